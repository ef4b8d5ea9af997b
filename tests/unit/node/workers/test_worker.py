"""A worker starts with its log, its variables and its umask, and ends with its agent."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hpc_ddp.core import process
from hpc_ddp.core.process import NOTICE_SIGNALS
from hpc_ddp.node.child_process import ignore_notices
from hpc_ddp.node.workers import worker
from tests.skips import skip_or_fail
from tests.waiting import pid_in, wait_until
from unit.fakes import STRANGER, stop_clock

# --- its start -----------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Start a worker of two nodes with two workers each, as torchrun would."""

    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "PYTHONPATH")
    of_slurm = f"import json, os; print(json.dumps([os.environ[n] for n in {names}]))"

    def run(
        rank: int = 2,
        local: int = 0,
        look: str = of_slurm,
        wrapper: Sequence[str] = (),
        **environ: str,
    ) -> subprocess.CompletedProcess[bytes]:
        env = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(rank // 2)}
        env |= {"RANK": str(rank), "LOCAL_RANK": str(local), "PATH": os.environ["PATH"]}
        env |= {"HPC_DDP_RUN": "/r", "HPC_DDP_NODE_FOLDER": str(tmp_path)}
        env |= {"HPC_DDP_AGENT_PID": str(os.getpid()), "SLURM_PROCID": "1", **environ}
        argv = worker.worker_command(sys.executable, ["-c", look])
        return subprocess.run(
            [*wrapper, *argv], env=env, capture_output=True, preexec_fn=ignore_notices
        )

    return run


def test_a_worker_has_a_log_and_slurms_variables_of_its_own(
    start: Callable[..., subprocess.CompletedProcess[bytes]], tmp_path: Path
) -> None:
    for rank in (1, 3, 4):
        (tmp_path / f"rank-{rank}.pid").touch()  # of an earlier start with other ranks
    (tmp_path / "rank-4.log").touch()
    done = start()
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    log = tmp_path / "rank-2.log"
    assert json.loads(log.read_text()) == ["2", "0", "1", "4", "/r/lib"]
    assert log.stat().st_mode & 0o777 == 0o600
    assert {path.name for path in tmp_path.glob("*.pid")} == {"rank-2.pid", "rank-3.pid"}
    assert pid_in(tmp_path / "rank-2.pid") > 1
    start(HPC_DDP_CODE="/c", PYTHONPATH="/p")
    first, again, second = log.read_bytes().splitlines()
    assert again + b"\n" == worker.AGAIN
    assert json.loads(second)[-1] == "/r/lib:/c:/p"
    (tmp_path / "rank-0.pid").touch()
    start(rank=3, local=1)
    assert (tmp_path / "rank-0.pid").exists()  # the first worker of the node looks after them
    assert first


@pytest.mark.parametrize(
    ("environ", "is_later"),
    [
        ({"HPC_DDP_ATTEMPT": "0"}, False),
        ({"HPC_DDP_ATTEMPT": "0", "TORCHELASTIC_RESTART_COUNT": "0"}, False),
        ({"HPC_DDP_ATTEMPT": "0", "TORCHELASTIC_RESTART_COUNT": "1"}, True),
        ({"HPC_DDP_ATTEMPT": "2"}, True),
        ({"HPC_DDP_ATTEMPT": "2", "HPC_DDP_FIRST_ATTEMPT": "2"}, False),
        ({"HPC_DDP_ATTEMPT": "3", "HPC_DDP_FIRST_ATTEMPT": "2"}, True),
        ({"HPC_DDP_ATTEMPT": "2", "HPC_DDP_RESUME_IF": "/no/ckpt.pt"}, False),
        ({"HPC_DDP_ATTEMPT": "2", "HPC_DDP_RESUME_IF": "/*/null"}, True),  # of no known age
    ],
)
def test_a_script_has_further_arguments_from_its_second_start_on(
    start: Callable[..., subprocess.CompletedProcess[bytes]],
    tmp_path: Path,
    environ: dict[str, str],
    is_later: bool,
) -> None:
    look = "import sys; print(sys.argv[1:])"
    environ = {**environ, "HPC_DDP_RUN": str(tmp_path)}
    done = start(look=look, HPC_DDP_RESUME_ARGS="--resume 'last one.pt'", **environ)
    assert done.returncode == 0, done.stderr
    printed = (tmp_path / "rank-2.log").read_text().strip()
    assert printed == str(["--resume", "last one.pt"] if is_later else [])


@pytest.mark.parametrize("is_newer", [True, False])
def test_a_checkpoint_from_before_a_fresh_start_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_newer: bool
) -> None:
    """The first attempt since ``--fresh`` may have ended before it saved."""
    checkpoint = tmp_path / "ckpt.pt"
    checkpoint.touch()
    begun = tmp_path / "logs" / "attempt-2" / "attempt.json"
    begun.parent.mkdir(parents=True)
    begun.touch()
    os.utime(begun, (2, 2))
    os.utime(checkpoint, (3, 3) if is_newer else (1, 1))
    environ = {"RUN": str(tmp_path), "ATTEMPT": "3", "FIRST_ATTEMPT": "2"}
    environ |= {"RESUME_ARGS": "--resume", "RESUME_IF": f"{tmp_path}/*.pt"}
    for name, text in environ.items():
        monkeypatch.setenv(f"HPC_DDP_{name}", text)
    assert worker.resume_args() == (["--resume"] if is_newer else [])


def test_a_checkpoint_that_was_there_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its disk was away as the workers started, and the script began anew over its checkpoint."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "logs" / "attempt-0").mkdir(parents=True)
    environ = {"RUN": str(tmp_path), "ATTEMPT": "1"}
    environ |= {"RESUME_ARGS": "--resume", "RESUME_IF": f"{disk}/*.pt"}
    for name, text in environ.items():
        monkeypatch.setenv(f"HPC_DDP_{name}", text)
    clock = stop_clock(monkeypatch, worker)
    assert worker.resume_args() == []  # the first attempt had none
    (disk / "a.pt").touch()
    with monkeypatch.context() as given:  # as an argument of the script has it
        given.setenv("HPC_DDP_RESUME_IF", "$HPC_DDP_RUN/disk/*.pt")
        assert worker.resume_args() == ["--resume"]
        (tmp_path / "logs" / "attempt-0" / worker.RESUMABLE).unlink()
    assert worker.note_checkpoint(waits=False)  # by the supervisor, at an attempt's end
    disk.rename(tmp_path / "away")
    assert not worker.note_checkpoint(waits=False)
    assert clock.slept == []
    with pytest.raises(
        SystemExit, match=r"\*\.pt, the script's checkpoint, is gone; hint: hpc-ddp"
    ):
        worker.resume_args()
    assert sum(clock.slept) > worker.PATIENCE_S
    monkeypatch.setattr(clock, "sleep", lambda _: (tmp_path / "away").rename(disk))
    assert worker.resume_args() == ["--resume"]
    # After --fresh the first attempt is another one.
    monkeypatch.setenv("HPC_DDP_FIRST_ATTEMPT", "1")
    monkeypatch.setenv("HPC_DDP_ATTEMPT", "2")
    (disk / "a.pt").unlink()
    assert worker.resume_args() == []


@pytest.mark.parametrize(
    ("mode", "is_link", "mode_of_tmp", "where"),
    [
        (None, False, 0o755, "tmp"),
        (None, False, 0o1777, "tmp"),
        (None, False, 0o777, "run"),  # a colleague could put another one in its place
        (0o700, False, 0o770, "run"),
        (0o700, False, 0o755, "tmp"),
        (0o777, False, 0o755, "run"),
        (0o700, True, 0o755, "run"),
    ],
)
def test_the_compilers_cache_is_this_users_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: int | None,
    is_link: bool,
    mode_of_tmp: int,
    where: str,
) -> None:
    """Pickles are loaded from it, and its usual place has a name that anybody can make."""
    folders = {name: tmp_path / name for name in ("tmp", "run", "theirs")}
    for folder in folders.values():
        folder.mkdir()
    folders["tmp"].chmod(mode_of_tmp)
    monkeypatch.setenv("TMPDIR", str(folders["tmp"]))
    monkeypatch.setenv("HPC_DDP_RUN", str(folders["run"]))
    taken = folders["tmp"] / f"hpc-ddp-compile-{os.geteuid()}"
    if is_link:
        taken.symlink_to(folders["theirs"])
    elif mode is not None:
        taken.mkdir()
        taken.chmod(mode)
    expected = {"tmp": taken, "run": folders["run"] / "compile-cache"}[where]
    assert worker.make_compile_cache() == worker.make_compile_cache() == str(expected)
    assert expected.stat().st_mode & 0o777 == 0o700


def test_the_compilers_cache_is_in_no_folder_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner may rename what lies in it, in spite of the sticky bit."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("HPC_DDP_RUN", str(tmp_path))
    if os.geteuid():
        skip_or_fail("only root can give a folder to another user")
    os.chown(tmp_path / "tmp", STRANGER, -1)
    assert worker.make_compile_cache() == str(tmp_path / "compile-cache")


def test_without_a_tmpdir_the_compilers_cache_is_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    monkeypatch.setenv("HPC_DDP_RUN", str(tmp_path))
    assert worker.make_compile_cache() == str(tmp_path / "compile-cache")
    (tmp_path / "compile-cache").chmod(0o777)
    with pytest.raises(PermissionError, match="is not this user's alone"):
        worker.make_compile_cache()


def test_sets_have_one_order_in_all_workers(
    start: Callable[..., subprocess.CompletedProcess[bytes]], tmp_path: Path
) -> None:
    look = "import os; print(os.environ['PYTHONHASHSEED'])"
    start(look=look)
    start(look=look, PYTHONHASHSEED="7")
    first, _, second = (tmp_path / "rank-2.log").read_text().splitlines()
    assert (first, second) == ("0", "7")


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_workers_are_no_task_of_an_mpi_unless_each_of_them_is_one(
    start: Callable[..., subprocess.CompletedProcess[bytes]], tmp_path: Path, by_torchrun: bool
) -> None:
    of_task = {"PMI_RANK": "1", "PMIX_RANK": "1", "OMPI_COMM_WORLD_RANK": "1", "PMI2_FD": "3"}
    settings = {"OMPI_MCA_btl": "tcp", "I_MPI_FABRICS": "ofi", "PMIX_MCA_gds": "hash"}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"} if by_torchrun else {}
    names = [*of_task, *settings]
    look = f"import json, os; print(json.dumps([n for n in {names} if n in os.environ]))"
    start(look=look, **of_task, **settings, **agent)
    remaining = json.loads((tmp_path / "rank-2.log").read_text())
    assert remaining == (list(settings) if by_torchrun else names)


def test_a_sourced_file_does_not_see_the_command(tmp_path: Path) -> None:
    """A file that is sourced without arguments has those of its shell."""
    file = tmp_path / "env.sh"
    file.write_text("export COUNT=$#\nwhile [ $# -gt 0 ]; do shift; done\n")
    command = worker.command_after_setup(f". {file}", ["printenv", "COUNT"])
    assert subprocess.run(command, capture_output=True, text=True).stdout == "0\n"


@pytest.mark.parametrize(
    ("line", "code"), [("exit 0", 1), ("exit 3", 3), ("kill -TERM $$", -15), ("false", 0)]
)
def test_a_set_up_line_that_ends_its_shell_fails(line: str, code: int) -> None:
    """The program has not begun: that is no finished training."""
    command = worker.command_after_setup(f"A='b c'; export A\n{line}", ["printenv", "A"])
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "" if code else "b c\n")
    assert ("lines have not ended" in done.stderr) is (line in ("exit 0", "kill -TERM $$"))


def test_a_script_has_the_users_umask(
    start: Callable[..., subprocess.CompletedProcess[bytes]], tmp_path: Path
) -> None:
    """The node side takes the group's right to write from its own files only."""
    look = "import os; print(oct(os.umask(0)), 'HPC_DDP_UMASK' in os.environ)"
    start(look=look, HPC_DDP_UMASK="2")
    assert (tmp_path / "rank-2.log").read_text() == "0o2 False\n"


def test_a_worker_is_known_by_its_process_and_its_job(
    start: Callable[..., subprocess.CompletedProcess[bytes]], tmp_path: Path
) -> None:
    """A training of another job has called sbatch for this one: its identity was inherited."""
    look = "import os; env = os.environ; print(env['HPC_DDP_WORKER'], 'HPC_DDP_TRAINER' in env)"
    start(look=look, SLURM_JOB_ID="8", HPC_DDP_WORKER="1 7", HPC_DDP_TRAINER="1")
    pid = pid_in(tmp_path / "rank-2.pid")
    assert (tmp_path / "rank-2.log").read_text() == f"{pid} 8 False\n"


def test_a_worker_whose_agent_has_died_does_not_begin(
    start: Callable[..., subprocess.CompletedProcess[bytes]], tmp_path: Path
) -> None:
    done = start(HPC_DDP_AGENT_PID="1", TORCHELASTIC_USE_AGENT_STORE="True")
    assert done.returncode == 1
    assert b"what has started this worker has died" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_worker_that_a_wrapper_has_started_begins(
    start: Callable[..., subprocess.CompletedProcess[bytes]], tmp_path: Path
) -> None:
    """Its parent is the wrapper, and not the supervisor, whose child ignores notices."""
    look = f"import signal; print([signal.getsignal(n) for n in {[*map(int, NOTICE_SIGNALS)]}])"
    done = start(wrapper=["sh", "-c", '"$@"; exit $?', "sh"], look=look)
    assert (done.returncode, done.stderr) == (0, b"")
    printed = (tmp_path / "rank-2.log").read_text()
    assert printed.count("SIG_DFL") == len(NOTICE_SIGNALS) - 1
    assert "default_int_handler" in printed


@pytest.mark.parametrize("setup", ["", "true"])
def test_a_notice_during_its_preparation_ends_it(
    start: Callable[..., subprocess.CompletedProcess[bytes]], tmp_path: Path, setup: str
) -> None:
    """The supervisor's signal came while this process ignored it: a script that handles no notice
    would run on until it is killed."""
    (tmp_path / "notice").write_text("{}")
    environ = {"HPC_DDP_NOTICE": str(tmp_path / "notice"), "HPC_DDP_WORKER_SETUP": setup}
    done = start(look="print('began')", **environ)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, b"")
    assert (tmp_path / "rank-2.log").read_text() == ""


def _is_over(pid: int) -> bool:
    """Tell whether a process has ended, also where nobody has asked for its code."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def test_a_worker_prints_into_its_log_and_ends_with_its_agent(tmp_path: Path) -> None:
    code = "import sys, time; print('out'); print('error', file=sys.stderr); time.sleep(900)"
    words = " ".join(
        shlex.quote(word) for word in worker.worker_command(sys.executable, ["-c", code])
    )
    names = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    names |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    names |= {"HPC_DDP_RUN": "/r", "HPC_DDP_NODE_FOLDER": str(tmp_path)}
    script = f"export HPC_DDP_AGENT_PID=$$; {words} & wait"
    log, number = tmp_path / "rank-0.log", tmp_path / "rank-0.pid"
    with subprocess.Popen(["bash", "-c", script], env={**os.environ, **names}) as agent:
        try:
            wait_until(lambda: log.exists() and log.read_text() == "out\nerror\n", "both lines")
            assert not _is_over(pid_in(number))
        finally:
            agent.kill()
    wait_until(lambda: _is_over(pid_in(number)), "the worker's end")


@pytest.mark.parametrize(("world", "by_node"), [("2", "2"), ("4", "2(x2)"), ("6", "2(x3)")])
def test_task_counts_have_slurms_form(
    world: str, by_node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": "2"}
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
        values[name] = "1"
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    variables = worker.task_variables()
    assert variables["SLURM_TASKS_PER_NODE"] == variables["SLURM_STEP_TASKS_PER_NODE"] == by_node
    assert {variables[f"SLURM_{name}"] for name in ("NTASKS", "NPROCS", "STEP_NUM_TASKS")} == {
        world
    }
    assert variables["SLURM_NTASKS_PER_NODE"] == "2"


def test_a_disk_that_is_away_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = stop_clock(monkeypatch, worker)
    with pytest.raises(FileNotFoundError):
        worker.open_log(str(tmp_path / "gone" / "rank-0"))
    assert worker.PATIENCE_S < sum(clock.slept) <= worker.PATIENCE_S + 2

    def come_back(seconds: float) -> None:
        (tmp_path / "gone").mkdir()

    monkeypatch.setattr(clock, "sleep", come_back)
    os.close(worker.open_log(str(tmp_path / "gone" / "rank-0")))
    assert process.live_pid(tmp_path / "gone" / "rank-0.pid") == os.getpid()


def test_only_rank_0_writes_the_trackers_run(
    start: Callable[..., subprocess.CompletedProcess[bytes]], tmp_path: Path
) -> None:
    names = ("WANDB_RUN_ID", "WANDB_MODE", "COMET_EXPERIMENT_KEY", "MLFLOW_RUN_ID")
    look = f"import os; print(*[os.environ.get(name) for name in {names}])"
    answer = tmp_path / "trackers"
    answer.write_text('{"WANDB_MODE": "offline", "MLFLOW_RUN_ID": "m"}')
    environ = {
        "WANDB_RUN_ID": "w",
        "COMET_EXPERIMENT_KEY": "c",
        "HPC_DDP_TRACKERS_FILE": str(answer),
    }

    def seen(rank: int, ours: str) -> str:
        log = tmp_path / f"rank-{rank}.log"
        log.unlink(missing_ok=True)
        start(rank, rank % 2, look, HPC_DDP_TRACKERS=ours, **environ)
        return log.read_text().strip()

    ours = "WANDB_RUN_ID COMET_EXPERIMENT_KEY"
    assert seen(0, ours) == "w offline c m"
    assert seen(3, ours) == "w-r3 offline cr3 None"
    assert seen(3, "") == "w offline c None"  # the user's own ids are left as they are


def test_an_answer_about_trackers_is_waited_for_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    clock = stop_clock(monkeypatch, worker)
    answer = tmp_path / "trackers"
    answer.touch()
    monkeypatch.setenv("HPC_DDP_TRACKERS_FILE", str(answer))
    assert worker.await_tracker_answer() == {}
    assert sum(clock.slept) >= worker.LOOKUP_S
    assert "no word of the first node about trackers" in capfd.readouterr().err
    assert worker.await_tracker_answer() == {}  # nobody looks
    assert capfd.readouterr().err == ""
