"""A start before the end of its pause, which Slurm has not taken."""

from __future__ import annotations

import pytest

from hpc_ddp import slurm
from hpc_ddp.core.file_io import read_json, write_json
from hpc_ddp.core.run_folder import RunFolder
from unit.fakes import Clock, Slurm
from unit.node.batch.fakes import call_batch, show_job


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("cause", ["begin", "first-job", "failed"])
def test_a_start_before_the_end_of_its_pause_is_put_off_once(
    controller: Slurm,
    run: RunFolder,
    clock: Clock,
    printed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cause: str,
    is_refused: bool,
) -> None:
    """Slurm has refused to put the job off."""
    run.claim_attempt({"job_id": "7", "nodes": ["n1"], "restarts": 0}, lambda info: False)
    write_json(run.pauses, {"7": clock.now + 400})
    write_json(run.vain_jobs, {"7": 2})
    shown = controller.folder / "shown"
    shown.write_text(show_job(restarts=2))
    refusal = "[ $1 = update ] && { echo denied >&2; exit 1; };" * is_refused
    nodes = "[ $2 = hostnames ] && printf 'n1\\nn2\\n' && exit"
    slurm.show_job("7")  # takes the first answer, that of `controller`
    controller.answer_by("scontrol", f"{refusal} {nodes}; cat {shown}")
    words = [cause, "1"] if cause == "failed" else [cause]
    assert call_batch(monkeypatch, run, *words, SLURM_RESTART_COUNT="2") == 0
    assert ("exit 0" in capsys.readouterr().out) is (cause != "failed")
    changes = [words for words in controller.calls("scontrol") if words[0] != "show"]
    assert changes == [["requeue", "7"], ["update", "JobId=7", "StartTime=now+400"]]
    assert read_json(run.vain_jobs) == {"7": 2}  # it does not count
    assert not run.pauses.exists()
    shown.write_text(show_job(restarts=3))
    assert call_batch(monkeypatch, run, "begin", SLURM_RESTART_COUNT="3") == 0
    assert run.attempt(1).path.is_dir()
