"""What happens to jobs on a real cluster, and that they come through it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from cluster import Cluster
from cluster_build import Proctrack
from harness import (
    BACKENDS,
    DIGITS,
    DIGITS_ARGS,
    SCRIPTS,
    TWO_BY_TWO,
    Hpc,
    Job,
    in_one_go,
    same_weights,
)


@pytest.mark.parametrize("proctrack", ["linuxproc", "cgroup"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_preempted_with_and_without_notice(
    hpc: Hpc, cluster: Cluster, undisturbed: Job, backend: str, proctrack: Proctrack
) -> None:
    """First with a grace time of 20 s, then with none; the weights in the end are the same."""
    _use(cluster, proctrack)
    words = ("--backend", backend, *TWO_BY_TWO, str(DIGITS), *DIGITS_ARGS)
    job = hpc.submit(*words, env={"HPC_DDP_SAVE_EVERY": "1"})
    job.at_step(5)
    job.preempt()
    stopped = job.event("stopped", timeout=20)["step"]
    assert job.event("first_step", attempt=1)["step"] == stopped + 1
    cluster.run("scontrol", "update", "PartitionName=low", "GraceTime=0")
    try:
        job.at_step(stopped + 20, attempt=1)
        job.preempt()
        job.event("first_step", attempt=2)
    finally:
        cluster.run("scontrol", "update", "PartitionName=low", "GraceTime=20")
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts()[0] == ("preempted", "requeue")
    assert job.verdicts()[-1] == ("finished", "none")
    assert same_weights(job, undisturbed)
    assert "Traceback" not in job.output()
    assert job.output().count("going on from step") == 2


def _use(cluster: Cluster, proctrack: Proctrack) -> None:
    if proctrack == "cgroup" and cluster.cgroup_reason:
        pytest.skip(cluster.cgroup_reason)
    if cluster.proctrack != proctrack:
        cluster.reconfigure(proctrack=proctrack)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plain_script_that_dies_of_the_notice_is_requeued(
    hpc: Hpc, cluster: Cluster, backend: str, tmp_path: Path
) -> None:
    _use(cluster, "linuxproc")
    env = {"TICKS": "600", "MARKER": f"{tmp_path}/marker"}
    job = hpc.submit("--backend", backend, *TWO_BY_TWO, str(SCRIPTS / "plain.py"), env=env)
    job.until(lambda: os.path.exists(env["MARKER"]), 60, "first attempt at work")
    time.sleep(1)
    job.preempt()
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("preempted", "requeue"), ("finished", "none")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_worker_is_recovered_from(
    hpc: Hpc, cluster: Cluster, undisturbed: Job, backend: str
) -> None:
    _use(cluster, "linuxproc")
    words = ("--backend", backend, *TWO_BY_TWO, str(DIGITS), *DIGITS_ARGS)
    job = hpc.submit(*words, env={"HPC_DDP_SAVE_EVERY": "1"})
    job.at_step(25)
    workers = [job.worker(rank) for rank in range(4)]
    os.kill(workers[1], signal.SIGKILL)
    job.until(lambda: not any(map(_runs, workers)), 10, "end of the survivors")
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("failed", "requeue"), ("finished", "none")]
    assert "rank 1 on" in job.output()
    assert "SIGKILL" in job.output()
    assert same_weights(job, undisturbed)


def _runs(pid: int) -> bool:
    """Tell whether a process runs; one that is dead and waits for its parent does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_errors_of_a_script_end_it_with_its_own_code(hpc: Hpc, cluster: Cluster) -> None:
    """Before the first step at once; at the same step again after one retry."""
    _use(cluster, "linuxproc")
    script = str(SCRIPTS / "trouble.py")
    before = hpc.submit(*TWO_BY_TWO, script, "exit-before")
    assert before.end() == "FAILED", before.output()
    assert before.show()["ExitCode"] == "3:0"
    assert before.verdicts() == [("failed", "give up")]
    raises = hpc.submit(*TWO_BY_TWO, script, "raise-before")
    assert raises.end() == "FAILED", raises.output()
    last = raises.output().splitlines()[-1]
    node = raises.nodes().replace("[", "").split("-")[0]
    assert "rank 3" in last
    assert node[:4] in last
    assert "ValueError: before the first step" in last
    again = hpc.submit(*TWO_BY_TWO, script, "raise-at-30")
    assert again.end() == "FAILED", again.output()
    assert again.verdicts() == [("failed", "requeue"), ("failed", "give up")]
    assert "ValueError: at step 30" in again.output().splitlines()[-1]


@pytest.mark.parametrize("way", ["hpc-ddp cancel", "scancel"])
def test_cancel_in_each_phase(hpc: Hpc, cluster: Cluster, way: str) -> None:
    _use(cluster, "linuxproc")

    def cancel(job: Job) -> None:
        if way == "scancel":
            cluster.run("scancel", job.id)
        else:
            hpc("cancel", job.id)

    script = str(SCRIPTS / "trouble.py")
    words = ("--nodes", "1", "--nproc-per-node", "2", script)
    pending = hpc.submit("--sbatch=--hold", *words, "none")
    starting = hpc.submit(*words, "slow-start")
    saving = hpc.submit(*words, "slow-save")
    cancel(pending)
    starting.until(lambda: bool(list(starting.run.logs.glob("*/*/rank-1.pid"))), 60, "workers")
    cancel(starting)
    saving.until(lambda: (saving.run.path / "saving-0").exists(), 60, "save")
    cancel(saving)
    training = hpc.submit(*words, "none")
    training.event("first_step")
    cancel(training)
    graced = hpc.submit(*TWO_BY_TWO, str(SCRIPTS / "plain.py"), env={"TICKS": "600", "DEAF": "1"})
    graced.until(lambda: '"argv"' in graced.output(), 60, "work")
    graced.preempt()
    graced.until(lambda: bool(graced.events("notice")), 20, "notice")
    cancel(graced)
    for job in (pending, starting, saving, training, graced):
        assert job.end(20) == "CANCELLED", job.output()
    time.sleep(8)  # longer than it takes to be requeued
    for job in (pending, starting, saving, training, graced):
        assert job.state() == "CANCELLED"
        assert "requeue" not in {action for _, action in job.verdicts()}
        if way == "hpc-ddp cancel":
            assert '"cancelled"' in hpc("status", "--json", job.id).stdout


@pytest.fixture(scope="module")
def time_limited(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Job]:
    """Two jobs that need longer than Slurm's shortest time limit, a minute: one of ours, one plain.

    They run on the last node beside the test of the cut link, since both mostly wait.
    """
    _use(cluster, "linuxproc")
    cluster.reset()
    hpc = Hpc(cluster, tmp_path_factory.mktemp("limited"))
    words = ("--nodes", "1", "--nodelist", cluster.nodes[-1], "--time", "1")
    slow = ("--epochs", "2", "--batch-size", "8", "--step-seconds", "0.5")
    ours = hpc.submit(*words, "--gpus-per-node", "4", str(DIGITS), *slow)
    plain = hpc.submit(
        *words,
        "--max-requeues",
        "1",
        str(SCRIPTS / "plain.py"),
        env={"TICKS": "600", "DEAF": "1"},
    )
    return ours, plain


def test_first_node_cut_off_and_healed(
    cluster: Cluster, undisturbed: Job, time_limited: tuple[Job, Job], tmp_path: Path
) -> None:
    """The shell of the lost attempt comes back to a job that is somebody else's by now."""
    hpc = Hpc(cluster, tmp_path / "runs")
    words = ("--exclude", cluster.nodes[-1], *TWO_BY_TWO, str(DIGITS), *DIGITS_ARGS)
    job = hpc.submit(*words, env={"HPC_DDP_SAVE_EVERY": "0.5"})
    job.at_step(30)
    first = job.events("started", 0)[0]["nodes"][0]
    cluster.cut(first)
    job.event("first_step", attempt=1, timeout=150)
    assert first not in job.events("started", 1)[0]["nodes"]
    for srun in _processes_of(job, "srun", attempt=0):
        os.kill(srun, signal.SIGKILL)  # or its shell would sit there and wait for it
    cluster.heal(first)
    job.until(lambda: "attempt 0: superseded" in job.output(), 60, "verdict of the old shell")
    assert job.end() == "COMPLETED", job.output()
    assert len(job.run.attempts()) == 2
    assert same_weights(job, undisturbed)


def _processes_of(job: Job, name: str, attempt: int) -> list[int]:
    """Return the processes of an attempt by their name, wherever they run: it is one machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "environ").read_bytes().decode(errors="replace").split("\0")
            wanted = {f"HPC_DDP_RUN={job.run.path}", f"HPC_DDP_ATTEMPT={attempt}"}
            if (path / "comm").read_text().strip() == name and wanted <= set(words):
                found.append(int(path.name))
    return found


def test_longer_than_the_time_limit(
    cluster: Cluster, undisturbed: Job, time_limited: tuple[Job, Job]
) -> None:
    """Ours goes on at the next step; one that uses nothing of ours starts over, once.

    The latter ignores SIGTERM as well, and must not take the verdict with it.
    """
    ours, plain = time_limited
    assert ours.end(240) == "COMPLETED", ours.output()
    assert set(ours.verdicts()[:-1]) == {("time limit", "requeue")}
    assert in_one_go(ours)
    assert same_weights(ours, undisturbed)
    assert plain.end(120) == "FAILED", plain.output()
    assert plain.verdicts() == [("time limit", "requeue"), ("time limit", "give up")]
    cluster.reset()
