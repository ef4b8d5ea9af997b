"""Stand-ins for what a part of the training module asks of its other parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch


class Holds:
    """Anything with state_dict and load_state_dict can be tracked: here, one value."""

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
    """Let torch tell of so many accelerators; return the indices that become the current one."""
    current: list[int] = []
    device = torch.device(kind) if count else None
    monkeypatch.setattr("torch.accelerator.is_available", lambda: count > 0)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: count)
    monkeypatch.setattr(
        "torch.accelerator.current_accelerator", lambda check_available=False: device
    )
    monkeypatch.setattr("torch.accelerator.set_device_index", current.append)
    return current
