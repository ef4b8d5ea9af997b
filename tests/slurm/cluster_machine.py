"""What the test cluster needs of the machine: packages, permissions, processes, a lock."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

INSTANCES = range(16)
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sinfo": "slurm-client",
    "munged": "munge",
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "ip": "iproute2",
}
LINKS = "ip link add x type bridge && ip link add type veth"
# What outlives a checkout: other versions of Slurm.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpc-ddp"
LARGE = 250  # nodes that a /24 has addresses for
LIMIT_S = 600.0  # of a wait for the cluster: far more than a busy machine needs
APT_LOCK_S = 600.0  # a machine that has just been booted may be installing its updates
PATH = os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin"


class ClusterError(Exception):
    """Something that is expected to go wrong, in a sentence."""


# --- what the machine allows ---------------------------------------------------------------------


def available() -> str | None:
    """Why no cluster can be brought up here, or None when one can."""
    if not sys.platform.startswith("linux"):
        return "a test cluster needs Linux"
    if os.geteuid() != 0:
        return "a test cluster needs root, for network namespaces and device files"
    if missing_packages() and not shutil.which("apt-get", path=PATH):
        return f"no `apt-get` here to install {' '.join(missing_packages())}"
    if not _allowed("true"):
        return "this machine does not permit network namespaces (`unshare --net` fails)"
    if shutil.which("ip", path=PATH) and not _allowed(LINKS):
        return "this machine's kernel has no bridges or no veth links (`ip link add` fails)"
    return None


def cgroup_reason() -> str | None:
    """Why proctrack="cgroup" is not to be had here, or None when it is."""
    freezer = freezer_mount()
    if freezer is None:
        return "this machine mounts no cgroup v1 freezer, which proctrack/cgroup needs"
    if not os.access(freezer, os.W_OK):
        return f"{freezer} is read-only, and proctrack/cgroup needs to write there"
    return None


def ensure_packages(needed: dict[str, str] = PACKAGES) -> None:
    """Install what is missing of Slurm, munge and MariaDB, or of other packages by program, or by
    the path of another file."""
    if not missing_packages(needed):
        return
    with exclusive(CACHE / "packages.lock"):
        missing = missing_packages(needed)  # another process may have installed them meanwhile
        if not missing:
            return
        for argv in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
            _apt_get(*argv)
    if missing_packages(needed):
        raise ClusterError(f"apt-get installed {' '.join(missing)}, yet their programs are missing")


def _apt_get(*argv: str) -> None:
    """Run apt-get, after another program that holds one of its locks."""
    env = {**os.environ, "PATH": PATH, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    deadline = time.monotonic() + APT_LOCK_S
    while True:
        done = subprocess.run(
            ["apt-get", "-q", *argv], env=env, capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return
        if "Could not get lock" not in done.stderr or time.monotonic() > deadline:
            raise ClusterError(f"`apt-get {argv[0]}` failed: {tail(done.stdout + done.stderr)}")
        time.sleep(1)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock file, once no other process does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def missing_packages(needed: dict[str, str] = PACKAGES) -> list[str]:
    return [
        package
        for name, package in needed.items()
        if not (shutil.which(name, path=PATH) or os.path.exists(name))
    ]


def _allowed(script: str) -> bool:
    argv = ["unshare", "--net", "--uts", "--mount", "sh", "-c", script]
    env = {**os.environ, "PATH": PATH}
    return subprocess.run(argv, env=env, capture_output=True, check=False).returncode == 0


def freezer_mount() -> Path | None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup" and "freezer" in options.split(","):
            return Path(where)
    return None


def free_subnet(instance: int, size: int) -> ipaddress.IPv4Network:
    """A network for `size` nodes that overlaps no route of this machine: a /24, else a larger one,
    of which there is one for all instances."""
    routes = json.loads(sh("ip", "-4", "-j", "route", "show", "table", "all") or "[]")
    networks = [ipaddress.ip_network(r["dst"]) for r in routes if r["dst"][0].isdigit()]
    taken = [n for n in networks if n.prefixlen > 8]  # a wider one, as of a VPN, bears our hole
    for x in (66, 166, 216, 99, 31):
        end = f"{40 + instance}.0/24" if size <= LARGE else "128.0/18"
        subnet = ipaddress.IPv4Network(f"10.{x}.{end}")
        if not any(subnet.overlaps(t) for t in taken):
            return subnet
    raise ClusterError("each subnet that the test cluster would take is routed on this machine")


def ip_batch(lines: Iterable[str], *options: str) -> None:
    """Run commands of `ip`, in one process; raise ClusterError at the first that fails."""
    done = subprocess.run(
        ["ip", *options, "-batch", "-"],
        env={**os.environ, "PATH": PATH},
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ClusterError(f"`ip -batch` failed: {tail(done.stderr)}")


# --- processes and commands ----------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """A pid with its start time, since a pid alone may be another's by the time that it is used."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> Process:
        found = _state_and_start(pid)
        return cls(pid, found[1] if found else -1)

    def alive(self) -> bool:
        found = _state_and_start(self.pid)
        return found is not None and found[0] not in "ZX" and found[1] == self.start

    def name(self) -> str:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/comm").read_text().strip()
        return ""

    def send(self, number: signal.Signals) -> None:
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _state_and_start(pid: int) -> tuple[str, int] | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])


def kill(processes: Iterable[Process], number: signal.Signals, timeout: float) -> bool:
    """Signal them all, and wait until they are gone; false when some are left."""
    left = list(processes)
    for process in left:
        process.send(number)
    return poll(lambda: not any(p.alive() for p in left), timeout)


def poll(done: Callable[[], bool], timeout: float, pause: float = 0.03) -> bool:
    end = time.monotonic() + timeout
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


def sh(*argv: str, check: bool = True) -> str:
    done = subprocess.run(
        argv, env={**os.environ, "PATH": PATH}, capture_output=True, text=True, check=False
    )
    if check and done.returncode:
        raise ClusterError(f"`{shlex.join(argv)}` failed: {tail(done.stderr)}")
    return done.stdout


def tail(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-4:]) or "(it said nothing)"


# --- the lock of an instance ---------------------------------------------------------------------


def folder_of(instance: int) -> Path:
    # Not in /tmp, which job_container/tmpfs takes from the jobs; short, since the path of a unix
    # socket has 107 bytes.
    return Path(f"/var/tmp/hpc-ddp-cluster-{instance}")


def take_lock(instance: int) -> int | None:
    """Take an instance: an open lock file, or None when somebody else has it."""
    path = folder_of(instance).with_suffix(".lock")
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino == os.fstat(lock).st_ino:  # else its last holder has removed it
            return lock
    os.close(lock)
    return None


def claim(instance: int | None) -> tuple[int, int]:
    for number in INSTANCES if instance is None else [instance]:
        lock = take_lock(number)
        if lock is not None:
            return number, lock
    which = "each of the sixteen test clusters" if instance is None else f"test cluster {instance}"
    raise ClusterError(f"{which} is in use on this machine")
