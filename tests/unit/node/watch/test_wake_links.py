"""Supervisors find each other, prove themselves, and wake each other; over real connections."""

from __future__ import annotations

import json
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hpc_ddp.core.file_io import read_json
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.watch import wake_links
from hpc_ddp.node.watch.wake_links import FANOUT, SILENCE_S, Link, PeerLinks, Task
from tests.waiting import wait_until
from unit.node.fakes import place_of

NODES = tuple(f"local-{index}" for index in range(3))


@pytest.mark.parametrize("per_node", [1, 2, 8])
@pytest.mark.parametrize("nodes", [1, 2, FANOUT + 1, FANOUT + 2, 300, 1024])
def test_all_supervisors_are_one_tree(nodes: int, per_node: int) -> None:
    count = nodes * per_node
    tasks = [Task(index, count, per_node) for index in range(count)]
    for task in tasks:
        assert len(task.children) <= FANOUT + per_node - 1
        assert all(tasks[child].parent == task.index for child in task.children)
        assert task.parent is None or task.index in tasks[task.parent].children
    assert [task.index for task in tasks if task.parent is None] == [0]
    depths = {0: 0}
    for task in tasks[1:]:
        assert task.parent is not None
        assert task.parent < task.index
        depths[task.index] = depths[task.parent] + 1
    assert max(depths.values()) <= 3 + (per_node > 1)


def test_no_wake_up_is_lost_that_comes_as_one_is_asked_for(attempt: AttemptFolder) -> None:
    class LateEvent(threading.Event):
        def is_set(self) -> bool:
            """Be set by the other thread behind the answer."""
            was_set = super().is_set()
            self.set()
            return was_set

    links = PeerLinks(place_of(attempt, nodes=NODES, index=0), Task(0, len(NODES)))
    links._woken = LateEvent()
    assert [links.take_wake(), links.take_wake()] == [False, True]


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    run = RunFolder(tmp_path / "name" / "run").make()
    attempt = run.claim_attempt({"nodes": list(NODES)}, lambda identity: False)
    for name in NODES:
        attempt.node(name).path.mkdir()
    return attempt


@pytest.fixture
def start(
    attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], PeerLinks]]:
    """Start the links of a supervisor of three; all are closed at the end."""
    monkeypatch.setattr(wake_links, "PAUSE_S", 0.05)
    monkeypatch.setattr(wake_links, "RETRY_S", 0.05)
    started: list[PeerLinks] = []

    def make(index: int) -> PeerLinks:
        place = place_of(attempt, nodes=NODES, index=index)
        links = PeerLinks(place, Task(index, len(NODES)))
        started.append(links)
        links.start()
        return links

    yield make
    for links in started:
        end(links)


def port_of(attempt: AttemptFolder) -> int:
    """Return the port at which the first supervisor listens, once it does."""
    file = attempt.node(NODES[0]).peer_port
    wait_until(lambda: read_json(file), "the port of the first supervisor")
    return int(read_json(file)["port"])


def connect(attempt: AttemptFolder) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(attempt)), 60)


def end(links: PeerLinks) -> None:
    """End a supervisor's thread, and with it all its links."""
    links._has_ended = True
    wait_until(lambda: links._selector.get_map() is None, "the end of a supervisor's links")


def take_wakes(*links: PeerLinks) -> list[bool]:
    """Return which of some supervisors have been woken since the last call."""
    return [link.take_wake() for link in links]


def test_one_wakes_all_others(start: Callable[[int], PeerLinks]) -> None:
    everyone = [start(index) for index in (2, 0, 1)]  # a child may be there before its parent
    second, first, third = everyone
    wait_until(lambda: all(links.is_whole for links in everyone), "the links of three")
    wait_until(lambda: not any(take_wakes(*everyone)), "the end of the wake-ups of the start")
    second.wake()
    for links in (first, third):
        wait_until(links.take_wake, "a wake-up")
    assert not second.take_wake()


def test_the_end_of_a_peer_wakes_its_neighbours_and_breaks_the_links(
    start: Callable[[int], PeerLinks],
) -> None:
    first, second, third = (start(index) for index in range(3))
    everyone = (first, second, third)
    wait_until(lambda: all(links.is_whole for links in everyone), "the links of three")
    wait_until(lambda: not any(take_wakes(*everyone)), "the end of the wake-ups of the start")
    end(second)
    wait_until(first.take_wake, "the end of a peer")
    assert (first.is_whole, second.is_whole, third.is_whole) == (False, False, True)
    again = start(1)
    wait_until(lambda: first.is_whole and again.is_whole, "another supervisor in its place")


def test_a_peer_that_is_silent_is_dropped(attempt: AttemptFolder) -> None:
    """A cut cable closes no connection."""
    links = PeerLinks(place_of(attempt, nodes=NODES, index=0), Task(0, 3))
    ends = [socket.socketpair() for _ in range(3)]
    for task, (own, _) in zip((1, 2, None), ends, strict=True):
        link = Link(own, task)
        links._children.append(link)
        links._selector.register(own, selectors.EVENT_READ, link)
    assert links.is_whole
    for number in (1, 2):  # a peer, and a stranger
        links._children[number].heard_at -= SILENCE_S + 1
    links._beat_if_due()
    assert not links.is_whole
    assert links.take_wake()
    (left,) = links._children
    assert left.task == 1
    assert ends[0][1].recv(100) == b"{}\n"
    assert [end.recv(100) for _, end in ends[1:]] == [b"", b""]
    links._beat_if_due()  # not due yet
    left.heard_at -= SILENCE_S + 1
    links._beat_if_due()
    assert links._children == [left]
    for pair in ends:
        for end in pair:
            end.close()


ANSWERS: tuple[object, ...] = (
    {"task": 1, "proof": "", "nonce": "1"},
    {"task": 1, "proof": "\xe9", "nonce": "1"},
    {"task": 1, "proof": "\ud800", "nonce": "1"},
    {"task": 5, "proof": "0" * 64, "nonce": "1"},
    {"task": "1", "proof": "0" * 64},
    {"wake": True},
    {"nonce": "1"},
    [1],
    "[" * 280,
    "x" * 5000,
    "\n",
)


def test_a_stranger_is_sent_away_and_wakes_no_one(
    start: Callable[[int], PeerLinks], attempt: AttemptFolder
) -> None:
    first = start(0)
    for answer in ANSWERS:
        with connect(attempt) as stranger:
            greeting = json.loads(stranger.makefile().readline())
            assert list(greeting) == ["nonce"]
            text = answer if isinstance(answer, str) else json.dumps(answer)
            stranger.sendall(text.encode() + b"\n")
            with suppress(ConnectionResetError):  # of what it has not read
                assert stranger.recv(100) == b"", answer
    assert not first.take_wake()
    assert not first.is_whole
    second, third = start(1), start(2)
    wait_until(lambda: first.is_whole and second.is_whole and third.is_whole, "the real peers")


def test_a_false_parent_is_not_believed(
    start: Callable[[int], PeerLinks], attempt: AttemptFolder
) -> None:
    """It could keep a supervisor from asking the disk."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        attempt.node(NODES[0]).peer_port.write_text(json.dumps({"port": port}))
        second = start(1)
        server.settimeout(60)
        connection, _ = server.accept()
        with connection:
            connection.sendall(b'{"nonce": "1"}\n')
            answer = json.loads(connection.makefile().readline())
            assert answer["task"] == 1
            connection.sendall(json.dumps({"proof": answer["proof"]}).encode() + b"\n")
            assert connection.recv(100) == b""
        assert not second.is_whole


def test_strangers_can_not_fill_the_supervisor(
    start: Callable[[int], PeerLinks], attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wake_links, "STRANGERS", 2)
    start(0)
    waiting = [connect(attempt) for _ in range(2)]
    for stranger in waiting:
        assert stranger.makefile().readline()
    with connect(attempt) as third:
        assert third.recv(100) == b""
    for stranger in waiting:
        stranger.close()


def test_a_wake_up_is_passed_on_once_a_second(
    attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes may fail at once, and each of them wake all others."""
    links = PeerLinks(place_of(attempt, nodes=NODES, index=0), Task(0, 3))
    ends = [socket.socketpair() for _ in range(2)]
    for task, (own, _) in enumerate(ends, 1):
        links._children.append(Link(own, task))
    for _ in range(5):
        links._act_on(links._children[0], {"wake": True})
    links._act_on(links._children[0], {})
    assert ends[1][1].recv(100) == b'{"wake": true}\n'
    ends[0][1].setblocking(False)
    with pytest.raises(BlockingIOError):
        ends[0][1].recv(100)
    assert links.take_wake()
    for pair in ends:
        for end in pair:
            end.close()


def test_a_disk_without_the_secret_leaves_no_links(
    attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_error(act: Callable[[], object]) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(wake_links, "patiently", raise_error)
    links = PeerLinks(place_of(attempt, nodes=NODES, index=0), Task(0, 3))
    links._serve()
    assert not links.is_whole
    lone = PeerLinks(place_of(attempt, nodes=NODES[:1], index=0), Task(0, 1))
    lone.start()
    assert lone.is_whole
