"""The commands of every day, and the Python API, on real jobs of a script that needs no torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster
from harness import REPO, Hpc

import hpc_ddp
from hpc_ddp.live_jobs import read_queue

SCRIPT = (
    "import sys, time\nprint('up', *sys.argv[1:], flush=True)\ntime.sleep(float(sys.argv[-1]))\n"
)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


def test_beside_a_worker_and_clean_leaves_it_alone(hpc: Hpc, script: str) -> None:
    words = ("--nodes", "2", "--launcher", "srun", "--env", "MINE=a b", script, "600")
    job = hpc.submit(*words)
    job.until(lambda: len([*job.run.logs.glob("attempt-0/*/rank-*.pid")]) == 2, "workers")
    first, second = (next(job.run.logs.glob(f"attempt-0/*/rank-{rank}.pid")) for rank in (0, 1))
    look = ("--", "sh", "-c", 'echo "$SLURMD_NODENAME $MINE $HPC_DDP_RUN${RANK:+ $RANK}"')
    said = f"a b {job.run.path}\n"
    assert hpc("attach", job.id, *look).stdout == f"{first.parent.name} {said}"
    other = second.parent.name
    assert hpc("attach", job.id, "--node", other, *look).stdout == f"{other} {said}"
    assert hpc("attach", job.id, "--", "false", check=False).returncode == 1
    assert f"at {job.run.path} in {REPO.resolve()}" in _typed(hpc, "attach", job.id)
    assert job.state() == "RUNNING"  # what is beside it ends without it
    by_hand = json.loads(hpc("render", "--json", script, "0").stdout)["run"]
    hpc.cluster.run("sbatch", "--hold", f"{by_hand}/job.sbatch")
    for text in (job.id, by_hand):
        done = hpc("clean", text, "--yes", check=False)
        assert (done.returncode, "is at work: " in done.stderr) == (2, True)
    assert json.loads(hpc("clean", "--older-than", "0h", "--json").stdout) == []
    hpc("cancel", job.id)
    job.end()
    assert "does not run here now" in hpc("attach", job.id, check=False).stderr
    hpc("clean", job.id, "--yes")
    assert not job.run.path.exists()
    assert "no run" in hpc("status", job.id, check=False).stderr


def _typed(hpc: Hpc, *words: str) -> str:
    """Return what a terminal shows of a shell in which something is typed."""
    mine, its = os.openpty()
    env = hpc.cluster.env() | {"HPC_DDP_RUNS": str(hpc.runs), "PYTHONPATH": str(REPO)}
    argv = [sys.executable, "-m", "hpc_ddp", *words]
    with subprocess.Popen(argv, stdin=its, stdout=its, stderr=its, env=env, start_new_session=True):
        os.close(its)
        os.write(mine, b'echo "at $HPC_DDP_RUN in $PWD"; exit\n')
        shown = b""
        with contextlib.suppress(OSError):  # nobody is left who could write
            while more := os.read(mine, 4096):
                shown += more
    os.close(mine)
    return re.sub(r"\s*\r\n?", "", shown.decode())  # lines are cut at the terminal's width


def test_from_python(
    cluster: Cluster, hpc: Hpc, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (cluster.env() | {"HPC_DDP_RUNS": str(hpc.runs)}).items():
        monkeypatch.setenv(name, value)
    run = hpc_ddp.submit(hpc_ddp.JobSpec(script, args=("0.5",), launcher="srun"), nodes=2)
    assert run.state in ("waiting", "running", "starting", "finished")
    assert run.wait(240) == "finished"
    assert run.logs(rank=1) == "up 0.5\n"
    again = hpc("rerun", str(run.job_id), "--set", "seed=2", "--json")
    other = hpc_ddp.find(json.loads(again.stdout)["job_id"])
    assert other.wait(240) == "failed"  # its last argument is no number now
    assert other.status().rerun_of == str(run.path)
    held = hpc_ddp.submit(script=script, args=["1"], launcher="srun", sbatch=["--hold"])
    assert held.state == "waiting"
    live = read_queue().live.values()
    assert f"{held.path}/job.sbatch" in {job.script for job in live}
    with pytest.raises(TimeoutError):
        held.wait(timeout=0.5)
    held.cancel()
    assert held.wait(120) == "cancelled"
