"""The states of random generators."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hpc_ddp.training.models import rng
from hpc_ddp.training.models.generators import bytes_of


@pytest.mark.parametrize("make", [torch.Generator, random.Random, np.random.default_rng])
def test_bytes_of_a_state_are_equal_wherever_it_lies(make: Callable[[], Any]) -> None:
    generator = make()
    first = bytes_of(generator)
    states = [rng.raw_state(generator) for _ in range(3)]  # so the next one lies elsewhere
    assert bytes_of(generator) == first
    assert len(states) == 3
