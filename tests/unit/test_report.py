"""Pages on runs: well-formed, whole by themselves, safe, honest with few points and bad ones."""

from __future__ import annotations

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_ddp.launch.resources import folder
from hpc_ddp.report import page
from hpc_ddp.report.charts import (
    Scale,
    charts,
    clock_ticks,
    compact,
    short,
    step_ticks,
    value_ticks,
)
from hpc_ddp.report.curves import Curve, curves_of, is_noisy, smoothed, starts_of, thinned
from hpc_ddp.run.folder import RunFolder
from hpc_ddp.run.journal import Event
from hpc_ddp.run.spec import JobSpec

TEMPLATES = folder("templates")
NAN = float("nan")
VOID = {"meta", "link", "input", "br", "path"}
EVIL = '"><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>'


class Page(HTMLParser):
    """Reads a page, and fails where a tag is not closed, or fetches something."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.data: list[Any] = []
        self.html = html
        self.feed(html)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            if self.tags[-1][1].get("type") == "application/json":
                self.data.append(json.loads(data, parse_constant=pytest.fail))
        elif self.open and self.open[-1] != "style":
            self.text += data

    def count(self, name: str) -> int:
        """Return how many elements have a class."""
        return sum(name in (attrs.get("class") or "").split() for _, attrs in self.tags)

    def headings(self) -> list[str]:
        return re.findall(r"<h2[^>]*>(.*?)</h2>", self.html)


def check(html: str) -> Page:
    found = Page(html)
    assert len(html) < 1_000_000
    for tag, attrs in found.tags:
        assert tag not in ("img", "iframe", "object", "embed", "base")
        for name, value in attrs.items():
            assert not name.startswith("on"), (tag, name)
            assert name not in ("src", "srcset")
            assert name != "href" or value == "data:,"
    assert not re.findall(r"url\(|@import", found.html)
    assert sum(tag == "script" and not attrs for tag, attrs in found.tags) == 1
    return found


class Written:
    """A run folder, written event by event."""

    def __init__(self, root: Path, name: str = "digits", **spec: Any) -> None:
        self.run = RunFolder(root / name / "20261121-100000-abcd").make()
        spec = {"script": "t.py", "backend": "local"} | spec
        self.run.job_json.write_text(JobSpec(**spec).to_json())
        self.clock = 1.79e9

    def event(self, name: str, attempt: int = 0, after: float = 1.0, **fields: Any) -> Written:
        self.clock += after
        line = {"time": self.clock, "event": name, "attempt": attempt, **fields}
        with open(self.run.journal_folder / "all.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        return self

    def start(self, attempt: int = 0, step: int = 0) -> Written:
        self.run.attempt(attempt).path.mkdir(parents=True)
        self.event("started", attempt, 10, nodes=["n1", "n2"], host="n1")
        self.event("worker", attempt, 5, began=self.clock + 1, called=self.clock + 4)
        return self.event("training", attempt, step=step)

    def steps(self, first: int, last: int, attempt: int = 0, **values: Any) -> Written:
        for step in range(first, last + 1):
            told = {"loss": 2.0 / step, "lr": 0.1, "samples_per_s": 100.0} | values
            self.event("metrics", attempt, step=step, total_steps=100, epoch=0, **told)
        return self

    def preempted(self, attempt: int = 0, step: int = 0) -> Written:
        self.event("notice", attempt, source="SIGTERM")
        self.event("checkpoint", attempt, step=step, stall_s=0.1, write_s=0.4, bytes=5000)
        self.event("stopped", attempt, step=step, reason="notice")
        why = f"preempted, at step {step}"
        return self.event("verdict", attempt, cause="preempted", action="requeue", why=why)

    def finished(self, attempt: int = 0, step: int = 100) -> Written:
        self.event("finished", attempt, step=step, results={"accuracy": 0.9375})
        return self.event("verdict", attempt, cause="finished", action="none", why="")

    def page(self) -> Page:
        return check(page.report(self.run, TEMPLATES))


def test_a_run_that_was_preempted_twice(tmp_path: Path) -> None:
    written = Written(tmp_path, args=("--lr", "0.1"), nodes=2)
    written.event("submitted").start().steps(1, 40).preempted(0, 40)
    written.start(1, 40).steps(41, 70, 1).preempted(1, 70).start(2, 70).steps(71, 100, 2)
    found = written.finished(2).page()
    assert found.headings() == [
        *("Curves", "Where the time went", "Attempts", "Checkpoints", "Settings"),
    ]
    for told in ("finished", "is finished after 100 steps, in 3 attempts", "preempted, at step 40"):
        assert told in found.text
    assert "0.9375" in found.text
    assert "41 to 70" in found.text
    assert "t.py --lr 0.1" in found.text
    assert [run["step"][-1] for chart in found.data for run in chart] == [100] * 3
    assert found.count("mark") == 3 * 2 * 2 + 2 * 2  # per chart, by step and by time; loss: log
    assert found.count("attempt") == 3
    assert found.count("dot") == 2


def test_runs_of_which_little_is_known(tmp_path: Path) -> None:
    assert "never submitted" in Written(tmp_path / "rendered").page().text
    waits = Written(tmp_path / "never").event("submitted").page()
    assert "Curves" not in waits.headings()
    plain = Written(tmp_path / "plain").event("submitted").event("started", nodes=["n1"])
    plain.event("verdict", after=60, cause="failed", action="give up", why="it failed", exit_code=3)
    assert plain.page().headings() == ["Where the time went", "Attempts", "Settings"]
    hand = Written(tmp_path / "hand").event("started", backend="local", pid=1, began=0)
    hand.steps(1, 3).event("failed", rank=0, error="ValueError: no", traceback="Traceback\n  x")
    found = hand.page()
    assert found.headings()[0] == "What failed"
    assert "ValueError: no" in found.text


def test_a_failure_before_the_first_step(tmp_path: Path) -> None:
    written = Written(tmp_path).event("submitted").event("started", nodes=["n1"])
    written.run.attempt(0).path.mkdir()
    error = "RuntimeError: \x1b[31mno data\x1b[0m"
    written.event("failed", rank=1, node="n1", step=None, error=error, traceback="Traceback …")
    why: dict[str, Any] = {"why": error, "rank": 1, "node": "n1", "error": error}
    found = written.event("verdict", cause="failed", action="give up", exit_code=1, **why).page()
    assert "Rank 1 on n1, attempt 0" in found.text
    assert "Curves" not in found.headings()


def test_steps_that_were_done_again_are_dotted_and_do_not_count(tmp_path: Path) -> None:
    written = Written(tmp_path).start().steps(1, 40)
    written.event("verdict", cause="failed", action="requeue", why="killed")
    found = written.start(1, 20).steps(21, 60, 1, loss=0.25).finished(1, 60).page()
    assert "dotted: steps that were done again" in found.text
    assert found.count("redone") == 3 * 2 + 2
    curve = curves_of(written.run.events(), 0.0)["loss"]
    assert [curve.steps[i] for i in curve.kept()] == list(range(1, 61))
    assert curve.values[curve.kept()[30]] == 0.25


def test_restarts_within_an_attempt(tmp_path: Path) -> None:
    written = Written(tmp_path).start().steps(1, 10)
    written.event("worker", began=written.clock, called=written.clock).event("training", step=5)
    events = written.steps(6, 20).finished(0, 20).run.events()
    first, second = starts_of(events, 0.0)
    assert (first.again, second.again, second.step) == (False, True, 5)
    assert "↻" in written.page().text


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf, 1e308, -1e308, 10**400, 5e-324, 0])
def test_values_that_no_axis_can_hold(tmp_path: Path, value: float) -> None:
    written = Written(tmp_path).start().steps(1, 20).steps(21, 21, loss=value).steps(22, 30)
    found = written.finished().page()
    assert found.data[0][0]["step"] == list(range(1, 31))
    if not abs(value) < 1e300:
        assert "1 value was NaN or infinite" in found.text
        assert found.count("nan") == 4
    only = Written(tmp_path / "only").start().steps(1, 3, loss=value).finished().page()
    assert only.data[0][0]["step"] == [1, 2, 3]


def test_what_is_no_number_is_no_curve(tmp_path: Path) -> None:
    written = Written(tmp_path).start().steps(1, 3, phase="warm", good=True, none=None)
    found = written.event("metrics", step="x", loss=1).event("metrics", step=4).finished().page()
    assert [chart[0]["value"] for chart in found.data][1] == [0.1] * 3
    assert len(found.data) == 4  # loss, lr, good, samples_per_s


def test_hostile_words_stay_words(tmp_path: Path) -> None:
    written = Written(tmp_path, args=(EVIL, f"--x={EVIL}"), env={"A": EVIL})
    written.run.script.write_text(f"#!/bin/bash\n{EVIL}</pre></details>")
    hostile: dict[str, Any] = {EVIL: 1.0, "</script><b>": 2.0}
    written.start().steps(1, 5, **hostile)
    written.event("ranks", step=5, steps=5, step_s=1, busy_s=[1, 2], slowest=1, node=EVIL)
    written.event("preflight", ok=False, why=EVIL, seconds=1, report={EVIL: {"bad": []}})
    written.event("failed", rank=0, node=EVIL, error=EVIL, traceback=EVIL)
    why: dict[str, Any] = {"why": EVIL, "rank": 0, "node": EVIL, "error": EVIL, "bad_nodes": [EVIL]}
    written.event("verdict", cause="failed", action="give up", exit_code=1, **why)
    found = written.page()
    assert "<script>alert" not in found.html
    assert EVIL in found.text
    check(page.comparison([written.run, written.run], TEMPLATES))


def test_a_damaged_journal_and_job(tmp_path: Path) -> None:
    written = Written(tmp_path).start().steps(1, 5)
    for event in ("ranks", "checkpoint", "preflight", "notice", "failed", "first_step"):
        for value in (None, "x", [], {}, [None], {"a": 1}):
            names = ("step", "busy_s", "report", "bad_nodes", "nodes", "hosts", "rank", "error")
            damage: dict[str, Any] = dict.fromkeys(names, value)
            written.event(event, **damage)
    written.run.job_json.write_text("[]")
    written.page()


def _curve(values: list[float]) -> Curve:
    count = len(values)
    steps = [float(i) for i in range(count)]
    zeros = [0] * count
    return Curve("x", steps, steps, values, zeros, zeros, [False] * count)


@given(st.lists(st.floats(width=32) | st.just(NAN), min_size=1, max_size=300), st.integers(1, 30))
def test_thinning_keeps_what_shows(values: list[float], columns: int) -> None:
    """Of each column the least and the greatest, and never more than the columns hold."""
    curve = _curve(values)
    kept = thinned(curve, columns)
    assert kept == sorted(set(kept))
    assert len(kept) <= max(2 * columns, 3 * (columns + 1) + 2)
    assert {0, len(values) - 1} <= set(kept)
    width = (len(values) - 1) / columns or 1.0
    cells: dict[int, list[int]] = {}
    for i in range(len(values)):
        cells.setdefault(int(i / width), []).append(i)
    for cell in cells.values():
        sound = [values[i] for i in cell if math.isfinite(values[i])]
        there = [values[i] for i in cell if i in set(kept) and math.isfinite(values[i])]
        assert not sound or (min(sound), max(sound)) == (min(there), max(there))
        if len(sound) < len(cell):
            assert any(not math.isfinite(values[i]) for i in cell if i in set(kept))


def test_a_long_run_with_many_metrics_stays_small(tmp_path: Path) -> None:
    written = Written(tmp_path).start()
    chance = random.Random(0)
    lines = []
    for step in range(1, 3_001):
        told = {f"metric {i}": chance.random() for i in range(12)} | {"loss": chance.random()}
        line = {"time": 1.79e9 + 100 + step, "event": "metrics", "attempt": 0, "step": step}
        lines.append(json.dumps(line | told))
    (written.run.journal_folder / "rank-0.jsonl").write_text("\n".join(lines))
    found = written.page()
    assert len(found.data) == 13
    assert all(len(chart[0]["step"]) < 1000 for chart in found.data)


def test_many_attempts_and_saves(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    for step in range(0, 6_000, 2):
        attempt = step // 60
        lines += [{"event": "started", "nodes": [f"n{i}" for i in range(40)]}] * (step % 60 == 0)
        lines += [{"event": "training", "step": step}] * (step % 60 == 0)
        lines += [{"event": "checkpoint", "step": step, "stall_s": 0.3, "write_s": 0.5, "bytes": 1}]
        lines += [{"event": "metrics", "step": step + 1, "loss": 1.0}]
        for line in lines[-4:]:
            line.setdefault("attempt", attempt)
    written = Written(tmp_path)
    told = [json.dumps({"time": 1.79e9 + i, **line}) for i, line in enumerate(lines)]
    (written.run.journal_folder / "rank-0.jsonl").write_text("\n".join(told))
    found = written.page()
    assert found.count("attempt") == 100
    assert found.count("dot") < 200


def test_noise_is_smoothed_and_a_schedule_is_not() -> None:
    chance = random.Random(0)
    noisy = [1.0 + chance.random() for _ in range(400)]
    assert is_noisy(noisy)
    assert not is_noisy([math.cos(i / 100) for i in range(400)])
    means = smoothed(noisy, len(noisy))
    assert max(means) - min(means) < 0.7
    assert smoothed([3.0] * 80, 80) == pytest.approx([3.0] * 80)


@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300), st.sampled_from([False, True]))
def test_axes_hold_any_range(a: float, b: float, log: bool) -> None:
    low, high = min(a, b), max(a, b)
    if log:
        low, high = max(abs(low), 1e-290), max(abs(high), 1e-290)
    scale = Scale(min(low, high), max(low, high), log)
    for found in (value_ticks(scale), [] if log else step_ticks(scale)):
        assert len(found) <= 60
        assert all(0 <= tick.at <= 100 for tick in found)
    assert 0 <= scale(low) <= 1


def test_labels_are_short() -> None:
    assert [compact(v) for v in (0.0, 0.25, 150, 20_000, 1e-4, -3e6, 2.5e-05)] == [
        *("0", "0.25", "150", "20k", "0.0001", "−3M", "2.5e−5"),
    ]
    assert [short(v) for v in (0.98611, 12345.6, NAN, math.inf, None, 2.7e-5)] == [
        *("0.9861", "12,346", "NaN", "∞", "–", "2.7e−5"),
    ]
    assert [t.text for t in clock_ticks(Scale(0, 222))][:3] == ["0:00 min", "0:30", "1:00"]
    assert [t.text for t in clock_ticks(Scale(0, 86400 * 5))][:2] == ["0 d", "1"]


def test_slow_ranks(tmp_path: Path) -> None:
    written = Written(tmp_path).start().steps(1, 20)
    told: dict[str, Any] = {
        "steps": 10,
        "step_s": 0.2,
        "slowest": 3,
        "node": "n2",
        "data_s": [0.0] * 4,
    }
    written.event("ranks", step=10, busy_s=[0.1, 0.1, 0.1, 0.2], **told)
    found = written.event("ranks", step=20, busy_s=[0.1, 0.1, 0.1, 0.2], **told).finished().page()
    assert "Slowest ranks" in found.headings()
    assert "rank 3 on n2" in found.text
    assert "+100 % slow" in found.text


def test_comparing(tmp_path: Path) -> None:
    one = Written(tmp_path, "one", args=("--lr", "0.1", "--epochs=2"), nodes=2).start()
    two = Written(tmp_path, "two", args=("--lr=0.2", "--epochs=2", "--fast"), nodes=2).start()
    runs = [one.steps(1, 50).finished().run, two.steps(1, 30, loss=0.5).run]
    found = check(page.comparison([*runs, Written(tmp_path, "none").run], TEMPLATES))
    assert found.headings() == ["Results", "Curves", "Settings that differ"]
    differ = found.html.partition("Settings that differ</h2>")[2]
    assert re.findall(r'<tr><td class="t">(.*?)</td>', differ) == [
        "nodes",
        "--lr",
        "--epochs",
        "--fast",
    ]
    assert [run["label"] for run in found.data[0]] == ["A", "B"]
    assert found.count("tail") == 2 * 3 * 2 + 4


def test_a_sweep_compares_its_tasks_and_a_task_has_its_own_page(tmp_path: Path) -> None:
    sweep = Written(tmp_path, sweep={"lr": ("0.1", "0.2")}, array="0-1", backend="slurm")
    spec = JobSpec.from_json(sweep.run.job_json.read_text())
    task = Written(tmp_path / "elsewhere").start().steps(1, 20).finished(0, 20)
    task.run.job_json.write_text(spec.task(1).to_json())
    task.run.path.rename(sweep.run.task(1).path)
    found = sweep.page()
    assert "2 tasks: 1 not begun, 1 finished" in found.text
    assert [run["label"] for run in found.data[0]] == ["1"]
    alone = check(page.report(sweep.run.task(1), TEMPLATES))
    assert "--lr=0.2" in alone.text


def test_of_many_runs_the_best_are_drawn(tmp_path: Path) -> None:
    runs = [
        Written(tmp_path, f"run{i:02}").start().steps(1, 3, loss=float(i)).finished().run
        for i in range(16)
    ]
    found = check(page.comparison(runs[::-1], TEMPLATES))
    assert "Drawn are 12 of 16" in found.text
    assert len(found.data[0]) == 12


def _events(*steps: float) -> list[Event]:
    return [
        {"time": float(i), "event": "metrics", "attempt": 0, "step": s, "loss": 1.0}
        for i, s in enumerate(steps)
    ]


def test_a_curve_of_one_point_is_a_dot() -> None:
    (chart,) = charts(["loss"], [("", curves_of(_events(7), 0.0))])
    assert chart.plots[0].lines[0].d.endswith("h0")
    assert chart.summary == "loss, from 1 to 1, at the end 1, at step 7"
