"""The network interface of a node: its choice by a route, and its addresses."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from array import array
from pathlib import Path
from typing import Any

SIOCGIFCONF = 0x8912  # linux/sockios.h: the IPv4 addresses of all interfaces
IFREQ_BYTES, MOST_ADDRESSES = 40, 1024
IF_INET6 = Path("/proc/net/if_inet6")


def interface_to(host: str) -> str | None:
    """Return the name of the interface whose route leads to `host`, a name or an address. IPv4
    addresses of the host are tried first, then those of IPv6.

    None where the name can't be looked up, there is no route, or the route's address is no
    interface's. NCCL and Gloo would each pick an interface by themselves, Gloo from the address of
    this host's own name, which on many systems is loopback.
    """
    entries = []
    with contextlib.suppress(OSError, UnicodeError):  # the name is unknown, or is none
        entries = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)  # any port will do
    entries.sort(key=lambda entry: entry[0] != socket.AF_INET)  # False comes first
    for family, kind, protocol, _, address in entries:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing: only picks the route
            if name := _interface_with(family, probe.getsockname()):
                return name
    return None


def _interface_with(family: int, address: Any) -> str | None:
    """Return the name of the interface with `address`, a socket's of `family`; None where no
    interface has it, and for an IPv4 address that Gloo and NCCL would not use. Raise OSError for
    an IPv6 scope that is no interface's."""
    if family == socket.AF_INET:
        pairs = _ipv4_addresses()
        name = next((name for name, text in pairs if text == address[0]), None)
        # Gloo and NCCL take an interface's first address. Where that is loopback's, peers would
        # not reach this node by it. In the reversed dict the first address is set last, and stays.
        first_address = dict(reversed(pairs)).get(name or "", "")
        is_hidden = first_address.startswith("127.") and not address[0].startswith("127.")
        return None if is_hidden else name
    if scope := address[3]:  # of a link-local address, which other interfaces may have, too
        return socket.if_indextoname(scope)
    digits = socket.inet_pton(family, address[0]).hex()
    return next((name for name, text in _ipv6_addresses() if text == digits), None)


def has_ipv6(interface: str) -> bool:
    """Return whether an interface has an IPv6 address that is not link-local; False if Linux does
    not tell."""
    addresses = [digits for name, digits in _ipv6_addresses() if name == interface]
    return any(not digits.startswith("fe80") for digits in addresses)  # fe80: link-local


def _ipv6_addresses() -> list[tuple[str, str]]:
    """Return a pair for each IPv6 address: its interface's name, and the address as 32 hexadecimal
    digits; [] if Linux does not tell."""
    with contextlib.suppress(OSError):
        # A line is: address, index, length of the prefix, scope, flags, name.
        lines = IF_INET6.read_text(errors="replace").splitlines()
        return [(words[-1], words[0]) for words in map(str.split, lines)]
    return []


def _ipv4_addresses() -> list[tuple[str, str]]:
    """Return a pair for each IPv4 address: its interface's name, and the address as 127.0.0.1; an
    interface's first address comes first. [] where Linux does not tell, and on other systems."""
    if sys.platform != "linux":
        return []
    import fcntl

    entries = array("B", bytes(IFREQ_BYTES * MOST_ADDRESSES))
    request = struct.pack("iP", len(entries), entries.buffer_info()[0])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            size, _ = struct.unpack("iP", fcntl.ioctl(probe.fileno(), SIOCGIFCONF, request))
    except OSError:
        return []
    # A struct ifreq has the name in its bytes 0 to 15, and the address in its bytes 20 to 23.
    rows = [entries[at : at + IFREQ_BYTES].tobytes() for at in range(0, size, IFREQ_BYTES)]
    # An address may have a label of its own, as eth0:1.
    names = [row[:16].split(b"\0")[0].decode(errors="replace").split(":")[0] for row in rows]
    return [(name, socket.inet_ntoa(row[20:24])) for name, row in zip(names, rows, strict=True)]


def address_of(interface: str) -> str | None:
    """Return an interface's first IPv4 address; None where it has none, Linux does not tell, there
    is no such interface, or this is no Linux."""
    return next((text for name, text in _ipv4_addresses() if name == interface), None)
