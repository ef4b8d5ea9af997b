"""The batch script equals its kept copies, and quotes its values for a real shell."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_ddp.core import process
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission.script.render import Rendering, job_env
from tests.accept import is_accepted
from tests.waiting import wait_until

GOLDEN = Path(__file__).parent / "golden"

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpus": {"nodes": 2, "gpus_per_node": "a100:4", "cpus_per_node": 32, "time": "12:00:00"},
    "site": {
        "partition": "gpu",
        "account": "p1",
        "qos": "long",
        "constraint": "a100&nvlink",
        "mem": "0",
        "exclusive": True,
        "reservation": "r",
        "mail_type": "END,FAIL",
        "nodelist": "n[1-4]",
        "exclude": "n3",
        "sbatch": ("--network=x y", "--uenv"),
    },
    "fabric": {
        "nodes": 2,
        "fabric": "slingshot",
        "env": {"NCCL_NET_GDR_LEVEL": "SYS", "A": "it's $HOME"},
    },
    "environment": {
        "setup": ("module purge", "source env/bin/activate"),
        "python": "python",
        "container": "apptainer exec --nv 'my image.sif'",
        "interface": "ib0",
        "host_suffix": "i",
    },
    "hostile": {
        "script": "/home/me/a b;$(touch x)/tr'ain\".py",
        "args": ("a b", "$(touch x)", "`x`", "é\n'\""),
        "chdir": "/home/me/it's",
        "job_name": "a b",
    },
    "chain": {"continue_by": "resubmit"},
    "preflight": {"preflight": True, "nodes": 2, "container": "apptainer exec 'my image.sif'"},
    "stage": {"stage": True, "nodes": 2, "preflight": True, "setup": ("module load python",)},
    "array": {"array": "0-3"},
    "elastic": {"nodes": "2-4", "elastic": True, "torchrun": ("--numa-binding=node",)},
    "srun": {
        "launcher": "srun",
        "nodes": 2,
        "gpus_per_node": "4",
        "cpus_per_node": 32,
        "srun": ("--gpu-bind=closest", "--export=ALL,A=b c"),
        "args": ("a b",),
        "container": "apptainer exec 'my image.sif'",
    },
    "whole_nodes": {
        "nodes": 2,
        "gpus_per_node": "4",
        "gpu_request": "none",
        "step_launcher": "ibrun",
        "teardown": ("cp -r /tmp/out .",),
        "signal": "SIGUSR1@120",
    },
    "mpirun": {
        "nodes": 2,
        "step_launcher": "mpirun",
        "gpus_per_node": "a100:4",
        "gpu_request": "gres",
    },
    "mpirun_tasks": {
        "nodes": 2,
        "launcher": "mpirun",
        "gpus_per_node": "4",
        "mpirun": ("--mca btl self,tcp", "--bind-to core"),
    },
    "pyxis": {
        "nodes": 2,
        "gpus_per_node": "8",
        "gpu_request": "gpus-per-task",
        "launcher": "srun",
        "image": "nvcr.io/nvidia/pytorch:25.01-py3",
        "container_tool": "pyxis",
        "container_options": ("--no-container-mount-home",),
    },
    "sweep": {"array": "0-1%1", "sweep": {"lr": ("1e-3",), "name": ("a b", "$HOME")}},
}


def _render(path: str = "/scratch/me/hpc-ddp/job/20260101-000000-abcd", **values: Any) -> Rendering:
    spec = JobSpec(**{"script": "/home/me/train.py", "chdir": "/home/me", **values})
    code = Path(path) / "code" / "0"
    script = Path(spec.script)
    return Rendering(spec, RunFolder(Path(path)), code, code / script.parent.name / script.name)


@pytest.mark.parametrize("name", CASES)
def test_a_script_equals_its_kept_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To accept a change, run with ``HPC_DDP_ACCEPT=1``, and read the diff."""
    monkeypatch.setattr(sys, "executable", "/home/me/env/bin/python")
    text, golden = _render(**CASES[name]).text(), GOLDEN / f"{name}.sbatch"
    if is_accepted():
        golden.write_text(text)
    assert text == golden.read_text()


def test_a_task_alone_has_its_arrays_library() -> None:
    """Its own is a link out of its folder, which the container would have alone."""
    array = "/scratch/me/hpc-ddp/job/20260101-000000-abcd"
    text = _render(f"{array}/task-3", array="3", image="i.sif", container_tool="apptainer").text()
    assert f"_node={array}/lib/node.py" in text
    assert f"--bind {array}," in text


def test_kept_scripts_are_bash() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {f"{name}.sbatch" for name in CASES}
    for path in GOLDEN.iterdir():
        subprocess.run(["bash", "-n", path], check=True)


def _words_of_srun(rendering: Rendering, folder: Path) -> list[str]:
    """Run the blocks that hold the user's values in bash, and return what srun is given."""
    script = "\n".join(
        [
            "srun() { printf '%s\\0' \"$@\" >words; }; sleep() { :; }",
            rendering.block("settings").replace("\ncd ", "\ntrue ").replace("\n_await ", "\ntrue "),
            "node=/lib/node.py cpus=1 SLURM_NNODES=1 HPC_DDP_PORT='$(touch port)'",
            rendering.block("step"),
        ]
    )
    subprocess.run(["bash", "-c", script], cwd=folder, check=True, capture_output=True)
    return (folder / "words").read_bytes().decode().split("\0")[:-1]


TEXT = st.text(
    st.one_of(st.sampled_from("'\"\\$`;&|<>(){}[]*?!#~ \t\n-=%é€"), st.characters(codec="utf-8")),
    max_size=30,
).filter(lambda text: "\0" not in text)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(args=st.lists(TEXT, max_size=4), name=TEXT.filter(lambda t: t and "/" not in t))
def test_every_argument_arrives_and_nothing_is_executed(
    args: list[str], name: str, tmp_path: Path
) -> None:
    before = set(tmp_path.iterdir()) - {tmp_path / "words"}
    rendering = _render(script=f"/s/{name}.py", args=tuple(args), env={"A": "".join(args)})
    words = _words_of_srun(rendering, tmp_path)
    script = words.index(f"/scratch/me/hpc-ddp/job/20260101-000000-abcd/code/0/s/{name}.py")
    assert words[script + 1 :] == args
    assert set(tmp_path.iterdir()) - {tmp_path / "words"} == before


@pytest.mark.parametrize("text", ["$(touch x)", "`touch x`", "a'b\"c", "\n; touch x", "é $HOME"])
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_hostile_arguments_arrive(text: str, launcher: str, tmp_path: Path) -> None:
    rendering = _render(args=(text,), launcher=launcher)
    assert _words_of_srun(rendering, tmp_path)[-1] == text
    assert [path.name for path in tmp_path.iterdir()] == ["words"]


def test_options_of_srun_stand_before_the_command(tmp_path: Path) -> None:
    words = _words_of_srun(_render(srun=("--gpu-bind=closest", "--comment=a b")), tmp_path)
    assert words.index("--comment=a b") < words.index("supervisor")


def test_an_expedited_requeue_stays_one() -> None:
    """Of an option that stands twice sbatch takes the last."""
    header = _render(sbatch=("--requeue=expedite",)).header
    assert [value for name, value in header if name == "requeue"] == ["expedite"]
    with pytest.raises(UsageError, match="--requeue=expedite has no effect: --no-requeue"):
        _render(sbatch=("--requeue=expedite",), continue_by="resubmit")


def test_a_line_break_in_a_directive_is_refused() -> None:
    with pytest.raises(UsageError, match="#SBATCH"):
        _render(account="a\n#SBATCH --uid=0")


def test_a_users_template_overrides_a_block(tmp_path: Path) -> None:
    template = tmp_path / "own.j2"
    template.write_text(
        "{% extends 'job.sbatch.j2' %}"
        "{% block setup %}echo {{ run | q }}; {{ super() }}{% endblock %}"
    )
    text = _render(template=str(template), setup=("module load x",)).text()
    _, echoed, after = text.partition("echo /scratch/me/hpc-ddp/job/20260101-000000-abcd; ")
    assert echoed
    assert "\nmodule load x\n" in after
    assert "srun" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% extends 'job.sbatch.j2' %}\n{% block x %}", "line 2"),
        ("{{ no_such_name }}", "no_such_name"),
        ("{% extends 'gone.j2' %}", "gone.j2"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_broken_template_is_an_error_at_render_time(
    text: str, message: str, tmp_path: Path
) -> None:
    template = tmp_path / "own.j2"
    template.write_text(text)
    with pytest.raises(UsageError, match=message):
        _render(template=str(template)).text()


def test_unknown_fabric_names_the_known_ones() -> None:
    with pytest.raises(
        UsageError, match=r"auto, efa, ethernet, infiniband.*did you mean 'infiniband'"
    ):
        _render(fabric="infinibnd")


@pytest.mark.parametrize("path", ["/scratch/a:b/job/x", "/scratch/a\\b/job/x", "/a\nb/job/x"])
def test_a_run_folder_that_slurm_can_not_hold_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="colon"):
        _render(path=path)


# --- before the step, in a shell -------------------------------------------------------------

NODE_SIDE = """\
import os, sys
if sys.argv[1:] == ["batch", "begin"]:
    print("<hpc-ddp>HPC_DDP_CPUS=8</hpc-ddp>")
elif sys.argv[1:] == ["batch", "first-job"]:
    print("<hpc-ddp>exit 0</hpc-ddp>")
elif sys.argv[1:3] == ["batch", "failed"]:
    print(*sys.argv[1:], flush=True)
    sys.exit(int(sys.argv[3]) + 6)  # as where Slurm starts a job again that ends with this code
elif sys.argv[1:3] != ["batch", "watch"]:
    print(os.path.basename(sys.executable), *sys.argv[1:], flush=True)
"""

SHOW = 'wait; echo "$_host_python $OMP_NUM_THREADS"'


@pytest.fixture
def stage(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a job's set-up and the start of its attempt on a node with a `python3` and no other."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "kill", "find", "mktemp", "rm", "stat"):
        (programs / name).symlink_to(shutil.which(name) or name)
    (programs / "sleep").write_text("#!/bin/sh\n")  # while a disk is away
    clock = 'read now <"$0.now"; now=$((now + 100)); echo $now | tee "$0.now"'
    (programs / "date").write_text(f"#!/bin/bash\nPATH={os.defpath}\n{clock}\n")
    (programs / "date.now").write_text("0\n")
    (programs / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "run" / "lib").mkdir(parents=True)
    (tmp_path / "run" / "lib" / "node.py").write_text(NODE_SIDE)
    for path in ("run", "run/lib", "run/lib/node.py"):
        (tmp_path / path).chmod(0o755)
    for program in programs.iterdir():
        if not program.is_symlink():
            program.chmod(0o755)

    def play(shell_options: str = "", **values: Any) -> subprocess.CompletedProcess[str]:
        blocks = _render(str(tmp_path / "run"), **{"chdir": str(tmp_path), **values})
        script = "".join(blocks.block(name) for name in ("settings", "setup", "attempt"))
        env = {"PATH": str(programs), "HOME": os.environ["HOME"], "HOSTNAME": "n1"}
        env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_NNODES": "1"}
        env |= {"SLURM_CLUSTER_NAME": "c"}
        env |= {"SHELLOPTS": shell_options} if shell_options else {}
        file = tmp_path / "slurm_script"
        file.write_text(f"#!/bin/bash\n{script}\n{SHOW}")
        file.chmod(0o755)
        return subprocess.run([file], env=env, capture_output=True, text=True)

    return play


@pytest.mark.parametrize(
    "broken",
    [
        "\x7fELF of another processor",
        "#!/bin/sh\nexit 1  # as 3.6 answers\n",
        "#!/no/such/interpreter\n",
        None,
    ],
)
def test_the_node_side_takes_a_python_that_runs_there(
    stage: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken: str | None,
) -> None:
    python = tmp_path / "login-python"
    if broken:
        python.write_text(broken)
        python.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        done = stage(python=str(python))
    assert done.stdout == "python3 8\n", done.stderr


def test_a_job_without_a_python_lists_the_ones_it_tried(
    stage: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "bin" / "python3").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/login/python")
        done = stage(python="/worker's/python")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.sub(r"first: \S+ line \d+: ", "first: ", done.stderr) == (
        "hpc-ddp: no Python of 3.10 or later runs on n1; tried: /login/python /worker's/python"
        " python3 python3.14 python3.13 python3.12 python3.11 python3.10;"
        " the first: /login/python: No such file or directory\n"
        'hpc-ddp: hint: --setup "module load python", or --python PATH\n'
    )


def test_python_variables_of_modules_do_not_reach_the_node_side(
    stage: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The `enum.py` of an old stack, or the home of another Python, would end it."""
    (tmp_path / "enum.py").write_text("raise SystemError('not this one')")
    lines = (f"export PYTHONPATH={tmp_path}", f"export PYTHONHOME={tmp_path}")
    done = stage(setup=lines)
    assert done.stdout == f"{sys.executable} 8\n", done.stderr


def test_a_warning_during_the_set_up_is_passed_on_after_it(
    stage: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = stage(setup=("kill -USR2 $$",), gpus_per_node="2")
    assert done.stdout.splitlines() == ["python batch warned", f"{sys.executable} 4"], done.stderr


@pytest.mark.parametrize(
    ("line", "code"),
    [("false || exit 1", 7), ("set -e\nfalse", 7), ("exit 0", 0), ("kill -TERM $$", 149)],
)
def test_a_job_that_ends_in_its_set_up_is_not_started_again_for_ever(
    stage: Callable[..., subprocess.CompletedProcess[str]], line: str, code: int
) -> None:
    """By a cluster's RequeueExit; a preemption, which ends it by a signal, is left alone."""
    assert stage(setup=(line,)).returncode == code


@pytest.mark.parametrize(
    ("line", "code"), [("exit 1", 1), ("set -e\nfalse", 1), ("exit 0", 0), ("exit 255", 255)]
)
def test_a_set_up_line_may_have_a_trap_for_its_end(
    stage: Callable[..., subprocess.CompletedProcess[str]], line: str, code: int
) -> None:
    """It took the place of the script's own: endless restarts, and a chain that went on."""
    done = stage(setup=("trap 'echo own exit' EXIT", line))
    assert done.stdout == f"own exit\nbatch failed {code}\n"
    assert done.returncode == (code and (code + 6) % 256)  # as the stand-in answers


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NNODES"])
def test_a_set_up_line_may_not_unset_what_the_job_needs(
    stage: Callable[..., subprocess.CompletedProcess[str]], name: str
) -> None:
    done = stage(setup=(f"unset {name}",))
    assert (done.returncode, done.stdout) == (7, "batch failed 1\n")
    assert f"hpc-ddp: a set-up line has unset {name}, without which" in done.stderr


def test_what_hpc_ddp_reads_of_slurm_outlives_the_set_up_lines(
    stage: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """A run whose lines had unset the restart count was lost at its second end."""
    lines = ("unset ${!SLURM_C*}", "trap 'echo on $SLURM_CLUSTER_NAME' EXIT")
    assert stage(setup=lines).stdout == f"{sys.executable} 8\non c\n"


def test_a_start_that_hpc_ddp_puts_off_is_no_end_of_set_up_lines(
    stage: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The job that waited for this one was cancelled then."""
    for name in ("date", "sleep"):
        (tmp_path / "bin" / name).unlink()
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or name)
    done = stage(setup=("echo $SLURM_RESTART_COUNT",), continue_by="resubmit")
    assert (done.returncode, done.stdout) == (0, "python batch queue-next\n"), done.stderr


def test_options_of_the_submitting_shell_do_not_end_a_job(
    stage: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Slurm passes on an exported SHELLOPTS, and POSIXLY_CORRECT."""
    done = stage("errexit:nounset:noclobber:posix", setup=("false", "echo $UNSET still here"))
    assert (done.returncode, done.stdout) == (0, f"still here\n{sys.executable} 8\n")


def test_a_working_directory_that_is_gone_ends_a_job_in_the_same_way(
    stage: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    assert stage(chdir=str(tmp_path / "gone")).returncode == 7


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.sbatch")), ids=lambda path: path.stem)
def test_the_scripts_own_variables_hide_none_of_the_users(path: Path) -> None:
    """One that is exported would reach the program with the script's value."""
    text = path.read_text()
    local = "|".join(re.findall(r"\blocal (.*)", text))
    names = {
        *re.findall(r"(?:^|[\s;(&|'])([A-Za-z_]\w*)\+?=", text, re.M),
        *re.findall(r"\bfor (\w+) in\b", text),
        *(name for words in re.findall(r"\bread -r ([\w ]+)", text) for name in words.split()),
    }
    ours = re.compile(r"_\w*|HPC_DDP_\w+|SLURM_EXPORT_ENV|OMP_NUM_THREADS")
    of_the_job = set(re.findall(r"^export (\w+)=", text, re.M))
    strange = {name for name in names if not ours.fullmatch(name)} - of_the_job
    assert [name for name in sorted(strange) if not re.search(rf"\b{name}\b", local)] == []


def test_a_warning_leaves_the_process_that_is_waited_for() -> None:
    """The signal may come between the start of srun and the look at its process id."""
    text = _render().text()
    (trap,) = (
        line for line in text.splitlines() if line.startswith("trap") and "batch warned" in line
    )
    lines = ["_node_side=(true)", trap, "sleep 60 & step=$!", "kill -USR2 $$", "last=$!"]
    code = "\n".join([*lines, "kill $step", "[ $last = $step ]"])
    assert subprocess.run(["bash", "-c", code]).returncode == 0


@pytest.mark.parametrize("path", ["run", "run/lib", "run/lib/node.py"])
@pytest.mark.parametrize("change", ["writable", "of another user", "absent"])
def test_a_folder_that_another_user_could_have_made_is_not_executed(
    stage: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, path: str, change: str
) -> None:
    target = tmp_path / path
    if change == "writable":
        target.chmod(0o775)
    elif change == "absent":
        target.rename(tmp_path / "away")
    elif os.geteuid() == 0:
        os.chown(target, 12345, -1)
    else:
        pytest.skip("only root can give a file away")
    done = stage()
    assert (done.returncode, done.stdout) == (1, "")
    assert "hpc-ddp: nothing is run of " in done.stderr
    assert str(tmp_path / "run") in done.stderr


# timeout(1) has begun to wait, and so passes a signal on.
SETTLED = "until [[ $(</proc/$PPID/status) == *State:?S* ]]; do :; done\n"


def _play_stage(
    tmp_path: Path, stage: Callable[..., subprocess.CompletedProcess[str]], bring: str
) -> tuple[str, str]:
    """Run it with a parcel and a `stage.sh` of these lines; return its output and its calls."""
    lib = tmp_path / "run" / "lib"
    script = lib / "hpc_ddp" / "node" / "workers" / "staging" / "stage.sh"
    script.parent.mkdir(parents=True)
    bring = bring.replace("$real_sleep", shutil.which("sleep") or "sleep")
    script.write_text(f"echo $1 >>{tmp_path}/calls\n[ $1 = bring ] || exit\n{bring}\n")
    (tmp_path / "run" / "stage").mkdir()
    (tmp_path / "run" / "stage" / "label").write_text("part p-1 1 1\n")
    (tmp_path / "bin" / "srun").write_text(
        '#!/bin/sh\nuntil [ $1 = bash ]; do shift; done; exec "$@"'
    )
    (tmp_path / "bin" / "srun").chmod(0o755)
    for name in ("bash", "timeout"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or name)
    (lib / "node.py").write_text(NODE_SIDE.replace("=8", "=8; HPC_DDP_END_TIME=1"))
    strict = "IFS=$'\\n\\t'"  # of what is called bash's strict mode
    lines = ("export BATCH=$$ SLURM_NNODES=1", "trap 'echo own exit' EXIT", strict)
    done = stage(stage=True, setup=lines)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr, (tmp_path / "calls").read_text()


@pytest.mark.parametrize(
    ("bring", "is_brought", "text"),
    [
        ("", "p-1", ""),
        ("exit 1", "no", ""),
        (f"{SETTLED}kill -USR2 $BATCH; exec $real_sleep 600", "no", "batch warned"),
        ("exec $real_sleep 600", "no", "no copy in 1 s; to try it again: rm "),
    ],
)
def test_the_parcel_is_brought_within_a_time(
    stage: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bring: str,
    is_brought: str,
    text: str,
) -> None:
    monkeypatch.setattr(f"{__name__}.SHOW", f'{SHOW}; echo "brought: $HPC_DDP_BROUGHT"')
    output, calls = _play_stage(tmp_path, stage, bring)
    assert f"brought: {is_brought}" in output
    assert text in output
    assert calls == "bring\ntidy\n"  # the last at the exit
    assert output.count("own exit\n") == 1
    assert (tmp_path / "run" / "unstaged").exists() == ("no copy" in text)


def test_an_unstaged_run_brings_nothing(
    stage: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "run" / "unstaged").touch()
    (tmp_path / "run" / "unstaged").chmod(0o644)
    assert _play_stage(tmp_path, stage, "")[1] == "tidy\n"


def test_no_removal_is_waited_for() -> None:
    text = _render(stage=True, preflight=True).text()
    removals = [line for line in text.splitlines() if '"${_near[@]}" tidy' in line]
    assert removals
    assert all("timeout -k" in line for line in removals)


def test_a_chain_has_its_next_job_before_the_parcel_is_brought() -> None:
    text = _render(stage=True, continue_by="resubmit").text()
    assert text.index("batch begin") < text.index(" bring ")


def test_a_missing_preloaded_library_is_no_failure(
    stage: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """ld.so complains of it in the name of each program."""
    done = stage(env={"LD_PRELOAD": "/no/such.so"})
    assert done.stdout == f"{sys.executable} 8\n", done.stderr


def test_a_job_of_one_node_needs_no_fabric() -> None:
    assert job_env(JobSpec("x.py", fabric="slingshot", env={"A": "1"})) == {"A": "1"}
    assert job_env(JobSpec("x.py", fabric="slingshot", nodes="1-2"))["NCCL_NET"]


def test_nodes_wait_longer_for_one_with_lines_of_its_own() -> None:
    """They may copy data to it."""
    for lines, seconds in (((), 600), (("cp -r /data /tmp",), 3600)):
        script = _render(node_setup=lines).text()
        assert f"join_timeout={seconds},read_timeout={seconds}" in script


def test_a_python_that_is_a_variable_is_expanded() -> None:
    text = _render(python="$ENV/bin/python", setup=("ENV=/e",), expand=("ENV",)).text()
    assert '_python="${ENV?is not set, and --expand names it}"/bin/python' in text


def test_a_python_that_is_here_is_waited_for_but_in_a_container() -> None:
    wait = "  # the workers' Python"
    here, image = {"python": sys.executable}, {"image": "/i.sif", "container_tool": "pyxis"}
    assert wait in _render(**here).text()
    assert wait not in _render(**here, **image).text()
    assert wait not in _render(python="/not/here/python").text()


def _teardown_of(*lines: str) -> str:
    """Return the bash of a job's teardown: its function, and the call."""
    rendering = _render(teardown=lines)
    text = rendering.text()
    begin = text.index("_tear_down() {")
    return text[begin : text.index("\n}\n", begin) + 3] + rendering.block("teardown")


@pytest.mark.parametrize("code", [0, 143])
def test_a_teardown_that_slurm_ends_is_not_over(tmp_path: Path, code: int) -> None:
    """Slurm may signal all processes of the job: one is killed, and the last line ends with 0."""
    script = tmp_path / "script"
    mark = tmp_path / "began"
    lines = (f"touch {mark}; sleep 600 & trap 'kill $!; exit {code}' TERM; wait",)
    script.write_text(f"_answer_of() {{ echo 60 finished; }}\n{_teardown_of(*lines)}")
    env = {**os.environ, "HPC_DDP_RUN": str(tmp_path)}
    with subprocess.Popen(["bash", script], env=env, start_new_session=True) as shell:
        wait_until(mark.exists, "the teardown")
        os.kill(shell.pid, signal.SIGTERM)
        shell.wait()
    assert not (tmp_path / "torn-down").exists()


def test_a_teardown_that_the_time_cuts_off_is_not_over(tmp_path: Path) -> None:
    """The job of a finished run COMPLETED without it, and no start ran it again."""
    script = f"_answer_of() {{ echo 1 finished; }}\n{_teardown_of('sleep 600')}"
    env = {**os.environ, "HPC_DDP_RUN": str(tmp_path)}
    played = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    assert "the teardown has had its 1 s" in played.stderr
    assert not (tmp_path / "torn-down").exists()


def test_clean_up_lines_have_the_scripts_name_and_variables(tmp_path: Path) -> None:
    lines = ('echo "$0 ${DIRS[1]} $HPC_DDP_VERDICT"; f', "exit 3")
    block = _teardown_of(*lines)
    state = "_answer_of() { echo 5 finished; }; f() { echo of f; }; DIRS=(a b)\n"
    argv = ["bash", "-c", f"{state}{block}", "/x/slurm_script"]
    env = {**os.environ, "HPC_DDP_RUN": str(tmp_path)}
    played = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert (tmp_path / "torn-down").exists()
    assert played.stdout == "/x/slurm_script b finished\nof f\n"
    assert played.stderr == "hpc-ddp: the teardown ended with code 3\n"


def _sleeps(pid: int) -> bool:
    with contextlib.suppress(OSError):  # it is gone
        return "State:\tS" in process.proc_text(pid, "status")
    return False


def test_a_teardown_ends_with_all_that_it_has_started() -> None:
    block = _teardown_of("sleep 600 & echo $!; sleep 600")
    argv = ["bash", "-c", f"_answer_of() {{ echo 1 failed; }}\n{block}"]
    played = subprocess.run(argv, capture_output=True, text=True)
    assert "the teardown has had its 1 s" in played.stderr
    pid = int(played.stdout)
    wait_until(lambda: not _sleeps(pid), "the end of sleep")


@pytest.mark.parametrize(
    ("nodes", "has_disk", "calls"),
    [
        ("1", True, ["requeue {}", "update JobId={} StartTime=now+1800"]),
        ("2", False, ["requeue {}", "update JobId={} StartTime=now+1800"]),
        ("2", True, ["requeue {}"]),
    ],
)
@pytest.mark.parametrize("is_array", [False, True])
def test_without_its_disk_a_job_waits_and_then_starts_again(
    tmp_path: Path, nodes: str, has_disk: bool, calls: list[str], is_array: bool
) -> None:
    """The last task's SLURM_JOB_ID is that of the whole array, whose other tasks began anew. A job
    that was requeued while the disk was away for all nodes was FAILED by Slurm."""
    rendering = _render(**({"array": "0-2"} if is_array else {}))
    begin = rendering.text().index("_end_of_wait() {")
    waits = rendering.text()[begin : rendering.text().index("# A user who can rename")]
    parts = (
        f"scontrol() {{ echo $* >>{tmp_path}/calls; }}; timeout() {{ {str(has_disk).lower()}; }}",
        "sleep() { :; }; now=0",
        waits.replace("$(command date +%s)", "$((now += 9000))"),
        "_node=/none SLURM_JOB_ID=9 SLURM_ARRAY_JOB_ID=9 SLURM_ARRAY_TASK_ID=2",
        f"HPC_DDP_END_TIME=20000 SLURM_NNODES={nodes}; _run_part() {{ :; }}",
        rendering.block("verdict"),
    )
    done = subprocess.run(["bash", "-c", "\n".join(parts)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    job = "9_2" if is_array else "9"
    lines = (tmp_path / "calls").read_text().splitlines()
    assert lines == [call.format(job) for call in calls]
