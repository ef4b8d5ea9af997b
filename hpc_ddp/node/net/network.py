"""A node's own network: names, addresses, free ports."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface
IF_INET6 = Path("/proc/net/if_inet6")

LOOPBACK = "127.0.0.1"
RESOLVE_S = 30.0  # a name server may be away for a moment
FIRST_PORT, LAST_PORT = 10000, 32767  # below the range that Linux hands out by itself


def reach(nodes: Sequence[str], index: int, suffix: str) -> str:
    """Return the name by which the nodes of an attempt reach ``nodes[index]``; on a node alone
    loopback.

    `suffix` is appended to names for the interconnect, '' without one. By loopback a job of one
    node works also where names of nodes can't be looked up, or lead elsewhere.
    """
    return nodes[index] + suffix if len(nodes) > 1 else LOOPBACK


def first_port(job_id: str, run: str) -> int:
    """Return the port to try first: the runs of all jobs are spread over the range, so that two on
    one node, or in one allocation, rarely meet. `run` is the path of the run."""
    return FIRST_PORT + zlib.crc32(f"{job_id} {run}".encode()) % (LAST_PORT - FIRST_PORT)


def free_port(start: int) -> int:
    """Return the first TCP port from `start` on that has no listener here, from 10000 to 32767.

    `start` is brought into the range first, and the search wraps around. Raise OSError where all
    are taken. Another process may take the port right after.
    """
    count = LAST_PORT - FIRST_PORT + 1
    for step in range(count):
        port = FIRST_PORT + (start - FIRST_PORT + step) % count
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))  # fails for a listener on [::] as well
            return port
    raise OSError(f"no free port between {FIRST_PORT} and {LAST_PORT}")


def listen_on_any_port() -> socket.socket:
    """Return a socket that listens on a free TCP port of all interfaces, IPv4 and IPv6, where there
    is IPv6; raise OSError where no port is free."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def check_resolves(host: str, wait_s: float = RESOLVE_S) -> None:
    """Wait until the name of a node leads to an address; raise OSError where it does not within
    `wait_s`. torchrun would look for it for minutes, without a word."""
    give_up = time.monotonic() + wait_s
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except socket.gaierror as error:
            if time.monotonic() > give_up:
                raise OSError(
                    f"the name {host} can't be looked up on {socket.gethostname()}:"
                    f" {error.strerror}"
                ) from None
        time.sleep(1)


def interface_to(host: str) -> str | None:
    """Return the name of the interface whose route leads to `host`, a name or an address; by its
    IPv4 addresses, or else by those of IPv6.

    None where the name does not resolve, there is no route, or the address is no interface's. NCCL
    and Gloo would each pick one by themselves, Gloo from the address of this host's own name, which
    on many systems is loopback.
    """
    entries = []
    with contextlib.suppress(OSError, UnicodeError):  # no name
        entries = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    entries.sort(key=lambda entry: entry[0] != socket.AF_INET)
    for family, kind, protocol, _, address in entries:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing: only picks the route
            if name := _interface_with(family, probe.getsockname()):
                return name
    return None


def _interface_with(family: int, address: Any) -> str | None:
    """Return the name of the interface that has a socket's address, None where none has; raise
    OSError for a scope that is no interface's."""
    if family == socket.AF_INET:
        names = [name for _, name in socket.if_nameindex()]
        return next((name for name in names if address_of(name) == address[0]), None)
    if scope := address[3]:  # of a link's own address, which other interfaces may have, too
        return socket.if_indextoname(scope)
    digits = socket.inet_pton(family, address[0]).hex()
    return next((name for name, text in _ipv6_addresses() if text == digits), None)


def has_ipv6(interface: str) -> bool:
    """Return whether an interface has an IPv6 address beyond the link's own; False if Linux does
    not say."""
    addresses = [digits for name, digits in _ipv6_addresses() if name == interface]
    return any(not digits.startswith("fe80") for digits in addresses)


def _ipv6_addresses() -> list[tuple[str, str]]:
    """Return the interfaces' names with their IPv6 addresses, as 32 hexadecimal digits each; []
    if Linux does not say."""
    with contextlib.suppress(OSError):
        lines = IF_INET6.read_text(errors="replace").splitlines()
        return [(words[-1], words[0]) for words in map(str.split, lines)]
    return []


def address_of(interface: str) -> str | None:
    """Return an interface's IPv4 address, None where it has none, is absent, or this is no
    Linux."""
    if sys.platform != "linux":
        return None
    import fcntl

    request = struct.pack("256s", interface.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])
