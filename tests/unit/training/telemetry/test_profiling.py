"""The model's use of the device's peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_ddp.core.journal.journal import Journal, read_events
from hpc_ddp.training.data.order import Position
from hpc_ddp.training.devices import CPU
from hpc_ddp.training.telemetry.metrics import Metrics
from hpc_ddp.training.telemetry.profiling import peak_flops, use_per_sample
from tests.waiting import LIMIT_S
from unit.training.fakes import checked_options


def test_mfu_needs_a_peak_and_the_cost_of_a_sample(tmp_path: Path) -> None:
    chosen = checked_options(flops_per_sample=2e6, peak_flops=1e9)
    assert use_per_sample(chosen, CPU, world_size=4) == pytest.approx(0.0005)
    assert use_per_sample(checked_options(flops_per_sample=2e6), CPU, 4) is None
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp16") == 989.4e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32") == 156e12
    assert peak_flops("a toaster", "fp32") is None

    journal = Journal(tmp_path, "rank-0")
    shown: list[dict[str, Any]] = []
    metrics = Metrics(journal, 1, ["here"], use_per_sample_s=0.5, listeners=[shown.append])
    metrics.add(Position(step=1), 10, {"loss": torch.tensor(1.0)})
    metrics.flush()
    journal.drain(LIMIT_S)
    event = read_events(tmp_path)[-1].to_line()
    assert event["mfu"] == pytest.approx(event["samples_per_s"] / 2, rel=1e-3)
    assert shown == [{name: event[name] for name in shown[0]}]
    assert shown[0]["loss"] == 1.0
