"""A node's links to its partners: their names, connections to them, and files that they share."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import socket
import socketserver
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpc_ddp.node.net.place import Place
from hpc_ddp.node.preflight.messages import report

PARTNERS = 8  # of each node: with up to nine nodes, all others
LINK_S = 16.0  # for each answer of a connection
LATE = (TimeoutError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
VISIBLE_S = 15.0  # until a file that one node has written is there on another
PAYLOAD = 256 << 10  # bytes each way: more than fits into small packets


def partners(nodes: Sequence[str], node: str, again: bool = False) -> list[str]:
    """Return the nodes that `node` checks, at most `PARTNERS`, [] for a lone one; as many check it.

    The partners are at the same distances from each node, on a ring of all; with `again` at other
    ones. From 17 nodes on the distances are less than half a ring: no two nodes check each other.
    """
    count = min(PARTNERS, len(nodes) - 1)
    index, half = nodes.index(node), max(count, (len(nodes) - 1) // 2)
    first = 2 if again and len(nodes) > PARTNERS + 1 else 1
    strides = [first + number * half // count for number in range(count)]
    return [nodes[(index + stride) % len(nodes)] for stride in strides]


class Listener(socketserver.ThreadingTCPServer):
    """Answers partners that send the secret, with the node's name and the bytes that they sent.

    It listens on all interfaces, IPv4 and IPv6; a thread serves until the process ends.
    """

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, node: str, secret: str, port: int = 0) -> None:
        """Open the port, or any free one where it is taken, and start the thread; raise OSError
        where there is none."""
        try:
            super().__init__(("", port), _Answer)
        except OSError:
            super().__init__(("", 0), _Answer)
        self.node, self.secret = node, secret.encode()
        self.port: int = self.server_address[1]
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def server_bind(self) -> None:
        """Bind the socket, to IPv4 as well if it is of IPv6; raise OSError where the port is
        taken."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class _Answer(socketserver.StreamRequestHandler):
    """Handles a connection to a `Listener`."""

    server: Listener

    def handle(self) -> None:
        """Answer one connection; a partner without the secret gets nothing, and a broken link is no
        error."""
        self.connection.settimeout(LINK_S)
        with contextlib.suppress(OSError):
            if hmac.compare_digest(self.rfile.readline(100).strip(), self.server.secret):
                self.wfile.write(f"{self.server.node}\n".encode())
                self.wfile.write(self.rfile.read(PAYLOAD))


def reach(node: str, address: str, port: int, secret: str) -> None:
    """Exchange bytes with the `Listener` of `node` at an address and port.

    Raises
    ------
    OSError
        there is no connection, or it leads to another node; one of `LATE` if it is silent for
        `LINK_S` or breaks
    """
    with (
        socket.create_connection((address, port), timeout=LINK_S) as peer,
        peer.makefile("rb") as lines,
    ):
        peer.sendall(f"{secret}\n".encode())
        name = lines.readline(300).decode(errors="replace").strip()
        if name != node:
            raise OSError(f"{name or 'something else'} answers there")
        peer.sendall(bytes(PAYLOAD))
        if len(lines.read(PAYLOAD)) < PAYLOAD:
            raise ConnectionResetError("the connection was closed in the middle")


def addresses_of(host: str) -> list[str]:
    """Return the addresses that a host's name resolves to here, one at least; raise OSError if it
    resolves to none, UnicodeError if it can't be a name."""
    addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in addresses))


def is_loopback(addresses: Iterable[str]) -> bool:
    """Return whether all addresses, IPv4 or IPv6, are the machine's own."""
    return all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in addresses)


def link_trouble(place: Place, peer: str, port: int, secret: str) -> tuple[str, bool]:
    """Return why this node does not reach a partner by its name, '' if it does, and whether the
    reason may be want of time. Takes `LINK_S` for each of the partner's answers, at most.

    `port` is that of the partner's `Listener`, which is tried at the first address only.
    """
    host = place.host_of(place.nodes.index(peer))
    failure = f"the name {host} does not resolve here"
    try:
        addresses = addresses_of(host)
        if not place.is_local and is_loopback(addresses):
            return f"the name {host} resolves to {addresses[0]}, which is loopback", False
        failure = f"no connection from here to {peer} ({addresses[0]})"
        reach(peer, addresses[0], port, secret)
    except (OSError, UnicodeError) as error:
        is_late = isinstance(error, LATE) or getattr(error, "errno", 0) == socket.EAI_AGAIN
        return f"{failure}: {_reason(error)}", is_late
    return "", False


def own_delay(node: str, port: int, secret: str) -> dict[str, float]:
    """Return ``delay_s``, the seconds in which this node reaches its own `Listener` on loopback; {}
    if it does not."""
    begin = time.monotonic()
    with contextlib.suppress(OSError):
        reach(node, "127.0.0.1", port, secret)
        return {"delay_s": round(time.monotonic() - begin, 3)}
    return {}


def _reason(error: Exception) -> str:
    """Return an error's text; for an OSError that has a number, without it."""
    return str(getattr(error, "strerror", None) or error)


def file_trouble(folder: Path, peer: str, secret: str) -> str:
    """Return why a partner's file, with the secret in it, is not seen here within `VISIBLE_S`; ''
    if it is."""
    end = time.monotonic() + VISIBLE_S
    while not contains(folder / peer, secret):
        if time.monotonic() > end:
            return f"does not see the files that {peer} writes"
        time.sleep(0.2)
    return ""


def contains(path: Path, text: str) -> bool:
    """Return whether a file contains exactly a text; False if it can't be read."""
    with contextlib.suppress(OSError):
        return path.read_text() == text
    return False


def check_partners(place: Place, ports: Mapping[str, int], folder: Path, secret: str) -> None:
    """Check this node's partners, all at once; report troubles of links and of shared files, and
    this node's own delay meanwhile.

    `ports` are those of the `Listener`s of the partners and of this node, by name. Each node has
    written a file of its name into `folder`, on a shared disk, with the `secret` in it.
    """
    peers = [node for node in ports if node != place.node]
    with ThreadPoolExecutor(2 * PARTNERS + 1) as pool:
        delay = pool.submit(own_delay, place.node, ports[place.node], secret)
        links = [pool.submit(link_trouble, place, peer, ports[peer], secret) for peer in peers]
        files = [pool.submit(file_trouble, folder, peer, secret) for peer in peers]
    report(values=delay.result())
    for peer, link, file in zip(peers, links, files, strict=True):
        why, is_late = link.result()
        if why:
            report(trouble=peer, check="link", why=why, late=is_late)
        if why := file.result():
            report(trouble=peer, check="scratch", why=why, late=True)
