"""A rank that the others wait for is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_ddp.core.journal.stragglers import slow_rank
from unit.core.journal.fakes import event_at
from unit.report.written_runs import make_run, write_event, write_step_times


def test_a_slow_rank_is_named_after_three_reports() -> None:
    slow: dict[str, Any] = {
        "busy_s": [0.1, 0.4, 0.1],
        "data_s": [0.0, 0.0, 0.0],
        "step_s": 0.4,
        "slowest": 1,
    }
    events = [event_at("ranks", **slow, node="n2") for _ in range(3)]
    result = slow_rank(events)
    assert result is not None
    assert (result.rank, result.node, result.own_s, result.others_s, result.data) == (
        *(1, "n2", 0.4, 0.1),
        False,
    )
    for begin in ("started", "worker"):
        assert slow_rank([*events[:2], event_at(begin), *events[2:]]) is None
        assert slow_rank([*events, event_at(begin)]) is None
        assert slow_rank([event_at(begin), *events]) == result
    # A quarter more than the others, and a tenth of a step that all wait for.
    for compute_s, step_s, named in ((0.125, 0.2, True), (0.12, 0.1, False), (0.125, 0.3, False)):
        values = {**slow, "busy_s": [0.1, compute_s, 0.1], "step_s": step_s}
        assert (slow_rank([event_at("ranks", **values)] * 3) is not None) is named, compute_s


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
    ]
    for damage in damages:
        fields = {"busy_s": [0.1, 0.3], "data_s": [0.0], "slowest": 1, "node": 7, "step_s": 0.3}
        write_event(run, "rank-0", "ranks", 0, **{**fields, **damage})
    assert slow_rank(run.events()) is None
