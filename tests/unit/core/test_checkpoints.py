"""Checkpoints are verified, listed and set aside."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_ddp.core import checkpoints
from hpc_ddp.training.checkpoint import disk
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
    made = write_draft(tmp_path_factory.mktemp("damage"), 1, content=bytes(range(50)))
    victim = made / data.draw(st.sampled_from(["state.pt", checkpoints.MANIFEST]))
    content = bytearray(victim.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[place:]
    victim.write_bytes(content)
    assert checkpoints.verify(made)


def test_a_failed_verification_names_the_file(tmp_path: Path) -> None:
    made = write_draft(tmp_path, 1)
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


def test_health_is_listed_oldest_first(tmp_path: Path) -> None:
    for step in (9, 10, 8):
        disk.publish(write_draft(tmp_path, step), 0)
    (tmp_path / "step-9" / "state.pt").unlink()
    write_draft(tmp_path, 11)
    rows = checkpoints.health(tmp_path)
    assert [(row.name, row.problem) for row in rows] == [
        ("step-8", None),
        ("step-9", "state.pt is missing"),
        ("step-10", None),
    ]
    assert rows[0].bytes == 1000


def test_the_checksum_of_a_manifest_does_not_depend_on_its_order() -> None:
    one = checkpoints.manifest_crc({"step": 1, "files": {}})
    assert one == checkpoints.manifest_crc({"files": {}, "step": 1})
