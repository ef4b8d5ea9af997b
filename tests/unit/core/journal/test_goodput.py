"""The time of a run is divided into parts; journals are made by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_ddp.core.journal.events import JournalEvent, Submitted, WorkerStarted
from hpc_ddp.core.journal.goodput import PARTS, account, line, pieces, share, start_costs
from hpc_ddp.core.journal.parsing import event_of
from tests.raw_events import typed


def _event(event: str, time: float, attempt: int = 0, **fields: Any) -> JournalEvent:
    return typed(event, time, attempt, **fields)


def _steps(attempt: int, start: float, first: int, last: int) -> list[JournalEvent]:
    """Steps of one second: `training` at `start`, `metrics` at each second after it."""
    count = last - first + 1
    events = [_event("training", start, attempt, step=first - 1)]
    events += [
        _event("metrics", start + 1 + i, attempt, step=first + i, loss=0.1) for i in range(count)
    ]
    return events


def _start(attempt: int, at: float, step: int | None = None) -> list[JournalEvent]:
    """10 s to the worker's process, 4 to import, 2 to start, 3 to restore; 1 more to train."""
    events = [_event("started", at, attempt, nodes=["n1"], job_id="1")]
    events += [_event("worker", at + 15, attempt, began=at + 10, called=at + 14)]
    if step is not None:
        events += [_event("restored", at + 19, attempt, step=step, passed_over=[], restore_s=3.0)]
    return events


def _save(attempt: int, at: float, step: int, stall_s: float = 0.5) -> JournalEvent:
    return _event("checkpoint", at, attempt, step=step, stall_s=stall_s, write_s=0.4, bytes=1)


def _verdict(attempt: int, at: float, cause: str, step: int | None = None) -> JournalEvent:
    return _event("verdict", at, attempt, cause=cause, action="requeue", step=step)


def parts_of(
    events: list[JournalEvent], now: float | None = None, waits: bool = False
) -> dict[str, Any]:
    """Return the parts that are not zero, having checked that they add up."""
    events = sorted(events, key=lambda event: (event.attempt, event.time))
    seconds = account(events, now, waits)
    begin = min(e.time for e in events if isinstance(e, Submitted))
    assert sum(seconds.values()) == pytest.approx((now or max(e.time for e in events)) - begin)
    return {part: pytest.approx(value) for part, value in seconds.items() if value}


SUBMITTED = [_event("submitted", 100.0, first_attempt=0), _event("queued", 100.1, job_id="1")]
FIRST = [*SUBMITTED, *_start(0, 150.0), *_steps(0, 170.0, 1, 20)]  # the 20th ends at 190


def test_steps_after_a_restart_within_an_attempt_count_as_redone() -> None:
    """The workers are killed after step 20, and start again 5 s later from step 10."""
    again = [
        _event("worker", 200.0, began=195.0, called=199.0),
        _event("restored", 204.0, step=10, passed_over=[], restore_s=3.0),
        *_steps(0, 205.0, 11, 40),
    ]
    parts = parts_of([*FIRST, *again, _event("finished", 235.0, step=40)])
    first = parts_of(FIRST)
    assert parts["lost"] == pytest.approx(5.0)
    assert parts["restoring"] == pytest.approx(3.0)
    assert parts["redone"] == pytest.approx(10.0)
    assert parts["training"] == pytest.approx(40.0)
    assert parts["queued"] == first["queued"]


def test_an_undisturbed_run_has_no_lost_steps() -> None:
    events = [*FIRST, _save(0, 180.0, 10), _save(0, 190.6, 20), _event("finished", 190.6, step=20)]
    events += [_verdict(0, 193.6, "finished")]
    assert parts_of(events) == {
        "queued": 50,
        "starting": 10,
        "importing": 4,
        "building": 6,
        "training": 19.6,
        "saving": 1,
        "lost": 3,
    }
    assert share(account(events)) == pytest.approx(19.6 / 43.6)


def test_two_preemptions_add_queue_and_start_times() -> None:
    events = list(FIRST)
    for attempt, at, step in ((0, 190.0, 20), (1, 290.0, 30)):
        events += [_save(attempt, at + 1, step, 1.0), _event("stopped", at + 1, attempt, step=step)]
        events += [_verdict(attempt, at + 3, "preempted", step)]
        events += _start(attempt + 1, at + 70, step)
        events += _steps(attempt + 1, at + 90, step + 1, step + 10)
    events += [_event("finished", 390.0, 2, step=40), _verdict(2, 391.0, "finished")]
    assert parts_of(events) == {
        "queued": 50 + 67 + 67,
        "starting": 30,
        "importing": 12,
        "building": 6 + 3 + 3,
        "restoring": 6,
        "training": 40,
        "saving": 2,
        "lost": 2 + 2 + 1,
    }


def test_steps_after_a_crash_count_as_redone() -> None:
    # Attempt 0 reaches step 20, with a checkpoint at 12; killed, and noticed 5 s later.
    events = [*FIRST, _save(0, 182.0, 12), _verdict(0, 195.0, "failed", 20)]
    events += _start(1, 200.0, 12)
    # 2 steps between two events: it passes step 20 in the middle, at 228.
    marks = [_event("metrics", 220.0 + 2 * i + 1, 1, step=13 + 2 * i) for i in range(1, 10)]
    events += [_event("training", 220.0, 1, step=12), *marks]
    events += [_save(1, 225.2, 17, 0.2), _verdict(1, 245.0, "failed", 31)]
    parts = parts_of(events)
    assert parts["redone"] == 7.8
    assert parts["training"] == 20 - 0.5 + (239 - 228)
    assert parts["saving"] == 0.7
    assert parts["lost"] == 5 + 6
    # The next one starts below both.
    events += [*_start(2, 250.0, 17), *_steps(2, 270.0, 18, 28)]
    assert parts_of(events)["redone"] == 7.8 + 11


def test_a_stall_lies_at_the_beginning_of_an_asynchronous_save() -> None:
    # Copied at 181.0, durable at 189.0: step 10 has long passed when the event comes.
    save = _event("checkpoint", 189.0, step=11, stall_s=0.3, write_s=8.0, bytes=1)
    assert parts_of([*FIRST, save]) == {
        "queued": 50,
        "starting": 10,
        "importing": 4,
        "building": 6,
        "training": 19.7,
        "saving": 0.3,
    }


def test_an_attempt_killed_before_its_first_step_is_lost() -> None:
    events = [*SUBMITTED, *_start(0, 150.0), _verdict(0, 172.0, "node lost")]
    assert parts_of(events) == {
        **{"queued": 50, "starting": 10, "importing": 4, "building": 1, "lost": 7},
    }
    assert share(account(events)) == 0.0
    only = [*SUBMITTED, _event("started", 150.0), _verdict(0, 152.0, "node lost")]
    assert parts_of([*only, *_start(1, 160.0)]) == {
        "queued": 58,
        "lost": 2,
        "starting": 10,
        "importing": 4,
        "building": 1,
    }


def test_an_attempt_killed_below_the_reached_step_is_lost() -> None:
    """The second attempt has one mark, below the step that the first one came to."""
    second = [*_start(1, 200.0, 10), _event("first_step", 221.0, 1, step=11)]
    events = [*FIRST, _verdict(0, 195.0, "failed", 20), *second, _verdict(1, 230.0, "failed", 11)]
    assert parts_of(events) == {
        **{"queued": 55.0, "starting": 20.0, "importing": 8.0, "building": 10.0, "restoring": 3.0},
        **{"training": 20.0, "lost": 14.0},
    }


def test_a_live_run_is_counted_until_now() -> None:
    assert parts_of(SUBMITTED, 110.0) == {"queued": 10}
    assert parts_of([*SUBMITTED, *_start(0, 150.0)], 167.0)["building"] == 3
    assert parts_of(FIRST, 195.0)["training"] == 25
    stopped = [*FIRST, _event("stopped", 190.5, step=20)]
    assert parts_of(stopped, 200.0)["lost"] == 9.5
    assert parts_of([*stopped, _verdict(0, 191.5, "preempted")], 200.0)["queued"] == 50 + 8.5
    assert parts_of(FIRST, 200.0, waits=True)["queued"] == 50 + 10  # its node was lost


def test_time_until_a_later_submit_counts_as_queued() -> None:
    events = [*FIRST, _event("stopped", 190.0, step=20), _verdict(0, 191.0, "notice")]
    events += [_event("submitted", 991.0, first_attempt=1), *_start(1, 1000.0, 20)]
    assert parts_of(events)["queued"] == 50 + 809


def test_a_script_without_steps_counts_as_running() -> None:
    events = [*SUBMITTED, _event("started", 150.0), _verdict(0, 190.0, "preempted")]
    assert parts_of(events) == {"queued": 50, "running": 40}
    events += [_event("started", 250.0, 1)]
    assert parts_of(events, 300.0) == {"queued": 110, "running": 90}
    assert share(account(events, 300.0)) is None


def test_a_worker_may_start_before_its_attempt() -> None:
    events = [_event("worker", 105.5, began=100.0, called=104.0), _event("started", 105.0)]
    events += _steps(0, 106.0, 1, 5)
    seconds = account(sorted(events, key=lambda event: event.time))
    assert {part: value for part, value in seconds.items() if value} == {
        "importing": 4,
        "building": 2,
        "training": 5,
    }


def test_the_imports_made_ahead_of_a_fork_count_as_importing() -> None:
    """The agent begins 2 s after the attempt, the fork server ends its imports 5 s later."""
    ahead: dict[str, Any] = {"imports_began": 152.0, "imports_ended": 157.0}
    worker = _event("worker", 161.5, began=160.0, called=161.0, **ahead)
    again = _event("worker", 190.5, began=189.0, called=190.0, **ahead)
    events = [*SUBMITTED, _event("started", 150.0), worker, *_steps(0, 163.0, 1, 20)]
    parts = {"queued": 50, "starting": 2 + 3, "importing": 5 + 1, "building": 2}
    assert parts_of(events) == {**parts, "training": 20}
    # A restart within the attempt imports nothing.
    assert parts_of([*events, again])["importing"] == 5 + 1 + 1


def test_starts_that_cost_more_than_a_tenth_are_named() -> None:
    seconds = dict.fromkeys(PARTS, 0.0)
    assert start_costs(seconds) == ""
    seconds |= {"training": 900.0, "starting": 30.0, "importing": 60.0, "queued": 9000.0}
    assert start_costs(seconds) == ""
    seconds["building"] = 50.0
    assert start_costs(seconds) == (
        "Starts took 13 % of its time (30 s starting, 60 s importing, 50 s building), mostly "
        "importing: the fork server's imports, and the script's own until it calls `start`."
    )
    assert start_costs({**seconds, "running": 1.0}) == ""


def test_the_goodput_line_has_the_largest_parts() -> None:
    seconds = dict.fromkeys(PARTS, 0.0) | {"training": 41.2, "saving": 0.2, "lost": 0.04}
    seconds |= {"starting": 9.96, "queued": 7200.0}
    assert line(seconds) == "goodput 80 %: 41 s training, 0.2 s saving, 10 s starting, 2.0 h queued"
    assert line(dict.fromkeys(PARTS, 0.0)) == "goodput -: nothing yet"
    assert account([]) == dict.fromkeys(PARTS, 0.0)


WHOLE = [
    *FIRST,
    _save(0, 182.0, 12),
    _verdict(0, 195.0, "failed", 20),
    *_start(1, 200.0, 12),
    *_steps(1, 220.0, 13, 30),
    _save(1, 238.4, 30),
    _event("stopped", 238.5, 1, step=30),
    _verdict(1, 240.0, "preempted", 30),
    *_start(2, 300.0, 30),
    *_steps(2, 320.0, 31, 35),
    _event("finished", 325.5, 2, step=35),
    _verdict(2, 327.0, "finished"),
]

FIELDS = st.sampled_from(["step", "began", "called", "restore_s", "stall_s", "write_s"])


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.booleans(), st.floats(-1.5, 1.5), FIELDS), min_size=len(WHOLE)),
    st.one_of(st.none(), st.floats(327.0, 400.0)),
    st.booleans(),
)
def test_the_parts_add_up_with_any_events_missing(
    changes: list[tuple[bool, float, str]], now: float | None, waits: bool
) -> None:
    events = []
    for event, (is_kept, shift, without) in zip(WHOLE, changes, strict=False):
        if is_kept:
            line = {**event.to_line(), "time": event.time + shift}
            line.pop(without, None)
            changed = event_of(json.loads(json.dumps(line)))
            assert changed is not None
            events.append(changed)
    seconds = account(sorted(events, key=lambda e: (e.attempt, e.time)), now, waits)
    assert all(value >= 0 for value in seconds.values())
    if events:
        times = [event.time for event in events]
        submitted = [event.time for event in events if isinstance(event, Submitted)]
        workers = [event for event in events if isinstance(event, WorkerStarted)]
        begin = min(submitted or [*times, *(w.began for w in workers if w.began is not None)])
        wall = max((now or max(times)) - begin, 0)
        assert sum(seconds.values()) == pytest.approx(wall, rel=0.01)


def test_pieces_have_no_gaps() -> None:
    events = [
        *(_event("submitted", 0.0), _event("started", 5.0, nodes=["a"]), _event("notice", 9.0)),
        _event("verdict", 20.0, cause="failed", action="requeue", why=""),
        _event("started", 30.0, 1, nodes=["a"]),
    ]
    assert [(piece.part, piece.begin, piece.end) for piece in pieces(events, now=50.0)] == [
        *(("queued", 0.0, 5.0), ("running", 5.0, 20.0)),
        *(("queued", 20.0, 30.0), ("running", 30.0, 50.0)),
    ]
    waits = pieces(events, now=50.0, waits=True)
    assert [(piece.part, piece.end) for piece in waits][-1] == ("queued", 50.0)
    assert pieces([]) == []


def test_the_share_excludes_the_queue() -> None:
    nothing = account([])
    assert share(nothing) is None
    assert share({**nothing, "queued": 5.0}) is None
    assert share({**nothing, "queued": 5.0, "training": 3.0, "lost": 1.0}) == 0.75
    assert share({**nothing, "running": 5.0}) is None
    assert line(nothing) == "goodput -: nothing yet"
