"""Calls of a script to its run, without ranks."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.devices import CPU
from hpc_ddp.training.models.mesh import ParallelDims
from hpc_ddp.training.run import Run
from unit.training.data.fakes import NoisyNumbers


def test_the_shards_of_a_run_have_each_sample_once() -> None:
    rows = []
    for rank in range(5):
        dims = ParallelDims(rank, 5)
        run: Any = SimpleNamespace(_dims=dims, seed=0, device=CPU)
        rows += [int(row[0]) for batch in Run.shard(run, NoisyNumbers(), 4) for row in batch]
    assert sorted(rows) == list(range(23))


def test_the_weights_are_read_an_exchange_after_a_look() -> None:
    calls: list[tuple[int, str]] = []
    run: Any = SimpleNamespace(_look_at=0, _look_answers_at=None)
    for exchanges in (0, 0, 1, 1, 9, 10, 10, 12, 13):
        precision = SimpleNamespace(look=lambda at=exchanges: calls.append((at, "look")))
        run._precision = precision
        run._refuse_non_finite = lambda at=exchanges: calls.append((at, "read"))
        Run._watch_weights(run, exchanges)
    assert calls == [(0, "look"), (1, "read"), (10, "look"), (12, "read")]


def test_whether_a_run_is_resumed_is_known_behind_track() -> None:
    for resumed in (False, True):
        run: Any = SimpleNamespace(_manager=SimpleNamespace(resumed=resumed), _has_tracked=True)
        assert Run.resumed.__get__(run) == resumed
    run._has_tracked = False
    with pytest.raises(UsageError, match=r"run\.resumed was read before run\.track"):
        Run.resumed.__get__(run)


def test_a_part_of_a_model_that_is_called_stage_is_no_pipelines() -> None:
    run: Any = SimpleNamespace(device=CPU, _dims=ParallelDims(), untimed=contextlib.nullcontext)
    model = torch.nn.Module()
    model.stage = torch.nn.Linear(2, 2)
    with Run.evaluating(run, model) as plain:
        assert plain is model
