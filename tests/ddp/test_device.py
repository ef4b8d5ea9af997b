"""Training on an accelerator, the stand-in of tests/device: the CPU's numbers, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import conftest
import pytest

from tests.devices import ROOT, device_env, reports_of
from tests.skips import skip_or_fail

CHECKS = ROOT / "tests" / "device" / "checks.py"


@pytest.fixture(scope="session")
def stand_in() -> Iterator[conftest.Zygote]:
    """A process that forks workers which see four devices."""
    if shutil.which("g++") is None or shutil.which("ninja") is None:
        skip_or_fail("the stand-in device is compiled by g++ and ninja (apt: g++ ninja-build)")
    process = conftest.Zygote("sim")
    yield process
    process.end()


@pytest.fixture
def make_sim_crew(stand_in: conftest.Zygote, tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    yield from conftest.crews_of(stand_in, tmp_path / "sim")


def test_the_stand_in_has_the_cpus_numbers_and_reports_mistakes(stand_in: object) -> None:
    env = {**os.environ, **device_env("sim")} | {"SIM_DEVICES": "2"}
    done = subprocess.run([sys.executable, str(CHECKS)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == CHECKS.read_text().count("\n@check\n")


def test_stopped_and_killed_it_ends_with_the_cpus_bits(
    make_crew: Callable[[str], Any], make_sim_crew: Callable[[str], Any]
) -> None:
    """DDP with dropout and batch norm; saves go through pinned memory."""
    on_cpu = make_crew("cpu")
    on_cpu.go(2)
    crew = make_sim_crew("device")
    stopped = crew.launch(2, "--at", "5", "--signal", str(int(signal.SIGTERM)), "--ranks", "1")
    assert stopped.wait() == [0, 0], stopped.output()
    saved = ("--save-every-steps", "3", "--wait", str(crew.run.checkpoints / "step-15"))
    killed = crew.launch(2, *saved, "--at", "17", "--signal", str(int(signal.SIGKILL)))
    assert killed.wait() == [-signal.SIGKILL] * 2, killed.output()
    crew.go(2)
    assert crew.weights == on_cpu.weights


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_half_precision_a_kill_leaves_the_same_bits(
    make_sim_crew: Callable[[str], Any], precision: str
) -> None:
    words = ("--precision", precision, "--save-every-steps", "4")
    whole = make_sim_crew("whole")
    whole.go(2, *words, script="day.py")
    killed = make_sim_crew("killed")
    assert any(killed.launch(2, *words, "--kill-at", "7", script="day.py").wait())
    killed.go(2, *words, script="day.py")
    assert killed.weights == whole.weights


def test_each_way_of_sharing_a_model_trains_and_goes_on(
    make_sim_crew: Callable[[str], Any], tmp_path: Path
) -> None:
    """Tensor parallel first: its optimizer has DTensors and plain ones; then sharded, offloaded."""
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 14)
    text = ("--text", str(tmp_path / "text"), "--batch-size", "16", "--epochs", "2")
    crew = make_sim_crew("ways")
    ways = (
        (2, ("--parallel", "tp"), "2"),
        (2, ("--parallel", "fsdp", "--offload"), "5"),
        (2, ("--parallel", "pp"), "0"),
    )
    for ranks, spread, at in ways:
        launch = crew.launch(ranks, *text, *spread, script="strategy.py", AT=at)
        assert launch.wait() == [0] * ranks, launch.output()
    assert crew.events("finished")
    assert not reports_of(launch.output())


def test_the_host_waits_for_no_step_and_once_for_a_save(
    make_sim_crew: Callable[[str], Any],
) -> None:
    """But for the first step. Copies of batches and of what is saved leave it free."""
    output = make_sim_crew("waits").go(1, script="waits.py")
    (line,) = (line for line in output.splitlines() if line.startswith("waits "))
    waits = [int(word) for word in line.split()[1:]]
    assert waits[1:] == [*8 * [0], 1, *10 * [0]]  # step 10 saves


def test_each_device_of_a_worker_draws_by_the_seed_numbers_of_its_own(
    make_sim_crew: Callable[[str], Any],
) -> None:
    """The same on each worker. Its first device is the one that torch takes if none is named."""
    drawn = set()
    for seed in ("7", "70"):
        output = make_sim_crew(seed).go(2, seed, script="placed.py")
        lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"devices"')]
        assert [(line["devices"], line["current"]) for line in lines] == [([0, 1], 0), ([2, 3], 2)]
        drawn |= {tuple(numbers) for line in lines for numbers in line["drawn"]}
    assert len(drawn) == 4


def test_an_error_of_a_loader_worker_is_told_once(make_sim_crew: Callable[[str], Any]) -> None:
    """The worker's thread that lends memory to pin may fail as well, when the rank has left."""
    crew = make_sim_crew("loader")
    launch = crew.launch(1, "--workers", "2", "--bad-sample", "9")
    assert launch.wait() == [1]
    (failed,) = crew.events("failed")
    assert failed["error"] == "ValueError: no sample 9"
