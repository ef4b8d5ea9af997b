"""The batch shell's calls, before, while and after the step; Slurm's commands are stand-ins."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import Clock, Slurm, stop_clock
from written_runs import linked

from hpc_ddp import slurm
from hpc_ddp.core import process
from hpc_ddp.core.attempt_env import AttemptEnv
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.file_io import read_json, write_json
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.job.spec import JobSpec
from hpc_ddp.core.journal.events import VerdictGiven
from hpc_ddp.core.journal.journal import last_event
from hpc_ddp.core.run_folder import AttemptFolder, RunFolder
from hpc_ddp.liveness import is_attempt_live
from hpc_ddp.node import batch
from hpc_ddp.node.batch import attempt_env, begin, next_port, verdict, warned
from hpc_ddp.node.outcome import excluded_nodes, gather_facts, requeue
from hpc_ddp.node.outcome.gather_facts import judge
from hpc_ddp.slurm_text import parse_job
from tests.raw_events import raw, raw_events

SHOWN = """\
JobId=7 JobName=x
   JobState={state} Reason=None Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:00 TimeLimit=00:16:40 TimeMin=N/A
   StartTime=2026-11-21T10:00:00 EndTime=2026-11-21T10:01:00 Deadline=N/A
   PreemptEligibleTime=2026-11-21T10:00:00 PreemptTime={preempted}
"""


def shown(state: str = "RUNNING", restarts: int = 0, preempted: str = "None") -> str:
    """Return what `scontrol show job` prints."""
    return SHOWN.format(state=state, restarts=restarts, preempted=preempted)


END = parse_job(shown()).end_time or 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return stop_clock(monkeypatch, batch, excluded_nodes, requeue, slurm, now=END - 1000)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "name" / "run").make()
    run.lib.mkdir()
    run.job_json.write_text(JobSpec("train.py", nodes=2).to_json())
    return run


def _spec(run: RunFolder, **values: Any) -> JobSpec:
    spec = JobSpec("train.py", **values)
    run.job_json.write_text(spec.to_json())
    return spec


def _environ(run: RunFolder, **values: str) -> dict[str, str]:
    return {
        **{"HPC_DDP_RUN": str(run.path), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"},
        **{"PATH": os.environ["PATH"], **values},
    }


@pytest.fixture
def controller(slurm_commands: Slurm, clock: Clock) -> Slurm:
    """Slurm with a running job of two nodes, and whatever a test asks of it besides."""

    def answer(text: str) -> None:
        slurm_commands.answer_by(
            "scontrol", f"[ $2 = hostnames ] && printf 'n1\\nn2\\n' || cat <<'x'\n{text}x\n"
        )

    answer(shown())
    return slurm_commands


# --- before the step -----------------------------------------------------------------------


def test_the_step_is_told_what_it_needs(controller: Slurm, run: RunFolder) -> None:
    _spec(run, nodes=2, host_suffix="-ib", signal="USR1@90", fabric="efa")
    exports = begin(_environ(run, SLURM_RESTART_COUNT="3", SLURM_CLUSTER_NAME="c"))
    assert exports is not None
    port = int(exports.pop("HPC_DDP_PORT"))
    assert 10049 <= port < 32768
    assert exports == {
        "HPC_DDP_RUN": str(run.path),
        "HPC_DDP_RESTARTS": "3",
        "HPC_DDP_HEAD": "n1-ib",
        "HPC_DDP_ATTEMPT": "0",
        "HPC_DDP_NNODES": "2",
        "HPC_DDP_LEAST_NODES": "2",
        "HPC_DDP_RDZV_ID": "7.0",
        "HPC_DDP_END_TIME": f"{END:.0f}",
        "HPC_DDP_FABRIC": "efa",
        "HPC_DDP_SIGNAL": "USR1",
        "HPC_DDP_WARN_S": "90",
        "HPC_DDP_CPUS": "1",
    }
    (event,) = raw_events(run.path)
    assert (event["event"], event["nodes"], event["cluster"]) == ("started", ["n1", "n2"], "c")
    assert (event["job_id"], event["restarts"]) == ("7", 3)
    assert run.attempt(0).info == {
        name: event[name] for name in ("job_id", "restarts", "host", "nodes", "cluster")
    }
    assert linked(run, "7", "c").resolve() == run.path
    assert not (run.attempt(0).path / "next.json").exists()


@pytest.mark.parametrize(
    ("ends_in", "warn_s", "end"), [(300.0, "30", True), (6000.0, "60", True), (None, "60", False)]
)
def test_a_short_attempt_is_warned_in_its_last_tenth(
    run: RunFolder, clock: Clock, ends_in: float | None, warn_s: str, end: bool
) -> None:
    spec = JobSpec("train.py", nodes="2-4", elastic=True)
    when = None if ends_in is None else clock.now + ends_in
    env = attempt_env(run, run.attempt(2), 1, "id", when, spec)
    exports = env.to_env()
    assert (exports["HPC_DDP_WARN_S"], bool(exports["HPC_DDP_END_TIME"])) == (warn_s, end)
    assert (exports["HPC_DDP_LEAST_NODES"], exports["HPC_DDP_RDZV_ID"]) == ("1", "id.2")
    assert replace(AttemptEnv.from_env(exports), end_time=when, warn_s=env.warn_s) == env


def test_ports_are_spread_over_the_range() -> None:
    ports = [batch._first_port(str(number)) for number in range(20_000)]
    assert (min(ports), ports[1] - ports[0]) == (10000, 7)
    assert max(ports) < 32768
    assert len(set(ports)) > 15_000


@pytest.mark.parametrize(
    ("restarts", "link", "begins"),
    [("", False, False), ("0", False, False), ("1", False, True), ("", True, True)],
)
def test_a_finished_run_is_not_begun_again(
    controller: Slurm, run: RunFolder, restarts: str, link: bool, begins: bool
) -> None:
    attempt = run.claim_attempt({}, lambda info: False)
    run.journal("batch").write(raw("verdict", cause="finished", action="none", why=""))
    if link:
        write_json(attempt.path / "next.json", {"job_id": "7"})
    environ = _environ(run, SLURM_RESTART_COUNT=restarts)
    if begins:
        assert begin(environ) is None
        assert len(run.attempts()) == 1
    else:
        with pytest.raises(HpcDdpError, match="is finished"):
            begin(environ)


def test_a_run_that_was_cancelled_is_not_requeued_back_to_life(
    controller: Slurm, run: RunFolder
) -> None:
    run.cancelled.touch()
    with pytest.raises(HpcDdpError, match="was cancelled, or given up"):
        begin(_environ(run, SLURM_RESTART_COUNT="1"))
    assert begin(_environ(run)) is not None  # somebody's own sbatch lifts the mark


@pytest.mark.parametrize(("attempts", "last"), [(0, 0), (2, 1)])
def test_a_run_without_hours_left_does_not_start(
    controller: Slurm, run: RunFolder, attempts: int, last: int
) -> None:
    _spec(run, budget_gpu_hours=2.0, nproc_per_node=2)
    for _ in range(attempts):
        run.claim_attempt({}, lambda info: False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "gpu_hours", lambda run, gpus: float(gpus))
        with pytest.raises(HpcDdpError, match="2 of 2 GPU hours are spent") as caught:
            begin(_environ(run))
    assert f"hpc-ddp submit --run {run.path} --budget-gpu-hours" in str(caught.value.hint)
    (event,) = raw_events(run.path)
    assert (event["cause"], event["action"], event["exit_code"]) == ("budget", "give up", 1)
    assert event["attempt"] == last


@pytest.mark.parametrize(
    ("earlier", "job", "live"),
    [
        ({"job_id": "7", "restarts": 0}, shown(), False),  # an earlier start of this very job
        ({"job_id": "6", "restarts": 1}, shown(restarts=1), True),
        ({"job_id": "6", "restarts": 1}, shown("SUSPENDED", 1), True),
        ({"job_id": "6", "restarts": 1}, shown(restarts=2), False),
        ({"job_id": "6", "restarts": 1}, shown("COMPLETED", 1), False),
        ({"job_id": "6"}, None, False),
        (process.identity(), shown(), True),
        ({**process.identity(), "pid": 1 << 30}, shown(), False),
    ],
)
def test_two_attempts_are_not_run_at_once(
    slurm_commands: Slurm,
    clock: Clock,
    run: RunFolder,
    earlier: dict[str, Any],
    job: str | None,
    live: bool,
) -> None:
    slurm_commands.answer("scontrol", job or "", "Invalid job id specified", int(job is None))
    assert is_attempt_live(run, JobRef("7"), earlier) is live


def test_no_answer_does_not_say_that_the_other_job_is_over(
    slurm_commands: Slurm, clock: Clock, run: RunFolder
) -> None:
    for _ in range(30):
        slurm_commands.answer("scontrol", err="Unable to contact slurm controller", code=1)
    slurm_commands.answer("scontrol", shown("COMPLETED"))
    assert not is_attempt_live(run, JobRef("7"), {"job_id": "6", "restarts": 0})
    assert sum(clock.slept) > 780  # s, which a controller was away for


def test_of_thousands_of_nodes_the_step_can_start(
    slurm_commands: Slurm, clock: Clock, run: RunFolder
) -> None:
    """Linux starts no process with a variable of more than 128 KiB."""
    names = "seq -f nid%05g.cluster.site.org 9999"
    answer = f"[ $2 = hostnames ] && {names} || cat <<'x'\n{shown()}x\n"
    slurm_commands.answer_by("scontrol", answer)
    _spec(run, nodes=9999)
    environ = _environ(run)
    exports = begin(environ)
    assert exports is not None
    printed = subprocess.check_output(["env"], env={**environ, **exports}, text=True)
    assert "HPC_DDP_NNODES=9999\n" in printed
    env = AttemptEnv.from_env({**environ, **exports})
    assert env.nodes[::9998] == ("nid00001.cluster.site.org", "nid09999.cluster.site.org")


def test_where_the_other_job_can_not_be_asked_for_nothing_is_begun(
    slurm_commands: Slurm, run: RunFolder
) -> None:
    slurm_commands.answer("scontrol", err="Access denied", code=1)
    with pytest.raises(HpcDdpError, match="Access denied"):
        is_attempt_live(run, JobRef("7"), {"job_id": "6"})


def test_a_task_of_an_array_has_a_folder_of_its_own(controller: Slurm, run: RunFolder) -> None:
    _spec(run, array="0-1", sweep={"lr": ("1", "2")}, args=("a",))
    environ = _environ(run, SLURM_ARRAY_TASK_ID="1", SLURM_ARRAY_JOB_ID="5")
    exports = begin(environ)
    assert exports is not None
    task = run.task(1)
    assert exports["HPC_DDP_RUN"] == str(task.path)
    assert JobSpec.from_json(task.job_json.read_text()).args == ("a", "--lr=2")
    assert os.readlink(task.path / "lib") == "../lib"
    assert linked(run, "7").resolve() == task.path
    last = environ | {"SLURM_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "0"}
    assert begin(last) is not None
    assert batch._run_of({**environ, "HPC_DDP_RUN": str(task.path)}) == task
    assert not linked(run, "5").exists()  # the array's own, linked at the submit


def test_a_link_of_a_chain_queues_the_next_one(controller: Slurm, run: RunFolder) -> None:
    _spec(run, nodes=2, continue_by="resubmit")
    controller.answer("sbatch", "8\n")
    assert begin(_environ(run)) is not None
    assert read_json(run.attempt(0).path / "next.json") == {"job_id": "8"}


def test_a_link_queues_the_next_one_before_its_set_up(controller: Slurm, run: RunFolder) -> None:
    _spec(run, nodes=2, continue_by="resubmit")
    controller.answer("sbatch", "8\n")
    batch.queue_next(_environ(run))
    assert read_json(run.early_links) == {"7": "8"}
    assert linked(run, "8").resolve() == run.path
    batch.queue_next(_environ(run, SLURM_RESTART_COUNT="1"))
    assert begin(_environ(run)) is not None
    assert read_json(run.attempt(0).path / "next.json") == {"job_id": "8"}
    assert not run.early_links.exists()
    assert len(controller.calls("sbatch")) == 1


def test_a_run_that_is_not_to_go_on_queues_no_link(controller: Slurm, run: RunFolder) -> None:
    _spec(run, nodes=2, continue_by="resubmit")
    write_json(run.early_links, {"6": "7"})
    run.cancelled.touch()
    with pytest.raises(HpcDdpError, match="was cancelled"):
        batch.queue_next(_environ(run))
    run.journal("batch").write(raw("verdict", cause="finished", action="none", why=""))
    batch.queue_next(_environ(run))
    assert controller.calls("sbatch") == []


def test_of_two_shells_in_an_allocation_the_second_waits(
    controller: Slurm, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is the same, and so is its restart count."""
    environ = _environ(run, HPC_DDP_INTERACTIVE="1")
    assert begin(environ) is not None
    with pytest.raises(HpcDdpError, match="is already being run"):
        begin(environ)
    monkeypatch.setattr(process, "is_live", lambda info: False)  # it was ended
    assert begin(environ) is not None


# --- while it runs -------------------------------------------------------------------------


@pytest.fixture
def attempt(run: RunFolder) -> AttemptFolder:
    return run.claim_attempt({"job_id": "7", "nodes": ["n1", "n2"]}, lambda info: False)


def _in_step(run: RunFolder, **values: str) -> dict[str, str]:
    return _environ(
        run,
        **{
            "HPC_DDP_ATTEMPT": "0",
            "HPC_DDP_RESTARTS": "0",
            "HPC_DDP_END_TIME": f"{END:.0f}",
        }
        | values,
    )


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Callable[..., list[float]]:
    """Have Slurm give a job one end after the other, each from a time on, None for no answer;
    return when it was asked."""

    def set_limits(is_preempted: bool = False, **ends: float | None) -> list[float]:
        asked_at: list[float] = []

        def ask(job_id: str, is_quiet: bool = False) -> Any:
            asked_at.append(clock.now)
            end = [end for since, end in ends.items() if float(since[1:]) <= clock.now][-1]
            if end is None:
                return None
            left_s = end - clock.now
            return SimpleNamespace(end_time=end, left_s=left_s, preempted=is_preempted)

        monkeypatch.setattr(batch, "ask", ask)
        return asked_at

    return set_limits


@pytest.mark.parametrize(
    ("is_preempted", "end_in", "warn_s", "word", "slept"),
    [
        (False, 1000.0, "60", "warning signal", 940.0),
        (False, 1000.0, "", "warning signal", 1000.0),
        (False, 1000.0, "2000", "warning signal", 0.0),
        (True, 1000.0, "60", "preemption", 0.0),
        (False, None, "60", "warning signal", 0.0),
    ],
)
def test_a_warning_is_passed_on_in_time(
    clock: Clock,
    run: RunFolder,
    attempt: AttemptFolder,
    limits: Callable[..., list[float]],
    is_preempted: bool,
    end_in: float | None,
    warn_s: str,
    word: str,
    slept: float,
) -> None:
    limits(is_preempted, _0=None if end_in is None else clock.now + end_in)
    warned(_in_step(run, HPC_DDP_WARN_S=warn_s))
    assert attempt.notice.read_text() == word
    assert sum(clock.slept) == pytest.approx(slept)


@pytest.mark.parametrize(
    ("later", "last"),
    [
        (200_000.0, 199_940),  # extended by the operator
        (50_000.0, 49_940),  # shortened
        (None, 86_340),  # the controller is down: what is known counts
        (math.inf, None),  # set to UNLIMITED
    ],
)
def test_the_end_time_is_asked_for_again_and_again(
    clock: Clock,
    run: RunFolder,
    attempt: AttemptFolder,
    limits: Callable[..., list[float]],
    later: float | None,
    last: float | None,
) -> None:
    clock.now = 0.0
    asked_at = limits(_0=86_400.0, _20000=later, _300000=300_050.0)
    batch.watch(_in_step(run, HPC_DDP_WARN_S="60", HPC_DDP_END_TIME="86400"))
    if last is None:  # until there is a limit again
        assert attempt.end_time.read_text() == "300050"
        return
    assert asked_at[-1] == pytest.approx(last)  # just before the nodes are warned
    assert attempt.end_time.read_text() == (f"{later:.0f}" if later else "")
    assert len(asked_at) < 90


def test_a_limit_that_comes_later_is_known(
    clock: Clock, run: RunFolder, attempt: AttemptFolder, limits: Callable[..., list[float]]
) -> None:
    clock.now = 0.0
    limits(_0=math.inf, _5000=9000.0)
    batch.watch(_in_step(run, HPC_DDP_WARN_S="60", HPC_DDP_END_TIME=""))
    assert attempt.end_time.read_text() == "9000"
    assert clock.now == pytest.approx(8940.0)


def test_a_warning_that_came_before_the_limit_was_extended_waits(
    clock: Clock, run: RunFolder, attempt: AttemptFolder, limits: Callable[..., list[float]]
) -> None:
    clock.now = 80.0
    limits(_0=150.0, _85=1150.0)
    warned(_in_step(run, HPC_DDP_WARN_S="60", HPC_DDP_END_TIME="150"))
    assert clock.now == pytest.approx(1090.0)
    assert attempt.end_time.read_text() == "1150"
    assert attempt.notice.read_text() == "warning signal"


@pytest.mark.parametrize(
    ("left_s", "seconds"), [(1000.0, 300), (320.0, 300), (120.0, 100), (3.0, 1), (None, 300)]
)
def test_a_teardown_leaves_time_for_the_verdict(
    clock: Clock,
    run: RunFolder,
    attempt: AttemptFolder,
    limits: Callable[..., list[float]],
    printed: list[str],
    left_s: float | None,
    seconds: int,
) -> None:
    limits(_0=clock.now + left_s if left_s else None)
    assert batch.teardown_time(_in_step(run, HPC_DDP_END_TIME="")) == seconds
    assert bool(printed) == (seconds < 300)


@pytest.mark.parametrize(
    ("text", "cpus"), [("64(x2),48", 48), ("8", 8), ("36,72(x12)", 36), ("", 1), ("4(x16)", 4)]
)
def test_the_smallest_node_counts(text: str, cpus: int) -> None:
    assert batch.least_cpus(text) == cpus


def test_another_port_is_tried_without_what_the_first_one_left(
    run: RunFolder, attempt: AttemptFolder
) -> None:
    node = attempt.node("n1")
    node.path.mkdir()
    for path in (node.record, attempt.node("n1", 1).record, attempt.port_taken):
        path.write_text("{}")
    attempt.failed.write_text("n1")
    assert next_port(_in_step(run, HPC_DDP_PORT="32767")) >= 10000
    assert (attempt.failed.read_text(), node.records()) == ("", [])
    assert not attempt.port_taken.exists()


def test_the_next_port_is_another_one(
    run: RunFolder, attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt.port_taken.touch()
    monkeypatch.setattr(batch, "free_port", lambda start: start)
    assert next_port(_in_step(run, HPC_DDP_PORT="20000")) == 20001


# --- after it ------------------------------------------------------------------------------


def _record(attempt: AttemptFolder, node: str, **values: Any) -> None:
    attempt.node(node).path.mkdir(exist_ok=True)
    record = {"node": node, "code": 0, "notice": None, "failures": [], **values}
    attempt.node(node).record.write_text(json.dumps(record))


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said to the user."""
    lines: list[str] = []
    for module in (batch, excluded_nodes, gather_facts, requeue):
        monkeypatch.setattr(module, "say", lines.append)
    return lines


def test_an_end_without_trouble(
    controller: Slurm, run: RunFolder, attempt: AttemptFolder, printed: list[str]
) -> None:
    for node in ("n1", "n2"):
        _record(attempt, node)
    assert verdict(_in_step(run)) == 0
    (event,) = raw_events(run.path)
    assert (event["cause"], event["action"], event["why"], event["exit_code"]) == (
        *("finished", "none", ""),
        0,
    )
    assert (event["progress"], event["step"], event["bad_nodes"]) == (False, None, [])
    assert "rank" not in event
    assert printed == ["attempt 0: finished"]
    assert controller.calls("sinfo") == []


def test_an_error_of_the_script(
    controller: Slurm, run: RunFolder, attempt: AttemptFolder, printed: list[str]
) -> None:
    failure = {"rank": 3, "code": 4, "time": 1.0, "error": "ValueError: x"}
    _record(attempt, "n1", code=1)
    _record(attempt, "n2", code=1, failures=[failure])
    assert verdict(_in_step(run)) == 4
    (event,) = raw_events(run.path)
    assert (event["cause"], event["action"], event["exit_code"]) == ("failed", "give up", 4)
    assert (event["rank"], event["node"], event["error"]) == (3, "n2", "ValueError: x")
    assert printed == [
        f"its log: {attempt.path}/n2/rank-3.log",
        "attempt 0: rank 3 on n2: ValueError: x; it came before the first step, and would come"
        " again; given up",
    ]


@pytest.mark.parametrize(("step", "then"), [(None, "it starts over"), (5, "it goes on")])
def test_a_lost_node_is_kept_off_the_requeued_job(
    controller: Slurm,
    run: RunFolder,
    attempt: AttemptFolder,
    printed: list[str],
    step: int | None,
    then: str,
) -> None:
    controller.answer("sinfo", "n2|down*\n")
    controller.answer("sbatch")
    if step:
        run.journal("rank-0").write(raw("first_step", step=step))
    _record(attempt, "n1")
    assert verdict(_in_step(run)) == 0
    (event,) = [event for event in raw_events(run.path) if event["event"] == "verdict"]
    assert (event["cause"], event["bad_nodes"]) == ("node lost", ["n2"])
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
def test_what_is_on_disk_and_in_slurm_are_facts(
    slurm_commands: Slurm,
    clock: Clock,
    run: RunFolder,
    attempt: AttemptFolder,
    printed: list[str],
    marks: dict[str, Any],
    cause: str,
    text: str,
) -> None:
    slurm_commands.answer("scontrol", shown(restarts=marks.get("restarts", 0)))
    slurm_commands.answer("sinfo")
    if "cancelled" in marks:
        run.cancelled.touch()
    if "superseded" in marks:
        run.claim_attempt({}, lambda info: False)
    verdict(_in_step(run))
    assert raw_events(run.path)[0]["cause"] == cause
    assert printed == [text]


def test_of_a_silent_node_slurm_is_asked_where_there_is_one(
    run: RunFolder, attempt: AttemptFolder, slurm_commands: Slurm
) -> None:
    slurm_commands.answer("sinfo", "n1|down\nn2|down\n")
    facts, decided = judge(run, attempt, _in_step(run), None)
    assert (facts.lost_nodes, decided.cause) == ([], "node lost")
    assert slurm_commands.calls("sinfo") == []


# --- as the batch script calls it ----------------------------------------------------------


def test_what_is_exported_survives_a_shell() -> None:
    lines = batch.export_lines({"A": "a b'$(x)", "B": ""})
    done = subprocess.run(
        ["bash", "-c", f'{lines}printf "%s|%s" "$A" "$B"'], capture_output=True, text=True
    )
    assert done.stdout == "a b'$(x)|"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, run: RunFolder) -> Callable[..., int]:
    def main(*words: str, **environ: str) -> int:
        for name, value in _in_step(run, **environ).items():
            monkeypatch.setenv(name, value)
        return batch.main(list(words))

    return main


def test_each_call_of_the_batch_script(
    controller: Slurm,
    run: RunFolder,
    call: Callable[..., int],
    printed: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call("begin") == 0
    assert "export HPC_DDP_ATTEMPT=0\n" in capsys.readouterr().out
    attempt = run.attempt(0)
    assert call("interrupted") == 0
    assert attempt.notice.read_text() == "interrupted"
    assert call("warned", HPC_DDP_WARN_S="2000", HPC_DDP_END_TIME="1") == 0
    assert attempt.notice.read_text() == "warning signal"
    assert call("watch", HPC_DDP_WARN_S="2000", HPC_DDP_END_TIME="1") == 0
    assert call("teardown-time", HPC_DDP_END_TIME="1") == 0
    assert int(capsys.readouterr().out) >= 1
    attempt.port_taken.touch()
    assert call("next-port", HPC_DDP_PORT="20000") == 0
    assert int(capsys.readouterr().out) > 20000
    for node in ("n1", "n2"):
        _record(attempt, node, code=1, failures=[{"rank": 0, "code": 3, "time": 1, "error": ""}])
    assert call("verdict") == 3
    assert call("no such") == 2
    assert printed[-1] == "unknown call ['no such']"
    run.journal("batch", 1).write(raw("verdict", cause="finished", action="none", why=""))
    assert call("begin", SLURM_RESTART_COUNT="1") == 0
    assert capsys.readouterr().out == "exit 0\n"


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
    controller.answer("scontrol", f"{shown()}   ExpeditedRequeue={expedited}\n")
    assert call("begin") == 0
    if not code:
        run.journal("rank-0", 0).write(raw("finished", step=1))
    failures = [{"rank": 0, "code": 3, "time": 1, "error": ""}] if code else []
    for node in ("n1", "n2"):
        _record(run.attempt(0), node, code=code, failures=failures)
    assert call("verdict") == code
    assert [words for words in controller.calls("scontrol") if words[0] == "update"] == updates


def test_what_can_not_be_done_is_said(
    controller: Slurm, run: RunFolder, call: Callable[..., int], printed: list[str]
) -> None:
    run.journal("batch").write(raw("verdict", cause="finished", action="none", why=""))
    assert call("begin") == 1
    assert printed == [
        f"run {run.path} is finished",
        "hint: start a new one: hpc-ddp submit",
    ]
    assert call("interrupted", HPC_DDP_ATTEMPT="9") == 75
    assert "the run's folder can't be used: " in printed[-1]


def test_the_last_event_of_an_attempt_is_its_verdict(
    controller: Slurm, run: RunFolder, attempt: AttemptFolder, printed: list[str]
) -> None:
    run.journal("rank-0").write(raw("finished", step=3))
    for node in ("n1", "n2"):
        _record(attempt, node)
    verdict(_in_step(run))
    assert last_event(run.events(), VerdictGiven) == run.events()[-1]
    assert raw_events(run.path)[-1]["step"] == 3
