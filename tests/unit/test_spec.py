from __future__ import annotations

from typing import Any

import pytest

from hpc_ddp.run.errors import UsageError
from hpc_ddp.run.spec import JobSpec, directives, parse_time


def test_survives_json() -> None:
    spec = JobSpec("train.py", args=("a b", "$(x)", "é\n"), env={"A": "1"}, sbatch=("--x=1",))
    assert JobSpec.from_json(spec.to_json()) == spec


def test_json_of_a_newer_version_is_read() -> None:
    text = JobSpec("train.py").to_json().replace("{", '{"invented_later": 1,', 1)
    assert JobSpec.from_json(text) == JobSpec("train.py")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1", 60), ("1:30", 90), ("1:00:00", 3600), ("1-2", 93600), ("1-2:30", 95400)],
)
def test_time(text: str, seconds: int) -> None:
    assert parse_time(text) == seconds


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
        ({"time": "0"}, "'0'", "no time"),
        ({"backend": "slrum"}, "'slrum'", "did you mean 'slurm'?"),
        ({"continue_by": "magic"}, "'magic'", "requeue, resubmit"),
        ({"launcher": "mpirun"}, "'mpirun'", "torchrun, srun"),
        ({"srun": ("gpu-bind=x",)}, "srun option 'gpu-bind=x'", "--name=value"),
        ({"launcher": "srun", "nproc_per_node": 4, "cpus_per_task": 2}, "2", "4 tasks"),
        ({"name": "../x"}, "'../x'", "letters"),
        ({"name": "a\nb"}, "", "#SBATCH"),
        ({"partition": "a\n#SBATCH --account=x"}, "partition", "#SBATCH"),
        ({"sbatch": ("network=x",)}, "'network=x'", "--name=value"),
        ({"sbatch": ("--a=\n",)}, "", "--name=value"),
        ({"args": ("a\0b",)}, "NUL", "NUL"),
        ({"container": "a 'b"}, "a 'b", "split into words"),
        ({"array": "0-1", "continue_by": "resubmit"}, "chain", "array"),
        ({"env": {"1A": "x"}}, "'1A'", "environment variable"),
        ({"env": {"WANDB_API_KEY": "x"}}, "WANDB_API_KEY", "secret"),
        ({"env": {"HF_TOKEN": "x"}}, "HF_TOKEN", "secret"),
    ],
)
def test_refuses_and_says_what_is_accepted(
    values: dict[str, object], named: str, accepted: str
) -> None:
    with pytest.raises(UsageError) as caught:
        JobSpec("train.py", **values)  # type: ignore[arg-type]
    assert named in caught.value.message
    assert accepted in caught.value.message
    assert caught.value.hint
    assert caught.value.exit_code == 2


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
def test_how_many_nodes(
    values: dict[str, Any], nodes: tuple[int, int], least: int, restarts: int
) -> None:
    spec = JobSpec("t.py", **values)
    assert (spec.node_range, spec.least_nodes, spec.restarts) == (nodes, least, restarts)
    assert JobSpec.from_json(spec.to_json()) == spec


def test_cpus_are_a_nodes_under_both_launchers() -> None:
    under_torchrun = JobSpec("t.py", gpus_per_node="4", cpus_per_task=32)
    assert ("cpus-per-task", "32") in directives(under_torchrun)
    assert under_torchrun.tasks_per_node == 1
    under_srun = JobSpec("t.py", launcher="srun", gpus_per_node="4", cpus_per_task=32)
    assert ("cpus-per-task", "8") in directives(under_srun)
    assert under_srun.tasks_per_node == 4
