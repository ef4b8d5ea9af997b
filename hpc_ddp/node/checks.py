"""One node's part of the preflight: what it finds out about itself, and its way to the others.

``python <run>/lib/node.py checks``, one task per node. It is asked on stdin and tells on stdout,
both carried by Slurm: so a node that sees another disk, or none of the others, is heard too.

=======  ===========================================================  ============
asked    told                                                         then stage
=======  ===========================================================  ============
`order`  the ports that it can be reached by                          ``hello``
`ports`  interface, GPUs, space; names, links and disk of the others  ``checked``
`go`     what torch is there, as soon as it is imported               ``imported``
`again`  how fast it sends to other nodes (all by `bandwidth`)        ``done``
=======  ===========================================================  ============
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import IO, Any

from hpc_ddp.core.accelerators import VENDORS, device_files, visible
from hpc_ddp.node.net import fabric, network
from hpc_ddp.node.net.place import Place
from hpc_ddp.node.supervisor import NOTICE_SIGNALS

MARK = "hpc-ddp-preflight "  # what a set-up line or a container prints is passed over
TEXT = 500  # bytes of a reason; Slurm breaks lines of more than 1024
LINK_S = 8.0  # to answer to a connection
REVERSE_S = 3.0  # for all reverse look-ups
VISIBLE_S = 15.0  # until what one node has written is there on another
GPU_S = 20.0  # for nvidia-smi
FILES = "nvidia-smi and device files"
PAYLOAD = 256 << 10  # bytes each way: more than fits into small packets
TMPDIR_BYTES = 64 << 20  # less space than this is none


def tell(**fields: Any) -> None:
    """Tell one thing on stdout, as one line in one write: several threads and processes tell."""
    cut = {
        k: v.encode()[:TEXT].decode(errors="ignore") for k, v in fields.items() if type(v) is str
    }
    message = {"node": os.environ["HPC_DDP_NODE"], **fields, **cut}
    os.write(1, f"{MARK}{json.dumps(message, ensure_ascii=False)}\n".encode())


class UnfitError(Exception):
    """A reason for which a node is unfit, as the end of the sentence '<node>: …'."""


# --- the node itself -----------------------------------------------------------------------


def interface(place: Place) -> dict[str, Any]:
    """Return the interface that the workers will use, and its address."""
    name = os.environ.get("GLOO_SOCKET_IFNAME") or place.chosen_interface
    if name is None:
        if len(place.nodes) == 1:
            return {}
        raise UnfitError(f"no interface leads to {place.peer}")
    interfaces = [interface for _, interface in socket.if_nameindex()]
    if name not in interfaces:
        raise UnfitError(f"there is no interface {name!r}, only {', '.join(interfaces)}")
    address = network.address_of(name)
    if address is None and not _has_ipv6(name):
        raise UnfitError(f"the interface {name} has no address")
    return {"interface": name, "address": address}


def _has_ipv6(name: str) -> bool:
    with contextlib.suppress(OSError):
        lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        return any(words[-1] == name and not words[0].startswith("fe80") for words in lines)
    return False


def interconnect(place: Place) -> dict[str, Any]:
    """Return the fabric that is here, and how many cards it has; also what keeps NCCL from it."""
    if place.is_local or len(place.nodes) == 1:
        return {}
    interconnect = fabric.look()
    note = {"note": f"fabric: {interconnect.trouble}"} if interconnect.trouble else {}
    return {"fabric": interconnect.name or None, "cards": len(interconnect.cards), **note}


def gpus(
    wanted: int, environ: Mapping[str, str], listed: int | None, files: Mapping[str, int]
) -> dict[str, Any]:
    """Compare the GPUs that were asked for with those that are here.

    Slurm sets the variables of several vendors where its gres.conf names none, so only those of the
    vendor with the most device files count; without device files, all of them.

    Parameters
    ----------
    listed
        number of GPUs that nvidia-smi lists, None without such a program
    files
        number of device files of each vendor that has some

    Raises
    ------
    UnfitError
        fewer GPUs are here
    """
    name = max(files, key=lambda name: files[name], default="NVIDIA" if listed is not None else "")
    vendors = [VENDORS[name]] if name else VENDORS.values()
    variables: dict[str, int] = {}
    for vendor in vendors:
        variables |= visible(vendor, environ)
    present = listed if listed is not None else files.get(name)
    if present is not None:  # one file may be several devices: as many as the job wants, then
        variables[FILES] = max(present, min(wanted, present * VENDORS[name].tiles))
    if not variables:
        note = f"can't tell whether there are {wanted} GPUs: no nvidia-smi, no device files"
        return {"gpus": None, "note": note} if wanted else {"gpus": 0}
    source = min(variables, key=lambda source: variables[source])
    count = variables[source]
    if count < wanted:
        raise UnfitError(f"{count} GPUs in place of {wanted} (by {source})")
    if present is None and wanted:
        return {"gpus": count, "note": f"only {source} tells of GPUs"}
    # Where none was asked for, torch need not see one: a CPU node may have a display's.
    return {"gpus": count, **({"gpus_there": present} if wanted else {})}


def _nvidia_smi() -> int | None:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=GPU_S)
    except FileNotFoundError:
        return None
    except (OSError, subprocess.TimeoutExpired):
        raise UnfitError(f"nvidia-smi gave no answer within {GPU_S:.0f} s") from None
    if done.returncode:
        printed = (done.stdout + done.stderr).strip().splitlines()
        raise UnfitError(f"nvidia-smi: {printed[0] if printed else f'exit code {done.returncode}'}")
    lines = [line.strip() for line in done.stdout.splitlines()]
    gpus, parts = (sum(line.startswith(f"{word} ") for line in lines) for word in ("GPU", "MIG"))
    return max(gpus, parts)


def _check_gpus(place: Place, wanted: int) -> dict[str, Any]:
    """Count the GPUs.

    Only nvidia-smi is asked: it names a GPU that has failed while its file is still there. The
    programs of other vendors are written in Python, and break in a job's environment, or count
    cards in place of devices.
    """
    if place.is_local:  # nodes that are processes of one machine, with gloo on CPU
        return {}
    files = device_files()
    nvidia = "NVIDIA" in files or not files
    return gpus(wanted, os.environ, _nvidia_smi() if wanted and nvidia else None, files)


def tmpdir(path: Path) -> dict[str, Any]:
    """Look whether files can be written in TMPDIR, and how much."""
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(1 << 20))
            file.flush()
        free = shutil.disk_usage(path).free
    except OSError as error:
        raise UnfitError(f"TMPDIR {path} can't be written: {error.strerror}") from None
    if free < TMPDIR_BYTES:
        raise UnfitError(f"TMPDIR {path} has only {free / 1e6:.0f} MB free")
    return {"tmpdir": str(path), "tmpdir_free": free}


def space(folder: Path, needed: int) -> dict[str, Any]:
    """Compare the space that is free in the run's folder with that needed; both in bytes."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise UnfitError(f"the run folder is not there: {error.strerror}") from None
    if free < needed:
        raise UnfitError(
            f"the run folder has {free / 1e6:.0f} MB free, and needs {needed / 1e6:.0f} MB"
        )
    return {"scratch_free": free}


def _look(check: str, work: Callable[[], dict[str, Any]]) -> None:
    """Make one check, and tell what it found."""
    try:
        fields = work()
    except UnfitError as error:
        tell(bad=check, why=str(error))
        return
    note = fields.pop("note", None)
    tell(values=fields)
    if note:
        tell(note=note)


# --- the way to the others -----------------------------------------------------------------


class Listener:
    """Answers the other nodes: who this is, what time it is, and with as many bytes as came."""

    def __init__(self, node: str, secret: str) -> None:
        self._node, self._secret = node, secret.encode()
        self._socket = socket.create_server(("", 0), backlog=128)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes who waits in it
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        peer.settimeout(LINK_S)
        with contextlib.suppress(OSError), peer, peer.makefile("rb") as lines:
            if not hmac.compare_digest(lines.readline(100).strip(), self._secret):
                return
            peer.sendall(f"{self._node}\n".encode())
            lines.readline(1)
            peer.sendall(f"{time.time()}\n".encode())
            peer.sendall(lines.read(PAYLOAD))


def reach(node: str, address: str, port: int, secret: str) -> float:
    """Exchange bytes with a node's `Listener`; return how far its clock is ahead, in seconds.

    Raises
    ------
    OSError
        there is no way, or it leads to another node
    """
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(socket.create_connection((address, port), timeout=LINK_S))
        lines = stack.enter_context(peer.makefile("rb"))
        peer.sendall(f"{secret}\n".encode())
        name = lines.readline(300).decode(errors="replace").strip()
        if name != node:
            raise OSError(f"{name or 'something else'} answers there")
        before = time.time()
        peer.sendall(b"\n")
        clock = float(lines.readline(50) or 0)
        ahead = clock - (before + time.time()) / 2
        peer.sendall(bytes(PAYLOAD))
        if len(lines.read(PAYLOAD)) < PAYLOAD:
            raise OSError("the connection was closed in the middle")
    return ahead


def addresses_of(host: str) -> list[str]:
    """Return what a host's name resolves to here; raises OSError."""
    addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in addresses))


def is_loopback(addresses: Iterable[str]) -> bool:
    return all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in addresses)


class Way:
    """The checks of this node's links to its peers."""

    def __init__(self, place: Place, folder: Path, secret: str) -> None:
        self._place, self._folder, self._secret = place, folder, secret
        self._resolved: dict[str, str] = {}
        self._failed_links: list[tuple[str, str, int]] = []  # node, address, port

    def look(self, ports: dict[str, int]) -> None:
        """Look for all nodes that have a port, at once.

        A link that fails is tried once more when the rest is through: a node that all others ask at
        the same time, and that imports torch meanwhile, may be late with its first answer.
        """
        with ThreadPoolExecutor(32) as pool:
            for index, node in enumerate(self._place.nodes):
                pool.submit(self._name_and_link, node, self._place.host_of(index), ports.get(node))
            for node in ports:
                pool.submit(self._disk, node)
        with ThreadPoolExecutor(32) as pool:
            for link in self._failed_links:
                pool.submit(self._link_again, *link)
        if not self._place.is_local:
            self._reverse()

    def _name_and_link(self, node: str, host: str, port: int | None) -> None:
        is_self = node == self._place.node
        try:
            addresses = addresses_of(host)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            tell(pair=node, check="name", why=f"the name {host} does not resolve here: {why}")
            return
        self._resolved[host] = addresses[0]
        if not self._place.is_local and is_loopback(addresses):
            why = f"the name {host} resolves to {addresses[0]}, which is loopback"
            # torchrun is told all that it would take from there.
            tell(note=why) if is_self else tell(pair=node, check="name", why=why)
            return
        if is_self or port is None:
            return
        try:
            self._link(node, addresses[0], port)
        except (OSError, ValueError):
            self._failed_links.append((node, addresses[0], port))

    def _link(self, node: str, address: str, port: int) -> None:
        ahead = reach(node, address, port, self._secret)
        if node == self._place.nodes[0]:
            tell(values={"clock_s": round(-ahead, 3)})

    def _link_again(self, node: str, address: str, port: int) -> None:
        try:
            self._link(node, address, port)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            why = f"no way from here to {node} ({address}): {reason}"
            tell(pair=node, check="link", why=why, address=address)

    def _disk(self, node: str) -> None:
        end = time.monotonic() + VISIBLE_S
        while not holds(self._folder / node, self._secret):
            if time.monotonic() > end:
                tell(pair=node, check="scratch", why=f"does not see what {node} writes")
                return
            time.sleep(0.2)

    def _reverse(self) -> None:
        """Look up the names of the addresses. Nothing here needs them, so it is only noted."""
        nameless: list[str] = []

        def look(host: str, address: str) -> None:
            names: list[str] = []
            with contextlib.suppress(OSError):
                name, aliases, _ = socket.gethostbyaddr(address)
                names = [name, *aliases]
            if host.partition(".")[0] not in [name.partition(".")[0] for name in names]:
                nameless.append(f"{address} is {names[0] if names else 'nobody'}, not {host}")

        threads = [
            threading.Thread(target=look, args=pair, daemon=True) for pair in self._resolved.items()
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + REVERSE_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            tell(note=f"reverse look-ups of names take longer than {REVERSE_S:.0f} s")
        if nameless:
            more = f" (and {len(nameless) - 1} more)" if len(nameless) > 1 else ""
            tell(note=f"no reverse name: {sorted(nameless)[0]}{more}")


def holds(path: Path, text: str) -> bool:
    """Tell whether a file is there and holds a text."""
    with contextlib.suppress(OSError):
        return path.read_text() == text
    return False


# --- torch ---------------------------------------------------------------------------------


class Torch:
    """The part that needs torch, in a process of its own: importing it takes the longest."""

    def __init__(self, place: Place) -> None:
        argv = [sys.executable, str(place.run.lib / "node.py"), "bandwidth"]
        settings = place.fabric_env(fabric.look()) if place.seeks_fabric else {}
        env = {**os.environ, **settings, **place.interface_env()}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, env=env, stdin=pipe, stdout=pipe, stderr=pipe)
        self._teller = threading.Thread(target=self._tell, daemon=True)
        self._teller.start()

    def _tell(self) -> None:
        """Pass on what it tells; where it ends badly, tell that with its last word."""
        lines: list[str] = []
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        errors = threading.Thread(target=_collect, args=(self._process.stderr, lines), daemon=True)
        errors.start()
        for line in self._process.stdout:
            if line.startswith(MARK.encode()):
                os.write(1, line)
        code = self._process.wait()
        errors.join(1)
        if code:
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            tell(bad="torch", why=f"torch's process ended with {name}: {(lines or ['-'])[-1]}")

    def ask(self) -> None:
        """Pass on all that is asked from now on, and wait until it has told all."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as stdin:
            for line in sys.stdin:
                stdin.write(line.encode())
                stdin.flush()
        self._teller.join()


def _collect(stream: IO[bytes], lines: list[str]) -> None:
    """Keep the last line that is not blank."""
    for line in stream:
        text = line.decode(errors="replace").strip()
        if text:
            lines[:] = [text]


def _end_politely(number: int, frame: FrameType | None) -> None:
    tell(notice=signal.Signals(number).name)
    os._exit(0)


def main(argv: list[str]) -> int:
    place = Place.from_env(dict(os.environ))
    os.environ["HPC_DDP_NODE"] = place.node
    for number in NOTICE_SIGNALS:
        signal.signal(number, _end_politely)
    order = json.loads(sys.stdin.readline() or "null")
    if order is None:
        return 1
    torch = Torch(place)
    folder, secret = Path(order["folder"]), order["secret"]
    listener = Listener(place.node, secret)
    try:
        (folder / place.node).write_text(secret)
    except OSError as error:
        tell(bad="scratch", why=f"can't write in the run folder {place.run.path}: {error.strerror}")
    tell(
        stage="hello",
        host=place.host,
        port=listener.port,
        store_port=network.free_port(listener.port),
        addresses=[a for a in network.addresses() if not is_loopback([a])][:10],
    )
    if place.index == 0:
        tell(values={"clock_s": 0.0})
    with contextlib.suppress(OSError):
        tell(values={"load": round(os.getloadavg()[0] / (os.cpu_count() or 1), 1)})
    _look("interface", lambda: interface(place))
    _look("fabric", lambda: interconnect(place))
    _look("gpus", lambda: _check_gpus(place, order["gpus"]))
    _look("tmpdir", lambda: tmpdir(Path(os.environ.get("TMPDIR") or "/tmp")))
    _look("scratch", lambda: space(place.run.path, order["needed"]))
    ports = json.loads(sys.stdin.readline() or "null")
    if ports is not None:
        Way(place, folder, secret).look(ports["ports"])
        tell(stage="checked")
        torch.ask()
    os._exit(0)  # whoever still listens or looks something up is not waited for
