"""The folder of a plain start, which other jobs and users may have made."""

from __future__ import annotations

import fcntl
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.training.process import run_directory
from hpc_ddp.training.process.environment import DistEnv, LaunchEnv
from tests.raw_events import raw
from tests.waiting import LIMIT_S


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """The run that a plain start takes, with a start of another host and job."""
    monkeypatch.setenv("HPC_DDP_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    run = RunFolder(tmp_path / "runs" / LaunchEnv.from_env().stem / "local").make()
    info = {"host": "elsewhere", "pid": 1, "job": "7", "restarts": None}
    run.claim_attempt(info, lambda _: False)
    run.journal("rank-0").write(raw("started", backend="local", host="elsewhere", pid=1))
    return run


def _claim() -> int:
    return run_directory._claim_local(LaunchEnv.from_env(), DistEnv.from_env({}))[1]


def test_folders_of_runs_are_closed_to_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another start would refuse them: the user's umask is that of a project."""
    monkeypatch.setenv("HPC_DDP_RUNS", str(tmp_path / "project" / "runs"))
    umask = os.umask(0o002)
    try:
        assert _claim() == 0
    finally:
        os.umask(umask)
    modes = [path.stat().st_mode & 0o022 for path in tmp_path.rglob("*") if path.is_dir()]
    assert not any(modes)


def test_a_run_that_another_host_is_at_is_not_taken(run: RunFolder) -> None:
    with pytest.raises(HpcDdpError, match="is already being run"):
        _claim()


def test_a_run_whose_job_was_started_again_elsewhere_goes_on(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert _claim() == 1


def test_a_run_that_another_node_of_the_same_job_is_at_is_not_taken(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(HpcDdpError, match="is already being run"):
        _claim()


def test_of_two_starts_beside_a_finished_run_one_is_refused(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other start, in a thread, comes between the look and the rename."""
    run.journal("rank-0").write(raw("finished", step=1))
    rename, lock, threads = run_directory._move_away, fcntl.flock, ThreadPoolExecutor()
    rivals: list[Future[int]] = []
    is_met = threading.Event()  # the rival waits for the lock, or has ended
    first = threading.current_thread()

    def rename_late(path: Path) -> Path:
        if not rivals:
            rivals.append(threads.submit(_claim))
            rivals[0].add_done_callback(lambda _: is_met.set())
            assert is_met.wait(LIMIT_S)
        return rename(path)

    def note_rival(descriptor: int, kind: int) -> None:
        if threading.current_thread() is not first:
            is_met.set()
        lock(descriptor, kind)

    monkeypatch.setattr(run_directory, "_move_away", rename_late)
    monkeypatch.setattr(fcntl, "flock", note_rival)
    assert _claim() == 0
    with pytest.raises(HpcDdpError, match="is already being run"):
        rivals[0].result(LIMIT_S)


@pytest.mark.parametrize("event", ["stopped", "finished"])
def test_a_run_that_has_ended_by_its_journal_goes_on(run: RunFolder, event: str) -> None:
    fields: dict[str, Any] = {"step": 1} | ({"reason": "notice"} if event == "stopped" else {})
    run.journal("rank-0").write(raw(event, **fields))
    assert _claim() == (1 if event == "stopped" else 0)  # a finished one is renamed


def test_a_run_that_is_silent_for_minutes_goes_on(run: RunFolder) -> None:
    for path in run.journal_folder.iterdir():
        os.utime(path, (1, 1))
    assert _claim() == 1


def test_a_link_in_place_of_the_run_is_not_followed(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results"
    results.mkdir(mode=0o755)
    run.path.rename(tmp_path / "gone")
    run.path.symlink_to(results)

    def refuse(path: Path) -> None:
        raise OSError(40, "a link of another user", str(path))

    monkeypatch.setattr(run_directory, "check_links", refuse)
    with pytest.raises(OSError, match="a link of another user"):
        _claim()
    assert list(results.iterdir()) == []
    assert results.stat().st_mode & 0o777 == 0o755


def test_a_job_that_is_no_text_is_refused(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run.job_json.write_bytes(b"\xff{}")
    with pytest.raises(HpcDdpError, match=r"job\.json is broken"):
        _claim()


def test_a_start_from_another_folder_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPC_DDP_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr("sys.argv", ["/scripts/train.py"])
    monkeypatch.chdir(tmp_path)
    _claim()
    (run,) = map(RunFolder, (tmp_path / "runs").glob("*/local"))
    monkeypatch.setattr(run_directory, "_may_be_live", lambda *_: False)  # this very process
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert _claim() == 1
    assert JobSpec.from_json(run.job_json.read_bytes()).chdir == str(tmp_path / "elsewhere")
