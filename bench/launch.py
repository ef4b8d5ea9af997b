"""Measures what hpc-ddp costs, side by side with plain Slurm and torchrun, on the tests' cluster.

``make bench`` prints a table of medians and writes it to ``bench/results/``. Five questions:

- how much longer does `hpc-ddp submit` take than `sbatch` of the same script
- how long is it from a job's start to its first step, with workers that are forked and with workers
  that import torch by themselves, against bare ``srun torchrun`` and bare ``srun python``
- how long is it from the notice of a preemption to the first new step, against the sum of what
  can't be avoided: Slurm's own requeue delay, one save, one start
- how long is it from a kill of one worker to the next step, under ``--max-restarts``, on the
  cluster and in a dry run
- how many processes of a node load libtorch in a start (strace), and how much CPU time does a start
  with 8 workers take against one with 1
"""

from __future__ import annotations

import datetime
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
sys.path[:0] = [str(REPO / "tests" / "slurm"), str(REPO / "bench"), str(REPO)]

from cluster import ATTACH, Cluster  # noqa: E402  # its folder was just put on the path
from cluster_machine import poll  # noqa: E402
from disk_operations import processes_below  # noqa: E402
from harness import DIGITS, TWO_BY_TWO, Hpc, Job  # noqa: E402

from hpc_ddp.core.run_folder import RunFolder  # noqa: E402
from tests.raw_events import raw_events  # noqa: E402
from tests.waiting import pid_in  # noqa: E402

ARGS = ("--epochs", "2", "--batch-size", "8", "--step-seconds", "0.1")
ROUNDS = 7
PREEMPTIONS = 5

BARE = """\
#!/bin/bash
#SBATCH --nodes=2 --gpus-per-node=2 --ntasks-per-node=1 --output={folder}/out
date +%s.%N >{folder}/begin
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0 HPC_DDP_RUNS={folder}/runs
export PYTHONPATH={repo}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
srun --ntasks-per-node=1 {python} -m torch.distributed.run --nnodes=2 --nproc-per-node=2 \\
    --rdzv-backend=c10d --rdzv-endpoint="$head:29500" --rdzv-id="$SLURM_JOB_ID" {script} {args}
"""
BARE_PYTHON = """\
#!/bin/bash
#SBATCH --nodes=2 --gpus-per-node=2 --ntasks-per-node=2 --output={folder}/out
date +%s.%N >{folder}/begin
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0 HPC_DDP_RUNS={folder}/runs
export PYTHONPATH={repo} MASTER_PORT=29500 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec {python} {script} {args}'
"""
ONE_STEP = """
import time

import torch
from torch.utils.data import TensorDataset

from hpc_ddp.training import start

run = start(seed=0)
model = run.wrap(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = run.loader(TensorDataset(torch.randn(1024, 8)), batch_size=4)
run.track(model=model, optimizer=optimizer)
for epoch in run.epochs(1):
    for (inputs,) in batches:
        run.backward(model(inputs).sum())
        optimizer.step()
        run.step()
        time.sleep(1)
"""
REQUEUED = """\
#!/bin/bash
#SBATCH --nodes=2 --gpus-per-node=2 --requeue --open-mode=append --output={folder}/out
date +%s.%N >>{folder}/begins
[ -n "$SLURM_RESTART_COUNT" ] && exit
date +%s.%N >{folder}/requeued
scontrol requeue $SLURM_JOB_ID
"""


@dataclass
class Bench:
    """The cluster, and a folder for what the jobs leave."""

    cluster: Cluster
    folder: Path

    def fresh(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))

    def submit_s(self) -> tuple[float, float]:
        """Return the seconds of ``hpc-ddp submit`` and of ``sbatch`` of the script it wrote."""
        hpc = Hpc(self.cluster, self.fresh())
        begin = time.monotonic()
        job = hpc.submit("--sbatch=--hold", *TWO_BY_TWO, str(DIGITS))
        ours = time.monotonic() - begin
        begin = time.monotonic()
        again = self.cluster.run("sbatch", "--parsable", "--hold", str(job.run.script)).stdout
        bare = time.monotonic() - begin
        self.cluster.run("scancel", job.id, again.strip())
        return ours, bare

    def start_ours_s(self, *words: str) -> float:
        """Return the seconds from the first line of our batch script to the first step, with some
        more options."""
        folder = self.fresh()
        hpc = Hpc(self.cluster, folder / "runs")
        setup = f"--setup=date +%s.%N >{folder}/begin"
        job = hpc.submit(setup, *words, *TWO_BY_TWO, str(DIGITS), *ARGS)
        return self._first_step(job, folder)

    def start_bare_s(self, script: str) -> float:
        """The same with a hand-written script: torchrun as it is documented, or python."""
        folder = self.fresh()
        run = RunFolder(folder / "runs" / DIGITS.stem / "local")  # of a plain start
        words = {"repo": REPO, "python": sys.executable, "script": DIGITS, "args": " ".join(ARGS)}
        (folder / "job").write_text(script.format(folder=folder, **words))
        printed = self.cluster.run("sbatch", "--parsable", str(folder / "job")).stdout
        return self._first_step(Job(self.cluster, printed.strip(), run), folder)

    def _first_step(self, job: Job, folder: Path) -> float:
        seconds: float = job.event("first_step")["time"] - float((folder / "begin").read_text())
        self.cluster.run("scancel", job.id)
        self.cluster.reset()
        return seconds

    def requeue_s(self) -> float:
        """Return the seconds from ``scontrol requeue`` to the start of the job it requeues."""
        folder = self.fresh()
        (folder / "job").write_text(REQUEUED.format(folder=folder))
        self.cluster.run("sbatch", str(folder / "job"))
        begins = folder / "begins"
        poll(lambda: begins.exists() and begins.read_text().count("\n") == 2, timeout=60)
        asked = float((folder / "requeued").read_text())
        self.cluster.reset()
        return float(begins.read_text().split()[1]) - asked

    def restarted_s(self) -> float:
        """Return the seconds from a kill of a worker to the end of the next step."""
        hpc = Hpc(self.cluster, self.fresh())
        job = hpc.submit("--max-restarts", "1", *TWO_BY_TWO, str(DIGITS), *ARGS)
        job.at_step(10)
        killed = time.time()
        os.kill(job.worker(1), signal.SIGKILL)
        job.until(lambda: len(job.events("first_step")) == 2, "the first step after the kill")
        seconds: float = job.events("first_step")[-1]["time"] - killed
        self.cluster.run("scancel", job.id)
        self.cluster.reset()
        return seconds

    def restarted_here_s(self) -> float:
        """The same in a dry run with two workers, without the cluster."""
        folder = self.fresh()
        words = ("--max-restarts", "1", "--nproc-per-node", "2", str(DIGITS), *ARGS)
        with DryRun(folder, *words) as run:
            poll(lambda: any(e["step"] >= 10 for e in run.events("metrics")), timeout=60)
            killed = time.time()
            os.kill(pid_in(next(run.path.glob("logs/attempt-0/*/rank-1.pid"))), signal.SIGKILL)
            poll(lambda: len(run.events("first_step")) == 2, timeout=60)
            seconds: float = run.events("first_step")[-1]["time"] - killed
        return seconds

    def start_cpu_s(self, workers: int) -> float:
        """Return the CPU seconds of all processes of a dry run up to its first step."""
        folder = self.fresh()
        (folder / "train.py").write_text(ONE_STEP)
        words = ("--nproc-per-node", str(workers), str(folder / "train.py"))
        with DryRun(folder / "runs", *words) as run:
            poll(lambda: bool(run.events("first_step")), timeout=120)
            return cpu_s(run.process.pid)

    def imports(self, *options: str) -> int:
        """Return how many processes of a node load libtorch in an attempt on two nodes with two
        workers each and some options: those that strace has seen open it, below slurmd."""
        folder = self.fresh()
        (folder / "train.py").write_text(ONE_STEP)
        slurmd = str(self.cluster.slurmd_pid(self.cluster.nodes[0]))
        argv = ["strace", "-f", "-ff", "-qq", "-e", "trace=openat", "-o", str(folder / "trace")]
        tracer = subprocess.Popen([*argv, "-p", slurmd])
        hpc = Hpc(self.cluster, folder / "runs")
        job = hpc.submit(*options, *TWO_BY_TWO, str(folder / "train.py"))
        job.event("first_step")
        tracer.terminate()  # the processes go on without it
        tracer.wait()
        self.cluster.run("scancel", job.id)
        self.cluster.reset()
        texts = (file.read_text(errors="replace") for file in folder.glob("trace.*"))
        return sum(bool(re.search(r"libtorch_cpu\.so.* = \d+$", text, re.M)) for text in texts)

    def preempted_s(self) -> tuple[float, float]:
        """Return the seconds from the notice to the first new step, and those of the save."""
        hpc = Hpc(self.cluster, self.fresh())
        job = hpc.submit(*TWO_BY_TWO, str(DIGITS), *ARGS)
        job.at_step(10)
        job.preempt()
        notice = job.event("notice")["time"]
        first = job.event("first_step", attempt=1)["time"]
        save: float = job.events("checkpoint", 0)[-1]["stall_s"]
        self.cluster.run("scancel", job.id)
        self.cluster.reset()
        return first - notice, save


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process, its descendants, and those that they have waited for,
    have used so far."""
    ticks = 0
    for path in (Path(f"/proc/{pid}/stat") for pid in processes_below(pid)):
        with suppress(OSError):
            ticks += sum(map(int, path.read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


class DryRun:
    """A dry run in a folder of its own, which ends with the block."""

    def __init__(self, folder: Path, *words: str) -> None:
        argv = [sys.executable, "-m", "hpc_ddp", "dry-run", *words]
        env = {**os.environ, "HPC_DDP_RUNS": str(folder), "PYTHONPATH": str(REPO)}
        self.process = subprocess.Popen(
            argv, cwd=REPO, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        poll(lambda: any(folder.glob("*/*/journal")), timeout=60)
        self.path = next(folder.glob("*/*/journal")).parent

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of a name in the run's journal."""
        return [event for event in raw_events(self.path) if event["event"] == name]

    def __enter__(self) -> DryRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()


def measure(bench: Bench) -> list[str]:
    """Measure everything, ours and the reference in turn; return a table's lines."""
    submits = [bench.submit_s() for _ in range(ROUNDS)]
    starts = [
        (
            bench.start_ours_s(),
            bench.start_ours_s("--no-warm-start"),
            bench.start_bare_s(BARE),
            bench.start_bare_s(BARE_PYTHON),
        )
        for _ in range(ROUNDS)
    ]
    requeue = statistics.median(bench.requeue_s() for _ in range(PREEMPTIONS))
    preempted = [bench.preempted_s() for _ in range(PREEMPTIONS)]
    restarted = [(bench.restarted_s(), bench.restarted_here_s()) for _ in range(ROUNDS)]
    restart, restart_here = (statistics.median(column) for column in zip(*restarted, strict=True))
    cpu = [(bench.start_cpu_s(8), bench.start_cpu_s(1)) for _ in range(ROUNDS)]
    eight, one = (statistics.median(column) for column in zip(*cpu, strict=True))
    ours, bare = (statistics.median(column) for column in zip(*submits, strict=True))
    our_start, by_exec, torchrun, python = (
        statistics.median(column) for column in zip(*starts, strict=True)
    )
    back, save = (statistics.median(column) for column in zip(*preempted, strict=True))
    floor = requeue + save + our_start
    return [
        "| what (medians) | hpc-ddp | reference | reach | measured |",
        "|---|---|---|---|---|",
        f"| submit | {ours:.3f} s | sbatch {bare:.3f} s | at most 0.3 s more"
        f" | {ours - bare:.3f} s more |",
        f"| job start to first step | {our_start:.2f} s | srun python {python:.2f} s"
        f" | at most 0.65 x | {our_start / python:.3f} x |",
        f"| the same | {our_start:.2f} s | srun torchrun {torchrun:.2f} s"
        f" | at most 0.45 x | {our_start / torchrun:.3f} x |",
        f"| the same with --no-warm-start | {by_exec:.2f} s | srun torchrun {torchrun:.2f} s"
        f" | at most 1.05 x | {by_exec / torchrun:.3f} x |",
        f"| notice to first new step | {back:.2f} s | requeue {requeue:.2f} s + save {save:.2f} s"
        f" + start {our_start:.2f} s = {floor:.2f} s | at most 1.5 s more | {back - floor:.2f} s"
        " more |",
        f"| kill -9 to the next step, 2 x 2 on the cluster | {restart:.2f} s | | at most 3 s | |",
        f"| the same, 2 workers in a dry run | {restart_here:.2f} s | | at most 2 s | |",
        f"| CPU time of a run of one step, 8 workers | {eight:.2f} s | 1 worker {one:.2f} s"
        f" | at most 1.3 x | {eight / one:.3f} x |",
        f"| processes of a node that load libtorch | {bench.imports()} | | 1 | |",
        f"| the same with --preflight | {bench.imports('--preflight')} | | 1 | |",
        "",
        f"All values: submit {_all(submits)}; start {_all(starts)}; back {_all(preempted)};"
        f" restart {_all(restarted)}; CPU {_all(cpu)}",
    ]


def _all(rows: Sequence[Sequence[float]]) -> str:
    return " ".join("/".join(f"{value:.2f}" for value in row) for row in rows)


def machine() -> str:
    model = subprocess.run(["uname", "-mr"], capture_output=True, text=True).stdout.strip()
    return f"{os.cpu_count()} cores, {model}, Python {sys.version.split()[0]}"


def main() -> None:
    attach = os.environ.get(ATTACH)
    cluster = Cluster.attach(int(attach)) if attach else Cluster.up()
    try:
        with tempfile.TemporaryDirectory() as folder:
            lines = measure(Bench(cluster, Path(folder)))
    finally:
        cluster.down()
    today = datetime.date.today().isoformat()
    text = "\n".join([f"# {today}: {machine()}", "", *lines, ""])
    print(text)
    (REPO / "bench" / "results" / f"{today}-launch.md").write_text(text)


if __name__ == "__main__":
    main()
