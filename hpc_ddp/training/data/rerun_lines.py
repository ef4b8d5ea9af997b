"""Lines of the script that a resume runs a second time: between two loops, atop an epoch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from numbers import Number
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

# Types of a state that is no tensor, array or object of a library's.
_PLAIN = (Number, str, bytes, type(None))


class Settings:
    """The values that lines of a script may set in the tracked `objects`: settings of optimizers,
    states of schedulers, also of a script's own, and of models which parts train and which
    parameters need gradients. As a checkpoint has them, to be put back behind lines that had run
    before it."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = {name: thing for name, thing in objects.items() if _has_settings(thing)}
        self._settings = {name: _settings_of(thing) for name, thing in self._objects.items()}

    def put_back(self, say: Callable[[str], None]) -> None:
        """Put the settings back, and call `say` with a line for each object of which some were
        changed."""
        for name, key, earlier, current in self._changes():
            _put_settings(self._objects[name], {**current, **earlier})
            say(
                f"{name}: {_display_name(key)} is {earlier[key]} again, as in the checkpoint: lines"
                " between two loops, or at the top of an epoch, have run a second time"
            )

    def accept_changes(self, say: Callable[[str], None]) -> None:
        """Take the present settings of optimizers and schedulers for the checkpoint's, and call
        `say` with a warning for each object of which some differ. Models' flags stay: that a script
        evaluates behind run.track says nothing of the training."""
        for name, key, earlier, current in self._changes():
            if not isinstance(self._objects[name], torch.nn.Module):
                self._settings[name] = current
                say(
                    f"WARNING: {name}: {key} is {current.get(key)}, and {earlier[key]} in the"
                    " checkpoint: lines behind run.track have set it"
                )

    def _changes(self) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
        """Yield the name of each object with changed settings, the first of these, and the settings
        as they were and as they are."""
        for name, thing in self._objects.items():
            earlier, current = self._settings[name], _settings_of(thing)
            keys = (key for key in earlier if not _is_equal(earlier[key], current.get(key)))
            if (key := next(keys, None)) is not None:
                yield name, key, earlier, current


def _display_name(key: str) -> str:
    return key.replace(" of module.", " of ")


def _has_settings(thing: Any) -> bool:
    """Return whether an object has settings; one of the script's own class has, if it makes steps,
    and its state is plain."""
    if isinstance(thing, (torch.nn.Module, Optimizer, LRScheduler)):
        return True
    if not callable(getattr(thing, "step", None)):
        return False
    state = thing.state_dict()
    return isinstance(state, dict) and _is_plain(state)


def _is_plain(state: Any) -> bool:
    """Return whether a state has numbers and texts alone."""
    if isinstance(state, dict):
        return all(map(_is_plain, state.values()))
    if isinstance(state, (list, tuple)):
        return all(map(_is_plain, state))
    return isinstance(state, _PLAIN)


def _settings_of(thing: Any) -> dict[str, Any]:
    """Return a copy of a scheduler's state; of the settings of an optimizer's groups, by names as
    ``lr`` or, for those of further groups, ``lr of group 1``; or of a model's flags, by names as
    ``training of fc.1``."""
    if isinstance(thing, Optimizer):
        return {
            _name_of(key, number): copy.deepcopy(setting)
            for number, group in enumerate(thing.param_groups)
            for key, setting in group.items()
            if key != "params"
        }
    if isinstance(thing, torch.nn.Module):
        return {
            **{_of_part(key): part.training for key, part in thing.named_modules()},
            **{f"requires_grad of {key}": part.requires_grad for key, part in _parameters(thing)},
        }
    return copy.deepcopy(dict(thing.state_dict()))


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return model.named_parameters(remove_duplicate=False)


def _of_part(key: str) -> str:
    return f"training of {key or 'the model'}"


def _name_of(key: str, group: int) -> str:
    return f"{key} of group {group}" if group else key


def _put_settings(thing: Any, settings: dict[str, Any]) -> None:
    """Give an object the `settings` of `_settings_of`; an optimizer's tensors stay the same
    objects."""
    if isinstance(thing, Optimizer):
        for number, group in enumerate(thing.param_groups):
            for key in group.keys() - {"params"}:
                setting = settings[_name_of(key, number)]
                if isinstance(group[key], torch.Tensor):
                    group[key].data.copy_(torch.as_tensor(setting))
                else:
                    group[key] = setting
    elif isinstance(thing, torch.nn.Module):
        for key, part in thing.named_modules():
            if part.training != settings[_of_part(key)]:
                part.training = not part.training
        for key, parameter in _parameters(thing):
            if parameter.requires_grad != settings[f"requires_grad of {key}"]:
                parameter.requires_grad_(not parameter.requires_grad)
    else:
        thing.load_state_dict(settings)


def _is_equal(first: Any, second: Any) -> bool:
    """Return whether two settings are equal, also where tensors, arrays or objects of the
    script's own classes are among them."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, Number) and isinstance(second, Number):  # numpy's are some, too
        return bool(first == second) or (first != first and second != second)
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
    is_equal = first == second
    return bool(is_equal.all() if hasattr(is_equal, "all") else is_equal)  # an array's, for one
