"""Parts that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def say(text: str) -> None:
    """Print a text and an end of line to stderr: stdout is data."""
    click.echo(text, err=True)


def folder_option(command: Command) -> Command:
    """Add ``--runs-dir`` to a command, which gets it as `runs_dir`: a text, or None."""
    return click.option("--runs-dir", metavar="DIR", help="Where run folders are.")(command)


def json_option(command: Command) -> Command:
    """Add ``--json`` to a command, which gets it as `as_json`: True or False."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)
