"""Runs by the ids of their jobs, where clusters and users share the disk."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hpc_ddp.core import file_io
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.journal.events import Queued
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.core.run_index import find_run, link_job, linked_runs, unlink_jobs


def _run(root: Path, name: str, *jobs: JobRef) -> RunFolder:
    run = RunFolder(root / name / "20260101-000000-aa").make()
    run.job_json.write_text("{}")
    for job in jobs:
        run.journal("submit").write(Queued(job.id, job.cluster or None))
        link_job(job, run)
    return run


def test_a_number_means_the_job_of_this_cluster(tmp_path: Path) -> None:
    first = _run(tmp_path, "a", JobRef("28", "hd7"))
    second = _run(tmp_path, "b", JobRef("28", "hd8"))
    assert find_run(tmp_path, "28", lambda: "hd7") == first
    assert find_run(tmp_path, "28", lambda: "hd8") == second
    for own_cluster in (lambda: "hd9", str):
        with pytest.raises(UsageError) as raised:
            find_run(tmp_path, "28", own_cluster)
        assert f"{first.path} on hd7, {second.path} on hd8" in raised.value.message
    unlink_jobs(second)
    assert find_run(tmp_path, "28") == first
    assert linked_runs(tmp_path, [JobRef("28", "hd7"), JobRef("28", "hd8")]) >= {str(first.path)}


def test_a_job_of_another_cluster_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    run = _run(tmp_path, "a", JobRef("28", "hd8"))
    with pytest.raises(UsageError, match=r"job 28 of this cluster \(hd7\) is no single run"):
        find_run(tmp_path, "28", lambda: "hd7")
    assert find_run(tmp_path, run.id, lambda: "hd7") == run


def test_each_user_has_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(tmp_path, "a", JobRef("28", "hd7"))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    other = _run(tmp_path, "b", JobRef("29", "hd7"))
    assert sorted(path.name for path in tmp_path.glob(".jobs-*")) == [
        f".jobs-{os.getuid()}",
        f".jobs-{os.getuid() + 1}",
    ]
    assert run != other


def test_the_index_can_be_written_by_its_user_alone(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        _run(tmp_path, "a", JobRef("28", "hd7"))
    finally:
        os.umask(umask)
    modes = [path.stat().st_mode & 0o022 for path in (tmp_path.glob(".jobs-*"))]
    assert modes == [0]


def test_nothing_is_made_behind_a_link_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run(tmp_path, "a")
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / f".jobs-{os.geteuid()}").symlink_to(home)
    monkeypatch.setattr(file_io, "is_link_of_another", lambda status: stat.S_ISLNK(status.st_mode))
    link_job(JobRef("28", "hd7"), run)
    assert list(home.iterdir()) == []
