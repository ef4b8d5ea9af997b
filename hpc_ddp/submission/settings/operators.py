"""For the operators of a cluster: a site file for all users, limits, and a mark on jobs."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpc_ddp import __version__
from hpc_ddp.core.errors import UsageError, closest
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.slurm_options import SBATCH, as_pairs
from hpc_ddp.core.job.slurm_values import limit_seconds
from hpc_ddp.submission.settings.trust import read_toml

SITE_FILE = Path("/etc/hpc-ddp/site.toml")
VARIABLE = "HPC_DDP_SITE_FILE"  # set by a module, where /etc is not the same on all nodes
LIMITS = ("max-requeues", "nodes", "time", "budget-gpu-hours")


def comment_pairs(options: Sequence[str]) -> list[tuple[str, str]]:
    """Return the comment by which operators find the jobs of hpc-ddp, as a list with one (option,
    value) pair for sbatch.

    Return [] where the user has a comment, in the raw `options` or in SBATCH_COMMENT: some sites
    charge, or decide, by a job's comment.
    """
    has_comment = "comment" in dict(as_pairs(options, SBATCH)) or "SBATCH_COMMENT" in os.environ
    return [] if has_comment else [("comment", f"hpc-ddp/{__version__}")]


def find_site_file(environ: Mapping[str, str]) -> Path | None:
    """Return the site file that the operators have for all users; None where there is none.

    Raises
    ------
    UsageError
        HPC_DDP_SITE_FILE in `environ` names a file that does not exist
    """
    path = Path(environ.get(VARIABLE) or SITE_FILE)
    if path.is_file():
        return path
    if environ.get(VARIABLE):
        raise UsageError(
            f"{VARIABLE} is {str(path)!r}, which is no file; accepted: a site file",
            hint=f"unset {VARIABLE}, and tell the operators of this cluster",
        )
    return None


@functools.cache  # one command may read a file twice
def warn_once(message: str, hint: str | None) -> None:
    """Print a warning on stderr, about settings that do not count, and a hint unless that is None.
    In a process the same warning and hint are printed only once."""
    print(f"warning: {message}", *([f"hint: {hint}"] if hint else []), sep="\n", file=sys.stderr)


class _Request(NamedTuple):
    """A job's value for the key of a limit, as the job has it (None: it sets none) and as a number
    (None: unbounded), and the bound, in the number's unit."""

    key: str
    setting: float | str | None
    number: float | None
    bound: float


@dataclass(frozen=True)
class Limits:
    """The table ``[limits]`` of a site file."""

    path: Path
    bounds: Mapping[str, Any]  # by key, as the file has them
    job: JobSpec  # has the bounds as its values, and converts their units

    @property
    def defaults(self) -> dict[str, Any]:
        """The bounds, by key, that a job gets as values where it sets none: only that of the
        budget.

        ``max-requeues`` is not among them: as a value it would also let a script that starts over
        get so many new time limits. The run keeps it as a bound (`RunFolder.most_requeues`).
        """
        return {key: bound for key, bound in self.bounds.items() if key == "budget-gpu-hours"}

    def check(self, spec: JobSpec) -> None:
        """Raise UsageError for a job that asks for more than the operators' limits, or has no
        budget where budgets are limited; the message names the file, the limit and the value. For
        the local back-end, only SBATCH_TIMELIMIT is checked for being a time."""
        for key, setting, number, bound in self._requests(spec):
            if spec.backend != "local" and (number is None or number > bound):
                request = "unbounded" if setting is None else setting
                raise UsageError(
                    f"{key} is {request}, and {self.path} limits it;"
                    f" accepted: up to {self.bounds[key]}",
                    hint=f"--{key} {self.bounds[key]}",
                )

    def _requests(self, spec: JobSpec) -> Iterator[_Request]:
        """Yield the request of a job for each limit that applies to it.

        The number of a time is in seconds. The limit of time applies where the job or
        SBATCH_TIMELIMIT sets a time, the limit of requeues where the job sets them; those of nodes
        and the budget always. Raise UsageError where SBATCH_TIMELIMIT is no time.
        """
        if "nodes" in self.bounds:
            yield _Request("nodes", spec.nodes, spec.node_range[1], self.job.node_range[1])
        time = spec.time or os.environ.get("SBATCH_TIMELIMIT")  # else the partition's limit counts
        if "time" in self.bounds and time:
            yield _Request("time", time, limit_seconds(time), self.job.time_s or 0)
        if spec.max_requeues is not None and "max-requeues" in self.bounds:
            requeues = spec.max_requeues
            yield _Request("max-requeues", requeues, requeues, self.bounds["max-requeues"])
        if "budget-gpu-hours" in self.bounds:
            hours = spec.budget_gpu_hours
            yield _Request("budget-gpu-hours", hours, hours, self.bounds["budget-gpu-hours"])


def read_limits(path: Path) -> Limits:
    """Return the limits of a site file; their `bounds` are empty for a file without limits. An
    unknown limit is left out with a warning on stderr: no user can mend the file, and it may be for
    a newer hpc-ddp.

    Raises
    ------
    UsageError
        the file can't be read or may not act for the user; ``limits`` is no table; or a bound is a
        value that no job can have
    """
    table = read_toml(path).get("limits", {})
    hint = f"tell the operators of this cluster: {path}"
    if not isinstance(table, dict):
        raise UsageError(f"{path}: limits is {table!r}, but must be a table", hint=hint)
    for key in table.keys() - {*LIMITS}:
        near = closest(key, LIMITS)
        warn_once(f"{path}: unknown limit {key!r}{near}; accepted: {', '.join(LIMITS)}", hint)
        del table[key]
    try:
        job = JobSpec("", **{key.replace("-", "_"): value for key, value in table.items()})
    except (UsageError, TypeError) as error:
        raise UsageError(f"{path}: [limits]: {error}", hint=hint) from None
    return Limits(path, table, job)
