"""Whether a job is live, by its cluster, and whether a run may be started; stand-ins for Slurm."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hpc_ddp.core import process
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.job.job_ref import JobRef, remove_duplicates
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.live_jobs import (
    Life,
    Queue,
    check_idle,
    is_attempt_live,
)
from hpc_ddp.slurm_text import QueuedJob
from tests.raw_events import raw
from unit.fakes import Slurm, squeue_rows

RUNNING = QueuedJob("RUNNING", "None", "n1", "1:00")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "name" / "run").make()


def _answer(slurm_commands: Slurm, state: str, number: str = "7", cluster: str = "here") -> None:
    """Let this cluster have a job, and no other one be known."""
    row = squeue_rows(f"{number}|{number}|{state}|None|n1|9:00|/|a.sh\n")
    slurm_commands.answer_by("squeue", f"[[ $1 != --clusters* ]] && printf %s '{row}'")
    slurm_commands.answer("scontrol", f"ClusterName = {cluster}\n")


def test_a_job_is_its_cluster_and_its_id() -> None:
    here, there, unknown = JobRef("7", "here"), JobRef("7", "there"), JobRef("7")
    assert not here.is_same(there)
    assert here.is_same(unknown)
    assert unknown.is_same(there)
    assert not here.is_same(JobRef("8", "here"))
    assert remove_duplicates([unknown, here, there, here]) == [here, there]
    assert [JobRef.parse(str(job)) for job in (here, unknown)] == [here, unknown]


@pytest.mark.parametrize(
    ("state", "life"),
    [
        ("PENDING", Life.LIVE),
        ("CONFIGURING", Life.LIVE),
        ("SUSPENDED", Life.LIVE),
        ("STAGE_OUT", Life.LIVE),  # of which hpc-ddp knows nothing
        ("COMPLETING", Life.UNKNOWN),  # a requeue may be under way
        ("PREEMPTED", Life.UNKNOWN),
        ("CANCELLED", Life.OVER),
    ],
)
def test_whether_a_job_is_live(run: RunFolder, state: str, life: Life) -> None:
    queue = Queue({"7": QueuedJob(state, "None", "", "")}, "here")
    assert queue.life(JobRef("7", "here"), run) is life
    assert queue.life(JobRef("7"), run) is life
    assert queue.life(JobRef("8", "here"), run) is Life.OVER
    assert Queue(None).life(JobRef("8", "here"), run) is Life.UNKNOWN


def test_a_job_of_another_cluster_is_asked_for_there(slurm_commands: Slurm, run: RunFolder) -> None:
    slurm_commands.answer("squeue", squeue_rows("7|7|RUNNING|None|n1|9:00|/|a\n"))
    queue = Queue({}, "here")
    assert queue.life(JobRef("7", "there"), run) is Life.LIVE
    assert queue.life(JobRef("8", "there"), run) is Life.OVER
    assert [call[0] for call in slurm_commands.calls("squeue")] == ["--clusters=there"]


def test_two_clusters_of_one_name_are_told_apart_by_their_controllers(run: RunFolder) -> None:
    """Clouds call all of theirs alike: that a job is not here does not say that it is over."""
    queue = Queue({"9": QueuedJob("RUNNING", "None", "", "")}, "cloud@head-2:6817")
    assert queue.life(JobRef("7", "cloud@head-1:6817"), run) is Life.UNKNOWN
    assert queue.life(JobRef("7", "cloud@head-2:6817"), run) is Life.OVER
    assert queue.life(JobRef("7", "cloud"), run) is Life.OVER
    moved = JobRef("9", "cloud@head-1:6817")  # its controller has, to another host
    assert queue.life(moved, run) is Life.LIVE


def test_a_start_waits_for_the_users_word_of_a_cluster_of_the_same_name(
    slurm_commands: Slurm, run: RunFolder
) -> None:
    slurm_commands.answer("scontrol", err="slurm_load_jobs error: Invalid job id", code=1)
    own = JobRef("9", "cloud@head-2:1")
    info: dict[str, str] = {"job_id": "7", "cluster": "cloud@head-1:1"}
    with pytest.raises(HpcDdpError, match="job 7 of cluster cloud@head-1:1 may run") as raised:
        is_attempt_live(run, own, info)
    assert "--force" in str(raised.value.hint)
    assert not is_attempt_live(run, own, info | {"cluster": "cloud"})
    run.journal("submit").write(raw("dismissed", job_id="7", cluster="cloud@head-1:1"))
    assert not is_attempt_live(run, own, info)


def test_a_job_of_another_run_with_the_number_of_an_old_one_is_no_work(
    slurm_commands: Slurm, run: RunFolder, tmp_path: Path
) -> None:
    """A cluster that was set up anew, or a controller that lost its state, begins at 1 again."""
    other = RunFolder(tmp_path / "other" / "20260102-000000-abcd").make()
    for part in (run, other):
        part.script.write_text("")
        part.job_json.write_text("{}")
    run.journal("batch").write(raw("started", job_id="7", cluster="here"))
    line = squeue_rows(f"7|7|RUNNING|None|n1|9:00|/|{other.script}\n")
    slurm_commands.answer("squeue", line)
    slurm_commands.answer("scontrol", "ClusterName = here\n")
    check_idle(run)
    shown = f"   JobState=RUNNING Reason=None\n   Command={other.script}\n"
    slurm_commands.answer("scontrol", shown)
    info = {"job_id": "7", "cluster": "here", "restarts": 0}
    assert not is_attempt_live(run, JobRef("9", "here"), info)
    slurm_commands.answer("scontrol", shown.replace(str(other.path), str(run.path)))
    assert is_attempt_live(run, JobRef("9", "here"), info)
    other.job_json.unlink()  # a copy, which a site's sbatch has submitted
    slurm_commands.answer("scontrol", shown)
    assert is_attempt_live(run, JobRef("9", "here"), info)


@pytest.mark.parametrize(
    ("state", "cluster", "words"),
    [
        ("RUNNING", "here", "is at work: job 7, running"),
        ("COMPLETING", "here", "may be at work: job 7, completing"),
        ("RUNNING", "there", "may be at work: job 7 of cluster there, which can't be asked"),
    ],
)
def test_a_run_whose_job_is_not_known_to_be_over_is_not_started(
    slurm_commands: Slurm, run: RunFolder, state: str, cluster: str, words: str
) -> None:
    run.journal("batch").write(raw("started", job_id="7", cluster=cluster))
    _answer(slurm_commands, state)
    with pytest.raises(UsageError, match=words) as raised:
        check_idle(run)
    assert raised.value.hint
    assert ("--force" in raised.value.hint) is (state != "RUNNING" or cluster != "here")


def test_the_users_word_counts_where_slurm_can_not_be_asked(
    slurm_commands: Slurm, run: RunFolder
) -> None:
    run.journal("batch").write(raw("started", job_id="7", cluster="there"))
    _answer(slurm_commands, "RUNNING")
    check_idle(run, is_forced=True)
    check_idle(run)
    own = JobRef("9", "here")
    assert not is_attempt_live(run, own, {"job_id": "7", "cluster": "there"})
    slurm_commands.answer("scontrol", err="can't be reached", code=1)
    with pytest.raises(HpcDdpError):  # of which no word was given
        is_attempt_live(run, own, {"job_id": "8", "cluster": "there"})


def test_a_silent_slurm_starts_nothing(slurm_commands: Slurm, run: RunFolder) -> None:
    run.journal("batch").write(raw("started", job_id="7"))
    slurm_commands.answer("squeue", err="Socket timed out", code=1)
    for is_forced in (False, True):
        with pytest.raises(UsageError, match="may be at work: job 7 of a Slurm") as raised:
            check_idle(run, is_forced)
        assert raised.value.hint == "the same command again, once Slurm answers"


def test_the_same_number_on_two_clusters_is_two_jobs(run: RunFolder) -> None:
    """The start of a job is not that of its namesake elsewhere."""
    run.journal("batch").write(raw("started", job_id="7", cluster="there"))
    run.journal("batch").write(raw("verdict", cause="failed", action="give up", why=""))
    info = {"job_id": "7", "cluster": "there", "restarts": 0}
    assert not is_attempt_live(run, JobRef("7", "here"), info)  # over, by the journal
    check_idle(run)


def test_an_attempt_with_a_verdict_is_over_wherever_the_controller_is(
    slurm_commands: Slurm, run: RunFolder
) -> None:
    """It has moved to another host, say, and has forgotten the job since."""
    run.journal("batch").write(raw("started", job_id="7", cluster="c@ctl1:6817", restarts=0))
    info = {"job_id": "7", "cluster": "c@ctl1:6817", "restarts": 0}
    for _ in range(4):
        slurm_commands.answer("scontrol", err="slurm_load_jobs error: Invalid job id", code=1)
    with pytest.raises(HpcDdpError, match="can't be asked from here"):
        is_attempt_live(run, JobRef("8", "c@ctl2:6817"), info)
    run.journal("batch", 1).write(raw("verdict", cause="failed", action="requeue", why=""))
    with pytest.raises(HpcDdpError, match="can't be asked from here"):  # that of another attempt
        is_attempt_live(run, JobRef("8", "c@ctl2:6817"), info)
    run.journal("batch").write(raw("verdict", cause="failed", action="requeue", why=""))
    assert not is_attempt_live(run, JobRef("8", "c@ctl2:6817"), info)


def test_a_task_that_waits_with_its_array_is_at_work(slurm_commands: Slurm, run: RunFolder) -> None:
    """Not one whose array has other tasks in the queue alone."""
    run.journal("submit").write(raw("queued", job_id="18", cluster="here"))
    task = RunFolder(run.path / "task-1").make()
    row = "\x1f".join(["18", "18", "0-1%2", "PENDING", "None", "", "9:00", "name", "/", "a"])
    slurm_commands.answer("squeue", row + "\n")
    slurm_commands.answer("squeue", row.replace("0-1%2", "0,2") + "\n")
    slurm_commands.answer("scontrol", "ClusterName = here\n")
    with pytest.raises(UsageError, match="is at work: job 18_1, pending"):
        check_idle(task)
    check_idle(task)


def test_another_shell_of_the_allocation_is_work(
    slurm_commands: Slurm, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    slurm_commands.answer("squeue", squeue_rows("7|7|RUNNING|None|n1|9:00|/|bash\n"))
    run.journal("batch").write(raw("started", job_id="7"))
    info = {"job_id": "7", "shell": process.identity(os.getpid())}
    run.claim_attempt(info, lambda _: False)
    with pytest.raises(UsageError, match="is at work: another shell of job 7"):
        check_idle(run)
    info["shell"] = {"pid": 2**22 + 1, "began": "1", "host": socket.gethostname()}
    run.claim_attempt(info, lambda _: False)
    check_idle(run)


def test_an_allocation_that_a_run_has_left_is_not_its_work(
    slurm_commands: Slurm, run: RunFolder
) -> None:
    """It may be open for other work, and the run's batch job begins beside it."""
    slurm_commands.answer("squeue", squeue_rows("7|7|RUNNING|None|n1|9:00|/|(null)\n"))
    slurm_commands.answer("scontrol", "ClusterName = here\n")
    shell = {"pid": 2**22 + 1, "began": "1", "host": "login1"}
    info = {"job_id": "7", "restarts": 0, "cluster": "here", "shell": shell}
    for number in range(2):  # in the same allocation
        run.claim_attempt(info, lambda _: False)
        started = raw("started", job_id="7", cluster="here", restarts=0, shell=shell)
        run.journal("batch", number).write(started)
        with pytest.raises(UsageError, match="is at work: job 7, running"):
            check_idle(run)
        run.journal("batch", number).write(raw("verdict", cause="notice", action="none", why=""))
        check_idle(run)
        assert not is_attempt_live(run, JobRef("8", "here"), info)
