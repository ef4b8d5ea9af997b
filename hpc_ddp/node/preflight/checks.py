"""One node's part of the preflight: the checks of the node itself, then those of its partners.

``python <run>/lib/node.py preflight.checks``, one task per node. It reads questions on stdin, one
line each, and answers with `messages` on stdout:

==============  ======================================================================  ============
question        answer                                                                  then stage
==============  ======================================================================  ============
`Order`         none: the node's task runs                                              ``start``
(the same)      interface, fabric, GPUs, TMPDIR, space in the run folder                ``local``
ports, missing  names, links and files of the partners, by `links`                      ``partners``
(empty)         the version and the devices of torch, by `bandwidth`                    ``torch``
members         the speeds between nodes, by `bandwidth`                                ``exchange``
fit             none: the preflight is over, and whether the training can start
==============  ======================================================================  ============

torchrun's agent imports torch anyway: with HPC_DDP_PREFLIGHT_SHELL it answers from the stage
``torch`` on (`agent_part`), unless the empty question comes before. Then, as without that variable,
the node's task imports torch: not before, since meanwhile a node would answer its partners late.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from hpc_ddp.core.accelerators import VENDORS, device_files, listed_devices
from hpc_ddp.core.attempt_env import AttemptEnv
from hpc_ddp.core.process import NOTICE_SIGNALS, STOOD_STILL_S
from hpc_ddp.node.net import fabric_lookup, interface, names_and_ports
from hpc_ddp.node.net.place import Place
from hpc_ddp.node.preflight import agent_link, bandwidth
from hpc_ddp.node.preflight.links import Listener, check_partners, partners
from hpc_ddp.node.preflight.messages import report

GPU_S = 120.0  # for nvidia-smi, which wakes all GPUs where no daemon keeps the driver awake
FILES = "nvidia-smi and device files"
TMPDIR_BYTES = 64 << 20  # less space than this is none


class Order(NamedTuple):
    """The first question, with the same keys as in JSON."""

    nodes: Sequence[str]  # all names; a node without the shared disk can't read them from a file
    folder: str  # path of the folder in which each node writes a file of its name
    secret: str  # content of these files, and the first line of a connection between nodes
    gpus: int  # that the job has on each node
    needed: int  # bytes of free space in the run folder
    port: int  # of each node's `Listener`, where it is free
    again: bool  # for a second opinion: with other partners


class UnfitError(Exception):
    """A node is unfit; the text is the reason, printed behind '<node>: '."""


def check_interface(place: Place) -> dict[str, Any]:
    """Return ``interface``, the name of the network interface that the workers will use, and
    ``address``, its IPv4 address (None if it has only IPv6). {} for a lone node without a chosen
    interface.

    Raise UnfitError if no interface leads to the other nodes, or if the chosen interface does not
    exist or has no address.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME") or place.chosen_interface
    if name is None:
        if len(place.nodes) == 1:
            return {}
        raise UnfitError(f"no interface leads to {place.peer}")
    interfaces = [interface for _, interface in socket.if_nameindex()]
    if name not in interfaces:
        raise UnfitError(f"there is no interface {name!r}, only {', '.join(interfaces)}")
    address = interface.address_of(name)
    if address is None and not interface.has_ipv6(name):
        raise UnfitError(f"the interface {name} has no address")
    return {"interface": name, "address": address}


def check_interconnect(place: Place) -> dict[str, Any]:
    """Return ``fabric``, the name of this node's interconnect, None without one; ``cards``, the
    number of its devices; and a ``note`` if NCCL can't use the interconnect. {} where the nodes are
    processes of one machine, and for a lone node."""
    if place.is_local or len(place.nodes) == 1:
        return {}
    fabric = fabric_lookup.find_fabric()
    note = {"note": f"fabric: {fabric.trouble}"} if fabric.trouble else {}
    return {"fabric": fabric.name or None, "cards": len(fabric.cards), **note}


def check_gpus(
    wanted: int, environ: Mapping[str, str], listed: int | None, files: Mapping[str, int]
) -> dict[str, Any]:
    """Return ``gpus``, the number of GPUs on this node that the job may use (None where that is
    unknown); a ``note`` where the number is uncertain; and, in a job with GPUs, ``gpus_there``, the
    number by nvidia-smi, or else by device files, where either tells it.

    ``gpus`` is the lowest of the numbers by nvidia-smi or device files and by the variables of
    visible devices. Slurm sets the variables of several vendors where its gres.conf names none, so
    only those of one vendor count: the one with the most device files, or NVIDIA if there are no
    device files but nvidia-smi; without both, those of all vendors.

    Parameters
    ----------
    wanted
        number of GPUs that the job has on each node
    environ
        the environment, which may have the vendors' variables of visible devices
    listed
        number of GPUs that nvidia-smi lists, None without such a program
    files
        number of device files of each vendor that has some

    Raises
    ------
    UnfitError
        the job may use fewer GPUs than `wanted`
    """
    by_smi = "NVIDIA" if listed is not None else ""
    name = max(files, key=lambda vendor: files[vendor], default=by_smi)
    vendors = [VENDORS[name]] if name else VENDORS.values()
    counts: dict[str, int] = {}  # by source: a variable, or `FILES`
    for vendor in vendors:
        counts |= listed_devices(vendor, environ)
    present = listed if listed is not None else files.get(name)
    if present is not None:  # one file may be several devices: as many as the job wants, then
        counts[FILES] = max(present, min(wanted, present * VENDORS[name].tiles))
    if not counts:
        note = f"can't tell whether there are {wanted} GPUs: no nvidia-smi, no device files"
        return {"gpus": None, "note": note} if wanted else {"gpus": 0}
    source = min(counts, key=lambda source: counts[source])
    count = counts[source]
    if count < wanted:
        raise UnfitError(f"{count} GPUs in place of {wanted} (by {source})")
    if present is None and wanted:
        return {"gpus": count, "note": f"GPUs are counted by {source} alone"}
    # In a job without GPUs torch need not see one: a CPU node may have a display's.
    return {"gpus": count, **({"gpus_there": present} if wanted else {})}


def _run_within(argv: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command, and return its end with what it has printed. Time in which the job was
    suspended does not count. Raise ``subprocess.TimeoutExpired`` where it takes longer than
    `limit_s` seconds, OSError where it can't be started."""
    pipe, waited_s = subprocess.PIPE, 0.0
    # No `with`: its end would wait for a process that a driver keeps in state D, without a limit.
    program = subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True)
    while waited_s < limit_s:
        begin = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            printed = program.communicate(timeout=min(1.0, limit_s - waited_s))
            return subprocess.CompletedProcess(argv, program.returncode, *printed)
        turn_s = time.monotonic() - begin
        waited_s += turn_s if turn_s < STOOD_STILL_S else 0.0
    program.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.communicate(timeout=1.0)
    raise subprocess.TimeoutExpired(argv, limit_s)


def _ask_nvidia_smi() -> int | None:
    """Run ``nvidia-smi -L``; return the number of GPUs that it lists, or of MIG devices if these
    are more; None where there is no such program. Raise UnfitError if it fails,
    ``subprocess.TimeoutExpired`` if it takes longer than `GPU_S`."""
    try:
        done = _run_within(["nvidia-smi", "-L"], GPU_S)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnfitError(f"nvidia-smi can't be started: {error.strerror}") from None
    if done.returncode:
        printed = (done.stdout + done.stderr).strip().splitlines()
        raise UnfitError(f"nvidia-smi: {printed[0] if printed else f'exit code {done.returncode}'}")
    lines = [line.strip() for line in done.stdout.splitlines()]
    gpus = sum(line.startswith("GPU ") for line in lines)
    mig_devices = sum(line.startswith("MIG ") for line in lines)
    return max(gpus, mig_devices)


def count_gpus(place: Place, wanted: int) -> dict[str, Any]:
    """Count this node's GPUs by nvidia-smi and device files, and return what `check_gpus` returns;
    `wanted` is the number that the job has on each node. {} where the nodes are processes of one
    machine.

    nvidia-smi is the only vendor's program that is asked: it shows that a GPU has failed whose
    device file is still there. Other vendors' programs are written in Python, and break in a job's
    environment, or count cards in place of devices. If nvidia-smi is late, that is a note where
    device files tell the number, else an UnfitError. Raise UnfitError also as `check_gpus` and
    `_ask_nvidia_smi`.
    """
    if place.is_local:  # they train with gloo on CPU
        return {}
    files = device_files()
    may_be_nvidia = "NVIDIA" in files or not files
    listed, why = None, f"nvidia-smi gave no answer within {GPU_S:.0f} s"
    try:
        listed = _ask_nvidia_smi() if wanted and may_be_nvidia else None
    except subprocess.TimeoutExpired:
        if not files:
            raise UnfitError(why) from None
        return check_gpus(wanted, os.environ, None, files) | {"note": f"{why}; its files are there"}
    return check_gpus(wanted, os.environ, listed, files)


def try_tmpdir(path: Path) -> dict[str, Any]:
    """Write 1 MiB to a temporary file in `path`, the folder TMPDIR, and remove it; return
    ``tmpdir``, the path, and ``tmpdir_free``, the free space in bytes. Raise UnfitError if the
    folder can't be written, or has less than `TMPDIR_BYTES` free."""
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(1 << 20))
            file.flush()
        total, _, free = shutil.disk_usage(path)
    except OSError as error:
        raise UnfitError(f"TMPDIR {path} can't be written: {error.strerror}") from None
    if total and free < TMPDIR_BYTES:  # some file systems report no sizes at all
        raise UnfitError(f"TMPDIR {path} has only {free / 1e6:.0f} MB free")
    return {"tmpdir": str(path), "tmpdir_free": free}


def try_run_folder(place: Place, folder: Path, secret: str, needed: int) -> dict[str, Any]:
    """Write `secret` to this node's file in `folder`, below the run's folder, by which partners see
    that the disk is shared; return ``scratch_free``, the run folder's free space in bytes.

    Raises
    ------
    UnfitError
        the folder can't be written, or the run folder has less than `needed` bytes free
    """
    try:
        (folder / place.node).write_text(secret)
        total, _, free = shutil.disk_usage(place.run.path)
    except OSError as error:
        reason = f"can't write in the run folder {place.run.path}: {error.strerror}"
        raise UnfitError(reason) from None
    if total and free < needed:
        raise UnfitError(
            f"the run folder has {free / 1e6:.0f} MB free, and needs {needed / 1e6:.0f} MB"
        )
    return {"scratch_free": free}


def read_load() -> dict[str, Any]:
    """Return ``load``, the load average of the last minute per processor; {} on a system that
    has no load average."""
    with contextlib.suppress(OSError):
        return {"load": round(os.getloadavg()[0] / (os.cpu_count() or 1), 1)}
    return {}


def check_node(place: Place, order: Order) -> None:
    """Make the checks of this node alone; print (`report`) the values and the note of each check,
    or its UnfitError as a fault. The checks write a temporary file in TMPDIR, and this node's file
    in the order's folder. Raise OSError where stdout is closed."""
    folder = Path(order.folder)
    checks: dict[str, Callable[[], dict[str, Any]]] = {
        "load": read_load,
        "interface": lambda: check_interface(place),
        "fabric": lambda: check_interconnect(place),
        "gpus": lambda: count_gpus(place, order.gpus),
        "tmpdir": lambda: try_tmpdir(Path(os.environ.get("TMPDIR") or "/tmp")),
        "scratch": lambda: try_run_folder(place, folder, order.secret, order.needed),
    }
    for name, check in checks.items():
        try:
            values = check()
        except UnfitError as error:
            report(fault=name, why=str(error))
            continue
        if note := values.pop("note", None):
            report(note=note)
        report(values=values)


def _set_network(place: Place) -> None:
    """Set the variables of the network interface and of the interconnect in this process's
    environment to the values that the workers will get."""
    fabric_env = place.fabric_env(fabric_lookup.find_fabric()) if place.seeks_fabric else {}
    os.environ.update(fabric_env | place.interface_env())


def _read_question() -> dict[str, Any]:
    """Wait for the next question on stdin and return it. Raise EOFError when stdin is closed,
    ValueError for a torn line."""
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    question: dict[str, Any] = json.loads(line)
    return question


def _end_with_notice(number: int, frame: FrameType | None) -> None:
    """Report the signal `number` as a notice, and exit the process with 0."""
    report(notice=signal.Signals(number).name)
    os._exit(0)


def answer_on_torch(place: Place, store_socket: socket.socket) -> bool:
    """Answer the driver's questions on stdin from the stage ``torch`` on; return whether the driver
    then says that the training can start. `store_socket` is the socket for `join_group`.

    The variables of `_set_network` are set. Raises EOFError where the driver ends the dialogue
    without that word, ValueError for a torn question, OSError where stdout is closed.
    """
    _set_network(place)
    torch = bandwidth.import_torch()
    while "fit" not in (question := _read_question()):
        if torch is not None and place.node in question.get("members", ()):
            group = bandwidth.Group(**question)
            bandwidth.measure_group(torch, place.node, store_socket, group)
    return bool(question["fit"])


def _answer_all(order: Order, place: Place) -> None:
    """Answer the driver's questions after the `order`; raise as `main`, and EOFError where stdin is
    closed before the last question."""
    report(stage="start")
    listener = Listener(place.node, order.secret, order.port)
    # The socket is held until the store is made: another process might take the port.
    with names_and_ports.listen_on_any_port() as store_socket:
        check_node(place, order)
        contact = {"host": place.host, "port": listener.port}
        report(stage="local", contact=contact | {"store_port": store_socket.getsockname()[1]})
        question = _read_question()  # of a size that does not depend on the number of nodes
        nodes = [node for node in order.nodes if node not in question["missing"]]
        if place.node in nodes:
            peers = partners(nodes, place.node, order.again)
            ports = {node: question["ports"].get(node, order.port) for node in (*peers, place.node)}
            check_partners(place, ports, Path(order.folder), order.secret)
        report(stage="partners")
        has_agent = AttemptEnv.from_env(os.environ).preflight_shell
        is_passed = has_agent and agent_link.pass_dialogue(place, store_socket)
        if not is_passed and "fit" not in _read_question():
            answer_on_torch(place, store_socket)


def main(argv: list[str]) -> int:
    """Answer the driver's questions on stdin in the order of the module's table, then exit the
    process with 0, whatever the checks have found. `argv` is not used.

    A signal of `NOTICE_SIGNALS` is reported as a notice, and ends the process with 0 at once.
    HPC_DDP_NODE is set, and the variables of `_set_network`. Raises OSError as `Place.from_env`,
    where no port is free, where stdout is closed, and as `agent_link.pass_dialogue`; KeyError,
    TypeError or ValueError for a wrong environment or a damaged question.
    """
    os.environ["HPC_DDP_NODE"] = ""  # for a notice that comes before the order
    for number in NOTICE_SIGNALS:
        signal.signal(number, _end_with_notice)
    with contextlib.suppress(EOFError):
        order = Order(**_read_question())
        place = Place.from_env(dict(os.environ), order.nodes)
        os.environ["HPC_DDP_NODE"] = place.node
        _answer_all(order, place)
    os._exit(0)  # taking torch apart takes time; nor is a thread waited for that resolves a name
