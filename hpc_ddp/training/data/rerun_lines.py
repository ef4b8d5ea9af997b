"""Lines of the script that a resume runs a second time: between two loops, atop an epoch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class Settings:
    """The settings of optimizers and schedulers among the tracked `objects`, as a checkpoint has
    them, to be put back behind lines of the script that had run before it."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = {
            name: thing
            for name, thing in objects.items()
            if isinstance(thing, (Optimizer, LRScheduler))
        }
        self._settings = {name: _settings_of(thing) for name, thing in self._objects.items()}

    def put_back(self, say: Callable[[str], None]) -> None:
        """Put the settings back, and call `say` with a line for each object of which some were
        changed."""
        for name, thing in self._objects.items():
            earlier, current = self._settings[name], _settings_of(thing)
            changed = [key for key in earlier if not _is_equal(earlier[key], current.get(key))]
            if changed:
                if isinstance(thing, Optimizer):
                    _put_settings(thing, earlier)
                else:
                    thing.load_state_dict({**current, **earlier})
                key = changed[0]
                say(
                    f"{name}: {key} is {earlier[key]} again, as in the checkpoint: lines between"
                    " two loops, or at the top of an epoch, have run a second time"
                )


def _settings_of(thing: Any) -> dict[str, Any]:
    """Return a copy of a scheduler's state, or of the settings of an optimizer's groups, by names
    as ``lr`` or, for those of further groups, ``lr of group 1``."""
    if isinstance(thing, LRScheduler):
        return copy.deepcopy(thing.state_dict())
    return {
        _name_of(key, number): copy.deepcopy(setting)
        for number, group in enumerate(thing.param_groups)
        for key, setting in group.items()
        if key != "params"
    }


def _name_of(key: str, group: int) -> str:
    return f"{key} of group {group}" if group else key


def _put_settings(optimizer: Optimizer, settings: Mapping[str, Any]) -> None:
    """Give the groups of an optimizer the `settings` of `_settings_of`; tensors stay the same
    objects."""
    for number, group in enumerate(optimizer.param_groups):
        for key in group.keys() - {"params"}:
            setting = settings.get(_name_of(key, number), group[key])
            if isinstance(group[key], torch.Tensor):
                group[key].data.copy_(torch.as_tensor(setting))
            else:
                group[key] = setting


def _is_equal(first: Any, second: Any) -> bool:
    """Return whether two settings are equal, also where tensors, arrays or objects of the
    script's own classes are among them."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_is_equal(first[k], second[k]) for k in first)
    if isinstance(first, (list, tuple)):
        pairs = zip(first, second, strict=False)
        return len(first) == len(second) and all(_is_equal(*pair) for pair in pairs)
    comparison: object = type(first).__eq__
    if comparison is object.__eq__ and hasattr(first, "__dict__"):
        return first is second or _is_equal(vars(first), vars(second))
    if isinstance(first, float) and math.isnan(first):
        return math.isnan(second)
    is_equal = first == second
    return bool(is_equal.all() if hasattr(is_equal, "all") else is_equal)  # an array's, for one
