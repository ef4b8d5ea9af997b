"""What a loop over epochs hears of those that are done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.integrations.epochs import EpochStop
from hpc_ddp.integrations.fabric import Stop


def test_a_loop_that_begins_before_its_checkpoint_is_warned_once() -> None:
    stop = object.__new__(EpochStop)  # without the handlers of signals
    printed: list[str] = []
    values = {"facts": {"epoch": 2, "batches": 3}, "_has_warned": False, "_say": printed.append}
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
