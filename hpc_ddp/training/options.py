"""The options of `start`, checked."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.checkpoint.files import LEAST
from hpc_ddp.training.models.precision import DTYPES
from hpc_ddp.training.process.environment import LaunchEnv

BACKENDS = ("nccl", "gloo", "mpi")


@dataclass(frozen=True)
class Options:
    """See `start`; making one raises UsageError for a value that makes no sense."""

    seed: int
    save_every: float | str | None
    save_every_steps: int | None
    keep_last: int
    keep_every: int | None
    hang_after: float | None
    precision: str
    backend: str | None
    stop_on_nan: bool
    deterministic: bool
    tensorboard: bool
    progress: bool
    profile: tuple[int, ...] | None
    flops_per_sample: float | None
    peak_flops: float | None
    tp: int
    pp: int
    devices_per_worker: int

    @classmethod
    def chosen(cls, env: LaunchEnv, **arguments: object) -> Options:
        """Return what the script asks for, but for what the environment says otherwise."""
        for name in ("save_every", "hang_after", "profile", "backend"):
            if (value := getattr(env, name)) is not None:
                arguments[name] = value
        return cls(**arguments)  # type: ignore[arg-type]  # the types are looked at below

    def __post_init__(self) -> None:
        if self.precision not in DTYPES:
            accepted = ", ".join(map(repr, DTYPES))
            raise UsageError(f"precision is {self.precision!r}; accepted: {accepted}")
        if self.backend not in (None, *BACKENDS):
            accepted = ", ".join(map(repr, BACKENDS))
            raise UsageError(f"backend is {self.backend!r}; accepted: {accepted}, or None")
        if isinstance(self.save_every, str) and self.save_every != "auto":
            raise UsageError(
                f"save_every is {self.save_every!r}; accepted: seconds, 'auto', or None"
            )
        self._check("seed", -(2**63), kind=int)
        self._check("keep_last", LEAST, kind=int)
        for name in ("tp", "pp", "devices_per_worker"):
            self._check(name, 1, kind=int)
        if self.precision == "fp16" and self.tp * self.pp > 1:
            raise UsageError(
                "precision is 'fp16' with tp or pp; accepted with these: 'fp32', 'bf16'",
                hint="bf16 needs no scaled gradients, on which all ranks would have to agree",
            )
        for name in ("save_every_steps", "keep_every"):
            self._check(name, 1, or_none=True, kind=int)
        for name in ("save_every", "hang_after"):
            self._check(name, 0, or_none=True)
        for name in ("flops_per_sample", "peak_flops"):
            self._check(name, 0, or_none=True)
            if getattr(self, name) == 0:
                raise UsageError(f"{name} is {getattr(self, name)!r}; accepted: a number above 0")
        if self.profile is not None and not _is_window(self.profile):
            raise UsageError(  # the first step of a process would only show it warming up
                f"profile is {self.profile!r}; accepted: the first step to trace, from 2, and the"
                " last",
                hint="profile=(10, 15), or HPC_DDP_PROFILE=10:15",
            )
        if self.tensorboard and find_spec("tensorboard") is None:
            raise UsageError(
                "tensorboard=True needs the package tensorboard, which is not installed",
                hint="pip install tensorboard",
            )

    def _check(
        self, name: str, least: int, or_none: bool = False, kind: Any = (int, float)
    ) -> None:
        value = getattr(self, name)
        if value == "auto" or (value is None and or_none):
            return
        if isinstance(value, bool) or not isinstance(value, kind) or not value >= least:
            accepted = f"a {'whole ' if kind is int else ''}number from {least}"
            raise UsageError(
                f"{name} is {value!r}; accepted: {accepted}{', or None' if or_none else ''}"
            )


def _is_window(value: Any) -> bool:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    return all(isinstance(step, int) for step in value) and 2 <= value[0] <= value[1]
