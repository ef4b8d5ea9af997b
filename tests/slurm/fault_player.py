"""Does faults to runs on the tests' cluster, takes them away again, and notes what came of them."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import Cluster, ClusterError
from cluster_machine import Process
from faults import KINDS, LANES, Fault, Lane
from harness import Job

from hpc_ddp.core.checkpoints import published
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.process import live_pid
from tests.raw_events import raw_events

STEPPING_S = 5.0  # a run whose last metrics are older than this takes no steps
SHOW_S = 10.0  # for how long a fault without notice keeps GraceTime at 0


class MissedError(Exception):
    """The target of a fault is not there, or not in a state for it."""


@dataclass
class Lot:
    """One run of a lane, with the folder of the lane's own file system that it lies in."""

    lane: int
    number: int
    seed: int
    backend: str
    job: Job
    scratch: Path
    damaged: set[str] = field(default_factory=set)  # checkpoints that we have damaged

    @property
    def kind(self) -> Lane:
        return LANES[self.lane]

    @property
    def name(self) -> str:
        return f"run-{self.lane}-{self.number}"

    def newest(self) -> AttemptFolder:
        """Return the attempt that runs.

        Raises
        ------
        MissedError
            none does
        """
        attempts = self.job.run.attempts()
        if not attempts:
            raise MissedError("it has not started yet")
        number = attempts[-1].number
        if self.job.events("verdict", number) or not self.processes(number):
            raise MissedError("it waits for its next attempt, or is through")
        return attempts[-1]

    def processes(self, attempt: int) -> list[Target]:
        wanted = {f"HPC_DDP_RUN={self.job.run.path}", f"HPC_DDP_ATTEMPT={attempt}"}
        return [target for target in _targets() if wanted <= target.environ]

    def nodes(self, attempt: AttemptFolder) -> list[str]:
        names: list[str] = self.job.events("started", attempt.number)[0]["nodes"]
        return names

    def job_id(self, attempt: AttemptFolder) -> str:
        return str(attempt.info["job_id"])

    def steps(self) -> bool:
        """Tell whether the run takes steps at this very moment."""
        events = raw_events(self.job.run.path)
        return bool(events) and any(
            e["event"] == "metrics" and e["time"] > time.time() - STEPPING_S for e in events[-20:]
        )

    def stuck(self) -> bool:
        """Tell whether a failure now would be the second one without a checkpoint in between."""
        events = raw_events(self.job.run.path)
        verdicts = [e for e in events if e["event"] == "verdict"]
        if not verdicts or verdicts[-1].get("progress"):
            return False
        since = verdicts[-1]["attempt"]
        saved = any(e["event"] == "checkpoint" and e["attempt"] > since for e in events)
        return verdicts[-1]["cause"] in ("failed", "time limit") and not saved


@dataclass(frozen=True)
class Target:
    """A process of a run."""

    process: Process
    argv: list[str]
    environ: set[str]

    @property
    def part(self) -> str:
        """``supervisor``, ``elastic_agent``, ``srun``, or something else."""
        if self.process.name() == "srun":  # its command line ends with the supervisor's
            return "srun"
        if any(word.endswith("/submitit/core/_submit.py") for word in self.argv):
            return "supervisor"
        return self.argv[2] if self.argv[1:2] and self.argv[1].endswith("/lib/node.py") else ""


def _targets() -> Iterator[Target]:
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            process = Process.of(int(path.name))
            argv = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            environ = set((path / "environ").read_bytes().decode(errors="replace").split("\0"))
            if process.alive():
                yield Target(process, argv, environ)


@dataclass
class Noted:
    """A fault that was played: when, on whom, and whom it hit (run and its attempt then)."""

    fault: Fault
    time: float
    target: str
    missed: bool = False
    hit: list[tuple[Lot, int]] = field(default_factory=list)


class Player:
    """Plays faults. `lots` has the run of each lane."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.lots: dict[int, Lot] = {}
        self.noted: list[Noted] = []
        self.ctld_frozen = False
        self._away: set[str] = set()  # nodes that are cut off or without a slurmd
        self._heals: list[tuple[float, Callable[[], object]]] = []
        self._better: list[str] = []  # jobs of the partition that preempts

    # --- playing and healing ---

    def play(self, fault: Fault) -> Noted:
        """Do a fault, and note it; one whose target is not there is noted as missed."""
        noted = Noted(fault, time.time(), "")
        self.noted.append(noted)
        try:
            lot = self.lots.get(fault.lane)
            if lot is None:
                raise MissedError("nothing is submitted yet")
            if fault.kind.startswith("slurmctld"):
                noted.target = self._controller(fault)
                noted.hit = [
                    (each, len(each.job.run.attempts()) - 1) for each in self.lots.values()
                ]
                return noted
            attempt = lot.newest()
            if KINDS[fault.kind].steps and not lot.steps():
                raise MissedError("it takes no steps now")
            if KINDS[fault.kind].fails and lot.stuck():
                raise MissedError("it has no checkpoint yet since its last failure")
            nodes = lot.nodes(attempt)
            if fault.kind.startswith(("link", "slurmd")):
                nodes = [nodes[fault.node]]
            whole = fault.kind.startswith(("link", "slurmd", "preempted"))
            noted.hit = list(self._on(nodes)) if whole else [(lot, attempt.number)]
            noted.target = f"{lot.name}.{attempt.number}: {self._do(fault, lot, attempt)}"
        except (MissedError, ClusterError, OSError) as error:
            noted.hit = []
            noted.missed, noted.target = True, f"{lot.name if lot else ''}: {error}"
        return noted

    def heal(self, everything: bool = False) -> None:
        """Take away what is over by now, or all that there is."""
        if everything:
            self._thaw()  # the others may have to ask it
        due = [heal for heal in self._heals if everything or heal[0] <= time.time()]
        self._heals = [heal for heal in self._heals if heal not in due]
        for _, mend in sorted(due, key=lambda heal: heal[0]):
            try:
                mend()
            except ClusterError:  # no controller to ask just now
                if everything:
                    raise
                self._later(2, mend)
        if everything and self._better:
            self.cluster.run("scancel", *self._better, check=False)

    def _later(self, seconds: float, mend: Callable[[], object]) -> None:
        self._heals.append((time.time() + seconds, mend))

    def _on(self, nodes: list[str]) -> Iterator[tuple[Lot, int]]:
        """Yield the runs that have one of the nodes, with their attempts."""
        for lot in self.lots.values():
            with contextlib.suppress(MissedError):
                attempt = lot.newest()
                if set(nodes) & set(lot.nodes(attempt)):
                    yield lot, attempt.number

    # --- the kinds ---

    def _do(self, fault: Fault, lot: Lot, attempt: AttemptFolder) -> str:
        """Do a fault to a run; return whom it met."""
        match fault.kind:
            case "preempted" | "preempted without notice":
                return self._preempt(lot.nodes(attempt), fault.kind == "preempted")
            case "worker killed":
                return self._signal(self._worker(lot, attempt, fault.rank), signal.SIGKILL)
            case "worker terminated":
                return self._signal(self._worker(lot, attempt, fault.rank), signal.SIGTERM)
            case "worker stopped":
                target = self._worker(lot, attempt, fault.rank)
                self._later(10, lambda: target.process.send(signal.SIGCONT))
                return self._signal(target, signal.SIGSTOP)
            case "agent killed" | "supervisor killed":
                part = {"agent killed": "elastic_agent"}.get(fault.kind, "supervisor")
                return self._signal(self._part(lot, attempt, part, fault.node), signal.SIGKILL)
            case "srun killed":
                return self._signal(self._part(lot, attempt, "srun", 0), signal.SIGKILL)
            case "batch shell killed":
                return self._signal(self._shell(lot.job_id(attempt)), signal.SIGKILL)
            case "requeued by hand":
                self.cluster.run("scontrol", "requeue", lot.job_id(attempt))
                return f"job {lot.job_id(attempt)}"
            case "link cut for 5 s" | "link cut for 60 s":
                return self._cut(lot.nodes(attempt)[fault.node], KINDS[fault.kind].lasts)
            case "slurmd dead for 20 s" | "slurmd dead for 50 s":
                return self._lose_slurmd(lot.nodes(attempt)[fault.node], KINDS[fault.kind].lasts)
            case "byte flipped" | "file cut short":
                damaged = self._damage(lot, cut_short=fault.kind == "file cut short")
                killed = self._signal(self._worker(lot, attempt, fault.rank), signal.SIGKILL)
                return f"{damaged}, then {killed}"
            case "scratch full":
                return self._fill(lot.scratch)
            case "scratch read-only":
                return self._make_read_only(lot.scratch)
        raise AssertionError(fault.kind)

    def _preempt(self, nodes: list[str], notice: bool) -> str:
        options = f"--partition=high --nodes={len(nodes)} --nodelist={','.join(nodes)} --time=1"
        if not notice:
            self._grace(0)
            self._later(SHOW_S, lambda: self._grace(20))
        done = self.cluster.run(
            *("sbatch", "--parsable", "--no-requeue", *options.split(), "--gpus-per-node=4"),
            *("--output=/dev/null", "--job-name=better", "--wrap=sleep 3"),
        )
        self._better.append(done.stdout.strip())
        return ",".join(nodes)

    def _grace(self, seconds: int) -> None:
        self.cluster.run("scontrol", "update", "PartitionName=low", f"GraceTime={seconds}")

    def _worker(self, lot: Lot, attempt: AttemptFolder, rank: int) -> Target:
        for path in attempt.path.glob(f"*/rank-{rank}.pid"):
            pid = live_pid(path)
            for target in lot.processes(attempt.number):
                if target.process.pid == pid:
                    return target
        raise MissedError(f"no rank {rank} there")

    def _part(self, lot: Lot, attempt: AttemptFolder, part: str, node: int) -> Target:
        for target in sorted(lot.processes(attempt.number), key=lambda each: each.process.pid):
            if target.part == part and f"SLURM_NODEID={node}" in target.environ:
                return target
        raise MissedError(f"no {part} there")

    def _shell(self, job_id: str) -> Target:
        end = f"/job{int(job_id):05d}/slurm_script"
        for target in _targets():
            script = target.argv[1] if len(target.argv) > 1 else ""
            if script.startswith(f"{self.cluster.folder}/") and script.endswith(end):
                return target
        raise MissedError("no batch shell there")

    def _signal(self, target: Target, number: signal.Signals) -> str:
        target.process.send(number)
        return f"process {target.process.pid}"

    def _cut(self, node: str, seconds: float) -> str:
        self._take_away(node)

        def mend() -> None:
            self.cluster.heal(node)
            self._away.discard(node)

        self._later(seconds, mend)
        self.cluster.cut(node)
        return node

    def _lose_slurmd(self, node: str, seconds: float) -> str:
        self._take_away(node)

        def mend() -> None:
            self.cluster.start_slurmd(node)
            self._away.discard(node)

        self._later(seconds, mend)
        self.cluster.kill_slurmd(node)
        return node

    def _take_away(self, node: str) -> None:
        if node in self._away:
            raise MissedError(f"{node} is away already")
        self._away.add(node)

    def _controller(self, fault: Fault) -> str:
        if fault.kind == "slurmctld restarted":
            self.cluster.restart_ctld()
        else:
            self._later(KINDS[fault.kind].lasts, self._thaw)
            self.ctld_frozen = True
            self.cluster.signal_ctld(signal.SIGSTOP)
        return "slurmctld"

    def _thaw(self) -> None:
        self.cluster.signal_ctld(signal.SIGCONT)
        self.ctld_frozen = False

    def _damage(self, lot: Lot, cut_short: bool) -> str:
        found = published(lot.job.run.checkpoints)
        if not found:
            raise MissedError("it has no checkpoint yet")
        path = max(found[0].iterdir(), key=lambda path: path.stat().st_size)
        with open(path, "r+b") as file:
            middle = path.stat().st_size // 2
            file.seek(middle)
            byte = file.read(1)[0]
            if cut_short:
                file.truncate(middle)
            else:
                file.seek(middle)
                file.write(bytes([byte ^ 1]))
        lot.damaged.add(found[0].name)
        return f"{found[0].name}/{path.name}"

    def _fill(self, scratch: Path) -> str:
        filler = scratch / "filler"
        self._later(10, lambda: filler.unlink(missing_ok=True))
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:  # the runs write beside it: until there is no room for another page
                file.write(bytes(4096))
        return f"{filler.stat().st_size / 1e6:.0f} MB"

    def _make_read_only(self, scratch: Path) -> str:
        """Lay a read-only view of it over it, on each node: what is open already stays writable."""

        def on_nodes(script: str) -> None:
            for node in self.cluster.nodes:
                self.cluster.exec_on(node, "sh", "-c", script, check=False)

        self._later(10, lambda: on_nodes(f"umount -l {scratch}"))
        on_nodes(f"mount --bind {scratch} {scratch} && mount -o remount,bind,ro {scratch}")
        return "all nodes"


def outcome(noted: Noted, until: float) -> str:
    """Say what followed a fault in the journals of the runs that it hit, up to a time."""
    told = []
    for lot, attempt in noted.hit:
        events = [e for e in raw_events(lot.job.run.path) if noted.time <= e["time"] < until]
        events = [e for e in events if e["attempt"] >= attempt]
        told.append(f"{lot.name}: {', '.join(_told(events, attempt)) or 'went on'}")
    return "; ".join(told)


def _told(events: list[dict[str, Any]], attempt: int) -> Iterator[str]:
    """Pick what matters of a run's events; attempts that ended without a verdict are named."""
    judged = {e["attempt"] for e in events if e["event"] == "verdict"}
    failed = sum(e["event"] == "save_failed" for e in events)
    if failed:
        yield f"{failed} saves failed"
    for event in events:
        match event["event"]:
            case "verdict":
                yield f"{event['cause']} ({event['action']})"
            case "restored" if event["passed_over"]:
                yield f"passed over {len(event['passed_over'])}"
            case "started" if event["attempt"] > attempt and event["attempt"] - 1 not in judged:
                yield f"attempt {event['attempt']} without a verdict"
