"""``make size``: how large the code is, room by room, and which words its names are made of.

``python -m tools.size [FOLDER …]`` prints a table. A line of code is neither blank, nor a comment,
nor part of a docstring; a binding is a parameter, or a name that an assignment, a loop, a
``with``, an ``except``, a walrus or a match pattern binds, once in each function.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

WORDS = (Path(__file__).parent / "vague_names.txt").read_text().split("\n\n")
# Pronouns and participles, which say that a value was found and not what it is; and the usual
# fillers: the one kind must not become the other.
RIDDLES, FILLERS = (frozenset(words.split()) for words in WORDS)
# Sentences that do not begin with their subject, or that name no process.
FREE_START = re.compile(
    r"(?:\A|[.:;]\s+|\n\s*\n)\s*(?:What|Who|Whoever|Whatever|Of|Nobody|Somebody)\b"
)
LONG_FUNCTION, LONG_FILE, LONGEST_FILE = 50, 300, 400

# The same counts of other packages without their tests: submitit at e49d5e7, httpx at ae1b9f66.
PEERS = (
    "submitit             19     2107     238      6   27   143     3        5",
    "httpx                23     5773     446      9   34   133    14       10",
)
HEAD = (
    "room              files     code   funcs median  p90  longest >50  >300  >400"
    " riddles fillers free"
)


@dataclass
class Size:
    """Counts of some files; `functions` has the number of lines of each function, `files` that of
    each file."""

    code: int = 0
    files: list[int] = field(default_factory=list)
    functions: list[int] = field(default_factory=list)
    riddles: int = 0
    fillers: int = 0
    free_starts: int = 0

    def add(self, path: Path) -> None:
        text = path.read_text()
        tree = ast.parse(text)
        docstrings = [*_docstrings(tree)]
        self.files.append(text.count("\n"))
        self.code += len(_code_lines(text) - _lines_of(docstrings))
        self.functions += [
            node.end_lineno - node.lineno + 1
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
        ]
        names = [name for _, name in bindings(tree)]
        self.riddles += sum(name in RIDDLES for name in names)
        self.fillers += sum(name in FILLERS for name in names)
        self.free_starts += sum(len(FREE_START.findall(str(doc.value))) for doc in docstrings)

    def row(self, room: str) -> str:
        lengths = sorted(self.functions) or [0]
        p90 = lengths[int(0.9 * (len(lengths) - 1))]
        return (
            f"{room:18}{len(self.files):5}{self.code:9}{len(self.functions):8}"
            f"{statistics.median(lengths):7.0f}{p90:5}{lengths[-1]:9}"
            f"{sum(length > LONG_FUNCTION for length in lengths):4}"
            f"{sum(lines > LONG_FILE for lines in self.files):6}"
            f"{sum(lines > LONGEST_FILE for lines in self.files):6}"
            f"{self.riddles:8}{self.fillers:8}{self.free_starts:5}"
        )


def measure(paths: Iterable[Path]) -> Size:
    """Return the counts of some files together."""
    size = Size()
    for path in sorted(paths):
        size.add(path)
    return size


def bindings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each name that is bound, once for each function or module."""
    for scope in ast.walk(tree):
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module):
            names: dict[str, int] = {}
            for name, line in _bound_in(scope):
                names.setdefault(name, line)
            yield from ((line, name) for name, line in names.items())


def _bound_in(scope: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names that one scope binds, with their lines; those of functions in it are left
    out."""
    if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        arguments = scope.args
        for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            yield arg.arg, arg.lineno
        yield from ((arg.arg, arg.lineno) for arg in (arguments.vararg, arguments.kwarg) if arg)
    stack = [*ast.iter_child_nodes(scope)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name, node.lineno
        stack += ast.iter_child_nodes(node)


def _docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            constant = first.value if isinstance(first, ast.Expr) else None
            if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                yield constant


def _lines_of(nodes: Iterable[ast.expr]) -> set[int]:
    return {n for node in nodes for n in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def _code_lines(text: str) -> set[int]:
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*skipped, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def main(folders: list[str]) -> int:
    """Print a row for each room of hpc_ddp and each folder, and the rows of two other packages."""
    print(HEAD)
    for name in folders or ["hpc_ddp", "jobs", "tools", "bench", "tests"]:
        folder = Path(name)
        rooms = sorted({path.parent for path in folder.rglob("*.py")} - {folder})
        tops = sorted({folder / room.relative_to(folder).parts[0] for room in rooms})
        if name == "hpc_ddp":
            for room in tops:
                print(measure(room.rglob("*.py")).row(f"  {room.name}"))
            for path in sorted(folder.glob("*.py")):
                print(measure([path]).row(f"  {path.name}"))
        print(measure(folder.rglob("*.py")).row(name))
    print("\n".join(PEERS))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
