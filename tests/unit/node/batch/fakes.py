"""Answers of Slurm and environments for the calls of the batch script."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node import batch
from hpc_ddp.slurm_text import parse_job
from unit.fakes import Slurm

SHOWN_JOB = """\
JobId=7 JobName=x
   JobState={state} Reason=None Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:00 TimeLimit=00:16:40 TimeMin=N/A
   StartTime=2026-11-21T10:00:00 EndTime=2026-11-21T10:01:00 Deadline=N/A
   PreemptEligibleTime=2026-11-21T10:00:00 PreemptTime={preempted}
"""


def show_job(state: str = "RUNNING", restarts: int = 0, preempted: str = "None") -> str:
    """Return what `scontrol show job` prints."""
    return SHOWN_JOB.format(state=state, restarts=restarts, preempted=preempted)


def answer_scontrol(slurm: Slurm, text: str) -> None:
    """Have scontrol answer about the job with `text` from now on, and with two names of nodes."""
    shown = slurm.folder / "shown-job"
    shown.write_text(text)
    slurm.answer_by("scontrol", f"[ $2 = hostnames ] && printf 'n1\\nn2\\n' || cat {shown}")


END = parse_job(show_job()).end_time or 0.0


def write_spec(run: RunFolder, **values: Any) -> JobSpec:
    spec = JobSpec("train.py", **values)
    run.job_json.write_text(spec.to_json())
    return spec


def job_environ(run: RunFolder, **values: str) -> dict[str, str]:
    return {
        **{"HPC_DDP_RUN": str(run.path), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"},
        **{"PATH": os.environ["PATH"], **values},
    }


def step_environ(run: RunFolder, **values: str) -> dict[str, str]:
    return job_environ(
        run,
        **{
            "HPC_DDP_ATTEMPT": "0",
            "HPC_DDP_RESTARTS": "0",
            "HPC_DDP_END_TIME": f"{END:.0f}",
        }
        | values,
    )


def write_record(attempt: AttemptFolder, node: str, **values: Any) -> None:
    attempt.node(node).path.mkdir(exist_ok=True)
    record = {"node": node, "code": 0, "notice": None, "failures": [], **values}
    attempt.node(node).record.write_text(json.dumps(record))


def call_batch(monkeypatch: pytest.MonkeyPatch, run: RunFolder, *argv: str, **values: str) -> int:
    """Run a command of the batch script in the environment of a job, and return its code."""
    for name, value in job_environ(run, **values).items():
        monkeypatch.setenv(name, value)
    return batch.main([*argv])
