"""`hpc-ddp trust`: accept settings files of other users."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from hpc_ddp.submit.settings import trust as launch_trust


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=Path)
def trust(paths: Sequence[Path]) -> None:
    """Accept settings files or templates of another user, as they are now.

    Read them first: they decide what your jobs run. A file that changes afterwards, or gets another
    owner, is refused again. The list is ~/.config/hpc-ddp/trusted.json.
    """
    for path in paths:
        launch_trust.accept(path)
        click.echo(path.absolute())
