"""The first difference between two runs of one script, by the records of `hpc_ddp.training.drill`.

Pure. A rank writes a record at a moment of the training: digests of the parts of the state, and of
what the optimizers read in the step, and the values that the script has passed to `run.step`.
`base` are the records of the undisturbed run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpc_ddp.core.journal.events import DrillRecord

Pair = tuple[DrillRecord, DrillRecord]  # of the undisturbed run and of a disturbed one

# Relative differences that another order of sums can make: in one step, and over a drill's steps.
STEP_TOLERANCE = 1e-5
END_TOLERANCE = 1e-2

# Kinds of parts, causes before consequences within one step. `random` are generators, `settings`
# an optimizer's learning rate and the like, `untracked` the state of an optimizer not in run.track.
_ORDER = (
    *("position", "random", "loss", "gradients", "scheduler", "settings", "untracked"),
    *("optimizer", "model", "object"),
)
_STATE_ORDER = ("position", "model", "optimizer", "scheduler", "settings", "object", "random")
_MOMENTS = ("start", "step", "epoch", "end")  # in time, for records with the same number of steps
_COMPUTED = ("loss", "gradients", "model", "optimizer")  # another order of sums can change these


@dataclass(frozen=True)
class Difference:
    """The first difference of an attempt to the undisturbed run.

    Attributes
    ----------
    step
        completed steps; for `at_start` those of the checkpoint that the run has resumed from
    attempt, ranks
        the attempt's number, from 0, and the ranks whose records differ in this part
    at_start
        the part differs already when the checkpoint has been loaded
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
        the state that an earlier attempt has saved, and this one loaded, differs already
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
        """The kind for the drill's table: ``optimizer`` also for ``untracked``."""
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
    """Return the first difference between the records of one attempt and those of the undisturbed
    run; None where all that can be compared are equal.

    Parameters
    ----------
    base, disturbed
        the records of all ranks, of the undisturbed run and of one attempt of the disturbed one
    earlier
        the records of the attempts before `disturbed`. One of them has saved the state that
        `disturbed` loads: its first record is compared with this state

    Raises
    ------
    KeyError, ValueError
        a record has no sizes, an unknown moment, or an unknown kind of part: the recorder writes
        no such record
    """
    pairs, has_drifted = _make_pairs(base, disturbed, earlier)
    # By the moment first, then by rank: later differences are consequences.
    differing = sorted(
        (pair for pair in pairs if any(_parts_that_differ(*pair))),
        key=lambda pair: (pair[1].step, _MOMENTS.index(pair[1].at)),
    )
    if not differing:
        return None
    first = differing[0][1]
    at_moment = [pair for pair in differing if _moment(pair[1]) == _moment(first)]  # of all ranks
    order = _ORDER if first.at == "step" else _STATE_ORDER
    parts = sorted(
        {part for pair in at_moment for part in _parts_that_differ(*pair)},
        key=lambda part: (order.index(part.partition(" ")[0]), part),
    )
    ranks = sorted(pair[1].rank for pair in at_moment if parts[0] in _parts_that_differ(*pair))
    kind, _, name = parts[0].partition(" ")
    has_gradients = any("gradients" in record.used for _, record in at_moment)
    # Gradients come before these kinds in `_ORDER`: they would be the first part if they differed.
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


def _make_pairs(
    base: Sequence[DrillRecord], disturbed: Sequence[DrillRecord], earlier: Sequence[DrillRecord]
) -> tuple[list[Pair], bool]:
    """Return the records of an attempt (`disturbed`) as pairs (reference, record), and whether the
    state that the attempt has loaded differed from the undisturbed run's already. The arguments are
    those of `first_difference`.

    The reference of a record of the start is the record of the newest earlier attempt at the same
    position, where there is one; all other references are records of the undisturbed run. A record
    without a reference is left out.
    """
    base_of = _by_position(base)
    earlier_of = _by_position(sorted(earlier, key=lambda record: -record.attempt))
    pairs: list[Pair] = []
    has_drifted = False
    for record in disturbed:
        reference = base_of.get(_position(record)) or _nearest(base, record)
        if reference is None:
            continue
        if record.at == "start":
            saved = earlier_of.get(_position(record), reference)
            has_drifted = has_drifted or reference.state != saved.state
            reference = saved
        pairs.append((reference, record))
    return pairs, has_drifted


def _difference_at_end(pairs: Sequence[Pair]) -> float | None:
    """Return the largest relative difference of values and weights at the last step of `pairs`,
    which are one or more.

    1 where the position in any pair differs, None where there are no numbers to compare. Raise
    KeyError as `_distance`.
    """
    if any(_position(reference) != _position(record) for reference, record in pairs):
        return 1.0
    last_step = max(record.step for _, record in pairs)
    return _distance([pair for pair in pairs if pair[1].step == last_step], "weights")


class _Position(NamedTuple):
    """A rank, and its position in the training. A record of a start has the position of its
    checkpoint, and so that of the step which was saved."""

    rank: int
    step: int
    epoch: int
    samples: int


def _position(record: DrillRecord) -> _Position:
    """Return the rank and the position of a record."""
    return _Position(record.rank, record.step, record.epoch, record.samples)


def _by_position(records: Sequence[DrillRecord]) -> dict[_Position, DrillRecord]:
    """Return records by their `_position`; of several with the same one, the first."""
    by_position: dict[_Position, DrillRecord] = {}
    for record in records:  # an end may have a step's position; the step's has more to compare
        by_position.setdefault(_position(record), record)
    return by_position


def _nearest(base: Sequence[DrillRecord], record: DrillRecord) -> DrillRecord | None:
    """Return the record of the undisturbed run to compare with `record`, whose position that run
    never had: the rank's record of the same step, or else of its last step. None for a record that
    is no step and no end, and for a rank without steps."""
    steps = [r for r in base if r.rank == record.rank and r.at == "step"]
    if record.at not in ("step", "end") or not steps:
        return None
    return next((r for r in steps if r.step == record.step), steps[-1])


def _moment(record: DrillRecord) -> tuple[int, str, _Position]:
    """Return a key of a moment in an attempt, which the records of all ranks at this moment have in
    common."""
    return record.attempt, record.at, _position(record)._replace(rank=0)


def _value_texts(record: DrillRecord) -> dict[str, str]:
    """Return a record's values by name, as texts: two NaN are equal then."""
    return {name: repr(number) for name, number in record.values.items()}


def _parts_that_differ(reference: DrillRecord, record: DrillRecord) -> Iterator[str]:
    """Yield the parts that differ, as texts for `describe`.

    It is ``position`` alone where the records are of different positions. Else it is the key
    (``KIND NAME`` or ``gradients``) of each digest that both records have and that differs, and
    ``loss`` where the values of a step differ.
    """
    if _position(reference) != _position(record):
        yield "position"
        return
    for digests, expected in ((record.used, reference.used), (record.state, reference.state)):
        for part, digest in digests.items():
            if expected.get(part, digest) != digest:  # a part that the reference lacks is equal
                yield part
    if record.at == "step" and _value_texts(reference) != _value_texts(record):
        yield "loss"


def _distance(pairs: Sequence[Pair], size: str) -> float | None:
    """Return the largest `_relative_difference` in some pairs of records: of the values that both
    records have, and of the entry `size` of their sizes (``gradients`` or ``weights``). None where
    there are no numbers. Raise KeyError for a record that lacks the size."""
    distances: list[float] = []
    for reference, record in pairs:
        names = record.values.keys() & reference.values.keys()
        couples = [(reference.values[name], record.values[name]) for name in names]
        couples.append((reference.sizes[size], record.sizes[size]))
        for a, b in couples:
            if _is_number(a) and _is_number(b):
                distances.append(_relative_difference(a, b))
    return max(distances, default=None)


def _is_number(scalar: object) -> bool:
    """Return whether a value from JSON is a number; True and False are none."""
    return isinstance(scalar, (int, float)) and not isinstance(scalar, bool)


def _relative_difference(a: float, b: float) -> float:
    """Return ``|a - b| / max(|a|, |b|, 1e-3)``. The result is 0 for equal numbers and for two NaN,
    and inf for another pair with a number that is NaN or infinite."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b), 1e-3)  # a loss of nearly nothing is all rounding


# -- texts for the user ----------------------------------------------------------------------


_PLURAL = ("random", "gradients", "model", "settings")


def describe(part: str) -> str:
    """Return a part as text for the user, as "the weights of `model`". `part` is ``KIND NAME``, or
    a kind alone."""
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
    """Return a sentence on a difference that comes only from another order of sums; its `relative`
    must not be None."""
    return (
        f"from step {difference.step} on numbers differ by {difference.relative:.0e} of their size,"
        f" and by {difference.grown or 0:.0e} at the end: the same numbers were added up in another"
        " order, which is no failure to resume"
    )


def explain(difference: Difference, is_steady: bool, before: str) -> tuple[str, str]:
    """Return two texts for the user: which part differs first and why, and a hint.

    With `is_steady` the difference is one to the undisturbed run, and `before` is the disturbance
    before it, as "killed (SIGKILL) at step 9". Else the difference is one between two undisturbed
    runs, and `before` is not used.
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
    """Return two texts: at which step a difference shows and why, as the end of a sentence; and a
    hint."""
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
            "step it where each batch comes by: a loop without run.loader saves within run.step",
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
