"""The switch to another version of Slurm; the tests beside this one run with what it gives."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import cluster_versions
import pytest
from cluster import Cluster, ClusterError, available
from cluster_versions import SUITES, VARIABLE, NotToBeHadError, ensure, wanted
from harness import ONE_BY_TWO, SCRIPTS, TWO_BY_TWO, Hpc, Job, use

from hpc_ddp.core.run_folder import RunFolder


def test_the_environment_names_a_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert wanted() == ""
    monkeypatch.setenv(VARIABLE, "trixie")
    assert wanted() == "trixie"
    monkeypatch.setenv(VARIABLE, "24.11")
    with pytest.raises(ClusterError, match=f"24.11: accepted are {', '.join(SUITES)}"):
        wanted()


@pytest.mark.skipif(available() is not None, reason="apt, as root, is needed")
def test_without_the_mirror_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_versions, "CACHE", tmp_path)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with pytest.raises(NotToBeHadError, match="the Slurm of Debian trixie can't be had"):
        ensure("trixie")
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_the_cluster_has_the_wanted_version(cluster: Cluster) -> None:
    """The controller that answers, and what a job finds on its PATH."""
    suite = cluster.suite
    first = {"": (), "bullseye": (20, 11), "trixie": (24, 11), "sid": (26,)}[suite]
    assert cluster.version()[: len(first)] == first
    year, month, patch = cluster.version()
    said = f"{year}.{month:02}.{patch}"
    assert said in cluster.run("scontrol", "show", "config").stdout
    assert said in cluster.run("srun", "--nodes=1", "srun", "--version").stdout


# --- what may differ from version to version, shown with a script that starts at once --------


def _begin(hpc: Hpc, folder: Path, *words: str, env: dict[str, str] | None = None) -> Job:
    """Submit a script without torch, and wait until all its four ranks are at work."""
    folder.mkdir(exist_ok=True)
    script = (*TWO_BY_TWO, str(SCRIPTS / "light.py"), str(folder))
    job = hpc.submit("--launcher", "srun", *words, *script, env=env)
    job.until(lambda: len(list(folder.iterdir())) == 4, "four ranks at work")
    time.sleep(1)
    return job


def _goes_on(job: Job, why: str) -> None:
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [(why, "requeue"), ("finished", "none")]
    assert job.output().count("done by rank 0") == 1


@pytest.mark.more
@pytest.mark.version
def test_preempted(hpc: Hpc, cluster: Cluster, tmp_path: Path) -> None:
    use(cluster)
    job = _begin(hpc, tmp_path / "ranks")
    job.preempt()
    _goes_on(job, "preempted")


@pytest.mark.more
@pytest.mark.version
@pytest.mark.parametrize("partition", ["low", "low0"])
def test_preempted_and_killed(hpc: Hpc, cluster: Cluster, tmp_path: Path, partition: str) -> None:
    """At the end of a grace time that it does not use, and without any: Slurm requeues it."""
    use(cluster)
    job = _begin(hpc, tmp_path / "ranks", "--partition", partition, env={"DEAF": "1"})
    job.preempt()
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts()[-1] == ("finished", "none")
    assert len(job.run.attempts()) == 2


@pytest.mark.more
@pytest.mark.row(
    "preemption, a node takes its time to answer the controller",
    promise="requeued: until all nodes have answered Slurm shows SIGNALING, which is no cancel",
)
@pytest.mark.version
def test_a_node_is_slow_to_take_the_signal(hpc: Hpc, cluster: Cluster, tmp_path: Path) -> None:
    use(cluster)
    job = _begin(hpc, tmp_path / "ranks")
    with cluster.slow_slurmd(job.events("started")[0]["nodes"][-1]):
        job.preempt()
        job.until(lambda: bool(job.verdicts()), "verdict")
    _goes_on(job, "preempted")


@pytest.mark.more
@pytest.mark.version
def test_time_limit_and_refused_requeue(hpc: Hpc, cluster: Cluster, tmp_path: Path) -> None:
    """Beside each other, since both wait. What may not be requeued goes on as a new job."""
    use(cluster)
    limited = _begin(hpc, tmp_path / "limited", "--time", "1")
    refused = _begin(hpc, tmp_path / "refused", env={"DEAF": "1"})
    cluster.run("scontrol", "update", f"JobId={refused.id}", "Requeue=0")
    os.kill(refused.worker(1), signal.SIGKILL)
    refused.until(lambda: len(refused.verdicts()) == 2, "two verdicts")
    assert "it goes on as job" in refused.output()
    assert refused.verdicts()[-1] == ("finished", "none")
    _goes_on(limited, "time limit")


@pytest.mark.more
@pytest.mark.version
@pytest.mark.parametrize("way", ["scancel", "hpc-ddp"])
def test_cancelled_in_the_grace_time(hpc: Hpc, cluster: Cluster, tmp_path: Path, way: str) -> None:
    use(cluster)
    job = _begin(hpc, tmp_path / "ranks", env={"DEAF": "1"})
    job.preempt()
    job.notice()
    if way == "scancel":
        cluster.run("scancel", job.id)
    else:
        hpc("cancel", job.id)
    assert job.end() == "CANCELLED", job.output()
    assert len(job.run.attempts()) == 1


@pytest.mark.more
@pytest.mark.version
def test_one_task_of_an_array_is_preempted(hpc: Hpc, cluster: Cluster, tmp_path: Path) -> None:
    """Only that one is requeued; status and explain know what became of both."""
    use(cluster)
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
    words = ("--launcher", "srun", *ONE_BY_TWO, "--exclusive", str(SCRIPTS / "light.py"))
    sweep = hpc.submit(*words, sets=(f"folder={folders[0]},{folders[1]}",))
    sweep.until(lambda: all(len(list(f.iterdir())) == 2 for f in folders), "both tasks")
    assert "2 running" in hpc("status", sweep.id).stdout
    tasks = [
        Job(cluster, f"{sweep.id}_{n}", RunFolder(sweep.run.path / f"task-{n}")) for n in range(2)
    ]
    time.sleep(1)
    tasks[1].preempt()
    assert tasks[1].end() == "COMPLETED", tasks[1].output()
    assert tasks[1].verdicts() == [("preempted", "requeue"), ("finished", "none")]
    assert len(tasks[0].run.attempts()) == 1
    hpc("cancel", sweep.id)
    assert tasks[0].end() == "CANCELLED"
    assert len(tasks[1].run.attempts()) == 2


@pytest.mark.more
@pytest.mark.version
def test_what_becomes_of_it_is_told(hpc: Hpc, cluster: Cluster, tmp_path: Path) -> None:
    """By status and explain, of jobs that wait, run, failed, and were killed."""
    use(cluster)
    held = hpc.submit("--sbatch=--hold", "--launcher", "srun", str(SCRIPTS / "light.py"), ".")
    assert "held" in hpc("explain", held.id).stdout
    assert '"waiting"' in hpc("status", "--json", held.id).stdout
    job = _begin(hpc, tmp_path / "ranks", "--max-failures", "0")
    assert '"running"' in hpc("status", "--json", job.id).stdout
    os.kill(job.worker(1), signal.SIGKILL)
    assert job.end() == "FAILED", job.output()
    told = hpc("explain", job.id).stdout
    assert "SIGKILL" in told
    hpc("cancel", held.id)
    assert held.end() == "CANCELLED"


@pytest.fixture
def expedited(cluster: Cluster) -> Iterator[None]:
    """A cluster that puts a requeued job before all others."""
    if cluster.version()[:2] < (25, 11):
        pytest.skip("Slurm has --requeue=expedite from 25.11 on")
    use(cluster)
    cluster.reconfigure(extra="SlurmctldParameters=enable_expedited_requeue")
    yield
    cluster.reconfigure(extra="")


@pytest.mark.more
@pytest.mark.version
@pytest.mark.row(
    "requeued by Slurm 25.11 and later with `--requeue=expedite`",
    promise="starts again at once; what is given up fails, and is not held in the queue",
)
def test_expedited(expedited: None, hpc: Hpc, tmp_path: Path) -> None:
    words = ("--sbatch=--requeue=expedite",)
    preempted = _begin(hpc, tmp_path / "preempted", *words)
    preempted.preempt()
    _goes_on(preempted, "preempted")
    given_up = _begin(hpc, tmp_path / "given up", *words, "--max-failures", "0")
    os.kill(given_up.worker(1), signal.SIGKILL)
    assert given_up.end() == "FAILED", given_up.output()
    failed = hpc.submit(*words, "--setup=exit 7", str(SCRIPTS / "light.py"), ".")
    assert failed.end() == "FAILED", failed.output()  # and is not held in the queue
