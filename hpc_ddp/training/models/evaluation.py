"""Models for evaluation: eval mode, equal buffers, the exponential moving average of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.models.dtensor import fsdp_modules, is_sharded, reshard

TOGETHER = 1 << 26  # bytes of a broadcast of several buffers


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, without gradients; at the end, also after an error, put back into
    training mode the parts that were in it, and let FSDP2 have its shards again."""
    modes = {id(module): module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        set_modes(model, modes)  # frozen parts may have been in eval mode before
        reshard(model)  # or an optimizer made now would train what is gathered


def set_modes(module: nn.Module, modes: Mapping[int, bool]) -> None:
    """Have a module and its parts train, or not, as `modes` has it by their ids; parts that are not
    in it stay as they are.

    By ``train``, since classes override it, which merge an adapter's weights for an evaluation, or
    keep what they have computed of them. Its override may leave a part otherwise: that one has its
    own call.
    """
    mode = modes.get(id(module), module.training)
    if module.training != mode:
        module.train(mode)
        module.training = mode
    for part in module.children():
        set_modes(part, modes)


def share_buffers(model: nn.Module, device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Overwrite a model's buffers with those of the group's first rank; all its ranks call it.

    Only the persistent ones, which a checkpoint has; the others, masks and tables, are alike
    everywhere, and those that are DTensors are their mesh's. They travel together, one broadcast
    for `TOGETHER` bytes of a type of number, on `device`, whose tensors the group (None: the
    default one) carries. The host waits only for buffers that lie elsewhere.
    """
    unique: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            is_kept = name not in module._non_persistent_buffers_set and buffer.numel()
            if is_kept and not is_sharded(buffer):
                unique[id(buffer)] = buffer
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in unique.values():
        by_type.setdefault(buffer.dtype, []).append(buffer)
    for buffers in chain.from_iterable(map(_in_parcels, by_type.values())):
        # As bytes: NCCL and Gloo refuse int16 and others.
        plain = [buffer.detach().to(device).resolve_conj().resolve_neg() for buffer in buffers]
        flat = torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in plain])
        dist.broadcast(flat, group=group, group_src=0)
        numbers = flat.view(buffers[0].dtype)
        parts = torch.split(numbers, [buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.data.copy_(part.view(buffer.shape))


def _in_parcels(buffers: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield buffers in order, in lists of `TOGETHER` bytes at most, or of one: the base of a model
    in few bits is made of buffers, of which there is no room for a copy."""
    parcel: list[torch.Tensor] = []
    for buffer in buffers:
        if parcel and sum(part.nbytes for part in parcel) + buffer.nbytes > TOGETHER:
            yield parcel
            parcel = []
        parcel.append(buffer)
    if parcel:
        yield parcel


def averaged(model: torch.nn.Module, decay: float) -> Average:
    """Return a copy of a model whose ``update_parameters`` averages weights and running statistics:
    `decay` is the share of the average that an update keeps.

    Buffers that are no floating-point numbers (counters, masks) are copied, and so are 8-bit
    numbers, and those of buffers and frozen parameters whose average is not finite. Raise
    UsageError for a `decay` that is not from 0 to 1, for trained weights of 16 bits, and for a
    model that FSDP2 has sharded.
    """
    if not 0 <= decay <= 1:
        raise UsageError(f"decay is {decay}; accepted: a number from 0 to 1, such as 0.999")
    if fsdp_modules(model):
        raise UsageError(
            "run.ema was called after run.fully_shard, and torch copies no model that is sharded;"
            " accepted: a model before that",
            hint="average = run.ema(model), then run.fully_shard for the model and for"
            " average.module",
        )
    for name, weight in model.named_parameters():
        is_short = weight.is_floating_point() and weight.dtype.itemsize == 2
        if is_short and weight.requires_grad and 0.5 < decay < 1:
            raise UsageError(
                f"{name} is of {weight.dtype}, in which steps of a share of {1 - decay:.2g} are"
                " rounded away: the average would stay as it is; accepted by run.ema: weights of"
                " torch.float32",
                hint="average = run.ema(copy.deepcopy(model).float()); update_parameters(model)"
                " averages a model of 16 bits in",
            )
    return Average(model, decay)


class Average(AveragedModel):
    """torch's averaged model, which here neither reads its count on a device, nor waits for one.

    Tensors are averaged in as few calls as there are devices and types of them: DTensors and plain
    ones, which tensor parallelism leaves side by side, go in no one call.
    """

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        """Copy a model; at each update the average keeps the share `decay` of itself."""
        super().__init__(model, use_buffers=True)
        self._decay = decay
        self._begun_on = _device_of(model)

    def follow(self, model: torch.nn.Module) -> None:
        """Move to the device of the model that it was copied from, unless it was moved itself."""
        if _device_of(self.module) == self._begun_on:
            self.module.to(_device_of(model))

    @torch.no_grad()
    def update_parameters(self, model: torch.nn.Module) -> None:
        """Average the weights, and the statistics, of a model in; the first time copy them.

        Raise ValueError for a model with another number of tensors; nothing is averaged then.
        """
        self.n_averaged = self.n_averaged.cpu()  # it may have moved with the weights
        for shards in (self.module, model):  # an evaluation may have gathered them
            reshard(shards)
        groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for mean, new in zip(_tensors(self.module), _tensors(model), strict=True):
            key = mean.device, mean.dtype, is_sharded(mean), new.requires_grad
            means, news = groups.setdefault(key, ([], []))
            means.append(mean.detach())
            news.append(new.detach().to(mean.device, mean.dtype))
        for (_, dtype, _, has_gradient), (means, news) in groups.items():
            if self.n_averaged > 0 and _has_average(dtype):
                torch._foreach_lerp_(means, news, 1 - self._decay)
                if not has_gradient:
                    _replace_non_finite(means, news)
            else:
                for mean, new in zip(means, news, strict=True):
                    mean.copy_(new)
        self.n_averaged += 1


def _has_average(dtype: torch.dtype) -> bool:
    """Return whether torch averages numbers of a type: floating-point and complex ones, but none of
    8 bits."""
    return (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1


def _replace_non_finite(means: Sequence[torch.Tensor], news: Sequence[torch.Tensor]) -> None:
    """Overwrite averages that are not finite with the new numbers, on their device.

    A mask of infinities is a buffer, or a frozen parameter: its average would be NaN, for which no
    one looks. Frozen ones are not just copied: a GAN may have its generator without gradients at
    the moment of the average. Numbers that stay as they are keep their bits in an average.
    """
    for mean, new in zip(means, news, strict=True):
        mean.copy_(torch.where(torch.isfinite(mean), mean, new))


def _device_of(model: torch.nn.Module) -> torch.device | None:
    """Return the device of a model's first tensor, None without any."""
    return next((tensor.device for tensor in _tensors(model)), None)


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    return chain(model.parameters(), model.buffers())
