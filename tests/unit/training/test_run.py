"""Calls of a script to its run, without ranks."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.training.data.batch_plan import Position
from hpc_ddp.training.data.call_order import CallOrder
from hpc_ddp.training.devices import CPU
from hpc_ddp.training.models.mesh import ParallelDims
from hpc_ddp.training.run import Run
from hpc_ddp.training.stops.consensus import Decision
from unit.training.checkpoint.fakes import claim_run, make_manager, make_saver
from unit.training.data.fakes import NoisyNumbers
from unit.training.fakes import Holds


def test_the_shards_of_a_run_have_each_sample_once() -> None:
    rows = []
    for rank in range(5):
        dims = ParallelDims(rank, 5)
        run: Any = SimpleNamespace(_dims=dims, seed=0, device=CPU)
        rows += [int(row[0]) for batch in Run.shard(run, NoisyNumbers(), 4) for row in batch]
    assert sorted(rows) == list(range(23))


def test_the_weights_are_read_an_exchange_after_a_look() -> None:
    calls: list[tuple[int, str]] = []
    run: Any = SimpleNamespace(_next_look=0, _result_due=None)
    for exchanges in (0, 0, 1, 1, 9, 10, 10, 12, 13):
        precision = SimpleNamespace(start_check=lambda at=exchanges: calls.append((at, "look")))
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


@pytest.mark.parametrize("call", ["epochs", "steps", "finish"])
def test_a_run_whose_track_has_failed_is_refused(tmp_path: Path, call: str) -> None:
    """Also where the script catches the error: it would train, and save, from step 0."""
    run = claim_run(tmp_path)
    saved = make_manager(make_saver(run), Position(step=1))
    saved.track({"count": Holds(1)}, {})
    saved.save_surely()
    for part in (run.checkpoints / "step-1").iterdir():
        part.write_bytes(b"damaged")
    training: Any = object.__new__(Run)
    manager = make_manager(make_saver(run), Position())
    with pytest.raises(HpcDdpError, match="no good checkpoint any more"):
        manager.track({"count": Holds(0)}, {})
    vars(training).update(
        _manager=manager, position=Position(), _is_over=False, _env=SimpleNamespace(is_within=False)
    )
    vars(training).update(_calls=CallOrder(), _decision=Decision(), _loader=None)
    with pytest.raises(UsageError, match=r"run\.track .*has raised an error"):
        training.finish() if call == "finish" else next(getattr(training, call)(5))


def test_a_part_of_a_model_that_is_called_stage_is_no_pipelines() -> None:
    run: Any = SimpleNamespace(device=CPU, _dims=ParallelDims(), untimed=contextlib.nullcontext)
    model = torch.nn.Module()
    model.stage = torch.nn.Linear(2, 2)
    with Run.evaluating(run, model) as plain:
        assert plain is model
