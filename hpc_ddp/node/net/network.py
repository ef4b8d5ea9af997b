"""A node's own network: names, addresses, free ports."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections.abc import Sequence

SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface

LOOPBACK = "127.0.0.1"
FIRST_PORT, LAST_PORT = 10000, 32767  # below the range that Linux hands out by itself


def reach(nodes: Sequence[str], index: int, suffix: str) -> str:
    """Return what the nodes of an attempt reach one of them by: a name; on a node alone loopback.

    So a job of one node works where names of nodes can't be looked up, or lead elsewhere.
    """
    return nodes[index] + suffix if len(nodes) > 1 else LOOPBACK


def free_port(start: int) -> int:
    """Return a port that nobody listens on here, the first one from `start` on.

    `start` is brought into the range first; where all are taken, OSError is raised.
    """
    count = LAST_PORT - FIRST_PORT + 1
    for step in range(count):
        port = FIRST_PORT + (start - FIRST_PORT + step) % count
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))  # fails for a listener on [::] as well
            return port
    raise OSError(f"no free port between {FIRST_PORT} and {LAST_PORT}")


def interface_to(host: str) -> str | None:
    """Return the name of the interface that leads to `host`, None when that can't be told.

    NCCL and Gloo would each pick one by themselves, Gloo from whatever the own host name
    resolves to, which on many systems is loopback.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: only picks the route
            address = probe.getsockname()[0]
    except OSError:
        return None
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if address_of(name) == address), None)


def addresses() -> list[str]:
    """Return the IPv4 addresses of this node's interfaces."""
    return [a for _, name in socket.if_nameindex() if (a := address_of(name))]


def address_of(interface: str) -> str | None:
    """Return an interface's IPv4 address, None where it has none."""
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
