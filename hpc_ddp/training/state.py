"""State of the user's objects: taking it out, checking it, putting it back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hpc_ddp.run.errors import HpcDdpError

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_SHOWN = 8


def unwrap(thing: Any) -> Any:
    """Return the module inside a DDP wrapper, so that keys have no ``module.`` in front."""
    return thing.module if isinstance(thing, DistributedDataParallel) else thing


def collect(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of each object by name."""
    return {name: unwrap(each).state_dict() for name, each in objects.items()}


def check_loadable(value: Any, where: str) -> None:
    """Refuse at the first save what ``weights_only`` would refuse at the first restore.

    Raises
    ------
    HpcDdpError
        names the entry that is neither a tensor nor a plain value
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_loadable(key, f"a key of {where}")
            check_loadable(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            check_loadable(item, where)
    elif type(value) not in _ATOMS and not isinstance(value, torch.Tensor):
        raise HpcDdpError(
            f"{where} is a {type(value).__module__}.{type(value).__name__}; accepted in a"
            " state_dict: tensors, numbers, text, None, and lists and dicts of them",
            hint="return plain values from state_dict, for instance float(x) or x.item()",
        )


def put_back(objects: Mapping[str, Any], saved: Mapping[str, Any], step: int) -> None:
    """Load the states of a checkpoint (made at `step`) into the objects.

    Raises
    ------
    HpcDdpError
        the checkpoint belongs to other objects: names the keys and shapes that differ
    """
    if set(objects) != set(saved):
        raise _other(
            step, f"it holds {', '.join(sorted(saved))}, tracked are {', '.join(sorted(objects))}"
        )
    for name, wrapped in objects.items():
        each = unwrap(wrapped)
        if isinstance(each, torch.nn.Module):
            differences = _differences(each.state_dict(), saved[name])
            if differences:
                more = f", and {len(differences) - _SHOWN} more" if differences[_SHOWN:] else ""
                raise _other(step, f"{name}: {', '.join(differences[:_SHOWN])}{more}")
        try:
            each.load_state_dict(saved[name])
        except (ValueError, RuntimeError, KeyError) as error:
            raise _other(step, f"{name}: {error}") from error


def _differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    found = [f"{key} is not in the checkpoint" for key in here if key not in there]
    found += [f"{key} is not in the model" for key in there if key not in here]
    for key in here.keys() & there.keys():
        mine, saved = getattr(here[key], "shape", None), getattr(there[key], "shape", None)
        if mine != saved:
            found.append(f"{key} is {_shape(mine)} here and {_shape(saved)} in the checkpoint")
    return sorted(found)


def _shape(shape: Any) -> str:
    return "no tensor" if shape is None else str(tuple(shape))


def _other(step: int, how: str) -> HpcDdpError:
    return HpcDdpError(
        f"the checkpoint of step {step} is not of this program's objects: {how}",
        hint="start another run, or undo the change to the script",
    )
