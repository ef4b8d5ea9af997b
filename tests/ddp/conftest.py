"""Real worker processes on gloo, several per test, without waiting for torch each time."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.run.folder import RunFolder
from hpc_ddp.run.journal import Event

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Zygote:
    def __init__(self) -> None:
        env = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        self.running: set[int] = set()
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def clear(self) -> None:
        """Kill what a failed test has left running."""
        for pid in self.running:
            os.kill(pid, signal.SIGKILL)
            while self.ask({"wait": pid})["code"] is None:
                time.sleep(0.02)
        self.running.clear()

    def end(self) -> None:
        self._process.communicate(timeout=60)


@dataclass
class Launch:
    """Some ranks at work."""

    zygote: Zygote
    pids: list[int]
    logs: list[Path]

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks or range(len(self.pids)):
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def wait(self, timeout_s: float = 60.0) -> list[int]:
        """Return the exit codes by rank; what runs on after the time is killed (code -9)."""
        deadline = time.monotonic() + timeout_s
        codes: list[int] = []
        for pid in self.pids:
            while (code := self.zygote.ask({"wait": pid})["code"]) is None:
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.02)
            self.zygote.running.discard(pid)
            codes.append(code)
        return codes

    def ended(self) -> bool:
        """Tell whether no rank runs any more (not waited for, they stay as zombies)."""
        stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2] for pid in self.pids)
        return all(stat.split()[0] == "Z" for stat in stats)

    def output(self) -> str:
        return "".join(log.read_text() for log in self.logs)

    def until(self, text: str, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)


@dataclass
class Crew:
    """A run folder, and the workers that are sent to it, attempt by attempt."""

    zygote: Zygote
    base: Path
    run: RunFolder
    attempt: int = -1

    @property
    def weights(self) -> bytes:
        """What the run's script left behind at its end."""
        return (self.run.path / "weights").read_bytes()

    def launch(self, world_size: int, *argv: str, script: str = "script.py", **env: str) -> Launch:
        """Start the next attempt as hpc-ddp's launcher would, less the supervisor.

        A world size of 0 is one process to which nobody says anything of ranks.
        """
        self.attempt += 1
        (self.run.logs / f"attempt-{self.attempt}").mkdir()
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        logs = [self.base / f"{self.attempt}-{rank}.log" for rank in range(max(world_size, 1))]
        workers = []
        for rank, log in enumerate(logs):
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
            ranks |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_PORT": port}
            ranks = ranks if world_size else {}
            ours = {"HPC_DDP_RUN": self.run.path, "HPC_DDP_ATTEMPT": self.attempt}
            told = {name: str(value) for name, value in {**ranks, **ours}.items()}
            told |= {"MASTER_ADDR": "127.0.0.1", "HPC_DDP_NODE": "here", **env}
            told["PYTEST_CURRENT_TEST"] = os.environ["PYTEST_CURRENT_TEST"]  # not the first test's
            line = [str(HERE / script), *argv]
            log.touch()
            workers.append({"env": told, "argv": line, "log": str(log), "cwd": str(self.base)})
        pids = self.zygote.ask({"workers": workers})["pids"]
        self.zygote.running |= set(pids)
        return Launch(self.zygote, pids, logs)

    def go(self, world_size: int, *argv: str, script: str = "script.py", **env: str) -> str:
        """Start an attempt that ends well; return what it printed."""
        launch = self.launch(world_size, *argv, script=script, **env)
        codes = launch.wait()
        assert not any(codes), launch.output()
        return launch.output()

    def events(self, *names: str) -> list[Event]:
        return [event for event in self.run.events() if event["event"] in names]


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    process = Zygote()
    yield process
    process.end()


@pytest.fixture
def make_crew(zygote: Zygote, tmp_path: Path) -> Iterator[Callable[[str], Crew]]:
    def make(name: str) -> Crew:
        base = tmp_path / name
        return Crew(zygote, base, RunFolder(base / "run").make())

    yield make
    zygote.clear()


@pytest.fixture
def crew(make_crew: Callable[[str], Crew]) -> Crew:
    return make_crew("crew")
