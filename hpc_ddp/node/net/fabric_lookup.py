"""Looks up a node's interconnect, and the variables that follow from it (``--fabric auto``).

The look-up runs where the workers are, on each node and inside the container. The variables that a
fabric sets are data: ``lib/fabrics.json`` of the run, made of ``templates/fabrics``.

=============  ==============================================================================
``slingshot``  a device of the class cxi
``efa``        an RDMA device whose driver is efa
``tcpxo``      ``/dev/aperture_devices``, through which Google's a3-megagpu VMs reach their GPUs
``infiniband`` an RDMA port with the link layer InfiniBand that is active
``roce``       an RDMA port with the link layer Ethernet that is active; nothing is set for it
=============  ==============================================================================
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")
TABLE = "fabrics.json"
VERBS = "libibverbs.so.1"  # what NCCL opens, when it starts
NOTHING = "none"


@dataclass(frozen=True)
class Interconnect:
    """A node's interconnect.

    `name` is the name of the fabric, '' where there is none that we know. `cards` are the devices
    that show it. `trouble` is the reason why NCCL can't use it, or can't use its InfiniBand; ''
    without one.
    """

    name: str = ""
    cards: tuple[str, ...] = ()
    trouble: str = ""

    def __str__(self) -> str:
        """Return the interconnect for people: ``infiniband (mlx5_0 and 3 more)`` or ``none``, with
        ``, but …`` where there is a trouble."""
        more = f" and {len(self.cards) - 1} more" if len(self.cards) > 1 else ""
        text = f"{self.name} ({self.cards[0]}{more})" if self.name else NOTHING
        return f"{text}, but {self.trouble}" if self.trouble else text

    def is_like(self, peer: Interconnect) -> bool:
        """Return whether NCCL can work alike with this node's interconnect and with `peer`, another
        node's: the fabric is the same, and both have a `trouble`, or none has."""
        return self.name == peer.name and bool(self.trouble) == bool(peer.trouble)


class Port(NamedTuple):
    """A port of an RDMA device, as the kernel tells of it."""

    card: str
    driver: str
    layer: str
    active: bool


def find_fabric(root: Path = ROOT, can_load: Callable[[str], bool] | None = None) -> Interconnect:
    """Return the interconnect of this node: the first one of the module's table that the node has,
    with its devices and its trouble. Files that can't be read count as absent.

    Parameters
    ----------
    root
        the folder that has ``sys`` and ``dev``
    can_load
        tells whether a shared library, by its name, can be loaded (default: loads it here)
    """
    ports = _ports(root / "sys/class/infiniband")
    aperture = root / "dev/aperture_devices"
    kinds = {
        "slingshot": [path.name for path in _entries(root / "sys/class/cxi")],
        "efa": [port.card for port in ports if port.driver == "efa"],
        "tcpxo": ["/dev/aperture_devices"] if aperture.is_dir() else [],
        "infiniband": [p.card for p in ports if p.layer == "InfiniBand" and p.active],
        "roce": [p.card for p in ports if p.layer == "Ethernet" and p.active],
    }
    name = next((kind for kind, cards in kinds.items() if cards), "")
    idle = [port.card for port in ports if port.layer == "InfiniBand" and not port.active]
    trouble = ""
    if name in ("", "roce") and idle:
        trouble = f"no InfiniBand port is active ({', '.join(idle)})"
    elif name in ("infiniband", "roce"):
        trouble = _trouble_of_verbs(root, can_load or _try_to_load)
    return Interconnect(name, tuple(dict.fromkeys(kinds.get(name, ()))), trouble)


def fabric_variables(
    interconnect: Interconnect, lib: Path, environ: Mapping[str, str], root: Path = ROOT
) -> dict[str, str]:
    """Return the variables for an interconnect that are set neither in `environ` nor in NCCL's
    files.

    `lib` is the folder with the table of fabrics; {} where the table can't be read or lacks this
    fabric. `root` is the folder below which NCCL's files lie. NCCL_NET is left out, too, where the
    variables that are set choose NCCL's network already: they name a plugin, or, if it were verbs
    (``IB``), switch these off, or lead to a plugin (LD_LIBRARY_PATH), which NCCL prefers.
    """
    present = {**read_nccl_conf(environ, root), **environ}
    fabrics: dict[str, dict[str, str]] = {}
    with contextlib.suppress(OSError, ValueError):  # a lib of an older version has no table
        fabrics = json.loads((lib / TABLE).read_text())
    of_fabric = fabrics.get(interconnect.name, {}).items()
    variables = {name: text for name, text in of_fabric if name not in present}
    is_verbs = variables.get("NCCL_NET") == "IB"
    if "NCCL_NET_PLUGIN" in present or (
        is_verbs and (_switches_verbs_off(present) or _has_plugin(present))
    ):
        variables.pop("NCCL_NET", None)
    return variables


def _ports(folder: Path) -> list[Port]:
    """Return the ports of the RDMA devices in `folder`, ``/sys/class/infiniband``, sorted by
    device; [] without such a folder."""
    ports = []
    for card in _entries(folder):
        driver = os.path.basename(os.path.realpath(card / "device/driver"))  # a link to the driver
        for port in _entries(card / "ports"):
            active = _read(port / "state").endswith("ACTIVE")  # "4: ACTIVE"
            ports.append(Port(card.name, driver, _read(port / "link_layer"), active))
    return ports


def _entries(folder: Path) -> list[Path]:
    """Return a folder's entries, sorted; [] if it can't be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:  # no such class of devices
        return []


def _read(path: Path) -> str:
    """Return a file's text without blanks around it, '' if it can't be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _try_to_load(library: str) -> bool:
    """Load a library by its name into this process; return whether the dynamic linker can do
    that."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _trouble_of_verbs(root: Path, can_load: Callable[[str], bool]) -> str:
    """Return the reason why RDMA verbs can't be used here, '' if they can: a container may lack
    their devices or library. `root` and `can_load` are those of `find_fabric`."""
    devices = [path for path in _entries(root / "dev/infiniband") if path.name.startswith("uverbs")]
    if not any(os.access(path, os.R_OK | os.W_OK) for path in devices):
        return "they can't be opened: there is no /dev/infiniband/uverbs* that we may use"
    return "" if can_load(VERBS) else f"{VERBS} can't be loaded, without which NCCL can't use them"


def read_nccl_conf(environ: Mapping[str, str], root: Path = ROOT) -> dict[str, str]:
    """Return the variables that the configuration files of NCCL and RCCL set, by name; a later file
    wins. A file that can't be read sets none.

    The files lie below `root`, in ``etc`` and in the home folder (HOME in `environ`);
    NCCL_CONF_FILE in `environ` names one more. Other variables of `environ` have no effect.
    """
    home = environ.get("HOME", "/").lstrip("/")
    paths = [root / f"etc/{name}.conf" for name in ("nccl", "rccl")]
    paths += [root / home / f".{name}.conf" for name in ("nccl", "rccl")]
    if path_text := environ.get("NCCL_CONF_FILE"):
        paths.append(Path(path_text))
    lines = (line for path in paths for line in _read(path).splitlines())
    pairs = (line.partition("=") for line in lines if not line.startswith("#"))
    return {name.strip(): value for name, _, value in pairs}


def _switches_verbs_off(variables: Mapping[str, str]) -> bool:
    """Return whether NCCL_IB_DISABLE among `variables` keeps NCCL from verbs."""
    return variables.get("NCCL_IB_DISABLE", "0") != "0"


def _has_plugin(variables: Mapping[str, str]) -> bool:
    """Return whether a network plugin of NCCL or RCCL lies in a folder of LD_LIBRARY_PATH, one of
    `variables`."""
    folders = filter(None, variables.get("LD_LIBRARY_PATH", "").split(":"))
    names = ("libnccl-net.so", "librccl-net.so")
    return any(os.path.exists(os.path.join(folder, name)) for folder in folders for name in names)
