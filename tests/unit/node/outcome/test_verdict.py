"""Verdicts follow a table. Each row is a bad day; its events in Slurm are shown in tests/slurm."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hpc_ddp.core.errors import EARLY_EXIT, HIDDEN_EXIT
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.enums import Action, Bound, Cause, EndKind
from hpc_ddp.core.journal.events import JournalEvent
from hpc_ddp.node.outcome.attempt_facts import EARLY_S
from hpc_ddp.node.outcome.bounds import too_many_silent
from hpc_ddp.node.outcome.first_failure import Failure
from hpc_ddp.node.outcome.verdict import Verdict, decide
from hpc_ddp.slurm_text import Job
from tests.raw_events import changed
from unit.node.outcome.fakes import (
    BASE,
    FINE,
    RUNNING,
    decide_by,
    decide_elastic,
    event_of,
    failed_records,
    record_of,
)


def test_a_good_end_is_finished() -> None:
    assert decide_by() == Verdict(Cause.FINISHED, Action.NONE, "")


def test_the_record_of_each_task_counts() -> None:
    spec = JobSpec("t.py", launcher="srun", nproc_per_node=2)
    assert decide_by(spec=spec, records=FINE * 2).cause == "finished"
    verdict = decide_by(spec=spec, records=(*FINE, record_of("n1")), events=())
    assert (verdict.cause, verdict.why) == ("node lost", "no word from n2")


def test_the_tasks_of_an_edited_batch_script_count() -> None:
    """A run with one task a node was taken for one that has lost its nodes, and trained again."""
    spec = JobSpec("t.py", launcher="srun", nproc_per_node=2)
    records = [{**record, "tasks": 1} for record in FINE]
    assert decide_by(spec=spec, records=records).cause == "finished"
    records = [{**record, "tasks": 3} for record in FINE * 2]
    assert decide_by(spec=spec, records=records, events=()).cause == "node lost"


def test_an_end_that_is_saved_once_more_is_no_progress() -> None:
    """A finished training whose later lines kill the job was started again without end."""
    events = [event_of("first_step", 0, step=1), event_of("checkpoint", 0, step=10)]
    for attempt in range(11):
        if attempt:
            events.append(event_of("restored", attempt, step=10))
            events.append(event_of("checkpoint", attempt, step=10))
        events.append(event_of("finished", attempt, step=10))
        verdict = decide_by(records=(), attempt=attempt, events=events)
        if verdict.action == "give up":
            break
        cause, action = verdict.cause, verdict.action
        lost = {"cause": cause, "action": action, "progress": attempt == 0, "step": 10}
        events.append(event_of("verdict", attempt, **lost))
    assert attempt == 4
    text = "4 attempts in a row ended so, without a newer checkpoint"
    assert verdict.refusal == (text, Bound.NO_PROGRESS)
    assert verdict.why.endswith(f"; {text}")


def test_a_loop_without_a_finish_is_not_finished() -> None:
    left = event_of("failed", rank=0, node="n1", step=5, error=EARLY_EXIT)
    events = (event_of("training", step=0), event_of("first_step", step=1), left)
    verdict = decide_by(events=events)
    assert (verdict.cause, verdict.action, verdict.exit_code) == ("failed", "give up", 1)
    assert "without run.finish()" in verdict.why


@pytest.mark.parametrize("had_begun", [False, True])
def test_a_code_that_is_hidden_finishes_no_training(had_begun: bool) -> None:
    """As below ``python train.py | tee log``: a start that was killed before its loop, or failed,
    made a half-done run finished for good."""
    stopped = event_of("training", 0, step=0), event_of("first_step", 0, step=1)
    before = () if had_begun else stopped
    lost = {"cause": "preempted", "action": "requeue", "progress": True, "step": 14}
    events = [*before, event_of("verdict", 0, **lost)]
    verdict = decide_by(events=events, attempt=1, had_begun=had_begun)
    assert (verdict.cause, verdict.action) == ("failed", "requeue")
    assert (verdict.why, verdict.kind) == (HIDDEN_EXIT, EndKind.HIDDEN_EXIT)
    error = "OSError: Stale file handle"
    failed = event_of("failed", 1, rank=1, node="n2", step=None, error=error)
    verdict = decide_by(events=[*stopped, *events, failed], attempt=1, had_begun=had_begun)
    assert (verdict.cause, verdict.action) == ("failed", "requeue")
    assert verdict.why == f"rank 1 on n2: {error}: {HIDDEN_EXIT}"
    done = event_of("finished", 0, step=40)
    verdict = decide_by(events=[*events, done], attempt=1, had_begun=had_begun)
    assert verdict.cause == "finished"


def test_a_rank_that_leaves_its_peers_is_named() -> None:
    records = (record_of("n1", error="RuntimeError: Connection closed by peer"), record_of("n2"))
    left = event_of("failed", rank=1, node="n2", step=5, error=EARLY_EXIT)
    verdict = decide_by(records=records, events=(*BASE.events, left))
    assert verdict.why == f"rank 1 on n2: {EARLY_EXIT}, at step 5"
    assert decide_by(events=(event_of("training", step=0), left)).action == "give up"


def test_a_notice_in_the_last_moment_leaves_a_run_finished() -> None:
    records = (record_of("n1", notice="SIGTERM"), record_of("n2"))
    assert decide_by(records=records, events=(event_of("finished", step=9),)).cause == "finished"
    assert decide_by(records=records[:1], events=(event_of("finished"),)).cause == "finished"
    preempted = replace(RUNNING, preempted_at=900.0)
    assert decide_by(job=preempted, events=(event_of("finished"),)).cause == "finished"
    lost = decide_by(job=preempted, records=FINE[:1], events=(event_of("finished", step=9),))
    assert (lost.cause, lost.why) == ("preempted", "preempted, at step 9")
    assert decide_by(job=preempted, events=(event_of("first_step", step=4),)).why == (
        "preempted, at step 4"
    )


def test_a_torchrun_that_hung_behind_the_end_of_a_run_leaves_it_finished() -> None:
    records = (FINE[0], {**record_of("n2", rank=None, code=-9), "code": -9, "idle": True})
    verdict = decide_by(records=records, events=(*BASE.events, event_of("finished", step=9)))
    assert (verdict.cause, verdict.action) == ("finished", "none")
    verdict = decide_by(records=records)
    assert (verdict.cause, verdict.action) == ("failed", "requeue")


def test_after_a_notice_the_end_of_a_script_counts_by_its_exit_codes() -> None:
    """A script with a library's Trainer: a final evaluation may follow its training."""
    events = (event_of("first_step", step=1), event_of("finished", step=9, at_exit=True))
    done, failed = record_of("n2", "SIGTERM"), {**record_of("n1", "SIGTERM"), "code": 1}
    good = decide_by(records=(record_of("n1", "SIGTERM"), done), events=events)
    assert (good.cause, good.action) == ("finished", "none")
    preempted = replace(RUNNING, preempted_at=900.0)
    for records in ((failed, done), (done,), ()):
        verdict = decide_by(job=preempted, records=records, events=events)
        assert (verdict.cause, verdict.action) == ("preempted", "requeue")
    verdict = decide_by(records=(failed, done), events=events)
    assert (verdict.cause, verdict.action) == ("notice", "requeue")


def test_after_a_notice_a_script_with_several_stages_is_not_through() -> None:
    """Its last one may have stopped at the notice, with 0."""
    events = (event_of("first_step", step=1), event_of("finished", step=9, within=True))
    assert decide_by(records=FINE, events=events).cause == "finished"
    noticed = (record_of("n1", "SIGTERM"), record_of("n2", "SIGTERM"))
    verdict = decide_by(records=noticed, events=events)
    assert (verdict.cause, verdict.action) == ("notice", "requeue")
    preempted = replace(RUNNING, preempted_at=900.0)
    assert decide_by(job=preempted, records=noticed, events=events).cause == "preempted"
    assert decide_by(records=failed_records(), events=events).cause == "failed"


def test_a_crash_after_the_training_is_a_crash() -> None:
    events = (event_of("first_step", step=1), event_of("checkpoint", step=9), event_of("finished"))
    assert decide_by(records=failed_records(), events=events).cause == "failed"


@pytest.mark.parametrize(
    ("job", "cause", "action"),
    [
        (replace(RUNNING, preempted_at=900.0), "preempted", "requeue"),
        (replace(RUNNING, state="COMPLETING", reason="TimeLimit"), "time limit", "requeue"),
        (replace(RUNNING, state="COMPLETING"), "cancelled", "none"),
        (replace(RUNNING, state="CANCELLED"), "cancelled", "none"),
        # Cancelled within the grace time; ended by the preemption where PreemptMode is CANCEL.
        (replace(RUNNING, state="COMPLETING", preempted_at=900.0), "cancelled", "none"),
        (replace(RUNNING, state="COMPLETING", preempted_at=1000.0), "preempted", "requeue"),
        (replace(RUNNING, state="COMPLETING", reason="NodeDown"), "node lost", "requeue"),
        (replace(RUNNING, state="NODE_FAIL"), "node lost", "requeue"),
        (replace(RUNNING, state="COMPLETING", restarts=1), "superseded", "none"),
        (replace(RUNNING, state="PENDING", restarts=1), "superseded", "none"),
        (RUNNING, "notice", "requeue"),
        (None, "notice", "requeue"),
    ],
)
def test_after_a_notice_slurm_tells_why(job: Job | None, cause: str, action: str) -> None:
    records = (record_of("n1", notice="SIGTERM"), record_of("n2", notice="SIGTERM"))
    verdict = decide_by(
        job=job, records=records, events=(event_of("stopped", step=5, reason="notice"),)
    )
    assert (verdict.cause, verdict.action) == (cause, action)


def test_a_sigterm_because_another_nodes_task_has_died_is_no_notice() -> None:
    verdict = decide_by(records=(record_of("n1", notice="SIGTERM", error="Connection reset"),))
    assert (verdict.cause, verdict.action, verdict.why) == (
        "node lost",
        "requeue",
        "no word from n2",
    )


def test_a_worker_that_dies_of_the_notice_is_preempted_not_failed() -> None:
    records = (record_of("n1", "SIGTERM", code=-15), record_of("n2", "SIGTERM", error="gloo"))
    verdict = decide_by(job=replace(RUNNING, preempted_at=900.0), records=records, events=())
    assert (verdict.cause, verdict.action) == ("preempted", "requeue")


@pytest.mark.parametrize(
    ("events", "codes", "is_maybe_done"),
    [
        ((), (0, 0), True),
        ((), (0, 1), False),
        ((event_of("worker", began=None, called=1.0),), (0, 0), False),  # it journals its end
        ((event_of("first_step", step=1),), (0, 0), False),
    ],
)
def test_a_plain_script_may_have_finished_after_the_notice(
    events: tuple[Any, ...], codes: tuple[int, int], is_maybe_done: bool
) -> None:
    names = zip(("n1", "n2"), codes, strict=True)
    records = [{**record_of(node, "SIGTERM"), "code": code} for node, code in names]
    verdict = decide_by(records=records, events=events)
    assert (verdict.cause, verdict.action) == ("notice", "requeue")
    text = "notice (the script exited with 0 after the notice, so it may have finished)"
    assert (verdict.why == text) == is_maybe_done
    assert (verdict.kind == EndKind.MAYBE_FINISHED) == is_maybe_done


def test_a_script_that_did_not_end_after_the_notice_is_named() -> None:
    records = (
        {**record_of("n1", "SIGTERM", code=-9), "killed": True},
        record_of("n2", "SIGTERM"),
    )
    verdict = decide_by(records=records)
    assert (verdict.cause, verdict.action) == ("notice", "requeue")
    assert verdict.why == "notice, at step 1 (the script did not end by itself, and was killed)"
    assert verdict.kind == EndKind.KILLED


def test_a_cancelled_run_is_cancelled_whatever_failed() -> None:
    assert decide_by(cancelled=True, records=failed_records()).action == "none"


@pytest.mark.parametrize(
    ("reason", "notice"),
    [("notice", "time limit"), ("notice", "warning signal"), ("deadline", None)],
)
def test_the_deadline_is_the_time_limit(reason: str, notice: str | None) -> None:
    events = (event_of("stopped", step=5, reason=reason), event_of("checkpoint"))
    verdict = decide_by(events=events, records=(record_of("n1", notice), record_of("n2", notice)))
    assert (verdict.cause, verdict.action) == ("time limit", "requeue")


@pytest.mark.parametrize(
    ("source", "cause"),
    [("time limit", "time limit"), ("warning signal", "time limit"), ("SIGTERM", "node lost")],
)
def test_a_step_that_is_killed_at_the_time_limit_is_no_lost_node(source: str, cause: str) -> None:
    events = (event_of("first_step", step=1), event_of("notice", source=source))
    assert decide_by(events=events, records=()).cause == cause


def test_preemption_is_without_bound_unless_one_is_given() -> None:
    before = [event_of("verdict", k, cause="preempted", action="requeue") for k in range(50)]
    job = replace(RUNNING, preempted_at=900.0)
    assert decide_by(job=job, attempt=50, events=before).action == "requeue"
    spec = JobSpec("t.py", max_requeues=50)
    verdict = decide_by(job=job, attempt=50, events=before, spec=spec)
    assert (verdict.action, verdict.exit_code) == ("give up", 1)
    assert "--max-requeues" in verdict.why


@pytest.mark.parametrize(
    ("attempts", "marks", "spec", "most", "why"),
    [
        (9, [], {}, math.inf, ""),
        (10, [], {}, math.inf, "10 attempts in a row ended without a verdict"),
        (10, [("checkpoint", 7)], {}, math.inf, ""),
        (10, [("verdict", 7)], {}, math.inf, ""),
        (10, [("notice", 7)], {}, math.inf, ""),  # preempted, and killed before the verdict
        (11, [("notice", 7)], {}, math.inf, "10 attempts in a row"),
        (4, [], {"max_failures": 0}, math.inf, "4 attempts in a row"),
        (1, [], {"max_requeues": 0}, math.inf, "started 1 times (max-requeues is 0)"),
        (1, [("verdict", 0)], {"max_requeues": 0}, math.inf, ""),  # the verdict has decided
        (3, [("verdict", 0)], {"max_requeues": 2}, math.inf, ""),  # the first has failed
        (3, [], {"max_requeues": 9}, 2, "max-requeues is 2"),
        (3, [("verdict", 0)], {}, 2, "started 3 times (max-requeues is 2)"),  # of all of them
    ],
)
def test_ends_without_a_verdict_are_bounded(
    attempts: int,
    marks: list[tuple[str, int]],
    spec: dict[str, Any],
    most: float,
    why: str,
) -> None:
    """The job may take its own first node down each time, and the shell with it."""
    events = [event_of(name, number) for name, number in marks]
    reason = too_many_silent(JobSpec("t.py", **spec), most, events, range(attempts))
    assert why in (reason or "") if why else reason is None


@pytest.mark.parametrize(
    ("progress", "spec", "why"),
    [
        (False, {}, "10 attempts in a row"),
        (False, {"max_requeues": 1}, "max-requeues is 1"),
        (True, {"max_requeues": 1}, "max-requeues is 1"),
        (True, {"max_requeues": 0}, "max-requeues is 0"),
        (True, {}, None),
    ],
)
def test_starts_by_slurm_itself_are_bounded(
    progress: bool, spec: dict[str, Any], why: str | None
) -> None:
    """The job may take a node of its own down each time, but not the first one."""
    fields = {"cause": "superseded", "action": "none", "progress": progress}
    events = [event_of("verdict", number, **fields) for number in range(10)]
    reason = too_many_silent(JobSpec("t.py", **spec), math.inf, events, range(10))
    assert why in reason if reason and why else reason is None


def test_ends_without_a_verdict_are_in_a_row_where_nothing_else_is_between() -> None:
    """Of twenty attempts each second one ended well, after a notice and with a checkpoint."""
    events = [
        event_of(name, number)
        for number in range(0, 20, 2)
        for name in ("notice", "checkpoint", "verdict")
    ]
    assert too_many_silent(JobSpec("t.py"), math.inf, events, range(20)) is None


def test_the_operators_bound_holds_for_each_run() -> None:
    before = [event_of("verdict", k, cause="preempted", action="requeue") for k in range(5)]
    job = replace(RUNNING, preempted_at=900.0)
    assert decide_by(job=job, attempt=5, events=before, most_requeues=6).action == "requeue"
    for spec in (JobSpec("t.py"), JobSpec("t.py", max_requeues=50)):
        verdict = decide_by(job=job, attempt=5, events=before, most_requeues=5, spec=spec)
        assert (verdict.action, verdict.exit_code) == ("give up", 1)
        assert "requeued 5 times, which this cluster limits (max-requeues)" in verdict.why


@pytest.mark.parametrize(
    ("failure", "stepped", "action", "code"),
    [
        ({"error": "ValueError: boom"}, False, "give up", 1),
        ({"error": "", "code": 3}, False, "give up", 3),
        ({"error": "ValueError: boom"}, True, "requeue", 0),
        ({"error": "", "code": -9}, False, "requeue", 0),
        ({"error": "[gloo] op.preamble.length <= op.nbytes", "code": -6}, False, "give up", 134),
        ({"error": "[gloo] op.preamble.length <= op.nbytes", "code": -6}, True, "requeue", 0),
        ({"error": "t.py: error: --backend: not 'gloo'", "code": 2}, False, "give up", 2),
        ({"error": "RuntimeError: Connection closed by peer"}, False, "requeue", 0),
    ],
)
def test_failures_after_the_first_step_are_retried(
    failure: dict[str, Any], stepped: bool, action: str, code: int
) -> None:
    events = (event_of("first_step", step=1),) if stepped else ()
    verdict = decide_by(records=failed_records(**failure), events=events)
    assert (verdict.cause, verdict.action, verdict.exit_code) == ("failed", action, code)


def test_the_same_error_at_the_same_step_is_not_retried() -> None:
    last = event_of(
        "verdict",
        0,
        cause="failed",
        action="requeue",
        error="ValueError: boom",
        step=7,
        progress=True,
    )
    events = [
        event_of("first_step", 1, step=5),
        event_of("failed", 1, step=7),
        event_of("checkpoint", 1),
    ]
    verdict = decide_by(
        attempt=1, records=failed_records(), events=[last, *events[:1], events[2], events[1]]
    )
    assert (verdict.action, verdict.exit_code) == ("give up", 1)
    assert "same step" in verdict.why
    later = [last, events[0], events[2], event_of("failed", 1, step=8)]
    assert decide_by(attempt=1, records=failed_records(), events=later).action == "requeue"


@pytest.mark.parametrize("attempt_has_stepped", [True, False])
def test_a_wrong_call_is_not_retried(attempt_has_stepped: bool) -> None:
    """In an attempt without a step, it may be the node that lacks something."""
    records = failed_records(error="UsageError: run.log: loss is reserved", code=2)
    events = (event_of("first_step", int(attempt_has_stepped), step=1),)
    verdict = decide_by(attempt=1, records=records, events=events)
    assert verdict.action == ("give up" if attempt_has_stepped else "requeue")
    assert "would come again" in verdict.why or not attempt_has_stepped


def test_a_hang_is_retried_like_a_lost_connection() -> None:
    error = "HangError: no step for 1800 s at step 7; stacks in /r/logs/n1/stack-rank-0.txt"
    last = event_of("verdict", cause="failed", action="requeue", error=error, step=7, progress=True)
    events = [event_of("first_step", 1, step=5), event_of("failed", 1, step=7)]
    begun, records = event_of("first_step", 0, step=1), failed_records(error=error)
    verdict = decide_by(attempt=1, records=records, events=[begun, last, *events])
    assert (verdict.cause, verdict.action) == ("failed", "requeue")
    assert error in verdict.why
    stuck = [begun, changed(last, progress=False), *events]
    assert decide_by(attempt=1, records=records, events=stuck).action == "give up"


def test_a_job_that_takes_one_node_down_after_the_other_is_bounded() -> None:
    lost = [
        event_of("verdict", k, cause="node lost", action="requeue", bad_nodes=[f"n{k}"])
        for k in range(9)
    ]
    facts = {"records": [], "lost_nodes": ["n9"]}
    assert decide_by(attempt=8, events=lost[:8], **facts).action == "requeue"
    assert (
        "10 attempts in a row have ended without" in decide_by(attempt=9, events=lost, **facts).why
    )
    preempted = event_of("verdict", 5, cause="preempted", action="requeue")
    between = [
        *lost[:5],
        preempted,
        *(changed(verdict, attempt=verdict.attempt + 1) for verdict in lost[5:]),
    ]
    begun = event_of("first_step", step=1)
    assert decide_by(attempt=10, events=[begun, *between], **facts).action == "give up"
    assert decide_by(attempt=10, events=between, **facts).action == "requeue"  # a plain script
    between[5] = changed(preempted, progress=True)
    assert decide_by(attempt=10, events=[begun, *between], **facts).action == "requeue"
    saved = [*lost[:5], changed(lost[5], progress=True), *lost[6:]]
    assert decide_by(attempt=9, events=saved, **facts).action == "requeue"


def test_a_signal_to_each_attempt_is_bounded() -> None:
    """A set-up line or a health script may send it, before a step is done."""
    noticed = {"records": (record_of("n1", notice="SIGTERM"), record_of("n2", notice="SIGTERM"))}
    before = [event_of("verdict", k, cause="notice", action="requeue") for k in range(9)]
    assert decide_by(attempt=8, events=before[:8], **noticed).action == "requeue"
    last = decide_by(attempt=9, events=before, **noticed)
    assert (last.cause, last.action) == ("notice", "give up")
    text = "10 attempts in a row have ended without a newer checkpoint"
    assert last.refusal == (text, Bound.NO_PROGRESS)
    saved = [*before[:5], changed(before[5], progress=True), *before[6:]]
    assert decide_by(attempt=9, events=saved, **noticed).action == "requeue"
    mixed = [changed(v, cause="node lost") if v.attempt % 2 else v for v in before]
    assert decide_by(attempt=9, events=mixed, **noticed).action == "give up"
    spec = JobSpec("t.py", max_failures=0)
    assert decide_by(spec=spec, attempt=3, events=before[:3], **noticed).action == "give up"
    preempted = [changed(v, cause="preempted") for v in before]
    assert decide_by(attempt=9, events=preempted, **noticed).action == "requeue"
    job = replace(RUNNING, preempted_at=900.0)
    assert decide_by(attempt=9, events=before, job=job).action == "requeue"


def test_time_limits_of_a_script_with_its_own_checkpoints_do_not_count() -> None:
    spec = JobSpec("t.py", max_requeues=50)
    job = replace(RUNNING, state="COMPLETING", reason="TimeLimit")
    before = [event_of("verdict", k, cause="time limit", action="requeue") for k in range(20)]
    assert decide_by(spec=spec, attempt=20, events=before, job=job).action == "requeue"
    lost = {"records": FINE[:1], "lost_nodes": ["n2"]}
    assert decide_by(spec=spec, attempt=20, events=before, **lost).action == "requeue"


def test_a_disk_that_does_not_answer_a_restore_is_tried_again() -> None:
    """Before its first step, in attempt after attempt: the code of a `DiskError`, 75."""
    error = "/r/checkpoints/step-5 can't be read on rank 1, and was waited for: I/O error"
    records = failed_records(error=error, code=75)
    before = [
        event_of("verdict", k, cause="failed", action="requeue", error=error, step=None)
        for k in range(3)
    ]
    for count in range(3):
        assert decide_by(attempt=count, records=records, events=before[:count]).action == "requeue"
    last = decide_by(attempt=3, records=records, events=before)
    assert (last.action, last.exit_code) == ("give up", 75)
    assert decide_by(records=failed_records(error=error, code=1), events=[]).action == "give up"


@pytest.mark.parametrize("is_restored", [False, True])
@pytest.mark.parametrize(
    ("failure", "pauses"),
    [
        ({"error": "FileNotFoundError: [Errno 2] No such file or directory: '/d/x.pt'"}, True),
        ({"error": "", "code": -9}, True),
        ({"error": "OSError: [Errno 19] No such device: '/d/x.pt'"}, False),  # a node's fault
    ],
)
def test_a_start_that_has_worked_before_is_tried_again(
    failure: dict[str, Any], pauses: bool, is_restored: bool
) -> None:
    """Data were away for 39 s at a requeue, and the run was given up at the second try."""
    events = [event_of("first_step", 0, step=1), event_of("checkpoint", 0, step=200)]
    events.append(event_of("verdict", 0, cause="preempted", progress=True, step=200))
    pauses_s = []
    for attempt in range(1, 5):
        if is_restored:
            events.append(event_of("restored", attempt, step=200))
        records = failed_records(**failure)
        verdict = decide_by(records=records, attempt=attempt, events=events)
        if verdict.action == Action.REQUEUE:
            pauses_s.append(verdict.pause_s)
        values = {"cause": "failed", "error": failure["error"], "progress": False}
        step = 200 if is_restored else None
        events.append(event_of("verdict", attempt, **values, step=step))
    assert pauses_s == ([0.0, 600.0, 1800.0] if pauses else [0.0] * 3)
    assert verdict.why.endswith("; 3 retries were made already (--max-failures)")
    # It has come back; a failure after some steps is the first one without a newer checkpoint.
    again = [*events[:5], event_of("first_step", 2, step=201)]
    verdict = decide_by(records=failed_records(error="", code=-9), attempt=2, events=again)
    assert (verdict.action, verdict.pause_s) == ("requeue", 0.0)


@pytest.mark.parametrize("first", ["preempted", "failed"])
@pytest.mark.parametrize("kind", ["silent", "unfit", "hopeless", "error", "plain"])
def test_whatever_a_start_lacks_may_come_back(kind: str, first: str) -> None:
    """A container's image was away for 8 minutes; an outage began amid the training."""
    started = replace(event_of("started", 0, host="n1"), time=0.0)
    end = event_of("verdict", 0, cause=first, progress=True, step=200)
    steps = [event_of("first_step", 0, step=1), event_of("checkpoint", 0, step=200)]
    events = [started, *([] if kind == "plain" else steps), replace(end, time=EARLY_S + 1.0)]
    records: tuple[dict[str, Any], ...] = failed_records(error="OSError: no image")
    cause = "failed"
    if kind in ("silent", "unfit", "hopeless"):
        records, cause = (), "node lost" if kind == "silent" else "bad node"
    pauses_s = []
    for attempt in range(1, 6):
        events.append(replace(event_of("started", attempt, host="n1"), time=1000.0 * attempt))
        if kind in ("unfit", "hopeless"):
            values = {"bad_nodes": [], "hopeless": kind == "hopeless", "why": "no disk"}
            events.append(event_of("preflight", attempt, ok=False, **values))
        decided = failed_records(error="OSError: no image", time=1000.0 * attempt + 1.0)
        verdict = decide_by(records=records and decided, attempt=attempt, events=events)
        if verdict.action != Action.REQUEUE:
            break
        assert verdict.cause == cause
        pauses_s.append(verdict.pause_s)
        events.append(event_of("verdict", attempt, cause=cause, progress=False, step=None))
    is_counted = first == "failed" and cause == "failed"  # as one of the failures
    expected = [600.0, 1800.0] if first == "failed" else [0.0, 600.0, 1800.0]
    assert pauses_s == expected + [1800.0] * (first == "failed" and not is_counted)


def test_an_error_at_the_step_of_the_checkpoint_is_not_retried() -> None:
    """The next attempt comes to it before it has done a step."""
    begun = [event_of("first_step", 0, step=1), event_of("checkpoint", 0, step=200)]
    values = {"cause": "failed", "error": "ValueError: boom", "progress": True, "step": 200}
    events = [*begun, event_of("verdict", 0, **values), event_of("restored", 1, step=200)]
    verdict = decide_by(records=failed_records(), attempt=1, events=events)
    assert verdict.why.endswith("the same error came at the same step in the attempt before")


def test_two_attempts_without_progress_end_it() -> None:
    first = event_of(
        "verdict", 0, cause="failed", action="requeue", error="", step=2, progress=False
    )
    events = [event_of("first_step", 0, step=1), first, event_of("first_step", 1, step=1)]
    verdict = decide_by(attempt=1, records=failed_records(error="", code=-9), events=events)
    assert "without a newer checkpoint" in verdict.why
    preempted = [changed(first, cause=Cause.PREEMPTED), events[2]]
    assert (
        decide_by(attempt=1, records=failed_records(error="", code=-9), events=preempted).action
        == "requeue"
    )


def test_progress_of_an_attempt_that_was_lost_without_a_verdict_counts() -> None:
    first = event_of(
        "verdict", 0, cause="failed", action="requeue", error="", step=2, progress=False
    )
    begun = [event_of("first_step", attempt, step=1) for attempt in range(3)]
    events = [begun[0], first, begun[1], event_of("checkpoint", 1, step=90), begun[2]]
    killed = failed_records(error="", code=-9)
    assert decide_by(attempt=2, records=killed, events=events).action == "requeue"
    assert decide_by(attempt=2, records=killed, events=[*begun, first]).action == "give up"


def test_failures_have_a_budget() -> None:
    before = [
        event_of("verdict", k, cause="failed", action="requeue", error="", step=k, progress=not k)
        for k in range(3)
    ]
    records = failed_records(error="", code=-9)
    verdict = decide_by(attempt=3, records=records, events=[event_of("first_step"), *before])
    assert (verdict.action, verdict.exit_code) == ("give up", 137)
    assert decide_by(attempt=2, records=records, events=before[:2]).action == "requeue"


def test_a_plain_script_at_the_time_limit_starts_over_as_often_as_allowed() -> None:
    job = replace(RUNNING, state="COMPLETING", reason="TimeLimit")
    spec = JobSpec("t.py", max_requeues=1)
    assert decide_by(job=job, events=(), spec=spec).action == "requeue"
    before = [event_of("verdict", 0, cause="time limit", action="requeue")]
    assert decide_by(job=job, attempt=1, events=before, spec=spec).action == "give up"
    nine = [event_of("verdict", k, cause="time limit", action="requeue") for k in range(9)]
    assert decide_by(job=job, attempt=8, events=nine[:8]).action == "requeue"
    verdict = decide_by(job=job, attempt=9, events=nine)
    assert verdict.action == "give up"
    assert verdict.why.endswith(
        "can't be seen; 10 attempts have ended so (--max-requeues allows more)"
    )
    parts = replace(JobSpec("t.py"), time="12:00:00", time_min="1:00:00")  # of the same time
    assert decide_by(job=job, attempt=9, events=nine, spec=parts).action == "requeue"
    more = replace(spec, max_requeues=20)  # the user's word
    assert decide_by(job=job, attempt=9, events=nine, spec=more).action == "requeue"


def test_a_script_that_hangs_before_its_first_step_is_given_up_at_its_second_time_limit() -> None:
    """It uses hpc_ddp.training: no step in a whole job is no progress that can't be seen."""
    job = replace(RUNNING, state="COMPLETING", reason="TimeLimit")
    begun = [event_of("worker", k, began=None, called=1.0) for k in range(2)]
    first = event_of("verdict", 0, cause="time limit", action="requeue", progress=False)
    assert decide_by(job=job, events=begun[:1]).action == "requeue"
    verdict = decide_by(job=job, attempt=1, events=[begun[0], first, begun[1]])
    assert (verdict.action, verdict.why) == (
        "give up",
        "time limit; two attempts in a row have ended without a newer checkpoint, and without a"
        " step (--max-requeues allows more)",
    )
    assert verdict.refusal
    assert verdict.refusal.bound == Bound.NO_PROGRESS
    more = JobSpec("t.py", max_requeues=20)  # the script may have a loop of its own
    events = [begun[0], first, begun[1]]
    assert decide_by(job=job, attempt=1, events=events, spec=more).action == "requeue"


def test_an_error_before_the_first_step_is_final_in_the_first_attempts_alone() -> None:
    """Later it may be the node's: a GPU that is taken, say."""
    assert decide_by(records=failed_records(), events=()).action == "give up"
    earlier = [event_of("first_step", 0, step=1), event_of("checkpoint", 0, step=117)]
    before = [*earlier, event_of("verdict", 0, cause="preempted", action="requeue")]
    assert decide_by(records=failed_records(), events=before, attempt=1).action == "requeue"


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"
        " capacity of 79.15 GiB of which 0.10 GiB is free. Process 47 has 78.90 GiB memory in use.",
        "RuntimeError: unable to open shared memory object </torch_12_3_0> in read-write mode: No"
        " space left on device (28)",
        "RuntimeError: No CUDA GPUs are available",
        "OSError: [Errno 116] Stale file handle",
        "OSError: [Errno 30] Read-only file system: '/tmp/cache/x'",
        "OSError: [Errno 28] No space left on device: '/dev/shm/x'",
        "FileNotFoundError: [Errno 2] No usable temporary directory found in ['/tmp', '/']",
        "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment",
        "Error 803: system has unsupported display driver / cuda driver combination",
        "RuntimeError: Failed to initialize NVML: Driver/library version mismatch",
        "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected",
    ],
)
def test_an_error_of_one_nodes_machine_comes_again_on_that_node_alone(error: str) -> None:
    """Also before the first step, and as in the attempt before, which had another bad node."""
    torn_down, broken = record_of("n1", code=-15), record_of("n2", error=error)
    before = [event_of("verdict", 0, cause="failed", action="requeue", error=error)]
    facts = replace(BASE, records=(torn_down, broken), events=before, attempt=1)
    assert decide(facts).action == "requeue"
    assert facts.bad_nodes == ["n2"]
    on_both = replace(facts, records=(record_of("n1", error=error), broken))
    assert decide(on_both).action == "give up"
    assert not on_both.bad_nodes


@pytest.mark.parametrize("script", ["plain", "begun", "with progress"])
def test_an_error_of_the_only_nodes_machine_is_the_scripts_once_another_node_has_it(
    script: str,
) -> None:
    """Most jobs have one node; Slurm gives a requeued one the same, since it is free."""
    error = "RuntimeError: No CUDA GPUs are available"
    steps = [event_of("first_step", 0, step=1), event_of("checkpoint", 0, step=40)]
    began = {"plain": [], "begun": [event_of("worker", 1, began=None, called=1.0)]}
    facts = replace(BASE, nodes=("n1",), records=(record_of("n1", error=error),), attempt=1)
    facts = replace(facts, events=began.get(script, steps))
    assert (decide(facts).action, facts.bad_nodes) == ("requeue", ["n1"])

    def judge_again(node: str, count: int = 1, error_before: str = error) -> tuple[str, list[str]]:
        values = {"cause": "failed", "action": "requeue", "node": node, "error": error_before}
        verdicts = [event_of("verdict", 1 + k, **values, bad_nodes=[node]) for k in range(count)]
        again = replace(facts, events=[*facts.events, *verdicts], attempt=1 + count)
        return decide(again).action, [*again.bad_nodes]

    # There is no node to go to, or the other one has another fault.
    assert judge_again("n1", 2) == ("requeue", ["n1"])
    assert judge_again("n1", 3) == ("give up", ["n1"])
    assert judge_again("n2", error_before="OSError: [Errno 5] I/O error") == ("requeue", ["n1"])
    action = "requeue" if script == "with progress" else "give up"
    assert judge_again("n2") == (action, [])


@pytest.mark.parametrize(
    ("line", "is_of_node"),
    [
        ("cp: error writing '/tmp/data.tar': No space left on device", True),
        ("tar: /local/a/b: Cannot write: No space left on device", True),
        ('rsync: [receiver] write failed on "/dev/shm/a": No space left on device (28)', True),
        ("cp: error writing '/scratch/data.tar': No space left on device", False),
        ("touch: cannot touch '/tmp/a': Read-only file system", True),
    ],
)
def test_a_full_disk_of_a_node_is_its_own_in_the_words_of_any_program(
    line: str, is_of_node: bool
) -> None:
    failure = Failure(None, "n1", 1, 1.0, "", line)
    assert failure.is_of_machine is is_of_node


def test_an_error_of_this_very_machine_is_not_tried_again_without_slurm() -> None:
    """In a dry run, as of a script for GPUs."""
    records = (record_of("local-0", error="RuntimeError: No CUDA GPUs are available"),)
    events = [event_of("started", host="h", pid=7, began="x", nodes=["local-0"])]
    facts = replace(BASE, nodes=("local-0",), records=records, events=events, job=None)
    assert (decide(facts).action, facts.bad_nodes) == ("give up", [])


def test_steps_of_a_plain_script_are_not_known() -> None:
    """Its errors may be those of a disk or a node, unless they come soon after its start."""
    error = "OSError: [Errno 5] Input/output error"
    before: list[JournalEvent] = []
    for attempt in range(4):
        started = event_of("started", attempt, host="n1")
        later = failed_records(error=error, time=EARLY_S + 1.0)
        verdict = decide_by(records=later, attempt=attempt, events=[*before, started])
        assert verdict.action == ("requeue" if attempt < 3 else "give up")
        early = decide_by(records=failed_records(), attempt=attempt, events=[*before, started])
        assert early.why.endswith("it came in the first 10 minutes, and would come again")
        before += [started, event_of("verdict", attempt, cause="failed", error=error)]
    worker = event_of("worker", 0, began=None, called=1.0)
    later = failed_records(time=EARLY_S + 1.0)
    verdict = decide_by(records=later, events=[event_of("started", host="n1"), worker])
    assert verdict.why.endswith("it came before the first step, and would come again")


def test_a_job_that_must_not_start_twice_does_not() -> None:
    events = (event_of("first_step", step=1), event_of("checkpoint", step=9))
    once, preempted = JobSpec("t.py", max_requeues=0), replace(RUNNING, preempted_at=900.0)
    for facts in ({"records": failed_records()}, {"job": preempted, "records": ()}):
        verdict = decide_by(spec=once, events=events, **facts)
        assert verdict.why.endswith("it must not be started twice (--max-requeues 0)")
        assert decide_by(events=events, **facts).action == "requeue"


@pytest.mark.parametrize("nodes", [("n1",), ("n1", "n2")])
def test_a_step_that_never_starts_is_given_up(nodes: tuple[str, ...]) -> None:
    blamed = [*nodes] if len(nodes) == 1 else []  # the only node, each time
    lost = {"cause": "node lost", "action": "requeue", "bad_nodes": blamed}
    before = [event_of("verdict", k, **lost) for k in range(3)]
    verdict = decide_by(records=(), attempt=3, events=before, nodes=nodes)
    assert (verdict.action, verdict.exit_code) == ("give up", 1)
    assert "nothing was heard" in verdict.why
    stepped = [*before, event_of("first_step", 3, step=1)]
    assert decide_by(records=(), attempt=3, events=stepped).action == "requeue"


def test_repeated_kills_without_a_checkpoint_are_given_up() -> None:
    lost = {"cause": "node lost", "action": "requeue", "step": 50, "progress": False}
    before = [event_of("verdict", k, **lost, bad_nodes=[]) for k in range(3)]
    stepped = [*before, event_of("first_step", 3, step=1)]
    verdict = decide_by(records=(), attempt=3, events=stepped)
    assert verdict.action == "give up"
    assert "without a newer checkpoint" in verdict.why
    saved = [*stepped, event_of("checkpoint", 3, step=40)]
    assert decide_by(records=(), attempt=3, events=saved).action == "requeue"
    assert decide_by(records=(), attempt=3, events=stepped, lost_nodes=("n1",)).action == "requeue"
    earlier = [event_of("verdict", k, **lost, bad_nodes=["n1"]) for k in range(3)]
    again = [*earlier, event_of("first_step", 3, step=1)]
    assert decide_by(records=(), attempt=3, events=again).action == "requeue"


def test_a_worker_killed_by_its_supervisor_is_not_the_cause() -> None:
    torn_down = {**record_of("n2", code=-9), "torn_down": "n1", "killed": True}
    verdict = decide_by(records=(record_of("n1", code=3), torn_down), events=())
    assert (verdict.action, verdict.exit_code) == ("give up", 3)


def test_a_silent_node_is_lost() -> None:
    verdict = decide_by(records=FINE[:1])
    assert (verdict.cause, verdict.action, verdict.why) == (
        "node lost",
        "requeue",
        "no word from n2",
    )


def test_a_failed_preflight_keeps_off_its_bad_nodes() -> None:
    event = event_of("preflight", ok=False, bad_nodes=["n2"], hopeless=False, why="n2: no space")
    facts = replace(BASE, records=(), events=[event], lost_nodes=["n1"])
    assert facts.bad_nodes == ["n1", "n2"]
    verdict = decide(facts)
    assert (verdict.cause, verdict.action) == ("bad node", "requeue")
    assert (verdict.why, verdict.kind) == ("preflight: n2: no space", EndKind.PREFLIGHT)
    hopeless = decide_by(records=(), events=[changed(event, bad_nodes=[], hopeless=True)])
    assert (hopeless.cause, hopeless.action, hopeless.exit_code) == ("failed", "give up", 1)
    assert hopeless.kind == EndKind.PREFLIGHT
    before = [event_of("verdict", k, cause="bad node", action="requeue") for k in range(3)]
    again = [*before, changed(event, attempt=3)]
    assert decide_by(records=(), events=again, attempt=3).action == "give up"
    assert decide_by(records=(), events=again[1:], attempt=3).action == "requeue"
    ended = changed(event, bad_nodes=[], notice="SIGTERM")
    assert decide_by(records=(), events=[ended]).cause == "notice"
    # The batch script ends the step that waits for the preflight: that is no notice of the job's.
    of_step = [record_of("n1", rank=None, code=1) | {"notice": "SIGTERM"}]
    assert decide_by(records=of_step, events=[event]).cause == "bad node"
    preempted = replace(RUNNING, preempted_at=900.0)
    assert decide_by(records=(), events=[ended], job=preempted).cause == "preempted"
    fine = event_of("preflight", ok=True, bad_nodes=[])
    assert decide_by(events=[fine, *BASE.events]).cause == "finished"


def test_an_elastic_job_finishes_without_a_lost_node() -> None:
    done = (event_of("first_step", step=1), event_of("finished", step=9))
    assert decide_elastic(record_of("n1"), events=done).cause == "finished"
    departed = record_of("n2", rank=None, error="RendezvousConnectionError: n1 is gone") | {
        "left": True
    }
    assert decide_elastic(record_of("n1"), departed, events=done).cause == "finished"
    assert (
        decide_elastic(record_of("n1"), lost_nodes=("n2",), events=done).why == "Slurm has lost n2"
    )
    assert decide_by(records=(record_of("n1"),), events=done).cause == "node lost"  # not elastic


@pytest.mark.parametrize(
    ("rank", "error"),
    [
        (
            0,
            "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]",
        ),
        (None, "RendezvousTimeoutError: "),
    ],
)
def test_an_elastic_job_that_has_lost_too_many_nodes_has_not_failed(
    rank: int | None, error: str
) -> None:
    record = record_of("n1", rank=rank, error=error)
    assert decide_elastic(record, lost_nodes=("n2",)).cause == "node lost"
    assert decide_elastic(record).cause == "failed"


def test_an_elastic_job_still_fails() -> None:
    assert decide_elastic(record_of("n1", error="ValueError: boom")).cause == "failed"
    assert (
        decide_elastic(record_of("n1"), record_of("n2", error="ValueError: boom")).cause == "failed"
    )
    verdict = decide_elastic(record_of("n2", rank=None, error="no store") | {"left": True})
    assert (verdict.cause, verdict.why) == ("node lost", "no word from n1, n2")


@pytest.mark.parametrize("error", ["HangError: no step for 15 s", "Connection closed by peer [n2]"])
def test_a_failure_right_after_a_suspension_is_not_counted(error: str) -> None:
    records = [{**record, "stood_still": True} for record in failed_records(error=error)]
    event = event_of("verdict", cause="stood still", action="requeue", progress=True, step=5)
    before = tuple(changed(event, attempt=number) for number in range(20))
    events = (*before, event_of("first_step", 20, step=1), event_of("checkpoint", 20, step=9))
    verdict = decide_by(records=records, attempt=20, events=events)
    assert (verdict.cause, verdict.action) == (Cause.STOOD_STILL, Action.REQUEUE)
    assert verdict.why.startswith(f"rank 0 on n1: {error} (right after it stood still")
    once = decide_by(spec=JobSpec("t.py", nodes=2, max_failures=0), records=records, attempt=20,
                     events=events)  # fmt: skip
    assert (once.cause, once.action) == (Cause.STOOD_STILL, Action.REQUEUE)
    # Nor are those before it, where a failure follows.
    later = decide_by(records=failed_records(), attempt=20, events=events)
    assert (later.cause, later.action) == (Cause.FAILED, Action.REQUEUE)
    # Without a newer checkpoint it ends all the same.
    unsaved = [changed(event, attempt=number, progress=False) for number in range(20)]
    events = (*unsaved, event_of("first_step", 20, step=1))
    verdict = decide_by(records=records, attempt=20, events=events)
    assert verdict.action == Action.GIVE_UP
    assert "21 attempts in a row have ended without a newer checkpoint" in verdict.why


@pytest.mark.parametrize(
    "failure",
    [
        {"error": "ModuleNotFoundError: No module named 'x'"},
        {"error": "", "code": -9},  # for want of memory, say, which had stopped the node
    ],
)
def test_an_error_of_the_scripts_after_a_stall_is_counted(failure: dict[str, Any]) -> None:
    records = [{**record, "stood_still": True} for record in failed_records(**failure)]
    verdict = decide_by(records=records)
    assert verdict.cause == Cause.FAILED
