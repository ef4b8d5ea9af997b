"""A script that loads its data by itself is warned when a resume repeats some of them."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from hpc_ddp.training.data.order import Position
from hpc_ddp.training.data.own_data import OwnData, is_own_loader_open
from unit.training.data.fakes import EndlessStream, NoisyNumbers, make_loader


def test_an_open_dataloader_of_the_script_is_seen() -> None:
    ours = [iter(make_loader()), iter(make_loader(EndlessStream()))]
    for iterator in ours:
        next(iterator)
    theirs = iter(DataLoader(NoisyNumbers(), 4))
    assert is_own_loader_open()
    del theirs
    assert not is_own_loader_open()


@pytest.mark.parametrize("is_likely", [False, True])
def test_it_warns_once_at_the_first_step(is_likely: bool) -> None:
    said: list[str] = []
    own = OwnData(is_likely, said.append)
    kept = iter(DataLoader(NoisyNumbers(), 4))
    own.warn_of_epoch(Position(step=3, epoch=1))  # the iteration goes over epochs
    own.warn_of_step()
    own.warn_of_step()
    assert [text.partition(":")[0] for text in said] == ["WARNING"] * is_likely
    del kept


def test_a_loader_that_is_opened_in_a_new_epoch_repeats_nothing() -> None:
    said: list[str] = []
    own = OwnData(True, said.append)
    own.warn_of_epoch(Position(step=8, epoch=2))
    kept = iter(DataLoader(NoisyNumbers(), 4))
    own.warn_of_step()
    assert not said
    del kept


def test_a_loader_that_is_opened_later_is_an_evaluations() -> None:
    said: list[str] = []
    own = OwnData(True, said.append)
    own.warn_of_step()
    kept = iter(DataLoader(NoisyNumbers(), 4))
    own.warn_of_step()
    assert not said
    del kept


def test_an_epoch_that_was_partly_done_begins_again() -> None:
    said: list[str] = []
    own = OwnData(True, said.append)
    for _ in range(2):
        own.warn_of_epoch(Position(step=7, epoch=1, epoch_steps=3))
        own.warn_of_step()
    (text,) = said
    assert "from epoch 1, after 3 of its steps" in text
    assert "run.loader(dataset, batch_size)" in text
