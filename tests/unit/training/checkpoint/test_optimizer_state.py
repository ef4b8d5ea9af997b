"""The state of an optimizer that torch has loaded, with the types that it was stored in."""

from __future__ import annotations

import torch

from hpc_ddp.training.checkpoint.optimizer_state import _with_types


def test_an_average_keeps_its_type_on_its_parameters_device() -> None:
    loaded = {"mean": torch.zeros(2, dtype=torch.bfloat16, device="meta"), "step": torch.zeros(())}
    stored = {"mean": torch.ones(2), "step": torch.ones(())}
    state = _with_types(loaded, stored, None)
    assert (state["mean"].dtype, state["mean"].device.type) == (torch.float32, "meta")
    assert state["step"].device.type == "cpu"
