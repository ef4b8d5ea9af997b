"""The end of a run in words: each verdict, a stop, a script of others."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.live_jobs import Queue
from hpc_ddp.node.outcome.attempt_facts import AttemptFacts as VerdictFacts
from hpc_ddp.node.outcome.verdict import decide
from hpc_ddp.report.logs.files import LogQuery
from hpc_ddp.report.logs.view import follow_logs, show_logs
from hpc_ddp.report.status.run_status import status_of
from tests.raw_events import typed
from unit.report.written_runs import Written, record


@pytest.mark.parametrize(
    ("cause", "kind", "words"),
    [
        ("preempted", "preempted", "preempted at step 20: a job of higher priority"),
        ("time limit", "time limit", "time limit at step 20"),
        ("notice", "stopped", "asked to stop at step 20"),
        ("node lost", "node lost", "lost a node at step 20 (no word from n2)"),
    ],
)
def test_an_attempt_that_can_continue_is_explained(
    written: Written, cause: str, kind: str, words: str
) -> None:
    why = "no word from n2" if cause == "node lost" else cause
    written.attempt(0, steps=20, saved=12).verdict(cause, "requeue", why=why)
    explanation = written.explain()
    assert explanation.kind == kind
    assert words in explanation.text
    assert "but was not requeued" in explanation.text
    assert (
        "The newest checkpoint is of step 12: 8 steps (11 s) are to be done again."
        in explanation.text
    )
    assert explanation.hint == f"hpc-ddp submit --run {written.run.path}"


def test_a_requeue_is_not_denied_while_slurm_is_silent(written: Written) -> None:
    written.attempt(0, steps=20, saved=12).verdict("preempted", "requeue")
    silent = written.explain(refusal="scontrol got no answer: x")
    assert "It was to be requeued; of job None: scontrol got no answer: x." in silent.text
    assert silent.hint == "the same command again, once Slurm answers"
    forgotten = written.explain(refusal="scontrol refused: Invalid job id", is_forgotten=True)
    assert "but was not requeued" in forgotten.text


def test_a_preflight_that_fails_on_all_nodes_is_a_bad_environment(written: Written) -> None:
    why = "preflight: import torch: ModuleNotFoundError: No module named 'torch'"
    written.attempt(0).verdict("failed", "give up", why=why, kind="preflight")
    explanation = written.explain()
    assert (explanation.kind, explanation.hint[:8]) == ("bad environment", "--python")
    assert "its preflight failed: import torch" in explanation.text
    assert "given up" not in explanation.text
    why = "preflight: 2 GPUs in place of 4 (by nvidia-smi and device files) (the same on all nodes)"
    written.attempt(1).verdict("failed", "give up", 1, why=why, kind="preflight")
    assert written.explain().kind == "bad node"


def test_a_failed_preflight_names_the_node(written: Written) -> None:
    why = "preflight: n2 has 3 of 4 GPUs"
    written.attempt(0).verdict("bad node", "requeue", why=why, bad_nodes=["n2"])
    explanation = written.explain(record("PENDING", "BeginTime"))
    assert "its preflight failed: n2 has 3 of 4 GPUs." in explanation.text
    assert written.attempt(1).verdict("bad node", "give up", 1, why=f"{why}; x").explain().kind == (
        "bad node"
    )


def test_a_polite_stop_loses_nothing(written: Written) -> None:
    written.attempt(0, steps=20, saved=20).event("stopped", step=20, reason="notice")
    explanation = written.verdict("preempted", "requeue").explain()
    assert "Nothing is lost: step 20 is saved." in explanation.text
    assert (explanation.lost_steps, explanation.lost_s) == (0, 0.0)


def test_a_script_of_others_starts_over(written: Written) -> None:
    explanation = written.attempt(0).verdict("preempted", "requeue").explain()
    assert "it starts over, or goes on from its own checkpoints" in explanation.text


def test_a_spent_budget_is_explained(written: Written) -> None:
    written.attempt(0, steps=20, saved=20).verdict("preempted", "requeue")
    why = "3 of 2 GPU hours are spent (--budget-gpu-hours)"
    written.event("verdict", cause="budget", action="give up", why=why)
    explanation = written.explain()
    assert explanation.kind == "budget spent"
    assert f"was not started again: {why}." in explanation.text
    assert explanation.hint.endswith("--budget-gpu-hours HOURS")


def test_a_cancelled_run_is_explained(written: Written, tmp_path: Path) -> None:
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
    explanation = requeued.explain(record("CANCELLED"))
    assert explanation.kind == "cancelled"
    assert "Its last attempt was preempted at step 20" in explanation.text


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
def test_slurms_state_counts_without_a_verdict(written: Written, state: str, kind: str) -> None:
    explanation = written.attempt(0, steps=20).explain(record(state))
    assert explanation.kind == kind
    assert "at step 20" in explanation.text
    assert "Nothing had been saved: 20 steps" in explanation.text


def test_a_lost_run_shows_its_last_line(written: Written) -> None:
    written.event("queued", job_id="7").attempt(0).said("hello\nlast words\n")
    explanation = written.explain()
    assert explanation.kind == "lost"
    assert 'The last line of its output: "last words"' in explanation.text


def test_an_output_folder_unknown_to_the_node_is_named(written: Written) -> None:
    explanation = written.event("queued", job_id="7").explain(record("FAILED", "NonZero", "0:53"))
    assert (explanation.kind, "--runs-dir" in explanation.hint) == ("bad environment", True)


def test_a_script_without_run_finish_is_unfinished(written: Written) -> None:
    written.attempt(0, steps=20, saved=12).verdict("failed", "give up", kind="early exit")
    explanation = written.explain()
    assert (explanation.kind, explanation.lost_steps) == ("unfinished", 8)
    assert "run.finish()" in explanation.hint


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
    assert verdict.refusal is not None
    text, bound = verdict.refusal
    written.attempt(1, steps=20).verdict(
        verdict.cause, verdict.action, 1, why=verdict.why, bound=bound, why_not=text
    )
    explanation = written.explain()
    assert explanation.kind == "no progress"
    assert "The last one ran into its time limit" in explanation.text
    assert "save more often" in explanation.hint


MANY = "10 attempts in a row have ended without a newer checkpoint"


@pytest.mark.parametrize(
    ("cause", "kind", "end", "bound", "words", "hint"),
    [
        (
            "node lost",
            None,
            "no word from n2",
            "3 attempts in a row ended so, without a newer checkpoint",
            "3 attempts in a row have ended without a newer checkpoint."
            " The last one lost a node at step 20 (no word from n2).",
            "hpc-ddp logs",
        ),
        (
            "notice",
            None,
            "notice, at step 20",
            MANY,
            "10 attempts in a row have ended without a newer checkpoint."
            " The last one was asked to stop at step 20, and did.",
            "save more often",
        ),
        (
            "notice",
            "killed",
            "notice (the script did not end by itself, and was killed)",
            MANY,
            "10 attempts in a row have ended without a newer checkpoint."
            " The last one was asked to stop at step 20, did not, and was killed.",
            "save more often",
        ),
        (
            "bad node",
            "preflight",
            "preflight: n2 is slow",
            MANY,
            "10 attempts in a row have ended without a newer checkpoint."
            " The last one began no training, since its preflight failed: n2 is slow.",
            "hpc-ddp submit",
        ),
    ],
)
def test_no_progress_names_the_cause_of_the_last_attempt(
    written: Written, cause: str, kind: str | None, end: str, bound: str, words: str, hint: str
) -> None:
    fields: dict[str, Any] = {"kind": kind, "bound": "no progress", "why_not": bound}
    written.attempt(0, steps=20).verdict(cause, "give up", why=f"{end}; {bound}", **fields)
    explanation = written.explain()
    assert explanation.kind == "no progress"
    assert f"was given up: {words}" in explanation.text
    assert explanation.text.count("given up") == 1
    assert explanation.hint.startswith(hint)
    assert "--time" not in explanation.hint


def test_a_run_continued_with_fixed_code_is_waiting(written: Written) -> None:
    written.attempt(0, steps=20).failure("ValueError: boom")
    written.event("submitted", first_attempt=1).event("queued", job_id="8")
    explanation = written.explain(record("PENDING", "Priority"))
    assert explanation.kind == "waiting"
    assert (
        "Its last attempt failed at step 20: rank 3 on n2 raised ValueError: boom"
        in explanation.text
    )


def _standalone(root: Path, host: str = "") -> Written:
    """Return what a plain `python t.py` leaves, on a host ('': here); it did 20 steps."""
    written = Written(root, backend="local")
    written.run.attempt(0).path.mkdir(parents=True)
    written.event("started", backend="local", host=host or socket.gethostname(), pid=1, began="1")
    written.event("training", step=0).event("first_step", step=1)
    return written.event("metrics", step=20, total_steps=90, loss=0.5)


def test_a_stopped_standalone_run_is_explained(tmp_path: Path) -> None:
    written = _standalone(tmp_path).event("stopped", step=20, reason="notice", source="SIGINT")
    status = status_of(written.run, Queue({}))
    assert status.state == "stopped"
    assert status.why == "notice (SIGINT), at step 20; can go on with the same command"
    explanation = written.explain()
    assert (explanation.kind, explanation.hint, explanation.lost_steps) == (
        "stopped",
        "the same command again",
        0,
    )
    assert "was asked to stop at step 20 (SIGINT), and did. Nothing is lost" in explanation.text
    written.event("started", 1, backend="local", host="h", pid=1, began="1")
    assert "Before that it was asked to stop once." in written.explain().text


def test_a_failed_standalone_run_is_explained(tmp_path: Path) -> None:
    written = _standalone(tmp_path)
    written.event("failed", rank=0, node="h", step=20, error="ValueError: boom", traceback="")
    status = status_of(written.run, Queue({}))
    assert (status.state, status.why) == ("failed", "rank 0: ValueError: boom")
    explanation = written.explain()
    assert explanation.kind == "python error"
    assert "failed at step 20: rank 0 on h raised ValueError: boom" in explanation.text
    assert explanation.hint == "fix it, then the same command again"


def test_a_standalone_run_on_another_machine_is_not_called_lost(tmp_path: Path) -> None:
    status = status_of(_standalone(tmp_path, "elsewhere").run, Queue({}))
    assert status.state == "unknown"
    assert status.why == "process 1 on elsewhere, which can't be seen from here"


def test_a_lost_standalone_run_has_no_logs(tmp_path: Path) -> None:
    written = _standalone(tmp_path)
    assert status_of(written.run, Queue({})).state == "lost"
    assert written.explain().kind == "lost"
    for explanation in (written.explain(), written.explain(live=True)):
        assert "hpc-ddp logs" not in explanation.hint
    with pytest.raises(UsageError, match="by hand: its output went to its terminal") as caught:
        show_logs(written.run, LogQuery())
    assert str(caught.value.hint).startswith("hpc-ddp explain ")
    with pytest.raises(UsageError, match="by hand"):
        follow_logs(written.run, LogQuery(), lambda: True)


def test_a_script_that_was_killed_at_its_time_limit_is_named(written: Written) -> None:
    why = "time limit (the script did not end by itself, and was killed)"
    written.attempt(0).verdict("time limit", "requeue", why=why, kind="killed")
    explanation = written.explain()
    assert "ran into its time limit. It did not end by itself, and was killed." in explanation.text
