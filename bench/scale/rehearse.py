"""Rehearses a job of many nodes on this machine, and counts what each node asks for.

``make rehearse N=64``, or ``python bench/scale/rehearse.py --nodes 4 16 64 [--workers 1]``

Real are slurmctld, a slurmd for each node, the batch script, srun, supervisors, torchrun's agents
with their rendezvous, fork servers, verdict and journals, each in its node's network namespace.
Two things are not. What imports torch is forked from one warm parent (fork_parent.py), for want of
memory; and the ranks only count steps (stand_in.py). `--exec` starts all as a cluster does, to
compare the counts.

A rehearsal starts a run, counts while it only trains, has a job of a higher priority preempt it,
and lets it finish in its second attempt; `--cut` lets nodes lose their network before that, all at
once; with `--log` each rank prints a line in each step, five a second. Needs root, gcc, bpftrace, a
mounted debugfs, and what `make cluster` needs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import operations

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
sys.path.insert(0, str(REPO / "tests/slurm"))

from cluster import Cluster  # noqa: E402  # of the tests, which is no package

DISK = Path("/var/tmp/hpc-ddp-rehearsal")  # the shared disk: a file system of its own, in memory
MEMORY = Path("/dev/shm/hpc-ddp-rehearsal")  # what the rehearsal and its ranks tell each other
LIMIT_S = 1500.0
SETTLE_S = 60.0  # until the first looks of a start are over
# All nodes share this machine's two cores: Slurm's own limits of time are for nodes with their own.
SLURM_CONF = "MessageTimeout=100\nSlurmdTimeout=120\nTCPTimeout=60\nUnkillableStepTimeout=600\n"
# All namespaces share the table of neighbours, and all nodes this machine's process ids.
LIMITS = {
    "net.ipv4.neigh.default.gc_thresh3": 1 << 17,
    "net.ipv4.neigh.default.gc_thresh2": 1 << 16,
    "net.ipv4.neigh.default.gc_thresh1": 1 << 15,
    "kernel.pid_max": 1 << 22,
    "fs.inotify.max_user_instances": 1 << 13,
}


@dataclass
class Phase:
    """A part of a rehearsal: its seconds, and what was asked for in it.

    `operations` are those on the shared disk, by node and kind; `bytes` those that each node sent
    and got; `rpcs` all that slurmctld got; `cpu_s` the CPU time of this machine.
    """

    seconds: float = 0.0
    operations: dict[str, Counter[str]] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    rpcs: dict[str, int] = field(default_factory=dict)
    cpu_s: float = 0.0


@dataclass
class Rehearsal:
    """One run of so many nodes, on a cluster that is up."""

    cluster: Cluster
    workers: int
    python: str
    logs: bool = False  # whether each rank prints a line in each step
    phases: dict[str, Phase] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)

    def play(self, settle: float, seconds: float, cut: int) -> None:
        """Start, train for some seconds, be preempted, start again, lose nodes, finish."""
        ranks = self.cluster.size * self.workers
        with self.phase("start"):
            job = self.submit()
            self.wait_for(lambda: self.count_of("started-0-*") == ranks, "the start of all ranks")
        self.figures["sockets of the first node"] = self.sockets(self.cluster.nodes[0])
        self.figures["sockets of the last node"] = self.sockets(self.cluster.nodes[-1])
        self.figures["processes"] = self.processes()
        self.figures["memory used, MB"] = used_mb()
        time.sleep(settle)
        with self.phase("training"):
            time.sleep(seconds)
        with self.phase("preemption"):
            high = ["sbatch", "--parsable", "-p", "high", "--exclusive", "--wrap", "sleep 1"]
            nodes = ["-N", str(self.cluster.size), "--chdir", "/", "-o", "/dev/null"]
            self.cluster.run(*high, *nodes)
            self.wait_for(lambda: self.count_of("stopped-0-*") == ranks, "the notice of all ranks")
            self.wait_for(lambda: self.event("verdict"), "the verdict")
        with self.phase("second start"):
            self.wait_for(lambda: self.count_of("started-1-*") == ranks, "the second start")
        if cut:
            self.lose(self.cluster.nodes[-cut:], job)
        with self.phase("end"):
            (MEMORY / "finish").touch()
            last = 2 if cut else 1
            self.wait_for(lambda: self.event("verdict", last), "the last verdict")
            self.wait_for(lambda: job not in self.queue(), "the end of the job")

    def lose(self, nodes: list[str], job: str) -> None:
        """Cut nodes off at the same moment; once Slurm has requeued the job, bring them back, and
        wait for its next start."""
        ranks = self.cluster.size * self.workers
        with self.phase("loss of nodes"):
            for node in nodes:
                self.cluster.cut(node)
            show = ["scontrol", "show", "job", job]
            self.wait_for(lambda: "Restarts=2" in self.cluster.run(*show).stdout, "the requeue")
        with self.phase("start after the loss"):
            for node in nodes:
                self.cluster.heal(node)
            self.wait_for(lambda: self.count_of("started-2-*") == ranks, "the third start")

    def submit(self, *more: str, package: Path = REPO) -> str:
        """Submit the run by the hpc_ddp of a checkout, with `more` options; return the job's id."""
        argv = [sys.executable, "-m", "hpc_ddp", "submit", "--nodes", str(self.cluster.size)]
        argv += ["--nproc-per-node", str(self.workers), "--cpus-per-node", "8"]
        argv += ["--partition", "low", "--python", self.python, "--time", "5:00:00"]
        argv += ["--runs-dir", str(DISK / "runs"), *more, str(HERE / "stand_in.py")]
        argv += [str(MEMORY), str(DISK / "state"), *(["--log"] if self.logs else [])]
        env = {**self.cluster.env(), "PYTHONPATH": str(package)}
        print(self.cluster.run(*argv, env=env, cwd=DISK).stdout, flush=True)
        return self.queue()[-1]

    @property
    def run(self) -> Path:
        """The run's folder."""
        return next((DISK / "runs").glob("*/*/job.json")).parent

    def queue(self) -> list[str]:
        """Return the ids of the jobs that are not over."""
        return self.cluster.run("squeue", "-h", "-o", "%A").stdout.split()

    def event(self, name: str, attempt: int = 0) -> dict[str, Any] | None:
        """Return an event of the batch script's journal, None before it is written."""
        with contextlib.suppress(OSError):
            for line in (self.run / "journal/batch.jsonl").read_text().splitlines():
                event: dict[str, Any] = json.loads(line)
                if (event["event"], event["attempt"]) == (name, attempt):
                    return event
        return None

    def count_of(self, pattern: str) -> int:
        """Return how many ranks have left a file of that name."""
        return sum(1 for _ in MEMORY.glob(pattern))

    def wait_for(self, condition: Callable[[], object], event: str) -> None:
        """Return once `condition` holds; raise RuntimeError after `LIMIT_S`, or for a run that has
        ended before."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            if time.monotonic() > end:
                raise RuntimeError(f"{event} did not come within {LIMIT_S:g} s")
            time.sleep(0.1)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a part of the rehearsal."""
        spaces = {
            os.stat(f"/run/netns/{self.cluster._netns(node)}").st_ino: node
            for node in self.cluster.nodes
        }
        phase = self.phases[name] = Phase()
        with operations.count(DISK, spaces) as phase.operations:
            self.cluster.run("sdiag", "--reset", check=False)
            before, cpu, began = self.traffic(), cpu_seconds(), time.monotonic()
            yield
            phase.seconds = time.monotonic() - began
            phase.cpu_s = cpu_seconds() - cpu
            phase.bytes = {node: n - before[node] for node, n in self.traffic().items()}
            phase.rpcs = read_rpcs(self.cluster.run("sdiag", check=False).stdout)
        print(f"{name}: {phase.seconds:.1f} s, {phase.cpu_s:.1f} s of CPU", flush=True)

    def traffic(self) -> dict[str, int]:
        """Return the bytes that each node has sent and got."""
        return {node: self._traffic_of(node) for node in self.cluster.nodes}

    def _traffic_of(self, node: str) -> int:
        folder = Path("/sys/class/net") / self.cluster._cable(node) / "statistics"
        return sum(int((folder / name).read_text()) for name in ("rx_bytes", "tx_bytes"))

    def sockets(self, node: str) -> int:
        """Return the TCP connections that a node has to other nodes."""
        lines = self.cluster.exec_on(node, "ss", "-tnH", "state", "established").stdout.splitlines()
        addresses = [line.split()[-2:] for line in lines]
        return sum(here.rsplit(":", 1)[0] != there.rsplit(":", 1)[0] for here, there in addresses)

    def processes(self) -> int:
        """Return how many processes the nodes have, beside their daemons."""
        return len(self.cluster.strays())


def read_rpcs(text: str) -> dict[str, int]:
    """Return how many messages of each type slurmctld got, by what sdiag prints."""
    part = text.partition("by message type")[2].partition("by user")[0]
    return {name: int(n) for name, n in re.findall(r"^\s*([A-Z_]+) .*?count:(\d+)", part, re.M)}


def cpu_seconds() -> float:
    """Return the CPU time that this machine has spent, in s."""
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def used_mb() -> float:
    """Return the memory in use on this machine, in MB."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(lines[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    return (total - free) / 1024


# --- the rig -------------------------------------------------------------------------------------


@contextlib.contextmanager
def wide_limits() -> Iterator[None]:
    """Set this machine's limits for many nodes, and set them back."""
    files = {Path("/proc/sys") / name.replace(".", "/"): n for name, n in LIMITS.items()}
    before = {file: file.read_text() for file in files}
    try:
        for file, number in files.items():
            file.write_text(str(max(number, int(before[file]))))
        yield
    finally:
        for file, text in before.items():
            file.write_text(text)


@contextlib.contextmanager
def shared_disk() -> Iterator[None]:
    """Mount the file system that all nodes share, which nothing else uses."""
    for folder in (DISK, MEMORY):
        folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8g", "disk", DISK], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", DISK], check=True)
        shutil.rmtree(MEMORY)


@contextlib.contextmanager
def warm_python() -> Iterator[str]:
    """Start the warm parent, and yield the path of the Python that has it fork."""
    client, listener = MEMORY / "python", MEMORY / "warm"
    defines = [f'-DPYTHON="{sys.executable}"', f'-DFORK_SOCKET="{listener}"']
    argv = ["gcc", "-O1", "-Wall", *defines, "-o", str(client), str(HERE / "fork_client.c")]
    subprocess.run(argv, check=True)
    parent = subprocess.Popen(
        [sys.executable, HERE / "fork_parent.py", listener, client],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
    )
    try:
        assert parent.stdout is not None
        if not parent.stdout.readline():
            raise RuntimeError("the warm parent has not started")
        yield str(client)
    finally:
        parent.kill()
        parent.wait()


def summary(rehearsal: Rehearsal) -> dict[str, Any]:
    """Return what a rehearsal has measured, per node."""
    nodes = rehearsal.cluster.nodes
    result: dict[str, Any] = {"nodes": len(nodes), "workers": rehearsal.workers}
    for name, phase in rehearsal.phases.items():
        totals = {node: sum(phase.operations.get(node, {}).values()) for node in nodes}
        others = sorted(totals[node] for node in nodes[1:])
        kinds: Counter[str] = Counter()
        for node in nodes:
            kinds.update(phase.operations.get(node, {}))
        result[name] = {
            "seconds": round(phase.seconds, 1),
            "cpu_s": round(phase.cpu_s, 1),
            "operations": {
                "first node": totals[nodes[0]],
                "median of the others": others[len(others) // 2] if others else 0,
                "most of the others": others[-1] if others else 0,
                "login": sum(phase.operations.get("login", {}).values()),
                "all, by kind": dict(kinds),
            },
            "bytes": {
                "first node": phase.bytes[nodes[0]],
                "median": sorted(phase.bytes.values())[len(nodes) // 2],
            },
            "rpcs": sum(phase.rpcs.values()),
            "rpcs_by_type": phase.rpcs,
        }
    return result | {"figures": rehearsal.figures}


@contextlib.contextmanager
def rig(size: int, is_forked: bool = True) -> Iterator[tuple[Cluster, str]]:
    """Bring up a cluster of that size, and yield it with the job's Python."""
    began = time.monotonic()
    with shared_disk(), contextlib.ExitStack() as stack:
        python = stack.enter_context(warm_python()) if is_forked else sys.executable
        cluster = Cluster.up(accounting=False, size=size, extra=SLURM_CONF)
        stack.callback(cluster.down)
        grace = ["PartitionName=low", f"GraceTime={LIMIT_S:.0f}"]  # all nodes share two cores
        cluster.run("scontrol", "update", *grace)
        print(f"{size} nodes are up after {time.monotonic() - began:.0f} s", flush=True)
        yield cluster, python


def rehearse(size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Play on a cluster of that size, and return the summary."""
    with rig(size, not options.exec) as (cluster, python):
        rehearsal = Rehearsal(cluster, options.workers, python, options.log)
        rehearsal.figures["memory used by the idle rig, MB"] = used_mb()
        try:
            rehearsal.play(options.settle, options.seconds, options.cut)
        except BaseException:
            keep = Path("/tmp/rehearsal-failed")
            shutil.rmtree(keep, ignore_errors=True)
            shutil.copytree(DISK, keep, symlinks=True)
            shutil.copytree(cluster.folder / "log", keep / "slurm-log")
            raise
        return summary(rehearsal)


def main() -> None:
    """Rehearse for each size, and append the results to a file, a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--workers", type=int, default=1, help="ranks of a node")
    parser.add_argument("--settle", type=float, default=SETTLE_S, help="seconds before that")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training that are counted")
    parser.add_argument("--cut", type=int, default=0, help="nodes that lose their network")
    parser.add_argument("--log", action="store_true", help="each rank prints a line in each step")
    parser.add_argument("--exec", action="store_true", help="start each process as a cluster does")
    parser.add_argument("--output", type=Path, help="a file of JSON lines to append to")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with wide_limits():
        for size in options.nodes:
            result = rehearse(size, options) | {"exec": options.exec, "log": options.log}
            print(json.dumps(result, indent=1), flush=True)
            if options.output:
                with options.output.open("a") as file:
                    file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
