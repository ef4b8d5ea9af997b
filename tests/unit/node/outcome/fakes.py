"""Facts of an attempt, for its verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.events import JournalEvent
from hpc_ddp.node.outcome.attempt_facts import AttemptFacts
from hpc_ddp.node.outcome.verdict import Verdict, decide
from hpc_ddp.slurm_text import Job
from tests.raw_events import typed

RUNNING = Job("RUNNING", "None", 0, None, 1000.0)


def event_of(event: str, attempt: int = 0, **fields: Any) -> JournalEvent:
    return typed(event, 0.0, attempt, **fields)


def record_of(node: str, notice: str | None = None, **failure: Any) -> dict[str, Any]:
    failures = [{"rank": 0, "code": 1, "time": 1.0, "error": "", **failure}] if failure else []
    return {"node": node, "code": len(failures), "notice": notice, "failures": failures}


FINE = (record_of("n1"), record_of("n2"))


BASE = AttemptFacts(
    spec=JobSpec("t.py"),
    attempt=0,
    cancelled=False,
    superseded=False,
    job=RUNNING,
    restarts=0,
    nodes=("n1", "n2"),
    records=FINE,
    events=(event_of("first_step", step=1),),
)


def decide_by(**changes: Any) -> Verdict:
    return decide(replace(BASE, **changes))


def failed_records(**failure: Any) -> tuple[dict[str, Any], ...]:
    return (record_of("n1", **{"error": "ValueError: boom", **failure}), record_of("n2", code=-15))


def decide_elastic(*records: dict[str, Any], **changes: Any) -> Verdict:
    return decide_by(spec=JobSpec("t.py", nodes=2, elastic=True), records=records, **changes)
