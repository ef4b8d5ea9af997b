"""Generators of a data set's own are seeded, or a warning names them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from hpc_ddp.training.data import sample_seeds
from hpc_ddp.training.data.batch_plan import BatchPlan, Position
from unit.training.data.fakes import make_loader


class Noise:
    """As MONAI has it: a transform with a generator, which can be seeded."""

    def __init__(self) -> None:
        self.R = numpy.random.RandomState(4)

    def set_random_state(self, seed: int | None = None, state: Any = None) -> Noise:
        self.R = numpy.random.RandomState(seed)
        return self

    def draw(self) -> float:
        return float(self.R.random_sample())


class Flips:
    """As albumentations has it: two transforms that draw from one pair of generators."""

    def __init__(self) -> None:
        self.set_random_state(numpy.random.default_rng(4), random.Random(4))

    def set_random_seed(self, seed: int) -> None:
        raise AssertionError("each transform would draw the same numbers")

    def set_random_state(
        self, random_generator: numpy.random.Generator, py_random: random.Random
    ) -> None:
        self.random_generator, self.py_random = random_generator, py_random

    def draw(self) -> float:
        return float(self.random_generator.random()) + self.py_random.random()


class Plain:
    def __init__(self) -> None:
        self.generators: dict[str, Any] = {"a": random.Random(2), "b": numpy.random.default_rng(2)}

    def draw(self) -> float:
        return float(self.generators["b"].random())


class Unseeded(Plain):
    def set_random_state(self, state: Any) -> None:
        raise AssertionError


class Mapped(Dataset[float]):
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)
        self.more: Any = [self.transforms, None, torch.ones(2), self]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return sum(float(transform.draw()) for transform in self.transforms)


class Stream(Mapped, IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        return (self[0] for _ in range(4))


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(sample_seeds, "say", lines.append)
    return lines


@pytest.mark.parametrize("kind", [Mapped, Stream])
@pytest.mark.parametrize(("workers", "make"), [(0, Noise), (1, Noise), (0, Flips)])
def test_transforms_that_can_be_seeded_are(
    kind: Any, workers: int, make: Any, printed: list[str]
) -> None:
    dataset = kind(make())
    plan = BatchPlan(2, 0, 1)
    loader = make_loader(dataset, plan, warn=printed.append, num_workers=workers)
    whole = torch.cat(list(loader))
    assert len(set(whole.tolist())) == 4
    loader._position.samples = 2
    assert torch.equal(torch.cat(list(loader)), whole[2:])
    loader._position.begin_epoch()
    later = torch.cat(list(loader))
    assert not torch.equal(later, whole)
    other = make_loader(dataset, plan, position=replace(loader._position), num_workers=workers)
    dataset.transforms[0] = make()  # by the loop
    assert torch.equal(torch.cat(list(other)), later)
    assert printed == []


@pytest.mark.parametrize("kind", [Mapped, Stream])
def test_a_generator_that_changes_is_named_once(kind: Any, printed: list[str]) -> None:
    dataset = kind(Noise(), Unseeded())
    loader = make_loader(dataset, BatchPlan(2, 0, 1), warn=printed.append)
    for _ in range(2):
        list(loader)
        loader._position.begin_epoch()
    list(make_loader(dataset, BatchPlan(2, 0, 1)))  # another rank's
    assert len(printed) == 1
    assert "from a generator of its own, dataset.transforms[1].generators['b']:" in printed[0]


class Counting(Stream):
    passes = 0

    def __iter__(self) -> Iterator[float]:
        self.passes += 1
        return iter([0.0] * 4)


class Opening(Stream):
    passes = False

    def __iter__(self) -> Iterator[float]:
        self.passes = True
        return iter([0.0] * 4)


class CountingSamples(Stream):
    def __iter__(self) -> Iterator[float]:
        self.passes = 0
        for _ in range(4):
            self.passes += 1
            yield 0.0


class WithEpoch(Counting):
    def set_epoch(self, epoch: int) -> None:
        self.passes = epoch


def test_a_stream_that_counts_its_epochs_is_missed(printed: list[str]) -> None:
    for kind in (Counting, WithEpoch, Stream, CountingSamples, Opening):
        dataset: Any = kind()
        dataset.passes = False if kind is Opening else 0
        list(make_loader(dataset, BatchPlan(2, 0, 1), warn=printed.append))
    assert len(printed) == 1
    assert "the stream counts its epochs in its attribute passes" in printed[0]


def test_persistent_workers_miss_what_the_loop_sets() -> None:
    for persistent in (True, False):
        lines: list[str] = []
        dataset: Any = Mapped(Noise())
        loader = make_loader(
            dataset, warn=lines.append, num_workers=1, persistent_workers=persistent
        )
        for level in range(3):
            dataset.level = level
            list(loader)
            loader._position.begin_epoch()
        assert len(lines) == persistent


class PerIndex(Mapped):
    def __init__(self) -> None:
        self.generator, self.missing = random.Random(), float("nan")

    def __getitem__(self, index: int) -> float:
        self.generator.seed(index)
        return self.generator.random() + random.random()


def test_a_generator_that_is_seeded_for_each_sample_is_right(printed: list[str]) -> None:
    state = random.getstate()
    list(make_loader(PerIndex(), BatchPlan(2, 0, 1), warn=printed.append))
    assert printed == []
    assert random.getstate() == state


class Masks:
    """A collate_fn with a generator of its own, as Transformers' for masked language models."""

    def __init__(self) -> None:
        self.generator: random.Random | None = None
        self.noise = Noise()

    def __call__(self, samples: list[Any]) -> list[Any]:
        self.generator = self.generator or random.Random(42)
        return [(sample, self.generator.random(), self.noise.draw()) for sample in samples]


def test_a_collate_fn_is_looked_through_too(printed: list[str]) -> None:
    """Its transforms are seeded for each batch. Its generator is the rank's, which may track it,
    and no more numbers are drawn from it than the script draws."""
    draws = []
    for done in (0, 2):
        position, masks = Position(samples=done), Masks()
        options: dict[str, Any] = {"collate_fn": masks, "warn": printed.append}
        loader = make_loader(Mapped(), BatchPlan(2, 0, 1), position=position, **options)
        draws.append([[draw for _, _, draw in batch] for batch in loader])
        alone = random.Random(42)
        for _ in range(sum(map(len, draws[-1]))):
            alone.random()
        assert masks.generator is not None
        assert masks.generator.getstate() == alone.getstate()
    assert draws[1] == draws[0][1:]
    assert printed == []


def test_a_generator_of_a_collate_fn_in_a_worker_is_warned_of(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Each worker has a copy, whose state no checkpoint has."""
    list(make_loader(Mapped(), collate_fn=Masks(), num_workers=1, warn=lambda text: None))
    place = "collate_fn draws from a generator of its own, collate_fn.generator"
    assert place in capfd.readouterr().err


class Collating(Mapped):
    """A data set that each sample draws from a generator of, which it seeds, and with its own
    ``collate_fn``, a method."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(0)

    def __getitem__(self, index: int) -> Any:
        self.generator.seed(index)
        return self.generator.random()

    def collate(self, samples: list[Any]) -> list[Any]:
        return samples


def test_a_generator_that_each_sample_seeds_is_in_no_collate_fn(
    capfd: pytest.CaptureFixture[str],
) -> None:
    data = Collating()
    list(make_loader(data, collate_fn=data.collate, num_workers=1, warn=lambda text: None))
    assert "WARNING" not in capfd.readouterr().err


class Split(Mapped):
    """A data set whose split comes of its seed, and whose transforms hide in functions."""

    def __init__(self, hidden: Any) -> None:
        self.samples = [(str(number), number) for number in range(3000)]
        self.hidden = hidden

    def set_random_state(self, seed: int) -> None:
        raise AssertionError


def test_transforms_are_found_behind_a_list_and_in_functions() -> None:
    noise, flips = Noise(), Flips()

    def draw() -> float:
        return noise.draw() + empty  # type: ignore[has-type, no-any-return]

    for hidden in (noise, draw, noise.draw, partial(noise.draw), {"a": (flips,)}):
        transforms, generators = sample_seeds.find_transforms_and_generators(Split(hidden))
        assert (len(transforms), generators) == (1, {})
    if noise.R is None:
        empty = 0.0  # a cell without content


def test_transforms_have_seeds_of_their_own_unless_they_were_made_equal() -> None:
    """Of a pair one turns the image, and the other one its mask."""
    dataset = Mapped(Noise(), Noise().set_random_state(5), Noise().set_random_state(5), Lone())
    seeds = sample_seeds.SampleSeeds(dataset)
    for epoch in range(2):
        seeds.fetch(epoch, lambda: None)
        seeds.seed(3)
        first, *pair, _ = (transform.draw() for transform in dataset.transforms)
        assert first != pair[0] == pair[1]
        dataset.transforms[2].draw()


class Lone:
    def set_random_state(self, seed: int) -> None:
        self.seed = seed

    def draw(self) -> float:
        return 0.0


class Lazy(Mapped):
    def __getitem__(self, index: int) -> float:
        if not self.transforms:
            self.transforms.append(Noise())
        return super().__getitem__(index)


def test_transforms_that_the_first_sample_makes_are_seeded() -> None:
    whole = torch.cat(list(make_loader(Lazy(), BatchPlan(2, 0, 1))))
    for done in (0, 2):
        position = Position(samples=done)
        rest = torch.cat(list(make_loader(Lazy(), BatchPlan(2, 0, 1), position=position)))
        assert torch.equal(rest, whole[done:])


def test_a_data_set_is_looked_through_in_part() -> None:
    many: Any = Mapped()
    many.more = [[0.5, object()] for _ in range(10**6)] + [Noise()]
    many.deep = [[[[object() for _ in range(60)] for _ in range(60)]], [[[[[[Noise()]]]]]]]
    assert sample_seeds.find_transforms_and_generators(many) == ({}, {})
