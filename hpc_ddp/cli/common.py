"""What the commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from hpc_ddp.launch import config

Command = TypeVar("Command", bound=Callable[..., Any])


def say(text: str) -> None:
    """Print to stderr: stdout is data."""
    click.echo(text, err=True)


def root_of(settings: config.Settings) -> Path:
    """Return the folder of all runs."""
    return config.runs_dir(settings, os.environ)


def folder_of(option: str | None) -> Path:
    """Return the folder of all runs for a command that knows no other setting."""
    return config.runs_folder(option)


def folder_option(command: Command) -> Command:
    return click.option("--runs-dir", metavar="DIR", help="Where run folders are.")(command)


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)
