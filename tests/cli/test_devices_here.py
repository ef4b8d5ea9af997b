"""Accelerators in a dry run: hidden, unless a developer's switch shows those of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_ddp.core.accelerators import VENDORS, hiding_env
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.core.run_index import all_runs
from tests.devices import ROOT, device_env, reports_of
from tests.raw_events import raw_events
from tests.skips import needs_stand_in

DIGITS = str(ROOT / "jobs" / "digits.py")


def _play(root: Path, *words: str, **environ: str) -> tuple[RunFolder, str]:
    """Return the folder of a run on the stand-in that has ended well, and what was printed."""
    env = {**os.environ, **device_env("sim"), "HPC_DDP_RUNS": str(root), **environ}
    argv = [sys.executable, "-m", "hpc_ddp", *words]
    done = subprocess.run(argv, cwd=root.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not reports_of(done.stdout + done.stderr)
    (run,) = all_runs(root)
    return run, done.stdout


def test_every_vendor_is_hidden_by_its_own_variables() -> None:
    env = hiding_env()
    for vendor in VENDORS.values():
        assert set(vendor.hidden) <= set(vendor.variables) & set(env)
    assert env["HIP_VISIBLE_DEVICES"] == env["ROCR_VISIBLE_DEVICES"] == "-1"


def test_a_dry_run_has_no_accelerators(tmp_path: Path) -> None:
    needs_stand_in()
    (tmp_path / "show.py").write_text("import torch\nprint(torch.accelerator.device_count())\n")
    words = ("dry-run", "--launcher", "srun", str(tmp_path / "show.py"))
    _, printed = _play(tmp_path / "runs", *words, HPC_DDP_DRY_RUN_DEVICES="")
    assert printed == "0\n"


@pytest.mark.more
def test_a_dry_run_on_shown_devices_measures_and_trains(tmp_path: Path) -> None:
    needs_stand_in()
    words = ("--preflight", "--nodes", "2", "--gpus-per-node", "1", DIGITS, "--epochs", "1")
    run, printed = _play(tmp_path / "runs", "dry-run", *words)
    assert "test accuracy" in printed
    (preflight,) = [event for event in raw_events(run.path) if event["event"] == "preflight"]
    for node in preflight["report"].values():
        assert (node["device"], node["devices"]) == ("sim", 4)
        assert min(node["exchange_mb_s"], node["all_reduce_mb_s"]) > 0


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=pytest.mark.more)])
def test_a_first_contact_tries_each_feature(tmp_path: Path, gpus: int) -> None:
    """The last worker is killed; the weights are those of the undisturbed training."""
    needs_stand_in()
    words = ("preflight", "--train", "--gpus-per-node", str(gpus))
    run, printed = _play(tmp_path / "runs", *words)
    rows = [line.split(" | ") for line in printed.splitlines() if "| yes |" in line]
    assert [row[0] for row in rows] == [
        *("| all-reduce", "| wrap, fp32", "| bf16", "| fp16", "| FSDP2, bf16"),
        "| save, kill, resume",
    ]
    assert "| device | sim sim |" in printed
    assert f"| ranks | {gpus} |" in printed
    assert "resumed at 6" in rows[-1][-1]
    assert rows[-1][-1].split()[-2] == rows[1][-1].split()[-2]  # the digests
    assert (run.path / "first-contact.md").read_text() == printed.removesuffix("\n")
