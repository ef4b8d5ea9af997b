"""The tests that are too long for `make test`: make test-more, and make soak.

    make test-more             what is marked `more`, on the machine's own Slurm; and what trains,
                               on the stand-in accelerator, with the pinned torch and the oldest
    make soak                  every row of docs/bad-days.md, and the other versions of Slurm
    make test-more REPORT=1    what there is, without running anything (also: make soak REPORT=1)

Both keep their results in one file, so that neither runs what has passed at this commit. They run
in a copy of the checkout, which may be worked in meanwhile.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.results import NAME_VARIABLE, OWN, SUITE_VARIABLE, newest, row_of
from tools.command import make_parser, run_command
from tools.store import (
    REPO,
    RESULTS,
    Line,
    Store,
    ToolError,
    completeness,
    current_commit,
    replace_text,
)
from tools.working_copy import WorkingCopy, parallel

STORE = RESULTS / "tests.jsonl"
PAGE = RESULTS / "README.md"
FAULTS = RESULTS / "faults.md"
FAULT_REPORT = {"HPC_DDP_FAULT_REPORT": str(FAULTS)}


@dataclass(frozen=True)
class Selection:
    """Some of the tests, with one version of Slurm and one of torch."""

    name: str
    title: str
    words: tuple[str, ...]  # for pytest
    suite: str = OWN
    environ: dict[str, str] = field(default_factory=dict)
    torch: str = ""  # the release; the pinned one, if none is named

    @property
    def row(self) -> str:
        """The row of the store that lists the tests."""
        return f"selection {self.name}"


MORE = Selection("more", "`make test-more`", ("-m", "more"), environ=FAULT_REPORT)
ROWS = Selection(
    "rows",
    "`make soak`: the rows of bad-days.md",
    ("-m", "row"),
    environ={"HPC_DDP_SOAK": "200", **FAULT_REPORT},
)
VERSIONS = tuple(
    Selection(
        suite,
        f"`make soak`: the Slurm of {suite}",
        ("tests/slurm", "-m", "version or not more"),
        suite=suite,
        environ={SUITE_VARIABLE: suite},
    )
    for suite in ("bullseye", "trixie", "sid")
)
# All that trains and does not need Slurm, on the stand-in accelerator.
DEVICE_TESTS = ("tests/ddp", "tests/cli/test_drill.py", "tests/cli/test_dry_run.py")
DELAYS = {"SIM_STREAM_DELAY_MS": "4", "SIM_COLLECTIVE_DELAY_MS": "2"}


def on_device(suite: str, title: str, torch: str = "", **environ: str) -> Selection:
    words = (*DEVICE_TESTS, "-m", "more or not more")
    environ |= {"DEVICE": "sim", NAME_VARIABLE: suite}
    return Selection(suite, f"`make test-more`: {title}", words, suite, environ, torch)


DEVICES = (
    on_device("device", "the stand-in accelerator, with delays", **DELAYS),
    on_device("device, torch 2.9", "the stand-in accelerator, with torch 2.9", "2.9"),
)
COMMANDS = {"test-more": (MORE, *DEVICES), "soak": (ROWS, *VERSIONS)}


# --- running -------------------------------------------------------------------------------------


def run(selection: Selection, copy: WorkingCopy, store_path: str, commit: str) -> None:
    """Run the tests of a selection that have not passed at this commit, and print their outcomes.
    Raise ToolError where pytest fails otherwise than by a test."""
    store = Store(STORE if store_path else None)
    tests = collect(selection, copy)
    line: Line = {"row": selection.row, "commit": commit, "tests": tests}
    if store.newest().get(selection.row) != line:
        store.append(line)
    results = newest(store.lines(), commit)
    rows = [row_of(selection.suite, test) for test in tests]
    left = [row for row in rows if results.get(row, {}).get("outcome") != "passed"]
    print(f"{selection.name}: {len(left)} of {len(tests)} tests to run", flush=True)
    if not left:
        return
    words = [*parallel(), *selection.words, "--durations=25"]
    words += [f"--results={store_path}", "--resume"] if store_path else []
    process = copy.test_run(*words)
    process.environ, process.torch = selection.environ, selection.torch
    ended = 0
    for event in process.events():
        if "test" in event:
            ended += 1
            text = f"{event['outcome']} {event['seconds']:6.1f} s  {event['test']}"
            why = f"  {event['why']}" if event["why"] else ""
            print(f"{ended:4} of {len(left)}  {text}{why}", flush=True)
    if process.code:
        print(process.output(), flush=True)
    if process.code not in (0, 1):
        raise ToolError(f"pytest ended with {process.code}")
    process.clear()


def collect(selection: Selection, copy: WorkingCopy) -> list[str]:
    """Return the tests of a selection, sorted; raise ToolError where there are none."""
    copy.make_environment(selection.torch)
    process = copy.test_run("--collect-only", "--quiet", *selection.words)
    process.environ, process.torch = selection.environ, selection.torch
    tests = [test for event in process.events() for test in event.get("collected", ())]
    if process.code or not tests:
        raise ToolError(f"the tests can't be collected: {process.output()[-2000:]}")
    process.clear()
    return sorted(tests)


def thin_out(store: Store, commit: str) -> None:
    """Remove old results from the store. The newest result of each row stays, and its newest pass,
    which docs/bad-days.md shows; so do all results of the same tests at the same commits, and the
    failures of this commit."""
    lines = store.lines()
    newest_lines = list(store.newest().values())
    passes = {
        line["row"]: line
        for line in lines
        if line.get("outcome") == "passed" and not line.get("changed")
    }
    groups = {_group(line) for line in (*newest_lines, *passes.values()) if "test" in line}

    def is_kept(line: Line) -> bool:
        if "test" not in line:
            return any(line is newest_line for newest_line in newest_lines)
        is_failure = line["outcome"] == "failed" and line["commit"] == commit
        return is_failure or _group(line) in groups

    kept = [line for line in lines if is_kept(line)]
    if len(kept) < len(lines):
        store.rewrite(kept)


def _group(line: Line) -> tuple[str, str, str]:
    """Return the suite, the function and the commit of a result, which those of a test's variants
    share."""
    return line["suite"], _function(line["test"]), line["commit"]


def _function(test: str) -> str:
    return test.partition("[")[0]


# --- the report ----------------------------------------------------------------------------------


@dataclass
class State:
    """How far the results of a selection go, and how good they are."""

    selection: Selection
    text: str
    is_good: bool  # whole, of one commit, without a failure (also an earlier one) or a skip
    outcomes: list[Line] = field(default_factory=list)
    # How often a test that has passed failed before, at the same commit; and why, the last time.
    flakes: dict[str, tuple[int, str]] = field(default_factory=dict)


def state_of(selection: Selection, store: Store, commit: str = "") -> State:
    """Return the state of a selection: its results against the tests that were to be run at a
    commit. The commit is by default that at which the tests were listed last."""
    listed = store.newest().get(selection.row)
    if listed is None:
        return State(selection, "not run yet", False)
    commit = commit or listed["commit"]
    results = {line["row"]: line for line in store.lines() if "test" in line}
    rows = [row_of(selection.suite, test) for test in listed["tests"]]
    whole = completeness(rows, results, commit)
    outcomes = [results[row] for row in rows if row in results]
    flakes = {}
    for line in outcomes:
        failures = [
            failure.get("why", "")
            for failure in store.lines()
            if (failure["row"], failure["commit"]) == (line["row"], line["commit"])
            and failure["outcome"] == "failed"
        ]
        if failures and line["outcome"] == "passed":
            flakes[line["row"]] = len(failures), failures[-1]
    counts = Counter(
        "passed after failures" if line["row"] in flakes else line["outcome"] for line in outcomes
    )
    text = f"{whole}; {', '.join(f'{counts[name]} {name}' for name in sorted(counts)) or 'none'}"
    if listed["commit"] != commit:
        text += f"; the tests were listed at commit {listed['commit']}"
    is_whole = whole.is_whole and listed["commit"] == commit
    is_good = is_whole and set(counts) == {"passed"}
    return State(selection, text, is_good, outcomes, flakes)


def page(store: Store) -> str:
    """Return the text of docs/results/README.md, made from the kept results alone."""
    states = [state_of(each, store) for each in (MORE, *DEVICES, ROWS, *VERSIONS)]
    lines = [
        "# Results of the long tests",
        "",
        "Written by `make test-more` and `make soak`, from `tests.jsonl`;"
        " [testing.md](../testing.md) says what they run.",
        "",
        "| tests | where they stand | from | to | versions |",
        "|---|---|---|---|---|",
    ]
    for state in states:
        dates = sorted({line["date"] for line in state.outcomes}) or ["–"]
        versions = sorted(
            {
                f"{title} {line[name]}"
                for line in state.outcomes
                for name, title in (("slurm", "Slurm"), ("torch", "torch"))
                if name in line
            }
        )
        cells = (state.selection.title, state.text, dates[0], dates[-1], ", ".join(versions) or "–")
        lines.append(f"| {' | '.join(cells)} |")
    lines += _measurements(states)
    sections = {
        "Failed": _with_outcome(states, "failed"),
        "Passed after failures": _flakes(states),
        "Skipped": _with_outcome(states, "skipped"),
    }
    for title, rows in sections.items():
        if items := [f"- {row}" for row in rows]:
            lines += ["", f"## {title}", *items]
    return "\n".join(lines) + "\n"


def _measurements(states: Sequence[State]) -> list[str]:
    """Return a table of what tests that passed have recorded with record_property; [] without
    any."""
    values: dict[tuple[str, ...], dict[str, str]] = {}  # the value of each row of the store
    for line in (line for state in states for line in state.outcomes):
        title = line.get("bad_day") or f"`{_function(line['test'])}`"
        suite = "" if line["suite"] == OWN else f" ({line['suite']})"
        measured = line.get("measured", {}) if line["outcome"] == "passed" else {}
        for name, value in measured.items():
            key = f"{title}{suite}", name, line["commit"]
            values.setdefault(key, {})[line["row"]] = str(value)
    if not values:
        return []
    lines = ["", "## Measured", "| bad day or test | what was measured | values | commit |"]
    lines.append("|---|---|---|---|")
    for (title, name, commit), by_row in values.items():
        lines.append(f"| {title} | {name} | {', '.join(by_row.values())} | {commit} |")
    return lines


def _with_outcome(states: Sequence[State], outcome: str) -> Iterator[str]:
    shown = set()
    for state in states:
        for line in state.outcomes:
            if line["outcome"] == outcome and line["row"] not in shown:
                shown.add(line["row"])
                yield _item(line, line.get("why", ""))


def _flakes(states: Sequence[State]) -> Iterator[str]:
    shown = set()
    for state in states:
        for line in state.outcomes:
            if line["row"] in state.flakes and line["row"] not in shown:
                shown.add(line["row"])
                count, why = state.flakes[line["row"]]
                failures = "1 failure" if count == 1 else f"{count} failures"
                yield f"passed after {failures}: {_item(line, why)}"


def _item(line: Line, why: str) -> str:
    suite = "" if line["suite"] == OWN else f" ({line['suite']})"
    reason = " ".join(why.replace("`", "'").split())
    return f"`{line['test']}`{suite}, commit {line['commit']}: `{reason or 'no reason'}`"


def report(
    selections: Sequence[Selection],
    store: Store,
    commit: str,
    write: Callable[[str], None] = print,
) -> bool:
    """Print the state of the selections; return whether all results are there, of this commit, and
    passed."""
    states = [state_of(selection, store, commit) for selection in selections]
    for state in states:
        write(f"{state.selection.name}: {state.text}")
    for outcome in ("failed", "skipped"):
        for text in _with_outcome(states, outcome):
            write(f"{outcome} {text}")
    for text in _flakes(states):
        write(text)
    return all(state.is_good for state in states)


def run_all(selections: Sequence[Selection], commit: str, *, dirty: bool) -> None:
    """Run the tests of the selections that have no result yet. The pages are written even where
    that is interrupted."""
    began = time.monotonic()
    copy = WorkingCopy("suites", dirty=dirty)
    thin_out(Store(None if dirty else STORE), commit)
    try:
        for selection in selections:
            run(selection, copy, "" if dirty else os.fspath(STORE), commit)
    finally:
        print(f"after {time.monotonic() - began:.0f} s:", flush=True)
        if not dirty:
            write_pages(Store(STORE))


def write_pages(store: Store) -> None:
    replace_text(PAGE, page(store))
    matrix = REPO / "tests" / "unit" / "repository" / "bad_days.py"
    subprocess.run([sys.executable, str(matrix)], check=True)


def main() -> int:
    parser = make_parser("make", __doc__)
    parser.add_argument("command", choices=COMMANDS)

    def act(args: argparse.Namespace) -> bool:
        selections, commit = COMMANDS[args.command], current_commit()
        if not args.report:
            run_all(selections, commit, dirty=args.dirty)
        if args.dirty:
            return True
        is_good = report(selections, Store(STORE), commit)
        write_pages(Store(STORE))
        return is_good

    return run_command(parser, act)


if __name__ == "__main__":
    sys.exit(main())
