"""Small files are read whatever is in them, and an absent disk is waited for."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpc_ddp.cli.main import main
from hpc_ddp.core import file_io
from hpc_ddp.core.file_io import (
    check_links,
    open_data,
    read_json,
    read_seconds,
    read_tail,
    read_word,
    write_json,
)
from hpc_ddp.core.run_folder import RunFolder
from unit.core.fakes import BROKEN
from unit.fakes import stop_clock


@pytest.mark.parametrize("content", BROKEN.values(), ids=list(BROKEN))
def test_a_broken_json_file_reads_as_empty(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "job.json"
    path.write_bytes(content)
    assert read_json(path) == {}


@pytest.mark.parametrize("content", BROKEN.values(), ids=list(BROKEN))
def test_a_damaged_notice_still_reads(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notice"
    path.write_bytes(content)
    assert read_word(path)
    assert read_seconds(path) in (7.0, None)


def test_any_content_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert (read_json(path), read_word(path), read_tail(path, 9)) == ({}, "", "")
    path.write_text("[1]")
    assert read_json(path) == {}
    path.write_text('{"a": 1')
    assert read_json(path) == {}
    write_json(path, {"a": 1})
    assert (read_json(path), [entry.name for entry in tmp_path.iterdir()]) == ({"a": 1}, ["file"])
    path.write_text(" word\n")
    assert read_word(path) == "word"
    path.write_bytes(b"x" * 50 + b"[rank3]: one\n[rank12]:two\nno [rank1]: three\xff")
    assert read_tail(path, 44) == "one\ntwo\nno [rank1]: three\ufffd"
    assert read_tail(path, 4) == "ree�"
    assert read_tail(path, 1000).startswith("x" * 50)
    gloo = (
        "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks: 1\n"
    )
    path.write_text(f"one\n[rank0]: {gloo}two\n{gloo}")
    assert read_tail(path, 1000) == "one\ntwo\n"


def test_a_disk_that_comes_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, errors = stop_clock(monkeypatch, file_io), [OSError("away"), OSError("away")]

    def act() -> str:
        if errors:
            raise errors.pop()
        return "there"

    assert file_io.patiently(act) == "there"
    assert clock.slept == [1, 1]


@pytest.mark.parametrize("patience_s", [file_io.PATIENCE_S, 0.0, -5.0])
def test_a_call_is_tried_twice_whatever_the_patience(
    monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    clock, calls = stop_clock(monkeypatch, file_io), []

    def act() -> None:
        calls.append(clock.now)
        clock.now += 2 * file_io.PATIENCE_S
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        file_io.patiently(act, patience_s)
    assert len(calls) == 2


def test_a_file_replaces_a_planted_link(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.write_text("kept")
    (tmp_path / "status.json").symlink_to(target)
    write_json(tmp_path / "status.json", {"a": 1})
    assert target.read_text() == "kept"
    assert read_json(tmp_path / "status.json") == {"a": 1}
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "status.json"}


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


def test_a_pipe_is_no_file(tmp_path: Path, run: RunFolder) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    assert read_json(tmp_path / "pipe.json") == {}
    assert read_tail(tmp_path / "pipe.json", 10) == ""
    os.mkfifo(run.journal_folder / "b.jsonl")
    with pytest.raises(OSError, match="no regular file"):
        run.events()
    result = CliRunner().invoke(main, ["status", "--runs-dir", str(run.root)])
    assert "unreadable" in result.output


def test_a_file_that_can_not_be_written_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        write_json(tmp_path / "file", {"a": 1})
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
