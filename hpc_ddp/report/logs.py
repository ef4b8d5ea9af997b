"""What a run has printed: the job's own output, one rank's log, or all ranks' in order of time."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import re
import shlex
import sys
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from hpc_ddp.report.evidence import is_by_hand
from hpc_ddp.run.errors import UsageError
from hpc_ddp.run.folder import AttemptFolder, RunFolder
from hpc_ddp.run.journal import Event, events_of, last_event

POLL_S = 0.5
ASK_EVERY = 20  # polls between two questions to Slurm whether the run has ended
LIST_EVERY = 10  # polls between two looks for new ranks
CHUNK = 1 << 16  # bytes read of a log at once: there may be thousands of them
FOLD_S = 2.0  # equal lines of several ranks within this time are one: times are good to a second

# What launchers and libraries print in every rank of every job, and nobody needs.
NOISE = re.compile(
    rb"\[W\d{4} .*socket\.cpp:\d+\] \[c10d\] The hostname of the client socket cannot be retrieved"
    rb"|\[Gloo\] Rank \d+ is connected to \d+ peer ranks"
)
MARK = re.compile(rb"^\[rank\d+\]: ?")  # torch's own, of tracebacks
COLOURS = (36, 33, 32, 35, 34, 31)


@dataclass(frozen=True)
class Asked:
    """What is to be shown. `rank` shows one rank's log as it is, `job` the job's own output; else
    all ranks' are merged, which `raw` does without leaving out or folding anything."""

    rank: int | None = None
    attempt: int | None = None
    job: bool = False
    raw: bool = False
    pattern: re.Pattern[bytes] | None = None

    @classmethod
    def of(
        cls, rank: int | None, attempt: int | None, job: bool, raw: bool, grep: str | None
    ) -> Asked:
        """Raises UsageError where the options contradict each other, or `grep` is no pattern."""
        if job and (rank is not None or attempt is not None):
            raise UsageError(
                "--job was given with --rank or --attempt: the job's output is one file, of all",
                hint="leave out --job",
            )
        try:
            pattern = re.compile(os.fsencode(grep)) if grep is not None else None
        except re.error as error:
            raise UsageError(
                f"--grep {grep!r} is no regular expression: {error}",
                hint=r"a backslash before each of . * + ? [ ( | that is meant as it is",
            ) from None
        return cls(rank, attempt, job, raw, pattern)


def show(run: RunFolder, asked: Asked) -> None:
    """Print the logs."""
    follow(run, asked, None)


def follow(run: RunFolder, asked: Asked, ended: Callable[[], bool] | None) -> None:
    """Print the logs and go on with what is added, until `ended` says so; None: only what is there.

    Raises
    ------
    UsageError
        there is no such rank or attempt, which names those that there are; or there will be nothing
    """
    if is_by_hand(run.events()):
        log_files(run, asked.rank or 0, asked.attempt)  # where there are none, none will come
    shown = _Plain(run, asked) if asked.job or asked.rank is not None else _Merged(run, asked)
    if ended is None:
        shown.update(last=True)
        if isinstance(shown, _Merged) and shown.is_empty:
            _Plain(run, asked).update(last=True)
        return
    with contextlib.suppress(KeyboardInterrupt):
        for poll in itertools.count():
            last = poll % ASK_EVERY == 0 and ended()  # asked first, so that all before it is shown
            with contextlib.suppress(UsageError):  # a rank that has not started yet
                shown.update(last)
                if last and isinstance(shown, _Merged) and shown.is_empty:
                    _Plain(run, asked).update(last)
            if last:
                return
            time.sleep(POLL_S)


# --- files as they are ----------------------------------------------------------------------


def log_files(run: RunFolder, rank: int | None, attempt: int | None) -> list[Path]:
    """Return the files to show: the job's own output, or those of a rank, oldest attempt first.

    The job's output has the launcher's lines and what rank 0 prints, over all attempts. An
    `attempt` without a rank means rank 0's.

    Raises
    ------
    UsageError
        there is no such rank or attempt; names those that there are
    """
    outputs = sorted(run.logs.glob("slurm*.out"))
    if rank is None and attempt is None and outputs:
        return outputs
    wanted = rank or 0
    folders = [a for a in run.attempts() if attempt in (None, a.number)]
    files = [node.rank_log(wanted) for a in folders for node in a.nodes()]
    found = [path for path in files if path.exists()]
    if not found and not (rank is None or run.attempts()):
        return []
    if not found and not run.attempts():
        raise UsageError(f"run {run.id} has printed nothing yet", hint=f"hpc-ddp explain {run.id}")
    if not found and is_by_hand(run.events()):
        raise UsageError(
            f"run {run.path} was started by hand: what it printed went to its terminal",
            hint=f"hpc-ddp explain {shlex.quote(str(run.path))}",
        )
    if not found:
        ranks = {p.stem.removeprefix("rank-") for p in run.logs.glob("attempt-*/*/rank-*.log")}
        raise UsageError(
            f"no log of rank {wanted}"
            + (f" in attempt {attempt}" if attempt is not None else "")
            + f"; ranks: {', '.join(sorted(ranks, key=int)) or 'none yet'};"
            + f" attempts: {', '.join(str(a.number) for a in run.attempts()) or 'none yet'}",
            hint=f"hpc-ddp logs {run.id}",
        )
    return found


class _Plain:
    """Copies files to stdout, one after the other."""

    def __init__(self, run: RunFolder, asked: Asked) -> None:
        self._run, self._asked = run, asked
        self._files: dict[Path, _Log] = {}

    def update(self, last: bool) -> None:
        for path in log_files(self._run, self._asked.rank, self._asked.attempt):
            log = self._files.setdefault(path, _Log(path))
            for _, line in log.lines(last or self._asked.pattern is None):
                _write(line, self._asked.pattern)
        sys.stdout.buffer.flush()


def _write(line: bytes, pattern: re.Pattern[bytes] | None, before: str = "") -> None:
    if pattern is None or pattern.search(line):
        sys.stdout.buffer.write(before.encode() + line)


class _Log:
    """One growing file; `times` and `sizes` tell how long it was when. With `tidy`, of what a
    progress bar has drawn over and over only the last is a line."""

    def __init__(self, path: Path, tidy: bool = False) -> None:
        self.path, self._tidy, self._read = path, tidy, 0
        self.times: list[float] = []
        self.sizes: list[int] = []

    @property
    def may_have_grown(self) -> bool:
        """Whether there may be something new; asks nobody where the supervisor notes that."""
        return not self.sizes or self.sizes[-1] > self._read

    def lines(self, last: bool) -> Iterator[tuple[float, bytes]]:
        """Yield the lines that are new, and when they were there; `last`: also one without end."""
        rest = b""
        while True:
            try:
                with open(self.path, "rb") as file:  # not kept open: there may be thousands
                    file.seek(self._read + len(rest))
                    chunk = file.read(CHUNK)
            except OSError:
                return
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                self._read += len(line) + 1
                yield self._when(self._read), self._last_drawn(line) + b"\n"
            if self._tidy:
                drawn = self._last_drawn(rest)
                self._read += len(rest) - len(drawn)
                rest = drawn
            if not chunk:
                break
        if rest and last:
            self._read += len(rest)
            yield self._when(self._read), rest

    def _last_drawn(self, line: bytes) -> bytes:
        bar = line.rstrip(b"\r")
        return line[bar.rfind(b"\r") + 1 :] if self._tidy else line

    def _when(self, size: int) -> float:
        at = bisect_left(self.sizes, size)
        if at < len(self.times):
            return self.times[at]
        with contextlib.suppress(OSError):
            return max(self.path.stat().st_mtime, *self.times[-1:], 0.0)
        return time.time()


# --- all ranks, in order of time --------------------------------------------------------------


@dataclass
class _Group:
    """One attempt, of a run or of a task of an array: its ranks' logs by node and rank."""

    run: RunFolder
    attempt: AttemptFolder
    tidy: bool
    logs: dict[tuple[str, int], _Log] = field(default_factory=dict)
    begun: bool = False
    told: bool = False
    _looks: int = 0
    _seen: dict[Path, int] = field(default_factory=dict)  # bytes of each list of times

    def look(self, last: bool) -> None:
        """Take in the logs that there are by now, and when they grew."""
        if last or not self._looks % LIST_EVERY or not self.logs:
            for node in self.attempt.nodes():
                for path in node.path.glob("rank-*.log"):
                    rank = path.stem.removeprefix("rank-")
                    if rank.isdecimal():
                        self.logs.setdefault((node.path.name, int(rank)), _Log(path, self.tidy))
                for path in node.path.glob("printed*"):
                    self._seen.setdefault(path, 0)
        self._looks += 1
        for path in self._seen:
            self._read_times(path)

    def _read_times(self, path: Path) -> None:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(self._seen[path])
            for line in file.read().splitlines(keepends=True):
                words = line.split()
                if not line.endswith(b"\n"):
                    break  # half-written: the next look takes it
                self._seen[path] += len(line)
                with contextlib.suppress(ValueError, IndexError, KeyError):
                    when, size = float(words[0]), int(words[2])
                    log = self.logs[path.parent.name, int(words[1])]
                    log.times.append(when)
                    log.sizes.append(size)

    def events(self) -> list[Event]:
        """Return what the batch shell has journaled of the attempt; those of ranks are many."""
        paths = sorted(self.run.journal_folder.glob("*.jsonl"))
        found = (e for p in paths if not p.name.startswith("rank-") for e in events_of(p))
        return [event for event in found if event["attempt"] == self.attempt.number]

    def lines(self, last: bool) -> Iterator[_Line]:
        """Yield the new lines of all ranks in order of time."""

        now = time.time()  # a node's clock may be ahead

        def of(node: str, rank: int, log: _Log) -> Iterator[_Line]:
            at = 0.0
            for when, line in log.lines(last):
                at = max(at, min(when, now))
                yield _Line(at, rank, node, line)

        every = last or self._looks % LIST_EVERY == 1  # its supervisor may not be able to note it
        grown = [each for each in sorted(self.logs.items()) if every or each[1].may_have_grown]
        each = (of(node, rank, log) for (node, rank), log in grown)
        return heapq.merge(*each, key=itemgetter(0, 1))


class _Line(NamedTuple):
    when: float
    rank: int
    node: str
    text: bytes


class _Folded:
    """Makes one of equal lines that several ranks print at about the same time. No rank's lines
    change their order by it: those before an equal one are shown first."""

    def __init__(self, fold: bool) -> None:
        self._fold = fold
        self._held: list[_Line] = []

    def add(self, line: _Line) -> Iterator[tuple[_Line, list[int]]]:
        """Take a line in; yield those that are too old to be equal to it, with their ranks."""
        if not self._fold:
            yield line, [line.rank]
            return
        yield from self.take(line.when - FOLD_S)
        self._held.append(line)

    def take(self, before: float) -> Iterator[tuple[_Line, list[int]]]:
        """Yield, and forget, all lines, if the first is from before a time."""
        if not self._held or self._held[0].when >= before:
            return
        queues: dict[int, deque[_Line]] = {}
        places: dict[bytes, dict[int, int]] = {}  # of each text, how often each rank still has it
        for line in self._held:
            queues.setdefault(line.rank, deque()).append(line)
            counts = places.setdefault(line.text, {})
            counts[line.rank] = counts.get(line.rank, 0) + 1
        held, self._held = self._held, []

        def pop(rank: int) -> _Line:
            line = queues[rank].popleft()
            places[line.text][rank] -= 1
            return line

        gone: Counter[int] = Counter()  # lines of each rank that were shown before their turn
        for line in held:
            if gone[line.rank]:
                gone[line.rank] -= 1
                continue
            pop(line.rank)
            ranks = [line.rank]
            others = [rank for rank, count in places[line.text].items() if count]
            for rank in others:
                if rank == line.rank:
                    continue
                while True:
                    first = pop(rank)
                    gone[rank] += 1
                    if first.text == line.text:
                        break
                    yield first, [rank]
                ranks.append(rank)
            yield line, ranks


class _Merged:
    """Prints the ranks' lines with their node and rank, and a line where an attempt begins or ends.

    The marks are left out as long as only rank 0 has said anything.
    """

    def __init__(self, run: RunFolder, asked: Asked) -> None:
        self._run, self._asked = run, asked
        self._groups: dict[Path, _Group] = {}
        self._folded: dict[Path, _Folded] = {}
        self._marked = False
        self._width = 0  # of the widest mark of one rank so far
        self._colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    @property
    def is_empty(self) -> bool:
        """Whether no rank has a log."""
        return not any(group.logs for group in self._groups.values())

    def update(self, last: bool) -> None:
        self._find()
        groups = sorted((g for g in self._groups.values() if last or not g.told), key=_began)
        for group in groups:
            group.look(last)
        self._marked = self._marked or any(map(self._has_several, groups))
        for group in groups:
            self._update(group, last)
        sys.stdout.buffer.flush()

    def _find(self) -> None:
        for run in self._run.tasks() or [self._run]:
            for attempt in run.attempts():
                if self._asked.attempt in (None, attempt.number):
                    self._groups.setdefault(attempt.path, _Group(run, attempt, not self._asked.raw))
        wanted = self._asked.attempt
        if wanted is not None and not self._groups:
            log_files(self._run, 0, wanted)  # says which there are

    def _has_several(self, group: _Group) -> bool:
        """Tell whether any rank but 0 has printed what is to be shown."""
        others = (log.path for (_, rank), log in group.logs.items() if rank and log.may_have_grown)
        return any(map(self._says_something, others))

    def _says_something(self, path: Path) -> bool:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            return any(map(self._is_shown, file.read(CHUNK).splitlines(keepends=True)))
        return False

    def _is_shown(self, line: bytes) -> bool:
        return self._asked.raw or not NOISE.search(line)

    def _update(self, group: _Group, last: bool) -> None:
        folded = self._folded.setdefault(group.attempt.path, _Folded(not self._asked.raw))
        events = group.events()
        verdict = last_event(events, "verdict")
        over = last or verdict is not None  # asked first, so that all lines before it are there
        if not group.begun and (group.logs or over):
            self._say(group, _beginning(events))
            group.begun = True
        for line in group.lines(over):
            if self._is_shown(line.text):
                self._print(group, folded.add(line))
        self._print(group, folded.take(float("inf") if over else time.time() - FOLD_S / 2))
        if verdict and not group.told:
            self._say(group, _end(verdict))
            group.told = True

    def _print(self, group: _Group, lines: Iterable[tuple[_Line, list[int]]]) -> None:
        for line, ranks in lines:
            text = line.text if line.text.endswith(b"\n") else line.text + b"\n"
            if not self._marked:
                _write(text, self._asked.pattern)
            elif self._asked.pattern is None or self._asked.pattern.search(text):
                _write(MARK.sub(b"", text), None, self._mark(group, line, ranks))

    def _mark(self, group: _Group, line: _Line, ranks: list[int]) -> str:
        task = f"task {group.run.index} " if group.run.is_task else ""
        if len(ranks) == 1:
            where = f"{line.node} rank {line.rank}"
        elif len(ranks) == len(group.logs):
            where = "all ranks"
        else:
            where = f"ranks {spans(ranks)}"
        self._width = max(self._width, len(where) if len(ranks) == 1 else 0)
        mark = f"{task}{where:{self._width}} | "
        if not self._colours:
            return mark
        return f"\033[{COLOURS[line.rank % len(COLOURS)]}m{mark}\033[0m"

    def _say(self, group: _Group, text: str) -> None:
        if self._asked.pattern is not None or not text:
            return
        task = f"task {group.run.index}, " if group.run.is_task else ""
        said = f"--- {task}attempt {group.attempt.number}{text}"
        sys.stdout.buffer.write(
            f"\033[1m{said}\033[0m\n".encode() if self._colours else f"{said}\n".encode()
        )


def _began(group: _Group) -> tuple[float, int]:
    with contextlib.suppress(OSError):
        return (group.attempt.path / "attempt.json").stat().st_mtime, group.attempt.number
    return float("inf"), group.attempt.number


def _beginning(events: Sequence[Event]) -> str:
    """Return when, where and as which job an attempt began."""
    started = last_event(list(events), "started")
    if started is None:
        return ""
    when = time.strftime(" began %a %H:%M:%S", time.localtime(started["time"]))
    nodes = started.get("nodes") or []
    where = " ".join(nodes) if len(nodes) <= 4 else f"{nodes[0]} … {nodes[-1]} ({len(nodes)} nodes)"
    job = f", job {started['job_id']}" if started.get("job_id") else ""
    return f"{when}{where and f' on {where}'}{job}"


def _end(verdict: Event) -> str:
    """Return how an attempt ended, in the words of the job's own output."""
    when = time.strftime("%H:%M:%S", time.localtime(verdict["time"]))
    why = verdict.get("why") or verdict.get("cause")
    again = "; it starts over" if verdict.get("step") is None else "; it goes on"
    then = {"requeue": again, "give up": "; given up"}.get(verdict.get("action", ""), "")
    return f" ended {when}: {why}{then}"


def spans(numbers: Iterable[int]) -> str:
    """Return numbers as ``0-3,7``."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
