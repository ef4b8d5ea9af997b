"""The environment of a worker is read and checked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.process.environment import DistEnv, LaunchEnv, mark_trained, take_run


def test_rank_facts_come_from_torchrun_or_are_those_of_one_process() -> None:
    assert DistEnv.from_env({}) == DistEnv(0, 0, 1, 1, launched=False)
    env = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert DistEnv.from_env(env) == DistEnv(3, 1, 4, 2, launched=True)
    with pytest.raises(UsageError, match="WORLD_SIZE is None"):
        DistEnv.from_env({"RANK": "0", "LOCAL_RANK": "0"})


def test_the_launch_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/a/train me.py", "--lr", "1"])
    env = LaunchEnv.from_env({"HPC_DDP_END_TIME": "", "HPC_DDP_NODE": "n1"})
    assert (env.run, env.attempt, env.end_time, env.node) == (None, None, None, "n1")
    assert env.stem == "train me"
    with pytest.raises(UsageError, match="HPC_DDP_SAVE_EVERY is 'often'"):
        LaunchEnv.from_env({"HPC_DDP_SAVE_EVERY": "often"})


def test_the_environment_names_a_window_to_profile() -> None:
    assert LaunchEnv.from_env({"HPC_DDP_PROFILE": "10:15"}).profile == (10, 15)
    with pytest.raises(UsageError, match="HPC_DDP_PROFILE is 'ten'"):
        LaunchEnv.from_env({"HPC_DDP_PROFILE": "ten"})


def _worker(pid: int, job: str = "7", **more: str) -> dict[str, str]:
    """Return the environment of a worker, and of all that it starts."""
    env = {"HPC_DDP_RUN": "/r", "HPC_DDP_ATTEMPT": "2", "HPC_DDP_NOTICE": "/r/notice"}
    return {**env, "HPC_DDP_WORKER": f"{pid} {job}", "SLURM_JOB_ID": "7", **more}


@pytest.mark.parametrize("is_within", [True, False])
def test_a_worker_or_a_process_of_its_script_has_the_run(is_within: bool) -> None:
    env = LaunchEnv.from_env(_worker(os.getppid() if is_within else os.getpid()))
    assert (env.run, env.attempt, env.is_within) == (Path("/r"), 2, is_within)
    bare = _worker(os.getpid())
    del bare["SLURM_JOB_ID"]  # some scripts do so
    assert LaunchEnv.from_env(bare).attempt == 2
    older = {"HPC_DDP_RUN": "/r", "HPC_DDP_ATTEMPT": "2", "HPC_DDP_NODE_FOLDER": "/n"}
    env = LaunchEnv.from_env(older)  # a run's library from before there was an identity
    assert (env.attempt, env.is_within) == (2, False)


@pytest.mark.parametrize(
    "environ",
    [
        _worker(1, SLURM_JOB_ID="8"),  # sbatch eval.sbatch, by rank 0
        _worker(1, HPC_DDP_TRAINER="1"),  # torchrun eval.py, by rank 0
        {"HPC_DDP_RUN": "/r", "HPC_DDP_ATTEMPT": "2", "SLURM_JOB_ID": "7"},  # in clean-up lines
    ],
)
def test_what_a_training_starts_has_not_its_run(environ: dict[str, str]) -> None:
    env = LaunchEnv.from_env(environ)
    assert (env.run, env.attempt, env.notice, env.is_within) == (None, None, None, False)


def test_a_process_trains_once_in_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HPC_DDP_WORKER", "1 ")
    monkeypatch.setenv("HPC_DDP_NODE_FOLDER", str(tmp_path))
    monkeypatch.setenv("HPC_DDP_TRAINER", "")  # so that it is gone after the test
    del os.environ["HPC_DDP_TRAINER"]
    env = LaunchEnv.from_env(_worker(1))
    take_run(env)
    with pytest.raises(UsageError, match="second training has begun in a process"):
        take_run(env)
    del os.environ["HPC_DDP_TRAINER"]
    mark_trained(env)
    with pytest.raises(UsageError, match="second process of this worker"):
        take_run(env)
    monkeypatch.setenv("HPC_DDP_WORKER", "2 ")  # torchrun has started it again
    take_run(env)
    del os.environ["HPC_DDP_TRAINER"]
