"""What a job script has: its variables, its programs, its set-up lines, its launchers."""

from __future__ import annotations

import pytest
from cluster import Cluster
from harness import SUBMITIT_LATER, TWO_BY_ONE, Hpc, use


@pytest.mark.parametrize("backend", SUBMITIT_LATER)
def test_a_command_with_variables_and_set_up_lines(
    hpc: Hpc, cluster: Cluster, backend: str
) -> None:
    """What `setup` sets without an export is known in arguments, and a node has its own name."""
    use(cluster)
    names = ("SLURM_JOB_ID", "DATA", "SLURMD_NODENAME")
    words = [word for name in names for word in ("--expand", name)]
    words += ["--env", "OUT=/x/$SLURM_JOB_ID", "--env", "AT=$SLURMD_NODENAME"]
    words += ["--setup", "DATA='a  b'", "--node-setup", "export NODE=$SLURMD_NODENAME"]
    words += ["--worker-setup", "export LEVEL=$((RANK + 5))", "--worker-setup", "false"]
    program = ("--no-python", "bash", "-c", 'echo "$1|$2|$OUT|$AT|$NODE|$LEVEL"', "it")
    job = hpc.submit(
        "--backend", backend, *TWO_BY_ONE, *words, *program, "$DATA", "$SLURM_JOB_ID$X"
    )
    assert job.end() == "COMPLETED", job.output()
    for rank, node in enumerate(job.run.attempts()[0].node_names):
        text = job.run.attempt(0).node(node).rank_log(rank).read_text()
        assert f"a  b|{job.id}$X|/x/{job.id}|{node}|{node}|{rank + 5}\n" in text
        assert "this set-up command failed with code 1: false" in text
