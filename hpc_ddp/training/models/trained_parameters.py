"""The parameters that the optimizers of a script train, and those that its loop has frozen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class TrainedParameters:
    """The parameters that optimizers train, whether they need gradients at the moment or not.

    A GAN ends each step with a discriminator without gradients, which is trained all the same. A
    frozen model below an adapter is often in an optimizer, too, but the optimizer never has a state
    for it. So a parameter counts as trained if an optimizer has a state for it, or if it needed a
    gradient at a call of `add`: plain SGD has no states.
    """

    def __init__(self) -> None:
        self._optimizers: list[Optimizer] = []
        self._with_gradients: set[int] = set()
        self._settings: dict[int, list[dict[str, Any]]] = {}  # by id of the optimizer
        # By id: whether a parameter needed gradients, and whether a module was in training mode, at
        # the last `note_flags`.
        self._as_made: dict[int, bool] = {}
        self._versions: dict[int, int] = {}  # torch's count of each parameter's changes, at `add`

    def add(self, objects: Iterable[Any]) -> None:
        """Note the optimizers among a script's objects, with their plain settings and the
        parameters that need gradients now; and of the modules among the objects the flags
        (`note_flags`) and versions of the parameters. Other objects are passed over."""
        for thing in objects:
            if isinstance(thing, Optimizer):
                self._optimizers.append(thing)
                self._settings[id(thing)] = [
                    {key: group[key] for key in thing.defaults if _is_plain(group.get(key))}
                    for group in thing.param_groups
                ]
                parameters = parameters_of(thing)
                self._with_gradients |= {id(p) for p in parameters if p.requires_grad}
            elif isinstance(thing, torch.nn.Module):
                self.note_flags(thing)
                plain = (p for p in thing.parameters() if not p.is_inference())
                self._versions |= {id(p): p._version for p in plain}

    def note_flags(self, module: torch.nn.Module) -> None:
        """Note the flags of a module as the script has made them, in place of those noted before:
        which of its parameters need gradients, and which of its parts are in training mode."""
        self._as_made |= {id(p): p.requires_grad for p in module.parameters()}
        self._as_made |= {id(part): part.training for part in module.modules()}

    def flag_as_made(self, thing: object, flag: bool) -> bool:
        """Return the flag that `note_flags` has noted of a parameter or of a part of a module;
        return `flag`, the present one, if none was noted."""
        return self._as_made.get(id(thing), flag)

    def settings(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Return the plain settings of each of an optimizer's groups, by name, as they were at
        `add`; [] for an optimizer that was not added."""
        return self._settings.get(id(optimizer), [])

    def changes_of(self, module: torch.nn.Module) -> dict[str, bool]:
        """Return those parameters of a module, by name, of which the loop has changed whether they
        need gradients, as it unfreezes layers; each with whether it needs them now."""
        flags = module.named_parameters(remove_duplicate=False)
        return self._changed((key, id(p), p.requires_grad) for key, p in flags)

    def state_of(self, thing: Any) -> dict[str, Any]:
        """Return the state dict of an object. To a module's, add the parameters that it leaves out
        although they have changed since `add`: a hook may drop parameters that are frozen, or were
        frozen at first. Add nothing to that of a class with a ``load_state_dict`` of its own."""
        entries: dict[str, Any] = thing.state_dict()
        if getattr(type(thing), "load_state_dict", None) is not torch.nn.Module.load_state_dict:
            return entries
        parameters = [*thing.named_parameters(remove_duplicate=False)]
        listed = {id(parameter) for key, parameter in parameters if key in entries}
        left_out = {key: p for key, p in parameters if id(p) in self._versions.keys() - listed}
        trained = self.ids() if left_out else set()
        for key, parameter in left_out.items():
            # The version does not count the changes that a CUDA graph makes.
            is_trained = parameter.requires_grad and id(parameter) in trained
            if is_trained or parameter._version != self._versions[id(parameter)]:
                entries[key] = parameter.detach()
        return entries

    def modes_of(self, module: torch.nn.Module) -> dict[str, bool]:
        """Return those parts of a module, by name, of which the loop has changed whether they are
        in training mode, as it stops the means of batch norm; each with its present mode."""
        return self._changed((key, id(m), m.training) for key, m in module.named_modules())

    def _changed(self, flags: Iterable[tuple[str, int, bool]]) -> dict[str, bool]:
        """Return, by name, those of the `flags` (each a name, an id and a flag) that differ from
        the noted flag of the id. A flag of which none was noted counts as unchanged."""
        return {key: flag for key, number, flag in flags if self._as_made.get(number, flag) != flag}

    def ids(self) -> set[int]:
        """Return the ids of the parameters that count as trained now."""
        return self._with_gradients.union(
            id(parameter)
            for optimizer in self._optimizers
            for parameter in parameters_of(optimizer)
            if optimizer.state.get(parameter)
        )


def _is_plain(setting: Any) -> bool:
    """Return whether a setting is a number, a bool, or a tuple of them."""
    parts = setting if isinstance(setting, tuple) else (setting,)
    return all(isinstance(part, (int, float)) for part in parts)


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return all parameters of an optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
