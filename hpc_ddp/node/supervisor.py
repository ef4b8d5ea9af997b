"""The Slurm task of each node: starts torchrun, and decides what a signal meant.

``python <run>/lib/node.py supervisor <torchrun command line>``

Slurm signals only the task, or every process of the step, depending on the site's proctrack
plugin. The supervisor is the task, so it always hears of it; it alone decides whether that was
a notice, says so to the workers in a file, and signals them. A worker that gets SIGTERM
without that word is being torn down after a peer's crash.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from string import Template
from types import FrameType
from typing import Any

from hpc_ddp.core.attempt_env import AttemptEnv
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.file_io import patiently, read_json, read_seconds, read_word, write_json
from hpc_ddp.core.journal.events import FabricChosen, NoticeGiven
from hpc_ddp.core.journal.vocabulary import NoticeSource
from hpc_ddp.core.process import signal_recorded
from hpc_ddp.core.run_folder import AttemptFolder, NodeFolder, RunFolder
from hpc_ddp.node.log_offsets import Growth
from hpc_ddp.node.net import fabric as fabrics
from hpc_ddp.node.net.network import LOOPBACK, interface_to, reach
from hpc_ddp.node.outcome import first_failure, head_failover, oom

LOOK_EVERY_S = 1.0
FENCE_EVERY_S = 10.0  # listing a folder costs an NFS server more than opening a file
TEARDOWN_S = 4.0  # an aware worker is gone after 2; what is left then hangs
JOURNALED_S = 60.0  # how long before its end a worker may have journaled its error
PEERS_S = 8.0  # how long a failed node waits for its peers' ends before srun kills them
STOOD_STILL_S = 10.0  # a loop that took so long was suspended, and Slurm has another end time
CATCH_UP_S = 15.0  # until the batch side has asked for it, and this side has read it
LEAD_S = 10.0  # what workers have after a notice, however late it is: KillWait is 30 s by default

NOTICE_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Place:
    """Where this supervisor runs, from the environment that the batch shell exported.

    `nodes` are all node names of the attempt, `index` this one's place among them, the host
    names to reach them by being name + `suffix`. `end_time` is in unix seconds.
    """

    run: RunFolder
    attempt: AttemptFolder
    nodes: tuple[str, ...]
    index: int
    suffix: str
    end_time: float | None
    warn_s: float
    interface: str | None
    notice_signal: signal.Signals = signal.SIGTERM
    fabric: str = ""

    @classmethod
    def from_env(cls, environ: dict[str, str]) -> Place:
        env = AttemptEnv.from_env(environ)
        return cls(
            run=env.run_folder,
            attempt=env.attempt_folder,
            nodes=env.nodes,
            index=node_index(environ),
            suffix=env.host_suffix,
            end_time=env.end_time,
            warn_s=env.warn_s,
            interface=env.interface or None,
            notice_signal=signal.Signals[f"SIG{env.notice_signal}"],
            fabric=env.fabric,
        )

    @property
    def node(self) -> str:
        return self.nodes[self.index]

    @property
    def host(self) -> str:
        return self.host_of(self.index)

    def host_of(self, index: int) -> str:
        """Return the name or address that the nodes reach one of them by."""
        local = f"127.0.0.{index + 1}"  # nodes that are only processes of one machine
        return local if self.is_local else reach(self.nodes, index, self.suffix)

    @property
    def is_local(self) -> bool:
        return self.node.startswith("local-")

    @property
    def peer(self) -> str:
        """Another node to look for the network by: the first, or the second on the first."""
        return self.nodes[0 if self.index else min(1, len(self.nodes) - 1)] + self.suffix

    @property
    def chosen_interface(self) -> str | None:
        """The interface to the other nodes: as the user says, else the one that leads there."""
        inside = self.is_local or len(self.nodes) == 1
        return self.interface or interface_to(LOOPBACK if inside else self.peer)

    def interface_env(self) -> dict[str, str]:
        """Return what tells Gloo and NCCL their interface, where nothing else has."""
        name = self.chosen_interface
        if not name:
            return {}
        variables = {
            "GLOO_SOCKET_IFNAME": name,
            "NCCL_SOCKET_IFNAME": f"={name}",
        }  # =: exactly this
        # An administrator may have said it in NCCL's own files, and knows better than a route.
        configured_env = {
            **({} if self.interface else fabrics.configured(os.environ)),
            **os.environ,
        }
        return {key: value for key, value in variables.items() if key not in configured_env}

    @property
    def seeks_fabric(self) -> bool:
        """Whether the interconnect is to be looked up: alone, a node needs none."""
        return self.fabric == "auto" and len(self.nodes) > 1 and not self.is_local

    def fabric_env(self, interconnect: fabrics.Found) -> dict[str, str]:
        """Return what tells NCCL of the interconnect, where nothing else has."""
        return fabrics.settings(interconnect, self.run.lib, os.environ)


def node_index(environ: Mapping[str, str]) -> int:
    """Return this node's place among the attempt's nodes.

    Where not srun has started this process, but an MPI, which may count in another order, or
    pass on the first node's variables, the host's own name tells.

    Raises
    ------
    OSError
        this host is none of the nodes
    """
    env = AttemptEnv.from_env(environ)
    if env.node_index is not None:
        return env.node_index
    if env.step_launcher == "srun":
        return int(environ["SLURM_NODEID"])
    nodes = env.nodes
    names = (socket.gethostname(), socket.gethostname().partition(".")[0])
    if match := next((name for name in names if name in nodes), None):
        return env.nodes.index(match)
    raise OSError(f"this host, {names[0]}, is none of the job's nodes, {' '.join(nodes)}")


AGENT_WORDS = 3  # python node.py agent


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """Split what torchrun is told into its options, and the script with its arguments.

    Options have the form ``--name=value``, so the script is the first word without a dash.
    """
    script = next(i for i, word in enumerate(words) if not word.startswith("-"))
    return words[:script], words[script:]


def expand(command: list[str], environ: Mapping[str, str]) -> list[str]:
    """Fill in the variables in torchrun's options where no shell has: under submitit, and locally.

    Never in the script's arguments: those are the user's.
    """
    start, (options, script) = command[:AGENT_WORDS], split(command[AGENT_WORDS:])
    return [*start, *(Template(word).substitute(environ) for word in options), *script]


class Signals:
    """Notes signals, and wakes the loop. A handler that did more could run at any moment."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._read, write = socket.socketpair()
        self._write = write  # kept: the wake-up descriptor must stay open
        self._read.setblocking(False)
        write.setblocking(False)
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        for number in (*NOTICE_SIGNALS, signal.SIGCHLD):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self.seen.append(number)

    def wait(self, seconds: float) -> None:
        """Sleep, until a signal comes (a child's end is one)."""
        if select.select([self._read], [], [], seconds)[0]:
            self._read.recv(4096)


@dataclass
class Supervisor:
    """One node's part of one attempt."""

    place: Place
    command: list[str]
    signals: Signals = field(default_factory=Signals)
    notice: str | None = None
    torn_down: str | None = None
    _to_tell: str | None = None  # a notice that could not be written down yet
    _kill_at: float = 0.0
    _noticed_at: float = 0.0
    _looked_at: float = field(default_factory=time.monotonic)
    _next_look: float = 0.0
    _next_fence: float = 0.0
    _log_position: int = 0
    _oom_kills: int = field(default_factory=oom.kills)
    _fabric: fabrics.Found | None = None  # what is to be compared with the first node's

    def __post_init__(self) -> None:
        self.end_time = self.place.end_time
        self.folder = self._own_folder()
        patiently(partial(self.folder.path.mkdir, exist_ok=True))
        for stale in (*self._pids(), self.folder.failures):
            stale.unlink(missing_ok=True)
        self.journal = self.place.run.journal(self._name(), self.place.attempt.number)
        self.growth = Growth(self.folder)

    # What a supervisor of one worker does otherwise: see node/task.py.

    def _own_folder(self) -> NodeFolder:
        return self.place.attempt.node(self.place.node)

    def _name(self) -> str:
        """The place of this supervisor among those of the attempt."""
        return self.place.node

    @property
    def _speaks_for_its_node(self) -> bool:
        return True

    def _pids(self) -> list[Path]:
        """Return the files with the process ids of the workers that have started."""
        return list(self.folder.path.glob("rank-*.pid"))

    def _peers(self) -> list[Path]:
        """Return where all supervisors of the attempt record their ends."""
        return [self.place.attempt.node(node).record for node in self.place.nodes]

    def run(self) -> int:
        """Run torchrun to its end and return the code for the task: 0 also for a polite stop."""
        if read_word(self.place.attempt.failed):  # a peer failed before this one was up
            return 1
        try:
            agent = self._start()
        except OSError as error:
            write_json(self.folder.failures, {"agent": str(error)})
            return self._end(127)
        leader_lost = head_failover.watch(self.place, dict(os.environ)) if self._elastic else None
        while agent.poll() is None:
            self.signals.wait(0.1)
            self._look(agent)
            if leader_lost and leader_lost.is_set() and not self._kill_at:
                self._kill_at = time.time()
        self._show_rank_0()
        self.growth.note()
        return self._end(agent.returncode)

    def _start(self) -> subprocess.Popen[bytes]:
        with open(self.folder.agent_log, "ab") as log:
            return subprocess.Popen(
                self._command(),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self._env(),
                start_new_session=True,
            )

    def _command(self) -> list[str]:
        """Add what differs between nodes: who hosts the store, and this node's own name.

        torchrun would guess both from host names, and guesses wrong with several interfaces,
        aliases, or an /etc/hosts that maps the name to loopback (pytorch issue 73656).
        """
        is_host = "1" if self.place.index == 0 else "0"
        start = self.command[:AGENT_WORDS]
        options, script = split(self.command[AGENT_WORDS:])
        confs = [w.removeprefix("--rdzv-conf=") for w in options if w.startswith("--rdzv-conf=")]
        conf = ",".join([*confs, f"is_host={is_host}"])  # torchrun reads only the last --rdzv-conf
        return [*start, *options, f"--rdzv-conf={conf}", f"--local-addr={self.place.host}", *script]

    def _env(self) -> dict[str, str]:
        place = self.place
        env = dict(os.environ, HPC_DDP_NODE=place.node, HPC_DDP_NODE_FOLDER=str(self.folder.path))
        env["HPC_DDP_NOTICE"] = str(self.folder.notice)
        return env | self._fabric_env() | place.interface_env()

    def _fabric_env(self) -> dict[str, str]:
        """Look up the interconnect; note it, and say what was found and set for it.

        What is said is the first node's: the others say only where theirs is another.
        """
        place = self.place
        if not place.seeks_fabric:
            return {}
        interconnect = fabrics.look()
        variables = place.fabric_env(interconnect)
        if not self._speaks_for_its_node:
            return variables
        self.journal.write(FabricChosen(place.node, **asdict(interconnect), env=variables))
        if place.index > 0:
            self._fabric = interconnect
            return variables
        with contextlib.suppress(OSError):  # then nobody compares
            place.attempt.fabric.write_text(json.dumps(asdict(interconnect)))
        if interconnect != fabrics.Found():
            words = " ".join(f"{key}={value}" for key, value in variables.items())
            say(f"fabric: {place.node}: {interconnect}; {words or 'nothing is set for it'}")
        return variables

    def _compare_fabric(self) -> None:
        """Say loudly where the first node has another interconnect: NCCL would hang, or crawl."""
        if not self._fabric:
            return
        place, fabric, noted = self.place, self._fabric, read_json(self.place.attempt.fabric)
        if noted:
            self._fabric, first = None, fabrics.Found(**noted)
            if not fabric.is_like(first):
                say(
                    f"WARNING: the interconnect of {place.node} is {fabric}, and of"
                    f" {place.nodes[0]} {first}: NCCL will fail, hang or be slow"
                )

    def _look(self, agent: subprocess.Popen[bytes]) -> None:
        """Act on what has come since the last look."""
        now = time.time()
        looked_at, self._looked_at = self._looked_at, time.monotonic()
        if self._looked_at - looked_at > STOOD_STILL_S:
            self._next_look = self._next_fence = now + CATCH_UP_S
        if self.signals.seen:
            names = [signal.Signals(number).name for number in self.signals.seen]
            self.signals.seen.clear()
            if self._peer_failed():  # srun ends a step whose task failed with SIGTERM, too
                self._tear_down()
            else:
                self._give_notice(names[0], agent)
        if now >= self._next_look:
            self._next_look = now + LOOK_EVERY_S
            self._look_around(agent, now)
        if now >= self._next_fence:
            self._next_fence = now + FENCE_EVERY_S
            self._end_if_superseded(now)
            self._read_end_time()
        source = self.notice or self._to_tell
        is_late = source and now >= self._noticed_at + LEAD_S
        if is_late and self._time_is_over(now) and not self._kill_at:
            # Slurm's own SIGKILL would take the batch shell too, and with it the verdict.
            self._kill_at = now
        if self._kill_at and now >= self._kill_at:
            self._signal_workers(signal.SIGKILL)
            agent.kill()

    def _look_around(self, agent: subprocess.Popen[bytes], now: float) -> None:
        self._show_rank_0()
        self.growth.note()
        self._compare_fabric()
        place = self.place
        word = read_word(place.attempt.notice)
        if self._peer_failed():
            self._tear_down()
        elif self._to_tell:
            self._give_notice(self._to_tell, agent)
        elif word:
            self._give_notice(word, agent)
        elif self._time_is_over(now + place.warn_s):
            self._give_notice(NoticeSource.TIME_LIMIT, agent)

    def _time_is_over(self, time_s: float) -> bool:
        """Tell whether a time is past the end, as Slurm has it by now: a limit may be extended."""
        if self.end_time and time_s >= self.end_time:
            self._read_end_time()
        return self.end_time is not None and time_s >= self.end_time

    def _read_end_time(self) -> None:
        self.end_time = read_seconds(self.place.attempt.end_time) or self.end_time

    def _end_if_superseded(self, now: float) -> None:
        """End what is left of an attempt on a node that Slurm has given up and started anew.

        Behind a cut link, or beside a dead slurmd, nobody else does, and peers that are gone
        without a word would be waited for until the watchdog comes.
        """
        if not self.torn_down and not self.place.run.is_newest(self.place.attempt.number):
            self.torn_down = "a later attempt"
            self._kill_at = now

    def _peer_failed(self) -> bool:
        return read_word(self.place.attempt.failed) not in ("", self._name())

    def _give_notice(self, source: str, agent: subprocess.Popen[bytes]) -> None:
        """Tell the workers that the attempt must end soon; without workers yet, end it."""
        if self.notice or self.torn_down:
            return
        try:
            write_json(self.folder.notice, {"source": source, "time": time.time()})
        except OSError:  # workers that are signalled without it would take it for a tear-down
            self._to_tell = source
            return
        self.notice, self._noticed_at = source, time.time()
        self.journal.write(NoticeGiven(source))
        if not self._signal_workers(self.place.notice_signal):
            agent.kill()

    def _tear_down(self) -> None:
        """End the workers of a node whose peer has failed: nothing can come of them."""
        if not self.torn_down:
            self.torn_down = read_word(self.place.attempt.failed)
            self._signal_workers(signal.SIGTERM)
            self._kill_at = time.time() + TEARDOWN_S

    def _signal_workers(self, number: int) -> int:
        """Signal every worker that has started; return how many there were."""
        return signal_recorded(self._pids(), number)

    def _show_rank_0(self) -> None:
        """Copy what rank 0 prints to the job's own output, which is where people look first."""
        try:
            with open(self.folder.rank_log(0), "rb") as file:
                file.seek(self._log_position)
                new = file.read()
        except OSError:  # not there yet, or not now
            return
        self._log_position += len(new)
        if new:
            sys.stdout.buffer.write(new)
            sys.stdout.buffer.flush()

    @property
    def _elastic(self) -> bool:
        """Whether torchrun goes on without a node that is lost."""
        return any(w.startswith("--nnodes=") and ":" in w for w in self.command)

    def _end(self, code: int) -> int:
        """Record how it ended, for the peers and for the verdict."""
        failures = [] if code == 0 else self._failures(code)
        # Its workers did not end by themselves, but for want of the rendezvous on the first node.
        has_left = (
            self._elastic and self.place.index > 0 and any(f["rank"] is None for f in failures)
        )
        record: dict[str, Any] = {
            "node": self.place.node,
            "code": code,
            "notice": self.notice,
            "torn_down": self.torn_down,
            "left": has_left,
            "failures": failures,
        }
        self._tell(partial(write_json, self.folder.record, record))
        if code == 0 or self.notice:
            return 0
        if not self.place.run.is_newest(self.place.attempt.number):
            # A requeued job has the same id, and so has its step: an old srun that is left behind
            # a cut link would end, for our bad exit, the later attempt's step.
            return 0
        if has_left:
            head_failover.decide(self.place, dict(os.environ), lambda: bool(self.signals.seen))
            return 1
        if not self.torn_down:
            self._tell(partial(self.place.attempt.failed.write_text, self._name()))
        if not self.place.attempt.port_taken.exists():
            self._wait_for_peers()
        return 1

    def _tell(self, write: Callable[[], object]) -> None:
        try:
            patiently(write)
        except OSError as error:  # the verdict will say that nothing was heard of this node
            say(f"{self._name()} can't record how it ended: {error}")

    def _failures(self, code: int) -> list[dict[str, Any]]:
        noted, now = read_json(self.folder.failures), time.time()
        failures = self._failed_workers(code, noted)
        for record in failures:
            record["error"] = self._error_of(record)
        if not failures:
            failures = [{"rank": None, "code": code, "time": now, "error": noted.get("agent", "")}]
        if oom.kills() > self._oom_kills:
            for first_failure in failures:
                if first_failure["code"] == -signal.SIGKILL:
                    first_failure["error"] = oom.KILLED
        return failures

    def _error_of(self, failed: dict[str, Any]) -> str:
        rank, code = failed["rank"], failed["code"]
        log = self.folder.rank_log(rank)
        if code < 0:
            return first_failure.abort_reason(log) if code == -signal.SIGABRT else ""
        journal = self.place.run.journal(f"rank-{rank}").path
        since = failed["time"] - JOURNALED_S  # not that of a start before
        return first_failure.last_exception(log) or first_failure.journaled_error(journal, since)

    def _failed_workers(self, code: int, noted: dict[str, Any]) -> list[dict[str, Any]]:
        """Return rank, code and time of each worker that failed, as torchrun has told them."""
        failures: list[dict[str, Any]] = noted.get("failures", [])
        return failures

    def _wait_for_peers(self) -> None:
        """Let the peers end by themselves: srun kills them when this task fails."""
        give_up, waiting = time.time() + PEERS_S, self._peers()
        while time.time() < give_up and waiting:
            while waiting and waiting[-1].exists():  # each is looked for until it is seen once
                waiting.pop()
            time.sleep(0.2)


def supervise(kind: type[Supervisor], command: list[str]) -> int:
    try:
        return kind(Place.from_env(dict(os.environ)), command).run()
    except OSError as error:
        say(f"this node can't take part: {error}")
        return 1


def main(command: list[str]) -> int:
    return supervise(Supervisor, command)
