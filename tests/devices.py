"""Which device the tests train on: ``DEVICE=sim`` takes the stand-in accelerator of tests/device.

``DEVICE=cuda`` takes the machine's own GPUs, which ranks share where they are too few. Without it,
or with ``DEVICE=cpu``, none is visible.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DEVICE = os.environ.get("DEVICE", "cpu")
SIM_DEVICES = 4
# Of torch, by its package: importing it takes seconds.
RELEASE = tuple(int(number) for number in version("torch").split(".")[:2])
HAS_SIM_RECORD = RELEASE >= (2, 15)  # of collectives: torch 2.9 has one for NCCL and Gloo alone
REPORT = "sim: "  # begins a line of the stand-in that tells of an access that nothing orders


def device_env(device: str = DEVICE) -> dict[str, str]:
    """Return the environment of a process that is to train on a device."""
    if device == "cuda":  # machines of developers have few
        return {"PYTHONPATH": str(ROOT), "HPC_DDP_DRY_RUN_DEVICES": "shared"}
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    if device == "cpu":
        return hidden
    if device != "sim":
        raise pytest.UsageError(f"DEVICE is {device!r}; accepted: cpu, sim, cuda")
    paths = f"{ROOT / 'tests' / 'device'}{os.pathsep}{ROOT}"
    visible = {"SIM_DEVICES": str(SIM_DEVICES), "HPC_DDP_DRY_RUN_DEVICES": "1"}
    return {**hidden, **visible, "PYTHONPATH": paths}


def reports_of(output: str) -> list[str]:
    """Return what the stand-in device found wrong, of what processes have printed."""
    return [line for line in output.splitlines() if line.startswith(REPORT)]
