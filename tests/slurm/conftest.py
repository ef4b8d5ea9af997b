"""The real Slurm cluster, brought up once for the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import ATTACH, Cluster, available
from cluster_versions import NotToBeHadError
from harness import DIGITS, DIGITS_ARGS, ONE_BY_TWO, TWO_BY_TWO, WALK, Hpc, Job


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if ATTACH in os.environ:
        yield Cluster.attach(int(os.environ[ATTACH]))
        return
    reason = available()
    if reason:
        if os.environ.get("CI") == "true":
            pytest.fail(f"the Slurm tests can't run, and CI must run them: {reason}")
        pytest.skip(reason)
    try:
        up = Cluster.up()
    except NotToBeHadError as error:
        pytest.skip(str(error))
    try:
        yield up
    finally:
        up.down()


@pytest.fixture
def hpc(cluster: Cluster, tmp_path: Path) -> Iterator[Hpc]:
    yield Hpc(cluster, tmp_path / "runs")
    cluster.reset()


@pytest.fixture(scope="session")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run that nobody disturbs: what every other one must end like."""
    hpc = Hpc(cluster, tmp_path_factory.mktemp("undisturbed"))
    job = hpc.submit(*TWO_BY_TWO, str(DIGITS), *DIGITS_ARGS)
    assert job.end() == "COMPLETED", job.output()
    return job


@pytest.fixture(scope="session")
def walked(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """walk.py on two ranks, undisturbed."""
    hpc = Hpc(cluster, tmp_path_factory.mktemp("walked"))
    job = hpc.submit(*ONE_BY_TWO, str(WALK))
    assert job.end() == "COMPLETED", job.output()
    return job
