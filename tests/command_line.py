"""The command line in the tests' own process: a start of Python takes half a second of each call.

That the installed command and ``python -m hpc_ddp`` come to the same is shown by the tests that
start them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

from click.testing import CliRunner

from hpc_ddp.cli.main import main


def call_here(
    folder: Path, environ: Mapping[str, str], *words: str
) -> subprocess.CompletedProcess[str]:
    """Return what the command comes to in a folder, with these variables and no others."""
    here = os.getcwd()
    with mock.patch.dict(os.environ, environ, clear=True):
        os.chdir(folder)
        try:
            result = CliRunner().invoke(main, words, prog_name="hpc-ddp")
        finally:
            os.chdir(here)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception  # which would be a traceback
    return subprocess.CompletedProcess(words, result.exit_code, result.stdout, result.stderr)
