"""`attach` beside workers of a real job."""

from __future__ import annotations

from pathlib import Path

from harness import Hpc

SCRIPT = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


def test_a_command_on_a_node_of_choice(hpc: Hpc, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    job = hpc.submit("--nodes", "2", "--launcher", "srun", "--env", "MINE=a b", str(script))
    job.until(lambda: len([*job.run.logs.glob("attempt-0/*/rank-*.pid")]) == 2, 120, "workers")
    first, second = (job.run.logs.glob(f"attempt-0/*/rank-{rank}.pid") for rank in (0, 1))
    look = ("--", "sh", "-c", 'echo "$SLURMD_NODENAME $MINE $HPC_DDP_RUN${RANK:+ $RANK}"')
    said = f"a b {job.run.path}\n"
    assert hpc("attach", job.id, *look).stdout == f"{next(first).parent.name} {said}"
    other = next(second).parent.name
    assert hpc("attach", job.id, "--node", other, *look).stdout == f"{other} {said}"
    assert hpc("attach", job.id, "--", "false", check=False).returncode == 1
    assert job.state() == "RUNNING"  # what is beside it ends without it
    hpc("cancel", job.id)
    job.end()
    done = hpc("attach", job.id, check=False)
    assert "does not run here now" in done.stderr
