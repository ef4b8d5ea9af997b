"""The real Slurm cluster, brought up once for the whole suite."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import ATTACH, Cluster, available
from cluster_machine import exclusive
from cluster_versions import NotToBeHadError
from harness import DIGITS, DIGITS_ARGS, ONE_BY_TWO, TWO_BY_TWO, WALK, Hpc, Job

from hpc_ddp.core.run_folder import RunFolder
from tests.programs.program import PROGRAMS_FOLDER
from tests.skips import skip_or_fail

# `make programs` has their sources.
collect_ignore = [] if PROGRAMS_FOLDER in os.environ else ["test_programs.py"]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if ATTACH in os.environ:
        yield Cluster.attach(int(os.environ[ATTACH]))
        return
    reason = available()
    if reason:
        skip_or_fail(reason)
    try:
        up = Cluster.up()
    except NotToBeHadError as error:
        skip_or_fail(str(error))
    try:
        yield up
    finally:
        up.down()


@pytest.fixture
def hpc(cluster: Cluster, tmp_path: Path) -> Iterator[Hpc]:
    yield Hpc(cluster, tmp_path / "runs")
    cluster.reset()


def _reference(cluster: Cluster, factory: pytest.TempPathFactory, name: str, *words: str) -> Job:
    """Return an undisturbed run, which all processes of the test session share: the first that
    needs it makes it, on its own cluster."""
    common = factory.getbasetemp()
    common = common.parent if "PYTEST_XDIST_WORKER" in os.environ else common
    record = common / f"{name}.json"
    with exclusive(common / f"{name}.lock"):
        if not record.exists():
            job = Hpc(cluster, common / name).submit(*words)
            assert job.end() == "COMPLETED", job.output()
            record.write_text(json.dumps({"id": job.id, "run": str(job.run.path)}))
    values = json.loads(record.read_text())
    return Job(cluster, values["id"], RunFolder(Path(values["run"])))


@pytest.fixture(scope="session")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """digits.py on two nodes of two ranks, undisturbed: what every other run must end like."""
    return _reference(
        cluster, tmp_path_factory, "undisturbed", *TWO_BY_TWO, str(DIGITS), *DIGITS_ARGS
    )


@pytest.fixture(scope="session")
def walked(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """walk.py on two ranks, undisturbed."""
    return _reference(cluster, tmp_path_factory, "walked", *ONE_BY_TWO, str(WALK))
