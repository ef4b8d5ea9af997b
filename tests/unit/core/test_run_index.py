"""Runs are found by their names, ids and jobs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hpc_ddp.core import file_io, run_index
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.events import Queued, Started
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.core.run_index import all_runs, find_run, link_job
from unit.core.fakes import make_run
from unit.report.written_runs import Written


def test_a_name_that_is_a_link_of_another_user_is_no_run(
    tmp_path: Path, run: RunFolder, links_are_anothers: None
) -> None:
    (run.root / "other").symlink_to("train")
    with pytest.raises(UsageError, match="no run 'other'"):
        find_run(run.root, "other")
    assert find_run(run.root, "train").path == run.path


def test_the_index_of_jobs_replaces_no_file(
    tmp_path: Path,
    run: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "3").write_text("mine")
    index = run.root / f".jobs-{os.geteuid()}"
    index.mkdir()
    (index / "_").symlink_to(results)
    link_job(JobRef("3"), run)  # a link of this user's own: but what lies there is no link
    assert (results / "3").read_text() == "mine"
    monkeypatch.setattr(file_io, "ROOT", -1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    (run.root / f".jobs-{os.geteuid()}").symlink_to(results)
    link_job(JobRef("4"), run)
    assert not (results / "4").exists()
    assert "job 4 can't be found by its id" in capsys.readouterr().err


def test_a_run_is_found_by_all_its_names(tmp_path: Path) -> None:
    old, new = make_run(tmp_path, run_id="20250101-000000-aa"), make_run(tmp_path)
    link_job(JobRef("77"), old)
    for run, job in ((old, "77"), (new, "78")):
        run.journal("submit").write(Queued(job))
    assert find_run(tmp_path, str(old.path)) == old
    assert find_run(tmp_path, old.id) == old
    assert find_run(tmp_path, "n") == new
    assert find_run(tmp_path, "77") == old
    assert all_runs(tmp_path) == [new, old]


def test_the_newest_run_is_the_one_started_last(tmp_path: Path) -> None:
    names = ["20250101-000000-aa", "local-1", "20250301-000000-aa", "local", "20250501-000000-aa"]
    runs = [make_run(tmp_path, run_id=name) for name in names]
    for run, month in ((runs[1], 2), (runs[3], 4)):
        when = time.mktime((2025, month, 1, 0, 0, 0, 0, 0, -1))
        os.utime(run.job_json, (when, when))
    (tmp_path / "n" / "zzz").mkdir()  # no run
    assert all_runs(tmp_path) == runs[::-1]
    assert find_run(tmp_path, "n") == runs[-1]
    namesake = make_run(tmp_path, "a", "local")
    assert find_run(tmp_path, "local") == namesake
    runs[-1].job_json.unlink()
    assert find_run(tmp_path, "n") == runs[3]


def test_a_task_of_an_array_is_found_by_the_id_that_is_shown(tmp_path: Path) -> None:
    array = make_run(tmp_path)
    task = RunFolder(array.path / "task-3").make()
    task.job_json.write_text("{}")
    link_job(JobRef("12"), array)
    link_job(JobRef("15"), task)
    array.journal("submit").write(Queued("12"))
    task.journal("batch").write(Started("n1", job_id="15"))
    assert (task.name, task.id, task.root) == ("n", f"{array.id}/task-3", tmp_path)
    for text in (task.id, "15", "12_3", str(task.path)):
        assert find_run(tmp_path, text) == task
    assert find_run(tmp_path, "12") == array


@pytest.mark.parametrize("number", ["2", "02", "002"])
def test_a_task_may_be_named_with_zeros(tmp_path: Path, number: str) -> None:
    array = RunFolder(tmp_path / "n" / "20260101-000000-aaaa").make()
    task = RunFolder(array.path / "task-2").make()
    for folder in (array, task):
        folder.job_json.write_text("{}")
    for text in (f"{array.id}/task-{number}", f"{array.path}/task-{number}"):
        assert find_run(tmp_path, text) == task


@pytest.mark.parametrize("text", ["nope", "*", "../..", "", "a/b", "[", "~nobody-here/x", "\0"])
def test_an_unknown_run_is_an_error_with_a_hint(tmp_path: Path, text: str) -> None:
    make_run(tmp_path)
    with pytest.raises(UsageError, match="no run") as caught:
        find_run(tmp_path, text)
    assert "hpc-ddp status" in str(caught.value.hint)


def test_a_link_of_a_job_to_another_run_does_not_count(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "train" / "1").make()
    run.job_json.write_text("{}")
    link_job(JobRef("7"), run)
    with pytest.raises(UsageError, match="no run '7'"):
        find_run(tmp_path, "7")
    run.journal("submit").write(Queued("7"))
    assert find_run(tmp_path, "7") == run


def test_a_task_of_an_array_is_found_by_its_job_id(tmp_path: Path) -> None:
    array = Written(tmp_path, array="0-2")
    task = RunFolder(array.run.path / "task-1").make()
    task.job_json.write_text(array.run.job_json.read_text())
    link_job(JobRef("7"), array.run)
    array.run.journal("submit").write(Queued("7"))
    assert find_run(tmp_path, "7_1") == task


@pytest.mark.parametrize("array", ["0-3", None])
def test_a_task_that_waits_with_its_array_is_explained(tmp_path: Path, array: str | None) -> None:
    run = make_run(tmp_path)
    run.job_json.write_text(JobSpec("train.py", array=array).to_json())
    error = "task 3 of .* has not begun" if array else "no run "
    with pytest.raises(UsageError, match="no run "):
        find_run(tmp_path, f"{run.id}/task-4")
    for text in (f"{run.id}/task-3", f"{run.path}/task-3"):
        with pytest.raises(UsageError, match=error):
            find_run(tmp_path, text)


def test_runs_that_can_not_be_listed_are_not_none(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with an expired ticket; a colleague's folder among the runs is passed over."""
    (run.root / "colleagues").mkdir()
    closed = {run.root / "colleagues"}

    def list_names(folder: Path) -> list[str]:
        if folder in closed:
            raise PermissionError(13, "Permission denied", str(folder))
        return file_io.list_names(folder)

    monkeypatch.setattr(run_index, "list_names", list_names)
    assert [found.path for found in all_runs(run.root)] == [run.path]
    closed.add(run.root)
    with pytest.raises(PermissionError):
        all_runs(run.root)
    with pytest.raises(PermissionError):
        find_run(run.root, "nothing")
