"""The trials of a sweep are ranked by a metric, and the best one is named."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.live_jobs import Queue
from hpc_ddp.report.status.array_tasks import Task, rank_tasks, read_tasks, task_table
from hpc_ddp.report.status.run_state import RunState
from hpc_ddp.report.status.run_status import status_of


@pytest.fixture
def sweep(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "digits" / "20261124").make()


def trials(sweep: RunFolder, *fields: dict[str, Any]) -> list[Task]:
    """Return a finished task for each of the `fields` of a Task or its status."""
    finished = replace(status_of(sweep, Queue(None)), state=RunState.FINISHED)
    made = []
    for index, field in enumerate(fields):
        of_task = {name: field.pop(name) for name in ("best", "is_higher_better") if name in field}
        task = Task(
            index, {"lr": f"0.{index}"}, RunState.FINISHED, None, replace(finished, **field)
        )
        made.append(replace(task, **of_task))
    return made


@pytest.mark.parametrize(
    ("fields", "order", "metric"),
    [
        ([{"loss": 2.0}, {"loss": 0.0}, {"loss": 1.0}], [1, 2, 0], "lowest loss, 0"),
        (
            [{"loss": 1.0, "results": {"accuracy": x}} for x in (0.2, None, 0.9)],
            [2, 0, 1],
            "highest accuracy, 0.9",
        ),
        (
            [{"results": {"val_loss": x}} for x in (2.0, math.nan, 1.0)],
            [2, 0, 1],
            "lowest val_loss, 1",
        ),
        (
            [{"best": x, "results": {"accuracy": 1.0}} for x in (1.0, 3.0, 2.0)],
            [1, 2, 0],
            "highest value of run.best, 3",
        ),
        (
            [{"best": x, "is_higher_better": False} for x in (1.0, 3.0)],
            [0, 1],
            "lowest value of run.best, 1",
        ),
    ],
)
def test_trials_are_ranked(
    sweep: RunFolder, fields: list[dict[str, Any]], order: list[int], metric: str
) -> None:
    ranking = rank_tasks(trials(sweep, *fields))
    assert ranking is not None
    assert [task.index for task in ranking.tasks] == order
    assert ranking.text(sweep) == (
        f"best: task {order[0]} (lr=0.{order[0]}), with the {metric}\n"
        f"again: hpc-ddp rerun {sweep.path}/task-{order[0]}"
    )
    rows = task_table(ranking.tasks).splitlines()[1:]
    assert [int(row.split()[0]) for row in rows] == order


def test_a_sweep_under_way_has_a_best_so_far(sweep: RunFolder) -> None:
    first, second = trials(sweep, {"loss": 2.0}, {"loss": 1.0})
    running = replace(second, state=RunState.RUNNING)
    waiting = Task(2, {"lr": "0.2"}, RunState.WAITING, None, None)
    ranking = rank_tasks([waiting, first, running])
    assert ranking is not None
    assert [task.index for task in ranking.tasks] == [1, 0, 2]
    assert ranking.text(sweep).startswith("best so far: task 1 (lr=0.1), with the lowest loss, 1\n")


def test_without_a_metric_or_a_trial_there_is_no_best(sweep: RunFolder) -> None:
    assert rank_tasks(trials(sweep, {}, {})) is None
    assert rank_tasks([replace(task, trial={}) for task in trials(sweep, {"loss": 1.0})]) is None


def test_a_task_that_ended_before_its_attempt_is_lost(sweep: RunFolder) -> None:
    """One with an output, once no job of the array is left."""
    sweep.job_json.write_text(JobSpec("t.py", array="0-1").to_json())
    (sweep.logs / "slurm-1.out").touch()
    states = [task.state for task in read_tasks(sweep, Queue(None))]
    assert states == [RunState.NOT_BEGUN, RunState.LOST]
