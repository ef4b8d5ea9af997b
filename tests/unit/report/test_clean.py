"""Finished runs are deleted; runs at work and last good checkpoints stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core import checkpoints, process
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.trackers import mlflow_id_file
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.core.run_index import all_runs, link_job
from hpc_ddp.live_jobs import Queue
from hpc_ddp.report import clean
from hpc_ddp.report.status.run_status import status_of
from hpc_ddp.slurm_text import QueuedJob
from tests.raw_events import raw

REPO = Path(__file__).parents[3]
DAY_S = 86400.0


def checkpoint(run: RunFolder, name: str, good: bool = True, **facts_of_run: Any) -> Path:
    folder = run.checkpoints / name
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(b"x" * 1000)
    facts = checkpoints.facts_of(folder / "data")
    manifest: dict[str, Any] = {"files": {"data": {"size": facts.size, "crc32": facts.crc32}}}
    manifest |= facts_of_run
    manifest["crc32"] = checkpoints.manifest_crc(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if not good:
        (folder / "data").write_bytes(b"y" * 1000)
    return folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(clean, "read_queue", lambda: Queue({}))
    return tmp_path / "runs"


@pytest.fixture
def make(root: Path) -> Callable[..., RunFolder]:
    def made(name: str, end: str | None = "finished", steps: Sequence[int] = (3, 6)) -> RunFolder:
        run = RunFolder(root / "digits" / name).make()
        run.job_json.write_text(JobSpec("train.py").to_json())
        journal = run.journal("batch")
        journal.write(raw("submitted"))
        journal.write(raw("queued", job_id=name))
        journal.write(raw("started", nodes=["n1"], job_id=name))
        link_job(JobRef(name), run)
        if end:
            action = {"finished": "none", "preempted": "requeue"}.get(end, "give up")
            journal.write(raw("verdict", cause=end, action=action, why=""))
        for step in steps:
            checkpoint(run, f"step-{step}")
        return run

    return made


def deleted_by(root: Path, *named: RunFolder, only: bool = False, **how: Any) -> set[str]:
    """Clean, and return what has gone, below the folder of runs."""
    before = {path.relative_to(root) for path in root.glob("digits/**/*")}
    items = clean.find_deletions(
        root, named, how.get("older_than_s", 0.0), how.get("states", ()), checkpoints_only=only
    )
    assert [problem for _, problem in clean.delete_parts(items, root) if problem] == []
    deleted = before - {path.relative_to(root) for path in root.glob("digits/**/*")}
    assert not list(root.glob(f"*/{clean.TRASH}*/*"))
    tops = {path for path in deleted if not {*path.parents} & deleted}
    assert {str(path) for path in tops} == {
        str(path.relative_to(root)) for deletion in items for path in deletion.paths
    }
    return {str(path.relative_to("digits")) for path in tops}


def test_a_finished_run_goes_with_what_leads_to_it(root: Path, make: Any) -> None:
    make("1")
    unfinished = make("2", end=None, steps=[])
    unfinished.cancelled.touch()
    (unfinished.checkpoints / "mine.pt").touch()  # a script's own: something to go on from
    assert deleted_by(root) == {"1"}
    assert [link.name for link in (root / f".jobs-{os.geteuid()}" / "_").iterdir()] == ["2"]
    make("3")
    (root / "digits" / "2").rename(root / "2")
    assert deleted_by(root) == {"3"}
    assert not (root / "digits").exists()


def test_the_last_good_checkpoint_of_an_unfinished_run_stays(root: Path, make: Any) -> None:
    run = make("1", end="failed", steps=[3, 6])
    checkpoint(run, "step-9", best={"step": 3, "value": 1.0})
    checkpoint(run, "step-12", good=False)
    checkpoint(run, "step-6.old-0")
    checkpoint(run, "step-9.tmp-gone")
    (run.checkpoints / "step-3-of-mine").mkdir()
    deleted = deleted_by(root, run)
    assert {Path(path).name for path in deleted} == {"step-6", "step-6.old-0", "step-9.tmp-gone"}
    assert {path.name for path in run.checkpoints.iterdir()} == {
        *("step-3", "step-9", "step-12", "step-3-of-mine")
    }
    assert deleted_by(root, run) == set()


def test_the_first_checkpoints_of_keep_every_stay(root: Path, make: Any) -> None:
    run = make("1", end="failed", steps=[4, 8, 12, 18])
    checkpoint(run, "step-19", keep_every=10)
    assert {Path(path).name for path in deleted_by(root, run)} == {"step-8", "step-18"}


def test_all_checkpoints_stay_if_none_is_good(root: Path, make: Any) -> None:
    run = make("1", end="failed", steps=[])
    for step in (3, 6):
        checkpoint(run, f"step-{step}", good=False)
    assert deleted_by(root, run) == set()
    assert deleted_by(root, make("2", end="failed", steps=[])) == {"2"}


def test_deletions_are_limited_to_checkpoints_and_states(root: Path, make: Any) -> None:
    for name, end in (("1", "finished"), ("2", "failed"), ("3", "preempted")):
        make(name, end)
    assert deleted_by(root, older_than_s=DAY_S) == set()
    assert deleted_by(root, only=True, states=["finished"]) == {"1/checkpoints/step-3"}
    assert deleted_by(root, only=True) == {"2/checkpoints/step-3", "3/checkpoints/step-3"}
    for path in root.glob("digits/1/**/*"):
        os.utime(path, (0, time.time() - 2 * DAY_S))
    assert deleted_by(root, older_than_s=DAY_S) == {"1"}


def test_an_array_is_deleted_once_all_tasks_are_finished(root: Path, make: Any) -> None:
    run = make("1", end=None, steps=[])
    spec = JobSpec("train.py", sweep={"lr": ("1", "2")}, array="0-1")
    run.job_json.write_text(spec.to_json())
    for index in range(2):
        task = run.task(index).make()
        checkpoint(task, "step-1")
        checkpoint(task, "step-2")
        if index == 0:
            task.journal("batch").write(raw("verdict", cause="finished", action="none", why=""))
    deleted = {f"1/task-{index}/checkpoints/step-1" for index in range(2)}
    assert deleted_by(root) == deleted
    with pytest.raises(UsageError, match="is a task of an array"):
        clean.find_deletions(root, [run.task(0)], 0, (), checkpoints_only=False)
    run.task(1).journal("batch").write(raw("verdict", cause="finished", action="none", why=""))
    assert deleted_by(root) == {"1"}


def test_runs_at_work_stay(root: Path, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    local, remote = make("1", end=None), make("2", end=None)
    local.journal("rank-0").write(raw("started", backend="local", **process.identity()))
    identity = {**process.identity(), "host": "another"}
    remote.journal("rank-0").write(raw("started", backend="local", **identity))
    queued, by_hand, requeued = make("3"), make("4"), make("5", end=None)
    jobs = {
        "3": QueuedJob("PENDING", "Priority", "", ""),
        "5": QueuedJob("PREEMPTED", "", "", ""),
        "99": QueuedJob("RUNNING", "", "", "", str(by_hand.script)),
    }
    monkeypatch.setattr(clean, "read_queue", lambda: Queue(jobs))
    assert clean.find_deletions(root, [], 0, (), checkpoints_only=False) == []
    for run, words in (
        (local, "process"),
        (remote, "on another, which can't be seen"),
        (queued, "job 3, pending"),
        (by_hand, "a job of its script"),
        (requeued, "job 5, preempted"),
    ):
        with pytest.raises(UsageError, match=f"is at work: .*{words}"):
            clean.find_deletions(root, [run], 0, (), checkpoints_only=True)
    monkeypatch.setattr(clean, "read_queue", lambda: Queue(None))
    with pytest.raises(UsageError, match="can't be asked from here"):
        clean.find_deletions(root, [queued], 0, (), checkpoints_only=True)


def test_a_slurm_without_an_answer_is_reported_once(
    root: Path, make: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make("1")
    monkeypatch.setattr(clean, "read_queue", lambda: Queue(None, problem="squeue refused: x"))
    items = clean.find_deletions(root, [], 0, (), checkpoints_only=False)
    assert list(clean.delete_parts(items, root)) == []
    assert capfd.readouterr().err.count("squeue refused: x; runs that have a job are left") == 1


def test_a_run_that_was_resumed_meanwhile_stays(root: Path, make: Any) -> None:
    run = make("1")
    items = clean.find_deletions(root, [], 0, (), checkpoints_only=False)
    run.journal("submit").write(raw("submitted"))
    ((_, problem),) = clean.delete_parts(items, root)
    assert "was resumed meanwhile" in problem
    assert len(all_runs(root)) == 1
    assert run.events()[-1].event == "submitted"


def test_links_are_not_followed(root: Path, make: Any, tmp_path: Path) -> None:
    make("1")
    (root / "digits").rename(tmp_path / "elsewhere")
    (root / "digits").symlink_to(tmp_path / "elsewhere")
    assert clean.find_deletions(root, [], 0, (), checkpoints_only=False) == []
    with pytest.raises(UsageError, match="is not below"):
        clean.find_deletions(
            root, [RunFolder(tmp_path / "elsewhere" / "1")], 0, (), checkpoints_only=False
        )
    (root / "digits").unlink()
    run = make("2")
    (run.path / "data").symlink_to(tmp_path / "elsewhere")
    assert deleted_by(root) == {"2"}
    assert (tmp_path / "elsewhere" / "1" / "job.json").exists()
    (root / "digits").mkdir()
    (root / "digits" / f"{clean.TRASH}x").symlink_to(tmp_path / "elsewhere")
    list(clean.delete_parts([], root))
    assert (tmp_path / "elsewhere" / "1" / "job.json").exists()


def test_an_interrupted_deletion_is_completed(root: Path, make: Any) -> None:
    make("1")
    (root / "digits" / f"{clean.TRASH}x" / "left" / "over").mkdir(parents=True)
    assert [run.id for run in all_runs(root)] == ["1"]
    list(clean.delete_parts([], root))
    assert [path.name for path in (root / "digits").iterdir()] == ["1"]


def test_a_record_that_was_not_sent_is_kept(
    root: Path, make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """hpc-ddp itself has put it there, where nodes have no internet."""
    run = make("1")
    record = run.path / "wandb" / "offline-run-1" / "run-1.wandb"
    record.parent.mkdir(parents=True)
    record.touch()
    assert deleted_by(root) == {"1/checkpoints/step-3"}
    assert "stays: a record was not sent: wandb sync" in capsys.readouterr().err
    record.with_suffix(".wandb.synced").touch()
    archive = run.path / "comet" / "x.zip"  # it stays where it is once it was sent
    archive.parent.mkdir()
    archive.touch()
    assert "1" in deleted_by(root)
    assert "has a record that perhaps was not sent: comet upload" in capsys.readouterr().err


def test_a_deletion_is_confirmed_first(root: Path, make: Any) -> None:
    make("1")
    env = {"PATH": "/nowhere", "HOME": str(root), "HPC_DDP_RUNS": str(root)}
    make("2", end=None, steps=[])
    for path in (root / "digits").glob("*/journal/*"):  # of no job: there is no Slurm to ask
        path.write_text(path.read_text().replace('"job_id"', '"job"'))

    def call(*words: str) -> tuple[int, str, str]:
        argv = [sys.executable, "-m", "hpc_ddp", "clean", *words]
        done = subprocess.run(
            argv, env=env | {"PYTHONPATH": str(REPO)}, capture_output=True, text=True
        )
        return done.returncode, done.stdout, done.stderr

    assert call()[2] == "nothing to clean\n"  # the default is for old ones
    code, printed, error = call("1")
    assert (code, printed.splitlines()[1].split()[:3]) == (2, ["digits", "1", "finished"])
    assert "stdin is no terminal" in error
    (plan,) = json.loads(call("1", "--json")[1])
    assert (plan["deleted"], plan["paths"]) == (False, [plan["run"]])
    assert plan["bytes"] > 2000
    assert len(all_runs(root)) == 2
    code, _, error = call("1", "--yes")
    assert (code, "freed" in error, len(all_runs(root))) == (0, True, 1)


def test_folders_of_other_tools_stay(root: Path, make: Any, tmp_path: Path) -> None:
    """A folder that looks like a run, others' checkpoints, and a script's own results."""
    thesis = root / "digits" / "thesis"
    thesis.mkdir(parents=True)
    (thesis / "job.json").write_text('{"other": "tool"}')
    linked = make("1", end="failed", steps=[])
    foreign = make("2", steps=[1, 2, 3])
    foreign.path.rename(tmp_path / "theirs")
    linked.checkpoints.rmdir()
    linked.checkpoints.symlink_to(tmp_path / "theirs" / "checkpoints")
    results = make("3", end="failed", steps=[])
    (results.path / "out").mkdir()
    (make("4", end="failed", steps=[]).path / "task-mnli").mkdir()  # no task of an array
    trash = root / "digits" / ".trash-of-mine"
    trash.mkdir()
    assert deleted_by(root) == set()
    assert trash.exists()
    with pytest.raises(UsageError, match="is no run of hpc-ddp"):
        clean.find_deletions(root, [RunFolder(thesis)], 0.0, (), False)
    assert len(list((tmp_path / "theirs" / "checkpoints").iterdir())) == 3


def test_runs_that_may_be_at_work_elsewhere_stay(
    root: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of which this cluster knows nothing, and one that another cluster has."""
    lost = make("1", end=None, steps=[])
    with pytest.raises(UsageError, match="it may be at work on another cluster"):
        clean.find_deletions(root, [lost], 0.0, (), False)
    lost.journal("batch").write(raw("started", nodes=["n1"], job_id="1", cluster="other"))
    monkeypatch.setattr(clean, "read_queue", lambda: Queue({}, "this"))
    with pytest.raises(UsageError, match="of cluster other, which can't be asked"):
        clean.find_deletions(root, [lost], 0.0, (), False)
    assert deleted_by(root) == set()


def test_an_array_is_not_finished_before_all_its_tasks_are(root: Path, make: Any) -> None:
    array = make("1", end=None, steps=[])
    array.job_json.write_text(JobSpec("train.py", array="0-3").to_json())
    task = array.task(0).make()
    task.job_json.write_text(JobSpec("train.py", array="0").to_json())
    task.journal("batch").write(raw("verdict", cause="finished", action="none", why=""))
    assert status_of(array, Queue({})).state == "array"
    assert status_of(array, Queue({})).why == "1 of 4 tasks finished"
    assert deleted_by(root) == set()


def test_an_unfinished_run_without_results_is_deleted(root: Path, make: Any) -> None:
    run = make("1", end="failed", steps=[])
    ours = (run.script, run.limits_json, run.early_links, run.cancelled, run.unstaged)
    names = (".start", ".nfs0000a1", ".fuse_hidden01", ".__afs1", ".job.json.0123456789abcdef")
    hidden = (run.path / name for name in names)
    for path in (*ours, mlflow_id_file(run), mlflow_id_file(run, 3), run.path / "stage", *hidden):
        path.write_text("{}")
    make("2", end="failed", steps=[]).path.joinpath(".aim").mkdir()  # as Aim's own repository
    assert deleted_by(root) == {"1"}


def test_a_run_that_went_on_meanwhile_and_can_not_be_put_back_is_kept(
    root: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was resumed is made anew in its place, and no sweep takes the rest of it."""
    run = make("1")
    items = clean.find_deletions(root, [], 0, (), checkpoints_only=False)
    fingerprint = clean._fingerprint

    def resume(looked_at: RunFolder) -> Any:
        if looked_at.path != run.path:
            run.journal_folder.mkdir(parents=True)
            run.journal("submit").write(raw("submitted"))
            return "another"
        return fingerprint(looked_at)

    monkeypatch.setattr(clean, "_fingerprint", resume)
    ((_, problem),) = clean.delete_parts(items, root)
    assert "was resumed meanwhile, and left alone, in " in problem
    (kept,) = root.glob(f"*/{clean.HOLDING}*/1")
    assert (kept / "checkpoints" / "step-6").is_dir()
    list(clean.delete_parts([], root))
    assert kept.is_dir()
