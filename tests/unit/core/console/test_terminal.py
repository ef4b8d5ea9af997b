"""Messages to the user, also where stderr is a full disk, closed, or no file."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hpc_ddp.core.console.terminal import say

SCRIPT = "from hpc_ddp.core.console.terminal import say; say('word')"


def test_a_message_is_a_line_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    say("word")
    assert capfd.readouterr().err == "hpc-ddp: word\n"


def test_without_a_file_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    say("word")
    assert capsys.readouterr().err == "hpc-ddp: word\n"


def test_a_full_disk_does_not_change_the_exit_code() -> None:
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", SCRIPT], stderr=full).returncode == 0
    closed = subprocess.run(["bash", "-c", f'"{sys.executable}" -c "{SCRIPT}" 2>&-'])
    assert closed.returncode == 0
