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
    return container.make_entry(spec, Path("/scratch/r"), Path("/scratch/r/code/0"))


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
    mounts = ["--container-mounts=/a:/b", "--container-mounts=/c:/c", "--no-container-mount-home"]
    pyxis = _entry(container_tool="pyxis", container_options=mounts)
    joined = "--container-mounts=/scratch/r:/scratch/r,/home/me:/home/me,/a:/b,/c:/c"
    assert [word for word in pyxis.srun if "mount" in word] == [joined, mounts[2]]
    podman = _entry(container_tool="podman-hpc").command
    assert podman[-6:] == (
        *("--volume", "/scratch/r:/scratch/r", "--volume", "/home/me:/home/me"),
        *("--workdir=/home/me", "a.sif"),
    )


def test_gpus_of_amd_have_their_option() -> None:
    for values in ({"gpus_per_node": "mi250:8"}, {"gpus_per_node": "8", "gpu_vendor": "amd"}):
        assert _entry(**values).command[:3] == ("apptainer", "exec", "--rocm")
        assert _entry(container_tool="podman-hpc", **values).command.count("--gpu") == 1
    assert _entry(gpu_vendor="amd").command[2] == "--bind"  # no GPUs
    words = _entry(gpus_per_node="mi250:8", container_options=["--nv"]).command
    assert "--rocm" not in words


def test_the_working_directory_is_the_same_inside() -> None:
    assert "--container-workdir=/home/me" in _entry(container_tool="pyxis").srun
    options = ["--container-workdir=/app"]
    words = _entry(container_tool="pyxis", container_options=options).srun
    assert [word for word in words if "workdir" in word] == options  # pyxis refuses a second one


def test_the_folder_of_a_command_is_the_images() -> None:
    """As /opt/conda/bin, which the host's would hide."""
    spec = JobSpec(script="/opt/conda/bin/python", no_python=True, chdir="/home/me", image="a.sif")
    words = container.make_entry(spec, Path("/scratch/r"), Path("/opt/conda/bin")).command
    assert "/scratch/r,/home/me" in words


def test_a_folder_behind_a_link_is_mounted(tmp_path: Path) -> None:
    """The project is mounted, and in it a link leads to where the runs are."""
    project, runs = tmp_path / "project", tmp_path / "scratch"
    (project / "plain").mkdir(parents=True)
    (runs / "r").mkdir(parents=True)
    (project / "runs").symlink_to(runs)
    spec = JobSpec(script="t.py", chdir=str(project), image="a.sif")
    run = project / "runs" / "r"
    words = container.make_entry(spec, run, run / "code").command
    assert words[3].split(",") == [f"{runs}/r", str(project)]
    plain = project / "plain"
    assert container.make_entry(spec, plain, plain / "code").command[3] == str(project)


def test_impossible_containers_are_refused() -> None:
    with pytest.raises(UsageError, match="accepted: apptainer, apptainer-run, podman-hpc, pyxis"):
        _entry(container_tool="docker")
    spec = JobSpec(script="/s.py", chdir="/a,b", image="a.sif")
    with pytest.raises(UsageError, match="comma or a colon"):
        container.make_entry(spec, Path("/r"), Path("/r/code/0"))
