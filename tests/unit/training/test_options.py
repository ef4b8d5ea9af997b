"""Arguments of `start` and variables of the environment become checked options."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training import options as options_module
from hpc_ddp.training.options import Options
from hpc_ddp.training.process.environment import LaunchEnv
from unit.training.fakes import checked_options


def test_variables_of_the_environment_override_arguments() -> None:
    env = LaunchEnv.from_env({"HPC_DDP_SAVE_EVERY": "20"})
    checked = Options(save_every=10, hang_after=30).checked(env)
    assert (checked.save_every, checked.hang_after) == (20, 30)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"precision": "half"}, "precision is 'half'; accepted: 'fp32', 'bf16', 'fp16'"),
        ({"profile": (1, 5)}, r"profile is \(1, 5\); accepted: the first step to trace, from 2"),
        ({"profile": (9, 5)}, "profile is"),
        ({"flops_per_sample": 0.0}, "flops_per_sample is 0.0; accepted: a number above 0"),
        ({"peak_flops": -1.0}, "peak_flops is -1.0"),
        ({"seed": 2**64}, "accepted: a whole number up to 18446744073709551615"),
    ],
)
def test_options_are_checked(wrong: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        checked_options(**wrong)


def test_a_missing_tensorboard_is_reported_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_module, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="tensorboard") as caught:
        checked_options(tensorboard=True)
    assert caught.value.hint == "pip install tensorboard"
