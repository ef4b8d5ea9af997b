"""Commands for runs: status, explain, logs, verify, cancel, report.

Its commands let HpcDdpError and OSError through (UsageError where RUN means no run): `main.Group`
prints them and sets the exit code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import click

from hpc_ddp.cli.common import folder_option, json_option, output_error, say
from hpc_ddp.core import checkpoints
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.file_io import write_whole
from hpc_ddp.core.file_owners import is_executable
from hpc_ddp.report import tables
from hpc_ddp.report.cancel import cancel as cancel_run
from hpc_ddp.report.status import run_status, run_table
from hpc_ddp.submission.package_files import folder as resource_folder
from hpc_ddp.submission.settings.runs_dir import run_of, runs_folder


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option(
    "--all", "show_all", is_flag=True, help="All runs, not only those that are new or live."
)
@click.option("--watch", "watches", is_flag=True, help="A screen with keys: logs, cancel, explain.")
@folder_option
@json_option
def status(
    runs: Sequence[str], show_all: bool, watches: bool, runs_dir: str | None, as_json: bool
) -> None:
    """Show the state of runs, those under way first; of one array or sweep also its tasks."""
    if watches and (runs or show_all or as_json):
        raise UsageError("--watch shows all live and new runs", hint="hpc-ddp status --watch")
    if watches:
        from hpc_ddp.report.status.screen import watch_runs  # a Python may lack curses

        watch_runs(runs_folder(runs_dir))
        return
    if text := run_table.status_text(runs_folder(runs_dir), runs, show_all, as_json):
        click.echo(text)


@click.command()
@click.argument("run", required=False)
@folder_option
@json_option
def explain(run: str | None, runs_dir: str | None, as_json: bool) -> None:
    """Explain what became of RUN (a folder, id, name or job id; without one the newest run), and
    what to do about it."""
    # A quarter of the time of `status` to import.
    from hpc_ddp.report.explain.explain import explain_run
    from hpc_ddp.report.explain.explanation import paragraph

    explanation = explain_run(run_of(run, runs_dir))
    if as_json:
        click.echo(json.dumps(explanation.to_dict()))
    else:
        click.echo(paragraph(explanation))


@click.command()
@click.argument("run", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines, until the run has ended.")
@click.option("--rank", type=click.IntRange(0), help="One rank's log as it is (default: all).")
@click.option("--attempt", type=click.IntRange(0), help="One attempt's (default: all).")
@click.option("--job", is_flag=True, help="The job's own output: rank 0's, and Slurm's lines.")
@click.option("--raw", is_flag=True, help="Leave out no noise, and fold no equal lines.")
@folder_option
def logs(
    run: str | None,
    follow: bool,
    rank: int | None,
    attempt: int | None,
    job: bool,
    raw: bool,
    runs_dir: str | None,
) -> None:
    """Print the output of RUN (a folder, id, name or job id; without one the newest run), all ranks
    in order of time.

    Each line has its node and rank before it, unless only rank 0 has printed anything. Equal lines
    of several ranks are shown once.
    """
    # Both read the logs of a run, which `status` needs not.
    from hpc_ddp.report.logs import view
    from hpc_ddp.report.logs.files import LogQuery

    query = LogQuery(rank, attempt, job, raw)
    folder = run_of(run, runs_dir)
    if follow:
        view.follow_logs(folder, query, lambda: run_status.has_ended(folder))
    else:
        view.show_logs(folder, query)


@click.command()
@click.argument("run")
@folder_option
@json_option
def verify(run: str, runs_dir: str | None, as_json: bool) -> None:
    """Read RUN's checkpoints, of an array those of all its tasks, and report whether every byte is
    as it was written.

    Exit code 1 where one is damaged. A resume skips those, to the newest good one.
    """
    run_folder = run_of(run, runs_dir)
    rows = checkpoints.verify_all(run_folder.checkpoints)
    for task in run_folder.tasks():
        of_task = checkpoints.verify_all(task.checkpoints)
        rows += [replace(row, name=f"{task.path.name}/{row.name}") for row in of_task]
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows]))
    elif not rows:
        say("no checkpoints of hpc-ddp yet; a script without hpc_ddp.training saves its own")
    else:
        click.echo(tables.checkpoint_table(rows))
    # Exit code 1 where a checkpoint has a problem.
    sys.exit(any(row.problem for row in rows))


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@folder_option
def cancel(runs: Sequence[str], runs_dir: str | None) -> None:
    """Cancel runs for good: nothing requeues them after this.

    Exit code 1 where Slurm did not cancel a job or it is live still, 2 where a run was finished
    already; each is named, and the other runs are cancelled.
    """
    code = 0
    for run in [run_of(text, runs_dir) for text in runs]:
        try:
            cancel_run(run)
        except (HpcDdpError, OSError) as error:
            if len(runs) == 1:
                raise
            say(f"error: {error}")  # and the others are cancelled
            code = max(code, getattr(error, "exit_code", 1))
        else:
            say(f"cancelled: {run.path}")
    sys.exit(code)


@click.command()
@click.argument("run")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write it (default: report.html in the run's folder; here for another user's).",
)
@folder_option
def report(run: str, output: Path | None, runs_dir: str | None) -> None:
    """Write RUN as one HTML page: curves, where the time went, attempts, settings, the end.

    The page needs no network; its path is printed.
    """
    from hpc_ddp.report.html import page  # jinja2 takes a quarter of the time of `status` to import

    run_folder = run_of(run, runs_dir)
    html = page.render_page(run_folder, resource_folder("templates"))
    # Another user's run is data: a link in it must not lead the page over a file of the viewer's.
    default_folder = run_folder.path if is_executable(run_folder) else Path.cwd()
    path = output or default_folder / "report.html"
    try:
        write_whole(path, html)
    except OSError as error:
        raise output_error(path, error) from None
    click.echo(path)
