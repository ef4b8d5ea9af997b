"""Weights of a checkpoint as a safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.training.data.order import Position
from hpc_ddp.training.export import export
from unit.training.checkpoint.fakes import claim_run, make_manager, make_saver


@pytest.mark.parametrize("per_rank", [(), ("model",)])
def test_an_export_refuses_tensors_that_differ_between_ranks(
    tmp_path: Path, per_rank: tuple[str, ...]
) -> None:
    run, model = claim_run(tmp_path), torch.nn.Linear(2, 2)
    manager = make_manager(make_saver(run), Position(step=1))
    if not per_rank:
        ddp: Any = torch.nn.parallel.DistributedDataParallel
        ddp._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
    manager.track({"model": model}, {}, per_rank)
    manager.save_surely()
    with pytest.raises(HpcDdpError, match=r"each rank had its own model\.bias"):
        export(run.path, run.path / "model.safetensors")
