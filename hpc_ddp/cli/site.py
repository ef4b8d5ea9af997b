"""Commands for settings files: detect, list and show those of sites, trust those of other users.

Its commands let HpcDdpError and OSError through: `main.Group` prints them and sets the exit code.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import click

from hpc_ddp.cli.common import say
from hpc_ddp.submission.settings import config, operators, sites
from hpc_ddp.submission.settings import trust as settings_trust
from hpc_ddp.submission.settings.user import home_folder
from hpc_ddp.submission.site_detect import cluster, infer


@click.group()
def site() -> None:
    """Show site files, and write one for this cluster."""


@site.command("detect")
@click.option("--name", metavar="NAME", help="Write NAME.toml, for --site NAME.")
@click.option("--print", "only_print", is_flag=True, help="Print the file, and write nothing.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def detect_(name: str | None, only_print: bool, force: bool) -> None:
    """Probe Slurm and this login node, and write a site file; its path is printed.

    The file is ~/.config/hpc-ddp/site.toml, which counts for all your jobs from here, and is yours
    to edit. For a site that hpc-ddp knows it has the site's name, and holds only what the known
    file does not. Nothing is submitted.
    """
    home = home_folder()
    recognised = None if name else sites.recognise(home, os.environ)
    name = name or (recognised[0] if recognised else "site")
    shipped = sites.read_shipped_keys(name)
    if shipped:
        say(f"{name} is known (hpc-ddp site show {shlex.quote(name)}): its keys are left out here")
    description = infer.infer_site(cluster.probe_cluster(os.environ), shipped)
    text = description.to_toml(time.strftime("%Y-%m-%d"))
    if only_print:
        click.echo(text, nl=False)
        return
    for line in (description.title, *description.remarks):
        say(line)
    click.echo(sites.write_file(home, name, text, force))


@site.command("list")
def list_() -> None:
    """List the site files: yours, the operators', and those that come with hpc-ddp.

    `*` marks those in use.
    """
    home = home_folder()
    in_use = sites.find_files(_site_in_use(home), home, operators.find_site_file(os.environ))
    for path in sites.all_files(home):
        click.echo(
            f"{'*' if path in in_use else ' '} {path.stem:16} {sites.read_title(path) or path}"
        )


@site.command()
@click.argument("name", required=False)
def show(name: str | None) -> None:
    """Print the files of site NAME (default: the site in use); the first has precedence."""
    home = home_folder()
    for path in sites.find_files(
        name or _site_in_use(home), home, operators.find_site_file(os.environ)
    ):
        click.echo(f"# --- {path}\n{path.read_text()}")


def _site_in_use(home: Path) -> str | None:
    """Return the name of the site of jobs that are submitted from this folder: the project file's,
    else the site that the environment shows; None without either. Raise UsageError for settings
    that can't be used."""
    recognised = sites.recognise(home, os.environ)
    named: str | None = config.load({}, Path.cwd(), home).get("site")
    return named or (recognised[0] if recognised else None)


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=Path)
def trust(paths: Sequence[Path]) -> None:
    """Accept settings files or templates of another user, as they are now.

    Read them first: they decide what your jobs run. A file that changes afterwards, or gets another
    owner, is refused again. The list is ~/.config/hpc-ddp/trusted.json. The paths are printed.
    """
    for path in paths:
        settings_trust.accept_file(path)
        click.echo(path.absolute())
