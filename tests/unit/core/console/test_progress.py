"""The line of progress: after a second, on a terminal, and gone at the end."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from hpc_ddp.core import checkpoints
from hpc_ddp.core.console import progress
from unit.fakes import Clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(monkeypatch: pytest.MonkeyPatch, patience_s: float = 0.0) -> Terminal:
    """Let stderr be a terminal. In the test itself: pytest puts its own back after a fixture."""
    monkeypatch.setattr(progress, "PATIENCE_S", patience_s)
    monkeypatch.setattr(progress, "REDRAW_S", 0.0)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_it_is_drawn_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    with progress.ProgressBar("counting", 4) as bar:
        bar.add(1)
        bar.add(3)
    first, second, last = terminal.getvalue().split("\r\x1b[K")[1:]
    assert first.startswith("counting ━")
    assert first.endswith("─ 25%")
    assert second.endswith("━ 100%")
    assert last == ""


def test_what_is_quick_or_unknown_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = watched(monkeypatch)
    with progress.ProgressBar("counting", 0) as bar:
        bar.add(1)
    assert " 0%" in unknown.getvalue()
    quick = watched(monkeypatch, patience_s=60.0)
    with progress.ProgressBar("counting", 1) as bar:
        bar.add(1)
    assert quick.getvalue() == ""


def test_verify_counts_what_it_reads(tmp_path: Path) -> None:
    folder = tmp_path / "step-3"
    folder.mkdir()
    (folder / "a").write_bytes(b"x" * 1000)
    read: list[int] = []
    assert checkpoints.facts_of(folder / "a", read.append).size == 1000
    assert read == [1000]
    assert checkpoints.health(tmp_path)[0].problem == "manifest.json is missing"


def test_it_is_drawn_after_a_second_and_not_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_it_does_not_break_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    monkeypatch.setenv("COLUMNS", "20")
    progress.ProgressBar("counting", 4).add(4)
    assert terminal.getvalue() == f"\r\x1b[Kcounting {'━' * 10}"  # 19 characters


def test_nothing_is_drawn_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    watched(monkeypatch)
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with progress.ProgressBar("counting", 4) as bar:
        bar.add(4)
    assert log.getvalue() == ""
