"""The failures of an attempt's workers: what each said, and which one was the first cause."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_ddp.core.errors import (
    CAN_GO_ON,
    COMMUNICATION_ERROR,
    EARLY_EXIT,
    ERROR_LINE,
    MISMATCH,
    UsageError,
)
from hpc_ddp.core.file_io import read_json, read_tail
from hpc_ddp.core.job.attempt_folder import AttemptFolder, NodeFolder
from hpc_ddp.core.journal.events import JournalEvent, RankFailed, WorkerStarted
from hpc_ddp.core.journal.journal import last_event
from hpc_ddp.core.journal.parsing import parse_event
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome.oom import KILLED
from hpc_ddp.node.workers.worker import AGAIN

TAIL_BYTES = 64 * 1024
JOURNALED_S = 60.0  # how long before its end a worker may have journaled its error

_UNREADABLE = re.compile(r"^(?:Syntax|Indentation|Tab)Error: .{1,400}", re.M)
_ABORTED = re.compile(  # but for the lines of a C++ stack, which name the watchdog as well
    r"^(?!.*(?:frame #|Exception raised from)).*(?:ProcessGroupNCCL|Watchdog caught|c10::Dist"
    rf"|what\(\): |watchdog thread terminated|(?:CUDA|HIP) error during|{MISMATCH.pattern}).*$",
    re.M,
)
# NCCL's watchdog meets such errors of the rank's own kernels, and ends the process for them.
_OF_DEVICE = re.compile(r"(?:CUDA|HIP) error: (?!.*(?:CUDA|HIP) error: ).*")
# An error that the machine makes, and no script: of a disk (EIO, ENXIO, ENODEV, ENOTCONN,
# ESHUTDOWN, ESTALE; of the node's own also ENOSPC, EROFS and EUCLEAN), of an accelerator that has
# failed or is not there, or of its driver; or of memory of the node, or of an accelerator, that
# another process holds.
_OF_MACHINE = re.compile(
    r"\[Errno (?:5|6|19|107|108|116)\]"
    r"|\[Errno (?:28|30|117)\][^']*'/(?:tmp|var/tmp|dev/shm|local\w*)/"
    r"|/(?:tmp|var/tmp|dev/shm|local\w*)/[^']*'?: (?:No space left on device|Read-only file system)"
    r"|No usable temporary directory|uncorrectable (?:ECC|NVLink)|GPU (?:is lost|has fallen off)"
    r"|\bXid\b|No \w+ (?:GPU|XPU|NPU|device)s? (?:is|are) available|no \w+-capable device"
    r"|device\(s\) is/are busy or unavailable|(?:CUDA|HIP) unknown error"
    r"|[Ff]ound no \w+ driver|[Dd]river/library version mismatch|NVML/RM version mismatch"
    r"|unsupported display driver|forward compatibility was attempted|system not yet initialized"
    r"|Process \d+ has [\d.]+ \w+ memory in use|out of shared memory"
    r"|file </torch_\w+>[^:]*: No space left|shared memory \w+ </\w+>[^:]*: No space left"
)
# As faulthandler prints it for a fatal signal: where the thread was that got it.
_CRASHED = re.compile(r"^Current thread .*:\n\s+(File .*)", re.M)
_TIMER = re.compile(r"Timeout \(([\d:]+)")  # as faulthandler begins what its timer writes
_TORN_DOWN = (-signal.SIGTERM, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class Failure:
    """A worker that did not end well.

    `rank` is None where torchrun itself failed, or where it is not known which process was killed.
    `code` is the exit code as Popen gives it, negative for a signal. `time` is that of the end, in
    unix seconds by the node's clock. `error` is the line that names the error, '' where none is
    known; `last_line` then is the last line of the log.
    """

    rank: int | None
    node: str
    code: int
    time: float
    error: str
    last_line: str = ""

    @property
    def kind(self) -> str:
        """The first of these that applies: ``left`` (`early_exits`); ``torn down`` (SIGTERM);
        ``exception`` (differing collectives, or an error of the device); ``hang``; ``signal`` (any
        other signal, unless the error is that a peer is gone); ``disk`` (exit code `CAN_GO_ON`);
        ``communication`` (a peer is gone, by another line than a script's own ``error: …``);
        ``exception`` (any other error); ``exit`` (no error)."""
        if self.error.startswith(EARLY_EXIT):
            return "left"
        if self.code in _TORN_DOWN:
            return "torn down"
        if MISMATCH.search(self.error) or _OF_DEVICE.match(self.error):
            return "exception"
        if self.error.startswith("HangError: "):
            return "hang"
        if self.code < 0 and not COMMUNICATION_ERROR.search(self.error):
            return "signal"
        if self.code == CAN_GO_ON:
            return "disk"
        if COMMUNICATION_ERROR.search(self.error) and not ERROR_LINE.match(self.error):
            return "communication"
        return "exception" if self.error else "exit"

    @property
    def is_of_usage(self) -> bool:
        """Whether the error is a UsageError of hpc_ddp.training: a wrong call by the script, which
        would fail again."""
        return self.kind == "exception" and self.error.startswith(f"{UsageError.__name__}: ")

    @property
    def is_of_machine(self) -> bool:
        """Whether the error is the node's own: of its disk, its accelerators or their driver. An
        error of the kind ``disk`` is not: a save failed, and all nodes share its disk."""
        text = self.error or self.last_line  # the latter of a program of set-up lines, say
        return self.kind != "disk" and bool(_OF_MACHINE.search(text))

    @property
    def is_of_peers(self) -> bool:
        """Whether the failure may follow from the loss of another node: a hang or a broken
        connection of a worker, or an error of the rendezvous, in which torchrun waits for enough
        nodes."""
        is_of_rendezvous = self.rank is None and "Rendezvous" in self.error
        return is_of_rendezvous or self.kind in ("hang", "communication")

    @property
    def is_of_clock(self) -> bool:
        """Whether a timeout may be the cause, as that of a watchdog or of torch, whose clocks go on
        while the job is suspended: True for SIGABRT, and for each kind but ``exception``,
        ``signal`` and ``left``."""
        is_aborted = self.code == -signal.SIGABRT
        return is_aborted or self.kind in ("hang", "communication", "disk", "exit", "torn down")

    @property
    def exit_code(self) -> int:
        """The code for the whole job, as a shell would give it (128 + signal); never 0."""
        return 128 - self.code if self.code < 0 else self.code or 1

    def __str__(self) -> str:
        """Return the failure as ``rank 3 on n2: RuntimeError: …``; without an error with the signal
        or exit code, and the log's last line, as ``torchrun on n2: SIGKILL ("…")``; with ``a
        process`` in place of torchrun where one was killed for want of memory."""
        subject = "a process" if self.error == KILLED else "torchrun"
        if self.rank is not None:
            subject = f"rank {self.rank}"
        code = _signal_name(-self.code) if self.code < 0 else f"exit code {self.code}"
        quote = f' ("{self.last_line}")' if self.last_line else ""
        return f"{subject} on {self.node}: {self.error or code + quote}"


def _signal_name(number: int) -> str:
    """Return a signal's name, as ``SIGKILL``; ``signal 42`` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:  # most of the real-time signals
        return f"signal {number}"


def read_failures(record: dict[str, Any]) -> list[Failure]:
    """Return the failures in `record`, the JSON of a node's record of its end; [] without any.
    Where the node's supervisor has killed the workers, failures by SIGKILL get the code of SIGTERM:
    they say nothing about the cause. Raises KeyError or TypeError for a record of another form."""
    failures = [Failure(node=record["node"], **failure) for failure in record.get("failures", [])]
    if record.get("killed"):
        return [
            replace(f, code=_TORN_DOWN[0]) if f.code == -signal.SIGKILL else f for f in failures
        ]
    return failures


def find_failure(
    failures: Sequence[Failure], events: Iterable[JournalEvent], attempt: int, is_good: bool
) -> Failure | None:
    """Return the first cause (`first_cause`) of an attempt's end: of the recorded `failures` and
    the `early_exits`, or, where all nodes have ended with 0 (`is_good`), of the `hidden_failures`.
    None without a failure. `events` are the run's."""
    if is_good:
        return first_cause(hidden_failures(events, attempt))
    return first_cause(failures, early_exits(events, attempt))


def early_exits(events: Iterable[JournalEvent], attempt: int) -> list[Failure]:
    """Return a failure with exit code 0 for each rank that has ended by itself amid the training,
    as by ``sys.exit(0)``; [] without such a rank. The ranks have journalled this among `events`,
    the run's. Only the attempt of the number `attempt` counts, from the last start of its workers
    on."""
    return [
        Failure(event.rank, event.node, 0, event.time, f"{event.error}, at step {event.step}")
        for event in _failed_ranks(events, attempt)
        if event.error == EARLY_EXIT
    ]


def hidden_failures(events: Iterable[JournalEvent], attempt: int) -> list[Failure]:
    """Return a failure with exit code 1 for each rank that has journalled an error, by the same
    events as `early_exits`: a shell around the script, or the script itself, may have made 0 of the
    code."""
    return [
        Failure(event.rank, event.node, 1, event.time, event.error)
        for event in _failed_ranks(events, attempt)
        if event.error != EARLY_EXIT
    ]


def _failed_ranks(events: Iterable[JournalEvent], attempt: int) -> list[RankFailed]:
    """Return what ranks have journalled of their failures, from the last start of the workers in an
    attempt on."""
    events_here = [event for event in events if event.attempt == attempt]
    start = last_event(events_here, WorkerStarted)
    failed = [event for event in events_here if isinstance(event, RankFailed)]
    return [event for event in failed if not (start and event.time < start.time)]


def first_cause(failures: Sequence[Failure], exits: Iterable[Failure] = ()) -> Failure | None:
    """Return the failure that the others follow from: the one whose kind comes first in `order`,
    among equal kinds the earliest. None without `failures`. Clocks of nodes differ, so time comes
    last.

    A worker whose peer has died reports a closed connection, and a worker that the agent has ended
    died of SIGTERM: these kinds come last. A rank that hangs with Python's lock exits without an
    error, and its peers report the hang: ``hang`` comes before ``exit``. The peers of a rank that
    leaves by itself hang, or lose the connection: ``left`` comes before ``hang``.

    `exits` are those of `early_exits`. One of them is a candidate, too, if its rank has no failure,
    or was only torn down. If its rank has a failure of the kind ``exit``, this failure counts as
    ``left``, at the time of the early exit.
    """
    causes = dict.fromkeys(("exception", "signal", "disk"), 0)
    order = {**causes, "left": 1, "hang": 2, "exit": 3, "communication": 4, "torn down": 5}
    kinds = {failure.rank: failure.kind for failure in failures}
    exits_by_rank = {early.rank: early for early in exits}

    def place_of(failure: Failure) -> tuple[int, float]:
        """Return the place of a failure's kind in `order`, and the failure's time."""
        early = exits_by_rank.get(failure.rank) if failure.kind == "exit" else None
        return (order["left"], early.time) if early else (order[failure.kind], failure.time)

    unrecorded = [e for e in exits_by_rank.values() if kinds.get(e.rank) in (None, "torn down")]
    # Without a failure all ranks have left: that is an end, and not judged here.
    return min([*failures, *(unrecorded if failures else ())], key=place_of, default=None)


def failures_of(code: int, run: RunFolder, folder: NodeFolder) -> list[dict[str, Any]]:
    """Return the failures of one supervisor's workers, with the fields of `Failure` but ``node``;
    where no worker has failed, one failure of torchrun, with rank None. `code` is the exit code,
    not 0, of the supervisor's child, `folder` has the supervisor's files, `run` the journals."""
    report = read_json(folder.failures)
    failures: list[dict[str, Any]] = report.get("failures", [])
    # A worker that is a task has no torchrun to report it. With a report it could not be started.
    if folder.rank is not None and not report:
        failures = [{"rank": folder.rank, "code": code, "time": time.time()}]
    for failure in failures:
        failure |= reason_of(failure, run, folder)
    if not failures:
        reason = reason_of_agent(code, report.get("agent", ""), folder)
        failures = [{"rank": None, "code": code, "time": time.time(), **reason}]
    return failures


def reason_of(failure: dict[str, Any], run: RunFolder, folder: NodeFolder) -> dict[str, str]:
    """Return the fields ``error`` and ``last_line`` of a worker's failure, as `Failure` has them.

    The error is that of `error_of`, which explains the parameters. ``last_line`` is '' if there is
    an error, else the last line of the worker's log; after a signal the line of Python code in
    which the worker got it, '' where that is not known.
    """
    error = error_of(failure, run, folder)
    return _with_last_line(failure["code"], error, folder.rank_log(failure["rank"]))


def reason_of_agent(code: int, error: str, folder: NodeFolder) -> dict[str, str]:
    """Return the fields of `reason_of` for a failure of torchrun itself, whose log is the agent log
    of `folder`. `code` is torchrun's exit code, `error` the error that torchrun has reported, or
    ''. Without an error the last line of its log may tell the reason."""
    return _with_last_line(code, error, folder.agent_log)


def _with_last_line(code: int, error: str, log: Path) -> dict[str, str]:
    """Return the fields of `reason_of` for the exit code, the error ('': none) and the log of a
    worker or of torchrun."""
    lines: list[str] = []
    if not error:
        lines = _last_lines(log) if code >= 0 else _crash_lines(log)
    return {"error": error, "last_line": next(reversed(lines), "")}


def error_of(failure: dict[str, Any], run: RunFolder, folder: NodeFolder) -> str:
    """Return the line that names a worker's error, '' without an error. `failure` has the worker's
    ``rank``, its exit ``code`` and the ``time`` of its end, in unix seconds; the worker's log is in
    the node's `folder`, its journal in `run`.

    After an exit code this is the first of: the exception of the last traceback in the log; the
    error that the worker has journaled since `JOURNALED_S` before its end; the hang that the
    watchdog's timer has written to the file of stacks; the line of the log by which a script
    refuses its arguments. After a signal it is NCCL's or gloo's reason to abort (SIGABRT), the hang
    whose report has crashed (SIGSEGV), or ''. Files that can't be read count as empty.
    """
    rank, code = failure["rank"], failure["code"]
    log = folder.rank_log(rank)
    since = failure["time"] - JOURNALED_S  # not that of a start before
    hang = _silent_hang(folder.stacks(rank), since)
    if code < 0:
        return {-signal.SIGABRT: abort_reason(log), -signal.SIGSEGV: hang}.get(code, "")
    journal, attempt = run.journal(f"rank-{rank}").path, AttemptFolder(folder.path.parent).number
    own_error = last_exception(log) or journaled_error(journal, since, attempt)
    return own_error or hang or _error_line(log)


def _silent_hang(stacks: Path, since: float) -> str:
    """Return the error of a worker that the watchdog's timer in C has ended; '' if the timer has
    not written to the worker's file `stacks` at the time `since`, in unix seconds, or later.

    Such a worker can't report the hang itself: Python's lock was held, or the worker was suspended
    for so long. A suspended worker goes on while faulthandler writes, and faulthandler may crash on
    stacks that change.
    """
    try:
        text = stacks.read_bytes()[:80].decode(errors="replace")  # the timer's line comes first
        is_new = stacks.stat().st_mtime >= since
    except OSError:
        return ""
    timer = _TIMER.match(text)
    return f"HangError: no step for {timer[1]} h; stacks in {stacks}" if timer and is_new else ""


def last_exception(log: Path) -> str:
    """Return the line that names the exception of the last traceback in `_end_of` a log; '' where
    there is no traceback, or no such log. At most 500 characters.

    For a script that can't be parsed Python prints the line without a traceback: that is returned,
    too.
    """
    text = _end_of(log)
    _, marker, after = text.rpartition("Traceback (most recent call last):\n")
    if not marker:
        return next(iter(_UNREADABLE.findall(text)), "")
    # Lines of the stack are indented, and the exception's is the first that is not.
    lines = (line for line in after.splitlines() if line and not line[0].isspace())
    return next(lines, "")[:500]


def _end_of(log: Path) -> str:
    """Return the text that a worker's last start has written to its log, of the log's last
    `TAIL_BYTES`; '' where there is no such log. Each restart writes the mark `AGAIN` first."""
    return read_tail(log, TAIL_BYTES).rpartition(AGAIN.decode())[2]


def _last_lines(log: Path) -> list[str]:
    """Return the last ten lines of `_end_of` a log, oldest first, without blank lines and those of
    hpc-ddp about an early exit; each is cut to 500 characters. [] where there is no such log."""
    lines = [line for line in _end_of(log).splitlines() if EARLY_EXIT not in line]
    return [line.strip()[:500] for line in lines if line.strip()][-10:]


def _crash_lines(log: Path) -> list[str]:
    """Return the lines of Python in which a worker got fatal signals, in `_end_of` its log, oldest
    first; [] where there are none."""
    return [line[:500] for line in _CRASHED.findall(_end_of(log))]


def _error_line(log: Path) -> str:
    """Return the last of a log's `_last_lines` that begins like an error (`ERROR_LINE`), as where a
    script refuses its arguments; '' without such a line."""
    return next((line for line in reversed(_last_lines(log)) if ERROR_LINE.match(line)), "")


def abort_reason(log: Path) -> str:
    """Return the last line that NCCL's watchdog or gloo has logged before it aborted a worker, by
    `_end_of` the worker's log; '' where there is no such line. At most 500 characters.

    NCCL aborts where a peer is gone, so such a worker is not the cause; gloo aborts where the peer
    sends another size (`MISMATCH`). Where a line names an error of the worker's own device, the
    last such error is returned, from ``CUDA error: `` or ``HIP error: `` on.
    """
    lines = _ABORTED.findall(_end_of(log))
    errors = _OF_DEVICE.findall("\n".join(lines))
    if errors:
        return str(errors[-1])[:500]
    return str(lines[-1]).strip().removeprefix("what():").strip()[:500] if lines else ""


def journaled_error(journal: Path, since: float, attempt: int) -> str:
    """Return the last error that a worker has written to the file `journal` in the attempt of this
    number, at the time `since` (unix seconds) or later; '' without such an error, and where the
    file can't be read. At most 500 characters. Early exits don't count.

    `hpc_ddp.training` prints an error of its own for people, without a traceback in the log: such
    an error is returned without its type.
    """
    for line in reversed(read_tail(journal, TAIL_BYTES).splitlines()):
        event = parse_event(line)
        if not isinstance(event, RankFailed) or event.error == EARLY_EXIT:
            continue  # a rank that exits early may have printed the reason to its log
        if event.attempt == attempt and event.time >= since:
            kind, _, message = event.error.partition(": ")
            return (message if kind.startswith("hpc_ddp.") else event.error)[:500]
    return ""
