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
from hpc_ddp.training.data.order import Position

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

EVERY_S, TERMINAL_S = 30.0, 5.0  # between two lines, in a log and on a terminal


class ProgressLines:
    """Prints a line on stderr now and then, and the last state at the end.

    A run that is done before the first line is due prints none.
    """

    def __init__(self) -> None:
        self._every_s = TERMINAL_S if sys.stderr.isatty() else EVERY_S
        self._first: tuple[float, int] | None = None  # time and step of the first metrics
        self._due_s = time.monotonic() + self._every_s
        self._is_begun = False  # a line was printed
        self._text = ""  # of the newest metrics

    def show(self, fields: dict[str, Any]) -> None:
        """Note the fields of a metrics line, and print a line where one is due."""
        now = time.monotonic()
        self._first = self._first or (now, fields["step"])
        self._text = _line(fields, now, *self._first)
        if now >= self._due_s:
            self._due_s, self._is_begun = now + self._every_s, True
            print(self._text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Print the last state, if a line was printed before."""
        if self._is_begun:
            print(self._text, file=sys.stderr, flush=True)


def _line(fields: dict[str, Any], now: float, first_s: float, first_step: int) -> str:
    """Return the line of a step with `fields` of a metrics line, for people.

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
    """Return the numbers among the fields of a metrics line, without the steps."""
    steps = {"step", "total_steps"}
    return {k: v for k, v in fields.items() if k not in steps and isinstance(v, (int, float))}


class TensorBoardSink:
    """TensorBoard's writer, made at its first use, after the checkpoint is restored.

    `position` is the run's. At the first use, what an earlier attempt wrote for steps behind it is
    purged: these steps are done again.
    """

    def __init__(self, folder: Path, position: Position) -> None:
        self._folder, self._position = folder, position
        self._writer: SummaryWriter | None = None
        self._has_failed = False

    @property
    def writer(self) -> SummaryWriter:
        """The writer; made, with its folder, at the first use. Raises OSError if the disk
        refuses."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # a second or two

            redone = self._position.step + 1
            self._writer = SummaryWriter(str(self._folder), purge_step=redone, flush_secs=10)
        return self._writer

    def show(self, fields: dict[str, Any]) -> None:
        """Write the numbers of a metrics line. A disk that refuses is reported on stderr, once, and
        nothing more is written."""
        if self._has_failed:
            return
        with self._tolerance():
            for name, number in _scalars(fields).items():
                self.writer.add_scalar(name, number, fields["step"])

    def end(self) -> None:
        """Close the writer, if it was used; a disk that refuses is reported, not raised."""
        if self._writer is None or self._has_failed:
            return
        with self._tolerance():
            self._writer.close()

    @contextmanager
    def _tolerance(self) -> Iterator[None]:
        """Print an OSError and note it, so that nothing more is tried: curves end no training."""
        try:
            yield
        except OSError as error:
            self._has_failed = True
            say(f"TensorBoard's file can't be written any more: {error}")
