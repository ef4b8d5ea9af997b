"""The table of jobs/preflight_train.py, over starts of the workers that end badly."""

from __future__ import annotations

import runpy
import socket
from pathlib import Path
from typing import Any

import pytest

JOB = runpy.run_path(str(Path(__file__).parents[3] / "jobs" / "preflight_train.py"))
LAST, FEATURES = JOB["LAST"], [*JOB["FEATURES"]]


def _table(folder: Path, rank: int, start: str) -> Any:
    return JOB["Table"](folder / "first-contact", rank, start)


def test_a_crash_ends_a_feature_and_the_planned_kill_does_not(tmp_path: Path) -> None:
    table = _table(tmp_path, 0, "0.0")
    table.begin("all-reduce")
    table.put("all-reduce", speed="1 GB/s", seconds=0.1)
    table.put("all-reduce", ok=True)
    table.begin("bf16")
    assert _table(tmp_path, 1, "0.0").is_left("bf16")  # a rank that reads later, of the same start
    again = _table(tmp_path, 1, "0.1")
    remaining = [name for name in FEATURES if again.is_left(name)]
    assert remaining == ["wrap, fp32", "fp16", "FSDP2, bf16", LAST]
    for start in ("0.1", "0.2"):
        assert _table(tmp_path, 0, start).is_left(LAST)
        _table(tmp_path, 0, start).begin(LAST)
    assert not _table(tmp_path, 0, "0.3").is_left(LAST)
    lines = (tmp_path / "first-contact.md").read_text().splitlines()
    assert "| all-reduce | yes | 0.1 | speed 1 GB/s |" in lines
    assert "| bf16 | no |  | the workers ended without an exception: see the logs |" in lines
    assert "| fp16 | not tried |  |  |" in lines


def test_an_error_is_that_of_the_first_rank_but_for_the_planned_kill(tmp_path: Path) -> None:
    table = _table(tmp_path, 1, "0.0")
    for name in ("fp16", LAST):
        table.begin(name)
        _table(tmp_path, 0, "0.0").begin(name)
        table.fail(name, RuntimeError("no such kernel\nand more"))
    assert _table(tmp_path, 0, "0.0").is_left("fp16")  # or a late rank would begin the next one
    table.fail("bf16", RuntimeError("ended before rank 0 began"))
    again = _table(tmp_path, 0, "0.1")
    assert "| bf16 | no |  | rank 1: RuntimeError: ended before rank 0 began |" in again.markdown()
    assert again.is_left(LAST)
    assert not again.is_left("fp16")
    assert "| fp16 | no |  | rank 1: RuntimeError: no such kernel |" in again.markdown()


def test_an_error_of_any_rank_is_a_no_and_the_first_one_counts(tmp_path: Path) -> None:
    table = _table(tmp_path, 0, "0.0")
    table.begin("fp16")
    _table(tmp_path, 1, "0.0").fail("fp16", RuntimeError("the cause"))
    table.fail("fp16", RuntimeError("a connection closed"))
    table.put("fp16", ok=True)
    again = _table(tmp_path, 0, "0.1")
    assert "| fp16 | no |  | rank 1: RuntimeError: the cause |" in again.markdown()


def test_ranks_meet_at_a_port_that_is_free(tmp_path: Path) -> None:
    port = _table(tmp_path, 0, "0.0").meet("fp16")
    assert _table(tmp_path, 1, "0.0").meet("fp16") == port
    with socket.create_server(("", port)):
        assert _table(tmp_path, 0, "0.1").meet("fp16") != port


def test_the_killed_training_resumes_to_the_weights_of_the_undisturbed_one(tmp_path: Path) -> None:
    table = _table(tmp_path, 0, "0.1")
    table.put("wrap, fp32", weights="abc")
    table.put(LAST, weights="abc")
    with pytest.raises(JOB["UnexpectedError"], match="it went on at step None, not at 6"):
        table.compare(LAST)
    table.put(LAST, **{"resumed at": 6})
    table.compare(LAST)
    table.put(LAST, weights="abd")
    with pytest.raises(JOB["UnexpectedError"], match="not those of the undisturbed"):
        table.compare(LAST)
