"""What a worker is told through its environment."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_ddp.run.errors import UsageError


@dataclass(frozen=True)
class DistInfo:
    """Who this process is among its peers; one process alone where nobody has said."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    launched: bool = False  # by torchrun or the like: MASTER_ADDR and MASTER_PORT are set

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> DistInfo:
        """Read torchrun's variables.

        Raises
        ------
        UsageError
            only some of them are set, or one is not a number
        """
        if "RANK" not in environ:
            return cls()
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        rank, local_rank, world_size, local_world_size = (_number(environ, n) for n in names)
        return cls(rank, local_rank, world_size, local_world_size, launched=True)


@dataclass(frozen=True)
class Surroundings:
    """What hpc-ddp's launcher and supervisor say to the worker; all None under a plain start.

    `end_time` is in unix seconds, `save_every` in seconds or ``"auto"``, `hang_after` in seconds.
    """

    run: Path | None
    attempt: int | None
    node: str
    notice: Path | None
    end_time: float | None
    save_every: float | str | None
    hang_after: float | None
    profile: tuple[int, ...] | None  # first and last step
    backend: str | None
    runs: Path
    stem: str

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Surroundings:
        """Read the ``HPC_DDP_*`` variables; raises UsageError for a value that is no number."""
        run, notice = environ.get("HPC_DDP_RUN"), environ.get("HPC_DDP_NOTICE")
        script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
        return cls(
            run=Path(run) if run else None,
            attempt=_number(environ, "HPC_DDP_ATTEMPT") if run else None,
            node=environ.get("HPC_DDP_NODE") or socket.gethostname(),
            notice=Path(notice) if notice else None,
            end_time=_seconds(environ, "HPC_DDP_END_TIME"),
            save_every=_interval(environ, "HPC_DDP_SAVE_EVERY"),
            hang_after=_seconds(environ, "HPC_DDP_HANG_AFTER"),
            profile=_window(environ, "HPC_DDP_PROFILE"),
            backend=environ.get("HPC_DDP_BACKEND") or None,
            runs=Path(environ.get("HPC_DDP_RUNS") or "runs").expanduser().absolute(),
            stem=script if script not in ("", "-", "-c") else "python",
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise UsageError(
            f"the environment variable {name} is {environ.get(name)!r}; accepted: a whole number",
            hint="start the script with torchrun or hpc-ddp, which set it",
        ) from None


def _interval(environ: Mapping[str, str], name: str) -> float | str | None:
    return "auto" if environ.get(name) == "auto" else _seconds(environ, name)


def _seconds(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise UsageError(
            f"the environment variable {name} is {text!r}; accepted: a number of seconds",
            hint=f"unset {name}",
        ) from None


def _window(environ: Mapping[str, str], name: str) -> tuple[int, ...] | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return tuple(int(part) for part in text.split(":"))
    except ValueError:
        raise UsageError(
            f"the environment variable {name} is {text!r}; accepted: two steps, like 10:15",
            hint=f"unset {name}",
        ) from None
