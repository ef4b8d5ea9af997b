"""``hpc-ddp status --watch``: the table of runs as a screen with keys."""

from __future__ import annotations

import curses
import math
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from hpc_ddp.core.console.units import duration
from hpc_ddp.core.errors import UsageError
from hpc_ddp.live_jobs import read_queue
from hpc_ddp.report.status import run_table
from hpc_ddp.report.status.run_status import Status

READ_S = 5.0  # from one read of the journals to the next
ASK_S = 60.0  # from one query of Slurm to the next: Slurm answers all users of the cluster
KEYS = "e: explain  l: logs  a: attach  c: cancel  r: refresh  q: quit"
HEAD_LINES = 1  # lines above the rows
# Imports this package: with -m, one in the working directory would come first.
_ROOT = str(Path(__file__).resolve().parents[3])
_MAIN = f"import sys; sys.path[0] = {_ROOT!r}; from hpc_ddp.cli.main import main; main()"


def watch_runs(root: Path) -> None:
    """Show the runs in `root` on the terminal, and start the commands of `KEYS`, until the user
    presses q or Ctrl-C. Raise UsageError where there is no terminal, or it can't show a screen;
    OSError where the folder can't be read, or the command of a key can't be started."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "--watch needs a terminal", hint="in a script: hpc-ddp status --json, once a minute"
        )
    try:
        with suppress(KeyboardInterrupt):
            curses.wrapper(lambda window: Screen(window, root).run())
    except curses.error as error:
        raise UsageError(
            f"this terminal can't show a screen: {error}",
            hint="export TERM=xterm, or hpc-ddp status",
        ) from None


class Screen:
    """The screen with the table of the runs in `root`, one selected row, and a bottom line with the
    keys or a question. Slurm is asked when the object is made."""

    def __init__(self, window: curses.window, root: Path) -> None:
        self._window, self._root = window, root
        self._rows: Sequence[Status] = ()
        self._selected = 0  # an index of the rows
        self._read_at = -math.inf  # the time of the last read of the journals, by time.monotonic()
        self._ask_slurm()
        with suppress(curses.error):  # a terminal without a cursor to hide
            curses.curs_set(0)

    def run(self) -> None:
        """Read the runs every `READ_S`, draw them, and obey keys, until the user presses q. Raise
        OSError if the folder can't be read, or the command of a key can't be started."""
        while True:
            if time.monotonic() > self._read_at + READ_S:
                self._read_runs()
            self._draw(KEYS)
            self._window.timeout(int(1000 * READ_S))  # milliseconds; then getch returns -1
            key = self._window.getch()
            if key == ord("q"):
                return
            self._obey(key)

    def _ask_slurm(self) -> None:
        """Ask Slurm for the user's jobs, and have `run` read the journals at its next round."""
        self._queue, self._asked_at = read_queue(), time.monotonic()
        self._read_at = -math.inf

    def _read_runs(self) -> None:
        """Read the journals; ask Slurm before if its last answer is older than `ASK_S`. The same
        run stays selected, or the first if that one is not shown any more. Raise OSError if the
        folder can't be read."""
        if time.monotonic() - self._asked_at > ASK_S:
            self._ask_slurm()
        run = self._rows[self._selected].run if self._rows else None
        runs, _ = run_table.select_runs(self._root, self._queue, show_all=False)
        rows = run_table.read_statuses(self._root, runs, self._queue)
        self._rows = run_table.sort_live_first(rows)
        paths = [row.run for row in self._rows]
        self._selected = paths.index(run) if run in paths else 0
        self._read_at = time.monotonic()

    def _draw(self, bottom: str) -> None:
        """Draw the table, scrolled to the selected row, which is inverted, and the line `bottom`
        with the age of Slurm's answer."""
        height, width = self._window.getmaxyx()
        lines = run_table.runs_table(self._rows, width).splitlines() if self._rows else ["no runs"]
        room = max(height - HEAD_LINES - 1, 1)  # lines between the head and the bottom line
        first = max(0, self._selected - room + 1)  # the index of the first row that is drawn
        self._window.erase()
        self._draw_line(0, lines[0], curses.A_BOLD)
        for place, line in enumerate(lines[HEAD_LINES:][first : first + room]):
            is_selected = first + place == self._selected
            self._draw_line(
                HEAD_LINES + place, line, curses.A_REVERSE if is_selected else curses.A_NORMAL
            )
        age = duration(time.monotonic() - self._asked_at)
        self._draw_line(height - 1, f"{bottom}  (Slurm: {age} ago)", curses.A_DIM)
        self._window.redrawwin()  # also unchanged lines: another program may have written there
        self._window.refresh()

    def _draw_line(self, y: int, text: str, style: int) -> None:
        """Draw a text as line `y`, counted from the top, cut to the width; nothing for a line that
        the screen does not have. `style` is an attribute of curses."""
        height, width = self._window.getmaxyx()
        if 0 <= y < height:
            with suppress(curses.error):  # the last cell of the screen can't be written
                self._window.addnstr(y, 0, text.ljust(width), width, style)

    def _obey(self, key: int) -> None:
        """Start the command of a key in `KEYS`, or move the selection (arrows, j, k); other keys do
        nothing. Raise OSError if the command can't be started."""
        last = len(self._rows) - 1
        if key in (curses.KEY_UP, ord("k")):
            self._selected = max(self._selected - 1, 0)
        elif key in (curses.KEY_DOWN, ord("j")):
            self._selected = min(self._selected + 1, max(last, 0))
        elif key == ord("r"):
            self._ask_slurm()
        elif self._rows:
            row = self._rows[self._selected]
            if key in (ord("e"), ord("\n")):
                self._run_command(["explain", row.run])
            elif key == ord("l"):
                self._run_command(["logs", "-f", row.run])
            elif key == ord("a"):
                self._run_command(["attach", row.run])
            elif key == ord("c") and self._is_confirmed(f"cancel {row.name} ({row.id})?"):
                self._run_command(["cancel", row.run])
                self._ask_slurm()

    def _is_confirmed(self, question: str) -> bool:
        """Ask a question in the bottom line, wait for a key, and return whether it is y."""
        self._draw(f"{question} y: yes, any other key: no")
        self._window.timeout(-1)  # without end
        return self._window.getch() == ord("y")

    def _run_command(self, words: Sequence[str]) -> None:
        """Leave the screen, run a command of hpc-ddp, which Ctrl-C ends, and come back once the
        user presses Enter below its output. Raise OSError if the command can't be started."""
        curses.endwin()
        # Ctrl-C is for the command alone. A process inherits that a signal is ignored: so the
        # command takes SIGINT anew before it begins.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            print(f"$ hpc-ddp {' '.join(words)}", flush=True)
            argv = [sys.executable, "-c", _MAIN, *words, "--runs-dir", str(self._root)]
            take_interrupts = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
            subprocess.run(argv, check=False, preexec_fn=take_interrupts)
            input("[Enter] ")
        except EOFError:  # Ctrl-D in place of Enter
            pass
        finally:
            signal.signal(signal.SIGINT, before)
        self._window.clear()  # the next drawing brings the screen back
