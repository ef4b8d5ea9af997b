"""What happens to jobs on a real cluster, and that they come through it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster
from cluster_build import Proctrack
from harness import (
    ONE_BY_TWO,
    QUICK_WALK,
    SCRIPTS,
    SUBMITIT_LATER,
    TWO_BY_ONE,
    Hpc,
    Job,
    in_one_go,
    runs,
    same_weights,
    use,
)


@pytest.mark.row(
    "preemption with a grace time of 20 s, and with none",
    "goes on at the next step; with no grace time from the last checkpoint",
)
@pytest.mark.parametrize(
    ("backend", "proctrack"),
    [
        ("slurm", "linuxproc"),
        pytest.param("submitit", "cgroup", marks=pytest.mark.more),
        pytest.param("slurm", "cgroup", marks=pytest.mark.more),
        pytest.param("submitit", "linuxproc", marks=pytest.mark.more),
    ],
)
def test_preempted_with_and_without_notice(
    hpc: Hpc, cluster: Cluster, walked: Job, backend: str, proctrack: Proctrack
) -> None:
    """First with a grace time of 20 s, then with none; the weights in the end are the same."""
    use(cluster, proctrack)
    job = hpc.submit("--backend", backend, *TWO_BY_ONE, *QUICK_WALK, "--hold-at", "5", "55")
    job.held(5)
    job.preempt()
    stopped = job.event("stopped")["step"]
    assert job.event("first_step", attempt=1)["step"] == stopped + 1
    cluster.run("scontrol", "update", "PartitionName=low", "GraceTime=0")
    try:
        job.held(55)
        job.preempt()
        job.event("first_step", attempt=2)
    finally:
        cluster.run("scontrol", "update", "PartitionName=low", "GraceTime=20")
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts()[0] == ("preempted", "requeue")
    assert job.verdicts()[-1] == ("finished", "none")
    assert same_weights(job, walked)
    assert "Traceback" not in job.output()
    assert job.output().count("going on from step") == 2


@pytest.mark.row(
    "preemption of a script that uses nothing of hpc-ddp", "started again, though it dies of it"
)
@pytest.mark.parametrize("backend", SUBMITIT_LATER)
def test_a_plain_script_that_dies_of_the_notice_is_requeued(
    hpc: Hpc, cluster: Cluster, backend: str, tmp_path: Path
) -> None:
    use(cluster, "linuxproc")
    env = {"TICKS": "600", "MARKER": f"{tmp_path}/marker"}
    job = hpc.submit("--backend", backend, *ONE_BY_TWO, str(SCRIPTS / "plain.py"), env=env)
    job.until(lambda: os.path.exists(env["MARKER"]), "first attempt at work")
    job.preempt()
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("preempted", "requeue"), ("finished", "none")]


@pytest.mark.row(
    "one worker killed (-9)",
    "the others end within 10 s; goes on from the last checkpoint; the cause is named",
)
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(("--backend", "slurm"), id="slurm"),
        pytest.param(("--backend", "submitit"), id="submitit", marks=pytest.mark.more),
        pytest.param(("--launcher", "srun"), id="srun", marks=pytest.mark.more),
    ],
)
def test_a_killed_worker_is_recovered_from(
    hpc: Hpc,
    cluster: Cluster,
    walked: Job,
    how: tuple[str, str],
    record_property: Callable[[str, object], None],
) -> None:
    use(cluster, "linuxproc")
    job = hpc.submit(*how, *TWO_BY_ONE, *QUICK_WALK, "--hold-at", "25")
    job.held(25)
    workers = [job.worker(rank) for rank in range(2)]
    os.kill(workers[1], signal.SIGKILL)
    began = time.monotonic()
    job.until(lambda: not any(map(runs, workers)), "end of the survivors")
    record_property("survivors gone after s", round(time.monotonic() - began))
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("failed", "requeue"), ("finished", "none")]
    assert "rank 1 on" in job.output()
    assert "SIGKILL" in job.output()
    assert same_weights(job, walked)


@pytest.mark.row(
    "a Python error before the first step, or at the same step again",
    "FAILED with the code of the worker that failed first; rank, node and error in the last line",
)
def test_errors_of_a_script_end_it_with_its_own_code(hpc: Hpc, cluster: Cluster) -> None:
    """Before the first step at once; at the same step again after one retry."""
    use(cluster, "linuxproc")
    script = str(SCRIPTS / "trouble.py")
    exits = hpc.submit(*ONE_BY_TWO, script, "exit-before")
    assert exits.end() == "FAILED", exits.output()
    assert exits.show()["ExitCode"] == "3:0"
    assert exits.verdicts() == [("failed", "give up")]
    again = hpc.submit(*ONE_BY_TWO, script, "raise-at-30")
    assert again.end() == "FAILED", again.output()
    assert again.verdicts() == [("failed", "requeue"), ("failed", "give up")]
    last = again.output().splitlines()[-1]
    assert "rank 1 on" in last
    assert again.events("started", 1)[0]["nodes"][0] in last
    assert "ValueError: at step 30" in last
    told = json.loads(hpc("explain", "--json", again.id).stdout)
    assert (told["kind"], told["rank"], told["step"]) == ("python error", 1, 30)
    assert "trouble.py line" in told["text"]
    held = hpc.submit("--sbatch=--hold", script, "none")
    assert "held" in hpc("explain", held.id).stdout
    hpc("cancel", held.id)


@pytest.mark.more  # two minutes, nearly all until Slurm takes the node for lost
@pytest.mark.row(
    "the first node's link cut, and healed while the next attempt runs",
    "the shell of the lost attempt comes back and does nothing",
)
def test_first_node_cut_off_and_healed(hpc: Hpc, cluster: Cluster, walked: Job) -> None:
    """The shell of the lost attempt comes back to a job that is another attempt's by now. Slurm
    kills it then, maybe before its verdict."""
    use(cluster, "linuxproc")
    job = hpc.submit(*TWO_BY_ONE, *QUICK_WALK, "--hold-at", "35")
    job.held(35)
    first = job.events("started", 0)[0]["nodes"][0]
    cluster.cut(first)
    job.event("first_step", attempt=1)
    assert first not in job.events("started", 1)[0]["nodes"]
    for srun in job.processes("srun ", attempt=0):
        os.kill(srun, signal.SIGKILL)  # or its shell would sit there and wait for it
    cluster.heal(first)
    assert job.end() == "COMPLETED", job.output()
    assert job.output().count("attempt 0: ") == job.output().count("attempt 0: superseded")
    assert len(job.run.attempts()) == 2
    assert same_weights(job, walked)


@pytest.mark.row("time limit", "goes on at the next step")
def test_longer_than_the_time_limit(hpc: Hpc, cluster: Cluster, walked: Job) -> None:
    """A limit that comes while the job trains, however long a start takes on this machine."""
    use(cluster, "linuxproc")
    job = hpc.submit("--time", "30", *ONE_BY_TWO, *QUICK_WALK, "--hold-at", "35")
    job.held(35)
    job.shorten_time_limit()
    job.event("verdict")
    job.set_time_limit("30")
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("time limit", "requeue"), ("finished", "none")]
    assert in_one_go(job)
    assert same_weights(job, walked)


@pytest.mark.more  # two minutes of waiting for time limits
@pytest.mark.row(
    "time limit; the script uses nothing of hpc-ddp and ignores SIGTERM",
    "starts over, a few times",
)
def test_a_plain_script_that_ignores_the_time_limit(hpc: Hpc, cluster: Cluster) -> None:
    """It must not take the verdict with it."""
    use(cluster, "linuxproc")
    deaf = {"TICKS": "600", "DEAF": "1"}
    words = ("--time", "1", "--max-requeues", "1", str(SCRIPTS / "plain.py"))
    job = hpc.submit(*words, env=deaf)
    # Slurm calls it TIMEOUT where its own limit was quicker than the verdict.
    assert job.end() in ("FAILED", "TIMEOUT"), job.output()
    assert job.verdicts() == [("time limit", "requeue"), ("time limit", "give up")]
