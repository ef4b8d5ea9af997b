"""Which tests fail now and then? Runs each of tests/unit, tests/cli and tests/ddp many times.

    make flakes N=20                   each test 20 times, in rounds
    make flakes N=100 TEST=notices     those that `pytest -k notices` takes
    make flakes N=20 REPORT=1          what there is, without running anything

Several run at once, as in `make test`. Tests that start processes (tests/cli, tests/ddp) run half
of the times beside busy loops, one more than there are cores. See docs/testing.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from tools.command import make_parser, run_command
from tools.store import (
    RESULTS,
    Line,
    Store,
    ToolError,
    completeness,
    current_commit,
)
from tools.working_copy import WorkingCopy, parallel

STORE = RESULTS / "flakes.jsonl"
FOLDERS = ("tests/unit", "tests/cli", "tests/ddp")
START_PROCESSES = ("tests/cli/", "tests/ddp/")
LIMIT_S = 900.0  # for one test; beyond it the test has failed
REWRITE_EVERY = 500  # appended lines, after which only the newest of each test stays
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(1000000))"


@dataclass
class Counts:
    """How often a test has run, and how it ended."""

    passed: int = 0
    failed: int = 0
    passed_under_load: int = 0
    failed_under_load: int = 0
    skipped: int = 0
    skipped_under_load: int = 0
    why: str = ""  # the first line of the newest failure

    @classmethod
    def of(cls, line: Line | None, commit: str) -> Counts:
        """Return the counts of a line of the store; zeros where there is no line, or it is of
        another commit."""
        if line is None or line["commit"] != commit:
            return cls()
        return cls(**{name: line[name] for name in cls.__dataclass_fields__ if name in line})

    def fields(self) -> Line:
        """Return the counts as a line of the store keeps them: without zeros, so that the file
        stays small."""
        return {name: value for name, value in asdict(self).items() if value}

    def add(self, outcome: str, why: str, *, loaded: bool) -> None:
        """Count a run with this outcome. A skipped test has run as well, and is not tried again."""
        name = f"{outcome}_under_load" if loaded else outcome
        setattr(self, name, getattr(self, name) + 1)
        if outcome == "failed":
            self.why = why

    def runs(self, *, loaded: bool) -> int:
        if loaded:
            return self.passed_under_load + self.failed_under_load + self.skipped_under_load
        return self.passed + self.failed + self.skipped

    @property
    def failures(self) -> int:
        return self.failed + self.failed_under_load

    @property
    def skips(self) -> int:
        return self.skipped + self.skipped_under_load


def tests_of(line: Line) -> list[str]:
    """Return the tests that a line of the store lists; [] for a line that has the result of a
    test."""
    files = line.get("tests", {}).items()
    return [f"{file}::{name}" for file, names in files for name in names]


def wanted_runs(test: str, count: int, *, loaded: bool) -> int:
    """Return how often a test is to run, with load or without."""
    under_load = count // 2 if test.startswith(START_PROCESSES) else 0
    return under_load if loaded else count - under_load


@dataclass
class Table:
    """The tests that an expression of pytest selects, and their counts at a commit."""

    store: Store
    commit: str
    expression: str
    count: int

    @property
    def row(self) -> str:
        """The row of the store that lists the tests."""
        return f"selection {self.expression}".strip()

    def tests(self) -> list[str]:
        return tests_of(self.store.newest().get(self.row, {}))

    def listed_at(self) -> str:
        """Return the commit at which the tests were listed."""
        return str(self.store.newest().get(self.row, {}).get("commit", ""))

    def counts(self, test: str) -> Counts:
        return Counts.of(self.store.newest().get(test), self.commit)

    def list_tests(self, tests: Sequence[str]) -> None:
        if (self.tests(), self.listed_at()) != (list(tests), self.commit):
            # By file: the names of the files would be half of the text.
            by_file: dict[str, list[str]] = {}
            for test in tests:
                file, _, name = test.partition("::")
                by_file.setdefault(file, []).append(name)
            date = time.strftime("%Y-%m-%d")
            line = {"row": self.row, "commit": self.commit, "date": date, "tests": by_file}
            self.store.append(line)

    def drop_unlisted(self) -> None:
        """Remove from the store the results of tests that no selection lists any more. Those of an
        older commit stay until the test has run again, and the report counts them."""
        newest = self.store.newest().values()
        listed = {test for line in newest for test in tests_of(line)}
        self.store.retain(lambda line: "tests" in line or line["row"] in listed)

    def missing(self, *, loaded: bool) -> list[str]:
        """Return the tests that have not yet run often enough, with load or without."""
        newest = self.store.newest()
        return [
            test
            for test in self.tests()
            if Counts.of(newest.get(test), self.commit).runs(loaded=loaded)
            < wanted_runs(test, self.count, loaded=loaded)
        ]

    def add(self, test: str, outcome: str, why: str, *, loaded: bool) -> None:
        counts = self.counts(test)
        counts.add(outcome, why, loaded=loaded)
        self.store.append({"row": test, "commit": self.commit, **counts.fields()})
        if len(self.store.lines()) > len(self.store.newest()) + REWRITE_EVERY:
            self.store.retain(lambda line: True)


# --- running -------------------------------------------------------------------------------------


@contextmanager
def load(wanted: bool, environ: dict[str, str]) -> Iterator[None]:
    """Keep each core busy inside the block, where that is wanted. The busy loops end with this
    process, however it ends."""
    count = (os.cpu_count() or 1) + 1 if wanted else 0
    loops = [subprocess.Popen([sys.executable, "-c", BUSY], env=environ) for _ in range(count)]
    try:
        yield
    finally:
        for process in loops:
            process.kill()
            process.wait()


def collect(copy: WorkingCopy, expression: str) -> list[str]:
    words = ["--collect-only", "--quiet", *FOLDERS, *(["-k", expression] if expression else [])]
    process = copy.test_run(*words)
    tests = [test for event in process.events() for test in event.get("collected", ())]
    if process.code or not tests:
        raise ToolError(f"no tests for {expression!r}: {process.output()[-1000:]}")
    process.clear()
    return tests


def run_round(table: Table, copy: WorkingCopy, *, loaded: bool) -> None:
    """Run once each test that has not yet run often enough, and store the outcomes. Raise ToolError
    where pytest does not end by itself, or fails otherwise than by a test."""
    tests = table.missing(loaded=loaded)
    print(f"{len(tests)} tests, {'under' if loaded else 'without'} load", flush=True)
    process = copy.test_run(limit_s=LIMIT_S)
    names = process.folder / "tests"
    names.write_text("".join(f"{test}\n" for test in tests))
    process.words = [*parallel(), f"@{names}"]
    ended = set()
    with load(loaded, dict(os.environ)):
        for event in process.events():
            if "test" in event:
                ended.add(event["test"])
                table.add(event["test"], event["outcome"], event["why"], loaded=loaded)
                if event["outcome"] == "failed":
                    print(f"failed  {event['test']}\n    {event['why']}", flush=True)
    if process.hung in tests:
        table.add(process.hung, "failed", f"not over after {LIMIT_S:g} s", loaded=loaded)
    elif process.hung or process.code not in (0, 1) or not ended:
        tail = process.output()[-2000:]
        raise ToolError(f"pytest ended with {process.code} {process.hung}: {tail}")
    process.clear()


def run(table: Table, copy: WorkingCopy) -> None:
    """Collect the tests; then run rounds, without load and under load in turn, until each test has
    run often enough."""
    table.list_tests(collect(copy, table.expression))
    table.drop_unlisted()
    while any(table.missing(loaded=loaded) for loaded in (False, True)):
        for loaded in (False, True):
            if table.missing(loaded=loaded):
                run_round(table, copy, loaded=loaded)


# --- the report ----------------------------------------------------------------------------------


def report(table: Table, write: Callable[[str], None] = print) -> bool:
    """Print failures and skips; return whether each test has run often enough, and none has failed
    or was skipped."""
    tests = table.tests()
    newest = table.store.newest()
    failures = skips = 0
    for test in tests:
        counts = Counts.of(newest.get(test), table.commit)
        if counts.failures:
            failures += 1
            write(
                f"{test}: failed {counts.failed} of {counts.runs(loaded=False)} times, under load"
                f" {counts.failed_under_load} of {counts.runs(loaded=True)}\n    {counts.why}"
            )
        if counts.skips:
            skips += 1
            runs = counts.runs(loaded=False) + counts.runs(loaded=True)
            write(f"{test}: skipped {counts.skips} of {runs} times")

    def has_run(line: Line) -> bool:
        """Return whether a test has run often enough at the commit of its line."""
        counts = Counts.of(line, line["commit"])
        return all(
            counts.runs(loaded=loaded) >= wanted_runs(line["row"], table.count, loaded=loaded)
            for loaded in (False, True)
        )

    state = completeness(tests, newest, table.commit, has_run)
    text = f"{len(tests)} tests, {table.count} runs each, {failures} of them failed"
    text += f", {skips} were skipped; {state}"
    is_listed = table.listed_at() == table.commit
    if tests and not is_listed:
        text += f"; the tests were listed at commit {table.listed_at()}"
    write(text)
    return state.is_whole and is_listed and not failures and not skips


def main() -> int:
    parser = make_parser("make flakes", __doc__)
    parser.add_argument("--count", type=int, default=20, help="N: runs of each test")
    parser.add_argument("--test", default="", help="TEST: an expression, as for pytest -k")

    def act(args: argparse.Namespace) -> bool:
        if args.count < 1:
            raise ToolError(f"N is {args.count}; accepted: 1 and more")
        store = Store(None if args.dirty else STORE)
        table = Table(store, current_commit(), args.test, args.count)
        if not args.report:
            run(table, WorkingCopy("flakes", dirty=args.dirty))
        return report(table)

    return run_command(parser, act)


if __name__ == "__main__":
    sys.exit(main())
