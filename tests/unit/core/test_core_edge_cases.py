"""The small print of processes, words, and checkpoints, as tables."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core import checkpoints, process
from hpc_ddp.core.checkpoints import (
    FileFacts,
    Health,
    all_of,
    facts_of,
    find_damage,
    health,
    manifest_crc,
    verify,
)
from hpc_ddp.core.console import progress
from hpc_ddp.core.errors import HpcDdpError, UsageError, closest
from hpc_ddp.core.journal.events import JournalEvent
from hpc_ddp.core.run_folder import RunFolder
from tests.raw_events import raw, typed


def _event(event: str, time: float = 1.0, attempt: int = 0, **fields: Any) -> JournalEvent:
    return typed(event, time, attempt, **fields)


# --- patience, processes, progress ---------------------------------------------------------


def test_a_process_is_known_by_when_it_began() -> None:
    info = process.identity()
    assert (info["host"], info["pid"]) == (socket.gethostname(), os.getpid())
    assert process.is_live(info)
    for change in ({"host": "x"}, {"pid": "7"}, {"began": "1"}, {"pid": 1 << 30}, {"pid": None}):
        assert not process.is_live({**info, **change}), change
    began = process.began_at()
    assert began is not None
    assert time.time() - 36000 < began < time.time()


def test_a_process_that_nobody_has_buried_is_dead() -> None:
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process._began(child.pid) is None
    assert process._exists(os.getpid()) is None  # where there is /proc, that has the answer
    assert signal.SIGRTMIN < process.SHOW_STACKS < signal.SIGRTMAX


def test_without_proc_a_process_lives_as_long_as_it_has_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen(["true"]) as child:
        pass

    def fail(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setattr(Path, "read_text", fail)
    info = process.identity()
    assert process.is_live(info)
    assert not process.is_live({**info, "pid": child.pid})
    assert process.began_at() is None


def test_a_bar_is_as_long_as_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = progress.ProgressBar("x", 4)
    drawn = []
    for amount in (0, 1, 2, 9):
        bar.add(amount)
        drawn.append(bar._line())
    shares = (0, 8, 22, 30)
    percents = ("0%", "25%", "75%", "100%")
    assert drawn == [
        f"x {'━' * full}{'─' * (30 - full)} {percent}"
        for full, percent in zip(shares, percents, strict=True)
    ]


def test_a_word_that_was_meant() -> None:
    assert closest("slrum", ("slurm", "local")) == ", did you mean 'slurm'?"
    assert closest("zzz", ("slurm", "local")) == ""
    assert (HpcDdpError("x").exit_code, UsageError("x").exit_code) == (1, 2)
    assert (HpcDdpError("x", hint="y").hint, HpcDdpError("x").message) == ("y", "x")


# --- checkpoints ---------------------------------------------------------------------------


def _checkpoint(folder: Path, name: str, **values: Any) -> Path:
    made = folder / name
    made.mkdir()
    files = {}
    for file in ("a", "b", "c"):
        (made / file).write_bytes(file.encode() * 10)
        files[file] = vars(facts_of(made / file))
    value = {"files": files, "world_size": 2, **values}
    value["crc32"] = manifest_crc(value)
    (made / "manifest.json").write_text(json.dumps(value))
    return made


def test_facts_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "CHUNK", 16)
    (tmp_path / "a").write_bytes(bytes(range(50)))
    counts: list[int] = []
    facts = facts_of(tmp_path / "a", counts.append)
    assert (facts.size, facts.crc32) == (50, zlib.crc32(bytes(range(50))))
    assert counts == [16, 16, 16, 2]


def test_ranks_share_the_reading(tmp_path: Path) -> None:
    made = _checkpoint(tmp_path, "step-1")
    (made / "b").write_bytes(b"xx")
    assert [verify(made, rank, 3) for rank in range(3)] == [
        *(None, "b has 2 bytes instead of 10", None)
    ]
    (made / "c").unlink()
    (made / "c").mkdir()
    assert verify(made, 2, 3) == "c is no file: Is a directory"
    (made / "manifest.json").write_text("[]")
    assert verify(made) == "manifest.json can't be read: its own CRC32 differs"


def test_what_is_no_checkpoint_for_all_its_name_is_damaged(tmp_path: Path) -> None:
    """So that an older one is tried."""
    (tmp_path / "step-6").touch()
    (tmp_path / "step-7").symlink_to("nowhere")
    (tmp_path / "step-8").symlink_to("step-8")
    made = _checkpoint(tmp_path, "step-9")
    (made / "b").unlink()
    (made / "b").symlink_to("nowhere")
    problems = [find_damage(path, 0, 1) for path in checkpoints.candidates(tmp_path)]
    assert [str(problem).partition(":")[0] for problem in problems] == [
        "b is no file",
        *["manifest.json is no file"] * 3,
    ]
    assert len(checkpoints.health(tmp_path)) == 4


def test_only_what_a_readable_folder_lacks_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what a look-up denies and the folder lists, nor what an I/O error hides."""
    made = _checkpoint(tmp_path, "step-1")

    def fail(error: OSError) -> None:
        def facts_of(path: Path, read: Any) -> FileFacts:
            raise error

        monkeypatch.setattr(checkpoints, "facts_of", facts_of)

    fail(OSError(errno.EIO, "Input/output error"))
    with pytest.raises(OSError, match="a can't be read: Input/output error") as caught:
        find_damage(made)
    assert caught.value.errno == errno.EIO
    assert verify(made) == "a can't be read: Input/output error"
    fail(FileNotFoundError(errno.ENOENT, "No such file or directory"))
    with pytest.raises(FileNotFoundError, match="a can't be read: No such file"):
        find_damage(made)
    (made / "a").unlink()
    assert find_damage(made) == "a is missing"
    with pytest.raises(FileNotFoundError):
        find_damage(tmp_path / "step-2")


def test_checkpoints_are_set_aside_and_kept(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "name" / "run").make()
    assert checkpoints.lost(run) == []
    _checkpoint(run.checkpoints, "step-4")
    (run.checkpoints / "step-5.tmp-0").mkdir()
    run.journal("rank-0", 3).write(raw("checkpoint", step=4))
    (run.logs / "attempt-3").mkdir()
    assert checkpoints.set_aside(run) == run.checkpoints / "aside-0"
    assert find_damage(run.checkpoints / "aside-0" / "step-4") is None
    assert [path.name for path in run.checkpoints.iterdir()] == ["aside-0"]
    assert checkpoints.lost(run) == []
    run.journal("rank-0", 4).write(raw("checkpoint", step=2))
    assert checkpoints.lost(run) == ["step-2: it was saved, and is gone"]
    _checkpoint(run.checkpoints, "step-2")
    assert checkpoints.set_aside(run) == run.checkpoints / "aside-1"


@pytest.mark.parametrize(("backend", "command"), [("local", "dry-run"), ("slurm", "submit")])
def test_the_command_that_begins_again_is_that_of_the_run(
    tmp_path: Path, backend: str, command: str
) -> None:
    run = RunFolder(tmp_path / "a name" / "run").make()
    assert checkpoints.fresh_command(run) == f"mv '{run.path}' '{run.path}'-old"
    run.lib.mkdir()
    run.job_json.write_text(json.dumps({"backend": backend}))
    assert checkpoints.fresh_command(run) == f"hpc-ddp {command} --run '{run.path}' --fresh"
    assert command in checkpoints.fresh_command(run.task(0))  # what an array has is the array's


def test_health_of_all_that_is_there(tmp_path: Path) -> None:
    best = {"best": {"step": 9, "value": 1.0}}
    _checkpoint(tmp_path, "step-10", **best)
    _checkpoint(tmp_path, "step-9", **best)
    _checkpoint(tmp_path, "step-2", best={"step": 2})  # the best one at its time
    (tmp_path / "step-9.tmp-0").mkdir()
    (tmp_path / "step-3.bad-0-1").mkdir()
    (tmp_path / "step-3.old-0").mkdir()
    (tmp_path / "step-x").mkdir()
    os.utime(tmp_path / "step-2", (time.time() - 500, time.time() - 500))
    rows = health(tmp_path)
    names = ["step-2", "step-3.bad-0-1", "step-3.old-0", "step-9", "step-10"]
    assert [row.name for row in rows] == names
    assert rows[-1] == Health("step-10", rows[-1].age_s, 30, 2, best=False, problem=None)
    assert 499 < rows[0].age_s < 600
    assert [row.best for row in rows] == [False, False, False, True, False]
    assert (rows[1].bytes, rows[1].world_size, rows[1].problem) == (
        *(None, None, "manifest.json is missing"),
    )
    (tmp_path / "step-4").touch()
    every = [path.name for path in all_of(tmp_path)]
    assert every == sorted([*names, "step-9.tmp-0"])
    assert all_of(tmp_path / "none") == []
    assert checkpoints._size(tmp_path / "none") == 0
    assert checkpoints._size(tmp_path / "step-9") > 30
