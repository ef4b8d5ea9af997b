"""`Options`: the parameters of `start`, checked."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.checkpoint.storage.retention import LEAST_KEPT
from hpc_ddp.training.models.precision import DTYPES
from hpc_ddp.training.process.environment import LaunchEnv

OVERRIDDEN = ("save_every", "hang_after", "profile", "backend")  # by variables, if they are set


@dataclass(frozen=True)
class Options:
    """The parameters of `start`; all but `seed` by keyword.

    Attributes
    ----------
    seed
        decides initial weights, order of the data, and every other random number
    save_every
        seconds between checkpoints, ``"auto"`` for the interval that is expected to lose the
        least time, None for no such clock; ``HPC_DDP_SAVE_EVERY`` overrides
    save_every_steps
        a checkpoint after every so many optimizer steps as well
    keep_last
        how many of the newest checkpoints stay, at least 2; the best one stays, too (`Run.best`)
    keep_every
        of every so many steps one checkpoint stays for good
    hang_after
        seconds without a sign of progress, from the first step on, after which a rank writes
        its threads' stacks into the run's folder and fails, so that the run can be retried;
        None or 0: never; ``HPC_DDP_HANG_AFTER`` overrides. Progress is a step, a batch
        of the run's `loader` or of a `shard`, a `sum`, a save, an epoch's end: code between
        steps that takes longer than this calls ``run.sum()`` now and then, on all ranks
    precision
        "fp32", "bf16" or "fp16": what `Run.autocast` computes in; "fp16" scales the loss, and so
        needs `Run.update` in place of ``optimizer.step()``
    backend
        what carries gradients between ranks, "nccl", "gloo" or another one that torch has; None:
        NCCL on GPUs and Gloo on CPUs. Gloo works on GPUs too, slowly, to find out whether NCCL is
        to blame; MPI needs a torch that was built with it, and its own launcher;
        ``"cpu:gloo,cuda:nccl"`` is for scripts whose own collectives send tensors of the CPU as
        well; ``HPC_DDP_BACKEND`` overrides
    stop_on_nan
        ends the run with an error once a weight is NaN or infinite; such weights are never saved.
        Each save's copy is looked through behind the training, and the weights about every two
        seconds (every tenth step where steps take long): 0.13 ms of a 1 ms step, 15 ms of a 530 ms
        one, measured on a CPU
    deterministic
        has torch and NCCL use deterministic algorithms only, which is slower. On GPUs a run needs
        it for the same bits after a resume: else kernels of convolutions, embeddings and attention,
        and NCCL in an NVSwitch, add in another order each time
    tensorboard
        writes what goes to `Run.step` into ``<run folder>/tensorboard`` as well
    progress
        prints a line with step, values, speed and time left on stderr now and then
    profile
        the first step of this attempt to trace, from 2, and the last; ``HPC_DDP_PROFILE=10:15``
        overrides
    flops_per_sample
        FLOPs of forward and backward for one sample; gives ``mfu``, the used share of the GPUs'
        peak
    peak_flops
        FLOP/s of one GPU, where `training.telemetry.peak_flops` does not know its peak; rank
        0 prints a message then. For fp32 on GPUs with TF32 it is known if
        ``torch.set_float32_matmul_precision("high")`` was called before `start`
    tp
        ranks that share each layer (tensor parallel); neighbours, so on one node where they fit
    pp
        stages of a pipeline. The other ``world size / (tp * pp)`` ranks are data parallel: only
        these take different samples
    replicas
        copies of a model in ``run.fully_shard``, each shared by neighbouring ranks (HSDP): with a
        copy for each node only gradients travel between nodes
    devices_per_worker
        GPUs of each worker, `Run.devices`, for a model that the script itself spreads over them
    """

    seed: int = 0
    _: KW_ONLY
    save_every: float | Literal["auto"] | None = 300.0
    save_every_steps: int | None = None
    keep_last: int = 3
    keep_every: int | None = None
    hang_after: float | None = 1800.0
    precision: str = "fp32"
    backend: str | None = None
    stop_on_nan: bool = True
    deterministic: bool = False
    tensorboard: bool = False
    progress: bool = True
    profile: tuple[int, int] | None = None
    flops_per_sample: float | None = None
    peak_flops: float | None = None
    tp: int = 1
    pp: int = 1
    replicas: int = 1
    devices_per_worker: int = 1

    def checked(self, env: LaunchEnv) -> Options:
        """Return a copy with the options that `env` sets in place of the script's (`OVERRIDDEN`).
        Raise UsageError if a value of the copy makes no sense, or the package tensorboard is needed
        and not installed."""
        overrides: dict[str, Any] = {name: getattr(env, name) for name in OVERRIDDEN}
        overrides = {name: option for name, option in overrides.items() if option is not None}
        options = replace(self, **overrides)
        options._check_words()
        options._check_numbers()
        return options

    def _check_words(self) -> None:
        """Raise UsageError for an unknown `precision`, a text in `save_every` but "auto", or
        `tensorboard` without the package."""
        if self.precision not in DTYPES:
            accepted = ", ".join(map(repr, DTYPES))
            raise UsageError(f"precision is {self.precision!r}; accepted: {accepted}")
        if isinstance(self.save_every, str) and self.save_every != "auto":
            raise UsageError(
                f"save_every is {self.save_every!r}; accepted: seconds, 'auto', or None"
            )
        if self.tensorboard and find_spec("tensorboard") is None:
            raise UsageError(
                "tensorboard=True needs the package tensorboard, which is not installed",
                hint="pip install tensorboard",
            )

    def _check_numbers(self) -> None:
        """Raise UsageError for a number out of its range, a wrong `profile`, or fp16 with `tp` or
        `pp`."""
        self._check_number("seed", -(2**63), kind=int)
        if self.seed >= 2**64:
            raise UsageError(f"seed is {self.seed}; accepted: a whole number up to {2**64 - 1}")
        self._check_number("keep_last", LEAST_KEPT, kind=int)
        for name in ("tp", "pp", "replicas", "devices_per_worker"):
            self._check_number(name, 1, kind=int)
        if self.precision == "fp16" and self.tp * self.pp > 1:
            raise UsageError(
                "precision is 'fp16' with tp or pp; accepted with these: 'fp32', 'bf16'",
                hint="bf16 needs no scaled gradients, on which all ranks would have to agree",
            )
        for name in ("save_every_steps", "keep_every"):
            self._check_number(name, 1, or_none=True, kind=int)
        for name in ("save_every", "hang_after"):
            self._check_number(name, 0, or_none=True)
        for name in ("flops_per_sample", "peak_flops"):
            self._check_number(name, 0, or_none=True)
            if getattr(self, name) == 0:
                raise UsageError(f"{name} is {getattr(self, name)!r}; accepted: a number above 0")
        if self.profile is not None and not _is_window(self.profile):
            raise UsageError(  # the first step of a process would only show it warming up
                f"profile is {self.profile!r}; accepted: the first step to trace, from 2, and the"
                " last",
                hint="profile=(10, 15), or HPC_DDP_PROFILE=10:15",
            )

    def _check_number(
        self, name: str, least: int, or_none: bool = False, kind: Any = (int, float)
    ) -> None:
        """Raise UsageError unless the option `name` is a number of type `kind`, `least` or greater,
        or is None and `or_none` is true. NaN and bools are refused; ``save_every`` may be "auto".
        """
        option = getattr(self, name)
        if (option is None and or_none) or (name == "save_every" and option == "auto"):
            return
        # `not >=`, since each comparison with NaN is false.
        if isinstance(option, bool) or not isinstance(option, kind) or not option >= least:
            accepted = f"a {'whole ' if kind is int else ''}number from {least}"
            raise UsageError(
                f"{name} is {option!r}; accepted: {accepted}{', or None' if or_none else ''}"
            )


def _is_window(option: Any) -> bool:
    """Return whether an option is a pair of steps: the first from 2 on, the second not before the
    first."""
    if not isinstance(option, (tuple, list)) or len(option) != 2:
        return False
    return all(isinstance(step, int) for step in option) and 2 <= option[0] <= option[1]
