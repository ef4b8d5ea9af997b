"""Set-up lines are told whether their run has started before, also by a disk in trouble."""

from __future__ import annotations

import errno

import pytest

from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome.requeue import kept_variables
from unit.fakes import Clock, Slurm
from unit.node.batch.fakes import answer_scontrol, call_batch, show_job


@pytest.mark.parametrize("is_away", [True, False])
def test_set_up_lines_have_the_variables_of_the_run_or_do_not_run(
    controller: Slurm,
    run: RunFolder,
    printed: list[str],
    patience: Clock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_away: bool,
) -> None:
    """Without SLURM_RESTART_COUNT some lines delete what an earlier start has saved."""
    run.claim_attempt({"job_id": "7", "nodes": ["n1"], "restarts": 0}, lambda info: False)
    if is_away:
        reads = iter([OSError(errno.ESTALE, "Stale file handle")] * 200)
        monkeypatch.setattr(kept_variables, "count_starts", lambda run: _raise(next(reads)))
    answer_scontrol(controller, show_job(restarts=1))
    assert call_batch(monkeypatch, run, "first-job", SLURM_RESTART_COUNT="1") == 0
    out = capsys.readouterr().out
    assert ("export SLURM_RESTART_COUNT=1" in out) is not is_away
    assert ("exit 0" in out) is is_away
    assert (["requeue", "7"] in controller.calls("scontrol")) is is_away
    assert (sum(patience.slept) > 50.0) is is_away


def test_a_disk_that_goes_between_two_looks_makes_no_first_start(
    controller: Slurm,
    run: RunFolder,
    patience: Clock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Set-up lines would delete what the run has saved."""
    run.claim_attempt({"job_id": "7", "nodes": ["n1"], "restarts": 0}, lambda info: False)
    text, count, sleep = run.job_json.read_text(), kept_variables.count_starts, patience.sleep

    def lose_disk(run: RunFolder) -> int:
        monkeypatch.setattr(kept_variables, "count_starts", count)
        run.job_json.unlink()
        return 0  # as of a folder that is missing

    def wait(seconds: float) -> None:
        sleep(seconds)
        run.job_json.write_text(text)

    monkeypatch.setattr(kept_variables, "count_starts", lose_disk)
    monkeypatch.setattr(patience, "sleep", wait)
    assert call_batch(monkeypatch, run, "first-job", SLURM_RESTART_COUNT="1") == 0
    out = capsys.readouterr().out
    assert "export SLURM_RESTART_COUNT=1" in out
    assert "HPC_DDP_FIRST_START" not in out


def _raise(error: OSError) -> None:
    raise error
