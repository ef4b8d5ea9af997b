"""The model's use of the device's peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_ddp.core.journal.journal import Journal, read_events
from hpc_ddp.training import devices
from hpc_ddp.training.data.batch_plan import Position
from hpc_ddp.training.devices import CPU
from hpc_ddp.training.telemetry.metrics import Metrics
from hpc_ddp.training.telemetry.peak_flops import peak_flops, peak_share_per_sample
from tests.waiting import LIMIT_S
from unit.training.fakes import checked_options


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.4),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "fp16", None),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200 NVL", "bf16", 835),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "bf16", 2500),
        ("NVIDIA A100 80GB PCIe", "bf16", 312),
        ("NVIDIA A100-SXM-64GB", "bf16", None),  # Leonardo's has more cores
        ("NVIDIA RTX A1000", "bf16", None),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-PCIE-16GB", "fp16", 112),
        ("Tesla V100-PCIE-16GB", "fp32", 14),
        ("Tesla V100-PCIE-16GB", "bf16", None),
        ("AMD Instinct MI250X", "fp32", 47.9),
        ("AMD Instinct MI250X / MI250", "bf16", None),
        ("AMD Instinct MI300A", "bf16", 980.6),
        ("AMD Instinct MI325X", "bf16", 1307.4),
        ("a toaster", "fp32", None),
    ],
)
def test_a_peak_is_that_of_the_whole_name(name: str, precision: str, tera: float | None) -> None:
    expected = None if tera is None else pytest.approx(1e12 * tera)
    assert peak_flops(name, precision) == expected


def test_fp32_has_the_peak_of_tf32_only_where_torch_multiplies_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32") is None
    monkeypatch.setattr(devices, "uses_tf32", lambda: True)
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32") == 156e12
    assert peak_flops("Tesla V100-SXM2-16GB", "fp32") == 15.7e12
    assert peak_flops("AMD Instinct MI300X", "fp32") is None


def test_torchs_setting_of_tf32_is_read() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert devices.uses_tf32()
        torch.set_float32_matmul_precision("highest")
        assert not devices.uses_tf32()
    finally:
        torch.set_float32_matmul_precision(before)


def test_mfu_needs_a_peak_and_the_cost_of_a_sample() -> None:
    told: list[str] = []
    chosen = checked_options(flops_per_sample=2e6, peak_flops=1e9)
    assert peak_share_per_sample(chosen, CPU, 4, told.append) == pytest.approx(0.0005)
    assert peak_share_per_sample(checked_options(), CPU, 4, told.append) is None
    assert told == []
    assert peak_share_per_sample(checked_options(flops_per_sample=2e6), CPU, 4, told.append) is None
    assert told == [
        "there is no mfu: the peak of cpu with fp32 is not known; start(peak_flops=) gives it"
    ]


def test_mfu_is_journalled_and_shown(tmp_path: Path) -> None:
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
