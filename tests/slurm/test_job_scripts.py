"""What a job script has: its variables, its programs, its set-up lines, its launchers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cluster import Cluster, ensure_packages
from harness import (
    AS_ROOT,
    DIGITS,
    DIGITS_ARGS,
    MPIRUN,
    SUBMITIT_LATER,
    TWO_BY_ONE,
    TWO_BY_TWO,
    Hpc,
    Job,
    in_one_go,
    same_weights,
    use,
)

from tests.skips import skip_or_fail


@pytest.mark.parametrize("backend", SUBMITIT_LATER)
def test_a_command_with_variables_and_set_up_lines(
    hpc: Hpc, cluster: Cluster, backend: str
) -> None:
    """What `setup` sets without an export is known in arguments, and a node has its own name."""
    use(cluster)
    names = ("SLURM_JOB_ID", "DATA", "SLURMD_NODENAME", "FILES[@]", "MORE[@]")
    words = [word for name in names for word in ("--expand", name)]
    words += ["--env", "OUT=/x/$SLURM_JOB_ID", "--env", "AT=$SLURMD_NODENAME"]
    words += [
        "--setup",
        "DATA='a  b'",
        "--setup",
        "FILES=(c 'd  e')",
        "--node-setup",
        "export NODE=$SLURMD_NODENAME",
    ]
    words += ["--worker-setup", "export LEVEL=$((RANK + 5))", "--worker-setup", "false"]
    words += ["--worker-setup", "MORE=()"]
    show = 'echo "$1|$2|$OUT|$AT|$NODE|$LEVEL|$3|$4|$#"'
    arguments = ("$DATA", "$SLURM_JOB_ID$X", "${FILES[@]}", "${MORE[@]}")
    program = ("--no-python", "bash", "-c", show, "it", *arguments)
    job = hpc.submit("--backend", backend, *TWO_BY_ONE, *words, *program)
    assert job.end() == "COMPLETED", job.output()
    for rank, node in enumerate(job.run.attempts()[0].node_names):
        text = job.run.attempt(0).node(node).rank_log(rank).read_text()
        assert f"a  b|{job.id}$X|/x/{job.id}|{node}|{node}|{rank + 5}|c|d  e|4\n" in text
        assert "this set-up command failed with code 1: false" in text


@pytest.mark.more
def test_a_task_of_mpirun_for_each_worker(hpc: Hpc, cluster: Cluster, undisturbed: Job) -> None:
    """Preempted once. Ranks are those of the MPI, whose variables the workers keep."""
    use(cluster)
    ensure_packages(MPIRUN)
    words = ("--launcher", "mpirun", "--mpirun=--mca btl self,tcp", *TWO_BY_TWO)
    job = hpc.submit(*words, str(DIGITS), *DIGITS_ARGS, env={"HPC_DDP_SAVE_EVERY": "1", **AS_ROOT})
    job.at_step(5)
    job.preempt()
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("preempted", "requeue"), ("finished", "none")]
    assert same_weights(job, undisturbed)
    show = 'echo "$RANK $OMPI_COMM_WORLD_RANK $LOCAL_RANK $OMPI_COMM_WORLD_LOCAL_RANK $WORLD_SIZE"'
    job = hpc.submit(*words, "--no-python", "bash", "-c", show, env=AS_ROOT)
    assert job.end() == "COMPLETED", job.output()
    logs = sorted(job.run.attempt(0).path.glob("*/rank-*.log"))
    assert [log.read_text() for log in logs] == [f"{r} {r} {r % 2} {r % 2} 4\n" for r in range(4)]


@pytest.mark.more
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_an_old_python_is_named_by_the_verdict(hpc: Hpc, cluster: Cluster, launcher: str) -> None:
    """One that a set-up line brings, so that the submit does not know it."""
    use(cluster)
    old = sorted(Path.home().glob(".pyenv/versions/3.[789].*/bin/python"))
    if not old:
        skip_or_fail("there is no old Python")
    words = ("--launcher", launcher, "--python", "python", "--setup", f"PATH={old[0].parent}:$PATH")
    job = hpc.submit(*words, *TWO_BY_ONE, str(DIGITS))
    assert job.end() == "FAILED", job.output()
    assert job.verdicts() == [("failed", "give up")]
    assert "too old; accepted for --python: 3.10 or later" in job.output()


@pytest.mark.more
def test_an_old_script_is_imported_preempted_and_resumed(
    hpc: Hpc, cluster: Cluster, tmp_path: Path
) -> None:
    """Its program is as it was; what the script set up before the launch is there."""
    use(cluster)
    shutil.copy(DIGITS, tmp_path / "train.py")
    shutil.copytree(DIGITS.parent / "data", tmp_path / "data")
    (tmp_path / "old.sbatch").write_text(
        "#!/bin/bash\n#SBATCH -N 2 --ntasks-per-node=1\n#SBATCH --gpus-per-node=1\n"
        "#SBATCH --time=5\n#SBATCH --array=0-3%1\nexport OMP_NUM_THREADS=1\nMARK=set-up-line\n"
        'echo "$MARK of $SLURM_JOB_ID"\n'
        "head=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)\n"
        f"ARGS=()\nfor word in {' '.join(DIGITS_ARGS)}; do ARGS+=($word); done\n"
        'srun bash -c "torchrun --nnodes=$SLURM_NNODES --nproc_per_node=1 --rdzv_backend=c10d'
        ' --rdzv_endpoint=$head:29400 train.py ${ARGS[*]}"\n'
        'echo "after $MARK"\n'
    )
    hpc("import", "old.sbatch", cwd=tmp_path)
    job = hpc.submit(cwd=tmp_path, env={"HPC_DDP_SAVE_EVERY": "1"})
    job.at_step(5)
    job.preempt()
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("preempted", "requeue"), ("finished", "none")]
    assert f"set-up-line of {job.id}" in job.output()
    assert "after set-up-line" in job.output()
    assert in_one_go(job), job.output()
