"""Batches of any shape, pinned and moved to a device."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch

from hpc_ddp.training.devices import CPU, is_accelerator
from hpc_ddp.training.models.dtensor import gathered


def rows_of(tensor: torch.Tensor, indices: list[int]) -> torch.Tensor:
    """Return a copy of the rows of a tensor at some indices, on the tensor's device. The host does
    not wait for an accelerator."""
    if not is_accelerator(tensor.device):
        return tensor[indices]
    index = torch.tensor(indices, dtype=torch.int64, device="cpu").pin_memory()
    return tensor[index.to(tensor.device, non_blocking=True)]


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a copy of a batch with its tensors on `device`. The host does not wait for tensors
    that come from pinned memory.

    Tensors are looked for in tuples, lists, dicts (whose copies are plain ones), other mutable
    mappings and dataclasses; any other object stays the same one. An object with a method ``to``
    moves itself: Transformers' BatchEncoding, a Batch of PyG, a packed sequence.
    """
    return _changed(batch, partial(_moved, device=device))


def pinned(batch: Any) -> Any:
    """Return a copy of a batch with its tensors in pinned memory, where they can be. Tensors are
    looked for where `to_device` does; an object with a method ``pin_memory`` pins itself."""
    return _changed(batch, _pinned)


def to_host(batch: Any) -> Any:
    """Return a copy of a batch with its tensors in the host's memory, without their graphs. A
    sharded tensor becomes a whole one, for which all its ranks must call this. Tensors are looked
    for where `to_device` does."""
    return _changed(
        batch, lambda part: gathered(part).cpu() if isinstance(part, torch.Tensor) else None
    )


def _moved(value: Any, device: torch.device) -> Any:
    """Return a value on a device by its own method ``to``; None for a value without one."""
    if not callable(getattr(value, "to", None)):
        return None
    try:
        return value.to(device, non_blocking=True)
    except TypeError:  # it knows of a device alone
        return value.to(device)


def _pinned(value: Any) -> Any:
    """Return a copy in pinned memory; a tensor that can't be pinned as it is; None for a value
    without ``pin_memory``."""
    if isinstance(value, torch.Tensor):
        if value.device != CPU or value.layout != torch.strided or value.is_nested:
            return value
        # Pinned memory has the tensor's strides: the numbers of an expanded one would meet there.
        return (value.contiguous() if 0 in value.stride() else value).pin_memory()
    return value.pin_memory() if callable(getattr(value, "pin_memory", None)) else None


def _changed(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a batch whose parts are changed; other objects in it stay the same.

    `change` returns the new part, or None for an object to look into (tuple, list, dict, mutable
    mapping or dataclass), or to leave alone.
    """
    changed = change(batch)
    if changed is not None:
        return changed
    if isinstance(batch, dict):
        return {key: _changed(value, change) for key, value in batch.items()}
    if isinstance(batch, MutableMapping):  # a UserDict
        mapping = copy.copy(batch)
        mapping.update({key: _changed(value, change) for key, value in batch.items()})
        return mapping
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_changed(value, change) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(_changed(value, change) for value in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        result = copy.copy(batch)  # its fields need not be arguments of its class
        for field in fields(batch):
            value = _changed(getattr(batch, field.name), change)
            object.__setattr__(result, field.name, value)  # it may be frozen
        return result
    return batch
