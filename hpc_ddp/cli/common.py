"""Parts that several commands share."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import click

from hpc_ddp.core.errors import HpcDdpError

Command = TypeVar("Command", bound=Callable[..., Any])


def say(text: str) -> None:
    """Print a text and an end of line to stderr: stdout is data. Where stderr takes nothing, as
    with 2>&-, the text is lost, and nothing is raised."""
    with suppress(OSError):
        click.echo(text, err=True)


def warn(texts: Iterable[str]) -> None:
    """Print each of the texts to stderr as a warning."""
    for text in texts:
        say(f"warning: {text}")


def output_error(path: Path, error: OSError) -> HpcDdpError:
    """Return the error for the file of ``-o``, `path`, that the disk refuses by `error`."""
    return HpcDdpError(f"can't write {path}: {error.strerror}", hint="-o FILE writes it elsewhere")


def note_kept(layer: Mapping[str, Any], args: Sequence[str], origin: str) -> None:
    """Note on stderr that a SCRIPT of the command line without ARGS keeps `args`, the arguments of
    a run or of the project file, as `origin` names it. `layer` has the settings of the command
    line. Nothing is printed without a SCRIPT, with ARGS, and if `args` is empty."""
    if args and "script" in layer and "args" not in layer:
        words = shlex.join(args)
        say(f"note: {layer['script']} has the arguments of {origin}: {words}; without: --, alone")


def echo_surely(text: str) -> None:
    """Print a text to stdout. Where stdout refuses it, as on a full disk or a closed pipe, print it
    to stderr with a warning, and send stdout to /dev/null from then on.

    Nothing is raised: the command has done its work, and must not look as if it had failed to a
    script, which would repeat it.
    """
    try:
        click.echo(text)
    except OSError as error:
        say(f"{text}\nwarning: stdout did not take this: {error.strerror}")
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())  # for what is left in Python's buffer
        os.close(sink)


def folder_option(command: Command) -> Command:
    """Add ``--runs-dir`` to a command, which gets it as `runs_dir`: a text, or None."""
    return click.option("--runs-dir", metavar="DIR", help="Where run folders are.")(command)


def json_option(command: Command) -> Command:
    """Add ``--json`` to a command, which gets it as `as_json`: True or False."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)
