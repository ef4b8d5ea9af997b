from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ddp import slurm
from hpc_ddp.core import file_io
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node import batch
from hpc_ddp.node.outcome import gather_facts
from hpc_ddp.node.outcome.requeue import (
    attempt_end,
    chain,
    excluded_nodes,
    job_change,
    next_start,
    vain_start,
)
from hpc_ddp.node.watch import end_time
from unit.fakes import Clock, Slurm, stop_clock
from unit.node.batch.fakes import END, answer_scontrol, show_job


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return stop_clock(
        monkeypatch,
        *(batch, end_time, excluded_nodes, next_start, attempt_end, slurm, vain_start),
        now=END - 1000,
    )


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all that waits for the disk."""
    return stop_clock(monkeypatch, file_io)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "name" / "run").make()
    run.lib.mkdir()
    run.job_json.write_text(JobSpec("train.py", nodes=2).to_json())
    return run


@pytest.fixture
def controller(slurm_commands: Slurm, clock: Clock) -> Slurm:
    """Slurm with a running job of two nodes."""
    answer_scontrol(slurm_commands, show_job())
    return slurm_commands


@pytest.fixture
def attempt(run: RunFolder) -> AttemptFolder:
    return run.claim_attempt({"job_id": "7", "nodes": ["n1", "n2"]}, lambda identity: False)


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages to the user."""
    lines: list[str] = []
    outcome = (attempt_end, chain, excluded_nodes, gather_facts, job_change, next_start, vain_start)
    for module in (batch, *outcome):
        monkeypatch.setattr(module, "say", lines.append)
    return lines
