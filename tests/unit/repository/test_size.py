"""The counts of `make size`, and their ceilings: lower one when the code gets below it; and where a
condition has to stand."""

from __future__ import annotations

import ast
from pathlib import Path

from tools.size import LONGEST_FILE, bindings, measure

REPO = Path(__file__).parents[3]
RIDDLES = 0  # names such as found, each, told: `tools/vague_names.txt`
FILLERS = 98  # data, value, item …
# Files of which a loop still has its condition in its iterable.


def test_names_say_what_a_value_is_and_files_can_be_looked_through() -> None:
    size = measure((REPO / "hpc_ddp").rglob("*.py"))
    assert size.riddles <= RIDDLES
    assert size.fillers <= FILLERS
    assert size.free_starts == 0
    assert max(size.files) <= LONGEST_FILE


def test_folders_can_be_looked_through() -> None:
    for folder in (REPO / "hpc_ddp").rglob("*/"):
        entries = [path.name for path in folder.iterdir() if path.name != "__pycache__"]
        assert folder.name == "__pycache__" or len(entries) <= 13, folder


def test_a_condition_stands_before_its_loop() -> None:
    """``if c: for x in Y``, and not ``for x in Y if c else ()``, which reads as a filter."""
    for path in (REPO / "hpc_ddp").rglob("*.py"):
        loops = (n for n in ast.walk(ast.parse(path.read_text())) if hasattr(n, "iter"))
        assert not any(isinstance(loop.iter, ast.IfExp) for loop in loops), path


def test_code_names_and_docstrings_are_counted(tmp_path: Path) -> None:
    source = tmp_path / "a.py"
    source.write_text(
        '"""Of a module.\n\nTwo lines."""\n\nfound = 1  # one\n\n\ndef f(told, *, x):\n'
        '    """Return it."""\n    for each in told:\n        found, found = each, x\n'
        "    return lambda said: said\n"
    )
    size = measure([source])
    assert (size.code, size.files, size.functions) == (5, [12], [5])
    assert (size.riddles, size.fillers, size.free_starts) == (5, 1, 1)
    names = sorted(name for _, name in bindings(ast.parse(source.read_text())))
    assert names == ["each", "found", "found", "said", "told", "x"]
