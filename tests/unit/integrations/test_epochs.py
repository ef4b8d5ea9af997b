"""What a loop over epochs hears of those that are done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
)

from hpc_ddp.core.errors import UsageError
from hpc_ddp.integrations.epochs import EpochStop, drop_iterator, find_generators_of_loader
from hpc_ddp.integrations.fabric import Stop


def test_a_loop_that_begins_before_its_checkpoint_is_warned_once() -> None:
    stop: EpochStop = object.__new__(Stop)  # without the handlers of signals
    printed: list[str] = []
    values = {
        "_own_facts": {"epoch": 2, "batches": 3},
        "_has_warned": False,
        "_say": printed.append,
    }
    vars(stop).update(values, _info=SimpleNamespace(world_size=1))
    assert [stop._begin_epoch(epoch) for epoch in range(4)] == [None, None, 3, 0]
    (warning,) = printed
    assert "epoch 0 is done" in warning
    assert "range(stop.position.epoch, …)" in warning


def test_a_save_before_load_is_refused() -> None:
    stop = object.__new__(Stop)
    vars(stop).update(_objects=None, _fabric=cast(Any, SimpleNamespace()))
    with pytest.raises(UsageError, match=r"stop\.save was called before stop\.load"):
        stop.save()


def make_stop(**facts: Any) -> EpochStop:
    """Make one that has loaded the run's checkpoint, with these facts of its own, on two ranks."""
    stop: EpochStop = object.__new__(Stop)  # without the handlers of signals
    vars(stop).update(facts={}, _own_facts=facts, _ended=None)
    vars(stop).update(_has_warned=False, _is_within=False, _is_restored=True)
    vars(stop).update(_info=SimpleNamespace(world_size=2), _say=lambda text: None)
    return stop


def test_a_second_loader_of_an_epoch_is_refused() -> None:
    stop = make_stop(epoch=0, batches=0)
    second = pytest.raises(UsageError, match=r"called within another stop\.batches")
    with stop._loop_over_batches(0), second, stop._loop_over_batches(1):
        pass
    stop._begin_epoch(0)
    stop._end_epoch()
    with pytest.raises(UsageError, match="called again for epoch 0"), stop._loop_over_batches(0):
        pass
    with stop._loop_over_batches(1):
        pass


def test_batches_before_load_are_refused() -> None:
    stop = make_stop(epoch=0, batches=0)
    stop._is_restored = False
    with pytest.raises(UsageError, match=r"before stop\.load"), stop._loop_over_batches(0):
        pass


def test_an_epoch_of_another_number_of_ranks_begins_anew() -> None:
    stop, printed = make_stop(epoch=1, batches=3, ranks=4), list[str]()
    vars(stop)["_say"] = printed.append
    assert stop.batches_done == 0
    assert stop._begin_epoch(1) == 0
    assert "4 ranks have begun epoch 1, and there are 2 now" in printed[0]
    assert make_stop(epoch=1, batches=3, ranks=2)._begin_epoch(1) == 3
    # Of an epoch before it, which is done, nothing begins anew; nor of one behind it.
    for number, warnings in ((0, 1), (2, 0)):
        stop, printed = make_stop(epoch=1, batches=3, ranks=4), list[str]()
        vars(stop)["_say"] = printed.append
        assert not stop._begin_epoch(number)
        assert len(printed) == warnings
        assert not any("ranks have begun" in text for text in printed)


def test_each_epoch_has_an_iterator_of_its_own() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)), persistent_workers=False)
    wrapped = SimpleNamespace(_dataloader=loader)
    loader._iterator = iter(loader)
    drop_iterator(wrapped)
    assert loader._iterator is None


def test_the_generators_of_a_loader_are_the_scripts() -> None:
    generator, data = torch.Generator(), TensorDataset(torch.arange(4))
    sampler = RandomSampler(data, generator=generator)
    loaders: list[DataLoader[Any]] = [
        DataLoader(data, shuffle=True, generator=generator),
        DataLoader(data, sampler=sampler),
        DataLoader(data, batch_sampler=BatchSampler(sampler, 2, drop_last=False)),
    ]
    for loader in loaders:
        assert find_generators_of_loader(loader) == [generator]
    second = torch.Generator()
    assert find_generators_of_loader(DataLoader(data, sampler=sampler, generator=second)) == [
        second,
        generator,
    ]
    assert find_generators_of_loader(DataLoader(data)) == []


def test_the_generator_of_a_sampler_that_fabric_wraps_is_the_scripts() -> None:
    """As it does on several ranks: its own sampler has one of indices as its data set."""
    generator, data = torch.Generator(), TensorDataset(torch.arange(4))
    sampler = RandomSampler(data, generator=generator)
    indices = TensorDataset(torch.arange(4))
    vars(indices)["_sampler"] = sampler
    wrapper: DistributedSampler[Any] = DistributedSampler(indices, num_replicas=2, rank=0)
    assert find_generators_of_loader(DataLoader(data, sampler=wrapper)) == [generator]


def test_the_generator_of_a_sampler_may_have_any_name() -> None:
    generator, data = torch.Generator(), TensorDataset(torch.arange(4))
    sampler = RandomSampler(data)
    vars(sampler)["numbers"] = generator
    assert find_generators_of_loader(DataLoader(data, sampler=sampler)) == [generator]


def test_indices_may_be_an_array() -> None:
    indices: Any = torch.arange(4).numpy()
    assert (
        find_generators_of_loader(DataLoader(TensorDataset(torch.arange(4)), sampler=indices)) == []
    )


def test_the_facts_of_the_script_outlast_an_epoch() -> None:
    """Also those with a name that the class itself uses."""
    stop = make_stop(epoch=0, batches=3)
    stop.facts |= {"best": 0.5, "epoch": "the best one"}
    assert stop.batches_done == 3
    stop._begin_epoch(0)
    stop._end_epoch()
    stop._begin_epoch(1)
    assert stop.facts == {"best": 0.5, "epoch": "the best one"}
    assert stop.batches_done == 0


def test_a_save_outside_of_the_batches_is_refused() -> None:
    """It would resume at the first batch of the first epoch, with trained weights."""
    stop: Any = make_stop(epoch=0, batches=0)
    vars(stop).update(_objects={})
    with pytest.raises(UsageError, match=r"outside of a loop over stop\.batches"):
        stop.save()


def test_what_no_checkpoint_of_fabric_can_hold_is_refused() -> None:
    stop = object.__new__(Stop)
    with pytest.raises(UsageError, match=r"stop\.load\(optimizers=…\) is a list"):
        stop.load(optimizers=[torch.optim.SGD([torch.ones(1)])])
    with pytest.raises(UsageError, match=r"stop\.load\(data=…\) is a data loader"):
        stop.load(data=SimpleNamespace(_dataloader=DataLoader(TensorDataset(torch.arange(4)))))
