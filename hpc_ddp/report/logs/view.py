"""Prints the logs of a run, once or as they grow."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_io import NOISE, open_data
from hpc_ddp.core.job.task_folder import trial_text
from hpc_ddp.core.journal.events import JournalEvent, Started, VerdictGiven
from hpc_ddp.core.journal.journal import last_event
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.report.logs.files import (
    LogFile,
    LogQuery,
    check_keeps_output,
    find_log_files,
    find_rank_logs,
)
from hpc_ddp.report.logs.merge import FOLD_S, AttemptLogs, Line, LineFold, format_spans

POLL_S = 0.5
ASK_EVERY = 20  # at every twentieth poll `has_ended` is asked, which queries Slurm
BEGINNING_BYTES = 1 << 16  # of a log, in which lines that are no noise are looked for
_NOISE = re.compile(rb"^.*(?:" + NOISE.encode() + rb").*\n?", re.M)
NOISE_WORDS = (b"socket.cpp", b"[Gloo] Rank")  # one is in each line of noise
TORCH_MARK = re.compile(rb"^\[rank\d+\]: ?", re.M)  # torch's own, of tracebacks
RANK_COLOURS = (36, 33, 32, 35, 34, 31)


def show_logs(run: RunFolder, query: LogQuery) -> None:
    """Print the lines of a query that exist now to stdout; none for a rank before the first
    attempt. Where no rank has a log, the job's own output takes the place of merged lines.

    Raises
    ------
    UsageError
        the run has no such rank or attempt, has printed nothing yet, was started by hand, so that
        it has no log, or is an array and a rank is asked for
    OSError
        the run's folder or journal can't be read, or stdout is closed
    """
    _check_has_logs(run, query)
    _update_view(_open_view(run, query), run, query, is_last=True)


def follow_logs(run: RunFolder, query: LogQuery, has_ended: Callable[[], bool]) -> None:
    """Print the lines of a query to stdout, and the lines that are added, until `has_ended` returns
    True, or the user presses Ctrl-C.

    `has_ended` is called at first, and then at every `ASK_EVERY`-th poll, of `POLL_S` each. A rank
    or attempt that does not exist yet is waited for; it is no error if it does not exist at the
    end either. Raise UsageError for a run that was started by hand, and so has no log, OSError
    where the run's folder or journal can't be read or stdout is closed, and what `has_ended`
    raises.
    """
    _check_has_logs(run, query)
    view = _open_view(run, query)
    with contextlib.suppress(KeyboardInterrupt):
        for poll in itertools.count():
            # Called before the update, so that all lines from before the end are shown.
            is_last = poll % ASK_EVERY == 0 and has_ended()
            with contextlib.suppress(UsageError):  # a rank that has not started yet
                _update_view(view, run, query, is_last)
            if is_last:
                return
            time.sleep(POLL_S)


def _check_has_logs(run: RunFolder, query: LogQuery) -> None:
    """Raise UsageError for a script that was started by hand and has no log: it will never have
    one; OSError where the journal or an attempt's folder can't be read."""
    # The journal, which is larger than a list of logs, is read only where there is no log.
    if run.attempts() and not find_rank_logs(run, query.rank or 0, query.attempt):
        check_keeps_output(run)


def _open_view(run: RunFolder, query: LogQuery) -> PlainView | MergedView:
    """Return the view for a query: of the files as they are, or of all ranks' lines, merged."""
    if query.job or query.rank is not None:
        return PlainView(run, query)
    return MergedView(run, query)


def _update_view(
    view: PlainView | MergedView, run: RunFolder, query: LogQuery, is_last: bool
) -> None:
    """Print the new lines of a view. In place of a merged view that is empty at the end
    (`is_last`), print the job's own output. Raise UsageError for a rank or an attempt that the run
    does not have, and OSError where a folder can't be read, or stdout is closed."""
    view.update(is_last)
    if is_last and view.is_empty:
        PlainView(run, query).update(is_last)


class PlainView:
    """Copies the files of a rank, or of the job's output, to stdout, one after the other."""

    is_empty = False

    def __init__(self, run: RunFolder, query: LogQuery) -> None:
        self._run, self._query = run, query
        self._files: dict[Path, LogFile] = {}

    def update(self, is_last: bool) -> None:
        """Print the new bytes of the files. A line without its line break is printed at once:
        `is_last` changes nothing. Raise UsageError where there is no such log (`find_log_files`),
        and OSError where a folder can't be read, or stdout is closed."""
        for path in find_log_files(self._run, self._query.rank, self._query.attempt):
            log = self._files.setdefault(path, LogFile(path))
            for text in log.read_new_text(is_last=True):
                sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()


class MergedView:
    """Prints the ranks' lines, each behind a mark with its node and rank, and a heading where an
    attempt begins and where it ends. As long as only rank 0 has printed lines, there are no
    marks."""

    def __init__(self, run: RunFolder, query: LogQuery) -> None:
        self._run, self._query = run, query
        self._groups: dict[Path, AttemptLogs] = {}
        self._folds: dict[Path, LineFold] = {}
        self._has_marks = False
        self._width = 0  # of the widest mark of one rank so far
        self._has_colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    @property
    def is_empty(self) -> bool:
        """Whether no rank has a log."""
        return not any(group.logs for group in self._groups.values())

    def update(self, is_last: bool) -> None:
        """Print the new lines of all ranks; with `is_last` also lines without a line break.

        Raise UsageError for an attempt that the run does not have (`_add_attempts`), and OSError
        where the run's folder or journal can't be read, or stdout is closed.
        """
        self._add_attempts()
        groups = [group for group in self._groups.values() if is_last or not group.end_shown]
        groups.sort(key=_begin_time)
        for group in groups:
            group.update(is_last)
        self._has_marks = self._has_marks or any(map(self._has_several_ranks, groups))
        for group in groups:
            self._print_attempt(group, is_last)
        sys.stdout.buffer.flush()

    def _add_attempts(self) -> None:
        """Add the attempts of the query that have begun since the last call, of an array those of
        all tasks, to `_groups`. Raise UsageError where there are attempts, and none has the query's
        number; OSError where a run's folder can't be read."""
        number = self._query.attempt
        numbers: set[int] = set()
        for run in self._run.tasks() or [self._run]:
            for attempt in run.attempts():
                numbers.add(attempt.number)
                if number in (None, attempt.number):
                    group = AttemptLogs(run, attempt, not self._query.raw)
                    self._groups.setdefault(attempt.path, group)
        if numbers and not self._groups:
            raise UsageError(
                f"run {self._run.path} has no attempt {number}"
                f"; attempts: {', '.join(map(str, sorted(numbers)))}",
                hint=f"hpc-ddp logs {self._run.quoted} --attempt {max(numbers)}",
            )

    def _has_several_ranks(self, group: AttemptLogs) -> bool:
        """Return whether a rank other than 0 has printed a line that is shown, by the beginnings
        of those logs that may have grown."""
        logs = [log for (_, rank), log in group.logs.items() if rank and log.may_have_grown]
        return any(self._has_output(log.path) for log in logs)

    def _has_output(self, path: Path) -> bool:
        """Return whether the beginning of a log has a line that is shown; False where it can't be
        read."""
        with contextlib.suppress(OSError), open_data(path) as file:
            return bool(self._without_noise(file.read(BEGINNING_BYTES)))
        return False

    def _without_noise(self, text: bytes) -> bytes:
        """Return a text without its lines of noise; unchanged where the query is raw."""
        # The search for words is much faster than the pattern.
        if self._query.raw or not any(word in text for word in NOISE_WORDS):
            return text
        return _NOISE.sub(b"", text)

    def _print_attempt(self, group: AttemptLogs, is_last: bool) -> None:
        """Print the new lines of an attempt, with a heading where it begins and where it ends, once
        each. Unless `is_last`, lines of the last second may wait for equal ones, until the next
        call. Raise OSError where the journal or the attempt's folder can't be read, or stdout is
        closed."""
        fold = self._folds.setdefault(group.attempt.path, LineFold(not self._query.raw))
        # Read before the lines, so that all lines from before the verdict are there.
        events = group.read_events()
        verdict = last_event(events, VerdictGiven)
        is_over = is_last or verdict is not None
        if not group.begin_shown and (group.logs or is_over):
            self._print_heading(group, _begin_text(events))
            group.begin_shown = True
        for line in group.read_new_lines(is_over):
            if text := self._without_noise(line.text):
                self._print_lines(group, fold.add(line._replace(text=text)))
        before = float("inf") if is_over else time.time() - FOLD_S / 2
        self._print_lines(group, fold.release(before))
        if verdict and not group.end_shown:
            self._print_heading(group, _end_text(verdict))
            group.end_shown = True

    def _print_lines(self, group: AttemptLogs, lines: Iterable[tuple[Line, list[int]]]) -> None:
        """Print folded lines, each with the mark of its ranks in place of torch's own, where marks
        are shown. Raise OSError where stdout is closed."""
        for line, ranks in lines:
            text = line.text if line.text.endswith(b"\n") else line.text + b"\n"
            if self._has_marks:
                mark = self._mark(group, line, ranks).encode()
                text = TORCH_MARK.sub(b"", text) if b"[rank" in text else text
                # Before each line of the text; its last line break begins none.
                text = mark + text[:-1].replace(b"\n", b"\n" + mark) + b"\n"
            sys.stdout.buffer.write(text)

    def _mark(self, group: AttemptLogs, line: Line, ranks: list[int]) -> str:
        """Return the mark for a line: the task, if any, with node and rank, or the ranks that
        printed the line. On a terminal it has the colour of the line's rank.

        Marks are as wide as the widest mark of a single rank so far, which this call updates.
        """
        task = f"task {group.run.index} " if group.run.is_task else ""
        if len(ranks) == 1:
            origin = f"{line.node} rank {line.rank}"
            self._width = max(self._width, len(origin))
        elif len(ranks) == len(group.logs):
            origin = "all ranks"
        else:
            origin = f"ranks {format_spans(ranks)}"
        mark = f"{task}{origin:{self._width}} | "
        if not self._has_colours:
            return mark
        return f"\033[{RANK_COLOURS[line.rank % len(RANK_COLOURS)]}m{mark}\033[0m"

    def _print_heading(self, group: AttemptLogs, text: str) -> None:
        """Print a heading that names the attempt, with `text` behind it; nothing for ''."""
        if not text:
            return
        task = ""
        if group.run.is_task:
            task = f"task {group.run.index}{trial_text(group.run)}, "
        heading = f"--- {task}attempt {group.attempt.number}{text}"
        if self._has_colours:
            heading = f"\033[1m{heading}\033[0m"
        sys.stdout.buffer.write(f"{heading}\n".encode())


def _begin_time(group: AttemptLogs) -> tuple[float, int]:
    """Return a key that sorts attempts by their begin: the time of their attempt.json in unix
    seconds, inf without the file, and their number."""
    with contextlib.suppress(OSError):
        return (group.attempt.path / "attempt.json").stat().st_mtime, group.attempt.number
    return float("inf"), group.attempt.number


def _begin_text(events: Sequence[JournalEvent]) -> str:
    """Return the begin of an attempt as text, `` began …``, with time, nodes and job; '' where
    `events` have no `Started`."""
    started = last_event(events, Started)
    if started is None:
        return ""
    begin = time.strftime(" began %a %H:%M:%S", time.localtime(started.time))
    nodes = started.nodes or []
    names = " ".join(nodes) if len(nodes) <= 4 else f"{nodes[0]} … {nodes[-1]} ({len(nodes)} nodes)"
    job = f", job {started.job_id}" if started.job_id else ""
    return f"{begin}{names and f' on {names}'}{job}"


def _end_text(verdict: VerdictGiven) -> str:
    """Return the end of an attempt as text, `` ended …``, with time and reason, in the words of the
    job's output."""
    end = time.strftime("%H:%M:%S", time.localtime(verdict.time))
    why = verdict.why or str(verdict.cause)
    if verdict.then:
        why += f"; {verdict.then}"
    elif verdict.why:
        why = f"{verdict.cause}; {why}"
    return f" ended {end}: {why}"
