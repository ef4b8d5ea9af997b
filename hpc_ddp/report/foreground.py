"""A progress bar for a run in the foreground, drawn from its journal.

The workers print plain lines: a bar of their own would garble the logs.
"""

from __future__ import annotations

import subprocess
import threading
from typing import IO, TYPE_CHECKING

from hpc_ddp.run.folder import RunFolder
from hpc_ddp.run.journal import last_event

if TYPE_CHECKING:
    from rich.console import Console

REFRESH_S = 0.3


def watch(run: RunFolder, process: subprocess.Popen[bytes]) -> int:
    """Wait for `process` and return its exit code.

    Output that comes through a pipe is shown above a bar with the run's progress.
    """
    if process.stdout is None:
        return process.wait()
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.fields[metrics]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(), transient=True) as progress:
        task = progress.add_task("", total=None, metrics="starting")
        reader = threading.Thread(target=_copy, args=(process.stdout, progress.console))
        reader.start()
        while reader.is_alive():
            reader.join(REFRESH_S)
            metrics = last_event(run.events(), "metrics") or {"step": 0}
            values = "  ".join(
                f"{name} {metrics[name]:.4g}"
                for name in ("epoch", "loss", "samples_per_s")
                if metrics.get(name) is not None
            )
            progress.update(
                task,
                completed=metrics["step"],
                total=metrics.get("total_steps"),
                metrics=values or "starting",
            )
    return process.wait()


def _copy(lines: IO[bytes], console: Console) -> None:
    """Print lines above the bar, as they are."""
    for line in lines:
        text = line.decode(errors="replace").rstrip("\n")
        console.print(text, markup=False, highlight=False, soft_wrap=True)
