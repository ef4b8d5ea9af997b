"""hpc-ddp as typed on the login node of the tests' cluster, and its jobs, watched from outside."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import Cluster
from cluster_build import Proctrack

from hpc_ddp.core.checkpoints import candidates
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.training.checkpoint.restore import open_checkpoint
from tests.frames import frames_of_ours
from tests.raw_events import raw_events
from tests.waiting import pid_in, wait_until

REPO = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
DIGITS = REPO / "jobs" / "digits.py"
# 2 epochs of 45 steps on 4 ranks: some ten seconds of steps, so that there is time to disturb.
DIGITS_ARGS = ("--epochs", "2", "--batch-size", "8", "--step-seconds", "0.05")
WALK = SCRIPTS / "walk.py"
QUICK_WALK = (str(WALK), "--step-seconds", "0.01")
BACKENDS = ("slurm", "submitit")
# Where the back-ends do not differ.
SUBMITIT_LATER = ("slurm", pytest.param("submitit", marks=pytest.mark.more))
ONE_BY_TWO = ("--nodes", "1", "--gpus-per-node", "2")
# What most tests take: a rank more is four seconds more of importing torch, at each start.
TWO_BY_ONE = ("--nodes", "2", "--gpus-per-node", "1")
# Open MPI, by its program; it starts nothing as root, unless these are set.
MPIRUN = {"mpirun": "openmpi-bin"}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
TWO_BY_TWO = ("--nodes", "2", "--gpus-per-node", "2")


@dataclass
class Job:
    """A submitted run, watched from outside."""

    cluster: Cluster
    id: str
    run: RunFolder

    def events(self, name: str, attempt: int | None = None) -> list[dict[str, Any]]:
        found = [event for event in raw_events(self.run.path) if event["event"] == name]
        return [event for event in found if attempt in (None, event["attempt"])]

    def event(self, name: str, attempt: int = 0) -> dict[str, Any]:
        """Wait for an attempt's event, and return it."""
        self.until(lambda: bool(self.events(name, attempt)), f"event {name} of attempt {attempt}")
        return self.events(name, attempt)[-1]

    def until(self, condition: Callable[[], object], event: str) -> None:
        """Return once `condition` holds."""
        wait_until(condition, event, lambda: f"job {self.show()}\n{self.output()}", pause_s=0.3)

    def show(self) -> dict[str, str]:
        text = self.cluster.run("scontrol", "show", "job", self.id).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def state(self) -> str:
        return self.show()["JobState"]

    def end(self) -> str:
        """Wait until the job is over for good, and return Slurm's state for it.

        Slurm shows none of these states before the batch script has ended on its node: what is
        over then can't requeue itself any more.
        """
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        self.until(lambda: self.state() in over, "the job's end")
        assert not frames_of_ours(self.output())
        return self.state()

    def printed(self, text: str) -> None:
        """Wait until the job has printed `text`."""
        self.until(lambda: text in self.output(), f"{text!r} in the output")

    def notice(self) -> None:
        """Wait until a supervisor has had a notice, and its second is over: a scancel within the
        second of a preemption can't be told from the preemption's own end, in Slurm's whole
        seconds."""
        self.until(lambda: self.events("notice"), "a notice")
        began = int(self.events("notice")[0]["time"])
        self.until(lambda: time.time() >= began + 1, "the next second")

    def nodes(self) -> str:
        return self.show()["NodeList"]

    def at_step(self, step: int, attempt: int = 0) -> None:
        """Wait until an attempt has come to a step."""
        self.until(
            lambda: any(e["step"] >= step for e in self.events("metrics", attempt)),
            f"step {step} of attempt {attempt}",
        )

    def held(self, step: int) -> None:
        """Wait until walk.py holds at a step, and what it saved before is durable."""
        self.until((self.run.path / f"held-{step}").exists, f"hold at step {step}")
        saved = step // 10 * 10
        if 0 < saved < step:
            self.until(
                lambda: any(e["step"] == saved for e in self.events("checkpoint")),
                f"checkpoint of step {saved}",
            )

    def preempt(self) -> None:
        """Send a job to the partition that preempts, onto the nodes that this job has."""
        shown = self.show()
        nodes = shown["NodeList"]
        self.cluster.run(
            "sbatch",
            "--partition=high",
            f"--nodelist={nodes}",
            f"--nodes={shown['NumNodes']}",
            "--gpus-per-node=4",
            "--output=/dev/null",
            "--wrap=sleep 1",
        )

    def set_time_limit(self, minutes: int | str) -> None:
        self.cluster.run("scontrol", "update", f"JobId={self.id}", f"TimeLimit={minutes}")

    def shorten_time_limit(self) -> None:
        """Have the running job's time end in 50 to 110 s: Slurm counts limits in minutes."""
        clock = self.show()["RunTime"]  # [days-]HH:MM:SS
        hours, minutes, seconds = (int(number) for number in clock.split("-")[-1].split(":"))
        self.set_time_limit((hours * 3600 + minutes * 60 + seconds + 50) // 60 + 1)

    def worker(self, rank: int, attempt: int = 0) -> int:
        """Return the process id of a rank."""
        (path,) = self.run.logs.glob(f"attempt-{attempt}/*/rank-{rank}.pid")
        return pid_in(path)

    def workers(self, attempt: int = 0) -> list[int]:
        """Return the process ids of all ranks, in order, once they have started."""
        count = self.event("first_step", attempt)["world_size"]
        return [self.worker(rank, attempt) for rank in range(count)]

    def processes(self, words: str = "", attempt: int = 0, node: str = "") -> list[int]:
        """Return the processes of an attempt with `words` in their command line, anywhere: it is
        one machine. An srun or mpirun has the words of what it starts, and counts where it is asked
        for."""
        wanted = {f"HPC_DDP_RUN={self.run.path}", f"HPC_DDP_ATTEMPT={attempt}"}
        wanted |= {f"SLURMD_NODENAME={node}"} if node else set()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environ = (path / "environ").read_bytes().decode(errors="replace").split("\0")
                command = (path / "cmdline").read_bytes().decode(errors="replace")
                starts = command.startswith(("srun", "mpirun")) and not words.startswith("srun")
                if wanted <= set(environ) and words in command.replace("\0", " ") and not starts:
                    found.append(int(path.name))
        return [pid for pid in found if runs(pid)]

    def agent(self, attempt: int = 0) -> int:
        """Return the process id of torchrun's agent on the node of the last rank; under srun of
        its supervisor."""
        stat = Path(f"/proc/{self.workers(attempt)[-1]}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])

    def output(self) -> str:
        return "".join(path.read_text() for path in sorted(self.run.logs.glob("slurm*.out")))

    def verdicts(self) -> list[tuple[str, str]]:
        return [(event["cause"], event["action"]) for event in self.events("verdict")]

    def weights(self, prefix: str = "model.") -> dict[str, Any]:
        """Return the model in the newest checkpoint, or what else has a name with this prefix."""
        newest = candidates(self.run.checkpoints)[0]
        reader = open_checkpoint(newest).reader
        return {name: reader.read(name) for name in reader if name.startswith(prefix)}


@dataclass
class Hpc:
    """Runs hpc-ddp as a user of the cluster's login node would."""

    cluster: Cluster
    runs: Path

    def __call__(
        self, *words: str, cwd: Path = REPO, env: dict[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        environ = self.cluster.env() | {"HPC_DDP_RUNS": str(self.runs), "PYTHONPATH": str(REPO)}
        argv = [sys.executable, "-m", "hpc_ddp", *words]
        environ |= env or {}
        done = subprocess.run(argv, cwd=cwd, env=environ, capture_output=True, text=True)
        assert not check or done.returncode == 0, done.stderr
        return done

    def submit(
        self,
        *words: str,
        env: dict[str, str] | None = None,
        sets: Sequence[str] = (),
        cwd: Path = REPO,
    ) -> Job:
        """Submit a job; a sweep, where `sets` has ``name=value,value``."""
        command = ("sweep", *(f"--set={each}" for each in sets)) if sets else ("submit",)
        told = json.loads(self(*command, "--json", *words, env=env, cwd=cwd).stdout)
        return Job(self.cluster, told["job_id"], RunFolder(Path(told["run"])))


def runs(pid: int) -> bool:
    """Tell whether a process runs; one that is dead and waits for its parent does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def use(cluster: Cluster, proctrack: Proctrack = "linuxproc") -> None:
    """Have the cluster track processes in this way."""
    if proctrack == "cgroup" and cluster.cgroup_reason:
        pytest.skip(cluster.cgroup_reason)
    if cluster.proctrack != proctrack:
        cluster.reconfigure(proctrack=proctrack)


def same_weights(one: Job, other: Job) -> bool:
    """Tell whether two runs ended with the same weights, bit for bit."""
    a, b = one.weights(), other.weights()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def in_one_go(job: Job) -> bool:
    """Tell whether each attempt went on at the step after the one that the last had stopped at."""
    firsts = [event["step"] for event in job.events("first_step")][1:]
    stops = [event["step"] for event in job.events("stopped")]
    if stops and stops[-1] == job.events("finished")[-1]["step"]:
        stops.pop()  # stopped at the very last step: nothing was left to do
    return firsts == [step + 1 for step in stops]
