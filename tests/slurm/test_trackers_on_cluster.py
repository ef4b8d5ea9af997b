"""Three attempts of a real job: one run of a tracker. tests/cli/test_trackers.py has dry runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster
from harness import SCRIPTS, TWO_BY_ONE, Hpc, Job, use

from hpc_ddp.core.job.trackers import mlflow_id_file
from tests.trackers import mlflow_server, recorded_at, recorded_offline

STEPS = [*range(1, 13)]


def play_three_attempts(job: Job, steps: Callable[[], list[int]]) -> None:
    """Kill the first attempt at step 4, preempt the second at step 8, and wait for the job's end;
    `steps` has those that rank 0 has recorded so far."""

    def stand(attempt: int, step: int) -> None:
        def has_recorded() -> bool:  # and saved
            logs = job.run.logs.glob(f"attempt-{attempt}/*/rank-0.log")
            stands_still = any(f"STANDS AT {step}\n" in log.read_text() for log in logs)
            return stands_still and step in steps()

        job.until(has_recorded, f"step {step} recorded in attempt {attempt}")

    stand(0, 4)
    os.kill(job.worker(0), signal.SIGKILL)
    stand(1, 8)
    job.preempt()
    assert job.end() == "COMPLETED", job.output()
    assert [cause for cause, _ in job.verdicts()][1:] == ["preempted", "finished"]


@pytest.mark.more
def test_weights_and_biases_offline_is_one_run(hpc: Hpc, cluster: Cluster, tmp_path: Path) -> None:
    use(cluster, "linuxproc")
    nowhere = {"WANDB_BASE_URL": "http://127.0.0.1:9", "HTTPS_PROXY": "", "https_proxy": ""}
    words = (*TWO_BY_ONE, "--chdir", str(tmp_path), str(SCRIPTS / "tracked.py"), "wandb")
    job = hpc.submit(*words, env=nowhere)
    id = f"{job.run.path.parent.name}-{job.run.path.name}"
    play_three_attempts(job, lambda: recorded_offline(job.run.path).get(id, []))
    recorded = recorded_offline(job.run.path)
    assert recorded[id] == STEPS
    assert recorded.keys() == {id, f"{id}-r1"}  # that rank records, too
    sync = f"wandb sync {job.run.path}/wandb/offline-run-*"
    assert f"hpc-ddp: recorded offline; to send it: {sync}\n" in job.output()


@pytest.mark.more
def test_mlflow_has_one_run(hpc: Hpc, cluster: Cluster, tmp_path: Path) -> None:
    use(cluster, "linuxproc")
    words = (*TWO_BY_ONE, "--chdir", str(tmp_path), str(SCRIPTS / "tracked.py"), "mlflow")
    with mlflow_server(tmp_path / "server", cluster.address) as url:

        def steps() -> list[int]:
            (recorded,) = recorded_at(url).values() or ([],)
            return recorded

        job = hpc.submit(*words, env={"MLFLOW_TRACKING_URI": url, "MLFLOW_EXPERIMENT_NAME": "x"})
        play_three_attempts(job, steps)
        assert recorded_at(url) == {mlflow_id_file(job.run).read_text().strip(): STEPS}
    assert "recorded offline" not in job.output()
