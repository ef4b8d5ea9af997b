"""A real Slurm cluster on one machine, for the tests and for trying things out by hand.

    python tests/slurm/cluster.py shell         a shell beside a cluster, which goes with the shell
    python tests/slurm/cluster.py up | down     keep one between test runs, and end it

Each compute node is a network namespace with a host name, an address and (pretended) GPUs of its
own, so names, interfaces, links and node failures are real; all nodes share the file system.
Up to sixteen instances live side by side. All that one has is named for it, and nothing of a
Slurm that is at home on the machine is used: not /etc/slurm, not /etc/hosts, not its ports or keys.
It needs Debian or Ubuntu, root, and the right to make network namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from types import FrameType
from typing import NoReturn

from cluster_build import GPUS, KEEPER, NODES, Machinery, Proctrack
from cluster_machine import (
    INSTANCES,
    LIMIT_S,
    ClusterError,
    Process,
    available,
    cgroup_reason,
    claim,
    ensure_packages,
    folder_of,
    kill,
    poll,
    sh,
    take_lock,
)
from cluster_versions import ensure, wanted

__all__ = ["ATTACH", "Cluster", "ClusterError", "available", "cgroup_reason", "ensure_packages"]

ATTACH = "HPC_DDP_CLUSTER"  # names the instance that `up` left running


class Cluster(Machinery):
    """One instance. Make it with `Cluster.up`, or with `Cluster.attach` if it is up already."""

    def __init__(self, instance: int) -> None:
        super().__init__(instance)
        self._lock: int | None = None

    @classmethod
    def up(
        cls,
        *,
        proctrack: Proctrack = "linuxproc",
        accounting: bool = True,
        extra: str = "",
        instance: int | None = None,
        suite: str | None = None,
        size: int = NODES,
        first_node: int = 1,
        cpus: Sequence[int] | None = None,
    ) -> Cluster:
        """Bring up the first free instance (or that one); `extra` is added to slurm.conf.

        `suite` is the one of Debian to take Slurm from; without, the environment says it. The
        `size` nodes are numbered from `first_node` on, and `cpus` are those of each.
        """
        reason = available() or (cgroup_reason() if proctrack == "cgroup" else None)
        if reason:
            raise ClusterError(reason)
        suite = wanted() if suite is None else suite
        ensure_packages()
        if suite:
            ensure(suite)
        number, lock = claim(instance)
        self = cls(number)
        self._lock = lock
        self.proctrack, self.accounting, self.extra = proctrack, accounting, extra
        self.suite, self.size, self.first_node = suite, size, first_node
        self.cpus = [*cpus] if cpus else self.cpus[:1] * size
        try:
            self._clear()  # an earlier holder may have been killed
            _start_guard(number)
            self._build()
        except BaseException:
            self.down()
            raise
        return self

    @classmethod
    def attach(cls, instance: int) -> Cluster:
        """Use an instance that is up; its `down` leaves it up."""
        free = take_lock(instance)
        if free is not None:
            folder_of(instance).with_suffix(".lock").unlink()
            os.close(free)
            raise ClusterError(f"no test cluster {instance} is up on this machine")
        self = cls(instance)
        self.attached = True
        vars(self).update({k: v for k, v in self._recorded().items() if k != "processes"})
        if not self.conf.exists() or not self.address:
            raise ClusterError(f"test cluster {instance} is not ready to be used")
        return self

    def down(self) -> None:
        """End all that the cluster started, and remove all that it made."""
        if self._lock is None:
            return
        self._take_down()
        os.close(self._lock)
        self._lock = None

    def _take_down(self) -> None:
        keeper = self._processes.get(KEEPER)
        self._clear()
        # Unlinked while it is held, so that nobody can lock a file that is about to go.
        self.folder.with_suffix(".lock").unlink(missing_ok=True)
        if keeper:
            keeper.send(signal.SIGKILL)

    @property
    def cgroup_reason(self) -> str | None:
        """Why this machine cannot do proctrack="cgroup", or None."""
        return cgroup_reason()

    # --- what tests do with it ---

    def cut(self, node: str) -> None:
        """Pull the node's network cable; what runs there goes on."""
        sh("ip", "link", "set", self._cable(node), "down")

    def heal(self, node: str) -> None:
        sh("ip", "link", "set", self._cable(node), "up")

    @contextlib.contextmanager
    def slow_link(self, node: str) -> Iterator[None]:
        """Let the node send 2.5 MB/s at most."""
        shape = ["root", "tbf", "rate", "20mbit", "burst", "32kbit", "latency", "400ms"]
        self.exec_on(node, "tc", "qdisc", "add", "dev", "eth0", *shape)
        try:
            yield
        finally:
            self.exec_on(node, "tc", "qdisc", "del", "dev", "eth0", "root")

    @contextlib.contextmanager
    def scratch_full(self) -> Iterator[None]:
        """Leave no byte free on the nodes' scratch, also where a run deletes old checkpoints: the
        next save would have their room."""
        ballast, end = self.scratch / "ballast", threading.Event()

        def fill() -> None:
            with open(ballast, "wb", buffering=0) as file:
                while not end.wait(0.02):
                    with contextlib.suppress(OSError):
                        while file.write(bytes(4096)):
                            pass

        thread = threading.Thread(target=fill)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()
            ballast.unlink()

    @contextlib.contextmanager
    def scratch_read_only(self) -> Iterator[None]:
        """Lay a read-only view over scratch; what is open stays so, as on a real one."""
        view = self.folder / "view"
        view.mkdir(exist_ok=True)
        sh("mount", "--bind", str(self.scratch), str(view))
        sh("mount", "--make-private", str(view))
        sh("mount", "-o", "remount,bind,ro", str(view))
        sh("mount", "--bind", str(view), str(self.scratch))
        yield
        sh("umount", "--lazy", str(self.scratch))
        sh("umount", "--lazy", str(view))

    @contextlib.contextmanager
    def scratch_gone(self) -> Iterator[None]:
        """Leave only the empty mount point, which takes no files."""
        sh("mount", "-t", "tmpfs", "-o", "ro", "gone", str(self.scratch))
        yield
        sh("umount", "--lazy", str(self.scratch))

    def slurmd_pid(self, node: str) -> int:
        """Return the id of a node's slurmd, below which its jobs run."""
        return self._processes[f"slurmd.{node}"].pid

    def kill_slurmd(self, node: str) -> None:
        """Kill a node's slurmd; its jobs go on."""
        self._stop(f"slurmd.{node}", number=signal.SIGKILL)

    @contextlib.contextmanager
    def slow_slurmd(self, node: str) -> Iterator[None]:
        """Have a node's slurmd take no message; its jobs go on."""
        self._processes[f"slurmd.{node}"].send(signal.SIGSTOP)
        try:
            yield
        finally:
            self._processes[f"slurmd.{node}"].send(signal.SIGCONT)

    def bind_slurmds(self) -> None:
        """Bind the slurmds to the CPU on which the nodes' namespaces were made.

        Linux numbers namespaces by CPU since 6.18, and refuses to mount one (EINVAL) within another
        that has a higher number, as job_container/tmpfs does.
        """
        for node in self.nodes:
            pid = str(self._processes[f"slurmd.{node}"].pid)
            sh("taskset", "--all-tasks", "--cpu-list", "--pid", "0", pid)

    def stop_ctld(self) -> None:
        self._stop("slurmctld")

    def restart_ctld(self) -> None:
        self.stop_ctld()
        self._start_ctld()

    def signal_ctld(self, number: signal.Signals) -> None:
        self._processes["slurmctld"].send(number)

    def reconfigure(self, *, proctrack: Proctrack | None = None, extra: str | None = None) -> None:
        """Restart slurmctld and the slurmds with other settings, which ends all jobs."""
        if proctrack == "cgroup" and self.cgroup_reason:
            raise ClusterError(self.cgroup_reason)
        self.reset()
        self.proctrack = proctrack or self.proctrack
        self.extra = self.extra if extra is None else extra
        self._write_conf()
        self._save(self._processes)
        self._stop("slurmctld", *(f"slurmd.{n}" for n in self.nodes))
        self._start_ctld()
        self._start_slurmds()

    def reset(self, timeout: float = LIMIT_S) -> None:
        """Cancel all jobs, mend all links and daemons, and wait until every node is idle."""
        for node in self.nodes:
            self.heal(node)
            self.start_slurmd(node)
        end = time.monotonic() + timeout
        while not self._calm():
            if time.monotonic() > end:
                raise ClusterError(f"no reset within {timeout:g} s: {self.states()}")
            time.sleep(0.2)
        if not poll(lambda: not self.strays(), 0.5):
            kill(self.strays(), signal.SIGKILL, 5)  # a lost job's; Slurm knows them no more

    def _calm(self) -> bool:
        """Whether there is no job and each node is idle; if not, push towards it."""
        jobs = self.run("squeue", "-h", "-o", "%A").stdout.split()
        if jobs:
            self.run("scancel", *sorted(set(jobs)), check=False)
            # A job that minds no SIGTERM would take KillWait to go.
            kill([p for p in self.strays() if p.name() != "slurmstepd"], signal.SIGKILL, 1)
        states = self.states()
        for node, state in states.items():
            if state.endswith("*"):
                # slurmctld asks a silent node every 10 s only; a starting slurmd reports at once.
                self._stop(f"slurmd.{node}")
                self.start_slurmd(node)
                poll(partial(self._answers, node), 3, 0.1)
            elif state.startswith(("down", "drain", "fail")):
                self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
        return not jobs and set(states.values()) == {"idle"}

    def _answers(self, node: str) -> bool:
        return not self.states()[node].endswith("*")

    def strays(self) -> list[Process]:
        """What runs on the nodes beside their daemons."""
        daemons = {p.pid for p in self._processes.values()}
        return [p for p in self._residents() if p.pid not in daemons]


# --- when its holder is killed -------------------------------------------------------------------


def _start_guard(instance: int) -> None:
    """Start a process that takes the instance down once the holder of its lock is no more.

    A test process that is killed, or that pytest-xdist ends at a Ctrl-C, takes nothing down.
    """
    argv = [sys.executable, __file__, "guard", "--instance", str(instance)]
    quiet = subprocess.DEVNULL
    guard = subprocess.Popen(argv, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    guard.returncode = 0  # it may outlive this process, of which Popen would warn


def _guard(instance: int | None) -> int:
    """Wait for the lock; do nothing where its holder has taken the instance down itself."""
    assert instance is not None
    path = folder_of(instance).with_suffix(".lock")
    with contextlib.suppress(FileNotFoundError):
        lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.stat(path).st_ino == os.fstat(lock).st_ino:
            cluster = Cluster(instance)
            cluster._lock = lock
            cluster.down()
    return 0


# --- the command line ----------------------------------------------------------------------------


def _describe(cluster: Cluster) -> str:
    return f"""\
test cluster {cluster.instance}, in {cluster.folder} (logs in log/)
  nodes       {" ".join(cluster.nodes)}, each with 8 CPUs and {GPUS} pretended GPUs
  partitions  low (default; preempted by high, 20 s notice), low0 (the same, no notice), high
  try         srun -N2 --gpus-per-node=4 bash -c 'echo $(hostname): $CUDA_VISIBLE_DEVICES'"""


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    """Let a signal that would kill this process unwind it, so that the cluster goes too."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(each, lambda *_: None)  # not a second time, while things are taken down
        raise SystemExit(128 + number)

    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(each, leave)
    yield


def _shell(instance: int | None) -> int:
    with _signals_end_it(), contextlib.ExitStack() as stack:
        print("bringing up a cluster ...", file=sys.stderr, flush=True)
        cluster = Cluster.up(instance=instance)
        stack.callback(cluster.down)
        print(_describe(cluster), file=sys.stderr, flush=True)
        if not sys.stdin.isatty():
            return _run_shell(["bash"], cluster)
        rc = cluster.folder / "bashrc"
        prompt = f"(cluster {cluster.instance}) \\w\\$ "
        rc.write_text(f"[ -f ~/.bashrc ] && . ~/.bashrc\nPS1={shlex.quote(prompt)}\n")
        # At a prompt, Ctrl-C is for the line that is being typed.
        signal.signal(signal.SIGINT, lambda *_: None)
        return _run_shell(["bash", "--rcfile", str(rc), "-i"], cluster)


def _run_shell(argv: list[str], cluster: Cluster) -> int:
    batch = not sys.stdin.isatty()
    # A script's commands form a group of their own, which can be ended as a whole.
    child = subprocess.Popen(argv, env=cluster.env(), start_new_session=batch)
    try:
        return child.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            if batch:
                os.killpg(child.pid, signal.SIGKILL)
            elif child.poll() is None:
                child.send_signal(signal.SIGHUP)


def _up(instance: int | None) -> int:
    with _signals_end_it():
        cluster = Cluster.up(instance=instance)
    assert cluster._lock is not None
    # The lock lives as long as somebody has the file open.
    cluster._start(KEEPER, "sleep", "infinity", keep=[cluster._lock])
    print(_describe(cluster), file=sys.stderr)
    print(f"export {ATTACH}={cluster.instance}\nexport SLURM_CONF={cluster.conf}")
    if cluster.suite:
        print(f"export PATH={shlex.quote(cluster.path)}")
    return 0


def _down(instance: int | None) -> int:
    wanted = [instance] if instance is not None else [n for n in INSTANCES if _kept(n)]
    if not wanted:
        raise ClusterError("no test cluster is being kept up on this machine")
    for number in wanted:
        cluster = Cluster(number)
        cluster._lock = take_lock(number)
        if cluster._lock is not None:  # nobody has it: remove what a killed holder has left
            cluster.down()
        elif _kept(number):
            cluster._take_down()
        else:
            raise ClusterError(f"test cluster {number} is in use, and goes with its user")
    return 0


def _kept(instance: int) -> bool:
    return Cluster(instance)._alive(KEEPER)


def main() -> int:
    parser = argparse.ArgumentParser(description="a real Slurm cluster of four nodes, for tests")
    parser.add_argument("command", choices=("shell", "up", "down", "guard"))
    parser.add_argument("--instance", type=int, choices=INSTANCES, help="default: the first free")
    args = parser.parse_args()
    commands = {"shell": _shell, "up": _up, "down": _down, "guard": _guard}
    try:
        return commands[args.command](args.instance)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
