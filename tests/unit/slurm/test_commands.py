"""Slurm's commands are called, read and called again; stand-ins take their place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_ddp import slurm
from hpc_ddp.core import attempt_env
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.slurm import NoAnswerError
from hpc_ddp.slurm_text import JobRecord, QueuedJob
from unit.fakes import Clock, Slurm, squeue_rows
from unit.slurm.fakes import TIMED_OUT


@pytest.mark.parametrize(
    ("out", "err", "code", "message", "hint"),
    [
        ("", "sbatch: error: no\nsbatch: error: way\n", 3, "refused: no; way", "man sbatch"),
        ("on stdout\n", "", 1, "refused: on stdout", "man sbatch"),
        ("", "", 9, "refused: exit code 9", "man sbatch"),
        ("", "sbatch: error: Invalid account\n", 1, "Invalid account", "sacctmgr show"),
        ("", "error: invalid partition specified: x", 1, "specified: x", "sinfo -s"),
    ],
)
def test_a_refusal_is_worded(
    slurm_commands: Slurm, out: str, err: str, code: int, message: str, hint: str
) -> None:
    slurm_commands.answer("sbatch", out, err, code)
    with pytest.raises(HpcDdpError) as caught:
        slurm.sbatch(Path("job"), os.environ)
    assert not isinstance(caught.value, NoAnswerError)
    assert caught.value.message.endswith(message)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(hint)


def test_a_machine_without_slurm_and_a_command_that_hangs(
    tmp_path: Path, slurm_commands: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_commands.answer_by("scontrol", "exec sleep 60")
    with pytest.raises(NoAnswerError, match=r"scontrol gave no answer within 0 s"):
        slurm._run(["scontrol"], timeout_s=0.05)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HpcDdpError, match="this machine has no Slurm client") as caught:
        slurm.show_config()
    assert "dry-run" in str(caught.value.hint)


def test_changes_of_a_job_call_slurms_commands(slurm_commands: Slurm, tmp_path: Path) -> None:
    for command in ("scontrol", "sbatch", "scancel"):
        slurm_commands.answer(command)
    slurm.requeue("7")
    slurm.update_job("7", "ExcNodeList=n1,n2")
    assert slurm.why_refused(Path("job"), "--exclude=n1") == ""
    slurm.cancel(["7", "8_1"])
    assert slurm_commands.calls("scontrol") == [
        ["requeue", "7"],
        ["update", "JobId=7", "ExcNodeList=n1,n2"],
    ]
    assert slurm_commands.calls("sbatch") == [["--test-only", "--exclude=n1", "job"]]
    assert slurm_commands.calls("scancel") == [["7", "8_1"]]


# A site without it, or a controller that is away, must not end a command.
@pytest.mark.parametrize(
    ("ask", "nothing"),
    [
        (
            lambda: slurm.why_refused(Path("job")),
            "sbatch refused: no answer is laid down for sbatch",
        ),
        (lambda: slurm.takes_option("sbatch", "gres"), False),
        (lambda: slurm.unusable_nodes(["n1"]), []),
        (lambda: slurm.show_accounting("qos"), []),
        (lambda: slurm.show_accounting("user", "me", "withassoc"), []),
    ],
)
def test_optional_queries_return_nothing_on_errors(
    slurm_commands: Slurm, ask: Callable[[], object], nothing: object
) -> None:
    assert ask() == nothing


def test_a_controller_that_is_away_is_waited_for(
    slurm_commands: Slurm, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(6):
        slurm_commands.answer("scontrol", err=TIMED_OUT, code=1)
    slurm_commands.answer("scontrol", "   JobState=RUNNING Reason=None\n")
    assert slurm.show_job("7").state == "RUNNING"
    assert slurm_commands.calls("scontrol") == [["show", "job", "7"]] * 7
    assert clock.slept == [1, 2, 4, 8, 16, 30]
    assert (
        capsys.readouterr().err.count("Socket timed out on send/recv operation; trying again") == 6
    )


@pytest.mark.parametrize(
    "error",
    [
        "scontrol: error: Munge encode failed: Failed to access /run/munge/munge.socket.2",
        "slurm_load_jobs error: Protocol authentication error",
        "Invalid authentication credential",
        "scontrol: error: get_addr_info: getaddrinfo() failed: Name or service not known",
        'scontrol: error: slurm_set_addr: Unable to resolve "ctl"',
        "scontrol: fatal: Could not establish a configuration source",
    ],
)
def test_munged_or_a_name_server_that_is_away_is_waited_for(
    slurm_commands: Slurm, clock: Clock, error: str
) -> None:
    """It is started again, say; a link of a chain that it refuses would end the chain."""
    slurm_commands.answer("scontrol", err=error, code=1)
    slurm_commands.answer("scontrol", "   JobState=RUNNING Reason=None\n")
    assert slurm.show_job("7").state == "RUNNING"


def test_a_client_whose_files_are_away_gives_no_answer(slurm_commands: Slurm, clock: Clock) -> None:
    """As at a start, where its libraries are on a disk that is away for a moment."""
    error = "scontrol: error while loading shared libraries: libslurmfull.so: cannot open"
    for _ in range(3):
        slurm_commands.answer("scontrol", err=error, code=127)
    slurm_commands.answer("scontrol", "n1\nn2\n")
    assert slurm.expand_hosts("n[1-2]") == ["n1", "n2"]
    assert len(clock.slept) == 3


def test_a_controller_is_awaited_for_a_bounded_time(slurm_commands: Slurm, clock: Clock) -> None:
    slurm_commands.answer("scontrol", err="Unable to contact slurm controller", code=1)
    with pytest.raises(NoAnswerError, match="scontrol got no answer"):
        slurm.show_job("7")
    assert slurm.PATIENCE_S - slurm.LONGEST_PAUSE_S < sum(clock.slept) <= slurm.PATIENCE_S


def test_a_refusal_is_not_tried_again(slurm_commands: Slurm, clock: Clock) -> None:
    slurm_commands.answer("scontrol", err="slurm_load_jobs error: Invalid job id specified", code=1)
    with pytest.raises(HpcDdpError, match="Invalid job id"):
        slurm.show_job("7")
    assert len(slurm_commands.calls("scontrol")) == 1


def test_cancel_passes_over_jobs_that_are_gone_alone(slurm_commands: Slurm) -> None:
    slurm_commands.answer("scancel", err="scancel: error: Invalid job id 7", code=1)
    slurm.cancel(["7"])
    slurm_commands.answer("scancel", err="scancel: error: Access denied", code=1)
    with pytest.raises(HpcDdpError, match="Access denied"):
        slurm.cancel(["7"])


@pytest.mark.parametrize(
    ("rows", "states"),
    [
        ("5|5|RUNNING|None|n1|9:00|/w|a\n", {"5": "RUNNING"}),
        # An array's own id is that of its last task. While others run, it stands for one of them.
        (
            "5|6|RUNNING|None|n1|9:00|/w|a\n5|5|COMPLETED|None|n2|0:00|/w|a\n",
            {"6": "RUNNING", "5": "RUNNING"},
        ),
        (
            "5|6|COMPLETED|None|n1|9:00|/w|a\n5|5|PENDING|None|||/w|a\n",
            {"6": "COMPLETED", "5": "PENDING"},
        ),
        ("5|6|RUNNING|None|n1|9:00|/w|a\n", {"6": "RUNNING", "5": "RUNNING"}),
        ("5|6|COMPLETED|None|n1|0:00|/w|a\n", {"6": "COMPLETED"}),
        ("5|5|SIGNALING|None|n1|9:00|/w|a\nnot|ours\n", {"5": "RUNNING"}),
    ],
)
def test_an_array_lives_as_long_as_one_of_its_tasks(
    slurm_commands: Slurm, rows: str, states: dict[str, str]
) -> None:
    slurm_commands.answer("squeue", squeue_rows(rows))
    assert {id: job.state for id, job in slurm.list_jobs().items()} == states


def test_lines_of_the_queue_are_parsed(slurm_commands: Slurm, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    rows = (
        f"5|5|PENDING|Priority|n[1-2]|1:00|{tmp_path}/link|job.sh\n"
        "6|6|RUNNING|None|n1|2:00|/w|/a|b\n7|7|PREEMPTED|None||2:00|/w|(null)\ntorn|\n"
    )
    slurm_commands.answer("squeue", squeue_rows(rows))
    assert slurm.list_jobs() == {
        "5": QueuedJob("PENDING", "Priority", "n[1-2]", "1:00", f"{tmp_path}/job.sh", "name"),
        "6": QueuedJob("RUNNING", "None", "n1", "2:00", "/a|b", "name"),
        "7": QueuedJob("PREEMPTED", "None", "", "2:00", "(null)", "name"),
    }


def test_a_job_that_is_forgotten_is_in_the_accounting(slurm_commands: Slurm) -> None:
    slurm_commands.answer("scontrol", err="Invalid job id specified", code=1)
    row = "CANCELLED by 1000|None|0:15|n1|2026-11-21T10:00:00"
    slurm_commands.answer("sacct", f"a line|of another kind\nFAILED||1:0||\n{row}\n")
    record = slurm.find_record("7")
    assert record == JobRecord("CANCELLED", "None", "0:15", "n1", record.start_time)
    assert record.start_time is not None
    assert slurm_commands.calls("sacct")[0][-1] == "--jobs=7"


@pytest.mark.parametrize("accounting", [("", 0), ("sacct: error: no accounting", 1)])
def test_an_unknown_job_is_an_error(slurm_commands: Slurm, accounting: tuple[str, int]) -> None:
    slurm_commands.answer("scontrol", err="Invalid job id specified", code=1)
    slurm_commands.answer("sacct", accounting[0], code=accounting[1])
    with pytest.raises(HpcDdpError, match="scontrol refused: Invalid job id"):
        slurm.find_record("7")


def test_nodes_that_are_down_or_do_not_answer(slurm_commands: Slurm) -> None:
    states = "n1|idle\nn2|down*\nn3|drained\nn4|mixed*\nn5|failing\nn6|allocated\nodd\n"
    slurm_commands.answer("sinfo", states)
    nodes = ["n6", "n5", "n4", "n3", "n2", "n1", "n0"]
    assert slurm.unusable_nodes(nodes) == ["n5", "n4", "n3", "n2"]
    assert slurm.unusable_nodes([]) == []
    assert len(slurm_commands.calls("sinfo")) == 1
    many = [f"nid{number:05}.cluster.site.org" for number in range(9999)]
    slurm_commands.answer("sinfo", f"{many[-1]}|down\n")
    assert slurm.unusable_nodes(many) == [many[-1]]


def test_names_that_are_too_long_for_a_command_are_refused(
    slurm_commands: Slurm, tmp_path: Path
) -> None:
    slurm_commands.answer("sbatch")
    too_long = f"--exclude={'n' * 140_000}"
    reason = slurm.why_refused(tmp_path / "job", too_long)
    assert reason == "sbatch can't be started: Argument list too long"


def test_a_host_list_is_expanded(slurm_commands: Slurm) -> None:
    banner = "-----\nNOTICE\n-----\nmaintenance on Friday\n"
    slurm_commands.answer("scontrol", f"{banner}n1\nn2\n")
    assert slurm.expand_hosts("n[1-2]") == ["n1", "n2"]
    assert slurm_commands.calls("scontrol") == [["show", "hostnames", "n[1-2]"]]
    with pytest.raises(HpcDdpError, match="'' of this job names no node"):
        slurm.expand_hosts("")
    assert len(slurm_commands.calls("scontrol")) == 1


def test_the_configuration_is_read(slurm_commands: Slurm) -> None:
    text = "Configuration data as of now\nA = 1\nB     = x=y\n\nCgroup Support:\nA = 2\n"
    slurm_commands.answer("scontrol", text)
    assert slurm.show_config() == {"A": "1", "B": "x=y"}


def test_rows_of_the_accounting_are_read(slurm_commands: Slurm) -> None:
    slurm_commands.answer("sacctmgr", "torn\nhigh|00:02:00|low|cluster\n")
    assert slurm.show_accounting("qos") == [
        {"Name": "high", "GraceTime": "00:02:00", "Preempt": "low", "PreemptMode": "cluster"}
    ]
    assert slurm_commands.calls("sacctmgr")[0][2:] == [
        *("show", "qos", "format=Name,GraceTime,Preempt,PreemptMode")
    ]


def test_options_added_by_a_site_are_read(slurm_commands: Slurm) -> None:
    slurm_commands.answer("sbatch", "  --uenv=NAME\n")
    assert slurm.takes_option("sbatch", "uenv")
    assert not slurm.takes_option("sbatch", "bb")


def test_times_are_read_with_any_format_of_a_profile(
    slurm_commands: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    slurm_commands.answer_by("scontrol", 'echo "   JobState=RUNNING Reason=$SLURM_TIME_FORMAT"')
    assert slurm.show_job("7").reason == "standard"


def test_variables_of_an_outer_job_are_dropped() -> None:
    environ = {
        "SLURM_CPU_BIND": "x",
        "SALLOC_A": "x",
        "SRUN_B": "x",
        "SLURM_CONF": "/c",
        "HOME": "/",
    }
    assert attempt_env.clean_env(environ) == {"SLURM_CONF": "/c", "HOME": "/"}


def test_variables_of_an_outer_run_are_dropped() -> None:
    """A job that a worker submits, or a script in an allocation, is none of that run's."""
    of_a_run = {"HPC_DDP_INTERACTIVE": "1", "HPC_DDP_NODE_INDEX": "0", "HPC_DDP_NODE_FOLDER": "/f"}
    of_a_run |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "1", "LOCAL_RANK": "1"}
    of_a_run |= {"MASTER_ADDR": "n1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=eth0"}
    of_a_run |= {"HCCL_SOCKET_IFNAME": "=eth0", "CCL_KVS_IFACE": "eth0"}
    of_a_user = {"HPC_DDP_RUNS": "/r", "HPC_DDP_HANG_AFTER": "60", "NAME": "x", "RANKING": "y"}
    assert attempt_env.clean_env(of_a_run | of_a_user) == of_a_user
    of_a_user["GLOO_SOCKET_IFNAME"] = "ib0"
    assert attempt_env.clean_env(of_a_user) == of_a_user


def test_paths_of_a_staged_environment_are_those_of_the_installed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a worker submits may run on another node, and after the tree was removed."""
    folder, hook = "/tmp/near-0/ab", "/runs/r/lib/hpc_ddp/node/workers/staging/hook"
    tree = f"{folder}/environment-1"
    of_a_task = {
        "HPC_DDP_OPENED_FILES": f"{folder}/opened-r-1",
        "HPC_DDP_NEAR": tree,
        "PYTHONPATH": f"{hook}:{tree}/env/site:/mine:",
        "LD_LIBRARY_PATH": f"{tree}/env/lib",
        "PYTHONUSERBASE": f"{tree}/home/u/.local",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/compile",
        "TRITON_CACHE_DIR": "/home/u/triton",
        "EMPTY": "",
    }
    assert attempt_env.clean_env(of_a_task) == {
        "PYTHONPATH": "/env/site:/mine:",
        "LD_LIBRARY_PATH": "/env/lib",
        "PYTHONUSERBASE": "/home/u/.local",
        "TRITON_CACHE_DIR": "/home/u/triton",
        "EMPTY": "",
    }
    noting = {"HPC_DDP_OPENED_FILES": f"{folder}/opened-r-0", "PYTHONPATH": hook}
    assert attempt_env.clean_env(noting) == {}
    monkeypatch.setenv("HPC_DDP_NEAR", tree)
    monkeypatch.setattr("sys.executable", f"{tree}/env/bin/python")
    assert attempt_env.installed_python() == "/env/bin/python"
