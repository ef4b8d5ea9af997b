"""Checkpoints are verified, listed and set aside."""

from __future__ import annotations

import errno
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_ddp.core import checkpoints
from hpc_ddp.core.checkpoints import (
    FileFacts,
    Health,
    all_of,
    facts_of,
    find_damage,
    verify,
    verify_all,
)
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.training.checkpoint.storage import disk
from tests.raw_events import raw
from unit.core.fakes import write_checkpoint
from unit.training.checkpoint.fakes import write_draft


def test_a_published_checkpoint_verifies(tmp_path: Path) -> None:
    final = disk.publish(write_draft(tmp_path, 7), attempt=0)
    assert final.name == "step-7"
    assert checkpoints.verify(final) is None
    assert checkpoints.read_manifest(final)["step"] == 7


@given(st.data())
def test_a_flipped_bit_or_a_cut_is_detected(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    checkpoint = write_draft(tmp_path_factory.mktemp("damage"), 1, content=bytes(range(50)))
    victim = checkpoint / data.draw(st.sampled_from(["state.pt", checkpoints.MANIFEST]))
    content = bytearray(victim.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[place:]
    victim.write_bytes(content)
    assert checkpoints.verify(checkpoint)


def test_a_failed_verification_names_the_file(tmp_path: Path) -> None:
    checkpoint = write_draft(tmp_path, 1)
    (checkpoint / "state.pt").write_bytes(b"y" * 1000)
    assert checkpoints.verify(checkpoint) == "state.pt has been damaged: its CRC32 differs"
    (checkpoint / "state.pt").unlink()
    assert checkpoints.verify(checkpoint) == "state.pt is missing"
    (checkpoint / checkpoints.MANIFEST).unlink()
    assert checkpoints.verify(checkpoint) == "manifest.json is missing"


def test_candidates_are_newest_first_and_published_ones_only(tmp_path: Path) -> None:
    strays = ["step-5.old-1", "step-9.tmp-0", "step-7.bad-0", "step-x", "else"]
    for name in ["step-5", "step-10", "step-1", *strays]:
        (tmp_path / name).mkdir()
    candidates = [path.name for path in checkpoints.candidates(tmp_path)]
    assert candidates == ["step-10", "step-5", "step-5.old-1", "step-1"]
    assert checkpoints.candidates(tmp_path / "absent") == []


def test_health_is_listed_oldest_first(tmp_path: Path) -> None:
    for step in (9, 10, 8):
        disk.publish(write_draft(tmp_path, step), 0)
    (tmp_path / "step-9" / "state.pt").unlink()
    write_draft(tmp_path, 11)
    rows = checkpoints.verify_all(tmp_path)
    assert [(row.name, row.problem) for row in rows] == [
        ("step-8", None),
        ("step-9", "state.pt is missing"),
        ("step-10", None),
    ]
    assert rows[0].bytes == 1000


def test_the_checksum_of_a_manifest_does_not_depend_on_its_order() -> None:
    one = checkpoints.manifest_crc({"step": 1, "files": {}})
    assert one == checkpoints.manifest_crc({"files": {}, "step": 1})


def test_a_long_file_is_summed_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "CHUNK_BYTES", 16)
    (tmp_path / "a").write_bytes(bytes(range(50)))
    counts: list[int] = []
    facts = facts_of(tmp_path / "a", counts.append)
    assert (facts.size, facts.crc32) == (50, zlib.crc32(bytes(range(50))))
    assert counts == [16, 16, 16, 2]


def test_ranks_share_a_verification(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "step-1")
    (checkpoint / "b").write_bytes(b"xx")
    assert [verify(checkpoint, rank, 3) for rank in range(3)] == [
        *(None, "b has 2 bytes instead of 10", None)
    ]
    (checkpoint / "c").unlink()
    (checkpoint / "c").mkdir()
    assert verify(checkpoint, 2, 3) == "c is no file: Is a directory"
    (checkpoint / "manifest.json").write_text("[]")
    assert verify(checkpoint) == "manifest.json can't be read: it is no JSON object"


@pytest.fixture
def shared_file(tmp_path: Path) -> Path:
    """A checkpoint with one file of eleven writers, 10 bytes of each, and one of a writer alone."""
    folder = disk.draft(tmp_path, 1, 0)
    folder.mkdir()
    parts = [
        disk.write_file(
            folder / "rank-0.bin", bytes([rank]) * 10, offset=10 * rank, ends=rank == 10
        )
        for rank in reversed(range(11))
    ]
    alone = disk.write_file(folder / "rank-11.bin", b"alone")
    files = {"rank-11.bin": [alone], "rank-0.bin": parts[::-1]}
    disk.write_manifest(folder, {"step": 1}, files)
    return disk.publish(folder, 0)


def test_ranks_share_the_verification_of_a_file(shared_file: Path) -> None:
    """Each reads the part of the rank that it is, which it reads again at a restore."""
    sizes: list[int] = []
    assert verify(shared_file, count_bytes=sizes.append) is None
    assert sizes == [10] * 11 + [5]
    with open(shared_file / "rank-0.bin", "r+b") as file:
        file.seek(75)
        file.write(b"x")
    problems = [verify(shared_file, rank, 12) for rank in range(12)]
    damage = "rank-0.bin has been damaged: its CRC32 differs"
    assert problems == [damage if rank == 7 else None for rank in range(12)]


@pytest.mark.parametrize("size", [0, 75, 109, 111])
def test_a_shared_file_of_another_size_is_damaged(shared_file: Path, size: int) -> None:
    os.truncate(shared_file / "rank-0.bin", size)
    assert verify(shared_file) == f"rank-0.bin has {size} bytes instead of 110"


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([[10, 1]] * 10, "its 'parts' are not as large as their file"),
        ([[110]], "its 'parts' are damaged"),
        ([110], "its 'parts' are damaged"),
        ([["110", 1]], "its 'parts' are damaged"),
        (None, "its 'parts' are damaged"),
    ],
)
def test_damaged_parts_are_refused(shared_file: Path, parts: Any, problem: str) -> None:
    manifest = json.loads((shared_file / "manifest.json").read_text())
    manifest["files"]["rank-0.bin"]["parts"] = parts
    del manifest["crc32"]
    manifest["crc32"] = checkpoints.manifest_crc(manifest)
    (shared_file / "manifest.json").write_text(json.dumps(manifest))
    assert verify(shared_file) == f"manifest.json can't be read: {problem}"


def test_stray_files_with_names_of_checkpoints_are_damaged(tmp_path: Path) -> None:
    """An older checkpoint is tried then."""
    (tmp_path / "step-6").touch()
    (tmp_path / "step-7").symlink_to("nowhere")
    (tmp_path / "step-8").symlink_to("step-8")
    checkpoint = write_checkpoint(tmp_path, "step-9")
    (checkpoint / "b").unlink()
    (checkpoint / "b").symlink_to("nowhere")
    problems = [find_damage(path, 0, 1) for path in checkpoints.candidates(tmp_path)]
    assert [str(problem).partition(":")[0] for problem in problems] == [
        "b is no file",
        *["manifest.json is no file"] * 3,
    ]
    assert len(checkpoints.verify_all(tmp_path)) == 4


def test_only_a_file_that_a_readable_folder_lacks_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listed file that a look-up denies is not missing, nor one behind an I/O error."""
    checkpoint = write_checkpoint(tmp_path, "step-1")

    def fail(error: OSError) -> None:
        def facts_of(*part: Any) -> FileFacts:
            raise error

        monkeypatch.setattr(checkpoints, "facts_of", facts_of)

    fail(OSError(errno.EIO, "Input/output error"))
    with pytest.raises(OSError, match="a can't be read: Input/output error") as caught:
        find_damage(checkpoint)
    assert caught.value.errno == errno.EIO
    assert verify(checkpoint) == "a can't be read: Input/output error"
    fail(FileNotFoundError(errno.ENOENT, "No such file or directory"))
    with pytest.raises(FileNotFoundError, match="a can't be read: No such file"):
        find_damage(checkpoint)
    (checkpoint / "a").unlink()
    assert find_damage(checkpoint) == "a is missing"
    with pytest.raises(FileNotFoundError):
        find_damage(tmp_path / "step-2")


def test_checkpoints_are_set_aside_and_kept(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "name" / "run").make()
    assert checkpoints.describe_lost(run) == []
    write_checkpoint(run.checkpoints, "step-4")
    (run.checkpoints / "step-5.tmp-0").mkdir()
    run.journal("rank-0", 3).write(raw("checkpoint", step=4))
    (run.logs / "attempt-3").mkdir()
    assert checkpoints.set_aside(run) == run.checkpoints / "aside-0"
    assert find_damage(run.checkpoints / "aside-0" / "step-4") is None
    assert [path.name for path in run.checkpoints.iterdir()] == ["aside-0"]
    assert checkpoints.describe_lost(run) == []
    run.journal("rank-0", 4).write(raw("checkpoint", step=2))
    assert checkpoints.describe_lost(run) == ["step-2: it was saved, and is gone"]
    write_checkpoint(run.checkpoints, "step-2")
    assert checkpoints.set_aside(run) == run.checkpoints / "aside-1"


@pytest.mark.parametrize(("backend", "command"), [("local", "dry-run"), ("slurm", "submit")])
def test_the_command_for_a_fresh_start_is_that_of_the_run(
    tmp_path: Path, backend: str, command: str
) -> None:
    run = RunFolder(tmp_path / "a name" / "run").make()
    assert checkpoints.fresh_command(run) == f"mv '{run.path}' '{run.path}'-old"
    run.lib.mkdir()
    run.job_json.write_text(json.dumps({"backend": backend}))
    assert checkpoints.fresh_command(run) == f"hpc-ddp {command} --run '{run.path}' --fresh"
    assert command in checkpoints.fresh_command(run.task(0))  # what an array has is the array's


def test_health_covers_all_kinds_of_folders(tmp_path: Path) -> None:
    best = {"best": {"step": 9, "value": 1.0}}
    write_checkpoint(tmp_path, "step-10", **best)
    write_checkpoint(tmp_path, "step-9", **best)
    write_checkpoint(tmp_path, "step-2", best={"step": 2})  # the best one at its time
    (tmp_path / "step-9.tmp-0").mkdir()
    (tmp_path / "step-3.bad-0-1").mkdir()
    (tmp_path / "step-3.old-0").mkdir()
    (tmp_path / "step-x").mkdir()
    os.utime(tmp_path / "step-2", (time.time() - 500, time.time() - 500))
    rows = verify_all(tmp_path)
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


def test_bytes_read_are_reported(tmp_path: Path) -> None:
    folder = tmp_path / "step-3"
    folder.mkdir()
    (folder / "a").write_bytes(b"x" * 1000)
    read: list[int] = []
    assert checkpoints.facts_of(folder / "a", read.append).size == 1000
    assert read == [1000]
    assert checkpoints.verify_all(tmp_path)[0].problem == "manifest.json is missing"
