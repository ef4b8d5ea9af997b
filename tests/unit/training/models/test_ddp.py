"""What a model goes through before DDP."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.devices import CPU
from hpc_ddp.training.models.ddp import set_averaging, with_sync_batchnorm


class NormAct(nn.BatchNorm2d):
    """As timm's BatchNormAct2d, which has the activation in it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


def test_a_batch_norm_with_an_activation_is_refused() -> None:
    """torch would put one without in its place; on a CPU as well, where a dry run is to show it."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(NormAct(3)))
    with pytest.raises(UsageError, match=r"replace 1\.0, a NormAct, by a batch norm alone"):
        with_sync_batchnorm(model, CPU, None, print)


def test_batch_norms_become_those_of_all_ranks_on_accelerators() -> None:
    notes: list[str] = []
    model = nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3))
    assert with_sync_batchnorm(model, CPU, None, notes.append) is model
    assert notes == ["sync_batchnorm is off: torch has it for GPUs only"]
    converted = with_sync_batchnorm(model, torch.device("meta"), None, notes.append)
    assert [type(part) for part in converted.children()] == [nn.SyncBatchNorm] * 2


@pytest.mark.parametrize(
    ("static", "recorded", "averages"),
    [(False, False, False), (True, False, True), (True, True, False)],
)
def test_a_static_graph_is_recorded_with_averages(
    static: bool, recorded: bool, averages: bool
) -> None:
    ddp = SimpleNamespace(static_graph=static, _static_graph_delay_allreduce_enqueued=recorded)
    for on in (True, False):
        set_averaging(ddp, on)
        assert ddp.require_backward_grad_sync == (on or averages)
