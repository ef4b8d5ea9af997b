"""Small files, read whatever is in them, and a disk that is waited for."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ddp.core import file_io
from hpc_ddp.core.file_io import read_json, read_tail, read_word, write_json
from unit.fakes import stop_clock


def test_files_are_read_whatever_is_in_them(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert (read_json(path), read_word(path), read_tail(path, 9)) == ({}, "", "")
    path.write_text("[1]")
    assert read_json(path) == {}
    path.write_text('{"a": 1')
    assert read_json(path) == {}
    write_json(path, {"a": 1})
    assert (read_json(path), [item.name for item in tmp_path.iterdir()]) == ({"a": 1}, ["file"])
    path.write_text(" word\n")
    assert read_word(path) == "word"
    path.write_bytes(b"x" * 50 + b"[rank3]: one\n[rank12]:two\nno [rank1]: three\xff")
    assert read_tail(path, 44) == "one\ntwo\nno [rank1]: three\ufffd"
    assert read_tail(path, 4) == "ree�"
    assert read_tail(path, 1000).startswith("x" * 50)


def test_a_disk_that_comes_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, errors = stop_clock(monkeypatch, file_io), [OSError("away"), OSError("away")]

    def act() -> str:
        if errors:
            raise errors.pop()
        return "there"

    assert file_io.patiently(act) == "there"
    assert clock.slept == [1, 1]


def test_what_takes_longer_than_the_patience_is_tried_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, calls = stop_clock(monkeypatch, file_io), []

    def act() -> None:
        calls.append(clock.now)
        clock.now += 2 * file_io.PATIENCE_S
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        file_io.patiently(act)
    assert len(calls) == 2


def test_a_file_is_written_beside_what_others_have_put_there(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("kept")
    (tmp_path / "status.json").symlink_to(mine)
    write_json(tmp_path / "status.json", {"a": 1})
    assert mine.read_text() == "kept"
    assert read_json(tmp_path / "status.json") == {"a": 1}
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "status.json"}
