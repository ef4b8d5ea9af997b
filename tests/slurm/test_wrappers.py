"""Wrappers of Python that are no plain exec of it: containers, environments of conda."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster
from cluster_build import Proctrack
from harness import ONE_BY_TWO, QUICK_WALK, Hpc, Job, in_one_go, same_weights, use

from hpc_ddp.core.errors import HIDDEN_EXIT
from tests.skips import skip_or_fail

ENTER = "unshare --pid --fork --mount-proc --kill-child"
IN_A_NAMESPACE = f'exec {ENTER} {sys.executable} "$@"'  # apptainer exec --pid, podman run
NOT_BY_EXEC = f'{sys.executable} "$@"'  # conda run, tykky


@pytest.mark.more
@pytest.mark.parametrize(
    ("wrapper", "backend", "launcher", "proctrack"),
    [
        # The batch script starts the supervisor by the wrapper, submitit by its own Python.
        (IN_A_NAMESPACE, "slurm", "torchrun", "linuxproc"),
        (IN_A_NAMESPACE, "submitit", "torchrun", "cgroup"),
        (NOT_BY_EXEC, "submitit", "torchrun", "linuxproc"),
        (NOT_BY_EXEC, "submitit", "srun", "linuxproc"),
        (IN_A_NAMESPACE, "slurm", "srun", "linuxproc"),
    ],
    ids=["slurm-namespace", "submitit-namespace", "child", "worker", "srun-namespace"],
)
def test_a_training_below_a_wrapper_saves_at_a_preemption(
    hpc: Hpc,
    cluster: Cluster,
    walked: Job,
    tmp_path: Path,
    wrapper: str,
    backend: str,
    launcher: str,
    proctrack: Proctrack,
) -> None:
    use(cluster, proctrack)
    if wrapper is IN_A_NAMESPACE and subprocess.run([*ENTER.split(), "true"]).returncode:
        skip_or_fail("this machine gives no PID namespace (unshare)")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{wrapper}\n")
    python.chmod(0o755)
    words = ("--python", str(python), "--backend", backend, "--launcher", launcher)
    job = hpc.submit(*words, *ONE_BY_TWO, *QUICK_WALK, "--hold-at", "25")
    job.held(25)
    job.preempt()
    stop = job.event("stopped")
    assert stop["step"] >= 25
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("preempted", "requeue"), ("finished", "none")]
    assert in_one_go(job)
    assert same_weights(job, walked)


@pytest.mark.more
@pytest.mark.parametrize(("launcher", "proctrack"), [("torchrun", "cgroup"), ("srun", "linuxproc")])
def test_a_training_below_a_shell_saves_at_a_preemption(
    hpc: Hpc,
    cluster: Cluster,
    walked: Job,
    tmp_path: Path,
    launcher: str,
    proctrack: Proctrack,
) -> None:
    """Where Slurm signals every process of a step the shell dies at once, else of the notice."""
    use(cluster, proctrack)
    script = tmp_path / "run.sh"
    script.write_text(f'{sys.executable} "$@"\ntouch {tmp_path}/behind-$RANK\n')
    words = ("--launcher", launcher, *ONE_BY_TWO, "--no-python", "bash", str(script))
    job = hpc.submit(*words, *QUICK_WALK, "--write-seconds", "1", "--hold-at", "25")
    job.held(25)
    job.preempt()
    assert job.event("stopped")["step"] >= 25
    assert not list(tmp_path.glob("behind-*"))
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("preempted", "requeue"), ("finished", "none")]
    assert in_one_go(job)
    assert same_weights(job, walked)


def test_a_start_that_dies_in_a_pipe_finishes_nothing(
    hpc: Hpc, cluster: Cluster, walked: Job, tmp_path: Path
) -> None:
    """``python train.py | tee log`` ends with tee's code, whatever ended the training."""
    use(cluster)
    script = tmp_path / "run.sh"
    dies = "[ $HPC_DDP_ATTEMPT != 1 ] || set -- -c 'import os; os.kill(os.getpid(), 9)'\n"
    script.write_text(f'{dies}{sys.executable} "$@" | tee -a {tmp_path}/log-$RANK\n')
    job = hpc.submit(
        *ONE_BY_TWO, "--no-python", "bash", str(script), *QUICK_WALK, "--hold-at", "25"
    )
    job.held(25)
    job.preempt()
    assert job.end() == "COMPLETED", job.output()
    ends = [("preempted", "requeue"), ("failed", "requeue"), ("finished", "none")]
    assert job.verdicts() == ends
    assert job.events("verdict")[1]["why"] == HIDDEN_EXIT
    assert same_weights(job, walked)
