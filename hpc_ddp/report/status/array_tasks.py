"""The tasks of an array in a table, and the ranking of a sweep's trials."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hpc_ddp.core import checkpoints
from hpc_ddp.core.file_io import list_names, read_text
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.events import Submitted
from hpc_ddp.core.journal.fields import to_number
from hpc_ddp.core.journal.journal import last_event
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.live_jobs import Queue
from hpc_ddp.report.status.run_state import RunState, state_of_job
from hpc_ddp.report.status.run_status import Status, status_of
from hpc_ddp.report.tables import align_columns

# In names of metrics of which lower values are better.
_LOWER = re.compile(r"loss|error|perplexity|ppl|nll|mse|mae|bpb|\b[cw]er\b|seconds", re.I)


@dataclass(frozen=True)
class Task:
    """One task of an array.

    Attributes
    ----------
    trial
        the task's values of the sweep's parameters, by name; empty for an array that is no sweep
    best
        the best value that the script passed to ``run.best``; None without one
    status
        the status of the task's run; None for a task that has not begun
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
        """The results that the script passed to ``run.finish``, by name; None for a result that is
        no number."""
        return self.status.results if self.status else {}

    def to_dict(self) -> dict[str, Any]:
        """Return the task for JSON: its status, if it has begun, with index, parameters, state and
        best value."""
        status = self.status.to_dict() if self.status else {}
        task = {"task": self.index, "trial": dict(self.trial), "state": self.state}
        return {**status, **task, "best": self.best}


def read_tasks(run: RunFolder, queue: Queue) -> list[Task]:
    """Return all tasks of an array in the order of their indexes; [] for a run that is no array,
    and for a task.

    `queue` has the user's jobs in Slurm. Raise UsageError for a broken job.json, and OSError where
    job.json, a journal or a folder of checkpoints can't be read.
    """
    spec = JobSpec.from_json(read_text(run.job_json))
    if not spec.array or run.is_task:
        return []
    folders = {task.index: task for task in run.tasks()}
    jobs = [queue.find(job, run) for job in run.jobs(run.events())]
    states = {state_of_job(job.state) for job in jobs if job} - {None}
    # A task whose job has an output, and is over, has ended before its attempt if it has none.
    outputs = frozenset() if states else frozenset(list_names(run.logs))
    tasks = []
    for index in spec.indexes(folders):
        state = RunState.LOST if f"slurm-{index}.out" in outputs else RunState.NOT_BEGUN
        state = RunState.WAITING if RunState.WAITING in states else state
        trial = spec.trials[index] if spec.trials else {}
        tasks.append(_read_task(index, trial, folders.get(index), queue, state))
    return tasks


def _read_task(
    index: int,
    trial: Mapping[str, str],
    run: RunFolder | None,
    queue: Queue,
    state_before_attempt: RunState,
) -> Task:
    """Return the task of an array with this `index` and `trial`. Raise OSError where the task's
    journal or folder of checkpoints can't be read.

    `run` is the task's folder (None: it has not begun), and `queue` has the user's jobs in Slurm.
    `state_before_attempt` is the task's state if it has no attempt; a task that waits by that also
    waits where it has not begun since it was submitted again.
    """
    status = status_of(run, queue) if run else None
    if run is None or status is None or status.state is RunState.RENDERED:
        return Task(index, trial, state_before_attempt, None, None)
    waits = state_before_attempt is RunState.WAITING and _is_resubmitted(run)
    state = RunState.WAITING if waits else status.state
    best = _read_best(run)
    is_higher_better = bool(best.get("higher", True))
    return Task(index, trial, state, to_number(best.get("value")), status, is_higher_better)


def _is_resubmitted(run: RunFolder) -> bool:
    """Return whether a task was submitted again, and has not begun since. Raise OSError where its
    journal can't be read."""
    submitted = last_event(run.events(), Submitted)
    return submitted is not None and submitted.first_attempt == run.next_attempt()


def _read_best(run: RunFolder) -> Mapping[str, Any]:
    """Return the entry ``best`` of the newest checkpoint whose manifest can be read: ``value``, and
    ``higher`` (whether greater is better); {} without an entry or a checkpoint. Raise OSError where
    the folder of checkpoints can't be listed."""
    for folder in checkpoints.published(run.checkpoints):
        with suppress(OSError, ValueError):
            best: Mapping[str, Any] = checkpoints.read_manifest(folder).get("best") or {}
            return best
    return {}


@dataclass(frozen=True)
class Ranking:
    """The metric by which the trials of a sweep are compared, and its `tasks`, the best one first.
    Tasks without a number of the metric come last, in their former order. `metric` is ``best`` (the
    value of ``run.best``), ``loss``, or the name of a result."""

    metric: str
    is_higher_better: bool
    tasks: Sequence[Task]

    @property
    def best(self) -> Task:
        """The best task, which has a number of the metric."""
        return self.tasks[0]

    def text(self, run: RunFolder) -> str:
        """Return the best trial of the sweep `run` as a line of text, and the command that repeats
        it as another."""
        trial = " ".join(f"{name}={text}" for name, text in self.best.trial.items())
        number = _four_digits(_metric_of(self.best, self.metric))
        order = "highest" if self.is_higher_better else "lowest"
        metric = "value of run.best" if self.metric == "best" else self.metric
        is_over = all(task.state is RunState.FINISHED for task in self.tasks)
        head = "best" if is_over else "best so far"
        return (
            f"{head}: task {self.best.index} ({trial}), with the {order} {metric}, {number}\n"
            f"again: hpc-ddp rerun {run.task(self.best.index).quoted}"
        )


def rank_tasks(tasks: Sequence[Task]) -> Ranking | None:
    """Return the ranking of a sweep's tasks, by the first of these metrics for which any task has a
    number: the value of ``run.best``, the first result of ``run.finish``, the loss. None where
    there is no such number, and for an array that is no sweep.

    The script decides whether a greater value of ``run.best`` is better. For another metric the
    lower value is better if `_LOWER` is in the metric's name (loss, error, seconds …), else the
    greater one.
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
    """Return a task's number of the metric of a `Ranking`; NaN without one. A result ``loss`` goes
    before the loss of the task's status."""
    number = task.results.get(metric)
    if metric == "best":
        number = task.best
    elif number is None and metric == "loss" and task.status:
        number = task.status.loss
    return math.nan if number is None else number


def task_table(tasks: Sequence[Task]) -> str:
    """Return the tasks, one or more, as a table: index, parameters, state, attempt, step, loss,
    best value, results and reason. A column in which all cells are empty is left out, unless it is
    a parameter's. Raise IndexError without tasks."""
    parameters = list(tasks[0].trial)
    results = list(dict.fromkeys(name for task in tasks for name in task.results))
    header = ["task", *parameters, "state", "attempt", "step", "loss", "best", *results, "why"]
    rows = [_cells(task, results) for task in tasks]
    columns = [  # indexes
        i
        for i, name in enumerate(header)
        if name in parameters or any(row[i] not in (None, "") for row in rows)
    ]
    return align_columns([header[i] for i in columns], [[row[i] for i in columns] for row in rows])


def _cells(task: Task, results: Sequence[str]) -> list[object]:
    """Return the cells of a task in the order of `task_table`'s header; `results` are the names of
    the columns of results. None for an unknown value, '' without a reason."""
    status = task.status
    attempt, progress, loss = None, None, None
    if status:
        attempt, progress, loss = status.attempt, status.progress, status.loss
    cells: list[object] = [task.index, *task.trial.values(), task.state, attempt, progress]
    numbers = (loss, task.best, *map(task.results.get, results))
    return [*cells, *map(_four_digits, numbers), status.why if status else ""]


def summarize_tasks(run: RunFolder, tasks: Sequence[Task]) -> str:
    """Return a line of text with the number of tasks in each state, the GPU or worker hours that
    all tasks of the array have used until their last events, and the budget, if there is one. The
    journals are read for the hours. Raise UsageError for a broken job.json, and OSError where it or
    a journal can't be read."""
    counts = Counter(task.state for task in tasks)
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    spec = JobSpec.from_json(read_text(run.job_json))
    hours = run.gpu_hours(spec.gpus_in_use)
    unit = "GPU" if spec.gpu_count else "worker"
    budget = f" of {spec.budget_gpu_hours:g}" if spec.budget_gpu_hours else ""
    return f"{len(tasks)} tasks: {states}; {hours:.3g}{budget} {unit} hours used"


def _four_digits(number: float | None) -> str | None:
    """Return a number as text with four significant digits; None for None."""
    return None if number is None else f"{number:.4g}"
