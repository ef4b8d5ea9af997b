"""Preemption at bad moments."""

from __future__ import annotations

import pytest
from cluster import Cluster
from cluster_build import Proctrack
from harness import (
    BACKENDS,
    ONE_BY_TWO,
    QUICK_WALK,
    WALK,
    Hpc,
    Job,
    in_one_go,
    same_weights,
    use,
)


@pytest.mark.more
@pytest.mark.row(
    "preempted three times in a row, once in start-up and once during a save",
    promise="goes on at the next step each time; preemption is no lack of progress",
)
@pytest.mark.parametrize("proctrack", ["linuxproc", "cgroup"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_three_times_in_a_row(
    hpc: Hpc, cluster: Cluster, walked: Job, backend: str, proctrack: Proctrack
) -> None:
    use(cluster, proctrack)
    script = (str(WALK), "--step-seconds", "0.1", "--write-seconds", "0.8", "--hold-start", "1")
    words = ("--backend", backend, "--max-failures", "0", *ONE_BY_TWO)
    job = hpc.submit(*words, *script, "--save-every-steps", "40")
    job.at_step(5)
    job.preempt()
    started = job.run.attempt(1).path
    job.until(lambda: bool(list(started.glob("*/rank-1.pid"))), "workers of attempt 1")
    job.preempt()
    job.event("first_step", attempt=2)
    drafts = job.run.checkpoints
    job.until(lambda: bool(list(drafts.glob("*.tmp-2"))), "save of attempt 2")
    job.preempt()
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("preempted", "requeue")] * 3 + [("finished", "none")]
    assert not job.events("first_step", 1)
    assert in_one_go(job)
    assert same_weights(job, walked)


@pytest.mark.more
@pytest.mark.parametrize("number", ["HUP", "USR1", "USR2", "INT"])
def test_signals_of_scancel_are_notices(
    hpc: Hpc, cluster: Cluster, walked: Job, number: str
) -> None:
    """Also to torchrun and the workers, where Slurm signals every process of a step."""
    use(cluster, "linuxproc")
    job = hpc.submit(*ONE_BY_TWO, *QUICK_WALK, "--hold-at", "25")
    job.held(25)
    cluster.run("scancel", f"--signal={number}", job.id)
    stop = job.event("stopped")
    assert job.event("first_step", attempt=1)["step"] == stop["step"] + 1
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("notice", "requeue"), ("finished", "none")]
    assert same_weights(job, walked)
