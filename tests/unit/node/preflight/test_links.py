"""A node has partners, and connects to each of them."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from pathlib import Path

import pytest

from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.node.net.names_and_ports import listen_on_any_port
from hpc_ddp.node.net.place import Place
from hpc_ddp.node.preflight import links
from hpc_ddp.node.preflight.links import Listener, partners
from hpc_ddp.node.preflight.messages import MARK
from unit.fakes import stop_clock
from unit.node.fakes import place_of


@pytest.mark.parametrize("count", [1, 2, 5, 9, 10, 100, 1024])
@pytest.mark.parametrize("again", [False, True])
def test_each_node_is_checked_as_often_as_it_checks(count: int, again: bool) -> None:
    nodes = [f"n{index}" for index in range(count)]
    checked = Counter(peer for node in nodes for peer in partners(nodes, node, again))
    per_node = min(count - 1, links.PARTNERS_PER_NODE)
    for node in nodes:
        peers = partners(nodes, node, again)
        assert node not in peers
        assert len(set(peers)) == len(peers) == per_node
    assert set(checked.values()) <= {per_node}


@pytest.mark.parametrize("count", [17, 64, 100, 1024])
def test_many_nodes_check_no_pair_twice_and_have_other_partners_again(count: int) -> None:
    nodes = [f"n{index}" for index in range(count)]
    pairs = [{node, peer} for node in nodes for peer in partners(nodes, node)]
    assert len({frozenset(pair) for pair in pairs}) == count * links.PARTNERS_PER_NODE
    news = {*partners(nodes, "n0", again=True)} - {*partners(nodes, "n0")}
    assert len(news) == (links.PARTNERS_PER_NODE if count > 32 else 1)


# --- links ---------------------------------------------------------------------------------


def test_a_link_is_checked_by_name_and_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener("b", "secret")
    links.exchange_with("b", "127.0.0.1", listener.port, "secret")
    with pytest.raises(OSError, match="b answers there"):
        links.exchange_with("c", "127.0.0.1", listener.port, "secret")
    with pytest.raises(OSError, match="something else answers"):
        links.exchange_with("b", "127.0.0.1", listener.port, "another")
    assert 0 <= links.measure_own_delay("b", listener.port, "secret")["delay_s"] < links.LINK_S
    assert links.measure_own_delay("c", listener.port, "secret") == {}
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setattr(links, "LINK_S", 0.2)
        with pytest.raises(OSError, match="timed out"):
            links.exchange_with("b", "127.0.0.1", deaf.getsockname()[1], "secret")
    _close(listener)


def _close(listener: Listener) -> None:
    listener.shutdown()
    listener.server_close()


def test_a_connection_that_is_closed_in_the_middle() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            peer, _ = server.accept()
            with peer, peer.makefile("rb") as received:
                received.readline()
                peer.sendall(b"b\n")
                received.read(links.PAYLOAD_BYTES)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError, match="closed in the middle"):
            links.exchange_with("b", "127.0.0.1", server.getsockname()[1], "secret")
        thread.join()


def test_a_listener_keeps_no_process_alive_and_has_its_own_port() -> None:
    before = set(threading.enumerate())
    listeners = [Listener("b", "secret") for _ in range(2)]
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)
    assert all(listener.daemon_threads for listener in listeners)
    assert listeners[0].port != listeners[1].port
    for listener in listeners:
        _close(listener)


def test_a_listener_takes_the_port_that_all_have_if_it_is_free() -> None:
    with listen_on_any_port() as server:
        port = server.getsockname()[1]
        busy = Listener("b", "secret", port)
    free = Listener("b", "secret", port)
    assert (busy.port != port, free.port) == (True, port)
    for listener in (busy, free):
        _close(listener)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="IPv6 is off")
def test_a_listener_answers_ipv6_as_well() -> None:
    listener = Listener("b", "secret")
    for address in ("127.0.0.1", "::1"):
        links.exchange_with("b", address, listener.port, "secret")
    _close(listener)


def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LINK_S", 0.1)
    listener = Listener("b", "secret")
    with socket.create_connection(("127.0.0.1", listener.port), timeout=60) as peer:
        assert peer.recv(1) == b""
    _close(listener)


@pytest.mark.parametrize(
    ("addresses", "loopback"),
    [
        (["127.0.1.1"], True),
        (["::1", "127.0.0.1"], True),
        (["127.0.0.1", "10.0.0.1"], False),
        (["fe80::1%eth0"], False),
    ],
)
def test_loopback_addresses_are_recognised(addresses: list[str], loopback: bool) -> None:
    assert links.is_loopback(addresses) is loopback


def test_a_name_has_each_address_once() -> None:
    assert links.addresses_of("127.0.0.1") == ["127.0.0.1"]


@pytest.fixture
def place(attempt: AttemptFolder) -> Place:
    return place_of(attempt)


@pytest.mark.parametrize(
    ("addresses", "why", "is_late"),
    [
        (["10.0.0.2"], "", False),
        (["10.0.0.9"], "no connection from here to n2 (10.0.0.9): timed out", True),
        (["10.0.0.8"], "no connection from here to n2 (10.0.0.8): Connection refused", False),
        (["127.0.1.1"], "the name n2 resolves to 127.0.1.1, which is loopback", False),
        (OSError(2, "Name unknown"), "the name n2 does not resolve here: Name unknown", False),
        (
            socket.gaierror(socket.EAI_AGAIN, "Temporary failure"),
            "the name n2 does not resolve here: Temporary failure",
            True,
        ),
        (UnicodeError("label"), "the name n2 does not resolve here: label", False),
    ],
)
def test_name_and_link_faults_are_told_apart(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    addresses: list[str] | Exception,
    why: str,
    is_late: bool,
) -> None:
    def resolve(host: str) -> list[str]:
        if isinstance(addresses, Exception):
            raise addresses
        return addresses

    def reach(node: str, address: str, port: int, secret: str) -> None:
        assert (node, port, secret) == ("n2", 5, "secret")
        if address == "10.0.0.8":
            raise ConnectionRefusedError(111, "Connection refused")
        if address != "10.0.0.2":
            raise TimeoutError("timed out")

    monkeypatch.setattr(links, "addresses_of", resolve)
    monkeypatch.setattr(links, "exchange_with", reach)
    assert links.test_link(place, "n2", 5, "secret") == (why, is_late)


def test_loopback_is_right_between_processes_of_one_machine(
    attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "exchange_with", lambda *words: None)
    place = place_of(attempt, nodes=("local-0", "local-1"))
    assert links.test_link(place, "local-1", 5, "secret") == ("", False)


# --- files ---------------------------------------------------------------------------------


def test_a_file_that_comes_late_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = stop_clock(monkeypatch, links)
    last = 1000 + links.VISIBLE_S - 1
    monkeypatch.setattr(links, "has_content", lambda path, text: clock.now > last)
    assert links.await_file(tmp_path, "n2", "secret") == ""
    monkeypatch.setattr(links, "has_content", lambda path, text: False)
    begin = clock.now
    why = links.await_file(tmp_path, "n2", "secret")
    assert why == "does not see the files that n2 writes"
    assert links.VISIBLE_S < clock.now - begin < links.VISIBLE_S + 1


def test_a_file_contains_a_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("secret")
    assert links.has_content(tmp_path / "a", "secret")
    assert not links.has_content(tmp_path / "a", "other")
    assert links.has_content(tmp_path / "b", "secret") is False


def test_troubles_with_partners_are_reported(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPC_DDP_NODE", "n1")
    monkeypatch.setattr(
        links, "test_link", lambda place, peer, port, secret: (f"{port}" * (port == 6), True)
    )
    monkeypatch.setattr(links, "measure_own_delay", lambda node, port, secret: {node: port})
    monkeypatch.setattr(
        links, "await_file", lambda folder, peer, secret: secret if peer == "n2" else ""
    )
    links.check_partners(place, {"n1": 4, "n2": 5, "n3": 6}, Path("/no"), "secret")
    lines = [json.loads(line.removeprefix(MARK)) for line in capfd.readouterr().out.splitlines()]
    assert lines == [
        {"node": "n1", "values": {"n1": 4}},
        {"node": "n1", "trouble": "n2", "check": "scratch", "why": "secret", "late": True},
        {"node": "n1", "trouble": "n3", "check": "link", "why": "6", "late": True},
    ]
    links.check_partners(place, {"n1": 4}, Path("/no"), "secret")
    assert len(capfd.readouterr().out.splitlines()) == 1
