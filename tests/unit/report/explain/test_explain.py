"""Explanations of runs that are finished, live, or only rendered, and of arrays."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from hpc_ddp.core.file_io import write_json
from hpc_ddp.core.journal.stragglers import summarize_times
from hpc_ddp.core.process import identity
from hpc_ddp.training.checkpoint.storage import disk
from unit.fakes import Slurm
from unit.report.written_runs import Written, record


def test_a_finished_run_is_explained(written: Written) -> None:
    written.attempt(0, steps=20, saved=20).verdict("preempted", "requeue")
    written.attempt(1, steps=90, saved=90).event("finished", 1, step=90)
    explanation = written.verdict("finished", "none", 1).explain()
    assert (explanation.kind, explanation.attempt) == ("finished", 1)
    assert "is finished after 90 steps, in 2 attempts" in explanation.text
    assert "Before that it was preempted once." in explanation.text
    assert "export" in explanation.hint
    disk.write_manifest(written.run.checkpoints / "step-90", {"format": "lightning"}, {})
    assert written.explain().hint == ""  # its own checkpoint is a file to load


def test_a_run_that_has_just_finished_has_no_earlier_verdict(written: Written) -> None:
    written.attempt(0, steps=20, saved=20)
    written.verdict("preempted", "requeue", why="preempted, at step 20")
    written.attempt(1, steps=90, saved=90).event("finished", 1, step=90)
    text = written.explain().text
    assert "is finished after 90 steps" in text
    assert "at step 20" not in text


def test_a_rendered_run_is_explained(tmp_path: Path) -> None:
    explanation = Written(tmp_path).explain()
    assert explanation.kind == "rendered"
    assert explanation.hint.startswith("sbatch ")


def test_a_waiting_run_tells_its_last_end(written: Written) -> None:
    for number in (0, 1):
        written.attempt(number, steps=20, saved=20)
        written.event("stopped", number, step=20, reason="notice")
        written.verdict("preempted", "requeue", number)
    written.attempt(2, steps=33, saved=30).failure(code=-9, number=2)
    # the verdict on it, as its retry has it
    path = written.run.journal_folder / "all.jsonl"
    path.write_text(path.read_text().replace('"give up"', '"requeue"'))
    explanation = written.explain(record("PENDING", "BeginTime", start_time=time.time() + 100))
    assert explanation.kind == "waiting"
    assert "Slurm expects to start it on" in explanation.text
    assert "Before that it was preempted twice." in explanation.text
    assert (
        "start it on" in explanation.text.partition("Its last attempt failed at step 33: rank 3")[0]
    )
    assert "The newest checkpoint is of step 30: 3 steps" in explanation.text
    assert (explanation.lost_steps, explanation.step) == (3, 33)


def test_starts_that_came_to_nothing_are_told(written: Written) -> None:
    written.attempt(0, steps=20).verdict("preempted", "requeue")
    words = "1 start came to nothing: its output says why."
    assert words not in written.explain(record("PENDING", "BeginTime")).text
    write_json(written.run.vain_jobs, {"7": 1})
    assert words in written.explain(record("PENDING", "BeginTime")).text


def test_a_running_run_is_explained(written: Written) -> None:
    written.attempt(0, steps=20, saved=10)
    explanation = written.explain(record("RUNNING"))
    assert explanation.kind == "running"
    assert "running on n[1-2]" in explanation.text
    assert "is at step 20 of 90 (loss 0.5)" in explanation.text
    assert "checkpoint is of step 10" in explanation.text
    assert "it may hang" in explanation.text  # the last event is 950 s old
    for _ in range(3):
        times = summarize_times(20, 9, 0.4, [0.0, 0.0, 0.3], [0.1, 0.1, 0.4], ["n1", "n1", "n2"])
        written.event("ranks", **times.to_fields())
    explanation = written.explain(record("RUNNING"))
    assert (
        "But rank 2 on n2 waits for data: 0.4 s a step of its own, others 0.1 s: the"
        in explanation.text
    )
    written.event("save_failed", step=20, error="[Errno 28] No space left on device")
    explanation = written.explain(record("RUNNING"))
    assert "LAST SAVE FAILED" in explanation.text
    assert "make room" in explanation.hint


def test_a_run_that_does_not_train_yet_is_explained(written: Written) -> None:
    written.event("queued", job_id="7")
    assert "just been started" in written.explain(record("RUNNING")).text
    written.attempt(0)
    assert "reports no steps" in written.explain(record("RUNNING")).text


@pytest.mark.parametrize(("state", "kind"), [("SUSPENDED", "suspended"), ("COMPLETING", "ending")])
def test_suspended_and_completing_runs_are_explained(
    written: Written, state: str, kind: str
) -> None:
    assert written.attempt(0, steps=3).explain(record(state)).kind == kind


def test_a_verdict_that_slurm_has_not_carried_out_yet(written: Written) -> None:
    written.attempt(0, steps=3).verdict("preempted", "requeue")
    assert written.explain(record("RUNNING")).kind == "ending"


def test_a_process_of_this_machine_is_seen_to_run(tmp_path: Path) -> None:
    written = Written(tmp_path, backend="local").event("started", nodes=["a"], **identity())
    assert written.explain().kind == "running"


@pytest.mark.parametrize(
    ("kind", "progress"),
    [
        (None, "it starts over, or goes on from its own checkpoints."),
        ("maybe finished", "it may have finished, or goes on from its own checkpoints."),
    ],
)
def test_the_progress_of_a_plain_script_is_unknown(
    written: Written, kind: str | None, progress: str
) -> None:
    explanation = written.attempt(0).verdict("notice", "requeue", kind=kind).explain()
    assert f"Its progress is unknown: {progress}" in explanation.text


@pytest.mark.parametrize("reason", ["Priority", "Resources"])
def test_a_preempted_run_has_only_to_wait(written: Written, reason: str) -> None:
    written.attempt(0, steps=20, saved=20).verdict("preempted", "requeue")
    assert written.explain(record("PENDING", reason)).hint == "wait: it starts by itself"


def test_an_array_is_summed_up(tmp_path: Path, slurm_commands: Slurm) -> None:
    """Slurm is not asked for the finished task."""
    array = Written(tmp_path, array="0-2").event("submitted").event("queued", job_id="7")
    for number, end in enumerate(("finished", "failed")):
        task = Written(tmp_path / "other").event("queued", job_id=f"7_{number}")
        task.attempt(0, steps=20)
        if end == "failed":
            task.failure("ValueError: boom")
        else:
            task.event("finished", step=20).verdict("finished", "none")
        shutil.move(task.run.path, array.run.path / f"task-{number}")
    explanation = array.explain(record("PENDING", "Resources"))
    assert explanation.kind == "array"
    assert "2 tasks have begun: 1 finished, 1 python error. Others wait" in explanation.text
    assert "Task 1 of run digits (20261121-100000-abcd) failed at step 20" in explanation.text
    assert explanation.tasks["1"].kind == "python error"
    jobs = [words[-1] for words in slurm_commands.calls("scontrol") if "job" in words]
    assert jobs == ["7_1", "7"]


def test_of_tasks_that_failed_slurm_is_asked_for_the_first_alone(
    tmp_path: Path, slurm_commands: Slurm
) -> None:
    array = Written(tmp_path, array="0-3").event("submitted").event("queued", job_id="7")
    for number in range(4):
        task = Written(tmp_path / "other").event("queued", job_id=f"7_{number}")
        task.attempt(0, steps=20).event("started", nodes=["n2"], job_id=f"7_{number}")
        task.failure("ValueError: boom")
        shutil.move(task.run.path, array.run.path / f"task-{number}")
    text = array.explain(record("COMPLETED")).text
    assert "4 tasks have begun: 4 python error." in text
    assert "Task 0 of run digits (20261121-100000-abcd) failed at step 20" in text
    jobs = [words[-1] for words in slurm_commands.calls("scontrol") if "job" in words]
    assert jobs == ["7_0", "7"]


@pytest.mark.parametrize(
    ("job", "imports_s", "is_told"),
    [
        ({}, 40.0, True),
        ({}, 4.0, False),
        ({"stage": True}, 40.0, False),
        ({"image": "i"}, 40.0, False),
    ],
)
def test_slow_imports_have_stage_recommended(
    written: Written, job: dict[str, object], imports_s: float, is_told: bool
) -> None:
    values = json.loads(written.run.job_json.read_text()) if written.run.job_json.exists() else {}
    written.run.job_json.write_text(json.dumps({**values, **job}))
    written.attempt(0, steps=20, saved=20)
    written.event(
        "worker", 0, began=1.0, called=99.0, imports_began=1.0, imports_ended=1 + imports_s
    )
    text = written.verdict("preempted", "requeue").explain().text
    assert ("Its imports took 40 s: with --stage" in text) == is_told


def test_imports_of_a_worker_by_itself_count_up_to_its_start(written: Written) -> None:
    written.attempt(0, steps=20, saved=20).event("worker", 0, began=10.0, called=40.0)
    assert "Its imports took 30 s: with --stage" in written.explain().text
