"""The disk that a run lives on fills up, turns read-only, or is gone for a while."""

from __future__ import annotations

import resource
import shutil
import sys
import time
from collections.abc import Iterator

import pytest
from cluster import Cluster
from harness import (
    BACKENDS,
    DIGITS,
    DIGITS_ARGS,
    SCRIPTS,
    TWO_BY_ONE,
    TWO_BY_TWO,
    WALK,
    Hpc,
    Job,
    in_one_go,
    same_weights,
    use,
)

SECONDS = 10
BALLAST, LIMIT_BYTES = SCRIPTS / "ballast.py", 1 << 20
EVERY_SECOND = {"HPC_DDP_SAVE_EVERY": "1"}


@pytest.fixture
def hpc(cluster: Cluster) -> Iterator[Hpc]:
    """Runs on the nodes' scratch."""
    use(cluster)
    yield Hpc(cluster, cluster.scratch / "runs")
    cluster.reset()
    shutil.rmtree(cluster.scratch / "runs")


@pytest.mark.more
@pytest.mark.row(
    "scratch full, read-only, or gone for ten seconds",
    promise="the training goes on, warns, and saves again; not a step is lost",
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("trouble", ["full", "read_only", "gone"])
def test_ten_seconds_of_trouble(
    hpc: Hpc, cluster: Cluster, undisturbed: Job, backend: str, trouble: str
) -> None:
    words = ("--backend", backend, *TWO_BY_TWO, str(DIGITS), *DIGITS_ARGS)
    job = hpc.submit(*words, "--step-seconds", "0.25", env=EVERY_SECOND)
    job.at_step(10)
    with getattr(cluster, f"scratch_{trouble}")():
        time.sleep(SECONDS)
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("finished", "none")]
    assert len(job.run.attempts()) == 1
    assert "could not be saved" in job.output()
    assert "Traceback" not in job.output()
    assert same_weights(job, undisturbed)


@pytest.mark.more
@pytest.mark.row(
    "quota hit in mid-save",
    promise="the half-written checkpoint is dropped, the one before it stays, the next save counts",
)
def test_a_quota_in_mid_save(hpc: Hpc, undisturbed: Job) -> None:
    """By the kernel's limit on the size of a file: writes fail after the first megabyte."""
    job = hpc.submit(*TWO_BY_TWO, str(BALLAST), *DIGITS_ARGS, env=EVERY_SECOND)
    job.at_step(10)
    workers = job.workers()
    for pid in workers:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (LIMIT_BYTES, resource.RLIM_INFINITY))
    job.event("save_failed")
    for pid in workers:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert job.end() == "COMPLETED", job.output()
    assert "File too large" in job.events("save_failed")[0]["error"]
    assert not list(job.run.checkpoints.glob("*.tmp-*"))
    assert len(job.run.attempts()) == 1
    assert same_weights(job, undisturbed)


@pytest.mark.more
@pytest.mark.row(
    "no save succeeds any more",
    promise="ends after three failed saves and half a minute, and says why; can go on later",
)
def test_saves_that_never_succeed_end_the_run(hpc: Hpc, undisturbed: Job) -> None:
    words = ("--max-failures", "0", *TWO_BY_TWO, str(BALLAST), *DIGITS_ARGS)
    job = hpc.submit(*words, "--step-seconds", "0.8", env=EVERY_SECOND)
    job.at_step(5)
    for pid in job.workers():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (LIMIT_BYTES, resource.RLIM_INFINITY))
    assert job.end() == "FAILED", job.output()
    assert "saves in a row failed" in job.events("verdict")[0]["why"]
    assert "File too large" in job.events("verdict")[0]["why"]
    again = hpc.submit("--run", str(job.run.path), env=EVERY_SECOND)
    assert again.end() == "COMPLETED", again.output()
    assert same_weights(again, undisturbed)


@pytest.mark.more
def test_a_python_that_is_away_is_waited_for(hpc: Hpc, cluster: Cluster, walked: Job) -> None:
    """As on a file system that is mounted when it is first asked for."""
    env = cluster.scratch / "env"
    env.mkdir()
    python = env / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    job = hpc.submit(*TWO_BY_ONE, "--python", str(python), str(WALK), "--hold-at", "10")
    job.held(10)
    env.rename(env.with_suffix(".away"))
    job.preempt()
    job.until(lambda: job.run.attempt(1).path.exists(), "the second attempt")
    time.sleep(SECONDS)
    env.with_suffix(".away").rename(env)
    assert job.end() == "COMPLETED", job.output()
    assert len(job.run.attempts()) == 2
    assert in_one_go(job)
    assert same_weights(job, walked)
