"""What is known of a cluster: site detect, list, show."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from hpc_ddp.cli.common import say
from hpc_ddp.launch import config, detect, login, site_files


@click.group()
def site() -> None:
    """Look at this cluster, and at the site files that say what clusters are like."""


@site.command("detect")
@click.option("--name", metavar="NAME", default="site", help="Write NAME.toml, for --site NAME.")
@click.option("--print", "only_print", is_flag=True, help="Print the file, and write nothing.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def detect_(name: str, only_print: bool, force: bool) -> None:
    """Ask Slurm and this login node what the cluster is like, and write a site file.

    What follows for your jobs is said in words. The file is ~/.config/hpc-ddp/site.toml, which
    counts for all your jobs from here, and is yours to edit. Nothing is submitted.
    """
    facts = login.look(os.environ)
    found = detect.describe(facts)
    origin = f"As `hpc-ddp site detect` found it from {facts.host} on {time.strftime('%Y-%m-%d')}."
    text = found.to_toml(origin)
    if only_print:
        click.echo(text, nl=False)
        return
    say(found.title)
    for remark in found.remarks:
        say(f"- {remark}")
    click.echo(site_files.write(Path.home(), name, text, force))


@site.command("list")
def list_() -> None:
    """List the site files: yours, and those that come with hpc-ddp."""
    for path in site_files.all_files(Path.home()):
        click.echo(f"{path.stem:18} {path}")


@site.command()
@click.argument("name", required=False)
def show(name: str | None) -> None:
    """Print the files of site NAME (default: what counts here), the one that comes first on top."""
    chosen = name or config.load({}, Path.cwd(), Path.home()).get("site")
    for path in config.site_files(chosen, Path.home()):
        click.echo(f"# --- {path}\n{path.read_text()}")
