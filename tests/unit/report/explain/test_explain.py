"""Explanations of runs that are finished, live, or only rendered, and of arrays."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from written_runs import Written, record

from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.journal.events import Queued
from hpc_ddp.core.process import identity
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.core.run_index import find_run, link_job


def test_finished(written: Written) -> None:
    written.attempt(0, steps=20, saved=20).verdict("preempted", "requeue")
    written.attempt(1, steps=90, saved=90).event("finished", 1, step=90)
    found = written.verdict("finished", "none", 1).explain()
    assert (found.kind, found.attempt) == ("finished", 1)
    assert "is finished after 90 steps, in 2 attempts" in found.text
    assert "Before that it was preempted once." in found.text
    assert "export" in found.hint


def test_rendered_only(tmp_path: Path) -> None:
    found = Written(tmp_path).explain()
    assert found.kind == "rendered"
    assert found.hint.startswith("sbatch ")


def test_waiting_after_a_requeue_tells_of_the_last_end(written: Written) -> None:
    for number in (0, 1):
        written.attempt(number, steps=20, saved=20)
        written.event("stopped", number, step=20, reason="notice")
        written.verdict("preempted", "requeue", number)
    written.attempt(2, steps=33, saved=30).failure(code=-9, number=2)
    # the verdict on it, as its retry has it
    path = written.run.journal_folder / "all.jsonl"
    path.write_text(path.read_text().replace('"give up"', '"requeue"'))
    found = written.explain(record("PENDING", "BeginTime", start_time=time.time() + 100))
    assert found.kind == "waiting"
    assert "Slurm expects to start it on" in found.text
    assert "Before that it was preempted twice." in found.text
    assert "start it on" in found.text.partition("Its last attempt failed at step 33: rank 3")[0]
    assert "The newest checkpoint is of step 30: 3 steps" in found.text
    assert (found.lost_steps, found.step) == (3, 33)


def test_running(written: Written) -> None:
    written.attempt(0, steps=20, saved=10)
    found = written.explain(record("RUNNING"))
    assert found.kind == "running"
    assert "running on n[1-2]" in found.text
    assert "is at step 20 of 90 (loss 0.5)" in found.text
    assert "checkpoint is of step 10" in found.text
    assert "it may hang" in found.text  # the last event is 950 s old
    for _ in range(3):
        own: dict[str, Any] = {"busy_s": [0.1, 0.1, 0.4], "data_s": [0.0, 0.0, 0.3], "slowest": 2}
        written.event("ranks", step=20, steps=9, step_s=0.4, node="n2", **own)
    found = written.explain(record("RUNNING"))
    assert (
        "But rank 2 on n2 waits for data: 0.4 s a step of its own, others 0.1 s: the" in found.text
    )
    written.event("save_failed", step=20, error="[Errno 28] No space left on device")
    found = written.explain(record("RUNNING"))
    assert "LAST SAVE FAILED" in found.text
    assert "make room" in found.hint


def test_running_but_not_training_yet(written: Written) -> None:
    written.event("queued", job_id="7")
    assert "just been started" in written.explain(record("RUNNING")).text
    written.attempt(0)
    assert "reports no steps" in written.explain(record("RUNNING")).text


@pytest.mark.parametrize(("state", "kind"), [("SUSPENDED", "suspended"), ("COMPLETING", "ending")])
def test_other_states(written: Written, state: str, kind: str) -> None:
    assert written.attempt(0, steps=3).explain(record(state)).kind == kind


def test_a_verdict_that_slurm_has_not_carried_out_yet(written: Written) -> None:
    written.attempt(0, steps=3).verdict("preempted", "requeue")
    assert written.explain(record("RUNNING")).kind == "ending"


def test_a_process_of_this_machine_is_seen_to_run(tmp_path: Path) -> None:
    written = Written(tmp_path, backend="local").event("started", nodes=["a"], **identity())
    assert written.explain().kind == "running"


@pytest.mark.parametrize("reason", ["Priority", "Resources"])
def test_preempted_it_has_only_to_wait(written: Written, reason: str) -> None:
    written.attempt(0, steps=20, saved=20).verdict("preempted", "requeue")
    assert written.explain(record("PENDING", reason)).hint == "wait: it starts by itself"


def test_an_array_is_summed_up(tmp_path: Path) -> None:
    array = Written(tmp_path, array="0-2").event("submitted").event("queued", job_id="7")
    for number, end in enumerate(("finished", "failed")):
        task = Written(tmp_path / "other")
        task.attempt(0, steps=20)
        if end == "failed":
            task.failure("ValueError: boom")
        else:
            task.event("finished", step=20).verdict("finished", "none")
        shutil.move(task.run.path, array.run.path / f"task-{number}")
    found = array.explain(record("PENDING", "Resources"))
    assert found.kind == "array"
    assert "2 tasks have begun: 1 finished, 1 python error. Others wait" in found.text
    assert "Task 1 of run digits (20261121-100000-abcd) failed at step 20" in found.text
    assert found.tasks["1"].kind == "python error"


def test_a_task_of_an_array_is_found_by_its_job_id(tmp_path: Path) -> None:
    array = Written(tmp_path, array="0-2")
    task = RunFolder(array.run.path / "task-1").make()
    task.job_json.write_text(array.run.job_json.read_text())
    link_job(JobRef("7"), array.run)
    array.run.journal("submit").write(Queued("7"))
    assert find_run(tmp_path, "7_1") == task
