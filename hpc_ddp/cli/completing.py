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
    """Return the lines by which a shell (bash, zsh or fish) learns the completion; raise KeyError
    for another shell."""
    kinds = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
    completion_class = kinds[shell]
    completion = completion_class(click.Command("hpc-ddp"), {}, "hpc-ddp", VARIABLE)
    # Not by source(), which would look for a new bash first.
    return completion_class.source_template % completion.source_vars()


def teach_completion(command: click.Command) -> click.Command:
    """Change a command's parameters so that the Tab key completes runs, sites and fabrics, and
    return the command. `_OFFERED` has the completions by the parameters' names."""
    for param in command.params:
        if param.name in _OFFERED:
            vars(param)["shell_complete"] = _OFFERED[param.name]
    return command


def runs(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Return the names of runs, then their ids, that begin with `incomplete`, newest first. Folders
    are listed, but no file is read, so that it is quick. A path is left to the shell.

    The shell inserts the text as it is, so only names of the form that hpc-ddp gives are offered:
    another user's folder may be called like a command. A folder that can't be listed has no ids.
    Settings that can't be used end the list without a message.
    """
    if incomplete.startswith((".", "/", "~")):
        return [CompletionItem(incomplete, type="dir")]
    names: dict[str, str] = {}  # the newest id by name
    ids: dict[str, str] = {}  # the name by id
    with suppress(HpcDdpError, OSError), redirect_stderr(io.StringIO()):
        for entry in os.scandir(runs_folder(ctx.params.get("runs_dir"))):
            if entry.is_dir() and _PLAIN.fullmatch(entry.name):
                run_ids: list[str] = []
                with suppress(OSError):  # another user's folder that is closed
                    run_ids = [run for run in os.listdir(entry) if _PLAIN.fullmatch(run)]
                ids |= dict.fromkeys(run_ids, entry.name)
                if run_ids:
                    names[entry.name] = max(run_ids)  # an id begins with its time
    newest_first = sorted(names, key=lambda name: names[name], reverse=True)
    items = [CompletionItem(name, help="the newest of that name") for name in newest_first]
    items += [CompletionItem(id, help=ids[id]) for id in sorted(ids, reverse=True)]
    return [entry for entry in items if entry.value.startswith(incomplete)]


def _offer_stems(*folders: Path) -> Callable[[click.Context, str], list[CompletionItem]]:
    """Return a function for click that offers the names of the TOML files in some folders, without
    ``.toml``; none of a missing folder."""

    def offer(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the names that begin with `incomplete`, sorted."""
        names = sorted({path.stem for folder in folders for path in folder.glob("*.toml")})
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]

    return offer


_OFFERED = {
    **dict.fromkeys(("run", "runs", "run_text"), runs),
    "site": _offer_stems(
        folder("templates") / "sites", Path(os.path.expanduser("~/.config/hpc-ddp"))
    ),
    "fabric": _offer_stems(folder("templates") / "fabrics"),
}
