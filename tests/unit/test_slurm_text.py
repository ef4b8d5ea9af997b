"""The text of Slurm's commands is parsed into records."""

from __future__ import annotations

import math

import pytest

from hpc_ddp import slurm_text
from hpc_ddp.slurm_text import parse_job, parse_job_id, parse_record, parse_records

SHOWN = """\
JobId=7 JobName=x Restarts=9 JobState=FAILED
   UserId=me(1000) GroupId=me(1000) MCS_label=N/A
   JobState=COMPLETING Reason=TimeLimit Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:05 TimeLimit=00:01:00 TimeMin=N/A
   StartTime=2026-11-21T10:00:00 EndTime=2026-11-21T10:01:00 Deadline=N/A
   PreemptEligibleTime=2026-11-21T10:00:00 PreemptTime=2026-11-21T10:00:30
"""


def test_a_name_can_not_pass_for_a_field() -> None:
    job = parse_job(SHOWN)
    assert (job.state, job.reason, job.restarts) == ("COMPLETING", "TimeLimit", 2)
    assert job.end_time is not None
    assert job.preempted_at == job.end_time - 30


def test_preempted_is_not_cancelled_within_the_grace_time() -> None:
    """Slurm says COMPLETING in each case, and no reason."""
    assert not parse_job(SHOWN).preempted
    assert parse_job(SHOWN.replace("COMPLETING", "RUNNING")).preempted
    assert parse_job(SHOWN.replace("10:00:30", "10:01:00")).preempted


def test_a_job_that_is_being_signalled_runs() -> None:
    """A job in its grace time is not cancelled: the flag stands where the state does."""
    job = parse_job(SHOWN.replace("COMPLETING", "SIGNALING"))
    assert job.state == "RUNNING"
    assert job.preempted
    assert parse_record(WAITS.replace("PENDING", "REQUEUE_HOLD")).state == "PENDING"


def test_the_time_left_is_independent_of_the_clock() -> None:
    assert parse_job(SHOWN).left_s == 55.0
    assert parse_job(SHOWN.replace("TimeLimit=00:01:00", "TimeLimit=UNLIMITED")).left_s == math.inf
    assert parse_job(SHOWN.replace("TimeLimit=00:01:00", "TimeLimit=1-00:00:05")).left_s == 86_400
    assert (
        parse_job(SHOWN.replace("TimeLimit=00:01:00", "TimeLimit=Partition_Limit")).left_s is None
    )
    assert parse_job("").left_s is None


def test_an_expedited_job_is_known() -> None:
    """Slurm 26.05 prints this text."""
    assert not parse_job(SHOWN).expedited
    job = parse_job(f"{SHOWN}   StdOut=/x\n   ExpeditedRequeue=Yes\n")
    assert (job.expedited, job.restarts) == (True, 2)
    assert not parse_job(f"{SHOWN}   ExpeditedRequeue=No\n").expedited


def test_unknown_times_are_none() -> None:
    text = SHOWN.replace("2026-11-21T10:01:00", "Unknown").replace("2026-11-21T10:00:30", "None")
    job = parse_job(text)
    assert job.end_time is None
    assert not job.preempted
    nothing = parse_job("")
    assert (nothing.state, nothing.reason, nothing.restarts) == ("", "", 0)


WAITS = """\
JobId=3 JobName=wide
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   JobState=PENDING Reason=ReqNodeNotAvail,_UnavailableNodes:hd0n1 Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:53
   RunTime=00:00:00 TimeLimit=UNLIMITED TimeMin=N/A
   StartTime=2026-11-22T20:15:37 EndTime=Unknown Deadline=N/A
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=(null)
"""


def test_a_record_of_an_ended_job_is_parsed() -> None:
    record = parse_record(WAITS)
    assert (record.state, record.exit_code, record.nodes) == ("PENDING", "0:53", "")
    assert record.reason == "ReqNodeNotAvail, UnavailableNodes:hd0n1"
    assert record.start_time is not None
    assert parse_record(WAITS.replace("NodeList=(null)\n", "NodeList=n[1-2]\n")).nodes == "n[1-2]"
    assert parse_record("").state == ""
    # Of a waiting array's first record it may be empty; then the next record follows.
    first = WAITS.replace("NodeList=(null)\n", "NodeList=\n")
    second = "JobId=101 JobName=x\n   JobState=RUNNING Reason=None\n   NodeList=n7\n"
    assert parse_record(f"{first}\n{second}").nodes == ""


@pytest.mark.parametrize(
    ("printed", "id"),
    [
        ("-----\n Welcome to the 9 nodes of Lonestar\n-----\n\n --> Verifying 12\n77\n", "77"),
        ("77;stampede\n\n", "77;stampede"),
        ("5\n77\n Have a nice day\n", "77"),
        ("5 jobs of yours wait\n", None),
        ("", None),
    ],
)
def test_a_banner_is_no_job_id(printed: str, id: str | None) -> None:
    assert parse_job_id(printed) == id


def test_a_name_within_a_value_starts_no_field() -> None:
    (row,) = parse_records("NodeName=n1 Gres=gpu:2 OS=Linux 6 #1 Reason=bad Gres=none [me@x]\n")
    assert (row["Gres"], row["OS"], row["Reason"]) == ("gpu:2", "Linux", "bad")


@pytest.mark.parametrize("printed", ["a\nqueue full, retrying\n", b"a\nqueue full, retrying"])
def test_the_last_line_of_a_command_that_takes_too_long_is_kept(printed: object) -> None:
    assert slurm_text.last_line(printed) == ": queue full, retrying"
    assert slurm_text.last_line(None) == slurm_text.last_line(b"") == ""


def test_a_limit_of_jobs_is_no_limit_of_time() -> None:
    limits = "(job submit limit, user's size and/or time limits)"
    hint = slurm_text.hint_for(f"Job violates accounting/QOS policy {limits}")
    assert hint.startswith("fewer jobs or tasks at once")
