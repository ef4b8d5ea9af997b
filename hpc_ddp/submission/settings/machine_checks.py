"""Checks of a job on the machine that submits it, before anything is written."""

from __future__ import annotations

import codecs
import json
import os
import re
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

from hpc_ddp.core.console.notification import read_addresses
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission.settings.config import Settings

OLDEST_PYTHON = (3, 10)  # of the Pythons that run the node side


def check_job(spec: JobSpec, run: RunFolder, settings: Settings) -> None:
    """Raise UsageError for a job that can't run: by this machine, by its file of `notify`, by
    container-options without an image, or by the operators' limits. See `make_plan`."""
    _check_environment(spec)
    _check_encoding(spec, run)
    _check_python(spec)
    if spec.notify:
        read_addresses(Path(spec.notify))
    layer = settings.layer("container-options")
    if layer and layer.kind in ("option", "project") and not spec.image:
        raise UsageError(
            "container-options have no effect without an image", hint="--image IMAGE beside them"
        )
    if settings.limits:
        settings.limits.check(spec)


def _check_python(spec: JobSpec) -> None:
    """Raise UsageError for a Python that is too old for hpc-ddp's part of the workers. Its version
    is that of its file's name, ``pythonX.Y``: nothing is run. A Python with another name, in a
    container, or found only by set-up lines passes."""
    # A bare name, where there are set-up lines, is not searched here: they may bring another PATH.
    path = spec.python if "/" in spec.python or spec.setup else shutil.which(spec.python)
    version = re.search(r"/python(\d)\.(\d+)$", os.path.realpath(path or ""))
    if not version or spec.container or spec.image:
        return
    if (int(version[1]), int(version[2])) < OLDEST_PYTHON:
        raise UsageError(
            f"python {path} is Python {version[1]}.{version[2]}; accepted:"
            f" 3.{OLDEST_PYTHON[1]} or later",
            hint="--python PATH, of an environment with a newer one and torch",
        )


def _check_environment(spec: JobSpec) -> None:
    """Raise UsageError for a variable that is to be passed on and is not set here."""
    for name in spec.env_names:
        if name not in os.environ:
            raise UsageError(f"--env {name}: {name} is not set here", hint=f"export {name}=…")


def _check_encoding(spec: JobSpec, run: RunFolder) -> None:
    """Raise UsageError for a text of the job, or a run's path, that is not ASCII, where this
    shell's locale is not UTF-8: the script, which is UTF-8, would have other bytes than the user
    has typed."""
    encoding = codecs.lookup(sys.getfilesystemencoding()).name
    settings = json.dumps([str(run.path), asdict(spec)], ensure_ascii=False)
    match = re.search(r'[^"\s]*[^\x00-\x7f][^"\s]*', settings)  # the word, for the message
    if match and encoding != "utf-8":
        raise UsageError(
            f"{match[0]!r} is not ASCII, and this shell's locale reads it as {encoding}",
            hint="export LC_ALL=C.UTF-8",
        )
