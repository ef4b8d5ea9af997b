"""`--stage` in a dry run: the second attempt starts from the tree, and nothing is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hpc_ddp.core.errors import CAN_GO_ON
from hpc_ddp.core.run_index import all_runs
from tests.children import start_child
from tests.waiting import wait_until

REPO = Path(__file__).parents[2]
TWICE = REPO / "tests" / "slurm" / "scripts" / "twice.py"


def test_the_second_attempt_starts_from_the_parcel(tmp_path: Path) -> None:
    (near := tmp_path / "near").mkdir()
    env = {**os.environ, "HPC_DDP_RUNS": str(tmp_path / "runs"), "TMPDIR": str(near)}
    words = ("--stage", "--launcher", "srun", "--nodes", "2", "--python", sys.executable)
    argv = [sys.executable, "-m", "hpc_ddp", "dry-run", *words, str(TWICE)]
    with open(out := tmp_path / "out", "wb") as file:
        first = start_child(argv, cwd=tmp_path, env=env, stdout=file, stderr=file)
    wait_until(lambda: [*tmp_path.glob("runs/*/*/stage/label")], "the parcel", out.read_text)
    first.terminate()
    assert first.wait() == CAN_GO_ON, out.read_text()
    (run,) = all_runs(tmp_path / "runs")
    argv = [sys.executable, "-m", "hpc_ddp", "dry-run", "--run", str(run.path)]
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    prefixes = [
        {
            path.read_text().splitlines()[0]
            for path in run.logs.glob(f"attempt-{number}/*/rank-*.log")
        }
        for number in (0, 1)
    ]
    assert prefixes[0] == {f"prefix {sys.prefix}"}
    (line,) = prefixes[1]
    assert line.startswith(f"prefix {near}/")
    assert line.endswith(sys.prefix)
    for text in ("there is no parcel yet", "the next start reads", " MB of disk; Python starts"):
        assert f"{out.read_text()}{done.stderr}".count(text) == 1
    assert [*near.rglob("*")][:9] == []
    assert not (run.path / "stage").exists()
