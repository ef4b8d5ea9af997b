"""The generators of a rank, and those of its script."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hpc_ddp.training.models import rng
from hpc_ddp.training.models.generators import bytes_of, find_script_generators
from hpc_ddp.training.models.tracked import GradientWatch

noise = torch.Generator()  # of a script's module


class Proxy:
    """As an object that is only known within a request."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("outside of a request")


def test_generators_in_variables_of_the_script_are_found() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.masks = np.random.default_rng(3)
            self.proxy = Proxy()

        def train(self) -> list[tuple[str, Any]]:
            local = random.Random(1)
            kept = local, noise, random.SystemRandom()  # a tuple is not looked into
            return find_script_generators() if kept else []

    names, generators = zip(*Trainer().train(), strict=True)
    assert {"masks", "local"} <= set(names)
    assert sum(generator is noise for generator in generators) == 1
    assert not any(isinstance(generator, random.SystemRandom) for generator in generators)


@pytest.mark.parametrize("make", [torch.Generator, random.Random, np.random.default_rng])
def test_bytes_of_a_state_are_equal_wherever_it_lies(make: Callable[[], Any]) -> None:
    generator = make()
    first = bytes_of(generator)
    states = [rng.raw_state(generator) for _ in range(3)]  # so the next one lies elsewhere
    assert bytes_of(generator) == first
    assert len(states) == 3


def test_no_variable_lives_longer_for_it() -> None:
    """An output of a model would keep the activations of a forward."""

    def train() -> tuple[int, int]:
        output = torch.ones(1)
        reference = weakref.ref(output)
        find_script_generators()
        output = torch.zeros(1)
        variables = locals()  # which the script may keep
        find_script_generators()
        return reference() is not None, len(variables) >= 2 and "output" in variables

    assert train() == (False, True)
    assert noise is not None  # a module's variables stay


def watched(*rounds: Callable[[], object], tracked: Any = None) -> list[str]:
    """Return the names in the warnings of an attempt whose steps are these calls."""
    lines: list[str] = []
    watch = GradientWatch([tracked], lines.append)
    for step in rounds:
        step()
        watch.end_step()
    return [line.partition(", is in")[0].rpartition(" ")[2] for line in lines]


def test_a_generator_that_steps_draw_from_is_warned_of() -> None:
    """In a fresh process a resume would begin it anew, and draw numbers that were drawn before."""
    reseeded, ours, at_epoch = (torch.Generator() for _ in range(3))
    local = np.random.RandomState(3)

    def draw() -> None:
        for generator in (noise, reseeded.manual_seed(len(seeds)), ours):
            torch.rand(1, generator=generator)
        local.rand()
        seeds.append(0)

    def begin_and_draw() -> None:
        torch.randperm(3, generator=at_epoch)
        draw()

    seeds: list[int] = []
    owner = SimpleNamespace(state_dict=dict, generator=ours)
    assert watched(begin_and_draw, draw, draw, tracked=owner) == ["noise", "local"]
    assert watched(lambda: None, lambda: None, draw) == []


def test_what_can_not_be_looked_at_ends_no_training() -> None:
    class Odd(random.Random):
        def getstate(self) -> Any:
            raise NotImplementedError

    odd = Odd()
    assert watched(odd.random, odd.random) == []
