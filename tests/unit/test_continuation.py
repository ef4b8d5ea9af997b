from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ddp.node.continuation import KEPT_OFF_S, _bad_nodes, check_wanted, own_id
from hpc_ddp.run.errors import HpcDdpError
from hpc_ddp.run.folder import RunFolder


def test_a_blamed_node_is_kept_off_for_a_day() -> None:
    verdict = {"event": "verdict", "attempt": 0, "time": 1000.0, "bad_nodes": ["n2", "n1"]}
    older = {**verdict, "time": 0.0, "bad_nodes": ["n3"]}
    other = {"event": "verdict", "attempt": 1, "time": 1001.0}
    events = [older, verdict, other]
    assert _bad_nodes(events, 1002.0) == ["n1", "n2", "n3"]
    assert _bad_nodes(events, 500.0 + KEPT_OFF_S) == ["n1", "n2"]
    assert _bad_nodes(events, 1000.0 + KEPT_OFF_S) == []


def test_a_task_of_an_array_is_named_by_array_and_task() -> None:
    assert own_id({"SLURM_JOB_ID": "7"}) == "7"
    last = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    assert own_id(last) == "7_2"  # a requeue of 7 restarts all tasks


def test_a_first_start_lifts_the_mark_of_the_whole_array(tmp_path: Path) -> None:
    whole = RunFolder(tmp_path / "run").make()
    task = RunFolder(whole.path / "task-1").make()
    for each in (whole, task):
        each.cancelled.touch()
    with pytest.raises(HpcDdpError, match="was cancelled"):
        check_wanted(task, restarts=1, is_link=False)
    check_wanted(task, restarts=0, is_link=False)
    assert not whole.cancelled.exists()
    assert not task.cancelled.exists()
