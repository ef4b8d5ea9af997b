"""``docs/reference.md``: all settings of a job, all commands, the options of ``start()``, variables
and events, from their declarations.

``python -m tools.reference`` writes the page; ``tests/unit/repository/test_reference.py`` compares
it with the declarations.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path

import click

from hpc_ddp.cli.main import main as commands
from hpc_ddp.core.job.option_declaration import GROUPS, TABLE, Option
from hpc_ddp.core.job.variables import OF_USERS
from hpc_ddp.core.journal.events import EVENTS
from hpc_ddp.submission.settings.config import OPTIONS

REPO = Path(__file__).parent.parent
PAGE = REPO / "docs" / "reference.md"
OPTIONS_OF_START = REPO / "hpc_ddp" / "training" / "options.py"
HEAD = """# Reference

Written by `python -m tools.reference` from the declarations in the code.

## Settings of a job
Options of `submit`, `render`, `sweep` and `dry-run`, and keys of `hpc-ddp.toml` and of site files.
`drill`, `preflight` and `rerun` take those that mean something there.
"""

ON_BY_DEFAULT = ("snapshot", "warm-start")  # an option switches them off


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD, *_settings(), "\n## Commands\n", *_commands(commands, "hpc-ddp")]
    return "".join([*parts, *_options_of_start(), *_variables(), *_events()])


def _settings() -> Iterator[str]:
    for group in GROUPS:
        yield f"\n### {group}\n| option | key in a file | meaning |\n|---|---|---|\n"
        for key, declared in OPTIONS.items():
            if declared.group == group:
                is_off = key in ON_BY_DEFAULT
                kind = "false (default: true)" if is_off else declared.kind.text
                yield f"| {_flags(key, declared)} | `{key}`: {kind} | {declared.help} |\n"


def _options_of_start() -> Iterator[str]:
    """Yield the table of the fields of `Options`, each with the first sentence that its docstring
    has on it. The file is parsed, not imported: that would import torch."""
    yield "\n## Options of start()\n"
    yield "Parameters of `hpc_ddp.training.start`; `hpc_ddp/training/options.py` has the full\n"
    yield "text.\n\n"
    yield "| option | default | meaning |\n|---|---|---|\n"
    body = ast.parse(OPTIONS_OF_START.read_text()).body
    declared = next(node for node in body if isinstance(node, ast.ClassDef))
    text = (ast.get_docstring(declared) or "").partition("----------\n")[2]
    descriptions = dict(re.findall(r"^(\w+)\n((?: +.+\n?)+)", text, re.MULTILINE))
    for node in declared.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            name = node.target.id
            description = " ".join(descriptions[name].split()).replace("``", "`")
            sentence = re.split(r"\. (?=[A-Z])", description)[0]
            yield f"| `{name}` | `{ast.unparse(node.value)}` | {sentence} |\n"


def _variables() -> Iterator[str]:
    yield "\n## Environment variables\n"
    yield "Set them in your shell. Those in place of a script's option go into a job by\n"
    yield "`--env NAME=VALUE`, as `HPC_DDP_TRACKERS=off` does ([trackers](trackers.md)).\n\n"
    yield "| variable | value | effect |\n|---|---|---|\n"
    for name, variable in OF_USERS.items():
        yield f"| `{name}` | {variable.accepted} | {variable.effect} |\n"


def _events() -> Iterator[str]:
    yield "\n## Events of the journal\n"
    yield "Each has `time` (unix seconds), `event` and `attempt` as well; fields in brackets are "
    yield "optional.\n\n"
    yield "| event | written by | fields | meaning |\n|---|---|---|---|\n"
    for kind in EVENTS:
        names = [
            f"`{item.name}`" if item.default is MISSING else f"[`{item.name}`]"
            for item in kind.own_fields()
        ]
        meaning = " ".join((kind.__doc__ or "").split())
        yield f"| `{kind.event}` | {kind.writer} | {', '.join(names)} | {meaning} |\n"


def _flags(key: str, declared: Option) -> str:
    if declared.is_file_only:
        return "–"
    if key in ON_BY_DEFAULT:
        return f"`--no-{key}`"
    accepted = " ".join(f"`{name}`" for name in declared.accepted)
    short = f"`-{declared.letter}`, " if declared.letter else ""
    repeated = " (repeatable)" if declared.kind.is_list or declared.kind is TABLE else ""
    return f"{short}`--{key}`{repeated}{': ' if accepted else ''}{accepted}"


def _commands(group: click.Group, name: str) -> Iterator[str]:
    for word in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), word)
        assert command
        if isinstance(command, click.Group):
            yield from _commands(command, f"{name} {word}")
            continue
        context = click.Context(command, info_name=f"{name} {word}")
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        yield f"\n### {name} {word}\n```\n{usage}\n```\n{_paragraphs(command.help or '')}\n"
        rows = [*_own_options(command, context)]
        if rows:
            yield "\n| option | meaning |\n|---|---|\n" + "".join(rows)


def _own_options(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield a row for each option that is no setting of a job."""
    for param in command.params:
        key = (param.name or "").replace("_", "-").removeprefix("no-")
        record = param.get_help_record(context)
        if record and isinstance(param, click.Option) and key not in OPTIONS:
            flags, meaning = record
            yield f"| `{flags.replace('|', chr(92) + '|')}` | {meaning} |\n"


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(block.split()) for block in text.split("\n\n"))


if __name__ == "__main__":
    PAGE.write_text(page())
