"""The end of the job's time, which an operator may change, and the notices ahead of it."""

from __future__ import annotations

import contextlib
import math
import time

from hpc_ddp.core.attempt_env import AttemptEnv
from hpc_ddp.core.file_io import read_seconds, read_word
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.journal.enums import NoticeSource
from hpc_ddp.node.outcome.requeue.next_start import ask_about_job
from hpc_ddp.slurm_text import Job

ASK_SHARE = 0.2  # of the time that is left: the pause until Slurm is asked for the end time again
ASK_LEAST_S, ASK_MOST_S = 5.0, 3600.0  # also without a limit: an operator may set one
SAME_S = 3.0  # how far two answers about the same end may lie apart: Slurm counts whole seconds


def give_warning(environ: dict[str, str]) -> None:
    """Write the attempt's notice, for the supervisors of all nodes, after Slurm's warning signal.

    Slurm may send the signal up to a minute early: this waits until the warning is due, and
    meanwhile keeps ``end-time`` up to date. It does not wait at a preemption, which some sites
    announce by the signal too, or where Slurm does not tell the end of the job's time. Raise
    OSError if the notice can't be written."""
    job = ask_about_job(environ["SLURM_JOB_ID"])
    while job and not job.preempted and (end_time := end_of(job)) is not None:
        note_end_time(environ, end_time)
        if not _await_warning(environ, end_time):
            break
        job = ask_about_job(environ["SLURM_JOB_ID"])
    source = NoticeSource.PREEMPTION if job and job.preempted else NoticeSource.WARNING_SIGNAL
    attempt_of(environ).notice.write_text(source)


def watch_end_time(environ: dict[str, str]) -> None:
    """Keep the attempt's ``end-time`` file up to date with Slurm; return once the nodes are due to
    be warned, a preemption begins, or the user has interrupted the script in an allocation.

    An operator may extend or shorten a limit, and a job that was suspended ends later. Slurm is
    asked more often at first and towards the end; without an answer the last one counts. A
    preemption becomes the attempt's notice, as Slurm's signal reaches no step that begins later."""
    end_time, most_s = end_time_at_start(environ), ASK_LEAST_S
    while _await_warning(environ, end_time, most_s):
        most_s = min(2 * most_s, ASK_MOST_S)
        job = ask_about_job(environ["SLURM_JOB_ID"], is_quiet=True)
        if read_word(attempt_of(environ).notice) == NoticeSource.INTERRUPTED:
            return  # `give_notice_of_interrupt` has noted an end before the allocation's
        if job and job.preempted:  # Slurm now tells the end of the grace time
            with contextlib.suppress(OSError):
                attempt_of(environ).notice.write_text(NoticeSource.PREEMPTION)
            return
        if (new_end := end_of(job)) is not None:
            end_time = new_end
            note_end_time(environ, end_time)


def end_of(job: Job | None) -> float | None:
    """Return when a job's time is over, in unix seconds of this host's clock: inf without a limit,
    None where Slurm does not say."""
    return None if job is None or job.left_s is None else time.time() + job.left_s


def give_notice_of_interrupt(environ: dict[str, str]) -> None:
    """Write the attempt's notice after the user has interrupted the script in an allocation; note
    an end time ``warn_s`` seconds from now, unless an earlier one is noted. Raise OSError if the
    notice can't be written."""
    attempt_of(environ).notice.write_text(NoticeSource.INTERRUPTED)
    noted_end = read_seconds(attempt_of(environ).end_time) or end_time_at_start(environ)
    note_end_time(environ, min(time.time() + AttemptEnv.from_env(environ).warn_s, noted_end))


def note_end_time(environ: dict[str, str], end_time: float) -> None:
    """Write an end time (unix seconds, or inf) into the attempt's ``end-time``, if it is more than
    `SAME_S` from the noted one. An OSError is passed over: the nodes keep to the noted one."""
    path = attempt_of(environ).end_time
    noted_end = read_seconds(path) or end_time_at_start(environ)
    if abs(end_time - noted_end) > SAME_S:  # False for inf and inf, whose difference is NaN
        with contextlib.suppress(OSError):
            path.write_text(f"{end_time:.0f}")


def _await_warning(environ: dict[str, str], end_time: float, most_s: float = ASK_MOST_S) -> bool:
    """Sleep for a share of the time until the nodes' warning is due, `most_s` seconds at most, and
    return True; if it is due, return False at once. `end_time` is the end of the job's time in unix
    seconds, or inf."""
    early_s = end_time - AttemptEnv.from_env(environ).warn_s - time.time()
    if early_s <= 0:
        return False
    time.sleep(min(early_s, max(ASK_LEAST_S, ASK_SHARE * early_s), most_s))
    return True


def attempt_of(environ: dict[str, str]) -> AttemptFolder:
    """Return the folder of the attempt that `environ` names; raise KeyError without a run."""
    return AttemptEnv.from_env(environ).attempt_folder


def end_time_at_start(environ: dict[str, str]) -> float:
    """Return the end of the job's time in unix seconds as it was at the attempt's start, inf
    without a limit."""
    return AttemptEnv.from_env(environ).end_time or math.inf
