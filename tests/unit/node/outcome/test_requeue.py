"""How a run goes on after an attempt; Slurm's commands are stand-ins."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import Clock, Slurm, stop_clock

from hpc_ddp import slurm
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.file_io import read_json, write_json
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.job.spec import JobSpec
from hpc_ddp.core.journal import journal
from hpc_ddp.core.journal.vocabulary import Action, Cause
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome import excluded_nodes, requeue
from hpc_ddp.node.outcome.excluded_nodes import KEPT_OFF_S, _bad_nodes
from hpc_ddp.node.outcome.requeue import (
    check_wanted,
    go_on,
    is_link,
    own_id,
    queue_next_link,
)
from hpc_ddp.node.outcome.verdict import AttemptFacts, Verdict
from tests.raw_events import raw, typed


def test_a_blamed_node_is_kept_off_for_a_day() -> None:
    verdict = typed("verdict", 1000.0, bad_nodes=["n2", "n1"])
    older = typed("verdict", 1.0, bad_nodes=["n3"])
    events = [older, verdict, typed("verdict", 1001.0, 1)]
    assert _bad_nodes(events, since=0.0) == ["n1", "n2", "n3"]
    assert _bad_nodes(events, since=500.0) == ["n1", "n2"]
    assert _bad_nodes(events, since=1000.0) == []


def test_a_task_of_an_array_is_named_by_array_and_task() -> None:
    assert own_id({"SLURM_JOB_ID": "7"}) == "7"
    last = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    assert own_id(last) == "7_2"  # a requeue of 7 restarts all tasks


def test_a_first_start_lifts_the_mark_of_the_whole_array(tmp_path: Path) -> None:
    whole = RunFolder(tmp_path / "run").make()
    task = RunFolder(whole.path / "task-1").make()
    for each in (whole, task):
        each.cancelled.touch()
    with pytest.raises(HpcDdpError, match="was cancelled"):
        check_wanted(task, restarts=1, is_link=False, job=JobRef("8"))
    check_wanted(task, restarts=0, is_link=False, job=JobRef("8"))
    assert not whole.cancelled.exists()
    assert not task.cancelled.exists()


@pytest.mark.parametrize("ids", [{"job": JobRef("8")}, {"job": JobRef("9"), "array": JobRef("8")}])
def test_a_cancel_refuses_the_job_that_starts_meanwhile(
    tmp_path: Path, ids: dict[str, JobRef]
) -> None:
    run = RunFolder(tmp_path / "run").make()
    write_json(run.cancelled, {"jobs": ["7", "8"]})
    with pytest.raises(HpcDdpError, match="was cancelled as it started"):
        check_wanted(run, restarts=0, is_link=False, **ids)
    assert run.cancelled.exists()
    check_wanted(run, restarts=0, is_link=False, job=JobRef("10"))
    assert not run.cancelled.exists()


# --- what is wanted ------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "name" / "my run").make()
    run.job_json.write_text("{}")
    run.claim_attempt({"job_id": "7"}, lambda info: False)
    return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return stop_clock(monkeypatch, excluded_nodes, requeue, slurm, journal)


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said to the user."""
    lines: list[str] = []
    monkeypatch.setattr(requeue, "say", lines.append)
    monkeypatch.setattr(excluded_nodes, "say", lines.append)
    return lines


def test_a_job_that_the_job_before_it_has_queued_is_a_link(run: RunFolder) -> None:
    assert not is_link(run, JobRef("8"))
    write_json(run.attempt(0).path / "next.json", {"job_id": "8"})
    assert is_link(run, JobRef("8"))
    assert not is_link(run, JobRef("7"))


@pytest.mark.parametrize(
    ("attempt", "cause", "action", "state", "ended"),
    [
        (0, "failed", "give up", "COMPLETED", True),
        (0, "cancelled", "none", "COMPLETED", True),
        (0, "preempted", "requeue", "CANCELLED", False),
        (None, "", "", "CANCELLED", True),  # by scancel, before its verdict
        (None, "", "", "TIMEOUT", False),
        (1, "failed", "give up", "TIMEOUT", False),  # of no attempt that has a folder
    ],
)
def test_a_chain_that_has_ended_is_not_gone_on_with(
    run: RunFolder,
    slurm_commands: Slurm,
    attempt: int | None,
    cause: str,
    action: str,
    state: str,
    ended: bool,
) -> None:
    slurm_commands.answer("scontrol", f"   JobState={state} Reason=None\n")
    if attempt is not None:
        run.journal("batch", attempt).write(raw("verdict", cause=cause, action=action, why=""))
    check_wanted(run, restarts=1, is_link=False, job=JobRef("8"))
    if ended:
        with pytest.raises(HpcDdpError, match="was cancelled, or given up"):
            check_wanted(run, restarts=0, is_link=True, job=JobRef("8"))
    else:
        check_wanted(run, restarts=0, is_link=True, job=JobRef("8"))
    assert (slurm_commands.calls("scontrol") != []) is (attempt != 0)


@pytest.mark.parametrize(
    ("before", "answer", "ended"),
    [
        (["6"], "   JobState=PREEMPTED Reason=None\n", False),
        (["6"], "   JobState=NODE_FAIL Reason=None\n", False),
        (["6"], "   JobState=FAILED Reason=NonZeroExitCode\n", True),
        (["6"], "   JobState=CANCELLED Reason=None\n", True),
        (["1", "2", "3", "4", "5"], "   JobState=PREEMPTED Reason=None\n", False),
        (["5", "6", "3"], "   JobState=PREEMPTED Reason=None\n", False),
    ],
)
def test_a_job_that_was_taken_away_in_its_set_up_is_followed(
    run: RunFolder, slurm_commands: Slurm, before: list[str], answer: str | None, ended: bool
) -> None:
    write_json(run.early_links, {**dict.fromkeys(before, "0"), before[-1]: "8", "8": "9"})
    assert is_link(run, JobRef("8"))
    assert run.jobs([])[-2:] == [JobRef("8"), JobRef("9")]
    slurm_commands.answer("scontrol", answer or "", code=0 if answer else 1)
    if ended:
        with pytest.raises(HpcDdpError, match="was cancelled, or given up"):
            check_wanted(run, restarts=0, is_link=True, job=JobRef("8"))
    else:
        check_wanted(run, restarts=0, is_link=True, job=JobRef("8"))
    assert slurm_commands.calls("scontrol") == [["show", "job", before[-1]]]


def test_a_job_that_was_refused_does_not_end_the_chain(
    run: RunFolder, slurm_commands: Slurm
) -> None:
    """It had queued a job of its own before its set-up lines."""
    slurm_commands.answer("scancel")
    write_json(run.early_links, {"5": "6"})
    requeue.take_back_early(run, {"SLURM_JOB_ID": "5"})
    assert slurm_commands.calls("scancel") == [["6"]]
    assert read_json(run.early_links) == {}
    requeue.take_back_early(run, {"SLURM_JOB_ID": "5"})
    write_json(run.early_links, {"5": "6"})
    write_json(run.attempt(0).path / "next.json", {"job_id": "8"})
    slurm_commands.answer("scontrol", "   JobState=RUNNING Reason=None\n")
    check_wanted(run, restarts=0, is_link=True, job=JobRef("8"))
    assert slurm_commands.calls("scontrol") == [["show", "job", "7"]]


def test_a_chain_without_an_attempt_begins(tmp_path: Path, slurm_commands: Slurm) -> None:
    check_wanted(RunFolder(tmp_path / "new").make(), restarts=0, is_link=True, job=JobRef("8"))
    assert slurm_commands.calls("scontrol") == []


# --- going on ------------------------------------------------------------------------------

SHOWN = (
    "   JobState={} Reason=None\n   Requeue=1 Restarts={} BatchFlag=1\n"
    "   ReqNodeList=(null) ExcNodeList=(null)\n"
)
AWAY = "{ echo Unable to contact slurm controller >&2; exit 1; }"
RUNNING = f"printf '{SHOWN.format('RUNNING', 2)}'"
GO_ON = Verdict(Cause.PREEMPTED, Action.REQUEUE, "")


def _environ(**values: str) -> dict[str, str]:
    return {"SLURM_JOB_ID": "7", "HPC_DDP_RESTARTS": "2", "PATH": os.environ["PATH"], **values}


def _facts(run: RunFolder, lost: tuple[str, ...] = (), **spec: Any) -> AttemptFacts:
    fields: dict[str, Any] = dict.fromkeys(("cancelled", "superseded"), False)
    fields |= {"job": None, "restarts": 2, "nodes": (), "records": (), "events": run.events()}
    return AttemptFacts(spec=JobSpec("t.py", **spec), attempt=0, lost_nodes=lost, **fields)


@pytest.fixture
def end(run: RunFolder, clock: Clock, printed: list[str]) -> Callable[..., int]:
    """Go on after the run's attempt."""

    def call(decided: Verdict = GO_ON, lost: tuple[str, ...] = (), **values: Any) -> int:
        spec = {name: values.pop(name) for name in ("continue_by",) if name in values}
        attempt, facts = run.attempt(0), _facts(run, lost, **spec)
        return go_on(run, attempt, _environ(**values), facts, decided)

    return call


def _changes(slurm_commands: Slurm) -> list[list[str]]:
    return [words for words in slurm_commands.calls("scontrol") if words[0] != "show"]


def test_a_job_is_requeued_by_its_own_id(
    slurm_commands: Slurm, end: Callable[..., int], printed: list[str]
) -> None:
    slurm_commands.answer("scontrol", SHOWN.format("RUNNING", 2))
    assert end() == 0
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1"}
    assert end(**array) == 0
    assert _changes(slurm_commands) == [["requeue", "7"], ["requeue", "5_1"]]
    assert slurm_commands.calls("scontrol")[0] == ["show", "job", "7"]
    assert printed == []


@pytest.mark.parametrize(
    ("decided", "code"),
    [
        (Verdict(Cause.FINISHED, Action.NONE, ""), 0),
        (Verdict(Cause.FAILED, Action.GIVE_UP, "", 3), 3),
    ],
)
def test_what_is_not_requeued_ends_with_its_code(
    slurm_commands: Slurm, end: Callable[..., int], decided: Verdict, code: int
) -> None:
    assert end(decided) == code
    assert slurm_commands.calls("scontrol") == []


def test_an_allocation_is_left_to_its_owner(
    slurm_commands: Slurm, end: Callable[..., int], printed: list[str], run: RunFolder
) -> None:
    assert end(HPC_DDP_INTERACTIVE="1") == 75
    assert slurm_commands.calls("scontrol") == []
    assert len(printed) == 1
    assert f"'{run.path}'" in printed[0]


@pytest.mark.parametrize(
    ("state", "restarts", "wanted", "newest", "code", "words"),
    [
        ("RUNNING", 3, True, True, 0, "attempt 0 is no longer the job's current one: left alone"),
        ("RUNNING", 2, True, False, 0, "attempt 0 is no longer the job's current one: left alone"),
        ("PENDING", 2, True, True, 75, "the job is PENDING by now: not requeued"),
        ("RUNNING", 2, False, True, 75, "the job is RUNNING by now: not requeued"),
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
    slurm_commands.answer("scontrol", SHOWN.format(state, restarts))
    if not wanted:
        run.cancelled.touch()
    if not newest:
        run.claim_attempt({}, lambda info: False)
    assert end() == code
    assert printed == [words]
    assert _changes(slurm_commands) == []


@pytest.mark.parametrize(
    "shown",
    [
        SHOWN.format("COMPLETING", 2).replace("None", "TimeLimit"),
        SHOWN.format("COMPLETING", 2)
        + "   PreemptEligibleTime=x PreemptTime=2026-11-21T10:00:00\n",
    ],
)
def test_a_job_that_slurm_ends_is_requeued_all_the_same(
    slurm_commands: Slurm, end: Callable[..., int], shown: str
) -> None:
    slurm_commands.answer("scontrol", shown)
    assert end() == 0
    assert _changes(slurm_commands) == [["requeue", "7"]]


def test_a_controller_that_refuses_to_tell_is_asked_again(
    slurm_commands: Slurm, end: Callable[..., int], clock: Clock
) -> None:
    slurm_commands.answer("scontrol", err="Access denied", code=1)
    slurm_commands.answer("scontrol", SHOWN.format("RUNNING", 2))
    assert end() == 0
    assert clock.slept == [requeue.PAUSE_S]
    assert _changes(slurm_commands) == [["requeue", "7"]]


@pytest.mark.parametrize(("lost", "newest"), [(("n2",), True), ((), True), (("n2",), False)])
def test_a_job_that_slurm_has_requeued_itself_is_kept_off_the_lost_node(
    slurm_commands: Slurm,
    end: Callable[..., int],
    run: RunFolder,
    lost: tuple[str, ...],
    newest: bool,
) -> None:
    _blame(run, "n2")
    if not newest:
        run.claim_attempt({}, lambda info: False)
    slurm_commands.answer("scontrol", SHOWN.format("PENDING", 3))
    slurm_commands.answer("sbatch")
    assert end(Verdict(Cause.SUPERSEDED, Action.NONE, ""), lost=lost) == 0
    assert bool(slurm_commands.calls("scontrol")) is (lost != () and newest)


def test_a_requeue_without_an_answer_is_tried_again(
    slurm_commands: Slurm, end: Callable[..., int], clock: Clock, printed: list[str]
) -> None:
    slurm_commands.answer("scontrol", SHOWN.format("RUNNING", 2))
    slurm_commands.answer("scontrol", err="Socket timed out", code=1)
    slurm_commands.answer("scontrol", SHOWN.format("RUNNING", 2))
    slurm_commands.answer("scontrol")
    assert end() == 0
    assert printed == ["scontrol got no answer: Socket timed out; trying again"]
    assert clock.slept == [requeue.PAUSE_S]
    assert len(_changes(slurm_commands)) == 2


def test_a_requeue_is_given_up_after_a_while(
    slurm_commands: Slurm,
    end: Callable[..., int],
    clock: Clock,
    printed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requeue, "TRIES", 4)
    slurm_commands.answer_by(
        "scontrol",
        f"[ $1 = show ] && printf '{SHOWN.format('RUNNING', 2)}' || "
        "{ echo Socket timed out >&2; exit 1; }",
    )
    assert end() == 75
    assert clock.slept == [requeue.PAUSE_S] * 4
    assert "could not be requeued; go on with: hpc-ddp submit --run '" in printed[-1]


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
    """It is asked until shortly before the end of the job's time, as an operator has set it."""
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
    assert bool(_changes(slurm_commands)) is (code == 0)
    assert clock.now < back_at + 60
    assert len(slurm_commands.calls("scontrol")) < 60  # now and then, and so are the messages


@pytest.mark.parametrize(("code", "ended"), [(0, 0), (1, 75)])
def test_where_a_requeue_is_not_permitted_a_new_job_goes_on(
    slurm_commands: Slurm,
    end: Callable[..., int],
    run: RunFolder,
    printed: list[str],
    code: int,
    ended: int,
) -> None:
    slurm_commands.answer("scontrol", SHOWN.format("RUNNING", 2))
    slurm_commands.answer("scontrol", err="Requested operation is disabled", code=1)
    slurm_commands.answer("sbatch", "8\n", code=code)
    assert end() == ended
    assert printed[0] == "scontrol refused: Requested operation is disabled"
    if ended:
        assert "the next job of the chain could not be queued: " in printed[1]
    else:
        assert printed[1:] == ["it goes on as job 8"]
        assert read_json(run.attempt(0).path / "next.json") == {"job_id": "8"}


# --- a chain -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "decided", "code", "cancelled"),
    [
        ("8", GO_ON, 0, []),
        ("8", Verdict(Cause.FAILED, Action.GIVE_UP, "", 3), 3, [["8"]]),
        ("8", Verdict(Cause.FINISHED, Action.NONE, ""), 0, [["8"]]),
        ("8", Verdict(Cause.SUPERSEDED, Action.NONE, ""), 0, []),
        (None, Verdict(Cause.FINISHED, Action.NONE, ""), 0, []),
    ],
)
def test_the_end_of_a_link(
    slurm_commands: Slurm,
    end: Callable[..., int],
    run: RunFolder,
    link: str | None,
    decided: Verdict,
    code: int,
    cancelled: list[list[str]],
) -> None:
    slurm_commands.answer("scancel")
    if link:
        write_json(run.attempt(0).path / "next.json", {"job_id": link})
    assert end(decided, continue_by="resubmit") == code
    assert slurm_commands.calls("scancel") == cancelled
    assert slurm_commands.calls("sbatch") == []


def test_a_link_that_was_not_queued_at_the_start_is_at_the_end(
    slurm_commands: Slurm, end: Callable[..., int], printed: list[str]
) -> None:
    slurm_commands.answer("sbatch", "8\n")
    slurm_commands.answer("sbatch", err="no", code=1)
    assert end(continue_by="resubmit") == 0
    assert end(continue_by="resubmit") == 0  # it waits already
    assert len(slurm_commands.calls("sbatch")) == 1


def test_a_chain_without_a_next_job_is_left_to_the_user(
    slurm_commands: Slurm, end: Callable[..., int], printed: list[str]
) -> None:
    slurm_commands.answer("sbatch", err="no", code=1)
    assert end(continue_by="resubmit") == 75
    assert "could not be requeued" in printed[-1]


def test_a_link_that_can_not_be_cancelled_will_find_the_verdict(
    slurm_commands: Slurm, end: Callable[..., int], run: RunFolder, printed: list[str]
) -> None:
    write_json(run.attempt(0).path / "next.json", {"job_id": "8"})
    slurm_commands.answer("scancel", err="Access denied", code=1)
    assert end(Verdict(Cause.FAILED, Action.GIVE_UP, "", 3), continue_by="resubmit") == 3
    assert printed == ["scancel refused: Access denied"]


@pytest.mark.parametrize("lost", [(), ("n2",)])
def test_a_waiting_link_is_kept_off_a_lost_node(
    slurm_commands: Slurm, end: Callable[..., int], run: RunFolder, lost: tuple[str, ...]
) -> None:
    write_json(run.attempt(0).path / "next.json", {"job_id": "8"})
    _blame(run, "n2")
    slurm_commands.answer("sbatch")
    slurm_commands.answer("scontrol", SHOWN.format("PENDING", 0))
    assert end(lost=lost, continue_by="resubmit") == 0
    update = ["update", "JobId=8", "ExcNodeList=n2"]
    assert _changes(slurm_commands) == ([update] if lost else [])


def test_the_next_link_of_a_task_is_that_task(
    run: RunFolder, slurm_commands: Slurm, clock: Clock
) -> None:
    task = run.task(1).make()
    attempt = task.claim_attempt({}, lambda info: False)
    slurm_commands.answer("sbatch", "9;cluster\n")
    environ = _environ(SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="1")
    assert queue_next_link(task, attempt, environ) == JobRef("9")
    (words,) = slurm_commands.calls("sbatch")
    assert words == [
        *("--parsable", "--dependency=afterany:5_1", "--array=1"),
        str(run.script),
    ]
    assert (run.root / f".jobs-{os.geteuid()}" / "_" / "9").resolve() == run.path


@pytest.mark.parametrize(("excluded", "kept_off"), [("", "n2"), ("n[2,8-9]", "n8,n9,n2")])
def test_the_next_link_is_kept_off_bad_nodes(
    run: RunFolder, slurm_commands: Slurm, clock: Clock, excluded: str, kept_off: str
) -> None:
    """Its --exclude takes the place of the script's line, which this job had."""
    _blame(run, "n2")
    _exclude(slurm_commands, excluded)
    slurm_commands.answer("sbatch", "9\n")
    assert queue_next_link(run, run.attempt(0), _environ()) == JobRef("9")
    words = slurm_commands.calls("sbatch")[-1]
    assert words[1:3] == ["--dependency=afterany:7", f"--exclude={kept_off}"]


def test_a_link_without_an_answer_is_none_of_the_known_jobs(
    run: RunFolder, slurm_commands: Slurm, clock: Clock
) -> None:
    run.journal("submit").write(raw("queued", job_id="7"))
    slurm_commands.answer("sbatch", err="Socket timed out", code=1)
    slurm_commands.answer("squeue", f"7\x1fN/A\x1f{run.script}\n6\x1fN/A\x1f{run.script}\n")
    assert queue_next_link(run, run.attempt(0), _environ()) == JobRef("6")


# --- off bad nodes -------------------------------------------------------------------------


REFUSED = "not kept off n2, n3: sbatch refused: too few nodes"


def _exclude(slurm_commands: Slurm, nodes: str) -> None:
    """Have Slurm keep the job off some nodes already: ``n[8-9]``, with or without n2."""
    shown = SHOWN.format("RUNNING", 2).replace("ExcNodeList=(null)", f"ExcNodeList={nodes}")
    names = "n2\nn8\nn9\n" if "2" in nodes else "n8\nn9\n"
    answer = f"[ $2 = hostnames ] && printf '{names}' || printf '{shown}'"
    slurm_commands.answer_by("scontrol", answer)


def _blame(run: RunFolder, *nodes: str) -> None:
    values: dict[str, Any] = {"cause": "node lost", "action": "requeue", "why": ""}
    run.journal("batch").write(raw("verdict", **values, bad_nodes=nodes))


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
    _blame(run, "n3", "n2")
    clock.now += age_s
    _exclude(slurm_commands, excluded)
    slurm_commands.answer("sbatch", err="too few nodes", code=int(not fits))
    assert end() == 0
    assert _changes(slurm_commands) == [
        ["requeue", "7"],
        ["update", "JobId=7", f"ExcNodeList={kept_off}"],
    ]
    assert printed == words
    asked = [f"--exclude={'n8,n9,' if excluded else ''}n2,n3", str(run.script)]
    expected = [["--test-only", *asked]] if age_s < KEPT_OFF_S else []
    assert slurm_commands.calls("sbatch") == expected


def test_a_job_that_can_not_be_kept_off_goes_on(
    slurm_commands: Slurm, end: Callable[..., int], run: RunFolder, printed: list[str]
) -> None:
    _blame(run, "n2")
    refused = "{ echo Access denied >&2; exit 1; }"
    slurm_commands.answer_by("scontrol", f"[ $1 = update ] && {refused} || {RUNNING}")
    slurm_commands.answer("sbatch")
    assert end() == 0
    assert printed == ["scontrol refused: Access denied"]
