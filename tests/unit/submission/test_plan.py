"""Planned runs on disk."""

from __future__ import annotations

import calendar
import errno
import os
import shutil
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core import file_owners
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.task_folder import make_task
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission import backends, plan
from hpc_ddp.submission.package_files import PACKAGE
from hpc_ddp.submission.restart import plan_continuation, plan_rerun, set_aside
from hpc_ddp.submission.run_files import earlier, library, snapshot
from hpc_ddp.submission.run_files.start_claim import release_start
from hpc_ddp.submission.settings import machine_checks
from hpc_ddp.submission.settings.config import Layer, Settings
from hpc_ddp.training.checkpoint.storage import disk
from tests.raw_events import raw
from tests.waiting import LIMIT_S
from unit.fakes import set_acl


@pytest.mark.parametrize("has_acl", [False, True])
def test_nothing_of_a_run_can_be_written_by_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_acl: bool
) -> None:
    """Its owner has the umask of a project's group, and so have the script and the package; or the
    folder has a default ACL, which takes the umask's place."""
    umask = os.umask(0o002)
    try:
        if has_acl:
            set_acl(tmp_path, "default")
        project = tmp_path / "project"
        (project / "part").mkdir(parents=True)
        (project / "part" / "more.py").write_text("")
        (project / "train.py").write_text("")
        package = tmp_path / "hpc_ddp"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (*package.rglob("*"), *project.rglob("*")):
            path.chmod(path.stat().st_mode | 0o020)
        monkeypatch.setattr(library, "PACKAGE", package)
        settings = Settings({"script": "train.py"})
        run = plan.plan_new(settings, project, tmp_path / "runs").write()
        backends.write_script(run)
        backends.SubmititBackend().write_further_files(run)
        make_task(run.run, 0)
        run.run.claim_attempt({}, lambda _: False)
        run.run.journal("worker").write(raw("first_step", step=1))  # a worker has its user's umask
        assert os.umask(0o002) == 0o002
    finally:
        os.umask(umask)
    paths = [run.run.path, *run.run.path.rglob("*")]
    assert {run.run.script, run.run.lib / "node.py", run.code / "part" / "more.py"} <= {*paths}
    assert [path for path in paths if path.stat().st_mode & 0o022] == []
    for folder in (run.run.path.parent, run.run.root):
        assert not folder.stat().st_mode & 0o022


@pytest.mark.parametrize(("folder_mode", "file_mode"), [(0o775, 0o664), (0o755, 0o664)])
def test_a_disk_that_keeps_no_permissions_is_refused_before_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder_mode: int, file_mode: int
) -> None:
    """As CIFS with dir_mode and file_mode, and gcsfuse: the batch script would start nothing."""
    monkeypatch.setattr(file_owners, "_is_private", lambda gid, uid: True)
    (tmp_path / "train.py").write_text("")
    make_folder, open_file, set_mode = os.mkdir, os.open, os.chmod

    def make(name: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        make_folder(name, mode, dir_fd=dir_fd)
        set_mode(name, folder_mode, dir_fd=dir_fd)

    def open_there(name: str, *words: int, **options: Any) -> int:
        descriptor = open_file(name, *words, **options)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            set_mode(descriptor, file_mode)
        return descriptor

    monkeypatch.setattr(os, "mkdir", make)
    monkeypatch.setattr(os, "open", open_there)
    for name in ("chmod", "fchmod"):
        monkeypatch.setattr(os, name, lambda *_, **options: None)
    new = plan.plan_new(Settings({"script": "train.py"}), tmp_path, tmp_path / "runs")
    with pytest.raises(UsageError, match=r"runs does not keep permissions: .* mode 0\d") as caught:
        backends.write_script(new.write())
    assert "--runs-dir" in str(caught.value.hint)
    assert (new.run.path / "journal").exists() is (folder_mode == 0o755)  # `render` removes none


@pytest.mark.parametrize("new_code", [False, True])
def test_a_continued_run_keeps_its_code_unless_new_code_is_asked_for(
    tmp_path: Path, new_code: bool
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    script = project / "train.py"
    script.write_text("old")
    settings = Settings({"script": "train.py"})
    run = plan.plan_new(settings, project, tmp_path / "runs").write().run
    script.write_text("new")
    (project / "weights.pt").write_bytes(bytes(60_000_000 if not new_code else 1))  # the script's
    continued = plan_continuation(run, {}, Settings({}), project, new_code).write()
    assert continued.script == run.code / str(int(new_code)) / "train.py"
    assert continued.script.read_text() == ("new" if new_code else "old")
    assert (run.code / "1").exists() is new_code
    continued.discard()  # its start was refused
    assert (run.code / "0" / "train.py").read_text() == "old"
    assert not (run.code / "1").exists()


@pytest.mark.parametrize(
    ("earlier", "has_begun", "later"),
    [
        ("afterok:12", False, "afterok:12"),
        ("afterok:12", True, None),
        ("afterok:12,singleton", True, "singleton"),
        (None, True, None),
    ],
)
def test_a_run_that_has_begun_waits_for_no_job_of_long_ago(
    tmp_path: Path, earlier: str | None, has_begun: bool, later: str | None
) -> None:
    (tmp_path / "a.py").touch()
    settings = Settings({"script": "a.py", "dependency": earlier})
    run = plan.plan_new(settings, tmp_path, tmp_path / "runs").write().run
    if has_begun:
        run.claim_attempt({"nodes": ["n1"]}, lambda identity: False)
    continued = plan_continuation(run, {}, Settings({}), tmp_path)
    assert continued.spec.dependency == later
    other = plan_continuation(run, {"dependency": "afterok:7"}, Settings({}), tmp_path)
    assert other.spec.dependency == "afterok:7"


def test_a_run_whose_working_directory_is_gone_names_the_option(tmp_path: Path) -> None:
    """As a git work tree that was removed: each job of the run ended at once."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.py").touch()
    settings = Settings({"script": "a.py"})
    run = plan.plan_new(settings, tmp_path / "tree", tmp_path / "runs").write().run
    shutil.rmtree(tmp_path / "tree")
    with pytest.raises(UsageError, match=r"working directory .*tree' does not exist any more"):
        plan_continuation(run, {}, Settings({}), tmp_path)
    with pytest.raises(UsageError, match=r"working directory .*tree' does not exist any more"):
        plan_rerun(run, {}, {}, Settings({}), tmp_path, tmp_path / "runs", same_code=True)
    moved = plan_continuation(run, {"chdir": "."}, Settings({}), tmp_path)
    assert moved.spec.chdir == str(tmp_path)


def test_a_script_that_is_named_is_new_code(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(name)
    settings = Settings({"script": "a.py"})
    run = plan.plan_new(settings, tmp_path, tmp_path / "runs").write().run
    (tmp_path / "a.py").unlink()
    kept = plan_continuation(run, {}, Settings({}), tmp_path)  # its own copy is there
    assert (kept.script, kept.copies_code) == (run.code / "0" / "a.py", False)
    other = plan_continuation(run, {"script": "b.py"}, Settings({}), tmp_path)
    assert (other.script, other.copies_code) == (run.code / "1" / "b.py", True)


@pytest.mark.parametrize(
    ("options", "args"),
    [
        ({"script": "a.py"}, ("--lr", "1")),
        ({"script": "a.py", "args": []}, ()),
        ({"script": "b.py"}, ()),
        ({"script": "moved/a.py"}, ("--lr", "1")),
        ({"script": "a.py", "no-python": True}, ()),
        ({}, ("--lr", "1")),
    ],
)
def test_a_run_keeps_the_arguments_of_its_script(
    tmp_path: Path, options: dict[str, Any], args: tuple[str, ...]
) -> None:
    (tmp_path / "moved").mkdir()
    for name in ("a.py", "b.py", "moved/a.py"):
        (tmp_path / name).touch()
    settings = Settings({"script": "a.py", "args": ["--lr", "1"]})
    run = plan.plan_new(settings, tmp_path, tmp_path / "runs").write().run
    if "moved" in str(options):
        (tmp_path / "a.py").unlink()
    assert plan_continuation(run, options, Settings({}), tmp_path).spec.args == args


def test_settings_of_a_new_run_alone_are_refused_or_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").touch()
    for name in ("KEY", "TOKEN"):
        monkeypatch.setenv(name, "x")
    settings = Settings({"script": "a.py", "env-names": ["KEY"]})
    run = plan.plan_new(settings, tmp_path, tmp_path / "runs").write().run
    with pytest.raises(UsageError, match="--site has no effect beside --run"):
        plan_continuation(run, {"site": "lumi"}, Settings({"site": "lumi"}), tmp_path)
    live = plan_continuation(run, {"snapshot": False}, Settings({"snapshot": False}), tmp_path)
    assert (live.script, live.copies_code) == (tmp_path / "a.py", False)
    more = plan_continuation(run, {"env-names": ["TOKEN"]}, Settings({}), tmp_path)
    assert more.spec.env_names == ("KEY", "TOKEN")


def test_a_run_of_the_live_code_stays_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("old")
    settings = Settings({"script": "train.py", "snapshot": False})
    run = plan.plan_new(settings, tmp_path, tmp_path / "runs").write().run
    kept = plan_continuation(run, {}, Settings({}), tmp_path)
    assert (kept.script, kept.copies_code) == (script, False)
    script.unlink()
    with pytest.raises(UsageError, match="does not exist any more"):
        plan_continuation(run, {}, Settings({}), tmp_path)


@pytest.mark.parametrize(
    "options",
    [{"script": "true", "no-python": True}, {"script": "json.tool", "module": True}],
)
def test_a_run_that_went_on_with_a_command_keeps_no_copy(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    (tmp_path / "train.py").touch()
    run = plan.plan_new(Settings({"script": "train.py"}), tmp_path, tmp_path / "runs").write().run
    plan_continuation(run, options, Settings(options), tmp_path).write()
    earlier.remove_note(run)  # the job is queued
    release_start(run)
    again = plan_continuation(run, {}, Settings({}), tmp_path)
    assert (again.code, again.script, again.copies_code) == (
        tmp_path, tmp_path / options["script"], False,
    )  # fmt: skip


def test_a_module_that_is_left_in_the_copy_alone_is_kept(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.py").touch()
    settings = Settings({"script": "own.train", "module": True})
    run = plan.plan_new(settings, tmp_path, tmp_path / "runs").write().run
    shutil.rmtree(tmp_path / "own")
    assert plan_continuation(run, {}, Settings({}), tmp_path).code == run.code / "0"
    again = plan_rerun(run, {}, {}, Settings({}), tmp_path, tmp_path / "runs", same_code=True)
    assert again.source == run


def test_options_of_a_container_without_an_image_are_refused(tmp_path: Path) -> None:
    """A site may have some for the jobs that have one."""
    (tmp_path / "train.py").touch()
    values = {"script": "train.py", "container-options": ["--nv"]}
    for kind in ("option", "project"):
        settings = Settings(values, [Layer(kind, values)])
        with pytest.raises(UsageError, match="container-options have no effect"):
            plan.plan_new(settings, tmp_path, tmp_path / "runs")
    plan.plan_new(Settings(values, [Layer("site", values)]), tmp_path, tmp_path / "runs")


def test_a_command_of_the_working_directory_keeps_its_dot(tmp_path: Path) -> None:
    """It is not looked for by PATH."""
    settings = Settings({"script": "./run.sh", "no-python": True, "python": sys.executable})
    spec = plan.plan_new(settings, tmp_path, tmp_path / "runs").spec
    assert (spec.script, spec.job_name) == ("./run.sh", "run")


def test_an_old_python_is_refused_where_its_name_is_known(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    old = tmp_path / "python"
    values = {"script": "train.py", "python": str(old)}
    for version in ("3.8", "2.7"):
        (tmp_path / f"python{version}").touch()
        old.unlink(missing_ok=True)
        old.symlink_to(f"python{version}")
        with pytest.raises(UsageError, match=rf"is Python {version}; accepted: 3\.10 or later"):
            plan.plan_new(Settings(values), tmp_path, tmp_path / "runs")
    unknown: list[dict[str, Any]] = [{"image": "a.sif"}, {"python": "gone"}, {"python": "/gone"}]
    for more in unknown:
        plan.plan_new(Settings({**values, **more}), tmp_path, tmp_path / "runs")


def test_a_run_of_another_version_is_refused_before_its_library_is_replaced(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text("")
    settings = Settings({"script": "train.py"})
    prepared = plan.plan_new(settings, tmp_path, tmp_path / "runs").write()
    run = prepared.run
    folder = run.checkpoints / "step-7"
    folder.mkdir()
    disk.write_manifest(folder, {"step": 7, "format": 3}, {})
    (run.lib / "of-then").touch()
    continued = plan_continuation(run, {}, Settings({}), tmp_path)
    with pytest.raises(UsageError, match=r"step-7 has format 3; this hpc-ddp reads 4") as caught:
        continued.write()
    assert "--fresh" in (caught.value.hint or "")
    assert (run.lib / "of-then").exists()
    replace(continued, is_fresh=True).write()
    assert not (run.lib / "of-then").exists()


def test_checkpoints_that_can_not_be_set_aside_are_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the run that was prepared is discarded, which an OSError would leave."""
    (tmp_path / "train.py").write_text("")
    settings = Settings({"script": "train.py"})
    prepared = plan.plan_new(settings, tmp_path, tmp_path / "runs").write()

    def refuse(run: RunFolder) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(RunFolder, "tasks", refuse)
    with pytest.raises(UsageError, match="can't be set aside: Permission denied"):
        set_aside(prepared)


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_file_in_the_way_is_no_other_submit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    (tmp_path / "train.py").write_text("")
    new = plan.plan_new(Settings({"script": "train.py"}), tmp_path, tmp_path / "runs")
    if is_taken:
        new.run.make()

    def refuse(*_: object) -> None:
        raise FileExistsError(errno.EEXIST, "File exists", str(new.run.code / "train.py"))

    monkeypatch.setattr(snapshot, "take_snapshot", refuse)
    text = "made by another submit" if is_taken else "can't be written: File exists"
    with pytest.raises(UsageError, match=text):
        new.write()
    assert new.run.path.exists() is is_taken


def test_a_full_disk_takes_nothing_from_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are there, whatever there is no room for; the message has one line of a copy's."""
    (tmp_path / "train.py").write_text("")
    run = plan.plan_new(Settings({"script": "train.py"}), tmp_path, tmp_path / "runs").write().run
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}

    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def refuse_all(*args: Any, **options: Any) -> None:
        raise shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")] * 40)

    continued = plan_continuation(run, {"args": ("--lr", "1")}, Settings({}), tmp_path)
    monkeypatch.setattr(plan, "write_whole", refuse)
    monkeypatch.setattr(shutil, "copytree", refuse_all)
    text = r"can't be written: \[Errno 28\] No space left on device: 'b'$"
    with pytest.raises(UsageError, match=text):
        continued.write()
    release_start(run)
    monkeypatch.undo()
    after = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert {path: after.get(path) for path in before} == before
    assert not [path for path in run.path.iterdir() if path.name.startswith(".draft")]


@pytest.mark.parametrize("is_killed", [True, False])
def test_code_that_is_copied_in_part_is_no_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """As by a connection that is lost, or Ctrl-C."""
    project = tmp_path / "project"
    project.mkdir()
    for name in ("train.py", "config.yaml"):
        (project / name).write_text("old")
    run = plan.plan_new(Settings({"script": "train.py"}), project, tmp_path / "runs").write().run
    continued = plan_continuation(run, {}, Settings({}), project, new_code=True)
    copies: list[object] = []
    copy = shutil.copy

    def copy_one(*args: Any, **options: Any) -> Any:
        if copies:
            raise KeyboardInterrupt
        copies.append(args)
        return copy(*args, **options)

    monkeypatch.setattr(plan, "carry_library", lambda run: None)
    monkeypatch.setattr(shutil, "copy", copy_one)
    if is_killed:
        monkeypatch.setattr(shutil, "rmtree", lambda *args, **options: None)
    with pytest.raises(KeyboardInterrupt):
        continued.write()
    release_start(run)
    monkeypatch.undo()
    assert run.newest_code == run.code / "0"
    assert len([*run.code.glob(".draft-*")]) == is_killed
    again = plan_continuation(run, {}, Settings({}), project, new_code=True).write()
    assert again.code == run.newest_code == run.code / "1"
    names = {path.name for path in again.code.iterdir()}
    assert names == {"train.py", "config.yaml", "__pycache__"}
    assert not [*run.code.glob(".draft-*")]


def test_the_place_of_a_script_is_noted(tmp_path: Path) -> None:
    """By then the folder has another name, or is no repository, and another file of the name would
    be taken."""
    repository = tmp_path / "repository"
    (repository / "exp").mkdir(parents=True)
    for path in (repository / "train.py", repository / "exp" / "train.py"):
        path.write_text(str(path))
    subprocess.run(["git", "init", "--quiet", repository], check=True)
    settings = Settings({"script": "repository/exp/train.py"})
    run = plan.plan_new(settings, tmp_path, tmp_path / "runs").write().run
    repository.rename(tmp_path / "renamed")
    again = plan_continuation(run, {}, Settings({}), tmp_path)
    assert again.script == run.code / "0" / "exp" / "train.py"
    repeated = plan_rerun(run, {}, {}, Settings({}), tmp_path, tmp_path / "runs", True).write()
    assert repeated.script == repeated.code / "exp" / "train.py"
    third = plan_continuation(repeated.run, {}, Settings({}), tmp_path)
    assert third.script == repeated.script


def test_a_part_of_an_array_leaves_the_others_to_be_started(tmp_path: Path) -> None:
    """Also those that have never begun."""
    (tmp_path / "train.py").write_text("")
    settings = Settings({"script": "train.py", "array": "0-3%1"})
    run = plan.plan_new(settings, tmp_path, tmp_path / "runs").write().run
    arrays = []
    for part in ("3", "5", None):
        options = {"array": part} if part else {}
        continued = plan_continuation(run, options, Settings({}), tmp_path).write()
        earlier.remove_note(run)  # the job is queued
        release_start(run)
        stored = JobSpec.from_json(run.job_json.read_bytes())
        arrays.append((continued.spec.array, stored.array))
    assert arrays == [("3", "0-3%1"), ("5", "0,1,2,3,5%1"), ("0,1,2,3,5%1", "0,1,2,3,5%1")]


def test_tasks_whose_teardown_was_cut_off_go_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    settings = Settings({"script": "train.py", "array": "0-2", "teardown": ["true"]})
    run = plan.plan_new(settings, tmp_path, tmp_path / "runs").write().run
    for index in range(3):
        make_task(run, index).journal("rank-0").write(raw("finished", step=4))
    run.task(1).torn_down.touch()
    assert plan_continuation(run, {}, Settings({}), tmp_path).spec.array == "0,2"


def test_a_run_becomes_no_array(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    run = plan.plan_new(Settings({"script": "train.py"}), tmp_path, tmp_path / "runs").write().run
    with pytest.raises(UsageError, match=r"array is '0-1' for run .*, which is no array"):
        plan_continuation(run, {"array": "0-1"}, Settings({}), tmp_path)


def test_a_task_goes_on_alone_and_takes_no_array(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    settings = Settings({"script": "train.py", "array": "0-3"})
    run = plan.plan_new(settings, tmp_path, tmp_path / "runs").write().run
    task = make_task(run, 2)
    for options in ({}, {"array": "2"}):
        assert plan_continuation(task, options, Settings({}), tmp_path).spec.array == "2"
    with pytest.raises(
        UsageError, match=r"array is '3' for .*/task-2, which is one task"
    ) as caught:
        plan_continuation(task, {"array": "3"}, Settings({}), tmp_path)
    assert str(run.path) in str(caught.value.hint)


def test_settings_of_another_version_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    run = plan.plan_new(Settings({"script": "train.py"}), tmp_path, tmp_path / "runs").write().run
    run.job_json.write_text(run.job_json.read_text().replace("{", '{"resume_mode": "x", ', 1))
    plan_continuation(run, {}, Settings({}), tmp_path)
    assert (
        "another version of hpc-ddp, which are left out: resume_mode\n" in capsys.readouterr().err
    )


def test_the_names_of_runs_sort_by_time_in_any_zone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook's container has UTC; the login node's time has an hour twice in autumn."""
    try:
        for zone in ("America/Los_Angeles", "UTC", "Asia/Tokyo"):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            name = plan.new_folder(tmp_path, JobSpec("train.py")).path.name
            begun = calendar.timegm(time.strptime(name[:15], "%Y%m%d-%H%M%S"))
            assert abs(begun - time.time()) < LIMIT_S
    finally:
        monkeypatch.undo()
        time.tzset()


def test_texts_in_another_encoding_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "runs" / "train" / "1")
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")
    machine_checks._check_encoding(JobSpec("train.py", args=("--data", "green")), run)
    wrong = JobSpec("train.py", env={"COLOUR": "gr\xc3\xbcn"}), JobSpec("tr\xc3\xa4n.py")
    other_run = RunFolder(tmp_path / "\xfc" / "train" / "1")
    setup = JobSpec("t.py", setup=("export COLOUR=gr\xc3\xbcn",))
    cases = *((spec, run) for spec in (*wrong, setup)), (JobSpec("t.py"), other_run)
    for spec, folder in cases:
        with pytest.raises(UsageError, match="this shell's locale reads it as iso8859-1") as caught:
            machine_checks._check_encoding(spec, folder)
        assert caught.value.hint == "export LC_ALL=C.UTF-8"
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "UTF8")
    machine_checks._check_encoding(wrong[0], run)
