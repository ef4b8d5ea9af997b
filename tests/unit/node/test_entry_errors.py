"""The node side's entry points: an error ends in a sentence and a code, not in a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes import Slurm

from hpc_ddp.core.errors import CAN_GO_ON, HpcDdpError
from hpc_ddp.core.job.spec import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node import batch, dry_run, supervisor
from hpc_ddp.node.net.place import Place
from hpc_ddp.node.outcome import head_failover

WRITER = (
    "from hpc_ddp.core.console.terminal import write_output as w\n"
    "import os; r, p = os.pipe(); os.close(r); os.dup2(p, 1); w(b'x' * 10); w(b'')"
)


def raise_error(*args: Any, **options: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_an_output_that_is_closed_does_not_end_a_supervisor() -> None:
    assert subprocess.run([sys.executable, "-c", WRITER]).returncode == 0
    with open("/dev/full", "wb") as full:
        script = WRITER.partition("import os")[0] + "w(b'x' * 10)"
        assert subprocess.run([sys.executable, "-c", script], stdout=full).returncode == 0


@pytest.mark.parametrize("error", [KeyError("SLURM_NODEID"), ValueError("attempt.json")])
def test_a_supervisor_without_a_place_says_so(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(environ: dict[str, str]) -> None:
        raise error

    monkeypatch.setattr(Place, "from_env", refuse)
    assert supervisor.main(["true"]) == 1
    assert f"can't take part: its place in the job is unknown: {error!r}" in capfd.readouterr().err


def test_a_dry_run_on_a_full_disk_can_go_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path / "train" / "20260101-000000-abcd").make()
    run.job_json.write_text(JobSpec("train.py").to_json())
    monkeypatch.setenv("HPC_DDP_RUN", str(run.path))
    monkeypatch.setattr(RunFolder, "claim_attempt", raise_error)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    assert dry_run.main(["python", "train.py"]) == CAN_GO_ON
    assert "No space left on device" in capfd.readouterr().err


def test_a_verdict_that_fails_leaves_no_job_without_a_shell(
    slurm_commands: Slurm, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(environ: dict[str, str]) -> int:
        raise HpcDdpError("the run's job.json is broken")

    monkeypatch.setattr(batch, "verdict", refuse)
    monkeypatch.setattr(head_failover, "_nodes_left", lambda environ: ["n2"])
    slurm_commands.answer("scancel", err="Access denied", code=1)
    head_failover._end_job({"SLURM_JOB_ID": "7"})
    assert slurm_commands.calls("scancel") == [["7"]]
    assert "the run's job.json is broken" in capfd.readouterr().err
