"""Starts that came to nothing: the disk refused them, or Slurm ended their set-up lines.

There is no attempt to judge then. The bound is `max_failures`, as for the starts of a node.
"""

from __future__ import annotations

import math

from hpc_ddp.core.attempt_env import INTERACTIVE
from hpc_ddp.core.console.terminal import answer, say
from hpc_ddp.core.errors import CAN_GO_ON, HpcDdpError
from hpc_ddp.core.file_io import read_json
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.task_folder import run_of_job
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome.requeue.attempt_end import noted_restarts
from hpc_ddp.node.outcome.requeue.chain import command_to_go_on, record_vain_job
from hpc_ddp.node.outcome.requeue.next_start import EndedStart, go_on


def end_for_disk(call: str, environ: dict[str, str], error: OSError) -> int:
    """Print that the disk has refused a call of the batch script by `error`, and how the run goes
    on; return the exit code. After ``begin`` and ``verdict`` the run goes on by itself
    (`_start_again`): the code is then 0, and the batch shell ends. Else it is `CAN_GO_ON`."""
    say(f"the run's folder can't be used: {error}")
    if call not in ("begin", "verdict"):
        say(f"once it can: {command_to_go_on(environ)}")
        return CAN_GO_ON
    code = _start_again(environ)
    if call == "begin" and code == 0:
        answer("exit 0")
    return code


def go_on_after_cut_off_setup(environ: dict[str, str]) -> None:
    """Have the run go on after set-up lines that Slurm ends, at the time limit or by a preemption
    where PreemptMode is CANCEL (`_start_again`), and print that; not after a scancel."""
    say("Slurm ends the job in its set-up lines")
    _start_again(environ)


def _start_again(environ: dict[str, str]) -> int:
    """Have the run go on (`go_on`) after a start or verdict that has come to nothing by no fault of
    the run. Return 0 if it does, else `CAN_GO_ON`, with the command for the user printed: in an
    allocation, after more than ``max_failures`` starts in vain in a row, where a bound permits no
    start, or where job.json or the run's folder can't be used."""
    try:
        if INTERACTIVE not in environ:
            run = run_of_job(environ)
            spec = JobSpec.from_json(run.job_json.read_bytes())
            start, vain_starts = _this_start(run, spec, environ)
            limit = math.inf if spec.max_requeues is None else spec.max_requeues
            if start.restarts < min(run.most_requeues, limit) and vain_starts <= spec.max_failures:
                if start.link:
                    record_vain_job(run, environ)  # else the link takes this job for failed
                code = go_on(start)
                if code == 0:
                    say(
                        f"starts that came to nothing: {vain_starts} of at most {spec.max_failures}"
                    )
                return code
            say(
                f"the job was requeued {start.restarts} times, {vain_starts} starts came to nothing"
            )
    except (OSError, HpcDdpError) as error:
        say(str(error))
    say(f"once it can: {command_to_go_on(environ)}")
    return CAN_GO_ON


def _this_start(run: RunFolder, spec: JobSpec, environ: dict[str, str]) -> tuple[EndedStart, int]:
    """Return this start of the job, and how many starts of the run have come to nothing since its
    newest attempt, this one included if it has begun none. Raises OSError where the run's folder
    can't be read."""
    job_id, attempts, restarts = environ["SLURM_JOB_ID"], run.attempts(), noted_restarts(environ)
    of_job = [attempt for attempt in attempts if attempt.info.get("job_id") == job_id]
    last_start = max((attempt.info["restarts"] for attempt in of_job), default=-1)
    earlier_jobs = [id for id in read_json(run.vain_jobs) if id != job_id]
    newest = attempts[-1] if attempts else None
    attempt = newest if newest in of_job and last_start == restarts else None
    start = EndedStart(run, spec, environ, restarts, newest.number if newest else -1, attempt)
    return start, restarts - last_start + len(earlier_jobs)
