"""Generators of Python, numpy and torch are saved and restored."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from hpc_ddp.training import devices
from hpc_ddp.training.data.batch_plan import derive_seed
from hpc_ddp.training.devices import CPU
from hpc_ddp.training.models import rng
from unit.training.fakes import draw_numbers


def test_generators_go_through_a_file_as_plain_values(tmp_path: Any) -> None:
    random.gauss(0, 1)  # leaves a second number behind
    torch.save(rng.snapshot([CPU]), tmp_path / "rng")
    expected = [draw_numbers() for _ in range(3)]
    gauss = random.gauss(0, 1)
    rng.restore(torch.load(tmp_path / "rng", weights_only=True), [CPU])
    assert [draw_numbers() for _ in range(3)] == expected
    assert random.gauss(0, 1) == gauss


def test_each_device_of_a_worker_has_a_generator_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second one's numbers are not the first one's, and both are put back."""
    states: dict[torch.device, int] = {}
    monkeypatch.setattr(devices, "seed", states.__setitem__)
    monkeypatch.setattr(devices, "random_state", states.__getitem__)
    monkeypatch.setattr(devices, "put_random_state", states.__setitem__)
    places = [torch.device("cuda", index) for index in (2, 3)]
    with rng.preserve_generators():
        rng.seed_all(7, places)
        assert states == dict(zip(places, (7, derive_seed(7, 1)), strict=True))
        saved = rng.snapshot(places)
        states.clear()
        rng.restore(saved, places)
        assert states == dict(zip(places, (7, derive_seed(7, 1)), strict=True))
        assert "devices" not in rng.snapshot([devices.CPU])
