"""Run folders that tests write event by event."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.stragglers import summarize_times
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.core.run_index import link_job
from hpc_ddp.report.explain.explain import explain
from hpc_ddp.report.explain.explanation import Explanation
from hpc_ddp.report.explain.facts import gather
from hpc_ddp.slurm_text import JobRecord, QueuedJob

NOW = time.time()


# What torch, CUDA, NCCL and Python print.
GLOO_TIMEOUT = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78]"
    " Timed out waiting 5000ms for recv operation to complete"
)

GLOO_CLOSED = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/"
    "tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:3734. This is typically caused by a"
    " remote worker crashing."
)

CUDA_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.78 GiB. GPU 0 has a total"
    " capacity of 31.47 GiB of which 12.73 GiB is free."
)

NCCL_WATCHDOG = (
    "[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective"
    " operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168,"
    " NumelOut=466119168, Timeout(ms)=600000) ran for 600060 milliseconds before timing out.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
)

NCCL2_TIMEOUT = (  # of torch 2.15, by the strings of its library
    "torch.distributed.DistBackendError: Watchdog caught collective operation timeout: NCCL"
    " operation timed out"
)
NCCL_SYSTEM = (
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/"
    "ProcessGroupNCCL.cpp:1333, unhandled system error (run with NCCL_DEBUG=INFO for details)"
)

SYNTAX = '  File "t.py", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'


def linked(run: RunFolder, job_id: str, cluster: str = "_") -> Path:
    """Return the link of a job in the index of the run's user."""
    return run.root / f".jobs-{os.geteuid()}" / cluster / job_id


class Written:
    """A run folder, written event by event."""

    def __init__(self, root: Path, **spec: Any) -> None:
        self.run = RunFolder(root / "digits" / "20261121-100000-abcd").make()
        self.run.job_json.write_text(JobSpec("t.py", python="/env/bin/python", **spec).to_json())
        self.clock = NOW - 1000.0

    def event(self, name: str, /, attempt: int = 0, **fields: Any) -> Written:
        self.clock += 10
        line = {"time": self.clock, "event": name, "attempt": attempt, **fields}
        with open(self.run.journal_folder / "all.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        return self

    def attempt(self, number: int = 0, steps: int = 0, saved: int = 0) -> Written:
        """Start an attempt; it does `steps` steps and has saved one of them."""
        self.run.attempt(number).path.mkdir(parents=True)
        self.event("started", number, nodes=["n1", "n2"])
        if steps:
            self.event("training", number, step=0).event("first_step", number, step=1)
        if saved:
            self.event("checkpoint", number, step=saved, stall_s=0.1, write_s=1.0, bytes=1)
            (self.run.checkpoints / f"step-{saved}").mkdir(exist_ok=True)
        if steps:
            self.event("metrics", number, step=steps, total_steps=90, loss=0.5)
        return self

    def failure(
        self, error: str = "", code: int = 1, rank: int | None = 3, log: str = "", number: int = 0
    ) -> Written:
        """Let a rank on n2 fail, and the node record it."""
        node = self.run.attempt(number).node("n2")
        node.path.mkdir(exist_ok=True)
        failures = [
            {"rank": 0, "code": -15, "time": NOW, "error": ""},
            {"rank": rank, "code": code, "time": NOW, "error": error},
        ]
        node.record.write_text(json.dumps({"node": "n2", "code": 1, "failures": failures}))
        (node.agent_log if rank is None else node.rank_log(rank)).write_text(log)
        why = f"rank {rank} on n2: {error}; it came before the first step"
        more: dict[str, Any] = {"rank": rank, "node": "n2", "error": error, "bound": "other"}
        more["why_not"] = "it came before the first step"
        return self.verdict("failed", "give up", number, why, **more)

    def verdict(
        self, cause: str, action: str, attempt: int = 0, why: str = "", **more: Any
    ) -> Written:
        return self.event("verdict", attempt, cause=cause, action=action, why=why, **more)

    def said(self, text: str) -> Written:
        self.run.slurm_out.write_text(text)
        return self

    def explain(self, record: JobRecord | None = None, **more_facts: Any) -> Explanation:
        """Explain it, with what Slurm would say of its job 7."""
        facts = replace(
            gather(self.run), job_id="7" if record else None, record=record, **more_facts
        )
        return explain(facts)


def record(state: str, reason: str = "None", code: str = "0:0", **more: Any) -> JobRecord:
    return JobRecord(state, reason, code, **{"nodes": "n[1-2]", "start_time": None, **more})


RUNNING_JOB = QueuedJob("RUNNING", "None", "n[1-2]", "1:02:03")


def write_event(run: RunFolder, writer: str, event: str, ago: float, **fields: Any) -> None:
    line = {"time": time.time() - ago, "event": event, "attempt": 0, **fields}
    with open(run.journal_folder / f"{writer}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def make_run(root: Path, number: int = 7, ended: bool = False) -> RunFolder:
    """Make a run of job `number` that has been training for 100 s, and is at step 400 of 1000."""
    run = RunFolder(root / "digits" / f"20260101-{number:06}-aaaa").make()
    run.job_json.write_text(JobSpec("train.py").to_json())
    link_job(JobRef(str(number)), run)
    write_event(run, "submit", "submitted", 300, backend="slurm")
    write_event(run, "submit", "queued", 300, job_id=str(number))
    write_event(run, "batch", "started", 200, nodes=["n1", "n2"], job_id=str(number))
    write_event(run, "rank-0", "worker", 190, began=time.time() - 195, called=time.time() - 191)
    write_event(run, "rank-0", "first_step", 100, step=1, world_size=4, hosts=["n1", "n2"])
    for step in (200, 400):
        values = {"step": step, "total_steps": 1000, "epoch": 0, "loss": 1 / step}
        write_event(run, "rank-0", "metrics", 100 - step / 4, **values, samples_per_s=64.0)
    write_event(run, "rank-0", "checkpoint", 50, step=200, stall_s=0.1, write_s=1.0, bytes=5)
    if ended:
        write_event(run, "rank-0", "finished", 0, step=400)
        write_event(
            run, "batch", "verdict", 0, cause="finished", action="none", why="", exit_code=0
        )
    return run


def write_step_times(run: RunFolder, busy_s: list[float], data_s: list[float]) -> None:
    """Journal the step times of all ranks, rank k of the node ``n<k>``."""
    event = summarize_times(9, 9, 0.3, data_s, busy_s, [f"n{rank}" for rank in range(len(busy_s))])
    write_event(run, "rank-0", "ranks", 1, **event.to_fields())
