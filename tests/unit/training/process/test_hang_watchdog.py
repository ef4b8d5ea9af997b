"""The record of the last collectives, which a hanging rank dumps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hpc_ddp.training.process import hang_watchdog as watchdog


def test_a_torch_without_a_record_of_a_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.9 takes no backend's name, and its TypeError has the function's signature."""

    def dump(*, onlyActive: bool = False) -> bytes:
        return b"record"

    backend = SimpleNamespace(name=lambda: "xccl")
    group = SimpleNamespace(WORLD=SimpleNamespace(_get_backend=lambda device: backend))
    monkeypatch.setattr(watchdog, "dist", SimpleNamespace(group=group))
    monkeypatch.setattr(watchdog, "c10d", SimpleNamespace(_dump_fr_trace=dump))
    with pytest.raises(NotImplementedError, match=r"torch \S+ records no collectives of xccl$"):
        watchdog.flight_recorder(torch.device("cpu"))
    backend.name = lambda: "gloo"
    assert watchdog.flight_recorder(torch.device("cpu")) == b"record"
