"""A progress line appears after a second on a terminal, and is gone at the end."""

from __future__ import annotations

import io
import sys

import pytest

from hpc_ddp.core.console import progress
from unit.fakes import Clock


def test_a_bar_is_as_long_as_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = progress.ProgressBar("x", 4)
    drawn = []
    for amount in (0, 1, 2, 9):
        bar.add(amount)
        drawn.append(bar._line())
    shares = (0, 8, 22, 30)
    percents = ("0%", "25%", "75%", "100%")
    assert drawn == [
        f"x {'━' * full}{'─' * (30 - full)} {percent}"
        for full, percent in zip(shares, percents, strict=True)
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watch_stderr(monkeypatch: pytest.MonkeyPatch, patience_s: float = 0.0) -> Terminal:
    """Let stderr be a terminal. In the test itself: pytest puts its own back after a fixture."""
    monkeypatch.setattr(progress, "PATIENCE_S", patience_s)
    monkeypatch.setattr(progress, "REDRAW_S", 0.0)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_a_progress_bar_is_drawn_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watch_stderr(monkeypatch)
    with progress.ProgressBar("counting", 4) as bar:
        bar.add(1)
        bar.add(3)
    first, second, last = terminal.getvalue().split("\r\x1b[K")[1:]
    assert first.startswith("counting ━")
    assert first.endswith("─ 25%")
    assert second.endswith("━ 100%")
    assert last == ""


def test_a_quick_or_unknown_amount_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = watch_stderr(monkeypatch)
    with progress.ProgressBar("counting", 0) as bar:
        bar.add(1)
    assert " 0%" in unknown.getvalue()
    quick = watch_stderr(monkeypatch, patience_s=60.0)
    with progress.ProgressBar("counting", 1) as bar:
        bar.add(1)
    assert quick.getvalue() == ""


def test_a_progress_bar_is_drawn_after_a_second_and_not_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, terminal = Clock(), Terminal()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = progress.ProgressBar("counting", 100)
    draws = []
    for after_s in (0.0, 0.9, 1.0, 1.05, 1.15, 1.2):
        clock.now = 1000.0 + after_s
        bar.add(1)
        draws.append(terminal.getvalue().count("counting"))
    assert draws == [0, 0, 1, 1, 2, 2]


def test_a_progress_bar_fits_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watch_stderr(monkeypatch)
    monkeypatch.setenv("COLUMNS", "20")
    progress.ProgressBar("counting", 4).add(4)
    assert terminal.getvalue() == f"\r\x1b[Kcounting {'━' * 10}"  # 19 characters


def test_no_progress_bar_is_drawn_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_stderr(monkeypatch)
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with progress.ProgressBar("counting", 4) as bar:
        bar.add(4)
    assert log.getvalue() == ""
