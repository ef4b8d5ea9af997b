"""A node's own network: names, addresses, free ports."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import time
import zlib
from collections.abc import Sequence

SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface

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
    """Return the name of the interface whose route leads to `host` (a name or an IPv4 address).

    None where the name does not resolve, there is no route, or the address is no interface's. NCCL
    and Gloo would each pick one by themselves, Gloo from the address of this host's own name, which
    on many systems is loopback.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: only picks the route
            address = probe.getsockname()[0]
    except OSError:
        return None
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if address_of(name) == address), None)


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
