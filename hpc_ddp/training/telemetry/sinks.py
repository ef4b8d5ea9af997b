"""Sinks of the metrics on rank 0 besides the journal: lines on stderr, and TensorBoard."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_ddp.core.console.terminal import say
from hpc_ddp.training.data.batch_plan import Position

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

EVERY_S, TERMINAL_S = 30.0, 5.0  # seconds between two lines in a log, and on a terminal


class ProgressLines:
    """Prints a line with the newest metrics to stderr every `EVERY_S` seconds, on a terminal every
    `TERMINAL_S`, and once at the end. A run that ends before the first line is due prints none.
    """

    def __init__(self) -> None:
        self._every_s = TERMINAL_S if sys.stderr.isatty() else EVERY_S
        self._first: tuple[float, int] | None = None  # time and step of the first metrics
        self._due_s = time.monotonic() + self._every_s
        self._is_begun = False  # whether a line was printed
        self._text = ""  # the line of the newest metrics

    def show(self, fields: dict[str, Any]) -> None:
        """Note the fields of a metrics line, and print a line to stderr if one is due."""
        now = time.monotonic()
        self._first = self._first or (now, fields["step"])
        self._text = _format_line(fields, now, *self._first)
        if now >= self._due_s:
            self._due_s, self._is_begun = now + self._every_s, True
            print(self._text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Print the line of the newest metrics to stderr, if a line was printed before."""
        if self._is_begun:
            print(self._text, file=sys.stderr, flush=True)


def _format_line(fields: dict[str, Any], now: float, first_s: float, first_step: int) -> str:
    """Return the fields of a metrics line as text, with an estimate of the time left, as ``step
    20/100  loss 0.31  0:01:20 left``.

    `now` and `first_s`, the time of step `first_step`, are in monotonic seconds.
    """
    step, total = fields["step"], fields.get("total_steps")
    parts = [f"step {step}/{total}" if total else f"step {step}"]
    for name, number in _scalars(fields).items():
        parts.append(f"{name} {number:.4g}" if isinstance(number, float) else f"{name} {number}")
    if total and total > step > first_step:
        left_s = (total - step) * (now - first_s) / (step - first_step)
        parts.append(f"{timedelta(seconds=round(left_s))} left")
    return "  ".join(parts)


def _scalars(fields: dict[str, Any]) -> dict[str, float]:
    """Return the numbers among the fields of a metrics line, without the two numbers of steps."""
    steps = {"step", "total_steps"}
    return {k: v for k, v in fields.items() if k not in steps and isinstance(v, (int, float))}


class TensorBoardSink:
    """Writes metrics for TensorBoard to files in `folder`; the writer is made at its first use.

    `position` is the run's. At the first use, points of an earlier attempt for steps behind this
    position are purged, since these steps are done again: so it must follow the restore.
    """

    def __init__(self, folder: Path, position: Position) -> None:
        self._folder, self._position = folder, position
        self._writer: SummaryWriter | None = None
        self._has_failed = False

    @property
    def writer(self) -> SummaryWriter:
        """TensorBoard's writer. The first read makes it and its folder, or raises OSError if the
        disk refuses."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # the import takes a second or two

            next_step = self._position.step + 1
            self._writer = SummaryWriter(str(self._folder), purge_step=next_step, flush_secs=10)
        return self._writer

    def show(self, fields: dict[str, Any]) -> None:
        """Write the numbers of a metrics line. If the disk refuses, print a message once, and write
        nothing more."""
        if self._has_failed:
            return
        with self._tolerate_disk_errors():
            for name, number in _scalars(fields).items():
                self.writer.add_scalar(name, number, fields["step"])

    def end(self) -> None:
        """Close the writer, if it was used and has not failed. If the disk refuses, print a
        message."""
        if self._writer is None or self._has_failed:
            return
        with self._tolerate_disk_errors():
            self._writer.close()

    @contextmanager
    def _tolerate_disk_errors(self) -> Iterator[None]:
        """A context that prints an OSError and notes it in `_has_failed`, in place of raising it:
        curves end no training."""
        try:
            yield
        except OSError as error:
            self._has_failed = True
            say(f"TensorBoard's file can't be written any more: {error}")
