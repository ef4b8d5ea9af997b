"""Sweeps that something happens to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from harness import BACKENDS, DIGITS, WALK, Hpc, Job, in_one_go, same_weights

from hpc_ddp.core.run_folder import RunFolder

ONE_NODE = ("--nodes", "1", "--gpus-per-node", "2", "--exclusive")


def _tasks(cluster: Cluster, sweep: Job, count: int) -> list[Job]:
    return [
        Job(cluster, f"{sweep.id}_{n}", RunFolder(sweep.run.path / f"task-{n}"))
        for n in range(count)
    ]


def _status(hpc: Hpc, sweep: Job) -> list[dict[str, Any]]:
    (told,) = json.loads(hpc("status", "--json", sweep.id).stdout)
    tasks: list[dict[str, Any]] = told["tasks"]
    return tasks


@pytest.mark.more
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_of_four_points_is_preempted(hpc: Hpc, cluster: Cluster, backend: str) -> None:
    sets = ("lr=0.005,0.0001", "seed=0,1")
    words = ("--backend", backend, "--max-parallel", "2", *ONE_NODE, str(DIGITS))
    sweep = hpc.submit(*words, "--epochs", "2", "--step-seconds", "0.1", sets=sets)
    tasks = _tasks(cluster, sweep, 4)
    tasks[1].at_step(10)
    assert [each["state"] for each in _status(hpc, sweep)].count("waiting") == 2
    tasks[1].preempt()
    for task in tasks:
        assert task.end() == "COMPLETED", task.output()
    assert tasks[1].verdicts() == [("preempted", "requeue"), ("finished", "none")]
    assert in_one_go(tasks[1])
    found = _status(hpc, sweep)
    assert [tuple(each["trial"].values()) for each in found] == [
        ("0.005", "0"),
        ("0.005", "1"),
        ("0.0001", "0"),
        ("0.0001", "1"),
    ]
    scores = [each["results"]["accuracy"] for each in found]
    assert min(scores[:2]) > max(scores[2:])
    assert not same_weights(tasks[0], tasks[1])
    done = hpc("submit", "--run", str(sweep.run.path), check=False)
    assert done.returncode == 2
    assert "all tasks of" in done.stderr


@pytest.mark.more
def test_a_budget_ends_it_and_a_larger_one_goes_on(hpc: Hpc, cluster: Cluster) -> None:
    words = ("--max-parallel", "1", "--budget-gpu-hours", "0.0001", *ONE_NODE, str(WALK))
    sweep = hpc.submit(*words, sets=("step-seconds=0.3,0.31",))
    tasks = _tasks(cluster, sweep, 2)
    tasks[0].at_step(5)
    tasks[0].preempt()
    assert tasks[0].end() == "FAILED"
    assert tasks[0].verdicts() == [("preempted", "give up")]
    assert tasks[1].end() == "FAILED"  # it was never begun: nothing was left for it
    assert tasks[1].verdicts() == [("budget", "give up")]
    shown = hpc("status", sweep.id).stdout
    assert "of 0.0001 GPU hours are spent" in shown
    assert "2 failed" in shown
    again = hpc.submit("--run", str(sweep.run.path), "--budget-gpu-hours", "10")
    for task in _tasks(cluster, again, 2):
        assert task.end() == "COMPLETED", task.output()
    assert in_one_go(tasks[0])


@pytest.mark.more
def test_a_sweep_may_be_tried_here_first(hpc: Hpc, tmp_path: Path) -> None:
    words = ("--backend", "local", "--set", "seed=0,1", str(DIGITS), "--epochs", "1")
    done = hpc("sweep", *words)
    assert "task 1: --seed=1" in done.stderr
    (sweep,) = hpc.runs.glob("digits/*")
    shown = hpc("status", str(sweep)).stdout
    assert "2 tasks: 2 finished" in shown
    assert "accuracy" in shown
