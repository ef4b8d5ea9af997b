"""What rank 0 shows of the metrics beside the journal: a line for people, and TensorBoard."""

from __future__ import annotations

import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from hpc_ddp.training.data.order import Position

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

EVERY_S = 30.0


class Progress:
    """One line on stderr: redrawn on a terminal, and else a new one every `EVERY_S`.

    Under hpc-ddp a worker's stderr is always a log, so its own bar is never in the way. A run
    that is done before the first line is due says nothing.
    """

    def __init__(self) -> None:
        self._out = sys.stderr
        self._drawn = self._said = False
        self._first: tuple[float, int] | None = None  # time and step of the first line
        self._due_s = time.monotonic() + EVERY_S
        self._terminal = self._out.isatty()
        self._text = ""
        if self._terminal:
            sys.stdout = cast(TextIO, _Above(sys.stdout, self))
            sys.stderr = cast(TextIO, _Above(sys.stderr, self))

    def show(self, fields: dict[str, Any]) -> None:
        """Take in the fields of a metrics line."""
        now = time.monotonic()
        self._first = self._first or (now, fields["step"])
        self._text = _line(fields, now, *self._first)
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._put(f"\r\x1b[K{self._text[:width]}")
            self._drawn = True
        elif now >= self._due_s:
            self._put(f"{self._text}\n")
            self._due_s, self._said = now + EVERY_S, True

    def clear(self) -> None:
        """Take the drawn line away, so that something else can be written."""
        if self._drawn:
            self._put("\r\x1b[K")
            self._drawn = False

    def end(self) -> None:
        """Leave the last state for the log."""
        self.clear()
        if self._said or (self._terminal and self._text):
            self._put(f"{self._text}\n")

    def _put(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class _Above:
    """A stream whose writes take the drawn line away first; it comes back with the next one."""

    def __init__(self, stream: TextIO, progress: Progress) -> None:
        self._stream, self._progress = stream, progress

    def write(self, text: str) -> int:
        self._progress.clear()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _line(fields: dict[str, Any], now: float, first_s: float, first_step: int) -> str:
    step, total = fields["step"], fields.get("total_steps")
    parts = [f"step {step}/{total}" if total else f"step {step}"]
    for name, value in _scalars(fields).items():
        parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    if total and total > step > first_step:
        left_s = (total - step) * (now - first_s) / (step - first_step)
        parts.append(f"{timedelta(seconds=round(left_s))} left")
    return "  ".join(parts)


def _scalars(fields: dict[str, Any]) -> dict[str, float]:
    told = {"step", "total_steps"}
    return {k: v for k, v in fields.items() if k not in told and isinstance(v, (int, float))}


class Board:
    """TensorBoard's writer, made when it is first asked for, after the checkpoint is restored.

    What an earlier attempt wrote of the steps that are now done again is purged.
    """

    def __init__(self, folder: Path, position: Position) -> None:
        self._folder, self._position = folder, position
        self._writer: SummaryWriter | None = None

    @property
    def writer(self) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # a second or two

            redone = self._position.step + 1
            self._writer = SummaryWriter(str(self._folder), purge_step=redone, flush_secs=10)
        return self._writer

    def show(self, fields: dict[str, Any]) -> None:
        """Take in the fields of a metrics line."""
        for name, value in _scalars(fields).items():
            self.writer.add_scalar(name, value, fields["step"])

    def end(self) -> None:
        if self._writer is not None:
            self._writer.close()
