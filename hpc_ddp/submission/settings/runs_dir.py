"""The folder of all runs, by the settings, and the run that a person means."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from string import Template

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.core.run_index import find_run
from hpc_ddp.slurm import own_cluster
from hpc_ddp.submission.settings.config import PROJECT_FILE, Settings, load
from hpc_ddp.submission.settings.defaults import absolute
from hpc_ddp.submission.settings.user import home_folder


def runs_root(settings: Settings, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of all runs, an absolute path; it is not made.

    That is ``runs-dir``, else ``HPC_DDP_RUNS``, else ``hpc-ddp`` below ``scratch`` (a site file
    has it) or ``$SCRATCH``, else ``./runs``. ``$NAME``, ``~`` and ``{account}`` are filled in.

    Raises
    ------
    UsageError
        a variable in it is not set here, or the account is not known
    """
    if text := settings.get("runs-dir") or environ.get("HPC_DDP_RUNS"):
        return _filled(text, settings, environ)
    scratch = settings.get("scratch") or environ.get("SCRATCH")
    return _filled(f"{scratch}/hpc-ddp" if scratch else "runs", settings, environ)


def runs_folder(option: str | None, is_strict: bool = False) -> Path:
    """Return the folder of all runs for a command that knows no other setting of a job.

    `option` is the value of ``--runs-dir``, None without. Settings that can't be used are warnings
    on stderr; with `is_strict` they raise UsageError. In both cases a folder's name that can't be
    filled in raises it, as in `runs_root`, and so does a user without a home folder. Raise OSError
    where the working folder is gone.
    """
    layer = {"runs-dir": option} if option else {}
    return runs_root(load(layer, Path.cwd(), home_folder(), is_strict))


def run_of(text: str, option: str | None) -> RunFolder:
    """Return the run that a person means by `text`; a path needs no settings.

    `option` is the value of ``--runs-dir``, None without. For a job's id Slurm may be asked which
    cluster this is.

    Raises
    ------
    UsageError
        there is no such run, or a job id names none of this cluster alone; and as `runs_folder`
    OSError
        `text` is too long for a path, or a run's folder or journal can't be read
    """
    is_path = bool(text) and "\0" not in text and (Path(text) / "job.json").is_file()
    return find_run(Path() if is_path else runs_folder(option), text, own_cluster)


def _filled(text: str, settings: Settings, environ: Mapping[str, str]) -> Path:
    """Return a folder's name with its variables filled in, as an absolute path; one with a ``$``
    that begins no variable is taken as it is. Raise UsageError for a variable that is not set, and
    for an unknown account."""
    values = {**environ, "account": settings.get("account") or environ.get("SBATCH_ACCOUNT", "")}
    try:
        filled = Template(text.replace("{account}", "${account}")).substitute(values)
    except KeyError as error:
        raise UsageError(
            f"the folder of runs is {text}, and {error.args[0]} is not set here",
            hint="export it, or --runs-dir DIR",
        ) from None
    except ValueError:  # a $ that is part of a name
        filled = text
    if "{account}" in text and not values["account"]:
        raise UsageError(
            f"the folder of runs is {text}, and no account is named",
            hint=f'account = "…" in {PROJECT_FILE}, --account, or --runs-dir DIR',
        )
    return absolute(Path(os.path.expanduser(filled)))
