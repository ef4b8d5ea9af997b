from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_ddp.run import checkpoints
from hpc_ddp.training import storage


def make(folder: Path, step: int, attempt: int = 0, content: bytes = b"x" * 1000) -> Path:
    made = storage.draft(folder, step, attempt)
    made.mkdir(parents=True)
    facts = storage.write_file(made / "state.pt", lambda file: file.write(content))
    storage.write_manifest(made, {"step": step}, {"state.pt": facts})
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_verifies(tmp_path: Path) -> None:
    final = storage.publish(make(tmp_path, 7), attempt=0)
    assert final.name == "step-7"
    assert storage.verify(final) is None
    assert storage.read_manifest(final)["step"] == 7


@given(st.data())
def test_no_flipped_bit_and_no_cut_goes_unseen(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    made = make(tmp_path_factory.mktemp("damage"), 1, content=bytes(range(50)))
    victim = made / data.draw(st.sampled_from(["state.pt", storage.MANIFEST]))
    content = bytearray(victim.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[place:]
    victim.write_bytes(content)
    assert storage.verify(made)


def test_reasons_name_the_file(tmp_path: Path) -> None:
    made = make(tmp_path, 1)
    (made / "state.pt").write_bytes(b"y" * 1000)
    assert storage.verify(made) == "state.pt has been damaged: its CRC32 differs"
    (made / "state.pt").unlink()
    assert storage.verify(made) == "state.pt is missing"
    (made / storage.MANIFEST).unlink()
    assert storage.verify(made) == "manifest.json is missing"


def test_candidates_are_newest_first_and_published_ones_only(tmp_path: Path) -> None:
    others = ["step-5.old-1", "step-9.tmp-0", "step-7.bad-0", "step-x", "else"]
    for name in ["step-5", "step-10", "step-1", *others]:
        (tmp_path / name).mkdir()
    found = [path.name for path in storage.candidates(tmp_path)]
    assert found == ["step-10", "step-5", "step-5.old-1", "step-1"]
    assert storage.candidates(tmp_path / "absent") == []


def test_an_existing_step_is_moved_aside(tmp_path: Path) -> None:
    storage.publish(make(tmp_path, 3), 0)
    storage.publish(make(tmp_path, 3, content=b"later"), 0)
    assert names(tmp_path) == ["step-3", "step-3.old-0"]
    (tmp_path / "step-3" / "state.pt").unlink()
    for _ in range(2):
        storage.publish(make(tmp_path, 3, 1), 1)
        (tmp_path / "step-3" / "state.pt").unlink()
    assert names(tmp_path) == ["step-3", "step-3.bad-1", "step-3.bad-1-1", "step-3.old-0"]


def test_pruning_keeps_the_newest_and_what_is_bad(tmp_path: Path) -> None:
    for name in ["step-1", "step-2", "step-3", "step-10", "step-10.old-0", "step-4.bad-0"]:
        (tmp_path / name).mkdir()
    storage.prune(tmp_path, keep=2)
    assert names(tmp_path) == ["step-10", "step-3", "step-4.bad-0"]
    storage.remove(tmp_path / "step-1")  # somebody else was faster


def test_drafts_of_earlier_attempts_are_cleared(tmp_path: Path) -> None:
    for name in ["step-1.tmp-0", "step-2.tmp-1", "step-2.tmp-11", "step-1"]:
        (tmp_path / name).mkdir()
    storage.clear_drafts(tmp_path, attempt=1)
    assert names(tmp_path) == ["step-1", "step-2.tmp-1"]


def test_a_write_error_keeps_its_cause() -> None:
    with pytest.raises(OSError, match="No space left"):
        storage.write_file(Path("/dev/full"), lambda file: torch.save(torch.zeros(9), file))


def test_sizes_and_sums_are_those_of_the_file(tmp_path: Path) -> None:
    value: dict[str, Any] = {"a": torch.arange(1000), "b": [1, "x"]}
    facts = storage.write_file(tmp_path / "f", lambda file: torch.save(value, file))
    assert facts == storage._facts_of(tmp_path / "f")
    assert torch.equal(torch.load(tmp_path / "f", weights_only=True)["a"], value["a"])
