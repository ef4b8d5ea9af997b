"""The precision of a step, loss scaling, and the check for numbers that are not finite."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Collection, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.checkpoint.state import ignored_by_ddp
from hpc_ddp.training.devices import Transfer, has_bf16, has_float64, name
from hpc_ddp.training.models.dtensor import clip_gradients, total_norm
from hpc_ddp.training.models.mesh import ParallelDims
from hpc_ddp.training.models.tracked_objects import LivingModels
from hpc_ddp.training.models.trained_parameters import TrainedParameters, parameters_of

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# NCCL's variables for sums in an NVSwitch, or in a switch of the network: NCCL does not choose the
# order of these sums.
SUMS_IN_SWITCHES = ("NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE")
NON_FINITE_WEIGHTS = "the weights have NaN or infinity in them"
LEAST_SCALE = 2.0**-16  # 32 skipped steps in a row from where GradScaler starts


class Scaler(torch.amp.GradScaler):
    """A scaler that keeps whether its newest `step` has skipped an optimizer, by `has_skipped`. A
    fused optimizer skips on the device: then it stays as it was."""

    has_skipped = False

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Step the optimizer unless there is an overflow, as torch's own method, which keeps its
        decision for itself; `optimizer_state` is the scaler's."""
        flags = optimizer_state["found_inf_per_device"].values()
        self.has_skipped = any(flag.item() for flag in flags)
        return None if self.has_skipped else optimizer.step(*args, **kwargs)


class Precision:
    """Autocast, loss scaling, the update of the weights, and the check that they are finite.

    Its state, the scale of fp16's gradients, belongs into every checkpoint. For other precisions
    the state is empty, so that a run can go on with another precision.
    """

    def __init__(
        self, kind: str, device: torch.device, stop_on_nan: bool, dims: ParallelDims | None = None
    ) -> None:
        """`kind` is a key of `DTYPES`; without `dims` this rank is alone. Without `stop_on_nan` the
        weights are not checked.

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
        self._scaler = Scaler(device.type) if kind == "fp16" else None
        self._stop_on_nan = stop_on_nan
        self._watched = LivingModels[torch.nn.Module]()
        self._trained = TrainedParameters()  # none, until `watch_trained`
        # By optimizer: the number of its parameters, and the result of `_private_parameters`.
        self._private = WeakKeyDictionary[torch.optim.Optimizer, tuple[int, frozenset[int]]]()
        self._norm: Transfer | None = None  # of the weights; the device may still compute it
        self._left_scaled = False  # gradients are scaled, and no update followed
        # With fp16, in this step:
        self._updated: set[int] = set()  # ids of the optimizers that were updated
        self._flags: list[torch.Tensor] = []  # the scaler's, of an overflow
        self._lost_overflow = False  # whether one came before an optimizer's second update

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context that computes in the precision; for fp32 it does nothing."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, self.dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward of a scalar loss; with fp16 it is scaled first."""
        self._left_scaled = self._scaler is not None
        torch.autograd.backward(self._scaler.scale(loss) if self._scaler else loss)

    def update(
        self, optimizer: torch.optim.Optimizer, clip_norm: float | None, scheduler: Any
    ) -> torch.Tensor | None:
        """Step the optimizer, unless fp16's scaler skips the step, and set the gradients to None.
        With `clip_norm` clip them first, and return their norm before clipping, a scalar; else
        return None. Step the scheduler, unless it is None or the optimizer's step was skipped.

        It is a collective with `clip_norm` and parameters that are spread over several ranks, and,
        with parameters of which each rank has its own, with `clip_norm` or fp16. With fp16 the host
        waits for the device, as torch's scaler does.
        """
        norm, parameters = None, parameters_of(optimizer)
        private = self._private_parameters(optimizer, parameters)
        if self._scaler and id(optimizer) in self._updated:  # twice in a step: a GAN's critic
            self._begin_second_update(self._scaler)
        # Without gradients, as a GAN's in the first steps.
        is_idle = all(parameter.grad is None for parameter in parameters)
        worst: torch.Tensor | None = None
        if self._scaler and (private or clip_norm is not None):
            worst = self._unscale(self._scaler, optimizer, is_idle, bool(private))
        if clip_norm is not None:
            norm = clip_gradients(parameters, clip_norm, self._dims, self._device, private)
        if is_idle:  # torch's scaler refuses an optimizer without gradients
            optimizer.step()
            is_stepped = scheduler is None or worst is None or not worst.item()
        else:
            is_stepped = self._step(optimizer, is_asked=scheduler is not None)
        if is_stepped and scheduler is not None:
            scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        self._left_scaled = self._left_scaled and is_idle
        return norm

    def _unscale(
        self,
        scaler: torch.amp.GradScaler,
        optimizer: torch.optim.Optimizer,
        is_idle: bool,
        has_private: bool,
    ) -> torch.Tensor | None:
        """Divide the gradients by fp16's scale, unless there are none (`is_idle`).

        If each rank has parameters of its own (`has_private`), also share the flags of an overflow,
        a collective, and return their maximum (`_share_overflow`): else only the rank with the
        overflow would skip the step. Return None without such parameters.
        """
        if not is_idle:
            scaler.unscale_(optimizer)
        if not has_private:
            return None
        flags = {} if is_idle else scaler._found_inf_per_device(optimizer)
        return self._share_overflow(flags.values())

    def _begin_second_update(self, scaler: torch.amp.GradScaler) -> None:
        """Have `scaler` accept a second update of an optimizer in this step, with the same scale.
        Note whether an update before had an overflow, for which the host waits for the device."""
        self._lost_overflow = self._lost_overflow or any(flag.item() for flag in self._flags)
        scaler.update(scaler.get_scale())
        self._updated.clear()

    def _share_overflow(self, flags: Collection[torch.Tensor]) -> torch.Tensor:
        """Set each rank's `flags` of an overflow, scalars that are 0 or 1, to the maximum over all
        ranks; return the maximum, a scalar. All ranks call it, also those without flags."""
        # Each rank sends one number, from the run's device: NCCL takes no other, and the parameters
        # may lie on several.
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
        """Return the ids of those of an optimizer's `parameters` that are private: each rank has
        its own of them, as experts that DDP ignores, and tensors of no watched model. The set is
        empty where there is one copy of the model, or where none of the parameters' gradients is
        averaged. It is kept until the optimizer has another number of parameters."""
        count, private = self._private.get(optimizer, (0, frozenset()))
        if count != len(parameters) and self._dims.dp > 1:
            modules = {str(number): module for number, module in enumerate(self._watched)}
            averaged = {id(weight) for module in self._watched for weight in module.parameters()}
            averaged -= {id(parameter) for _, parameter in ignored_by_ddp(modules)}
            private = frozenset(map(id, parameters)) - averaged
            if len(private) == len(parameters):
                private = frozenset()
            self._private[optimizer] = len(parameters), private
        return private

    def _step(self, optimizer: torch.optim.Optimizer, is_asked: bool) -> bool:
        """Step the optimizer, and return whether it did; False if fp16's scaler skipped the step.
        If the caller does not ask for the result (not `is_asked`), it may be True for a skipped
        step, too: for that of a fused optimizer the host would wait for the device."""
        if self._scaler is None:
            optimizer.step()
            return True
        self._updated.add(id(optimizer))
        self._scaler.has_skipped = False
        self._scaler.step(optimizer)
        flags = self._scaler._found_inf_per_device(optimizer).values()
        self._flags += flags
        if is_asked and getattr(optimizer, "_step_supports_amp_scaling", False):
            return not any(flag.item() for flag in flags)
        return not self._scaler.has_skipped

    def _choose_scale(self) -> None:
        """Choose fp16's next scale, after all updates of a step. Lower it also for an overflow
        before an optimizer's second update in the step, which torch's scaler has forgotten. With
        another precision, or without an update, do nothing."""
        if self._scaler is None or not self._updated:
            return
        self._scaler.update()
        if self._lost_overflow:
            self._scaler.update(self._scaler.get_scale() * self._scaler.get_backoff_factor())
        self._updated.clear()
        self._flags.clear()
        self._lost_overflow = False

    def end_step(self) -> None:
        """End a step, and choose fp16's next scale. Raise UsageError if `backward` has scaled
        gradients and no `update` followed: the script's own ``optimizer.step()`` may have used the
        scaled gradients."""
        if self._left_scaled:
            raise UsageError(
                "with precision='fp16' the gradients are scaled, and run.update was not called",
                hint="write run.update(optimizer) in place of optimizer.step()",
            )
        self._choose_scale()

    def watch_model(self, model: torch.nn.Module) -> None:
        """Have `start_check` read the weights of `model`, too, if they need gradients; all ranks
        call it. A second call for a model does nothing."""
        self._watched.add(model)

    def watch_trained(self, trained: TrainedParameters) -> None:
        """Have `start_check` read also those weights of the watched models that optimizers train
        although they need no gradients now, as a GAN's discriminator; all ranks call it."""
        self._trained = trained

    def start_check(self) -> None:
        """Begin to compute the norm of the watched models' weights, which shows whether they are
        finite; all ranks must call it at the same step, as it may be a collective (`total_norm`).

        It reads the weights, not each step's gradients: a gradient that is not finite ends up in
        the weights and stays. The device reads them once; the host waits for nothing, and
        `take_fault` returns the result, some steps later. Without `stop_on_nan`, or without a
        watched model, nothing is read.
        """
        if not (self._stop_on_nan and self._watched):
            return
        parameters = (weight for model in self._watched for weight in model.parameters())
        # Weights in 8 bits, of which torch has no norm, are checked by each save only.
        ids = self._trained.ids()
        trained = (weight for weight in parameters if weight.requires_grad or id(weight) in ids)
        weights = [weight for weight in trained if weight.dtype.itemsize > 1]
        with torch.no_grad():
            self._norm = Transfer({"norm": total_norm(weights, self._dims, self._device)})

    def take_fault(self) -> str:
        """Return, once, the fault that the last `start_check` has seen, the same text on all ranks:
        the weights have NaN or infinity in them. Return '' where they have none, without a
        `start_check` since the last call, and without `stop_on_nan`.

        The host waits for the device. At a fault the weights are read once more, without models
        that the script has let go: all ranks must call it. With fp16 the scaler keeps the weights
        finite by skipping steps. Once its scale is below `LEAST_SCALE`, it skips nearly all steps,
        and each call returns that as the fault.
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
        gc.collect()  # the weights may be of a model that the script has let go, as after a trial
        self.start_check()
        return "" if self._norm_is_finite() else NON_FINITE_WEIGHTS

    def _norm_is_finite(self) -> bool:
        """Return, once, whether the norm of the last `start_check` is finite; True without a norm.
        The host waits for the device."""
        norm = None if self._norm is None else self._norm.numbers()["norm"]
        self._norm = None
        return norm is None or math.isfinite(norm)

    def state_dict(self) -> dict[str, Any]:
        """Return fp16's scale and its counters; {} for other precisions."""
        return self._scaler.state_dict() if self._scaler else {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Set fp16's scale and counters to those of `saved`, which `state_dict` has returned; do
        nothing if `saved` is {}, or this precision is another one."""
        if self._scaler and saved:
            self._scaler.load_state_dict(saved)


def make_deterministic(rank: int) -> None:
    """Have torch and NCCL use deterministic algorithms only, in this process: set environment
    variables and torch's switches. Call it before anything uses a GPU. Variables that the user has
    set stay; rank 0 prints a message for each of `SUMS_IN_SWITCHES` that is not 0.

    Sources: https://docs.pytorch.org/docs/stable/notes/randomness.html, and on an NVSwitch's sums
    https://github.com/NVIDIA/nccl/issues/1497. torch itself sets ``NCCL_ALGO=^NVLS``, which leaves
    NVLSTree between nodes, and does nothing where NCCL_ALGO is set.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for variable in SUMS_IN_SWITCHES:
        setting = os.environ.setdefault(variable, "0")
        if setting != "0" and rank == 0:
            say(
                f"deterministic is True, and {variable}={setting} lets NCCL add up in switches, in"
                f" another order each time; {variable}=0 keeps the bits the same"
            )
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
