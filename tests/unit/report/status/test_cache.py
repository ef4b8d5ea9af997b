"""The status of ended runs is cached."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpc_ddp.core.file_io import write_whole
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.live_jobs import Queue
from hpc_ddp.report.status.cache import StatusCache
from hpc_ddp.report.status.run_status import Status
from hpc_ddp.slurm_text import QueuedJob
from tests.raw_events import raw
from unit.report.written_runs import RUNNING_JOB, make_run, write_event


def test_the_cache_is_private_and_read_only_if_it_still_is(run: RunFolder) -> None:
    run.journal("batch").write(raw("finished", step=3))
    cache = StatusCache(run.root, Queue({}))
    cache.status_of(run)
    cache.save()
    (path,) = run.root.glob(".status*")
    assert path.stat().st_mode & 0o777 == 0o600
    entries = json.loads(path.read_text())
    assert entries["runs"]
    entries["runs"][str(run.path)]["status"]["why"] = "forged"
    write_whole(path, json.dumps(entries), mode=0o600)
    assert StatusCache(run.root, Queue({})).status_of(run).why == "forged"
    path.chmod(0o666)
    assert StatusCache(run.root, Queue({})).status_of(run).why == ""


def test_only_ended_runs_are_cached_until_they_change(
    tmp_path: Path,
) -> None:
    ended, live = make_run(tmp_path, 7, ended=True), make_run(tmp_path, 8)

    def look(queue: dict[str, QueuedJob]) -> list[Status]:
        cache = StatusCache(tmp_path, Queue(queue))
        statuses = [cache.status_of(run) for run in (ended, live)]
        cache.save()
        return statuses

    first = look({"8": RUNNING_JOB})
    assert [status.state for status in first] == ["finished", "running"]
    cached = json.loads((tmp_path / f".status-{os.geteuid()}.json").read_text())["runs"]
    assert list(cached) == [str(ended.path)]
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
def test_a_damaged_cache_is_ignored(tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path, ended=True)
    write_whole(tmp_path / f".status-{os.geteuid()}.json", text, mode=0o600)
    assert StatusCache(tmp_path, Queue({})).status_of(run).state == "finished"
