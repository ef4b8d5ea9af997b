"""The Tab key, in a bash that has taken in what `hpc-ddp completion bash` prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
ASK = """
eval "$(hpc-ddp completion bash)" || exit
ask() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
    $(complete -p hpc-ddp | grep -o '_[a-z_]*completion') hpc-ddp
    echo "$2: ${COMPREPLY[*]}"
}
ask hpc-ddp st
ask hpc-ddp logs ''
ask hpc-ddp status gpt 202603
ask hpc-ddp submit --run di
ask hpc-ddp verify --runs-dir elsewhere ''
ask hpc-ddp render --fabric ''
ask hpc-ddp sweep --site own
"""


def test_bash_offers_commands_runs_sites_and_fabrics(tmp_path: Path) -> None:
    for run in ("digits/20260101-000000-aaaa", "digits/20260301-000000-bbbb"):
        (tmp_path / "runs" / run).mkdir(parents=True)
    for run in ("gpt/20260201-000000-cccc", ".jobs/1", ".trash/x"):
        (tmp_path / "runs" / run).mkdir(parents=True)
    (tmp_path / "elsewhere" / "x" / "local").mkdir(parents=True)
    (tmp_path / ".config" / "hpc-ddp").mkdir(parents=True)
    (tmp_path / ".config" / "hpc-ddp" / "own-site.toml").touch()
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "hpc-ddp"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m hpc_ddp "$@"\n')
    program.chmod(0o755)
    env = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PYTHONPATH": str(REPO),
        "HPC_DDP_RUNS": str(tmp_path / "runs"),
    }
    done = subprocess.run(
        ["bash", "-c", ASK], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.stderr == ""
    ids = "20260301-000000-bbbb 20260201-000000-cccc 20260101-000000-aaaa"
    assert done.stdout.splitlines()[:5] == [
        "st: status",
        f"logs: digits gpt {ids}",
        "status: 20260301-000000-bbbb",
        "submit: digits",
        "verify: x local",
    ]
    fabrics, sites = done.stdout.splitlines()[5:]
    assert {"auto", "ethernet", "infiniband"} <= {*fabrics.split()}
    assert sites == "sweep: own-site"


@pytest.mark.parametrize(("shell", "word"), [("zsh", "#compdef hpc-ddp"), ("fish", "complete ")])
def test_the_other_shells_have_theirs(shell: str, word: str) -> None:
    from hpc_ddp.cli.completing import script

    assert word in script(shell)
    assert "_HPC_DDP_COMPLETE" in script(shell)
