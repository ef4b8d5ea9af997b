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

PARTNERS_PER_NODE = 8  # with up to nine nodes, all others
LINK_S = 16.0  # for each answer of a connection
# Errors of a connection that may come from want of time.
LATE = (TimeoutError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
VISIBLE_S = 15.0  # until a node sees a file that another node has written
PAYLOAD_BYTES = 256 << 10  # bytes each way: more than fits into small packets


def partners(nodes: Sequence[str], node: str, again: bool = False) -> list[str]:
    """Return the partners of `node` among `nodes`, which `node` checks, at most
    `PARTNERS_PER_NODE`; [] for a lone node. Equally many nodes check `node`.

    All nodes form a ring, and each node has its partners at the same distances along the ring; with
    `again` at other distances, if there are more nodes than partners. From 17 nodes on all
    distances are below half of the ring: no two nodes check each other.
    """
    count = min(PARTNERS_PER_NODE, len(nodes) - 1)
    index, half = nodes.index(node), max(count, (len(nodes) - 1) // 2)
    first = 2 if again and len(nodes) > PARTNERS_PER_NODE + 1 else 1
    distances = [first + number * half // count for number in range(count)]
    return [nodes[(index + distance) % len(nodes)] for distance in distances]


class Listener(socketserver.ThreadingTCPServer):
    """A server that answers each partner that sends the secret, with the node's name and then the
    bytes that the partner sends. It listens on all interfaces, IPv4 and IPv6; a thread serves until
    the process ends."""

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, node: str, secret: str, port: int = 0) -> None:
        """Listen on `port`, or on any free port where that is taken, and start the thread. The
        attribute `port` is the port in use. Raise OSError where no port is free."""
        try:
            super().__init__(("", port), _Answer)
        except OSError:
            super().__init__(("", 0), _Answer)
        self.node, self.secret = node, secret.encode()
        self.port: int = self.server_address[1]
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def server_bind(self) -> None:
        """Bind the socket; a socket of IPv6 also takes IPv4 from now on. Raise OSError where the
        port is taken."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class _Answer(socketserver.StreamRequestHandler):
    """Handles a connection to a `Listener`."""

    server: Listener

    def handle(self) -> None:
        """Answer one connection. A partner without the secret gets no answer; a connection that
        breaks, or is silent for `LINK_S`, is given up without an error."""
        self.connection.settimeout(LINK_S)
        with contextlib.suppress(OSError):
            if hmac.compare_digest(self.rfile.readline(100).strip(), self.server.secret):
                self.wfile.write(f"{self.server.node}\n".encode())
                self.wfile.write(self.rfile.read(PAYLOAD_BYTES))


def exchange_with(node: str, address: str, port: int, secret: str) -> None:
    """Exchange bytes with the `Listener` of `node` at an address and port, to which `secret` is
    sent.

    Raises
    ------
    OSError
        there is no connection, or it leads to another node; one of the errors `LATE` if the
        connection is silent for `LINK_S`, or breaks
    """
    with (
        socket.create_connection((address, port), timeout=LINK_S) as peer,
        peer.makefile("rb") as lines,
    ):
        peer.sendall(f"{secret}\n".encode())
        name = lines.readline(300).decode(errors="replace").strip()  # '': a wrong secret
        if name != node:
            raise OSError(f"{name or 'something else'} answers there")
        peer.sendall(bytes(PAYLOAD_BYTES))
        if len(lines.read(PAYLOAD_BYTES)) < PAYLOAD_BYTES:
            raise ConnectionResetError("the connection was closed in the middle")


def addresses_of(host: str) -> list[str]:
    """Return the addresses that a host's name resolves to here, one at least; raise OSError if it
    resolves to none, UnicodeError if it can't be a name."""
    addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in addresses))


def is_loopback(addresses: Iterable[str]) -> bool:
    """Return whether all addresses, IPv4 or IPv6, are those of loopback."""
    return all(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in addresses)  # %: scope


def test_link(place: Place, peer: str, port: int, secret: str) -> tuple[str, bool]:
    """Try to reach the partner `peer` by its name; return the reason why this node does not, '' if
    it does, and whether the reason may be want of time. Waits `LINK_S` at most for each of the
    partner's answers.

    `port` is that of the partner's `Listener`, to which `secret` is sent. Only the first address of
    the name is tried.
    """
    host = place.host_of(place.nodes.index(peer))
    failure = f"the name {host} does not resolve here"
    try:
        addresses = addresses_of(host)
        if not place.is_local and is_loopback(addresses):
            return f"the name {host} resolves to {addresses[0]}, which is loopback", False
        failure = f"no connection from here to {peer} ({addresses[0]})"
        exchange_with(peer, addresses[0], port, secret)
    except (OSError, UnicodeError) as error:
        # EAI_AGAIN: a name server did not answer in time.
        is_late = isinstance(error, LATE) or getattr(error, "errno", 0) == socket.EAI_AGAIN
        return f"{failure}: {_reason(error)}", is_late
    return "", False


def measure_own_delay(node: str, port: int, secret: str) -> dict[str, float]:
    """Return ``delay_s``, the seconds that this node, `node`, needs to exchange bytes with its own
    `Listener` at `port`, by loopback; {} if that fails."""
    begin = time.monotonic()
    with contextlib.suppress(OSError):
        exchange_with(node, "127.0.0.1", port, secret)
        return {"delay_s": round(time.monotonic() - begin, 3)}
    return {}


def _reason(error: Exception) -> str:
    """Return an error's text, without the number that an OSError may put before it."""
    return str(getattr(error, "strerror", None) or error)


def await_file(folder: Path, peer: str, secret: str) -> str:
    """Wait until this node sees the file of the partner `peer`, with `secret` in it, in `folder`,
    and return ''; after `VISIBLE_S` return the reason for a fault."""
    end = time.monotonic() + VISIBLE_S
    while not has_content(folder / peer, secret):
        if time.monotonic() > end:
            return f"does not see the files that {peer} writes"
        time.sleep(0.2)
    return ""


def has_content(path: Path, text: str) -> bool:
    """Return whether a file's content is exactly `text`; False if the file can't be read."""
    with contextlib.suppress(OSError):
        return path.read_text() == text
    return False


def check_partners(place: Place, ports: Mapping[str, int], folder: Path, secret: str) -> None:
    """Test the links and shared files of all partners of this node at the same time; print
    (`report`) a message to the driver for each trouble, and one with this node's own delay.

    `ports` has the ports of the `Listener`s of the partners and of this node, by node. Each node
    has written the `secret` to a file of its own name in `folder`, which is on a shared disk.
    Raises OSError where stdout is closed.
    """
    peers = [node for node in ports if node != place.node]
    with ThreadPoolExecutor(2 * PARTNERS_PER_NODE + 1) as pool:
        delay = pool.submit(measure_own_delay, place.node, ports[place.node], secret)
        links = [pool.submit(test_link, place, peer, ports[peer], secret) for peer in peers]
        files = [pool.submit(await_file, folder, peer, secret) for peer in peers]
    report(values=delay.result())
    for peer, link, file in zip(peers, links, files, strict=True):
        reason, is_late = link.result()
        if reason:
            report(trouble=peer, check="link", why=reason, late=is_late)
        if reason := file.result():
            report(trouble=peer, check="scratch", why=reason, late=True)
