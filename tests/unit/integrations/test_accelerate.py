"""What `Stop` refuses of an Accelerator, and what it tells the checkpoints of its own files."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.integrations.accelerate import Stop


def accelerator_with(is_automatic: bool = False, is_stateful: bool = False) -> Any:
    """Return what `Stop` reads of an Accelerator, whose import takes seconds."""
    project = SimpleNamespace(automatic_checkpoint_naming=is_automatic)
    loaders = SimpleNamespace(use_stateful_dataloader=is_stateful)
    return cast(Any, SimpleNamespace(project_configuration=project, dataloader_config=loaders))


def test_automatic_names_are_refused() -> None:
    with pytest.raises(UsageError, match="automatic_checkpoint_naming is True") as refusal:
        Stop(accelerator_with(is_automatic=True))
    assert "accepted: False" in refusal.value.message
    assert "automatic_checkpoint_naming=False" in str(refusal.value.hint)


def test_loaders_that_skip_by_themselves_are_refused() -> None:
    with pytest.raises(UsageError, match="use_stateful_dataloader is True") as refusal:
        Stop(accelerator_with(is_stateful=True))
    assert "use_stateful_dataloader=False" in str(refusal.value.hint)
