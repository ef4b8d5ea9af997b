"""Names of nodes, and free ports."""

from __future__ import annotations

import contextlib
import socket
import time
import zlib
from collections.abc import Sequence

LOOPBACK = "127.0.0.1"
RESOLVE_S = 30.0  # a name server may be away for a moment
FIRST_PORT, LAST_PORT = 10000, 32767  # below the range that Linux hands out by itself


def reachable_name(nodes: Sequence[str], index: int, suffix: str) -> str:
    """Return the name by which the nodes of an attempt reach ``nodes[index]``: that node's name
    with `suffix`; in an attempt of one node loopback's address.

    A site's `suffix` leads to the interconnect; '' for none. By loopback a job of one node works
    also where names of nodes can't be looked up, or lead elsewhere.
    """
    return nodes[index] + suffix if len(nodes) > 1 else LOOPBACK


def first_port(job_id: str, run: str) -> int:
    """Return the port to try first, a number made of `job_id` and `run`, the path of the run: two
    runs on one node, or in one allocation, so rarely try the same port."""
    return FIRST_PORT + zlib.crc32(f"{job_id} {run}".encode()) % (LAST_PORT - FIRST_PORT)


def free_port(start: int) -> int:
    """Return the first TCP port from `start` on, in `FIRST_PORT` to `LAST_PORT`, that has no
    listener on this host. Another process may take the port right afterwards.

    A `start` outside of this range is brought into it, and the search wraps around. Raise OSError
    where all ports are taken.
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
    """Wait until the name `host` of a node can be looked up; raise OSError where that fails for
    `wait_s` seconds. torchrun would try it for minutes, and print nothing."""
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
