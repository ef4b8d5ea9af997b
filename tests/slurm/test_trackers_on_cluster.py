"""Three attempts of a real job: one run of a tracker. tests/cli/test_trackers.py has dry runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cluster import Cluster
from harness import SCRIPTS, TWO_BY_ONE, Hpc, use

from tests.tracker_files import recorded_offline


@pytest.mark.more
def test_weights_and_biases_offline_is_one_run(hpc: Hpc, cluster: Cluster, tmp_path: Path) -> None:
    """The first attempt is killed at step 4, the second preempted at step 8."""
    use(cluster, "linuxproc")
    nowhere = {"WANDB_BASE_URL": "http://127.0.0.1:9", "HTTPS_PROXY": "", "https_proxy": ""}
    words = (*TWO_BY_ONE, "--chdir", str(tmp_path), str(SCRIPTS / "tracked.py"), "wandb")
    job = hpc.submit(*words, env=nowhere)
    id = f"{job.run.path.parent.name}-{job.run.path.name}"

    def stand(attempt: int, step: int) -> None:
        recorded = f"step {step} recorded in attempt {attempt}"
        job.until(lambda: step in recorded_offline(job.run.path).get(id, []), recorded)

    stand(0, 4)
    os.kill(job.worker(0), signal.SIGKILL)
    stand(1, 8)
    job.preempt()
    assert job.end() == "COMPLETED", job.output()
    assert [cause for cause, _ in job.verdicts()][1:] == ["preempted", "finished"]
    recorded = recorded_offline(job.run.path)
    assert recorded[id] == [*range(1, 13)]
    assert recorded.keys() == {id, f"{id}-r1"}  # that rank records, too
    sync = f"wandb sync {job.run.path}/wandb/offline-run-*"
    assert f"hpc-ddp: recorded offline; to send it: {sync}\n" in job.output()
