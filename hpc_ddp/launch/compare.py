"""Where two runs of one script part, from the records that `hpc_ddp.training.drill` has written.

Pure. A record is what a rank wrote at one moment: a digest of each part of the state, of what the
step consumed, the exact values that the script gave to `run.step`. `base` is the undisturbed run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Record = Mapping[str, Any]

ROUNDING = 1e-5  # relative: what another order of sums can do to the numbers of one step
GROWN = 1e-2  # … and what may become of that in the steps of a drill

# What follows from what within one step, first causes first.
_STEP_ORDER = (
    *(
        "position",
        "data",
        "random",
        "inputs",
        "loss",
        "gradients",
        "scheduler",
        "scaler",
        "optimizer",
    ),
    *("model", "object"),
)
_TIMES = ("start", "step", "epoch", "end")  # of records of the same step
_STATE_ORDER = ("position", "model", "optimizer", "scheduler", "scaler", "object", "random")
_COMPUTED = ("loss", "gradients", "model", "optimizer")  # what the order of sums can change


@dataclass(frozen=True)
class Difference:
    """The first thing that differs.

    Attributes
    ----------
    step
        completed steps; for `at_start` those of the checkpoint that was gone on from
    at_start
        the state was another one as soon as the checkpoint had been loaded
    kind, name
        ``position`` (a step, or the end, at another place in the epochs), ``data``, ``random``,
        ``inputs``, ``loss``, ``gradients``, ``model``, ``optimizer``,
        ``scheduler``, ``scaler`` or ``object``, and the script's name for it
    others
        what else differs at that moment, as kind and name
    tracked
        the script named it in `run.track`
    by
        largest relative difference of loss and gradients in that step; None where unknown, or
        where something differs behind gradients that are equal: no sum is in between
    grown
        the same at the last step that both runs have, of loss and weights
    like
        the step of the undisturbed run that consumed the same data
    variables
        of the script, by name: value in the undisturbed run, and here
    drifted
        an attempt before this one had parted from the undisturbed run already
    """

    step: int
    at_start: bool
    kind: str
    name: str
    attempt: int
    ranks: tuple[int, ...] = (0,)
    others: tuple[str, ...] = ()
    tracked: bool = True
    by: float | None = None
    grown: float | None = None
    like: int | None = None
    variables: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    drifted: bool = False

    @property
    def is_rounding(self) -> bool:
        """Only the order of sums differs: small from the start on, and not much larger later."""
        return (
            not self.at_start
            and self.kind in _COMPUTED
            and self.by is not None
            and self.by <= (GROWN if self.drifted else ROUNDING)
            and (self.grown or 0.0) <= GROWN
        )


@dataclass(frozen=True)
class Curve:
    """How many steps' values were compared, over all attempts, and how many are equal."""

    steps: int = 0
    equal: int = 0


def records(events: Sequence[Record]) -> list[Record]:
    return [event for event in events if event["event"] == "record"]


def attempt(records: Sequence[Record], number: int) -> list[Record]:
    return [record for record in records if record["attempt"] == number]


def first_difference(
    base: Sequence[Record],
    other: Sequence[Record],
    unsteady: frozenset[str] = frozenset(),
    earlier: Sequence[Record] = (),
) -> Difference | None:
    """Return where the records of one attempt leave those of the undisturbed run, if they do.

    Parameters
    ----------
    base, other
        of all ranks; `other` of one attempt
    unsteady
        names of variables that differ between any two runs: clocks, say
    earlier
        of the attempts before `other`: one of them has saved what `other` begins with, which is
        not the undisturbed run's any more where sums were rounded in another way
    """
    known = _by_moment(base)
    saved = _by_moment(sorted(earlier, key=lambda record: -record["attempt"]))
    pairs = [(known[_key(record)], record) for record in other if _key(record) in known]
    starts = [(a, saved.get(_key(b), a)) for a, b in pairs if b["at"] == "start"]
    drifted = any(a["state"] != own["state"] for a, own in starts)
    pairs = [(saved.get(_key(b), a) if b["at"] == "start" else a, b) for a, b in pairs]
    pairs += [(at, record) for record in other if (at := _misplaced(base, known, record))]
    # By the moment first, then by rank: what comes later in time differs as a consequence.
    parted = sorted(
        (pair for pair in pairs if any(_parts_that_differ(*pair))),
        key=lambda pair: (pair[1]["step"], _TIMES.index(pair[1]["at"])),
    )
    if not parted:
        return None
    moment = _moment(parted[0][1])
    here = [pair for pair in parted if _moment(pair[1]) == moment]
    order = _STEP_ORDER if parted[0][1]["at"] == "step" else _STATE_ORDER
    differing = sorted(
        {part for pair in here for part in _parts_that_differ(*pair)},
        key=lambda part: (_place(part, order, known.values()), part),
    )
    first = differing[0]
    b = next(b for a, b in here if first in _parts_that_differ(a, b))
    kind, _, name = first.partition(" ")
    last = max(pairs, key=lambda pair: pair[1]["step"])
    grown = _distance([pair for pair in pairs if pair[1]["step"] == last[1]["step"]], "weights")
    behind = kind in ("optimizer", "model") and any("gradients" in b["used"] for _, b in here)
    return Difference(
        step=b["step"],
        at_start=b["at"] == "start",
        kind=kind,
        name=name,
        attempt=b["attempt"],
        ranks=tuple(sorted(b["rank"] for a, b in here if first in _parts_that_differ(a, b))),
        others=tuple(differing[1:]),
        tracked=first not in b["untracked"],
        by=None if behind else _distance(here, "gradients"),
        grown=1.0 if any(_key(a) != _key(b) for a, b in pairs) else grown,
        like=_same_data(base, b, kind),
        variables=_variables(known, pairs, b, unsteady),
        drifted=drifted,
    )


def curve(base: Sequence[Record], other: Sequence[Record]) -> Curve:
    """Compare the values given to `run.step`, at all steps that both have."""
    known = _by_moment(base)
    both = [(known[_key(r)], r) for r in other if r["at"] == "step" and _key(r) in known]
    both = [(a, b) for a, b in both if a["values"] or b["values"]]
    return Curve(len(both), sum(_values(a) == _values(b) for a, b in both))


def unsteady_variables(base: Sequence[Record], other: Sequence[Record]) -> frozenset[str]:
    """Return the script's variables that differ though nothing was done to either run."""
    known = _by_moment(base)
    pairs = ((known[_key(r)], r) for r in other if _key(r) in known)
    return frozenset(name for pair in pairs for name, _ in _variables_that_differ(*pair))


def _key(record: Record) -> tuple[Any, ...]:
    """What makes two records of the same moment. One of a start is of its checkpoint's."""
    return tuple(record[name] for name in ("rank", "step", "epoch", "samples"))


def _by_moment(base: Sequence[Record]) -> dict[tuple[Any, ...], Record]:
    known: dict[tuple[Any, ...], Record] = {}
    for record in base:  # the end may be the moment of a step, which has more to compare
        known.setdefault(_key(record), record)
    return known


def _misplaced(
    base: Sequence[Record], known: Mapping[Any, Record], record: Record
) -> Record | None:
    """Return what to hold a step against that the undisturbed run did not do at that place."""
    if record["at"] not in ("step", "end") or _key(record) in known:
        return None
    own = [each for each in base if each["rank"] == record["rank"] and each["at"] == "step"]
    return next((each for each in own if each["step"] == record["step"]), own[-1] if own else None)


def _moment(record: Record) -> tuple[Any, ...]:
    return record["attempt"], record["at"], *_key(record)[1:]


def _values(record: Record) -> dict[str, str]:
    return {name: repr(value) for name, value in record["values"].items()}  # NaN is like NaN


def _parts_that_differ(a: Record, b: Record) -> Iterator[str]:
    """Yield kind and name of what both have, and is not the same."""
    if _key(a) != _key(b):
        yield "position"
        return
    for group in ("used", "state") if b["at"] == "step" else ("state",):
        yield from (
            name for name in b[group] if a[group].get(name, b[group][name]) != b[group][name]
        )
    if b["at"] == "step" and _values(a) != _values(b):
        yield "loss"


def _place(part: str, order: Sequence[str], known: Any) -> int:
    kind = part.partition(" ")[0]
    if kind == "inputs" and not any("data" in record["used"] for record in known):
        kind = "data"  # a loader of its own: what the model got is all there is to see of it
    return order.index(kind)


def _distance(pairs: Sequence[tuple[Record, Record]], size: str) -> float | None:
    """Return the largest relative difference of the values, and of a size."""
    found = []
    for a, b in pairs:
        numbers = [(a["values"][n], v) for n, v in b["values"].items() if n in a["values"]]
        numbers.append((a["sizes"][size], b["sizes"][size]))
        found += [_relative(x, y) for x, y in numbers if _is_number(x) and _is_number(y)]
    return max(found, default=None)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _relative(a: float, b: float) -> float:
    if a != a or b != b:
        return 0.0 if a != a and b != b else float("inf")
    return abs(a - b) / max(abs(a), abs(b), 1e-3)  # a loss of nearly nothing is all rounding


def _same_data(base: Sequence[Record], record: Record, kind: str) -> int | None:
    """Return the step of the undisturbed run that consumed what `record` did."""
    if kind not in ("data", "inputs"):
        return None
    same = (r for r in base if r["rank"] == record["rank"] and r["at"] == "step")
    digest = record["used"].get(kind)
    return next((r["step"] for r in same if r["used"].get(kind) == digest), None)


def _variables_that_differ(a: Record, b: Record) -> Iterator[tuple[str, tuple[str, str]]]:
    for name, (digest, shown) in b["variables"].items():
        was = a["variables"].get(name)
        if was and was[0] != digest:
            yield name, (was[1], shown)


def _variables(
    known: Mapping[Any, Record],
    pairs: Sequence[tuple[Record, Record]],
    record: Record,
    unsteady: frozenset[str],
) -> dict[str, tuple[str, str]]:
    """Return what differed when the attempt began: later, much does in consequence."""
    start = next(
        (p for p in pairs if p[1]["at"] == "start" and p[1]["rank"] == record["rank"]), None
    )
    if start is None:
        return {}
    return {n: values for n, values in _variables_that_differ(*start) if n not in unsteady}


# -- in words --------------------------------------------------------------------------------


_PLURAL = ("data", "inputs", "random", "gradients", "model")


def call(part: str) -> str:
    """Return what a person calls a part, given as kind and name."""
    kind, _, name = part.partition(" ")
    words = {
        "position": "the place in the epochs",
        "data": "the data",
        "inputs": "the inputs of the model",
        "random": f"the random numbers ({name}'s generator)",
        "loss": "the loss",
        "gradients": "the gradients",
        "model": f"the weights of `{name}`",
        "scaler": f"the gradient scaler `{name}`",
        "object": f"`{name}`",
    }
    return words.get(kind, f"the {kind} `{name}`")


def rounding(found: Difference) -> str:
    """Say of a difference that only the order of sums is another one."""
    return (
        f"from step {found.step} on numbers differ by {found.by:.0e} of their size, and by"
        f" {found.grown or 0:.0e} at the end: the same numbers were added up in another order,"
        " which is no failure to resume"
    )


def explain(found: Difference, steady: bool, before: str) -> tuple[str, str]:
    """Return what differs first and why, and what to do about it.

    `steady`: two undisturbed runs are equal. `before` is what was done to the run before.
    """
    what = call(f"{found.kind} {found.name}".strip())
    if not steady:
        return (
            f"two undisturbed runs differ already, first in {what} at step {found.step}; so nobody"
            " could tell whether a resume goes wrong",
            "look for what no seed decides: os.urandom, the time, a generator without a seed"
            if found.kind != "model"
            else "make the model after start(seed=…), which seeds",
        )
    why, hint = _reason(found, what)
    also = f" Differing too: {', '.join(map(call, found.others[:3]))}." if found.others else ""
    variables = list(found.variables.items())[:4]
    own = [n if a == b else f"{n} ({b}, was {a})" for n, (a, b) in variables]  # a generator, say
    if own and found.kind in ("data", "inputs", "loss", "gradients", "random"):
        also = f" Variables of the script that are not what they were: {', '.join(own)}."
    verb = "differ" if found.kind in _PLURAL else "differs"
    return f"After it was {before}, {what} {verb} first, {why}.{also}", hint


def _reason(found: Difference, what: str) -> tuple[str, str]:
    step, name = found.step, found.name
    if found.at_start and not found.tracked:
        return (
            f"when the run goes on from step {step}: run.track does not name it, so it begins anew",
            f"run.track(…, {_argument(name, found.kind)})",
        )
    if found.at_start:
        return (
            f"when the run goes on from step {step}: it is changed between run.track and the loop,"
            " or its load_state_dict does not take back what state_dict gave",
            f"look at what happens to {name} after run.track",
        )
    like = f", which are those of step {found.like}" if found.like else ""
    return {
        "position": (
            f"at step {step}: after a resume an epoch has more or fewer steps, or the run has",
            "count by run.position and not by the loop: enumerate begins at 0 again in mid-epoch",
        ),
        "data": (
            f"at step {step}{like}: what the data set yields depends on something that a resume"
            " does not bring back",
            "draw in the data set from torch's, random's or numpy's global generators: they are"
            " seeded for each sample",
        ),
        "inputs": (
            f"at step {step}{like}, of a batch that "
            "is the same or not the run's loader's: they depend on something that a resume does"
            " not bring back",
            "take batches from run.loader, and draw from the global generators or track yours",
        ),
        "random": (
            f"at step {step}: the script draws or seeds between steps in a way that a resume does"
            " not repeat",
            "seed once, by start(seed=…), and draw nothing behind run.step",
        ),
        "scheduler": (
            f"at step {step}: a step of it was lost or made twice",
            "step it before run.step, which saves and stops",
        ),
    }.get(
        found.kind,
        (
            f"at step {step}, though data, random numbers, weights and optimizer were the same"
            " before: it is computed with something that no checkpoint holds",
            "put the script's own state into an object with state_dict and load_state_dict, and"
            " name it in run.track",
        ),
    )


def _argument(name: str, kind: str) -> str:
    plain = name.rpartition(".")[2]
    return f"{plain if plain.isidentifier() and plain.islower() else kind}={name}"
