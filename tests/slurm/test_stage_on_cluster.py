"""`--stage`: a requeued job starts Python from a tree close to its nodes, which is removed."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
from harness import SCRIPTS, Hpc, Job


@pytest.mark.more
def test_a_requeued_job_starts_from_the_parcel(hpc: Hpc, tmp_path: Path) -> None:
    (near := tmp_path / "near").mkdir()
    words = ("--stage", "--launcher", "srun", "--nodes", "2", "--python", sys.executable)
    job = hpc.submit(*words, "--setup", f"export TMPDIR={near}", str(SCRIPTS / "twice.py"))
    job.until((job.run.path / "stage" / "label").exists, "the parcel")
    hpc.cluster.run("scontrol", "requeue", job.id)
    assert job.end() == "COMPLETED", job.output()
    prefixes = [
        {
            path.read_text().splitlines()[0]
            for path in job.run.logs.glob(f"attempt-{n}/*/rank-*.log")
        }
        for n in (0, 1)
    ]
    assert prefixes[0] == {f"prefix {sys.prefix}"}
    (line,) = prefixes[1]
    assert line.startswith(f"prefix {near}/")
    for text in ("there is no parcel yet", "the next start reads", " MB of disk; Python starts"):
        assert job.output().count(text) == 1, job.output()
    assert [*near.iterdir()] == []
    assert not (job.run.path / "stage").exists()


@pytest.mark.more
def test_a_preempted_job_finds_its_tree_on_the_node(hpc: Hpc, tmp_path: Path) -> None:
    """It is hidden meanwhile, and goes with the job's end."""
    (near := tmp_path / "near").mkdir()
    script = tmp_path / "thrice.py"
    script.write_text((SCRIPTS / "twice.py").read_text() + LATER)
    words = ("--stage", "--launcher", "srun", "--python", sys.executable, "--gpus-per-node", "1")
    job = hpc.submit(*words, "--setup", f"export TMPDIR={near}", str(script))
    job.until((job.run.path / "stage" / "label").exists, "the parcel")
    trees = []
    for count in (2, 3):
        job.preempt()
        job.until(partial(_has_started, job, count), "a start")
        trees += [(mark, mark.stat().st_ino) for mark in near.glob("*/*/*.complete")]
    (tmp_path / "go").touch()
    assert job.end() == "COMPLETED", job.output()
    assert len(trees) == 2
    assert trees[0] == trees[1]
    assert [*near.iterdir()] == []


def _has_started(job: Job, count: int) -> bool:
    return job.output().count("prefix ") == count


LATER = """
while not os.path.exists(os.path.join(os.path.dirname(os.environ["TMPDIR"]), "go")):
    time.sleep(0.1)
"""
