"""A command of a worker, and the process that waits for it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from hpc_ddp.core.process import identity, mortal_name, signal_recorded
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
FOLDER = str(Path(program.__file__).parent)
SHORT_REST = "import program\nprogram.REST_S = 1.0\nprogram.run_command(*sys.argv[1:])\n"


def start_command(*words: str) -> subprocess.Popen[str]:
    argv = [sys.executable, program.__file__, "command", *words]
    return subprocess.Popen(
        argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


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
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "node.py").write_text(f"import sys; sys.path.insert(0, {FOLDER!r})\n{SHORT_REST}")
    line = HELPERS[helper].replace("READY", f"{tmp_path}/helper; echo $$ > {tmp_path}/pid")
    line += f"{sys.executable} {tmp_path}/train.py {tmp_path} 0.2 0; exit 7"
    argv = [sys.executable, str(tmp_path / "node.py"), "sh", "-c", line]
    with subprocess.Popen(argv, start_new_session=True) as process:
        wait_until((tmp_path / "ready").exists, "the training")
        wait_until((tmp_path / "helper").exists, "the helper")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
        assert (tmp_path / "saved").exists()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_without_a_notice_the_status_of_the_command_counts(tmp_path: Path) -> None:
    """Here its shell alone is killed, by a person, say."""
    (tmp_path / "train.py").write_text(TRAINING)
    line = f"{sys.executable} {tmp_path}/train.py {tmp_path} 0 0 & echo $! > {tmp_path}/pid; wait"
    with start_command("sh", "-c", f"echo $$ > {tmp_path}/shell; {line}") as process:
        wait_until((tmp_path / "ready").exists, "the training")
        os.kill(pid_in(tmp_path / "shell"), signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
        os.kill(pid_in(tmp_path / "pid"), signal.SIGKILL)


def test_a_shell_that_ends_by_its_own_trap_leaves_the_training_its_time(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    line = f"trap 'kill $T' TERM; {sys.executable} {tmp_path}/train.py {tmp_path} 0.5 0 & T=$!"
    with start_command("sh", "-c", f"{line}; wait $T") as process:
        wait_until((tmp_path / "ready").exists, "the training")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert (tmp_path / "saved").exists()


def test_a_kill_ends_the_training_below_a_shell(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    line = f"{sys.executable} {tmp_path}/train.py {tmp_path} 0 0 & echo $! > {tmp_path}/pid; wait"
    with start_command("sh", "-c", line) as process:
        wait_until((tmp_path / "ready").exists, "the training")
        record = identity(process.pid)
        (tmp_path / "rank-0.pid").write_text(f"{process.pid} {record['began']}")
        assert signal_recorded([tmp_path / "rank-0.pid"], signal.SIGKILL) == 1
        training = Path(f"/proc/{pid_in(tmp_path / 'pid')}/exe")
        wait_until(lambda: not training.exists(), "the end of the training")


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
        assert process.wait(60) == -signal.SIGTERM


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
