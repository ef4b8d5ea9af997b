"""Files of runs that may be another user's: they are read as data, and lead nowhere else."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpc_ddp.cli.completing import runs
from hpc_ddp.cli.main import main
from hpc_ddp.core import file_io
from hpc_ddp.core.console.terminal import printable
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_io import check_links, open_data, read_json, read_tail, write_whole
from hpc_ddp.core.file_owners import check_folder
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.job.spec import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.core.run_index import find_run, link_job
from hpc_ddp.liveness import Queue
from hpc_ddp.report import bundle
from hpc_ddp.report.status.cache import StatusCache
from tests.raw_events import raw


@pytest.fixture
def links_are_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests: all that they make belongs to another user from now on."""
    monkeypatch.setattr(file_io, "ROOT", -1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    folder = tmp_path / "private"
    folder.mkdir()
    (folder / "key").write_text("secret\n")
    (folder / "keys.jsonl").write_text('{"event": "finished", "time": 1}\n')
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "runs" / "train" / "20260101-000000-abcd").make()
    run.job_json.write_text(JobSpec("train.py").to_json())
    run.journal("submit").write(raw("submitted", backend="slurm"))
    return run


@pytest.mark.parametrize(
    "lead", [lambda link: link, lambda link: link / "key", lambda link: link.parent / "again" / "x"]
)
def test_no_link_of_another_user_is_followed(
    tmp_path: Path, secret: Path, links_are_anothers: None, lead: Callable[[Path], Path]
) -> None:
    (secret / "x").write_text("")
    (tmp_path / "link").symlink_to(secret)
    (tmp_path / "again").symlink_to("link")
    with pytest.raises(OSError, match="a link of another user"):
        check_links(lead(tmp_path / "link"))


def test_links_of_this_user_are_followed(tmp_path: Path, secret: Path) -> None:
    (tmp_path / "link").symlink_to("private")
    (tmp_path / "again").symlink_to(tmp_path / "link")
    with open_data(tmp_path / "again" / "key") as file:
        assert file.read() == b"secret\n"
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OSError, match="Too many levels") as error:
        check_links(tmp_path / "round")
    assert error.value.errno == errno.ELOOP


def test_a_pipe_is_not_waited_for(tmp_path: Path, run: RunFolder) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    assert read_json(tmp_path / "pipe.json") == {}
    assert read_tail(tmp_path / "pipe.json", 10) == ""
    os.mkfifo(run.journal_folder / "b.jsonl")
    with pytest.raises(OSError, match="no regular file"):
        run.events()
    result = CliRunner().invoke(main, ["status", "--runs-dir", str(run.root)])
    assert "unreadable" in result.output


def test_a_runs_links_reach_no_report(
    tmp_path: Path, secret: Path, run: RunFolder, links_are_anothers: None
) -> None:
    log = run.attempt(0).node("n1").rank_log(0)
    log.parent.mkdir(parents=True)
    log.symlink_to(secret / "key")
    (run.path / "task-0").symlink_to(secret)
    (run.logs / "slurm.out").symlink_to(secret / "key")
    assert read_tail(log, 100) == ""
    _, omissions = bundle.write(run, tmp_path / "bundle.tar.gz")
    assert [line for line in omissions if "slurm.out" in line]
    run.journal_folder.joinpath("keys.jsonl").symlink_to(secret / "keys.jsonl")
    with pytest.raises(OSError, match="a link of another user"):
        run.events()


@pytest.mark.parametrize("part", ["runs", "runs/train"])
def test_runs_are_not_made_behind_a_link_of_another_user(
    tmp_path: Path, run: RunFolder, part: str, links_are_anothers: None
) -> None:
    folder = tmp_path / part
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    with pytest.raises(UsageError, match="a link of another user"):
        check_folder(RunFolder(folder.parent / run.path.relative_to(folder.parent)))


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


def test_the_cache_of_states_is_private_and_believed_from_its_user_alone(run: RunFolder) -> None:
    run.journal("batch").write(raw("finished", step=3))
    cache = StatusCache(run.root, Queue({}))
    cache.status_of(run)
    cache.save()
    (path,) = run.root.glob(".status*")
    assert path.stat().st_mode & 0o777 == 0o600
    entries = json.loads(path.read_text())
    assert entries["runs"]
    entries["runs"][str(run.path)]["status"]["why"] = "forged"
    write_whole(path, json.dumps(entries), mode=0o600)
    assert StatusCache(run.root, Queue({})).status_of(run).why == "forged"
    path.chmod(0o666)
    assert StatusCache(run.root, Queue({})).status_of(run).why == ""


def test_names_that_a_shell_would_read_are_not_offered(tmp_path: Path, run: RunFolder) -> None:
    (run.root / "best;id>PWNED;#").mkdir()
    (run.root / "train" / "$(id)").mkdir()
    parent = main.make_context("hpc-ddp", ["status"], resilient_parsing=True)
    parent.params["runs_dir"] = str(run.root)
    assert [item.value for item in runs(parent, "")] == ["train", "20260101-000000-abcd"]


def test_a_run_can_not_change_the_terminal(run: RunFolder) -> None:
    assert printable("a\x1b]0;b\x07\x9b\tc\n") == "a\ufffd]0;b\ufffd\ufffd\tc\n"
    why = "\x1b]0;title\x07 curl evil"
    # Of a later attempt: within a millisecond the order of two writers is that of their names.
    run.journal("batch", 1).write(raw("verdict", cause="failed", action="give up", why=why))
    result = CliRunner().invoke(main, ["status", "--runs-dir", str(run.root)])
    assert "\ufffd]0;title\ufffd curl evil" in result.output
    assert "\x1b" not in result.output
