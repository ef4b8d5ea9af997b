"""Accelerators by their vendors."""

from __future__ import annotations

from pathlib import Path

from hpc_ddp.core.accelerators import device_files


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
