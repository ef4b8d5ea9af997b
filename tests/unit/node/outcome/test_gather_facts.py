"""The facts that a verdict is made of: since the newest submit, and within the budget."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp import slurm
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
        gather_facts.limit_silent_ends(run, spec)
    run.journal("submit").write(Submitted(first_attempt=12))
    gather_facts.limit_silent_ends(run, spec)
    run.claim_attempt({}, lambda identity: False)
    gather_facts.limit_silent_ends(run, spec)


@pytest.mark.parametrize(
    ("states", "max_requeues", "why"),
    [
        (["PREEMPTED"] * 12, None, None),
        ([*["PREEMPTED"] * 8, "NODE_FAIL", *["PREEMPTED"] * 4], None, None),
        (["PREEMPTED"] * 12, 3, "it was started 14 times"),
        (["NODE_FAIL"] * 12, None, "13 attempts in a row"),
        ([], None, "13 attempts in a row"),  # there is no accounting
    ],
)
def test_preemptions_before_the_first_process_are_no_crashes(
    run: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    states: list[str],
    max_requeues: int | None,
    why: str | None,
) -> None:
    """While a container starts nothing can journal a notice; the accounting knows."""
    run.claim_attempt({"host": "h", "pid": 1}, lambda identity: False)  # of a dry run
    run.claim_attempt({"job_id": "6", "restarts": 0}, lambda identity: False)
    for restarts in range(12):
        run.claim_attempt({"job_id": "7", "restarts": restarts}, lambda identity: False)
    table = {"6": ["PREEMPTED"], "7": states}  # of two jobs of a chain
    monkeypatch.setattr(slurm, "starts_in_accounting", table.__getitem__)
    spec = JobSpec("train.py", max_requeues=max_requeues)
    with pytest.raises(HpcDdpError, match=why) if why else nullcontext():
        gather_facts.limit_silent_ends(run, spec)


@pytest.mark.parametrize(("begins", "why"), [(False, None), (True, "12 attempts in a row")])
def test_boots_in_vain_are_no_crashes(run: RunFolder, begins: bool, why: str | None) -> None:
    """Slurm starts the batch script on the first node, and takes the job back: another one did not
    come up. A job that takes a node down has begun there."""
    for number in range(12):
        attempt = run.claim_attempt({}, lambda identity: False)
        fields = {"cause": "superseded", "action": "none", "why": ""}
        run.journal("batch", number).write(raw("verdict", attempt=number, **fields))
        if begins:
            attempt.node("n2").path.mkdir()
    with pytest.raises(HpcDdpError, match=why) if why else nullcontext():
        gather_facts.limit_silent_ends(run, JobSpec("train.py", nodes=2))


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


STAGED = {"staged-disk"}


def _judge_stage(
    run: RunFolder, staged: set[str] = STAGED, **changes: Any
) -> tuple[Action, str, bool]:
    """Return action and reason of an attempt, and whether its run is unstaged from now on."""
    facts = replace(BASE, **{"events": (), "records": failed_records(), **changes})
    decided = gather_facts.judge_stage(run, facts, decide(facts), staged)
    return decided.action, decided.why, run.unstaged.exists()


LOST = {"records": (record_of("n1"),), "spec": JobSpec("t.py", max_failures=0)}
SPENT = {"spec": JobSpec("t.py", budget_gpu_hours=1), "gpu_hours": 2.0}
HOPELESS = event_of(
    "preflight", ok=False, hopeless=True, bad_nodes=[], why="import torch", report={}
)
LATE = {"events": (event_of("first_step", step=1),), "spec": JobSpec("t.py", max_failures=0)}


@pytest.mark.parametrize(
    "changes",
    [{}, LOST, {"events": (HOPELESS,)}, LATE],
    ids=["failed", "lost", "unfit", "after a step"],
)
def test_the_copy_ends_no_run(run: RunFolder, changes: dict[str, Any]) -> None:
    (run.path / "stage").mkdir()
    action, why, is_unstaged = _judge_stage(run, **changes)
    assert (action, is_unstaged) == (Action.REQUEUE, True)
    assert why.endswith("; next it starts without the copy of --stage")
    assert not (run.path / "stage").exists()
    assert _judge_stage(run, **changes)[0] == Action.GIVE_UP  # once per run


@pytest.mark.parametrize(
    ("staged", "changes"),
    [
        (set(), {}),
        (STAGED, {"records": (record_of("n1"),)}),
        (STAGED, {"cancelled": True}),
        (STAGED, {**LOST, "spec": JobSpec("t.py", max_requeues=0)}),
        (STAGED, SPENT),
        (STAGED, {**SPENT, "events": (HOPELESS,)}),
        (STAGED, {"attempt": 1, "events": (event_of("verdict", 0),), "most_requeues": 1}),
    ],
    ids=["unstaged", "requeued", "cancelled", "limit", "budget", "unfit", "operators"],
)
def test_another_end_is_judged_as_ever(
    run: RunFolder, staged: set[str], changes: dict[str, Any]
) -> None:
    facts = replace(BASE, **{"events": (), "records": failed_records(), **changes})
    action, _, is_unstaged = _judge_stage(run, staged, **changes)
    assert (action, is_unstaged) == (decide(facts).action, False)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_copy_in_memory_goes_where_memory_is_short(run: RunFolder, kind: str) -> None:
    records = failed_records(error="out of memory: killed by the kernel", code=-9)
    events = (event_of("first_step", step=1),)
    action, _, is_unstaged = _judge_stage(run, {f"staged-{kind}"}, records=records, events=events)
    assert (action, is_unstaged) == (Action.REQUEUE, kind == "memory")


FULL = "rank 0: [Errno 28] No space left for 360.0 MB: 349.3 MB are free"


@pytest.mark.parametrize("is_task", [False, True])
@pytest.mark.parametrize("max_failures", [0, 3])
def test_a_parcel_gives_way_where_the_disk_is_full(
    run: RunFolder, max_failures: int, is_task: bool
) -> None:
    """Also one that no attempt has started from yet, which would cost the run its end."""
    run.parcel.mkdir()
    part = run.task(0).make() if is_task else run
    spec = JobSpec("t.py", max_failures=max_failures)
    changes = {"events": LATE["events"], "spec": spec, "records": failed_records(error=FULL)}
    action, _, is_unstaged = _judge_stage(part, set(), **changes)
    assert (action, is_unstaged, run.parcel.exists()) == (Action.REQUEUE, True, False)
    action, _, _ = _judge_stage(part, set(), **changes)
    assert action == (Action.REQUEUE if max_failures else Action.GIVE_UP)


def test_a_task_marks_itself_and_leaves_the_parcel(run: RunFolder) -> None:
    task, sister = run.task(0).make(), run.task(1)
    (run.path / "stage").mkdir()
    assert _judge_stage(task)[2]
    assert (run.path / "stage").exists()
    assert not sister.unstaged.exists()


def test_a_run_that_can_not_be_marked_is_judged_as_ever(run: RunFolder) -> None:
    run.unstaged.symlink_to("no/such/folder")
    assert _judge_stage(run)[0] == Action.GIVE_UP


def test_a_finished_run_has_no_parcel(run: RunFolder) -> None:
    done = (event_of("finished", step=2), *BASE.events)
    (run.path / "stage").mkdir()
    facts = replace(BASE, events=done)
    assert gather_facts.judge_stage(run, facts, decide(facts), STAGED).cause == Cause.FINISHED
    assert not (run.path / "stage").exists()
