"""Unfit nodes are blamed by the reports of all."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_ddp.node.preflight.blame import (
    NodeReport,
    Reports,
    blame_exchange,
    blame_fabric,
    blame_pairs,
    blame_slow,
    blame_torch,
    find_culprits,
    outcome,
)
from hpc_ddp.node.preflight.links import partners
from unit.node.preflight.fakes import NODES, reports_of


def _faults(reports: Reports) -> dict[str, list[str]]:
    return {
        node: [check for check, _ in report.faults]
        for node, report in reports.items()
        if report.faults
    }


def _trouble(reports: Reports, pairs: str, check: str, **more: Any) -> None:
    for pair in pairs.split():
        reports[pair[0]].add({"trouble": pair[1], "check": check, "why": pair, **more})


def test_messages_of_a_node_add_up() -> None:
    report = NodeReport()
    report.add({"stage": "local", "contact": {"port": 5}})
    report.add({"stage": "partners", "values": {"a": 1}})
    report.add({"values": {"b": 2}})
    report.add({"fault": "gpus", "why": "none"})
    report.add({"trouble": "n2", "check": "link", "why": "no connection", "turn": 2})
    for note in ("odd", "again"):
        report.add({"note": note})
    assert (report.contact, report.stages) == ({"port": 5}, {"local", "partners"})
    assert report.values == {"a": 1, "b": 2}
    assert (report.faults, report.notes) == ([("gpus", "none")], ["odd", "again"])
    (trouble,) = report.troubles
    assert (trouble.peer, trouble.check, trouble.why) == ("n2", "link", "no connection")
    assert trouble.turn == 2


@pytest.mark.parametrize(
    ("pairs", "covering"),
    [
        ("", ""),
        ("ab ba", "ab"),  # two nodes: it may be either
        ("ab", "a"),  # of two that it may be, the one that observed it
        ("ab cb", "b"),
        ("ab ac ad", "a"),
        ("ab ac ad db cb", "ab"),
    ],
)
def test_the_fewest_nodes_are_blamed(pairs: str, covering: str) -> None:
    assert find_culprits([(pair[0], pair[1]) for pair in pairs.split()]) == set(covering)


@pytest.mark.parametrize("count", [12, 32, 1024])
def test_bad_nodes_among_many_are_blamed_and_no_others(count: int) -> None:
    """They and their partners do not reach each other; each node has eight partners."""
    nodes = [f"n{index}" for index in range(count)]
    bad = {nodes[1], nodes[2], nodes[count // 2]}
    pairs = [(node, peer) for node in nodes for peer in partners(nodes, node)]
    assert find_culprits([pair for pair in pairs if bad & set(pair)]) == bad


def test_a_link_that_is_cut_names_its_node() -> None:
    reports = reports_of()
    _trouble(reports, "ab cb ba bc", "link")
    blame_pairs(reports, "scratch")
    assert not _faults(reports)
    blame_pairs(reports, "link")
    assert reports["b"].faults == [("link", "ba")]
    assert _faults(reports) == {"b": ["link"]}


def test_a_name_that_one_node_resolves_wrongly_is_that_nodes_fault() -> None:
    one = reports_of()
    _trouble(one, "ba", "link")  # b takes a for another host
    blame_pairs(one, "link")
    assert one["b"].faults == [("link", "ba")]
    assert _faults(one) == {"b": ["link"]}
    all_others = reports_of()
    _trouble(all_others, "ab cb", "link")  # b has no name
    blame_pairs(all_others, "link")
    assert all_others["b"].faults == [("link", "a: ab")]


def test_a_node_with_a_fault_explains_its_troubles() -> None:
    reports = reports_of()
    reports["b"].faults.append(("gpus", "none"))
    _trouble(reports, "ab cb ac", "link")
    blame_pairs(reports, "link", [("the batch shell", "b")])
    assert _faults(reports) == {"a": ["link"], "b": ["gpus"]}


def test_the_batch_shell_shows_which_of_two_nodes_has_another_disk() -> None:
    reports = reports_of(2)
    _trouble(reports, "ab ba", "scratch")
    blame_pairs(reports, "scratch", [("the batch shell", "b")])
    assert _faults(reports) == {"b": ["scratch"]}
    alone = reports_of(4)
    blame_pairs(alone, "scratch", [("the batch shell", node) for node in "abc"])
    assert not _faults(alone)  # the shell's own view is late
    _trouble(alone, "ad bd", "scratch")
    blame_pairs(alone, "scratch", [("the batch shell", "d")])
    assert alone["d"].faults == [("scratch", "a: ad")]


def test_the_first_exchange_that_broke_explains_the_later_ones() -> None:
    reports = reports_of(4)
    _trouble(reports, "ab db cb", "bandwidth", turn=1)
    _trouble(reports, "ca dc", "bandwidth", turn=2)
    blame_pairs(reports, "bandwidth")
    assert _faults(reports) == {"b": ["bandwidth"]}


def test_a_group_that_broke_is_explained_by_pairs_or_is_no_nodes_fault() -> None:
    reports = reports_of()
    for report in reports.values():
        report.values["exchange_error"] = "Connection reset"
    _trouble(reports, "ab cb", "bandwidth", turn=1)
    blame_exchange(reports)
    assert _faults(reports) == {"b": ["bandwidth"]}
    for report in reports.values():
        report.faults.clear()
        report.troubles.clear()
    blame_exchange(reports)
    assert reports["c"].faults == [("exchange", "Connection reset")]
    fields = outcome(reports)
    assert (fields["bad_nodes"], fields["hopeless"]) == ([], False)


@pytest.mark.parametrize(
    ("speeds", "slow"),
    [
        ({}, ""),
        ({"a": 400.0, "b": 300.0}, ""),
        ({"b": 2.5}, "b"),
        ({"a": 2.5, "b": 2.5, "c": 2.5}, ""),  # nothing to compare with
    ],
)
def test_a_slow_node_is_blamed(speeds: dict[str, float], slow: str) -> None:
    reports = reports_of(3, **speeds)
    reports["d"] = NodeReport()  # without an answer
    blame_slow(reports)
    assert set(_faults(reports)) == set(slow)
    for node in slow:
        why = "2.5 MB/s at best with others, while others come to 1.0 GB/s"
        assert reports[node].faults == [("bandwidth", why)]


@pytest.mark.parametrize(
    ("speed", "load", "slow"),
    [(200.0, 0.0, ""), (199.0, 0.5, "b"), (199.0, 1.5, ""), (41.0, 43.0, ""), (39.0, 43.0, "b")],
)
def test_five_times_slower_is_slow_unless_processors_are_busy(
    speed: float, load: float, slow: str
) -> None:
    reports = reports_of(3, b=speed)
    reports["a"].values["load"] = load
    blame_slow(reports)
    assert set(_faults(reports)) == set(slow)


def test_no_speeds_are_no_fault() -> None:
    reports = {node: NodeReport() for node in NODES}
    blame_slow(reports)
    assert not _faults(reports)


def test_another_torch_and_no_gpu_are_faults() -> None:
    reports = reports_of()
    for report, version in zip(reports.values(), ("2.5", "2.6", "2.6"), strict=True):
        report.values |= {"torch": version, "devices": 0}
    reports["c"].values["gpus_there"] = 4
    blame_torch(reports)
    assert _faults(reports) == {"a": ["torch"], "c": ["torch"]}
    assert reports["a"].faults[0][1] == "torch 2.5, while others have 2.6"


def test_a_node_without_the_interconnect_of_the_others_is_unfit() -> None:
    names: list[str | None] = [None, "infiniband", None]  # also where most have none
    reports = {
        node: NodeReport(values={"fabric": name}) for node, name in zip("abc", names, strict=True)
    }
    reports["d"] = NodeReport()  # without an answer
    blame_fabric(reports)
    why = "no fast network that we know here, while others have infiniband"
    assert reports["a"].faults == [("fabric", why)]
    assert set(_faults(reports)) == {"a", "c"}
    none = {node: NodeReport(values={"fabric": None}) for node in "ab"}
    blame_fabric(none)
    assert not _faults(none)


def test_a_fault_of_all_nodes_is_no_nodes_fault() -> None:
    reports = reports_of()
    for report in reports.values():
        report.faults.append(("torch", "No module named 'torch'"))
    fields = outcome(reports)
    assert (fields["ok"], fields["bad_nodes"], fields["hopeless"]) == (False, [], True)
    assert fields["why"] == "No module named 'torch' (the same on all nodes)"
    reports["c"].faults[:] = [("silent", "no word within 40 s")]
    assert outcome(reports)["hopeless"]
    for node, faults in (("a", [("silent", "no word")]), ("c", reports["b"].faults)):
        reports[node].faults[:] = faults
    assert outcome(reports)["why"] == "No module named 'torch' (the same on all nodes)"
    for node, faults in (("a", reports["b"].faults), ("c", [])):
        reports[node].faults[:] = faults
    fields = outcome(reports)
    assert (fields["bad_nodes"], fields["hopeless"]) == (["a", "b"], False)
    silent = reports_of()
    for report in silent.values():
        report.faults.append(("silent", "no word"))  # because of Slurm's controller, perhaps
    fields = outcome(silent)
    assert (fields["bad_nodes"], fields["hopeless"]) == ([], False)


def test_one_bad_node_and_a_silent_one_have_nothing_in_common() -> None:
    reports = reports_of(2)
    reports["a"].faults.append(("gpus", "nvidia-smi: broken"))
    reports["b"].faults.append(("silent", "no word"))
    fields = outcome(reports)
    assert (fields["bad_nodes"], fields["hopeless"]) == (["a", "b"], False)


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_that_does_not_start_is_no_nodes_fault(count: int) -> None:
    reports = reports_of(count)
    for report in reports.values():
        report.faults.append(("step", "srun has ended without it: Socket timed out"))
    fields = outcome(reports)
    assert (fields["bad_nodes"], fields["hopeless"]) == ([], False)


def test_one_node_alone_is_bad_where_another_may_be_better() -> None:
    reports = reports_of(1)
    reports["a"].faults.append(("tmpdir", "full"))
    assert outcome(reports)["bad_nodes"] == ["a"]
    reports["a"].faults[:] = [("torch", "No module named 'torch'")]
    fields = outcome(reports)
    assert (fields["hopeless"], fields["why"]) == (True, "No module named 'torch'")
    two = reports_of(2)
    for report in two.values():
        report.faults.append(("link", "no connection"))
    assert outcome(two)["bad_nodes"] == ["a", "b"]


def test_the_outcome_names_few_of_many() -> None:
    reports = {f"n{number}": NodeReport(faults=[("gpus", f"why {number}")]) for number in range(5)}
    reports["n9"] = NodeReport(values={"a": 1}, notes=["odd"])
    event = outcome(reports)
    assert event["why"] == "n0: why 0; n1: why 1; n2: why 2; and 2 more"
    assert event["report"]["n9"] == {"a": 1, "bad": [], "notes": ["odd"]}
    assert event["report"]["n0"]["bad"] == [{"check": "gpus", "why": "why 0"}]
