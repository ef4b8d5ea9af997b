"""`batch begin` starts an attempt, or refuses it; Slurm's commands are stand-ins."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core import file_io, process
from hpc_ddp.core.attempt_env import AttemptEnv
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.file_io import read_json, write_json
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.task_folder import run_of_job
from hpc_ddp.core.job.trackers import tracker_env
from hpc_ddp.core.job.variables import export_lines
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.live_jobs import is_attempt_live
from hpc_ddp.node import batch
from hpc_ddp.node.batch import attempt_env, begin
from tests.raw_events import raw, raw_events
from unit.fakes import Clock, Slurm, stop_clock
from unit.node.batch.fakes import END, answer_scontrol, job_environ, show_job, write_spec
from unit.report.written_runs import linked


def test_the_step_gets_its_variables(controller: Slurm, run: RunFolder) -> None:
    write_spec(run, nodes=2, host_suffix="-ib", signal="USR1@90", fabric="efa")
    answer_scontrol(controller, show_job(restarts=3))
    exports = begin(job_environ(run, SLURM_RESTART_COUNT="3", SLURM_CLUSTER_NAME="c"))
    assert exports is not None
    port = int(exports.pop("HPC_DDP_PORT"))
    assert 10000 <= port < 32768
    assert exports == {
        "HPC_DDP_RUN": str(run.path),
        "HPC_DDP_RESTARTS": "3",
        "HPC_DDP_HEAD": "n1-ib",
        "HPC_DDP_ATTEMPT": "0",
        "HPC_DDP_NNODES": "2",
        "HPC_DDP_LEAST_NODES": "2",
        "HPC_DDP_RDZV_ID": "run.0",
        "HPC_DDP_END_TIME": f"{END:.0f}",
        "HPC_DDP_FABRIC": "efa",
        "HPC_DDP_SIGNAL": "USR1",
        "HPC_DDP_WARN_S": "90",
        "HPC_DDP_CPUS": "1",
        "HPC_DDP_RESUME_ARGS": "",
        "HPC_DDP_RESUME_IF": "",
        "HPC_DDP_FIRST_ATTEMPT": "0",
        "HPC_DDP_WARM_START": "1",
        "HPC_DDP_SLURM_RESTARTS": "3",
        "HPC_DDP_FIRST_START": "yes",
        "SLURM_RESTART_COUNT": "3",
        **tracker_env(run, {}),
    }
    (event,) = raw_events(run.path)
    assert (event["event"], event["nodes"], event["cluster"]) == ("started", ["n1", "n2"], "c")
    assert (event["job_id"], event["restarts"]) == ("7", 3)
    assert run.attempt(0).info == {
        name: event[name] for name in ("job_id", "restarts", "host", "nodes", "cluster")
    }
    assert linked(run, "7", "c").resolve() == run.path
    assert not (run.attempt(0).path / "next.json").exists()


@pytest.mark.parametrize("option", ["requeue", "no-requeue"])
def test_a_job_that_may_not_be_requeued_is_allowed_to_be(
    controller: Slurm, run: RunFolder, option: str
) -> None:
    """By a site's plugin: Slurm ended a job that had lost a node, and the run was lost."""
    run.script.write_text(f"#!/bin/bash\n#SBATCH --{option}\n")
    answer_scontrol(controller, show_job().replace("Requeue=1", "Requeue=0"))
    assert begin(job_environ(run)) is not None
    changes = [words for words in controller.calls("scontrol") if words[0] == "update"]
    assert changes == [["update", "JobId=7", "Requeue=1"]] * (option == "requeue")


@pytest.mark.parametrize(
    ("preempted", "notice"), [("None", ""), ("2026-11-21T10:00:30", "preemption")]
)
def test_a_preemption_in_the_set_up_lines_is_the_attempts_notice(
    controller: Slurm, run: RunFolder, preempted: str, notice: str
) -> None:
    """Slurm signals the steps that there are, and no later one."""
    write_spec(run, nodes=2)
    answer_scontrol(controller, show_job(preempted=preempted))
    assert begin(job_environ(run)) is not None
    assert run.attempt(0).notice.read_text() == notice


def test_two_runs_of_one_allocation_do_not_meet(
    controller: Slurm, run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "free_port", lambda start: start)  # they start at the same moment
    other = RunFolder(tmp_path / "other")
    answer_scontrol(controller, show_job())
    environments = []
    for folder in (run, other):
        folder.path.mkdir(exist_ok=True)
        write_spec(folder, nodes=2)
        environments.append(begin(job_environ(folder)))
    first, second = environments
    assert first is not None
    assert second is not None
    for name in ("HPC_DDP_PORT", "HPC_DDP_RDZV_ID"):
        assert first[name] != second[name]


@pytest.mark.parametrize(
    ("ends_in", "warn_s", "end"), [(300.0, "30", True), (6000.0, "60", True), (None, "60", False)]
)
def test_a_short_attempt_is_warned_in_its_last_tenth(
    run: RunFolder, clock: Clock, ends_in: float | None, warn_s: str, end: bool
) -> None:
    spec = JobSpec("train.py", nodes="2-4", elastic=True)
    when = None if ends_in is None else clock.now + ends_in
    env = attempt_env(run, run.attempt(2), 1, when, spec)
    exports = env.to_env()
    assert (exports["HPC_DDP_WARN_S"], bool(exports["HPC_DDP_END_TIME"])) == (warn_s, end)
    assert (exports["HPC_DDP_LEAST_NODES"], exports["HPC_DDP_RDZV_ID"]) == ("1", "run.2")
    assert replace(AttemptEnv.from_env(exports), end_time=when, warn_s=env.warn_s) == env


@pytest.mark.parametrize(
    ("restarts", "link", "begins"),
    [("", False, False), ("0", False, False), ("1", False, True), ("", True, True)],
)
def test_a_finished_run_is_not_begun_again(
    controller: Slurm, run: RunFolder, restarts: str, link: bool, begins: bool
) -> None:
    attempt = run.claim_attempt({}, lambda identity: False)
    run.journal("batch").write(raw("verdict", cause="finished", action="none", why=""))
    if link:
        write_json(attempt.path / "next.json", {"job_id": "7"})
    answer_scontrol(controller, show_job(restarts=int(restarts or 0)))
    environ = job_environ(run, SLURM_RESTART_COUNT=restarts)
    if begins:
        assert begin(environ) is None
        assert len(run.attempts()) == 1
    else:
        with pytest.raises(HpcDdpError, match="is finished"):
            begin(environ)


def test_the_restarts_of_a_job_in_which_sbatch_was_called_are_not_its_own(
    controller: Slurm, run: RunFolder
) -> None:
    """Slurm leaves SLURM_RESTART_COUNT as it is in a job that it has not started again."""
    exports = begin(job_environ(run, SLURM_RESTART_COUNT="2"))
    assert exports is not None
    assert exports["HPC_DDP_RESTARTS"] == "0"
    assert run.attempt(0).info["restarts"] == 0


def test_a_run_that_was_cancelled_is_not_requeued_back_to_life(
    controller: Slurm, run: RunFolder
) -> None:
    run.cancelled.touch()
    answer_scontrol(controller, show_job(restarts=1))
    with pytest.raises(HpcDdpError, match="was cancelled, or given up"):
        begin(job_environ(run, SLURM_RESTART_COUNT="1"))
    assert begin(job_environ(run)) is not None  # somebody's own sbatch lifts the mark


@pytest.mark.parametrize(("attempts", "last"), [(0, 0), (2, 1)])
def test_a_run_without_hours_left_does_not_start(
    controller: Slurm, run: RunFolder, attempts: int, last: int
) -> None:
    write_spec(run, budget_gpu_hours=2.0, nproc_per_node=2)
    for _ in range(attempts):
        run.claim_attempt({}, lambda identity: False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "gpu_hours", lambda run, gpus: float(gpus))
        with pytest.raises(HpcDdpError, match="2 of 2 GPU hours are spent") as caught:
            begin(job_environ(run))
    assert f"hpc-ddp submit --run {run.path} --budget-gpu-hours" in str(caught.value.hint)
    (event,) = raw_events(run.path)
    assert (event["cause"], event["action"], event["exit_code"]) == ("budget", "give up", 1)
    assert event["attempt"] == last


@pytest.mark.parametrize(
    ("earlier", "job", "live"),
    [
        ({"job_id": "7", "restarts": 0}, show_job(), False),  # an earlier start of this very job
        ({"job_id": "6", "restarts": 1}, show_job(restarts=1), True),
        ({"job_id": "6", "restarts": 1}, show_job("SUSPENDED", 1), True),
        ({"job_id": "6", "restarts": 1}, show_job(restarts=2), False),
        ({"job_id": "6", "restarts": 1}, show_job("COMPLETED", 1), False),
        ({"job_id": "6"}, None, False),
        (process.identity(), show_job(), True),
        ({**process.identity(), "pid": 1 << 30}, show_job(), False),
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


def test_a_job_of_which_slurm_does_not_answer_counts_as_live(
    slurm_commands: Slurm, clock: Clock, run: RunFolder
) -> None:
    for _ in range(30):
        slurm_commands.answer("scontrol", err="Unable to contact slurm controller", code=1)
    slurm_commands.answer("scontrol", show_job("COMPLETED"))
    assert not is_attempt_live(run, JobRef("7"), {"job_id": "6", "restarts": 0})
    assert sum(clock.slept) > 780  # s, which a controller was away for


def test_a_step_of_thousands_of_nodes_starts(
    slurm_commands: Slurm, clock: Clock, run: RunFolder
) -> None:
    """Linux starts no process with a variable of more than 128 KiB."""
    names = "seq -f nid%05g.cluster.site.org 9999"
    answer = f"[ $2 = hostnames ] && {names} || cat <<'x'\n{show_job()}x\n"
    slurm_commands.answer_by("scontrol", answer)
    write_spec(run, nodes=9999)
    environ = job_environ(run)
    exports = begin(environ)
    assert exports is not None
    printed = subprocess.check_output(["env"], env={**environ, **exports}, text=True)
    assert "HPC_DDP_NNODES=9999\n" in printed
    env = AttemptEnv.from_env({**environ, **exports})
    assert env.nodes[::9998] == ("nid00001.cluster.site.org", "nid09999.cluster.site.org")


def test_a_refused_query_of_the_other_job_starts_nothing(
    slurm_commands: Slurm, run: RunFolder
) -> None:
    slurm_commands.answer("scontrol", err="Access denied", code=1)
    with pytest.raises(HpcDdpError, match="Access denied"):
        is_attempt_live(run, JobRef("7"), {"job_id": "6"})


def test_a_task_of_an_array_has_a_folder_of_its_own(controller: Slurm, run: RunFolder) -> None:
    write_spec(run, array="0-1", sweep={"lr": ("1", "2")}, args=("a",))
    environ = job_environ(run, SLURM_ARRAY_TASK_ID="1", SLURM_ARRAY_JOB_ID="5")
    exports = begin(environ)
    assert exports is not None
    task = run.task(1)
    assert exports["HPC_DDP_RUN"] == str(task.path)
    assert JobSpec.from_json(task.job_json.read_text()).args == ("a", "--lr=2")
    assert os.readlink(task.path / "lib") == "../lib"
    assert linked(run, "7").resolve() == task.path
    last = environ | {"SLURM_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "0"}
    assert begin(last) is not None
    assert run_of_job({**environ, "HPC_DDP_RUN": str(task.path)}) == task
    assert not linked(run, "5").exists()  # the array's own, linked at the submit


def test_a_link_of_a_chain_queues_the_next_one(controller: Slurm, run: RunFolder) -> None:
    write_spec(run, nodes=2, continue_by="resubmit")
    controller.answer("sbatch", "8\n")
    assert begin(job_environ(run)) is not None
    assert read_json(run.attempt(0).path / "next.json") == {"job_id": "8"}


def test_a_link_queues_the_next_one_before_its_set_up(controller: Slurm, run: RunFolder) -> None:
    write_spec(run, nodes=2, continue_by="resubmit")
    controller.answer("sbatch", "8\n")
    batch.queue_next(job_environ(run))
    assert read_json(run.early_links) == {"7": "8"}
    assert linked(run, "8").resolve() == run.path
    answer_scontrol(controller, show_job(restarts=1))
    batch.queue_next(job_environ(run, SLURM_RESTART_COUNT="1"))
    assert begin(job_environ(run)) is not None
    assert read_json(run.attempt(0).path / "next.json") == {"job_id": "8"}
    assert not run.early_links.exists()
    assert len(controller.calls("sbatch")) == 1


def _queue_next_link(controller: Slurm, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queue job 8 as the next one of a chain, and set the variables of its first job."""
    write_spec(run, nodes=2, continue_by="resubmit")
    controller.answer("sbatch", "8\n")
    batch.queue_next(job_environ(run))
    for name, text in job_environ(run).items():
        monkeypatch.setenv(name, text)


def test_a_set_up_line_that_ends_the_job_ends_the_chain(
    controller: Slurm,
    run: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _queue_next_link(controller, run, monkeypatch)
    answer_scontrol(controller, show_job())
    assert batch.main(["failed", "0"]) == 0
    assert (read_json(run.early_links), controller.calls("scancel")) == ({}, [["8"]])
    assert "a set-up line has ended the job, with code 0" in "".join(capsys.readouterr())


@pytest.mark.parametrize("state", ["COMPLETING", "PREEMPTED"])
def test_a_job_that_slurm_ends_in_its_set_up_does_not_end_the_chain(
    controller: Slurm, run: RunFolder, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """The shell's code is then that of the command before the signal."""
    _queue_next_link(controller, run, monkeypatch)
    answer_scontrol(controller, show_job(state))
    assert batch.main(["failed", "0"]) == 0
    assert (read_json(run.early_links), controller.calls("scancel")) == ({"7": "8"}, [])


def test_a_cancelled_or_finished_run_queues_no_link(controller: Slurm, run: RunFolder) -> None:
    write_spec(run, nodes=2, continue_by="resubmit")
    write_json(run.early_links, {"6": "7"})
    run.cancelled.touch()
    with pytest.raises(HpcDdpError, match="was cancelled"):
        batch.queue_next(job_environ(run))
    run.journal("batch").write(raw("verdict", cause="finished", action="none", why=""))
    batch.queue_next(job_environ(run))
    assert controller.calls("sbatch") == []


def test_an_allocation_is_no_part_of_a_chain(controller: Slurm, run: RunFolder) -> None:
    """A site may want chains; one that was tried in a salloc would go on by itself."""
    write_spec(run, nodes=2, continue_by="resubmit")
    environ = job_environ(run, HPC_DDP_INTERACTIVE="1")
    batch.queue_next(environ)
    assert begin(environ) is not None
    assert controller.calls("sbatch") == []


def test_the_second_shell_of_an_allocation_is_refused(
    controller: Slurm, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is the same, and so is its restart count."""
    environ = job_environ(run, HPC_DDP_INTERACTIVE="1")
    assert begin(environ) is not None
    with pytest.raises(HpcDdpError, match="is already being run"):
        begin(environ)
    monkeypatch.setattr(process, "is_live", lambda identity: False)  # it was ended
    assert begin(environ) is not None


def test_exported_values_survive_a_shell() -> None:
    lines = export_lines({"A": "a b'$(x)", "B": ""})
    done = subprocess.run(
        ["bash", "-c", f'{lines}printf "%s|%s" "$A" "$B"'], capture_output=True, text=True
    )
    assert done.stdout == "a b'$(x)|"


@pytest.mark.parametrize("name", ["enforce_budget", "limit_silent_ends"])
def test_a_start_waits_for_its_disk(
    controller: Slurm, run: RunFolder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    clock = stop_clock(monkeypatch, file_io)
    look = getattr(batch, name)
    refusals = [OSError(116, "Stale file handle")] * 2

    def refuse(*words: Any) -> None:
        if refusals:
            raise refusals.pop()
        look(*words)

    monkeypatch.setattr(batch, name, refuse)
    assert begin(job_environ(run)) is not None
    assert len(clock.slept) == 2


@pytest.mark.parametrize("is_task", [False, True])
def test_a_teardown_that_was_cut_off_is_run_again(
    controller: Slurm, run: RunFolder, is_task: bool
) -> None:
    """As by a preemption after the training has finished. An array's tasks had the array's folder
    in HPC_DDP_RUN, and marked the array."""
    write_spec(run, teardown=("cp -r a b",), array="0-1" if is_task else None)
    environ = job_environ(run)
    if is_task:
        environ |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    run = run_of_job(environ)
    run.claim_attempt({}, lambda identity: False)
    assert batch.lines_of_no_attempt(environ) == "exit 0"  # the run is not finished
    run.journal("rank-0").write(raw("finished", step=1))
    parts = (
        '_tear_down() { echo "$HPC_DDP_RUN $HPC_DDP_VERDICT $1"; _sigterm=$SIGNAL; }',
        '_run_part() { echo "$*"; return 75; }',
        batch.lines_of_no_attempt(environ),
        "echo not here",
    )
    line = f"{run.path} finished 980\n"
    for name, printed, code in (("", line, 0), ("yes", f"{line}batch cut-off\n", 75)):
        argv = ["bash", "-c", "\n".join(parts)]
        played = subprocess.run(argv, env={"SIGNAL": name}, capture_output=True, text=True)
        assert (played.returncode, played.stdout) == (code, printed), played.stderr
    run.torn_down.touch()
    assert batch.lines_of_no_attempt(environ) == "exit 0"
