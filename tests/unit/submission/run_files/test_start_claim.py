"""A run is started by one process at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission.run_files.start_claim import claim_start, release_start


def test_a_run_is_started_by_one_process_at_a_time(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "name" / "run").make()
    code = (
        "import sys; from pathlib import Path; from hpc_ddp.core.run_folder import RunFolder;"
        "from hpc_ddp.submission.run_files.start_claim import claim_start;"
        "claim_start(RunFolder(Path(sys.argv[1])))"
    )
    argv = [sys.executable, "-c", code, str(run.path)]
    claim_start(run)
    other = subprocess.run(argv, capture_output=True, text=True)
    assert "is being started by another process just now" in other.stderr
    release_start(run)
    assert subprocess.run(argv).returncode == 0
    claim_start(run)  # that process has ended
    release_start(run)
