"""The server's answers, and the trial of an accelerator."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest

from hpc_ddp.node import elastic_agent
from hpc_ddp.node.workers import device_check, first_import, fork_server, preload
from hpc_ddp.node.workers.device_check import Trial
from hpc_ddp.node.workers.fork_server import ForkedProcess, ForkServer, _Server
from hpc_ddp.node.workers.worker import worker_command

COMMAND = worker_command(sys.executable, ["train.py"])


def _server(**environ: str) -> _Server:
    return _Server(Pipe()[0], ["train.py"], os.getpid(), environ)


@pytest.mark.parametrize(
    "name",
    [
        *("RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "NCCL_ASYNC", "PMI_ID"),
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_TIMER_FILE"),
    ],
)
def test_a_workers_own_variables_are_no_reason(name: str) -> None:
    assert _server(A="1")._refusal(COMMAND, {"A": "1", name: "3"}) == ""


def test_what_the_agent_sets_for_its_workers_is_no_reason() -> None:
    """Also in an elastic job: all that the module's text assigns."""
    text = Path(elastic_agent.__file__).read_text()
    names = re.findall(r'os\.environ\["(\w+)"\] = ', text)
    assert "TORCH_ELASTIC_WORKER_IDENTICAL" in names
    assert all(map(fork_server.OF_A_WORKER.match, names))


@pytest.mark.parametrize(
    ("environ", "name"),
    [({"A": "1", "OMP_NUM_THREADS": "1"}, "OMP_NUM_THREADS"), ({"A": "2"}, "A"), ({}, "A")],
)
def test_a_variable_that_imports_read_and_that_has_changed_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], name: str
) -> None:
    monkeypatch.setattr(first_import, "READ", {"A"})
    server = _server(A="1", B="1")
    assert server._refusal(COMMAND, environ) == f"{name} has changed since the imports"


def test_a_command_that_torchrun_wraps_is_a_reason() -> None:
    wrapped = ["numactl", "--cpunodebind=0", *COMMAND]
    assert _server()._refusal(wrapped, {}) == "its command begins with numactl"
    server = _server()
    server.refusal = "no"
    assert server._refusal(COMMAND, {}) == "no"


def test_a_refusal_is_printed_once_and_a_server_that_ends_is_one(
    capfd: pytest.CaptureFixture[str],
) -> None:
    connection, servers = Pipe()
    server = ForkServer(connection)
    servers.send("a reason")
    assert server.fork(COMMAND, {}) is None
    servers.close()
    assert server.fork(COMMAND, {}) is None
    assert capfd.readouterr().err == "hpc-ddp: workers are started by exec: a reason\n"


def test_a_forked_process_is_waited_for_as_a_popen() -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.read(reader, 1)
        os._exit(7)
    process = ForkedProcess(pid)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    os.write(writer, b"x")
    assert (process.wait(), process.poll(), process.returncode) == (7, 7, 7)
    os.close(reader)
    os.close(writer)


def test_a_trial_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "_try_accelerator", lambda: False)
    assert Trial().await_failure() == "a fork can't use the accelerator: it ended with 1"
    monkeypatch.setattr(
        device_check, "_try_accelerator", lambda: os.kill(os.getpid(), signal.SIGKILL)
    )
    assert Trial().await_failure() == "a fork can't use the accelerator: it ended with -9"
    monkeypatch.setattr(device_check, "_try_accelerator", lambda: time.sleep(60))
    monkeypatch.setattr(device_check, "TRIAL_S", 0.1)
    trial = Trial()
    assert "no end within" in trial.await_failure()
    with pytest.raises(ProcessLookupError):
        os.kill(trial.pid, 0)


def test_a_plugin_of_torch_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an NPU: its import may open a device, or a log of the rank."""
    info = tmp_path / "plugin-1.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[torch.backends]\nplug = plug:load\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert preload.name_of_plugin({}) == "plug"
    assert preload.name_of_plugin({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}) == ""


def test_a_trial_without_an_accelerator_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "_try_accelerator", lambda: True)
    assert Trial().await_failure() == ""


def test_a_notice_before_the_fork_ends_the_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its signal came while the server ignored it."""
    monkeypatch.setattr(fork_server, "prepare_worker", lambda words: words)
    (tmp_path / "notice").touch()
    pid = os.fork()
    if not pid:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            server = _Server(Pipe()[0], ["train.py"], os.getppid())
            server._become_worker(COMMAND, {"HPC_DDP_NOTICE": str(tmp_path / "notice")})
        finally:
            os._exit(0)
    assert ForkedProcess(pid).wait(20) == -signal.SIGTERM


def test_a_fork_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    before, count = len(os.listdir("/proc/self/fd")), 0
    fork = os.fork

    def fail() -> int:
        raise BlockingIOError("no process is left")

    def fail_in_the_child() -> int:
        nonlocal count
        count += 1
        return fork() if count == 1 else fail()

    monkeypatch.setattr(os, "fork", fail)
    assert _server()._fork_worker() == "a fork has failed: no process is left"
    monkeypatch.setattr(os, "fork", fail_in_the_child)
    assert _server()._fork_worker() == "a fork has failed"
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_server_without_an_answer_is_left(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fork_server, "ANSWER_S", 0.01)
    connection, _servers = Pipe()
    server = ForkServer(connection)
    assert server.fork(COMMAND, {}) is None
    assert server.fork(COMMAND, {}) is None  # an answer that comes late is for nobody
    assert "no answer within" in capfd.readouterr().err


def test_an_agent_with_threads_is_not_forked(capfd: pytest.CaptureFixture[str]) -> None:
    event = threading.Event()
    thread = threading.Thread(target=event.wait, name="a site's")
    thread.start()
    assert fork_server.start_server(["train.py"]) is None
    event.set()
    thread.join()
    assert "torchrun's agent has threads, such as a site's\n" in capfd.readouterr().err


def test_the_last_collections_see_what_an_ordinary_end_sees() -> None:
    """A cycle of the worker's own ends while its module is complete, a frozen one when the modules
    are taken apart."""
    script = """
import atexit, gc
from hpc_ddp.node.workers import fork_server

class Cycle:
    def __init__(self, name, write=print):
        self.me, self.name, self.write = self, name, write
    def __del__(self):
        self.write(self.name, globals().get("atexit") is not None)

kept = Cycle("frozen")
gc.freeze()
atexit.register(fork_server._end_collections)
Cycle("own")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    own, frozen = done.stdout.splitlines()
    assert own == "own True"
    assert frozen.startswith("frozen ")
