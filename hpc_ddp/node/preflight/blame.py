"""Finds the unfit nodes, and the reasons, by the reports of all nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from hpc_ddp.core.console.units import speed
from hpc_ddp.node.preflight.links import LINK_S

SLOW_FACTOR = 5  # times slower than usual is a fault, while processors are free
AGREEING_PARTNERS = 2  # that must be late with a node: one may be late itself, or by chance
MOST_SHOWN = 32  # nodes and findings in the event, whatever the number of nodes

# Sets of checks, by what their faults mean.
UNCLEAR = {"silent", "step", "exchange"}  # Slurm's controller or another node may be the cause
OF_ANY_NODE = {"torch", "ended", "scratch", "step"}  # any other node would have them as well
DOUBTFUL = {"link", "scratch", "bandwidth", "exchange"}  # a second test, by other partners, follows


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
        """Add one message of the node (see `messages`) to the report. Raise KeyError for a message
        that lacks a field, once the fields above it in this function are added."""
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


def find_culprits(pairs: Iterable[tuple[str, str]]) -> set[str]:
    """Return a few nodes that explain all failed checks, given as pairs of observer and partner: at
    least one end of each pair is among them. The set is empty without pairs.

    Nodes with the most failed checks are chosen first, then those with the most of the checks that
    are still unexplained. Where several nodes have equally many, all of these that have observed a
    failure are chosen, since nothing tells them apart; if none of these has, all are chosen.
    """
    unexplained, culprits = set(pairs), set[str]()
    while unexplained:
        # Two nodes that accuse each other count as one failed check.
        counts = Counter(node for pair in set(map(frozenset, unexplained)) for node in pair)
        most = max(counts.values())
        candidates = {node for node, count in counts.items() if count == most}
        culprits |= candidates & {observer for observer, _ in unexplained} or candidates
        unexplained = {pair for pair in unexplained if not culprits & set(pair)}
    return culprits


def blame_pairs(reports: Reports, check: str, more: Iterable[tuple[str, str]] = ()) -> None:
    """Add a fault to the nodes that explain the failed checks of one kind (see `find_culprits`):
    `check` is link, scratch or bandwidth. Checks with a node that has a fault already do not count,
    nor do those that `_failed_checks` leaves out. `more` are further pairs of observer and node,
    where the observer is no node.

    Where all failed checks of a node were late, and there are more than two nodes, the node gets
    the fault only if `AGREEING_PARTNERS` of its partners that get no fault are in these checks;
    else a note.
    """
    unfit = {node for node, report in reports.items() if report.faults}
    rows = _failed_checks(reports, check, unfit)
    pairs = [(node, trouble.peer) for node, trouble in rows]
    pairs += [pair for pair in more if not unfit & set(pair)]
    culprits = find_culprits(pairs)
    for node in culprits & set(reports):
        reasons = [trouble.why for observer, trouble in rows if observer == node]
        reasons += [
            f"{observer}: {trouble.why}" for observer, trouble in rows if trouble.peer == node
        ]
        reasons.append("the files that it writes do not appear on the first node")  # of `more`
        partners = {end for pair in pairs if node in pair for end in pair} - culprits
        is_late = all(trouble.late for end, trouble in rows if node in (end, trouble.peer))
        if is_late and len(partners) < AGREEING_PARTNERS < len(reports):
            reports[node].notes.append(f"not confirmed: {reasons[0]}")
        else:
            reports[node].faults.append((check, reasons[0]))


def _failed_checks(reports: Reports, check: str, unfit: set[str]) -> list[tuple[str, Trouble]]:
    """Return the failed checks of the kind `check`, each as the node that reports it and its
    trouble; without those of a node in `unfit`, without late links of which one end is slow to
    reach itself, and without those after the first turn with a failure, from which they follow."""
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
    first_turn = min((trouble.turn for _, trouble in rows), default=0)
    return [(node, trouble) for node, trouble in rows if trouble.turn == first_turn]


def blame_fabric(reports: Reports) -> None:
    """Add a fault to each node whose interconnect is not the most frequent one, also to a node that
    has none while others have one. Nodes that have not reported on the interconnect get no fault;
    nor does any node where no node has an interconnect."""
    names = [report.values["fabric"] for report in reports.values() if "fabric" in report.values]
    most = Counter(filter(None, names)).most_common(1)
    usual = most[0][0] if most else None
    for report in reports.values():
        name = report.values.get("fabric", usual)
        if usual and name != usual:
            why = f"{name or 'no fast network that we know'} here, while others have {usual}"
            report.faults.append(("fabric", why))


def blame_torch(reports: Reports) -> None:
    """Add a fault to each node whose version of torch is not the most frequent one, and a fault to
    each node where torch does not see the GPUs; a node may get both. Nodes that have not reported
    on torch get none."""
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
    """Add a fault to the nodes that explain failed exchanges (`blame_pairs`). If no node has a
    fault of any kind after that, add a fault to each node that has reported an
    ``exchange_error``."""
    blame_pairs(reports, "bandwidth")
    if not any(report.faults for report in reports.values()):
        for report in reports.values():
            if "exchange_error" in report.values:
                report.faults.append(("exchange", report.values["exchange_error"]))


def blame_slow(reports: Reports) -> None:
    """Add a fault to each node whose best speed is lower than the median of all nodes, divided by
    `SLOW_FACTOR` and by `strain`. Nodes without a measured speed get none, and don't count."""
    slack = SLOW_FACTOR * strain(reports)
    best_speeds = {
        node: report.values["exchange_mb_s"]
        for node, report in reports.items()
        if "exchange_mb_s" in report.values
    }
    usual = median(best_speeds.values()) if best_speeds else 0.0
    for node, best in best_speeds.items():
        if best < usual / slack:
            why = f"{speed(best)} at best with others, while others come to {speed(usual)}"
            reports[node].faults.append(("bandwidth", why))


def strain(reports: Reports) -> float:
    """Return the factor by which a healthy node may be slower since processors are busy: the
    highest load per processor of all nodes, but at least 1 and at most `SLOW_FACTOR`."""
    loads = [float(report.values.get("load", 0.0)) for report in reports.values()]
    return min(float(SLOW_FACTOR), max([1.0, *loads]))


def drop_unconfirmed(first: Reports, second: Reports) -> None:
    """Remove from the reports of the `second` test the faults of `DOUBTFUL` checks that the same
    node has not failed in the `first` test, too. Add a note to the second report about each
    doubtful check that the node has failed in one of both tests alone."""
    for node, report in second.items():
        old_faults, new_faults = dict(first[node].faults), dict(report.faults)
        chances = DOUBTFUL & (old_faults.keys() ^ new_faults.keys())  # ^: in one of both
        report.faults = [fault for fault in report.faults if fault[0] not in chances]
        reasons = old_faults | new_faults
        report.notes += [f"not confirmed: {reasons[check]}" for check in sorted(chances)]


def outcome(reports: Reports) -> dict[str, Any]:
    """Return the fields of the event ``preflight`` that follow from the reports: ok, bad_nodes,
    hopeless, why, report, summary. ``seconds`` is left to the caller.

    ``bad_nodes`` are the nodes with faults, but none where all nodes have failed the same check (by
    `_shared_checks`): no node is to blame for that. ``hopeless`` is True where other nodes would
    fail this check as well. ``why`` is the reason of this check, or else the first fault of three
    nodes at most, with the number of further nodes; '' without faults. ``report`` has `MOST_SHOWN`
    nodes at most, chosen first those with faults, then those with notes. ``summary`` is that of
    `_summarize`.
    """
    unfit = [node for node, report in reports.items() if report.faults]
    shared = _shared_checks(reports)
    reasons = [f"{node}: {reports[node].faults[0][1]}" for node in unfit]
    if shared:
        faults = (fault for node in unfit for fault in reports[node].faults)
        reason = next(why for check, why in faults if check in shared)  # a silent node lacks it
        reasons = [f"{reason} (the same on all nodes)" if len(reports) > 1 else reason]
    more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    odd_first = sorted(reports, key=lambda node: _oddness(reports[node]))
    selection = set(odd_first[:MOST_SHOWN])
    return {
        "ok": not unfit,
        "bad_nodes": [] if shared else unfit,
        "hopeless": bool(shared - UNCLEAR),
        "why": "; ".join(reasons[:3]) + more,
        "report": {node: _journaled(reports[node]) for node in reports if node in selection},
        "summary": _summarize(reports),
    }


def _oddness(report: NodeReport) -> int:
    """Return 0 for a report with faults, 1 for one with notes alone, 2 for any other."""
    return 0 if report.faults else 1 if report.notes else 2


def _summarize(reports: Reports) -> dict[str, Any]:
    """Return the number of nodes; the `MOST_SHOWN` most frequent texts of faults and notes, each
    with the number of its nodes and the first of them; and the `_quantiles` of all values."""
    texts = {
        node: [why for _, why in report.faults] + [f"note: {note}" for note in report.notes]
        for node, report in reports.items()
    }
    counts = Counter(text for row in texts.values() for text in dict.fromkeys(row))
    first_nodes = {text: node for node in reversed(texts) for text in texts[node]}
    return {
        "nodes": len(reports),
        "texts": {text: [n, first_nodes[text]] for text, n in counts.most_common(MOST_SHOWN)},
        "quantiles": _quantiles(report.values for report in reports.values()),
    }


def _quantiles(rows: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    """Return by key the lowest, the median and the highest of the numbers that `rows` have under
    the key; values that are no numbers are left out."""
    numbers: dict[str, list[float]] = {}
    for key, number in (pair for row in rows for pair in row.items()):
        if isinstance(number, int | float):
            numbers.setdefault(key, []).append(number)
    return {key: [min(row), round(median(row), 3), max(row)] for key, row in numbers.items()}


def _shared_checks(reports: Reports) -> set[str]:
    """Return the checks that all nodes have failed; nodes with only `UNCLEAR` faults do not count
    where at least two other nodes are left. Left out are checks that a single node, or the link
    between two nodes, may have failed by its own fault."""
    checks = [{check for check, _ in report.faults} for report in reports.values()]
    # A silent node may have the same fault as the others; but one node alone is no majority.
    clear_checks = [failed for failed in checks if not failed or failed - UNCLEAR]
    is_alone = len(clear_checks) < 2 <= len(reports)
    shared = set.intersection(*(checks if is_alone or not clear_checks else clear_checks))
    if len(reports) == 1:  # there is no other node to compare it with
        return shared & OF_ANY_NODE
    if len(reports) == 2:  # both fail a check of the one link between them
        return shared - {"link", "bandwidth"}
    return shared


def _journaled(report: NodeReport) -> dict[str, Any]:
    """Return a node's part of the event: its values, its faults as ``bad``, and its ``notes``."""
    bad = [{"check": check, "why": why} for check, why in report.faults]
    return {**report.values, "bad": bad, "notes": report.notes}
