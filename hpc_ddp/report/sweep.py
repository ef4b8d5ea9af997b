"""The tasks of an array side by side: what each was given, how far it is, what came out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hpc_ddp import slurm
from hpc_ddp.report.status import Status, columns, status_of
from hpc_ddp.run import checkpoints
from hpc_ddp.run.folder import RunFolder
from hpc_ddp.run.journal import last_event
from hpc_ddp.run.spec import JobSpec

WAITING, NOT_BEGUN = "waiting", "not begun"


@dataclass(frozen=True)
class Task:
    """One task of an array.

    Attributes
    ----------
    point
        its values of the sweep's parameters, by name
    best
        the best value that its script gave to ``run.best``, None where it gave none
    status
        None for one that has not begun
    """

    index: int
    point: Mapping[str, str]
    state: str
    best: float | None
    status: Status | None

    def to_dict(self) -> dict[str, Any]:
        told = self.status.to_dict() if self.status else {}
        return {**told, "task": self.index, "point": dict(self.point), "state": self.state} | {
            "best": self.best
        }


def tasks(run: RunFolder, jobs: Mapping[str, slurm.Queued]) -> list[Task]:
    """Return all tasks of an array in the order of their indexes; none for another run.

    `jobs` is what Slurm still has, by job id.
    """
    spec = JobSpec.from_json(run.job_json.read_text())
    if not spec.array or run.is_task:
        return []
    points = spec.trials
    begun = {task.index: task for task in run.tasks()}
    waits = any(jobs[job].state == "PENDING" for job in run.job_ids(run.events()) if job in jobs)
    return [
        _task(index, points[index] if points else {}, begun.get(index), jobs, waits)
        for index in spec.indexes(begun)
    ]


def _task(
    index: int,
    point: Mapping[str, str],
    run: RunFolder | None,
    jobs: Mapping[str, slurm.Queued],
    waits: bool,
) -> Task:
    status = status_of(run, jobs) if run else None
    if run is None or status is None or status.state == "rendered":
        return Task(index, point, WAITING if waits else NOT_BEGUN, None, None)
    state = WAITING if waits and _asked_again(run) else status.state
    return Task(index, point, state, _best(run), status)


def _asked_again(run: RunFolder) -> bool:
    """Tell whether a task was submitted again, and has not begun since."""
    asked = last_event(run.events(), "submitted")
    return asked is not None and asked.get("first_attempt") == len(run.attempts())


def _best(run: RunFolder) -> float | None:
    for folder in checkpoints.published(run.checkpoints):
        with suppress(OSError, ValueError):
            best = checkpoints.read_manifest(folder).get("best")
            return float(best["value"]) if best else None
    return None


def table(found: Sequence[Task]) -> str:
    """Return the tasks as a table: parameters, state, step, and what their scripts tell."""
    names = list(found[0].point)
    results = list(dict.fromkeys(name for task in found for name in _results(task)))
    header = ["task", *names, "state", "attempt", "step", "loss", "best", *results, "why"]
    rows = [
        [
            task.index,
            *task.point.values(),
            task.state,
            *_told(task.status),
            _short(task.best),
            *(_short(_results(task).get(name)) for name in results),
            task.status.why if task.status else "",
        ]
        for task in found
    ]
    filled = [
        i
        for i, name in enumerate(header)
        if name in names or any(row[i] not in (None, "") for row in rows)
    ]
    return columns([header[i] for i in filled], [[row[i] for i in filled] for row in rows])


def summary(run: RunFolder, found: Sequence[Task]) -> str:
    """Return how many tasks are in which state, and what they have used of a budget."""
    states = Counter(task.state for task in found)
    text = f"{len(found)} tasks: {', '.join(f'{count} {state}' for state, count in states.items())}"
    spec = JobSpec.from_json(run.job_json.read_text())
    used = run.gpu_hours(spec.gpus_in_use)
    what = "GPU" if spec.gpu_count else "worker"
    of = f" of {spec.budget_gpu_hours:g}" if spec.budget_gpu_hours else ""
    return f"{text}; {used:.3g}{of} {what} hours used"


def _told(status: Status | None) -> list[Any]:
    if status is None:
        return [None, None, None]
    step = f"{status.step}/{status.total_steps}" if status.total_steps else status.step
    return [status.attempt, step, _short(status.loss)]


def _results(task: Task) -> Mapping[str, float | None]:
    return task.status.results if task.status else {}


def _short(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"
