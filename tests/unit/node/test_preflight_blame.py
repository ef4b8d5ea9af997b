"""Who is unfit, and why, from what nodes tell; and what one node finds out, for real."""

from __future__ import annotations

import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.journal.events import PreflightEnded
from hpc_ddp.node import checks
from hpc_ddp.node.bandwidth import partner, turns
from hpc_ddp.node.preflight import (
    NodeReport,
    blame,
    find_cut_off,
    find_misnamed,
    find_other_torch,
    find_slow,
    note_odd,
    outcome,
)
from hpc_ddp.report.tables import preflight_table

NODES = ("a", "b", "c", "d")


def _told(count: int = 3, **speeds: float) -> dict[str, NodeReport]:
    """Nodes in whom nothing is wrong; `speeds` are given as ab=…, all others are 1000 MB/s."""
    names = NODES[:count]
    told = {name: NodeReport() for name in names}
    for one in names:
        told[one].hello = {"addresses": [f"10.0.0.{names.index(one) + 1}"]}
        told[one].speeds = {o: speeds.get(f"{one}{o}", 1000.0) for o in names if o != one}
    return told


def _bad(told: dict[str, NodeReport]) -> dict[str, list[str]]:
    return {node: [check for check, _ in each.bad] for node, each in told.items() if each.bad}


def _trouble(told: dict[str, NodeReport], pairs: str, check: str, **more: Any) -> None:
    for pair in pairs.split():
        told[pair[0]].pairs.append({"pair": pair[1], "check": check, "why": pair, **more})


@pytest.mark.parametrize(
    ("pairs", "guilty"),
    [
        ("", ""),
        ("ab ba", "ab"),  # two nodes: it can't be told which
        ("ab cb", "b"),
        ("ab ac ad", "a"),
        ("ab ac ad db cb", "ab"),
    ],
)
def test_blame_is_on_the_fewest(pairs: str, guilty: str) -> None:
    assert blame([(pair[0], pair[1]) for pair in pairs.split()]) == set(guilty)


def test_a_link_that_is_cut_names_its_node() -> None:
    told = _told()
    _trouble(told, "ab cb ba bc", "link", address="")
    find_misnamed(told)
    find_cut_off(told, "link")
    assert _bad(told) == {"b": ["link"]}


def test_who_has_a_wrong_name_is_told_from_whose_name_is_wrong() -> None:
    one = _told()
    _trouble(one, "ba", "link", address="10.0.0.99")  # b takes a for somebody else
    find_misnamed(one)
    find_cut_off(one, "link")
    assert one["b"].bad == [("name", "ba; a itself has 10.0.0.1")]
    all_others = _told()
    _trouble(all_others, "ab cb", "name")
    find_misnamed(all_others)
    assert all_others["b"].bad == [("name", "ab")]
    two = _told(2)
    _trouble(two, "ab", "name")  # b knows its own name, a does not
    find_misnamed(two)
    assert _bad(two) == {"a": ["name"]}


def test_another_disk_is_seen_by_the_shell_too() -> None:
    told = _told(2)
    _trouble(told, "ab ba", "scratch")
    find_cut_off(told, "scratch", [(".shell", "b")])
    assert _bad(told) == {"b": ["scratch"]}


def test_the_first_exchange_that_broke_explains_the_later_ones() -> None:
    told = _told(4)
    _trouble(told, "ab db cb", "bandwidth", turn=0)
    _trouble(told, "ca dc", "bandwidth", turn=1)
    find_cut_off(told, "bandwidth")
    assert _bad(told) == {"b": ["bandwidth"]}


@pytest.mark.parametrize(
    ("speeds", "slow"),
    [
        ({}, ""),
        ({"ab": 400.0, "ca": 300.0}, ""),  # weather
        ({"ba": 2.5, "bc": 2.5}, "b"),  # sends slowly
        ({"ba": 2.5, "bc": 2.5, "ab": 2.5, "cb": 2.5}, "b"),
    ],
)
def test_a_slow_node_is_found(speeds: dict[str, float], slow: str) -> None:
    told = _told(3, **speeds)
    assert set(find_slow(told)) == set(slow)
    told["c"].values["load"] = 1000.0  # whatever is seen there may come from that
    assert not find_slow(told)


def test_of_two_nodes_the_way_between_them_is_slow() -> None:
    found = find_slow(_told(2, ba=2.5))
    assert found["a"] == "2.5 MB/s from b, while others come to 1.0 GB/s"
    assert found["b"] == "2.5 MB/s to a, while others come to 1.0 GB/s"
    assert not find_slow(_told(2, ba=2.5, ab=2.5))  # nothing to compare with
    assert (
        find_slow({**_told(2, ba=2.5), "c": NodeReport(), "d": NodeReport()}) == found
    )  # who say nothing


def test_another_torch_and_no_gpu_are_found() -> None:
    told = _told()
    for each, version in zip(told.values(), ("2.5", "2.6", "2.6"), strict=True):
        each.values |= {"torch": version, "devices": 0}
    told["c"].values["gpus_there"] = 4
    find_other_torch(told)
    assert _bad(told) == {"a": ["torch"], "c": ["torch"]}


def test_clocks_are_only_noted() -> None:
    told = _told()
    told["b"].values["clock_s"] = -3.0
    note_odd(told)
    assert not _bad(told)
    assert told["b"].notes == ["its clock is -3.0 s off that of the others"]


def test_what_all_have_in_common_is_no_nodes_fault() -> None:
    told = _told()
    for each in told.values():
        each.bad.append(("torch", "No module named 'torch'"))
    found = outcome(told)
    assert (found["ok"], found["bad_nodes"], found["hopeless"]) == (False, [], True)
    assert found["why"] == "No module named 'torch' (the same on all nodes)"
    told["c"].bad[:] = [("silent", "no word within 40 s")]
    assert outcome(told)["hopeless"]
    told["c"].bad.clear()
    found = outcome(told)
    assert (found["bad_nodes"], found["hopeless"]) == (["a", "b"], False)
    silent = _told()
    for each in silent.values():
        each.bad.append(("silent", "no word"))  # of Slurm's controller, perhaps
    found = outcome(silent)
    assert (found["bad_nodes"], found["hopeless"]) == ([], False)


def test_one_bad_node_and_a_silent_one_have_nothing_in_common() -> None:
    told = _told(2)
    told["a"].bad.append(("gpus", "nvidia-smi: broken"))
    told["b"].bad.append(("silent", "no word"))
    found = outcome(told)
    assert (found["bad_nodes"], found["hopeless"]) == (["a", "b"], False)


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_that_does_not_start_is_no_nodes_fault(count: int) -> None:
    told = _told(count)
    for each in told.values():
        each.bad.append(("step", "srun has ended without it: Socket timed out"))
    found = outcome(told)
    assert (found["bad_nodes"], found["hopeless"]) == ([], False)


def test_one_node_alone_is_bad_where_another_may_be_better() -> None:
    told = _told(1)
    told["a"].bad.append(("tmpdir", "full"))
    assert outcome(told)["bad_nodes"] == ["a"]
    told["a"].bad[:] = [("torch", "No module named 'torch'")]
    assert outcome(told)["hopeless"]
    two = _told(2)
    for each in two.values():
        each.bad.append(("link", "no way"))
    assert outcome(two)["bad_nodes"] == ["a", "b"]


@pytest.mark.parametrize("world", range(2, 10))
def test_everybody_meets_everybody_once(world: int) -> None:
    met: Counter[tuple[int, int]] = Counter()
    for turn in range(world - 1 + world % 2):
        for rank in range(world):
            other = partner(rank, world, turn)
            if other is not None:
                assert partner(other, world, turn) == rank
                met[rank, other] += 1
    assert len(met) == world * (world - 1)
    assert set(met.values()) == {1}
    assert turns(world) <= world


# --- one node's checks ---------------------------------------------------------------------


def test_space_and_tmpdir(tmp_path: Path) -> None:
    assert checks.tmpdir(tmp_path)["tmpdir_free"] > 0
    with pytest.raises(checks.UnfitError, match="can't be written: No such file"):
        checks.tmpdir(tmp_path / "gone")
    with pytest.raises(checks.UnfitError, match="MB free, and needs"):
        checks.space(tmp_path, 1 << 62)


def test_the_way_to_another_node(monkeypatch: pytest.MonkeyPatch) -> None:
    there = checks.Listener("b", "secret")
    assert abs(checks.reach("b", "127.0.0.1", there.port, "secret")) < 1
    with pytest.raises(OSError, match="b answers there"):
        checks.reach("c", "127.0.0.1", there.port, "secret")
    with pytest.raises(OSError, match="something else answers"):
        checks.reach("b", "127.0.0.1", there.port, "another")
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setattr(checks, "LINK_S", 0.2)
        with pytest.raises(OSError, match="timed out"):
            checks.reach("b", "127.0.0.1", deaf.getsockname()[1], "secret")
    there.close()


def test_lines_are_short_and_whole(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPC_DDP_NODE", "n1")
    checks.tell(bad="x", why="é" * 5000)
    line = capfd.readouterr().out
    assert line.startswith(checks.MARK)
    assert len(line.encode()) < 1024


def test_the_table() -> None:
    told = _told(2)
    told["a"].values |= {"interface": "eth0", "address": "10.0.0.1", "clock_s": 0.0}
    told["b"].bad.append(("tmpdir", "full"))
    lines = preflight_table(PreflightEnded(**outcome(told), seconds=1.0)).splitlines()
    assert " ".join(lines[1].split()).endswith("+0.000 s - 1.0 GB/s 1.0 GB/s good")
    assert lines[2].endswith("tmpdir")


@pytest.mark.parametrize(
    ("values", "notes"),
    [
        ({"clock_s": 1.0, "load": 2.0}, []),
        ({"clock_s": 1.1}, ["its clock is +1.1 s off that of the others"]),
        ({"load": 2.1}, ["busy already: a load of 2.1 per processor"]),
    ],
)
def test_what_is_odd_beyond_a_bound_is_noted(values: dict[str, float], notes: list[str]) -> None:
    told = _told()
    told["a"].values |= values
    note_odd(told)
    assert [each.notes for each in told.values()] == [notes, [], []]


@pytest.mark.parametrize(
    ("speed", "load", "slow"), [(200.0, 0.0, ""), (199.0, 0.5, "b"), (199.0, 1.5, "")]
)
def test_five_times_slower_is_slow(speed: float, load: float, slow: str) -> None:
    told = _told(3, ba=speed, bc=speed, ab=speed, cb=speed)
    told["a"].values["load"] = load
    assert set(find_slow(told)) == set(slow)
