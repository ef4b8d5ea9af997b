from __future__ import annotations

import errno
import os
import random
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_ddp.core import checkpoints
from hpc_ddp.core.checkpoints import FileFacts
from hpc_ddp.training.checkpoint import disk
from hpc_ddp.training.checkpoint.schedule import Retention, prune


def make(folder: Path, step: int, attempt: int = 0, content: bytes = b"x" * 1000) -> Path:
    made = disk.draft(folder, step, attempt)
    made.mkdir(parents=True)
    facts = disk.write_file(made / "state.pt", content)
    disk.write_manifest(made, {"step": step}, {"state.pt": facts})
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_verifies(tmp_path: Path) -> None:
    final = disk.publish(make(tmp_path, 7), attempt=0)
    assert final.name == "step-7"
    assert checkpoints.verify(final) is None
    assert checkpoints.read_manifest(final)["step"] == 7


@given(st.data())
def test_no_flipped_bit_and_no_cut_goes_unseen(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    made = make(tmp_path_factory.mktemp("damage"), 1, content=bytes(range(50)))
    victim = made / data.draw(st.sampled_from(["state.pt", checkpoints.MANIFEST]))
    content = bytearray(victim.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[place:]
    victim.write_bytes(content)
    assert checkpoints.verify(made)


def test_reasons_name_the_file(tmp_path: Path) -> None:
    made = make(tmp_path, 1)
    (made / "state.pt").write_bytes(b"y" * 1000)
    assert checkpoints.verify(made) == "state.pt has been damaged: its CRC32 differs"
    (made / "state.pt").unlink()
    assert checkpoints.verify(made) == "state.pt is missing"
    (made / checkpoints.MANIFEST).unlink()
    assert checkpoints.verify(made) == "manifest.json is missing"


def test_candidates_are_newest_first_and_published_ones_only(tmp_path: Path) -> None:
    others = ["step-5.old-1", "step-9.tmp-0", "step-7.bad-0", "step-x", "else"]
    for name in ["step-5", "step-10", "step-1", *others]:
        (tmp_path / name).mkdir()
    found = [path.name for path in checkpoints.candidates(tmp_path)]
    assert found == ["step-10", "step-5", "step-5.old-1", "step-1"]
    assert checkpoints.candidates(tmp_path / "absent") == []


def test_an_existing_step_is_moved_aside(tmp_path: Path) -> None:
    disk.publish(make(tmp_path, 3), 0)
    disk.publish(make(tmp_path, 3, content=b"later"), 0)
    assert names(tmp_path) == ["step-3", "step-3.old-0"]
    (tmp_path / "step-3" / "state.pt").unlink()
    for _ in range(2):
        disk.publish(make(tmp_path, 3, 1), 1)
        (tmp_path / "step-3" / "state.pt").unlink()
    assert names(tmp_path) == ["step-3", "step-3.bad-1", "step-3.bad-1-1", "step-3.old-0"]


def test_pruning_keeps_the_newest_and_what_is_bad(tmp_path: Path) -> None:
    for name in ["step-1", "step-2", "step-3", "step-10", "step-10.old-0", "step-4.bad-0"]:
        (tmp_path / name).mkdir()
    prune(tmp_path, Retention(2))
    assert names(tmp_path) == ["step-10", "step-3", "step-4.bad-0"]
    disk.remove(tmp_path / "step-1")  # somebody else was faster


def test_the_best_and_one_of_every_n_steps_stay(tmp_path: Path) -> None:
    for step in range(5, 65, 5):
        (tmp_path / f"step-{step}").mkdir()
        prune(tmp_path, Retention(last=2, every=20), pinned=[35])
    left = sorted(map(checkpoints.step_of, tmp_path.iterdir()))
    assert left == [5, 20, 35, 40, 55, 60]


def test_drafts_are_cleared(tmp_path: Path) -> None:
    for name in ["step-1.tmp-0", "step-2.tmp-1", "step-2.tmp-11", "step-1"]:
        (tmp_path / name).mkdir()
    disk.clear_drafts(tmp_path)
    assert names(tmp_path) == ["step-1"]


def test_a_write_error_keeps_its_cause() -> None:
    with pytest.raises(OSError, match="No space left"):
        disk.write_file(Path("/dev/full"), bytes(9))
    with pytest.raises(OSError, match="No space left for 10000000000000"):
        disk.check_space(Path("/tmp"), 10**19, 1)
    disk.check_space(Path("/tmp"), 1, 1)


@pytest.mark.parametrize("size", [0, 1, checkpoints.CHUNK, 2 * checkpoints.CHUNK + 7])
def test_sizes_and_sums_are_those_of_the_file(tmp_path: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    facts = disk.write_file(tmp_path / "f", memoryview(content))
    assert facts == checkpoints.facts_of(tmp_path / "f") == FileFacts(size, zlib.crc32(content))
    assert (tmp_path / "f").read_bytes() == content


def test_health_is_listed_oldest_first(tmp_path: Path) -> None:
    for step in (9, 10, 8):
        disk.publish(make(tmp_path, step), 0)
    (tmp_path / "step-9" / "state.pt").unlink()
    make(tmp_path, 11)
    rows = checkpoints.health(tmp_path)
    assert [(row.name, row.problem) for row in rows] == [
        ("step-8", None),
        ("step-9", "state.pt is missing"),
        ("step-10", None),
    ]
    assert rows[0].bytes == 1000


def test_what_does_not_reach_the_disk_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        disk.write_file(tmp_path / "f", b"x")
    with pytest.raises(OSError, match="Input/output error"):
        disk.sync_folder(tmp_path)


def test_names_are_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's before it is published, and then its new one."""
    synced: list[str] = []

    def sync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "fsync", sync)
    disk.publish(make(tmp_path, 3), 0)
    assert synced == ["state.pt", "manifest.json", "step-3.tmp-0", tmp_path.name]


def test_a_manifest_is_the_same_in_any_order() -> None:
    one = checkpoints.manifest_crc({"step": 1, "files": {}})
    assert one == checkpoints.manifest_crc({"files": {}, "step": 1})
