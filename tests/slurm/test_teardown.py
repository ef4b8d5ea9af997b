"""A user's lines after the training: whatever becomes of them, the verdict comes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster import Cluster
from harness import Hpc, Job, use

from hpc_ddp.core.run_folder import RunFolder


@pytest.mark.parametrize("line", ["exit 3", "cat <<EOF"])
def test_the_verdict_comes_all_the_same(
    hpc: Hpc, cluster: Cluster, tmp_path: Path, line: str
) -> None:
    use(cluster)
    (tmp_path / "train.py").write_text("print('hello')\n")
    lines = json.dumps(["echo taken down: $HPC_DDP_VERDICT, $OUT", line])
    (tmp_path / "hpc-ddp.toml").write_text(f'setup = ["set -eu", "OUT=x"]\nteardown = {lines}\n')
    words = ("submit", "--json", "--launcher", "srun", "train.py")
    told = json.loads(hpc(*words, cwd=tmp_path).stdout)
    job = Job(cluster, told["job_id"], RunFolder(Path(told["run"])))
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("finished", "none")]
    assert "taken down: finished, x\n" in job.output()
