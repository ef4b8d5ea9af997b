"""The state of runs, from their journals and one call to Slurm."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from hpc_ddp import slurm
from hpc_ddp.run import goodput, process
from hpc_ddp.run.errors import HpcDdpError, UsageError
from hpc_ddp.run.folder import RunFolder
from hpc_ddp.run.journal import Event, is_finished, last_event
from hpc_ddp.run.spec import JobSpec


@dataclass(frozen=True)
class Status:
    """One run. `state` is in plain words; `last_checkpoint_s` is the age in seconds.

    `goodput` is from 0 to 1, `seconds` what it comes from (see `hpc_ddp.run.goodput`), `results`
    what the script gave to ``run.finish``, `rerun_of` the folder of the run that it is one more of.
    """

    run: str
    name: str
    id: str
    state: str
    job_id: str | None
    attempt: int | None
    step: int | None
    total_steps: int | None
    loss: float | None
    last_checkpoint_s: float | None
    goodput: float | None
    seconds: dict[str, float]
    why: str
    results: dict[str, float | None]
    rerun_of: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def status_of(run: RunFolder, queue: Mapping[str, slurm.Queued]) -> Status:
    """Return the state of one run; `queue` is what Slurm still has, by job id."""
    events = run.events()
    started = last_event(events, "started")
    metrics = last_event(events, "metrics") or {}
    saved = last_event(events, "checkpoint")
    jobs = run.job_ids(events)
    state, why = _state(run, events, [queue[job] for job in jobs if job in queue])
    now = time.time()
    live = state in _LIVE.values()
    seconds = goodput.account(events, now if live else None, waits=state == _LIVE["PENDING"])
    moved = last_event(events, "metrics", "checkpoint", "stopped", "finished", "restored")
    return Status(
        run=str(run.path),
        name=run.name,
        id=run.id,
        state=state,
        job_id=jobs[-1] if jobs else None,
        attempt=started["attempt"] if started else None,
        step=moved.get("step") if moved else None,
        total_steps=metrics.get("total_steps"),
        loss=metrics.get("loss"),
        last_checkpoint_s=now - saved["time"] if saved else None,
        goodput=goodput.share(seconds),
        seconds={part: round(value, 3) for part, value in seconds.items()},
        why=why,
        results=(last_event(events, "finished") or {}).get("results", {}),
        rerun_of=(last_event(events, "rerun") or {}).get("of"),
    )


_LIVE = {
    "PENDING": "waiting",
    "RUNNING": "running",
    "COMPLETING": "ending",
    "SUSPENDED": "suspended",
    "CONFIGURING": "starting",
}


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
    points: list[dict[str, str]] = []
    with suppress(HpcDdpError):  # a broken file of one run must not hide all others
        points = JobSpec.from_json(run.job_json.read_text()).points
    done, total = sum(task.finished() for task in tasks), len(points) or len(tasks)
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
    return status_of(run, jobs).state not in {*_LIVE.values(), "rendered"}


def cancel(run: RunFolder) -> None:
    """End a run for good. The mark comes first, so that a verdict just made sees it.

    Raises
    ------
    UsageError
        it is finished: there is nothing to cancel
    """
    if run.finished():
        raise UsageError(f"run {run.path} is finished", hint=f"hpc-ddp status {run.id}")
    jobs: list[str] = []
    for each in (run, *run.tasks()):
        if each.finished():
            continue
        each.cancelled.touch()
        events = each.events()
        each.journal("submit").write("cancelled")
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


COLUMNS = ("name", "id", "job", "state", "attempt", "step", "loss", "saved", "goodput", "why")


def table(rows: Sequence[Status]) -> str:
    """Return the rows as a table for a person."""
    return columns(COLUMNS, [_row(row) for row in rows])


def columns(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return rows of values below a header, in columns as wide as they need be."""
    cells = [["-" if value is None else str(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in ([*header], *cells)
    )
    return "\n".join(lines)


def _row(row: Status) -> tuple[Any, ...]:
    step = f"{row.step}/{row.total_steps}" if row.total_steps else row.step
    saved = None if row.last_checkpoint_s is None else f"{age(row.last_checkpoint_s)} ago"
    loss = None if row.loss is None else f"{row.loss:.4g}"
    good = None if row.goodput is None else f"{row.goodput:.0%}"
    return row.name, row.id, row.job_id, row.state, row.attempt, step, loss, saved, good, row.why


def age(seconds: float) -> str:
    """Return a time span in its biggest unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
