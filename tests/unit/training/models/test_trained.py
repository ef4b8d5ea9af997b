"""Which parameters count as trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hpc_ddp.training.models.trained import TrainedParameters, inner_optimizer


def test_a_parameter_is_trained_that_had_a_gradient_or_has_a_state() -> None:
    """A StyleGAN's need gradients only during their own phase of a step."""
    body, late, adapter = (nn.Parameter(torch.ones(2)) for _ in range(3))
    for parameter in (body, late):
        parameter.requires_grad_(False)
    optimizer = torch.optim.Adam([body, late, adapter])
    trained = TrainedParameters()
    trained.add([nn.Linear(2, 2), optimizer])
    for parameter in (body, late, adapter):
        parameter.requires_grad_(False)
    assert trained.ids() == {id(adapter)}
    late.grad = torch.ones(2)
    optimizer.step()
    assert trained.ids() == {id(adapter), id(late)}


class Nested(torch.optim.SGD):
    """As davda54/sam has it: the inner optimizer has the groups of the outer one."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.base = torch.optim.SGD(self.param_groups, momentum=0.9)


class Saving(Nested):
    def state_dict(self) -> Any:
        return {}


def test_an_optimizer_inside_another_one_is_named_unless_it_is_saved() -> None:
    parameters = [nn.Parameter(torch.ones(1))]
    outer = Nested(parameters)
    assert inner_optimizer(outer, [outer]) == "base"
    assert inner_optimizer(outer, [outer, outer.base]) == ""
    assert inner_optimizer(outer.base, []) == ""
    saving = Saving(parameters)
    assert inner_optimizer(saving, [saving]) == ""
    outer.base.state = outer.state
    assert inner_optimizer(outer, [outer]) == ""
