"""Plays `submit --preflight` on healthy nodes, then with two bad ones, and counts whom it names.

``python bench/scale/preflight.py --nodes 16 32 64 --plays 10 [--reference CHECKOUT]``

The rig is that of rehearse.py: real slurmds on this machine, whose cores they share, so that
healthy nodes are busy. `--reference` plays the preflight of another checkout as well, for
comparison. A job is cancelled once its preflight is over. Needs what rehearse.py needs, and
nft (``apt-get install nftables``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import rehearse
from cluster import Cluster  # of the tests, which rehearse.py has found
from rehearse import DISK, REPO, Rehearsal

PORTS = "32768-60999"  # those that Linux takes where any will do


@contextlib.contextmanager
def deaf(cluster: Cluster, node: str) -> Iterator[None]:
    """Drop all connections to a node but Slurm's own, as a firewall does; it can connect itself."""
    rule = f"iifname eth0 tcp flags syn / syn,ack tcp dport {PORTS} drop"
    chain = "add chain inet preflight input { type filter hook input priority 0; }"
    text = f"add table inet preflight; {chain}; add rule inet preflight input {rule}"
    cluster.exec_on(node, "nft", text)
    try:
        yield
    finally:
        cluster.exec_on(node, "nft", "delete table inet preflight")


@contextlib.contextmanager
def slow(cluster: Cluster, node: str) -> Iterator[None]:
    """Let a node send 2.5 MB/s."""
    with cluster.slow_link(node):
        yield


@contextlib.contextmanager
def misled(cluster: Cluster, node: str) -> Iterator[None]:
    """Let a node take each other one for a third, but for the first, which Slurm needs."""
    lines = [line.split() for line in (cluster.folder / "hosts").read_text().splitlines()]
    nodes = [words for words in lines if words[-1] in cluster.nodes[1:] and words[-1] != node]
    turned = dict(zip((words[-1] for words in nodes), [*nodes[1:], nodes[0]], strict=True))
    with tempfile.NamedTemporaryFile("w", dir=DISK) as file:
        for words in lines:
            there = turned.get(words[-1], words)
            file.write(" ".join([there[0], *words[1:]]) + "\n")
        file.flush()
        cluster.exec_on(node, "mount", "--bind", file.name, "/etc/hosts")
        try:
            yield
        finally:
            cluster.exec_on(node, "umount", "--lazy", "/etc/hosts")


Fault = Callable[[Cluster, str], AbstractContextManager[None]]
PAIRS: tuple[tuple[Fault, Fault], ...] = ((deaf, slow), (misled, deaf), (slow, misled))


def opened(cluster: Cluster, node: str) -> int:
    """Return the TCP connections that a node has opened or taken so far, those to itself twice."""
    lines = cluster.exec_on(node, "cat", "/proc/net/snmp").stdout.splitlines()
    names, numbers = (line.split() for line in lines if line.startswith("Tcp:"))
    counts = dict(zip(names, numbers, strict=True))
    return int(counts["ActiveOpens"]) + int(counts["PassiveOpens"])


def play(rehearsal: Rehearsal, package: Path) -> dict[str, Any]:
    """Submit a job, and return the event of its preflight, and what it has cost a node."""
    cluster = rehearsal.cluster
    samples = cluster.nodes[1 :: max(1, cluster.size // 8)]
    before = {node: opened(cluster, node) for node in samples}
    load = Path("/proc/loadavg").read_text().split()[0]
    with rehearsal.phase("preflight"):
        job = rehearsal.submit("--preflight", package=package)
        rehearsal.wait_for(lambda: rehearsal.event("preflight"), "the preflight")
    event = rehearsal.event("preflight") or {}
    after = {node: opened(cluster, node) - before[node] for node in samples}
    cluster.run("scancel", "--full", "--signal=KILL", job)
    cluster.run("scancel", job, check=False)
    rehearsal.wait_for(lambda: not rehearsal.queue(), "the end of the job")
    time.sleep(1)
    cluster.reset(600)
    shutil.rmtree(DISK / "runs")
    phase = rehearsal.phases["preflight"]
    return {
        "nodes": cluster.size,
        "bad_nodes": event["bad_nodes"],
        "ok": event["ok"],
        "why": event["why"],
        "seconds": event["seconds"],
        "bytes_of_event": len(json.dumps(event)),
        "connections": median(after.values()),
        "bytes": median(phase.bytes.values()),
        "operations": median(sum(counts.values()) for counts in phase.operations.values()),
        "load_before": float(load),
        "cpu_s": round(phase.cpu_s, 1),
        "summary": event.get("summary"),
    }


def plays(cluster: Cluster, python: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the outcome of each play on a cluster: healthy ones, then those with two bad nodes."""
    packages = {"this": REPO, **({"reference": options.reference} if options.reference else {})}
    for name, package in packages.items():
        rehearsal = Rehearsal(cluster, 1, python)
        for _ in range(options.plays):
            yield {"package": name, "faults": "none"} | judged(play(rehearsal, package), [])
        for first, second in islice(cycle(PAIRS), options.pairs):
            nodes = [cluster.nodes[cluster.size // 3], cluster.nodes[2 * cluster.size // 3]]
            with first(cluster, nodes[0]), second(cluster, nodes[1]):
                result = play(rehearsal, package)
            faults = f"{first.__name__}, {second.__name__}"
            yield {"package": name, "faults": faults} | judged(result, nodes)


def judged(result: dict[str, Any], bad: list[str]) -> dict[str, Any]:
    """Return a play with the bad nodes that it has missed, and the healthy ones that it has
    named."""
    named = set(result["bad_nodes"])
    return {**result, "missed": sorted({*bad} - named), "blamed": sorted(named - {*bad})}


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table of the plays, those of a kind in one line."""
    kinds = dict.fromkeys((row["nodes"], row["package"], row["faults"]) for row in rows)
    lines = [
        "| nodes | preflight | faults | plays | passed | healthy named | bad missed | s, median "
        "(most) | connections of a node | operations of a node | MB of a node | event, kB |",
        "|---" * 12 + "|",
    ]
    for kind in kinds:
        group = [row for row in rows if (row["nodes"], row["package"], row["faults"]) == kind]
        seconds = [row["seconds"] for row in group]
        usual = {
            key: median(row[key] for row in group)
            for key in ("connections", "operations", "bytes", "bytes_of_event")
        }
        cells = [*kind, len(group), sum(row["ok"] for row in group)]
        cells += [sum(len(row[key]) for row in group) for key in ("blamed", "missed")]
        cells += [f"{median(seconds):.0f} ({max(seconds):.0f})"]
        cells += [f"{usual['connections']:.0f}", f"{usual['operations']:.0f}"]
        cells += [f"{usual['bytes'] / 1e6:.1f}", f"{usual['bytes_of_event'] / 1e3:.1f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Play on clusters of each size, append each play to a file, and print a table at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--plays", type=int, default=10, help="on healthy nodes")
    parser.add_argument("--pairs", type=int, default=len(PAIRS), help="of bad nodes")
    parser.add_argument("--reference", type=Path, help="another checkout, to compare")
    parser.add_argument("--output", type=Path, help="a file of JSON lines to append to")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows = []
    with rehearse.wide_limits():
        for size in options.nodes:
            with rehearse.rig(size) as (cluster, python):
                for row in plays(cluster, python, options):
                    rows.append(row)
                    print(json.dumps({**row, "summary": None}), flush=True)
                    if options.output:
                        with options.output.open("a") as file:
                            file.write(json.dumps(row) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
