"""Each job of a chain queues the next one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from hpc_ddp.core.file_io import write_json
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.journal.enums import Action, Cause
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome.requeue import kept_variables, next_start
from hpc_ddp.node.outcome.requeue.chain import queue_next_link
from hpc_ddp.node.outcome.verdict import Verdict
from tests.raw_events import raw
from unit.fakes import Clock, Slurm
from unit.node.outcome.requeue.fakes import (
    GO_ON,
    RUNNING,
    SHOWN_JOB,
    blame_nodes,
    changes_of,
    exclude_nodes,
    job_environ,
)
from unit.report.written_runs import linked


@pytest.mark.parametrize(
    ("link", "decided", "code", "cancelled"),
    [
        ("8", GO_ON, 0, []),
        ("8", Verdict(Cause.FAILED, Action.GIVE_UP, "", 3), 3, [["8"]]),
        ("8", Verdict(Cause.FINISHED, Action.NONE, ""), 0, [["8"]]),
        ("8", Verdict(Cause.SUPERSEDED, Action.NONE, ""), 0, []),
        (None, Verdict(Cause.FINISHED, Action.NONE, ""), 0, []),
    ],
)
def test_the_end_of_a_link_keeps_or_cancels_the_next(
    slurm_commands: Slurm,
    end: Callable[..., int],
    run: RunFolder,
    link: str | None,
    decided: Verdict,
    code: int,
    cancelled: list[list[str]],
) -> None:
    slurm_commands.answer("scancel")
    slurm_commands.answer("scontrol", SHOWN_JOB.format("PENDING", 0))
    if link:
        write_json(run.attempt(0).path / "next.json", {"job_id": link})
    assert end(decided, continue_by="resubmit") == code
    assert slurm_commands.calls("scancel") == cancelled
    assert slurm_commands.calls("sbatch") == []


def test_a_link_that_was_not_queued_at_the_start_is_at_the_end(
    slurm_commands: Slurm, end: Callable[..., int], printed: list[str]
) -> None:
    slurm_commands.answer("sbatch", "8\n")
    slurm_commands.answer("sbatch", err="no", code=1)
    slurm_commands.answer("scontrol", SHOWN_JOB.format("RUNNING", 2))
    slurm_commands.answer("scontrol", SHOWN_JOB.format("PENDING", 0))
    assert end(continue_by="resubmit") == 0
    assert end(continue_by="resubmit") == 0  # it waits already
    assert len(slurm_commands.calls("sbatch")) == 1


@pytest.mark.parametrize(
    ("options", "words", "released"),
    [
        ("--hold", [], True),
        ("--begin=2030-01-01", ["--begin=now"], False),
        ("--hol\n#SBATCH --beg=noon", ["--begin=now"], True),
        ("--hint=nomultithread", [], False),
    ],
)
def test_a_job_in_place_of_a_requeue_does_not_wait_as_the_first_one(
    slurm_commands: Slurm,
    end: Callable[..., int],
    run: RunFolder,
    printed: list[str],
    options: str,
    words: list[str],
    released: bool,
) -> None:
    run.script.write_text(f"#!/bin/bash\n#SBATCH {options}\n")
    slurm_commands.answer("scontrol", SHOWN_JOB.format("RUNNING", 2))
    slurm_commands.answer("scontrol", err="Requested operation is disabled", code=1)
    slurm_commands.answer("scontrol", SHOWN_JOB.format("RUNNING", 2))
    slurm_commands.answer("sbatch", "8\n")
    slurm_commands.answer("scontrol")
    assert end() == 0
    (argv,) = slurm_commands.calls("sbatch")
    assert [word for word in argv if word.startswith("--begin")] == words
    releases = [argv for argv in slurm_commands.calls("scontrol") if "release" in argv]
    assert releases == ([["release", "8"]] if released else [])


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ({"out": SHOWN_JOB.format("CANCELLED", 0)}, 75),
        ({"err": "Invalid job id specified", "code": 1}, 75),
        ({"err": "Unable to contact slurm controller", "code": 1}, 0),
    ],
)
def test_a_chain_whose_next_job_was_cancelled_is_left_to_the_user(
    slurm_commands: Slurm,
    end: Callable[..., int],
    run: RunFolder,
    printed: list[str],
    clock: Clock,
    answer: dict[str, Any],
    code: int,
) -> None:
    write_json(run.attempt(0).path / "next.json", {"job_id": "8"})
    slurm_commands.answer("scontrol", **answer)
    assert end(continue_by="resubmit", HPC_DDP_END_TIME=f"{clock.now + 60}") == code
    assert slurm_commands.calls("sbatch") == []
    assert (printed[:1] == ["job 8, which was to go on, has ended: CANCELLED"]) is (code == 75)


def _answer_about_next(
    slurm_commands: Slurm, run: RunFolder, shown: str, is_forgotten: bool
) -> None:
    """Let job 8 be the next one of the chain, and the controller show it so, or not know it."""
    write_json(run.attempt(0).path / "next.json", {"job_id": "8"})
    answer = "echo Invalid job id specified >&2; exit 1" if is_forgotten else f"printf '{shown}'"
    slurm_commands.answer_by("scontrol", f"case $3 in 8) {answer};; *) {RUNNING};; esac")


@pytest.mark.parametrize("state", ["CANCELLED by 1000", "DEADLINE", "REVOKED"])
@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_chain_whose_next_job_was_given_up_is_left_to_the_user_whatever_tells_it(
    slurm_commands: Slurm,
    end: Callable[..., int],
    run: RunFolder,
    printed: list[str],
    state: str,
    is_forgotten: bool,
) -> None:
    shown = SHOWN_JOB.format(state.partition(" ")[0], 0)
    _answer_about_next(slurm_commands, run, shown, is_forgotten)
    slurm_commands.answer("sacct", f"{state}|None|0:0|n1|x\n")
    assert end(continue_by="resubmit") == 75
    assert slurm_commands.calls("sbatch") == []
    assert printed[0] == "job 8, which was to go on, has ended: CANCELLED"


@pytest.mark.parametrize("state", ["FAILED", "TIMEOUT", "COMPLETED", "NODE_FAIL", "COMPLETING"])
@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_chain_whose_next_job_is_over_gets_another(
    slurm_commands: Slurm,
    end: Callable[..., int],
    run: RunFolder,
    printed: list[str],
    state: str,
    is_forgotten: bool,
) -> None:
    """Its dependency was taken away, say: it started while this one ran, and was refused."""
    shown = SHOWN_JOB.format(state, 0).replace("Reason=None", "Reason=NonZeroExitCode")
    _answer_about_next(slurm_commands, run, shown, is_forgotten)
    slurm_commands.answer("sacct", f"{state}|None|1:0|n1|x\n")
    slurm_commands.answer("sbatch", "9\n")
    assert end(continue_by="resubmit") == 0
    assert run.attempt(0).link == JobRef("9")
    assert printed == [f"job 8, which was to go on, has ended: {state}", "it goes on as job 9"]


LIMIT = "AssocMaxSubmitJobLimit"  # MaxSubmitJobs=1, say, permits no job beside the one that runs


@pytest.mark.parametrize("is_lifted", [False, True])
def test_a_chain_whose_next_job_is_refused_goes_on_by_a_requeue(
    slurm_commands: Slurm,
    end: Callable[..., int],
    printed: list[str],
    clock: Clock,
    is_lifted: bool,
) -> None:
    slurm_commands.answer("sbatch", err=LIMIT, code=1)
    refusal = "case $1 in requeue) echo Access denied >&2; exit 1;; esac; "
    slurm_commands.answer_by("scontrol", ("" if not is_lifted else refusal) + RUNNING)
    slurm_commands.answer("sbatch", "8\n")
    assert end(continue_by="resubmit") == 0
    assert changes_of(slurm_commands) == [["update", "JobId=7", "Requeue=1"], ["requeue", "7"]]
    assert len(slurm_commands.calls("sbatch")) == 1 + is_lifted
    assert clock.slept == [*next_start.REFUSED_PAUSES_S[:is_lifted]]
    assert (printed[-1] == "it goes on as job 8") is is_lifted


def test_a_chain_whose_next_job_and_requeue_are_refused_is_left_to_the_user(
    slurm_commands: Slurm, end: Callable[..., int], printed: list[str], clock: Clock
) -> None:
    slurm_commands.answer("sbatch", err=LIMIT, code=1)
    refusal = "case $1 in update) echo Access denied >&2; exit 1;; esac; "
    slurm_commands.answer_by("scontrol", refusal + RUNNING)
    assert end(continue_by="resubmit") == 75
    assert clock.slept == [*next_start.REFUSED_PAUSES_S]
    assert "to go on: " in printed[-1]


def test_a_chain_that_was_cancelled_while_its_verdict_came_gets_no_next_job(
    slurm_commands: Slurm, end: Callable[..., int], printed: list[str], run: RunFolder
) -> None:
    slurm_commands.answer("scontrol", SHOWN_JOB.format("RUNNING", 2))
    run.cancelled.touch()
    assert end(continue_by="resubmit") == 75
    assert slurm_commands.calls("sbatch") == []


def test_a_link_that_can_not_be_cancelled_will_find_the_verdict(
    slurm_commands: Slurm, end: Callable[..., int], run: RunFolder, printed: list[str]
) -> None:
    write_json(run.attempt(0).path / "next.json", {"job_id": "8"})
    slurm_commands.answer("scancel", err="Access denied", code=1)
    assert end(Verdict(Cause.FAILED, Action.GIVE_UP, "", 3), continue_by="resubmit") == 3
    assert printed == ["scancel refused: Access denied"]


@pytest.mark.parametrize("is_blamed", [True, False])
def test_a_waiting_link_is_kept_off_a_lost_node(
    slurm_commands: Slurm, end: Callable[..., int], run: RunFolder, is_blamed: bool
) -> None:
    write_json(run.attempt(0).path / "next.json", {"job_id": "8"})
    if is_blamed:
        blame_nodes(run, "n2")
    slurm_commands.answer("sbatch")
    slurm_commands.answer("scontrol", SHOWN_JOB.format("PENDING", 0))
    assert end(continue_by="resubmit") == 0
    update = ["update", "JobId=8", "ExcNodeList=n2"]
    assert changes_of(slurm_commands) == ([update] if is_blamed else [])


def test_the_next_link_of_a_task_is_that_task(
    run: RunFolder, slurm_commands: Slurm, clock: Clock
) -> None:
    task = run.task(1).make()
    attempt = task.claim_attempt({}, lambda identity: False)
    slurm_commands.answer("sbatch", "9;cluster\n")
    environ = job_environ(SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="1")
    assert queue_next_link(task, attempt, environ) == JobRef("9")
    (words,) = slurm_commands.calls("sbatch")
    assert words == [
        *("--parsable", "--dependency=afterany:5_1", "--array=1"),
        str(run.script),
    ]
    assert linked(run, "9").resolve() == run.path


@pytest.mark.parametrize("is_newest", [True, False])
def test_the_next_link_of_a_task_alone_has_its_own_script(
    run: RunFolder, slurm_commands: Slurm, clock: Clock, is_newest: bool
) -> None:
    """With its memory and its code; the array's again where the array was submitted later."""
    task = run.task(1).make()
    for part in (run, task):
        part.script.write_text("#!/bin/bash\n")
        part.journal("submit").write(raw("submitted", backend="slurm"))
    if not is_newest:  # as the array's submit writes it for each of its tasks
        run.journal("submit").write(raw("submitted", backend="slurm"))
        task.journal("submit").write(raw("submitted"))
    attempt = task.claim_attempt({}, lambda identity: False)
    slurm_commands.answer("sbatch", "9\n")
    environ = job_environ(SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="1")
    (task.logs / ".environ-7").write_text(f"PATH={os.environ['PATH']}\0A=before\0")
    environ |= {"HPC_DDP_RUN": str(task.path), "A": "after"}
    assert kept_variables.env_before_setup(environ)["A"] == "before"
    queue_next_link(task, attempt, environ)
    (words,) = slurm_commands.calls("sbatch")
    assert words[-1] == str((task if is_newest else run).script)


def test_the_next_link_of_a_singleton_is_one(
    run: RunFolder, slurm_commands: Slurm, clock: Clock
) -> None:
    """Two jobs of its name would run at once."""
    run.script.write_text("#!/bin/bash\n#SBATCH --dependency=afterok:3,singleton\n")
    slurm_commands.answer("sbatch", "9\n")
    queue_next_link(run, run.attempt(0), job_environ())
    assert slurm_commands.calls("sbatch")[-1][1] == "--dependency=afterany:7,singleton"


def test_the_next_link_has_the_environment_from_before_the_set_up_lines(
    run: RunFolder, slurm_commands: Slurm, clock: Clock
) -> None:
    """They run again in the new job: what they export would count twice."""
    path, log = os.environ["PATH"], run.path / "environ"
    (run.logs / ".environ-7").write_text(f"PATH={path}\0DATA=/data\nx\0SLURM_JOB_NAME=a\0")
    slurm_commands.answer_by("sbatch", f"env -0 >'{log}'; echo 9")
    environ = job_environ(HPC_DDP_RUN=str(run.path), DATA="/data/train", HPC_DDP_UMASK="27")
    environ |= {"hf_token": "a1", "API_KEY": "b2", "DB": "pg://me:pw@h/x"}  # the file lacks them
    queue_next_link(run, run.attempt(0), environ)
    lines = log.read_text().split("\0")
    assert {"DATA=/data\nx", "hf_token=a1", "API_KEY=b2", "DB=pg://me:pw@h/x"} <= {*lines}
    assert not [line for line in lines if line.startswith("SLURM_JOB_NAME")]
    kept_variables.delete_env_before_setup(environ)
    assert dict(kept_variables.env_before_setup(environ)) == environ
    (run.logs / ".environ-7").write_text("PATH=/no/sbatch/here\0")
    assert dict(kept_variables.env_before_setup(environ)) == environ


@pytest.mark.parametrize(("excluded", "kept_off"), [("", "n2"), ("n[2,8-9]", "n8,n9,n2")])
def test_the_next_link_is_kept_off_bad_nodes(
    run: RunFolder, slurm_commands: Slurm, clock: Clock, excluded: str, kept_off: str
) -> None:
    """The option --exclude replaces the script's line, which this job had."""
    blame_nodes(run, "n2")
    exclude_nodes(slurm_commands, excluded)
    slurm_commands.answer("sbatch", "9\n")
    assert queue_next_link(run, run.attempt(0), job_environ()) == JobRef("9")
    words = slurm_commands.calls("sbatch")[-1]
    assert words[1:3] == ["--dependency=afterany:7", f"--exclude={kept_off}"]


def test_a_link_without_an_answer_is_none_of_the_known_jobs(
    run: RunFolder, slurm_commands: Slurm, clock: Clock
) -> None:
    run.journal("submit").write(raw("queued", job_id="7"))
    slurm_commands.answer("sbatch", err="Socket timed out", code=1)
    slurm_commands.answer("squeue", f"7\x1fN/A\x1f{run.script}\n6\x1fN/A\x1f{run.script}\n")
    assert queue_next_link(run, run.attempt(0), job_environ()) == JobRef("6")
