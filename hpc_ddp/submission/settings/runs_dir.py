"""The folder of all runs, by the settings, and the run that a text of the user names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from string import Template

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.core.run_index import all_runs, find_run
from hpc_ddp.slurm import own_cluster
from hpc_ddp.submission.settings.config import PROJECT_FILE, Settings, load
from hpc_ddp.submission.settings.defaults import absolute
from hpc_ddp.submission.settings.user import home_folder


def runs_root(settings: Settings, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of all runs, an absolute path; it is not made.

    The first that is set counts: ``runs-dir``; ``HPC_DDP_RUNS``; ``hpc-ddp`` below ``scratch`` (of
    a site file); ``hpc-ddp`` below ``$SCRATCH``; else ``runs`` in the working directory. ``$NAME``,
    ``~`` and ``{account}`` are filled in.

    Raises
    ------
    UsageError
        the folder's name has a variable that is not set here, or ``{account}`` where no account is
        known
    """
    if text := settings.get("runs-dir") or environ.get("HPC_DDP_RUNS"):
        return _fill_path(text, settings, environ)
    scratch = settings.get("scratch") or environ.get("SCRATCH")
    return _fill_path(f"{scratch}/hpc-ddp" if scratch else "runs", settings, environ)


def runs_folder(option: str | None, is_strict: bool = False) -> Path:
    """Return the folder of all runs, by the settings seen from the working directory, for a command
    that has no other option of a job.

    `option` is the value of ``--runs-dir``, or None. Settings that can't be used are warnings on
    stderr; with `is_strict` they raise UsageError. Raise UsageError in both cases as `runs_root`,
    and for a user without a home folder; OSError where the working directory is gone.
    """
    layer = {"runs-dir": option} if option else {}
    return runs_root(load(layer, Path.cwd(), home_folder(), is_strict))


def run_of(text: str | None, option: str | None) -> RunFolder:
    """Return the run that `text` names, as `find_run` has it: a path, a name, or a job's id; for
    None the one that began last. For a path no settings are read.

    `option` is the value of ``--runs-dir``, or None. For a job's id Slurm may be asked for this
    cluster's name. Settings that can't be used are warnings on stderr.

    Raises
    ------
    UsageError
        there is no such run, or no run at all, or it is not clear which cluster's job an id means;
        further where `runs_folder` raises it
    OSError
        `text` is too long for a path, or a run's folder or journal can't be read
    """
    if text is None:
        if runs := all_runs(root := runs_folder(option)):
            return runs[0]
        raise UsageError(f"there are no runs in {root}", hint="name one, or --runs-dir DIR")
    is_path = bool(text) and "\0" not in text and (Path(text) / "job.json").is_file()
    return find_run(Path() if is_path else runs_folder(option), text, own_cluster)


def _fill_path(text: str, settings: Settings, environ: Mapping[str, str]) -> Path:
    """Return the absolute path of a folder, from `text` with variables in it. A text with a ``$``
    that begins no variable is accepted: then only variables that are set are filled in. Raise
    UsageError for any other text with a variable that is not set, and for ``{account}`` where no
    account is known."""
    values = {**environ, "account": settings.get("account") or environ.get("SBATCH_ACCOUNT", "")}
    template = Template(text.replace("{account}", "${account}"))
    try:
        path = template.substitute(values)
    except KeyError as error:
        raise UsageError(
            f"the folder of runs is {text}, and {error.args[0]} is not set here",
            hint="export it, or --runs-dir DIR",
        ) from None
    except ValueError:  # a $ that begins no variable is part of the name
        path = template.safe_substitute(values)
    if "{account}" in text and not values["account"]:
        raise UsageError(
            f"the folder of runs is {text}, and no account is named",
            hint=f'account = "…" in {PROJECT_FILE}, --account, or --runs-dir DIR',
        )
    return absolute(Path(os.path.expanduser(path)))
