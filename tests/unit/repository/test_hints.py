"""Commands in hints: a user pastes them into a shell."""

import ast
import re
from itertools import pairwise
from pathlib import Path

import click

import hpc_ddp
from hpc_ddp.cli.main import main

_QUOTED = re.compile(r"quote|shlex\.join")
_NAMES = "|".join(main.list_commands(click.Context(main)))
_COMMAND = re.compile(rf"hpc-ddp ({_NAMES})( -{{0,2}}[a-z][a-z-]*)* $")  # the text before a value


def _unquoted_words(path: Path) -> list[str]:
    """Return `file: expression` for each value behind ``hpc-ddp COMMAND`` in an f-string that no
    call or property quotes for a shell."""
    words = []
    for node in ast.walk(ast.parse(path.read_text())):
        parts = node.values if isinstance(node, ast.JoinedStr) else []
        for before, part in pairwise(parts):
            is_word = isinstance(before, ast.Constant) and _COMMAND.search(str(before.value))
            if is_word and not _QUOTED.search(expression := ast.unparse(part)):
                words.append(f"{path.name}: {expression}")
    return words


def test_values_in_commands_are_quoted() -> None:
    package = Path(hpc_ddp.__file__).parent
    words = [word for path in sorted(package.rglob("*.py")) for word in _unquoted_words(path)]
    assert words == []
