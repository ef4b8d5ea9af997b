"""Which nodes are unfit, and why, by the reports of all nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from hpc_ddp.core.console.units import speed
from hpc_ddp.node.preflight.links import LINK_S

SLOW_FACTOR = 5  # times slower than usual is a fault, while processors are free
AGREEING_PARTNERS = 2  # have to be late with a node, lest chance or one of them is the reason
MOST_SHOWN = 32  # nodes and findings in the event, whatever the number of nodes

# Sets of checks: their faults may be caused by Slurm's controller or another node; any other node
# would have them as well; they need a second opinion, by other partners.
UNCLEAR = {"silent", "step", "exchange"}
OF_ANY_NODE = {"torch", "ended", "scratch", "step"}
DOUBTFUL = {"link", "scratch", "bandwidth", "exchange"}


@dataclass(frozen=True)
class Trouble:
    """A failed check between a node, which reports it, and its partner `peer`. `turn` is the number
    of the exchange, `late` whether the check may have failed for want of time."""

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
        how other nodes reach this one: ``host``, ``port``, ``store_port``
    stages
        the stages that the node has completed
    values, notes
        findings by name, and remarks, for the journal
    faults
        pairs of check and reason
    troubles
        checks between this node and a partner that failed; either may be at fault
    last_line
        the last line of the node's task that was no message
    has_ended
        whether the node's task has ended
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
        """Add one message of the node to the report. Raises KeyError for a message that lacks a
        field; the fields that this handles before are added then."""
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
    """Return a few nodes that explain all failed checks, given as pairs of observer and partner:
    one end of each pair at least is among them. Empty without pairs.

    Nodes with the most failed checks are chosen first, then those with the most of the checks that
    are still unexplained. Where several have equally many, all of them that have observed a failure
    are chosen, since nothing tells them apart; or all of them, where none has.
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
    """Add a fault to the nodes that explain the failed checks of one kind (see `cover`): link,
    scratch or bandwidth.

    `more` are further pairs of observer and node, where the observer is no node. Three kinds of
    pairs do not count: those with a node that has a fault already; those of later turns than the
    first turn with a failure, from which they follow; and late links of which one end is slow to
    reach itself.

    Where all failed checks of a node were late, and there are more than two nodes, the node gets
    the fault only if `AGREEING_PARTNERS` of its partners that get no fault are in these checks;
    else a note.
    """
    unfit = {node for node, report in reports.items() if report.faults}
    busy = {
        node for node, r in reports.items() if r.values.get("delay_s", 0.0) > LINK_S / SLOW_FACTOR
    }
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
        if is_late and len(partners) < AGREEING_PARTNERS < len(reports):
            reports[node].notes.append(f"not confirmed: {reasons[0]}")
        else:
            reports[node].faults.append((check, reasons[0]))


def blame_fabric(reports: Reports) -> None:
    """Add a fault to each node whose interconnect is not the most frequent one, or that has none
    while others have one. Nodes that have not reported on the interconnect are left out."""
    names = [report.values["fabric"] for report in reports.values() if "fabric" in report.values]
    most = Counter(name for name in names if name).most_common(1)
    for report in reports.values():
        name = report.values.get("fabric", "")
        if most and "fabric" in report.values and name != most[0][0]:
            why = f"{name or 'no fast network that we know'} here, while others have {most[0][0]}"
            report.faults.append(("fabric", why))


def blame_torch(reports: Reports) -> None:
    """Add a fault to nodes whose version of torch is not the most frequent one, and to nodes where
    torch does not see the GPUs; a node may get both. Nodes that have not reported on torch get no
    fault."""
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
    """Add a fault to the nodes that explain failed exchanges. If no node has a fault of any kind
    after that, add one to each node that has reported an ``exchange_error``."""
    blame_pairs(reports, "bandwidth")
    if not any(report.faults for report in reports.values()):
        for report in reports.values():
            if "exchange_error" in report.values:
                report.faults.append(("exchange", report.values["exchange_error"]))


def blame_slow(reports: Reports) -> None:
    """Add a fault to nodes whose best speed is lower than the median of all nodes, divided by
    `SLOW_FACTOR` and by `strain`. Nodes without a measured speed are left out."""
    slack = SLOW_FACTOR * strain(reports)
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
    """Return the highest load per processor of all nodes, but 1 at least and `SLOW_FACTOR` at most:
    by this factor a healthy node may be slower."""
    loads = [float(report.values.get("load", 0.0)) for report in reports.values()]
    return min(float(SLOW_FACTOR), max([1.0, *loads]))


def confirm(first: Reports, second: Reports) -> None:
    """Remove from the second reports the `DOUBTFUL` faults of checks that the same node has not
    failed in the first ones. Add a note to the second report about each doubtful check that the
    node has failed only once."""
    for node, report in second.items():
        before, after = dict(first[node].faults), dict(report.faults)
        chance = DOUBTFUL & (before.keys() ^ after.keys())
        report.faults = [fault for fault in report.faults if fault[0] not in chance]
        report.notes += [f"not confirmed: {(before | after)[check]}" for check in sorted(chance)]


def outcome(reports: Reports) -> dict[str, Any]:
    """Return the fields of the event ``preflight`` that follow from the reports: ok, bad_nodes,
    hopeless, why, report, summary.

    ``bad_nodes`` are the nodes with faults, but none where all nodes have one fault in common: no
    node is to blame for that. ``hopeless`` is True where other nodes would have this fault as well.
    ``why`` is this fault, or else the first fault of three nodes at most, with the number of
    further ones. ``report`` has `MOST_SHOWN` nodes at most, those with faults or notes first.
    ``summary`` has the number of nodes; the `MOST_SHOWN` most frequent texts of faults and notes,
    each with the number of its nodes and the first of them; and the `_quantiles` of all values.
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
    selection = set(odd_first[:MOST_SHOWN])
    return {
        "ok": not unfit,
        "bad_nodes": [] if shared else unfit,
        "hopeless": bool(shared - UNCLEAR),
        "why": "; ".join(reasons[:3]) + more,
        "report": {node: _journaled(reports[node]) for node in reports if node in selection},
        "summary": {
            "nodes": len(reports),
            "texts": {text: [n, first[text]] for text, n in counts.most_common(MOST_SHOWN)},
            "quantiles": _quantiles(report.values for report in reports.values()),
        },
    }


def _quantiles(rows: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    """Return by key the lowest, the median and the highest of the numbers that `rows` have under
    the key; other values are left out."""
    numbers: dict[str, list[float]] = {}
    for key, number in (pair for row in rows for pair in row.items()):
        if isinstance(number, int | float):
            numbers.setdefault(key, []).append(number)
    return {key: [min(row), round(median(row), 3), max(row)] for key, row in numbers.items()}


def _shared_checks(reports: Reports) -> set[str]:
    """Return the checks that all nodes have failed; nodes with only `UNCLEAR` faults do not count
    where two others are left. Left out are checks that a single node, or the link between two
    nodes, may have failed by its own fault."""
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
