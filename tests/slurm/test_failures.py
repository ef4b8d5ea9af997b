"""Processes of a job die or fail: recovered from inside the budget, or given up with the cause."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from cluster import Cluster
from harness import (
    BACKENDS,
    DIGITS,
    DIGITS_ARGS,
    ONE_BY_TWO,
    TWO_BY_TWO,
    WALK,
    Hpc,
    Job,
    same_weights,
    use,
)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.more
@pytest.mark.row(
    "one torchrun agent, or one supervisor, killed (-9)",
    promise="all of the attempt ends, on every node; goes on from the last checkpoint",
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("victim", ["agent", "supervisor"])
def test_who_looks_after_workers_killed(
    hpc: Hpc, cluster: Cluster, undisturbed: Job, backend: str, victim: str
) -> None:
    use(cluster)
    words = ("--backend", backend, *TWO_BY_TWO, str(DIGITS), *DIGITS_ARGS)
    job = hpc.submit(*words, "--step-seconds", "0.2", env={"HPC_DDP_SAVE_EVERY": "1"})
    job.at_step(20)
    agent = job.agent()
    os.kill(agent if victim == "agent" else _parent(agent), signal.SIGKILL)
    job.until(lambda: not job.processes("code/0/", attempt=0), "end of the first attempt")
    assert job.end() == "COMPLETED", job.output()
    cause = "failed" if victim == "agent" else "node lost"
    assert job.verdicts() == [(cause, "requeue"), ("finished", "none")]
    if victim == "agent":
        assert "torchrun on" in job.events("verdict")[0]["why"]
        assert "SIGKILL" in job.events("verdict")[0]["why"]
    assert same_weights(job, undisturbed)


@pytest.mark.row(
    "torchrun agent stopped (SIGSTOP), its workers come to their end",
    promise="it is killed a quarter of an hour later; the run is finished",
)
def test_an_agent_that_stands_still_keeps_no_node(hpc: Hpc, cluster: Cluster) -> None:
    use(cluster)
    job = hpc.submit("--sbatch=--hold", *ONE_BY_TWO, str(WALK))
    watch = job.run.lib / "hpc_ddp/node/watch/agent_watch.py"
    watch.write_text(watch.read_text().replace("LOOK_EVERY_S = 300.0", "LOOK_EVERY_S = 0.5"))
    cluster.run("scontrol", "release", job.id)
    job.at_step(20)
    os.kill(job.agent(), signal.SIGSTOP)
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("finished", "none")]
    assert "has not ended after its workers" in job.output()


@pytest.mark.more
@pytest.mark.row(
    "one worker's Python error after progress",
    promise="retried from the last checkpoint, up to --max-failures times",
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_that_comes_once(hpc: Hpc, cluster: Cluster, walked: Job, backend: str) -> None:
    use(cluster)
    words = ("--backend", backend, *ONE_BY_TWO, str(WALK), "--raise-once-at", "55")
    job = hpc.submit(*words)
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("failed", "requeue"), ("finished", "none")]
    first = job.events("verdict")[0]
    assert (first["rank"], first["error"]) == (1, "ValueError: this happens once")
    assert same_weights(job, walked)


@pytest.mark.more
@pytest.mark.row(
    "crash loop without progress",
    promise="ends after two attempts in a row without a newer checkpoint, and says so",
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("trouble", ["--die-at", "--die-from"])
def test_a_crash_loop_ends(hpc: Hpc, cluster: Cluster, backend: str, trouble: str) -> None:
    use(cluster)
    words = ("--backend", backend, "--max-failures", "9", *ONE_BY_TWO, str(WALK), trouble, "25")
    job = hpc.submit(*words)
    assert job.end() == "FAILED", job.output()
    assert job.verdicts() == [("failed", "requeue")] * 2 + [("failed", "give up")]
    assert "two attempts in a row have ended without a newer checkpoint" in job.output()
    assert ("SIGKILL" if trouble == "--die-at" else "ValueError: at ") in job.output()


@pytest.mark.more
@pytest.mark.row(
    "what the script's start needs is away at two starts of a run with progress",
    promise="tried again up to --max-failures times: the second time 10 minutes later, then 30",
)
def test_data_that_are_away_at_two_starts(
    hpc: Hpc, cluster: Cluster, walked: Job, tmp_path: Path
) -> None:
    use(cluster)
    data, script = tmp_path / "data", tmp_path / "train.py"
    data.touch()
    walk = f"import runpy\nrunpy.run_path({str(WALK)!r}, run_name='__main__')\n"
    script.write_text(f"open({str(data)!r}).close()\n{walk}")
    job = hpc.submit(*ONE_BY_TWO, str(script), "--step-seconds", "0.2")
    job.at_step(20)
    data.unlink()
    job.preempt()
    job.until(lambda: len(job.verdicts()) == 3, "the second failed start")
    data.touch()
    job.until(lambda: job.show()["Reason"] == "BeginTime", "the requeue")
    start = time.mktime(time.strptime(job.show()["StartTime"], "%Y-%m-%dT%H:%M:%S"))
    assert 540 < start - time.time() < 610  # a requeue that ends leaves it as it is
    cluster.run("scontrol", "update", f"JobId={job.id}", "StartTime=now+8")  # cred_expire is 5
    assert job.end() == "COMPLETED", job.output()
    failed = ("failed", "requeue")
    assert job.verdicts() == [("preempted", "requeue"), failed, failed, ("finished", "none")]
    assert same_weights(job, walked)


@pytest.mark.more
@pytest.mark.row(
    "suspended for longer than hang_after",
    promise="goes on from the last checkpoint, and no failure is counted",
)
def test_a_long_suspension_is_no_failure(hpc: Hpc, cluster: Cluster, walked: Job) -> None:
    use(cluster)
    words = ("--max-failures", "0", *ONE_BY_TWO, str(WALK), "--step-seconds", "0.2")
    job = hpc.submit(*words, env={"HPC_DDP_HANG_AFTER": "30", "HPC_DDP_SAVE_EVERY": "1"})
    job.at_step(20)
    cluster.run("scontrol", "suspend", job.id)
    time.sleep(40)  # longer than a step may take on a busy machine
    cluster.run("scontrol", "resume", job.id)
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("stood still", "requeue"), ("finished", "none")]
    assert same_weights(job, walked)


@pytest.mark.more
@pytest.mark.row(
    "a script of the site sends SIGTERM into each attempt, before a step",
    promise="ends after three times --max-failures requeues without a newer checkpoint",
)
def test_a_signal_to_each_attempt_ends(hpc: Hpc, cluster: Cluster, tmp_path: Path) -> None:
    use(cluster)
    script = tmp_path / "slow.py"  # it still reads its data set when the signal comes
    script.write_text("import time\ntime.sleep(600)\nfrom hpc_ddp.training import start\nstart()\n")
    # Once a worker runs: before its supervisor does, the signal would kill the task.
    signal_each = (
        "number=$(ls $HPC_DDP_RUN/logs | grep -c attempt-);"
        " (until ls $HPC_DDP_RUN/logs/attempt-$number/*/rank-1.pid; do sleep 0.1; done;"
        " scancel --signal=TERM $SLURM_JOB_ID) > /dev/null 2>&1 &"
    )
    words = ("--max-failures", "1", "--setup", signal_each, *ONE_BY_TWO, str(script))
    job = hpc.submit(*words)
    assert job.end() == "FAILED", job.output()
    assert job.verdicts() == [("notice", "requeue")] * 3 + [("notice", "give up")]
    assert "4 attempts in a row have ended without a newer checkpoint" in job.output()


@pytest.mark.more
@pytest.mark.row(
    "the first node is lost, with SBATCH_NO_KILL in the profile", promise="goes on elsewhere"
)
def test_a_profile_that_keeps_jobs_without_their_shell(
    hpc: Hpc, cluster: Cluster, walked: Job
) -> None:
    words = (*ONE_BY_TWO, str(WALK), "--hold-at", "25")
    job = hpc.submit(*words, env={"SBATCH_NO_KILL": "set"})
    job.held(25)
    node = job.nodes()
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    job.event("first_step", attempt=1)
    cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
    assert job.end() == "COMPLETED", job.output()
