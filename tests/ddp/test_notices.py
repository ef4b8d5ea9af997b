"""Who says that a signal was a notice, and how a worker ends."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

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
    time.sleep(0.3)
    began = time.monotonic()
    launch.signal(signal.SIGTERM)
    assert launch.wait() == [143, 143]
    assert 1.5 < time.monotonic() - began < 5
    assert "without a notice" in launch.output()
    assert not list(crew.run.checkpoints.iterdir())


def test_a_signal_before_its_word_is_a_notice(crew: Any) -> None:
    notice = crew.base / "notice"
    launch = crew.launch(2, *SLOW, "--at", "4", HPC_DDP_NOTICE=str(notice))
    launch.until("ACTING")
    for _ in range(3):
        launch.signal(signal.SIGTERM)
    time.sleep(0.5)
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
    env["HPC_DDP_END_TIME"] = str(time.time() + 14)  # ~ 4 s of steps: the rest is for saving
    crew.go(2, "--step-seconds", "0.5", **env)
    assert time.time() < float(env.pop("HPC_DDP_END_TIME")) - 5
    crew.run.cancelled.touch()
    crew.go(2, *SLOW, **env)
    assert [event["reason"] for event in crew.events("stopped")] == [
        "notice",
        "deadline",
        "cancelled",
    ]


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
    began = time.monotonic()
    codes = launch.wait()
    assert codes == [1, 1]  # rank 0 loses its connection
    assert time.monotonic() - began < 10
    failed = {event["rank"]: event for event in crew.events("failed")}
    assert failed[1]["error"] == "ValueError: a bad batch"
    assert "in act" in failed[1]["traceback"]
    assert failed[1]["node"] == "here"
    assert "ValueError: a bad batch" in launch.output()

    launch = crew.launch(1, "--at", "3", "--exit", "7")
    assert launch.wait() == [7]
