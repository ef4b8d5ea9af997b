"""The command import: from a job script that exists to ``hpc-ddp.toml``.

Lets HpcDdpError and OSError through: `main.Group` prints them and sets the exit code.
"""

from __future__ import annotations

import codecs
import difflib
import os
import sys
from pathlib import Path
from typing import Any

import click

from hpc_ddp.cli.common import say
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_io import write_whole
from hpc_ddp.submission.job_script.conversion import LOST, Conversion
from hpc_ddp.submission.job_script.importer import import_script
from hpc_ddp.submission.job_script.output import format_table, subtract_site, to_comment, to_toml
from hpc_ddp.submission.plan import plan_new
from hpc_ddp.submission.run_files.snapshot import select_files
from hpc_ddp.submission.settings import config
from hpc_ddp.submission.settings.runs_dir import runs_root
from hpc_ddp.submission.settings.user import home_folder


@click.command("import")
@click.argument("job_script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where to write it (default: hpc-ddp.toml in the working directory).",
)
@click.option("--site", metavar="NAME", help="The site whose settings are left out.")
def import_(job_script: Path, args: tuple[str, ...], output: Path | None, site: str | None) -> None:
    """Write hpc-ddp.toml for JOB_SCRIPT, a script for sbatch, and its ARGS; it is not run.

    Beside each value is the line that it comes from. The command prints what becomes of each line:
    taken over, set by hpc-ddp itself, or not taken over, with what to do. A file that is there is
    left as it is, and the difference is shown. Call it where you call sbatch.

    The exit code is 1 where that difference is not empty, and where hpc-ddp refuses the job: then
    the file is written with the reason as its first line.
    """
    text = _read_job_script(job_script)
    cwd, home = Path.cwd(), home_folder()
    path = cwd / (output or config.PROJECT_FILE)
    conversion = import_script(text, cwd, path.parent, args, job_script.name, os.environ)
    of_site = config.load({"site": site} if site else {}, Path("/"), home)
    subtract_site(conversion, of_site.values)
    if site:
        conversion.values["site"] = site, 0
    conversion, effect = _drop_refused(conversion, path, cwd, home)
    click.echo("\n".join(format_table(conversion, text)))
    for line, note in sorted(conversion.notes):
        click.echo(f"note{f', line {line}' if line else ''}: {note}")
    written = to_toml(conversion, os.path.relpath(job_script, path.parent))
    if isinstance(effect, UsageError):
        refusal = f"does not render yet: {effect.message}"
        click.echo(f"{refusal}\nhint: {effect.hint}" if effect.hint else refusal)
        _write_project_file(path, f"{to_comment(refusal)}\n{written}")
        sys.exit(1)
    click.echo("\n".join(effect))
    _write_project_file(path, written, "; next: hpc-ddp render, hpc-ddp submit")


def _read_job_script(path: Path) -> str:
    """Return the text of a job script, in UTF-8 or Latin-1; a byte-order mark, and lines that end
    as on DOS, both of which sbatch refuses, are left out and noted on stderr. Raise UsageError for
    a file that can't be read, is no text, or has neither ``#!`` at its beginning nor ``#SBATCH``.
    """
    try:
        content, reason = path.read_bytes(), "it is no text"
    except OSError as error:
        content, reason = b"\0", str(error.strerror)  # refused below, as what is no text
    if b"\0" in content:
        raise UsageError(
            f"job script {str(path)!r} can't be read: {reason}", hint=f"ls {path.parent}"
        )
    try:
        text = content.decode("utf-8-sig")  # an editor's mark is no part of the first line
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    if content.startswith(codecs.BOM_UTF8):
        say("note, line 1: it begins with a byte-order mark: sbatch itself refuses the script")
    if "\r\n" in text:
        first = text.partition("\r\n")[0].count("\n") + 1
        say(f"note, line {first}: lines end as on DOS: sbatch itself refuses the script")
        text = text.replace("\r\n", "\n")
    if not text.startswith("#!") and "#SBATCH" not in text:
        raise UsageError(
            f"{path} is no job script: neither #! nor #SBATCH in it; accepted: one for sbatch",
            hint="hpc-ddp import job.sbatch",
        )
    return text


def _drop_refused(
    conversion: Conversion, path: Path, cwd: Path, home: Path
) -> tuple[Conversion, list[str] | UsageError]:
    """Return a conversion without the settings that hpc-ddp refuses, and what `_try_render` returns
    for its job; or, in place of that, the UsageError that stays whichever further setting is left
    out.

    One setting after the other is left out, as long as the message changes by it; ``script`` stays
    in any case. Lines of refused settings are marked LOST, in `conversion` too. Nothing is written.
    The other arguments are those of `_try_render`, whose OSError is raised.
    """

    def effect_of(trial: Conversion) -> list[str] | UsageError:
        """Return what `_try_render` returns, or the UsageError that it raises."""
        try:
            return _try_render(trial, path, cwd, home)
        except UsageError as error:
            return error

    effect = effect_of(conversion)
    while isinstance(effect, UsageError):
        for trial, name, line in conversion.leave_out_each():
            later = effect if name == "script" else effect_of(trial)
            if not isinstance(later, UsageError) or later.message != effect.message:
                trial.mark(line, line, LOST, f"{name}: {effect.message}")
                conversion, effect = trial, later
                break
        else:
            break
    return conversion, effect


def _try_render(conversion: Conversion, path: Path, cwd: Path, home: Path) -> list[str]:
    """Render the job that a conversion describes, as ``hpc-ddp render`` does but without a folder,
    and return sentences about it.

    `path` is the project file's, for messages: no other project file counts. `cwd` is the working
    directory of the job, `home` the folder of the user's site files. Variables of ``env-names``
    that this shell lacks are left out. Raise UsageError for a job that is refused, OSError where
    the program can't be read.
    """
    settings: dict[str, Any] = conversion.settings()
    names = settings.pop("env-names", [])
    settings["env-names"] = [name for name in names if name in os.environ]
    loaded = config.load(config.as_options(settings, str(path)), Path("/"), home)
    plan = plan_new(loaded, cwd, runs_root(loaded))
    lines = plan.rendering.text().splitlines()
    missing = ", ".join(name for name in names if name not in os.environ)
    start = f"renders once your shell has {missing}" if missing else "renders"
    effect = [f"{start}: {len(lines)} lines; hpc-ddp render prints them"]
    try:
        if plan.copies_code:
            select_files(plan.spec.program, plan.run, plan.exclude)
    except UsageError as error:  # not of the settings, which all stay
        effect = [f"renders once its code can be copied: {error.message}", f"hint: {error.hint}"]
    is_torchrun = plan.spec.launcher == "torchrun"  # its agent is torch's
    if plan.spec.python == sys.executable and (is_torchrun or not plan.spec.no_python):
        effect.append(f"python: {sys.executable}, which runs hpc-ddp; python = … is another")
    script = cwd / plan.spec.script
    is_program = script.suffix == ".py" and script.is_file() and not plan.spec.no_python
    if is_program and b"hpc_ddp" not in script.read_bytes():
        effect.append(
            f"{script.name} does not use hpc_ddp.training: after a preemption it starts over, or"
            " goes on by its own means; ten lines change that: docs/adopt/README.md"
        )
    return [*effect, *(f"warning: {warning}" for warning in plan.warnings())]


def _write_project_file(path: Path, text: str, next_step: str = "") -> None:
    """Write a project file that only its owner can change, and print to stderr that it is written,
    with `next_step` behind it.

    An existing file stays. If it differs, the difference is printed, and the command ends with exit
    code 1 (SystemExit). Raise UsageError where the file can't be written, or is a link to nothing,
    and OSError where it can't be read.
    """
    if os.path.lexists(path):  # a link to a file that is not there is another user's trap
        try:
            old = path.read_text(errors="replace")
        except FileNotFoundError:
            raise UsageError(
                f"{path} is a link to a file that is not there", hint="--output FILE"
            ) from None
        if old == text:
            say(f"{path} is the same already")
            return
        diff = difflib.unified_diff(
            old.splitlines(), text.splitlines(), str(path), "from the script", lineterm=""
        )
        click.echo("\n".join(diff))
        say(f"{path} is there, and was left as it is; --output FILE writes another")
        sys.exit(1)
    try:
        write_whole(path, text, mode=0o644)  # what others can write is not used
    except OSError as error:
        raise UsageError(
            f"{path} can't be written: {error.strerror}", hint="--output FILE"
        ) from None
    say(f"wrote {path}{next_step}")
