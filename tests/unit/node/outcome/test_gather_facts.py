"""The facts that a verdict is made of: since the newest submit, and within the budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.enums import Action, Cause
from hpc_ddp.core.journal.events import Submitted
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome import gather_facts
from hpc_ddp.node.outcome.verdict import decide
from tests.raw_events import raw
from unit.node.outcome.fakes import BASE, event_of, failed_records, record_of


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


def _judge_stage(run: RunFolder, is_staged: bool = True, **changes: Any) -> tuple[Action, str, str]:
    """Return action and reason of an attempt that has failed, and what its parcel has then."""
    parcel = run.path / "stage"
    parcel.mkdir()
    (parcel / "label").touch()
    facts = replace(BASE, **{"events": (), "records": failed_records(), **changes})
    decided = gather_facts.judge_stage(run, facts, decide(facts), is_staged)
    return decided.action, decided.why, " ".join(path.name for path in parcel.glob("*"))


LOST = {"records": (record_of("n1"),), "spec": JobSpec("t.py", max_failures=0)}
HOPELESS = event_of(
    "preflight", ok=False, hopeless=True, bad_nodes=[], why="import torch", report={}
)


@pytest.mark.parametrize(
    "changes", [{}, LOST, {"events": (HOPELESS,)}], ids=["failed", "lost", "unfit"]
)
def test_an_early_end_from_the_copy_is_not_the_runs(
    run: RunFolder, changes: dict[str, Any]
) -> None:
    action, why, parcel = _judge_stage(run, **changes)
    assert (action, parcel) == (Action.REQUEUE, "refused")
    assert why.endswith("; next it starts without the copy of --stage")


@pytest.mark.parametrize(
    "changes", [{"events": (event_of("first_step", step=1),)}, {"is_staged": False}], ids=str
)
def test_another_end_is_judged_as_ever(run: RunFolder, changes: dict[str, Any]) -> None:
    assert _judge_stage(run, **changes)[2] == "label"


def test_a_limit_of_requeues_holds_for_the_copy_too(run: RunFolder) -> None:
    spec = JobSpec("t.py", max_requeues=0)
    action, _, parcel = _judge_stage(run, spec=spec)
    assert (action, parcel) == (Action.GIVE_UP, "refused")


def test_a_finished_run_has_no_parcel(run: RunFolder) -> None:
    done = (event_of("finished", step=2), *BASE.events)
    (run.path / "stage").mkdir()
    facts = replace(BASE, events=done)
    assert gather_facts.judge_stage(run, facts, decide(facts), True).cause == Cause.FINISHED
    assert not (run.path / "stage").exists()
