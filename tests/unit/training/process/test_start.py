"""The arguments of `start`."""

from __future__ import annotations

import inspect

from hpc_ddp.training.options import Options
from hpc_ddp.training.process.start import start


def test_start_has_the_parameters_of_its_options() -> None:
    parameters = inspect.signature(start).parameters
    assert parameters == inspect.signature(Options).parameters
    assert [parameters[name].default for name in ("seed", "save_every")] == [0, 300.0]
