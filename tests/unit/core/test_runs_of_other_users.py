"""Runs of other users: what is executed goes by its owner, and what is read has bounds."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core import checkpoints, file_io
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_io import make_private, parse_object, set_folder_mode, write_json
from hpc_ddp.core.file_owners import check_executable, check_folder, is_executable
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal import line_reader
from hpc_ddp.core.journal.journal import read_briefly, read_events
from hpc_ddp.core.journal.line_reader import LineReader
from hpc_ddp.core.run_folder import RunFolder
from tests.raw_events import raw
from tests.skips import skip_or_fail

STRANGER = 54321
FINISHED = b'{"time": 1, "event": "finished", "attempt": 0, "step": 3}\n'


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "runs" / "train" / "1").make()
    run.job_json.write_text(JobSpec("train.py").to_json())
    run.journal("submit").write(raw("submitted", backend="slurm"))
    for part in ("lib/hpc_ddp/batch.py", "code/0/train.py", "submitit/supervisor.pkl"):
        (run.path / part).parent.mkdir(parents=True)
        (run.path / part).touch(mode=0o644)
    return run


@pytest.fixture
def files_are_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


# --- what is executed ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [
        *("lib/hpc_ddp/batch.py", "lib/hpc_ddp", "code/0/train.py", "submitit/supervisor.pkl"),
        *("job.sbatch", "journal/submit.jsonl"),
    ],
)
def test_a_closed_run_goes_by_the_owners_of_its_files(run: RunFolder, part: str) -> None:
    """It may have been open for a while."""
    if os.geteuid():
        skip_or_fail("only root can give a file to another user")
    path = run.path / part
    path.touch()
    check_executable(run)
    path.chmod(0o777)  # others can't reach it
    assert is_executable(run)
    os.chown(path, STRANGER, -1)
    with pytest.raises(UsageError, match=f"{part} belongs to uid {STRANGER}"):
        check_executable(run)


@pytest.mark.parametrize("part", ["lib", "journal", "journal/batch.jsonl"])
def test_an_array_goes_by_the_owners_of_its_tasks_as_well(run: RunFolder, part: str) -> None:
    if os.geteuid():
        skip_or_fail("only root can give a file to another user")
    task = run.task(3).make()
    (task.path / "lib").symlink_to("../lib")
    task.journal("batch").write(raw("started"))
    check_executable(run)
    os.chown(task.path / part, STRANGER, -1, follow_symlinks=False)
    with pytest.raises(UsageError, match=f"task-3/{part} belongs to uid {STRANGER}"):
        check_executable(run)


# --- where runs are made ---------------------------------------------------------------------


def test_nothing_is_made_behind_what_is_not_checked(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="runs is a link to nowhere"):
        check_folder(RunFolder(runs / "train" / "1"))
    runs.unlink()
    check_folder(RunFolder(runs / "train" / "1"))
    assert not runs.exists()
    runs.mkdir()
    (runs / "train").touch()
    with pytest.raises(UsageError, match="train is no folder"):
        check_folder(RunFolder(runs / "train" / "1"))


@pytest.mark.parametrize("replacement", ["link", "folder"])
def test_a_new_folder_that_is_replaced_at_once_changes_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replacement: str
) -> None:
    public = tmp_path / "public"
    public.mkdir(mode=0o755)
    (public / "page").touch()
    make_folder = os.mkdir

    def replace(name: str, mode: int, *, dir_fd: int | None = None) -> None:
        make_folder(name, mode, dir_fd=dir_fd)
        (tmp_path / "1").rename(tmp_path / "moved")
        if replacement == "link":
            (tmp_path / "1").symlink_to(public)
        else:
            public.rename(tmp_path / "1")

    monkeypatch.setattr(os, "mkdir", replace)
    with pytest.raises(OSError, match=r"Not a directory|Too many levels|was made meanwhile"):
        make_private(tmp_path / "1", ("journal",), is_new=True)
    changed = public if replacement == "link" else tmp_path / "1"
    assert changed.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in changed.iterdir()] == ["page"]


def test_a_run_belongs_to_the_group_of_its_folder(tmp_path: Path) -> None:
    """By the setgid bit of a project's folder, which counts by group what its members may store."""
    tmp_path.chmod(0o2755)
    run = RunFolder(tmp_path / "runs" / "train" / "1").make()
    for folder in (run.path.parent, run.path, run.checkpoints, run.logs):
        assert folder.stat().st_mode & stat.S_ISGID, folder
    assert run.path.stat().st_mode & 0o777 == 0o700
    set_folder_mode(run.path, 0o750)
    assert run.path.stat().st_mode & 0o7777 == 0o2750


def test_whatever_the_umask_others_write_nothing_of_ours(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        run = RunFolder(tmp_path / "runs" / "train" / "1").make()
        write_json(run.cancelled, {})
        (run.checkpoints / "step-1").mkdir()
        checkpoints.set_aside(run)
    finally:
        os.umask(umask)
    made = [run.root, *run.root.rglob("*")]
    assert [path for path in made if path.stat().st_mode & 0o022] == [
        run.checkpoints / "aside-0" / "step-1"
    ]


# --- what is read ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["[" * 200_000, "[1]", "1", "", "{"])
def test_any_fault_of_a_json_text_is_one_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_object(text)
    with pytest.raises(UsageError, match=r"job\.json is broken"):
        JobSpec.from_json(text)
    (tmp_path / "manifest.json").write_text(text)
    assert str(checkpoints.verify(tmp_path)).startswith("manifest.json can't be read: ")


@pytest.mark.parametrize(
    "entries",
    [
        *({"sweep": {"a": [1]}}, {"sweep": [1]}, {"args": 3}, {"array": [1]}, {"env": [[]]}),
        {"sweep": {name: [str(number) for number in range(200)] for name in "abcdefgh"}},
    ],
)
def test_a_job_with_values_of_other_types_is_broken(entries: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        JobSpec.from_json(json.dumps({"script": "t.py", **entries}))


FACTS = {"size": 1, "crc32": 1}


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        ({}, "its 'files' is damaged"),
        ({"files": ["x"]}, "its 'files' is damaged"),
        ({"files": {"x": 1}}, "its 'x' is damaged"),
        ({"files": {"x": {"size": "1"}}}, "its 'size' is damaged"),
        ({"files": {"x": {**FACTS, "size": 10**400}}}, "its 'size' is damaged"),
        ({"files": {"../x": FACTS}}, "'../x' is no name"),
        ({"files": {"..": FACTS}}, "'..' is no name"),
        ({"files": {}, "best": [1]}, "its 'best' is damaged"),
        ({"files": {}, "best": {}}, "its 'step' is damaged"),
        ({"files": {}, "world_size": {}}, "its 'world_size' is damaged"),
    ],
)
def test_a_manifest_is_checked_before_it_is_believed(
    tmp_path: Path, manifest: dict[str, Any], problem: str
) -> None:
    folder = tmp_path / "step-3"
    folder.mkdir()
    (tmp_path / "x").write_text("private")
    manifest["crc32"] = checkpoints.manifest_crc(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (row,) = checkpoints.verify_all(tmp_path)
    assert problem in str(row.problem)
    assert row.bytes is None


@pytest.mark.parametrize("name", ["manifest.json", "w.bin"])
@pytest.mark.parametrize("kind", ["pipe", "endless device", "link of another user"])
def test_of_a_checkpoint_only_regular_files_are_read(
    tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "step-3"
    folder.mkdir()
    (folder / "w.bin").write_bytes(b"x")
    facts = checkpoints.facts_of(folder / "w.bin")
    manifest: dict[str, Any] = {"files": {"w.bin": vars(facts)}}
    manifest["crc32"] = checkpoints.manifest_crc(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoints.verify(folder) is None
    (folder / name).rename(tmp_path / "own")
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "endless device":
        (folder / name).symlink_to("/dev/zero")
    else:
        (folder / name).symlink_to(tmp_path / "own")
        monkeypatch.setattr(file_io, "ROOT", -1)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert str(checkpoints.verify(folder)).startswith(f"{name} is no file: ")


def test_a_link_further_up_proves_nothing_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be set aside as damaged."""
    (tmp_path / "disk" / "step-3").mkdir(parents=True)
    (tmp_path / "disk" / "step-3" / "manifest.json").touch()
    (tmp_path / "link").symlink_to("disk")
    monkeypatch.setattr(file_io, "ROOT", -1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(OSError, match="a link of another user"):
        checkpoints.find_damage(tmp_path / "link" / "step-3")


def test_sparse_files_of_others_are_read_no_further_than_a_line(
    run: RunFolder, files_are_anothers: None
) -> None:
    for number in range(12):
        path = run.journal_folder / f"w{number}.jsonl"
        path.touch()
        os.truncate(path, 3 << 30)
    with pytest.raises(OSError, match="too large for a journal") as error:
        read_briefly(run.journal_folder)
    assert error.value.errno == errno.EFBIG


@pytest.mark.parametrize("limit", ["MOST_FOREIGN_BYTES", "MOST_FOREIGN_FILES"])
def test_all_journal_files_of_a_run_share_a_budget(
    run: RunFolder, limit: str, monkeypatch: pytest.MonkeyPatch, files_are_anothers: None
) -> None:
    (run.journal_folder / "submit.jsonl").write_bytes(FINISHED)
    monkeypatch.setattr(line_reader, limit, 2 if limit.endswith("FILES") else 2 * len(FINISHED))
    (run.journal_folder / "a.jsonl").write_bytes(FINISHED)
    assert len(read_events(run.journal_folder)) == 2
    (run.journal_folder / "b.jsonl").write_bytes(FINISHED)
    for read in (read_events, read_briefly):
        with pytest.raises(OSError, match=r"too large for a journal: .*submit\.jsonl"):
            read(run.journal_folder)
    monkeypatch.setattr(os, "geteuid", os.getuid)
    assert len(read_events(run.journal_folder)) == 3


def test_of_ones_own_run_a_long_line_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash of a node may leave zeros in a file."""
    monkeypatch.setattr(line_reader, "LONGEST_LINE", 100)
    (tmp_path / "a.jsonl").write_bytes(FINISHED + b"\0" * 250 + FINISHED + FINISHED)
    assert len([*LineReader().read(tmp_path / "a.jsonl")]) == 2
    assert len(read_events(tmp_path)) == 2


@pytest.mark.parametrize("read", [read_events, read_briefly])
def test_a_journal_that_can_not_be_listed_is_not_empty(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], Any]
) -> None:
    def refuse(folder: Path) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    assert read(run.path / "absent") == []
    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(PermissionError):
        read(run.journal_folder)
