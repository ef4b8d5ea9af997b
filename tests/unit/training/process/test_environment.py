"""The environment of a worker is read and checked."""

from __future__ import annotations

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.process.environment import DistEnv, LaunchEnv


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
