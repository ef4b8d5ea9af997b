"""Accelerators by their vendors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_ddp.core.accelerators import device_files, expected_devices, hiding_env


def test_device_files_belong_to_the_vendor_of_the_device(tmp_path: Path) -> None:
    vendors = {"renderD128": "0x1002", "renderD129": "0x1002", "renderD130": "0x8086"}
    names = ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "davinci3", "davinci_manager")
    for name in (*names, *(f"dri/{name}" for name in (*vendors, "renderD131"))):
        (tmp_path / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev" / name).touch()
    assert device_files(tmp_path) == {"NVIDIA": 3, "Ascend": 1}
    for name, number in vendors.items():
        folder = tmp_path / "sys/class/drm" / name / "device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{number}\n")
    assert device_files(tmp_path) == {"NVIDIA": 3, "AMD": 2, "Intel": 1, "Ascend": 1}
    assert device_files(tmp_path / "none") == {}


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The top of a file system with devices of three vendors; the renderers may be processors'."""
    for name in ("nvidia0", "nvidia1", "dri/renderD128", "dri/renderD129"):
        (tmp_path / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev" / name).touch()
    for name, number in (("renderD128", "0x1002"), ("renderD129", "0x8086")):
        folder = tmp_path / "sys/class/drm" / name / "device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{number}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("environ", "counts"),
    [
        ({}, {"NVIDIA": 2}),
        ({"CUDA_VISIBLE_DEVICES": "7"}, {"NVIDIA": 2}),
        ({"CUDA_VISIBLE_DEVICES": ""}, {}),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, {}),
        (hiding_env(), {}),  # of a dry run
        ({"SLURM_JOB_ID": "1"}, {}),  # a job without GPUs on a node with some
        ({"SLURM_JOB_ID": "1", "CUDA_VISIBLE_DEVICES": "NoDevFiles"}, {}),
        ({"SLURM_JOB_ID": "1", "CUDA_VISIBLE_DEVICES": "0"}, {"NVIDIA": 2}),
        (
            {"ROCR_VISIBLE_DEVICES": "0", "ZE_AFFINITY_MASK": "0"},
            {"NVIDIA": 2, "AMD": 1, "Intel": 1},
        ),
        (
            {
                "ZE_AFFINITY_MASK": "0",
                "ONEAPI_DEVICE_SELECTOR": "*:cpu",
                "CUDA_VISIBLE_DEVICES": "",
            },
            {},
        ),
    ],
)
def test_devices_are_expected_where_nothing_hides_them(
    machine: Path, environ: dict[str, str], counts: dict[str, int]
) -> None:
    assert expected_devices(environ, machine) == counts


def test_none_is_expected_where_no_file_may_be_opened(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm takes devices of other jobs away so; and machines have none at all."""
    assert expected_devices({}, machine / "none") == {}
    monkeypatch.setattr(os, "access", lambda path, mode: path.name == "nvidia1")
    assert expected_devices({}, machine) == {"NVIDIA": 1}
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert expected_devices({}, machine) == {}
