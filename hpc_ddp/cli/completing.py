"""Completion by the Tab key, by click's own mechanism."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from pathlib import Path

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, ZshComplete

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.submission.package_files import folder
from hpc_ddp.submission.settings.runs_dir import runs_folder

_PLAIN = re.compile(r"\w[\w.+=,@-]*")
VARIABLE = "_HPC_DDP_COMPLETE"  # click's name for it: set while a shell asks


def script(shell: str) -> str:
    """Return the lines by which a shell (bash, zsh or fish) learns the completion."""
    kinds = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
    completion_class = kinds[shell]
    completion = completion_class(click.Command("hpc-ddp"), {}, "hpc-ddp", VARIABLE)
    return (
        completion_class.source_template % completion.source_vars()
    )  # source() would look for a new bash first


def teach(command: click.Command) -> click.Command:
    """Change a command's parameters so that the Tab key completes runs, sites and fabrics, and
    return the command. A parameter's name says which of these it means (`_OFFERED`)."""
    for param in command.params:
        if param.name in _OFFERED:
            vars(param)["shell_complete"] = _OFFERED[param.name]
    return command


def runs(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Return the names of runs, then their ids, that begin with `incomplete`, newest first. Folders
    are listed, but no file is read, so that it is quick. A path is left to the shell.

    The shell inserts the text as it is, so only names that hpc-ddp gives are offered: another
    user's folder may be called like a command. A folder that can't be listed has none.
    Settings that can't be used end the list without a message.
    """
    if incomplete.startswith((".", "/", "~")):
        return [CompletionItem(incomplete, type="dir")]
    names: dict[str, str] = {}  # name: its newest id
    ids: dict[str, str] = {}
    with suppress(HpcDdpError, OSError), redirect_stderr(io.StringIO()):
        for name in os.scandir(runs_folder(ctx.params.get("runs_dir"))):
            if name.is_dir() and _PLAIN.fullmatch(name.name):
                run_ids: list[str] = []
                with suppress(OSError):  # another user's that is closed
                    run_ids = [run for run in os.listdir(name) if _PLAIN.fullmatch(run)]
                ids |= dict.fromkeys(run_ids, name.name)
                if run_ids:
                    names[name.name] = max(run_ids)
    offered = sorted(names, key=lambda name: names[name], reverse=True)
    run_names = [CompletionItem(name, help="the newest of that name") for name in offered]
    run_names += [CompletionItem(id, help=ids[id]) for id in sorted(ids, reverse=True)]
    return [item for item in run_names if item.value.startswith(incomplete)]


def _stems(*folders: Path) -> Callable[[click.Context, str], list[CompletionItem]]:
    """Return a function for click that offers the names of the TOML files in some folders, without
    ``.toml``; none of a missing folder."""

    def offer(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = sorted({path.stem for folder in folders for path in folder.glob("*.toml")})
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]

    return offer


_OFFERED = {
    **dict.fromkeys(("run", "runs", "run_text"), runs),
    "site": _stems(folder("templates") / "sites", Path(os.path.expanduser("~/.config/hpc-ddp"))),
    "fabric": _stems(folder("templates") / "fabrics"),
}
