"""What `start` can be asked for beside seed and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from hpc_ddp.run.errors import UsageError

PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Options:
    """See `start`; making one raises UsageError for a value that makes no sense."""

    precision: str = "fp32"
    stop_on_nan: bool = True
    deterministic: bool = False
    tensorboard: bool = False
    progress: bool = True
    profile: tuple[int, ...] | None = None
    flops_per_sample: float | None = None
    peak_flops: float | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise UsageError(
                f"precision is {self.precision!r}; accepted: {', '.join(map(repr, PRECISIONS))}"
            )
        window = self.profile
        if window is not None and not (len(window) == 2 and 2 <= window[0] <= window[1]):
            raise UsageError(  # the first step of a process would only show it warming up
                f"profile is {window}; accepted: the first step to trace, from 2, and the last",
                hint="profile=(10, 15), or HPC_DDP_PROFILE=10:15",
            )
        for name in ("flops_per_sample", "peak_flops"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name} is {value!r}; accepted: a number above 0, or None")
        if self.tensorboard and find_spec("tensorboard") is None:
            raise UsageError(
                "tensorboard=True needs the package tensorboard, which is not installed",
                hint="pip install tensorboard",
            )
