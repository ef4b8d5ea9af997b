"""Which parameters count as trained."""

from __future__ import annotations

import torch
from torch import nn

from hpc_ddp.training.models.trained_parameters import TrainedParameters


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
