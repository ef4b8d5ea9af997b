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
LINK_S = 8.0  # to answer to a connection
TRIES = 2  # of a link: a busy node may be late with its first answer
VISIBLE_S = 15.0  # until a file that one node has written is there on another
PAYLOAD = 256 << 10  # bytes each way: more than fits into small packets


def partners(nodes: Sequence[str], node: str) -> list[str]:
    """Return the nodes that a node checks, at most `PARTNERS`, [] for a lone one; as many check it.

    They are at the same distances from each node, on a ring of all.
    """
    count = min(PARTNERS, len(nodes) - 1)
    index = nodes.index(node)
    strides = [1 + number * (len(nodes) - 1) // count for number in range(count)]
    return [nodes[(index + stride) % len(nodes)] for stride in strides]


class Listener(socketserver.ThreadingTCPServer):
    """Answers partners that send the secret: with the node's name, and the bytes that came.

    The port is free, on all interfaces; a thread serves until the process ends.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, node: str, secret: str) -> None:
        """Open the port and start the thread; raise OSError where there is no port."""
        super().__init__(("", 0), _Answer)
        self.node, self.secret = node, secret.encode()
        self.port: int = self.server_address[1]
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Answer(socketserver.StreamRequestHandler):
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
        there is no connection, it leads to another node, or is silent for `LINK_S`
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
            raise OSError("the connection was closed in the middle")


def addresses_of(host: str) -> list[str]:
    """Return the addresses that a host's name resolves to here, one at least; raise OSError if it
    resolves to none, UnicodeError if it can't be a name."""
    addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in addresses))


def is_loopback(addresses: Iterable[str]) -> bool:
    """Return whether all addresses, IPv4 or IPv6, are the machine's own."""
    return all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in addresses)


def link_trouble(place: Place, peer: str, port: int, secret: str) -> str:
    """Return why this node does not reach a partner by its name, '' if it does.

    `port` is that of the partner's `Listener`, which is tried at the first address only, `TRIES`
    times.
    """
    host = place.host_of(place.nodes.index(peer))
    try:
        addresses = addresses_of(host)
    except (OSError, UnicodeError) as error:
        return f"the name {host} does not resolve here: {_reason(error)}"
    if not place.is_local and is_loopback(addresses):
        return f"the name {host} resolves to {addresses[0]}, which is loopback"
    reason = ""
    for _ in range(TRIES):
        try:
            reach(peer, addresses[0], port, secret)
            return ""
        except OSError as error:
            reason = _reason(error)
    return f"no connection from here to {peer} ({addresses[0]}): {reason}"


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
    """Check this node's partners, all at once; report troubles of links and of shared files.

    Parameters
    ----------
    ports
        port of each node's `Listener`, by the node's name; this node among them
    folder
        on a shared disk; each node has written a file of its name into it
    secret
        content of these files, and what a `Listener` asks for
    """
    peers = partners(list(ports), place.node)
    with ThreadPoolExecutor(2 * PARTNERS) as pool:
        links = [pool.submit(link_trouble, place, peer, ports[peer], secret) for peer in peers]
        files = [pool.submit(file_trouble, folder, peer, secret) for peer in peers]
    for check, results in (("link", links), ("scratch", files)):
        for peer, trouble in zip(peers, results, strict=True):
            if why := trouble.result():
                report(trouble=peer, check=check, why=why)
