"""What `hpc-ddp status` tells of runs, from their journals and from Slurm's queue."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.report.status import table as overview
from hpc_ddp.report.status.cache import StatusCache
from hpc_ddp.report.status.run_status import Status, status_of
from hpc_ddp.run.folder import RunFolder, link_job
from hpc_ddp.run.goodput import account
from hpc_ddp.run.journal import last_event, read_briefly
from hpc_ddp.run.ranks import slow_rank
from hpc_ddp.run.spec import JobSpec
from hpc_ddp.slurm import Queued


def write(run: RunFolder, writer: str, event: str, ago: float, **fields: Any) -> None:
    line = {"time": time.time() - ago, "event": event, "attempt": 0, **fields}
    with open(run.journal_folder / f"{writer}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def make(root: Path, number: int = 7, ended: bool = False) -> RunFolder:
    """Make a run of job `number` that has been training for 100 s, and is at step 400 of 1000."""
    run = RunFolder(root / "digits" / f"20260101-{number:06}-aaaa").make()
    run.job_json.write_text(JobSpec("train.py").to_json())
    link_job(str(number), run)
    write(run, "submit", "submitted", 300, backend="slurm")
    write(run, "submit", "queued", 300, job_id=str(number))
    write(run, "batch", "started", 200, nodes=["n1", "n2"], job_id=str(number))
    write(run, "rank-0", "worker", 190, began=time.time() - 195, called=time.time() - 191)
    write(run, "rank-0", "first_step", 100, step=1, world_size=4, hosts=["n1", "n2"])
    for step in (200, 400):
        values = {"step": step, "total_steps": 1000, "epoch": 0, "loss": 1 / step}
        write(run, "rank-0", "metrics", 100 - step / 4, **values, samples_per_s=64.0)
    write(run, "rank-0", "checkpoint", 50, step=200, stall_s=0.1, write_s=1.0, bytes=5)
    if ended:
        write(run, "rank-0", "finished", 0, step=400)
        write(run, "batch", "verdict", 0, cause="finished", action="none", why="", exit_code=0)
    return run


RUNNING = Queued("RUNNING", "None", "n[1-2]", "1:02:03")


def test_a_run_that_runs(tmp_path: Path) -> None:
    run = make(tmp_path)
    status = status_of(run, {"7": RUNNING})
    assert (status.state, status.why, status.nodes) == ("running", "n[1-2]", 2)
    assert (status.step, status.total_steps, status.samples_per_s) == (400, 1000, 64.0)
    assert status.time_left_s == 3723
    assert status.eta_s == pytest.approx(150, abs=10)
    assert status.last_checkpoint_s == pytest.approx(50, abs=10)
    text = overview.table([status])
    assert text.splitlines()[0].split() == list(overview.COLUMNS)
    assert "400/1000" in text
    assert status_of(run, {"7": Queued("RUNNING", "None", "n1", "UNLIMITED")}).time_left_s is None


def test_why_a_run_waits_is_told_in_words(tmp_path: Path) -> None:
    status = status_of(make(tmp_path), {"7": Queued("PENDING", "Priority", "", "1:00:00")})
    assert (status.state, status.reason) == ("waiting", "Priority")
    assert status.why == "jobs of higher priority come first"
    assert (status.time_left_s, status.eta_s, status.slow) == (None, None, "")


def test_brief_reading_tells_the_same(tmp_path: Path) -> None:
    run = make(tmp_path, ended=True)
    with open(run.journal_folder / "rank-0.jsonl", "ab") as file:
        file.write(b'{"time": 1.0, "event": "metrics", "attempt": 0, "step": 9, "lo')  # torn
    events, brief = run.events(), read_briefly(run.journal_folder)
    assert [e["event"] for e in events] == [e["event"] for e in brief]
    assert account(events) == account(brief)
    assert last_event(events, "metrics") == {
        name: value
        for name, value in (last_event(brief, "metrics") or {}).items()
        if name != "line"
    }


def test_only_what_has_ended_is_remembered_and_only_as_long_as_nothing_changes(
    tmp_path: Path,
) -> None:
    ended, live = make(tmp_path, 7, ended=True), make(tmp_path, 8)

    def look(queue: dict[str, Queued]) -> list[Status]:
        known = StatusCache(tmp_path, queue)
        found = [known.status_of(run) for run in (ended, live)]
        known.save()
        return found

    first = look({"8": RUNNING})
    assert [each.state for each in first] == ["finished", "running"]
    kept = json.loads((tmp_path / ".status.json").read_text())["runs"]
    assert list(kept) == [str(ended.path)]
    again = look({"8": RUNNING})
    assert again[0].seconds == first[0].seconds
    assert again[0].last_checkpoint_s == pytest.approx(first[0].last_checkpoint_s or 0, abs=10)

    # The same run goes on: what was remembered does not count, whoever tells of it first.
    assert look({"7": RUNNING, "8": RUNNING})[0].state == "finished"  # its journal's last word
    write(ended, "submit", "submitted", 0, first_attempt=1)
    write(ended, "submit", "queued", 0, job_id="9")
    write(ended, "batch", "started", 0, nodes=["n1"], attempt=1)
    write(ended, "rank-0", "metrics", 0, attempt=1, step=401, total_steps=1000)
    assert look({"9": RUNNING})[0].step == 401
    write(ended, "batch", "verdict", 0, attempt=1, cause="failed", action="give up", why="boom")
    assert [look({})[0].state for _ in range(2)] == ["failed", "failed"]
    ended.cancelled.touch()
    assert look({})[0].state == "cancelled"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1, "runs": 3}', '{"runs": {}}'])
def test_a_damaged_memory_is_none(tmp_path: Path, text: str) -> None:
    run = make(tmp_path, ended=True)
    (tmp_path / ".status.json").write_text(text)
    assert StatusCache(tmp_path, {}).status_of(run).state == "finished"


def test_the_newest_and_the_live_ones_are_shown(tmp_path: Path, monkeypatch: Any) -> None:
    runs = [make(tmp_path, number, ended=number != 3) for number in range(30)]
    queue = {"3": RUNNING}
    shown, others = overview.select(tmp_path, queue, show_all=False)
    assert (len(shown), others) == (21, 9)
    assert shown[:2] == [runs[29], runs[28]]
    assert len(overview.select(tmp_path, queue, show_all=True)[0]) == 30
    monkeypatch.setattr(overview, "jobs_in_queue", lambda: queue)
    told = overview.show(tmp_path, [], False, False)
    assert [line.split()[2] for line in told.splitlines()[1:4]] == ["3", "29", "28"]
    assert told.endswith("… 9 older: hpc-ddp status --all")
    assert len(json.loads(overview.show(tmp_path, [], False, True))) == 30


def test_a_narrow_terminal_loses_columns_not_lines(tmp_path: Path) -> None:
    row = status_of(make(tmp_path), {"7": RUNNING})
    widths = {}
    for width in (200, 120, 100, 80, 60, 40):
        lines = overview.table([row], width).splitlines()
        assert len(lines) == 2
        assert all(len(line) <= width for line in lines)
        widths[width] = lines[0].split()
    assert set(widths[80]) < set(widths[120]) < set(widths[200])
    assert set(widths[40]) <= {"name", "state", "step", "left", "why"}
    assert "\033[32mrunning" in overview.table([row], 120, colours=True)


def _ranks(run: RunFolder, busy: list[float], data: list[float], **more: Any) -> None:
    slowest = busy.index(max(busy))
    fields = {"step": 9, "steps": 9, "step_s": 0.3, "slowest": slowest, "node": f"n{slowest}"}
    write(run, "rank-0", "ranks", 1, busy_s=busy, data_s=data, **{**fields, **more})


def test_a_slow_rank_is_named_only_when_it_is_slow_for_long(tmp_path: Path) -> None:
    run = make(tmp_path)
    for _ in range(2):
        _ranks(run, [0.1, 0.11, 0.3, 0.1], [0.0] * 4)
    assert slow_rank(run.events()) is None
    _ranks(run, [0.1, 0.3, 0.28, 0.1], [0.0] * 4)  # another one once
    assert str(slow_rank(run.events())).startswith("rank 2 on n2 is slow: 0.3 s a step of its own")
    status = status_of(run, {"7": RUNNING})
    assert status.slow == "rank 2 on n2 is slow: 0.3 s a step of its own, others 0.1 s"
    assert status.slow in overview.table([status])
    write(
        run, "rank-0", "worker", 0, began=time.time(), called=time.time()
    )  # they were started again
    assert slow_rank(run.events()) is None


def test_what_is_slow(tmp_path: Path) -> None:
    for busy, data, found in (
        ([0.1, 0.3], [0.0, 0.21], "waits for data"),
        ([0.1, 0.3], [0.0, 0.05], "is slow"),
        ([0.1, 0.12], [0.0, 0.0], ""),  # a little
        ([0.001, 0.002], [0.0, 0.0], ""),  # of steps of 300 ms that is nothing
        ([0.1, 0.1], [0.0, 0.0], ""),
    ):
        run = make(tmp_path / str(busy) / str(data))
        for _ in range(3):
            _ranks(run, busy, data)
        assert found in str(slow_rank(run.events()) or ""), busy
        assert bool(found) == (slow_rank(run.events()) is not None)


def test_damaged_ranks_name_nobody(tmp_path: Path) -> None:
    run = make(tmp_path)
    damages: list[dict[str, Any]] = [
        {"busy_s": ["x"], "data_s": 3},
        {"step_s": None},
        {"busy_s": []},
    ]
    for damage in damages:
        fields = {"busy_s": [0.1, 0.3], "data_s": [0.0], "slowest": 1, "node": 7, "step_s": 0.3}
        write(run, "rank-0", "ranks", 0, **{**fields, **damage})
    assert slow_rank(run.events()) is None


def test_the_queue_is_asked_once(tmp_path: Path, monkeypatch: Any) -> None:
    """However many runs."""
    calls = []

    def queue() -> dict[str, Queued]:
        calls.append(1)
        return {"7": RUNNING}

    monkeypatch.setattr(overview, "jobs_in_queue", queue)
    for number in range(5, 30):
        make(tmp_path, number)
    told = overview.show(tmp_path, [], True, False)
    assert told.count("\n") == 25
    assert told.splitlines()[1].split()[2:4] == ["7", "running"]
    assert len(calls) == 1


def test_a_damaged_run_hides_no_other(tmp_path: Path) -> None:
    """Deep nesting, a time that is none, a verdict without its parts, a folder for a file."""
    runs = []
    for name in ("1", "2"):
        run = RunFolder(tmp_path / "digits" / name).make()
        run.job_json.write_text(JobSpec("train.py").to_json())
        run.journal("batch").write("finished", step=3)
        runs.append(run)
    with open(runs[0].journal_folder / "batch.jsonl", "a") as file:
        file.write("[" * 100_000 + "\n")
        file.write('{"time": NaN, "event": "started", "attempt": 1, "nodes": 5}\n')
        file.write('{"time": 1999999999, "event": "verdict", "attempt": 5}\n')
    assert [row.state for row in overview.read_statuses(tmp_path, runs, {})] == [
        "finished",
        "finished",
    ]
    (runs[0].journal_folder / "a.jsonl").mkdir()
    (tmp_path / ".status.json").unlink()
    assert [row.state for row in overview.read_statuses(tmp_path, runs, {})] == [
        "unreadable",
        "finished",
    ]
