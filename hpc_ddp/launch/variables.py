"""Environment variables that a user passes in vain: dead, misspelt, or against the fabric.

The table is ``templates/variables.toml``. A warning is all: a job is never refused for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from hpc_ddp.launch.fabric import fabric_env, read_toml
from hpc_ddp.launch.resources import folder
from hpc_ddp.run.errors import closest
from hpc_ddp.run.spec import JobSpec

# How alike a name must be to be a slip of the pen. Of the names that are known no two are as alike.
ALIKE = 0.92
PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_", "FI_")

_EXPORT = re.compile(r"(?:^|[;&|]\s*|\bdo\s+|\bthen\s+)\s*export\s+(?P<words>[^;&|]*)")
_WORD = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>\"[^\"]*\"|'[^']*'|\S*)")


def warnings(spec: JobSpec) -> list[str]:
    """Return a sentence for each variable of a job that does not do what it seems to."""
    table = read_toml(folder("templates") / "variables.toml")
    given = passed(spec)
    found = [_warning(name, value, spec.fabric, table) for name, value in given.items()]
    return [*filter(None, found), *_contradictions(given, spec.fabric)]


def passed(spec: JobSpec) -> dict[str, str]:
    """Return the variables that the user passes, '' for values taken from the shell.

    Set-up lines run last; a value that the shell makes up there is taken as it stands.
    """
    given = {name: "" for name in spec.env_names} | dict(spec.env)
    return given | {name: value for line in spec.setup for name, value in _exported(line)}


def _exported(line: str) -> Iterator[tuple[str, str]]:
    for export in _EXPORT.finditer(line):
        for word in _WORD.finditer(export["words"]):
            yield word["name"], word["value"].strip("\"'")


def _warning(name: str, value: str, fabric: str, table: Mapping[str, Any]) -> str | None:
    for row in table["variable"]:
        if _fits(row, name, value, fabric):
            shown = f"{name}={value}" if "value" in row else name
            return f"{shown} {row['why']}; instead: {row['instead']}"
    known = " ".join(table["known"].values()).split()
    if name in known or not name.startswith(PREFIXES):
        return None
    near = closest(name, known, ALIKE)
    return f"{name} is unknown{near}" if near else None


def _fits(row: Mapping[str, Any], name: str, value: str, fabric: str) -> bool:
    named = fnmatchcase(name, row["name"])
    meant = "value" not in row or row["value"] == value.lower()
    return named and meant and ("fabrics" not in row or fabric in row["fabrics"])


def _contradictions(given: Mapping[str, str], fabric: str) -> Iterator[str]:
    net, own = fabric_env(fabric).get("NCCL_NET", ""), given.get("NCCL_NET", "")
    if net and own and _plain(net) != _plain(own):
        yield f"NCCL_NET={own} is not fabric {fabric}, which has {net!r}; yours counts"
    elif net == "IB" and given.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        yield (
            f"NCCL_IB_DISABLE={given['NCCL_IB_DISABLE']} and fabric {fabric} exclude each other:"
            " NCCL will fail; instead: --fabric ethernet, or without the variable"
        )


def _plain(net: str) -> str:
    """Return a name of NCCL's networks in one spelling; the plugin for libfabric has three."""
    return {"aws libfabric": "libfabric", "ofi": "libfabric"}.get(net.lower(), net.lower())
