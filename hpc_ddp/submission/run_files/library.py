"""The part of hpc-ddp that travels with a run."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

from hpc_ddp.core.file_io import close_to_others, drafted_folder, set_folder_mode
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission.package_files import PACKAGE
from hpc_ddp.submission.settings.fabric_profiles import read_auto_profiles

NODE_FOLDERS = ("core", "integrations", "node", "training")


def carry_library(run: RunFolder) -> None:
    """Copy the node-side part of hpc-ddp into the run's ``lib``, in place of an earlier submit's
    copy: the new batch script fits no other version. For a task of an array, whose ``lib`` is a
    link to the array's, nothing is copied: other tasks may use the array's just now.

    Raise OSError where the disk refuses, and UsageError for a broken fabric profile. The earlier
    ``lib`` then stays, or lies in ``.lib-earlier`` where the last rename was refused.
    """
    if run.lib.is_symlink():
        return
    earlier = run.path / ".lib-earlier"
    copy_folder = partial(  # with times of now: sites remove files with old times from scratch
        shutil.copytree, ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copy
    )
    with drafted_folder(run.lib) as draft:
        package = draft / "hpc_ddp"
        for name in NODE_FOLDERS:
            copy_folder(PACKAGE / name, package / name)
        (package / "cli").mkdir()
        shutil.copy(Path(__file__).with_name("worker_cli.py"), package / "cli" / "__init__.py")
        for name in (
            "__init__.py",
            "__main__.py",
            "live_jobs.py",
            "slurm.py",
            "slurm_text.py",
            "py.typed",
        ):
            shutil.copy(PACKAGE / name, package / name)
        shutil.copy(PACKAGE / "node" / "entry.py", draft / "node.py")
        # Python 3.10, which a node may have, reads no TOML.
        (draft / "fabrics.json").write_text(json.dumps(read_auto_profiles(), indent=1))
        close_code(draft)
        shutil.rmtree(earlier, ignore_errors=True)
        if run.lib.exists():
            run.lib.rename(earlier)
    shutil.rmtree(earlier, ignore_errors=True)


def close_code(tree: Path) -> None:
    """Remove the right to write in a folder with code, and all below it, from all users but the
    owner. Each folder with Python files gets a ``__pycache__`` that others can't write: a worker
    would make it with the user's umask, and members of the group could put code of theirs there.
    Raise OSError where that fails."""
    for folder in {path.parent for path in tree.rglob("*.py")}:
        cache = folder / "__pycache__"
        with suppress(PermissionError):  # the owner can't write here, and Python neither
            cache.mkdir(exist_ok=True)
            set_folder_mode(cache, 0o755)
    close_to_others(tree)
