"""A run, or several, as a page to look at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from hpc_ddp.cli.common import folder_option, run_of
from hpc_ddp.launch.resources import folder
from hpc_ddp.report import page
from hpc_ddp.run.errors import UsageError
from hpc_ddp.run.folder import write_whole
from hpc_ddp.run.ownership import is_executable


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--compare", is_flag=True, help="Several runs on one page.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write it (default: report.html, or compare.html, in the first run's folder).",
)
@folder_option
def report(runs: Sequence[str], compare: bool, output: Path | None, runs_dir: str | None) -> None:
    """Write RUN as one HTML page: curves, where the time went, attempts, settings, the end.

    Of a sweep, its tasks side by side. The page needs no network; its path is printed.
    """
    if len(runs) > 1 and not compare:
        raise UsageError(
            f"report was given {len(runs)} runs; accepted: one, or several to compare",
            hint=f"hpc-ddp report --compare {' '.join(runs)}",
        )
    found = [run_of(text, runs_dir) for text in runs]
    templates = folder("templates")
    html = page.comparison(found, templates) if compare else page.report(found[0], templates)
    # Another user's run is data: a link in it must not lead the page over a file of the viewer's.
    is_own = is_executable(found[0])
    folder_of_page = found[0].path if is_own else Path.cwd()
    path = output or folder_of_page / ("compare.html" if compare else "report.html")
    write_whole(path, html)
    click.echo(path)
