"""Names and ports of a node."""

from __future__ import annotations

import socket

import pytest

from hpc_ddp.node.net import names_and_ports
from unit.fakes import stop_clock


def test_a_node_alone_is_reached_by_loopback() -> None:
    assert names_and_ports.reachable_name(["n1"], 0, "-ib") == "127.0.0.1"
    assert names_and_ports.reachable_name(["n1", "n2"], 1, "-ib") == "n2-ib"


def test_a_name_is_looked_up_until_a_name_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = stop_clock(monkeypatch, names_and_ports)
    names_and_ports.check_resolves("localhost")
    with pytest.raises(OSError, match=r"the name n1\.invalid can't be looked up on"):
        names_and_ports.check_resolves("n1.invalid")
    assert clock.now - 1000 > names_and_ports.RESOLVE_S


def test_a_free_port_is_the_next_one() -> None:
    free = names_and_ports.free_port(20000)
    with socket.create_server(("", free)):
        assert names_and_ports.free_port(free) > free >= 20000
    first, last = names_and_ports.FIRST_PORT, names_and_ports.LAST_PORT
    assert all(first <= names_and_ports.free_port(start) <= last for start in (0, last + 1, 70000))


@pytest.mark.parametrize("has_ipv6", [True, False])
def test_a_port_that_is_listened_on_is_reached_and_kept(
    monkeypatch: pytest.MonkeyPatch, has_ipv6: bool
) -> None:
    has_ipv6 = has_ipv6 and socket.has_dualstack_ipv6()
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: has_ipv6)
    with names_and_ports.listen_on_any_port() as server:
        port = server.getsockname()[1]
        for host in ["127.0.0.1", "::1"][: 1 + has_ipv6]:
            socket.create_connection((host, port)).close()
        assert names_and_ports.free_port(port) != port


def test_the_last_port_is_followed_by_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {names_and_ports.FIRST_PORT + 1}
    tried: list[int] = []

    class Probe:
        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *error: object) -> None:
            return

        def bind(self, address: tuple[str, int]) -> None:
            tried.append(address[1])
            if address[1] not in free:
                raise OSError

    monkeypatch.setattr(socket, "socket", Probe)
    assert names_and_ports.free_port(names_and_ports.LAST_PORT) == names_and_ports.FIRST_PORT + 1
    assert tried == [
        names_and_ports.LAST_PORT,
        names_and_ports.FIRST_PORT,
        names_and_ports.FIRST_PORT + 1,
    ]
    free.clear()
    tried.clear()
    with pytest.raises(OSError, match="no free port between 10000 and 32767"):
        names_and_ports.free_port(0)
    assert len(set(tried)) == names_and_ports.LAST_PORT - names_and_ports.FIRST_PORT + 1


def test_ports_are_spread_over_the_range() -> None:
    ports = [names_and_ports.first_port(str(number), "/r") for number in range(20_000)]
    assert (min(ports) < 10010, max(ports) > 32757, max(ports) < 32768) == (True, True, True)
    assert len(set(ports)) > 11_000
