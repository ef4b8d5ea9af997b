"""The end of a run in words: each verdict, a stop, a script of others."""

from __future__ import annotations

from pathlib import Path

import pytest
from written_runs import (
    Written,
    record,
)

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.spec import JobSpec
from hpc_ddp.liveness import Queue
from hpc_ddp.node.outcome.verdict import AttemptFacts as VerdictFacts
from hpc_ddp.node.outcome.verdict import decide
from hpc_ddp.report.logs.files import LogQuery
from hpc_ddp.report.logs.view import follow, show
from hpc_ddp.report.status.run_status import status_of
from tests.raw_events import typed


@pytest.mark.parametrize(
    ("cause", "kind", "words"),
    [
        ("preempted", "preempted", "preempted at step 20: a job of higher priority"),
        ("time limit", "time limit", "time limit at step 20"),
        ("notice", "stopped", "asked to stop at step 20"),
        ("node lost", "node lost", "lost a node at step 20 (no word from n2)"),
    ],
)
def test_what_can_go_on(written: Written, cause: str, kind: str, words: str) -> None:
    why = "no word from n2" if cause == "node lost" else cause
    written.attempt(0, steps=20, saved=12).verdict(cause, "requeue", why=why)
    found = written.explain()
    assert found.kind == kind
    assert words in found.text
    assert "but was not requeued" in found.text
    assert "The newest checkpoint is of step 12: 8 steps (11 s) are to be done again." in found.text
    assert found.hint == f"hpc-ddp submit --run {written.run.path}"


def test_a_preflight_that_would_fail_on_all_nodes(written: Written) -> None:
    why = "preflight: import torch: ModuleNotFoundError: No module named 'torch'"
    found = written.attempt(0).verdict("failed", "give up", why=why).explain()
    assert (found.kind, found.hint[:8]) == ("bad environment", "--python")
    assert "its preflight failed: import torch" in found.text
    assert "given up" not in found.text
    why = "preflight: 2 GPUs in place of 4 (by nvidia-smi and device files) (the same on all nodes)"
    assert written.attempt(1).verdict("failed", "give up", 1, why=why).explain().kind == "bad node"


def test_a_node_that_failed_its_preflight(written: Written) -> None:
    why = "preflight: n2 has 3 of 4 GPUs"
    written.attempt(0).verdict("bad node", "requeue", why=why, bad_nodes=["n2"])
    found = written.explain(record("PENDING", "BeginTime"))
    assert "its preflight failed: n2 has 3 of 4 GPUs." in found.text
    assert written.attempt(1).verdict("bad node", "give up", 1, why=f"{why}; x").explain().kind == (
        "bad node"
    )


def test_a_polite_stop_loses_nothing(written: Written) -> None:
    written.attempt(0, steps=20, saved=20).event("stopped", step=20, reason="notice")
    found = written.verdict("preempted", "requeue").explain()
    assert "Nothing is lost: step 20 is saved." in found.text
    assert (found.lost_steps, found.lost_s) == (0, 0.0)


def test_a_script_of_others_starts_over(written: Written) -> None:
    found = written.attempt(0).verdict("preempted", "requeue").explain()
    assert "it starts over, or from its own snapshot" in found.text


def test_a_budget_that_is_spent(written: Written) -> None:
    written.attempt(0, steps=20, saved=20).verdict("preempted", "requeue")
    why = "3 of 2 GPU hours are spent (--budget-gpu-hours)"
    written.event("verdict", cause="budget", action="give up", why=why)
    found = written.explain()
    assert found.kind == "budget spent"
    assert f"was not started again: {why}." in found.text
    assert found.hint.endswith("--budget-gpu-hours HOURS")


def test_cancelled(written: Written, tmp_path: Path) -> None:
    written.attempt(0, steps=20, saved=12).verdict("cancelled", "none")
    assert written.explain().kind == "cancelled"
    waiting = Written(tmp_path / "b").event("submitted").event("queued", job_id="7")
    waiting.run.cancelled.touch()
    assert "cancelled before it began" in waiting.explain(record("CANCELLED")).text
    cut = Written(tmp_path / "d").event("submitted").attempt(0, steps=20)
    cut.run.cancelled.touch()
    assert "was cancelled at step 20. Nothing had been" in cut.explain(record("COMPLETING")).text
    requeued = Written(tmp_path / "c").event("submitted").attempt(0, steps=20)
    requeued.verdict("preempted", "requeue")
    found = requeued.explain(record("CANCELLED"))
    assert found.kind == "cancelled"
    assert "Its last attempt was preempted at step 20" in found.text


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("TIMEOUT", "time limit"),
        ("NODE_FAIL", "node lost"),
        ("CANCELLED", "cancelled"),
        ("PREEMPTED", "preempted"),
        ("OUT_OF_MEMORY", "host out of memory"),
        ("FAILED", "lost"),
    ],
)
def test_without_a_verdict_slurms_word_counts(written: Written, state: str, kind: str) -> None:
    found = written.attempt(0, steps=20).explain(record(state))
    assert found.kind == kind
    assert "at step 20" in found.text
    assert "Nothing had been saved: 20 steps" in found.text


def test_gone_without_a_word(written: Written) -> None:
    written.event("queued", job_id="7").attempt(0).said("hello\nlast words\n")
    found = written.explain()
    assert found.kind == "lost"
    assert 'The last line of its output: "last words"' in found.text


def test_an_output_folder_that_the_node_does_not_see(written: Written) -> None:
    found = written.event("queued", job_id="7").explain(record("FAILED", "NonZero", "0:53"))
    assert (found.kind, "--runs-dir" in found.hint) == ("bad environment", True)


def test_no_run_finish(written: Written) -> None:
    written.attempt(0, steps=20, saved=12).verdict("failed", "give up", why="the script ended")
    found = written.explain()
    assert (found.kind, found.lost_steps) == ("unfinished", 8)
    assert "run.finish()" in found.hint


def test_no_progress_as_the_verdict_words_it(written: Written) -> None:
    events = [
        typed("verdict", cause="time limit", progress=False),
        typed("first_step", attempt=1, step=1),
        typed("stopped", attempt=1, step=1, reason="deadline"),
    ]
    verdict = decide(
        VerdictFacts(JobSpec("t.py"), 1, False, False, None, 0, ["n1"], [], events=events)
    )
    written.attempt(0, steps=20).verdict("time limit", "requeue")
    written.attempt(1, steps=20).verdict(verdict.cause, verdict.action, 1, why=verdict.why)
    found = written.explain()
    assert found.kind == "no progress"
    assert "The last one ran into its time limit" in found.text
    assert "save more often" in found.hint


@pytest.mark.parametrize(
    ("cause", "why", "words", "hint"),
    [
        (
            "node lost",
            "no word from n2; 3 attempts in a row ended so, without a newer checkpoint",
            "3 attempts in a row have ended without a newer checkpoint."
            " The last one lost a node at step 20 (no word from n2).",
            "hpc-ddp logs",
        ),
        (
            "notice",
            "notice, at step 20; 10 attempts in a row have ended without a newer checkpoint",
            "10 attempts in a row have ended without a newer checkpoint."
            " The last one was asked to stop at step 20, and did.",
            "save more often",
        ),
        (
            "bad node",
            "preflight: n2 is slow; 10 attempts in a row have ended without a newer checkpoint",
            "10 attempts in a row have ended without a newer checkpoint."
            " The last one began no training, since its preflight failed: n2 is slow.",
            "hpc-ddp submit",
        ),
    ],
)
def test_no_progress_names_the_cause_of_the_last_attempt(
    written: Written, cause: str, why: str, words: str, hint: str
) -> None:
    explanation = written.attempt(0, steps=20).verdict(cause, "give up", why=why).explain()
    assert explanation.kind == "no progress"
    assert f"was given up: {words}" in explanation.text
    assert explanation.text.count("given up") == 1
    assert explanation.hint.startswith(hint)
    assert "--time" not in explanation.hint


def test_continued_with_mended_code_it_is_not_failed_any_more(written: Written) -> None:
    written.attempt(0, steps=20).failure("ValueError: boom")
    written.event("submitted", first_attempt=1).event("queued", job_id="8")
    found = written.explain(record("PENDING", "Priority"))
    assert found.kind == "waiting"
    assert "Its last attempt failed at step 20: rank 3 on n2 raised ValueError: boom" in found.text


def _by_hand(root: Path) -> Written:
    """Return what a plain `python t.py` leaves, which nobody judges; it did 20 steps."""
    written = Written(root, backend="local")
    written.run.attempt(0).path.mkdir(parents=True)
    written.event("started", backend="local", host="h", pid=1, began="1")
    written.event("training", step=0).event("first_step", step=1)
    return written.event("metrics", step=20, total_steps=90, loss=0.5)


def test_stopped_by_hand(tmp_path: Path) -> None:
    written = _by_hand(tmp_path).event("stopped", step=20, reason="notice", source="SIGINT")
    status = status_of(written.run, Queue({}))
    assert status.state == "stopped"
    assert status.why == "notice (SIGINT), at step 20; can go on with the same command"
    found = written.explain()
    assert (found.kind, found.hint, found.lost_steps) == ("stopped", "the same command again", 0)
    assert "was asked to stop at step 20 (SIGINT), and did. Nothing is lost" in found.text
    written.event("started", 1, backend="local", host="h", pid=1, began="1")
    assert "Before that it was asked to stop once." in written.explain().text


def test_failed_by_hand(tmp_path: Path) -> None:
    written = _by_hand(tmp_path)
    written.event("failed", rank=0, node="h", step=20, error="ValueError: boom", traceback="")
    status = status_of(written.run, Queue({}))
    assert (status.state, status.why) == ("failed", "rank 0: ValueError: boom")
    found = written.explain()
    assert found.kind == "python error"
    assert "failed at step 20: rank 0 on h raised ValueError: boom" in found.text
    assert found.hint == "fix it, then the same command again"


def test_gone_by_hand_nobody_is_sent_to_its_logs(tmp_path: Path) -> None:
    written = _by_hand(tmp_path)
    assert status_of(written.run, Queue({})).state == "lost"
    assert written.explain().kind == "lost"
    for found in (written.explain(), written.explain(live=True)):
        assert "hpc-ddp logs" not in found.hint
    with pytest.raises(UsageError, match="by hand: its output went to its terminal") as caught:
        show(written.run, LogQuery())
    assert str(caught.value.hint).startswith("hpc-ddp explain ")
    with pytest.raises(UsageError, match="by hand"):
        follow(written.run, LogQuery(), lambda: True)
