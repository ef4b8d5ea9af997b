"""A progress bar for a run in the foreground, drawn from its journal.

The workers print plain lines whoever watches; a bar of their own would garble the logs.
"""

from __future__ import annotations

import subprocess
import sys

from hpc_ddp.run.folder import RunFolder
from hpc_ddp.run.journal import last_event

REFRESH_S = 0.3


def watch(run: RunFolder, process: subprocess.Popen[bytes]) -> int:
    """Wait for `process`, showing the run's progress on a terminal; return its exit code."""
    if not sys.stderr.isatty():
        return process.wait()
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.fields[told]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None, told="starting")
        while True:
            try:
                return process.wait(REFRESH_S)
            except subprocess.TimeoutExpired:
                pass
            metrics = last_event(run.events(), "metrics")
            if metrics:
                told = "  ".join(
                    f"{key} {metrics[key]:.4g}"
                    for key in ("epoch", "loss", "samples_per_s")
                    if metrics.get(key) is not None
                )
                progress.update(
                    task, completed=metrics["step"], total=metrics.get("total_steps"), told=told
                )
