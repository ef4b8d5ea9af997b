"""How the test cluster is built: its hosts, its configuration, its daemons, and its end."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from string import Template
from typing import Any, Literal, NoReturn

from cluster_machine import (
    LIMIT_S,
    PATH,
    ClusterError,
    Process,
    folder_of,
    free_subnet,
    freezer_mount,
    ip_batch,
    kill,
    poll,
    sh,
    tail,
)
from cluster_versions import home_of

Proctrack = Literal["linuxproc", "cgroup"]

HERE = Path(__file__).resolve().parent
NODES = 4
GPUS = 4
KEEPER = "keeper"  # the process that holds the lock of a cluster without a user
# What a job or a shell inside a job has, and what must not leak into the commands of a test.
SLURM_VARIABLE = re.compile(r"(SLURMD?|SBATCH|SRUN|SALLOC|SCANCEL|SQUEUE|SINFO|SACCT|PMI)_")


class Machinery:
    """The hosts and daemons of one instance, without a care for whose it is."""

    KEPT = ("subnet", "accounting", "proctrack", "extra", "suite", "size", "first_node", "cpus")

    def __init__(self, instance: int) -> None:
        self.instance = instance
        self.folder = folder_of(instance)
        self.conf = self.folder / "slurm.conf"
        self.scratch = self.folder / "scratch"
        self.cluster = f"hd{instance}"
        self.controller = f"{self.cluster}ctl"
        self.size = NODES
        self.first_node = 1
        self.cpus = [8] * NODES  # of each node
        self.subnet = ""  # such as 10.66.40.0/24
        self.ctld_port, self.slurmd_port, self.dbd_port = (
            26800 + 10 * instance + k for k in (0, 1, 2)
        )
        self.accounting = True
        self.proctrack: Proctrack = "linuxproc"
        self.extra = ""
        self.suite = ""  # of Debian, whose Slurm it is; the machine's own without
        self._children: list[subprocess.Popen[bytes]] = []
        self.attached = False

    @property
    def address(self) -> str:
        """The login side's address on the nodes' network; '' before there is one."""
        return str(ipaddress.IPv4Network(self.subnet)[-2]) if self.subnet else ""

    def addresses(self) -> dict[str, str]:
        """The address of each node."""
        network = ipaddress.IPv4Network(self.subnet)
        return {node: str(network[k]) for k, node in enumerate(self.nodes, start=1)}

    @property
    def nodes(self) -> list[str]:
        return [f"{self.cluster}n{k + self.first_node}" for k in range(self.size)]

    # --- commands ---

    def env(self) -> dict[str, str]:
        """The environment of a user on the login node."""
        clean = {k: v for k, v in os.environ.items() if not SLURM_VARIABLE.match(k)}
        return {**clean, "PATH": self.path, "SLURM_CONF": str(self.conf)}

    @property
    def path(self) -> str:
        """The PATH that has this cluster's Slurm."""
        return f"{home_of(self.suite)}/bin:{PATH}" if self.suite else PATH

    def run(
        self, *argv: str, check: bool = True, timeout: float = LIMIT_S, **kw: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as on the login node, and keep what it says."""
        kw = {"env": self.env(), "stdin": subprocess.DEVNULL, "capture_output": True, **kw}
        if "input" in kw:
            del kw["stdin"]
        try:
            done: subprocess.CompletedProcess[str] = subprocess.run(
                argv, check=False, timeout=timeout, text=True, **kw
            )
        except subprocess.TimeoutExpired:
            late = f"`{shlex.join(argv)}` did not end within {timeout:g} s"
            raise ClusterError(late) from None
        if check and done.returncode:
            said = f"{done.stdout or ''}{done.stderr or ''}"
            raise ClusterError(f"`{shlex.join(argv)}` ended with {done.returncode}: {tail(said)}")
        return done

    def exec_on(
        self, node: str, *argv: str, cwd: str | Path = "/", **kw: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node: with its network, its host name and its view of the names."""
        return self.run(*self._inside(node, cwd), *argv, **kw)

    def version(self) -> tuple[int, ...]:
        """Of its Slurm, such as (24, 11, 5)."""
        said = self.run("slurmctld", "-V").stdout.split()[-1]
        return tuple(int(part) for part in said.split("."))

    def states(self) -> dict[str, str]:
        """The nodes' states as sinfo has them, such as idle, mixed, or down* (no answer)."""
        lines = self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%N %T").stdout.splitlines()
        return {node: state for node, state in (line.split() for line in lines)}

    def wait_idle(self, timeout: float = LIMIT_S) -> None:
        if not poll(lambda: set(self.states().values()) == {"idle"}, timeout, 0.1):
            raise ClusterError(f"the nodes are not idle after {timeout:g} s: {self.states()}")

    def start_slurmd(self, node: str) -> None:
        if not self._alive(f"slurmd.{node}"):
            self._start(f"slurmd.{node}", *self._slurm("slurmd"), host=node)

    # --- building ---

    def _build(self) -> None:
        self.subnet = str(free_subnet(self.instance, self.size))
        for name in ("log", "state", "cgroup", "db-tmp", *(f"spool.{n}" for n in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        if self.accounting:
            self._start("mariadb-install", *self._mariadb_install())
        self._write_names()
        self._write_conf()
        self._make_network()
        self._make_scratch()
        self._start_munge()
        for host in (self.controller, *self.nodes):
            self._make_host(host)
        if self.accounting:
            self._start_accounting()
        self._start_ctld()
        self._start_slurmds()
        self._check()

    def _write_names(self) -> None:
        try:
            names = Path("/etc/hosts").read_text().rstrip() + "\n"
        except OSError:
            names = "127.0.0.1 localhost\n"
        for name, address in ((self.controller, self.address), *self.addresses().items()):
            names += f"{address} {name}\n"
        (self.folder / "hosts").write_text(names)

    def _write_conf(self) -> None:
        addresses = self.addresses()
        values = {
            **{k: str(v) for k, v in vars(self).items() if not k.startswith("_")},
            "address": self.address,
            "accounting": f"AccountingStorageType=accounting_storage/slurmdbd\n"
            f"AccountingStorageHost={self.address}\nAccountingStoragePort={self.dbd_port}\n"
            # Whoever speaks to slurmdbd takes munge's socket from here, and not from AuthInfo.
            f"AccountingStoragePass={self.folder}/munge.socket"
            if self.accounting
            else "AccountingStorageType=accounting_storage/none",
            "plugins": f"PluginDir={home_of(self.suite)}/lib/slurm" if self.suite else "",
            "node_lines": "\n".join(
                f"NodeName={node} NodeAddr={addresses[node]} CPUs={cpus} RealMemory=20000"
                f" Gres=gpu:{GPUS}"
                for node, cpus in zip(self.nodes, self.cpus, strict=True)
            ),
        }
        for name in ("slurm.conf", "slurmdbd.conf"):
            text = Template((HERE / f"cluster.{name}").read_text()).substitute(values)
            (self.folder / name).write_text(text)
        (self.folder / "slurmdbd.conf").chmod(0o600)  # slurmdbd insists
        # Also linuxproc needs a cgroup plugin that loads: 22.05 knows no way to have none. An empty
        # folder will do, which spares a machine without cgroup v1. Before 22.05 there were no such
        # plugins, and slurmctld stops at a key that it does not know.
        freezer = freezer_mount() if self.proctrack == "cgroup" else None
        mount = freezer.parent if freezer else self.folder / "cgroup"
        plugin = "CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\n" if self.version() >= (22, 5) else ""
        (self.folder / "cgroup.conf").write_text(f"CgroupMountpoint={mount}\n{plugin}")
        if not (self.folder / "gres.conf").exists():
            gpus = f"{self._make_gpus()}[0-{GPUS - 1}]"
            (self.folder / "gres.conf").write_text(
                f"NodeName={','.join(self.nodes)} Name=gpu File={gpus}\n"
            )

    def _make_gpus(self) -> str:
        """Device files for the GPUs, here or, where the file system has none, in /dev."""
        for prefix in (f"{self.folder}/gpu", f"/dev/hpc-ddp-{self.instance}-gpu"):
            try:
                for k in range(GPUS):
                    os.mknod(f"{prefix}{k}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
                    os.close(os.open(f"{prefix}{k}", os.O_RDONLY))
            except OSError:
                continue
            return prefix
        raise ClusterError("this machine does not permit device files (`mknod` fails)")

    @property
    def _bridge(self) -> str:
        return f"hpcddp{self.instance}"

    def _cable(self, node: str) -> str:
        """The login side's end of the node's link."""
        if node not in self.nodes:
            raise ClusterError(f"no node `{node}`; there are {', '.join(self.nodes)}")
        return f"{self._bridge}n{self.nodes.index(node) + 1}"

    def _netns(self, node: str) -> str:
        return f"hpc-ddp-{self.instance}-{node}"

    def _make_network(self) -> None:
        size = ipaddress.IPv4Network(self.subnet).prefixlen
        lines = [
            f"link add {self._bridge} type bridge",
            f"addr add {self.address}/{size} dev {self._bridge}",
            f"link set {self._bridge} up",
        ]
        ip_batch(lines)
        for node, address in self.addresses().items():
            ns, cable = self._netns(node), self._cable(node)
            sh("ip", "netns", "add", ns)
            ip_batch(
                [
                    f"link add {cable} type veth peer name eth0 netns {ns}",
                    f"link set {cable} master {self._bridge} up",
                ]
            )
            inside = [f"addr add {address}/{size} dev eth0", "link set eth0 up", "link set lo up"]
            ip_batch(inside, "-n", ns)

    def _make_scratch(self) -> None:
        """A small file system of the nodes' own; shared, so that they see what is done to it."""
        self.scratch.mkdir()
        sh("mount", "-t", "tmpfs", "-o", "size=64m,mode=755", "scratch", str(self.scratch))
        sh("mount", "--make-shared", str(self.scratch))

    def _make_host(self, host: str) -> None:
        """A process that holds a host's namespaces, in which our names lie over /etc/hosts.

        The mounts are slaves: unmounting a namespace's file outside must free it in here as well.
        """
        script = f"set -e; mount --bind {self.folder}/hosts /etc/hosts; hostname {host}\n"
        if self.suite:  # a job that got no PATH has the default one, and so the machine's own Slurm
            script += (
                f"for program in {home_of(self.suite)}/bin/*; do place=/usr/bin/${{program##*/}}\n"
                '[ ! -e "$place" ] || mount --bind "$program" "$place"; done\n'
            )
        argv = ["unshare", "--uts", "--mount", "--propagation", "slave", "bash", "-c"]
        if host in self.nodes:
            argv = ["nsenter", f"--net=/run/netns/{self._netns(host)}", *argv]
        ready = self.folder / f"{host}.ready"
        # See `Cluster.bind_slurmds`.
        argv = ["taskset", "--cpu-list", "0", *argv]
        self._start(host, *argv, f"{script}: > {ready}\nexec sleep infinity")
        self._await(ready.exists, host, "the namespaces of a host")

    def _inside(self, host: str, cwd: str | Path = "/") -> list[str]:
        """The start of a command line that runs on this host."""
        holder = self._processes.get(host)
        if holder is None or not holder.alive():
            raise ClusterError(f"no host `{host}` is up; there are {', '.join(self.nodes)}")
        kinds = ["--uts", "--mount", *(["--net"] if host in self.nodes else [])]
        return ["nsenter", f"--target={holder.pid}", *kinds, f"--wd={cwd}"]

    def _slurm(self, daemon: str) -> list[str]:
        own = self.suite and daemon == "slurmd"
        stepd = ["-d", f"{home_of(self.suite)}/bin/slurmstepd"] if own else []
        return [daemon, "-D", "-f", str(self.conf), *stepd]

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{end}" for option, end in files.items()]
        log = f"--log-file={self.folder}/log/munged.log"
        self._start("munged", "munged", "--foreground", "--num-threads=4", log, *options)
        self._await((self.folder / "munge.socket").exists, "munged", "munged's socket")

    def _mariadb_install(self) -> list[str]:
        # --rpm only keeps it from changing the owner of a file of the installed package.
        options = ["--no-defaults", "--user=root", "--skip-test-db", "--skip-name-resolve", "--rpm"]
        root = "--auth-root-authentication-method=normal"
        return ["mariadb-install-db", *options, root, f"--datadir={self.folder}/db/data"]

    def _start_accounting(self) -> None:
        installed = self.folder / "db/data/mysql_upgrade_info"
        if not poll(lambda: not self._alive("mariadb-install"), 60) or not installed.exists():
            self._fail("mariadb-install", "the database's folder")
        data = self.folder / "db"
        data.chmod(0o700)  # the database's root has no password
        files = [f"--datadir={data}/data", f"--socket={data}/socket", f"--pid-file={data}/pid"]
        thrift = ["--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=64M"]
        options = ["--no-defaults", "--user=root", "--skip-networking", *files, *thrift]
        self._start("mariadbd", "mariadbd", *options)
        self._await((data / "socket").exists, "mariadbd", "the database's socket")
        self._start("slurmdbd", "slurmdbd", "-D", host=self.controller)
        self._await(lambda: _listens(self.address, self.dbd_port), "slurmdbd", "slurmdbd's port")
        self.run("sacctmgr", "-i", "add", "cluster", self.cluster)

    def _start_ctld(self) -> None:
        self._start("slurmctld", *self._slurm("slurmctld"), host=self.controller)
        ping = ["scontrol", "ping"]
        self._await(
            lambda: " is UP" in self.run(*ping, check=False).stdout, "slurmctld", "slurmctld"
        )

    def _start_slurmds(self) -> None:
        for node in self.nodes:
            self.start_slurmd(node)
        try:
            self.wait_idle()
        except ClusterError:
            dead = [n for n in self.nodes if not self._alive(f"slurmd.{n}")]
            self._fail(f"slurmd.{(dead or self.nodes)[0]}", "idle nodes")

    def _check(self) -> None:
        reach = f"exec 3<>/dev/tcp/{self.addresses()[self.nodes[1]]}/{self.slurmd_port}"
        if self.exec_on(self.nodes[0], "bash", "-c", reach, check=False).returncode:
            raise ClusterError(
                "the nodes do not reach each other; a firewall of this machine may filter bridges "
                "(`sysctl net.bridge.bridge-nf-call-iptables`)"
            )
        if self.accounting:
            self.run("sacct", "-n")

    # --- its processes, and its end ---

    def _start(self, name: str, *argv: str, host: str = "", keep: Sequence[int] = ()) -> None:
        more = {"MYSQL_UNIX_PORT": f"{self.folder}/db/socket"} if name == "slurmdbd" else {}
        if name.startswith("mariadb"):  # one that starts removes all temporary tables of its TMPDIR
            more = {"TMPDIR": f"{self.folder}/db-tmp"}
        with open(self.folder / "log" / f"{name}.out", "ab") as out:
            child = subprocess.Popen(
                [*(self._inside(host) if host else []), *argv],
                env={**self.env(), **more},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # a Ctrl-C is for us, and we end it in order
                pass_fds=keep,
            )
        if self.attached:
            child.returncode = 0  # it outlives this process, of which Popen would warn
        self._children.append(child)
        self._save({**self._processes, name: Process.of(child.pid)})

    def _stop(self, *names: str, number: signal.Signals = signal.SIGTERM) -> None:
        """End daemons, and wait until they are gone: the next ones need their ports and files."""
        known = self._processes
        processes = [known[name] for name in names if name in known]
        if not kill(processes, number, 15):
            kill(processes, signal.SIGKILL, 5)
        self._reap(processes)

    def _alive(self, name: str) -> bool:
        process = self._processes.get(name)
        return process is not None and process.alive()

    def _await(
        self, ready: Callable[[], bool], name: str, what: str, timeout: float = LIMIT_S
    ) -> None:
        if not poll(lambda: ready() or not self._alive(name), timeout) or not ready():
            self._fail(name, what)

    def _fail(self, name: str, what: str) -> NoReturn:
        logs = [self.folder / "log" / f"{name}.{end}" for end in ("log", "out")]
        said = "".join(log.read_text(errors="replace") for log in logs if log.exists())
        raise ClusterError(f"{what} did not come up; the end of {name}'s log: {tail(said)}")

    def _reap(self, ended: Sequence[Process]) -> None:
        pids = {process.pid for process in ended}
        for child in self._children:
            if child.pid in pids:  # its first thread is gone, others may take a moment longer
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(10)
        self._children = [child for child in self._children if child.poll() is None]

    @property
    def _processes(self) -> dict[str, Process]:
        """What was started, from the disk: also who is attached starts and ends daemons."""
        return {k: Process(*v) for k, v in self._recorded().get("processes", {}).items()}

    def _recorded(self) -> dict[str, Any]:
        try:
            state: dict[str, Any] = json.loads((self.folder / "cluster.json").read_text())
        except (OSError, ValueError):
            return {}
        return state

    def _save(self, processes: dict[str, Process]) -> None:
        state = {k: getattr(self, k) for k in self.KEPT}
        state["processes"] = {k: [p.pid, p.start] for k, p in processes.items()}
        new = self.folder / "cluster.json.new"
        new.write_text(json.dumps(state))
        new.rename(self.folder / "cluster.json")

    def _residents(self) -> list[Process]:
        """All processes on our nodes, known by the network namespace that they are in."""
        spaces = set()
        for node in self.nodes:
            with contextlib.suppress(OSError):
                spaces.add(os.stat(f"/run/netns/{self._netns(node)}").st_ino)
        spaces.discard(os.stat("/proc/self/ns/net").st_ino)  # whatever is amiss: never our own
        found = []
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{pid}/ns/net").st_ino in spaces:
                    found.append(Process.of(pid))
        return [process for process in found if process.alive()]

    def _clear(self) -> None:
        """Remove every trace of this instance, whoever of its holders left it."""
        if self.folder.is_symlink() or (self.folder.exists() and self.folder.stat().st_uid != 0):
            raise ClusterError(f"{self.folder} is somebody else's; remove it first")
        daemons = [p for name, p in self._processes.items() if name != KEEPER]
        kill(daemons, signal.SIGKILL, 10)
        poll(lambda: kill(self._residents(), signal.SIGKILL, 1) and not self._residents(), 20)
        self._reap(daemons)
        self._remove_network()
        self._remove_cgroups()
        for device in Path("/dev").glob(f"hpc-ddp-{self.instance}-gpu*"):
            device.unlink()
        while os.path.ismount(self.scratch):
            sh("umount", "--lazy", str(self.scratch))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _remove_network(self) -> None:
        for link in os.listdir("/sys/class/net"):
            if re.fullmatch(rf"{self._bridge}(n\d+)?", link):
                sh("ip", "link", "del", link, check=False)
        for space in Path("/run/netns").glob(f"{self._netns(self.cluster)}n*"):
            sh("ip", "netns", "del", space.name, check=False)

    def _remove_cgroups(self) -> None:
        """Remove what proctrack/cgroup made: a slurmd names its part for its node."""
        freezer = freezer_mount()
        for node in self.nodes if freezer else []:
            for folder, _, _ in os.walk(f"{freezer}/slurm_{node}", topdown=False):
                # The kernel may take a moment to see that the processes in it are gone.
                poll(partial(_rmdir, folder), 3)


def _rmdir(folder: str) -> bool:
    with contextlib.suppress(OSError):
        os.rmdir(folder)
    return not os.path.exists(folder)


def _listens(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
        return True
    return False
