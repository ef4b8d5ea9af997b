"""The variables by which trackers have one run for all attempts, and what is sent afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpc_ddp.core.attempt_env import clean_env
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.task_folder import make_task
from hpc_ddp.core.job.trackers import SET_HERE, mlflow_id_file, sync_commands, tracker_env
from hpc_ddp.core.journal.events import Fresh
from hpc_ddp.core.journal.journal import first_attempt
from hpc_ddp.core.run_folder import RunFolder


@pytest.fixture
def sweep(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "my digits" / "20261124").make()
    spec = JobSpec("t.py", array="0-1", sweep={"lr": ("0.1", "0.2"), "seed": ("7",)})
    run.job_json.write_text(spec.to_json())
    return run


def test_a_run_has_the_same_ids_in_each_attempt_and_a_trial_its_own(sweep: RunFolder) -> None:
    env = tracker_env(sweep, {})
    assert env == tracker_env(sweep, {})
    assert (env["WANDB_RUN_ID"], env["WANDB_RESUME"]) == ("my-digits-20261124", "allow")
    assert env["WANDB_DIR"] == str(sweep.path)
    assert env[SET_HERE].split() == [name for name in env if name != SET_HERE]
    trials = [tracker_env(make_task(sweep, index), {}) for index in (0, 1)]
    assert [trial["WANDB_RUN_ID"] for trial in trials] == [
        "my-digits-20261124-task-0",
        "my-digits-20261124-task-1",
    ]
    assert {trial["WANDB_RUN_GROUP"] for trial in trials} == {env["WANDB_RUN_ID"]}
    assert trials[1]["WANDB_NAME"] == "my digits lr=0.2 seed=7"
    keys = {variables["COMET_EXPERIMENT_KEY"] for variables in (env, *trials)}
    assert len(keys) == 3
    assert all(key.isalnum() and len(key) == 32 for key in keys)


def test_what_the_user_has_set_counts(sweep: RunFolder) -> None:
    environ = {"WANDB_RUN_ID": "mine", "WANDB_RESUME": ""}
    assert not environ.keys() & tracker_env(sweep, environ).keys()
    assert tracker_env(sweep, {SET_HERE: "off"}) == {}


def test_mlflows_id_is_known_from_the_second_attempt_on(sweep: RunFolder) -> None:
    assert "MLFLOW_RUN_ID" not in tracker_env(sweep, {})
    mlflow_id_file(sweep).write_text("abc\n")
    assert tracker_env(sweep, {})["MLFLOW_RUN_ID"] == "abc"


def test_a_copy_of_a_run_is_another_one_of_mlflow(sweep: RunFolder) -> None:
    mlflow_id_file(sweep).write_text("abc\n")
    copy = shutil.copytree(sweep.path, sweep.path.with_name("20261125-000000-abcd"))
    assert "MLFLOW_RUN_ID" not in tracker_env(RunFolder(copy), {})


def test_a_run_that_begins_anew_is_another_one_of_the_tracker(sweep: RunFolder) -> None:
    mlflow_id_file(sweep).write_text("abc\n")
    sweep.journal("submit").write(Fresh(2))
    env = tracker_env(sweep, {}, first_attempt(sweep.events()))
    assert env["WANDB_RUN_ID"] == "my-digits-20261124-2"
    assert "MLFLOW_RUN_ID" not in env


def test_a_job_that_is_submitted_by_a_worker_has_ids_of_its_own(sweep: RunFolder) -> None:
    outer = tracker_env(sweep, {"WANDB_RESUME": "must"})
    assert clean_env({**outer, "WANDB_RESUME": "must", "HOME": "/h"}) == {
        "WANDB_RESUME": "must",
        "HOME": "/h",
    }


def test_what_is_recorded_offline_is_sent_once(sweep: RunFolder) -> None:
    assert sync_commands(sweep) == []
    for place in ("wandb/run-1-x", "wandb/offline-run-1-x", "task-0/wandb/offline-run-2-y"):
        (sweep.path / place).mkdir(parents=True)
        (sweep.path / place / "run-x.wandb").touch()
    (sweep.path / "comet").mkdir()
    (sweep.path / "comet" / "x.zip").touch()
    path = f"'{sweep.path}'"
    assert sync_commands(sweep) == [
        f"wandb sync {path}/wandb/offline-run-*",
        f"comet upload {path}/comet/*.zip",
        f"wandb sync {path}/task-*/wandb/offline-run-*",
    ]
    (sweep.path / "wandb/offline-run-1-x/run-x.wandb.synced").touch()
    assert len(sync_commands(sweep)) == 2
