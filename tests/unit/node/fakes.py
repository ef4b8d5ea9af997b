"""The place of a supervisor, and signals, as tests of the node side need them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.net.place import Place
from hpc_ddp.node.watch.received_signals import Signals
from hpc_ddp.submission.run_files.library import carry_library


class NoSignals(Signals):
    """Signals that a test sets."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def wait(self, seconds: float) -> None:
        return


def place_of(attempt: AttemptFolder, **values: Any) -> Place:
    """Return the place of the first of three nodes; `values` replace its fields."""
    fields: dict[str, Any] = {
        "run": RunFolder(attempt.path.parents[1]),
        "attempt": attempt,
        "nodes": ("n1", "n2", "n3"),
        "index": 0,
        "suffix": "",
        "end_time": None,
        "warn_s": 60.0,
        "interface": None,
    }
    return Place(**{**fields, **values})


def write_lib(tmp_path: Path) -> Path:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    carry_library(run)
    return run.lib
