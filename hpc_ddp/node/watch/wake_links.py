"""Connections between the supervisors of an attempt, by which one wakes all others.

The files of the attempt say what has happened; a wake-up only says that they are worth a look. So
the supervisors need not ask the shared disk each second, and what comes over the network decides
nothing. The supervisors form a tree: each one is connected to its parent and to its children. The
children of a node's first supervisor are the first supervisors of at most `FANOUT` other nodes, and
the other supervisors of its own node. A supervisor that lacks one of these links asks the disk as
often as without a network.

Both ends of a connection prove that they know the attempt's secret, without sending it: HMAC-SHA256
over a number that the other end has drawn. Messages are lines of JSON.
"""

from __future__ import annotations

import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hpc_ddp.core.file_io import patiently, read_json, write_json
from hpc_ddp.node.net.names_and_ports import listen_on_any_port
from hpc_ddp.node.net.place import Place

FANOUT = 16  # three levels for 273 nodes, four for 4,369
CONNECT_S = 5.0
RETRY_S, RETRY_MOST_S = 1.0, 30.0  # between two tries to connect; each pause is twice the last one
PAUSE_S = 1.0  # without a message
BEAT_S = 10.0
SILENCE_S = 3 * BEAT_S  # a link that says nothing for so long is gone: a cut cable closes none
FORWARD_EVERY_S = 1.0  # all may wake all at once, and one wake-up makes several looks
LINE_BYTES = 300  # also a bound for what JSON may nest
STRANGERS = 64  # connections at a time whose other end has not proved itself


@dataclass(frozen=True)
class Task:
    """The number `index` of a supervisor, from 0 on, among the `count` supervisors of its attempt,
    of which each node has `per_node`."""

    index: int
    count: int
    per_node: int = 1

    @property
    def parent(self) -> int | None:
        """The number of the supervisor to connect to, None for the first one."""
        node, local = divmod(self.index, self.per_node)
        if local:
            return node * self.per_node
        return (node - 1) // FANOUT * self.per_node if node else None

    @property
    def children(self) -> frozenset[int]:
        """The numbers of the supervisors that connect to this one."""
        node, local = divmod(self.index, self.per_node)
        if local:
            return frozenset()
        first = FANOUT * node + 1
        nodes = range(first, min(first + FANOUT, self.count // self.per_node))
        own_node = range(self.index + 1, self.index + self.per_node)
        return frozenset({*own_node, *(peer * self.per_node for peer in nodes)})


@dataclass(eq=False)
class Link:
    """A connection to another supervisor. `task` is that supervisor's number, None until that has
    proved that it knows the secret; `nonce` is the text that it has to use in its proof;
    `heard_at` is the time, by time.monotonic(), at which something came last."""

    socket: socket.socket
    task: int | None = None
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    heard_at: float = field(default_factory=time.monotonic)
    _buffer: bytes = b""

    def send(self, **message: Any) -> None:
        """Send a message with these fields. An error is passed over: a broken link brings no
        messages either, and is dropped for its silence."""
        with suppress(OSError):
            self.socket.send(json.dumps(message).encode() + b"\n")

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that have come; the beginning of a further one is kept for the next
        call. Raise BlockingIOError where nothing has come, another OSError where the link has
        ended, ValueError for a line that is no message."""
        received = self.socket.recv(4096)
        if not received:
            raise OSError("the link has ended")
        self.heard_at = time.monotonic()
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        if any(len(line) > LINE_BYTES for line in (*lines, self._buffer)):
            raise ValueError("too long a line")
        for line in lines:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("no message")
            yield message


class PeerLinks:
    """Keeps a supervisor connected to its parent and children, by a thread of its own."""

    def __init__(self, place: Place, task: Task) -> None:
        """Note the supervisor's place and number; nothing is connected before `start`."""
        self._place, self._task = place, task
        self._parent: Link | None = None
        self._children: list[Link] = []
        self._selector = selectors.DefaultSelector()
        self._woken = threading.Event()
        # By `time.monotonic()`: when to try next to connect, to send a beat, to forward a wake-up.
        self._connect_at = self._beat_at = self._forward_at = 0.0
        self._retry_s = RETRY_S  # the pause after the next try to connect
        self._secret = b""
        self._has_ended = False

    @property
    def is_whole(self) -> bool:
        """Whether the parent and all children are connected, and have proved themselves; True for
        an attempt with a single supervisor."""
        if self._has_ended:
            return False
        peers = {link.task for link in self._links()}
        parent = set() if self._task.parent is None else {self._task.parent}
        return parent | self._task.children <= peers

    def start(self) -> None:
        """Start the thread; do nothing for an attempt with a single supervisor."""
        if self._task.count > 1:
            threading.Thread(target=self._serve, name="peer links", daemon=True).start()

    def wake(self) -> None:
        """Have all other supervisors look at the attempt's files: those with a link to this one
        pass the wake-up on. A supervisor that can't be reached looks often by itself."""
        self._wake_all_but(None)

    def take_wake(self) -> bool:
        """Return whether, since the last call that returned True, a peer has woken this supervisor,
        has connected or has gone; forget that."""
        if not self._woken.is_set():
            return False  # no clear(): the thread may have set it since
        self._woken.clear()
        return True

    def _wake_all_but(self, origin: Link | None) -> None:
        """Send a wake-up to all peers that have proved themselves, but not by `origin`, the link by
        which it came; None for a wake-up that begins here."""
        for link in self._links():
            if link is not origin and link.task is not None:
                link.send(wake=True)

    def _links(self) -> list[Link]:
        """Return the links to the children and the parent, also those without a proof yet."""
        parent = self._parent  # the thread may drop it meanwhile
        return [*self._children, *([parent] if parent else [])]

    # --- the thread -------------------------------------------------------------------------

    def _serve(self) -> None:
        """Listen, connect and pass wake-ups on until the process ends; the thread runs this. After
        an OSError, as where the secret can't be read or no port is free, all links are closed, and
        `is_whole` stays False."""
        try:
            self._secret = patiently(self._place.attempt.secret.read_bytes)
            if self._task.children:
                self._listen()
            while not self._has_ended:  # tests end it
                self._connect_if_due()
                for key, _ in self._selector.select(PAUSE_S):
                    if isinstance(key.data, Link):
                        self._read_link(key.data)
                    else:
                        self._accept_child(key.data)
                self._beat_if_due()
        except OSError:
            pass
        finally:
            self._has_ended = True
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]  # all are sockets
            self._selector.close()

    def _listen(self) -> None:
        """Open a port for the children, and write its number to this supervisor's port file. Raise
        OSError where either fails."""
        listener = listen_on_any_port()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, listener)
        port = {"port": listener.getsockname()[1]}
        patiently(partial(write_json, self._port_file(self._task.index), port))

    def _port_file(self, task: int) -> Path:
        """Return the path of the file with the port of the supervisor with the number `task`."""
        rank = None if self._task.per_node == 1 else task  # several on a node: one per rank
        return self._place.attempt.node(self._node_of(task), rank).peer_port

    def _node_of(self, task: int) -> str:
        """Return the name of the node of the supervisor with the number `task`."""
        return self._place.nodes[task // self._task.per_node]

    def _accept_child(self, listener: socket.socket) -> None:
        """Accept a connection as a child's link and send it the link's `nonce`, which the other end
        has to use in its proof. Close the connection at once where `STRANGERS` other links still
        lack a proof. A failed connection is passed over."""
        with suppress(OSError):
            connection, _ = listener.accept()
            if sum(link.task is None for link in self._children) >= STRANGERS:
                connection.close()
                return
            link = self._add_link(connection)
            self._children.append(link)
            link.send(nonce=link.nonce)

    def _add_link(self, connection: socket.socket) -> Link:
        """Return a new link for a connection; `_serve` reads what comes by it from now on."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = Link(connection)
        self._selector.register(connection, selectors.EVENT_READ, link)
        return link

    def _connect_if_due(self) -> None:
        """Try to connect to the parent, for `CONNECT_S` at most, and begin the pause before the
        next try. Do nothing for a supervisor that has no parent, or has the link already, and
        before the pause after the last try is over. A failure is passed over."""
        parent, now = self._task.parent, time.monotonic()
        if parent is None or self._parent or now < self._connect_at:
            return
        self._connect_at, self._retry_s = now + self._retry_s, min(2 * self._retry_s, RETRY_MOST_S)
        port = read_json(self._port_file(parent)).get("port")
        if isinstance(port, int):
            host = self._place.host_of(parent // self._task.per_node)
            with suppress(OSError):
                self._parent = self._add_link(socket.create_connection((host, port), CONNECT_S))

    def _read_link(self, link: Link) -> None:
        """Read and act on a link's messages. Drop the link where it has ended, brings something
        that is no message, or where its other end fails to prove itself."""
        try:
            for message in link.receive():
                if link.task is not None:
                    self._act_on(link, message)
                elif not self._go_on_with_proof(link, message):
                    raise ValueError("the other end does not know the secret")
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self._drop_link(link)

    def _act_on(self, link: Link, message: dict[str, Any]) -> None:
        """Act on a `message` of a proved `link`: at a wake-up wake this supervisor and, at most
        once in `FORWARD_EVERY_S`, its other peers. Ignore other messages: they only show that the
        link is there."""
        if message.get("wake") is not True:
            return
        self._woken.set()
        if time.monotonic() >= self._forward_at:
            self._forward_at = time.monotonic() + FORWARD_EVERY_S
            self._wake_all_but(link)

    def _go_on_with_proof(self, link: Link, message: dict[str, Any]) -> bool:
        """Take this end's next step in the proof of a `link` that has no `task` yet, by a `message`
        of the other end. Return False where the link must be dropped: the message has no right
        proof, or names a supervisor that is no child of this one. After True the other end may
        still be without a proof: the link gets its `task` once there is one.

        The parent sends its nonce; the child answers with its proof and a nonce of its own, and the
        parent with its proof. Once the other end is proved, the pauses between tries to connect are
        short again, and this supervisor is woken: it may have missed earlier wake-ups.
        """
        if link is self._parent and "nonce" in message:
            nonce = str(message["nonce"])
            proof = self._proof(nonce, self._task.index)
            link.send(task=self._task.index, proof=proof, nonce=link.nonce)
            return True
        is_child = link is not self._parent
        task = message.get("task") if is_child else self._task.parent
        if not isinstance(task, int) or (is_child and task not in self._task.children):
            return False
        expected = self._proof(link.nonce, task).encode()
        if not hmac.compare_digest(str(message.get("proof")).encode(), expected):
            return False
        if is_child:
            link.send(proof=self._proof(str(message.get("nonce")), self._task.index))
        link.task, self._retry_s = task, RETRY_S
        self._woken.set()
        return True

    def _proof(self, nonce: str, task: int) -> str:
        """Return the proof by which supervisor `task` shows that it knows the secret, in answer to
        the `nonce` that was sent to it."""
        return hmac.new(self._secret, f"{nonce} {task}".encode(), "sha256").hexdigest()

    def _beat_if_due(self) -> None:
        """Once in `BEAT_S`, send an empty message to the peers as a sign of life, and drop the
        links by which nothing has come for `SILENCE_S`."""
        now = time.monotonic()
        if now < self._beat_at:
            return
        self._beat_at = now + BEAT_S
        for link in self._links():
            if now - link.heard_at > SILENCE_S:
                self._drop_link(link)
            elif link.task is not None:
                link.send()

    def _drop_link(self, link: Link) -> None:
        """Close and forget a link. If its other end was proved, wake this supervisor: the peer's
        node may be lost."""
        self._selector.unregister(link.socket)
        link.socket.close()
        if link is self._parent:
            self._parent = None
        else:
            self._children.remove(link)
        if link.task is not None:
            self._woken.set()
