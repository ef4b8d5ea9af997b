"""From layers of settings to a job: where runs are, how a container is entered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.slurm_values import parse_signal
from hpc_ddp.core.job.spec import JobSpec
from hpc_ddp.submission.script import container
from hpc_ddp.submission.script.directives import directives
from hpc_ddp.submission.settings.config import Settings
from hpc_ddp.submission.settings.runs_dir import runs_root


@pytest.mark.parametrize(
    ("settings", "environ", "expected"),
    [
        ({"runs-dir": "/a"}, {"HPC_DDP_RUNS": "/b", "SCRATCH": "/c"}, "/a"),
        ({"scratch": "/d"}, {"HPC_DDP_RUNS": "/b", "SCRATCH": "/c"}, "/b"),
        ({"scratch": "/d/{account}/$USER", "account": "p1"}, {"USER": "me"}, "/d/p1/me/hpc-ddp"),
        ({}, {"SCRATCH": "/c"}, "/c/hpc-ddp"),
        ({"runs-dir": "~/runs"}, {}, str(Path.home() / "runs")),
        ({"runs-dir": "/a$"}, {}, "/a$"),
        ({}, {}, str(Path("runs").absolute())),
    ],
)
def test_where_runs_are(settings: dict[str, Any], environ: dict[str, str], expected: str) -> None:
    assert runs_root(Settings(settings), environ) == Path(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [("/d/{account}", "no account is named"), ("$NOWHERE/x", "NOWHERE is not set here")],
)
def test_what_is_missing_is_said(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        runs_root(Settings({"scratch": text}), {})


def _entry(**values: Any) -> container.Entry:
    spec = JobSpec(script="/home/me/train.py", chdir="/home/me", image="a.sif", **values)
    return container.entry(spec, Path("/scratch/r"), Path("/scratch/r/code/0"))


def test_containers() -> None:
    bind = ("--bind", "/scratch/r,/home/me", "a.sif")
    assert _entry().command == ("apptainer", "exec", *bind)
    assert _entry(gpus_per_node="4").command == ("apptainer", "exec", "--nv", *bind)
    rocm = _entry(gpus_per_node="4", container_tool="singularity", container_options=["--rocm"])
    assert rocm.command == ("singularity", "exec", "--rocm", *bind)
    more = _entry(gpus_per_node="4", container_options=["--bind", "/data"])
    assert more.command == ("apptainer", "exec", "--nv", "--bind", "/data", *bind)
    shifter = _entry(container_tool="shifter", container_options=["--module=gpu"])
    assert (shifter.sbatch, shifter.command) == (("--image=a.sif",), ("shifter", "--module=gpu"))
    pyxis = _entry(container_tool="pyxis")
    assert pyxis.command == ()
    assert pyxis.srun[1] == "--container-mounts=/scratch/r:/scratch/r,/home/me:/home/me"
    podman = _entry(container_tool="podman-hpc").command
    assert podman[-7:] == (
        *("--volume", "/scratch/r:/scratch/r", "--volume", "/home/me:/home/me"),
        *("--workdir", "/home/me", "a.sif"),
    )


def test_containers_that_can_not_be() -> None:
    with pytest.raises(UsageError, match="accepted: apptainer, podman-hpc, pyxis"):
        _entry(container_tool="docker")
    spec = JobSpec(script="/s.py", chdir="/a,b", image="a.sif")
    with pytest.raises(UsageError, match="comma or a colon"):
        container.entry(spec, Path("/r"), Path("/r/code/0"))


@pytest.mark.parametrize(
    ("request_", "more", "expected"),
    [
        ("gpus-per-node", {}, [("gpus-per-node", "a100:4")]),
        ("gres", {}, [("gres", "gpu:a100:4")]),
        ("gpus-per-task", {}, [("gpus-per-task", "a100:4")]),
        ("gpus-per-task", {"launcher": "srun"}, [("gpus-per-task", "a100:1")]),
        ("none", {}, []),
    ],
)
def test_how_gpus_are_asked_for(
    request_: str, more: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    spec = JobSpec(script="/s.py", gpus_per_node="a100:4", gpu_request=request_, **more)
    assert [pair for pair in directives(spec) if "g" in pair[0]] == expected
    assert spec.workers_per_node == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("USR1@90", ("USR1", 90)),
        ("B:SIGUSR2@600", ("USR2", 600)),
        ("10@30", ("USR1", 30)),
        ("sigterm", ("TERM", 60)),
    ],
)
def test_signals_in_all_of_sbatchs_forms(text: str, expected: tuple[str, int]) -> None:
    assert parse_signal(text) == expected
