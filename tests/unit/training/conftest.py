from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from hpc_ddp.training.models import rng
from hpc_ddp.training.stops import signals
from unit.training.fakes import LeftError


@pytest.fixture(autouse=True)
def _untouched_generators() -> Iterator[None]:
    with rng.preserve_generators():
        yield


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A process group whose other rank is not there: sums over ranks are what this one has."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages to the user; the end of the process is an error."""

    def leave(code: int) -> None:
        raise LeftError(code)

    lines: list[str] = []
    monkeypatch.setattr(signals, "say", lines.append)
    monkeypatch.setattr(os, "_exit", leave)
    return lines
