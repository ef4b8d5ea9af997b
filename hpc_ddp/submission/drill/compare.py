"""Where two runs of one script differ, from the records that `hpc_ddp.training.drill` has written.

Pure. A record is what a rank wrote at one moment: a digest of each part of the state, of what the
optimizers read in the step, the exact values that the script gave to `run.step`. `base` is the
undisturbed run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpc_ddp.core.journal.events import DrillRecord

Pair = tuple[DrillRecord, DrillRecord]  # of the undisturbed run and of a disturbed one

STEP_TOLERANCE = 1e-5  # relative: how much another order of sums can change the numbers of one step
END_TOLERANCE = 1e-2  # … and how much they may differ after the steps of a drill

# Kinds of parts, causes before consequences within one step. `random` are generators, `settings`
# an optimizer's learning rate and the like, `untracked` the state of an optimizer not in run.track.
_ORDER = (
    *("position", "random", "loss", "gradients", "scheduler", "settings", "untracked"),
    *("optimizer", "model", "object"),
)
_STATE_ORDER = ("position", "model", "optimizer", "scheduler", "settings", "object", "random")
_MOMENTS = ("start", "step", "epoch", "end")  # of records of the same step
_COMPUTED = ("loss", "gradients", "model", "optimizer")  # the order of sums can change these


@dataclass(frozen=True)
class Difference:
    """The first part that differs.

    Attributes
    ----------
    step
        completed steps; for `at_start` those of the checkpoint that the run has resumed from
    attempt, ranks
        the attempt's number, from 0, and the ranks whose records differ in this part
    at_start
        the part differed as soon as the checkpoint had been loaded
    kind, name
        ``position`` (a step, or the end, at another place in the epochs), ``random``, ``loss``,
        ``gradients``, ``settings`` or ``untracked`` (of an optimizer), ``model``, ``optimizer``,
        ``scheduler`` or ``object``, and the script's name for it
    also
        the other parts that differ at that moment, as kind and name
    relative
        largest relative difference of loss and gradients in that step; None where unknown, or
        where the gradients are equal, so that no sum can be the cause
    grown
        largest relative difference of loss and weights at the last step that both runs have
    drifted
        the state that an earlier attempt has saved differs from the undisturbed run's already
    """

    step: int
    at_start: bool
    kind: str
    name: str
    attempt: int
    ranks: tuple[int, ...] = (0,)
    also: tuple[str, ...] = ()
    relative: float | None = None
    grown: float | None = None
    drifted: bool = False

    @property
    def label(self) -> str:
        """The kind, with ``optimizer`` for ``untracked``."""
        return "optimizer" if self.kind == "untracked" else self.kind

    @property
    def is_rounding(self) -> bool:
        """Whether only the order of sums differs: the part that differs is a computed one, and not
        right after a resume; in that step numbers differ by `STEP_TOLERANCE` at most (if `drifted`,
        by `END_TOLERANCE`), and at the end by `END_TOLERANCE` at most."""
        return (
            not self.at_start
            and self.kind in _COMPUTED
            and self.relative is not None
            and self.relative <= (END_TOLERANCE if self.drifted else STEP_TOLERANCE)
            and (self.grown or 0.0) <= END_TOLERANCE
        )


def first_difference(
    base: Sequence[DrillRecord],
    disturbed: Sequence[DrillRecord],
    earlier: Sequence[DrillRecord] = (),
) -> Difference | None:
    """Return where the records of one attempt leave those of the undisturbed run; None if no record
    does.

    Parameters
    ----------
    base, disturbed
        the records of all ranks, of the undisturbed run and of one attempt of the disturbed one
    earlier
        the records of the attempts before `disturbed`. One of them has saved the state with which
        `disturbed` begins; it differs from the undisturbed run's where sums were rounded otherwise

    Raises
    ------
    KeyError, ValueError
        a record has no sizes, an unknown moment, or an unknown kind of part: the recorder writes
        no such record
    """
    pairs, has_drifted = _pairs(base, disturbed, earlier)
    # By the moment first, then by rank: later differences are consequences.
    differing = sorted(
        (pair for pair in pairs if any(_parts_that_differ(*pair))),
        key=lambda pair: (pair[1].step, _MOMENTS.index(pair[1].at)),
    )
    if not differing:
        return None
    first = differing[0][1]
    at_moment = [pair for pair in differing if _moment(pair[1]) == _moment(first)]
    order = _ORDER if first.at == "step" else _STATE_ORDER
    parts = sorted(
        {part for pair in at_moment for part in _parts_that_differ(*pair)},
        key=lambda part: (order.index(part.partition(" ")[0]), part),
    )
    ranks = sorted(b.rank for a, b in at_moment if parts[0] in _parts_that_differ(a, b))
    kind, _, name = parts[0].partition(" ")
    has_gradients = any("gradients" in record.used for _, record in at_moment)
    follows_equal_gradients = kind in ("optimizer", "model") and has_gradients
    return Difference(
        step=first.step,
        at_start=first.at == "start",
        kind=kind,
        name=name,
        attempt=first.attempt,
        ranks=tuple(ranks),
        also=tuple(parts[1:]),
        relative=None if follows_equal_gradients else _distance(at_moment, "gradients"),
        grown=_difference_at_end(pairs),
        drifted=has_drifted,
    )


def _pairs(
    base: Sequence[DrillRecord], disturbed: Sequence[DrillRecord], earlier: Sequence[DrillRecord]
) -> tuple[list[Pair], bool]:
    """Return the records of an attempt as pairs, each behind the record that it is compared with;
    records without such a one are left out. Also return whether a state that an earlier attempt has
    saved differs from the undisturbed run's.

    A record of the start is compared with the state that an earlier attempt has saved (the last one
    of that step), where there is one; all others with the undisturbed run's.
    """
    base_of = _by_moment(base)
    saved = _by_moment(sorted(earlier, key=lambda record: -record.attempt))
    pairs: list[Pair] = []
    has_drifted = False
    for record in disturbed:
        reference = base_of.get(_key(record)) or _nearest(base, record)
        if reference is None:
            continue
        if record.at == "start":
            before = saved.get(_key(record), reference)
            has_drifted = has_drifted or reference.state != before.state
            reference = before
        pairs.append((reference, record))
    return pairs, has_drifted


def _difference_at_end(pairs: Sequence[Pair]) -> float | None:
    """Return the largest relative difference of values and weights at the last step of `pairs`,
    which has some.

    1 where any position differs, None where there are no numbers to compare. Raise KeyError as
    `_distance`.
    """
    if any(_key(a) != _key(b) for a, b in pairs):
        return 1.0
    last_step = max(record.step for _, record in pairs)
    return _distance([pair for pair in pairs if pair[1].step == last_step], "weights")


class _Key(NamedTuple):
    """The rank and the position, which records of the same moment have in common. A start has the
    position of its checkpoint."""

    rank: int
    step: int
    epoch: int
    samples: int


def _key(record: DrillRecord) -> _Key:
    """Return the rank and the position of a record."""
    return _Key(record.rank, record.step, record.epoch, record.samples)


def _by_moment(base: Sequence[DrillRecord]) -> dict[_Key, DrillRecord]:
    """Return records by their `_key`, the first of each."""
    by_moment: dict[_Key, DrillRecord] = {}
    for record in base:  # the end may be the moment of a step, which has more to compare
        by_moment.setdefault(_key(record), record)
    return by_moment


def _nearest(base: Sequence[DrillRecord], record: DrillRecord) -> DrillRecord | None:
    """Return the undisturbed record to compare with `record`, which is at a position that the
    undisturbed run never had: the rank's record of the same step, or else of its last step. None
    for a record that is no step and no end, and for a rank without steps."""
    steps = [r for r in base if r.rank == record.rank and r.at == "step"]
    if record.at not in ("step", "end") or not steps:
        return None
    return next((r for r in steps if r.step == record.step), steps[-1])


def _moment(record: DrillRecord) -> tuple[int, str, _Key]:
    """Return what is equal for the records of all ranks at one moment of an attempt."""
    return record.attempt, record.at, _key(record)._replace(rank=0)  # one key for all ranks


def _values(record: DrillRecord) -> dict[str, str]:
    """Return a record's values by name, as texts that can be compared: NaN is like NaN."""
    return {name: repr(number) for name, number in record.values.items()}


def _parts_that_differ(reference: DrillRecord, record: DrillRecord) -> Iterator[str]:
    """Yield the parts that differ, as texts for `describe`.

    ``position`` alone where the records are of different positions. Else the key (``KIND NAME`` or
    ``gradients``) of each digest that both records have and that differs, and ``loss`` where the
    values of a step differ.
    """
    if _key(reference) != _key(record):
        yield "position"
        return
    for digests, expected in ((record.used, reference.used), (record.state, reference.state)):
        for part, digest in digests.items():
            if expected.get(part, digest) != digest:
                yield part
    if record.at == "step" and _values(reference) != _values(record):
        yield "loss"


def _distance(pairs: Sequence[Pair], size: str) -> float | None:
    """Return the largest relative difference (see `_relative_difference`) in some pairs of records:
    of the values that both records have, and of their size of the name `size` (``gradients`` or
    ``weights``). inf where only one number is NaN or infinite; None without numbers. Raise KeyError
    for a record that lacks the size."""
    distances = []
    for a, b in pairs:
        numbers = [(a.values[name], v) for name, v in b.values.items() if name in a.values]
        numbers.append((a.sizes[size], b.sizes[size]))
        distances += [
            _relative_difference(u, v) for u, v in numbers if _is_number(u) and _is_number(v)
        ]
    return max(distances, default=None)


def _is_number(scalar: object) -> bool:
    return isinstance(scalar, (int, float)) and not isinstance(scalar, bool)


def _relative_difference(a: float, b: float) -> float:
    """Return ``|a - b| / max(|a|, |b|, 1e-3)``: 0 for equal numbers and for two NaN, else inf if
    one of them is NaN or infinite."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b), 1e-3)  # a loss of nearly nothing is all rounding


# -- in words --------------------------------------------------------------------------------


_PLURAL = ("random", "gradients", "model", "settings")


def describe(part: str) -> str:
    """Return the words for a part, given as ``KIND NAME`` or a kind alone."""
    kind, _, name = part.partition(" ")
    words = {
        "position": "the place in the epochs",
        "random": f"the random numbers ({name}'s generator)",
        "loss": "the loss",
        "gradients": "the gradients",
        "settings": f"the settings of the optimizer `{name}` (its learning rate, say)",
        "untracked": f"the optimizer `{name}`",
        "model": f"the weights of `{name}`",
        "object": f"`{name}`",
    }
    return words.get(kind, f"the {kind} `{name}`")


def describe_rounding(difference: Difference) -> str:
    """Return the words for a difference that comes only from another order of sums; its `relative`
    is known."""
    return (
        f"from step {difference.step} on numbers differ by {difference.relative:.0e} of their size,"
        f" and by {difference.grown or 0:.0e} at the end: the same numbers were added up in another"
        " order, which is no failure to resume"
    )


def explain(difference: Difference, is_steady: bool, before: str) -> tuple[str, str]:
    """Return which part differs first and why, in words, and what to do about it.

    With `is_steady` the difference is one to the undisturbed run; else it is one between two
    undisturbed runs. `before` is the disturbance before it, as "killed (SIGKILL) at step 9".
    """
    part = describe(f"{difference.kind} {difference.name}".strip())
    if not is_steady:
        return (
            f"two undisturbed runs differ already, first in {part} at step {difference.step}; so it"
            " can't be checked whether a resume goes wrong",
            "make the model after start(seed=…), which seeds"
            if difference.kind == "model"
            else "look for what no seed decides: os.urandom, the time, a generator without a seed",
        )
    why, hint = _reason(difference)
    also = ", ".join(map(describe, difference.also[:3]))
    verb = "differ" if difference.kind in _PLURAL else "differs"
    text = f"After it was {before}, {part} {verb} first, {why}."
    return f"{text} Differing too: {also}." if also else text, hint


def _reason(difference: Difference) -> tuple[str, str]:
    """Return at which step a difference shows and why, in words, and what to do about it."""
    step, name = difference.step, difference.name
    if difference.at_start:
        return (
            f"when the run goes on from step {step}: it is changed between run.track and the loop,"
            " or its load_state_dict does not take back what state_dict gave",
            f"look at what happens to {name} after run.track",
        )
    reasons = {
        "position": (
            f"at step {step}: after a resume an epoch has more or fewer steps, or the run has",
            "count by run.position and not by the loop: enumerate begins at 0 again in mid-epoch",
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
        "settings": (
            f"at step {step}: run.track does not name a scheduler, or the script changes them in a"
            " way that a resume does not repeat",
            "run.track(…, scheduler=scheduler)",
        ),
        "untracked": (
            f"at step {step}: run.track does not name it, so it begins anew",
            "run.track(…, optimizer=optimizer)",
        ),
    }
    from_inputs = (
        f"at step {step}, though random numbers, weights and optimizer were the same before: its"
        " inputs, or other numbers in it, depend on something that no checkpoint holds",
        "take batches from run.loader, and draw from torch's, random's or numpy's global"
        " generators, which are seeded for each sample; put the script's own state into an object"
        " with state_dict and load_state_dict, and name it in run.track",
    )
    return reasons.get(difference.kind, from_inputs)
