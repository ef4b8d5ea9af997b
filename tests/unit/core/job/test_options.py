"""A job's values are checked, and survive JSON."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec
from unit.core.fakes import NESTED


@pytest.mark.parametrize("text", [NESTED, '{"a": ', "7", "[]"])
def test_a_broken_job_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"the run's job\.json is broken"):
        JobSpec.from_json(text)


def test_a_job_survives_json() -> None:
    spec = JobSpec("train.py", args=("a b", "$(x)", "é\n"), env={"A": "1"}, sbatch=("--x=1",))
    assert JobSpec.from_json(spec.to_json()) == spec


def test_json_of_a_newer_version_is_read() -> None:
    text = JobSpec("train.py").to_json().replace("{", '{"invented_later": 1,', 1)
    assert JobSpec.from_json(text) == JobSpec("train.py")


@pytest.mark.parametrize(
    ("values", "named", "accepted"),
    [
        ({"nodes": 0}, "0", "from 1"),
        ({"nodes": "4-2"}, "4-2", "as 1-4"),
        ({"nodes": "0-2"}, "0-2", "as 1-4"),
        ({"nodes": "two"}, "two", "as 1-4"),
        ({"max_restarts": -1}, "-1", "from 0"),
        ({"elastic": True, "max_restarts": 0}, "0", "restarts its workers"),
        ({"torchrun": ("numa-binding=node",)}, "numa", "--name=value"),
        ({"torchrun": ("--numa-binding=$(id)",)}, "id", "--name=value"),
        ({"torchrun": ("--nnodes=3",)}, "nnodes", "others"),
        ({"torchrun": ("--nproc_per=3",)}, "nproc-per", "others"),
        ({"torchrun": ("--rdzv_conf=x=1",)}, "rdzv-conf", "others"),
        ({"torchrun": ("--standalone",)}, "standalone", "others"),
        ({"torchrun": ("-m",)}, "--m", "others"),
        ({"nproc_per_node": -1}, "-1", "from 1"),
        ({"gpus_per_node": "a100"}, "'a100'", "type:number"),
        ({"time": "soon"}, "'soon'", "h:mm:ss"),
        ({"time": "0"}, "'0'", "positive"),
        ({"resume_if": "last.pt"}, "no resume-args beside it", "both"),
        ({"backend": "slrum"}, "'slrum'", "did you mean 'slurm'?"),
        ({"continue_by": "magic"}, "'magic'", "requeue, resubmit"),
        ({"launcher": "mpi"}, "'mpi'", "torchrun, srun, ibrun, mpirun"),
        ({"srun": ("gpu-bind=x",)}, "srun option 'gpu-bind=x'", "--name=value"),
        ({"launcher": "srun", "nproc_per_node": 4, "cpus_per_node": 2}, "2", "4 tasks"),
        ({"job_name": "../x"}, "'../x'", "letters"),
        ({"job_name": "a\nb"}, "", "letters"),
        ({"partition": "a\n#SBATCH --account=x"}, "partition", "#SBATCH"),
        ({"sbatch": ("network=x",)}, "'network=x'", "--name=value"),
        ({"sbatch": ("--a=\n",)}, "", "--name=value"),
        ({"sbatch": ("--no-kill",)}, "until the time limit", "--elastic"),
        ({"sbatch": ("--no-k=set",), "elastic": True, "nodes": 2}, "--no-kill ", "--elastic"),
        ({"args": ("a\0b",)}, "NUL", "NUL"),
        ({"container": "a 'b"}, "a 'b", "split into words"),
        ({"array": "0-1", "continue_by": "resubmit"}, "chain", "array"),
        ({"env": {"1A": "x"}}, "'1A'", "environment variable"),
        ({"env": {"WANDB_API_KEY": "x"}}, "WANDB_API_KEY", "secret"),
        ({"env": {"HF_TOKEN": "x"}}, "HF_TOKEN", "secret"),
        ({"env": {"HPC_DDP_SAVE_EVERY": "5m"}}, "'5m'", "seconds, or `auto`"),
        ({"env": {"HPC_DDP_HANG_AFTER": "-1"}}, "'-1'", "seconds; 0: never"),
        ({"env": {"HPC_DDP_PROFILE": "10-15"}}, "'10-15'", "two steps"),
        ({"env": {"A": "x" * 131_070}}, "131,070 characters", "fewer than 131,072 bytes"),
    ],
)
def test_a_refused_value_names_the_accepted_ones(
    values: dict[str, object], named: str, accepted: str
) -> None:
    with pytest.raises(UsageError) as caught:
        JobSpec("train.py", **values)  # type: ignore[arg-type]
    assert named in caught.value.message
    assert accepted in caught.value.message
    assert caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["300", "0.5", "auto", "", "$SECONDS_OF_SITE"])
def test_values_of_own_variables_are_accepted(text: str) -> None:
    spec = JobSpec("t.py", env={"HPC_DDP_SAVE_EVERY": text}, expand=("SECONDS_OF_SITE",))
    assert spec.env == {"HPC_DDP_SAVE_EVERY": text}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"nodes": 2}', "5"])
def test_a_broken_job_json_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"job.json is broken"):
        JobSpec.from_json(text)


def test_workers_follow_gpus() -> None:
    assert JobSpec("t.py").workers_per_node == 1
    assert JobSpec("t.py", gpus_per_node="a100:4").workers_per_node == 4
    assert JobSpec("t.py", gpus_per_node="4", nproc_per_node=2).workers_per_node == 2


@pytest.mark.parametrize(
    ("values", "nodes", "least", "restarts"),
    [
        ({}, (1, 1), 1, 0),
        ({"nodes": "2"}, (2, 2), 2, 0),
        ({"nodes": "2-4", "max_restarts": 1}, (2, 4), 2, 1),
        ({"nodes": 3, "elastic": True}, (3, 3), 1, 3),
        ({"nodes": "2-4", "elastic": True, "max_restarts": 5}, (2, 4), 2, 5),
    ],
)
def test_nodes_and_restarts_follow_the_settings(
    values: dict[str, Any], nodes: tuple[int, int], least: int, restarts: int
) -> None:
    spec = JobSpec("t.py", **values)
    assert (spec.node_range, spec.least_nodes, spec.restarts) == (nodes, least, restarts)
    assert JobSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"nodes": True}, "nodes is True"),
        ({"nodes": 10**6}, "nodes is 1000000"),
        ({"max_failures": True}, "max-failures is True"),
        ({"max_requeues": -1}, "max-requeues is -1"),
        ({"cpus_per_task": 0}, "cpus-per-task is 0"),
        ({"job_name": "-x"}, "can't be the name of a folder"),
        ({"job_name": "x" * 101}, "can't be the name of a folder"),
        ({"step_launcher": "ibrun", "launcher": "srun"}, "step-launcher ibrun excludes"),
        ({"step_launcher": "ibrun", "elastic": True}, "ibrun excludes --elastic"),
        ({"launcher": "ibrun", "srun": ("--x",)}, "ibrun excludes --elastic and --srun"),
        ({"step_launcher": "mpirun", "preflight": True}, "mpirun starts the tasks"),
        ({"launcher": "mpirun", "backend": "submitit"}, "mpirun starts the tasks"),
        ({"mpirun": ("--mca pml ob1",)}, "options of mpirun have no effect"),
        ({"launcher": "mpirun", "mpirun": ("--map-by node",)}, "--map-by is set by hpc-ddp"),
        ({"launcher": "mpirun", "mpirun": ("--mca 'pml",)}, "can't be split"),
        ({"launcher": "srun", "nodes": "1-2"}, "how many tasks there are"),
        ({"launcher": "srun", "max_restarts": 1}, "without torchrun"),
        ({"launcher": "srun", "elastic": True}, "without torchrun"),
        ({"launcher": "srun", "torchrun": ("--x",)}, "without torchrun"),
        ({"srun": ("--ntasks=3",)}, "srun option --ntasks is set by hpc-ddp"),
        ({"container": "a", "image": "b"}, "two ways to say one thing"),
        ({"stage": True, "container": "a"}, "--stage is not for containers"),
        ({"stage": True, "image": "a"}, "--stage is not for containers"),
        ({"stage": True, "backend": "submitit"}, "nor for submitit"),
        ({"sweep": {"lr": ("1", "1")}}, "no parameter with values that differ"),
        ({"sweep": {"lr": ("",)}}, "no parameter with values that differ"),
        ({"sweep": {"lr": ("a\n",)}}, "no parameter with values that differ"),
        ({"sweep": {"lr": ()}}, "no parameter with values that differ"),
        ({"sweep": {"1r": ("1",)}}, "no parameter with values that differ"),
        ({"sweep": {"lr": ("1", "2")}, "array": "0-2"}, "accepted: indexes from 0 to 1"),
        ({"sweep": {"lr": ("\0",)}}, "NUL"),
        ({"budget_gpu_hours": 0}, "budget-gpu-hours is 0"),
        ({"budget_gpu_hours": "1"}, "budget-gpu-hours is '1'"),
        ({"array": "0-100000"}, "more than 100,000 tasks"),
        ({"array": "0-99999,5"}, "more than 100,000 tasks"),
        ({"array": "0-"}, "no list of indexes"),
        ({"setup": ("\udcff",)}, "no UTF-8"),
        ({"args": ("\ud800",)}, "no UTF-8"),
        ({"python": "/a/\udcff"}, "no UTF-8"),
        ({"container": "a \udcff"}, "no UTF-8"),
        ({"image": "\udcff"}, "no UTF-8"),
        ({"interface": "\udcff"}, "no UTF-8"),
        ({"mpirun": ("\udcff",)}, "no UTF-8"),
        ({"time": "\u0661\u0660"}, "is not a Slurm time"),
        ({"signal": "TERM@\u0669"}, "signal"),
        ({"gpus_per_node": "\u0664"}, "neither a number nor type:number"),
        ({"python": "-x"}, "'-x' is no program"),
        ({"python": ""}, "'' is no program"),
        ({"python": "nice -n 5 /a/python"}, "'nice -n 5 /a/python' is no program"),
        ({"teardown": ("\0",)}, "NUL"),
        ({"chdir": "\0"}, "NUL"),
        ({"env": {"A": "\0"}}, "NUL"),
        ({"env_names": ("A B",)}, "'A B' is not a name"),
        ({"signal": "KILL"}, "signal 'KILL'"),
        ({"time_min": "60"}, "time-min is 60 and time not set"),
        ({"time_min": "61", "time": "1:00:00"}, "time-min is 61 and time 1:00:00"),
        ({"time_min": "9", "time": "60"}, "accepted: ten times the seconds of --signal"),
        ({"time_min": "1", "time": "60", "signal": "TERM@1"}, "or 2 minutes, where that is more"),
        ({"time_min": "x", "time": "60"}, "'x' is not a Slurm time"),
        ({"gpu_request": "x"}, "gpu-request 'x'"),
        ({"partition": ""}, "partition is an empty text"),
        ({"dependency": ""}, "dependency is an empty text"),
        ({"sbatch": ("--array 0-3",)}, "'--array 0-3' is not of the form --name or --name=value"),
        ({"srun": ("--cpus-per-task 3",)}, "is not of the form --name or --name=value"),
        ({"step_launcher": "x"}, "step-launcher 'x'"),
    ],
)
def test_contradicting_values_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        JobSpec("train.py", **values)
    assert words in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "values",
    [
        {"nodes": 999_999},
        {"nodes": "1-1", "nproc_per_node": 1, "cpus_per_task": 1},
        {"job_name": "x" * 100},
        {"max_failures": 0, "max_requeues": 0, "max_restarts": 0},
        {"step_launcher": "mpirun"},
        {"launcher": "srun", "max_restarts": 0, "srun": ("--gpu-bind=x",)},
        {"launcher": "srun", "nproc_per_node": 2, "cpus_per_node": 2},
        {"elastic": True, "max_restarts": 1},
        {"container": "a 'b c'"},
        {"image": "b"},
        {"sweep": {"lr": ("1", "2")}, "array": "0-1"},
        {"array": "0-99999", "budget_gpu_hours": 0.5},
        {"env": {"TOKENIZERS_PARALLELISM": "x", "KEYBOARD": "x"}, "env_names": ("HF_TOKEN",)},
        {"continue_by": "resubmit", "torchrun": ("--numa-binding=node",)},
        {"gpu_request": "none", "gpus_per_node": "4"},
        {"time": "60", "time_min": "1:00:00"},
        {"time": "60", "time_min": "2", "signal": "TERM@12"},
    ],
)
def test_compatible_values_are_accepted(values: dict[str, Any]) -> None:
    assert JobSpec("train.py", **values)


@pytest.mark.parametrize(
    ("text", "signal"),
    [
        ("TERM@60", ("TERM", 60)),
        ("sigusr1", ("USR1", 60)),
        ("B:USR2@0", ("USR2", 0)),
        ("RB:12@5", ("USR2", 5)),
        ("10", ("USR1", 60)),
        ("15@1", ("TERM", 1)),
        ("2", ("INT", 60)),
    ],
)
def test_signals_have_the_forms_of_sbatch(text: str, signal: tuple[str, int]) -> None:
    spec = JobSpec("t.py", signal=text)
    assert (spec.notice_signal, spec.warn_s) == signal


def test_a_sweep_has_a_task_for_each_combination() -> None:
    spec = JobSpec("t.py", args=("a",), sweep={"x": ("1", "2"), "y": ("3", "4")}, array="0-3")
    assert spec.trials[1] == {"x": "1", "y": "4"}
    assert spec.indexes([]) == [0, 1, 2, 3]
    task = spec.task(2)
    assert (task.args, task.sweep, task.array) == (("a", "--x=2", "--y=3"), {}, "2")
    plain = JobSpec("t.py", args=("a",))
    assert (plain.trials, plain.task(3).args, plain.time_s) == ([], ("a",), None)
    assert (plain.gpu_count, plain.gpu_type, plain.gpus_in_use) == (0, None, 1)
    typed = JobSpec("t.py", gpus_per_node="a100:4", nproc_per_node=2, time="1:00:00")
    assert (typed.gpu_count, typed.gpu_type, typed.gpus_in_use, typed.time_s) == (
        *(4, "a100", 4),
        3600,
    )
    assert JobSpec("t.py", nproc_per_node=3).gpus_in_use == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"array": "0-99999999999"}, "more than 100,000 tasks"),
        ({"array": "2", "sweep": {"lr": ("1", "2")}}, "indexes from 0 to 1"),
        ({"launcher": "srun", "nodes": "1-2"}, "accepted: a whole number"),
        ({"launcher": "srun", "srun": ("--ntasks=3",)}, "is set by hpc-ddp"),
        ({"launcher": "srun", "max_restarts": 1}, "without torchrun"),
        ({"torchrun": ("-h",)}, "is set by hpc-ddp"),
        ({"nodes": "\u0661"}, "accepted: a whole number from 1"),
        ({"nodes": 10**20}, "accepted: a whole number from 1"),
    ],
)
def test_impossible_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        JobSpec("train.py", **values)


def test_a_path_of_python_may_have_blanks() -> None:
    assert JobSpec("train.py", python="/my disk/env -a/bin/python").python


@pytest.mark.parametrize(
    ("name", "hint"), [("tr\udcc3\udca4n.py", "LC_ALL=C.UTF-8"), ("tr\udce4n.py", "rename it")]
)
def test_a_name_that_the_locale_can_not_read_is_no_wrong_name(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match="no UTF-8") as caught:
        JobSpec(name)
    assert hint in str(caught.value.hint)
