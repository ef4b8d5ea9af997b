"""The work of the reports on a run of many nodes and days, counted and not timed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.file_io import READER_THREADS
from hpc_ddp.core.journal import journal, line_reader
from hpc_ddp.core.journal.events import MetricsLine, StepTiming
from hpc_ddp.core.journal.journal import read_briefly, read_events
from hpc_ddp.report.explain import facts, node_records
from hpc_ddp.report.html.history import read_run
from hpc_ddp.report.logs import merge
from hpc_ddp.report.logs.files import CHUNK_BYTES, Cut, LogQuery, chunk_bytes
from hpc_ddp.report.logs.view import show_logs
from unit.report.logs.fakes import NOW, Logs
from unit.report.written_runs import Written

Count = Callable[[Any, str], list[Any]]


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    """Returns the first arguments of all calls of an object's function from now on."""

    def of(owner: Any, name: str) -> list[Any]:
        calls: list[Any] = []
        function = getattr(owner, name)

        def counted(*args: Any, **named: Any) -> Any:
            calls.append(args[0] if args else None)
            return function(*args, **named)

        monkeypatch.setattr(owner, name, counted)
        return calls

    return of


def _write_metrics(folder: Path, steps: int) -> None:
    folder.mkdir(exist_ok=True)
    head = {"time": 1.0, "event": "metrics", "attempt": 0}
    lines = [json.dumps({**head, "step": step, "loss": 0.5}) for step in range(steps)]
    (folder / "rank-0.jsonl").write_text("\n".join(lines) + "\n")


def test_the_journals_of_many_nodes_are_opened_by_their_folder(
    tmp_path: Path, count: Count
) -> None:
    for node in range(300):
        line = {"time": 1.0, "event": "notice", "attempt": 0, "source": "SIGTERM"}
        (tmp_path / f"n{node}.jsonl").write_text(json.dumps(line) + "\n")
    opened, looked_at = count(os, "open"), count(Path, "lstat")
    assert len(read_events(tmp_path)) == 300
    assert len([name for name in opened if str(name).endswith(".jsonl")]) == 300
    assert len(looked_at) <= READER_THREADS * (1 + len(tmp_path.parents))


def test_a_journal_is_parsed_in_chunks(tmp_path: Path, count: Count) -> None:
    _write_metrics(tmp_path / "a", 1000)
    parsed = count(json, "loads")
    assert len(read_events(tmp_path / "a")) == 1000
    assert len(parsed) == 1000 / journal.LINES_AT_ONCE


@pytest.mark.parametrize("damage", [b"", b"{", b'{"a": 1}, {"b": 2', b"[]", b"\0\0"])
def test_a_damaged_line_of_a_chunk_is_left_out_alone(tmp_path: Path, damage: bytes) -> None:
    _write_metrics(tmp_path, 50)
    path = tmp_path / "rank-0.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:20], damage, *lines[20:]]) + b"\n")
    steps = [event.step for event in read_events(tmp_path) if isinstance(event, MetricsLine)]
    assert steps == list(range(50))


def test_a_brief_read_parses_only_the_last_step_times(tmp_path: Path, count: Count) -> None:
    head = {"time": 1.0, "event": "ranks", "attempt": 0}
    times = {"ranks": [0, 1], "data_s": [0.0, 0.1], "slowest": 1, "node": "n1", "step_s": 0.5}
    lines = [json.dumps({**head, "step": step, **times}) for step in range(50)]
    (tmp_path / "rank-0.jsonl").write_text("\n".join(lines) + "\n")
    parsed = count(journal, "parse_event")
    events = read_briefly(tmp_path)
    assert len(parsed) == 3
    assert [bool(event.ranks) for event in events if isinstance(event, StepTiming)] == [
        *[False] * 47,
        *[True] * 3,
    ]


def _hang(written: Written, ranks: int) -> None:
    """Have the ranks, eight a node, hang at one line of the script, and rank 9 at another."""
    stack = "Current thread 0x{rank:016x} (most recent call first):\n"
    stack += '  File "/a/t.py", line {line} in f\n'
    written.attempt(0, steps=5)
    for rank in range(ranks):
        node = written.run.attempt(0).node(f"n{rank // 8}")
        node.path.mkdir(exist_ok=True)
        node.stacks(rank).write_text(stack.format(rank=rank, line=8 if rank == 9 else 7))
        node.agent_log.write_text("said nothing\n")
    error = "HangError: no step for 1800 s at step 5"
    record = {"rank": 0, "code": 1, "time": 1.0, "error": error}
    path = written.run.attempt(0).node("n0").record
    path.write_text(json.dumps({"node": "n0", "code": 1, "failures": [record]}))


def test_equal_stacks_of_many_ranks_are_looked_at_once(written: Written, count: Count) -> None:
    _hang(written, 64)
    node_records._user_line_of_stack.cache_clear()
    places = count(node_records, "find_user_line")
    hang_places = facts.gather(written.run).hang_places
    assert len(places) == 2
    assert hang_places == {rank: f"t.py line {8 if rank == 9 else 7}" for rank in range(64)}


def test_explain_reads_the_torchrun_log_of_the_failed_node_alone(
    written: Written, count: Count
) -> None:
    _hang(written, 64)
    tails = count(facts, "read_log_end")
    gathered = facts.gather(written.run)
    assert (gathered.failure and gathered.failure.node) == "n0"
    assert [path.parent.name for path in tails if path.name == "agent.log"] == ["n0"]


def test_explain_parses_few_metrics(written: Written, count: Count) -> None:
    _write_metrics(written.run.journal_folder, 500)
    parsed, built = count(journal, "parse_event"), count(journal, "event_of")
    assert len(facts.gather(written.run).events) > 500
    assert len(parsed) + len(built) < 10


def test_a_page_reads_the_journal_once(written: Written, count: Count) -> None:
    written.attempt(0, steps=5)
    folders = count(line_reader.LineReader, "read_folder")
    read_run(written.run)
    assert len(folders) == 1


def test_logs_open_no_journal_but_that_of_the_batch_script(
    tmp_path: Path, count: Count, capfd: Any
) -> None:
    logs = Logs(tmp_path).attempt(0).say("hello\n", 0, 1)
    for node in range(20):
        (logs.run.journal_folder / f"n{node}.jsonl").write_text("")
    opened = count(os, "open")
    show_logs(logs.run, LogQuery())
    journals = {Path(name).name for name in opened if str(name).endswith(".jsonl")}
    assert journals == {"batch.jsonl"}
    assert "hello" in capfd.readouterr().out


def test_following_opens_only_logs_that_have_grown(tmp_path: Path, count: Count) -> None:
    logs = Logs(tmp_path).attempt(0).say("hello\n", 0, 1, 2, 3)
    group = merge.AttemptLogs(logs.run, logs.run.attempt(0), tidy=True)
    group.update(is_last=False)
    assert len(list(group.read_new_lines(is_last=False))) == 4
    opened = count(os, "open")
    logs.say("more\n", 2)
    group.update(is_last=False)
    assert [line.text for line in group.read_new_lines(is_last=False)] == [b"more\n"]
    assert {Path(name).name for name in opened if str(name).endswith(".log")} == {"rank-2.log"}


def test_lines_that_are_noted_a_moment_apart_are_still_one(tmp_path: Path) -> None:
    """Supervisors note sizes at different moments: in a growing log no line is alone."""
    logs = Logs(tmp_path).attempt(0).say("begin\n", 0, 2)
    group = merge.AttemptLogs(logs.run, logs.run.attempt(0), tidy=True)
    fold, shown = merge.LineFold(folds=True), []
    for ranks in ((), (0,), (2,)):
        logs.second += 0 if ranks == (2,) else 10
        logs.say("epoch\n", *ranks)
        group.update(is_last=False)
        for line in group.read_new_lines(is_last=False):
            shown += [ranks for _, ranks in fold.add(line)]
    shown += [ranks for _, ranks in fold.release(math.inf)]
    assert shown == [[0, 2], [0, 2]]  # the line of the beginning, and this one


def test_following_looks_at_new_notes_alone(tmp_path: Path, count: Count) -> None:
    logs = Logs(tmp_path).attempt(0)
    _print_each_second(logs, 0, 500, NOW - 5000)
    group = merge.AttemptLogs(logs.run, logs.run.attempt(0), tidy=True)
    group.update(is_last=False)
    assert len(list(group.read_new_lines(is_last=False))) == 500
    (log,) = group.logs.values()
    assert merge._cuts(log, None) == merge._cuts(log, range(10**10)) == []
    log.times.append(NOW)
    log.sizes.append(log.position + 5)
    assert merge._cuts(log, None) == [Cut(log.position + 5, False)]


@pytest.mark.parametrize(
    ("count_of_logs", "size"), [(0, CHUNK_BYTES), (64, 1 << 19), (8192, 1 << 15)]
)
def test_many_logs_are_merged_in_a_bounded_memory(count_of_logs: int, size: int) -> None:
    assert chunk_bytes(count_of_logs) == size


def _print_each_second(logs: Logs, rank: int, lines: int, begin: float) -> None:
    """Have a rank of the first node print a line each second, as its supervisor notes."""
    node, size = logs.run.attempt(0).node("a"), 0
    node.path.mkdir(exist_ok=True)
    with open(node.printed, "a") as printed, open(node.rank_log(rank), "a") as log:
        for line in range(lines):
            size += log.write(f"rank {rank} line {line}\n")
            printed.write(f"{begin + line:.3f} {rank} {size}\n")


def test_lines_of_one_rank_alone_are_shown_in_one_piece(
    tmp_path: Path, count: Count, capfd: Any
) -> None:
    logs = Logs(tmp_path).attempt(0)
    _print_each_second(logs, 0, 2000, NOW - 5000)
    _print_each_second(logs, 1, 1, NOW - 4000)  # in the midst of the other's
    added = count(merge.LineFold, "add")
    show_logs(logs.run, LogQuery())
    assert len(added) < 20
    lines = capfd.readouterr().out.splitlines()
    expected = [f"a rank 0 | rank 0 line {line}" for line in range(2000)]
    assert [line for line in lines if "| rank 0" in line] == expected
    place = lines.index("a rank 1 | rank 1 line 0")
    assert lines[place - 1] == "a rank 0 | rank 0 line 1000"


def test_of_ranks_that_print_the_same_one_stands_for_all(
    tmp_path: Path, count: Count, capfd: Any
) -> None:
    logs = Logs(tmp_path).attempt(0)
    node = logs.run.attempt(0).node("a")
    node.path.mkdir()
    for rank in range(200):
        node.rank_log(rank).write_text("one\ntwo\n" if rank != 7 else "one\nother\ntwo\n")
        with open(node.printed, "a") as printed:
            printed.write(f"{NOW - 1000:.3f} {rank} {node.rank_log(rank).stat().st_size}\n")
    folded = count(merge, "_fold_lines")
    show_logs(logs.run, LogQuery())
    assert [len(lines) for lines in folded] == [5]  # two of 199 ranks, three of rank 7
    lines = [line for line in capfd.readouterr().out.splitlines() if "|" in line]
    assert [line.partition("| ")[2] for line in lines] == ["one", "other", "two"]
