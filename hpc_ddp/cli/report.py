"""``hpc-ddp report``: a run as a page."""

from __future__ import annotations

from pathlib import Path

import click

from hpc_ddp.cli.common import folder_option
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.file_io import write_whole
from hpc_ddp.core.ownership import is_executable
from hpc_ddp.report.html import page
from hpc_ddp.submission.resources import folder
from hpc_ddp.submission.settings.runs_dir import run_of


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
    # Another user's run is data: a link in it must not lead the page over a file of the viewer's.
    default_folder = run_folder.path if is_executable(run_folder) else Path.cwd()
    path = output or default_folder / "report.html"
    try:
        write_whole(path, html)
    except OSError as error:
        raise HpcDdpError(
            f"can't write {path}: {error.strerror}", hint="-o FILE writes it elsewhere"
        ) from None
    click.echo(path)
