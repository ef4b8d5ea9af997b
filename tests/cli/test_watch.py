"""`hpc-ddp status --watch` on a terminal and into a pipe, until Ctrl-C."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_ddp.core.job.spec import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from tests.waiting import LIMIT_S

REPO = Path(__file__).parents[2]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_table_that_is_renewed_until_ctrl_c(tmp_path: Path, terminal: bool) -> None:
    run = RunFolder(tmp_path / "runs" / "digits" / "20260101-000000-aaaa").make()
    run.job_json.write_text(JobSpec("train.py").to_json())
    env = dict(os.environ, HPC_DDP_RUNS=str(tmp_path / "runs"), PYTHONPATH=str(REPO), TERM="xterm")
    read, write = pty.openpty() if terminal else os.pipe()
    argv = [sys.executable, "-m", "hpc_ddp", "status", "--watch", "1"]
    process = subprocess.Popen(
        argv,
        env=env,
        cwd=tmp_path,
        stdout=write,
        stderr=subprocess.PIPE,
        # Where the tests run in the background, Ctrl-C is ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(write)
    shown = b""
    while shown.count(b"never submitted") < 2:
        ready, _, _ = select.select([read], [], [], LIMIT_S)
        assert ready, shown
        shown += os.read(read, 10_000)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 0
    assert process.stderr
    assert process.stderr.read() == b""
    process.stderr.close()
    os.close(read)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"digits +20260101-000000-aaaa +- +rendered", text)
    assert (b"\x1b[" in shown) == terminal
