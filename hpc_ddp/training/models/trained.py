"""Which parameters the optimizers of a script train."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class TrainedParameters:
    """The parameters that optimizers train, whether they need gradients at the moment or not.

    A GAN ends each step with a discriminator without gradients, which is trained all the same. But
    a frozen model below an adapter is often in an optimizer, too, which then never has a state for
    it. So those count that an optimizer has a state for, or that have needed a gradient at a call
    of `add`: plain SGD has no states.
    """

    def __init__(self) -> None:
        self._optimizers: list[Optimizer] = []
        self._with_gradients: set[int] = set()

    def add(self, objects: Iterable[Any]) -> None:
        """Add the optimizers among a script's objects; others are passed over."""
        for optimizer in objects:
            if isinstance(optimizer, Optimizer):
                self._optimizers.append(optimizer)
                parameters = parameters_of(optimizer)
                self._with_gradients |= {id(p) for p in parameters if p.requires_grad}

    def ids(self) -> set[int]:
        """Return the ids of the parameters that count as trained by now."""
        return self._with_gradients.union(
            id(parameter)
            for optimizer in self._optimizers
            for parameter in parameters_of(optimizer)
            if optimizer.state.get(parameter)
        )


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return all parameters of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def inner_optimizer(outer: Optimizer, tracked: Collection[Any]) -> str:
    """Return the attribute by which an optimizer has another one, as SAM has it, that is not
    `tracked`, and whose state is its own; '' without one, and where the outer one's class has a
    ``state_dict`` that may have that state."""
    if type(outer).state_dict is Optimizer.state_dict:
        for key, inner in vars(outer).items():
            is_apart = isinstance(inner, Optimizer) and inner.state is not outer.state
            if is_apart and all(inner is not thing for thing in tracked):
                return key
    return ""
