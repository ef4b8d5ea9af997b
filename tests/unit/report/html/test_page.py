from __future__ import annotations

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.report.html import page
from hpc_ddp.submission.package_files import folder

TEMPLATES = folder("templates")
NAN = float("nan")
VOID = {"meta", "link", "input", "br", "path"}
EVIL = '"><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>'


class Page(HTMLParser):
    """A parser of a page that fails where a tag is not closed, or fetches something."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.points: list[Any] = []  # of each chart
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
                self.points.append(json.loads(data, parse_constant=pytest.fail))
        elif self.open and self.open[-1] != "style":
            self.text += data

    def count(self, name: str) -> int:
        """Return how many elements have a class."""
        return sum(name in (attrs.get("class") or "").split() for _, attrs in self.tags)

    def headings(self) -> list[str]:
        return re.findall(r"<h2[^>]*>(.*?)</h2>", self.html)


def check(html: str) -> Page:
    parsed = Page(html)
    assert len(html) < 1_000_000
    for tag, attrs in parsed.tags:
        assert tag not in ("img", "iframe", "object", "embed", "base")
        for name, value in attrs.items():
            assert not name.startswith("on"), (tag, name)
            assert name not in ("src", "srcset")
            assert name != "href" or value == "data:,"
    assert not re.findall(r"url\(|@import", parsed.html)
    assert sum(tag == "script" and not attrs for tag, attrs in parsed.tags) == 1
    return parsed


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
            metrics = {"loss": 2.0 / step, "lr": 0.1, "samples_per_s": 100.0} | values
            self.event("metrics", attempt, step=step, total_steps=100, epoch=0, **metrics)
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
        return check(page.render_page(self.run, TEMPLATES))


def test_the_page_of_a_run_that_was_preempted_twice(tmp_path: Path) -> None:
    written = Written(tmp_path, args=("--lr", "0.1"), nodes=2)
    written.event("submitted").start().steps(1, 40).preempted(0, 40)
    written.start(1, 40).steps(41, 70, 1).preempted(1, 70).start(2, 70).steps(71, 100, 2)
    parsed = written.finished(2).page()
    assert parsed.headings() == ["Curves", "Where the time went", "Attempts", "Settings"]
    for text in ("finished", "is finished after 100 steps, in 3 attempts", "preempted, at step 40"):
        assert text in parsed.text
    assert "0.9375" in parsed.text
    assert "41 to 70" in parsed.text
    assert "t.py --lr 0.1" in parsed.text
    assert [chart[-1][0] for chart in parsed.points] == [100] * 3
    assert parsed.count("mark") == 3 * 2  # two more attempts, in each chart
    assert parsed.count("p-training") == 3 + 1  # in the strip and in the table


def test_settings_that_are_off_or_0_are_shown(tmp_path: Path) -> None:
    text = Written(tmp_path, warm_start=False, max_requeues=0, preflight=True).page().text
    settings = text.partition("Settings")[2].split()
    assert {"warm-startno", "max-requeues0", "preflightyes"} < {*settings}
    assert not [
        word for word in settings if word.startswith(("array", "exclusive", "env", "setup"))
    ]


def test_pages_of_runs_with_few_events(tmp_path: Path) -> None:
    assert "never submitted" in Written(tmp_path / "rendered").page().text
    waits = Written(tmp_path / "never").event("submitted").page()
    assert "Curves" not in waits.headings()
    plain = Written(tmp_path / "plain").event("submitted").event("started", nodes=["n1"])
    plain.event("verdict", after=60, cause="failed", action="give up", why="it failed", exit_code=3)
    assert plain.page().headings() == ["Where the time went", "Attempts", "Settings"]
    standalone = Written(tmp_path / "hand").event("started", backend="local", pid=1, began="0")
    standalone.run.attempt(0).path.mkdir(parents=True)
    standalone.steps(1, 3)
    standalone.event("failed", rank=0, error="ValueError: no", traceback="Traceback\n  x")
    parsed = standalone.page()
    assert parsed.headings()[0] == "The failure"
    assert "ValueError: no" in parsed.text


def test_a_failure_before_the_first_step(tmp_path: Path) -> None:
    written = Written(tmp_path).event("submitted").event("started", nodes=["n1"])
    written.run.attempt(0).path.mkdir()
    error = "RuntimeError: \x1b[31mno data\x1b[0m"
    written.event("failed", rank=1, node="n1", step=None, error=error, traceback="Traceback …")
    why: dict[str, Any] = {"why": error, "rank": 1, "node": "n1", "error": error}
    parsed = written.event("verdict", cause="failed", action="give up", exit_code=1, **why).page()
    assert "Rank 1 on n1, attempt 0" in parsed.text
    assert "Curves" not in parsed.headings()


def test_steps_that_were_done_again_are_dotted(tmp_path: Path) -> None:
    written = Written(tmp_path).start().steps(1, 40)
    written.event("verdict", cause="failed", action="requeue", why="killed")
    parsed = written.start(1, 20).steps(21, 60, 1, loss=0.25).finished(1, 60).page()
    assert parsed.count("redone") == 3


def test_restarts_within_an_attempt_are_marked(tmp_path: Path) -> None:
    written = Written(tmp_path).start().steps(1, 10)
    written.event("worker", began=written.clock, called=written.clock).event("training", step=5)
    assert written.steps(6, 20).finished(0, 20).page().count("mark") == 3  # one in each chart


@pytest.mark.parametrize("loss", [NAN, math.inf, -math.inf, 1e308, -1e308, 10**400, 5e-324, 0])
def test_numbers_that_no_axis_can_hold_are_drawn(tmp_path: Path, loss: float) -> None:
    written = Written(tmp_path).start().steps(1, 20).steps(21, 21, loss=loss).steps(22, 30)
    parsed = written.finished().page()
    assert sorted(step for step, _ in parsed.points[0]) == list(range(1, 31))
    if not abs(loss) < 1e300:
        assert "×: 1 NaN or infinite" in parsed.text
        assert parsed.count("nan") == 1
    only = Written(tmp_path / "only").start().steps(1, 3, loss=loss).finished().page()
    assert [step for step, _ in only.points[0]] == [1, 2, 3]


def test_a_text_is_no_curve(tmp_path: Path) -> None:
    written = Written(tmp_path).start().steps(1, 3, phase="warm", good=True, none=None)
    written.event("metrics", step="x", loss=1).event("metrics", step=4)
    parsed = written.finished().page()
    assert len(parsed.points) == 4  # loss, lr, good, samples_per_s
    assert parsed.points[1] == [[1, "0.1"], [2, "0.1"], [3, "0.1"]]


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    written = Written(tmp_path, args=(EVIL, f"--x={EVIL}"), env={"A": EVIL})
    written.run.script.write_text(f"#!/bin/bash\n{EVIL}</pre></details>")
    hostile: dict[str, Any] = {EVIL: 1.0, "</script><b>": 2.0}
    written.start().steps(1, 5, **hostile)
    slow: dict[str, Any] = {"ranks": [0, 1], "busy_s": [1, 2], "busy_quartiles_s": [1, 1, 1, 1, 2]}
    written.event("ranks", step=5, steps=5, step_s=1, slowest=1, node=EVIL, **slow)
    written.event("preflight", ok=False, why=EVIL, seconds=1, report={EVIL: {"bad": []}})
    written.event("failed", rank=0, node=EVIL, error=EVIL, traceback=EVIL)
    why: dict[str, Any] = {"why": EVIL, "rank": 0, "node": EVIL, "error": EVIL, "bad_nodes": [EVIL]}
    written.event("verdict", cause="failed", action="give up", exit_code=1, **why)
    parsed = written.page()
    assert "<script>alert" not in parsed.html
    assert EVIL in parsed.text


def test_the_page_of_a_damaged_journal_and_job(tmp_path: Path) -> None:
    written = Written(tmp_path).start().steps(1, 5)
    for event in ("ranks", "checkpoint", "preflight", "notice", "failed", "first_step"):
        for value in (None, "x", [], {}, [None], {"a": 1}):
            names = (
                "step",
                "busy_s",
                "ranks",
                "report",
                "bad_nodes",
                "nodes",
                "hosts",
                "rank",
                "error",
            )
            damage: dict[str, Any] = dict.fromkeys(names, value)
            written.event(event, **damage)
    written.run.job_json.write_text("[]")
    written.page()


def test_a_long_run_with_many_metrics_stays_small(tmp_path: Path) -> None:
    written = Written(tmp_path).start()
    chance = random.Random(0)
    lines = []
    for step in range(1, 3_001):
        metrics = {f"metric {i}": chance.random() for i in range(30)} | {"loss": chance.random()}
        line = {"time": 1.79e9 + 100 + step, "event": "metrics", "attempt": 0, "step": step}
        lines.append(json.dumps(line | metrics))
    (written.run.journal_folder / "rank-0.jsonl").write_text("\n".join(lines))
    parsed = written.page()
    assert len(parsed.points) == 24
    assert "Not drawn: metric 23, metric 24" in parsed.text
    assert all(len(chart) < 400 for chart in parsed.points)


def test_marks_of_many_attempts_do_not_overlap(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    for step in range(0, 6_000, 2):
        attempt = step // 60
        if step % 60 == 0:
            lines.append({"event": "started", "nodes": [f"n{i}" for i in range(40)]})
            lines.append({"event": "training", "step": step})
        lines.append({"event": "checkpoint", "step": step, "stall_s": 0.3, "write_s": 0.5})
        lines.append({"event": "metrics", "step": step + 1, "loss": 1.0})
        for line in lines[-4:]:
            line.setdefault("attempt", attempt)
    written = Written(tmp_path)
    events = [json.dumps({"time": 1.79e9 + i, **line}) for i, line in enumerate(lines)]
    (written.run.journal_folder / "rank-0.jsonl").write_text("\n".join(events))
    parsed = written.page()
    assert parsed.count("end") == 100
    assert 5 < parsed.count("mark") < 30  # the others would overlap


def test_an_array_has_no_page_and_its_task_has(tmp_path: Path) -> None:
    sweep = Written(tmp_path, sweep={"lr": ("0.1", "0.2")}, array="0-1", backend="slurm")
    spec = JobSpec.from_json(sweep.run.job_json.read_text())
    task = Written(tmp_path / "elsewhere").start().steps(1, 20).finished(0, 20)
    task.run.job_json.write_text(spec.task(1).to_json())
    task.run.path.rename(sweep.run.task(1).path)
    with pytest.raises(UsageError, match="is an array; accepted: one of its tasks") as caught:
        sweep.page()
    assert f"hpc-ddp status {sweep.run.path}" in str(caught.value.hint)
    assert "--lr=0.2" in check(page.render_page(sweep.run.task(1), TEMPLATES)).text
