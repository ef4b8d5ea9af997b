"""Beside a worker of a run that is played here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hpc_ddp
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.node import attach
from hpc_ddp.training.process.hang_watchdog import show_stacks_when_asked
from tests.waiting import LIMIT_S, wait_until

REPO = Path(__file__).parents[2]
SCRIPT = """
import os, time
os.chdir("deep")
print("up", flush=True)
time.sleep(600)
"""
Attach = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attach")


@pytest.fixture(scope="module")
def run(folder: Path) -> Iterator[hpc_ddp.Handle]:
    """A run of two ranks that waits."""
    (folder / "deep").mkdir()
    (folder / "train.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))
        found = hpc_ddp.submit(
            script="train.py",
            backend="local",
            launcher="srun",
            nodes=2,
            env={"MINE": "a b"},
            runs_dir=str(folder / "runs"),
        )
    logs = "logs/attempt-0/*/rank-*.log"
    wait_until(lambda: len([*found.path.glob(logs)]) == 2, "the logs of two ranks")
    wait_until(lambda: "up" in found.logs(1), "rank 1 at work")
    yield found
    found.cancel()
    found.wait(LIMIT_S)


@pytest.fixture
def beside(run: hpc_ddp.Handle, folder: Path) -> Attach:
    def call(*words: str) -> subprocess.CompletedProcess[str]:
        env = dict(os.environ, PYTHONPATH=str(REPO), HOME=str(folder))
        argv = [sys.executable, "-m", "hpc_ddp", "attach", str(run.path), *words]
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT_S)

    return call


def test_a_command_has_the_surroundings_of_the_worker(
    beside: Attach, run: hpc_ddp.Handle, folder: Path
) -> None:
    look = "import json, os; print(json.dumps([os.getcwd(), dict(os.environ)]))"
    done = beside("--node", "local-1", "--", sys.executable, "-c", look)
    assert done.returncode == 0, done.stderr
    cwd, environ = json.loads(done.stdout)
    assert cwd == str(folder / "deep")
    assert (environ["MINE"], environ["HPC_DDP_RUN"]) == ("a b", str(run.path))
    assert not {"RANK", "MASTER_PORT", "HPC_DDP_ATTEMPT", "HPC_DDP_NODE_FOLDER"} & set(environ)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rank", "7"), "rank 7 has no worker; ranks: 0, 1; nodes: local-0, local-1"),
        (("--node", "n7"), "node 'n7' has no worker; ranks: 0, 1"),
        (("--node", "local-1", "--rank", "0"), "rank 0 has no worker on local-1"),
        (("--py-spy", "--", "ls"), "can't be combined"),
        (("--", "no-such-command"), "can't be started: No such file"),
    ],
)
def test_what_is_not_there_is_said(beside: Attach, words: tuple[str, ...], message: str) -> None:
    done = beside(*words)
    assert done.returncode != 0
    assert message in done.stderr


def test_a_script_that_can_not_tell_is_not_signalled(
    run: hpc_ddp.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach.shutil, "which", lambda name, path: None)  # type: ignore[attr-defined]
    (pid_file,) = run.path.glob("logs/attempt-0/*/rank-0.pid")
    pid = attach.worker_of(pid_file)
    with pytest.raises(HpcDdpError, match=r"py-spy beside .* can't tell by itself"):
        attach.print_stacks(pid)
    assert Path(f"/proc/{pid}").exists()
    before = pid_file.read_text()
    pid_file.write_text(f"{os.getpid()} {before.split()[1]}")  # the number was given away
    with pytest.raises(HpcDdpError, match="rank-0 has no process on"):
        attach.worker_of(pid_file)
    pid_file.write_text(before)


def test_a_worker_tells_by_itself(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach.shutil, "which", lambda name, path: None)  # type: ignore[attr-defined]
    for _ in range(2):
        show_stacks_when_asked()  # this process is a worker, too, as far as that goes
        attach.print_stacks(os.getpid())
        assert capfd.readouterr().out.count("in test_a_worker_tells_by_itself\n") == 1
