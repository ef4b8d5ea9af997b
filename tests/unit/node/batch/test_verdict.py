"""`batch verdict` and the other calls of the batch script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpc_ddp.core.errors import CAN_GO_ON
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.journal.events import VerdictGiven
from hpc_ddp.core.journal.journal import last_event
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node import batch
from hpc_ddp.node.batch import give_verdict
from hpc_ddp.node.outcome.gather_facts import judge_attempt
from hpc_ddp.node.watch import end_step
from hpc_ddp.slurm_text import Job
from tests.raw_events import raw, raw_events
from unit.fakes import Clock, Slurm
from unit.node.batch.fakes import answer_scontrol, show_job, step_environ, write_record


def test_a_good_end_is_finished(
    controller: Slurm, run: RunFolder, attempt: AttemptFolder, printed: list[str]
) -> None:
    for node in ("n1", "n2"):
        write_record(attempt, node)
    assert give_verdict(step_environ(run)) == 0
    (event,) = raw_events(run.path)
    assert (event["cause"], event["action"], event["why"], event["exit_code"]) == (
        *("finished", "none", ""),
        0,
    )
    assert (event["progress"], event["step"], event["bad_nodes"]) == (False, None, [])
    assert "rank" not in event
    assert printed == ["attempt 0: finished"]
    assert controller.calls("sinfo") == []


def test_an_error_of_the_script_is_given_up(
    controller: Slurm, run: RunFolder, attempt: AttemptFolder, printed: list[str]
) -> None:
    failure = {"rank": 3, "code": 4, "time": 1.0, "error": "ValueError: x"}
    write_record(attempt, "n1", code=1)
    write_record(attempt, "n2", code=1, failures=[failure])
    assert give_verdict(step_environ(run)) == 4
    (event,) = raw_events(run.path)
    assert (event["cause"], event["action"], event["exit_code"]) == ("failed", "give up", 4)
    assert (event["rank"], event["node"], event["error"]) == (3, "n2", "ValueError: x")
    assert printed == [
        f"its log: {attempt.path}/n2/rank-3.log",
        "attempt 0: rank 3 on n2: ValueError: x; it came in the first 10 minutes, and would"
        " come again; given up",
    ]


@pytest.mark.parametrize(
    ("step", "saved", "then"),
    [
        (None, False, "it is started again"),
        (5, False, "it is started again"),
        (5, True, "it goes on"),
    ],
)
def test_a_lost_node_is_kept_off_the_requeued_job(
    controller: Slurm,
    run: RunFolder,
    attempt: AttemptFolder,
    printed: list[str],
    step: int | None,
    saved: bool,
    then: str,
) -> None:
    controller.answer("sinfo", "n2|down*\n")
    controller.answer("sbatch")
    if step:
        run.journal("rank-0").write(raw("first_step", step=step))
    if saved:
        run.journal("rank-0").write(raw("checkpoint", step=step))
    write_record(attempt, "n1")
    assert give_verdict(step_environ(run)) == 0
    (event,) = [event for event in raw_events(run.path) if event["event"] == "verdict"]
    assert (event["cause"], event["bad_nodes"], event["then"]) == ("node lost", ["n2"], then)
    assert printed == [
        f"attempt 0: no word from n2; {then}",
        "kept off: n2",
    ]
    changes = [words for words in controller.calls("scontrol") if words[0] != "show"]
    assert changes == [["requeue", "7"], ["update", "JobId=7", "ExcNodeList=n2"]]


@pytest.mark.parametrize(
    ("marks", "cause", "text"),
    [
        ({"cancelled": True}, "cancelled", "attempt 0: cancelled; by the user"),
        ({"superseded": True}, "superseded", "attempt 0: superseded"),
        ({"restarts": 1}, "superseded", "attempt 0: superseded"),
    ],
)
def test_marks_on_disk_and_slurms_state_decide(
    slurm_commands: Slurm,
    clock: Clock,
    run: RunFolder,
    attempt: AttemptFolder,
    printed: list[str],
    marks: dict[str, Any],
    cause: str,
    text: str,
) -> None:
    slurm_commands.answer("scontrol", show_job(restarts=marks.get("restarts", 0)))
    slurm_commands.answer("sinfo")
    if "cancelled" in marks:
        run.cancelled.touch()
    if "superseded" in marks:
        run.claim_attempt({}, lambda identity: False)
    give_verdict(step_environ(run))
    assert raw_events(run.path)[0]["cause"] == cause
    assert printed == [text]


def test_slurm_is_not_asked_for_nodes_without_a_job(
    run: RunFolder, attempt: AttemptFolder, slurm_commands: Slurm
) -> None:
    slurm_commands.answer("sinfo", "n1|down\nn2|down\n")
    facts, decided = judge_attempt(run, attempt, step_environ(run), None)
    assert (facts.lost_nodes, decided.cause) == ([], "node lost")
    assert slurm_commands.calls("sinfo") == []


DETECTED = (
    "slurmstepd: error: Detected 1 oom_kill event in StepId=7.{}. Some of the step tasks have been"
    " OOM Killed.\n"
)


OLD_DETECTED = "slurmstepd: error: Detected 1 oom-kill event(s) in step 7.{} cgroup. Some of …\n"
# As hd0n1 wrote it with JobAcctGatherParams=OverMemoryKill.
EXCEEDED = (
    "slurmstepd-n1: error: {} exceeded memory limit (2791518208 > 2726297600), being killed\n"
)


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (DETECTED.format(0), "a process on n1: out of memory: killed by the kernel"),
        ("srun: error: n2: tasks 4-5: Out Of Memory\n", "a process on n2: out of memory: killed"),
        (f"{DETECTED.format(0)}hpc-ddp: attempt 0: no word from n1; it goes on\nx\n", "no word"),
        (OLD_DETECTED.format(0), "a process on n1: out of memory: killed by the kernel"),
        (EXCEEDED.format("StepId=7.0"), "a process on n1: out of memory: killed by the kernel"),
        (EXCEEDED.format("StepId=7+1.0"), "a process on n1: out of memory: killed by the kernel"),
        (EXCEEDED.format("Step 7.0"), "a process on n1: out of memory: killed by the kernel"),
        (
            EXCEEDED.format("StepId=7.0").replace("memory", "virtual memory"),
            "a process on n1: out of memory: killed by the kernel",
        ),
        ("slurmstepd: error: Exceeded job memory limit\n", "a process on n1: out of memory"),
        ("srun: error: Exceeded step memory limit\n", "a process on n1: out of memory"),
        (EXCEEDED.format("StepId=7.batch"), "no word from n1, n2"),
        ("slurmstepd: error: Exceeded step memory limit at some point.\n", "no word from n1, n2"),
        (DETECTED.format("batch"), "no word from n1, n2"),
        ("srun: error: n2: task 4: Killed\n", "no word from n1, n2"),
    ],
)
def test_a_step_that_slurm_has_ended_for_memory_is_no_lost_node(
    run: RunFolder, attempt: AttemptFolder, slurm_commands: Slurm, output: str, why: str
) -> None:
    """Under OOMKillStep and OverMemoryKill the supervisors die with their workers; a leak would
    come for ever."""
    run.slurm_out.write_text(output)
    _, decided = judge_attempt(run, attempt, step_environ(run), None)
    assert decided.why.startswith(why)
    assert decided.cause == ("failed" if "memory" in why else "node lost")


@pytest.mark.parametrize(
    ("names", "bad_nodes"),
    [
        (["n2"], ["n2"]),
        (["n1", "n2"], ["n2"]),
        (["n1", "n2", "n3"], []),
        (["n1", "n2", "n4"], ["n2"]),
        ([f"n{i}" for i in range(1, 22)], ["n2"]),
    ],
)
def test_one_silent_node_is_kept_off(
    run: RunFolder, slurm_commands: Slurm, names: list[str], bad_nodes: list[str]
) -> None:
    """It is up for Slurm, and its mount of the run's disk is gone, say."""
    attempt = run.claim_attempt({"job_id": "7", "nodes": names}, lambda identity: False)
    for node in names:
        if node != "n2" and not (len(names) == 3 and node == "n3"):  # a second silent one
            write_record(attempt, node, notice="SIGTERM")
    slurm_commands.answer("sinfo")
    job = Job("RUNNING", "None", 0, None, None)
    facts, decided = judge_attempt(run, attempt, step_environ(run), job)
    assert (decided.cause, decided.action) == ("node lost", "requeue")
    assert facts.bad_nodes == bad_nodes
    (event,) = [event for event in raw_events(run.path) if event["event"] == "verdict"]
    assert event["bad_nodes"] == bad_nodes


def test_a_task_of_an_array_that_slurm_has_ended_for_memory_is_no_lost_node(
    run: RunFolder, slurm_commands: Slurm
) -> None:
    """Slurm writes its output into the array's folder."""
    task = run.task(3).make()
    task.job_json.write_text(run.job_json.read_text())
    claimed = task.claim_attempt({"job_id": "7", "nodes": ["n1"]}, lambda identity: False)
    (run.logs / "slurm-3.out").write_text(DETECTED.format(0))
    _, decided = judge_attempt(task, claimed, step_environ(task), None)
    assert decided.why.startswith("a process on n1: out of memory")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, run: RunFolder) -> Callable[..., int]:
    def main(*words: str, **environ: str) -> int:
        for name, value in step_environ(run, **environ).items():
            monkeypatch.setenv(name, value)
        return batch.main(list(words))

    return main


def _number(output: str) -> int:
    return int(output.removeprefix("<hpc-ddp>").removesuffix("</hpc-ddp>\n"))


def test_each_call_of_the_batch_script(
    controller: Slurm,
    run: RunFolder,
    call: Callable[..., int],
    printed: list[str],
    clock: Clock,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guarded: list[int] = []
    monkeypatch.setattr(end_step, "guard_step", lambda environ, shell: guarded.append(shell))
    assert call("begin") == 0
    assert "export HPC_DDP_ATTEMPT=0\n" in capsys.readouterr().out
    attempt = run.attempt(0)
    assert call("interrupted") == 0
    assert attempt.notice.read_text() == "interrupted"
    assert float(attempt.end_time.read_text()) == clock.now
    clock.now += 20.0
    assert call("interrupted", HPC_DDP_WARN_S="30") == 0  # a second Ctrl-C makes it no later
    assert float(attempt.end_time.read_text()) < clock.now
    assert call("warned", HPC_DDP_WARN_S="2000", HPC_DDP_END_TIME="1") == 0
    assert attempt.notice.read_text() == "warning signal"
    assert call("watch", "77", HPC_DDP_WARN_S="2000", HPC_DDP_END_TIME="1") == 0
    assert guarded == [77]
    assert call("teardown-plan", HPC_DDP_END_TIME="1") == 0
    assert "300 node-lost" in capsys.readouterr().out
    attempt.port_taken.touch()
    assert call("next-port", HPC_DDP_PORT="20000") == 0
    assert _number(capsys.readouterr().out) > 20000
    for node in ("n1", "n2"):
        write_record(
            attempt, node, code=1, failures=[{"rank": 0, "code": 3, "time": 1, "error": ""}]
        )
    assert call("verdict") == 3
    assert call("no such") == 2
    assert printed[-1] == "unknown call ['no such']"
    run.journal("batch", 1).write(raw("verdict", cause="finished", action="none", why=""))
    answer_scontrol(controller, show_job(restarts=1))
    assert call("begin", SLURM_RESTART_COUNT="1") == 0
    assert capsys.readouterr().out == "<hpc-ddp>exit 0</hpc-ddp>\n"


def test_a_damaged_record_ends_in_a_sentence(
    run: RunFolder, call: Callable[..., int], printed: list[str], controller: Slurm, clock: Clock
) -> None:
    assert call("begin") == 0
    write_record(run.attempt(0), "n1", code=0)
    record = run.attempt(0).node("n1").record
    record.write_text(record.read_text().replace('"n1"', '["n1"]'))
    assert call("verdict") == CAN_GO_ON
    assert printed[-1].startswith("a file of the attempt is damaged (TypeError(")
    assert printed[-1].endswith(f"to go on: hpc-ddp submit --run {run.path}")


@pytest.mark.parametrize(
    ("expedited", "code", "updates"),
    [("Yes", 3, [["update", "JobId=7", "Requeue=0"]]), ("No", 3, []), ("Yes", 0, [])],
)
def test_an_expedited_job_that_is_given_up_fails(
    controller: Slurm,
    run: RunFolder,
    call: Callable[..., int],
    printed: list[str],
    expedited: str,
    code: int,
    updates: list[list[str]],
) -> None:
    """Slurm would hold it in the queue for an exit code other than 0."""
    answer_scontrol(controller, f"{show_job()}   ExpeditedRequeue={expedited}\n")
    assert call("begin") == 0
    if not code:
        run.journal("rank-0", 0).write(raw("finished", step=1))
    failures = [{"rank": 0, "code": 3, "time": 1, "error": ""}] if code else []
    for node in ("n1", "n2"):
        write_record(run.attempt(0), node, code=code, failures=failures)
    assert call("verdict") == code
    assert [words for words in controller.calls("scontrol") if words[0] == "update"] == updates


def test_a_cluster_that_restarts_an_exit_code_gets_another_one(
    controller: Slurm, run: RunFolder, call: Callable[..., int], printed: list[str]
) -> None:
    """Slurm would start a job that was given up again, for ever; also one with Requeue=0."""
    assert call("begin") == 0
    for node in ("n1", "n2"):
        failures = [{"rank": 0, "code": 3, "time": 1, "error": ""}]
        write_record(run.attempt(0), node, code=3, failures=failures)
    config = "RequeueExit = 1,3,75-80\nRequeueExitHold = 2\n"
    controller.answer_by(
        "scontrol", f"[ $2 = config ] && printf '{config}' || printf '{show_job()}'"
    )
    assert call("verdict") == 4
    assert printed[-1] == "exit code 4 in place of 3, with which this cluster starts jobs again"


def test_a_refused_call_is_reported(
    controller: Slurm, run: RunFolder, call: Callable[..., int], printed: list[str]
) -> None:
    run.journal("batch").write(raw("verdict", cause="finished", action="none", why=""))
    assert call("begin") == 1
    assert printed == [
        f"run {run.path} is finished",
        "hint: start a new one: hpc-ddp submit",
    ]
    assert call("interrupted", HPC_DDP_ATTEMPT="9") == 75
    assert "the run's folder can't be used: " in printed[-2]
    assert printed[-1] == f"to go on: hpc-ddp submit --run {run.path}"


def test_the_last_event_of_an_attempt_is_its_verdict(
    controller: Slurm, run: RunFolder, attempt: AttemptFolder, printed: list[str]
) -> None:
    run.journal("rank-0").write(raw("finished", step=3))
    for node in ("n1", "n2"):
        write_record(attempt, node)
    give_verdict(step_environ(run))
    assert last_event(run.events(), VerdictGiven) == run.events()[-1]
    assert raw_events(run.path)[-1]["step"] == 3
