"""A requeue that no lost node was the reason of."""

from __future__ import annotations

from unit.report.written_runs import Written, record


def test_a_requeue_by_a_person_is_no_lost_node(written: Written) -> None:
    written.attempt(0, steps=20).verdict("superseded", "none", bad_nodes=[])
    text = written.explain(record("PENDING", "BeginTime")).text
    assert "Its last attempt was requeued at step 20, by Slurm or with scontrol requeue." in text
    assert "lost a node" not in text


def test_a_run_that_was_requeued_behind_its_end_is_finished(written: Written) -> None:
    """Its node was cut off, and Slurm started the job again, which found nothing left to do."""
    written.attempt(0, steps=20).event("finished", step=20)
    written.verdict("superseded", "none", bad_nodes=[])
    assert written.explain().kind == "finished"


def test_a_requeue_for_a_lost_node_names_it_so(written: Written) -> None:
    written.attempt(0, steps=20).verdict("superseded", "none", bad_nodes=["n2"])
    assert "lost a node" in written.explain(record("PENDING", "BeginTime")).text
