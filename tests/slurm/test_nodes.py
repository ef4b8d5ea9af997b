"""A node is lost, and what is left of the attempt on it must do no harm."""

from __future__ import annotations

import time
from typing import Any

import pytest
from cluster import Cluster, ensure_packages
from harness import (
    AS_ROOT,
    BACKENDS,
    DIGITS,
    DIGITS_ARGS,
    MPIRUN,
    ONE_BY_TWO,
    TWO_BY_TWO,
    WALK,
    Hpc,
    Job,
    same_weights,
    use,
)

# SlurmdTimeout of the tests' cluster, plus the third of it between two questions, plus the time
# that a controller takes to act on it.
LOST_S = 30 + 10 + 30
# A supervisor looks for a later attempt every 10 s; and the killed take a moment to be gone.
LEFT_S = 10 + 10
SLOWLY = (*DIGITS_ARGS, "--step-seconds", "0.8")  # Slurm needs a while to miss a node


def _running(hpc: Hpc, cluster: Cluster, which: str, *options: str) -> tuple[Job, str]:
    """Return a job at work, and the name of its first or other node."""
    use(cluster)
    words = (*options, *TWO_BY_TWO, str(DIGITS), *SLOWLY)
    job = hpc.submit(*words, env={"HPC_DDP_SAVE_EVERY": "1", **AS_ROOT})
    job.at_step(10)
    lost = job.events("started")[0]["nodes"][which == "other"]
    return job, lost


def _goes_on_elsewhere(
    job: Job, cluster: Cluster, undisturbed: Job, lost: str, record: Any
) -> None:
    began = time.monotonic()
    job.until(lambda: job.show()["Restarts"] == "1", "requeue")
    requeued = time.monotonic() - began
    record("requeued after s", round(requeued))
    assert requeued < LOST_S
    job.event("started", attempt=1)
    began = time.monotonic()
    job.until(lambda: not job.processes("code/0/", attempt=0), "end of the old ranks")
    record("old ranks gone s after the new start", round(time.monotonic() - began))
    assert time.monotonic() - began < LEFT_S
    job.event("first_step", attempt=1)
    cluster.heal(lost)
    cluster.start_slurmd(lost)
    assert job.end() == "COMPLETED", job.output()
    assert lost not in job.events("started", 1)[0]["nodes"]
    assert len(job.run.attempts()) == 2
    assert job.verdicts()[-1] == ("finished", "none")
    new = job.events("started", 1)[0]["time"]
    assert not [e for e in job.events("checkpoint", 0) if e["time"] > new]
    assert same_weights(job, undisturbed)


@pytest.mark.more
@pytest.mark.row(
    "a node's link cut for good",
    promise="requeued by Slurm within SlurmdTimeout × 4/3 and half a minute; goes on on other"
    " nodes from the last checkpoint; the old ranks end within 20 s of the new start, and write"
    " nothing that counts",
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", ["first", "other"])
def test_a_link_cut_for_good(
    hpc: Hpc, cluster: Cluster, undisturbed: Job, backend: str, which: str, record_property: Any
) -> None:
    job, lost = _running(hpc, cluster, which, "--backend", backend)
    cluster.cut(lost)
    _goes_on_elsewhere(job, cluster, undisturbed, lost, record_property)


@pytest.mark.more
@pytest.mark.row(
    "a node's slurmd killed",
    promise="the same; the job's processes there go on until then, and end as well",
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", ["first", "other"])
def test_a_slurmd_killed(
    hpc: Hpc, cluster: Cluster, undisturbed: Job, backend: str, which: str, record_property: Any
) -> None:
    job, lost = _running(hpc, cluster, which, "--backend", backend)
    cluster.kill_slurmd(lost)
    _goes_on_elsewhere(job, cluster, undisturbed, lost, record_property)


@pytest.mark.more
@pytest.mark.row("a node's slurmd killed")
def test_two_attempts_at_once(
    hpc: Hpc, cluster: Cluster, walked: Job, record_property: Any
) -> None:
    """All of a job is on the node: nothing stops the old attempt, which trains and saves on."""
    use(cluster)
    job = hpc.submit(*ONE_BY_TWO, str(WALK), "--step-seconds", "0.7")
    job.at_step(10)
    (lost,) = job.events("started")[0]["nodes"]
    cluster.kill_slurmd(lost)
    _goes_on_elsewhere(job, cluster, walked, lost, record_property)


@pytest.mark.more
@pytest.mark.parametrize("option", ["--launcher", "--step-launcher"])
@pytest.mark.parametrize("which", ["first", "other"])
def test_a_node_of_mpirun_is_cut_off(
    hpc: Hpc, cluster: Cluster, undisturbed: Job, option: str, which: str, record_property: Any
) -> None:
    """mpirun runs on the first node; its daemon on the other one loses it, or it loses that."""
    ensure_packages(MPIRUN)
    job, lost = _running(hpc, cluster, which, option, "mpirun")
    cluster.cut(lost)
    _goes_on_elsewhere(job, cluster, undisturbed, lost, record_property)
