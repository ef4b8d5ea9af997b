"""The tasks of an array side by side: parameters, progress, results."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hpc_ddp.core import checkpoints
from hpc_ddp.core.file_io import read_text
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.events import Submitted
from hpc_ddp.core.journal.fields import to_number
from hpc_ddp.core.journal.journal import last_event
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.live_jobs import Queue
from hpc_ddp.report.status.run_status import Status, status_of
from hpc_ddp.report.status.state import RunState, state_of_job
from hpc_ddp.report.tables import align_columns

# Names of results that are better the lower they are.
_LOWER = re.compile(r"loss|error|perplexity|ppl|nll|mse|mae|bpb|\b[cw]er\b|seconds", re.I)


@dataclass(frozen=True)
class Task:
    """One task of an array.

    Attributes
    ----------
    trial
        its values of the sweep's parameters, by name; empty for an array that is no sweep
    best
        the best value that its script passed to ``run.best``; None without one
    status
        None for a task that has not begun
    is_higher_better
        whether greater values of `best` are better
    """

    index: int
    trial: Mapping[str, str]
    state: RunState
    best: float | None
    status: Status | None
    is_higher_better: bool = True

    @property
    def results(self) -> Mapping[str, float | None]:
        """The results that its script passed to ``run.finish``."""
        return self.status.results if self.status else {}

    def to_dict(self) -> dict[str, Any]:
        """Return the task for JSON: its status, if it has begun, with index, parameters, state and
        best value."""
        status = self.status.to_dict() if self.status else {}
        task = {"task": self.index, "trial": dict(self.trial), "state": self.state}
        return {**status, **task, "best": self.best}


def tasks(run: RunFolder, queue: Queue) -> list[Task]:
    """Return all tasks of an array in the order of their indexes; [] for a run that is none, also
    for a task.

    `queue` has the user's jobs in Slurm. Raise UsageError for a broken job.json, of any run, and
    OSError where it, a journal or a folder of checkpoints can't be read.
    """
    spec = JobSpec.from_json(read_text(run.job_json))
    if not spec.array or run.is_task:
        return []
    folders = {task.index: task for task in run.tasks()}
    jobs = [queue.find(job, run) for job in run.jobs(run.events())]
    waits = any(job and state_of_job(job.state) is RunState.WAITING for job in jobs)
    return [
        _task(index, spec.trials[index] if spec.trials else {}, folders.get(index), queue, waits)
        for index in spec.indexes(folders)
    ]


def _task(
    index: int, trial: Mapping[str, str], run: RunFolder | None, queue: Queue, waits: bool
) -> Task:
    """Return one task of an array. Raise OSError where the task's journal or folder of checkpoints
    can't be read.

    `trial` has its values of the sweep's parameters, `run` is its folder (None: not begun), and
    `queue` has the user's jobs in Slurm. `waits` says that a job of the array waits in Slurm: then
    a task waits, too, that has not begun, or not since it was submitted again.
    """
    status = status_of(run, queue) if run else None
    if run is None or status is None or status.state is RunState.RENDERED:
        state = RunState.WAITING if waits else RunState.NOT_BEGUN
        return Task(index, trial, state, None, None)
    state = RunState.WAITING if waits and _is_resubmitted(run) else status.state
    best = _best(run)
    is_higher_better = bool(best.get("higher", True))
    return Task(index, trial, state, to_number(best.get("value")), status, is_higher_better)


def _is_resubmitted(run: RunFolder) -> bool:
    """Return whether a task was submitted again, and has not begun since. Raise OSError where its
    journal can't be read."""
    submitted = last_event(run.events(), Submitted)
    return submitted is not None and submitted.first_attempt == run.next_attempt()


def _best(run: RunFolder) -> Mapping[str, Any]:
    """Return the value of ``run.best`` in the newest checkpoint whose manifest can be read, as
    ``value`` and ``higher`` (whether greater is better); {} where it has none, or there is none.
    Raise OSError where the folder of checkpoints can't be listed."""
    for folder in checkpoints.published(run.checkpoints):
        with suppress(OSError, ValueError):
            best: Mapping[str, Any] = checkpoints.read_manifest(folder).get("best") or {}
            return best
    return {}


@dataclass(frozen=True)
class Ranking:
    """The metric by which the trials of a sweep are compared, and the tasks in its order, the best
    one first. Tasks without a value come last, by index. `metric` is ``best`` (the value of
    ``run.best``), ``loss``, or the name of a result."""

    metric: str
    is_higher_better: bool
    tasks: Sequence[Task]

    @property
    def best(self) -> Task:
        """The first of the tasks, which has a value."""
        return self.tasks[0]

    def text(self, run: RunFolder) -> str:
        """Return the best trial of the sweep `run` for people, and the command that repeats it."""
        trial = " ".join(f"{name}={text}" for name, text in self.best.trial.items())
        number = _short(_metric_of(self.best, self.metric))
        order = "highest" if self.is_higher_better else "lowest"
        metric = "value of run.best" if self.metric == "best" else self.metric
        is_over = all(task.state is RunState.FINISHED for task in self.tasks)
        head = "best" if is_over else "best so far"
        return (
            f"{head}: task {self.best.index} ({trial}), with the {order} {metric}, {number}\n"
            f"again: hpc-ddp rerun {run.task(self.best.index).quoted}"
        )


def rank(tasks: Sequence[Task]) -> Ranking | None:
    """Return the ranking of a sweep's tasks, by the first of these metrics for which any task has a
    number: the value of ``run.best``, the first result of ``run.finish``, the loss. None where
    there is no such number, and for an array that is no sweep.

    The script says which value of ``run.best`` is better. For another metric the lower value is
    better if the metric's name is one of `_LOWER` (a loss, an error, seconds), else the greater
    one.
    """
    names = [name for task in tasks for name in task.results]
    for metric in ("best", *names[:1], "loss"):
        trials = [task for task in tasks if task.trial]
        ranked = [task for task in trials if not math.isnan(_metric_of(task, metric))]
        if ranked:
            higher = ranked[0].is_higher_better if metric == "best" else not _LOWER.search(metric)
            ranked.sort(key=lambda task: _metric_of(task, metric), reverse=higher)
            return Ranking(metric, higher, [*ranked, *(t for t in tasks if t not in ranked)])
    return None


def _metric_of(task: Task, metric: str) -> float:
    """Return a task's value of the metric of a `Ranking`; NaN without one."""
    number = task.results.get(metric)
    if metric == "best":
        number = task.best
    elif number is None and metric == "loss" and task.status:
        number = task.status.loss
    return math.nan if number is None else number


def table(tasks: Sequence[Task]) -> str:
    """Return the tasks, one or more, as a table of index, parameters, state, attempt, step, loss,
    best value, results and reason; columns without any value are left out, but for parameters.
    Raise IndexError without tasks."""
    parameters = list(tasks[0].trial)
    results = list(dict.fromkeys(name for task in tasks for name in task.results))
    header = ["task", *parameters, "state", "attempt", "step", "loss", "best", *results, "why"]
    rows = [_cells(task, results) for task in tasks]
    shown = [
        i
        for i, name in enumerate(header)
        if name in parameters or any(row[i] not in (None, "") for row in rows)
    ]
    return align_columns([header[i] for i in shown], [[row[i] for i in shown] for row in rows])


def _cells(task: Task, results: Sequence[str]) -> list[object]:
    """Return the row of a task in the order of `table`'s header, with its `results` of these names;
    None for an unknown value, '' without a reason."""
    status = task.status
    attempt, progress, loss = None, None, None
    if status:
        attempt, progress, loss = status.attempt, status.progress, status.loss
    cells: list[object] = [task.index, *task.trial.values(), task.state, attempt, progress]
    cells += [_short(loss), _short(task.best), *(_short(task.results.get(n)) for n in results)]
    return [*cells, status.why if status else ""]


def summary(run: RunFolder, tasks: Sequence[Task]) -> str:
    """Return a line with the number of tasks in each state, the GPU or worker hours that all tasks
    of the array have used until their last events, and the budget, if there is one. Raise
    UsageError for a broken job.json, and OSError where it or a journal can't be read."""
    counts = Counter(task.state for task in tasks)
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    spec = JobSpec.from_json(read_text(run.job_json))
    hours = run.gpu_hours(spec.gpus_in_use)
    unit = "GPU" if spec.gpu_count else "worker"
    budget = f" of {spec.budget_gpu_hours:g}" if spec.budget_gpu_hours else ""
    return f"{len(tasks)} tasks: {states}; {hours:.3g}{budget} {unit} hours used"


def _short(number: float | None) -> str | None:
    """Return a number with four significant digits; None for None."""
    return None if number is None else f"{number:.4g}"
