"""Can the suite fail? Changes one place at a time, and runs the tests that reach it.

    make mutants N=40 SEED=7 ROOM=node             ROOM may have several, with commas
    make mutants N=40 SEED=7 ROOM=node REPORT=1    what there is, without running anything

First one run of the suite, in which each place records the tests that reach it; then for each
mutant the type checker, and those tests until one fails. See docs/testing.md.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from tools.command import make_parser, run_command
from tools.mutations import (
    Mutation,
    draw,
    outdated,
    read_equivalent,
    reason_by_mutation,
    with_probes,
)
from tools.statistics import wilson_interval
from tools.store import (
    REPO,
    RESULTS,
    Line,
    Store,
    ToolError,
    completeness,
    current_commit,
)
from tools.working_copy import Event, TestRun, WorkingCopy, parallel

STORE = RESULTS / "mutants.jsonl"
EQUIVALENT = RESULTS / "equivalent.toml"
LIMIT_S = 120.0  # more than the longest pause within a test, on a busy machine
SLURM_LIMIT_S = 600.0
KEEP_EVERY_S = 60.0
MANY = 8  # tests that are run several at once; each process takes seconds to start
AT_IMPORT = "import"
PYTEST_ENDED, TIME_LIMIT = "pytest ended with", "time limit, in"  # what else may kill a mutant
# Tests run in this order; those that need a cluster last.
STAGES = (("tests/unit",), ("tests/ddp", "tests/cli"), ("tests/slurm",))


@dataclass
class Draw:
    """The mutations of a room."""

    room: str
    seed: int
    mutations: list[Mutation]

    @property
    def name(self) -> str:
        return f"{self.room}/{self.seed}"

    def row(self, index: int) -> str:
        return f"{self.name} {index}"


@dataclass
class Reach:
    """Which tests reach a place, with the seconds that each takes."""

    tests: dict[str, float] = field(default_factory=dict)
    at_import: bool = False


# --- which tests reach which place ---------------------------------------------------------------


class Map:
    """Finds the tests that reach the places of some draws, and keeps them in the store.

    Each line of the store has the tests that ended within a minute, so that a kill costs no more.
    """

    def __init__(
        self,
        store: Store,
        commit: str,
        draws: Sequence[Draw],
        tests: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Take all tests, unless some are named, which run with these variables."""
        self._tests, self._environ = tests or test_files(), dict(environ or {})
        self._store = store
        self._commit = commit
        self._draws = draws
        self._prefix = " ".join(("reach", *tests, ""))
        self._name = self._prefix + ",".join(f"{each.name}x{len(each.mutations)}" for each in draws)

    def _lines(self) -> list[Line]:
        """Return the lines of a run with at least these places; of a complete one, if there is."""
        counts = {each.name: len(each.mutations) for each in self._draws}
        runs: dict[str, list[Line]] = {}
        words = self._prefix.count(" ") + 1  # else a row of further tests would begin like this
        for line in self._store.newest().values():
            row = line["row"]
            is_of_tests = row.startswith(self._prefix) and row.count(" ") == words
            if is_of_tests and line["commit"] == self._commit:
                runs.setdefault(row.rpartition(" ")[0], []).append(line)
        for lines in runs.values():
            draws = lines[0]["draws"]
            has_all = all(draws.get(name, 0) >= count for name, count in counts.items())
            if has_all and any(line["is_last"] for line in lines):
                return lines
        return runs.get(self._name, [])

    def is_complete(self) -> bool:
        return any(line["is_last"] for line in self._lines())

    def _ended(self) -> Iterator[tuple[str, float, dict[str, list[int]]]]:
        """Yield the tests that are known, with the seconds and the places of each."""
        for line in self._lines():
            for file, tests in line["tests"].items():
                for test, (seconds, places) in tests.items():
                    yield f"{file}::{test}", seconds, places

    def failed(self) -> dict[str, str]:
        """Return the tests that fail without a mutation, which say nothing about one."""
        lines = self._lines()
        return {test: why for line in lines for test, why in line["failed"].items()}

    def reach(self, draw: Draw, index: int) -> Reach:
        failed = self.failed()
        return Reach(
            tests={
                test: seconds
                for test, seconds, places in self._ended()
                if index in places.get(draw.name, []) and test not in failed
            },
            at_import=any(index in line["at_import"].get(draw.name, []) for line in self._lines()),
        )

    def complete(self, copy: WorkingCopy) -> None:
        """Run the tests that are missing, with a probe at each place."""
        if self.is_complete():
            return
        done = [test for test, _, _ in self._ended()]
        count = sum(len(each.mutations) for each in self._draws)
        print(f"running the suite with {count} probes ({len(done)} tests are done)", flush=True)
        run = copy.test_run(*parallel(), *self._tests)
        run.environ = self._environ
        (run.folder / "done").write_text("".join(f"{test}\n" for test in done))
        run.words.append(f"--done={run.folder / 'done'}")
        originals = self._insert_probes(copy, run.folder)
        try:
            self._record(run)
        finally:
            for file, content in originals.items():
                copy.write(file, content)
        if run.code not in (0, 1, 5):
            raise ToolError(f"the run with probes ended with {run.code}: {run.output()[-2000:]}")
        self._keep(run, {}, is_last=True)
        run.clear()

    def _insert_probes(self, copy: WorkingCopy, folder: Path) -> dict[str, bytes]:
        """Put a probe at each place; return the files as they were."""
        places: dict[str, dict[int, Mutation]] = {}
        for number, (_, _, mutation) in enumerate(self._places()):
            places.setdefault(mutation.file, {})[number] = mutation
        originals = {file: (copy.path / file).read_bytes() for file in places}
        for file, content in originals.items():
            copy.write(file, with_probes(content.decode(), places[file], folder).encode())
        return originals

    def _places(self) -> list[tuple[Draw, int, Mutation]]:
        return [(each, i, m) for each in self._draws for i, m in enumerate(each.mutations)]

    def _record(self, run: TestRun) -> None:
        ended: dict[str, Event] = {}
        total, kept = 0, time.monotonic()
        for event in run.events():
            if "test" in event:
                ended[event["test"]] = event
                total += 1
            if ended and time.monotonic() > kept + KEEP_EVERY_S:
                self._keep(run, ended)
                ended, kept = {}, time.monotonic()
                print(f"  {total} tests", flush=True)
        self._keep(run, ended)

    def _keep(self, run: TestRun, ended: dict[str, Event], *, is_last: bool = False) -> None:
        """Append a line with the places that these tests have reached."""
        at_import: dict[str, list[int]] = {}
        reached: dict[str, dict[str, list[int]]] = {test: {} for test in ended}
        for number, (drawn, index, _) in enumerate(self._places()):
            for test in _tests_in(run.folder / str(number)):
                if test == AT_IMPORT:
                    at_import.setdefault(drawn.name, []).append(index)
                elif test in reached:
                    reached[test].setdefault(drawn.name, []).append(index)
        tests: dict[str, dict[str, tuple[float, dict[str, list[int]]]]] = {}
        for test, event in ended.items():
            file, _, name = test.partition("::")
            tests.setdefault(file, {})[name] = (round(event["seconds"], 1), reached[test])
        self._store.append(
            {
                "row": f"{self._name} {len(self._lines())}",
                "commit": self._commit,
                "draws": {each.name: len(each.mutations) for each in self._draws},
                "tests": tests,
                "at_import": at_import,
                "failed": {t: e["why"] for t, e in ended.items() if e["outcome"] == "failed"},
                "is_last": is_last,
            }
        )


def test_files() -> list[str]:
    return sorted(str(path.relative_to(REPO)) for path in (REPO / "tests").rglob("test_*.py"))


def _file(test: str) -> str:
    return test.partition("::")[0]


def _tests_in(path: Path) -> list[str]:
    """Return the tests in a place's file, in the order in which they came there."""
    text = path.read_text(errors="replace") if path.exists() else ""
    tests = (re.sub(r" \((setup|call|teardown)\)$", "", line) for line in text.splitlines())
    return list(dict.fromkeys(tests))


# --- a mutant ------------------------------------------------------------------------------------


@dataclass
class Verdict:
    outcome: str  # killed or survived
    by: str
    run: int = 0  # tests
    reaching: int = 0


@dataclass
class Examination:
    """Decides whether something notices a mutant."""

    copy: WorkingCopy
    slurm_tests: int
    seconds: float
    environ: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known_errors = set(self.copy.type_errors())
        if self._known_errors:
            print(f"the types have {len(self._known_errors)} errors without a mutation", flush=True)

    def examine(self, mutation: Mutation, reach: Reach) -> Verdict:
        original = (self.copy.path / mutation.file).read_bytes()
        self.copy.write(mutation.file, mutation.apply(original))
        try:
            if errors := self._type_errors():
                return Verdict("killed", f"types: {errors[0]}")
            verdict = Verdict("survived", "", reaching=len(reach.tests))
            for tests, limit_s in self._stages(mutation, reach):
                if failure := self._first_failure(tests, reach, limit_s, verdict):
                    verdict.outcome, verdict.by = "killed", failure
                    return verdict
            verdict.by = "" if verdict.run else "no test reaches it"
            return verdict
        finally:
            self.copy.write(mutation.file, original)

    def _type_errors(self) -> list[str]:
        return [error for error in self.copy.type_errors() if error not in self._known_errors]

    def _stages(self, mutation: Mutation, reach: Reach) -> Iterable[tuple[list[str], float]]:
        for folders in STAGES:
            tests = [test for test in reach.tests if test.startswith(folders)]
            if folders == ("tests/slurm",):
                tests = sorted(tests, key=reach.tests.__getitem__)[: self.slurm_tests]
                yield tests, SLURM_LIMIT_S
            elif folders == ("tests/unit",):
                yield (["tests/unit"] if reach.at_import else tests), LIMIT_S
            else:
                yield self._shortest(tests, reach), LIMIT_S

    def _shortest(self, tests: Sequence[str], reach: Reach) -> list[str]:
        """Return tests for so many seconds; file by file, since tests of a file share fixtures."""
        by_file: dict[str, list[str]] = {}
        for test in tests:
            by_file.setdefault(_file(test), []).append(test)
        chosen: list[str] = []
        total = 0.0
        groups = by_file.values()
        for group in sorted(groups, key=lambda group: sum(reach.tests[test] for test in group)):
            for test in group:
                total += reach.tests[test]
                if total <= self.seconds:
                    chosen.append(test)
        return chosen

    def _first_failure(
        self, tests: Sequence[str], reach: Reach, limit_s: float, verdict: Verdict
    ) -> str:
        """Return the first test that fails and why, or an empty text."""
        if not tests:
            return ""
        run = self.copy.test_run(limit_s=limit_s)
        run.expected, run.environ = reach.tests, dict(self.environ)
        names = run.folder / "tests"
        names.write_text("".join(f"{test}\n" for test in tests))
        run.words = ["-x", f"@{names}"]
        if len(tests) >= MANY and not tests[0].startswith("tests/unit"):
            run.words += parallel()
        failure = ""
        with closing(run.events()) as events:
            for event in events:
                verdict.run += "test" in event
                if event.get("outcome") == "failed":
                    failure = f"{event['test']}: {event['why']}"
                    break
        if run.hung:
            failure = failure or f"{TIME_LIMIT} {run.hung}"
        elif run.code not in (0, 5) and not failure:
            lines = [
                line for line in run.output().splitlines() if line.startswith(("E  ", "ERROR"))
            ]
            failure = f"{PYTEST_ENDED} {run.code}: {(lines or [''])[0].strip()}"
        run.clear()
        return failure


def run(draws: Sequence[Draw], store: Store, commit: str, args: argparse.Namespace) -> None:
    """Examine the mutants that have no result at this commit."""
    copy = WorkingCopy("mutants", dirty=args.dirty)
    reached = Map(store, commit, draws)
    reached.complete(copy)
    examine_all(draws, store, commit, reached, Examination(copy, args.slurm, args.seconds))


def examine_all(
    draws: Sequence[Draw], store: Store, commit: str, reached: Map, examination: Examination
) -> None:
    """Keep a verdict on each mutant that has none at this commit."""
    store.retain(lambda line: not line["row"].startswith("reach ") or line["commit"] == commit)
    equivalent = read_equivalent(EQUIVALENT)
    results = store.newest()
    slurm_tests = examination.slurm_tests
    for test, why in reached.failed().items():
        print(f"fails without a mutation, and is left out: {test}: {why}")
    for each in draws:
        reasons = reason_by_mutation(each.mutations, equivalent)
        for index, mutation in enumerate(each.mutations):
            row = each.row(index)
            result = results.get(row)
            if mutation in reasons or (
                _is_result_of(result, mutation, commit) and _is_tried(result, slurm_tests)
            ):
                continue
            began = time.monotonic()
            verdict = examination.examine(mutation, reached.reach(each, index))
            line: Line = {"row": row, "commit": commit, "place": f"{mutation.file}:{mutation.line}"}
            line |= {"kind": mutation.kind, "change": mutation.change, "text": mutation.text}
            line |= {"outcome": verdict.outcome, "by": verdict.by, "run": verdict.run}
            line |= {"reaching": verdict.reaching, "slurm": slurm_tests}
            line |= {"date": time.strftime("%Y-%m-%d")}
            store.append(line)
            took = f"{time.monotonic() - began:.0f} s"
            print(f"{row}  {verdict.outcome} ({took})  {mutation}\n    {verdict.by}", flush=True)


def _is_result_of(line: Line | None, mutation: Mutation, commit: str = "") -> bool:
    """Tell whether a result is this mutation's: a row of another commit may be another's."""
    if line is None or (commit and line["commit"] != commit):
        return False
    return bool((line["text"], line["change"]) == (mutation.text, mutation.change))


def _is_tried(line: Line | None, slurm_tests: int) -> bool:
    """Tell whether a mutant was killed, or has survived with as many tests on Slurm as these."""
    return line is not None and (
        line["outcome"] == "killed" or bool(line.get("slurm", 0) >= slurm_tests)
    )


# --- the report ----------------------------------------------------------------------------------


def report(
    draws: Sequence[Draw],
    store: Store,
    commit: str,
    slurm_tests: int,
    write: Callable[[str], None] = print,
) -> bool:
    """Print the results by room, and return whether there are all of them, of this commit.

    A survivor that was tried with fewer tests on Slurm is missing. What was killed by no failure of
    a test is listed, for a human to look at.
    """
    results, entries = store.newest(), read_equivalent(EQUIVALENT)
    write("| room | mutants | killed | equivalent | survived | killed of those not equivalent |")
    write("|---|---|---|---|---|---|")
    survivors: list[str] = []
    doubtful: list[str] = []
    notes: list[str] = []
    wanted: list[str] = []
    for each in draws:
        reasons = reason_by_mutation(each.mutations, entries)
        killed = survived = 0
        for index, mutation in enumerate(each.mutations):
            line = results.get(each.row(index))
            if not _is_result_of(line, mutation):
                line = None
                results.pop(each.row(index), None)
            if mutation in reasons:
                notes.append(f"equivalent  {mutation}: {reasons[mutation]}")
                continue
            wanted.append(each.row(index))
            if line and line["outcome"] == "killed":
                killed += 1
                if line["by"].startswith((PYTEST_ENDED, TIME_LIMIT)):
                    doubtful.append(
                        f"look at    {each.row(index)}  {mutation}\n    killed: {line['by']}"
                    )
            elif line:
                survived += 1
                ran, reaching = line["run"], line["reaching"]
                more = f"{ran} of {reaching} tests that reach it were run"
                if ran > reaching:
                    more = f"it runs at import: {ran} tests were run, all of tests/unit among them"
                survivors.append(
                    f"survived  {each.row(index)}  {mutation}\n    {line['by'] or more}"
                )
        low, high = wilson_interval(killed, killed + survived)
        share = (
            f"{killed / (killed + survived):.0%} ({low:.0%} to {high:.0%})"
            if killed + survived
            else "–"
        )
        total = len(each.mutations)
        write(f"| {each.room} | {total} | {killed} | {len(reasons)} | {survived} | {share} |")
    for text in (*survivors, *doubtful, *notes):
        write(text)
    for entry in outdated(entries):
        write(f"equivalent.toml: {entry.file} has no line {entry.line!r} any more")
    state = completeness(wanted, results, commit, lambda line: _is_tried(line, slurm_tests))
    write(str(state))
    return state.is_whole


def main() -> int:
    parser = make_parser("make mutants", __doc__)
    parser.add_argument("--count", type=int, default=40, help="N: mutants of each room")
    parser.add_argument("--seed", type=int, default=7, help="SEED: of the drawing")
    parser.add_argument("--room", default="essential", help="ROOM: one, or several with commas")
    parser.add_argument("--slurm", type=int, default=6, help="tests of tests/slurm for each mutant")
    parser.add_argument(
        "--seconds", type=float, default=600, help="of tests/ddp and tests/cli for each mutant"
    )

    def act(args: argparse.Namespace) -> bool:
        if args.slurm < 0 or args.seconds < 0:
            raise ToolError("--slurm and --seconds accept 0 and more")
        rooms = dict.fromkeys(args.room.split(","))
        draws = [Draw(room, args.seed, draw(room, args.seed, args.count)) for room in rooms]
        commit, store = current_commit(), Store(None if args.dirty else STORE)
        if not args.report:
            run(draws, store, commit, args)
        return report(draws, store, commit, args.slurm)

    return run_command(parser, act)


if __name__ == "__main__":
    sys.exit(main())
