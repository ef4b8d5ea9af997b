"""Clusters that differ from that of the other tests as real ones differ from each other."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from cluster import Cluster
from cluster_machine import ensure_packages
from harness import (
    DIGITS,
    REPO,
    SCRIPTS,
    TWO_BY_ONE,
    TWO_BY_TWO,
    WALK,
    Hpc,
    Job,
    same_weights,
)

from hpc_ddp.core.run_folder import RunFolder

pytestmark = [pytest.mark.more, pytest.mark.version]

QUICK = (str(DIGITS), "--epochs", "1", "--batch-size", "64")


@pytest.fixture(scope="module")
def other() -> Iterator[Cluster]:
    """Node names that do not sort as text (n8 to n11), and nodes of different size."""
    cluster = Cluster.up(accounting=False, first_node=8, cpus=(8, 8, 6, 4))
    yield cluster
    cluster.down()


@pytest.fixture
def hpc(other: Cluster, tmp_path: Path) -> Iterator[Hpc]:
    yield Hpc(other, tmp_path / "runs")
    other.reset()


def _with(cluster: Cluster, extra: str) -> None:
    if cluster.extra != extra:
        cluster.reconfigure(extra=extra)


def _finishes(job: Job) -> str:
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("finished", "none")]
    return job.output()


@pytest.mark.row(
    "node names that do not sort as text",
    promise="ranks go by Slurm's order of the nodes, with rank 0 on the first, beside the store",
)
@pytest.mark.parametrize("nodes", ["4", "2-4"])
def test_ranks_go_by_the_node_list(hpc: Hpc, other: Cluster, tmp_path: Path, nodes: str) -> None:
    _with(other, "")
    elastic = ("--elastic",) if "-" in nodes else ()
    words = ("--nodes", nodes, "--gpus-per-node", "1", *elastic)
    job = hpc.submit(*words, str(SCRIPTS / "where.py"))
    output = _finishes(job)
    (names,) = re.findall(r"ranks on (.*)", output)
    assert names.split() == job.events("started")[0]["nodes"] == other.nodes


@pytest.mark.row(
    "nodes of different size",
    promise="a worker asks for the CPUs of the smallest one",
)
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_nodes_of_different_size(hpc: Hpc, other: Cluster, launcher: str) -> None:
    _with(other, "")
    sizes = ("--sbatch=--nodelist=" + ",".join(other.nodes[1:3]), "--exclusive")
    _finishes(hpc.submit("--launcher", launcher, *TWO_BY_TWO, *sizes, *QUICK))


@pytest.mark.row(
    "GPUs without CPUs by default (cons_tres, no DefCpuPerGPU)",
    promise="the job says that it has too few CPUs, and what to type",
)
def test_too_few_cpus_are_reported(hpc: Hpc, other: Cluster) -> None:
    _with(other, "")
    output = _finishes(hpc.submit("--nodes", "1", "--gpus-per-node", "4", *QUICK))
    assert "the job has 1 CPU(s) on a node, and 4 workers there" in output
    assert "--cpus-per-node 16" in output


@pytest.mark.row(
    "CPUs bound by task/affinity",
    promise="everything works",
)
def test_tasks_are_bound_to_cpus(hpc: Hpc, other: Cluster) -> None:
    _with(other, "TaskPlugin=task/affinity")
    _finishes(hpc.submit(*TWO_BY_TWO, "--cpus-per-node", "4", *QUICK))


@pytest.mark.row(
    "an MPI by default (MpiDefault=pmix)",
    promise="one task's PMIx reaches no worker of torchrun; each srun task has its own",
)
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_an_mpi_by_default(hpc: Hpc, other: Cluster, tmp_path: Path, launcher: str) -> None:
    if other.suite:
        pytest.skip("PMIx is installed for the machine's own Slurm only")
    ensure_packages({f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}/libpmix.so": "libpmix-dev"})
    # The nodes of this rig share their /tmp, in which each node makes a folder of the step's name:
    # two nodes would meet there, and so would steps of two clusters.
    base = other.folder / "pmix"
    base.mkdir(exist_ok=True)
    (other.folder / "mpi.conf").write_text(f"PMIxCliTmpDirBase={base}\n")
    _with(other, "MpiDefault=pmix")
    nodes = ("--nodes", "1", "--gpus-per-node", "4", "--cpus-per-node", "4")
    job = hpc.submit("--launcher", launcher, *nodes, str(SCRIPTS / "where.py"))
    output = _finishes(job)
    (line,) = re.findall(r"PMIX_RANK (.*)", output)
    assert line.split() == (["None"] * 4 if launcher == "torchrun" else ["0", "1", "2", "3"])


@pytest.fixture
def own_tmp(other: Cluster) -> Iterator[Path]:
    """Give each job a /tmp of its own; yield a folder for runs that is not in /tmp."""
    if other.version()[:2] < (21, 8):
        pytest.skip("Slurm has job_container/tmpfs from 21.08 on")
    base = other.folder / "job-tmp"
    base.mkdir(exist_ok=True)
    (other.folder / "job_container.conf").write_text(f"AutoBasePath=true\nBasePath={base}/%n\n")
    _with(other, "JobContainerType=job_container/tmpfs\nPrologFlags=Contain")
    other.bind_slurmds()
    yield other.folder / "runs"
    _with(other, "")


@pytest.mark.row(
    "a /tmp of its own for each job (job_container/tmpfs)",
    promise="everything works",
)
def test_a_tmp_for_each_job(hpc: Hpc, own_tmp: Path) -> None:
    marker = f"test ! -e {hpc.runs.parent}"  # which is in /tmp
    _finishes(hpc.submit("--runs-dir", str(own_tmp), "--setup", marker, *TWO_BY_ONE, *QUICK))


@pytest.mark.row(
    "a /tmp of its own for each job, `--stage`, preempted twice",
    promise="goes on: no copy lies there, since Slurm empties it at the notice",
)
def test_a_copy_and_a_tmp_for_each_job(hpc: Hpc, own_tmp: Path) -> None:
    script = own_tmp.parent / "thrice.py"
    script.write_text((SCRIPTS / "twice.py").read_text().replace('== "0"', '< "2"'))
    words = ("--stage", "--launcher", "srun", "--python", sys.executable)
    job = hpc.submit("--runs-dir", str(own_tmp), *words, *TWO_BY_ONE, str(script))
    job.until((job.run.path / "stage" / "label").exists, "the parcel")
    for count in (1, 2):
        job.until(partial(_has_started, job, count), "a start")
        job.preempt()
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("preempted", "requeue")] * 2 + [("finished", "none")]
    assert "/tmp/hpc-ddp-near-" not in job.output()


def _has_started(job: Job, count: int) -> bool:
    return job.output().count("prefix ") == count


@pytest.mark.row(
    "a profile that exports nothing (SBATCH_EXPORT=NONE)",
    promise="the job has its variables all the same",
)
def test_a_site_that_exports_nothing(hpc: Hpc, other: Cluster) -> None:
    _with(other, "")
    nothing = {"SBATCH_EXPORT": "NONE", "SLURM_EXPORT_ENV": "NONE"}
    _finishes(hpc.submit(*TWO_BY_ONE, *QUICK, env=nothing))


@pytest.mark.row(
    "a login node whose Python does not run on the nodes",
    promise="the node side takes the worker's Python, or the nodes' own",
)
def test_the_login_nodes_python_does_not_run(
    hpc: Hpc, other: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with(other, "")
    folder = tmp_path / "login" / "bin"
    folder.mkdir(parents=True)
    python = folder / "python"
    python.symlink_to(Path(sys.executable).resolve())
    words = ("--sbatch=--hold", "--python", sys.executable, *TWO_BY_ONE, *QUICK)
    packages = f"{REPO}:{sysconfig.get_path('purelib')}"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        job = hpc.submit(*words, env={"PYTHONPATH": packages})
    python.unlink()
    python.write_bytes(b"\x7fELF of another processor")
    python.chmod(0o755)
    assert str(python) in (job.run.path / "job.sbatch").read_text()
    other.run("scontrol", "release", job.id)
    _finishes(job)


@pytest.mark.row(
    "a login node that limits its shells (ulimit)",
    promise="the job has the nodes' limits, but for that of core files",
)
def test_limits_of_the_login_shell(hpc: Hpc, other: Cluster, tmp_path: Path) -> None:
    _with(other, "")
    script = tmp_path / "limits.py"
    script.write_text(
        "import resource as r\n"
        "print('limits', *(r.getrlimit(n)[0] for n in (r.RLIMIT_CPU, r.RLIMIT_CORE)))\n"
    )
    limited = 'ulimit -S -t 300 -c 0; exec "$@"'
    words = ("submit", "--json", "--nodes", "1", "--launcher", "srun", str(script))
    env = other.env() | {"HPC_DDP_RUNS": str(hpc.runs), "PYTHONPATH": str(REPO)}
    argv = ["bash", "-c", limited, "bash", sys.executable, "-m", "hpc_ddp", *words]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    job = Job(other, answer["job_id"], RunFolder(Path(answer["run"])))
    assert "limits -1 0\n" in _finishes(job)


@pytest.mark.row(
    "a cluster that starts jobs with some exit codes again (RequeueExit)",
    promise="a job that is given up ends, with another exit code",
)
def test_a_cluster_that_restarts_exit_codes(hpc: Hpc, other: Cluster, tmp_path: Path) -> None:
    _with(other, "RequeueExit=1,75\nRequeueExitHold=2")
    script = tmp_path / "fails.py"
    script.write_text("import sys\nsys.exit(1)\n")
    job = hpc.submit("--nodes", "1", "--launcher", "srun", str(script))
    assert job.end() == "FAILED", job.output()
    (verdict,) = job.verdicts()
    assert verdict[1] == "give up"
    shown = job.show()
    assert (shown["ExitCode"], shown["Restarts"]) == ("3:0", "0")


@pytest.mark.row(
    "a node goes silent shortly before the time limit, with Slurm's own timers",
    promise="the step is ended while the batch script lives; the job is requeued, and goes on",
)
def test_a_node_goes_silent_before_the_time_limit(hpc: Hpc, other: Cluster, walked: Job) -> None:
    _with(other, "SlurmdTimeout=300\nKillWait=30")
    words = (*TWO_BY_ONE, str(WALK), "--step-seconds", "0.8")
    job = hpc.submit("--time", "2", *words)
    job.until(lambda: job.show()["RunTime"] >= "00:01:42", "the last seconds before the limit")
    silent = job.events("started")[0]["nodes"][1]
    other.cut(silent)
    # At the time limit, which Slurm notices some time in the next half minute, it signals all
    # processes of the batch script; here they get it in any case.
    for pid in job.processes("batch watch"):
        os.kill(pid, signal.SIGTERM)
    job.until(job.verdicts, "verdict")
    other.heal(silent)
    assert job.end() == "COMPLETED", job.output()
    # An attempt that starts slowly may need a third one.
    assert set(job.verdicts()[:-1]) == {("time limit", "requeue")}
    assert job.verdicts()[-1] == ("finished", "none")
    assert "srun is killed, so that the verdict can come" in job.output()
    assert same_weights(job, walked)


@pytest.mark.row(
    "two clusters of one name on one disk, as clouds make them",
    promise="neither takes a run of the other one, and both say so",
)
def test_two_clusters_of_one_name(hpc: Hpc, other: Cluster) -> None:
    _with(other, "")
    namesake = Cluster.up(accounting=False, extra=f"ClusterName={other.cluster}")
    try:
        job = hpc.submit(*TWO_BY_ONE, str(WALK), "--hold-at", "20")
        job.held(20)
        there = Hpc(namesake, hpc.runs)
        (status,) = json.loads(there("status", "--json", job.run.id).stdout)
        assert (status["state"], "can't be asked from here" in status["why"]) == ("unknown", True)
        refused = there("submit", "--run", str(job.run.path), check=False)
        assert refused.returncode == 2
        assert f"may be at work: job {job.id} of cluster {other.cluster}@" in refused.stderr
        hpc("cancel", job.id)
        assert job.end() == "CANCELLED"
    finally:
        namesake.down()
