"""Verdicts, and answers of Slurm, after an attempt."""

from __future__ import annotations

import os
from typing import Any

from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.enums import Action, Cause
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome.attempt_facts import AttemptFacts
from hpc_ddp.node.outcome.verdict import Verdict
from tests.raw_events import raw
from unit.fakes import Slurm

SHOWN_JOB = (
    "   JobState={} Reason=None\n   Requeue=1 Restarts={} BatchFlag=1\n"
    "   ReqNodeList=(null) ExcNodeList=(null)\n"
)

RUNNING = f"printf '{SHOWN_JOB.format('RUNNING', 2)}'"
GO_ON = Verdict(Cause.PREEMPTED, Action.REQUEUE, "")


def job_environ(**values: str) -> dict[str, str]:
    return {"SLURM_JOB_ID": "7", "HPC_DDP_RESTARTS": "2", "PATH": os.environ["PATH"], **values}


def facts_of(run: RunFolder, lost: tuple[str, ...] = (), **spec: Any) -> AttemptFacts:
    fields: dict[str, Any] = dict.fromkeys(("cancelled", "superseded"), False)
    fields |= {"job": None, "restarts": 2, "nodes": (), "records": (), "events": run.events()}
    return AttemptFacts(spec=JobSpec("t.py", **spec), attempt=0, lost_nodes=lost, **fields)


def changes_of(slurm_commands: Slurm) -> list[list[str]]:
    return [words for words in slurm_commands.calls("scontrol") if words[0] != "show"]


def exclude_nodes(slurm_commands: Slurm, nodes: str) -> None:
    """Have Slurm keep the job off some nodes already: ``n[8-9]``, with or without n2."""
    shown = SHOWN_JOB.format("RUNNING", 2).replace("ExcNodeList=(null)", f"ExcNodeList={nodes}")
    shown += "   Partition=small Reservation=(null)\\n"
    names = "n2\nn8\nn9\n" if "2" in nodes else "n8\nn9\n"
    answer = f"[ $2 = hostnames ] && printf '{names}' || printf '{shown}'"
    slurm_commands.answer_by("scontrol", answer)


def blame_nodes(run: RunFolder, *nodes: str) -> None:
    values: dict[str, Any] = {"cause": "node lost", "action": "requeue", "why": ""}
    run.journal("batch").write(raw("verdict", **values, bad_nodes=nodes))
