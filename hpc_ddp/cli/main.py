"""``hpc-ddp``: submit, sweep, render, dry-run, drill, preflight, status, explain, logs, verify,
cancel.

stdout is data, everything else goes to stderr. Exit codes: 2 for usage, 1 for failure, 75 when
a dry run was stopped and can go on.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hpc_ddp import __version__
from hpc_ddp.cli.options import given, job_options, local_options, node_options
from hpc_ddp.launch import backends, config, prepare
from hpc_ddp.launch import drill as rehearsal
from hpc_ddp.launch import preflight as launch_preflight
from hpc_ddp.launch import sweep as launch_sweep
from hpc_ddp.launch.prepare import Prepared
from hpc_ddp.report import explain as report_explain
from hpc_ddp.report import health as report_health
from hpc_ddp.report import logs as report_logs
from hpc_ddp.report import preflight as report_preflight
from hpc_ddp.report import status as report_status
from hpc_ddp.report import sweep as report_sweep
from hpc_ddp.report.progress import watch
from hpc_ddp.run import checkpoints
from hpc_ddp.run.errors import CAN_GO_ON, HpcDdpError, UsageError
from hpc_ddp.run.folder import RunFolder, all_runs, find_run, runs_root

PASS_ON = {"allow_interspersed_args": False}  # what stands behind SCRIPT is the script's


class Group(click.Group):
    """Shows our errors as one line and a hint, never as a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
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
            text = f"{error.format_message()} Options of your script go after SCRIPT."
            raise click.UsageError(text, error.ctx) from None
        except OSError as error:  # a folder that went away, a name that is too long
            if isinstance(error, BrokenPipeError):
                raise  # click ends quietly
            click.echo(f"error: {error}", err=True)
            ctx.exit(1)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hpc-ddp")
def main() -> None:
    """Take a PyTorch script to a Slurm cluster and keep it going there."""


def _say(text: str) -> None:
    click.echo(text, err=True)


def _root(settings: config.Settings) -> Path:
    return runs_root(settings.get("runs-dir"), dict(os.environ))


def _prepare(options: dict[str, Any], **forced: Any) -> Prepared:
    run_text = options.pop("run_text")
    said = given(options) | forced
    cwd = Path.cwd()
    settings = config.load(said, cwd, Path.home())
    project = config.find_project_file(cwd)
    if project and project.parent != cwd:
        _say(f"settings: {project}")
    if run_text is None:
        return prepare.new_run(settings, cwd, _root(settings))
    run = find_run(_root(settings), run_text)
    return prepare.continued_run(run, said, settings, cwd)


@main.command(context_settings=PASS_ON)
@job_options
def submit(as_json: bool, **options: Any) -> None:
    """Submit SCRIPT with ARGS to Slurm; prints the job id."""
    _start(_prepare(options), as_json)


def _start(prepared: Prepared, as_json: bool) -> None:
    started = backends.start(prepared)
    if started.process:
        sys.exit(_foreground(prepared.run, started))
    _say(f"run: {prepared.run.path}")
    told = {"job_id": started.job_id, "run": str(prepared.run.path)}
    click.echo(json.dumps(told) if as_json else started.job_id)


@main.command(context_settings=PASS_ON)
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="NAME=VALUE,VALUE…",
    help="A parameter of the script and its values; repeatable. It gets --NAME=VALUE.",
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
    _start(_prepare(options, **launch_sweep.settings(sets, max_parallel)), as_json)


@main.command(context_settings=PASS_ON)
@job_options
def render(as_json: bool, **options: Any) -> None:
    """Print the batch script that `submit` would run. It can be submitted by hand."""
    prepared = _prepare(options)
    text = backends.render(prepared)
    _say(f"run: {prepared.run.path}")
    if prepared.spec.backend in ("slurm", "submitit"):
        _say(f"submit by hand: sbatch {shlex.quote(str(prepared.run.script))}")
    told = {"script": text, "run": str(prepared.run.path)}
    click.echo(json.dumps(told) if as_json else text, nl=as_json)


@main.command("dry-run", context_settings=PASS_ON)
@job_options
def dry_run(as_json: bool, **options: Any) -> None:
    """Play the same job on this machine: gloo on CPU, nodes as processes, in the foreground.

    Exit code 75 means that it was stopped and can go on with --run.
    """
    prepared = _prepare(options, backend="local")
    _say(f"run: {prepared.run.path}")
    code = _foreground(prepared.run, backends.start(prepared))
    if code == CAN_GO_ON:
        _say(f"stopped; go on with: hpc-ddp dry-run --run {shlex.quote(str(prepared.run.path))}")
    if as_json:
        click.echo(json.dumps({"exit_code": code, "run": str(prepared.run.path)}))
    sys.exit(code)


@main.command(context_settings=PASS_ON)
@local_options
@click.option(
    "--steps", type=int, help="End all runs at this step (default: its end, or 30 s of training)."
)
def drill(as_json: bool, steps: int | None, **options: Any) -> None:
    """Try here whether SCRIPT resumes right: end it in several ways, go on, and compare.

    It is stopped politely, killed, killed while it saves, and has a byte of a checkpoint flipped.
    Each step and the final weights are compared with an undisturbed run's, bit for bit; what
    differs first is named. Exit code 1 where it does not resume right. Whatever else the script
    writes, it writes here, too.
    """
    cwd = Path.cwd()
    # What it kills has to end: a project file may have workers started again within an attempt.
    forced = {"backend": "local", "max-restarts": 0, "elastic": False}
    settings = config.load(given(options) | forced, cwd, Path.home())
    report = rehearsal.drill(settings, cwd, _root(settings), steps, _say)
    click.echo(json.dumps(report.to_dict()) if as_json else report.text())
    if not report.ok:
        _say(f"its runs: {report.folder}")
    sys.exit(not report.ok)


@main.command()
@node_options
def preflight(as_json: bool, **options: Any) -> None:
    """Look whether the nodes of this allocation are fit for a job, and which are not.

    Run it inside a salloc. Exit code 1 where a node is not. `submit --preflight` does the same as
    the first thing in a job, and leaves bad nodes out of the next attempt.
    """
    settings = config.load(given(options), Path.cwd(), Path.home())
    event = launch_preflight.look(settings, Path.cwd(), _root(settings))
    if as_json:
        click.echo(json.dumps(event))
    elif event["report"]:
        click.echo(report_preflight.table(event))
    sys.exit(not event["ok"])


def _foreground(run: RunFolder, started: backends.Started) -> int:
    """Wait for a run in the foreground; Ctrl-C and SIGTERM are passed on to it as a notice."""
    process = started.process
    assert process is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: process.terminate())
    return watch(run, process)


@main.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--runs-dir", metavar="DIR", help="Where run folders are.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(runs: Sequence[str], runs_dir: str | None, as_json: bool) -> None:
    """Show the state of runs (default: all), newest first; of one array or sweep, its tasks."""
    root = _runs_dir(runs_dir)
    found = [find_run(root, text) for text in runs] if runs else all_runs(root)
    jobs = report_status.queue()
    rows = [report_status.status_of(run, jobs) for run in found]
    tasks = report_sweep.tasks(found[0], jobs) if len(runs) == 1 else []
    if as_json:
        told = [row.to_dict() for row in rows]
        click.echo(
            json.dumps([told[0] | {"tasks": [t.to_dict() for t in tasks]}] if tasks else told)
        )
    elif not rows:
        _say(f"no runs in {root}")
    else:
        click.echo(report_status.table(rows))
    if tasks and not as_json:
        click.echo(f"\n{report_sweep.table(tasks)}\n\n{report_sweep.summary(found[0], tasks)}")


@main.command()
@click.argument("run")
@click.option("--runs-dir", metavar="DIR", help="Where run folders are.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(run: str, runs_dir: str | None, as_json: bool) -> None:
    """Tell what became of RUN (a folder, id, name or job id), why, and what to do about it."""
    found = report_explain.explain_run(find_run(_runs_dir(runs_dir), run))
    if as_json:
        click.echo(json.dumps(found.to_dict()))
    else:
        click.echo(report_explain.paragraph(found))


@main.command()
@click.argument("run")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is added, until it has ended.")
@click.option("--rank", type=click.IntRange(0), help="One rank's log (default: the job's output).")
@click.option("--attempt", type=click.IntRange(0), help="One attempt's (default: all).")
@click.option("--runs-dir", metavar="DIR", help="Where run folders are.")
def logs(
    run: str, follow: bool, rank: int | None, attempt: int | None, runs_dir: str | None
) -> None:
    """Print what RUN (a folder, id, name or job id) has printed."""
    folder = find_run(_runs_dir(runs_dir), run)
    if follow:
        report_logs.follow(folder, rank, attempt, lambda: report_status.has_ended(folder))
    else:
        report_logs.show(folder, rank, attempt)


@main.command()
@click.argument("run")
@click.option("--runs-dir", metavar="DIR", help="Where run folders are.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(run: str, runs_dir: str | None, as_json: bool) -> None:
    """Read RUN's checkpoints through and tell whether every byte is as it was written.

    Exit code 1 where one is not. A resume passes over those, to the newest good one.
    """
    rows = checkpoints.health(find_run(_runs_dir(runs_dir), run).checkpoints)
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows]))
    elif not rows:
        _say("no checkpoints yet")
    else:
        click.echo(report_health.table(rows))
    sys.exit(any(row.problem for row in rows))


@main.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--runs-dir", metavar="DIR", help="Where run folders are.")
def cancel(runs: Sequence[str], runs_dir: str | None) -> None:
    """Cancel runs for good: nothing requeues them after this."""
    root = _runs_dir(runs_dir)
    for run in [find_run(root, text) for text in runs]:
        report_status.cancel(run)
        _say(f"cancelled: {run.path}")


def _runs_dir(option: str | None) -> Path:
    said = {"runs-dir": option} if option else {}
    return _root(config.load(said, Path.cwd(), Path.home()))
