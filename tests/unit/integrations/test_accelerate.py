"""What `Stop` refuses of an Accelerator, and what it tells the checkpoints of its own files."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.integrations.accelerate import ORDER, Stop


def accelerator_with(is_automatic: bool) -> Any:
    """Return what `Stop` reads of an Accelerator, whose import takes seconds."""
    settings = SimpleNamespace(automatic_checkpoint_naming=is_automatic)
    return cast(Any, SimpleNamespace(project_configuration=settings))


def test_automatic_names_are_refused() -> None:
    with pytest.raises(UsageError, match="automatic_checkpoint_naming is True") as refusal:
        Stop(accelerator_with(is_automatic=True))
    assert "accepted: False" in refusal.value.message
    assert "automatic_checkpoint_naming=False" in str(refusal.value.hint)


def test_the_order_of_the_data_alone_is_no_checkpoint() -> None:
    assert frozenset({ORDER}) == Stop._own_names
