"""The interconnect of a node: chosen for its workers, and compared with the first node's."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict

from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.file_io import read_json
from hpc_ddp.core.journal.events import FabricChosen
from hpc_ddp.core.journal.journal import Journal
from hpc_ddp.node.net import fabric_lookup
from hpc_ddp.node.net.place import Place


class FabricComparison:
    """Reports the first node's interconnect, and each node whose interconnect differs from it."""

    def __init__(self, place: Place, journal: Journal) -> None:
        """Keep this node's `place`, and the `journal` for reports; nothing is looked up."""
        self._place, self._journal = place, journal
        # This node's, while it waits for `compare`.
        self._pending: fabric_lookup.Interconnect | None = None

    def choose(self, is_reported: bool) -> dict[str, str]:
        """Look up this node's interconnect, and return the variables for it; {} where ``--fabric``
        is not auto, or the job has one machine.

        With `is_reported` the interconnect is journalled. The first node then also writes it into
        the attempt's file ``fabric``, unless the disk refuses, and prints it if it has cards or a
        trouble; another node keeps it for `compare`.
        """
        place = self._place
        if not place.seeks_fabric:
            return {}
        interconnect = fabric_lookup.find_fabric()
        variables = place.fabric_env(interconnect)
        if not is_reported:
            return variables
        self._journal.write(FabricChosen(place.node, **asdict(interconnect), env=variables))
        if place.index > 0:
            self._pending = interconnect
            return variables
        with contextlib.suppress(OSError):  # then no node compares its interconnect
            place.attempt.fabric.write_text(json.dumps(asdict(interconnect)))
        if interconnect != fabric_lookup.Interconnect():
            words = " ".join(f"{key}={value}" for key, value in variables.items())
            say(f"fabric: {place.node}: {interconnect}; {words or 'nothing is set for it'}")
        return variables

    def compare(self) -> None:
        """Read the first node's interconnect, and print a warning if this node's differs: NCCL
        would fail, hang, or be slow.

        Do nothing on the first node, before `choose` has reported this node's interconnect, until
        the first node has written its own, and after one comparison.
        """
        place, interconnect = self._place, self._pending
        if interconnect is None:
            return
        fields = read_json(place.attempt.fabric)
        if not fields:
            return
        self._pending, first = None, fabric_lookup.Interconnect(**fields)
        if not interconnect.is_like(first):
            say(
                f"WARNING: the interconnect of {place.node} is {interconnect}, and of"
                f" {place.nodes[0]} {first}: NCCL will fail, hang or be slow"
            )
