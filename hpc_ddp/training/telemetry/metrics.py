"""Measured values on their way to the journal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from hpc_ddp.core.attempt_env import FIRST_STEP, OPENED_FILES
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.journal.events import FirstStep, JournalEvent, MetricsLine
from hpc_ddp.core.journal.journal import Journal, first_attempt
from hpc_ddp.training.data.order import Position
from hpc_ddp.training.devices import Transfer, is_number, plain

# Seconds between two lines: in the first minute, then ever more, since a week is to be no gigabyte,
# and a disk has rest; and from a quarter of an hour on.
EVERY_S, SELDOM_S = 0.5, 10.0
RESERVED = {"time", "event", "attempt", "step", "total_steps", "epoch", "samples_per_s", "mfu"}


class Metrics:
    """Journals `FirstStep`, then lines of `MetricsLine`: one per `EVERY_S` at most, later one per
    `SELDOM_S`, and the last one always.

    Values are this rank's own (rank 0's in practice): a reduced loss would cost a collective
    a step. A tensor is read only when a line is due, and written once it has come from its
    device, some steps later: no step waits for a device, or for a disk.
    """

    def __init__(
        self,
        journal: Journal,
        world_size: int,
        hosts: list[str],
        use_per_sample_s: float | None = None,  # one sample per second, as a share of the peak
        listeners: Sequence[Callable[[dict[str, Any]], None]] = (),  # each gets the lines
    ) -> None:
        """`world_size` and `hosts`, the names of the ranks' nodes, are for `FirstStep`.

        `use_per_sample_s` is the share of the GPUs' peak that one sample per second takes, None
        where it is not known; each of the `listeners` is called with the fields of each line.
        """
        self._journal, self._use_per_sample_s = journal, use_per_sample_s
        self._listeners = list(listeners)
        self._first: dict[str, Any] = {"world_size": world_size, "hosts": hosts}
        self._began = self._written_at = time.monotonic()
        self._due = self._began + EVERY_S  # the next line, on the monotonic clock
        self._samples = 0  # since the last line
        self._latest: dict[str, Any] | None = None  # fields of the last step, if of no line yet
        self._line: Transfer | None = None  # the fields of a line under way to the journal

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Call `listener` with the fields of each further line."""
        self._listeners.append(listener)

    def add(
        self,
        position: Position,
        samples: int,
        values: dict[str, Any],
        total_steps: int | None = None,
    ) -> None:
        """Note a step's values, begin a line where one is due, and write a line whose values have
        come from their device. The first call journals `FirstStep`, and tells the keeper of
        ``--stage``, if there is one.

        `samples` is the size of the step's global batch, 0 where it is not known; `total_steps` is
        the run's, None where it is not known. Raises as `_write_line`, perhaps some steps later.
        """
        if self._first:
            self._journal.write(FirstStep(position.step, **self._first))
            self._first = {}
            with suppress(KeyError, OSError), open(os.environ[OPENED_FILES], "a") as record:
                record.write(f"{FIRST_STEP}\n")  # for the keeper of --stage
        self._samples += samples
        head = {"step": position.step, "total_steps": total_steps, "epoch": position.epoch}
        # A graph's next run may write over a loss, or take its memory away, before it is read.
        copies = {n: v.clone() if torch.is_tensor(v) else v for n, v in values.items()}
        self._latest = {**head, **copies}
        if time.monotonic() >= self._due:
            self._begin_line()
        if self._line is not None and self._line.is_over():
            self._write_line()

    def flush(self) -> None:
        """Write the values that were added last, unless that has been done; waits for a device, and
        raises as `_write_line`. `Journal.drain` waits for the disk."""
        self._begin_line()
        self._write_line()

    def _begin_line(self) -> None:
        """Write the line before; then make the latest values the fields of a new line, and begin to
        read those that are on a device. Nothing without new values. Raises as `_write_line`."""
        if self._latest is None:
            return
        self._write_line()  # of half a second ago: waits for no step but that one
        now = time.monotonic()
        speed = self._samples / max(now - self._written_at, 1e-9)
        fields = {**self._latest, "samples_per_s": round(speed, 1)}
        if self._use_per_sample_s is not None:
            fields["mfu"] = round(speed * self._use_per_sample_s, 4)
        self._line = Transfer(fields)
        self._written_at, self._samples, self._latest = now, 0, None
        self._due = now + min(max(EVERY_S, (now - self._began) / 100), SELDOM_S)

    def _write_line(self) -> None:
        """If a line is under way, pass its fields that are not None on to the journal and the
        listeners, -0.0 as 0.0. Waits for values that are still on a device.

        Raise RuntimeError, ValueError or TypeError for a value that is no scalar; errors of a
        listener come through.
        """
        if self._line is None:
            return
        numbers = self._line.numbers()
        present = {name: number for name, number in numbers.items() if number is not None}
        fields = {name: number if number else abs(number) for name, number in present.items()}
        self._line = None
        self._journal.write_later(MetricsLine(fields))
        for listener in self._listeners:
            listener(fields)


def once_for_each_step(
    hook: Callable[[int, dict[str, float]], object], history: Sequence[JournalEvent]
) -> Callable[[dict[str, Any]], None]:
    """Return a listener that calls `hook` with the step of each line and its fields, without
    ``step`` and ``total_steps``; not for steps up to the last one of `history`, the journal so far.
    Steps before a ``--fresh`` do not count."""
    first = first_attempt(history)
    lines = (event for event in history if isinstance(event, MetricsLine))
    last_step = max((line.step for line in lines if line.attempt >= first), default=-1)

    def listener(fields: dict[str, Any]) -> None:
        if fields["step"] > last_step:
            steps = ("step", "total_steps")
            hook(fields["step"], {name: fields[name] for name in fields if name not in steps})

    return listener


def check_values(values: dict[str, Any]) -> None:
    """Raise UsageError for a value that is no number, or whose name is `RESERVED`; None is taken
    for a value that this step lacks. Waits for no accelerator."""
    if reserved := RESERVED & values.keys():
        raise UsageError(
            f"run.step was given {sorted(reserved)[0]!r}, which the journal has already",
            hint="give it another name",
        )
    for name, value in values.items():
        if value is not None and not is_number(value):
            raise UsageError(
                f"run.step was given {name}, a {type(value).__name__} that is no number; accepted:"
                " numbers, and tensors of one number",
                hint=f"{name}.mean(), for instance",
            )


def number(call: str, name: str, value: Any) -> float:
    """Return `value`, a number or a tensor of one, as a float; raise UsageError for others, which
    names the `call`, as ``run.best``, and its argument `name`. Waits for an accelerator, whose
    errors come through."""
    is_refused = isinstance(value, str) or (torch.is_tensor(value) and not is_number(value))
    try:
        return float("no number" if is_refused else plain(value))
    except (TypeError, ValueError, OverflowError):
        raise UsageError(
            f"{call} was given {name}, a {type(value).__name__} that is no number; accepted:"
            " numbers, and tensors of one number",
            hint=f"float({name}) has to work, or {name}.mean() for a tensor of several",
        ) from None
