"""The interfaces of a node, and their addresses."""

from __future__ import annotations

import contextlib
import errno
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.node.net import interface

REPO = Path(__file__).parents[4]


IF_INET6 = """\
fe800000000000000000000000000001 02 40 20 80     eth0
fd000000000000000000000000000001 03 40 00 80      ib0
"""


def test_loopback_leads_to_itself() -> None:
    assert interface.interface_to("127.0.0.1") == "lo"
    assert interface.interface_to("no-such.invalid") is None
    assert interface.address_of("lo") == "127.0.0.1"
    assert interface.address_of("no-such0") is None


@pytest.fixture
def route(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[int, str]]]:
    """Resolve a name to some addresses and pick this host's own, by address; return the addresses
    that are tried."""

    def call(own: dict[str, tuple[Any, ...] | None]) -> list[tuple[int, str]]:
        tried: list[tuple[int, str]] = []

        class Probe(contextlib.nullcontext[Any]):
            def __init__(self, family: int, *more: int) -> None:
                self.family = family

            def __enter__(self) -> Any:
                return self

            def connect(self, address: tuple[Any, ...]) -> None:
                tried.append((self.family, address[0]))
                self.address = own[address[0]]
                if self.address is None:
                    raise OSError(errno.ENETUNREACH, "no route")

            def getsockname(self) -> Any:
                return self.address

        entries = [
            (socket.AF_INET6 if ":" in text else socket.AF_INET, 2, 17, "", (text, 9))
            for text in own
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *words, **more: entries)
        monkeypatch.setattr(socket, "socket", Probe)
        return tried

    return call


def test_names_of_ipv6_alone_lead_to_an_interface(
    route: Callable[..., list[tuple[int, str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "if_inet6").write_text(IF_INET6)
    monkeypatch.setattr(interface, "IF_INET6", tmp_path / "if_inet6")
    monkeypatch.setattr(socket, "if_indextoname", {4: "ib0"}.__getitem__)
    monkeypatch.setattr(interface, "_ipv4_addresses", lambda: [("eth0", "10.0.0.1")])
    own: tuple[Any, ...] = ("fd00::1", 50000, 0, 0)
    route({"fd00::2": own})
    assert interface.interface_to("n2-v6") == "ib0"
    route({"fe80::2": ("fe80::1%ib0", 50000, 0, 4)})  # each link has such an address
    assert interface.interface_to("n2-link") == "ib0"
    tried = route({"fd00::2": own, "10.0.0.2": ("10.0.0.1", 50000)})
    assert interface.interface_to("n2") == "eth0"
    assert tried == [(socket.AF_INET, "10.0.0.2")]
    route({"10.9.0.2": None, "fd00::2": own})
    assert interface.interface_to("n2") == "ib0"
    route({"fd00::2": ("fd00::77", 50000, 0, 0)})
    assert interface.interface_to("n2") is None


def test_each_address_of_an_interface_leads_to_it(
    route: Callable[..., list[tuple[int, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of nodes may lead to a second network on the same cards. What Gloo and NCCL take is
    an interface's first address."""
    own = [("lo", "127.0.0.1"), ("lo", "10.9.0.1"), ("bond0", "10.0.0.1"), ("bond0", "10.1.0.1")]
    monkeypatch.setattr(interface, "_ipv4_addresses", lambda: own)
    for address, name in (("10.0.0.1", "bond0"), ("10.1.0.1", "bond0"), ("10.9.0.1", None)):
        route({"10.7.0.2": (address, 50000)})
        assert interface.interface_to("n2") == name
    assert interface.address_of("bond0") == "10.0.0.1"


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rn", "true"], stderr=subprocess.DEVNULL).returncode != 0,
    reason="no network of its own",
)
def test_linux_tells_all_addresses() -> None:
    code = "from hpc_ddp.node.net.interface import _ipv4_addresses; print(_ipv4_addresses())"
    lines = f"ip address add 10.1.0.5/24 dev lo label lo:1; ip link set lo up; {sys.executable} -c"
    argv = ["unshare", "-rn", "sh", "-c", f'{lines} "{code}"']
    done = subprocess.run(argv, capture_output=True, text=True, cwd=REPO)
    assert done.stdout == "[('lo', '127.0.0.1'), ('lo', '10.1.0.5')]\n", done.stderr


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6")
def test_loopback_of_ipv6_leads_to_itself() -> None:
    assert interface.interface_to("::1") == "lo"


def test_an_address_of_ipv6_counts_beyond_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "if_inet6").write_text(IF_INET6)
    monkeypatch.setattr(interface, "IF_INET6", tmp_path / "if_inet6")
    assert [interface.has_ipv6(name) for name in ("eth0", "ib0", "lo")] == [False, True, False]
    monkeypatch.setattr(interface, "IF_INET6", tmp_path / "none")
    assert interface.has_ipv6("ib0") is False
