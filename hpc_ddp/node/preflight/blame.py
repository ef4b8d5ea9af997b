"""Which nodes are unfit, and why, by the reports of all nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from hpc_ddp.core.console.units import speed
from hpc_ddp.node.preflight.links import LINK_S

SLOW = 5  # times slower than usual is a fault, while processors are free
AGREE = 2  # partners that have to be late with a node, lest chance or one of them is the reason
SHOWN = 32  # nodes and findings in the event, whatever the number of nodes

# Checks: whose faults Slurm's controller or another node may cause; whose faults any node would
# have; whose faults need a second opinion, by other partners.
UNCLEAR = {"silent", "step", "exchange"}
OF_ANY_NODE = {"torch", "ended", "scratch", "step"}
DOUBTFUL = {"link", "scratch", "bandwidth", "exchange"}


@dataclass(frozen=True)
class Trouble:
    """A failed check between a node, which reports it, and its partner `peer`; `turn` counts the
    exchanges, and `late` says that it may have failed for want of time."""

    peer: str
    check: str
    why: str
    turn: int = 0
    late: bool = False


@dataclass
class NodeReport:
    """The report of one node.

    Attributes
    ----------
    contact
        how the others reach it: ``host``, ``port``, ``store_port``
    stages
        those that it has completed
    values, notes
        for the journal
    faults
        pairs of check and reason
    troubles
        failed checks of its partners, which may be either node's fault
    last_line
        the last line of its task that was no message
    has_ended
        its task has
    """

    contact: dict[str, Any] = field(default_factory=dict)
    stages: set[str] = field(default_factory=set)
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    last_line: str = ""
    has_ended: bool = False

    def add(self, message: dict[str, Any]) -> None:
        """Add one message of the node. Raise KeyError for one that lacks a field; what comes before
        that in the order below is added."""
        if "stage" in message:
            self.stages.add(message["stage"])
        self.contact |= message.get("contact", {})
        self.values |= message.get("values", {})
        if "note" in message:
            self.notes.append(message["note"])
        if "fault" in message:
            self.faults.append((message["fault"], message["why"]))
        if "trouble" in message:
            more = message.get("turn", 0), message.get("late", False)
            trouble = Trouble(message["trouble"], message["check"], message["why"], *more)
            self.troubles.append(trouble)


Reports = dict[str, NodeReport]


def cover(pairs: Iterable[tuple[str, str]]) -> set[str]:
    """Return a few nodes that explain failed checks, given as pairs of observer and partner; empty
    without any.

    The node with the most failed checks comes first. Where several have equally many, all those
    that observed a failure are taken, since nothing tells them apart; or all, where none did.
    """
    open_pairs, covering = set(pairs), set[str]()
    while open_pairs:
        counts = Counter(node for pair in {frozenset(pair) for pair in open_pairs} for node in pair)
        most = max(counts.values())
        candidates = {node for node, count in counts.items() if count == most}
        covering |= candidates & {observer for observer, _ in open_pairs} or candidates
        open_pairs = {pair for pair in open_pairs if not covering & set(pair)}
    return covering


def blame_pairs(reports: Reports, check: str, more: Iterable[tuple[str, str]] = ()) -> None:
    """Add a fault to the nodes that explain the failed checks of one kind: link, scratch or
    bandwidth.

    `more` are further pairs of observer and node, where the observer is no node. Pairs with a node
    that has a fault already do not count; nor do failures of later turns than the first that has
    some, since they follow from it, nor late links to or from a node that is slow to reach itself.

    Where all failed checks of a node were late, and there are more than two nodes, it gets the
    fault only if `AGREE` partners that get none say so, else a note.
    """
    unfit = {node for node, report in reports.items() if report.faults}
    busy = {node for node, r in reports.items() if r.values.get("delay_s", 0.0) > LINK_S / SLOW}
    rows = [
        (node, trouble)
        for node, report in reports.items()
        for trouble in report.troubles
        if trouble.check == check
        and not unfit & {node, trouble.peer}
        and not (check == "link" and trouble.late and busy & {node, trouble.peer})
    ]
    first = min((trouble.turn for _, trouble in rows), default=0)
    rows = [(node, trouble) for node, trouble in rows if trouble.turn == first]
    pairs = [(node, trouble.peer) for node, trouble in rows]
    pairs += [pair for pair in more if not unfit & set(pair)]
    covering = cover(pairs)
    for node in covering & set(reports):
        reasons = [trouble.why for observer, trouble in rows if observer == node]
        reasons += [
            f"{observer}: {trouble.why}" for observer, trouble in rows if trouble.peer == node
        ]
        reasons.append("the files that it writes do not appear on the first node")
        partners = {end for pair in pairs if node in pair for end in pair} - covering
        is_late = all(trouble.late for end, trouble in rows if node in (end, trouble.peer))
        if is_late and len(partners) < AGREE < len(reports):
            reports[node].notes.append(f"not confirmed: {reasons[0]}")
        else:
            reports[node].faults.append((check, reasons[0]))


def blame_fabric(reports: Reports) -> None:
    """Add a fault to nodes with another interconnect than most of those that have one, or without
    one; nodes without a report of it count for nothing."""
    names = [report.values["fabric"] for report in reports.values() if "fabric" in report.values]
    most = Counter(name for name in names if name).most_common(1)
    for report in reports.values():
        name = report.values.get("fabric", "")
        if most and "fabric" in report.values and name != most[0][0]:
            why = f"{name or 'no fast network that we know'} here, while others have {most[0][0]}"
            report.faults.append(("fabric", why))


def blame_torch(reports: Reports) -> None:
    """Add a fault to nodes with another torch than most, and to those where it does not see the
    GPUs; a node may get both. Nodes without a report of torch get none."""
    versions = [report.values["torch"] for report in reports.values() if "torch" in report.values]
    usual = Counter(versions).most_common(1)[0][0] if versions else None  # ties: the first
    for report in reports.values():
        version = report.values.get("torch", usual)
        if version != usual:
            report.faults.append(("torch", f"torch {version}, while others have {usual}"))
        if report.values.get("devices") == 0 and report.values.get("gpus_there"):
            why = "torch sees no GPU here, or is built without their backend, as NCCL"
            report.faults.append(("torch", why))


def blame_exchange(reports: Reports) -> None:
    """Add a fault to the nodes that explain failed exchanges; if then no node has a fault of any
    kind, to all whose exchange broke."""
    blame_pairs(reports, "bandwidth")
    if not any(report.faults for report in reports.values()):
        for report in reports.values():
            if "exchange_error" in report.values:
                report.faults.append(("exchange", report.values["exchange_error"]))


def blame_slow(reports: Reports) -> None:
    """Add a fault to nodes whose best speed is below the median, divided by `SLOW` and by `strain`.
    Nodes without a measured speed count for nothing."""
    slack = SLOW * strain(reports)
    best = {
        node: report.values["exchange_mb_s"]
        for node, report in reports.items()
        if "exchange_mb_s" in report.values
    }
    usual = median(best.values()) if best else 0.0
    for node in best:
        if best[node] < usual / slack:
            why = f"{speed(best[node])} at best with others, while others come to {speed(usual)}"
            reports[node].faults.append(("bandwidth", why))


def strain(reports: Reports) -> float:
    """Return the highest load per processor of all nodes, but 1 at least and `SLOW` at most: by
    this factor a healthy node may be slower."""
    loads = [float(report.values.get("load", 0.0)) for report in reports.values()]
    return min(float(SLOW), max([1.0, *loads]))


def confirm(first: Reports, second: Reports) -> None:
    """Drop the `DOUBTFUL` faults of the second reports that the first ones do not have, and add
    notes to the second ones about each doubtful fault that only one of both has."""
    for node, report in second.items():
        before, after = dict(first[node].faults), dict(report.faults)
        chance = DOUBTFUL & (before.keys() ^ after.keys())
        report.faults = [fault for fault in report.faults if fault[0] not in chance]
        report.notes += [f"not confirmed: {(before | after)[check]}" for check in sorted(chance)]


def outcome(reports: Reports) -> dict[str, Any]:
    """Return the fields of the event ``preflight`` that follow from the reports: ok, bad_nodes,
    hopeless, why, report, summary.

    A fault that all nodes have is no node's: then ``bad_nodes`` is empty. ``hopeless``: other nodes
    would have it as well. ``why`` has that of all nodes, or the first one of three at most, and the
    number of further nodes. ``report`` has `SHOWN` nodes at most, those with faults or notes before
    others. ``summary`` has the number of nodes; the `SHOWN` most frequent faults and notes, each
    with the number of its nodes and one of them; and lowest, median and highest of the numbers.
    """
    unfit = [node for node, report in reports.items() if report.faults]
    shared = _shared_checks(reports)
    reasons = [f"{node}: {reports[node].faults[0][1]}" for node in unfit]
    if shared:
        reason = next(why for check, why in reports[unfit[0]].faults if check in shared)
        reasons = [f"{reason} (the same on all nodes)" if len(reports) > 1 else reason]
    more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    texts = {
        node: [why for _, why in report.faults] + [f"note: {note}" for note in report.notes]
        for node, report in reports.items()
    }
    counts = Counter(text for row in texts.values() for text in dict.fromkeys(row))
    first = {text: node for node in reversed(texts) for text in texts[node]}
    odd_first = sorted(reports, key=lambda node: (not reports[node].faults, not texts[node]))
    selection = set(odd_first[:SHOWN])
    return {
        "ok": not unfit,
        "bad_nodes": [] if shared else unfit,
        "hopeless": bool(shared - UNCLEAR),
        "why": "; ".join(reasons[:3]) + more,
        "report": {node: _journaled(reports[node]) for node in reports if node in selection},
        "summary": {
            "nodes": len(reports),
            "texts": {text: [n, first[text]] for text, n in counts.most_common(SHOWN)},
            "quantiles": _quantiles(report.values for report in reports.values()),
        },
    }


def _quantiles(rows: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the lowest, the median and the highest of the numbers of each key."""
    numbers: dict[str, list[float]] = {}
    for key, number in (pair for row in rows for pair in row.items()):
        if isinstance(number, int | float):
            numbers.setdefault(key, []).append(number)
    return {key: [min(row), round(median(row), 3), max(row)] for key, row in numbers.items()}


def _shared_checks(reports: Reports) -> set[str]:
    """Return the checks that all nodes have failed, without those that may be due to a single node
    or to the link between two; empty without any. Nodes that have `UNCLEAR` faults alone do not
    count where two others are left."""
    checks = [{check for check, _ in report.faults} for report in reports.values()]
    # A silent node may have the same fault as the others; one node alone speaks for itself.
    speaking = [faults for faults in checks if not faults or faults - UNCLEAR]
    is_alone = len(speaking) < 2 <= len(reports)
    shared = set.intersection(*(checks if is_alone or not speaking else speaking))
    if len(reports) == 1:  # it can't be compared with another one
        return shared & OF_ANY_NODE
    if len(reports) == 2:  # the link between two nodes is not in common with others
        return shared - {"link", "bandwidth"}
    return shared


def _journaled(report: NodeReport) -> dict[str, Any]:
    """Return a node's part of the event: its values, its faults as ``bad``, and its ``notes``."""
    bad = [{"check": check, "why": why} for check, why in report.faults]
    return {**report.values, "bad": bad, "notes": report.notes}
