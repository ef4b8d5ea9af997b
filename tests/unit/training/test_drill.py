"""The record of a drill."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpc_ddp.training import drill
from unit.training.fakes import FakeDTensor


def test_a_drill_compares_a_ranks_part_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill, "is_sharded", lambda tensor: isinstance(tensor, FakeDTensor))
    tensors: Any = [FakeDTensor(), torch.ones(1)]
    assert drill.size_of(tensors) == 7.0
