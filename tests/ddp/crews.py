"""Workers of a training, forked from a process that has imported torch."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it untyped

from hpc_ddp.core.run_folder import RunFolder
from tests.devices import DEVICE, device_env, reports_of
from tests.raw_events import raw_events
from tests.waiting import is_pending, wait_until

HERE = Path(__file__).parent


class Zygote:
    """A client of the process that forks workers with these modules on this device. The processes
    of a test session share it: the first that needs it starts it."""

    def __init__(self, base: Path, device: str = DEVICE, name: str = "plain") -> None:
        """`base` is the session's folder."""
        self.device = device
        self.running: set[int] = set()
        self._address = f"hpc-ddp-{sha256(f'{base} {device} {name}'.encode()).hexdigest()[:32]}"
        with open(base / f"{device}-{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._connect():
                env = {**os.environ, "OMP_NUM_THREADS": "1", **device_env(device)}
                argv = [sys.executable, str(HERE / "fork_server.py"), self._address]
                subprocess.run(argv, stdin=subprocess.DEVNULL, env=env, check=True)
                assert self._connect()

    def _connect(self) -> bool:
        """Connect to the process, if it is there and not about to end."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._stream = self._socket.makefile("rw")
        try:
            self._socket.connect(f"\0{self._address}")
            self.ask({"import": []})
        except (OSError, ProcessHasEndedError):
            self.end()
            return False
        return True

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._stream.write(json.dumps(request) + "\n")
        self._stream.flush()
        line = self._stream.readline()
        if not line:
            raise ProcessHasEndedError("the process that forks the workers has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def clear(self) -> None:
        """Kill what a failed test has left running."""
        for pid in self.running:
            os.kill(pid, signal.SIGKILL)
            wait_until(partial(self._has_ended, pid), f"the end of {pid} after SIGKILL")
        self.running.clear()

    def _has_ended(self, pid: int) -> bool:
        return self.ask({"wait": pid})["code"] is not None

    def end(self) -> None:
        with suppress(OSError):
            self._stream.close()
        self._socket.close()


class ProcessHasEndedError(Exception):
    pass


def wait_for_end(pid: int, seconds: float) -> None:
    """Return once a process has ended, or after so many seconds. To ask again and again takes as
    much of a processor as a rank that trains."""
    with suppress(OSError):  # of an older kernel: at once
        descriptor = os.pidfd_open(pid)
        try:
            select.select([descriptor], [], [], seconds)
        finally:
            os.close(descriptor)


@dataclass
class Launch:
    """Some ranks at work."""

    zygote: Zygote
    pids: list[int]
    logs: list[Path]
    store: TCPStore  # where the ranks meet; it serves for as long as this object lives

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks or range(len(self.pids)):
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def wait(self) -> list[int]:
        """Return the exit codes by rank, once all have ended."""
        codes: list[int] = []

        def next_has_ended() -> bool:
            wait_for_end(self.pids[len(codes)], 1.0)
            code = self.zygote.ask({"wait": self.pids[len(codes)]})["code"]
            codes.extend([] if code is None else [code])
            return code is not None

        for rank, pid in enumerate(self.pids):
            wait_until(next_has_ended, f"the end of rank {rank}", self.output)
            self.zygote.running.discard(pid)
        assert not reports_of(self.output())
        return codes

    def wait_for_kill(self) -> None:
        """Wait for the end of all ranks, which kill themselves in one step. On a GPU one of them
        may meet its peers' end before."""
        codes = self.wait()
        accepted = {-signal.SIGKILL} | ({1} if self.zygote.device == "cuda" else set())
        assert -signal.SIGKILL in codes, self.output()
        assert accepted >= set(codes), self.output()

    def ended(self) -> bool:
        """Tell whether no rank runs any more (not waited for, they stay as zombies)."""
        return all(self.has_ended(rank) for rank in range(len(self.pids)))

    def has_ended(self, rank: int) -> bool:
        stat = Path(f"/proc/{self.pids[rank]}/stat").read_text().rpartition(")")[2]
        return stat.split()[0] == "Z"

    def await_delivery(self, number: int) -> None:
        """Return once no rank has the signal still before it."""
        wait_until(lambda: not any(is_pending(pid, number) for pid in self.pids), "the signal")

    def output(self) -> str:
        return "".join(log.read_text() for log in self.logs)

    def until(self, text: str) -> None:
        """Return once a rank has printed `text`; fail if all have ended without it."""
        printed = f"{text!r} in the output"
        wait_until(lambda: text in self.output(), printed, self.output, ended=self.ended)


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

    def launch(
        self,
        world_size: int,
        *argv: str,
        script: str = "training.py",
        nodes: Sequence[str] = (),
        **env: str,
    ) -> Launch:
        """Start the next attempt as hpc-ddp's launcher would, less the supervisor. `nodes` are the
        names of the ranks' nodes; by default they are all on one.

        A world size of 0 is one process to which nobody says anything of ranks.
        """
        self.attempt += 1
        (self.run.logs / f"attempt-{self.attempt}").mkdir()
        # Served here, as by torchrun's agent: a port that is free now may be taken by the time
        # that rank 0 would listen on it.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        logs = [self.base / f"{self.attempt}-{rank}.log" for rank in range(max(world_size, 1))]
        workers = []
        for rank, log in enumerate(logs):
            ranks = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": store.port}
            ranks |= place_on_node(self.zygote.device, rank, world_size)
            ranks |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
            ranks = ranks if world_size else {}
            ours = {"HPC_DDP_RUN": self.run.path, "HPC_DDP_ATTEMPT": self.attempt}
            told = {name: str(value) for name, value in {**ranks, **ours}.items()}
            node = nodes[rank] if nodes else "here"
            told |= {"MASTER_ADDR": "127.0.0.1", "HPC_DDP_NODE": node, **env}
            told["PYTEST_CURRENT_TEST"] = os.environ["PYTEST_CURRENT_TEST"]  # not the first test's
            line = [str(HERE / "scripts" / script), *argv]
            log.touch()
            workers.append({"env": told, "argv": line, "log": str(log), "cwd": str(self.base)})
        pids = self.zygote.ask({"workers": workers})["pids"]
        self.zygote.running |= set(pids)
        return Launch(self.zygote, pids, logs, store)

    def go(self, world_size: int, *argv: str, script: str = "training.py", **env: str) -> str:
        """Start an attempt that ends well; return what it printed."""
        launch = self.launch(world_size, *argv, script=script, **env)
        codes = launch.wait()
        assert not any(codes), launch.output()
        return launch.output()

    def events(self, *names: str) -> list[dict[str, Any]]:
        return [event for event in raw_events(self.run.path) if event["event"] in names]


def place_on_node(device: str, rank: int, world_size: int) -> dict[str, Any]:
    """Return the variables by which a rank finds its GPU; where ranks share GPUs, each is one of
    several nodes, also to NCCL."""
    count = torch.accelerator.device_count() if device == "cuda" else world_size
    place = {"LOCAL_RANK": rank % max(count, 1), "LOCAL_WORLD_SIZE": min(count, world_size)}
    place["GROUP_RANK"] = rank // max(count, 1)  # by which Lightning knows a node
    return place if count >= world_size else {**place, "NCCL_HOSTID": f"node-{rank // count}"}


def ends(output: str) -> list[str]:
    """Return what the ranks of a script have come to: its lines that begin with RANK."""
    return sorted(line for line in output.splitlines() if line.startswith("RANK"))


def ends_whole_and_stopped(
    make_crew: Callable[[str], Crew], script: str, at: int, *words: str
) -> tuple[list[str], list[str]]:
    """Return the `ends` of an undisturbed run of two ranks, and of one that is stopped at step `at`
    or some steps later, before step 20, and resumed."""
    whole, crew = make_crew("whole"), make_crew("stopped")
    expected = ends(whole.go(2, *words, script=script))
    crew.go(2, *words, "--at", str(at), script=script)
    (stop,) = crew.events("stopped")
    assert at <= stop["step"] < 20
    return expected, ends(crew.go(2, *words, script=script))


def crews_of(zygote: Zygote, folder: Path) -> Iterator[Callable[[str], Crew]]:
    """Yield what makes crews by name below a folder; kill their workers afterwards."""

    def make(name: str) -> Crew:
        base = folder / name
        return Crew(zygote, base, RunFolder(base / "run").make())

    yield make
    zygote.clear()
