"""The branches of device code: each condition on a device, a backend or a precision, and which of
its two outcomes some test has seen, on the stand-in accelerator or on the CPU.

`make device-faults ALL=1` records them while it looks for the tests that reach its faults.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tools.mutants import Draw, Map
from tools.mutations import (
    ENTERED,
    IS_FALSE,
    IS_TRUE,
    Mutation,
    Places,
    read_equivalent,
    reason_by_mutation,
)
from tools.store import REPO

ROOM = "branches"
PACKAGE = REPO / "hpc_ddp"
FILES = (
    *sorted((PACKAGE / "training").rglob("*.py")),
    *(PACKAGE / "core" / "accelerators.py", PACKAGE / "node/preflight/bandwidth.py"),
)
# Modules that are about devices and numbers alone: all their conditions and functions count.
WHOLE = {"devices", "accelerators", "meta", "norms", "precision", "sharded"}
# What a condition of any other module has in it that is about them.
WORDS = re.compile(
    r"device|accelerator|backend|dtype|precision|scaler|is_meta|floating|is_sharded|offload"
    r"|on_gpu|is_partial|pin_memory|is_quantized"
)


def branches(source: str, file: str = "", *, whole: bool = False) -> list[Mutation]:
    """Return two places for each condition, one for each of its outcomes, and one place for each
    function. Each is a mutation that changes nothing for the tests if the outcome never occurs."""
    collector = _Branches(source, file, whole)
    collector.visit(ast.parse(source))
    return collector.in_order()


class _Branches(Places):
    def __init__(self, source: str, file: str, whole: bool) -> None:
        super().__init__(source, file)
        self._whole = whole

    def _add_condition(self, condition: ast.expr) -> None:
        if isinstance(condition, ast.BoolOp):
            for value in condition.values:
                self._add_condition(value)
        elif self._whole or WORDS.search(ast.unparse(condition)):
            self.add(condition, IS_TRUE, "False")
            self.add(condition, IS_FALSE, "True")

    def visit_If(self, node: ast.If | ast.IfExp | ast.While) -> None:
        if not ast.unparse(node.test).endswith("TYPE_CHECKING"):
            self._add_condition(node.test)
        self.generic_visit(node)

    visit_IfExp = visit_While = visit_If

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._add_condition(condition)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for value in node.values[:-1]:  # the last one's truth may not be asked for
            self._add_condition(value)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if isinstance(node.value, ast.Compare):
            self._add_condition(node.value)
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass  # before Python 3.12 what is inside has no place of its own

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        expression = next(_expressions(node.body), None)
        if self._whole and expression is not None:
            self.add(expression, ENTERED, f"{node.name}() is never called")
        for child in node.body:
            self.visit(child)


def _expressions(body: Iterable[ast.stmt]) -> Iterator[ast.expr]:
    """Yield, in their order, the first expression of each statement of a body; a docstring is left
    out."""
    for index, statement in enumerate(body):
        is_docstring = index == 0 and isinstance(statement, ast.Expr)
        if is_docstring and isinstance(statement.value, ast.Constant):  # type: ignore[attr-defined]
            continue
        if isinstance(statement, ast.Try):
            yield from _expressions(statement.body)
        elif isinstance(statement, ast.With):
            yield statement.items[0].context_expr
        else:
            for name in ("test", "iter", "value", "exc"):
                if isinstance(expression := getattr(statement, name, None), ast.expr):
                    yield expression
                    break


def all_branches(files: Sequence[Path] = FILES) -> list[Mutation]:
    return [
        place
        for path in files
        for place in branches(
            path.read_text(), str(path.relative_to(REPO)), whole=path.stem in WHOLE
        )
    ]


def report(draw: Draw, maps: Sequence[Map], equivalent: Path, write: Callable[[str], None]) -> bool:
    """Print the outcomes that no test of the `maps` has seen; return whether each has a reason in
    the file `equivalent`, and all tests have been run."""
    reasons = reason_by_mutation(draw.mutations, read_equivalent(equivalent))
    is_whole = all(reached.is_complete() for reached in maps)
    open_places, explained = [], []
    for index, place in enumerate(draw.mutations):
        if any(reach.tests or reach.at_import for reach in (m.reach(draw, index) for m in maps)):
            continue
        text = f"{place.file}:{place.line}  {place.kind}: {place.before}"
        if place in reasons:
            explained.append(f"never seen  {text}\n    {reasons[place]}")
        else:
            open_places.append(f"never seen  {text}")
    total = len(draw.mutations)
    seen = total - len(open_places) - len(explained)
    write(
        f"branches of device code: {seen} of {total} outcomes seen,"
        f" {len(explained)} with a reason, {len(open_places)} without one"
        + ("" if is_whole else " (the tests have not all been run)")
    )
    for line in (*open_places, *explained):
        write(line)
    return is_whole and not open_places
