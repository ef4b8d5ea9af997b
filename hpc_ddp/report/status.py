"""The state of runs, from their journals and one call to Slurm."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpc_ddp import slurm
from hpc_ddp.report.reasons import in_words
from hpc_ddp.run import goodput, process
from hpc_ddp.run.errors import HpcDdpError, UsageError
from hpc_ddp.run.events import Cancelled
from hpc_ddp.run.folder import RunFolder
from hpc_ddp.run.journal import Event, is_finished, last_event, read_briefly
from hpc_ddp.run.ownership import check_executable
from hpc_ddp.run.ranks import slow_rank
from hpc_ddp.run.slurm_values import parse_time
from hpc_ddp.run.spec import JobSpec


@dataclass(frozen=True)
class Status:
    """One run. `state` and `why` are in plain words.

    Attributes
    ----------
    attempt, nodes
        the newest start, from 0, and how many nodes it has
    step, total_steps, loss, samples_per_s
        what the journal told last
    last_checkpoint_s
        the age of the newest one, in seconds
    time_left_s, eta_s
        of one that runs: seconds to its attempt's time limit, and to its last step at the pace of
        this attempt
    goodput, seconds
        from 0 to 1, and what it comes from (see `hpc_ddp.run.goodput`)
    reason
        Slurm's own word for why it waits
    slow
        the rank that the others wait for, '' where there is none (see `hpc_ddp.run.ranks`)
    results
        what the script gave to ``run.finish``
    rerun_of
        the folder of the run that it is one more of
    """

    run: str
    name: str
    id: str
    state: str
    job_id: str | None
    attempt: int | None
    nodes: int | None
    step: int | None
    total_steps: int | None
    loss: float | None
    samples_per_s: float | None
    last_checkpoint_s: float | None
    time_left_s: float | None
    eta_s: float | None
    goodput: float | None
    seconds: dict[str, float]
    why: str
    reason: str
    slow: str
    results: dict[str, float | None]
    rerun_of: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def status_of(run: RunFolder, queue: Mapping[str, slurm.Queued]) -> Status:
    """Return the state of one run; `queue` is what Slurm still has, by job id."""
    events = read_briefly(run.journal_folder)
    return judge(run, events, run.job_ids(events), queue)


def unreadable(run: RunFolder, why: str) -> Status:
    """Return what can be told of a run whose files are damaged."""
    return replace(judge(run, [], [], {}), state="unreadable", why=why)


def judge(
    run: RunFolder,
    events: Sequence[Event],
    jobs: Sequence[str],
    queue: Mapping[str, slurm.Queued],
) -> Status:
    """Return the state of a run from its journal and the ids of all its jobs."""
    events = list(events)
    started = last_event(events, "started")
    metrics = last_event(events, "metrics") or {}
    saved = last_event(events, "checkpoint")
    queued = [queue[job] for job in jobs if job in queue]
    state, why = _state(run, events, queued)
    if state == _LIVE["PENDING"] and (at_work := sum(_runs(task, queue) for task in run.tasks())):
        state, why = _LIVE["RUNNING"], f"{at_work} tasks run, others wait"
    now = time.time()
    live, running = state in LIVE, state == _LIVE["RUNNING"]
    waits = state == _LIVE["PENDING"]
    seconds = goodput.account(events, now if live else None, waits=waits)
    slow = slow_rank(events) if running else None
    limit = next((job.time_left for job in queued if job.state == "RUNNING"), "")
    moved = last_event(events, "metrics", "checkpoint", "stopped", "finished", "restored")
    return Status(
        run=str(run.path),
        name=run.name,
        id=run.id,
        state=state,
        job_id=jobs[-1] if jobs else None,
        attempt=started["attempt"] if started else None,
        nodes=len(started.get("nodes", ())) or None if started else None,
        step=moved.get("step") if moved else None,
        total_steps=metrics.get("total_steps"),
        loss=metrics.get("loss"),
        samples_per_s=metrics.get("samples_per_s"),
        last_checkpoint_s=now - saved["time"] if saved else None,
        time_left_s=_limit_s(limit) if running else None,
        eta_s=_eta_s(events, metrics, now) if running else None,
        goodput=goodput.share(seconds),
        seconds={part: round(value, 3) for part, value in seconds.items()},
        why=in_words(why, jobs[-1])[0] if waits else why,
        reason=why if waits else "",
        slow=str(slow or ""),
        results=(last_event(events, "finished") or {}).get("results", {}),
        rerun_of=(last_event(events, "rerun") or {}).get("of"),
    )


def _runs(task: RunFolder, queue: Mapping[str, slurm.Queued]) -> bool:
    jobs = task.job_ids(read_briefly(task.journal_folder))
    return any(job in queue and queue[job].state == "RUNNING" for job in jobs)


_LIVE = {
    "PENDING": "waiting",
    "RUNNING": "running",
    "COMPLETING": "ending",
    "SUSPENDED": "suspended",
    "CONFIGURING": "starting",
}
LIVE = tuple(_LIVE.values())


def _limit_s(text: str) -> float | None:
    """Return squeue's time left in seconds; None for one without a limit."""
    try:
        return float(parse_time(text))
    except UsageError:
        return None


def _eta_s(events: Sequence[Event], metrics: Event, now: float) -> float | None:
    """Return the seconds to the last step at the mean pace of this start, saves and all."""
    first = last_event(list(events), "first_step", "worker") or {}
    total, step = metrics.get("total_steps"), metrics.get("step", 0)
    done = step - first.get("step", step)
    if first.get("event") != "first_step" or not total or done <= 0:
        return None
    pace_s = (metrics["time"] - first["time"]) / done
    left_s = (total - step) * pace_s - (now - metrics["time"])
    return max(0.0, float(left_s))


def _state(
    run: RunFolder, events: Sequence[Event], queued: Sequence[slurm.Queued]
) -> tuple[str, str]:
    if is_finished(list(events)):
        return "finished", ""
    if run.cancelled.exists():
        return "cancelled", ""
    live = next((job for job in queued if job.state in _LIVE), None)
    last = last_event(list(events), "submitted", "started", "verdict")
    # The last task of an array has the array's own id, and others may still run.
    over = run.is_task and last is not None and last.get("action", "requeue") != "requeue"
    if live and not over:
        reason = live.reason if live.state == "PENDING" else live.nodes
        return _LIVE[live.state], reason
    tasks = run.tasks()
    here = last is not None and "pid" in last and process.is_live(last)
    if tasks and not here:
        return _of_tasks(run, tasks)
    if last is None:
        return "rendered", "never submitted"
    if last["event"] != "verdict":
        return _without_verdict(last, queued, events)
    if last["action"] == "requeue":
        return "stopped", f"{last['why']}; can go on with --run"
    return ("failed" if last["action"] == "give up" else last["cause"]), last["why"]


def _of_tasks(run: RunFolder, tasks: Sequence[RunFolder]) -> tuple[str, str]:
    """Tell what became of an array that is gone from the queue."""
    indexes = [task.index for task in tasks]
    with suppress(HpcDdpError, ValueError):  # a broken file of one run must not hide all others
        indexes = JobSpec.from_json(run.job_json.read_text()).indexes(indexes)
    done, total = sum(task.finished() for task in tasks), len(indexes)
    return "finished" if done == total else "array", f"{done} of {total} tasks finished"


def _without_verdict(
    last: Event, queued: Sequence[slurm.Queued], events: Sequence[Event]
) -> tuple[str, str]:
    """Tell what became of a job that is gone from the queue, or of a process of this machine."""
    if "pid" in last:
        if process.is_live(last):
            return "running", "on this machine"
        # Nobody judges a plain start of the script: its own word is all there is.
        here = [e for e in events if e["attempt"] == last["attempt"]]
        end = last_event(here, "stopped", "failed") if last.get("backend") == "local" else None
        if end and end["event"] == "stopped":
            why = f"{end.get('reason')} ({end['source']})" if "source" in end else end.get("reason")
            return "stopped", f"{why}, at step {end.get('step')}; can go on with the same command"
        if end:
            first = next(e for e in here if e["event"] == "failed")
            return "failed", f"rank {first.get('rank')}: {first.get('error')}"
        return "lost", "ended without a word"
    gone = next((job.state.lower() for job in queued), "gone from the queue")
    return "lost", gone


def queue() -> Mapping[str, slurm.Queued]:
    """Return what Slurm still has, by job id; nothing without a Slurm, or an answer."""
    try:
        return slurm.queue()
    except HpcDdpError:
        return {}


def has_ended(run: RunFolder) -> bool:
    """Tell whether nothing more will come of a run by itself; without an answer, not yet."""
    if run.finished() or run.cancelled.exists():
        return True
    local = "pid" in (last_event(run.events(), "started") or {})
    try:
        jobs = {} if local else slurm.queue()
    except HpcDdpError:
        return False
    return status_of(run, jobs).state not in {*LIVE, "rendered"}


def cancel(run: RunFolder) -> None:
    """End a run for good. The mark comes first, so that a verdict just made sees it.

    Raises
    ------
    UsageError
        it is finished: there is nothing to cancel; or another user could have written which process
        and which jobs are to end
    """
    check_executable(run)
    if run.finished():
        raise UsageError(f"run {run.path} is finished", hint=f"hpc-ddp status {run.id}")
    jobs: list[str] = []
    for each in (run, *run.tasks()):
        if each.finished():
            continue
        each.cancelled.touch()
        events = each.events()
        each.journal("submit").write(Cancelled())
        started = last_event(events, "started")
        if started and process.is_live(started):
            os.kill(started["pid"], signal.SIGTERM)
        jobs += each.job_ids(events)
    if run.is_task:
        jobs = _own_jobs(run, jobs)
    if jobs:
        slurm.cancel(jobs)


def _own_jobs(task: RunFolder, jobs: Sequence[str]) -> list[str]:
    """Return what names a task's jobs and no other one's: the last one of an array has its id."""
    whole = RunFolder(task.whole)
    arrays = whole.job_ids(whole.events())
    mine = [f"{each}_{task.index}" for each in arrays]
    return [*mine, *(job for job in jobs if job not in arrays)]


def columns(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return rows of values below a header, in columns as wide as they need be."""
    cells = [["-" if value is None else str(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in ([*header], *cells)
    )
    return "\n".join(lines)


def age(seconds: float) -> str:
    """Return a time span in its biggest unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
