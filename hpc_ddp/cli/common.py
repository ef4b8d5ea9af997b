"""Parts that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submit.settings import config

Command = TypeVar("Command", bound=Callable[..., Any])


def say(text: str) -> None:
    """Print to stderr: stdout is data."""
    click.echo(text, err=True)


def root_of(settings: config.Settings) -> Path:
    """Return the folder of all runs."""
    return config.runs_dir(settings, os.environ)


def folder_of(option: str | None, is_strict: bool = False) -> Path:
    """Return the folder of all runs for a command that knows no other setting."""
    return config.runs_folder(option, is_strict)


def run_of(text: str, option: str | None) -> RunFolder:
    """Return the run that a person means; a path needs no settings."""
    return config.run_of(text, option)


def folder_option(command: Command) -> Command:
    return click.option("--runs-dir", metavar="DIR", help="Where run folders are.")(command)


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)
