"""A controller that does not answer, or refuses; partitions and sites that do it their own way."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from cluster_build import Proctrack
from harness import (
    BACKENDS,
    DIGITS,
    DIGITS_ARGS,
    ONE_BY_TWO,
    QUICK_WALK,
    SCRIPTS,
    TWO_BY_TWO,
    WALK,
    Hpc,
    Job,
    in_one_go,
    same_weights,
    use,
)

from hpc_ddp import slurm

SAVE_OFTEN = {"HPC_DDP_SAVE_EVERY": "1"}
CANCELS = "PartitionName=lowc PriorityTier=1 GraceTime={grace} PreemptMode=CANCEL\n"


@pytest.fixture
def settings(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster whose settings a test may change."""
    yield cluster
    cluster.reconfigure(extra="")


@pytest.mark.more
@pytest.mark.row(
    "preemption, PreemptMode CANCEL", promise="goes on at the next step, or the last save"
)
@pytest.mark.parametrize("grace", [20, 0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_partition_that_cancels_what_it_preempts(
    hpc: Hpc, settings: Cluster, undisturbed: Job, backend: str, grace: int
) -> None:
    settings.reconfigure(extra=CANCELS.format(grace=grace))
    words = ("--backend", backend, "--partition", "lowc", *TWO_BY_TWO, str(DIGITS), *DIGITS_ARGS)
    job = hpc.submit(*words, env=SAVE_OFTEN)
    job.at_step(20)
    job.preempt()
    job.event("first_step", attempt=1)
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("preempted", "requeue"), ("finished", "none")]
    assert same_weights(job, undisturbed)


@pytest.mark.more
@pytest.mark.row("cancelled within the grace time, PreemptMode CANCEL", promise="stays cancelled")
def test_a_cancel_within_the_grace_time_of_a_partition_that_cancels(
    hpc: Hpc, settings: Cluster
) -> None:
    settings.reconfigure(extra=CANCELS.format(grace=20))
    env = {"TICKS": "600", "DEAF": "1"}
    words = ("--partition", "lowc", *TWO_BY_TWO, str(SCRIPTS / "plain.py"))
    job = hpc.submit(*words, env=env)
    job.printed('"argv"')
    job.preempt()
    job.notice()
    time.sleep(1.5)  # Slurm's times are in seconds
    settings.run("scancel", job.id)
    assert job.end() == "CANCELLED"


@pytest.mark.more
@pytest.mark.row(
    "preemption, the site sends the warning signal for it (send_user_signal)",
    promise="goes on at the next step",
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_site_that_sends_the_warning_signal_at_a_preemption(
    hpc: Hpc, settings: Cluster, undisturbed: Job, backend: str
) -> None:
    settings.reconfigure(extra="SlurmctldParameters=preempt_send_user_signal\n")
    job = hpc.submit("--backend", backend, *TWO_BY_TWO, str(DIGITS), *DIGITS_ARGS)
    job.at_step(20)
    job.preempt()
    job.event("first_step", attempt=1)
    assert job.events("notice")[0]["source"] == "preemption"
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("preempted", "requeue"), ("finished", "none")]
    assert in_one_go(job)
    assert same_weights(job, undisturbed)


@pytest.mark.more
@pytest.mark.row(
    "slurmctld does not answer for 14 s", promise="submitted once; the verdict is carried out"
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_controller_that_does_not_answer(hpc: Hpc, cluster: Cluster, backend: str) -> None:
    """sbatch gives up after 10 s ("Socket timed out"), and the job runs all the same."""
    script = str(SCRIPTS / "plain.py")
    words = ("--backend", backend, *TWO_BY_TWO, script)
    with _frozen(cluster, 14):
        job = hpc.submit(*words, env={"TICKS": "8"})
    queued = cluster.run("squeue", "-h", "-o", "%A", "--states=all", f"--name={job.run.name}")
    assert [id for id in queued.stdout.split() if _is_of(cluster, id, job)] == [job.id]
    job.printed('"argv"')
    with _frozen(cluster, 14):
        assert hpc("cancel", "nothing", check=False).returncode == 2
        hpc("status", job.id)
    assert job.end() == "COMPLETED", job.output()


@pytest.mark.more
@pytest.mark.row("slurmctld stopped while the verdict requeues", promise="requeued when it is back")
def test_the_controller_is_away_when_the_job_is_to_be_requeued(
    hpc: Hpc, cluster: Cluster, undisturbed: Job
) -> None:
    job = hpc.submit(*TWO_BY_TWO, str(DIGITS), *DIGITS_ARGS, env=SAVE_OFTEN)
    job.at_step(20)
    cluster.stop_ctld()
    os.kill(job.worker(1), signal.SIGKILL)
    job.until(lambda: bool(list(job.run.logs.glob("*/*/record.json"))), "end of a node")
    time.sleep(12)  # the verdict's first questions are not answered
    cluster.restart_ctld()
    job.event("first_step", attempt=1)
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("failed", "requeue"), ("finished", "none")]
    assert same_weights(job, undisturbed)


@pytest.mark.more
@pytest.mark.row(
    "slurmctld stopped for 150 s while the next job of a chain starts", promise="waits, and begins"
)
def test_the_controller_is_away_when_a_link_begins(
    hpc: Hpc, cluster: Cluster, walked: Job, tmp_path: Path
) -> None:
    """The second job stands in its set-up; in `begin` it asks whether the first one still runs."""
    passed = tmp_path / "passed"
    wait = f"while [ ! -e {passed} ]; do sleep 1; done"
    words = ("--continue-by", "resubmit", "--setup", wait, *ONE_BY_TWO, *QUICK_WALK)
    passed.touch()
    job = hpc.submit(*words, "--hold-at", "25")
    job.held(25)
    passed.unlink()
    link = Job(cluster, job.run.jobs(job.run.events())[1].id, job.run)
    job.preempt()
    job.until(lambda: link.state() == "RUNNING", "the link")
    cluster.stop_ctld()
    passed.touch()
    time.sleep(slurm.PATIENCE_S + 30)
    assert len(job.run.attempts()) == 1
    cluster.restart_ctld()
    job.event("first_step", attempt=1)
    assert link.end() == "COMPLETED", job.output()
    assert same_weights(job, walked)


@pytest.mark.more
@pytest.mark.row("slurmctld restarted in mid-run", promise="nothing happens")
def test_a_controller_that_is_restarted(hpc: Hpc, cluster: Cluster, undisturbed: Job) -> None:
    job = hpc.submit(*TWO_BY_TWO, str(DIGITS), *DIGITS_ARGS)
    job.at_step(20)
    cluster.restart_ctld()
    assert job.end() == "COMPLETED", job.output()
    assert len(job.run.attempts()) == 1
    assert same_weights(job, undisturbed)


@pytest.mark.more
@pytest.mark.row("requeue refused", promise="goes on as a new job; one cancel ends it")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_requeue_that_is_refused(
    hpc: Hpc, cluster: Cluster, undisturbed: Job, backend: str
) -> None:
    """As where the administrator has taken the right away from the job. The new one does not wait
    as the first one did."""
    held = ("--backend", backend, "--sbatch=--hold")
    job = hpc.submit(*held, *TWO_BY_TWO, str(DIGITS), *DIGITS_ARGS)
    cluster.run("scontrol", "release", str(job.id))
    job.at_step(20)
    cluster.run("scontrol", "update", f"JobId={job.id}", "Requeue=0")
    job.preempt()
    job.event("first_step", attempt=1)
    second = job.events("started", 1)[0]["job_id"]
    assert second != job.id
    assert Job(cluster, second, job.run).end() == "COMPLETED", job.output()
    assert "presently disabled" in job.output()
    assert in_one_go(job)
    assert same_weights(job, undisturbed)


@pytest.mark.row(
    "chain, by --continue-by resubmit", promise="goes on in the next job; stops when finished"
)
@pytest.mark.parametrize("backend", [pytest.param("slurm", marks=pytest.mark.more), "submitit"])
def test_a_chain(hpc: Hpc, cluster: Cluster, walked: Job, tmp_path: Path, backend: str) -> None:
    chain = ("--backend", backend, "--continue-by", "resubmit", *ONE_BY_TWO)
    words = (*chain, "--setup", f"umask >>{tmp_path}/umasks")
    umask = os.umask(0o027)
    try:
        job = hpc.submit(*words, *QUICK_WALK, "--hold-at", "25")
    finally:
        os.umask(umask)
    job.held(25)
    job.preempt()
    job.event("first_step", attempt=1)
    jobs = [link.id for link in job.run.jobs(job.run.events())]
    assert len(jobs) == 3
    second, third = (Job(cluster, id, job.run) for id in jobs[1:])
    assert second.end() == "COMPLETED", job.output()
    assert third.end() == "CANCELLED"
    assert (tmp_path / "umasks").read_text().split() == ["0027", "0027"]
    assert in_one_go(job)
    assert same_weights(job, walked)
    assert '"finished"' in hpc("status", "--json", job.id).stdout


@pytest.mark.more
@pytest.mark.row(
    "a chain is preempted in its set-up lines, PreemptMode CANCEL", promise="goes on as a new job"
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chain_that_is_preempted_in_its_set_up(
    hpc: Hpc, settings: Cluster, walked: Job, tmp_path: Path, backend: str
) -> None:
    """The first job stands in its set-up; the second one's set-up lets it pass."""
    settings.reconfigure(extra=CANCELS.format(grace=0))
    mark = tmp_path / "passed"
    wait = f"[ -e {mark} ] || {{ touch {mark}; sleep 600; }}"
    words = ("--partition", "lowc", "--continue-by", "resubmit", "--setup", wait)
    job = hpc.submit("--backend", backend, *words, *ONE_BY_TWO, *QUICK_WALK)
    job.until(mark.exists, "the set-up line")
    job.preempt()
    job.event("first_step")
    second = Job(settings, job.events("started")[0]["job_id"], job.run)
    assert second.id != job.id
    assert second.end() == "COMPLETED", job.output()
    assert same_weights(job, walked)


@pytest.mark.more
@pytest.mark.row(
    "set-up lines that still run at the time limit, or at a preemption with PreemptMode CANCEL",
    promise="requeued, and goes on",
)
@pytest.mark.parametrize("proctrack", ["linuxproc", "cgroup"])
@pytest.mark.parametrize("cause", ["time limit", "preemption"])
def test_set_up_lines_that_are_cut_off(
    hpc: Hpc, settings: Cluster, walked: Job, tmp_path: Path, cause: str, proctrack: Proctrack
) -> None:
    """The first start stands in its set-up; the second one's set-up lets it pass."""
    use(settings, proctrack)
    settings.reconfigure(extra=CANCELS.format(grace=0))
    mark = tmp_path / "passed"
    wait = f"[ -e {mark} ] || {{ touch {mark}; sleep 600; }}"
    words = ("--partition", "lowc", "--setup", wait, "--time", "5")
    job = hpc.submit(*words, *ONE_BY_TWO, *QUICK_WALK)
    job.until(mark.exists, "the set-up line")
    if cause == "preemption":
        job.preempt()
    else:
        job.set_time_limit(1)
    assert job.end() == "COMPLETED", job.output()
    assert job.show()["Restarts"] == "1"
    assert same_weights(job, walked)


@pytest.mark.more
@pytest.mark.row(
    "set-up lines that still run at the time limit, in a chain, or where a requeue is refused",
    promise="goes on as a new job",
)
@pytest.mark.parametrize("reason", ["chain", "refused"])
def test_set_up_lines_that_are_cut_off_in_a_job_that_is_not_requeued(
    hpc: Hpc, settings: Cluster, walked: Job, tmp_path: Path, reason: str
) -> None:
    settings.reconfigure(extra=CANCELS.format(grace=0))
    mark = tmp_path / "passed"
    wait = f"[ -e {mark} ] || {{ touch {mark}; sleep 600; }}"
    options = ("--continue-by", "resubmit") if reason == "chain" else ()
    job = hpc.submit(*options, "--setup", wait, "--time", "5", *ONE_BY_TWO, *QUICK_WALK)
    job.until(mark.exists, "the set-up line")
    if reason == "refused":
        settings.run("scontrol", "update", f"JobId={job.id}", "Requeue=0")
    job.set_time_limit(1)
    job.event("first_step")
    second = Job(settings, job.events("started")[0]["job_id"], job.run)
    assert second.id != job.id
    assert second.end() == "COMPLETED", job.output()
    assert "starts that came to nothing: 1 of at most 3" in job.output()
    assert same_weights(job, walked)
    assert len(job.run.attempts()) == 1


@pytest.mark.more
@pytest.mark.row("set-up lines of a chain fail", promise="fails, and the chain ends")
def test_a_chain_whose_set_up_fails_ends(hpc: Hpc, cluster: Cluster) -> None:
    words = ("--continue-by", "resubmit", "--setup", "exit 3")
    job = hpc.submit(*words, *ONE_BY_TWO, *QUICK_WALK)
    assert job.end() == "FAILED"
    jobs = [link.id for link in job.run.jobs(job.run.events())]
    assert len(jobs) == 2
    assert Job(cluster, jobs[1], job.run).end() == "FAILED"
    assert [link.id for link in job.run.jobs(job.run.events())] == jobs
    assert not job.run.attempts()


@pytest.mark.more
@pytest.mark.row("a chain is cancelled", promise="stays cancelled, all of it")
@pytest.mark.parametrize("way", ["hpc-ddp cancel", "scancel"])
def test_a_chain_that_is_cancelled(hpc: Hpc, cluster: Cluster, way: str) -> None:
    words = ("--continue-by", "resubmit", "--nodes", "1", str(SCRIPTS / "trouble.py"), "none")
    job = hpc.submit(*words)
    job.event("first_step")
    jobs = [link.id for link in job.run.jobs(job.run.events())]
    assert len(jobs) == 2
    if way == "scancel":
        cluster.run("scancel", job.id)
    else:
        hpc("cancel", job.id)
    assert job.end() == "CANCELLED"
    link = Job(cluster, jobs[1], job.run)
    assert link.end() in ("CANCELLED", "FAILED")
    assert len(job.run.attempts()) == 1
    assert [link.id for link in job.run.jobs(job.run.events())] == jobs


def _is_of(cluster: Cluster, job_id: str, job: Job) -> bool:
    return str(job.run.path) in cluster.run("scontrol", "show", "job", job_id).stdout


class _frozen:
    """slurmctld as it is when its host stands still; thaws after some seconds."""

    def __init__(self, cluster: Cluster, seconds: float) -> None:
        self.cluster = cluster
        self.timer = threading.Timer(seconds, cluster.signal_ctld, [signal.SIGCONT])

    def __enter__(self) -> None:
        self.cluster.signal_ctld(signal.SIGSTOP)
        self.timer.start()

    def __exit__(self, *_: object) -> None:
        self.timer.join()


@pytest.mark.more
def test_munged_that_is_started_again_ends_no_run(hpc: Hpc, settings: Cluster) -> None:
    """A job of a run that exists asks for the one before it, as the links of a chain do."""
    words = (*ONE_BY_TWO, "--setup", "until [ -e $HPC_DDP_RUN/go ]; do sleep 0.1; done", str(WALK))
    first = hpc.submit(*words)
    (first.run.path / "go").touch()
    first.event("checkpoint")
    hpc("cancel", first.id)
    first.end()
    (first.run.path / "go").unlink()
    job = hpc.submit("--run", str(first.run.path))
    job.until(lambda: job.state() == "RUNNING", "second job")
    socket = settings.folder / "munge.socket"
    socket.rename(away := socket.with_name("munge.away"))
    (job.run.path / "go").touch()
    job.printed("trying again")
    away.rename(socket)
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts()[-1] == ("finished", "none")
