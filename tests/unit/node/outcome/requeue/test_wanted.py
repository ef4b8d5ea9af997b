"""Attempts that were cancelled or superseded do not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.file_io import read_json, write_json
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome.requeue import chain
from hpc_ddp.node.outcome.requeue.chain import admit_job, is_link, own_id, record_late_link
from tests.raw_events import raw
from unit.fakes import Slurm


def test_a_task_of_an_array_is_named_by_array_and_task() -> None:
    assert own_id({"SLURM_JOB_ID": "7"}) == "7"
    last = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    assert own_id(last) == "7_2"  # a requeue of 7 restarts all tasks


def test_a_first_start_lifts_the_mark_of_the_whole_array(tmp_path: Path) -> None:
    array = RunFolder(tmp_path / "run").make()
    task = RunFolder(array.path / "task-1").make()
    for folder in (array, task):
        folder.cancelled.touch()
    with pytest.raises(HpcDdpError, match="was cancelled"):
        admit_job(task, restarts=1, is_link=False, job=JobRef("8"))
    admit_job(task, restarts=0, is_link=False, job=JobRef("8"))
    assert not array.cancelled.exists()
    assert not task.cancelled.exists()


@pytest.mark.parametrize("ids", [{"job": JobRef("8")}, {"job": JobRef("9"), "array": JobRef("8")}])
def test_a_cancel_refuses_the_job_that_starts_meanwhile(
    tmp_path: Path, ids: dict[str, JobRef]
) -> None:
    run = RunFolder(tmp_path / "run").make()
    write_json(run.cancelled, {"jobs": ["7", "8"]})
    with pytest.raises(HpcDdpError, match="was cancelled as it started"):
        admit_job(run, restarts=0, is_link=False, **ids)
    assert run.cancelled.exists()
    admit_job(run, restarts=0, is_link=False, job=JobRef("10"))
    assert not run.cancelled.exists()


def test_a_job_that_the_job_before_it_has_queued_is_a_link(run: RunFolder) -> None:
    assert not is_link(run, JobRef("8"))
    write_json(run.attempt(0).path / "next.json", {"job_id": "8"})
    assert is_link(run, JobRef("8"))
    assert not is_link(run, JobRef("7"))


@pytest.mark.parametrize("singleton", ["", ",singleton"])
@pytest.mark.parametrize("has_attempt", [True, False])
@pytest.mark.parametrize("has_verdict", [True, False])
def test_a_job_whose_id_came_too_late_is_a_link(
    tmp_path: Path, slurm_commands: Slurm, singleton: str, has_attempt: bool, has_verdict: bool
) -> None:
    """The job before it was cancelled while its sbatch waited for an answer."""
    run = RunFolder(tmp_path / "run").make()
    run.journal("submit").write(raw("queued", job_id="7"))
    if has_attempt:
        run.claim_attempt({"job_id": "7"}, is_live=lambda info: False)
    if has_attempt and has_verdict:
        run.journal("batch").write(raw("verdict", cause="preempted", action="requeue", why=""))
    record_late_link(run, JobRef("8"), {"SLURM_JOB_DEPENDENCY": f"afterany:7{singleton}"})
    assert is_link(run, JobRef("8"))
    assert run.jobs(run.events()) == [JobRef("7"), JobRef("8")]
    slurm_commands.answer("scontrol", "   JobState=CANCELLED Reason=None\n")
    if has_attempt and has_verdict:  # a person's scancel of the job before says so in its verdict
        admit_job(run, restarts=0, is_link=True, job=JobRef("8"))
    else:
        with pytest.raises(HpcDdpError, match="was cancelled, or given up"):
            admit_job(run, restarts=0, is_link=True, job=JobRef("8"))


@pytest.mark.parametrize("has_attempt", [True, False])
def test_a_late_link_of_a_task_is_one(tmp_path: Path, has_attempt: bool) -> None:
    """Slurm names the job before it by array and index, and the attempt has a number of its own."""
    array = RunFolder(tmp_path / "run").make()
    array.journal("submit").write(raw("queued", job_id="7"))
    task = array.task(3).make()
    if has_attempt:
        task.claim_attempt({"job_id": "11"}, is_live=lambda info: False)
    environ = {"SLURM_JOB_DEPENDENCY": "afterany:7_3", "SLURM_ARRAY_TASK_ID": "2"}
    record_late_link(task, JobRef("12"), environ)
    assert not is_link(task, JobRef("12"))
    record_late_link(task, JobRef("12"), environ | {"SLURM_ARRAY_TASK_ID": "3"})
    assert is_link(task, JobRef("12"))


@pytest.mark.parametrize("dependency", ["afterany:6", "afterok:7", "afterany:7:9", ""])
def test_a_persons_dependency_makes_no_link(run: RunFolder, dependency: str) -> None:
    record_late_link(run, JobRef("8"), {"SLURM_JOB_DEPENDENCY": dependency})
    run.journal("submit").write(raw("queued", job_id="9"))
    record_late_link(run, JobRef("9"), {"SLURM_JOB_DEPENDENCY": "afterany:7"})
    assert run.links() == []


@pytest.mark.parametrize(
    ("attempt", "cause", "action", "state", "ended"),
    [
        (0, "failed", "give up", "COMPLETED", True),
        (0, "cancelled", "none", "COMPLETED", True),
        (0, "preempted", "requeue", "CANCELLED", False),
        (None, "", "", "CANCELLED", True),  # by scancel, before its verdict
        (None, "", "", "TIMEOUT", False),
        (1, "failed", "give up", "TIMEOUT", False),  # of no attempt that has a folder
    ],
)
def test_an_ended_chain_is_not_continued(
    run: RunFolder,
    slurm_commands: Slurm,
    attempt: int | None,
    cause: str,
    action: str,
    state: str,
    ended: bool,
) -> None:
    slurm_commands.answer("scontrol", f"   JobState={state} Reason=None\n")
    if attempt is not None:
        run.journal("batch", attempt).write(raw("verdict", cause=cause, action=action, why=""))
    admit_job(run, restarts=1, is_link=False, job=JobRef("8"))
    if ended:
        with pytest.raises(HpcDdpError, match="was cancelled, or given up"):
            admit_job(run, restarts=0, is_link=True, job=JobRef("8"))
    else:
        admit_job(run, restarts=0, is_link=True, job=JobRef("8"))
    assert (slurm_commands.calls("scontrol") != []) is (attempt != 0)


@pytest.mark.parametrize(
    ("before", "answer", "ended"),
    [
        (["6"], "   JobState=PREEMPTED Reason=None\n", False),
        (["6"], "   JobState=NODE_FAIL Reason=None\n", False),
        (["6"], "   JobState=FAILED Reason=NonZeroExitCode\n", True),
        (["6"], "   JobState=CANCELLED Reason=None\n", True),
        (["1", "2", "3", "4", "5"], "   JobState=PREEMPTED Reason=None\n", False),
        (["5", "6", "3"], "   JobState=PREEMPTED Reason=None\n", False),
    ],
)
def test_a_job_that_was_taken_away_in_its_set_up_is_followed(
    run: RunFolder, slurm_commands: Slurm, before: list[str], answer: str | None, ended: bool
) -> None:
    write_json(run.early_links, {**dict.fromkeys(before, "0"), before[-1]: "8", "8": "9"})
    assert is_link(run, JobRef("8"))
    assert run.jobs([])[-2:] == [JobRef("8"), JobRef("9")]
    slurm_commands.answer("scontrol", answer or "", code=0 if answer else 1)
    if ended:
        with pytest.raises(HpcDdpError, match="was cancelled, or given up"):
            admit_job(run, restarts=0, is_link=True, job=JobRef("8"))
    else:
        admit_job(run, restarts=0, is_link=True, job=JobRef("8"))
    assert slurm_commands.calls("scontrol") == [["show", "job", before[-1]]]


def test_a_job_that_was_refused_does_not_end_the_chain(
    run: RunFolder, slurm_commands: Slurm
) -> None:
    """The refused job had queued a job of its own before its set-up lines."""
    slurm_commands.answer("scancel")
    write_json(run.early_links, {"5": "6"})
    chain.cancel_next_early(run, {"SLURM_JOB_ID": "5"})
    assert slurm_commands.calls("scancel") == [["6"]]
    assert read_json(run.early_links) == {}
    chain.cancel_next_early(run, {"SLURM_JOB_ID": "5"})
    write_json(run.early_links, {"5": "6"})
    write_json(run.attempt(0).path / "next.json", {"job_id": "8"})
    slurm_commands.answer("scontrol", "   JobState=RUNNING Reason=None\n")
    admit_job(run, restarts=0, is_link=True, job=JobRef("8"))
    assert slurm_commands.calls("scontrol") == [["show", "job", "7"]]


def test_a_chain_without_an_attempt_begins(tmp_path: Path, slurm_commands: Slurm) -> None:
    admit_job(RunFolder(tmp_path / "new").make(), restarts=0, is_link=True, job=JobRef("8"))
    assert slurm_commands.calls("scontrol") == []
