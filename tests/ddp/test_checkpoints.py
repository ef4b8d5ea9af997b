"""What reaches the disk, and what a damaged or full one does to a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SMALL = ("--samples", "80", "--epochs", "3", "--save-every-steps", "4")  # 30 steps on one rank


def kill_in(crew: Any, step: int, *argv: str) -> None:
    launch = crew.launch(1, *argv, "--at", str(step), "--signal", str(int(signal.SIGKILL)))
    assert launch.wait() == [-signal.SIGKILL], launch.output()


def test_the_last_three_are_kept_and_complete(crew: Any) -> None:
    kill_in(crew, 27, *SMALL)
    folders = sorted(path.name for path in crew.run.checkpoints.iterdir())
    # The save due in step 20, the last one of an epoch, comes behind the epoch's end.
    assert folders == ["step-16", "step-20", "step-24"]
    manifest = json.loads((crew.run.checkpoints / "step-20" / "manifest.json").read_text())
    assert (manifest["epoch"], manifest["samples"], manifest["world_size"]) == (2, 0, 1)
    assert sorted(manifest["files"]) == ["rng-0.pt", "state.pt"]
    assert crew.events("checkpoint")[-1].keys() >= {"stall_s", "write_s", "bytes"}


def test_damage_is_passed_over_loudly(make_crew: Callable[[str], Any]) -> None:
    whole = make_crew("whole")
    whole.go(1, *SMALL)
    crew = make_crew("damaged")
    kill_in(crew, 27, *SMALL)
    newest, second = crew.run.checkpoints / "step-24", crew.run.checkpoints / "step-20"
    flip_a_byte(newest / "state.pt")
    os.truncate(second / "rng-0.pt", 100)
    (crew.run.checkpoints / "step-25.tmp-0").mkdir()

    output = crew.go(1, *SMALL)
    assert "PASSED OVER the checkpoint step-24: state.pt has been damaged" in output
    assert "PASSED OVER the checkpoint step-20: rng-0.pt has 100 bytes instead of" in output
    assert "going on from step 16" in output
    (restored,) = crew.events("restored")
    assert restored["step"] == 16
    assert [text.split(":")[0] for text in restored["passed_over"]] == ["step-24", "step-20"]
    assert crew.weights == whole.weights
    left = sorted(path.name for path in crew.run.checkpoints.iterdir())
    assert left == ["step-20.bad-1", "step-24", "step-24.bad-1", "step-28", "step-30"]


def test_with_nothing_good_left_it_starts_again(make_crew: Callable[[str], Any]) -> None:
    whole = make_crew("whole")
    whole.go(1, *SMALL)
    crew = make_crew("damaged")
    kill_in(crew, 7, *SMALL)
    (crew.run.checkpoints / "step-4" / "manifest.json").unlink()
    output = crew.go(1, *SMALL)
    assert "manifest.json is missing" in output
    assert "starts again from step 0" in output
    assert crew.weights == whole.weights


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_superseded_attempt_publishes_nothing(crew: Any) -> None:
    later = crew.run.logs / "attempt-1"
    launch = crew.launch(
        2, "--save-every-steps", "4", "--at", "6", "--make", str(later), "--ranks", "0"
    )
    assert launch.wait() == [1, 1]
    assert "superseded by a later one" in launch.output()
    assert [path.name for path in crew.run.checkpoints.iterdir()] == ["step-4"]
    assert not crew.events("failed", "save_failed")


def test_a_checkpoint_of_another_model_is_refused_clearly(crew: Any) -> None:
    kill_in(crew, 7, *SMALL)
    launch = crew.launch(1, *SMALL, "--width", "24")
    assert launch.wait() == [1]
    assert "0.weight is (24, 33) here and (16, 33) in the checkpoint" in launch.output()
    assert "Traceback" not in launch.output()
    launch = crew.launch(1, *SMALL, "--seed", "9")
    assert launch.wait() == [2]
    assert "seed is 9, but 0 in the run's checkpoint" in launch.output()


@pytest.fixture
def tiny_disk(crew: Any) -> Iterator[Path]:
    """A file system of 1 MB below the run's checkpoints."""
    disk = crew.run.checkpoints
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a tiny tmpfs needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tiny tmpfs is not allowed here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.usefixtures("tiny_disk")
def test_a_full_disk_is_survived_for_a_while(crew: Any, tiny_disk: Path) -> None:
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(1_030_000))
    flag = crew.base / "go-on"
    save = ("--save-every-steps", "4", "--epochs", "1")
    launch = crew.launch(2, *save, "--at", "6", "--wait", str(flag))
    launch.until("ACTING")
    (failed,) = crew.events("save_failed")
    assert failed["step"] == 4
    assert "No space left" in failed["error"]
    ballast.unlink()
    flag.touch()
    assert launch.wait() == [0, 0], launch.output()
    assert crew.events("checkpoint")[0]["step"] == 8

    for path in tiny_disk.iterdir():
        shutil.rmtree(path)
    ballast.write_bytes(bytes(1_030_000))
    launch = crew.launch(2, *save)
    assert launch.wait() == [1, 1]
    assert "3 saves in a row failed" in launch.output()
    assert not list(tiny_disk.glob("step-*"))
