"""Shows the progress of what takes more than a second: on a terminal, and nowhere else.

Standard library only: the login node and the workers show it.
"""

from __future__ import annotations

import shutil
import sys
import time

PATIENCE_S = 1.0  # before the bar appears
REDRAW_S = 0.1
BAR_WIDTH = 30  # of the bar, in characters


class ProgressBar:
    """A bar ``title ━━━━━━──── 61 %`` on stderr, where stderr is a terminal. It is removed at the
    end of the ``with`` block.

    Parameters
    ----------
    title
        what is being done, in words
    total
        how much is to be done, in any unit; 0 where that is not known

    Examples
    --------
    >>> with ProgressBar("counting", total=3) as progress:
    ...     for _ in range(3):
    ...         progress.add(1)
    """

    def __init__(self, title: str, total: float) -> None:
        self._title, self._total = title, total
        self._done = 0.0
        self._drawn = False
        self._terminal = sys.stderr.isatty()
        self._next_s = time.monotonic() + PATIENCE_S  # when the bar is drawn, at the earliest

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._drawn:
            self._put("")

    def add(self, amount: float) -> None:
        """Count `amount` more, in the unit of the total, as done. On a terminal, redraw the bar:
        first after `PATIENCE_S`, then at most every `REDRAW_S`."""
        self._done += amount
        now = time.monotonic()
        if self._terminal and now >= self._next_s:
            self._next_s = now + REDRAW_S
            self._drawn = True
            self._put(self._line()[: shutil.get_terminal_size().columns - 1])

    def _line(self) -> str:
        """Return the bar as text, without an end of line."""
        share = min(self._done / self._total, 1.0) if self._total else 0.0
        full = round(share * BAR_WIDTH)
        return f"{self._title} {'━' * full}{'─' * (BAR_WIDTH - full)} {share:.0%}"

    def _put(self, text: str) -> None:
        """Replace the last line of the terminal, stderr, by a text; '' removes it."""
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
