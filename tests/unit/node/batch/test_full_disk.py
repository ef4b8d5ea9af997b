"""A disk without room at the start of an attempt costs the parcel of `--stage`, or a requeue."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from hpc_ddp import slurm
from hpc_ddp.core import run_folder
from hpc_ddp.core.errors import CAN_GO_ON
from hpc_ddp.core.file_io import read_json, write_json
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.job.task_folder import make_task
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node import batch
from hpc_ddp.node.outcome.requeue import chain
from unit.fakes import Clock, Slurm, raise_disk_full
from unit.node.batch.fakes import answer_scontrol, call_batch, job_environ, show_job, write_spec


def _fill_disk(monkeypatch: pytest.MonkeyPatch, run: RunFolder, error: int = errno.EDQUOT) -> None:
    """Let the disk have no room for an attempt, unless the parcel is removed."""
    make_attempt = RunFolder._make_attempt
    had_parcel = run.parcel.exists()

    def refuse(run: RunFolder, attempt: AttemptFolder, info: dict[str, Any]) -> bool:
        if had_parcel and not run.parcel.exists():
            return make_attempt(run, attempt, info)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(RunFolder, "_make_attempt", refuse)


def _begin(monkeypatch: pytest.MonkeyPatch, run: RunFolder, **values: str) -> int:
    return call_batch(monkeypatch, run, "begin", **values)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_the_parcel_goes_before_an_attempt_is_refused(
    controller: Slurm,
    run: RunFolder,
    printed: list[str],
    patience: Clock,
    monkeypatch: pytest.MonkeyPatch,
    error: int,
) -> None:
    monkeypatch.setattr(run_folder, "say", printed.append)
    run.parcel.mkdir()
    (run.parcel / "environment-1").write_bytes(bytes(100))
    _fill_disk(monkeypatch, run, error)
    assert _begin(monkeypatch, run) == 0
    assert run.attempt(0).path.is_dir()
    assert not run.parcel.exists()
    assert "no room for an attempt (to allow it again: rm" in run.unstaged.read_text()
    assert printed == [f"no room for an attempt: {run.parcel} of --stage is removed"]
    assert patience.slept == []


REFUSED = "the run's folder can't be used: [Errno 122] Disk quota exceeded"


@pytest.mark.parametrize(
    ("restarts", "attempts", "spec", "is_requeued"),
    [
        (0, 0, {}, True),
        (2, 0, {}, True),
        (3, 0, {}, False),
        (3, 2, {}, True),  # two of the starts were none in vain
        (9, 8, {}, True),
        (1, 1, {"max_requeues": 1}, False),
        (0, 0, {"max_failures": 0}, False),
        (0, 0, {"time": "60", "time_min": "20"}, True),
    ],
)
def test_a_disk_without_room_is_waited_for_in_the_queue(
    controller: Slurm,
    run: RunFolder,
    printed: list[str],
    patience: Clock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    restarts: int,
    attempts: int,
    spec: dict[str, Any],
    is_requeued: bool,
) -> None:
    write_spec(run, **spec)
    for restart in range(attempts):
        info = {"job_id": "7", "nodes": ["n1"], "restarts": restart}
        run.claim_attempt(info, lambda info: False)
    _fill_disk(monkeypatch, run)
    monkeypatch.setattr(chain, "write_json", raise_disk_full)  # no room for the count either
    answer_scontrol(controller, show_job(restarts=restarts))
    code = _begin(monkeypatch, run, SLURM_RESTART_COUNT=str(restarts))
    changes = [words for words in controller.calls("scontrol") if words[0] != "show"]
    settings = ["TimeLimit=60"] if "time_min" in spec else []
    pause = {1: "", 2: "600", 3: "1800"}.get(restarts + 1 - attempts)
    settings += [f"StartTime=now+{pause}"] if pause else []
    update = [["update", "JobId=7", *settings]] if settings else []
    assert changes == ([["requeue", "7"], *update] if is_requeued else [])
    assert code == (0 if is_requeued else CAN_GO_ON)
    assert ("exit 0" in capsys.readouterr().out) is is_requeued
    count = restarts + 1 - attempts
    bound = f"the job was requeued {restarts} times, {count} starts came to nothing"
    refusal = [bound, f"to go on: hpc-ddp submit --run {run.path}"]
    again = f"starts that came to nothing: {count} of at most 3"
    lines = [line for line in printed if "it waits" not in line]
    assert lines == [REFUSED, *([again] if is_requeued else refusal)]


def _refuse_requeue(controller: Slurm) -> None:
    """Let Slurm refuse each requeue, and take a new job, 8."""
    shown = controller.folder / "shown-job"
    shown.write_text(show_job())
    refusal = "[ $1 = requeue ] && echo disabled >&2 && exit 1"
    nodes = "[ $2 = hostnames ] && printf 'n1\\nn2\\n' && exit"
    controller.answer_by("scontrol", f"{refusal}; {nodes}; cat {shown}")
    controller.answer("sbatch", "8")


@pytest.mark.parametrize("cause", ["cut-off", "begin"])
def test_where_a_requeue_is_refused_a_new_job_goes_on(
    controller: Slurm,
    run: RunFolder,
    printed: list[str],
    patience: Clock,
    monkeypatch: pytest.MonkeyPatch,
    cause: str,
) -> None:
    run.script.touch()
    _refuse_requeue(controller)
    with monkeypatch.context() as full:
        _fill_disk(full, run)
        assert call_batch(full, run, cause) == 0
    assert printed[-3:] == [
        "scontrol refused: disabled",
        "it goes on as job 8",
        "starts that came to nothing: 1 of at most 3",
    ]
    (words,) = controller.calls("sbatch")
    assert words == ["--parsable", "--dependency=afterany:7", str(run.script)]
    assert (read_json(run.early_links), [*read_json(run.vain_jobs)]) == ({"7": "8"}, ["7"])
    # The new job finds that the job before it has ended, with 0, before an attempt.
    answer_scontrol(controller, show_job("COMPLETED"))
    waited_for = {"SLURM_JOB_DEPENDENCY": "afterany:7"}
    assert _begin(monkeypatch, run, SLURM_JOB_ID="8", **waited_for) == 0
    assert run.attempt(0).info["job_id"] == "8"
    assert not run.vain_jobs.exists()
    assert not run.early_links.exists()


def test_starts_in_vain_are_counted_over_jobs(
    controller: Slurm, run: RunFolder, printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse_requeue(controller)
    write_json(run.vain_jobs, {"4": 1, "5": 1, "6": 1})
    assert call_batch(monkeypatch, run, "cut-off") == CAN_GO_ON
    assert printed[1:] == [
        "the job was requeued 0 times, 4 starts came to nothing",
        f"to go on: hpc-ddp submit --run {run.path}",
    ]
    assert controller.calls("sbatch") == []


@pytest.mark.parametrize("by_slurm", [False, True])
def test_preemptions_before_an_attempt_are_not_bounded(
    controller: Slurm,
    run: RunFolder,
    printed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    by_slurm: bool,
) -> None:
    """Where Slurm itself requeues the job its record does not tell any more that it preempted."""
    write_spec(run, max_failures=0)
    preempted = show_job(preempted="2026-11-21T10:00:30")
    answer_scontrol(controller, show_job("COMPLETING", restarts=1) if by_slurm else preempted)
    assert call_batch(monkeypatch, run, "cut-off") == 0
    assert (["requeue", "7"] in controller.calls("scontrol")) is not by_slurm
    left_alone = "job 7 was started again, or its run goes on elsewhere: left alone"
    assert printed == ["Slurm ends the job before its attempt", *[left_alone] * by_slurm]
    assert read_json(run.vain_jobs) == {"7": 0}


def test_a_task_without_room_for_its_folder_is_waited_for(
    controller: Slurm,
    run: RunFolder,
    printed: list[str],
    patience: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_spec(run, array="0-1")
    monkeypatch.setattr(RunFolder, "make", raise_disk_full)
    answer_scontrol(controller, show_job(restarts=1))
    values = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "1", "SLURM_RESTART_COUNT": "1"}
    assert _begin(monkeypatch, run, **values) == 0
    changes = [words for words in controller.calls("scontrol") if words[0] != "show"]
    assert changes == [["requeue", "6_1"], ["update", "JobId=6_1", "StartTime=now+600"]]


def test_no_new_job_is_queued_that_nothing_would_bound(
    controller: Slurm, run: RunFolder, printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse_requeue(controller)
    monkeypatch.setattr(chain, "write_json", raise_disk_full)
    assert call_batch(monkeypatch, run, "cut-off") == CAN_GO_ON
    assert controller.calls("sbatch") == []
    assert printed[-1] == f"to go on: hpc-ddp submit --run {run.path}"


@pytest.mark.parametrize("state", ["PENDING", "CANCELLED", "FAILED"])
@pytest.mark.parametrize("cause", ["cut-off", "begin"])
def test_a_chains_next_job_goes_on_after_a_start_in_vain(
    controller: Slurm,
    run: RunFolder,
    printed: list[str],
    patience: Clock,
    monkeypatch: pytest.MonkeyPatch,
    cause: str,
    state: str,
) -> None:
    write_spec(run, continue_by="resubmit")
    run.script.touch()
    controller.answer("sbatch", "9")
    other, own = (controller.folder / name for name in ("shown-8", "shown-7"))
    other.write_text(show_job(state))
    own.write_text(show_job())
    nodes = "[ $2 = hostnames ] && printf 'n1\\nn2\\n' && exit"
    slurm.show_job("7")  # takes the first answer, that of `controller`
    controller.answer_by("scontrol", f"{nodes}; [ $3 = 8 ] && cat {other} || cat {own}")
    write_json(run.early_links, {"7": "8"})
    _fill_disk(monkeypatch, run)
    for name, value in job_environ(run).items():
        monkeypatch.setenv(name, value)
    is_cancelled = state == "CANCELLED"
    code = batch.main([cause])
    assert code == (CAN_GO_ON if is_cancelled else 0)
    assert len(controller.calls("sbatch")) == (state == "FAILED")
    assert [*read_json(run.vain_jobs)] == ["7"]
    assert read_json(run.early_links) == {"7": "9" if state == "FAILED" else "8"}
    # The next job starts although this one has begun no attempt, but not after a scancel.
    for end in ("COMPLETED", "TIMEOUT", "CANCELLED"):
        own.write_text(show_job(end))
        next_job = JobRef(read_json(run.early_links)["7"])
        assert chain._chain_has_ended(run, next_job) is (end == "CANCELLED")


@pytest.mark.parametrize(
    ("record", "spec", "is_requeued"),
    [
        (show_job("COMPLETING").replace("Reason=None", "Reason=TimeLimit"), {}, True),
        (show_job("COMPLETING"), {}, False),  # scancel
        (show_job("COMPLETING", restarts=1), {}, False),  # requeued by Slurm
        (
            show_job("COMPLETING").replace("Reason=None", "Reason=TimeLimit"),
            {"max_failures": 0},
            False,
        ),
        (show_job("RUNNING"), {"continue_by": "resubmit"}, True),  # its next job is refused
    ],
)
def test_set_up_lines_that_are_cut_off_are_run_again(
    controller: Slurm,
    run: RunFolder,
    printed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    record: str,
    spec: dict[str, Any],
    is_requeued: bool,
) -> None:
    write_spec(run, **spec)
    answer_scontrol(controller, record)
    for name, value in job_environ(run).items():
        monkeypatch.setenv(name, value)
    is_left_alone = "Restarts=1" in record
    assert batch.main(["cut-off"]) == (0 if is_requeued or is_left_alone else CAN_GO_ON)
    assert (["requeue", "7"] in controller.calls("scontrol")) is is_requeued
    assert printed[0] == "Slurm ends the job before its attempt"


@pytest.mark.parametrize("reason", ["cancelled", "ended", "started anew", "interactive"])
def test_a_job_that_is_over_is_not_requeued_for_its_disk(
    controller: Slurm,
    run: RunFolder,
    printed: list[str],
    patience: Clock,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
) -> None:
    _fill_disk(monkeypatch, run)
    state, restarts = "RUNNING", 0
    if reason == "ended":
        state = "COMPLETING"
    if reason == "started anew":
        restarts = 1
    if reason == "cancelled":  # while the disk was waited for
        make_attempt = RunFolder._make_attempt

        def cancel(run: RunFolder, attempt: AttemptFolder, info: dict[str, Any]) -> bool:
            run.cancelled.touch()
            return make_attempt(run, attempt, info)

        monkeypatch.setattr(RunFolder, "_make_attempt", cancel)
    answer_scontrol(controller, show_job(state, restarts))
    values = {"HPC_DDP_INTERACTIVE": "7"} if reason == "interactive" else {}
    assert _begin(monkeypatch, run, **values) == (0 if reason == "started anew" else CAN_GO_ON)
    assert ["requeue", "7"] not in controller.calls("scontrol")
    line = {
        "cancelled": "the run was cancelled: not requeued",
        "ended": "the job is COMPLETING by now: not requeued",
        "started anew": "job 7 was started again, or its run goes on elsewhere: left alone",
        "interactive": f"to go on: hpc-ddp submit --run {run.path}",
    }[reason]
    assert line in printed


@pytest.mark.parametrize(
    ("attempts", "restarts", "code", "pause"),
    [(0, 0, 3, ""), (1, 1, 0, ""), (1, 2, 0, "600"), (1, 3, 0, "1800"), (1, 4, 3, "")],
)
def test_set_up_lines_that_have_worked_before_are_run_again(
    controller: Slurm,
    run: RunFolder,
    printed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    attempts: int,
    restarts: int,
    code: int,
    pause: str,
) -> None:
    """Data were away for 15 s, and `set -e` with a `cp` ended a run that had trained."""
    for _ in range(attempts):
        run.claim_attempt({"job_id": "7", "nodes": ["n1"], "restarts": 0}, lambda info: False)
    write_json(run.vain_jobs, {"5": 0, "7": restarts - 1})  # job 5 was preempted
    answer_scontrol(controller, show_job(restarts=restarts))
    controller.answer("scontrol", "RequeueExit = (null)")
    code_now = call_batch(monkeypatch, run, "failed", "3", SLURM_RESTART_COUNT=str(restarts))
    assert code_now == code
    nodes = read_json(run.vain_nodes)
    assert ([len(times) for times in nodes.values()] == [1]) is bool(attempts)
    changes = [words for words in controller.calls("scontrol") if words[0] != "show"]
    update = [["update", "JobId=7", f"StartTime=now+{pause}"]] if pause else []
    assert changes == ([["requeue", "7"], *update] if code == 0 else [])


def test_what_set_up_lines_did_for_other_tasks_counts_for_a_task(
    controller: Slurm, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sick node ended all tasks of a sweep that had not begun, beside idle nodes."""
    write_spec(run, array="0-2")
    answer_scontrol(controller, show_job())
    controller.answer("scontrol", "RequeueExit = (null)")
    for task, code in (("1", 3), ("2", 0)):
        names = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": task}
        assert call_batch(monkeypatch, run, "failed", "3", **names) == code
        first = make_task(run, 0)
        first.claim_attempt({"job_id": "7", "nodes": ["n1"]}, lambda info: False)
    assert [len(times) for times in read_json(first.vain_nodes).values()] == [1]
