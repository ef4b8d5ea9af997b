from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp import slurm
from hpc_ddp.core.journal import journal
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome.requeue import attempt_end, chain, excluded_nodes, job_change, next_start
from hpc_ddp.node.outcome.requeue.attempt_end import carry_out_verdict
from hpc_ddp.node.outcome.verdict import Verdict
from unit.fakes import Clock, stop_clock
from unit.node.outcome.requeue.fakes import GO_ON, facts_of, job_environ


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "name" / "my run").make()
    run.job_json.write_text("{}")
    run.claim_attempt({"job_id": "7"}, lambda identity: False)
    return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return stop_clock(monkeypatch, excluded_nodes, next_start, attempt_end, slurm, journal)


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages to the user."""
    lines: list[str] = []
    for module in (attempt_end, chain, job_change, next_start):
        monkeypatch.setattr(module, "say", lines.append)
    monkeypatch.setattr(excluded_nodes, "say", lines.append)
    return lines


@pytest.fixture
def end(run: RunFolder, clock: Clock, printed: list[str]) -> Callable[..., int]:
    """Go on after the run's attempt."""

    def call(decided: Verdict = GO_ON, lost: tuple[str, ...] = (), **values: Any) -> int:
        options = ("continue_by", "time", "time_min", "teardown", "max_requeues")
        spec = {name: values.pop(name) for name in options if name in values}
        records = values.pop("records", ())
        attempt, facts = run.attempt(0), replace(facts_of(run, lost, **spec), records=records)
        return carry_out_verdict(run, attempt, job_environ(**values), facts, decided)

    return call
