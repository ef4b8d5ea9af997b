"""No node is named without a second opinion: preflights of simulated clusters, busy or with bad
nodes."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.line_reader import LONGEST_LINE
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.preflight import driver
from hpc_ddp.node.preflight.bandwidth import TURNS, partner
from hpc_ddp.node.preflight.blame import MOST_SHOWN, NodeReport, drop_unconfirmed, outcome
from hpc_ddp.node.preflight.dialogue import Command
from hpc_ddp.node.preflight.driver import examine_nodes, record_outcome
from hpc_ddp.node.preflight.links import LINK_S, partners
from tests.raw_events import raw_events

NODES = [f"n{index}" for index in range(64)]
DEAD, WRONG_NAMES, NO_NAME, SLOW_LINK, OTHER_DISK = "dead", "names", "no name", "slow", "disk"
KINDS = (DEAD, WRONG_NAMES, NO_NAME, SLOW_LINK, OTHER_DISK)
IDLE_S, BUSY_S = 0.01, 1.0  # median of an answer
DRAWS = 60


class Simulation:
    """Takes the place of a `Dialogue` with nodes that are healthy but for `bad` ones, by kind.

    An answer takes as long as both of its nodes do, each by chance around `answer_s`.
    """

    def __init__(self, draw: random.Random, bad: dict[str, str], answer_s: float) -> None:
        self.draw, self.bad, self.answer_s = draw, bad, answer_s
        self.reports = {node: NodeReport() for node in NODES}
        self.orders: list[dict[str, Any]] = []

    def send(self, **question: Any) -> None:
        self.orders.append(question)

    def close(self, patience_s: float) -> None:
        pass

    def wait(self, stage: str, nodes: Sequence[str], *limits: float, **more: float) -> list[str]:
        """Let each node complete the stage."""
        getattr(self, f"_{stage}")(nodes)
        return [node for node in nodes if not self.reports[node].faults]

    def _start(self, nodes: Sequence[str]) -> None:
        for node in nodes:
            self._add(node, stage="start")

    def _local(self, nodes: Sequence[str]) -> None:
        order, load = self.orders[0], min(30.0, self.answer_s * 30)
        for node in nodes:
            contact = {"host": node, "port": order["port"], "store_port": 6}
            self._add(node, contact=contact, values={"load": load * self.draw.random()})

    def _partners(self, nodes: Sequence[str]) -> None:
        self.slowness = {node: self.draw.lognormvariate(0, 0.8) for node in NODES}
        for node in nodes:
            self._add(node, values={"delay_s": self._delay(node, node)})
            for peer in partners(nodes, node, self.orders[0]["again"]):
                here, there = self.bad.get(node), self.bad.get(peer)
                is_late = self._delay(node, peer) > LINK_S or there == DEAD
                if is_late or here == WRONG_NAMES or there == NO_NAME:
                    is_sure = here == WRONG_NAMES or there == NO_NAME
                    self._add(node, trouble=peer, check="link", why="link", late=not is_sure)
                if OTHER_DISK in (here, there):
                    self._add(node, trouble=peer, check="scratch", why="file", late=True)

    def _torch(self, nodes: Sequence[str]) -> None:
        for node in nodes:
            self._add(node, values={"torch": "2", "device": None})

    def _exchange(self, nodes: Sequence[str]) -> None:
        first = self.orders[-1]["first"]
        for turn in range(first, first + TURNS):
            for rank, node in enumerate(nodes):
                peer = partner(rank, len(nodes), turn)
                chance = 1e-4 if self.answer_s > IDLE_S else 0  # of a time-out
                if peer is not None and self.draw.random() < chance:
                    why = f"no exchange with {nodes[peer]}"
                    more = {"check": "bandwidth", "why": why, "turn": turn}
                    self._add(node, trouble=nodes[peer], **more)
                    self._add(nodes[peer], trouble=node, **more)
        for node in nodes:
            usual = 2.0 if self.bad.get(node) == SLOW_LINK else 1000.0 / (1 + 30 * self.answer_s)
            speeds = [usual * self.draw.lognormvariate(0, 0.5) for _ in range(TURNS)]
            self._add(node, values={"exchange_mb_s": max(speeds)})

    def _add(self, node: str, **message: Any) -> None:
        self.reports[node].add(message)

    def _delay(self, *ends: str) -> float:
        """Return the seconds of an answer."""
        slowness = sum(self.slowness[end] for end in ends)
        return self.answer_s * slowness * self.draw.lognormvariate(0, 0.8)


Simulate = Callable[[int, dict[str, str], float], dict[str, Any]]


@pytest.fixture
def simulate(tmp_path: Path) -> Simulate:
    run = RunFolder(tmp_path / "name" / "run").make()
    run.job_json.write_text(JobSpec("train.py").to_json())
    run.claim_attempt({"nodes": NODES}, lambda identity: False)
    command = Command([], {**os.environ, "HPC_DDP_RUN": str(run.path), "HPC_DDP_ATTEMPT": "0"})

    def call(seed: int, bad: dict[str, str], answer_s: float) -> dict[str, Any]:
        draw = random.Random(seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                driver, "has_content", lambda path, text: bad.get(path.name) != OTHER_DISK
            )
            patch.setattr(driver, "Dialogue", lambda *words: Simulation(draw, bad, answer_s))
            return examine_nodes(run, NODES, [command], lambda: "")

    return call


def test_no_healthy_node_is_named_however_busy(simulate: Simulate) -> None:
    named = [simulate(seed, {}, BUSY_S)["bad_nodes"] for seed in range(DRAWS)]
    assert [nodes for nodes in named if nodes] == []


@pytest.mark.parametrize("answer_s", [IDLE_S, BUSY_S / 30])
def test_two_bad_nodes_are_named_and_no_others(simulate: Simulate, answer_s: float) -> None:
    draw = random.Random(0)
    for seed in range(DRAWS):
        bad = {node: draw.choice(KINDS) for node in draw.sample(NODES, 2)}
        assert set(simulate(seed, bad, answer_s)["bad_nodes"]) == set(bad), bad


@pytest.mark.parametrize(("bad", "again"), [({}, [False]), ({"n9": DEAD}, [False, True])])
def test_only_a_doubt_costs_a_second_round(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch, bad: dict[str, str], again: list[bool]
) -> None:
    rounds: list[bool] = []
    ask_questions = driver.ask_questions

    def count(dialogue: Any, spec: JobSpec, run: RunFolder, folder: Path, *more: Any) -> None:
        rounds.append(more[0])
        ask_questions(dialogue, spec, run, folder, *more)

    monkeypatch.setattr(driver, "ask_questions", count)
    assert simulate(0, bad, IDLE_S)["bad_nodes"] == [*bad]
    assert rounds == again


def test_what_is_found_once_is_a_note() -> None:
    first = {node: NodeReport(faults=[("link", "late")]) for node in "ab"}
    second = {"a": NodeReport(faults=[("gpus", "none"), ("bandwidth", "slow")]), "b": NodeReport()}
    second["b"].faults.append(("link", "no way"))
    drop_unconfirmed(first, second)
    assert second["a"].faults == [("gpus", "none")]
    assert second["a"].notes == ["not confirmed: slow", "not confirmed: late"]
    assert (second["b"].faults, second["b"].notes) == ([("link", "no way")], [])


@pytest.mark.parametrize("count", [4, 64, 1024, 5000])
def test_the_event_has_a_bounded_size(
    simulate: Simulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Each node reports as much as it can, and is bad."""
    values = {"interface": "eth0", "address": "10.0.0.1", "tmpdir": "/" * 400, "scratch_free": 1e9}
    reports = {
        f"node{n:04}": NodeReport(
            values={**values, "load": n},
            faults=[(f"check {n} {k}", f"{n} {k} " + "x" * 480) for k in range(6)],
            notes=[f"{n} {k} " + "y" * 480 for k in range(6)],
        )
        for n in range(count)
    }
    run = RunFolder(tmp_path / "name" / "run")
    monkeypatch.setattr(driver, "say", lambda text: None)
    record_outcome(run, 0, {**outcome(reports), "seconds": 1.0})
    (event,) = raw_events(run.path)
    assert len(json.dumps(event)) < LONGEST_LINE / 2
    assert (event["summary"]["nodes"], len(event["bad_nodes"])) == (count, count)
    assert len(event["report"]) == min(count, MOST_SHOWN)
    assert event["summary"]["quantiles"]["load"] == [0, (count - 1) / 2, count - 1]
