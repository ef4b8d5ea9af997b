"""The record of a drill."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpc_ddp.training import drill
from hpc_ddp.training.run import Run
from unit.training.fakes import FakeDTensor


def test_a_drill_compares_a_ranks_part_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill, "is_sharded", lambda tensor: isinstance(tensor, FakeDTensor))
    tensors: Any = [FakeDTensor(), torch.ones(1)]
    assert drill.size_of(tensors) == 7.0


def test_a_drill_compares_numbers_of_any_type() -> None:
    types = torch.uint8, torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.complex64
    assert drill.size_of(torch.ones(2).to(dtype) for dtype in types) == 10.0
    assert drill.size_of([torch.full((1,), 3 - 4j).conj(), torch.ones(0)]) == 7.0


def test_a_drill_records_no_names_of_added_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    run: Any = object.__new__(drill.DrilledRun)
    run._tracked = {}
    passed: dict[str, Any] = {}
    monkeypatch.setattr(Run, "track", lambda self, **arguments: passed.update(arguments))
    model = torch.nn.Linear(1, 1)
    run.track(model=model, per_rank=("model",), added=("model.bias",))
    assert passed["added"] == ("model.bias",)  # which has no state to digest
    assert run._tracked == {"model": model}


def test_states_of_another_shape_have_another_digest() -> None:
    states = (
        [1, 23],
        [12, 3],
        {"a": {"b": 1}, "c": 2},
        {"a": {"b": 1, "c": 2}},
        [[1], 2],
        [[1, 2]],
    )
    assert len(set(map(drill.digest_of, states))) == len(states)
