"""A rank that the others wait for is named."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.journal.events import StepTiming
from hpc_ddp.core.journal.stragglers import MOST_RANKS, slow_rank, summarize_times
from unit.core.journal.fakes import event_at
from unit.report.written_runs import make_run, write_event, write_step_times


def _times(busy_s: list[float], step_s: float = 0.4, time: float = 1.0) -> StepTiming:
    """Return a `ranks` event of ranks that wait for no data, rank k on the node ``n<k>``."""
    nodes = [f"n{rank}" for rank in range(len(busy_s))]
    data_s = [0.0] * len(busy_s)
    return replace(summarize_times(9, 9, step_s, data_s, busy_s, nodes), time=time)


def test_a_slow_rank_is_named_after_three_reports() -> None:
    events = [_times([0.1, 0.4, 0.1])] * 3
    result = slow_rank(events)
    assert result is not None
    assert (result.rank, result.node, result.own_s, result.others_s, result.data) == (
        *(1, "n1", 0.4, 0.1),
        False,
    )
    for begin in ("started", "worker"):
        assert slow_rank([*events[:2], event_at(begin), *events[2:]]) is None
        assert slow_rank([*events, event_at(begin)]) is None
        assert slow_rank([event_at(begin), *events]) == result
    # A quarter more than the others, and a tenth of a step that all wait for.
    for compute_s, step_s, named in ((0.125, 0.2, True), (0.12, 0.1, False), (0.125, 0.3, False)):
        event = _times([0.1, compute_s, 0.1], step_s)
        assert (slow_rank([event] * 3) is not None) is named, compute_s


def test_the_event_of_many_ranks_is_as_large_as_that_of_some() -> None:
    sizes = {}
    for count in (MOST_RANKS, 8192):
        chance = random.Random(count)
        busy_s = [0.25 + chance.random() / 100 for _ in range(count)]
        data_s = [0.001 + chance.random() / 1000 for _ in range(count)]
        nodes = [f"node{rank // 8:04d}" for rank in range(count)]
        event = summarize_times(9, 9, 0.3, data_s, busy_s, nodes)
        assert len(event.ranks) == MOST_RANKS
        sizes[count] = len(json.dumps(event.to_line()))
    assert sizes[8192] < 1.25 * sizes[MOST_RANKS]  # names of ranks have more digits
    assert sizes[8192] < 1200  # bytes


def test_up_to_32_ranks_are_all_in_the_event() -> None:
    busy_s = [0.1 + rank / 100 for rank in range(32)]
    event = _times(busy_s)
    assert list(event.ranks) == list(range(32))
    assert list(event.busy_s or ()) == pytest.approx(busy_s, rel=1e-3)


def test_a_slow_rank_of_many_is_named() -> None:
    events = []
    for round in range(3):
        chance = random.Random(round)
        busy_s = [0.25 + chance.random() / 100 for _ in range(8192)]
        busy_s[5000:5008] = [0.4 + chance.random() / 100 for _ in range(8)]  # a node of eight
        events.append(_times(busy_s))
    slow = slow_rank(events)
    assert slow is not None
    assert 5000 <= slow.rank < 5008
    assert slow.node == f"n{slow.rank}"
    assert slow.others_s == pytest.approx(0.255, rel=0.01)


def test_slow_ranks_are_told_from_ranks_that_wait_for_data(tmp_path: Path) -> None:
    for busy, data_s, words in (
        ([0.1, 0.3], [0.0, 0.21], "waits for data"),
        ([0.1, 0.3], [0.0, 0.05], "is slow"),
        ([0.1, 0.12], [0.0, 0.0], ""),  # a little
        ([0.001, 0.002], [0.0, 0.0], ""),  # of steps of 300 ms that is nothing
        ([0.1, 0.1], [0.0, 0.0], ""),
    ):
        run = make_run(tmp_path / str(busy) / str(data_s))
        for _ in range(3):
            write_step_times(run, busy, data_s)
        assert words in str(slow_rank(run.events()) or ""), busy
        assert bool(words) == (slow_rank(run.events()) is not None)


def test_damaged_step_times_name_no_rank(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    damages: list[dict[str, Any]] = [
        {"busy_s": ["x"], "data_s": 3},
        {"step_s": None},
        {"busy_s": []},
        {"node": "n1", "busy_quartiles_s": None},
        {"node": "n1", "busy_quartiles_s": [0.1]},
    ]
    for damage in damages:
        fields = {
            "ranks": [0, 1],
            "busy_s": [0.1, 0.3],
            "busy_quartiles_s": [0.1, 0.1, 0.1, 0.1, 0.3],
            "data_s": [0.0],
            "slowest": 1,
            "node": 7,
            "step_s": 0.3,
        }
        write_event(run, "rank-0", "ranks", 0, **{**fields, **damage})
    assert slow_rank(run.events()) is None
