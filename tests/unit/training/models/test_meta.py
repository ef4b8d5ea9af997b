"""Models on torch's meta device get their numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.devices import CPU
from hpc_ddp.training.models.meta import materialize


class Buffers(nn.Module):
    """A module with a buffer of each kind of number, and no reset_parameters to fill them."""

    waves: torch.Tensor
    places: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("places", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))


def fill(module: nn.Module) -> None:
    for buffer in module.buffers(recurse=False):
        buffer.copy_(torch.arange(len(buffer)))


def test_a_module_without_reset_parameters_is_filled_by_init() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Buffers())
    materialize(model, CPU, fill)
    buffers: Any = model[1]
    assert buffers.waves.tolist() == [0, 1]
    assert buffers.places.tolist() == [0, 1, 2]
    assert buffers.mask.tolist() == [False, True, True]
    assert model[0].weight.requires_grad
    assert not any(parameter.isnan().any() for parameter in model.parameters())


@pytest.mark.parametrize("missing", ["waves", "places", "mask"])
def test_a_buffer_that_nothing_fills_is_named(missing: str) -> None:
    def fill_others(module: nn.Module) -> None:
        for name, buffer in module.named_buffers(recurse=False):
            if name != missing:
                buffer.zero_()

    with torch.device("meta"):
        model = nn.Sequential(Buffers())
    with pytest.raises(UsageError, match=f"nothing gives numbers to 0.{missing} of a Buffers"):
        materialize(model, CPU, fill_others)


def test_a_table_may_have_the_largest_number() -> None:
    """As bytes have 255, and weights of 8 bits that are scaled by their largest one 127."""

    def fill_bytes(module: nn.Module) -> None:
        for buffer in module.buffers(recurse=False):
            buffer.copy_(torch.arange(256))

    with torch.device("meta"):
        model = nn.Module()
        model.register_buffer("bytes", torch.zeros(256, dtype=torch.uint8))
    materialize(model, CPU, fill_bytes)
    assert model.get_buffer("bytes").tolist() == [*range(256)]


def test_a_module_that_is_not_on_meta_stays_as_it_is() -> None:
    layer = nn.Linear(2, 2)
    before = layer.weight.clone()
    materialize(layer, CPU, None)
    assert torch.equal(layer.weight, before)


def test_a_tensor_without_numbers_needs_none() -> None:
    with torch.device("meta"):
        model = nn.Module()
        model.register_buffer("ids", torch.zeros(0, dtype=torch.int64))
    materialize(model, CPU, lambda module: None)
    assert model.get_buffer("ids").shape == (0,)
