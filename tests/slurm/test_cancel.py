"""The user cancels, and it stays cancelled, whatever the job was doing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster import Cluster
from harness import BACKENDS, ONE_BY_TWO, SCRIPTS, WALK, Hpc, Job, use

WAYS = ["hpc-ddp cancel", pytest.param("scancel", marks=pytest.mark.more)]


def _cancel(hpc: Hpc, way: str, job: Job) -> None:
    if way == "scancel":
        hpc.cluster.run("scancel", job.id)
    else:
        hpc("cancel", job.id)


@pytest.mark.row(
    "cancelled while pending, starting, running, saving, in the grace time",
    "ends at once and stays cancelled; after `hpc-ddp cancel`, `status` says so",
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["slurm", pytest.param("submitit", marks=pytest.mark.more)])
def test_cancel_in_each_phase(hpc: Hpc, cluster: Cluster, way: str, backend: str) -> None:
    use(cluster)
    script = str(SCRIPTS / "trouble.py")
    words = ("--backend", backend, "--nodes", "1")
    pending = hpc.submit("--sbatch=--hold", *words, script, "none")
    starting = hpc.submit(*words, script, "slow-start")
    saving = hpc.submit(*words, "--nproc-per-node", "2", script, "slow-save")
    _cancel(hpc, way, pending)
    starting.until(lambda: bool(list(starting.run.logs.glob("*/*/rank-0.pid"))), "a worker")
    _cancel(hpc, way, starting)
    saving.until(lambda: (saving.run.path / "saving-0").exists(), "save")
    _cancel(hpc, way, saving)
    training = hpc.submit(*words, script, "none")
    training.event("first_step")
    _cancel(hpc, way, training)
    deaf = {"TICKS": "600", "DEAF": "1"}
    plain = (*ONE_BY_TWO, str(SCRIPTS / "plain.py"))
    graced = hpc.submit("--backend", backend, *plain, env=deaf)
    graced.printed('"argv"')
    graced.preempt()
    graced.notice()
    _cancel(hpc, way, graced)
    for job in (pending, starting, saving, training, graced):
        assert job.end() == "CANCELLED", job.output()
    for job in (pending, starting, saving, training, graced):
        _stays_cancelled(hpc, way, job)
        assert "requeue" not in {action for _, action in job.verdicts()}


@pytest.mark.more
@pytest.mark.row(
    "cancelled while it waits to be started again", "stays cancelled, and is not started"
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_cancel_between_two_attempts(hpc: Hpc, cluster: Cluster, way: str, backend: str) -> None:
    use(cluster)
    job = hpc.submit("--backend", backend, *ONE_BY_TWO, str(WALK))
    job.at_step(10)
    job.preempt()
    job.until(lambda: bool(job.verdicts()), "verdict")
    job.until(lambda: job.state() == "PENDING", "wait for the next start")
    assert job.show()["Restarts"] == "1"
    _cancel(hpc, way, job)
    assert job.end() == "CANCELLED", job.output()
    _stays_cancelled(hpc, way, job)
    assert len(job.run.attempts()) == 1


HANGS = """
import time
import torch
from hpc_ddp.training import start
run = start(seed=0)
run.track(model=run.wrap(torch.nn.Linear(2, 2)))
for _ in run.steps(3):
    run.step()
run.finish()
time.sleep(3600)
"""


@pytest.mark.more
def test_a_finished_run_whose_script_hangs_is_cancelled(
    hpc: Hpc, cluster: Cluster, tmp_path: Path
) -> None:
    use(cluster)
    (tmp_path / "hangs.py").write_text(HANGS)
    job = hpc.submit("--nodes", "1", str(tmp_path / "hangs.py"))
    job.event("finished")
    assert job.state() == "RUNNING"
    hpc("cancel", job.id)
    assert job.end() == "CANCELLED", job.output()
    (status,) = json.loads(hpc("status", "--json", job.id).stdout)
    assert status["state"] == "finished", job.output()
    assert len(job.run.attempts()) == 1


def _stays_cancelled(hpc: Hpc, way: str, job: Job) -> None:
    assert job.state() == "CANCELLED"
    if way == "hpc-ddp cancel":
        assert '"cancelled"' in hpc("status", "--json", job.id).stdout
