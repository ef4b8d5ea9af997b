"""A run is requeued after its attempt; Slurm's commands are stand-ins."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hpc_ddp import slurm
from hpc_ddp.core.errors import CAN_GO_ON
from hpc_ddp.core.file_io import read_json, write_json
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.enums import Action, Cause
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome.requeue import next_start
from hpc_ddp.node.outcome.requeue.chain import own_id
from hpc_ddp.node.outcome.requeue.excluded_nodes import KEPT_OFF_S
from hpc_ddp.node.outcome.verdict import Verdict
from tests.raw_events import raw
from unit.fakes import Clock, Slurm
from unit.node.outcome.requeue.fakes import (
    RUNNING,
    SHOWN_JOB,
    blame_nodes,
    changes_of,
    exclude_nodes,
)

AWAY = "{ echo Unable to contact slurm controller >&2; exit 1; }"


def test_a_job_is_requeued_by_its_own_id(
    slurm_commands: Slurm, end: Callable[..., int], printed: list[str]
) -> None:
    slurm_commands.answer("scontrol", SHOWN_JOB.format("RUNNING", 2))
    assert end() == 0
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1"}
    assert end(**array) == 0
    assert changes_of(slurm_commands) == [["requeue", "7"], ["requeue", "5_1"]]
    assert slurm_commands.calls("scontrol")[0] == ["show", "job", "7"]
    assert printed == []


def test_a_finished_run_whose_teardown_was_cut_off_starts_again_for_it(
    slurm_commands: Slurm, end: Callable[..., int], printed: list[str], run: RunFolder
) -> None:
    """By the job's time limit, say."""
    slurm_commands.answer("scontrol", SHOWN_JOB.format("RUNNING", 2))
    finished = Verdict(Cause.FINISHED, Action.NONE, "")
    run.journal("rank-0").write(raw("finished", step=1))
    assert end(finished, teardown=("cp -r a b",)) == 0
    assert changes_of(slurm_commands) == [["requeue", "7"]]
    assert printed == ["the teardown was cut off: the job starts again for it"]
    # A job that must not be started twice is left to the user, and so failed.
    assert end(finished, teardown=("cp -r a b",), max_requeues=2) == CAN_GO_ON
    run.torn_down.touch()
    assert end(finished, teardown=("cp -r a b",)) == 0
    assert changes_of(slurm_commands) == [["requeue", "7"]]


@pytest.mark.parametrize(
    ("decided", "code"),
    [
        (Verdict(Cause.FINISHED, Action.NONE, ""), 0),
        (Verdict(Cause.FAILED, Action.GIVE_UP, "", 3), 3),
    ],
)
def test_a_job_that_is_not_requeued_ends_with_its_code(
    slurm_commands: Slurm, end: Callable[..., int], decided: Verdict, code: int
) -> None:
    assert end(decided) == code
    assert slurm_commands.calls("scontrol") == []


def test_a_job_that_got_a_part_of_its_time_may_have_all_of_it_again(
    slurm_commands: Slurm, end: Callable[..., int], printed: list[str]
) -> None:
    slurm_commands.answer("scontrol", SHOWN_JOB.format("RUNNING", 2))
    assert end(time="12:00:00") == 0
    assert end(time="12:00:00", time_min="30") == 0
    requeued = ["requeue", "7"]
    assert changes_of(slurm_commands) == [
        *(requeued, requeued),
        ["update", "JobId=7", "TimeLimit=12:00:00"],
    ]
    assert printed == []
    refusal = "case $1 in update) echo Access denied >&2; exit 1;; esac; "
    slurm_commands.answer_by("scontrol", refusal + RUNNING)
    assert end(time="12:00:00", time_min="30") == 0
    kept = "the next attempt has the time limit of this one, and not 12:00:00"
    assert printed == [f"{kept}: scontrol refused: Access denied"]


@pytest.mark.parametrize("is_chain", [False, True])
def test_a_job_is_put_off_by_the_verdicts_pause(
    slurm_commands: Slurm,
    end: Callable[..., int],
    run: RunFolder,
    clock: Clock,
    printed: list[str],
    is_chain: bool,
) -> None:
    job_id, options = "7", {}
    if is_chain:
        job_id, options = "8", {"continue_by": "resubmit"}
        write_json(run.attempt(0).path / "next.json", {"job_id": "8"})
    slurm_commands.answer("scontrol", SHOWN_JOB.format("PENDING" if is_chain else "RUNNING", 2))
    decided = Verdict(Cause.FAILED, Action.REQUEUE, "", pause_s=600.0)
    assert end(decided, **options) == 0
    assert changes_of(slurm_commands)[-1] == ["update", f"JobId={job_id}", "StartTime=now+600"]
    sooner = f"scontrol update JobId={job_id} StartTime=now+150"
    assert printed == [f"what its start lacks may come back: it waits 10 minutes, or {sooner}"]
    assert not run.pauses.exists()
    refusal = "case $1 in update) echo Access denied >&2; exit 1;; esac; "
    slurm_commands.answer_by("scontrol", refusal + RUNNING)
    assert end(decided, **options) == 0
    assert printed[1:] == ["scontrol refused: Access denied"]
    assert read_json(run.pauses) == {job_id: clock.now + 600}  # for the start itself


def test_the_pause_of_a_tasks_new_job_is_found_by_that_job(
    slurm_commands: Slurm, end: Callable[..., int], run: RunFolder
) -> None:
    write_json(run.attempt(0).path / "next.json", {"job_id": "8"})
    slurm_commands.answer_by("scontrol", "case $1 in update) exit 1;; esac; " + RUNNING)
    task = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1"}
    decided = Verdict(Cause.FAILED, Action.REQUEUE, "", pause_s=600.0)
    assert end(decided, continue_by="resubmit", **task) == 0
    new_job = {**task, "SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "8"}
    assert list(read_json(run.pauses)) == [own_id(new_job)]


def test_a_limit_that_an_operator_has_raised_stays(
    slurm_commands: Slurm, end: Callable[..., int]
) -> None:
    shown = SHOWN_JOB.format("RUNNING", 2) + "   RunTime=00:10:00 TimeLimit={} TimeMin=00:30:00\n"
    for limit, count in (("1-00:00:00", 0), ("12:00:00", 0), ("00:30:00", 1)):
        slurm_commands.answer("scontrol", shown.format(limit))
        assert end(time="12:00:00", time_min="30") == 0
        updates = [words for words in changes_of(slurm_commands) if words[0] == "update"]
        assert len(updates) == count


def test_an_allocation_is_left_to_its_owner(
    slurm_commands: Slurm, end: Callable[..., int], printed: list[str], run: RunFolder
) -> None:
    assert end(HPC_DDP_INTERACTIVE="1") == 75
    assert end(HPC_DDP_INTERACTIVE="1", continue_by="resubmit") == 75  # as of a site's chains
    assert slurm_commands.calls("scontrol") == []
    assert printed.pop() == printed[0]
    assert len(printed) == 1
    assert f"'{run.path}'" in printed[0]


@pytest.mark.parametrize(
    ("state", "restarts", "wanted", "newest", "code", "words"),
    [
        (
            "RUNNING",
            3,
            True,
            True,
            0,
            "job 7 was started again, or its run goes on elsewhere: left alone",
        ),
        (
            "RUNNING",
            2,
            True,
            False,
            0,
            "job 7 was started again, or its run goes on elsewhere: left alone",
        ),
        ("PENDING", 2, True, True, 75, "the job is PENDING by now: not requeued"),
        ("RUNNING", 2, False, True, 75, "the run was cancelled: not requeued"),
    ],
)
def test_another_start_of_the_job_is_left_alone(
    slurm_commands: Slurm,
    end: Callable[..., int],
    run: RunFolder,
    printed: list[str],
    state: str,
    restarts: int,
    wanted: bool,
    newest: bool,
    code: int,
    words: str,
) -> None:
    slurm_commands.answer("scontrol", SHOWN_JOB.format(state, restarts))
    if not wanted:
        run.cancelled.touch()
    if not newest:
        run.claim_attempt({}, lambda identity: False)
    assert end() == code
    assert printed == [words]
    assert changes_of(slurm_commands) == []


@pytest.mark.parametrize(
    "shown",
    [
        SHOWN_JOB.format("COMPLETING", 2).replace("None", "TimeLimit"),
        SHOWN_JOB.format("COMPLETING", 2)
        + "   PreemptEligibleTime=x PreemptTime=2026-11-21T10:00:00\n",
    ],
)
def test_a_job_that_slurm_is_ending_is_requeued(
    slurm_commands: Slurm, end: Callable[..., int], shown: str
) -> None:
    slurm_commands.answer("scontrol", shown)
    assert end() == 0
    assert changes_of(slurm_commands) == [["requeue", "7"]]


def test_a_controller_that_refuses_to_tell_is_asked_again(
    slurm_commands: Slurm, end: Callable[..., int], clock: Clock
) -> None:
    for _ in range(2):  # the second answer, which need not come, and the first
        slurm_commands.answer("scontrol", err="Access denied", code=1)
    slurm_commands.answer("scontrol", SHOWN_JOB.format("RUNNING", 2))
    assert end() == 0
    assert clock.slept == [next_start.PAUSE_S]
    assert changes_of(slurm_commands) == [["requeue", "7"]]


@pytest.mark.parametrize(("lost", "newest"), [(("n2",), True), ((), True), (("n2",), False)])
def test_a_job_that_slurm_has_requeued_itself_is_kept_off_the_lost_node(
    slurm_commands: Slurm,
    end: Callable[..., int],
    run: RunFolder,
    lost: tuple[str, ...],
    newest: bool,
) -> None:
    blame_nodes(run, "n2")
    if not newest:
        run.claim_attempt({}, lambda identity: False)
    slurm_commands.answer("scontrol", SHOWN_JOB.format("PENDING", 3))
    slurm_commands.answer("sbatch")
    assert end(Verdict(Cause.SUPERSEDED, Action.NONE, ""), lost=lost) == 0
    assert bool(slurm_commands.calls("scontrol")) is (lost != () and newest)


def test_a_requeue_without_an_answer_is_tried_again(
    slurm_commands: Slurm, end: Callable[..., int], clock: Clock, printed: list[str]
) -> None:
    slurm_commands.answer("scontrol", SHOWN_JOB.format("RUNNING", 2))
    slurm_commands.answer("scontrol", err="Socket timed out", code=1)
    slurm_commands.answer("scontrol", SHOWN_JOB.format("RUNNING", 2))
    slurm_commands.answer("scontrol")
    assert end() == 0
    assert printed == ["scontrol got no answer: Socket timed out; trying again"]
    assert clock.slept == [next_start.PAUSE_S]
    assert len(changes_of(slurm_commands)) == 2


def test_a_requeue_that_was_done_without_an_answer_is_one(
    slurm_commands: Slurm, end: Callable[..., int], printed: list[str]
) -> None:
    slurm_commands.answer("scontrol", SHOWN_JOB.format("RUNNING", 2))
    slurm_commands.answer("scontrol", err="Socket timed out", code=1)
    slurm_commands.answer("scontrol", SHOWN_JOB.format("PENDING", 3))
    slurm_commands.answer("scontrol")
    assert end(time="12:00:00", time_min="30") == 0
    assert printed == ["scontrol got no answer: Socket timed out; trying again"]
    assert ["update", "JobId=7", "TimeLimit=12:00:00"] in changes_of(slurm_commands)


def test_a_requeue_is_given_up_after_a_while(
    slurm_commands: Slurm,
    end: Callable[..., int],
    clock: Clock,
    printed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(next_start, "REQUEUE_TRIES", 4)
    slurm_commands.answer_by(
        "scontrol",
        f"[ $1 = show ] && printf '{SHOWN_JOB.format('RUNNING', 2)}' || "
        "{ echo Socket timed out >&2; exit 1; }",
    )
    assert end() == 75
    assert clock.slept == [next_start.PAUSE_S] * 4
    assert "to go on: hpc-ddp submit --run " in printed[-1]


@pytest.mark.parametrize(("left_s", "away_s", "code"), [(6420, 780, 0), (120, 780, 75)])
def test_a_controller_that_is_away_is_no_refusal(
    slurm_commands: Slurm,
    end: Callable[..., int],
    run: RunFolder,
    clock: Clock,
    left_s: int,
    away_s: int,
    code: int,
) -> None:
    """Slurm is asked until shortly before the job's end, which an operator may change."""
    run.attempt(0).end_time.write_text(f"{clock.now + left_s}")
    back_at = clock.now + away_s
    answers = slurm_commands.answer_by
    answers("scontrol", f"[ $(cat '{run.path}/now') -lt {int(back_at)} ] && {AWAY} || {RUNNING}")
    sleep = clock.sleep

    def pass_time(seconds: float) -> None:
        sleep(seconds)
        (run.path / "now").write_text(f"{int(clock.now)}")

    clock.sleep = pass_time  # type: ignore[method-assign]
    pass_time(0)
    assert end(HPC_DDP_END_TIME=f"{clock.now + 60}") == code
    assert bool(changes_of(slurm_commands)) is (code == 0)
    assert clock.now < back_at + 60
    assert len(slurm_commands.calls("scontrol")) < 60  # now and then, and so are the messages


def test_a_requeue_and_a_new_job_that_were_refused_are_tried_again(
    slurm_commands: Slurm, end: Callable[..., int], clock: Clock, printed: list[str]
) -> None:
    """By a plugin of the site, or a limit of the account, for a moment."""
    slurm_commands.answer("scontrol", SHOWN_JOB.format("RUNNING", 2))
    slurm_commands.answer("scontrol", err="Unspecified error", code=1)
    slurm_commands.answer("scontrol", SHOWN_JOB.format("RUNNING", 2))
    slurm_commands.answer("scontrol", SHOWN_JOB.format("RUNNING", 2))
    slurm_commands.answer("scontrol", "")
    slurm_commands.answer("sbatch", err="Unspecified error", code=1)
    assert end() == 0
    assert clock.slept == [*next_start.REFUSED_PAUSES_S[:1]]
    assert len(printed) == 2


@pytest.mark.parametrize(("code", "ended"), [(0, 0), (1, 75)])
def test_a_refused_requeue_submits_a_new_job(
    slurm_commands: Slurm,
    end: Callable[..., int],
    clock: Clock,
    run: RunFolder,
    printed: list[str],
    code: int,
    ended: int,
) -> None:
    for _ in range(1 + len(next_start.REFUSED_PAUSES_S) if code else 1):
        slurm_commands.answer("scontrol", SHOWN_JOB.format("RUNNING", 2))
        slurm_commands.answer("scontrol", err="Requested operation is disabled", code=1)
        slurm_commands.answer("scontrol", SHOWN_JOB.format("RUNNING", 2))
    slurm_commands.answer("sbatch", "" if code else "8\n", code=code)
    assert end(Verdict(Cause.FAILED, Action.REQUEUE, "", pause_s=600.0)) == ended
    assert clock.slept == ([*next_start.REFUSED_PAUSES_S] if code else [])
    assert printed[0] == "scontrol refused: Requested operation is disabled"
    if ended:
        assert "the next job of the chain could not be queued: " in printed[1]
    else:
        assert printed[1] == "it goes on as job 8"
        assert changes_of(slurm_commands)[-1] == ["update", "JobId=8", "StartTime=now+600"]
        assert read_json(run.attempt(0).path / "next.json") == {"job_id": "8"}


@pytest.mark.parametrize(
    ("state", "restarts", "words"),
    [
        ("COMPLETING", 3, "job 7 was started again, or its run goes on elsewhere: left alone"),
        ("PENDING", 2, "the job is PENDING by now: not requeued"),
        ("COMPLETING", 2, "the job is COMPLETING by now: not requeued"),
    ],
)
def test_a_job_that_was_requeued_meanwhile_gets_no_twin(
    slurm_commands: Slurm,
    end: Callable[..., int],
    printed: list[str],
    state: str,
    restarts: int,
    words: str,
) -> None:
    """By an operator, while this requeue was on its way; or it was cancelled then."""
    slurm_commands.answer("scontrol", SHOWN_JOB.format("RUNNING", 2))
    slurm_commands.answer("scontrol", err="Job is pending execution", code=1)
    slurm_commands.answer("scontrol", SHOWN_JOB.format(state, restarts))
    slurm_commands.answer("sbatch", "8\n")
    end()
    assert printed == ["scontrol refused: Job is pending execution", words]
    assert slurm_commands.calls("sbatch") == []


REFUSED = "not kept off n2, n3: sbatch refused: Requested node configuration is not available"


@pytest.mark.parametrize(
    ("age_s", "excluded", "fits", "kept_off", "words"),
    [
        (60.0, "", True, "n2,n3", ["kept off: n2, n3"]),
        (60.0, "n[8-9]", True, "n8,n9,n2,n3", ["kept off: n2, n3"]),
        (60.0, "n[2,8-9]", True, "n8,n9,n2,n3", ["kept off: n2, n3"]),
        (60.0, "n[8-9]", False, "n8,n9", [REFUSED]),
        (KEPT_OFF_S, "n[2,8-9]", True, "n8,n9", []),
        (KEPT_OFF_S, "", True, "", []),
    ],
)
def test_a_requeued_job_is_kept_off_bad_nodes(
    slurm_commands: Slurm,
    end: Callable[..., int],
    run: RunFolder,
    clock: Clock,
    printed: list[str],
    age_s: float,
    excluded: str,
    fits: bool,
    kept_off: str,
    words: list[str],
) -> None:
    """Slurm's list may be of any option, variable or plugin: all but our own nodes stay."""
    blame_nodes(run, "n3", "n2")
    clock.now += age_s
    exclude_nodes(slurm_commands, excluded)
    slurm_commands.answer("sbatch", err=REFUSED.partition("refused: ")[2], code=int(not fits))
    assert end() == 0
    assert changes_of(slurm_commands) == [
        ["requeue", "7"],
        ["update", "JobId=7", f"ExcNodeList={kept_off}"],
    ]
    assert printed == words
    exclude = f"--exclude={'n8,n9,' if excluded else ''}n2,n3"
    arguments = [exclude, "--partition=small", str(run.script)]  # where the job is now
    expected = [["--test-only", *arguments]] if age_s < KEPT_OFF_S else []
    assert slurm_commands.calls("sbatch") == expected
    # For the look before the requeue, and for the nodes.
    assert slurm_commands.calls("scontrol").count(["show", "job", "7"]) == 2


def test_a_job_whose_exclusion_is_refused_continues(
    slurm_commands: Slurm, end: Callable[..., int], run: RunFolder, printed: list[str]
) -> None:
    blame_nodes(run, "n2")
    refused = "{ echo Access denied >&2; exit 1; }"
    slurm_commands.answer_by("scontrol", f"[ $1 = update ] && {refused} || {RUNNING}")
    slurm_commands.answer("sbatch")
    assert end() == 0
    assert printed == ["scontrol refused: Access denied"]


@pytest.mark.parametrize("is_refused", [False, True])
def test_slurm_is_asked_before_the_requeue_and_changes_the_job_once(
    slurm_commands: Slurm,
    end: Callable[..., int],
    run: RunFolder,
    printed: list[str],
    is_refused: bool,
) -> None:
    """KillWait after the requeue the batch shell is killed: a busy controller took longer to answer
    `sbatch --test-only`, and nine starts in a row had the broken node."""
    blame_nodes(run, "n2")
    refusal = "[ $1$4 = updateTimeLimit=60 ] && { echo denied >&2; exit 1; }; " * is_refused
    slurm_commands.answer_by("scontrol", f"{refusal}{RUNNING}")
    slurm_commands.answer("sbatch")
    slurm_commands.answer("sinfo")
    verdict = Verdict(Cause.FAILED, Action.REQUEUE, "", pause_s=600.0)
    assert end(verdict, time="60", time_min="30") == 0
    lines = (slurm_commands.folder / "calls").read_text().split("\0\n")[:-1]
    commands = [line.split("\0")[:2] for line in lines]
    assert commands.index(["sbatch", "--test-only"]) < commands.index(["scontrol", "requeue"])
    settings = ["ExcNodeList=n2", "TimeLimit=60", "StartTime=now+600"]
    requeue, update, *others = changes_of(slurm_commands)
    assert requeue == ["requeue", "7"]
    assert update == ["update", "JobId=7", *settings]
    assert [words[2] for words in others] == settings * is_refused
    assert printed[0] == "kept off: n2"


def test_a_cancel_while_slurm_answers_about_nodes_counts(
    slurm_commands: Slurm,
    end: Callable[..., int],
    run: RunFolder,
    clock: Clock,
    printed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The requeue would bring the job back to life."""
    blame_nodes(run, "n2")
    shown = slurm_commands.folder / "shown"
    shown.write_text(SHOWN_JOB.format("RUNNING", 2))
    slurm_commands.answer_by("scontrol", f"cat {shown}")

    def cancel(*_: str) -> str:
        clock.now += 4.0
        shown.write_text(SHOWN_JOB.format("CANCELLED", 2))
        return ""

    monkeypatch.setattr(slurm, "why_refused", cancel)
    assert end(Verdict(Cause.FAILED, Action.REQUEUE, "")) == 75
    assert changes_of(slurm_commands) == []
    assert printed == ["the job is CANCELLED by now: not requeued"]


@pytest.mark.parametrize(("ages_s", "is_kept_off"), [((9.0, 60.0), True), ((9.0,), False)])
def test_a_node_on_which_set_up_lines_fail_twice_is_bad(
    slurm_commands: Slurm,
    end: Callable[..., int],
    run: RunFolder,
    clock: Clock,
    ages_s: tuple[float, ...],
    is_kept_off: bool,
) -> None:
    """`nvidia-smi || exit 1` failed four times on a sick node, beside idle ones."""
    slurm_commands.answer("scontrol", SHOWN_JOB.format("RUNNING", 2))
    slurm_commands.answer("sbatch")  # the test whether the other nodes suffice
    run.job_json.write_text(JobSpec("t.py").to_json())
    write_json(run.vain_nodes, {"n1": [clock.now - age for age in ages_s]})
    assert end() == 0
    assert (["update", "JobId=7", "ExcNodeList=n1"] in changes_of(slurm_commands)) is is_kept_off


@pytest.mark.parametrize(("has_worked", "count"), [(True, 2), (False, 0)])
def test_a_node_on_which_starts_fail_that_worked_before_is_noted(
    slurm_commands: Slurm, end: Callable[..., int], run: RunFolder, has_worked: bool, count: int
) -> None:
    """Another process held its GPU's memory: four starts there, beside idle nodes."""
    slurm_commands.answer("scontrol", SHOWN_JOB.format("RUNNING", 2))
    slurm_commands.answer("sbatch")
    run.job_json.write_text(JobSpec("t.py").to_json())
    if has_worked:
        run.journal("rank-0", -1).write(raw("first_step", step=1))
    failure = {"rank": 0, "code": 1, "time": 5.0, "error": "RuntimeError: no"}
    records = [{"node": "n1", "code": 1, "failures": [failure]}]
    for _ in range(2):
        assert end(Verdict(Cause.FAILED, Action.REQUEUE, ""), records=records) == 0
    assert len(read_json(run.vain_nodes).get("n1", [])) == count
    kept_off = ["update", "JobId=7", "ExcNodeList=n1"]
    assert (kept_off in changes_of(slurm_commands)) is has_worked
