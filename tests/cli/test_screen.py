"""`status --watch` on a terminal: keys select a run and start commands for it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpc_ddp
from hpc_ddp.core.run_folder import RunFolder
from tests.waiting import wait_until

# As the command that pip installs, which has no working directory in its path.
ENTRY = "import sys; sys.path.pop(0); from hpc_ddp.cli.main import main; main()"


class Terminal:
    """A terminal of 24 lines, and a command of hpc-ddp on it."""

    def __init__(self, root: Path, *words: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        env = {**os.environ, "TERM": "xterm", "HPC_DDP_RUNS": str(root), "COLUMNS": "80"}
        argv = [sys.executable, "-c", ENTRY, *words]
        env["PYTHONPATH"] = str(Path(hpc_ddp.__file__).parents[1])
        self.process = subprocess.Popen(
            argv, stdin=slave, stdout=slave, stderr=slave, env=env, cwd=root, start_new_session=True
        )
        os.close(slave)
        self.text = ""

    def until(self, text: str) -> None:
        """Wait until the command has printed `text` since the last key."""

        def has_ended() -> bool:
            return self.process.poll() is not None

        wait_until(lambda: text in self._read(), repr(text), lambda: self.text, ended=has_ended)

    def _read(self) -> str:
        while select.select([self._master], [], [], 0)[0]:
            try:
                self.text += os.read(self._master, 65536).decode()
            except OSError:  # the command has ended
                break
        return self.text

    def press(self, key: str) -> None:
        self.text = ""
        os.write(self._master, key.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Terminal]:
    (tmp_path / "hpc_ddp.py").write_text("raise SystemExit('a stranger')")
    for name in ("first", "second"):  # started by hand: their ids are equal
        run = RunFolder(tmp_path / name / "local").make()
        run.job_json.write_text("{}")
    terminal = Terminal(tmp_path, "status", "--watch")
    yield terminal
    terminal.close()


def test_keys_start_commands_for_the_selected_run(screen: Terminal) -> None:
    screen.until("q: quit")
    assert "first" in screen.text
    screen.press("e")
    screen.until("[Enter]")
    assert "never submitted" in screen.text  # not what lies in the working directory
    first = "first" if "first/local" in screen.text else "second"
    screen.press("\n")
    screen.until("q: quit")
    screen.press("j")
    screen.press("e")
    screen.until("[Enter]")
    second = {"first": "second", "second": "first"}[first]
    assert f"/{second}/local" in screen.text.partition("$ hpc-ddp explain ")[2]
    screen.press("\n")
    screen.until("q: quit")
    screen.press("c")
    screen.until(f"cancel {second} (local)?")
    screen.press("n")
    screen.until("q: quit")
    screen.press("q")
    wait_until(lambda: screen.process.poll() is not None, "the end", lambda: screen._read())
    assert screen.process.returncode == 0


def test_without_a_terminal_it_names_the_json(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "hpc_ddp", "status", "--watch", "--runs-dir", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert "--watch needs a terminal\nhint: in a script: hpc-ddp status --json" in done.stderr
