"""The disturbances of a drill: at which steps, and how."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hpc_ddp.core import checkpoints
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.process import signal_from_pid_files
from hpc_ddp.core.run_folder import RunFolder

LEAST_STEPS = 8
Disturbance = Callable[[subprocess.Popen[bytes], RunFolder], None]


@dataclass(frozen=True)
class Points:
    """The steps at which a run is disturbed."""

    stop: int  # the first attempt is stopped politely at this step
    save: int  # the second attempt saves at this step, so that the third resumes from it
    kill: int  # the second attempt is killed at this step, and the third while it saves it


@dataclass(frozen=True)
class Leg:
    """One attempt of the disturbed run.

    `name` is the disturbance as text, and `disturbance` the function that ends the attempt so; ''
    and None for an attempt that ends by itself. `plan` is the recorder's, with the keys of
    `training.drill.DrilledRun`. The attempt has to resume from step `least_step` or a later one.
    """

    name: str
    plan: dict[str, Any]
    disturbance: Disturbance | None = None
    least_step: int = 0


def choose_points(total: int, epoch_ends: Sequence[int]) -> Points:
    """Return the steps at which to disturb a run of `total` steps. `epoch_ends` are the steps that
    end an epoch, ascending.

    The stop comes in mid-epoch, after an epoch's end where there is an early one. The save is at
    the next epoch's end, from which a resume is a case of its own; or, without a next end, after a
    quarter of the steps that are left. The kill comes some steps after the save.

    Raises
    ------
    UsageError
        the run has less than `LEAST_STEPS` steps
    """
    if total < LEAST_STEPS:
        raise UsageError(
            f"the script takes {total} steps, and a drill needs {LEAST_STEPS}",
            hint="more epochs or a smaller batch, in the script's own arguments"
            if total
            else "call run.step() behind each optimizer.step(); a script of hpc_ddp.integrations is"
            " tried by a dry run: Ctrl-C stops it, and its last line continues it",
        )
    ends = [step for step in epoch_ends if step <= total - 6]
    stop = max(2, total * 3 // 10, ends[0] + 1 if ends else 0)
    while stop in epoch_ends and stop < total - 5:
        stop += 1
    later = [step for step in epoch_ends if stop < step <= total - 3]
    save = later[0] if later else stop + max(1, (total - stop) // 4)
    return Points(stop, save, min(total - 2, save + max(1, (total - save) // 3)))


def make_legs(points: Points, end: int | None) -> list[Leg]:
    """Return the four attempts of the disturbed run, in order; the last one is not disturbed. With
    `end` an attempt that reaches this step ends there; with None it ends with the script."""
    plan = {} if end is None else {"end": end}
    to_stop = {**plan, "hold": "stop", "at": points.stop}
    to_kill = {**plan, "hold": "kill", "at": points.kill, "save": points.save}
    in_save = {**plan, "hold": "save", "at": points.kill}
    return [
        Leg(f"stopped politely (SIGTERM) at step {points.stop}", to_stop, terminate_run),
        Leg(f"killed (SIGKILL) at step {points.kill}", to_kill, kill_run, points.stop),
        Leg(f"killed while saving step {points.kill}", in_save, kill_run, points.save),
        Leg("", plan),
    ]


def terminate_run(process: subprocess.Popen[bytes], run: RunFolder) -> None:
    """Ask a run to stop, by SIGTERM to its launcher `process`, and do not wait for its end; `run`
    is not used."""
    process.terminate()


def kill_run(process: subprocess.Popen[bytes], run: RunFolder) -> None:
    """Kill all processes of a run at once, and wait for the end of its launcher `process`. The
    launcher and the supervisors come first, so that none is left to react, then the workers of the
    newest attempt. A process that has ended already is no error. Raise OSError where the run's
    folder can't be read."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the launcher leads the supervisors' group
    for attempt in run.attempts()[-1:]:
        signal_from_pid_files(attempt.path.glob("*/rank-*.pid"), signal.SIGKILL)
    process.wait()


def flip_bit(run: RunFolder) -> str:
    """Flip a bit in the newest published checkpoint, and return the checkpoint's name. The bit is
    in the middle of the largest file; a file that another checkpoint shares, by a hard link, is
    taken only if there is no other. Raise IndexError without a checkpoint, OSError where the disk
    refuses."""
    newest = checkpoints.published(run.checkpoints)[0]
    status = {path: path.stat() for path in newest.iterdir()}
    path = max(status, key=lambda path: (status[path].st_nlink == 1, status[path].st_size))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return newest.name
