"""Attempts that end while Slurm has not made up its mind, or has forgotten; stand-ins for Slurm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.file_io import write_json
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.enums import Action, Cause
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome.attempt_facts import AttemptFacts
from hpc_ddp.node.outcome.gather_facts import since_submit
from hpc_ddp.node.outcome.requeue import attempt_end, next_start
from hpc_ddp.node.outcome.requeue.attempt_end import await_settled_job
from hpc_ddp.node.outcome.requeue.chain import admit_job, is_link
from hpc_ddp.node.outcome.verdict import decide
from hpc_ddp.slurm_text import Job
from tests.raw_events import typed
from unit.fakes import Slurm, stop_clock

JOB = Job("RUNNING", "None", 0, None, None)
KILLED = {"rank": 0, "code": -9, "time": 5.0, "error": ""}
ENDED = {"node": "n1", "code": 1, "notice": None, "torn_down": None, "left": False}


def _facts(job: Job, attempt: int = 0, events: Any = ()) -> AttemptFacts:
    return AttemptFacts(
        spec=JobSpec("t.py"),
        attempt=attempt,
        cancelled=False,
        superseded=False,
        job=job,
        restarts=0,
        nodes=["n1"],
        records=[{**ENDED, "failures": [KILLED]}],
        events=since_submit([*events], attempt),
    )


@pytest.mark.parametrize(
    ("state", "reason", "cause"),
    [
        ("SUSPENDED", "None", Cause.FAILED),
        ("CONFIGURING", "None", Cause.FAILED),
        ("STAGE_OUT", "None", Cause.FAILED),
        ("COMPLETING", "Prolog", Cause.FAILED),
        ("COMPLETING", "None", Cause.CANCELLED),  # by scancel, while the batch script runs
        ("CANCELLED", "None", Cause.CANCELLED),
        ("REVOKED", "None", Cause.CANCELLED),
    ],
)
def test_only_what_is_cancelled_is_called_so(state: str, reason: str, cause: Cause) -> None:
    assert decide(_facts(replace(JOB, state=state, reason=reason))).cause == cause


def test_a_suspended_job_is_asked_for_until_it_runs(
    slurm_commands: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = stop_clock(monkeypatch, next_start, attempt_end)
    for state in ("SUSPENDED", "SUSPENDED", "CONFIGURING", "RUNNING"):
        slurm_commands.answer("scontrol", f"   JobState={state} Reason=None\n")
    job = await_settled_job("7")
    assert job
    assert job.state == "RUNNING"
    assert clock.slept == [next_start.PAUSE_S] * 3


def test_a_submit_whose_job_waits_does_not_hide_the_attempt_that_runs() -> None:
    """Otherwise its first step is not seen, and it is given up."""
    submitted = typed("submitted", 0.0, first_attempt=0)
    second = typed("submitted", 4.0, first_attempt=1)
    steps = [typed("first_step", 2.0, step=0, world_size=1, hosts=["n1"])]
    saved = typed("checkpoint", 3.0, step=500, stall_s=0.0, write_s=0.0, bytes=1)
    events = [submitted, *steps, saved, second]
    assert since_submit(events, 0) == events
    assert decide(_facts(JOB, 0, events)).action == Action.REQUEUE
    assert since_submit(events) == []


# --- the job before a link -----------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "name" / "run").make()
    run.job_json.write_text("{}")
    return run


@pytest.mark.parametrize("has_begun", [True, False])
@pytest.mark.parametrize(
    ("state", "goes_on"),
    [("CANCELLED by 1000", False), ("PREEMPTED", True), ("NODE_FAIL", True), (None, False)],
)
def test_a_forgotten_job_is_in_the_accounting_or_not_followed(
    run: RunFolder, slurm_commands: Slurm, state: str | None, goes_on: bool, has_begun: bool
) -> None:
    if has_begun:
        attempt = run.claim_attempt({"job_id": "7"}, lambda info: False)
        write_json(attempt.path / "next.json", {"job_id": "8"})
    else:
        write_json(run.early_links, {"7": "8"})
    slurm_commands.answer("scontrol", err="Invalid job id specified", code=1)
    slurm_commands.answer("sacct", f"{state}|None|0:15|n1|x\n" if state else "")
    words = "was cancelled, or given up" if state else "is not known any more"
    if goes_on:
        admit_job(run, restarts=0, is_link=True, job=JobRef("8"))
        return
    with pytest.raises(HpcDdpError, match=words) as raised:
        admit_job(run, restarts=0, is_link=True, job=JobRef("8"))
    assert state or "hpc-ddp submit --run" in str(raised.value.hint)


def test_a_link_is_of_its_cluster(run: RunFolder) -> None:
    attempt = run.claim_attempt({"job_id": "7"}, lambda info: False)
    write_json(attempt.path / "next.json", {"job_id": "8;here"})
    assert is_link(run, JobRef("8", "here"))
    assert not is_link(run, JobRef("8", "there"))
