"""Who starts the workers, torchrun or srun, and scripts of other libraries under both."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from cluster import Cluster, ensure_packages
from cluster_build import Proctrack
from harness import (
    AS_ROOT,
    DIGITS,
    DIGITS_ARGS,
    MPIRUN,
    ONE_BY_TWO,
    QUICK_WALK,
    SCRIPTS,
    TWO_BY_TWO,
    WALK,
    Hpc,
    Job,
    in_one_go,
    same_weights,
    use,
)

LAUNCHERS = ("torchrun", "srun")


@pytest.mark.more
@pytest.mark.parametrize(("backend", "proctrack"), [("slurm", "linuxproc"), ("submitit", "cgroup")])
def test_a_task_for_each_worker(
    hpc: Hpc, cluster: Cluster, walked: Job, backend: str, proctrack: Proctrack
) -> None:
    """Preempted once; the weights in the end are those of an undisturbed run under torchrun."""
    use(cluster, proctrack)
    words = ("--launcher", "srun", "--backend", backend, *ONE_BY_TWO)
    job = hpc.submit(*words, *QUICK_WALK, "--hold-at", "5")
    job.held(5)
    job.preempt()
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("preempted", "requeue"), ("finished", "none")]
    assert in_one_go(job)
    assert same_weights(job, walked)
    assert "Traceback" not in job.output()
    assert job.output().count("going on from step") == 1
    logs = sorted(path.name for path in job.run.attempt(1).path.glob("*/rank-*.log"))
    assert logs == [f"rank-{rank}.log" for rank in range(2)]


@pytest.mark.more
def test_started_by_mpirun(hpc: Hpc, cluster: Cluster, undisturbed: Job) -> None:
    """Preempted, then a worker killed."""
    use(cluster)
    ensure_packages(MPIRUN)
    words = ("--step-launcher", "mpirun", *TWO_BY_TWO, str(DIGITS), *DIGITS_ARGS)
    job = hpc.submit(*words, env={"HPC_DDP_SAVE_EVERY": "1", **AS_ROOT})
    job.at_step(5)
    job.preempt()
    job.at_step(30, attempt=1)
    os.kill(job.worker(3, attempt=1), signal.SIGKILL)
    assert job.end() == "COMPLETED", job.output()
    retried = [("preempted", "requeue"), ("failed", "requeue"), ("finished", "none")]
    assert job.verdicts() == retried
    assert "rank 3 on" in job.output()
    assert same_weights(job, undisturbed)


@pytest.mark.more
def test_a_task_killed_under_srun(hpc: Hpc, cluster: Cluster, undisturbed: Job) -> None:
    use(cluster)
    words = ("--launcher", "srun", *TWO_BY_TWO, str(DIGITS), *DIGITS_ARGS)
    job = hpc.submit(*words, "--step-seconds", "0.2", env={"HPC_DDP_SAVE_EVERY": "1"})
    job.at_step(20)
    os.kill(job.agent(), signal.SIGKILL)
    job.until(lambda: not job.processes("code/0/", attempt=0), "end of the first attempt")
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("node lost", "requeue"), ("finished", "none")]
    assert same_weights(job, undisturbed)


@pytest.mark.more
def test_errors_under_srun(hpc: Hpc, cluster: Cluster, walked: Job, tmp_path: Path) -> None:
    """One that comes once is retried; one before the first step gives its code to the job."""
    use(cluster)
    words = ("--launcher", "srun", *ONE_BY_TWO)
    once = hpc.submit(*words, str(WALK), "--raise-once-at", "55")
    assert once.end() == "COMPLETED", once.output()
    first = once.events("verdict")[0]
    assert (first["rank"], first["error"]) == (1, "ValueError: this happens once")
    assert same_weights(once, walked)
    script = tmp_path / "ends.py"
    script.write_text("import os, sys, time\nos.environ['RANK'] == '1' and sys.exit(7)\n")
    with script.open("a") as file:
        file.write("time.sleep(600)\n")
    early = hpc.submit(*words, str(script))
    assert early.end() == "FAILED"
    assert early.show()["ExitCode"] == "7:0"
    assert "rank 1 on" in early.output()
    told = hpc("explain", early.id).stdout
    assert "exit code 7" in told
    assert "rank 1 on" in told


@pytest.mark.more
def test_a_port_that_is_taken_under_srun(hpc: Hpc, cluster: Cluster, tmp_path: Path) -> None:
    use(cluster)
    script = tmp_path / "taken.py"
    script.write_text(
        "import os, socket, torch.distributed as dist\n"
        f"marker = {str(tmp_path / 'marker')!r}\n"
        "if os.environ['RANK'] == '0' and not os.path.exists(marker):\n"
        "    open(marker, 'w').close()\n"
        "    taken = socket.create_server(('', int(os.environ['MASTER_PORT'])))\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "print('together at port', os.environ['MASTER_PORT'], flush=True)\n"
    )
    job = hpc.submit("--launcher", "srun", *ONE_BY_TWO, str(script))
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("finished", "none")]
    assert job.output().count("together at port") == 1


def _begin(hpc: Hpc, script: str, launcher: str, folder: Path, pause_s: float = 0.5) -> Job:
    """Submit a script of 80 steps, and wait until it has done some."""
    saves_itself = (str(folder),) if script == "procid_script.py" else ()
    args = (str(SCRIPTS / script), *saves_itself, str(pause_s))
    offline = {"HF_HUB_OFFLINE": "1"}
    job = hpc.submit("--launcher", launcher, *TWO_BY_TWO, *args, env=offline)
    job.printed("step 20 of 80")
    return job


@pytest.mark.more
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("script", "resumed"),
    [
        ("transformers_script.py", "hpc-ddp: going on from step"),
        ("lightning_script.py", "Restored all states from the checkpoint"),
        ("accelerate_script.py", "hpc-ddp: going on from step"),
        ("procid_script.py", "going on from step"),
    ],
)
def test_scripts_of_others_go_on_after_a_preemption(
    hpc: Hpc, cluster: Cluster, tmp_path: Path, script: str, resumed: str, launcher: str
) -> None:
    use(cluster, "cgroup")
    job = _begin(hpc, script, launcher, tmp_path)
    job.preempt()
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("preempted", "requeue"), ("finished", "none")]
    assert resumed in job.output()
    assert job.output().count("step 20 of 80") == 1
    assert job.output().count("done at step 80 with 4 ranks") == 1
    if script == "procid_script.py":
        return
    (stopped,) = job.events("stopped")
    first_steps = [event["step"] for event in job.events("first_step")]
    assert first_steps == [1, stopped["step"] + 1]
    assert [event["step"] for event in job.events("finished")] == [80]
    (shown,) = json.loads(hpc("status", "--json", job.id).stdout)
    assert (shown["step"], shown["total_steps"], shown["loss"] is None) == (80, 80, False)


@pytest.mark.more
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_lightning_goes_on_where_slurm_signals_every_process(
    hpc: Hpc, cluster: Cluster, tmp_path: Path, launcher: str
) -> None:
    """Its own handler of SIGTERM, whose broadcast may hang, is out of the way."""
    use(cluster, "linuxproc")
    job = _begin(hpc, "lightning_script.py", launcher, tmp_path)
    job.preempt()
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts()[-1] == ("finished", "none")
    assert "Restored all states from the checkpoint" in job.output()
    assert "done at step 80 with 4 ranks; TorchElasticEnvironment" in job.output()


@pytest.mark.more
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_cancelled_lightning_stays_cancelled(
    hpc: Hpc, cluster: Cluster, tmp_path: Path, launcher: str
) -> None:
    """Its own requeue, which it makes on a signal, would bring it back."""
    use(cluster, "linuxproc")
    job = _begin(hpc, "lightning_script.py", launcher, tmp_path, pause_s=1.0)
    cluster.run("scancel", job.id)
    assert job.end() == "CANCELLED", job.output()
    assert job.show()["Restarts"] == "0"
    assert len(job.run.attempts()) == 1
