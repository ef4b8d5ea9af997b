"""A script that loads its data by itself is warned when a resume repeats some of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from hpc_ddp.training.data.batch_plan import Position
from hpc_ddp.training.data.own_data import OwnData, StatefulLoaders, is_own_loader_open
from hpc_ddp.training.process.rank_messages import LoneControl
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


def test_the_first_iteration_of_a_tracked_loader_is_seen_once() -> None:
    calls: list[int] = []
    sampler = SequentialSampler(range(3))
    loaders = {"a": DataLoader(NoisyNumbers(), 4), "b": sampler, "c": object()}
    own = StatefulLoaders(loaders, is_resumed=True)
    own.on_first_batch = lambda: calls.append(1)
    for _ in range(2):
        assert len(list(loaders["a"])) == len(loaders["a"])  # type: ignore[call-overload, arg-type]
        assert list(sampler) == [0, 1, 2]
    assert calls == [1]
    assert type(loaders["a"]) is DataLoader
    assert type(sampler) is SequentialSampler
    assert not own.clear()


def test_a_loader_that_was_asked_before_the_loop_is_not_watched() -> None:
    loader = DataLoader(NoisyNumbers(), 4)
    own = StatefulLoaders({"loader": loader}, is_resumed=True)
    assert own.is_watched
    iter(loader)
    assert not own.is_watched
    assert not StatefulLoaders({"loader": loader}).is_watched
    assert not StatefulLoaders({"model": object()}, is_resumed=True).is_watched


def test_a_loop_without_a_batch_drops_what_the_first_one_would_do() -> None:
    own = StatefulLoaders({"loader": DataLoader(NoisyNumbers(), 4)}, is_resumed=True)
    own.on_first_batch = lambda: None
    assert own.clear()
    assert not own.clear()


class Sized(IterableDataset[int]):
    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        yield from range(4)


class Ranks(LoneControl):
    """Two ranks, of which the other one has an epoch of `length` batches."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def to_first(self, message: Any) -> list[Any]:
        return [message, self._length]


def test_the_batches_that_are_left_are_counted_where_ranks_have_as_many() -> None:
    """They save and stop together; a script may have a validation set beside, too."""
    position = Position(epoch_steps=3)
    loader: DataLoader[Any] = DataLoader(range(4))  # type: ignore[arg-type]
    assert StatefulLoaders({"a": loader}, position, Ranks(4)).has_left(1)
    assert not StatefulLoaders({"a": loader}, position, Ranks(5)).has_left(1)
    two = {"a": loader, "b": DataLoader(range(4))}  # type: ignore[arg-type]
    assert not StatefulLoaders(two, position, LoneControl()).has_left(1)
    assert not StatefulLoaders({"a": loader}, position).has_left(1)


def test_the_batches_that_are_left_are_counted_where_they_can_be() -> None:
    position = Position(epoch_steps=3)
    endless = BatchSampler(SequentialSampler(range(4)), 1, drop_last=False)
    endless.__class__ = type("Endless", (BatchSampler,), {"__len__": None})
    for loader, is_last in [
        (DataLoader(range(4)), True),  # type: ignore[arg-type]
        (DataLoader(range(5)), False),  # type: ignore[arg-type]
        (DataLoader(Sized()), False),
        (DataLoader(range(4), batch_sampler=endless), False),  # type: ignore[arg-type]
    ]:
        own = StatefulLoaders({"loader": loader}, position, LoneControl())
        assert own.has_left(1) is is_last
        assert not own.has_left(0)


@pytest.mark.filterwarnings("ignore:'set_vital'")  # which torchdata calls
@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_that_an_epoch_leaves_is_warned_of(
    workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resume between two epochs would yield its rest; what the script keeps goes on rightly."""
    loader = StatefulDataLoader(NoisyNumbers(), 4, num_workers=workers)
    own = StatefulLoaders({"loader": loader}, Position(), LoneControl())
    own.clear()  # before a batch
    list(loader)
    own.clear()
    kept = iter(loader)
    next(kept)
    own.clear()
    assert not capsys.readouterr().err
    del kept
    for _ in range(2):
        for _ in enumerate(loader):
            break
        own.clear()
    (line,) = capsys.readouterr().err.splitlines()
    assert "an epoch has ended amid a pass of loader" in line


def test_a_plain_loader_has_no_pass_to_go_on_with(capsys: pytest.CaptureFixture[str]) -> None:
    loader = DataLoader(NoisyNumbers(), 4, num_workers=1, persistent_workers=True)
    own = StatefulLoaders({"loader": loader}, Position(), LoneControl())
    for _ in loader:
        break
    own.clear()
    assert not capsys.readouterr().err
