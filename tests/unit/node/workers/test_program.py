"""A command of a worker, and the process that waits for it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hpc_ddp.core.process import identity, mortal_name, signal_from_pid_files
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
SHORT_REST = """
import sys
from hpc_ddp.node.workers import program
program.REST_S = 1.0
program.run_command(*sys.argv[2:])
"""


def start_command(*words: str, start: Sequence[str] = (program.__file__,)) -> subprocess.Popen[str]:
    """Start a worker as a leader of its own group; `start` are the words of Python before it."""
    argv = [sys.executable, *start, "command", *words]
    return subprocess.Popen(
        argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def training(folder: Path, delay_s: float = 0.0, code: int = 0) -> str:
    """Write a program that saves on SIGTERM, for a while, and exits with a code; return the line
    that starts it."""
    (folder / "train.py").write_text(TRAINING)
    return f"{sys.executable} {folder}/train.py {folder} {delay_s} {code}"


@contextmanager
def shell(folder: Path, line: str, *start: str) -> Iterator[subprocess.Popen[str]]:
    """Yield a worker whose shell runs a line with a `training`, once that is under way."""
    line = f"echo $$ > {folder}/shell; {line}"
    with start_command("sh", "-c", line, start=start or (program.__file__,)) as process:
        wait_until((folder / "ready").exists, "the training")
        yield process


def pid_file(folder: Path, process: subprocess.Popen[str]) -> Path:
    """Write the pid file of a worker, and return its path."""
    path = folder / "rank-0.pid"
    path.write_text(f"{process.pid} {identity(process.pid)['began']}")
    return path


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
    line = training(tmp_path, 0.5, code)
    for _ in range(1, levels):
        line = f"sh -c {shlex.quote(line + '; exit 7')}"
    with shell(tmp_path, f"{line}; touch {tmp_path}/behind") as process:
        assert mortal_name(process.pid) == ""
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == (code or -signal.SIGTERM)
    assert (tmp_path / "saved").exists()
    assert not (tmp_path / "behind").exists()


HELPERS = {
    "ignores": "(trap '' TERM; touch READY; while :; do sleep 0.2; done) &",
    "handles": "(trap : TERM; touch READY; while :; do sleep 0.2; done) &",
    "dies": "(touch READY; exec sleep 600) &",
}


@pytest.mark.parametrize("helper", HELPERS)
def test_what_else_runs_keeps_no_training_from_its_save(tmp_path: Path, helper: str) -> None:
    """It is ended with the worker, or, where it ignores that, when the supervisor kills it."""
    line = HELPERS[helper].replace("READY", f"{tmp_path}/helper") + training(tmp_path, 0.2)
    with shell(tmp_path, f"{line}; exit 7", "-c", SHORT_REST) as process:
        wait_until((tmp_path / "helper").exists, "the helper")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
        assert (tmp_path / "saved").exists()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_without_a_notice_the_status_of_the_command_counts(tmp_path: Path) -> None:
    """Here its shell alone is killed, by a person, say."""
    with shell(tmp_path, f"{training(tmp_path)} & echo $! > {tmp_path}/pid; wait") as process:
        os.kill(pid_in(tmp_path / "shell"), signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
        os.kill(pid_in(tmp_path / "pid"), signal.SIGKILL)


def test_a_shell_that_ends_by_its_own_trap_leaves_the_training_its_time(tmp_path: Path) -> None:
    line = f"trap 'kill $T' TERM; {training(tmp_path, 0.5)} & T=$!; wait $T"
    with shell(tmp_path, line) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert (tmp_path / "saved").exists()


def test_a_kill_ends_the_training_below_a_shell(tmp_path: Path) -> None:
    with shell(tmp_path, f"{training(tmp_path)} & echo $! > {tmp_path}/pid; wait") as process:
        assert signal_from_pid_files([pid_file(tmp_path, process)], signal.SIGKILL) == 1
        program_file = Path(f"/proc/{pid_in(tmp_path / 'pid')}/exe")
        wait_until(lambda: not program_file.exists(), "the end of the training")


def test_a_program_behind_a_shell_is_attached_to(tmp_path: Path) -> None:
    with shell(tmp_path, f"{training(tmp_path)}; exit 7") as process:
        assert worker_of(pid_file(tmp_path, process)) == pid_in(tmp_path / "shell")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_wait_for_a_notice_ends(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its time, whatever signals of children come; by a notice at once."""
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(program, "NOTICE_S", 0.2)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, program.AWAITED)
    try:
        tree = program.ProcessTree()
        signal.pthread_kill(threading.get_ident(), signal.SIGCHLD)
        tree.await_notice()
        assert tree.notice == 0
        monkeypatch.setattr(program, "NOTICE_S", 600.0)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        tree.await_notice()
        assert tree.notice == signal.SIGUSR1
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def test_a_notice_is_passed_on(tmp_path: Path) -> None:
    with shell(tmp_path, f"exec {training(tmp_path, code=4)}") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 4


def test_a_command_does_not_outlive_it(tmp_path: Path) -> None:
    line = f"echo $$ > {tmp_path}/shell; touch {tmp_path}/ready; read line"
    with start_command("sh", "-c", line) as process:
        wait_until((tmp_path / "ready").exists, "the shell")
        command = pid_in(tmp_path / "shell")
        process.kill()
    wait_until(lambda: not Path(f"/proc/{command}").exists(), "the end of the shell")


def test_a_crash_of_the_command_leaves_one_core() -> None:
    """The command's own: the process that ends as it did may leave none."""
    script = (
        "import ctypes, os, signal; from hpc_ddp.node.workers import program;"
        " get = lambda: ctypes.CDLL(None).prctl(3, 0, 0, 0, 0);"  # PR_GET_DUMPABLE
        " os.kill = lambda *_: (print(get(), flush=True), os._exit(0));"
        " print(get()); program._end_as(int(signal.SIGSEGV))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1\n0\n", "")
