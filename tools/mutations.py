"""Small changes to a program, as places in its text, and which of them a seed draws.

A mutation replaces one stretch of a file. The rest of the file stays as it is.
"""

from __future__ import annotations

import ast
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.store import REPO, ToolError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = "hpc_ddp"
TRAINING_CORE = ("checkpoint", "data", "process", "stops")  # its folders
ESSENTIAL = ("node", "slurm", "core", "training")
FLIPPED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
# The arguments of these calls, and of what is raised, are wording: a change there changes no more
# than what a person reads.
WORDING_CALLS = {"print", "warn", "say", "_say", "echo", "secho"}
# Kinds of places whose probe records an outcome of a condition, or the call of a function.
IS_TRUE, IS_FALSE, ENTERED = "is true", "is false", "is entered"


@dataclass(frozen=True)
class Mutation:
    """A change of one place. `start` and `end` count bytes of the file."""

    file: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    end: int
    is_statement: bool = False
    text: str = ""  # the source line, stripped: it names the place when line numbers have moved

    @property
    def change(self) -> str:
        """What changes, on one line."""
        return f"{_one_line(self.before)} -> {_one_line(self.after)}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.kind}  {self.change}"

    def apply(self, source: bytes) -> bytes:
        """Return the file's content with the change."""
        assert source[self.start : self.end] == self.before.encode(), f"{self} does not fit"
        return source[: self.start] + self.after.encode() + source[self.end :]


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)


# --- what can be mutated -------------------------------------------------------------------------


def mutations(source: str, file: str = "") -> list[Mutation]:
    """Return every mutation of a program, in the order of its text."""
    collector = _Collector(source, file)
    collector.visit(ast.parse(source))
    return collector.in_order()


class Places(ast.NodeVisitor):
    """Collects mutations of a program; subclasses visit the nodes that can be changed."""

    def __init__(self, source: str, file: str) -> None:
        self.mutations: list[Mutation] = []
        self._source = source.encode()
        self._file = file
        self._lines = source.splitlines()
        self._starts = [0]
        for line in self._source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._wording = 0

    def in_order(self) -> list[Mutation]:
        """Return the mutations in the order of the text, each once."""
        places = {(each.start, each.end, each.kind, each.after): each for each in self.mutations}
        return [places[key] for key in sorted(places)]

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, start: int, end: int) -> str:
        return self._source[start:end].decode()

    def add(self, node: ast.expr | ast.stmt, kind: str, after: str) -> None:
        if self._wording:
            return
        start, end = self.span(node)
        self.mutations.append(
            Mutation(
                file=self._file,
                line=node.lineno,
                kind=kind,
                before=self.text(start, end),
                after=after,
                start=start,
                end=end,
                is_statement=isinstance(node, ast.stmt),
                text=self._lines[node.lineno - 1].strip(),
            )
        )


class _Collector(Places):
    def _with_operators(self, operands: Sequence[ast.expr], operators: Sequence[str]) -> str:
        """Return the text from the first operand to the last, with other operators between."""
        spans = [self.span(operand) for operand in operands]
        text = self.text(*spans[0])
        for (_, end), (start, following), operator in zip(
            spans, spans[1:], operators, strict=False
        ):
            gap = self.text(end, start)
            word = re.search(r"\b(and|or|not\s+in|in|is\s+not|is)\b|[<>=!]=|[<>]", _no_comment(gap))
            assert word, gap
            gap = f"{gap[: word.start()]}{operator or word[0]}{gap[word.end() :]}"
            text += gap + self.text(start, following)
        return text

    # --- expressions ---

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = "or" if isinstance(node.op, ast.And) else "and"
        self._replace_operators(node, "and/or", node.values, [word] * (len(node.values) - 1))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for index, operator in enumerate(node.ops):
            operators = [""] * len(node.ops)
            operators[index] = FLIPPED[type(operator)]
            self._replace_operators(node, "compare", operands, operators)
        self.generic_visit(node)

    def _replace_operators(
        self, node: ast.expr, kind: str, operands: Sequence[ast.expr], operators: Sequence[str]
    ) -> None:
        start, end = self.span(node)
        # The node may begin before its first operand does, with a parenthesis around that.
        first, last = self.span(operands[0])[0], self.span(operands[-1])[1]
        text = self._with_operators(operands, operators)
        self.add(node, kind, self.text(start, first) + text + self.text(last, end))

    def visit_Constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, (bool, int, float)):
            return
        value = node.value
        if isinstance(value, bool):
            self.add(node, "constant", str(not value))
        else:
            self.add(node, "constant", repr(value + 1 if value + 1 != value else value * 2))

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._negate(condition)
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass  # before Python 3.12 what is inside has no place of its own

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        name = node.func.id if isinstance(node.func, ast.Name) else name
        self._wording += name in WORDING_CALLS
        self.generic_visit(node)
        self._wording -= name in WORDING_CALLS

    def _negate(self, condition: ast.expr) -> None:
        self.add(condition, "negate", f"not ({self.text(*self.span(condition))})")

    # --- statements ---

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and ast.unparse(node.value) != "None":
            self.add(node, "return", "return None")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, (ast.Call, ast.Await)):
            self.add(node, "drop", "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets):
            return
        if all(isinstance(target, ast.Attribute) for target in node.targets):
            self.add(node, "drop", "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Attribute):
            self.add(node, "drop", "pass")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add(node, "drop", "pass")
        self._wording += 1
        self.generic_visit(node)
        self._wording -= 1

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add(node, "drop", "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self.add(node, "drop", "pass")

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    # --- what is declared, not run ---

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Attribute) and node.value is not None:
            self.add(node, "drop", "pass")
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        pass

    def visit_match_case(self, node: ast.match_case) -> None:
        for child in (node.guard, *node.body):
            if child is not None:
                self.visit(child)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.visit(node.args)
        for child in node.body:
            self.visit(child)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for child in node.body:
            self.visit(child)


def _no_comment(gap: str) -> str:
    """Blank out comments, without moving what stands behind them."""
    return re.sub(r"#[^\n]*", lambda comment: " " * len(comment[0]), gap)


# --- drawing -------------------------------------------------------------------------------------


def files_of(room: str, repo: Path = REPO) -> list[str]:
    """Return the files of a room, sorted.

    Raises
    ------
    ToolError
        there is no such room; the message has those that there are
    """
    package = repo / PACKAGE
    folders = sorted(path.name for path in package.iterdir() if (path / "__init__.py").exists())
    if room == "essential":
        return sorted(file for part in ESSENTIAL for file in files_of(part, repo))
    if room == "training":
        cores = (package / "training" / name for name in TRAINING_CORE)
        paths: Iterable[Path] = (path for folder in cores for path in folder.rglob("*.py"))
    elif room == "slurm":
        paths = [package / "slurm.py", package / "slurm_text.py"]
    elif room in folders:
        paths = (package / room).rglob("*.py")
    else:
        rooms = ", ".join(dict.fromkeys(["essential", *ESSENTIAL, *folders]))
        raise ToolError(f"ROOM is {room!r}; accepted: {rooms}, or several with commas")
    return sorted(str(path.relative_to(repo)) for path in paths)


def draw(room: str, seed: int, count: int, repo: Path = REPO) -> list[Mutation]:
    """Return `count` mutations of a room, each of another line.

    Each line that can be mutated is as likely as any other, whatever its file. A larger count
    begins with the mutations of a smaller one.
    """
    sources = {file: (repo / file).read_text() for file in files_of(room, repo)}
    return draw_from(sources, random.Random(f"{room} {seed}"), count)


def draw_from(sources: Mapping[str, str], dice: random.Random, count: int) -> list[Mutation]:
    by_line: dict[tuple[str, int], list[Mutation]] = {}
    for file, source in sources.items():
        for mutation in mutations(source, file):
            by_line.setdefault((file, mutation.line), []).append(mutation)
    if not 1 <= count <= len(by_line):
        raise ToolError(f"N is {count}; accepted: 1 to {len(by_line)}, the lines to choose from")
    lines = list(by_line)
    dice.shuffle(lines)
    chosen = [dice.choice(by_line[line]) for line in lines]
    return chosen[:count]


# --- probes --------------------------------------------------------------------------------------

# Runs wherever the file does: in a worker, a fork, a Slurm job, an old Python. It appends the test
# that runs (pytest's variable, which subprocesses inherit; else the files that name the current
# ones) to the place's file, once in each process.
_PROBE = """\
def _mutant_probe(place, _seen=set()):
    try:
        import os
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        if not test:
            for name in os.listdir({folder!r}):
                if name.startswith("current"):
                    with open({folder!r} + "/" + name) as file:
                        test += file.read()
            test = test.strip() or "import"
        if (place, test) in _seen:
            return
        _seen.add((place, test))
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        number = os.open({folder!r} + "/" + str(place), flags, 0o666)
        try:
            os.write(number, (test + "\\n").encode("utf-8", "replace"))
        finally:
            os.close(number)
    except Exception:
        pass

def _outcome_probe(place, wanted, value):
    if bool(value) is wanted:
        _mutant_probe(place)
    return value
"""


def with_probes(source: str, places: Mapping[int, Mutation], folder: Path) -> str:
    """Return a file whose places each record the test that reaches them, in `folder`."""
    content = source.encode()
    edits: list[tuple[int, int, bytes]] = []  # offset, order among those of one offset, text
    for number, place in places.items():
        if place.is_statement:
            edits.append((place.start, -len(content), f"_mutant_probe({number}); ".encode()))
        else:
            # Where places nest, the longer one opens first and closes last.
            length = place.end - place.start
            before, after = f"(_mutant_probe({number}) or (", "))"
            if place.kind in (IS_TRUE, IS_FALSE):
                before, after = f"(_outcome_probe({number}, {place.kind == IS_TRUE}, (", ")))"
            edits.append((place.start, -length, before.encode()))
            edits.append((place.end, length - len(content), after.encode()))
    edits.append((_after_imports_of_the_future(source), -len(content) - 1, _probe_line(folder)))
    for offset, _, text in sorted(edits, key=lambda edit: edit[:2], reverse=True):
        content = content[:offset] + text + content[offset:]
    return content.decode()


def _probe_line(folder: Path) -> bytes:
    code = _PROBE.format(folder=str(folder))
    return f"exec({code!r}, globals())\n".encode()


def _after_imports_of_the_future(source: str) -> int:
    """Return the offset of the line at which statements may be put."""
    lines = source.encode().splitlines(keepends=True)
    last = 0
    for index, node in enumerate(ast.parse(source).body):
        is_docstring = (
            index == 0
            and isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        if is_docstring or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            last = node.end_lineno or 0
    if last == 0 and lines and lines[0].startswith(b"#!"):
        last = 1
    return sum(map(len, lines[:last]))


# --- mutations that change nothing ---------------------------------------------------------------


@dataclass(frozen=True)
class Equivalent:
    """A mutation that no test can tell from the original, by somebody's judgement."""

    file: str
    line: str  # the source line's text
    mutation: str  # before -> after
    reason: str

    def matches(self, mutation: Mutation) -> bool:
        return (self.file, self.line.strip(), self.mutation) == (
            mutation.file,
            mutation.text,
            mutation.change,
        )


def read_equivalent(path: Path) -> list[Equivalent]:
    """Read the list of equivalent mutations, which people keep."""
    if not path.exists():
        return []
    try:
        entries = tomllib.loads(path.read_text()).get("equivalent", [])
        return [Equivalent(**entry) for entry in entries]
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise ToolError(f"{path.name} can't be read: {error}") from None


def outdated(entries: Iterable[Equivalent], repo: Path = REPO) -> Iterator[Equivalent]:
    """Yield the entries whose line is in their file no more."""
    for entry in entries:
        path = repo / entry.file
        lines = path.read_text().splitlines() if path.exists() else []
        if entry.line.strip() not in (line.strip() for line in lines):
            yield entry


def reason_by_mutation(
    drawn: Iterable[Mutation], entries: Sequence[Equivalent]
) -> dict[Mutation, str]:
    """Return why a mutation changes nothing, for those that are in the list."""
    return {
        mutation: entry.reason for mutation in drawn for entry in entries if entry.matches(mutation)
    }
