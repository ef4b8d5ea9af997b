"""Answers of Slurm's commands."""

from __future__ import annotations

from pathlib import Path

TIMED_OUT = "slurm_load_jobs error: Socket timed out on send/recv operation"
HEADER = "#!/bin/bash\n#SBATCH --partition=debug\n#SBATCH --gpus-per-node=2\nsrun true\n"
SCRIPT = Path("job.sbatch")  # in the current folder
