"""The cache of the status of ended runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from written_runs import RUNNING_JOB, make_run, write_event

from hpc_ddp.core.file_io import write_whole
from hpc_ddp.liveness import Queue
from hpc_ddp.report.status.cache import StatusCache
from hpc_ddp.report.status.run_status import Status
from hpc_ddp.slurm_text import QueuedJob


def test_only_what_has_ended_is_remembered_and_only_as_long_as_nothing_changes(
    tmp_path: Path,
) -> None:
    ended, live = make_run(tmp_path, 7, ended=True), make_run(tmp_path, 8)

    def look(queue: dict[str, QueuedJob]) -> list[Status]:
        known = StatusCache(tmp_path, Queue(queue))
        found = [known.status_of(run) for run in (ended, live)]
        known.save()
        return found

    first = look({"8": RUNNING_JOB})
    assert [each.state for each in first] == ["finished", "running"]
    kept = json.loads((tmp_path / f".status-{os.geteuid()}.json").read_text())["runs"]
    assert list(kept) == [str(ended.path)]
    again = look({"8": RUNNING_JOB})
    assert again[0].seconds == first[0].seconds
    assert again[0].last_checkpoint_s == pytest.approx(first[0].last_checkpoint_s or 0, abs=10)

    # The same run goes on: what was remembered does not count, whoever tells of it first.
    assert (
        look({"7": RUNNING_JOB, "8": RUNNING_JOB})[0].state == "finished"
    )  # its journal's last word
    write_event(ended, "submit", "submitted", 0, first_attempt=1)
    write_event(ended, "submit", "queued", 0, job_id="9")
    write_event(ended, "batch", "started", 0, nodes=["n1"], attempt=1)
    write_event(ended, "rank-0", "metrics", 0, attempt=1, step=401, total_steps=1000)
    assert look({"9": RUNNING_JOB})[0].step == 401
    write_event(
        ended, "batch", "verdict", 0, attempt=1, cause="failed", action="give up", why="boom"
    )
    assert [look({})[0].state for _ in range(2)] == ["failed", "failed"]
    ended.cancelled.touch()
    assert look({})[0].state == "cancelled"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1, "runs": 3}', '{"runs": {}}'])
def test_a_damaged_memory_is_none(tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path, ended=True)
    write_whole(tmp_path / f".status-{os.geteuid()}.json", text, mode=0o600)
    assert StatusCache(tmp_path, Queue({})).status_of(run).state == "finished"
