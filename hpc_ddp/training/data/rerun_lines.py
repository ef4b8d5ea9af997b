"""Lines of the script that a resume runs a second time: between two loops, atop an epoch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpc_ddp.training.checkpoint.optimizer_state import overwrite_tensors

if TYPE_CHECKING:
    from hpc_ddp.training.data.batch_plan import Position
    from hpc_ddp.training.data.call_order import CallOrder

_PLAIN = (Number, str, bytes, type(None))  # types of values that are settings
_MOST = 1024  # the most numbers of a tensor or array that is a setting, and no replay buffer


class Resume:
    """Puts back, after a resume, the changes by lines of the script that had also run before the
    checkpoint. Without `objects` it does nothing.

    The settings of the tracked `objects` are put back here, models and optimizers by a call of
    `put_tensors_back`, which returns a line of text for each model or optimizer that had changed.
    With a true argument `put_tensors_back` leaves alone those of which only a setting has changed.
    `say` prints a line for the user. The checkpoint is of the loop of number `loops`.
    """

    def __init__(
        self,
        objects: Mapping[str, Any] | None = None,
        put_tensors_back: Callable[[bool], list[str]] = lambda accepts_settings: [],
        say: Callable[[str], None] = lambda line: None,
        loops: int = 0,
    ) -> None:
        self._settings, self._put_tensors_back = Settings(objects or {}), put_tensors_back
        self._say, self._loops = say, loops
        self._is_pending = bool(objects)  # until the loop of the checkpoint has begun
        self._was_behind = False  # the checkpoint's script, between that loop and the next one

    def begin_loop(self, calls: CallOrder, position: Position, is_over: bool) -> bool:
        """Called as the script begins a loop, of which nothing is left if `is_over`. If the
        checkpoint is in this loop, or at its end, put all back, once; but a first loop keeps the
        settings that the lines before it have set, with a warning. If the loop goes on, clear
        `position.is_behind`. Return whether it goes on, and is the checkpoint's."""
        is_resumed = self._is_pending and calls.is_checkpoints
        if is_resumed:
            self.put_back(accepts_settings=max(calls.number, self._loops) < 2)
        self._was_behind = is_resumed and is_over and position.is_behind
        position.is_behind &= is_over
        self._is_pending &= not calls.is_checkpoints
        return is_resumed and not is_over

    def put_back(self, accepts_settings: bool = False) -> None:
        """Put settings, models and optimizers back, and print a line for each that had changed.
        With `accepts_settings` the changed settings stay, with a warning for each object."""
        settings = self._settings
        if accepts_settings:
            settings.accept_changes(self._say)
        else:
            settings.put_back(self._say)
        for line in self._put_tensors_back(accepts_settings):
            self._say(line)
            # Without a line: `put_tensors_back` loads an optimizer's settings, too.
            settings.put_back(lambda line: None)

    def go_behind_loop(self, position: Position) -> None:
        """Called before a save behind a loop. If the checkpoint was saved at such a place, too, the
        lines between the loop and the save have run a second time: put all back. Then note in
        `position` that the script is behind the loop."""
        if self._was_behind:
            self.put_back()
        position.is_behind, self._was_behind = True, False


class Settings:
    """Keeps a copy of the values, as a checkpoint has just set them, that lines of a script may
    change in the tracked `objects`: settings of optimizers, and states of schedulers and of the
    script's own objects. `put_back` restores them. Makes each object's state once or twice, so
    errors of their ``state_dict`` come through."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = {name: thing for name, thing in objects.items() if _has_settings(thing)}
        self._settings = {name: _settings_of(thing) for name, thing in self._objects.items()}

    def put_back(self, say: Callable[[str], None]) -> None:
        """Put the settings back, and call `say` with a line for each object of which a setting had
        changed; the line names the first one."""
        for name, key, earlier, current in self._changes():
            _put_settings(self._objects[name], copy.deepcopy({**current, **earlier}))
            say(
                f"{name}: {key} is {earlier[key]!s:.60} again, as in the checkpoint: lines between"
                " two loops, or at the top of an epoch, have run a second time"
            )

    def accept_changes(self, say: Callable[[str], None]) -> None:
        """Keep the present settings in place of the checkpoint's from now on, and call `say` with a
        warning for each object of which a setting differs; the warning names the first one."""
        for name, key, earlier, current in self._changes():
            self._settings[name] = current
            say(
                f"WARNING: {name}: {key} is {current.get(key)!s:.60}, and {earlier[key]!s:.60} in"
                " the checkpoint: lines behind run.track have set it"
            )

    def _changes(self) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
        """Yield for each object with changed settings: its name, the key of the first changed one,
        the kept settings, and the present ones. A setting that is new counts as unchanged."""
        for name, thing in self._objects.items():
            earlier, current = self._settings[name], _settings_of(thing)
            keys = (key for key in earlier if not _is_equal(earlier[key], current.get(key)))
            if (key := next(keys, None)) is not None:
                yield name, key, earlier, current


def _has_settings(thing: Any) -> bool:
    """Return whether an object has settings. It has if it is an optimizer or scheduler, or another
    object with a plain state, as a meter of the script's, but no model, and nothing to iterate
    over: an iteration changes its state."""
    if isinstance(thing, (Optimizer, LRScheduler)):
        return True
    has_state = not isinstance(thing, torch.nn.Module) and hasattr(thing, "state_dict")
    if not has_state or hasattr(thing, "__iter__") or hasattr(thing, "__getitem__"):
        return False
    state = thing.state_dict()
    return isinstance(state, dict) and _is_plain(state)


def _is_plain(state: Any) -> bool:
    """Return whether a state, also within dicts, lists and tuples, has only numbers, texts, None,
    and tensors or arrays of at most `_MOST` numbers."""
    if isinstance(state, dict):
        return all(map(_is_plain, state.values()))
    if isinstance(state, (list, tuple)):
        return all(map(_is_plain, state))
    # `size` of an array is a number; of other objects it may be a method, or missing.
    count = state.numel() if isinstance(state, torch.Tensor) else getattr(state, "size", _MOST + 1)
    return isinstance(state, _PLAIN) or (isinstance(count, int) and count <= _MOST)


def _settings_of(thing: Any) -> dict[str, Any]:
    """Return a copy of an object's state dict; for an optimizer a copy of the settings of its
    groups, by `_name_of` key and group."""
    if isinstance(thing, Optimizer):
        return {
            _name_of(key, number): copy.deepcopy(setting)
            for number, group in enumerate(thing.param_groups)
            for key, setting in group.items()
            if key != "params"
        }
    return copy.deepcopy(dict(thing.state_dict()))


def _name_of(key: str, group: int) -> str:
    """Return ``lr`` for the first group, 0, ``lr of group 1`` for the second, …"""
    return f"{key} of group {group}" if group else key


def _put_settings(thing: Any, settings: dict[str, Any]) -> None:
    """Load the `settings` of `_settings_of` into an object; an optimizer's tensors, also those in
    lists, stay the same objects."""
    if isinstance(thing, Optimizer):
        for number, group in enumerate(thing.param_groups):
            for key in group.keys() - {"params"}:
                setting = settings[_name_of(key, number)]
                if isinstance(group[key], torch.Tensor):
                    group[key].data.copy_(torch.as_tensor(setting))
                else:
                    group[key] = overwrite_tensors(group[key], setting)
    else:
        thing.load_state_dict(settings)


def _is_equal(first: Any, second: Any) -> bool:
    """Return whether two settings are equal. Tensors and arrays are, if they have the same shape
    and equal elements; containers, and objects of classes without an ``__eq__``, if their contents
    are. NaN equals NaN in all of them."""
    are_tensors = isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
    if not are_tensors and isinstance(first, Number) and isinstance(second, Number):
        return bool(first == second) or (first != first and second != second)  # two NaN
    if not are_tensors and type(first) is not type(second):  # a Parameter is a tensor, too
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_is_equal(first[k], second[k]) for k in first)
    if isinstance(first, (list, tuple)):
        pairs = zip(first, second, strict=False)
        return len(first) == len(second) and all(_is_equal(*pair) for pair in pairs)
    if are_tensors or (hasattr(first, "shape") and hasattr(first, "size")):
        if first.shape != second.shape:
            return False
        return bool(((first == second) | ((first != first) & (second != second))).all())
    comparison: object = type(first).__eq__
    if comparison is object.__eq__ and hasattr(first, "__dict__"):
        return first is second or _is_equal(vars(first), vars(second))
    return bool(first == second)
