"""The dense peaks of GPUs, and the share of them that a training reaches (mfu)."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from hpc_ddp.training import devices
from hpc_ddp.training.options import Options

# Dense peaks in TFLOP/s from the data sheets of NVIDIA and AMD, by a pattern of the GPU's whole
# name, and by precision: a part of a GPU (MIG), or a site's own variant, has another name and peak.
# NVIDIA's newer sheets count sparsity, which is twice as much; an MI250X shows as two devices, each
# with half of its peak. "tf32" is the peak of precision fp32 if torch is set to multiply matrices
# in TF32. Without that, GPUs with TF32 have none for fp32: by torch's default convolutions use
# TF32, and matrices do not.
PEAKS = {
    r"V100-SXM[23]-\d+GB": {"fp16": 125.0, "fp32": 15.7},
    r"V100-PCIE-\d+GB": {"fp16": 112.0, "fp32": 14.0},
    r"A100-(SXM4|PCIE)-[48]0GB|A100 80GB PCIe": {"fp16": 312.0, "bf16": 312.0, "tf32": 156.0},
    r"L40S": {"fp16": 362.0, "bf16": 362.0, "tf32": 183.0},
    r"H100 PCIe": {"fp16": 756.0, "bf16": 756.0, "tf32": 378.0},
    r"(H100|H200) NVL": {"fp16": 835.0, "bf16": 835.0, "tf32": 417.5},
    r"H100 80GB HBM3|H200|GH200 \d+GB?( HBM3e)?": {"fp16": 989.4, "bf16": 989.4, "tf32": 494.7},
    r"B200": {"fp16": 2250.0, "bf16": 2250.0, "tf32": 1125.0},
    r"GB200": {"fp16": 2500.0, "bf16": 2500.0, "tf32": 1250.0},
    r"MI250X": {"fp16": 191.5, "bf16": 191.5, "fp32": 47.9},
    r"MI300A": {"fp16": 980.6, "bf16": 980.6},
    r"MI300X|MI325X": {"fp16": 1307.4, "bf16": 1307.4},
}
VENDORS = "(NVIDIA |Tesla |AMD Instinct )?"  # in front of a name


def peak_flops(name: str, precision: str) -> float | None:
    """Return the dense peak of a GPU in FLOP/s; None where `PEAKS` has none for its name and
    precision.

    `precision` is one of ``start``'s: fp32, bf16 or fp16. For fp32 the peak of a GPU with TF32 is
    known only if torch is set to use TF32 for matrices.
    """
    for pattern, peaks in PEAKS.items():
        if re.fullmatch(f"{VENDORS}({pattern})", name):
            as_tf32 = precision == "fp32" and "tf32" in peaks and devices.uses_tf32()
            peak = peaks.get("tf32" if as_tf32 else precision)
            return None if peak is None else 1e12 * peak
    return None


def peak_share_per_sample(
    options: Options, device: torch.device, device_count: int, tell: Callable[[str], None]
) -> float | None:
    """Return the share of the peak of all GPUs that one sample per second takes: `options` has the
    FLOPs of a sample, and may have the peak of one GPU. Return None if one of both is not known.

    If only the peak is missing, call `tell` with a message. `device` is one of the GPUs, and
    `device_count` the number of all ranks' GPUs.
    """
    if options.flops_per_sample is None:
        return None
    name = devices.name(device)
    peak = options.peak_flops or peak_flops(name, options.precision)
    if peak is None:
        tell(
            f"there is no mfu: the peak of {name or device.type} with {options.precision} is not"
            " known; start(peak_flops=) gives it"
        )
        return None
    return options.flops_per_sample / (peak * device_count)
