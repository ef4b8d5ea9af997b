"""Restarts within an attempt, as many nodes as there are, and nodes that are lost on the way."""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from harness import BACKENDS, WALK, Hpc, Job, runs, same_weights, use

SAMPLES = 1600  # of walk.py, in its one epoch; 4 per rank and step


def _whole(job: Job) -> bool:
    """Tell whether the steps, each counted once, have consumed the epoch; the last may be short."""
    worlds: dict[int, int] = {}
    for event in job.events("first_step"):
        worlds = {step: world for step, world in worlds.items() if step < event["step"]}
        worlds[event["step"]] = event["world_size"]
    steps = [*worlds, job.events("finished")[-1]["step"] + 1]
    room = sum((end - begin) * worlds[begin] * 4 for begin, end in pairwise(steps))
    last: int = 4 * list(worlds.values())[-1]
    whole: bool = 0 <= room - SAMPLES < last
    return whole


def _restarted(hpc: Hpc, backend: str, folder: Path) -> Job:
    """Return a run whose rank 1 is killed; on one node, whose name leads nowhere."""
    (folder / ".config" / "hpc-ddp").mkdir(parents=True)
    (folder / ".config" / "hpc-ddp" / "site.toml").write_text('host-suffix = ".no.invalid"\n')
    words = ("--backend", backend, "--nodes", "1", "--gpus-per-node", "2", "--max-restarts", "1")
    debug = ("--env", "TORCH_DISTRIBUTED_DEBUG=INFO")
    job = hpc.submit(*words, *debug, str(WALK), env={"HOME": str(folder)})
    job.event("checkpoint")
    other = job.worker(0)
    environ = Path(f"/proc/{other}/environ").read_bytes().split(b"\0")
    assert b"TORCH_DISTRIBUTED_DEBUG=INFO" in environ
    os.kill(job.worker(1), signal.SIGKILL)
    job.until(lambda: not runs(other), "end of rank 0")
    assert job.end() == "COMPLETED", job.output()
    return job


def test_a_killed_worker_and_a_name_that_leads_nowhere(
    hpc: Hpc, cluster: Cluster, tmp_path: Path
) -> None:
    """All workers start again in the same attempt; and one node needs no name."""
    use(cluster)
    job = _restarted(hpc, "slurm", tmp_path)
    assert job.verdicts() == [("finished", "none")]
    assert len(job.run.attempts()) == 1
    steps = [event["step"] for event in job.events("first_step")]
    assert steps == [1, job.events("restored")[0]["step"] + 1]
    assert "hpc-ddp: the workers start again" in job.output()
    log = job.run.attempts()[0].nodes()[0].agent_log.read_text()
    assert "started by exec" not in log
    assert "is finished" in hpc("explain", job.id).stdout


@pytest.mark.more
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_numbers_after_a_restart(
    hpc: Hpc, cluster: Cluster, walked: Job, backend: str, tmp_path: Path
) -> None:
    use(cluster)
    assert same_weights(_restarted(hpc, backend, tmp_path), walked)


@pytest.mark.more
@pytest.mark.parametrize("backend", BACKENDS)
def test_as_many_nodes_as_there_are(hpc: Hpc, cluster: Cluster, backend: str) -> None:
    """Four nodes are free at first; when it is preempted, one."""
    use(cluster)
    words = ("--backend", backend, "--nodes", "1-4", "--gpus-per-node", "1", str(WALK))
    job = hpc.submit(*words, "--step-seconds", "0.2")
    job.at_step(10)
    cluster.run(
        *("sbatch", "--partition=high", "--nodes=3", "--gpus-per-node=4", "--output=/dev/null"),
        "--wrap=sleep 600",
    )
    job.event("finished", attempt=1)
    assert job.end() == "COMPLETED", job.output()
    assert [len(e["nodes"]) for e in job.events("started")] == [4, 1]
    assert [e["world_size"] for e in job.events("first_step")] == [4, 1]
    assert job.verdicts() == [("preempted", "requeue"), ("finished", "none")]
    assert _whole(job)


def _three_nodes(hpc: Hpc, cluster: Cluster, backend: str, *words: str) -> tuple[Job, list[str]]:
    use(cluster)
    elastic = ("--backend", backend, "--nodes", "3", "--nproc-per-node", "1", "--elastic")
    job = hpc.submit(*elastic, *words, env={"HPC_DDP_SAVE_EVERY": "1"})
    job.at_step(20)
    return job, job.events("started")[0]["nodes"]


def _lose(job: Job, cluster: Cluster, node: str, how: str) -> None:
    """Cut a node's link; or end all that runs on it, as when its power is gone."""
    if how == "cut":
        cluster.cut(node)
        return
    cluster.kill_slurmd(node)
    for pid in job.processes(node=node):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.more
@pytest.mark.row(
    "a node of an --elastic job lost",
    promise="the others go on in the same attempt, from the last checkpoint, within some 30 s and"
    " the time of a start; every sample of the epoch is counted once",
)
@pytest.mark.parametrize("how", ["cut", "off"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_rest_goes_on(
    hpc: Hpc, cluster: Cluster, backend: str, how: str, record_property: Any
) -> None:
    job, nodes = _three_nodes(hpc, cluster, backend, str(WALK), "--step-seconds", "0.5")
    _lose(job, cluster, nodes[2], how)
    began = time.time()
    job.until(lambda: len(job.events("first_step")) == 2, "step without the node")
    record_property("went on after s", round(job.events("first_step")[1]["time"] - began))
    assert job.end() == "COMPLETED", job.output()
    assert [e["world_size"] for e in job.events("first_step")] == [3, 2]
    assert job.events("first_step")[1]["hosts"] == nodes[:2]
    assert job.verdicts() == [("finished", "none")]
    assert len(job.run.attempts()) == 1
    assert job.show()["Restarts"] == "0"
    assert _whole(job)


@pytest.mark.more
@pytest.mark.row("a node of an --elastic job lost")
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_node_ends_the_attempt(hpc: Hpc, cluster: Cluster, backend: str) -> None:
    job, nodes = _three_nodes(hpc, cluster, backend, str(WALK), "--step-seconds", "0.5")
    _lose(job, cluster, nodes[0], "cut")
    job.event("first_step", attempt=1)
    assert nodes[0] not in job.events("started", 1)[0]["nodes"]
    cluster.heal(nodes[0])
    assert job.end() == "COMPLETED", job.output()
    assert _whole(job)


@pytest.mark.more
def test_a_suspension_restarts_no_worker(hpc: Hpc, cluster: Cluster) -> None:
    """All agents have stood still, and so have their heartbeats."""
    use(cluster)
    words = ("--nodes", "2", "--nproc-per-node", "1", "--elastic")
    job = hpc.submit(*words, str(WALK), "--step-seconds", "0.2")
    job.at_step(20)
    cluster.run("scontrol", "suspend", job.id)
    time.sleep(30)  # longer than nodes are waited for
    cluster.run("scontrol", "resume", job.id)
    assert job.end() == "COMPLETED", job.output()
    assert len(job.events("first_step")) == 1, job.output()


@pytest.mark.more
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_elastic_script_that_fails_still_ends(hpc: Hpc, cluster: Cluster, backend: str) -> None:
    """Rank 1 kills itself at step 25, whenever it comes there."""
    use(cluster)
    elastic = ("--backend", backend, "--nodes", "2", "--elastic", "--max-restarts", "1")
    job = hpc.submit(*elastic, "--max-failures", "0", str(WALK), "--die-at", "25")
    assert job.end() == "FAILED", job.output()
    assert job.verdicts() == [("failed", "give up")]
    assert len(job.events("first_step")) == 2
    assert "rank 1 on" in job.events("verdict")[0]["why"]
    assert not job.processes()
