"""Commands that enter a container."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.submission.script import container


def _entry(**values: Any) -> container.Entry:
    spec = JobSpec(script="/home/me/train.py", chdir="/home/me", image="a.sif", **values)
    return container.entry(spec, Path("/scratch/r"), Path("/scratch/r/code/0"))


def test_each_container_tool_has_its_command() -> None:
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


def test_impossible_containers_are_refused() -> None:
    with pytest.raises(UsageError, match="accepted: apptainer, podman-hpc, pyxis"):
        _entry(container_tool="docker")
    spec = JobSpec(script="/s.py", chdir="/a,b", image="a.sif")
    with pytest.raises(UsageError, match="comma or a colon"):
        container.entry(spec, Path("/r"), Path("/r/code/0"))
