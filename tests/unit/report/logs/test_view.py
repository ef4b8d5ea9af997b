"""Logs of many ranks are merged, marked and folded into one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.report.logs.files import LogQuery
from hpc_ddp.report.logs.view import follow_logs, show_logs
from unit.report.logs.fakes import Logs

GLOO = "[W1121 20:48:17.333 socket.cpp:207] [c10d] The hostname of the client socket cannot be"
NOISE = f"{GLOO} retrieved. err=-3\n"


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path).attempt(0)


def shown(logs: Logs, capfd: Any, **options: Any) -> list[str]:
    capfd.readouterr()
    query: dict[str, Any] = {
        **dict.fromkeys(("rank", "attempt")),
        "job": False,
        "raw": False,
    }
    query |= options
    show_logs(logs.run, LogQuery(**query))
    return [line.rstrip() for line in capfd.readouterr().out.splitlines()]


def test_ranks_are_merged_in_order_of_time(logs: Logs, capfd: Any) -> None:
    logs.say("one\n", 0).say("two\n", 3).say("three\n", 0).say("four\nfive\n", 2).say("six\n", 3)
    head, *lines = shown(logs, capfd)
    assert head.startswith("--- attempt 0 began ")
    assert head.endswith(" on a b, job 7")
    assert lines == [
        "a rank 0 | one",
        "b rank 3 | two",
        "a rank 0 | three",
        "b rank 2 | four",
        "b rank 2 | five",
        "b rank 3 | six",
    ]


def test_equal_lines_of_several_ranks_are_one(logs: Logs, capfd: Any) -> None:
    logs.say("begin\n", 0, 1, 2, 3).say("x\n", 0, 1, 3).say("y\n", 1).say("z\n", 0)
    assert shown(logs, capfd)[1:] == [
        "all ranks | begin",
        "ranks 0-1,3 | x",
        "a rank 1 | y",
        "a rank 0 | z",
    ]
    assert len(shown(logs, capfd, raw=True)) == 1 + 4 + 3 + 1 + 1


def test_folding_keeps_each_ranks_order(logs: Logs, capfd: Any) -> None:
    logs.say("x\ny\n", 0).say("y\nx\n", 1)
    lines = shown(logs, capfd)[1:]
    assert lines == ["a rank 1 | y", "all ranks | x", "a rank 0 | y"]


def test_equal_lines_at_other_times_are_not_one(logs: Logs, capfd: Any) -> None:
    logs.say("x\n", 0)
    logs.second += 60
    logs.say("x\n", 1)
    assert shown(logs, capfd)[1:] == ["a rank 0 | x", "a rank 1 | x"]


def test_where_only_rank_0_speaks_nothing_is_marked(logs: Logs, capfd: Any) -> None:
    logs.say(NOISE, 0, 1, 2, 3).say("epoch 0\n", 0)
    assert shown(logs, capfd)[1:] == ["epoch 0"]
    assert any("socket.cpp" in line for line in shown(logs, capfd, raw=True))


def test_one_rank_is_shown_as_it_is(logs: Logs, capfd: Any) -> None:
    logs.say(NOISE, 2, 3).say("a\rb\r", 3).say("c\n[rank3]: d", 3)
    text = logs.run.attempt(0).node("b").rank_log(3).read_bytes().decode()
    show_logs(logs.run, LogQuery(rank=3))
    assert capfd.readouterr().out == text
    assert shown(logs, capfd)[1:] == ["b rank 3 | c", "b rank 3 | d"]


def test_attempts_follow_each_other_with_how_they_ended(logs: Logs, capfd: Any) -> None:
    logs.say("x\n", 0)
    why = {"cause": "preempted", "why": "preempted, at step 4", "then": "it goes on"}
    logs.event("verdict", action="requeue", step=4, **why).attempt(1).say("y\n", 0)
    lines = shown(logs, capfd)
    assert [line for line in lines if "---" not in line] == ["x", "y"]
    assert lines[2].startswith("--- attempt 0 ended ")
    assert lines[2].endswith(": preempted, at step 4; it goes on")
    assert lines[3].startswith("--- attempt 1 began ")
    assert shown(logs, capfd, attempt=1)[1:] == ["y"]
    with pytest.raises(UsageError, match="has no attempt 2; attempts: 0, 1"):
        shown(logs, capfd, attempt=2)


def test_the_jobs_own_output_is_shown(logs: Logs, capfd: Any) -> None:
    logs.say("x\n", 0)
    logs.run.slurm_out.write_text("setting up\nslurmstepd: error\nx\n")
    assert shown(logs, capfd, job=True) == ["setting up", "slurmstepd: error", "x"]


def test_the_jobs_output_is_shown_if_no_rank_printed(logs: Logs, capfd: Any) -> None:
    logs.run.slurm_out.write_text("module: command not found\n")
    assert shown(logs, capfd)[1:] == ["module: command not found"]


@pytest.mark.parametrize("damage", ["none", "torn", "words"])
def test_without_an_index_all_is_shown(logs: Logs, capfd: Any, damage: str) -> None:
    logs.say("x\n", 0, indexed=False).say("y\n", 2, indexed=False)
    for node in logs.run.attempt(0).nodes():
        if damage != "none":
            node.printed.write_text("1.0 0" if damage == "torn" else "\nx y\n1.0 77 3\n0x 0 z\n")
    assert sorted(shown(logs, capfd)[1:]) == ["a rank 0 | x", "b rank 2 | y"]


def test_tasks_of_an_array_are_told_apart(tmp_path: Path, capfd: Any) -> None:
    array = Logs(tmp_path)
    for index in range(2):
        task = Logs(tmp_path, f"run/task-{index}").attempt(0)
        task.say(f"of {index}\n", 0, 2)
    lines = shown(array, capfd)
    assert lines[0].startswith("--- task 0, attempt 0 began")
    assert [line for line in lines if "of 1" in line] == ["task 1 all ranks | of 1"]


def test_attempt_that_no_task_of_an_array_has_is_refused_with_the_existing_ones(
    tmp_path: Path,
) -> None:
    for index in range(2):
        Logs(tmp_path, f"run/task-{index}").attempt(index)
    array = Logs(tmp_path).run
    array.job_json.write_text('{"array": "0-1"}')
    with pytest.raises(UsageError, match="has no attempt 7; attempts: 0, 1") as error:
        show_logs(array, LogQuery(attempt=7))
    assert str(error.value.hint).endswith("run --attempt 1")


def test_following_continues_over_attempts(logs: Logs, capfd: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("hpc_ddp.report.logs.view.ASK_EVERY", 1)
    monkeypatch.setattr("hpc_ddp.report.logs.view.POLL_S", 0.01)
    story = [
        lambda: logs.say("x\nhal", 0, indexed=False),
        lambda: logs.say("f\n", 0, indexed=False),
        lambda: logs.event("verdict", action="requeue", why="preempted", cause="preempted", step=4),
        lambda: logs.attempt(1),
        lambda: logs.say("y\n", 0, 1, indexed=False),
        lambda: logs.event("verdict", action="none", why="", cause="finished"),
    ]

    def ended() -> bool:
        if story:
            story.pop(0)()
        return not story

    follow_logs(logs.run, LogQuery(), ended)
    lines = [line.strip() for line in capfd.readouterr().out.splitlines()]
    assert [line.partition(" ended")[0].partition(" began")[0] for line in lines] == [
        *("--- attempt 0", "x", "half", "--- attempt 0"),
        *("--- attempt 1", "all ranks | y", "--- attempt 1"),
    ]
