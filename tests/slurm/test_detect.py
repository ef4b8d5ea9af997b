"""What `hpc-ddp site detect` finds on the tests' cluster, and that jobs then do as it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from harness import Hpc

from hpc_ddp import slurm


@pytest.fixture
def many(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster with a partition more that cancels, and one that gives whole nodes."""
    made = {
        "lowc": ("PriorityTier=1", "PreemptMode=CANCEL", "GraceTime=0"),
        "whole": ("PriorityTier=10", "OverSubscribe=EXCLUSIVE", "DefaultTime=10", "MaxTime=60"),
    }
    for name, values in made.items():
        cluster.run("scontrol", "create", f"PartitionName={name}", "Nodes=ALL", *values)
    yield cluster
    for name in made:
        cluster.run("scontrol", "delete", f"PartitionName={name}")


def test_a_site_file_is_written_and_jobs_do_as_it_says(
    hpc: Hpc, many: Cluster, tmp_path: Path
) -> None:
    scratch = {"SCRATCH": "/nowhere/me", "WORK": str(tmp_path), "HPC_DDP_RUNS": ""}
    home = {"HOME": str(tmp_path), **scratch}
    script = tmp_path / "hello.py"
    script.write_text("print('hello')\n")
    done = hpc("site", "detect", env=home)
    path = tmp_path / ".config" / "hpc-ddp" / "site.toml"
    assert done.stdout == f"{path}\n"
    for text in (f"Cluster {many.cluster}: Slurm ", "$SCRATCH (/nowhere/me) is not writable here"):
        assert text in done.stderr
    written = path.read_text()
    assert 'continue-by = "resubmit"' in written
    for text in (
        "jobs can be preempted by high, whole (REQUEUE, 20 s of grace)",
        "jobs get whole nodes; time limit 01:00:00; 00:10:00 without --time",
        "without it: one core for all workers",
    ):
        assert text in written
    assert 'scratch = "$WORK"' in written
    again = hpc("site", "detect", env=home, check=False)
    assert again.returncode == 2
    assert "left as it is" in again.stderr
    hpc("site", "detect", "--force", env=home)
    assert path.read_text() == written

    whole = hpc("render", "-p", "whole", str(script), env=home).stdout
    assert "#SBATCH --gpus-per-node=4\n" in whole
    assert "--nproc-per-node=4\n" in whole
    job = hpc.submit("-p", "lowc", "--launcher", "srun", str(script), env=home)
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("finished", "none")]
    assert len(job.run.jobs(job.run.events())) == 2  # the next one had been queued
    assert job.show()["NumCPUs"] == "1"
    assert job.run.path.is_relative_to(tmp_path / "hpc-ddp")


def test_a_whole_node_has_no_gpus_for_a_step_that_has_not_asked(many: Cluster) -> None:
    """What the words of `site detect` rest on."""
    show = "echo $SLURM_CPUS_ON_NODE $CUDA_VISIBLE_DEVICES"
    step = ("srun", "--partition=whole", "--nodes=1")
    assert many.run(*step, "bash", "-c", show).stdout.split() == ["8"]
    asked = many.run(*step, "--gpus-per-node=4", "bash", "-c", show)
    assert asked.stdout.split() == ["8", "0,1,2,3"]


def test_an_accounting_that_does_not_answer(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.env().items():
        monkeypatch.setenv(name, value)
    assert slurm.show_accounting("qos") or not cluster.accounting
    text = cluster.conf.read_text()
    (tmp_path / "slurm.conf").write_text(text.replace(f"={cluster.dbd_port}\n", "=9\n"))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    assert slurm.show_accounting("qos") == slurm.show_accounting("user", "me", "withassoc") == []
    assert slurm.show_config()["ClusterName"] == cluster.cluster
