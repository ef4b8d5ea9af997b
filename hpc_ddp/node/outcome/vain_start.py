"""The requeue of a job whose start came to nothing: the disk refused it, or Slurm ended its set-up.

There is no attempt to judge then. The bound is `max_failures`, as for the starts of a node.
"""

from __future__ import annotations

import math

from hpc_ddp import slurm
from hpc_ddp.core.attempt_env import INTERACTIVE
from hpc_ddp.core.console.terminal import answer, say
from hpc_ddp.core.errors import CAN_GO_ON, HpcDdpError
from hpc_ddp.core.file_io import read_json
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.task_folder import run_of_job
from hpc_ddp.node.outcome.chain import command_to_go_on, own_id
from hpc_ddp.node.outcome.requeue import (
    MAY_BE_REQUEUED,
    ask_about_job,
    is_over,
    noted_restarts,
    prepare_next_start,
)


def end_for_disk(call: str, environ: dict[str, str], error: OSError) -> int:
    """Print that the disk has refused a call of the batch script by `error`, and how the run goes
    on; return the exit code. After ``begin`` and ``verdict`` the job is requeued (`_start_again`):
    the code is then 0, and the batch shell ends. Else it is `CAN_GO_ON`."""
    say(f"the run's folder can't be used: {error}")
    if call in ("begin", "verdict") and _start_again(environ):
        if call == "begin":
            answer("exit 0")
        return 0
    say(f"once it can: {command_to_go_on(environ)}")
    return CAN_GO_ON


def requeue_cut_off_setup(environ: dict[str, str]) -> None:
    """Requeue a job whose set-up lines Slurm ends, at the time limit or by a preemption where
    PreemptMode is CANCEL, and print that (`_start_again`); do nothing in a chain whose next job
    waits already. Raises OSError if that can't be read."""
    if read_json(run_of_job(environ).early_links).get(environ["SLURM_JOB_ID"]):
        return
    if _start_again(environ):
        say("the set-up lines were not done: the job's time was over")
    else:
        say(f"its set-up lines were ended; to go on: {command_to_go_on(environ)}")


def _start_again(environ: dict[str, str]) -> bool:
    """Requeue the job, whose start or verdict has come to nothing by no fault of its run; print
    that, and return True. False where the job or its run is over, or was cancelled or started anew,
    after ``max_failures`` starts in vain in a row, where a bound permits no requeue, in an
    allocation, and where Slurm refuses it or job.json can't be read. Bounds and refusals are
    printed."""
    restarts = noted_restarts(environ)
    job = None if INTERACTIVE in environ else ask_about_job(own_id(environ))
    if job is None or job.restarts != restarts or is_over(job):
        return False
    try:
        run = run_of_job(environ)
        spec = JobSpec.from_json(run.job_json.read_bytes())
        job_id, attempts = environ["SLURM_JOB_ID"], run.attempts()
        starts = [a.info["restarts"] for a in attempts if a.info.get("job_id") == job_id]
        vain_starts = restarts - max(starts, default=-1)  # since the job's newest attempt
        most = min(run.most_requeues, math.inf if spec.max_requeues is None else spec.max_requeues)
        if run.cancelled.exists():
            return False
        if restarts >= most or vain_starts > spec.max_failures:
            say(f"the job was requeued {restarts} times, {vain_starts} starts came to nothing")
            return False
        _requeue(own_id(environ))
        prepare_next_start(run, spec, own_id(environ), job, None, 0.0)
    except (OSError, HpcDdpError) as error:
        say(str(error))
        return False
    say("it is started again")
    return True


def _requeue(job_id: str) -> None:
    """Requeue a job, also one of a chain, or of a site that does not requeue by default; a first
    refusal is printed. Raise HpcDdpError where Slurm refuses it again."""
    try:
        slurm.requeue(job_id)
    except HpcDdpError as error:
        say(error.message)
        slurm.update_job(job_id, MAY_BE_REQUEUED)
        slurm.requeue(job_id)
