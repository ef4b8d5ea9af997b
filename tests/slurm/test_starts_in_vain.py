"""Ends before an attempt, between attempts, and in a teardown: the run goes on, or its teardown."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from harness import ONE_BY_TWO, QUICK_WALK, SCRIPTS, WALK, Hpc, Job, same_weights

pytestmark = pytest.mark.more
CANCELS = "PartitionName=lowc PriorityTier=1 GraceTime={grace} PreemptMode=CANCEL\n"


@pytest.fixture
def canceling(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster with a partition lowc, whose preemptions end a job for good after 20 s."""
    cluster.reconfigure(extra=CANCELS.format(grace=20))
    yield cluster
    cluster.reconfigure(extra="")


@pytest.mark.row(
    "preemption in a teardown", promise="the run goes on; of a finished one the teardown alone"
)
@pytest.mark.parametrize("end", ["plain, requeued", "finished", "failed"])
def test_a_preemption_in_a_teardown(
    hpc: Hpc, canceling: Cluster, walked: Job, tmp_path: Path, end: str
) -> None:
    began, done = tmp_path / "began", tmp_path / "done"
    # The first one is long.
    wait = f"[ $(wc -l <{began}) -gt 1 ] || sleep 600"
    lines = json.dumps([f"echo $HPC_DDP_VERDICT >>{began}", wait, f"touch {done}"])
    (tmp_path / "hpc-ddp.toml").write_text(f"teardown = {lines}\n")
    words: tuple[str, ...] = ("--partition", "lowc", *ONE_BY_TWO, *QUICK_WALK)
    if end == "plain, requeued":
        words = (*ONE_BY_TWO, "--env", "TICKS=1", str(SCRIPTS / "plain.py"))
    held = ("--hold-at", "25") if end == "failed" else ()
    job = hpc.submit(*words, *held, cwd=tmp_path)
    if held:
        job.held(25)
        os.kill(job.worker(1), signal.SIGKILL)
    job.until(began.exists, "the teardown")
    job.preempt()
    job.until(done.exists, "the second teardown")
    number = len(job.run.attempts())
    assert number == (2 if end == "failed" else 1)
    ends = began.read_text().split()
    assert ends == (["failed", "finished"] if end == "failed" else ["finished", "finished"])
    job.until((job.run.path / "torn-down").exists, "the mark of its end")
    if end != "plain, requeued":
        assert same_weights(job, walked)


@pytest.mark.row(
    "preempted in the first seconds of a start, PreemptMode CANCEL",
    promise="goes on as a new start",
)
@pytest.mark.parametrize("grace_s", [20, 0])
@pytest.mark.parametrize("kind", ["plain", "chain", "set-up"])
def test_a_preemption_in_the_first_seconds(
    hpc: Hpc, canceling: Cluster, walked: Job, kind: str, grace_s: int
) -> None:
    """The run's library is on a disk that comes late, for which the batch script waits. With a
    grace time Slurm signals no batch script, which asks whether its job is preempted."""
    canceling.reconfigure(extra=CANCELS.format(grace=grace_s))
    options = {"chain": ("--continue-by", "resubmit"), "set-up": ("--setup", "true"), "plain": ()}
    canceling.run("scontrol", "update", "PartitionName=lowc", "State=DOWN")
    job = hpc.submit("--partition", "lowc", *options[kind], *ONE_BY_TWO, *QUICK_WALK)
    lib, away = job.run.path / "lib", job.run.path / "lib-away"
    lib.rename(away)
    canceling.run("scontrol", "update", "PartitionName=lowc", "State=UP")
    job.until(lambda: job.state() == "RUNNING", "its start")
    job.preempt()
    job.until(lambda: job.show().get("PreemptTime", "None") != "None", "the preemption")
    away.rename(lib)
    job.until(lambda: job.events("first_step"), "a step")
    last = Job(canceling, job.events("started")[-1]["job_id"], job.run)
    assert last.end() == "COMPLETED", job.output()
    assert len(job.run.attempts()) == (2 if grace_s else 1)
    assert same_weights(job, walked)


@pytest.mark.row(
    "set-up lines fail in a later start of a run", promise="started again; --max-failures times"
)
def test_set_up_lines_that_have_worked_before(
    hpc: Hpc, cluster: Cluster, walked: Job, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    setup = ("--setup", "set -e", "--setup", f"[ ! -e {away} ]")
    job = hpc.submit(*setup, *ONE_BY_TWO, *QUICK_WALK, "--hold-at", "25")
    job.held(25)
    away.touch()
    job.preempt()
    job.printed("starts that came to nothing: 1 of at most 3")
    away.unlink()
    job.event("first_step", attempt=1)
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("preempted", "requeue"), ("finished", "none")]
    assert same_weights(job, walked)


@pytest.mark.row(
    "the disk of the runs is away for two minutes as an attempt ends", promise="the verdict waits"
)
def test_the_verdict_waits_for_the_disk(hpc: Hpc, cluster: Cluster, walked: Job) -> None:
    job = hpc.submit(*ONE_BY_TWO, str(WALK), "--step-seconds", "0.01", "--hold-at", "25")
    job.held(25)
    worker = job.worker(1)
    away = job.run.path.with_name("away")
    job.run.path.rename(away)
    os.kill(worker, signal.SIGKILL)
    time.sleep(130)
    away.rename(job.run.path)
    job.event("first_step", attempt=1)
    assert job.end() == "COMPLETED", job.output()
    assert same_weights(job, walked)
