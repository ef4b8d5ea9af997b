"""The small print of a run's folder, journal, processes and checkpoints, as tables."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from fakes import stop_clock

from hpc_ddp.core import checkpoints, file_io, process
from hpc_ddp.core.checkpoints import (
    FileFacts,
    Health,
    all_of,
    facts_of,
    find_damage,
    health,
    manifest_crc,
    verify,
)
from hpc_ddp.core.console import progress
from hpc_ddp.core.errors import HpcDdpError, UsageError, closest
from hpc_ddp.core.file_io import read_json, read_tail, read_word, write_json
from hpc_ddp.core.journal.events import Cancelled, JournalEvent, MetricsLine, Queued, step_of
from hpc_ddp.core.journal.goodput import account, line, pieces, share
from hpc_ddp.core.journal.journal import (
    Journal,
    is_finished,
    node_seconds,
    read_briefly,
    read_events,
)
from hpc_ddp.core.journal.stragglers import slow_rank
from hpc_ddp.core.run_folder import AttemptFolder, NodeFolder, RunFolder
from hpc_ddp.core.run_index import find_run, link_job
from tests.raw_events import raw, typed


def _event(event: str, time: float = 1.0, attempt: int = 0, **fields: Any) -> JournalEvent:
    return typed(event, time, attempt, **fields)


# --- the folder ----------------------------------------------------------------------------


def test_where_things_are(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "name" / "id")
    task = run.task(12)
    assert (run.is_task, task.is_task, task.index) == (False, True, 12)
    assert (run.whole, task.whole, task.name) == (run.path, run.path, "name")
    assert (task.root, run.root, run.id, task.id) == (tmp_path, tmp_path, "id", "id/task-12")
    attempt = run.attempt(3)
    assert (attempt.number, attempt.path) == (3, run.path / "logs" / "attempt-3")
    names = ("notice", "failed", "fabric", "port_taken")
    result = [str(getattr(attempt, name).relative_to(attempt.path)) for name in names]
    assert result == ["notice", "failed", "fabric", "port-taken"]
    files = ("notice", "record", "failures", "printed")
    of_node, of_task = attempt.node("n1"), attempt.node("n1", 2)
    assert [getattr(of_node, name).name for name in files] == [
        *("notice", "record.json", "failures.json", "printed")
    ]
    assert [getattr(of_task, name).name for name in files] == [
        *("notice-2", "record-2.json", "failures-2.json", "printed-2")
    ]
    per_rank = [of_node.rank_log(4), of_node.stacks(4), of_node.flight(4), of_node.agent_log]
    assert [path.name for path in per_rank] == [
        *("rank-4.log", "stack-rank-4.txt", "flight-rank-4", "agent.log")
    ]
    paths = [run.job_json, run.script, run.lib, run.code, run.slurm_out]
    paths += [run.checkpoints, run.cancelled, run.journal_folder]
    assert [str(path.relative_to(run.path)) for path in paths] == [
        *("job.json", "job.sbatch", "lib", "code", "logs/slurm.out"),
        *("checkpoints", "cancelled", "journal"),
    ]


def test_attempts_tasks_and_code_are_in_order_of_their_numbers(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "name" / "id").make()
    assert (run.newest_code, run.attempts(), run.tasks()) == (None, [], [])
    for number in (9, 10):
        for folder in (run.code / str(number), run.task(number).path):
            folder.mkdir(parents=True)
        run.attempt(number).path.mkdir()
    for other in (run.code / "x", run.path / "task-x", run.logs / "attempt-x"):
        other.mkdir()
    assert run.newest_code == run.task(9).newest_code == run.code / "10"
    assert [attempt.number for attempt in run.attempts()] == [9, 10]
    assert [task.index for task in run.tasks()] == [9, 10]
    assert (run.is_newest(10), run.is_newest(9), run.is_newest(11)) == (True, False, True)
    assert run.claim_attempt({"pid": 7, "host": "h"}, lambda info: False).number == 11
    with pytest.raises(HpcDdpError, match="attempt 11, process 7 on h"):
        run.claim_attempt({}, lambda info: True)


def test_an_attempt_that_can_not_be_made_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "name" / "id").make()

    def refuse(draft: Path, target: Path) -> Path:
        raise OSError(errno.EDQUOT, "quota")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="quota"):
        run.claim_attempt({}, lambda info: False)
    assert list(run.logs.iterdir()) == []


def test_what_nodes_recorded(tmp_path: Path) -> None:
    attempt = AttemptFolder(tmp_path / "attempt-0")
    for node, name, value in (
        ("n2", "record.json", {"code": 0, "node": "n2"}),
        ("n1", "record-0.json", {"code": 1, "node": "n1"}),
        ("n1", "record-1.json", {"node": "torn"}),
        ("n1", "other.json", {"code": 5}),
    ):
        (attempt.path / node).mkdir(parents=True, exist_ok=True)
        (attempt.path / node / name).write_text(json.dumps(value))
    (attempt.path / "notice").touch()
    assert [node.path.name for node in attempt.nodes()] == ["n1", "n2"]
    assert [record["node"] for record in attempt.records()] == ["n1", "n2"]
    assert len(NodeFolder(attempt.path / "n1").records()) == 2


def test_ids_of_jobs_oldest_first(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "name" / "id").make()
    for number, link in enumerate(("8", "", 9, "7")):
        attempt = run.claim_attempt({}, lambda info: False)
        assert attempt.number == number
        write_json(attempt.path / "next.json", {"job_id": link})
    events = [_event("queued", job_id="7"), _event("started", job_id=""), _event("cancelled")]
    assert run.job_ids([*events, _event("started", job_id="6"), events[0]]) == ["7", "6", "8"]


def test_hours_are_those_of_all_tasks(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "name" / "id").make()
    tasks = [run.task(index).make() for index in (0, 1)]
    for item, hours in zip((run, *tasks), (9, 1, 2), strict=True):
        path = item.journal_folder / "batch.jsonl"
        end = hours * 3600.0
        events = [_event("started", 0.0, nodes=["a", "b"])]
        events += [_event("verdict", end, why="")]
        path.write_text("".join(json.dumps(event.to_line()) + "\n" for event in events))
    assert tasks[0].gpu_hours(4) == run.gpu_hours(4) == 3 * 2 * 4
    assert not run.finished()


def test_files_are_read_whatever_is_in_them(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert (read_json(path), read_word(path), read_tail(path, 9)) == ({}, "", "")
    path.write_text("[1]")
    assert read_json(path) == {}
    path.write_text('{"a": 1')
    assert read_json(path) == {}
    write_json(path, {"a": 1})
    assert (read_json(path), [item.name for item in tmp_path.iterdir()]) == ({"a": 1}, ["file"])
    path.write_text(" word\n")
    assert read_word(path) == "word"
    path.write_bytes(b"x" * 50 + b"[rank3]: one\n[rank12]:two\nno [rank1]: three\xff")
    assert read_tail(path, 44) == "one\ntwo\nno [rank1]: three\ufffd"
    assert read_tail(path, 4) == "ree�"
    assert read_tail(path, 1000).startswith("x" * 50)


# --- the journal ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "sound"),
    [
        ({}, True),
        ({"nodes": [], "pid": None, "new": 1}, True),
        ({"time": "1"}, False),
        ({"time": float("inf")}, False),
        ({"time": 10**400}, False),
        ({"attempt": 1.5}, False),
        ({"event": 3}, False),
        ({"event": []}, False),
        ({"event": "a later version's"}, False),
        ({"nodes": "n1"}, False),
        ({"nodes": [1]}, False),
        ({"shell": 3}, False),
        ({"event": "metrics", "step": 3, "loss": float("nan"), "text": "x"}, True),
        ({"event": "metrics", "step": "3"}, False),
        ({"event": "checkpoint"}, True),
        ({"event": "checkpoint", "write_s": float("nan")}, False),
        ({"event": "verdict", "cause": "failed", "action": "requeue"}, True),
        ({"event": "verdict", "cause": "failed", "action": "requeue", "why": 5}, False),
        ({"event": "verdict", "cause": "failed"}, False),
        ({"event": "verdict", "cause": "a later version's", "action": "requeue"}, False),
        ({"event": "verdict", "cause": ["failed"], "action": "requeue"}, False),
    ],
)
def test_a_line_of_another_writer_is_read_or_left_out(
    tmp_path: Path, event: dict[str, Any], sound: bool
) -> None:
    line = {"time": 1.0, "event": "started", "attempt": 0, **event}
    (tmp_path / "a.jsonl").write_text(json.dumps(line) + "\n")
    assert bool(read_events(tmp_path)) is sound
    assert read_briefly(tmp_path) == read_events(tmp_path)


def test_of_many_metrics_the_last_is_read_in_full(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "rank-0", attempt=2)
    for step in (1, 2, 3):
        journal.write(raw("metrics", step=step, loss=0.5))
    journal.write(raw("stopped", step=3, reason="notice"))
    Journal(tmp_path, "batch").write(raw("started"))
    events = read_briefly(tmp_path)
    assert [event.event for event in events] == ["started", *["metrics"] * 3, "stopped"]
    metrics = [event for event in events if isinstance(event, MetricsLine)]
    assert [event.number("loss") for event in metrics] == [None, None, 0.5]
    assert [step_of(event) for event in events] == [None, 1, 2, 3, 3]
    assert [event.time for event in events] == [event.time for event in read_events(tmp_path)]
    assert all(event.attempt == 2 for event in events[1:])


def test_a_line_of_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "deep" / "er", "a", attempt=4)
    journal.write_surely(Queued("7"))
    journal.write(Cancelled())
    event, _ = read_events(journal.path.parent)
    assert event == Queued("7", time=event.time, attempt=4)
    assert abs(event.time - time.time()) < 60
    assert journal.path.read_bytes().count(b"\n") == 2


def test_an_event_that_matters_is_written_patiently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = stop_clock(monkeypatch, file_io)
    (tmp_path / "file").touch()
    Journal(tmp_path / "file", "a").write_surely(raw("x"))
    assert sum(clock.slept) == 61  # a minute, and one more try
    assert capsys.readouterr().err.count("can't write the journal") == 1


@pytest.mark.parametrize(
    ("events", "finished"),
    [
        ([], False),
        ([_event("finished")], True),
        ([_event("finished"), _event("verdict", cause="failed")], False),
        ([_event("verdict", cause="finished"), _event("started")], True),
        ([_event("verdict", cause="preempted"), _event("finished")], True),
    ],
)
def test_a_run_is_finished_by_its_last_word(events: list[JournalEvent], finished: bool) -> None:
    assert is_finished(events) is finished


def test_node_seconds() -> None:
    events = [
        _event("submitted", 0.0),
        _event("started", 10.0, nodes=["a", "b"]),
        _event("metrics", 25.0),
        _event("verdict", 20.0),
        _event("rerun", 500.0),
        _event("started", 30.0, 1, nodes=["a"]),
        _event("metrics", 40.0, 1),
    ]
    assert node_seconds(events) == 2 * 10 + 10
    assert node_seconds(events, now=100.0) == 2 * 10 + 70
    assert node_seconds(events, now=35.0) == 2 * 10 + 10
    assert node_seconds([_event("started", 10.0), *events[:1]]) == 0
    over = [*events, _event("verdict", 45.0, 1)]
    assert node_seconds(over, now=100.0) == 2 * 10 + 15


# --- patience, processes, progress ---------------------------------------------------------


def test_a_disk_that_comes_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, errors = stop_clock(monkeypatch, file_io), [OSError("away"), OSError("away")]

    def act() -> str:
        if errors:
            raise errors.pop()
        return "there"

    assert file_io.patiently(act) == "there"
    assert clock.slept == [1, 1]


def test_what_takes_longer_than_the_patience_is_tried_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, calls = stop_clock(monkeypatch, file_io), []

    def act() -> None:
        calls.append(clock.now)
        clock.now += 2 * file_io.PATIENCE_S
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        file_io.patiently(act)
    assert len(calls) == 2


def test_a_process_is_known_by_when_it_began() -> None:
    info = process.identity()
    assert (info["host"], info["pid"]) == (socket.gethostname(), os.getpid())
    assert process.is_live(info)
    for change in ({"host": "x"}, {"pid": "7"}, {"began": "1"}, {"pid": 1 << 30}, {"pid": None}):
        assert not process.is_live({**info, **change}), change
    began = process.began_at()
    assert began is not None
    assert time.time() - 36000 < began < time.time()


def test_a_process_that_nobody_has_buried_is_dead() -> None:
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process._began(child.pid) is None
    assert process._exists(os.getpid()) is None  # where there is /proc, that has the answer
    assert signal.SIGRTMIN < process.SHOW_STACKS < signal.SIGRTMAX


def test_without_proc_a_process_lives_as_long_as_it_has_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen(["true"]) as child:
        pass

    def fail(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setattr(Path, "read_text", fail)
    info = process.identity()
    assert process.is_live(info)
    assert not process.is_live({**info, "pid": child.pid})
    assert process.began_at() is None


def test_a_bar_is_as_long_as_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = progress.ProgressBar("x", 4)
    drawn = []
    for amount in (0, 1, 2, 9):
        bar.add(amount)
        drawn.append(bar._line())
    shares = (0, 8, 22, 30)
    percents = ("0%", "25%", "75%", "100%")
    assert drawn == [
        f"x {'━' * full}{'─' * (30 - full)} {percent}"
        for full, percent in zip(shares, percents, strict=True)
    ]


def test_a_word_that_was_meant() -> None:
    assert closest("slrum", ("slurm", "local")) == ", did you mean 'slurm'?"
    assert closest("zzz", ("slurm", "local")) == ""
    assert (HpcDdpError("x").exit_code, UsageError("x").exit_code) == (1, 2)
    assert (HpcDdpError("x", hint="y").hint, HpcDdpError("x").message) == ("y", "x")


# --- checkpoints ---------------------------------------------------------------------------


def _checkpoint(folder: Path, name: str, **values: Any) -> Path:
    made = folder / name
    made.mkdir()
    files = {}
    for file in ("a", "b", "c"):
        (made / file).write_bytes(file.encode() * 10)
        files[file] = vars(facts_of(made / file))
    value = {"files": files, "world_size": 2, **values}
    value["crc32"] = manifest_crc(value)
    (made / "manifest.json").write_text(json.dumps(value))
    return made


def test_facts_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "CHUNK", 16)
    (tmp_path / "a").write_bytes(bytes(range(50)))
    counts: list[int] = []
    facts = facts_of(tmp_path / "a", counts.append)
    assert (facts.size, facts.crc32) == (50, zlib.crc32(bytes(range(50))))
    assert counts == [16, 16, 16, 2]


def test_ranks_share_the_reading(tmp_path: Path) -> None:
    made = _checkpoint(tmp_path, "step-1")
    (made / "b").write_bytes(b"xx")
    assert [verify(made, rank, 3) for rank in range(3)] == [
        *(None, "b has 2 bytes instead of 10", None)
    ]
    (made / "c").unlink()
    (made / "c").mkdir()
    assert verify(made, 2, 3) == "c is no file: Is a directory"
    (made / "manifest.json").write_text("[]")
    assert verify(made) == "manifest.json can't be read: its own CRC32 differs"


def test_what_is_no_checkpoint_for_all_its_name_is_damaged(tmp_path: Path) -> None:
    """So that an older one is tried."""
    (tmp_path / "step-6").touch()
    (tmp_path / "step-7").symlink_to("nowhere")
    (tmp_path / "step-8").symlink_to("step-8")
    made = _checkpoint(tmp_path, "step-9")
    (made / "b").unlink()
    (made / "b").symlink_to("nowhere")
    problems = [find_damage(path, 0, 1) for path in checkpoints.candidates(tmp_path)]
    assert [str(problem).partition(":")[0] for problem in problems] == [
        "b is no file",
        *["manifest.json is no file"] * 3,
    ]
    assert len(checkpoints.health(tmp_path)) == 4


def test_only_what_a_readable_folder_lacks_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what a look-up denies and the folder lists, nor what an I/O error hides."""
    made = _checkpoint(tmp_path, "step-1")

    def fail(error: OSError) -> None:
        def facts_of(path: Path, read: Any) -> FileFacts:
            raise error

        monkeypatch.setattr(checkpoints, "facts_of", facts_of)

    fail(OSError(errno.EIO, "Input/output error"))
    with pytest.raises(OSError, match="a can't be read: Input/output error") as caught:
        find_damage(made)
    assert caught.value.errno == errno.EIO
    assert verify(made) == "a can't be read: Input/output error"
    fail(FileNotFoundError(errno.ENOENT, "No such file or directory"))
    with pytest.raises(FileNotFoundError, match="a can't be read: No such file"):
        find_damage(made)
    (made / "a").unlink()
    assert find_damage(made) == "a is missing"
    with pytest.raises(FileNotFoundError):
        find_damage(tmp_path / "step-2")


def test_checkpoints_are_set_aside_and_kept(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "name" / "run").make()
    assert checkpoints.lost(run) == []
    _checkpoint(run.checkpoints, "step-4")
    (run.checkpoints / "step-5.tmp-0").mkdir()
    run.journal("rank-0", 3).write(raw("checkpoint", step=4))
    (run.logs / "attempt-3").mkdir()
    assert checkpoints.set_aside(run) == run.checkpoints / "aside-0"
    assert find_damage(run.checkpoints / "aside-0" / "step-4") is None
    assert [path.name for path in run.checkpoints.iterdir()] == ["aside-0"]
    assert checkpoints.lost(run) == []
    run.journal("rank-0", 4).write(raw("checkpoint", step=2))
    assert checkpoints.lost(run) == ["step-2: it was saved, and is gone"]
    _checkpoint(run.checkpoints, "step-2")
    assert checkpoints.set_aside(run) == run.checkpoints / "aside-1"


@pytest.mark.parametrize(("backend", "command"), [("local", "dry-run"), ("slurm", "submit")])
def test_the_command_that_begins_again_is_that_of_the_run(
    tmp_path: Path, backend: str, command: str
) -> None:
    run = RunFolder(tmp_path / "a name" / "run").make()
    assert checkpoints.fresh_command(run) == f"mv '{run.path}' '{run.path}'-old"
    run.lib.mkdir()
    run.job_json.write_text(json.dumps({"backend": backend}))
    assert checkpoints.fresh_command(run) == f"hpc-ddp {command} --run '{run.path}' --fresh"
    assert command in checkpoints.fresh_command(run.task(0))  # what an array has is the array's


def test_health_of_all_that_is_there(tmp_path: Path) -> None:
    best = {"best": {"step": 9, "value": 1.0}}
    _checkpoint(tmp_path, "step-10", **best)
    _checkpoint(tmp_path, "step-9", **best)
    _checkpoint(tmp_path, "step-2", best={"step": 2})  # the best one at its time
    (tmp_path / "step-9.tmp-0").mkdir()
    (tmp_path / "step-3.bad-0-1").mkdir()
    (tmp_path / "step-3.old-0").mkdir()
    (tmp_path / "step-x").mkdir()
    os.utime(tmp_path / "step-2", (time.time() - 500, time.time() - 500))
    rows = health(tmp_path)
    names = ["step-2", "step-3.bad-0-1", "step-3.old-0", "step-9", "step-10"]
    assert [row.name for row in rows] == names
    assert rows[-1] == Health("step-10", rows[-1].age_s, 30, 2, best=False, problem=None)
    assert 499 < rows[0].age_s < 600
    assert [row.best for row in rows] == [False, False, False, True, False]
    assert (rows[1].bytes, rows[1].world_size, rows[1].problem) == (
        *(None, None, "manifest.json is missing"),
    )
    (tmp_path / "step-4").touch()
    every = [path.name for path in all_of(tmp_path)]
    assert every == sorted([*names, "step-9.tmp-0"])
    assert all_of(tmp_path / "none") == []
    assert checkpoints._size(tmp_path / "none") == 0
    assert checkpoints._size(tmp_path / "step-9") > 30


# --- goodput -------------------------------------------------------------------------------


def test_pieces_have_no_gaps() -> None:
    events = [
        *(_event("submitted", 0.0), _event("started", 5.0, nodes=["a"]), _event("notice", 9.0)),
        _event("verdict", 20.0, cause="failed", action="requeue", why=""),
        _event("started", 30.0, 1, nodes=["a"]),
    ]
    assert [(piece.part, piece.begin, piece.end) for piece in pieces(events, now=50.0)] == [
        *(("queued", 0.0, 5.0), ("running", 5.0, 20.0)),
        *(("queued", 20.0, 30.0), ("running", 30.0, 50.0)),
    ]
    waits = pieces(events, now=50.0, waits=True)
    assert [(piece.part, piece.end) for piece in waits][-1] == ("queued", 50.0)
    assert pieces([]) == []


def test_the_share_is_of_what_was_not_queued() -> None:
    nothing = account([])
    assert share(nothing) is None
    assert share({**nothing, "queued": 5.0}) is None
    assert share({**nothing, "queued": 5.0, "training": 3.0, "lost": 1.0}) == 0.75
    assert share({**nothing, "running": 5.0}) is None
    assert line(nothing) == "goodput -: nothing yet"


def test_a_rank_is_slow_by_its_own_start() -> None:
    slow: dict[str, Any] = {
        "busy_s": [0.1, 0.4, 0.1],
        "data_s": [0.0, 0.0, 0.0],
        "step_s": 0.4,
        "slowest": 1,
    }
    events = [_event("ranks", **slow, node="n2") for _ in range(3)]
    result = slow_rank(events)
    assert result is not None
    assert (result.rank, result.node, result.own_s, result.others_s, result.data) == (
        *(1, "n2", 0.4, 0.1),
        False,
    )
    for begin in ("started", "worker"):
        assert slow_rank([*events[:2], _event(begin), *events[2:]]) is None
        assert slow_rank([*events, _event(begin)]) is None
        assert slow_rank([_event(begin), *events]) == result
    # A quarter more than the others, and a tenth of a step that all wait for.
    for own, step_s, named in ((0.125, 0.2, True), (0.12, 0.1, False), (0.125, 0.3, False)):
        values = {**slow, "busy_s": [0.1, own, 0.1], "step_s": step_s}
        assert (slow_rank([_event("ranks", **values)] * 3) is not None) is named, own


def test_a_file_is_written_beside_what_others_have_put_there(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("kept")
    (tmp_path / "status.json").symlink_to(mine)
    write_json(tmp_path / "status.json", {"a": 1})
    assert mine.read_text() == "kept"
    assert read_json(tmp_path / "status.json") == {"a": 1}
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "status.json"}


def test_a_new_run_takes_no_folder_of_another_one(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "train" / "1").make(is_new=True)
    run.make()
    with pytest.raises(FileExistsError):
        run.make(is_new=True)


def test_a_link_of_a_job_to_another_run_does_not_count(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "train" / "1").make()
    run.job_json.write_text("{}")
    link_job("7", run)
    with pytest.raises(UsageError, match="no run '7'"):
        find_run(tmp_path, "7")
    run.journal("submit").write(Queued("7"))
    assert find_run(tmp_path, "7") == run
