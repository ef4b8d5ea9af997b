"""State dicts without their tensors, in plain values that ``weights_only`` loads again."""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.training.checkpoint.storage.layout import OWN
from hpc_ddp.training.devices import is_accelerator
from hpc_ddp.training.models.dtensor import is_sharded

# What stands in a tensor's place in the stored tree; the number is its device's of the worker's.
TENSOR, ON_DEVICE = "<tensor>", "<tensor on accelerator {}>"
_MARK = re.compile(r"<tensor(?: on (?:an )?accelerator(?: (\d+))?)?>")

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_DICTS = (dict, Counter, OrderedDict)  # those that weights_only knows; others become a dict
_LARGEST = 1 << 2039  # weights_only reads whole numbers below it


def take_apart(
    value: Any,
    where: str,
    tensors: dict[str, torch.Tensor],
    devices: Sequence[torch.device] = (),
) -> Any:
    """Return a copy of `value`, a state dict or an entry of one, with a mark in place of each
    tensor. The tensor is added to `tensors` by its place: `where` and the keys below it, joined by
    dots.

    The mark is `TENSOR`, or `ON_DEVICE` with the index of the tensor's accelerator in this worker's
    `devices` (0 if it is not in them). Mappings of other types than `_DICTS` become dicts, lists,
    tuples and sets of other types plain ones; numpy's float64, whole numbers and bools become
    Python's.

    Raise HpcDdpError for a named tuple or a defaultdict, which would come back as another type; for
    a tensor that is sparse, quantized or a wrapper, or whose name is reserved or used twice; and
    for what ``weights_only`` would refuse to load. The tensors before it are in `tensors`.
    """
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            raise refusal(where, f"a tensor of layout {value.layout}")
        if value.is_quantized:
            raise refusal(where, "a quantized tensor")
        if is_traceable_wrapper_subclass(value) and not is_sharded(value):
            raise refusal(where, kind_of(value))
        if where.endswith(OWN):
            raise refusal(where, f"a tensor with {OWN} at the end of its name")
        if where in tensors:
            raise refusal(where, "the second one of this name")
        tensors[where] = value
        number = devices.index(value.device) if value.device in devices else 0
        return ON_DEVICE.format(number) if is_accelerator(value.device) else TENSOR
    if isinstance(value, defaultdict) or hasattr(value, "_fields"):  # a named tuple's
        raise refusal(where, f"{kind_of(value)}, which would come back as a plain one")
    if isinstance(value, Mapping):
        for key in value:
            _check_atom(key, f"a key of {where}")
        items: Any = {k: take_apart(item, f"{where}.{k}", tensors, devices)
                      for k, item in value.items()}  # fmt: skip
        kind: Any = type(value)
        return kind(items) if kind in _DICTS else items
    if type(value) is list and _is_of_numbers(value):  # a million of them, one by one, take 1 s
        return value.copy()
    if isinstance(value, (list, tuple)):
        row = [take_apart(item, f"{where}.{i}", tensors, devices) for i, item in enumerate(value)]
        return tuple(row) if isinstance(value, tuple) else row
    if isinstance(value, set):
        return {take_apart(item, f"{where}.{item}", tensors, devices) for item in value}
    if _is_numpys_equal(value):
        return value.item()
    _check_atom(value, where)
    return value


def _is_numpys_equal(value: Any) -> bool:
    """Return whether a value is a number of numpy's that computes as Python's own: a float64, as a
    schedule by ``np.cos`` makes for a learning rate, a whole number, or a bool."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.float64, numpy.integer, numpy.bool_))


def _is_of_numbers(row: list[Any]) -> bool:
    """Return whether all entries are floats, or all are whole numbers that can be loaded again;
    False for an empty list."""
    kinds = set(map(type, row))
    if kinds == {int}:
        return bool(min(row) > -_LARGEST and max(row) < _LARGEST)
    return kinds == {float}


def _check_atom(value: Any, where: str) -> None:
    """Raise HpcDdpError for a value at `where` that could be saved, but that ``weights_only`` would
    not load again, or that would be taken for a tensor's mark."""
    if type(value) not in _ATOMS:
        raise refusal(where, kind_of(value))
    if type(value) is bytes and not value:
        raise refusal(where, "b'', which can't be loaded again")
    if type(value) is int and not -_LARGEST < value < _LARGEST:
        raise refusal(where, "a number of 2,040 bits or more, which can't be loaded again")
    if is_mark(value):
        raise refusal(where, f"the text {value}, which stands for a tensor")


def is_mark(entry: Any) -> bool:
    """Return whether an entry of a tree stands for a tensor."""
    return type(entry) is str and bool(_MARK.fullmatch(entry))


def device_number(mark: str) -> int | None:
    """Return, from a tensor's mark, the index of its accelerator in the worker's devices; None for
    the CPU."""
    match = _MARK.fullmatch(mark)
    assert match is not None
    return None if mark == TENSOR else int(match[1] or 0)


def kind_of(value: Any) -> str:
    """Return the type of a value for people, as ``a numpy.float32``."""
    return f"a {type(value).__module__}.{type(value).__name__}"


def refusal(where: str, kind: str) -> HpcDdpError:
    """Return the error for an entry at `where` that can't be saved; `kind` says what it is."""
    return HpcDdpError(
        f"{where} is {kind}; accepted in a state_dict: tensors, numbers, text, bytes, None, and"
        " lists and dicts of them",
        hint="return plain values from state_dict, as float(x), x.item(), dict(x) or list(x)",
    )
