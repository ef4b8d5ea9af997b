"""Processes are identified by host, number and start time."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_ddp.core import process
from tests.skips import skip_or_fail
from tests.waiting import wait_until


def test_a_process_is_identified_by_its_start_time() -> None:
    identity = process.identity()
    assert (identity["host"], identity["pid"]) == (socket.gethostname(), os.getpid())
    assert process.is_live(identity)
    for change in ({"host": "x"}, {"pid": "7"}, {"began": "1"}, {"pid": 1 << 30}, {"pid": None}):
        assert not process.is_live({**identity, **change}), change
    began = process.began_at()
    assert began is not None
    assert time.time() - 36000 < began < time.time()


def test_a_zombie_is_not_live() -> None:
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process._began(child.pid) is None
    # Where there is /proc, that has the answer.
    assert process._began_without_proc(os.getpid()) is None
    assert signal.SIGRTMIN < process.SHOW_STACKS < signal.SIGRTMAX


def test_a_worker_in_a_pid_namespace_of_its_own_is_found(tmp_path: Path) -> None:
    """As in a container; its id is another process's here, or nobody's."""
    path = tmp_path / "rank-0.pid"
    script = (
        "import sys, time; from hpc_ddp.node.workers import worker\n"
        "worker.open_log(sys.argv[1]); time.sleep(600)"
    )
    enter = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*enter, "true"], capture_output=True).returncode:
        skip_or_fail("this machine gives no PID namespace (unshare)")
    argv = [*enter, sys.executable, "-c", script, str(path.with_suffix(""))]
    with subprocess.Popen(argv, cwd=Path(__file__).parents[3]) as wrapper:
        try:
            wait_until(lambda: process.live_pid(path), "the worker", ended=wrapper.poll)
            assert path.read_text().split()[0] == "1"
            assert process.signal_from_pid_files([path], signal.SIGKILL) == 1
            assert wrapper.wait()
            assert process.live_pid(path) is None
        finally:
            wrapper.kill()


def test_a_pid_file_of_another_user_names_no_process(tmp_path: Path) -> None:
    """That user would choose which of this user's processes a notice ends."""
    path, link = tmp_path / "rank-0.pid", tmp_path / "rank-1.pid"
    path.write_text(f"{os.getpid()} {process._began(os.getpid())}")
    assert process.live_pid(path) == os.getpid()
    link.symlink_to(path)
    assert process.live_pid(link) is None
    if os.geteuid():
        skip_or_fail("only root can give a file to another user")
    os.chown(path, 54321, -1)
    assert process.live_pid(path) is None
    assert process.signal_from_pid_files([path, link], signal.SIGCONT) == 0


def test_a_process_of_another_pid_namespace_may_run_without_being_seen(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.pid"
    began, here = process._began(os.getpid()), os.readlink("/proc/self/ns/pid")
    for namespace, count in (("pid:[1]", 1), (here, 0), ("", 0)):
        path.write_text(f"{os.getpid()} {began}0 {namespace}")
        assert process.live_pid(path) is None
        assert process.signal_from_pid_files([path, tmp_path / "none"], signal.SIGKILL) == count
    for text in (f"{os.getpid()} {began} pid:[1]", "1 2 3 4", "1", "\xff"):
        path.write_text(text, encoding="latin-1")
        assert process.live_pid(path) is None
    assert process.signal_from_pid_files([path], signal.SIGKILL) == 0
    path.write_text(f"{os.getpid()} {began} {here}")
    assert process.live_pid(path) == os.getpid()


def test_a_process_is_identified_by_its_number_without_proc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen(["true"]) as child:
        pass

    def fail(path: Path, **_: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setattr(Path, "read_text", fail)
    identity = process.identity()
    assert process.is_live(identity)
    assert not process.is_live({**identity, "pid": child.pid})
    assert process.began_at() is None


def test_handled_and_ignored_signals_are_told_apart() -> None:
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert process.handles_signal(os.getpid(), signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        assert process.handles_signal(os.getpid(), signal.SIGUSR2) is False
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_process_may_have_any_bytes_for_its_name() -> None:
    """Slurm's task, a worker, or any process of the node; names end after 15 bytes, in a letter."""
    rename = "open('/proc/self/comm', 'wb').write('überwachungs-ü'.encode()[:15])"
    words = [sys.executable, "-c", f"{rename}; print(flush=True); input()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout
        assert child.stdout.readline()
        assert b"\xc3\n" in Path(f"/proc/{child.pid}/comm").read_bytes()
        assert process.proc_text(child.pid, "comm").startswith("überwachungs-")
        assert process.began_at(child.pid) is not None
        assert not process.handles_signal(child.pid, signal.SIGTERM)
        child.communicate(b"\n")


def test_a_file_in_memory_that_is_refused_has_the_systems_reason() -> None:
    with pytest.raises(OSError, match="no file in memory") as refusal:
        process.memory_file("x" * 300)  # a name may have 249 bytes
    assert refusal.value.errno == errno.EINVAL


@pytest.mark.parametrize("version", [(3, 10), (3, 11)])
def test_pythons_of_multiprocessing_import_nothing_from_the_working_directory(
    tmp_path: Path, version: tuple[int, int]
) -> None:
    """Another user may have put a file there, which the copy of the code leaves out."""
    (tmp_path / "socket.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    text = """
import multiprocessing, sys
from hpc_ddp.core.process import keep_folder_out
if __name__ == '__main__':
    own_version, sys.version_info = sys.version_info, VERSION
    keep_folder_out()
    keep_folder_out()
    sys.version_info = own_version
    process = multiprocessing.get_context('spawn').Process(target=print, args=('up',))
    process.start()
    process.join()
"""
    if sys.version_info < (3, 11) <= version:
        pytest.skip("Python has -P from 3.11 on")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(text.replace("VERSION", str(version)))
    argv = [sys.executable, str(tmp_path / "code" / "train.py")]
    env = {**os.environ, "PYTHONPATH": str(Path(process.__file__).parents[2])}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("up\n", 0), done.stderr
    assert not (tmp_path / "ran").exists()
