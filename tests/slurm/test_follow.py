"""A day with a run that is preempted: its logs are followed, and its state is looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster
from cluster_machine import LIMIT_S
from harness import DIGITS, DIGITS_ARGS, REPO, TWO_BY_TWO, Hpc, use


@pytest.mark.more
def test_logs_are_followed_over_a_preemption(cluster: Cluster, hpc: Hpc, tmp_path: Path) -> None:
    use(cluster)
    words = ("--partition", "low", "--time", "30:00", *TWO_BY_TWO)
    job = hpc.submit(*words, str(DIGITS), *DIGITS_ARGS)
    env = cluster.env() | {"HPC_DDP_RUNS": str(hpc.runs), "PYTHONPATH": str(REPO)}
    out = tmp_path / "followed"
    with open(out, "wb") as file:
        argv = [sys.executable, "-m", "hpc_ddp", "logs", "-f", job.id]
        following = subprocess.Popen(argv, env=env, stdout=file, stderr=subprocess.STDOUT)
    try:
        job.at_step(5)
        (told,) = json.loads(hpc("status", "--json", job.id).stdout)
        assert (told["state"], told["nodes"]) == ("running", 2)
        assert 0 < told["time_left_s"] <= 30 * 60
        assert told["eta_s"] is not None
        job.preempt()
        job.event("first_step", attempt=1)
        assert job.end() == "COMPLETED"
        assert following.wait(timeout=LIMIT_S) == 0
    finally:
        following.kill()
    print(hpc("status").stdout, hpc("logs", job.id).stdout, sep="\n")
    lines = out.read_text().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("--- attempt")]
    heads = [lines[i].split(" began ")[0].split(" ended ")[0] for i in starts]
    assert heads == ["--- attempt 0"] * 2 + ["--- attempt 1"] * 2
    assert lines[starts[1]].endswith("; it goes on")
    assert lines[starts[3]].endswith(": finished")
    assert any("going on from step" in line for line in lines[starts[2] : starts[3]])
    assert not any("slurmstepd" in line for line in lines)
    assert sorted(lines) == sorted(hpc("logs", job.id).stdout.splitlines())
    assert "slurmstepd" in hpc("logs", "--job", job.id).stdout
    assert list(job.run.logs.glob("attempt-*/*/printed"))
