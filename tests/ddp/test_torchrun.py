"""The example jobs as a user starts them: by python and by torchrun, nothing of hpc-ddp around."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_ddp.core import process
from hpc_ddp.core.file_io import read_json
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.training.process import run_directory
from hpc_ddp.training.process.environment import DistEnv, LaunchEnv
from tests.children import start_child
from tests.devices import device_env
from tests.raw_events import raw_events
from tests.waiting import LIMIT_S, wait_until

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def command(job: str, ranks: int, *argv: str) -> list[str]:
    start = [sys.executable] if ranks == 0 else [*TORCHRUN, "--nproc-per-node", str(ranks)]
    return [*start, str(ROOT / "jobs" / job), *argv]


def environment() -> dict[str, str]:
    env = {name: text for name, text in os.environ.items() if not name.startswith("HPC_DDP_")}
    return env | {"OMP_NUM_THREADS": "1"} | device_env()


def start(where: Path, job: str, ranks: int, *argv: str) -> subprocess.Popen[str]:
    return start_child(
        command(job, ranks, *argv),
        cwd=where,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_digits_stops_and_goes_on_under_torchrun(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "digits" / "local")
    first = start(tmp_path, "digits.py", 2, "--epochs", "3", "--step-seconds", "0.1")
    wait_until(lambda: any(e["event"] == "metrics" for e in raw_events(run.path)), "a step")
    first.send_signal(signal.SIGTERM)  # to the agent, which passes it on and then fails
    first.communicate(timeout=LIMIT_S)
    (stopped,) = [event for event in raw_events(run.path) if event["event"] == "stopped"]
    assert not run.finished()

    # By python alone, since each process imports torch and its compiler by itself.
    second = start(tmp_path, "digits.py", 0, "--epochs", "3")
    output, errors = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, errors
    assert f"going on from step {stopped['step']} " in errors
    assert run.finished()
    found = re.search(r"^test accuracy (0\.\d+)$", output, re.MULTILINE)
    assert found, output
    assert float(found[1]) >= 0.8


@pytest.mark.more
def test_linear_regression_in_one_process(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "linear_regression" / "local")
    for moved in ("", f" (the finished one is now {run.path}-1)"):
        job = start(tmp_path, "linear_regression.py", 0)
        output, errors = job.communicate(timeout=LIMIT_S)
        assert job.returncode == 0, errors
        assert re.search(r"^y = (2\.9|3\.0)\d+ x \+ (0\.9|1\.0)\d+$", output, re.MULTILINE), output
        # Where it takes longer than half a minute, there are lines of progress as well.
        lines = errors.splitlines()
        where, goodput = (line for line in lines if line.startswith("hpc-ddp: "))
        assert all(line.startswith(("hpc-ddp: ", "step ")) for line in lines)
        assert where == f"hpc-ddp: run: {run.path}{moved}"
        assert re.fullmatch(r"hpc-ddp: goodput \d+ %: .* training, .* importing.*", goodput)
    names = sorted(path.name for path in run.path.parent.glob("[!.]*"))
    assert names == ["local", "local-1"]


def test_other_arguments_are_the_runs_from_there_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "is_live", lambda info: False)  # it is this process each time
    run = RunFolder(tmp_path / "x" / "local")

    def begin(*args: str) -> str:
        monkeypatch.setattr(sys, "argv", ["x.py", *args])
        run_directory._claim_local(LaunchEnv.from_env({"HPC_DDP_RUNS": str(tmp_path)}), DistEnv())
        assert list(read_json(run.job_json)["args"]) == list(args)
        return capsys.readouterr().err

    said = f"hpc-ddp: run: {run.path}\n"
    assert begin("--lr", "wrong") == said
    assert begin("--lr", "1") == said  # nothing was done with the first ones
    (run.checkpoints / "step-3").mkdir()
    assert begin("--lr", "1") == said
    other = begin("--lr", "2")
    assert "other arguments (--lr 1); it goes on with the new ones" in other
