"""Commands beside a run: attach, bundle, clean, completion.

Its commands let HpcDdpError and OSError through (UsageError where RUN means no run): `main.Group`
prints them and sets the exit code.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hpc_ddp.cli import completing
from hpc_ddp.cli.common import folder_option, json_option, output_error, say
from hpc_ddp.core.attempt_env import clean_env
from hpc_ddp.core.console.units import byte_count, parse_age
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.run_index import find_run
from hpc_ddp.report import bundle as report_bundle
from hpc_ddp.report import clean as report_clean
from hpc_ddp.slurm import own_cluster
from hpc_ddp.submission import attach_command
from hpc_ddp.submission.settings.runs_dir import run_of, runs_folder

OLD = "30d"


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option(
    "--older-than", metavar="AGE", help=f"Quiet for so long, as 12h, {OLD} (default), 4w."
)
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(report_clean.STATES),
    help="Only runs in this state; repeatable.",
)
@click.option(
    "--checkpoints-only", is_flag=True, help="Keep the runs, with the last good checkpoint."
)
@click.option("-n", "--dry-run", is_flag=True, help="Only list the deletions.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@folder_option
@json_option
def clean(
    runs: Sequence[str],
    older_than: str | None,
    states: Sequence[str],
    checkpoints_only: bool,
    dry_run: bool,
    yes: bool,
    runs_dir: str | None,
    as_json: bool,
) -> None:
    """Delete old runs, or the RUNs that are named, of any age; lists them and asks first.

    A finished run is deleted completely. An unfinished one loses the checkpoints before the last
    good one, but for those of keep_every; all that it needs to go on stays. Queued and live runs
    are never touched. With --json there is no question: it only lists, unless there is --yes.

    Exit code 1 where a deletion that was confirmed could not be made; the reason is printed.
    """
    # Without one of the settings it might be another folder, whose runs would be deleted.
    root = runs_folder(runs_dir, is_strict=True)
    named = list(dict.fromkeys(find_run(root, text, own_cluster) for text in runs))
    older_than_s = parse_age(older_than or (OLD if not runs else "0h"))
    deletions = report_clean.find_deletions(root, named, older_than_s, states, checkpoints_only)
    if not as_json and deletions:
        click.echo(report_clean.deletion_table(deletions))
    elif not deletions:
        say("nothing to clean")
    if deletions and not (yes or dry_run or as_json):
        is_confirmed = _ask_to_delete()
    else:  # without deletions, too: remains of an interrupted call may still be there
        is_confirmed = not dry_run and (yes or not (deletions or as_json))
    rows = [deletion.to_dict() | {"deleted": False} for deletion in deletions]
    if is_confirmed and root.is_dir():
        _delete(deletions, rows, root)
    if as_json:
        click.echo(json.dumps(rows))
    # Exit code 1 where a confirmed deletion was not made.
    sys.exit(is_confirmed and not all(row["deleted"] for row in rows))


def _delete(
    deletions: Sequence[report_clean.Deletion], rows: Sequence[dict[str, Any]], root: Path
) -> None:
    """Make the deletions below `root`, and set ``deleted`` in the row of each that is made. Print
    to stderr why others are not, and the bytes that are freed. Without deletions only the remains
    of an interrupted call are removed."""
    results = report_clean.delete_parts(deletions, root)
    # A strict `zip` asks for one result more than there are, by which the remains are removed.
    for row, (deletion, problem) in zip(rows, results, strict=True):
        row["deleted"] = not problem
        if problem:
            say(f"{deletion.run.id}: {problem}")
    if deletions:
        say(f"freed {byte_count(sum(row['bytes'] for row in rows if row['deleted']))}")


def _ask_to_delete() -> bool:
    """Ask the user on the terminal, and return True if the user wants to delete. Raise UsageError
    where stdin is no terminal."""
    if not sys.stdin.isatty():
        raise UsageError(
            "clean asks before it deletes, and stdin is no terminal",
            hint="hpc-ddp clean --yes, or --dry-run",
        )
    return click.confirm("Delete?", err=True)


@click.command()
@click.argument("run")
@click.argument("command", nargs=-1, metavar="[-- COMMAND...]")
@click.option("--node", metavar="NAME", help="Beside the first worker of this node.")
@click.option("--rank", type=click.IntRange(0), help="Beside this rank (default 0).")
@click.option("--py-spy", is_flag=True, help="Print where each thread of the worker stands.")
@folder_option
def attach(
    run: str,
    command: Sequence[str],
    node: str | None,
    rank: int | None,
    py_spy: bool,
    runs_dir: str | None,
) -> None:
    """Open a shell, or run COMMAND, beside a worker of RUN: on its node, with its environment.

    The shell or COMMAND shares the job's resources; the job goes on when it ends. Its exit code is
    this command's. --py-spy needs no py-spy where the script uses hpc_ddp.training.
    """
    if py_spy and command:
        raise UsageError(
            "--py-spy can't be combined with a command",
            hint=f"hpc-ddp attach {shlex.quote(run)} --py-spy",
        )
    words = ["stacks"] if py_spy else ["run", *(command or ("bash",))]
    terminal = not py_spy and sys.stdin.isatty() and sys.stdout.isatty()
    argv = attach_command.make_command(run_of(run, runs_dir), node, rank, words, terminal)
    # This process becomes the shell or srun: its exit code is the command's.
    os.execvpe(argv[0], argv, clean_env(os.environ))


@click.command()
@click.argument("run")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where to write it (default: hpc-ddp-ID.tar.gz, here).",
)
@folder_option
def bundle(run: str, output: Path | None, runs_dir: str | None) -> None:
    """Pack RUN's logs and settings into one archive for a support ticket, and print its path.

    Journals, the end of each log, job and script, versions, and Slurm's record of the job. Values
    of environment variables, and of names like a secret's, are replaced; checkpoints and code are
    left out. Look through it before you send it: a log may have printed anything.
    """
    folder = run_of(run, runs_dir)
    path = output or Path(f"hpc-ddp-{folder.id.replace('/', '-')}.tar.gz")
    try:
        entries, omissions = report_bundle.write_bundle(folder, path)
    except OSError as error:
        if not error.filename or Path(error.filename) != path:  # not of the archive
            raise
        raise output_error(path, error) from None
    for title, names in (("packed", entries), ("left out", omissions)):
        say("\n  ".join([f"{title}:", *names]))
    click.echo(path.absolute())


@click.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print the shell code with which the Tab key completes commands, options and runs.

    \b
    bash, in ~/.bashrc:   eval "$(hpc-ddp completion bash)"
    zsh, in ~/.zshrc:     eval "$(hpc-ddp completion zsh)"
    fish, once:           hpc-ddp completion fish > ~/.config/fish/completions/hpc-ddp.fish
    """
    click.echo(completing.script(shell))
