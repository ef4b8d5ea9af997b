"""What is accepted has an effect: each of our own directives and variables, and what `without`
takes out."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.attempt_env import AttemptEnv, variable
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.slurm_options import SBATCH
from hpc_ddp.core.job.variables import OF_USERS
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node import child_process
from hpc_ddp.node.workers import worker
from hpc_ddp.submission.script.overridden_options import find_ineffective
from hpc_ddp.submission.script.render import Rendering
from hpc_ddp.submission.script.torchrun import TORCHRUN_OPTIONS
from unit.node.fakes import place_of

SHAPES: list[dict[str, Any]] = [
    {},
    {"continue_by": "resubmit"},
    {"elastic": True, "nodes": 2},
    {"launcher": "srun", "nodes": 2, "gpus_per_node": "a:4", "cpus_per_node": 8, "time": "60"},
    {"gpu_request": "gres", "gpus_per_node": "4", "mem": "1G", "partition": "p", "array": "0-1"},
    {"image": "a", "container_tool": "pyxis", "exclusive": True, "account": "a", "qos": "q"},
    {"image": "a", "container_tool": "shifter", "nodelist": "n1", "constraint": "c"},
]
# They give way to the user's, and so the user's is in force.
GIVE_WAY = ("comment", "propagate", "mpi", "requeue", "no-requeue")


def _rendering(**values: Any) -> Rendering:
    spec = JobSpec(script="/home/me/train.py", chdir="/home/me", **values)
    return Rendering(spec, RunFolder(Path("/r")), Path("/c"), Path("/c/train.py"))


def _in_force(pairs: list[tuple[str, str]], name: str) -> str:
    return [value for option, value in pairs if option == name][-1]


@pytest.mark.parametrize("values", SHAPES, ids=str)
def test_no_directive_of_ours_overrides_the_users_without_a_word(values: dict[str, Any]) -> None:
    for name, value in _rendering(**values).header:
        raw = f"--{name}=other" if value else f"--{name}=x"
        if name not in GIVE_WAY:
            with pytest.raises(UsageError, match=f"--{name}") as raised:
                _rendering(**{**values, "sbatch": (raw,)})
            assert raised.value.hint
            continue
        header = _rendering(**{**values, "sbatch": (raw,)}).header
        assert _in_force(header, name) == raw.partition("=")[2]


@pytest.mark.parametrize(
    ("values", "option", "instead"),
    [
        ({}, "--signal=USR1@90", "--signal USR1@90"),
        ({}, "--sig=USR1@90", "--signal USR1@90"),
        ({}, "--output=%j.out", "--output out-%j.txt"),
        ({}, "--open-mode=truncate", "appended"),
        ({}, "--no-requeue", "--max-requeues 0"),
        ({"continue_by": "resubmit"}, "--requeue", "--continue-by requeue"),
        ({}, "--ntasks-per-node=4", "--nproc-per-node"),
        ({}, "--ntasks=4", "--nproc-per-node"),
        ({}, "--nodes=4", "--nodes 4"),
        ({}, "--error=x", "--error"),
        ({}, "--chdir=/x", "--chdir"),
        ({"mem": "1G"}, "--mem-per-cpu=1G", "--mem-per-cpu=1G alone"),
        ({"cpus_per_task": 4}, "--cpus-per-gpu=4", "--cpus-per-gpu=4 alone"),
        ({"time": "60"}, "--time=30", "--time 30"),
        ({}, "--network=", "without the equals sign"),
        ({}, "--no-req", "--max-requeues 0"),
        ({}, "--job=other", "--job-name other"),
        ({"partition": "p"}, "--part=q", "--partition q"),
        ({}, "--tasks-per-node=4", "--nproc-per-node"),
        ({"nodes": "1-4"}, "--ntasks-per-node=4", "--nproc-per-node"),
        ({"exclusive": True}, "--oversubscribe", "--oversubscribe alone"),
        ({"exclusive": True}, "--exclusive=user", "--exclusive=user alone"),
        ({"gpus_per_node": "4"}, "--gres=gpu:2", "--gpu-request none"),
    ],
)
def test_an_option_of_sbatch_without_effect_is_an_error(
    values: dict[str, Any], option: str, instead: str
) -> None:
    with pytest.raises(UsageError) as raised:
        _rendering(**{**values, "sbatch": (option,)})
    assert instead in str(raised.value.hint)


def test_what_says_the_same_or_more_is_accepted() -> None:
    _rendering(sbatch=("--open-mode=append", "--hint=a", "--hint=b"), time="60")
    _rendering(sbatch=("--requeue=expedite", "--gpus=8"), gpus_per_node="4", nodes=2)
    mounts = "--container-mounts=/a:/a"
    values: dict[str, Any] = {"image": "a", "container_tool": "pyxis", "srun": (mounts,)}
    _rendering(**values)
    with pytest.raises(UsageError, match="--container-image=b has no effect"):
        _rendering(**{**values, "srun": ("--container-image=b",)})


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_no_option_of_ours_for_srun_overrides_the_users(launcher: str) -> None:
    block = _rendering(launcher=launcher).block("step")
    options = re.findall(
        r"--([a-z-]+)", block[block.index("_srun_options=(") : block.index("\n)\n")]
    )
    assert {"nodes", "ntasks", "overlap"} <= {*options}
    for name in options:
        if name in GIVE_WAY:
            text = _rendering(launcher=launcher, srun=(f"--{name}=x",)).block("step")
            assert re.findall(rf"--{name}=(\w+)", text)[-1] == "x"
            continue
        for word in (f"--{name}=x", f"--{name[:-1]}=x"):
            with pytest.raises(UsageError, match=r"is set by hpc-ddp|is a beginning of"):
                _rendering(launcher=launcher, srun=(word,))


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_no_option_of_the_step_goes_before_one_of_the_job(launcher: str) -> None:
    shape: dict[str, Any] = {"launcher": launcher, "nodes": 2}
    block = _rendering(**shape).block("step")
    options = block[block.index("_srun_options=(") : block.index("\n)\n")]
    # The step has --cpus-per-task of the job.
    names = {*re.findall(r"--([a-z-]+)", options)} & {*SBATCH.split()} - {"cpus-per-task"}
    for name in names:
        with pytest.raises(UsageError):
            _rendering(**shape, sbatch=(f"--{name}=x",)).block("step")


def test_a_distribution_of_the_job_holds_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def distributions(**values: Any) -> list[str]:
        step = _rendering(launcher="srun", nodes=2, **values).block("step")
        return re.findall(r"--distribution=[^\s']*", step)

    assert distributions() == ["--distribution=block"]
    for text in ("block:block", "*:cyclic", "block:cyclic:block,NoPack", "nopack"):
        assert distributions(sbatch=(f"--dist={text}",)) == [f"--distribution={text}"]
        # An option of the step goes before it, as in Slurm.
        assert distributions(srun=(f"--distribution={text}",))[-1] == f"--distribution={text}"
    both = {"sbatch": ("--distribution=block:block",), "srun": ("--distribution=block:cyclic",)}
    assert distributions(**both)[-1] == "--distribution=block:cyclic"
    for text in ("cyclic", "plane=2", "arbitrary"):
        with pytest.raises(UsageError, match="=block comes after it") as raised:
            distributions(sbatch=(f"--distribution={text}",))
        assert "block:…" in (raised.value.hint or "")
    monkeypatch.setenv("SBATCH_DISTRIBUTION", "block:fcyclic")
    assert distributions() == ["--distribution=block:fcyclic"]


def test_no_option_of_ours_for_torchrun_overrides_the_users() -> None:
    for option in TORCHRUN_OPTIONS:
        with pytest.raises(UsageError, match="is set by hpc-ddp"):
            _rendering(torchrun=(option.partition("=")[0] + "=x",))


def test_no_variable_of_ours_overrides_the_users_without_a_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of supervisor, worker and torchrun, and of an MPI, which are removed."""
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    attempt = RunFolder(tmp_path).attempt(0)
    names = {*worker.task_variables(), *child_process._variables(place_of(attempt), 0, 6)}
    names |= {variable(item.name) for item in fields(AttemptEnv)}
    names |= {prefix + "RANK" * prefix.endswith("_") for prefix in worker.OF_AN_MPI_TASK}
    text = _rendering(step_launcher="mpirun").block("settings")
    names |= {*re.findall(r"export (HPC_DDP_\w+)=", text)}
    # What torchrun's agent sets for a worker: torch.distributed.elastic.agent.server.
    names |= {"ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"}
    names |= {"TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID"}
    names |= {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    for name in names - {"MPI_LOCAL"}:
        for values in ({"env": {name: "1"}}, {"env_names": (name,)}):
            with pytest.raises(UsageError, match=f"{name} of env has no effect"):
                _rendering(**values)
    _rendering(env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"})  # a setting of torchrun's
    setting = {"PMI_MMAP_SYNC_WAIT_TIME": "600", "SLURM_MPI_TYPE": "pmix"}
    _rendering(env=setting, launcher="srun", nproc_per_node=2)  # of an MPI, whose task a worker is
    of_users = {name: variable.example for name, variable in OF_USERS.items()}
    _rendering(env={**of_users, "OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO"})


def test_a_project_takes_out_what_a_site_and_hpc_ddp_add() -> None:
    lines = ("module load a", "module load b")
    values: dict[str, Any] = {
        "partition": "p",
        "sbatch": ("--network=x", "--hint=nomultithread"),
        "srun": ("--cpu-bind=none", "--gpu-bind=closest"),
        "env": {"A": "1", "B": "2"},
        "setup": lines,
        "fabric": "infiniband",
        "nodes": 2,
    }
    words = ["--requeue", "--partition", "--network=x", "--cpu-bind", "OMP_NUM_THREADS", "A"]
    words += ["NCCL_NET", lines[0], "--comment"]
    before, after = _rendering(**values), _rendering(**values, without=words)
    assert after.warnings() == []
    gone = set(before.text().splitlines()) - set(after.text().splitlines())
    for text in ("--requeue", "--partition=p", "--network=x", "cpu-bind", "export OMP_NUM", "A=1"):
        assert any(text in line for line in gone), text
    script = after.text()
    for text in ("hint=nomultithread", "gpu-bind=closest", "export B=2", "\nmodule load b\n"):
        assert text in script
    assert "module load a" not in script
    assert "NCCL_NET=" not in script
    (warning,) = _rendering(without=("--qos",)).warnings()
    assert "without has '--qos', and the job has no such thing" in warning
    for word in ("--signal", "--signal=B:TERM@60"):
        with pytest.raises(UsageError, match="--signal, which hpc-ddp needs"):
            _rendering(without=(word,))


def test_an_option_whose_name_begins_like_ours_takes_nothing_away() -> None:
    """Sites that ask for GPUs by ``--gres`` have its flags, too."""
    rendering = _rendering(
        gpus_per_node="4", gpu_request="gres", sbatch=("--gres-flags=enforce-binding",)
    )
    assert _in_force(rendering.header, "gres") == "gpu:4"


@pytest.mark.parametrize(
    "option", ["--container-image=b", "--ntasks-per-node=4", "--tasks-per-node=4", "--output=x"]
)
def test_the_container_of_pyxis_has_no_option_of_the_step(option: str) -> None:
    values: dict[str, Any] = {"image": "a", "container_options": (option,)}
    with pytest.raises(UsageError, match="is an option of the step, set by hpc-ddp"):
        _rendering(container_tool="pyxis", **values)
    _rendering(container_tool="apptainer", **values)  # has options of its own


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_DISTRIBUTION", "SLURM_EXPORT_ENV"])
def test_variables_of_slurm_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"variable {name} of env is set by Slurm"):
        _rendering(env={name: "1"})
    _rendering(env={"SLURM_CPU_BIND": "cores"})


@pytest.mark.parametrize("name", ["SLURM_GPU_BIND", "SLURM_NETWORK", "SRUN_X", "SALLOC_X"])
def test_a_variable_that_does_not_leave_the_shell_is_refused(name: str) -> None:
    """An outer job has such, and the job's sbatch has none of them."""
    with pytest.raises(UsageError, match=f"variable {name} of this shell does not reach") as raised:
        _rendering(env_names=(name,))
    assert raised.value.hint == f"--env {name}=VALUE; for an option of srun: --srun=--NAME=VALUE"
    assert f"export {name}=x" in _rendering(env={name: "x"}).text()
    _rendering(env_names=("SLURM_JWT", "SLURM_CONF", "SBATCH_PARTITION", "FOO"))


def test_a_variable_of_this_node_does_not_reach_another_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _rendering(env_names=("NCCL_SOCKET_IFNAME",))
    monkeypatch.setenv("HPC_DDP_NODE_FOLDER", "/r")  # in a shell of a run
    with pytest.raises(UsageError, match="of this shell does not reach"):
        _rendering(env_names=("NCCL_SOCKET_IFNAME",))


@pytest.mark.parametrize("sweep", [{}, {"lr": ("1", "2")}])
def test_an_array_does_not_run_in_an_allocation(sweep: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="the salloc back-end runs inside one"):
        _rendering(array="0-1", sweep=sweep, backend="salloc")
    _rendering(array="0-1", sweep=sweep, backend="local")


@pytest.mark.parametrize(
    ("values", "warning"),
    [
        ({"backend": "local", "image": "a.sif", "setup": ("x",)}, "--setup, --image: no effect"),
        ({"backend": "salloc", "time": "60", "sbatch": ("--hint=a",)}, "--time, --sbatch: no"),
        (
            {"backend": "salloc", "dependency": "afterok:9", "reservation": "r", "output": "o"}
            | {"constraint": "a100", "partition": "p"},
            "--partition, --constraint, --reservation, --dependency, --output: no effect in an",
        ),
        ({"backend": "salloc", "nodes": 2, "gpus_per_node": "4"}, ""),
        ({"backend": "local", "array": "0-2"}, "--array: no effect in a dry run"),
        ({"backend": "local", "array": "0", "sweep": {"lr": ("1",)}}, ""),
        ({"time": "60", "signal": "USR1@600"}, "comes 360 s before the end, and not 600"),
        ({"time": "120", "signal": "USR1@600"}, ""),
        ({"time": "5"}, ""),
        ({"setup": ("export MASTER_PORT=29500 RANK=0",)}, "setup sets MASTER_PORT, RANK"),
        ({"setup": ("export PATH=/x:$PATH; RANK=1 id",)}, ""),
        ({"node_setup": ("export WORLD_SIZE=8",)}, "setup sets WORLD_SIZE"),
        ({"worker_setup": ("export NODE_RANK=$GROUP_RANK",)}, ""),
        ({"setup": ("trap 'touch saved' TERM",)}, "is replaced by hpc-ddp's"),
        ({"sbatch": ("--gres=gpu:4",)}, "--gpus-per-node 4 does both"),
        ({"sbatch": ("--gres=gpu:4",), "nproc_per_node": 4}, ""),
        ({"sbatch": ("--gres=scratch:4",)}, ""),
        ({"sbatch": ("--distribution=block:block",), "launcher": "mpirun"}, "mpirun has its own"),
        ({"sbatch": ("--distribution=block:block",), "launcher": "srun"}, ""),
    ],
)
def test_what_has_no_effect_is_a_warning(values: dict[str, Any], warning: str) -> None:
    spec = JobSpec(script="/home/me/train.py", chdir="/home/me", **values)
    warnings = find_ineffective(spec)
    assert warning in "".join(warnings)
    assert bool(warning) == bool(warnings)
