"""Who says that a signal was a notice, and how a worker ends."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from hpc_ddp.training.stops.signals import WORD_S
from tests.waiting import wait_until

SLOW = ("--step-seconds", "0.05")


def give_notice(path: Path, source: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"source": source}))
    draft.rename(path)


def test_a_signal_without_word_ends_a_worker_at_once(crew: Any) -> None:
    # Rank 1 hangs, so rank 0 sits in a collective: no Python code runs in its main thread.
    never = str(crew.base / "never")
    notice = str(crew.base / "notice")
    launch = crew.launch(
        2, *SLOW, "--at", "4", "--wait", never, "--ranks", "1", HPC_DDP_NOTICE=notice
    )
    launch.until("ACTING")
    steps = crew.run.path / "seen-0"
    wait_until(lambda: "\n0 4 " in steps.read_text(), "rank 0's step 4, which it ends alone")
    began = time.monotonic()
    launch.signal(signal.SIGTERM)
    assert launch.wait() == [143, 143]
    assert time.monotonic() - began >= WORD_S  # for that long the word may still come
    assert "without a notice" in launch.output()
    assert not list(crew.run.checkpoints.iterdir())


def test_a_signal_before_its_word_is_a_notice(crew: Any) -> None:
    notice = crew.base / "notice"
    patience = ("--word-seconds", "600")
    launch = crew.launch(2, *SLOW, "--at", "4", *patience, HPC_DDP_NOTICE=str(notice))
    launch.until("ACTING")
    for _ in range(3):
        launch.signal(signal.SIGTERM)
        launch.await_delivery(signal.SIGTERM)
    give_notice(notice, "preemption")
    launch.signal(signal.SIGTERM)
    assert launch.wait() == [0, 0], launch.output()
    (stopped,) = crew.events("stopped")
    assert (stopped["reason"], stopped["source"]) == ("notice", "preemption")
    assert (crew.run.checkpoints / f"step-{stopped['step']}").is_dir()


def test_the_other_ways_to_stop(crew: Any) -> None:
    notice = crew.base / "notice"
    give_notice(notice, "drill")  # a file alone, without any signal
    env = {"HPC_DDP_NOTICE": str(notice)}
    crew.go(2, *SLOW, **env)
    notice.unlink()
    crew.go(2, "--step-seconds", "0.5", **env, HPC_DDP_END_TIME=str(time.time() + 9))
    crew.run.cancelled.touch()
    crew.go(2, "--step-seconds", "0.5", **env)
    assert [event["reason"] for event in crew.events("stopped")] == [
        "notice",
        "deadline",
        "cancelled",
    ]


def test_rank_0_expects_what_a_save_took_in_an_earlier_attempt(crew: Any) -> None:
    """It alone watches the clock, for all."""
    crew.go(2, "--epochs", "1", "--at", "2", "--signal", str(int(signal.SIGTERM)))
    (saved,) = crew.events("checkpoint")
    launch = crew.launch(2, "--epochs", "1", "--print-save-seconds")
    assert launch.wait() == [0, 0], launch.output()
    total_s = saved["stall_s"] + saved["write_s"]
    assert f"a save takes {total_s!r} s\n" in launch.logs[0].read_text()


def test_loader_workers_outlive_a_notice(crew: Any) -> None:
    launch = crew.launch(1, *SLOW, "--workers", "2", "--at", "4")
    launch.until("ACTING")
    children = Path(f"/proc/{launch.pids[0]}/task/{launch.pids[0]}/children").read_text().split()
    assert len(children) >= 2
    for child in children:
        os.kill(int(child), signal.SIGTERM)
    launch.signal(signal.SIGTERM)
    assert launch.wait() == [0], launch.output()
    assert crew.events("stopped")


def test_a_failure_is_journaled_and_ends_quickly(crew: Any) -> None:
    launch = crew.launch(2, *SLOW, "--at", "3", "--fail", "--ranks", "1")
    codes = launch.wait()
    assert codes == [1, 1]  # rank 0 loses its connection
    failed = {event["rank"]: event for event in crew.events("failed")}
    assert failed[1]["error"] == "ValueError: a bad batch"
    assert "in act" in failed[1]["traceback"]
    assert failed[1]["node"] == "here"
    assert "ValueError: a bad batch" in launch.output()

    launch = crew.launch(1, "--at", "3", "--exit", "7")
    assert launch.wait() == [7]


def test_a_fatal_signal_in_compiled_code_shows_the_stack_of_python(crew: Any) -> None:
    launch = crew.launch(1, "--at", "3", "--signal", str(int(signal.SIGSEGV)))
    assert launch.wait() == [-signal.SIGSEGV]
    fatal, _, stacks = launch.output().partition("Current thread")
    assert "Fatal Python error: Segmentation fault" in fatal
    assert 'training.py", line' in stacks
