"""The facts that a verdict is made of: since the newest submit, and within the budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.events import Submitted
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome import gather_facts
from tests.raw_events import raw


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "name" / "run").make()


def test_a_submit_counts_ends_without_a_verdict_anew(run: RunFolder) -> None:
    spec = JobSpec("train.py", nodes=2)
    for _ in range(12):
        run.claim_attempt({}, lambda identity: False)
    with pytest.raises(HpcDdpError, match="12 attempts in a row ended without a verdict"):
        gather_facts.check_silent_ends(run, spec)
    run.journal("submit").write(Submitted(first_attempt=12))
    gather_facts.check_silent_ends(run, spec)
    run.claim_attempt({}, lambda identity: False)
    gather_facts.check_silent_ends(run, spec)


def test_fixed_code_has_its_budgets_anew(run: RunFolder) -> None:
    journal = run.journal
    journal("submit").write(raw("submitted"))
    journal("batch", 0).write(raw("verdict", cause="failed", action="requeue", why=""))
    journal("submit").write(raw("submitted", first_attempt=1))
    journal("batch", 1).write(raw("started"))
    assert [event.event for event in gather_facts.since_submit(run.events())] == ["started"]
    assert gather_facts.since_submit([]) == []


def test_hours_are_measured_for_a_budget_only(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "gpu_hours", lambda run, gpus: 10.0 * gpus)
    assert gather_facts._gpu_hours(run, JobSpec("t.py")) == 0.0
    assert (
        gather_facts._gpu_hours(run, JobSpec("t.py", budget_gpu_hours=1, gpus_per_node="4")) == 40.0
    )
