"""Batches of any shape, pinned and moved to a device."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch

from hpc_ddp.training.devices import CPU, is_accelerator
from hpc_ddp.training.models.dtensor import gather_whole


def copy_rows(tensor: torch.Tensor, indices: list[int]) -> torch.Tensor:
    """Return a copy of the rows of a tensor at `indices`, in their order and on the tensor's
    device. On an accelerator the copy is only queued: the host does not wait for it."""
    if not is_accelerator(tensor.device):
        return tensor[indices]
    # A list, or indices in memory that is not pinned, would make the host wait.
    index = torch.tensor(indices, dtype=torch.int64, device="cpu").pin_memory()
    return tensor[index.to(tensor.device, non_blocking=True)]


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch of the same structure with its tensors on `device`. The host does not wait for
    copies from pinned memory.

    Tensors are looked for in tuples, lists, dicts, other mutable mappings and dataclasses, all of
    which are copied, a subclass of dict to a plain dict. Other objects, and tensors on `device`
    already, are passed on as they are. An object with a method ``to`` moves itself: Transformers'
    BatchEncoding, a Batch of PyG, a packed sequence; the method's errors come through.
    """
    return _change_parts(batch, partial(_move, device=device))


def pin_tensors(batch: Any) -> Any:
    """Return a batch of the same structure with its tensors in pinned memory; a tensor that can't
    be pinned is passed on as it is. Tensors are looked for where `move_to_device` looks; an object
    with a method ``pin_memory`` pins itself."""
    return _change_parts(batch, _pin)


def move_to_host(batch: Any) -> Any:
    """Return a batch of the same structure with its tensors in the host's memory, without their
    graphs; one that is there already shares its memory with the result. A DTensor becomes a whole
    tensor: that is a collective of its ranks. Tensors are looked for where `move_to_device` looks.
    """
    return _change_parts(
        batch, lambda part: gather_whole(part).cpu() if isinstance(part, torch.Tensor) else None
    )


def _move(part: Any, device: torch.device) -> Any:
    """Return what a part's own method ``to`` returns for `device`; None for a part without it."""
    if not callable(getattr(part, "to", None)):
        return None
    try:
        return part.to(device, non_blocking=True)
    except TypeError:  # a method that takes only a device
        return part.to(device)


def _pin(part: Any) -> Any:
    """Return a copy of a part in pinned memory; a tensor that can't be pinned (it is on a device,
    sparse or nested) as it is; None for another object without a method ``pin_memory``."""
    if isinstance(part, torch.Tensor):
        if part.device != CPU or part.layout != torch.strided or part.is_nested:
            return part
        # The copy has the tensor's strides. With a stride of 0, as of an expanded tensor, several
        # numbers would have one place in it.
        return (part.contiguous() if 0 in part.stride() else part).pin_memory()
    return part.pin_memory() if callable(getattr(part, "pin_memory", None)) else None


def _change_parts(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return a batch with `change` of each part in the part's place.

    `change` returns the new part, or None for a container to copy and look into (tuple, list, dict,
    mutable mapping or dataclass), and for any other object, which is passed on as it is.
    """
    new_part = change(batch)
    if new_part is not None:
        return new_part
    if isinstance(batch, dict):
        return {key: _change_parts(value, change) for key, value in batch.items()}
    if isinstance(batch, MutableMapping):  # a UserDict
        mapping = copy.copy(batch)
        for name, content in [*getattr(mapping, "__dict__", {}).items()]:
            if isinstance(content, (dict, MutableMapping)):  # the script's own one, still
                setattr(mapping, name, copy.copy(content))
        mapping.update({key: _change_parts(value, change) for key, value in batch.items()})
        return mapping
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*(_change_parts(value, change) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(_change_parts(value, change) for value in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        result = copy.copy(batch)  # a call of its class might not take all fields
        for field in fields(batch):
            part = _change_parts(getattr(batch, field.name), change)
            object.__setattr__(result, field.name, part)  # works for a frozen dataclass, too
        return result
    return batch
