"""Stand-ins for the parts of the training module that a tested part uses."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch

from hpc_ddp.training.checkpoint.schedule import SaveSchedule
from hpc_ddp.training.options import Options
from hpc_ddp.training.process.environment import LaunchEnv


class Holds:
    """A trackable object of one value: it has state_dict and load_state_dict."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.value = saved["value"]


class Alone:
    """A control group of one rank: what it sends is the maximum, which is there after a wait."""

    rank = 0

    def start_max(self, values: torch.Tensor) -> Any:
        self.sent = values.tolist()
        self._values = values.zero_()
        return self

    def wait(self) -> None:
        self._values.copy_(torch.tensor(self.sent))


class Saves:
    """The attributes of Checkpoints that a SaveSchedule reads."""

    in_flight = failed = False
    slowest_save_s = stall_s = 0.0


def give_gpus(monkeypatch: pytest.MonkeyPatch, count: int, kind: str = "cuda") -> list[int]:
    """Let torch report `count` accelerators; return the indices that are made current."""
    current: list[int] = []
    device = torch.device(kind) if count else None
    monkeypatch.setattr("torch.accelerator.is_available", lambda: count > 0)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: count)
    monkeypatch.setattr(
        "torch.accelerator.current_accelerator", lambda check_available=False: device
    )
    monkeypatch.setattr("torch.accelerator.set_device_index", current.append)
    monkeypatch.setattr("hpc_ddp.core.accelerators.expected_devices", lambda environ: {})
    return current


def draw_numbers() -> tuple[float, float, float]:
    return random.random(), torch.rand(()).item(), numpy.random.random()


def make_schedule(saves: Saves | None = None, rank: int = 0, **options: Any) -> SaveSchedule:
    checkpoints: Any = saves or Saves()
    return SaveSchedule(checkpoints, rank, **options)


class LeftError(Exception):
    """The process would have ended here, with a code."""


def checked_options(**arguments: Any) -> Options:
    """Return what `start` makes of its arguments."""
    return Options(**arguments).checked(LaunchEnv.from_env({}))


class FakeDTensor:
    """A DTensor, as far as it is asked."""

    def __init__(self, *placements: Any) -> None:
        self.placements, self.wanted = placements, list[Any]()

    def detach(self) -> FakeDTensor:
        return self

    def to_local(self) -> torch.Tensor:
        return torch.full((2,), 3.0)

    def redistribute(self, *, placements: list[Any]) -> torch.Tensor:
        self.wanted = placements
        return self.to_local()
