"""The moving average of a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.models.evaluation import averaged


def test_the_average_follows_weights_and_statistics() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = averaged(model, decay=0.5)
    average.update_parameters(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for value in model.state_dict().values():
            value.add_(2)
    average.update_parameters(model)
    for name, value in average.module.state_dict().items():
        added = 2 if name.endswith("num_batches_tracked") else 1
        assert torch.allclose(value, before[name] + added), name
    with pytest.raises(UsageError, match=r"decay is 1\.5"):
        averaged(model, 1.5)


def test_complex_weights_are_averaged() -> None:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    average = averaged(model, decay=0.9)
    average.update_parameters(model)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1 + 2j)
    average.update_parameters(model)
    torch.testing.assert_close(average.module.weight, before + 0.1 + 0.2j)
