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
from hpc_ddp.training.data.batch_plan import Position
from hpc_ddp.training.devices import Transfer, is_number, plain

# Seconds between two lines: in the first minute, and from a quarter of an hour on. In between they
# grow, so that the journal of a week is no gigabyte, and the disk has rest.
EVERY_S, SELDOM_S = 0.5, 10.0
RESERVED = {"time", "event", "attempt", "step", "total_steps", "epoch", "samples_per_s", "mfu"}


class Metrics:
    """Journals `FirstStep`, then `MetricsLine`s: at most one per `EVERY_S`, later one per
    `SELDOM_S`, and always one for the last step.

    Values are this rank's own (rank 0's in practice): a loss over all ranks would cost a collective
    in each step. The copy of a tensor to the host begins when a line is due, and the line is
    written once the copy is done, some steps later: no step waits for a device, or for a disk.
    """

    def __init__(
        self,
        journal: Journal,
        world_size: int,
        hosts: list[str],
        use_per_sample_s: float | None = None,
        listeners: Sequence[Callable[[dict[str, Any]], None]] = (),
    ) -> None:
        """`world_size` and `hosts`, the names of the ranks' nodes, are for `FirstStep`.

        `use_per_sample_s` is the share of the GPUs' peak that one sample per second takes, for the
        field ``mfu``; None where it is not known. Each of the `listeners` is called with the fields
        of each line.
        """
        self._journal, self._use_per_sample_s = journal, use_per_sample_s
        self._listeners = list(listeners)
        # Fields of `FirstStep`, {} once it is journalled.
        self._first: dict[str, Any] = {"world_size": world_size, "hosts": hosts}
        self._began = self._written_at = time.monotonic()
        self._due = self._began + EVERY_S  # the next line, on the monotonic clock
        self._samples = 0  # samples since the last line
        self._latest: dict[str, Any] | None = None  # fields of the last step; None once in a line
        self._line: Transfer | None = None  # the fields of a line under way to the journal

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Have `listener` called with the fields of each further line."""
        self._listeners.append(listener)

    def add(
        self,
        position: Position,
        samples: int,
        values: dict[str, Any],
        total_steps: int | None = None,
    ) -> None:
        """Note a step's `values`, by name, begin a line if one is due, and write a line whose
        values have come from their device. The first call journals `FirstStep`, and appends a line
        to the file that the keeper of ``--stage`` reads, if there is one.

        `samples` is the size of the step's global batch, 0 where it is not known; `total_steps` is
        the run's, None where it is not known. Raises as `_write_line`, perhaps some steps later.
        """
        if self._first:
            self._journal.write(FirstStep(position.step, **self._first))
            self._first = {}
            with suppress(KeyError, OSError), open(os.environ[OPENED_FILES], "a") as record:
                record.write(f"{FIRST_STEP}\n")
        self._samples += samples
        head = {"step": position.step, "total_steps": total_steps, "epoch": position.epoch}
        # A CUDA graph's next run may overwrite a loss, or free its memory, before it is read.
        copies = {n: v.clone() if torch.is_tensor(v) else v for n, v in values.items()}
        self._latest = {**head, **copies}
        if time.monotonic() >= self._due:
            self._begin_line()
        if self._line is not None and self._line.is_over():
            self._write_line()

    def flush(self) -> None:
        """Write a line of the values that were added last, unless it is written already. Waits for
        a device, and raises as `_write_line`; `Journal.drain` waits for the disk."""
        self._begin_line()
        self._write_line()

    def _begin_line(self) -> None:
        """Write the line before, if it is still under way; then make the latest values the fields
        of a new line, and begin to copy those that are on a device. Do nothing without new values.
        Raises as `_write_line`."""
        if self._latest is None:
            return
        self._write_line()  # at least half a second old, so it hardly waits for the device
        now = time.monotonic()
        speed = self._samples / max(now - self._written_at, 1e-9)
        fields = {**self._latest, "samples_per_s": round(speed, 1)}
        if self._use_per_sample_s is not None:
            fields["mfu"] = round(speed * self._use_per_sample_s, 4)
        self._line = Transfer(fields)
        self._written_at, self._samples, self._latest = now, 0, None
        self._due = now + min(max(EVERY_S, (now - self._began) / 100), SELDOM_S)

    def _write_line(self) -> None:
        """If a line is under way, pass its fields that are not None to the journal and the
        listeners, -0.0 as 0.0. Waits for values that are still on a device.

        Raise RuntimeError, ValueError or TypeError for a value that is no scalar; errors of a
        listener come through.
        """
        if self._line is None:
            return
        numbers = self._line.numbers()
        present = {name: number for name, number in numbers.items() if number is not None}
        # abs makes 0.0 of -0.0.
        fields = {name: number if number else abs(number) for name, number in present.items()}
        self._line = None
        self._journal.write_later(MetricsLine(fields))
        for listener in self._listeners:
            listener(fields)


def make_step_listener(
    hook: Callable[[int, dict[str, float]], object], history: Sequence[JournalEvent]
) -> Callable[[dict[str, Any]], None]:
    """Return a listener of `Metrics` that calls `hook` with the step of each line, and its fields
    without ``step`` and ``total_steps``. Steps up to the last one in `history`, the journal so far,
    are passed over; attempts before a ``--fresh`` do not count there."""
    first = first_attempt(history)
    lines = (event for event in history if isinstance(event, MetricsLine))
    last_step = max((line.step for line in lines if line.attempt >= first), default=-1)

    def listener(fields: dict[str, Any]) -> None:
        """Pass the fields of a line to the hook, if its step is new."""
        if fields["step"] > last_step:
            steps = ("step", "total_steps")
            hook(fields["step"], {name: fields[name] for name in fields if name not in steps})

    return listener


def check_values(values: dict[str, Any]) -> None:
    """Raise UsageError if one of a step's `values`, by name, is no number, or its name is
    `RESERVED`. None is accepted: a value that this step lacks. Waits for no accelerator."""
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


def read_number(call: str, name: str, value: Any) -> float:
    """Return `value`, a number or a tensor of one number, as a float. Raise UsageError for any
    other value; the message names the `call`, as ``run.best``, and its argument `name`. Waits for
    an accelerator, whose errors come through."""
    is_refused = isinstance(value, str) or (torch.is_tensor(value) and not is_number(value))
    try:
        return float("no number" if is_refused else plain(value))  # `float` refuses this text
    except (TypeError, ValueError, OverflowError):
        raise UsageError(
            f"{call} was given {name}, a {type(value).__name__} that is no number; accepted:"
            " numbers, and tensors of one number",
            hint=f"float({name}) has to work, or {name}.mean() for a tensor of several",
        ) from None
