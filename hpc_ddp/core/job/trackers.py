"""Sets up trackers of experiments, which record a training: Weights & Biases, MLflow, Comet.

All attempts of a run write into one run of the tracker, whatever the script is: its id stands in
the environment, where the tracker's own client reads it. docs/decisions/013-trackers.md.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from hpc_ddp.core.file_io import read_word
from hpc_ddp.core.job.task_folder import trial_of
from hpc_ddp.core.run_folder import RunFolder

# Names of the variables that were set here, and not by the user; a user's ``off`` has none set.
SET_HERE = "HPC_DDP_TRACKERS"
# W&B's client keeps the last 15 s of an offline run in memory, which a kill would lose. An older
# client passes over a setting that it does not know.
FLUSH_EVERY_S = "1"


def tracker_env(
    run: RunFolder, environ: Mapping[str, str], first_attempt: int = 0
) -> dict[str, str]:
    """Return the trackers' variables for all workers of a run, with `SET_HERE`, which has their
    names with blanks between. Variables that `environ` has are left out. {} where `environ` has
    ``off`` for `SET_HERE`. MLflow's variable is there once the file `mlflow_id_file` is.
    `worker.set_trackers` sets the variables that differ between ranks.

    For the trackers each trial of a sweep is a run, in the sweep's group. A run that began anew
    (``--fresh``) with attempt `first_attempt` is another run than before, in the same group.
    """
    if environ.get(SET_HERE) == "off":
        return {}
    id = _tracker_id(f"{run.name}-{run.id}{_suffix(first_attempt)}")
    title = " ".join([run.name, *(f"{name}={setting}" for name, setting in trial_of(run).items())])
    variables = {
        "WANDB_RUN_ID": id,
        "WANDB_RESUME": "allow",
        "WANDB_NAME": title,
        "WANDB_RUN_GROUP": _tracker_id(f"{run.name}-{run.whole.name}"),
        "WANDB_DIR": str(run.path),
        "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": FLUSH_EVERY_S,
        "COMET_EXPERIMENT_KEY": hashlib.sha256(id.encode()).hexdigest()[:32],
        "COMET_START_MODE": "get_or_create",
        "COMET_START_EXPERIMENT_NAME": title,
        "COMET_OFFLINE_DIRECTORY": str(run.path / "comet"),
        "MLFLOW_RUN_ID": read_word(mlflow_id_file(run, first_attempt)),
    }
    chosen = {name: text for name, text in variables.items() if text and name not in environ}
    return {**chosen, SET_HERE: " ".join(chosen)}


def _suffix(first_attempt: int) -> str:
    """Return the end of a tracker's id, as ``-3``, for a run that began anew with attempt
    `first_attempt`; '' for 0."""
    return f"-{first_attempt}" if first_attempt else ""


def _tracker_id(text: str) -> str:
    """Return a text as an id that W&B takes: its last 110 characters, with ``-`` for each character
    that is not allowed. W&B takes 128: a rank's number may follow."""
    return re.sub(r"[^\w.-]", "-", text, flags=re.ASCII)[-110:]


def mlflow_id_file(run: RunFolder, first_attempt: int = 0) -> Path:
    """Return the path of the file with the id that MLflow's server has given to a run; the file is
    missing before. `first_attempt` is as in `tracker_env`. The file's name has the run's id, since
    a copy of the run's folder is another run."""
    return run.path / f"mlflow-{run.id.replace('/', '-')}{_suffix(first_attempt)}"


def sync_commands(run: RunFolder) -> list[str]:
    """Return the shell commands that send the offline records of a run, or of the tasks of an
    array, to the trackers; [] where nothing is left to send. A folder that can't be listed counts
    as empty, or raises OSError with an older Python."""
    commands = []
    for place in ("", "task-*/"):
        records = run.path.glob(f"{place}wandb/offline-run-*/*.wandb")
        if any(not path.with_suffix(".wandb.synced").exists() for path in records):
            commands.append(f"wandb sync {run.quoted}/{place}wandb/offline-run-*")
        if any(run.path.glob(f"{place}comet/*.zip")):
            commands.append(f"comet upload {run.quoted}/{place}comet/*.zip")
    return commands
