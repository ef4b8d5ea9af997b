"""The options of a job on the command line, made from their declarations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from hpc_ddp.cli.common import json_option
from hpc_ddp.core.job.option_declaration import (
    AMOUNT,
    COMMON,
    CONTINUATION,
    FLAG,
    GROUPS,
    LIST,
    NUMBER,
    TABLE,
    Option,
)
from hpc_ddp.core.job.slurm_options import move_to_own_keys
from hpc_ddp.submission.settings import config

Command = Callable[..., Any]
OTHERS = "Others"
_GROUP_OF = {
    "run-text": COMMON,
    "fresh": CONTINUATION,
    "new-code": CONTINUATION,
    "force": CONTINUATION,
}

# The options that describe the nodes of a job.
_OF_NODES = (
    "gpus-per-node",
    "site",
    "fabric",
    "interface",
    "setup",
    "container",
    "image",
    "python",
    "env",
    "runs-dir",
)
_ON_BY_DEFAULT = ("snapshot", "warm-start")  # an option switches them off
_RUN = click.option(
    "--run", "run_text", metavar="RUN", help="Continue a run: folder, id, name or job id."
)


class Grouped(click.Command):
    """A command of many options, which its help shows under the headings of their groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options into the help, under the headings of their groups."""
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in (*GROUPS, OTHERS)}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record and isinstance(param, click.Option):
                rows[group_of(param)].append(record)
        for heading, records in rows.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def group_of(param: click.Parameter) -> str:
    """Return the heading of a parameter in the help: that of its setting, else the one in
    `_GROUP_OF`, else `OTHERS`."""
    key = (param.name or "").replace("_", "-").removeprefix("no-")
    declared = config.OPTIONS.get(key)
    return declared.group if declared else _GROUP_OF.get(key, OTHERS)


def _click_option(key: str, declared: Option) -> Command:
    """Return the decorator that adds the option of a setting, `key`, to a command. For a setting
    that is on by default the option is ``--no-KEY``, which switches it off."""
    flags = [f"-{declared.letter}"] if declared.letter else []
    metavar = declared.metavar or "|".join(declared.accepted) or None
    if key in _ON_BY_DEFAULT:
        return click.option(f"--no-{key}", is_flag=True, help=declared.help)
    if declared.kind is FLAG:
        return click.option(*flags, f"--{key}", is_flag=True, default=None, help=declared.help)
    return click.option(
        *flags,
        f"--{key}",
        type={NUMBER: int, AMOUNT: float}.get(declared.kind),
        multiple=declared.kind in (LIST, TABLE),
        metavar=metavar,
        help=declared.help,
    )


def _add_options(command: Command, keys: list[str], *more: Command) -> Command:
    """Add the options of some keys to a command, then the options of the decorators `more`, and
    return the command."""
    # The decorator that is called last adds the first option of the help.
    for decorator in reversed(more):
        command = decorator(command)
    for key in reversed(keys):
        command = _click_option(key, config.OPTIONS[key])(command)
    return command


_KEYS = [key for key, declared in config.OPTIONS.items() if not declared.is_file_only]


def job_options(command: Command) -> Command:
    """Add the options of a job, ``--run``, ``--json``, SCRIPT and ARGS to a command, and return
    it."""
    return _add_options(_add_script(command), _KEYS, _RUN, json_option)


def local_options(command: Command) -> Command:
    """Add the options that mean something for processes on this machine, ``--json``, SCRIPT and
    ARGS to a command, and return it."""
    keys = [key for key in _KEYS if config.OPTIONS[key].is_local]
    return _add_options(_add_script(command), keys, json_option)


def rerun_options(command: Command) -> Command:
    """Add the options of a job that has its script, its arguments and its site already, and
    ``--json``, to a command, and return it."""
    return _add_options(command, [key for key in _KEYS if key != "site"], json_option)


def node_options(command: Command) -> Command:
    """Add the options that describe the nodes of a job, and ``--json``, to a command, and return
    it."""
    return _add_options(command, [key for key in _KEYS if key in _OF_NODES], json_option)


def _add_script(command: Command) -> Command:
    """Add the arguments SCRIPT, which may be left out, and ARGS to a command, and return it."""
    command = click.argument("args", nargs=-1, type=click.UNPROCESSED)(command)
    return click.argument("script", required=False)(command)


def settings_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings on the command line, under the keys of a project file.

    `options` are click's parameters by name, ``args`` among them if ``script`` is. An option that
    was not given is left out; ARGS count only behind a SCRIPT, and ``--`` alone stands for no ARGS.
    ``--env NAME=VALUE`` goes into ``env``, and ``--env NAME`` into ``env-names``. ``--no-snapshot``
    becomes ``snapshot``: False, and so do the others of `_ON_BY_DEFAULT`. Raw options of sbatch
    that have their own key get this key (`move_to_own_keys`).
    """
    settings: dict[str, Any] = {}
    for name, value in options.items():
        if value is None or value is False or value == ():
            continue
        settings[name.replace("_", "-")] = list(value) if isinstance(value, tuple) else value
    pairs = [text.partition("=") for text in settings.pop("env", ())]
    written = {name: value for name, equals, value in pairs if equals}
    passed_on = [name for name, equals, _ in pairs if not equals]
    if written:
        settings["env"] = written
    if passed_on:
        settings["env-names"] = passed_on
    for key in _ON_BY_DEFAULT:
        if settings.pop(f"no-{key}", False):
            settings[key] = False
    if not settings.get("script"):
        settings.pop("script", None)
        settings.pop("args", None)
    if settings.get("args") == ["--"]:
        settings["args"] = []
    return move_to_own_keys(settings)
