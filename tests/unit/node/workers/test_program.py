"""A command of a worker, and the process that waits for it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_ddp.core.process import identity, mortal_name
from hpc_ddp.node.attach import worker_of
from hpc_ddp.node.workers import program
from tests.waiting import pid_in, wait_until

TRAINING = """
import pathlib, signal, sys, time
folder, delay, code = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
def save(*_):
    time.sleep(delay)
    (folder / "saved").touch()
    sys.exit(code)
signal.signal(signal.SIGTERM, save)
(folder / "ready").touch()
time.sleep(600)
"""


def start_command(*words: str) -> subprocess.Popen[str]:
    argv = [sys.executable, program.__file__, "command", *words]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("line", "code"),
    [("exit 3", 3), ("kill -KILL $$", -9), ("kill -SEGV $$", -11), ("kill -TERM $$", -15)],
)
def test_it_ends_as_its_command_ends(line: str, code: int) -> None:
    with start_command("sh", "-c", line) as process:
        assert process.wait(60) == code


def test_a_command_without_permission_has_a_shells_code(tmp_path: Path) -> None:
    (tmp_path / "run.sh").touch()
    with start_command(str(tmp_path / "run.sh")) as process:
        assert process.wait(60) == 126
        assert process.stderr
        assert "run.sh can't be started: Permission denied" in process.stderr.read()


@pytest.mark.parametrize(("code", "levels"), [(0, 1), (5, 1), (5, 3)])
def test_a_training_is_waited_for_when_its_shell_dies(
    tmp_path: Path, code: int, levels: int
) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    line = f"{sys.executable} {tmp_path}/train.py {tmp_path} 0.5 {code}"
    for _ in range(1, levels):
        line = f"sh -c {shlex.quote(line + '; exit 7')}"
    line = f"echo $$ > {tmp_path}/shell; {line}; touch {tmp_path}/behind"
    with start_command("sh", "-c", line) as process:
        wait_until((tmp_path / "ready").exists, "the training")
        assert mortal_name(process.pid) == ""
        os.kill(pid_in(tmp_path / "shell"), signal.SIGTERM)
        assert process.wait(60) == code
    assert (tmp_path / "saved").exists()
    assert not (tmp_path / "behind").exists()


def test_a_program_behind_a_shell_is_attached_to(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    line = f"{sys.executable} {tmp_path}/train.py {tmp_path} 0 0; exit 7"
    with start_command("sh", "-c", line) as process:
        wait_until((tmp_path / "ready").exists, "the training")
        record = identity(process.pid)
        (tmp_path / "rank-0.pid").write_text(f"{process.pid} {record['began']}")
        shell = worker_of(tmp_path / "rank-0.pid")
        assert Path(f"/proc/{shell}/comm").read_text() == "sh\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_notice_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    words = (sys.executable, str(tmp_path / "train.py"), str(tmp_path), "0", "4")
    with start_command(*words) as process:
        wait_until((tmp_path / "ready").exists, "the training")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 4


def test_a_command_does_not_outlive_it(tmp_path: Path) -> None:
    line = f"echo $$ > {tmp_path}/shell; touch {tmp_path}/ready; read line"
    with start_command("sh", "-c", line) as process:
        wait_until((tmp_path / "ready").exists, "the shell")
        shell = pid_in(tmp_path / "shell")
        process.kill()
    wait_until(lambda: not Path(f"/proc/{shell}").exists(), "the end of the shell")
