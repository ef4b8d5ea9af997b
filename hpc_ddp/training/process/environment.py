"""The environment variables of a worker, as values."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hpc_ddp.core.errors import UsageError

T = TypeVar("T")

# Of a worker: its process id and Slurm job, as node/workers/worker.py sets it; and the id of the
# process in which `take_run` was called. All that a worker starts inherits both.
WORKER, TRAINER = "HPC_DDP_WORKER", "HPC_DDP_TRAINER"


@dataclass(frozen=True)
class DistEnv:
    """Rank and world size of this process; a world of one without a launcher."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    launched: bool = False  # by torchrun or the like: MASTER_ADDR and MASTER_PORT are set

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> DistEnv:
        """Return rank and world size by torchrun's variables; without ``RANK`` a world of one.

        Raises
        ------
        UsageError
            ``RANK`` is set and another one is not, or one is not a number
        """
        if "RANK" not in environ:
            return cls()
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        rank, local_rank, world_size, local_world_size = (_number(environ, n) for n in names)
        return cls(rank, local_rank, world_size, local_world_size, launched=True)


@dataclass(frozen=True)
class LaunchEnv:
    """The ``HPC_DDP_*`` variables, which hpc-ddp's launcher and supervisor set, or the user. A
    field is None where its variable is not set, apart from `node`, `runs` and `stem`.

    `run` is the run's folder, `attempt` the attempt's number. Both are None in a plain start, and
    in a process or job that a worker's training, or a clean-up line, has started: its environment
    names the run all the same. `is_within` is true in a process that a worker's script has started
    (``--no-python run.sh``). `end_time` is in unix seconds, `save_every` in seconds or ``"auto"``,
    `hang_after` in seconds. `runs` is the folder of plain starts' runs, `stem` the script's file
    name without ``.py``, the name of such a run. `notice` is the file in which the supervisor gives
    notice, `local_notice` the file in the supervisor's memory.
    """

    run: Path | None
    attempt: int | None
    node: str
    notice: Path | None
    local_notice: Path | None
    end_time: float | None
    save_every: float | str | None
    hang_after: float | None
    profile: tuple[int, ...] | None  # first and last step
    backend: str | None
    runs: Path
    stem: str
    is_within: bool = False

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> LaunchEnv:
        """Return the values of the ``HPC_DDP_*`` variables, of which those of a run in which this
        process must not train count as not set (`_without_foreign_run`). `stem` is by
        ``sys.argv``; without a variable `node` is this host, `runs` is ``runs`` in the working
        folder.

        Raise UsageError for a value that is no number where it has to be one, and for a run without
        ``HPC_DDP_ATTEMPT``.
        """
        environ = _without_foreign_run(environ)
        run, notice = environ.get("HPC_DDP_RUN"), environ.get("HPC_DDP_NOTICE")
        local_notice = environ.get("HPC_DDP_LOCAL_NOTICE")
        script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
        auto = "auto" if environ.get("HPC_DDP_SAVE_EVERY") == "auto" else None
        return cls(
            run=Path(run) if run else None,
            attempt=_number(environ, "HPC_DDP_ATTEMPT") if run else None,
            node=environ.get("HPC_DDP_NODE") or socket.gethostname(),
            notice=Path(notice) if notice else None,
            local_notice=Path(local_notice) if local_notice else None,
            end_time=_seconds(environ, "HPC_DDP_END_TIME"),
            save_every=auto or _seconds(environ, "HPC_DDP_SAVE_EVERY"),
            hang_after=_seconds(environ, "HPC_DDP_HANG_AFTER"),
            profile=_parse_variable(environ, "HPC_DDP_PROFILE", _window, "two steps, like 10:15"),
            backend=environ.get("HPC_DDP_BACKEND") or None,
            runs=Path(os.path.expanduser(environ.get("HPC_DDP_RUNS") or "runs")).absolute(),
            stem=script if script not in ("", "-", "-c") else "python",
            is_within=bool(run) and _worker_pid(environ) not in ("", str(os.getpid())),
        )


def _without_foreign_run(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return `environ`. Where this process must not train in the run that it names
    (`_may_train_in`), since it would write into a live run's folder, leave out the variables of
    this run."""
    if "HPC_DDP_RUN" not in environ or _may_train_in(environ):
        return environ
    of_attempt = ("RUN", "NOTICE", "LOCAL_NOTICE", "END_TIME", "PROFILE")
    hidden = {f"HPC_DDP_{name}" for name in of_attempt}
    return {name: text for name, text in environ.items() if name not in hidden}


def _may_train_in(environ: Mapping[str, str]) -> bool:
    """Return whether this process may train in the run that `environ` names. A worker may, and a
    process that a worker's script starts, unless a process above it trains (`take_run`) or it is in
    another Slurm job (``sbatch eval.sbatch``). Clean-up lines of a job may not."""
    if environ.get(TRAINER) not in (None, str(os.getpid())):
        return False
    if WORKER not in environ:  # an older version of hpc-ddp did not set it for its workers
        return "HPC_DDP_NODE_FOLDER" in environ
    job = environ[WORKER].partition(" ")[2]
    # A script may remove SLURM_JOB_ID, for a library that would take Slurm for its launcher.
    return environ.get("SLURM_JOB_ID", job) == job


def take_run(env: LaunchEnv) -> None:
    """Note in this process's environment, which its children inherit, that it trains in the
    worker's run; do nothing under a plain start. Raise UsageError where this process has done so
    before, or another process of the worker's script has ended its training in the run
    (`mark_trained`)."""
    if env.run is None:
        return
    if TRAINER in os.environ:
        raise UsageError(
            "a second training has begun in a process that hpc-ddp has started; accepted: one",
            hint="each training (a fold, a seed) as a run of its own: hpc-ddp sweep",
        )
    if _mark_path().exists():
        raise UsageError(
            "a second process of this worker has begun a training in the run; accepted: one",
            hint="each stage as a run of its own: hpc-ddp submit --dependency afterok:JOB",
        )
    os.environ[TRAINER] = str(os.getpid())


def mark_trained(env: LaunchEnv) -> None:
    """Note, by a file for later processes of this worker's script, that the training in the run has
    ended. Do nothing in the worker itself, of which there is no later process. A disk that refuses
    the file is passed over."""
    with suppress(OSError):
        if env.is_within:
            _mark_path().touch()


def _mark_path() -> Path:
    """Return the path of the file of `mark_trained`, in the folder of this node's attempt."""
    return Path(os.environ.get("HPC_DDP_NODE_FOLDER", "."), f"trained-{_worker_pid(os.environ)}")


def _worker_pid(environ: Mapping[str, str]) -> str:
    """Return the process id of the worker whose variables these are, '' where it is not known."""
    return environ.get(WORKER, "").partition(" ")[0]


def _number(environ: Mapping[str, str], name: str) -> int:
    """Return a variable as a whole number; raise UsageError if it is none, or is not set."""
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise UsageError(
            f"the environment variable {name} is {environ.get(name)!r}; accepted: a whole number",
            hint="start the script with torchrun or hpc-ddp, which set it",
        ) from None


def _seconds(environ: Mapping[str, str], name: str) -> float | None:
    """Return a variable in seconds, None where it is empty or not set; raise UsageError if it is no
    number."""
    return _parse_variable(environ, name, float, "a number of seconds")


def _window(text: str) -> tuple[int, ...]:
    """Return the whole numbers of a text like ``10:15``, as many as it has; raise ValueError for
    another text."""
    return tuple(int(step) for step in text.split(":"))


def _parse_variable(
    environ: Mapping[str, str], name: str, parse: Callable[[str], T], accepted: str
) -> T | None:
    """Return a variable as `parse` reads it, None where it is empty or not set.

    Raise UsageError, which names the `accepted` values, where `parse` raises ValueError.
    """
    text = environ.get(name)
    if not text:
        return None
    try:
        return parse(text)
    except ValueError:
        raise UsageError(
            f"the environment variable {name} is {text!r}; accepted: {accepted}",
            hint=f"unset {name}; in a job, leave it out of --env and [env]",
        ) from None
