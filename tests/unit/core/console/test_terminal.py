"""Messages reach the user also if stderr is a full disk, closed, or no file."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from hpc_ddp.cli.main import main
from hpc_ddp.core.console.terminal import printable, say
from hpc_ddp.core.run_folder import RunFolder
from tests.raw_events import raw


def test_a_run_can_not_change_the_terminal(run: RunFolder) -> None:
    assert printable("a\x1b]0;b\x07\x9b\tc\n") == "a\ufffd]0;b\ufffd\ufffd\tc\n"
    why = "\x1b]0;title\x07 curl evil"
    # Of a later attempt: within a millisecond the order of two writers is that of their names.
    run.journal("batch", 1).write(raw("verdict", cause="failed", action="give up", why=why))
    result = CliRunner().invoke(main, ["status", "--runs-dir", str(run.root)])
    assert "\ufffd]0;title\ufffd curl evil" in result.output
    assert "\x1b" not in result.output


SCRIPT = "from hpc_ddp.core.console.terminal import say; say('word')"


def test_a_message_is_a_line_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    say("word")
    assert capfd.readouterr().err == "hpc-ddp: word\n"


def test_a_message_is_printed_if_stderr_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    say("word")
    assert capsys.readouterr().err == "hpc-ddp: word\n"


def test_a_full_disk_does_not_change_the_exit_code() -> None:
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", SCRIPT], stderr=full).returncode == 0
    closed = subprocess.run(["bash", "-c", f'"{sys.executable}" -c "{SCRIPT}" 2>&-'])
    assert closed.returncode == 0


WRITER = (
    "from hpc_ddp.core.console.terminal import write_output as w\n"
    "import os; r, p = os.pipe(); os.close(r); os.dup2(p, 1); w(b'x' * 10); w(b'')"
)


def test_a_closed_output_is_no_error() -> None:
    assert subprocess.run([sys.executable, "-c", WRITER]).returncode == 0
    with open("/dev/full", "wb") as full:
        script = WRITER.partition("import os")[0] + "w(b'x' * 10)"
        assert subprocess.run([sys.executable, "-c", script], stdout=full).returncode == 0
