"""Commands before and at the start of a job: submit, sweep, render, dry-run, drill and others.

Its commands let HpcDdpError and OSError through: `main.Group` prints them and sets the exit code.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from hpc_ddp.cli.click_options import (
    Grouped,
    job_options,
    local_options,
    node_options,
    rerun_options,
    settings_of,
)
from hpc_ddp.cli.common import echo_surely, note_kept, say, warn
from hpc_ddp.core.errors import CAN_GO_ON, UsageError
from hpc_ddp.core.job import sweep as launch_sweep
from hpc_ddp.core.run_index import find_run
from hpc_ddp.report import tables
from hpc_ddp.report.status.run_table import local_trials_text
from hpc_ddp.slurm import own_cluster
from hpc_ddp.submission import backends
from hpc_ddp.submission import preflight as launch_preflight
from hpc_ddp.submission.drill.drill import drill as run_drill
from hpc_ddp.submission.plan import Plan, PreparedRun, plan_new
from hpc_ddp.submission.restart import plan_continuation, plan_rerun, set_aside
from hpc_ddp.submission.run_files.earlier import remove_note
from hpc_ddp.submission.run_files.snapshot import find_changed_files
from hpc_ddp.submission.settings import config, origin
from hpc_ddp.submission.settings.runs_dir import runs_root
from hpc_ddp.submission.settings.user import home_folder


class SignalForwarder:
    """Passes Ctrl-C and SIGTERM on to the process of a run, as a notice (SIGTERM)."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None  # once `wait` has it
        self._has_come = self._is_passed_on = False  # True once one of the signals has

    def install(self) -> SignalForwarder:
        """Handle both signals from now on, so that they no longer end this process, and return this
        object. A signal that comes before `wait` is passed on by `wait`."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._pass_on)
        return self

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._has_come, self._is_passed_on = True, self._process is not None
        if self._process:
            self._process.terminate()

    def wait(self, started: backends.StartedRun) -> int:
        """Wait for the process that a run has; return its exit code, 128 + n after signal n."""
        assert started.process is not None
        self._process = started.process
        if self._has_come and not self._is_passed_on:
            self._process.terminate()
        code = self._process.wait()
        return code if code >= 0 else 128 - code


PASS_ON = {"allow_interspersed_args": False}  # what stands behind SCRIPT is the script's

_fresh = click.option(
    "--fresh", is_flag=True, help="With --run: begin at step 0; the old checkpoints are kept."
)
_new_code = click.option(
    "--new-code", is_flag=True, help="With --run: the code as it is now, not the run's own copy."
)
_force = click.option(
    "--force",
    is_flag=True,
    help="With --run: a job of it that can't be asked for, or does not end, is over for good.",
)


def _write_run(
    options: dict[str, Any],
    fresh: bool = False,
    force: bool = False,
    new_code: bool = False,
    **forced: Any,
) -> PreparedRun:
    """Write the folder of the run that the command line's `options` describe, and return the run.

    `forced` settings, by key, win over `options`. With `fresh` the run is to begin at step 0; with
    `force` its jobs that can't be asked for count as over; with `new_code` its code is copied anew.
    An existing run is claimed: no other process can start it before `_start_run` has, or this one
    ends. ``run_text`` is removed from `options`. It prints to stderr as `_make_plan` does.

    Raises
    ------
    UsageError
        a setting is refused, the run can't go on or be written, or an option needs ``--run``
    OSError
        the run's folder, or the script, can't be read
    """
    for name, is_set in (("--fresh", fresh), ("--new-code", new_code), ("--force", force)):
        if is_set and options["run_text"] is None:
            raise UsageError(
                f"{name} needs --run RUN: a new run has no checkpoints, code or jobs of its own",
                hint=f"hpc-ddp submit --run RUN {name}",
            )
    plan, _ = _make_plan(options, new_code, **forced)
    return replace(plan, is_forced=force, is_fresh=fresh).write()


def _start_run(prepared: PreparedRun, fresh: bool) -> backends.StartedRun:
    """Start a run, and return the job or process. With `fresh` its checkpoints are set aside
    before, so that the run begins at step 0, and a line on stderr tells where they are kept.

    Raises
    ------
    HpcDdpError, OSError
        as `backends.start`
    UsageError
        the disk refuses to set checkpoints aside; the run is discarded then
    """
    try:  # before, since a job may start at once
        folders = set_aside(prepared) if fresh else []
    except UsageError:
        prepared.discard()
        raise
    started = backends.start(prepared)
    for folder in folders:
        say(f"its checkpoints are kept in {folder}")
    return started


def _note_misplaced(script: str | None, args: Sequence[str]) -> None:
    """Note on stderr each option of the running command that stands among the `args` behind
    `script`, and so goes to the script."""
    names = {n for p in click.get_current_context().command.params for n in p.opts if n[:2] == "--"}
    for word in args:
        name = word.partition("=")[0]
        if name in names:
            say(f"note: {name} stands behind {script}, so it goes to the script")


def _make_plan(
    options: dict[str, Any], new_code: bool = False, **forced: Any
) -> tuple[Plan, config.Settings]:
    """Return the plan of a job, of a new run or of ``--run``, and its merged settings. No run is
    made, and that of ``--run`` stays as it is, but for a start of it that was broken off: this is
    undone first (`plan_continuation`).

    ``run_text`` is removed from `options`; `new_code` and `forced` are as in `_write_run`. It
    prints to stderr which project file and site count, misplaced options, kept arguments, changed
    files of the code, an undone start, and warnings. Raise UsageError for a refused setting, and
    for a ``--run`` that is none, or can't go on; OSError where it, or the script, can't be read.
    """
    _note_misplaced(options.get("script"), options.get("args", ()))
    run_text = options.pop("run_text")
    layer = settings_of(options) | forced
    cwd = Path.cwd()
    settings = config.load(layer, cwd, home_folder())
    project = config.find_project_file(cwd)
    if project and project.parent != cwd:
        say(f"settings: {project}")
    if settings.recognised:
        say(f"site: {settings.recognised}")
    if run_text is None:
        plan = plan_new(settings, cwd, runs_root(settings))
    else:
        run = find_run(runs_root(settings), run_text, own_cluster)
        plan = plan_continuation(run, layer, settings, cwd, new_code)
        _note_changes(plan)
    note_kept(layer, plan.spec.args, "the run" if run_text else config.PROJECT_FILE)
    warn(plan.warnings())
    return plan, settings


def _note_changes(plan: Plan) -> None:
    """Note on stderr the first Python files that changed since a run copied its code, if it keeps
    the copy."""
    if plan.copies_code or not plan.code.is_relative_to(plan.run.whole):
        return
    inside = plan.script.relative_to(plan.code)
    if changed := find_changed_files(plan.code, inside, plan.spec.program):
        names = ", ".join(changed[:3]) + (", …" if changed[3:] else "")
        say(
            f"note: the run goes on with its own copy of the code; changed since: {names};"
            " --new-code takes it as it is now"
        )


@click.command(cls=Grouped, context_settings=PASS_ON)
@_fresh
@_new_code
@_force
@job_options
def submit(as_json: bool, fresh: bool, new_code: bool, force: bool, **options: Any) -> None:
    """Submit SCRIPT with ARGS to Slurm; prints the job id."""
    _start_and_report(_write_run(options, fresh, force, new_code), as_json, fresh)


def _start_and_report(prepared: PreparedRun, as_json: bool, fresh: bool = False) -> None:
    """Start a run, and print its job id, or with `as_json` an object with ``job_id`` and ``run``.

    A process in the foreground is waited for, and Ctrl-C and SIGTERM are passed on to it as a
    notice. The command ends with the process's exit code (SystemExit); with `as_json` it prints an
    object with ``exit_code`` and ``run``. The trials of a sweep on this machine are listed on
    stderr. `fresh` and the errors are those of `_start_run`.
    """
    path, forward = str(prepared.run.path), SignalForwarder()
    if prepared.spec.backend in ("local", "salloc"):
        forward.install()
    started = _start_run(prepared, fresh)
    say(f"run: {path}")
    if started.process is None:
        job_id = started.job.id if started.job else None
        echo_surely(json.dumps({"job_id": job_id, "run": path}) if as_json else job_id or "")
        return
    code = forward.wait(started)
    if prepared.spec.sweep and prepared.spec.backend == "local":
        click.echo(f"\n{local_trials_text(prepared.run)}", err=True)
    if code == CAN_GO_ON and prepared.spec.backend == "local":
        say(f"stopped; go on with: hpc-ddp dry-run --run {prepared.run.quoted}")
    if as_json:
        echo_surely(json.dumps({"exit_code": code, "run": path}))
    sys.exit(code)


@click.command(cls=Grouped, context_settings=PASS_ON)
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="NAME=VALUE,VALUE…",
    help="A parameter and its values; repeatable. SCRIPT gets --NAME=VALUE; ++NAME is Hydra's.",
)
@click.option("--max-parallel", type=int, metavar="N", help="Run at most so many at once.")
@job_options
def sweep(as_json: bool, sets: Sequence[str], max_parallel: int | None, **options: Any) -> None:
    """Submit SCRIPT once for each combination of values, as one array; prints the job id.

    Each has a run of its own. `hpc-ddp status SWEEP` shows their results; `hpc-ddp submit --run
    SWEEP` goes on with those that have not finished. `--backend local` plays them here.
    """
    if options["array"] or options["run_text"]:
        raise UsageError(
            "a sweep is an array of its own, and a new one",
            hint="--max-parallel 4; to go on with a sweep: hpc-ddp submit --run SWEEP",
        )
    _start_and_report(_write_run(options, **launch_sweep.parse_sets(sets, max_parallel)), as_json)


@click.command(cls=Grouped, context_settings=PASS_ON)
@click.option("--explain", is_flag=True, help="Print each setting and where it is set.")
@job_options
def render(as_json: bool, explain: bool, **options: Any) -> None:
    """Print the batch script that `submit` would run. It can be submitted by hand.

    Its run's folder is made; with --run the run stays as it is. With --explain the settings are
    printed in place of the script, and nothing is left behind.
    """
    if explain:
        rows = origin.find_origins(*_make_plan(options))
        table = origin.table(rows)
        click.echo(json.dumps([row.to_dict() for row in rows]) if as_json else table)
        return
    prepared = _write_run(options)
    text = backends.write_script(prepared)
    if prepared.is_new:
        remove_note(prepared.run)
    else:
        prepared.discard()
    say(f"run: {prepared.run.path}")
    if prepared.is_new and prepared.spec.backend in ("slurm", "submitit"):
        say(f"submit by hand: sbatch {shlex.quote(str(prepared.run.script))}")
    answer = {"script": text, "run": str(prepared.run.path)}
    click.echo(json.dumps(answer) if as_json else text, nl=as_json)


@click.command("dry-run", cls=Grouped, context_settings=PASS_ON)
@_fresh
@_new_code
@_force
@job_options
def dry_run(as_json: bool, fresh: bool, new_code: bool, force: bool, **options: Any) -> None:
    """Play the same job on this machine: gloo on CPU, nodes as processes, in the foreground.

    Exit code 75 means that it was stopped and can go on with --run.
    """
    _start_and_report(_write_run(options, fresh, force, new_code, backend="local"), as_json, fresh)


@click.command(cls=Grouped, context_settings=PASS_ON)
@local_options
@click.option(
    "--steps", type=int, help="End all runs at this step (default: its end, or 30 s of training)."
)
def drill(as_json: bool, steps: int | None, **options: Any) -> None:
    """Try here whether SCRIPT resumes right: end it in several ways, go on, and compare.

    It is stopped politely, killed, killed while it saves, and has a byte of a checkpoint flipped.
    Each step and the final weights are compared with an undisturbed run's, bit for bit; what
    differs first is named. Exit code 1 where it does not resume right, does not go on, or differs
    between two undisturbed runs; a difference that comes from another order of sums alone does not
    count. The script's other files are written here, as in any run.
    """
    cwd, layer = Path.cwd(), settings_of(options)
    # A killed attempt has to end: a project file may restart workers within one.
    forced = {"backend": "local", "max-restarts": 0, "elastic": False}
    settings = config.load(layer | forced, cwd, home_folder())
    note_kept(layer, settings.get("args", ()), config.PROJECT_FILE)
    report = run_drill(settings, cwd, runs_root(settings), steps, say)
    click.echo(json.dumps(report.to_dict()) if as_json else report.text())
    if not report.ok:
        say(f"its runs: {report.folder}")
    sys.exit(not report.ok)


@click.command(cls=Grouped)
@click.option(
    "--train", is_flag=True, help="Train with each feature once, also outside of an allocation."
)
@node_options
def preflight(as_json: bool, train: bool, **options: Any) -> None:
    """Test the nodes of this allocation, and name bad ones.

    Run it inside a salloc. Exit code 1 where a node is not fit for a job. `submit
    --preflight` does the same as the first thing in a job, and leaves bad nodes out of the next
    attempt. With --train a tiny model is trained on all GPUs of the allocation, or of this
    machine, and killed once; a table for an issue shows what works. Exit code 1 where something
    does not.
    """
    settings = config.load(settings_of(options), Path.cwd(), home_folder())
    if settings.recognised:
        say(f"site: {settings.recognised}")
    if train:
        _train_and_exit(settings, as_json)
    event = launch_preflight.run_checks(settings, Path.cwd(), runs_root(settings))
    if as_json:
        click.echo(json.dumps(event.to_line()))
    elif event.report:
        click.echo(tables.preflight_table(event))
    sys.exit(not event.ok)


def _train_and_exit(settings: config.Settings, as_json: bool) -> NoReturn:
    """Train with each feature once, print the table, and end the command (SystemExit), with exit
    code 1 if a feature fails or was not tried. Ctrl-C and SIGTERM give the training a notice.

    Raise UsageError for a refused setting, HpcDdpError where the training can't be started or tried
    no feature, and OSError where a file can't be written or read.
    """
    prepared = launch_preflight.write_trial_job(settings, Path.cwd(), runs_root(settings))
    say(f"run: {prepared.run.path}; this takes a minute or two")
    forward = SignalForwarder().install()
    code = forward.wait(backends.start(prepared, subprocess.DEVNULL))
    table = launch_preflight.read_table(prepared)
    click.echo(json.dumps({"table": table, "run": str(prepared.run.path)}) if as_json else table)
    sys.exit(bool(code) or "| no |" in table or "| not tried |" in table)  # cells of a feature


@click.command(cls=Grouped)
@click.argument("run")
@click.option(
    "--set", "sets", multiple=True, metavar="NAME=VALUE", help="Another --NAME of the script's."
)
@click.option("--same-code", is_flag=True, help="The run's own copy of the code, not today's.")
@rerun_options
def rerun(as_json: bool, run: str, sets: Sequence[str], same_code: bool, **options: Any) -> None:
    """Run the job of RUN once more, from its beginning and as a new run.

    Script, arguments, options and back-end are as they were, but for the options here. The code is
    as it is now. A task of a sweep (SWEEP/task-3) is repeated alone. Prints the job id.
    """
    changes: dict[str, str] = {}
    for text in sets:
        name, equals, value = text.removeprefix("--").partition("=")
        if not (name and equals):
            raise UsageError(
                f"--set {text} is not of the form NAME=VALUE",
                hint=f"hpc-ddp rerun {shlex.quote(run)} --set lr=0.1",
            )
        changes[name] = value
    layer, cwd = settings_of(options), Path.cwd()
    settings = config.load(layer, cwd, home_folder())
    root = runs_root(settings)
    old = find_run(root, run, own_cluster)
    plan = plan_rerun(old, changes, layer, settings, cwd, root, same_code)
    warn(plan.warnings())
    _start_and_report(plan.write(), as_json)
