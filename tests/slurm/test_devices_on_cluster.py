"""GPUs that Slurm gives to a job: the stand-in accelerator of tests/device, or a machine's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from harness import (
    BACKENDS,
    ONE_BY_TWO,
    QUICK_WALK,
    REPO,
    TWO_BY_ONE,
    WALK,
    Hpc,
    Job,
    in_one_go,
    same_weights,
)

from tests.devices import DEVICE, reports_of
from tests.skips import needs_stand_in

# As many devices as the job's gres has on a node; a real vendor's driver counts them itself.
STAND_IN = (
    *("--env", f"PYTHONPATH={REPO / 'tests' / 'device'}"),
    # Slurm 20.11 has the second variable only.
    *("--setup", 'export SIM_DEVICES="${SLURM_GPUS_ON_NODE:-$SLURM_GPUS_PER_NODE}"'),
)


@pytest.mark.more
@pytest.mark.parametrize("backend", BACKENDS)
def test_preempted_once_it_ends_with_the_cpus_weights(hpc: Hpc, walked: Job, backend: str) -> None:
    needs_stand_in()
    words = ("--backend", backend, "--preflight", *ONE_BY_TWO, *STAND_IN)
    job = hpc.submit(*words, str(WALK))
    job.at_step(5)
    job.preempt()
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("preempted", "requeue"), ("finished", "none")], job.output()
    for event in job.events("preflight"):
        (node,) = event["report"].values()
        assert (node["gpus"], node["device"], node["devices"]) == (2, "sim", 2)
    logs = [path.read_text() for path in job.run.logs.rglob("rank-*.log")]
    assert len(logs) == 4
    assert not reports_of("\n".join(logs))
    assert in_one_go(job)
    assert same_weights(job, walked)


@pytest.mark.more
def test_a_first_contact_in_an_allocation(hpc: Hpc) -> None:
    needs_stand_in()
    env = hpc.cluster.env() | {"HPC_DDP_RUNS": str(hpc.runs), "SIM_DEVICES": "1"}
    env["PYTHONPATH"] = f"{REPO / 'tests' / 'device'}:{REPO}"
    argv = ["salloc", "--nodes=2", "--gpus-per-node=1", sys.executable, "-m", "hpc_ddp"]
    done = subprocess.run([*argv, "preflight", "--train"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| yes |") == 6
    assert "| nodes | 2 |" in done.stdout


# --- a machine's own GPUs ---


needs_gpus = pytest.mark.skipif(DEVICE != "cuda", reason="DEVICE=cuda takes a machine's own GPUs")


@needs_gpus
@pytest.mark.more
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_gpus_it_ends_with_the_weights_of_an_undisturbed_run(hpc: Hpc, backend: str) -> None:
    words = ("--backend", backend, "--preflight", *TWO_BY_ONE, str(WALK))
    job = hpc.submit(*words)
    job.at_step(5)
    job.preempt()
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("preempted", "requeue"), ("finished", "none")], job.output()
    for event in job.events("preflight"):
        assert [(node["gpus"], node["device"]) for node in event["report"].values()] == [
            (1, "cuda"),
            (1, "cuda"),
        ]
    assert in_one_go(job)
    undisturbed = hpc.submit(*words, "--step-seconds", "0")
    assert undisturbed.end() == "COMPLETED", undisturbed.output()
    assert same_weights(job, undisturbed)


@needs_gpus
@pytest.mark.more
def test_on_gpus_a_killed_rank_goes_on_within_the_job(hpc: Hpc) -> None:
    job = hpc.submit("--max-restarts", "1", *TWO_BY_ONE, str(WALK))
    job.at_step(5)
    os.kill(job.worker(1), signal.SIGKILL)
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("finished", "none")], job.output()
    undisturbed = hpc.submit(*TWO_BY_ONE, *QUICK_WALK)
    assert undisturbed.end() == "COMPLETED", undisturbed.output()
    assert same_weights(job, undisturbed)


@needs_gpus
@pytest.mark.more
def test_on_gpus_a_first_contact_in_an_allocation(hpc: Hpc) -> None:
    env = hpc.cluster.env() | {"HPC_DDP_RUNS": str(hpc.runs), "PYTHONPATH": str(REPO)}
    argv = ["salloc", "--nodes=2", "--gpus-per-node=1", sys.executable, "-m", "hpc_ddp"]
    done = subprocess.run([*argv, "preflight", "--train"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| nodes | 2 |" in done.stdout
