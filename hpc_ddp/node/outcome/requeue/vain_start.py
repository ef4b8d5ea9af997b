"""Starts that came to nothing: the disk refused them, Slurm ended them, or set-up lines failed.

There is no attempt to judge then. The bound is `max_failures`, as for the starts of a node.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from hpc_ddp.core.attempt_env import AWAY_S, INTERACTIVE
from hpc_ddp.core.console.terminal import answer, say
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.file_io import patiently, read_json
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.task_folder import run_of_job
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome.pauses import PAUSES_S
from hpc_ddp.node.outcome.requeue.attempt_end import noted_restarts
from hpc_ddp.node.outcome.requeue.chain import leave_to_the_user, own_id, record_vain_start
from hpc_ddp.node.outcome.requeue.excluded_nodes import note_vain_node
from hpc_ddp.node.outcome.requeue.next_start import VERDICT_S, EndedStart, ask_about_job, go_on

LAST_S = 60.0  # of a pause, in which a start is not put off


def end_for_disk(call: str, environ: dict[str, str], error: OSError) -> int:
    """Print that the disk has refused a call of the batch script by `error`, and how the run goes
    on; return the exit code. After ``first-job``, ``begin`` and ``verdict`` the run goes on by
    itself (`_start_again`): the code is then 0, and the batch shell ends. Else it is
    `CAN_GO_ON`."""
    say(f"the run's folder can't be used: {error}")
    if call not in ("first-job", "begin", "verdict"):
        return leave_to_the_user(environ)
    code = _start_again(environ, PAUSES_S)
    if call != "verdict" and code == 0:
        answer("exit 0")
    return code


def go_on_after_cut_off(environ: dict[str, str]) -> int:
    """Have the run go on after a start that Slurm ends before the attempt, as in the set-up lines,
    at the time limit or by a preemption where PreemptMode is CANCEL, and print that; not after a
    scancel. Return as `_start_again`."""
    say("Slurm ends the job before its attempt")
    return _start_again(environ)


def go_on_after_failed_setup(environ: dict[str, str], code: int) -> int:
    """Return the exit code for a job whose set-up lines have ended with `code`, which is not 0.
    Where the run, or a task of its array, has had an attempt the lines have worked before: what
    they lack, data or room on a disk, may come back, so the run goes on (`_start_again`), and the
    code is 0 if it does. Else it is `code`, as in an allocation."""
    try:
        run = run_of_job(environ, makes=False)
        parts = (run, *(RunFolder(run.whole).tasks() if run.is_task else ()))
        has_worked = any(part.attempts() for part in parts)
    except OSError:
        has_worked = False
    if INTERACTIVE in environ or not has_worked:
        say(f"the set-up lines have ended the job, with code {code}: nothing was started")
        return code
    say(f"the set-up lines have ended with code {code}; in an earlier start they did not")
    note_vain_node(run, environ.get("SLURMD_NODENAME", socket.gethostname()))
    return 0 if _start_again(environ, PAUSES_S) == 0 else code


def keep_pause(environ: dict[str, str]) -> bool:
    """Return whether this start comes before its pause is over, and has been put off by the rest of
    it (`_start_again`): Slurm has not taken the pause. Raise as `run_of_job`."""
    if INTERACTIVE in environ or not _left_of_pause(run_of_job(environ, makes=False), environ):
        return False
    say("Slurm has started the job before the end of its pause")
    return _start_again(environ) == 0


def _left_of_pause(run: RunFolder, environ: dict[str, str]) -> float:
    """Return the seconds that are left of the pause that is noted for this job; 0 without one, and
    in its last minute, since a requeue takes two."""
    left_s = read_json(run.pauses).get(own_id(environ), 0.0) - time.time()
    return left_s if left_s > LAST_S else 0.0


def _start_again(environ: dict[str, str], pauses_s: Sequence[float] = (0.0,)) -> int:
    """Have the run go on (`go_on`) after a start or verdict that has come to nothing by no fault of
    the run, put off by the rest of its pause, or by one of `pauses_s` after the other, or else the
    last. Return 0 if it does, else `CAN_GO_ON`, with the command for the user printed: in an
    allocation, after more than ``max_failures`` starts in vain in a row, unless this one is excused
    (it was early, or Slurm took it away), where a bound permits no start, or where job.json or the
    run's folder can't be used."""
    if INTERACTIVE in environ:
        return leave_to_the_user(environ)
    try:
        run = run_of_job(environ, makes=False)
        end = float(environ.get("HPC_DDP_END_TIME") or math.inf) - VERDICT_S
        patience_s = min(AWAY_S, end - time.time())
        spec = patiently(partial(_spec_of, run), patience_s)
        start = patiently(partial(_this_start, run, spec, environ), patience_s)
        job = ask_about_job(start.job_id, give_up=start.give_up)
        left_s = _left_of_pause(run, environ)
        # By a preemption, say, of which a job's record tells no more once Slurm has requeued it.
        was_taken = job is not None and (job.preempted or job.restarts > start.restarts)
        is_excused = was_taken or left_s > 0
        count = _count_vain_starts(start, environ, is_excused)
        pause_s = left_s or pauses_s[min(max(count, 1), len(pauses_s)) - 1]
        start = replace(start, pause_s=pause_s, is_early=left_s > 0)
        if start.is_last or (count > spec.max_failures and not is_excused):
            say(f"the job was requeued {start.restarts} times, {count} starts came to nothing")
            return leave_to_the_user(environ)
        code = go_on(start, job)
    except (OSError, HpcDdpError) as error:
        say(str(error))
        return leave_to_the_user(environ)
    if code == 0 and not is_excused:
        say(f"starts that came to nothing: {count} of at most {spec.max_failures}")
    return code


def _spec_of(run: RunFolder) -> JobSpec:
    """Return a run's job, of a task for whose folder the disk has had no room that of its array.
    Raises OSError where it can't be read, UsageError where it is broken."""
    paths = run.job_json, RunFolder(run.whole).job_json
    return JobSpec.from_json(next(filter(Path.exists, paths), paths[-1]).read_bytes())


def _this_start(run: RunFolder, spec: JobSpec, environ: dict[str, str]) -> EndedStart:
    """Return this start of the job. Raises OSError where the run's folder can't be read."""
    job_id, attempts, restarts = environ["SLURM_JOB_ID"], run.attempts(), noted_restarts(environ)
    if not attempts:
        return EndedStart(run, spec, environ, restarts, newest=-1)
    newest, start = attempts[-1], {"job_id": job_id, "restarts": restarts}
    attempt = newest if start.items() <= newest.info.items() else None
    return EndedStart(run, spec, environ, restarts, newest.number, attempt)


def _count_vain_starts(start: EndedStart, environ: dict[str, str], is_excused: bool) -> int:
    """Record a start that has begun no attempt, and return how many have come to nothing since the
    run's newest attempt, this one included unless it `is_excused`; 0 after an attempt. Where the
    disk has no room for the record, each start of the job since its newest attempt counts, whatever
    has ended it. Raises OSError where the run's folder can't be read."""
    if start.attempt:
        return 0
    try:
        return record_vain_start(start.run, environ, not is_excused)
    except OSError:
        numbers = [
            attempt.info["restarts"]
            for attempt in start.run.attempts()
            if attempt.info.get("job_id") == environ["SLURM_JOB_ID"]
        ]
        return start.restarts - max(numbers, default=-1)
