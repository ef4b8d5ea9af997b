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
    place: str,
    tensors: dict[str, torch.Tensor],
    devices: Sequence[torch.device] = (),
) -> Any:
    """Return a copy of `value`, a state dict or an entry of one, with a mark in place of each
    tensor (`_take_tensor`), and add the tensors to `tensors` by their places: `place` and the keys
    below it, joined by dots. `devices` are this worker's.

    Mappings of other types than `_DICTS` become dicts, lists, tuples and sets of other types plain
    ones; numpy's float64, whole numbers and bools become Python's.

    Raise HpcDdpError for a named tuple or a defaultdict, which would come back as another type; for
    a set with tensors; for a tensor as `_take_tensor` does; and for what ``weights_only`` would
    refuse to load. `tensors` then has those that come before the refused entry.
    """
    if isinstance(value, torch.Tensor):
        return _take_tensor(value, place, tensors, devices)
    if isinstance(value, defaultdict) or hasattr(value, "_fields"):  # which a named tuple has
        raise refusal(place, f"{kind_of(value)}, which would come back as a plain one")
    if isinstance(value, Mapping):
        for key in value:
            _check_atom(key, f"a key of {place}")
        entries: Any = {k: take_apart(entry, f"{place}.{k}", tensors, devices)
                        for k, entry in value.items()}  # fmt: skip
        kind: Any = type(value)
        return kind(entries) if kind in _DICTS else entries
    if type(value) is list and _is_of_numbers(value):  # a million of them, one by one, take 1 s
        return value.copy()
    if isinstance(value, (list, tuple)):
        row = [take_apart(entry, f"{place}.{i}", tensors, devices) for i, entry in enumerate(value)]
        return tuple(row) if isinstance(value, tuple) else row
    if isinstance(value, set):
        tensors_here: dict[str, torch.Tensor] = {}
        entries = {take_apart(entry, f"{place}.{entry}", tensors_here, devices) for entry in value}
        if tensors_here:
            raise refusal(place, "a set of tensors, which has no order")
        return entries
    if _is_numpys_equal(value):
        return value.item()
    _check_atom(value, place)
    return value


def _take_tensor(
    tensor: torch.Tensor,
    place: str,
    tensors: dict[str, torch.Tensor],
    devices: Sequence[torch.device],
) -> str:
    """Add a tensor to `tensors` under the name `place`. Return its mark: `TENSOR` on the CPU, else
    `ON_DEVICE` with the index of its accelerator in this worker's `devices` (0 if it is not in
    them). Raise HpcDdpError for a tensor that is sparse, quantized or of a wrapper's class, or
    whose name is reserved or taken."""
    if tensor.layout != torch.strided:
        raise refusal(place, f"a tensor of layout {tensor.layout}")
    if tensor.is_quantized:
        raise refusal(place, "a quantized tensor")
    if is_traceable_wrapper_subclass(tensor) and not is_sharded(tensor):
        raise refusal(place, kind_of(tensor))
    if place.endswith(OWN):
        raise refusal(place, f"a tensor with {OWN} at the end of its name")
    if place in tensors:
        raise refusal(place, "the second one of this name")
    tensors[place] = tensor
    number = devices.index(tensor.device) if tensor.device in devices else 0
    return ON_DEVICE.format(number) if is_accelerator(tensor.device) else TENSOR


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


def _check_atom(value: Any, place: str) -> None:
    """Raise HpcDdpError for a value that is not of `_ATOMS`, that ``weights_only`` would not load
    again, or that would be taken for a tensor's mark. The message names its `place`."""
    if type(value) not in _ATOMS:
        raise refusal(place, kind_of(value))
    if type(value) is bytes and not value:
        raise refusal(place, "b'', which can't be loaded again")
    if type(value) is int and not -_LARGEST < value < _LARGEST:
        raise refusal(place, "a number of 2,040 bits or more, which can't be loaded again")
    if is_mark(value):
        raise refusal(place, f"the text {value}, which stands for a tensor")


def is_mark(entry: Any) -> bool:
    """Return whether an entry of a tree stands for a tensor."""
    return type(entry) is str and bool(_MARK.fullmatch(entry))


def device_number(mark: str) -> int | None:
    """Return, from a tensor's mark, the index of its accelerator in the worker's devices (0 for a
    mark of an older version, which has none); None for the CPU."""
    match = _MARK.fullmatch(mark)
    assert match is not None
    return None if mark == TENSOR else int(match[1] or 0)


def kind_of(value: Any) -> str:
    """Return the type of a value for people, as ``a numpy.float32``."""
    return f"a {type(value).__module__}.{type(value).__name__}"


def refusal(place: str, kind: str) -> HpcDdpError:
    """Return the error for an entry at `place` that can't be saved; `kind` names its kind."""
    return HpcDdpError(
        f"{place} is {kind}; accepted in a state_dict: tensors, numbers, text, bytes, None, and"
        " lists and dicts of them",
        hint="return plain values from state_dict, as float(x), x.item(), dict(x) or list(x)",
    )
