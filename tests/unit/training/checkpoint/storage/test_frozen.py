"""Weights that are not trained are written once; see tests/ddp/test_checkpoints.py for ranks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hpc_ddp.core import checkpoints
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.training.checkpoint.manager import CheckpointManager
from hpc_ddp.training.checkpoint.storage import frozen
from hpc_ddp.training.checkpoint.storage.frozen import hash_of
from hpc_ddp.training.checkpoint.storage.retention import Retention
from hpc_ddp.training.data.batch_plan import Position
from unit.training.checkpoint.fakes import Make, break_publishing, events_named, make_manager

FILE = "frozen-0.bin"


class Training:
    """A frozen model below a trained one, and the saves of its run."""

    def __init__(self, make: Make) -> None:
        self.base, self.head = nn.Linear(600, 600), nn.Linear(600, 2)  # 1.4 MB, 5 kB
        self.base.requires_grad_(False)
        self.position = Position()
        self.saver = make(keep=Retention(3))
        self.manager: CheckpointManager = make_manager(self.saver, self.position)
        self.manager.track({"model": nn.Sequential(self.base, self.head)}, {})

    def save(self) -> bool:
        self.position.step += 1
        with torch.no_grad():
            self.head.weight += 1
        self.manager.save()
        is_saved = self.manager.settle()
        self.saver.tidy()
        return is_saved


def inodes(run: RunFolder) -> list[int]:
    """Return the inodes of the frozen weights' files, oldest first; 0 where there is none."""
    paths = [folder / FILE for folder in checkpoints.published(run.checkpoints)[::-1]]
    return [path.stat().st_ino if path.exists() else 0 for path in paths]


def test_frozen_weights_are_written_once(run: RunFolder, make: Make) -> None:
    training = Training(make)
    assert [training.save() for _ in range(5)] == [True] * 5
    assert len(set(inodes(run))) == 1
    newest, *_ = folders = checkpoints.published(run.checkpoints)
    assert [folder.name for folder in folders] == ["step-5", "step-4", "step-3"]
    assert [checkpoints.verify(folder) for folder in folders] == [None] * 3
    assert (newest / FILE).stat().st_nlink == 3
    assert (newest / "rank-0.bin").stat().st_size < 30_000
    assert events_named(run, "checkpoint")[-1]["bytes"] > 600 * 600 * 4

    expected = [training.base.weight.clone(), training.head.weight.clone()]
    for folder in folders[1:]:  # each is complete by itself
        shutil.rmtree(folder)
    again = Training(make)
    assert (again.position.step, again.manager.resumed) == (5, True)
    assert torch.equal(again.base.weight, expected[0])
    assert torch.equal(again.head.weight, expected[1])


def test_large_buffers_are_written_once(run: RunFolder, make: Make) -> None:
    """As of a model whose weights of few bits are buffers, or a mask; running means change."""
    training = Training(make)
    del training.base.weight
    training.base.register_buffer("weight", torch.randint(9, (600, 600)))
    training.base.register_buffer("means", torch.zeros(60_000))
    training.manager = make_manager(training.saver, training.position)
    objects = {"model": nn.Sequential(training.base, training.head)}
    training.manager.track(objects, {})
    expected = training.base.weight.clone()
    for _ in range(4):
        assert training.save()
        training.base.get_buffer("means").add_(1.0)
    assert len(set(inodes(run))) == 1
    folder = checkpoints.published(run.checkpoints)[0]
    assert (folder / "rank-0.bin").stat().st_size < 60_000 * 4 + 30_000
    training.base.weight.zero_()
    manager = make_manager(training.saver, Position())
    manager.track(objects, {})
    assert torch.equal(training.base.weight, expected)
    assert training.base.get_buffer("means").eq(3).all()


@pytest.mark.parametrize("by", ["in place", "behind autograd", "another tensor", "two rows"])
def test_frozen_weights_that_change_are_written_anew(run: RunFolder, make: Make, by: str) -> None:
    training = Training(make)
    assert training.save()
    weight = training.base.weight
    if by == "in place":
        with torch.no_grad():
            weight[-1, -1].add_(1e-3)
    elif by == "behind autograd":
        weight.data[0].mul_(1.5)
    elif by == "another tensor":
        training.base.weight = nn.Parameter(weight + 1, requires_grad=False)
    else:
        weight.data[[0, 1]] = weight.data[[1, 0]]
    expected = training.base.weight.clone()
    assert [training.save(), training.save()] == [True, True]
    assert inodes(run)[1:] == [0, 0]  # few others are frozen; see the next test
    assert torch.equal(Training(make).base.weight, expected)


def test_weights_that_the_script_averages_are_no_frozen_ones(run: RunFolder, make: Make) -> None:
    training = Training(make)
    average = nn.Linear(600, 600).requires_grad_(False)
    training.saver = make(keep=Retention(4))
    training.manager = make_manager(training.saver, training.position)
    objects = {"model": nn.Sequential(training.base, training.head), "average": average}
    training.manager.track(objects, {})
    for _ in range(4):
        assert training.save()
        average.weight.data.mul_(0.5)
    first, *others = inodes(run)
    assert (first in others, len(set(others))) == (False, 1)
    folders = checkpoints.published(run.checkpoints)[::-1]
    assert [(folder / FILE).stat().st_size // 1_400_000 for folder in folders] == [2, 1, 1, 1]


def test_weights_that_are_trained_from_now_on(run: RunFolder, make: Make) -> None:
    training = Training(make)
    assert training.save()
    training.base.requires_grad_(True)
    assert [training.save(), training.save()] == [True, True]
    assert inodes(run)[1:] == [0, 0]
    assert torch.equal(Training(make).base.weight, training.base.weight)


def test_few_frozen_weights_stay_with_the_others(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "LEAST_BYTES", 600 * 600 * 4 + 600 * 4 + 1)
    assert Training(make).save()
    assert inodes(run) == [0]


def test_a_file_system_without_links(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    training = Training(make)
    monkeypatch.setattr(os, "link", refuse)
    assert [training.save() for _ in range(3)] == [True] * 3
    assert [bool(number) for number in inodes(run)] == [True, False, False]
    assert not [path.name for path in run.checkpoints.iterdir() if path.name.startswith(".")]
    assert torch.equal(Training(make).base.weight, training.base.weight)


def test_a_checkpoint_that_is_gone_costs_one_save(run: RunFolder, make: Make) -> None:
    training = Training(make)
    assert training.save()
    shutil.rmtree(run.checkpoints / "step-1")
    assert [training.save(), training.save(), training.save()] == [False, True, True]
    assert [path.name for path in checkpoints.published(run.checkpoints)] == ["step-4", "step-3"]
    assert len(set(inodes(run))) == 1


def test_a_save_that_fails_leaves_nothing_to_link_to(run: RunFolder, make: Make) -> None:
    training = Training(make)
    break_publishing(training.saver, OSError(5, "Input/output error"))
    assert not training.save()
    break_publishing(training.saver, None)
    assert [training.save(), training.save()] == [True, True]
    assert len(set(inodes(run))) == 1


def test_a_linked_file_is_as_young_as_its_checkpoint(run: RunFolder, make: Make) -> None:
    """A purge of old files would otherwise take it from the newest checkpoint."""
    training = Training(make)
    assert training.save()
    os.utime(run.checkpoints / "step-1" / FILE, (1e9, 1e9))
    assert training.save()
    facts = (run.checkpoints / "step-2" / FILE).stat()
    assert min(facts.st_mtime, facts.st_atime) > 1.7e9


BYTES = st.binary(min_size=1, max_size=40)


@given(BYTES, BYTES)
def test_other_bytes_have_another_hash(first: bytes, second: bytes) -> None:
    if len(first) != len(second):
        second = second.ljust(len(first), b"\0")[: len(first)]
    hashes = {
        int(hash_of(torch.frombuffer(bytearray(x), dtype=torch.uint8))) for x in (first, second)
    }
    assert len(hashes) == len({first, second})


def test_a_conjugate_view_has_the_hash_of_its_numbers() -> None:
    values = torch.randn(7, dtype=torch.complex64)
    assert int(hash_of(values.conj())) == int(hash_of(values.conj().resolve_conj().clone()))


@pytest.mark.parametrize("size", [(1 << 17) + 5, 1 << 18])
def test_the_hash_of_a_large_tensor_depends_on_the_order(size: int) -> None:
    """Values whose differences have many zeros at the end, in words that lie chunks apart."""
    values = torch.ones(2 * size)
    before = int(hash_of(values))
    hashes = {before}
    for place in (1, 255, 257, (1 << 17) - 1, 1 << 17, size - 1, 2 * size - 1):
        values[place] = 2.0
        hashes.add(int(hash_of(values)))
        values[place] = 1.0
    assert len(hashes) == 8
    assert int(hash_of(values)) == before
    assert int(hash_of(values.view(2, -1).t())) == int(hash_of(values.view(2, -1).t().clone()))
