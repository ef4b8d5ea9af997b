"""The precision of a step, loss scaling, and the check for numbers that are not finite."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Collection, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.checkpoint.state import ignored_by_ddp
from hpc_ddp.training.devices import Transfer, has_bf16, has_float64, name
from hpc_ddp.training.models.dtensor import clip_, total_norm
from hpc_ddp.training.models.mesh import ParallelDims
from hpc_ddp.training.models.tracked import LivingModels
from hpc_ddp.training.models.trained import TrainedParameters, parameters_of

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# Of NCCL, which does not choose in which order an NVSwitch, or a switch of the network, adds up.
IN_SWITCHES = ("NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE")
NON_FINITE_WEIGHTS = "the weights have NaN or infinity in them"
LEAST_SCALE = 2.0**-16  # 32 skipped steps in a row from where GradScaler starts


class Precision:
    """Autocast, loss scaling, the update of the weights, and the check that they are finite.

    Its state, the scale of fp16's gradients, belongs into every checkpoint. It is empty for the
    other precisions, so that a run can go on with another one.
    """

    def __init__(
        self, kind: str, device: torch.device, stop_on_nan: bool, dims: ParallelDims | None = None
    ) -> None:
        """`kind` is a key of `DTYPES`; without `dims` this rank is alone. `stop_on_nan` switches
        `look` on.

        Rank 0 prints a message for bf16 on a device that emulates it. Raise UsageError for fp16 on
        a device without float64.
        """
        self._device, self._dims, self.dtype = device, dims or ParallelDims(), DTYPES[kind]
        if kind == "fp16" and not has_float64(device):
            raise UsageError(
                f"precision is 'fp16' on {name(device)}, which has no float64, and torch's"
                " GradScaler computes in it; accepted: 'fp32', 'bf16'",
                hint="bf16 needs no scaled gradients",
            )
        if kind == "bf16" and not has_bf16(device) and self._dims.rank == 0:
            say(
                f"precision is 'bf16' on {name(device)}, which emulates it: steps are slow;"
                " precision='fp16' is fast there"
            )
        self._scaler = torch.amp.GradScaler(device.type) if kind == "fp16" else None
        self._stop_on_nan = stop_on_nan
        self._watched = LivingModels[torch.nn.Module]()
        self._trained = TrainedParameters()  # none, until `watch_trained`
        # Of each optimizer: how many parameters it has, and `_private_parameters`.
        self._private = WeakKeyDictionary[torch.optim.Optimizer, tuple[int, frozenset[int]]]()
        self._norm: Transfer | None = None  # of the weights; the device may still compute it
        self._left_scaled = False  # gradients are scaled, and no update followed
        # With fp16, in this step: ids of the optimizers that were updated; the scaler's flags of
        # an overflow, and whether there was one before an optimizer's second update.
        self._updated: set[int] = set()
        self._flags: list[torch.Tensor] = []
        self._lost_overflow = False

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context that computes in the precision; one that does nothing for fp32."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, self.dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward of a scalar loss, which is scaled first with fp16."""
        self._left_scaled = self._scaler is not None
        torch.autograd.backward(self._scaler.scale(loss) if self._scaler else loss)

    def update(
        self, optimizer: torch.optim.Optimizer, clip_norm: float | None, scheduler: Any
    ) -> torch.Tensor | None:
        """Step the optimizer, unless fp16's scaler skips that, and set the gradients to None. With
        `clip_norm` clip them first, and return their norm before, a scalar; else None. Step the
        scheduler, if there is one and the optimizer's step was not skipped.

        It is a collective with `clip_norm` and parameters over several ranks. With parameters of
        which each rank has its own it is one with `clip_norm` or fp16. With fp16 it waits for the
        device, as its scaler does.
        """
        norm, parameters = None, parameters_of(optimizer)
        private = self._private_parameters(optimizer, parameters)
        if self._scaler and id(optimizer) in self._updated:  # twice in a step: a GAN's critic
            self._begin_second_update(self._scaler)
        is_idle = all(parameter.grad is None for parameter in parameters)  # as a GAN's, at first
        if self._scaler and not is_idle and (private or clip_norm is not None):
            self._scaler.unscale_(optimizer)
        worst: torch.Tensor | None = None
        if self._scaler and private:  # else the rank with the overflow alone would skip the step
            flags = {} if is_idle else self._scaler._found_inf_per_device(optimizer)
            worst = self._share_overflow(flags.values())
        if clip_norm is not None:
            norm = clip_(parameters, clip_norm, self._dims, self._device, private)
        if is_idle:  # the scaler refuses it
            optimizer.step()
            is_stepped = scheduler is None or worst is None or not worst.item()
        else:
            is_stepped = self._step(optimizer, is_asked=scheduler is not None)
        if is_stepped and scheduler is not None:
            scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        self._left_scaled = self._left_scaled and is_idle
        return norm

    def _begin_second_update(self, scaler: torch.amp.GradScaler) -> None:
        """Let `scaler` take another update in this step, and keep whether the one before had an
        overflow, for which it waits for the device."""
        self._lost_overflow = self._lost_overflow or any(flag.item() for flag in self._flags)
        scaler.update(scaler.get_scale())
        self._updated.clear()

    def _share_overflow(self, flags: Collection[torch.Tensor]) -> torch.Tensor:
        """Set each rank's `flags` of an overflow, scalars that are 0 or 1, to the maximum over all
        ranks; return it, a scalar. All ranks call it, also those without flags."""
        # One on this rank's device, whatever devices its parameters are on: NCCL takes no other,
        # and each rank has to send as many.
        worst = torch.zeros((), dtype=torch.float32, device=self._device)
        for flag in flags:
            worst = torch.maximum(worst, flag.to(self._device))
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        for flag in flags:
            flag.copy_(worst)
        return worst

    def _private_parameters(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
    ) -> Set[int]:
        """Return the ids of those of an optimizer's `parameters` of which each rank has its own:
        experts that DDP ignores, and tensors of no model that is watched. The set is empty where
        there is one copy of the model, or where none of the parameters' gradients is averaged."""
        count, private = self._private.get(optimizer, (0, frozenset()))
        if count != len(parameters) and self._dims.dp > 1:  # some may have been added
            modules = {str(number): module for number, module in enumerate(self._watched)}
            averaged = {id(weight) for module in self._watched for weight in module.parameters()}
            averaged -= {id(parameter) for _, parameter in ignored_by_ddp(modules)}
            private = frozenset(map(id, parameters)) - averaged
            if len(private) == len(parameters):
                private = frozenset()
            self._private[optimizer] = len(parameters), private
        return private

    def _step(self, optimizer: torch.optim.Optimizer, is_asked: bool) -> bool:
        """Step the optimizer; return whether it did, and was not skipped by the scaler. Unless it
        `is_asked`, the result may be True also for a skipped step.

        The scaler's flags lie on the device, behind the kernels of the step: to read them is to
        wait for the kernels. Whether an ordinary optimizer was called shows on the host; a fused
        one is always called, and skips on the device.
        """
        if self._scaler is None:
            optimizer.step()
            return True
        self._updated.add(id(optimizer))
        with _noted_calls(optimizer) as calls:
            self._scaler.step(optimizer)
        flags = list(self._scaler._found_inf_per_device(optimizer).values())
        self._flags += flags
        if is_asked and calls and getattr(optimizer, "_step_supports_amp_scaling", False):
            return not any(flag.item() for flag in flags)
        return bool(calls)

    def _choose_scale(self) -> None:
        """Choose fp16's next scale, once all optimizers of a step have used the present one. Lower
        it also for an overflow before an optimizer's second update in the step. With another
        precision, or without an update, do nothing."""
        if self._scaler is None or not self._updated:
            return
        self._scaler.update()
        if self._lost_overflow:
            self._scaler.update(self._scaler.get_scale() * self._scaler.get_backoff_factor())
        self._updated.clear()
        self._flags.clear()
        self._lost_overflow = False

    def end_step(self) -> None:
        """End a step, and choose fp16's next scale. Raise UsageError if `backward` scaled gradients
        and no `update` followed: the script's own ``optimizer.step()`` may have used them as they
        were."""
        if self._left_scaled:
            raise UsageError(
                "with precision='fp16' the gradients are scaled, and run.update was not called",
                hint="write run.update(optimizer) in place of optimizer.step()",
            )
        self._choose_scale()

    def watch(self, model: torch.nn.Module) -> None:
        """Have `look` read the weights of a model, too; all ranks call it. A second call does
        nothing."""
        self._watched.add(model)

    def watch_trained(self, trained: TrainedParameters) -> None:
        """Have `look` read also those weights of the models that optimizers train though they need
        no gradients now, as a GAN's discriminator; all ranks call it."""
        self._trained = trained

    def look(self) -> None:
        """Begin to find out whether the weights of the watched models are finite; all ranks must
        call it at the same step.

        It reads the weights, not each step's gradients: a gradient that is not finite ends up in
        the weights and stays. That costs the device the time of reading them once. The host waits
        for nothing: `non_finite_fault` returns the answer, some steps later. Without `stop_on_nan`,
        or without a model to watch, nothing is read.
        """
        if not (self._stop_on_nan and self._watched):
            return
        parameters = (weight for model in self._watched for weight in model.parameters())
        # Those in 8 bits, of which torch has no norm, are looked at by each save alone.
        ids = self._trained.ids()
        trained = (weight for weight in parameters if weight.requires_grad or id(weight) in ids)
        weights = [weight for weight in trained if weight.dtype.itemsize > 1]
        with torch.no_grad():
            self._norm = Transfer({"norm": total_norm(weights, self._dims, self._device)})

    def non_finite_fault(self) -> str:
        """Return, once, the fault that the last `look` has read, the same on all ranks: that the
        weights have NaN or infinity in them. Return '' where they have none.

        It waits for the device. '' without a `look` since the last call, and without `stop_on_nan`.
        With fp16 the scaler keeps the weights finite by skipping steps: each call returns that as
        the fault, once the scale is below `LEAST_SCALE`, and so nearly all steps are skipped.
        """
        if not self._stop_on_nan:
            return ""
        if self._scaler is not None and (scale := self._scaler.get_scale()) < LEAST_SCALE:
            return (
                "fp16 skips nearly all steps, since gradients have NaN or infinity in them (the"
                f" loss scale is {scale:.2g})"
            )
        if self._norm_is_finite():
            return ""
        gc.collect()  # of a model that the script has let go, as after a trial of rates
        self.look()
        return "" if self._norm_is_finite() else NON_FINITE_WEIGHTS

    def _norm_is_finite(self) -> bool:
        """Return the result of the last `look`, once, and wait for the device for it; True without
        one."""
        norm = None if self._norm is None else self._norm.numbers()["norm"]
        self._norm = None
        return norm is None or math.isfinite(norm)

    def state_dict(self) -> dict[str, Any]:
        """Return fp16's scale and its counters, {} for other precisions."""
        return self._scaler.state_dict() if self._scaler else {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Set fp16's scale and counters to those of `state_dict`; do nothing if they are of another
        precision, or this one is."""
        if self._scaler and saved:
            self._scaler.load_state_dict(saved)


def make_deterministic(rank: int) -> None:
    """Have torch and NCCL use deterministic algorithms only, in this process, by environment
    variables and torch's switches. Call it before anything uses a GPU. Variables that are set stay;
    rank 0 prints a message for one of `IN_SWITCHES` that is not 0.

    Sources: https://docs.pytorch.org/docs/stable/notes/randomness.html, and on an NVSwitch's sums
    https://github.com/NVIDIA/nccl/issues/1497. torch itself sets ``NCCL_ALGO=^NVLS``, which leaves
    NVLSTree between nodes, and does nothing where NCCL_ALGO is set.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for variable in IN_SWITCHES:
        setting = os.environ.setdefault(variable, "0")
        if setting != "0" and rank == 0:
            say(
                f"deterministic is True, and {variable}={setting} lets NCCL add up in switches, in"
                f" another order each time; {variable}=0 keeps the bits the same"
            )
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


@contextmanager
def _noted_calls(optimizer: torch.optim.Optimizer) -> Iterator[list[None]]:
    """Give a list that gets an entry for each call of ``optimizer.step`` in the block; a hook would
    miss those of a class that does not begin with torch's ``__init__``, as timm's Lookahead."""
    calls: list[None] = []
    step, attributes = optimizer.step, vars(optimizer)
    before = attributes.get("step")  # a scheduler has set one

    @wraps(step)
    def note(*args: Any, **options: Any) -> Any:
        calls.append(None)
        return step(*args, **options)

    attributes["step"] = note
    try:
        yield calls
    finally:
        if before is None:
            del attributes["step"]
        else:
            attributes["step"] = before
