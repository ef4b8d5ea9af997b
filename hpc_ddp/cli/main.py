"""``hpc-ddp``: one command for what happens before a job, and one for all that comes after.

stdout is data, everything else goes to stderr. Exit codes: 2 for usage, 1 for failure, 75 when
a dry run was stopped and can go on; a command in the foreground ends with the code of its process.
"""

from __future__ import annotations

import gc
import importlib
import io
import keyword
import os
import sys
from typing import Any

import click

from hpc_ddp import __version__
from hpc_ddp.core.errors import HpcDdpError, closest

# The module of each command, in the order of the help. Imported when it is asked for: a start of
# Python is most of the time that a command takes.
COMMANDS = {
    **dict.fromkeys(
        ("submit", "sweep", "render", "dry-run", "drill", "preflight", "rerun"), "jobs"
    ),
    "import": "import_job",
    **dict.fromkeys(("status", "explain", "logs", "verify", "cancel", "report"), "runs"),
    **dict.fromkeys(("attach", "bundle", "clean", "completion"), "utilities"),
    **dict.fromkeys(("site", "trust"), "site"),
}

# Python looks for garbage after so many new objects. A journal's events are a million, none of them
# garbage, and a look through them again and again takes a quarter of the time to read them.
COLLECT_EVERY_OBJECTS = 200_000


class Group(click.Group):
    """Prints hpc-ddp's errors as one line and a hint, never as a traceback."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command line; a character that the locale has not is printed as ``?``."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
                stream.reconfigure(errors="replace")
        return super().main(*args, **options)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import and return a command. Raise click's UsageError for an unknown name, with the
        nearest one. While a shell asks for completions, the command is changed to give them
        (`teach_completion`)."""
        if name not in COMMANDS:
            ctx.fail(f"no command {name!r}{closest(name, COMMANDS)}; `hpc-ddp --help` lists them")
        module = importlib.import_module(f"hpc_ddp.cli.{COMMANDS[name]}")
        attribute = name.replace("-", "_") + "_" * keyword.iskeyword(name)  # as import_
        command: click.Command = getattr(module, attribute)
        if "_HPC_DDP_COMPLETE" in os.environ:  # a shell asks what the Tab key is to offer
            from hpc_ddp.cli.completing import teach_completion

            teach_completion(command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command and return its result. An HpcDdpError or OSError is printed to stderr, and
        ends the process with the error's exit code, 1 for an OSError.

        A broken pipe and click's own UsageError are raised. The UsageError for an unknown option
        before SCRIPT gets a sentence more: where a script's options go.
        """
        try:
            return super().invoke(ctx)
        except HpcDdpError as error:
            click.echo(f"error: {error.message}", err=True)
            if error.hint:
                click.echo(f"hint: {error.hint}", err=True)
            ctx.exit(error.exit_code)
        except click.NoSuchOption as error:
            if error.ctx is None or error.ctx.allow_interspersed_args:
                raise
            if isinstance(error.ctx.command, click.Group):  # which has no script
                raise
            text = f"{error.format_message()} Options of your script go after SCRIPT."
            raise click.UsageError(text, error.ctx) from None
        except OSError as error:  # a folder that went away, a name that is too long
            if isinstance(error, BrokenPipeError):
                raise  # click ends quietly
            try:
                os.getcwd()
            except FileNotFoundError:
                text = "the folder of this shell is gone\nhint: cd to one that exists"
                click.echo(f"error: {text}", err=True)
            else:
                click.echo(f"error: {error}", err=True)
            ctx.exit(1)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hpc-ddp")
def main() -> None:
    """Take a PyTorch script to a Slurm cluster and keep it going there."""
    for name in ("stdout", "stderr"):  # None where a shell has closed it: 2>&-
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for as long as it runs
    gc.set_threshold(COLLECT_EVERY_OBJECTS)
