"""``hpc-ddp report``: a run as a page."""

from __future__ import annotations

from pathlib import Path

import click

from hpc_ddp.cli.common import folder_option, run_of
from hpc_ddp.launch.resources import folder
from hpc_ddp.report.html import page


@click.command()
@click.argument("run")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write it (default: report.html in the run's folder).",
)
@folder_option
def report(run: str, output: Path | None, runs_dir: str | None) -> None:
    """Write RUN as one HTML page: curves, where the time went, attempts, settings, the end.

    The page needs no network; its path is printed.
    """
    run_folder = run_of(run, runs_dir)
    html = page.render(run_folder, folder("templates"))
    path = output or run_folder.path / "report.html"
    path.write_text(html, encoding="utf-8")
    click.echo(path)
