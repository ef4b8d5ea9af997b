"""jobs/digits.py with four megabytes more in each checkpoint: a limit on the size of files that is
below that stops saves, and spares the journal and the logs."""

import runpy
from pathlib import Path
from typing import Any

import torch

from hpc_ddp.training import Run

track = Run.track


class Ballast:
    def state_dict(self) -> dict[str, Any]:
        return {"numbers": torch.zeros(1 << 20)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["numbers"].numel() == 1 << 20


def track_more(run: Run, **objects: Any) -> None:
    track(run, ballast=Ballast(), **objects)


vars_of_run: Any = Run
vars_of_run.track = track_more
runpy.run_path(str(Path(__file__).parents[3] / "jobs" / "digits.py"), run_name="__main__")
