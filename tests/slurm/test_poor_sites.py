"""Sites that lack something."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from harness import BACKENDS, ONE_BY_TWO, WALK, Hpc, Job, in_one_go, same_weights, use

from hpc_ddp.core.run_folder import RunFolder


def _preempted(hpc: Hpc, walked: Job, *words: str) -> Job:
    job = hpc.submit(*words, *ONE_BY_TWO, str(WALK), "--step-seconds", "0.1")
    job.at_step(10)
    job.preempt()
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("preempted", "requeue"), ("finished", "none")]
    assert in_one_go(job)
    assert same_weights(job, walked)
    return job


@pytest.mark.more
@pytest.mark.row("no accounting", "everything works, also a preemption and an end by status")
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_accounting(bare: Cluster, walked: Job, backend: str, tmp_path: Path) -> None:
    hpc = Hpc(bare, tmp_path / "runs")
    assert bare.run("sacct", check=False).returncode != 0
    job = _preempted(hpc, walked, "--backend", backend)
    assert '"finished"' in hpc("status", "--json", job.id).stdout
    bare.reset()


@pytest.fixture(scope="module")
def bare() -> Iterator[Cluster]:
    cluster = Cluster.up(accounting=False)
    yield cluster
    cluster.down()


@pytest.mark.more
@pytest.mark.row("no scontrol where the workers are", "everything works")
def test_no_scontrol_in_the_container(hpc: Hpc, cluster: Cluster, walked: Job) -> None:
    """A container without Slurm in it, which `env` stands in for (not with submitit)."""
    use(cluster)
    _preempted(hpc, walked, "--container", "env PATH=/nowhere", "--python", sys.executable)


@pytest.mark.more
@pytest.mark.row("a job array, one task preempted", "each has its own run and its own fate")
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_of_an_array_is_preempted(
    hpc: Hpc, cluster: Cluster, walked: Job, backend: str
) -> None:
    use(cluster)
    words = ("--array", "0-3", "--nodes", "1", "--gpus-per-node", "2", "--exclusive")
    array = hpc.submit("--backend", backend, *words, str(WALK), "--step-seconds", "0.3")
    tasks = [
        Job(cluster, f"{array.id}_{n}", RunFolder(array.run.path / f"task-{n}")) for n in range(4)
    ]
    for task in tasks:
        task.event("started")
    # The last one: its number is that of the array, too.
    tasks[3].at_step(10)
    tasks[3].preempt()
    for task in tasks:
        assert task.end() == "COMPLETED", task.output()
        assert same_weights(task, walked)
    preempted = [("preempted", "requeue"), ("finished", "none")]
    fates = [task.verdicts() for task in tasks]
    assert fates == [preempted if n == 3 else preempted[1:] for n in range(4)]
    assert in_one_go(tasks[3])


@pytest.mark.more
@pytest.mark.row(
    "ten jobs submitted at once, four at a time on two nodes",
    "ports and folders apart: all finish",
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ten_jobs_on_two_nodes(hpc: Hpc, cluster: Cluster, backend: str) -> None:
    use(cluster)
    nodes = f"{cluster.nodes[0]},{cluster.nodes[1]}"
    words = ("--backend", backend, "--nodes", "2", "--gpus-per-node", "1", "--nodelist", nodes)
    jobs = [hpc.submit(*words, str(WALK.with_name("plain.py"))) for _ in range(10)]
    assert [job.end() for job in jobs] == ["COMPLETED"] * 10
    assert [job.verdicts() for job in jobs] == [[("finished", "none")]] * 10
    assert len({job.run.path for job in jobs}) == 10
    assert len({job.output().count("done") for job in jobs} - {1}) == 0
