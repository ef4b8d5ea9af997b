"""Three attempts of a job, a killed one, one that has notice, and the last: one run of a tracker.

The trackers' own clients record, W&B's offline and MLflow's with a server on this machine.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_dry_run import SCRIPTS, DryRun

from hpc_ddp.core.job.trackers import mlflow_id_file
from hpc_ddp.core.run_folder import RunFolder
from tests.trackers import mlflow_server, recorded_at, recorded_offline
from tests.waiting import LIMIT_S, pid_in, wait_until

SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "COMET_API_KEY")
SECRET = secrets.token_hex(20)  # not in the text of this file, which a snapshot may copy
STEPS = {"tracked.py": [*range(1, 13)], "tracked_run.py": [*range(1, 81)]}
TWO = ("--nodes", "1", "--gpus-per-node", "2")


@pytest.fixture
def mlflow_url(tmp_path: Path) -> Iterator[str]:
    with mlflow_server(tmp_path / "server") as url:
        yield url


def play_three_attempts(
    tmp_path: Path, script: str, tracker: str, steps: Callable[[Path], list[int]], **environ: str
) -> tuple[Path, str]:
    """Play a job whose first attempt is killed at its stand, and whose second gets notice; return
    the run's folder and what was printed. `steps` has those that rank 0 has recorded so far."""
    (tmp_path / "cwd").mkdir()
    root = tmp_path / "cwd" / "runs"
    environ |= dict.fromkeys(SECRETS, SECRET) | {"HTTPS_PROXY": "", "https_proxy": ""}
    # One of the scripts does without torch, which torchrun's agent would import.
    launcher = ("--launcher", "srun") if script == "tracked.py" else ()
    words = (*TWO, *launcher, str(SCRIPTS / script), tracker)
    dry = DryRun(root, *words, **environ)
    stands = (5, 8) if script == "tracked_run.py" else (4, 8)
    dry.until("started")

    def has_ended() -> bool:
        return dry.process.poll() is not None

    def stand(attempt: int) -> Path:
        at, log = stands[attempt], dry.run.attempt(attempt).node("local-0").rank_log(0)

        def has_recorded() -> bool:  # and saved
            stands_still = log.exists() and f"STANDS AT {at}\n" in log.read_text()
            return stands_still and at in steps(dry.run.path)

        recorded = f"step {at} recorded in attempt {attempt}"
        wait_until(has_recorded, recorded, dry.printed, ended=has_ended)
        return log.with_suffix(".pid")

    os.kill(pid_in(stand(0)), signal.SIGKILL)
    stand(1)
    dry.process.send_signal(signal.SIGTERM)
    assert dry.end() == 75, dry.printed()
    again = DryRun(root, "--run", str(dry.run.path), **environ)
    assert again.end() == 0, again.printed()
    assert len(dry.run.attempts()) == 3
    return dry.run.path, again.printed()


def files_with(secret: str, folder: Path) -> list[Path]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in paths if secret.encode() in path.read_bytes()]


@pytest.mark.more
@pytest.mark.parametrize("script", ["tracked.py", "tracked_run.py"])
def test_weights_and_biases_offline_is_one_run(tmp_path: Path, script: str) -> None:
    def steps(run: Path) -> list[int]:
        return recorded_offline(run).get(f"{run.parent.name}-{run.name}", [])

    # Nothing answers there: the node finds that out by itself.
    url = {"WANDB_BASE_URL": "http://127.0.0.1:9"}
    run, printed = play_three_attempts(tmp_path, script, "wandb", steps, **url)
    recorded = recorded_offline(run)
    id = f"{run.parent.name}-{run.name}"
    assert recorded[id] == STEPS[script]
    others = {f"{id}-r1"} if script == "tracked.py" else set()  # that rank records, too
    assert recorded.keys() == {id} | others
    command = f"wandb sync {run}/wandb/offline-run-*"
    assert f"hpc-ddp: recorded offline; to send it: {command}\n" in printed
    assert not files_with(SECRET, tmp_path)
    argv = [sys.executable, "-m", "hpc_ddp", "status", str(run)]
    status = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert status.stdout.endswith(f"recorded offline; to send it:\n{command}\n")


@pytest.mark.more  # twenty seconds, most of it the import of mlflow
@pytest.mark.parametrize("script", ["tracked.py", "tracked_run.py"])
def test_mlflow_has_one_run(tmp_path: Path, mlflow_url: str, script: str) -> None:
    def steps(run: Path) -> list[int]:
        return [step for steps in recorded_at(mlflow_url).values() for step in steps]

    url = {"MLFLOW_TRACKING_URI": mlflow_url, "MLFLOW_EXPERIMENT_NAME": "digits"}
    run, printed = play_three_attempts(tmp_path, script, "mlflow", steps, **url)
    runs = recorded_at(mlflow_url)
    assert len(runs) == 1, printed
    (recorded,) = runs.items()
    assert recorded == (mlflow_id_file(RunFolder(run)).read_text().strip(), STEPS[script])
    assert "recorded offline" not in printed
    assert not files_with(SECRET, tmp_path / "cwd")
    logs = run / "logs" / "attempt-2" / "local-0"
    if script == "tracked.py":  # rank 0 alone has it
        assert f"RUN {recorded[0]}\n" in (logs / "rank-0.log").read_text()
        assert "RUN None\n" in (logs / "rank-1.log").read_text()
