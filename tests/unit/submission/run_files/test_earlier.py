"""What a start has changed in an older run is undone where no job comes of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.cli import jobs
from hpc_ddp.core import checkpoints
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.file_io import read_json, write_json, write_whole
from hpc_ddp.core.journal.events import Fresh
from hpc_ddp.core.journal.journal import first_attempt
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission import backends
from hpc_ddp.submission.plan import Plan, plan_new
from hpc_ddp.submission.restart import plan_continuation
from hpc_ddp.submission.run_files import earlier
from hpc_ddp.submission.run_files.start_claim import release_start
from hpc_ddp.submission.settings.config import Settings
from tests.skips import skip_or_fail
from unit.fakes import Slurm, squeue_rows
from unit.training.checkpoint.fakes import checkpoint_names, make_saver, save_steps


class _Lost(BaseException):
    """The end of the process at a lost connection."""


@pytest.fixture
def run(slurm_commands: Slurm, tmp_path: Path) -> RunFolder:
    """A cancelled run with two checkpoints, whose script has changed since; no job is live."""
    slurm_commands.answer("squeue")
    script = tmp_path / "train.py"
    script.write_text("old")
    run = plan_new(Settings({"script": "train.py"}), tmp_path, tmp_path / "runs").write().run
    run.claim_attempt({"job_id": "3"}, lambda info: False)
    save_steps(make_saver(run), 1, 2)
    run.script.write_text("earlier")
    run.cancelled.write_text("{}")
    script.write_text("new")
    return run


def _files(run: RunFolder) -> dict[Path, bytes]:
    """Return what the run has that a start changes."""
    paths = [run.job_json, run.limits_json, run.script, run.cancelled, *run.code.rglob("*.py")]
    return {path: path.read_bytes() for path in paths if path.exists()}


def _plan(run: RunFolder, **options: Any) -> Plan:
    cwd = run.root.parent
    return plan_continuation(run, options, Settings(options), cwd, new_code="args" in options)


def _start(run: RunFolder) -> None:
    """Start the run with other arguments and the new code, from step 0."""
    prepared = _plan(run, args=("--lr", "9")).write()
    assert read_json(run.job_json)["args"] == ["--lr", "9"]
    assert prepared.code == run.newest_code
    jobs._start_run(prepared, fresh=True)


def _break_off(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the run as `_start` does; the process ends while sbatch is asked."""

    def end(*_: object) -> None:
        raise _Lost

    with monkeypatch.context() as patch:
        patch.setattr(backends.SlurmBackend, "start", end)
        with pytest.raises(_Lost):
            _start(run)
    assert checkpoint_names(run) == ["aside-0"]


def test_a_refused_start_leaves_the_run_as_it_was(slurm_commands: Slurm, run: RunFolder) -> None:
    before = _files(run)
    slurm_commands.answer("sbatch", err="Invalid partition name", code=1)
    with pytest.raises(HpcDdpError, match="Invalid partition"):
        _start(run)
    assert _files(run) == before
    assert checkpoint_names(run) == ["step-1", "step-2"]
    assert [path.name for path in run.path.glob(".before*")] == []
    for name in checkpoint_names(run):
        (run.checkpoints / name).rename(run.path / name)
    problems = checkpoints.describe_lost(run)
    assert problems == ["step-2: it was saved, and is gone"]  # no longer `fresh`


def test_a_refused_start_begins_nothing_anew(slurm_commands: Slurm, run: RunFolder) -> None:
    """Also where the script saves by itself; an earlier ``--fresh`` still holds."""
    shutil.rmtree(run.checkpoints)
    slurm_commands.answer("sbatch", err="Invalid partition name", code=1)
    for number in (0, 1):
        if number:
            run.journal("submit").write(Fresh(number))
            run.claim_attempt({"job_id": "4"}, lambda info: False)
        with pytest.raises(HpcDdpError, match="Invalid partition"):
            _start(run)
        assert first_attempt(run.events()) == number


def test_a_start_that_is_broken_off_is_undone_by_the_next_one(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _files(run)
    _break_off(run, monkeypatch)
    plan = _plan(run)
    assert "was broken off before Slurm had answered" in capsys.readouterr().err
    assert (plan.spec.args, plan.script.read_text()) == ((), "old")
    assert _files(run) == before
    assert checkpoint_names(run) == ["step-1", "step-2"]
    _plan(run)
    assert capsys.readouterr().err == ""


def test_a_note_of_a_start_changes_no_file_but_the_runs(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another user may have written it while the run was open."""
    _break_off(run, monkeypatch)
    note, profile = read_json(run.start_note), tmp_path / "profile"
    profile.write_text("mine")
    note["files"] |= {str(profile): "planted", "../profile": "planted", "new": "planted"}
    write_json(run.start_note, note)
    _plan(run)
    assert profile.read_text() == "mine"
    assert not (run.path / "new").exists()
    if os.geteuid():
        skip_or_fail("only root can give a file to another user")
    write_json(run.start_note, note)
    os.chown(run.start_note, 1000, -1)
    with pytest.raises(UsageError, match=r"before-start\.json belongs to"):
        _plan(run)


@pytest.mark.parametrize("damage", [{"first_attempts": None}, {"attempts": None}, {"files": []}])
def test_a_damaged_note_keeps_no_run_from_a_start(
    run: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: dict[str, Any],
) -> None:
    _break_off(run, monkeypatch)
    note = {**read_json(run.start_note), **damage}
    if not note["first_attempts"]:
        del note["first_attempts"]  # as of an older version
    write_json(run.start_note, note)
    _plan(run)
    assert ".before-start.json is damaged" in capsys.readouterr().err


def test_a_start_whose_job_has_begun_is_not_undone(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_off(run, monkeypatch)
    run.claim_attempt({"job_id": "4"}, lambda info: False)
    assert _plan(run).spec.args == ("--lr", "9")
    assert checkpoint_names(run) == ["aside-0"]
    assert [path.name for path in run.path.glob(".before*")] == []


def test_a_start_whose_job_is_queued_is_not_undone(
    slurm_commands: Slurm, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_off(run, monkeypatch)
    slurm_commands._answers["squeue"].clear()
    slurm_commands.answer("squeue", squeue_rows(f"4|4|PENDING|None||9:00|/|{run.script}\n"))
    plan = _plan(run)
    assert plan.spec.args == ("--lr", "9")
    with pytest.raises(UsageError, match="at work"):
        plan.write()
    release_start(run)
    assert read_json(run.job_json)["args"] == ["--lr", "9"]
    assert checkpoint_names(run) == ["aside-0"]


def test_where_slurm_does_not_answer_a_start_that_was_broken_off_is_refused(
    slurm_commands: Slurm, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_off(run, monkeypatch)
    slurm_commands._answers["squeue"].clear()
    slurm_commands.answer("squeue", err="squeue: error: no permission", code=1)
    with pytest.raises(UsageError, match=r"not known whether its job is queued: .*no permission"):
        _plan(run)
    assert read_json(run.job_json)["args"] == ["--lr", "9"]


def test_a_start_of_an_array_is_undone_before_a_task_of_it_starts(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_off(run, monkeypatch)
    earlier.undo_broken_start(run.task(0).make())
    assert read_json(run.job_json)["args"] == []


def test_a_folder_that_cannot_be_listed_loses_nothing(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _break_off(run, monkeypatch)

    def refuse(folder: Path) -> list[str]:
        raise OSError(5, os.strerror(5), str(folder))

    with monkeypatch.context() as patch:
        patch.setattr(earlier, "list_names", refuse)
        _plan(run)
    assert f"remains {run.code}: Input/output error" in capsys.readouterr().err
    assert (run.code / "0" / "train.py").read_text() == "old"
    _plan(run)
    assert run.newest_code == run.code / "0"
    assert checkpoint_names(run) == ["step-1", "step-2"]


def test_a_file_that_the_disk_refuses_is_written_by_the_next_start(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _files(run)
    _break_off(run, monkeypatch)

    def refuse(path: Path, text: str | bytes, mode: int) -> None:
        if path == run.job_json:
            raise OSError(122, os.strerror(122), str(path))
        write_whole(path, text, mode)

    with monkeypatch.context() as patch:
        patch.setattr(earlier, "write_whole", refuse)
        earlier.undo_start(run)
    assert f"remains {run.job_json}: Disk quota exceeded" in capsys.readouterr().err
    assert run.cancelled.exists()  # the others are written all the same
    earlier.undo_start(run)
    assert _files(run) == before


def test_a_copy_of_the_code_that_the_disk_keeps_is_no_runs_code(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {*os.listdir(run.code)}
    _break_off(run, monkeypatch)

    def refuse(path: Path, *_: object, **__: object) -> None:
        if path.is_relative_to(run.code):
            raise PermissionError(13, "Permission denied", str(path / "train.py"))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        earlier.undo_start(run)
    assert run.newest_code == run.code / "0"
    assert "/train.py: Permission denied; the next one tries again" in capsys.readouterr().err
    assert checkpoint_names(run) == ["step-1", "step-2"]
    assert run.start_note.exists()
    earlier.undo_start(run)
    names = {*os.listdir(run.code)} - {".script-1"}  # the note of the copy, which hurts nobody
    assert (names, run.start_note.exists()) == (before, False)
