"""Models for evaluation: eval mode, equal buffers, the exponential moving average of weights."""

from __future__ import annotations

import gc
import os
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.checkpoint.state import ignored_by_ddp
from hpc_ddp.training.data.loop_site import codes_in
from hpc_ddp.training.models.dtensor import fsdp_modules, is_sharded, reshard

TOGETHER = 1 << 26  # the most bytes of a broadcast of several buffers
MOST_PARTS = 10_000  # the most objects that `_refers_to_any` visits
_TORCH = os.path.dirname(torch.__file__)
# Types of objects that are not searched: what they hold is not a function's own.
NO_HOLDERS = (nn.Module, torch.Tensor, ModuleType, CodeType, type)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """A context in which a model is in eval mode, and no gradients are recorded. At its end, also
    after an error, all parts are in their former modes, and an FSDP2 model has its shards again."""
    modes = {id(module): module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        set_modes(model, modes)  # and not `train`: frozen parts may have been in eval mode before
        reshard(model)  # or an optimizer that is made now would train the gathered parameters


def set_modes(module: nn.Module, modes: Mapping[int, bool]) -> None:
    """Set the training mode of a module and its parts to that of `modes`, by their ids. A part that
    is not in `modes` keeps its mode, unless a call of ``train`` for a part around it changes that.

    It calls ``train``, since classes override this method: they merge an adapter's weights for an
    evaluation, or keep what they have computed of them. Parts that the call leaves in another mode
    get a call of their own.
    """
    mode = modes.get(id(module), module.training)
    if module.training != mode:
        module.train(mode)
        module.training = mode  # an override may not set it
    for part in module.children():
        set_modes(part, modes)


def share_buffers(model: nn.Module, device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Overwrite a model's persistent buffers with those of the first rank of a group, the default
    one for None; a collective of its ranks.

    Left alone are buffers that no checkpoint has (masks and tables), since they are alike on all
    ranks; DTensors; and buffers that DDP leaves to each rank (`ignored_by_ddp`). The buffers travel
    on `device`, whose tensors the group carries; those of one dtype travel together, in parcels.
    The host waits only for buffers that lie on other devices.
    """
    unique: dict[int, torch.Tensor] = {}
    private = {id(tensor) for _, tensor in ignored_by_ddp({"": model})}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            is_kept = name not in module._non_persistent_buffers_set and buffer.numel()
            if is_kept and not is_sharded(buffer) and id(buffer) not in private:
                unique[id(buffer)] = buffer
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in unique.values():
        by_type.setdefault(buffer.dtype, []).append(buffer)
    for buffers in chain.from_iterable(map(_make_parcels, by_type.values())):
        # As bytes: NCCL and Gloo refuse int16 and others.
        plain = [buffer.detach().to(device).resolve_conj().resolve_neg() for buffer in buffers]
        flat = torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in plain])
        dist.broadcast(flat, group=group, group_src=0)
        numbers = flat.view(buffers[0].dtype)
        parts = torch.split(numbers, [buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.data.copy_(part.view(buffer.shape))


def _make_parcels(buffers: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the buffers in order, in lists of `TOGETHER` bytes at most; a larger buffer is alone. A
    quantized model is made of buffers, and there is no room for a copy of them all."""
    parcel: list[torch.Tensor] = []
    for buffer in buffers:
        if parcel and sum(part.nbytes for part in parcel) + buffer.nbytes > TOGETHER:
            yield parcel
            parcel = []
        parcel.append(buffer)
    if parcel:
        yield parcel


def make_average(
    model: torch.nn.Module, decay: float, say: Callable[[str], None] = lambda text: None
) -> Average:
    """Return a copy of a model whose ``update_parameters`` averages weights and running statistics:
    `decay` is the share of the average that an update keeps. Call `say` with a warning of the parts
    whose ``forward`` the script has replaced by a function that the copy can't have.

    An update copies numbers of 8 bits and whole numbers (counters, masks), and, in buffers and
    frozen parameters, numbers whose average is not finite. Raise UsageError for a `decay` that is
    not from 0 to 1, for a model that FSDP2 has sharded, and, with a `decay` between 0.5 and 1, for
    trained weights of 16 bits.
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
    average = Average(model, decay)
    if names := ", ".join(average.lost_forwards):
        say(
            f"WARNING: the average evaluates {names} by its class's forward,"
            " not by the function that is there in the model, which would use the model's weights;"
            " accepted: a method (types.MethodType), or a subclass"
        )
    return average


def _refers_to_any(function: Any, modules: Container[int]) -> bool:
    """Return whether a function refers to one of `modules` (their ids): by itself, or by objects
    that it holds at any depth: its closure, its defaults, the globals that its code names, also
    that of functions within it, and what these hold. The search does not go into other modules, and
    returns False after `MOST_PARTS` objects."""
    parts, visited = deque([function]), set[int]()
    while parts and len(visited) < MOST_PARTS:
        part = parts.popleft()  # the nearest first: a vocabulary, say, has many objects
        if id(part) in modules:
            return True
        kind = type(part)  # isinstance would ask `__class__`, which may be code of the user's
        if id(part) in visited or not gc.is_tracked(part) or issubclass(kind, NO_HOLDERS):
            continue
        visited.add(id(part))
        scope = part.__globals__ if kind is FunctionType else {}
        # Of a function's globals only those that its code names.
        parts.extend(referent for referent in gc.get_referents(part) if referent is not scope)
        if kind is FunctionType:
            names = chain.from_iterable(code.co_names for code in codes_in(part.__code__))
            parts.extend(scope[name] for name in names if name in scope)
        if issubclass(kind, weakref.ref):
            parts.append(part())
    return False


class Average(AveragedModel):
    """torch's averaged model, with its count of updates on the CPU, so that an update does not wait
    for a device. `lost_forwards` has the names of parts that lack a ``forward`` of the script's.
    """

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        """Copy a model; at each update the average keeps the share `decay` of itself."""
        super().__init__(model, use_buffers=True)
        self.lost_forwards: list[str] = []
        modules = set(map(id, model.modules()))
        pairs = zip(model.named_modules(), self.module.modules(), strict=True)
        for (name, part), copied in pairs:
            # A copy has methods of its own, and shares functions: they would use the model's parts.
            forward = vars(part).get("forward")
            if forward is vars(copied).get("forward") and _refers_to_any(forward, modules):
                del vars(copied)["forward"]
                file = getattr(getattr(forward, "__code__", None), "co_filename", "")
                # torch's own, of torch.compile or a graph, computes the same as the class's.
                if not file.startswith(_TORCH):
                    self.lost_forwards.append(name or type(part).__name__)
        self._decay = decay
        self._begun_on = _device_of(model)

    def follow(self, model: torch.nn.Module | None) -> None:
        """Move the average to the device of `model`, its original. Do nothing if the average is not
        on the device on which it was made, since the script has moved it, or for None."""
        if model is not None and _device_of(self.module) == self._begun_on:
            self.module.to(_device_of(model))

    @torch.no_grad()
    def update_parameters(self, model: torch.nn.Module) -> None:
        """Update the average with the weights and buffers of a model; the first call copies them.
        Both models get their shards back if FSDP2 has sharded them.

        Raise ValueError for a model with another number of tensors; the average then stays.
        """
        self.n_averaged = self.n_averaged.cpu()  # a move of the module moves it, too
        for module in (self.module, model):  # an evaluation may have gathered them
            reshard(module)
        # One call averages all tensors of a group. DTensors and plain tensors, which tensor
        # parallelism leaves side by side, are refused in one call.
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
    """Return whether torch averages numbers of a type: floating-point and complex numbers of more
    than 8 bits."""
    return (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1


def _replace_non_finite(means: Sequence[torch.Tensor], news: Sequence[torch.Tensor]) -> None:
    """Overwrite averages that are not finite with the new numbers, on the averages' device.

    A mask of infinities is a buffer, or a frozen parameter: its average would be NaN, which no
    check would notice. Parameters without gradients are not simply copied: a GAN's generator may be
    without gradients at the moment of the update. Other frozen parameters lose nothing, since a
    number that does not change keeps its bits in an average.
    """
    for mean, new in zip(means, news, strict=True):
        mean.copy_(torch.where(torch.isfinite(mean), mean, new))


def _device_of(model: torch.nn.Module) -> torch.device | None:
    """Return the device of a model's first tensor, None without any."""
    return next((tensor.device for tensor in _tensors(model)), None)


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Return all parameters, then all buffers of a model."""
    return chain(model.parameters(), model.buffers())
