"""The end of a step that does not end by itself: its srun is killed, so that the verdict can come.

srun waits for each of its tasks, and longer than Slurm lets the batch shell live after the time
limit: a node that does not answer, or a task that nothing can kill, would cost the run its requeue.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from hpc_ddp import slurm
from hpc_ddp.core.attempt_env import AttemptEnv
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.file_io import patiently, read_seconds
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.process import children_by_parent, proc_text
from hpc_ddp.node.outcome.attempt_facts import silent_nodes
from hpc_ddp.node.outcome.requeue.next_start import ask_about_job

POLL_S = 10.0
ENDED_S = 60.0  # how long srun may take once all nodes have recorded their end
KEPT_S = 8.0  # of the batch shell's life after the time limit, for the verdict
KILL_WAIT_S = 30.0  # Slurm's default: from the time limit's SIGTERM to SIGKILL
ANSWER_S = 5.0
LAUNCHERS = ("srun", "mpirun", "orterun", "prterun", "ibrun")


def guard_step(environ: dict[str, str], shell: int) -> None:
    """Kill the launchers of the batch script, whose process id is `shell` (`_kill_step`), where the
    step would leave no time for the verdict: `ENDED_S` after all nodes have recorded their end, and
    `KEPT_S` before Slurm ends the batch shell at the time limit.

    Looks each `POLL_S` or sooner, for ever: the caller ends the process. Returns only where
    job.json is broken or can't be read, which is printed. Raises KeyError without a run or a job in
    `environ`.
    """
    env = AttemptEnv.from_env(environ)
    try:
        spec = JobSpec.from_json(patiently(env.run_folder.job_json.read_bytes))
    except (OSError, UsageError) as error:
        say(f"a step that does not end by itself is not ended before the time limit: {error}")
        return
    grace_s = _kill_wait() - KEPT_S
    ended_at: float | None = None
    while True:
        time.sleep(_pause(env, grace_s))
        # None again: a start whose port was taken deletes the records.
        ended_at = (ended_at or time.monotonic()) if _have_all_ended(env, spec) else None
        if ended_at is not None and time.monotonic() - ended_at > ENDED_S:
            _kill_step(shell, "all nodes have ended, and srun has not")
        elif _is_last_moment(env, environ["SLURM_JOB_ID"], grace_s):
            _kill_step(shell, "the time limit is over, and the step has not ended")


def _kill_wait() -> float:
    """Ask Slurm for the cluster's KillWait, and return it in seconds; `KILL_WAIT_S` without an
    answer."""
    try:
        return float(slurm.show_config().get("KillWait", "").split()[0])  # as in "30 sec"
    except (HpcDdpError, ValueError, IndexError):
        return KILL_WAIT_S


def _pause(env: AttemptEnv, grace_s: float) -> float:
    """Return the seconds until the next look, 1 to `POLL_S`. A look is due at the latest `grace_s`
    seconds after the job's time limit."""
    return max(1.0, min(POLL_S, _end_time(env) + grace_s - time.time()))


def _end_time(env: AttemptEnv) -> float:
    """Return the end of the job's time in unix seconds, inf without a limit: that in the attempt's
    file ``end-time``, which `end_time.watch_end_time` keeps up to date, else that in `env`."""
    end_time = read_seconds(env.attempt_folder.end_time) or env.end_time
    return float("inf") if end_time is None else end_time


def _have_all_ended(env: AttemptEnv, spec: JobSpec) -> bool:
    """Return whether all tasks of all nodes have recorded their end; False where the disk can't be
    read, or a record is damaged. To spare the disk, the other nodes' records are read only where
    the first node has one."""
    attempt = env.attempt_folder
    try:
        nodes = list(env.nodes)
        if not attempt.node(nodes[0]).records():
            return False
        return not silent_nodes(spec, nodes, attempt.records())
    except (OSError, ValueError, KeyError, TypeError):  # a damaged record is the verdict's matter
        return False


def _is_last_moment(env: AttemptEnv, job_id: str, grace_s: float) -> bool:
    """Return whether Slurm ends the batch shell within seconds: the job's time ended more than
    `grace_s` seconds ago by `_end_time`, and also by Slurm's record of the job, for which Slurm is
    asked only then.

    A record without the time that is left, or of a job that Slurm is ending, confirms this. False
    where Slurm does not answer within `ANSWER_S`, since it then ends nothing, and for a preempted
    job, which Slurm itself requeues."""
    if time.time() < _end_time(env) + grace_s:
        return False
    job = ask_about_job(job_id, is_quiet=True, give_up=time.monotonic() + ANSWER_S)
    if job is None or job.preempted:
        return False
    # Once Slurm, which looks at limits twice a minute, ends the job, `left_s` no longer shrinks.
    is_ending = job.state in ("COMPLETING", "TIMEOUT")
    return is_ending or job.left_s is None or job.left_s + grace_s <= 0


def _kill_step(shell: int, why: str) -> None:
    """Send SIGKILL to the `LAUNCHERS` and preflights among the children of the batch script, whose
    process id is `shell`; print the name of each, and the reason `why`. A process that is gone, or
    can't be killed, is passed over."""
    for pid in children_by_parent().get(shell, []):
        with suppress(OSError):
            name = proc_text(pid, "comm").strip()
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")  # name: of Python there
            if name in LAUNCHERS or b"preflight.driver" in words:
                say(f"{why}: {name} is killed, so that the verdict can come")
                os.kill(pid, signal.SIGKILL)
