"""The words that the processes of a run pass to each other, as enumerations.

Each member is a string, equal to its text in the journal and in files.
"""

from __future__ import annotations

from enum import Enum


class TextEnum(str, Enum):
    """A string enumeration whose text is its value (`enum.StrEnum` needs Python 3.11)."""

    def __str__(self) -> str:
        return str(self.value)


class Cause(TextEnum):
    """Why an attempt has ended."""

    FINISHED = "finished"
    SUPERSEDED = "superseded"  # a newer attempt of the run has begun
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time limit"
    NOTICE = "notice"  # a signal of unknown origin asked the job to stop
    BAD_NODE = "bad node"  # by the preflight
    NODE_LOST = "node lost"  # a node has left no record
    FAILED = "failed"
    STOOD_STILL = "stood still"  # it failed right after that, as after a suspension
    BUDGET = "budget"


class EndKind(TextEnum):
    """How an attempt has ended, where its cause leaves that open."""

    PREFLIGHT = "preflight"  # which found unfit nodes, or a fault that all nodes have
    EARLY_EXIT = "early exit"  # the script left its loop, and did not call run.finish()
    HIDDEN_EXIT = "hidden exit code"  # 0, before the end of the training
    KILLED = "killed"  # after a notice, for which the script did not end
    MAYBE_FINISHED = "maybe finished"  # a plain script that exited with 0 after a notice


class Bound(TextEnum):
    """The bound by which a run is given up."""

    NO_PROGRESS = "no progress"  # attempts in a row without a newer checkpoint
    UNSEEN_PROGRESS = "unseen progress"  # time limits of a script that reports no steps
    OTHER = "other"


class Action(TextEnum):
    """The step of the batch script after an attempt."""

    NONE = "none"
    REQUEUE = "requeue"
    GIVE_UP = "give up"


class NoticeSource(TextEnum):
    """The origin of a notice, besides names of signals."""

    TIME_LIMIT = "time limit"  # the supervisor's clock
    WARNING_SIGNAL = "warning signal"  # Slurm's --signal
    PREEMPTION = "preemption"
    INTERRUPTED = "interrupted"  # Ctrl-C or SIGTERM to an interactive run


class StopReason(TextEnum):
    """Why the ranks have stopped at a step, in rising order of urgency."""

    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    NOTICE = "notice"


# Notices and stops that mean the end of the job's time.
END_OF_TIME = (NoticeSource.TIME_LIMIT, NoticeSource.WARNING_SIGNAL, StopReason.DEADLINE)
