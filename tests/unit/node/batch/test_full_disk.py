"""A disk without room at the start of an attempt costs the parcel of `--stage`, or a requeue."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from hpc_ddp.core import file_io, run_folder
from hpc_ddp.core.errors import CAN_GO_ON
from hpc_ddp.core.file_io import write_json
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node import batch
from unit.fakes import Clock, Slurm, stop_clock
from unit.node.batch.fakes import answer_scontrol, job_environ, show_job, write_spec


def _fill_disk(monkeypatch: pytest.MonkeyPatch, run: RunFolder, error: int = errno.EDQUOT) -> None:
    """Let the disk have no room for an attempt, unless the parcel is removed."""
    make_attempt = RunFolder._make_attempt
    had_parcel = run.parcel.exists()

    def refuse(run: RunFolder, attempt: AttemptFolder, info: dict[str, Any]) -> bool:
        if had_parcel and not run.parcel.exists():
            return make_attempt(run, attempt, info)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(RunFolder, "_make_attempt", refuse)


def _begin(monkeypatch: pytest.MonkeyPatch, run: RunFolder, **values: str) -> int:
    for name, value in job_environ(run, **values).items():
        monkeypatch.setenv(name, value)
    return batch.main(["begin"])


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all that waits for the disk."""
    return stop_clock(monkeypatch, file_io)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_the_parcel_goes_before_an_attempt_is_refused(
    controller: Slurm,
    run: RunFolder,
    printed: list[str],
    patience: Clock,
    monkeypatch: pytest.MonkeyPatch,
    error: int,
) -> None:
    monkeypatch.setattr(run_folder, "say", printed.append)
    run.parcel.mkdir()
    (run.parcel / "environment-1").write_bytes(bytes(100))
    _fill_disk(monkeypatch, run, error)
    assert _begin(monkeypatch, run) == 0
    assert run.attempt(0).path.is_dir()
    assert not run.parcel.exists()
    assert "no room for an attempt (to allow it again: rm" in run.unstaged.read_text()
    assert printed == [f"no room for an attempt: {run.parcel} of --stage is removed"]
    assert patience.slept == []


REFUSED = "the run's folder can't be used: [Errno 122] Disk quota exceeded"


@pytest.mark.parametrize(
    ("restarts", "attempts", "spec", "is_requeued"),
    [
        (0, 0, {}, True),
        (2, 0, {}, True),
        (3, 0, {}, False),
        (3, 2, {}, True),  # two of the starts were none in vain
        (9, 8, {}, True),
        (1, 1, {"max_requeues": 1}, False),
        (0, 0, {"max_failures": 0}, False),
        (0, 0, {"continue_by": "resubmit"}, True),
        (0, 0, {"time": "60", "time_min": "20"}, True),
    ],
)
def test_a_disk_without_room_is_waited_for_in_the_queue(
    controller: Slurm,
    run: RunFolder,
    printed: list[str],
    patience: Clock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    restarts: int,
    attempts: int,
    spec: dict[str, Any],
    is_requeued: bool,
) -> None:
    write_spec(run, **spec)
    for restart in range(attempts):
        info = {"job_id": "7", "nodes": ["n1"], "restarts": restart}
        run.claim_attempt(info, lambda info: False)
    _fill_disk(monkeypatch, run)
    answer_scontrol(controller, show_job(restarts=restarts))
    code = _begin(monkeypatch, run, SLURM_RESTART_COUNT=str(restarts))
    changes = [words for words in controller.calls("scontrol") if words[0] != "show"]
    limit = [["update", "JobId=7", "TimeLimit=60"]] if "time_min" in spec else []
    assert changes == ([["requeue", "7"], *limit] if is_requeued else [])
    assert code == (0 if is_requeued else CAN_GO_ON)
    assert ("exit 0" in capsys.readouterr().out) is is_requeued
    vain_starts = restarts + 1 - attempts
    bound = f"the job was requeued {restarts} times, {vain_starts} starts came to nothing"
    refusal = [bound, f"once it can: hpc-ddp submit --run {run.path}"]
    assert printed == [REFUSED, *(["it is started again"] if is_requeued else refusal)]


def test_a_refused_requeue_is_allowed_first(
    controller: Slurm, run: RunFolder, printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a chain's job, or on a site with JobRequeue=0."""
    shown = controller.folder / "shown-job"
    shown.write_text(show_job())
    refuse = f"[ $1 = requeue ] && ! [ -e {run.path}/allowed ] && echo disabled >&2 && exit 1"
    controller.answer_by(
        "scontrol", f"{refuse}; [ $1 = update ] && touch {run.path}/allowed; cat {shown}"
    )
    for name, value in job_environ(run).items():
        monkeypatch.setenv(name, value)
    assert batch.main(["cut-off"]) == 0
    changes = [words for words in controller.calls("scontrol") if words[0] != "show"]
    assert changes == [["requeue", "7"], ["update", "JobId=7", "Requeue=1"], ["requeue", "7"]]
    assert printed[:2] == ["scontrol refused: disabled", "it is started again"]


@pytest.mark.parametrize(
    ("record", "spec", "is_requeued"),
    [
        (show_job("COMPLETING").replace("Reason=None", "Reason=TimeLimit"), {}, True),
        (show_job("COMPLETING"), {}, False),  # scancel
        (show_job("COMPLETING", restarts=1), {}, False),  # requeued by Slurm
        (
            show_job("COMPLETING").replace("Reason=None", "Reason=TimeLimit"),
            {"max_failures": 0},
            False,
        ),
        (show_job("RUNNING"), {"continue_by": "resubmit"}, True),  # its next job was refused
    ],
)
def test_set_up_lines_that_are_cut_off_are_run_again(
    controller: Slurm,
    run: RunFolder,
    printed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    record: str,
    spec: dict[str, Any],
    is_requeued: bool,
) -> None:
    write_spec(run, **spec)
    answer_scontrol(controller, record)
    for name, value in job_environ(run).items():
        monkeypatch.setenv(name, value)
    write_json(run.early_links, {"7": "8"})
    assert batch.main(["cut-off"]) == 0
    assert ["requeue", "7"] not in controller.calls("scontrol")  # a chain's next job waits
    run.early_links.unlink()
    assert batch.main(["cut-off"]) == 0
    assert (["requeue", "7"] in controller.calls("scontrol")) is is_requeued
    assert ("it is started again" in printed) is is_requeued


@pytest.mark.parametrize("reason", ["cancelled", "ended", "started anew", "interactive"])
def test_a_job_that_is_over_is_not_requeued_for_its_disk(
    controller: Slurm,
    run: RunFolder,
    printed: list[str],
    patience: Clock,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
) -> None:
    _fill_disk(monkeypatch, run)
    state, restarts = "RUNNING", 0
    if reason == "ended":
        state = "COMPLETING"
    if reason == "started anew":
        restarts = 1
    if reason == "cancelled":  # while the disk was waited for
        make_attempt = RunFolder._make_attempt

        def cancel(run: RunFolder, attempt: AttemptFolder, info: dict[str, Any]) -> bool:
            run.cancelled.touch()
            return make_attempt(run, attempt, info)

        monkeypatch.setattr(RunFolder, "_make_attempt", cancel)
    answer_scontrol(controller, show_job(state, restarts))
    values = {"HPC_DDP_INTERACTIVE": "7"} if reason == "interactive" else {}
    assert _begin(monkeypatch, run, **values) == CAN_GO_ON
    assert ["requeue", "7"] not in controller.calls("scontrol")
    assert printed[-1] == f"once it can: hpc-ddp submit --run {run.path}"
