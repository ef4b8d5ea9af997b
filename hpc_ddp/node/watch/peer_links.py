"""Connections between the supervisors of an attempt, by which one wakes all others.

The files of the attempt say what has happened; a wake-up only says that they are worth a look. So
the supervisors need not ask the shared disk each second, and what comes over the network decides
nothing. The supervisors are a tree: each one has a connection to its parent, and at most `FANOUT`
other nodes and the tasks of its own node for children. A supervisor that is not connected to all of
them asks the disk as often as it did without any network.

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
from hpc_ddp.node.net.network import listen_on_any_port
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
    """A supervisor among the `count` ones of its attempt: its number `index`, from 0 on, and how
    many each node has."""

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
    """A connection to another supervisor; `task` is its number, None until that is proved."""

    socket: socket.socket
    task: int | None = None
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    heard_at: float = field(default_factory=time.monotonic)
    _buffer: bytes = b""

    def send(self, **message: Any) -> None:
        """Send a message. An error is passed over: a link that takes none falls silent, and is
        dropped for that."""
        with suppress(OSError):
            self.socket.send(json.dumps(message).encode() + b"\n")

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that have come. Raise OSError where the link has ended or nothing has
        come (BlockingIOError), ValueError for what is no message."""
        data = self.socket.recv(4096)
        if not data:
            raise OSError("the link has ended")
        self.heard_at = time.monotonic()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if any(len(line) > LINE_BYTES for line in (*lines, self._buffer)):
            raise ValueError("too long a line")
        for line in lines:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("no message")
            yield message


class PeerLinks:
    """Connects a supervisor with its parent and children; a thread of its own does all of it."""

    def __init__(self, place: Place, task: Task) -> None:
        """Take the supervisor's place and number; `start` begins."""
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
        """Whether the parent and all children are connected."""
        if self._has_ended:
            return False
        peers = {link.task for link in self._links()}
        parent = set() if self._task.parent is None else {self._task.parent}
        return parent | self._task.children <= peers

    def start(self) -> None:
        """Start the thread; nothing for a supervisor without peers."""
        if self._task.count > 1:
            threading.Thread(target=self._serve, name="peer links", daemon=True).start()

    def wake(self) -> None:
        """Have all other supervisors look at the attempt's files; those that can't be reached find
        out by themselves."""
        self._wake_all_but(None)

    def take_wake(self) -> bool:
        """Return whether a peer has woken this supervisor, has joined or has gone since the last
        call."""
        if not self._woken.is_set():
            return False  # without clear(): it may be set by now
        self._woken.clear()
        return True

    def _wake_all_but(self, origin: Link | None) -> None:
        """Send a wake-up to all proved links but `origin`, by which it came; None: it is ours."""
        for link in self._links():
            if link is not origin and link.task is not None:
                link.send(wake=True)

    def _links(self) -> list[Link]:
        parent = self._parent  # the thread may drop it meanwhile
        return [*self._children, *([parent] if parent else [])]

    # --- the thread -------------------------------------------------------------------------

    def _serve(self) -> None:
        """Listen, connect and pass wake-ups on until the process ends. Where the shared disk or the
        port refuses, there are no links: the supervisor then asks the disk."""
        try:
            self._secret = patiently(self._place.attempt.secret.read_bytes)
            if self._task.children:
                self._listen()
            while not self._has_ended:  # tests end it
                self._connect_if_due()
                for key, _ in self._selector.select(PAUSE_S):
                    if isinstance(key.data, Link):
                        self._read(key.data)
                    else:
                        self._accept(key.data)
                self._beat_if_due()
        except OSError:
            pass
        finally:
            self._has_ended = True
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]  # all are sockets
            self._selector.close()

    def _listen(self) -> None:
        """Open a port for the children, and write its number into this node's folder; raise OSError
        where that is not possible."""
        listener = listen_on_any_port()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, listener)
        port = {"port": listener.getsockname()[1]}
        patiently(partial(write_json, self._port_file(self._task.index), port))

    def _port_file(self, task: int) -> Path:
        """Return the file with the port of supervisor `task`."""
        rank = None if self._task.per_node == 1 else task
        return self._place.attempt.node(self._node_of(task), rank).peer_port

    def _node_of(self, task: int) -> str:
        return self._place.nodes[task // self._task.per_node]

    def _accept(self, listener: socket.socket) -> None:
        """Accept a connection and send it a number, by which its other end has to prove itself;
        close it at once where `STRANGERS` others have not done so yet."""
        with suppress(OSError):
            connection, _ = listener.accept()
            if sum(link.task is None for link in self._children) >= STRANGERS:
                connection.close()
                return
            link = self._add(connection)
            self._children.append(link)
            link.send(nonce=link.nonce)

    def _add(self, connection: socket.socket) -> Link:
        """Return the link of a connection, of which `_serve` hears from now on."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = Link(connection)
        self._selector.register(connection, selectors.EVENT_READ, link)
        return link

    def _connect_if_due(self) -> None:
        """Try to connect to the parent, for `CONNECT_S` at most; nothing where there is a link,
        none is needed, or the pause after a failed try is not over."""
        parent, now = self._task.parent, time.monotonic()
        if parent is None or self._parent or now < self._connect_at:
            return
        self._connect_at, self._retry_s = now + self._retry_s, min(2 * self._retry_s, RETRY_MOST_S)
        port = read_json(self._port_file(parent)).get("port")
        if isinstance(port, int):
            host = self._place.host_of(parent // self._task.per_node)
            with suppress(OSError):
                self._parent = self._add(socket.create_connection((host, port), CONNECT_S))

    def _read(self, link: Link) -> None:
        """Act on a link's messages; drop it where it has ended, or says what it must not."""
        try:
            for message in link.receive():
                if link.task is not None:
                    self._act_on(link, message)
                elif not self._proves_itself(link, message):
                    raise ValueError("the other end does not know the secret")
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self._drop(link)

    def _act_on(self, link: Link, message: dict[str, Any]) -> None:
        """At a wake-up wake this supervisor and, once within FORWARD_EVERY_S, its other peers; any
        other message only shows that the link is there."""
        if message.get("wake") is not True:
            return
        self._woken.set()
        if time.monotonic() >= self._forward_at:
            self._forward_at = time.monotonic() + FORWARD_EVERY_S
            self._wake_all_but(link)

    def _proves_itself(self, link: Link, message: dict[str, Any]) -> bool:
        """Take the next message of a link whose other end is not known yet, and answer it; return
        False where the other end does not know the secret, or is neither parent nor child.

        The parent draws a number; the child answers with its proof and a number of its own, and the
        parent with its proof. A link that is proved gets its `task`, and wakes this supervisor.
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
        self._woken.set()  # what has happened before is on the disk
        return True

    def _proof(self, nonce: str, task: int) -> str:
        """Return what supervisor `task` answers to a number that was drawn for it."""
        return hmac.new(self._secret, f"{nonce} {task}".encode(), "sha256").hexdigest()

    def _beat_if_due(self) -> None:
        """Each `BEAT_S` send a sign of life to the peers, and drop the links by which nothing has
        come for `SILENCE_S`."""
        now = time.monotonic()
        if now < self._beat_at:
            return
        self._beat_at = now + BEAT_S
        for link in self._links():
            if now - link.heard_at > SILENCE_S:
                self._drop(link)
            elif link.task is not None:
                link.send()

    def _drop(self, link: Link) -> None:
        """Close a link. If it was a peer's, whose node may be lost, wake this supervisor."""
        self._selector.unregister(link.socket)
        link.socket.close()
        if link is self._parent:
            self._parent = None
        else:
            self._children.remove(link)
        if link.task is not None:
            self._woken.set()
