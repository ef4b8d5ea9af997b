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
from hpc_ddp.training.models.generators import Generators, bytes_of, find_script_generators
from hpc_ddp.training.models.tracked import warn_of_untracked

noise = torch.Generator()  # of a script's module


class Proxy:
    """As an object that is only known within a request."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("outside of a request")


def begin_loop(generators: Generators) -> None:
    generators.begin_loop(0, is_checkpoints=False, is_over=False, is_in_epoch=False)


def test_generators_in_variables_of_the_script_are_found() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.masks = np.random.default_rng(3)
            self.proxy = Proxy()

        def train(self) -> dict[str, Any]:
            local = random.Random(1)
            kept = local, noise, random.SystemRandom()  # a tuple is not looked into
            return find_script_generators() if kept else {}

    generators = Trainer().train()
    assert {"masks", "local", "noise"} >= generators.keys() >= {"masks", "local"}
    assert sum(generator is noise for generator in generators.values()) == 1


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


def test_a_generator_that_the_loop_draws_from_is_warned_of() -> None:
    """In a fresh process a resume would begin it anew, and draw numbers that were drawn before."""
    generators, lines = Generators([]), list[str]()
    idle, reseeded, ours = (torch.Generator() for _ in range(3))
    local = np.random.RandomState(3)
    begin_loop(generators)
    for drawn in (noise, reseeded.manual_seed(9), ours):
        torch.rand(1, generator=drawn)
    local.rand()
    assert idle.initial_seed() == noise.initial_seed()
    owner = SimpleNamespace(state_dict=dict, generator=ours)
    warn_of_untracked([owner], lines.append, generators=generators.take_drawn())
    assert [line.partition(", is in")[0] for line in lines] == [
        "WARNING: a random generator, noise",
        "WARNING: a random generator, local",
    ]
    assert generators.take_drawn() == {}
