"""Run folders written by hand, one for each way to end or to wait, and what is told of them.

The messages are those that torch 2.15, Python, bash, srun and slurmstepd really print; those of
CUDA and NCCL are as they stand in reports and in torch's own libraries.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_ddp.node.verdict import Facts as VerdictFacts
from hpc_ddp.node.verdict import decide
from hpc_ddp.report.explain.explain import explain, explain_run
from hpc_ddp.report.explain.explanation import Explanation, paragraph
from hpc_ddp.report.explain.facts import gather
from hpc_ddp.report.explain.patterns import FAILURES, explain_pending, recognise
from hpc_ddp.report.logs.files import LogQuery
from hpc_ddp.report.logs.view import follow, show
from hpc_ddp.report.status.run_status import status_of
from hpc_ddp.run.errors import UsageError
from hpc_ddp.run.folder import RunFolder, find_run
from hpc_ddp.run.process import identity
from hpc_ddp.run.spec import JobSpec
from hpc_ddp.slurm import Record

NOW = time.time()
EXAMPLES = int(os.environ.get("HPC_DDP_SOAK", "30"))


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
        return self.verdict("failed", "give up", number, why, rank=rank, node="n2", error=error)

    def verdict(
        self, cause: str, action: str, attempt: int = 0, why: str = "", **more: Any
    ) -> Written:
        return self.event("verdict", attempt, cause=cause, action=action, why=why, **more)

    def said(self, text: str) -> Written:
        self.run.slurm_out.write_text(text)
        return self

    def explain(self, record: Record | None = None, **known: Any) -> Explanation:
        """Explain it, with what Slurm would say of its job 7."""
        facts = replace(gather(self.run), job_id="7" if record else None, record=record, **known)
        return explain(facts)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path).event("submitted", backend="slurm", first_attempt=0)


def _record(state: str, reason: str = "None", code: str = "0:0", **more: Any) -> Record:
    return Record(state, reason, code, **{"nodes": "n[1-2]", "start_time": None, **more})


# --- what is so for good, and what goes on --------------------------------------------------


def test_finished(written: Written) -> None:
    written.attempt(0, steps=20, saved=20).verdict("preempted", "requeue")
    written.attempt(1, steps=90, saved=90).event("finished", 1, step=90)
    found = written.verdict("finished", "none", 1).explain()
    assert (found.kind, found.attempt) == ("finished", 1)
    assert "is finished after 90 steps, in 2 attempts" in found.text
    assert "Before that it was preempted once." in found.text
    assert "export" in found.hint


def test_rendered_only(tmp_path: Path) -> None:
    found = Written(tmp_path).explain()
    assert found.kind == "rendered"
    assert found.hint.startswith("sbatch ")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "higher priority"),
        ("Resources", "waits for nodes"),
        ("None", "not looked at it yet"),
        ("", "not looked at it yet"),
        ("BeginTime", "after a requeue"),
        ("Dependency", "has not ended"),
        ("DependencyNeverSatisfied", "never starts"),
        ("JobHeldUser", "held, by you"),
        ("JobHeldAdmin", "held by an administrator"),
        ("launch failed requeued held", "Slurm holds it"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "down, drained or reserved"),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority"
            " partitions",
            "down, drained or reserved",
        ),
        ("PartitionTimeLimit", "more time than its partition"),
        ("PartitionNodeLimit", "more nodes than its partition"),
        ("BadConstraints", "no node has what it asks for"),
        ("InvalidAccount", "account is not valid"),
        ("InvalidQOS", "QOS is not valid"),
        ("QOSMaxGRESPerUser", "your jobs together use as much as you may of: GPUs (GRES)"),
        ("QOSMaxCpuPerUserLimit", "as you may of: CPUs"),
        ("QOSMaxJobsPerUserLimit", "as you may of: running jobs"),
        ("QOSMaxNodePerJobLimit", "more than one job may have of: nodes"),
        ("QOSMaxWallDurationPerJobLimit", "more than one job may have of: run time"),
        ("AssocMaxGRESMinutesPerJob", "more than one job may have of: GPUs (GRES)"),
        ("MaxCpuPerAccount", "jobs of your account together"),
        ("AssocMaxJobsLimit", "as many as you may of: running jobs"),
        ("AssocGrpGRES", "all jobs of your account together use as much as they may of: GPUs"),
        ("AssocGrpCpuLimit", "your account together use as much as they may of: CPUs"),
        ("AssocGrpCPUMinutesLimit", "your account has used up its CPUs minutes"),
        ("AssocGrpGRESRunMinutes", "your account has used up its GPUs (GRES) minutes"),
        ("QOSGrpNodeLimit", "all jobs of your QOS together"),
        ("QOSMinGRES", "less than its QOS takes of: GPUs (GRES)"),
        ("QOSResourceLimit", "has reached a limit"),
        ("JobArrayTaskLimit", "%N"),
        ("WaitingForTheMoon", "Slurm gives the reason WaitingForTheMoon"),
    ],
)
def test_reasons_in_plain_words(written: Written, reason: str, words: str) -> None:
    found = written.event("queued", job_id="7").explain(_record("PENDING", reason, nodes=""))
    assert found.kind == "waiting"
    assert words in found.text
    assert found.hint == explain_pending(reason, "7")[1]


def test_waiting_after_a_requeue_tells_of_the_last_end(written: Written) -> None:
    for number in (0, 1):
        written.attempt(number, steps=20, saved=20)
        written.event("stopped", number, step=20, reason="notice")
        written.verdict("preempted", "requeue", number)
    written.attempt(2, steps=33, saved=30).failure(code=-9, number=2)
    # the verdict on it, as its retry has it
    path = written.run.journal_folder / "all.jsonl"
    path.write_text(path.read_text().replace('"give up"', '"requeue"'))
    found = written.explain(_record("PENDING", "BeginTime", start_time=time.time() + 100))
    assert found.kind == "waiting"
    assert "Slurm expects to start it on" in found.text
    assert "Before that it was preempted twice." in found.text
    assert "start it on" in found.text.partition("Its last attempt failed at step 33: rank 3")[0]
    assert "The newest checkpoint is of step 30: 3 steps" in found.text
    assert (found.lost_steps, found.step) == (3, 33)


def test_running(written: Written) -> None:
    written.attempt(0, steps=20, saved=10)
    found = written.explain(_record("RUNNING"))
    assert found.kind == "running"
    assert "running on n[1-2]" in found.text
    assert "is at step 20 of 90 (loss 0.5)" in found.text
    assert "checkpoint is of step 10" in found.text
    assert "it may hang" in found.text  # the last event is 950 s old
    for _ in range(3):
        own: dict[str, Any] = {"busy_s": [0.1, 0.1, 0.4], "data_s": [0.0, 0.0, 0.3], "slowest": 2}
        written.event("ranks", step=20, steps=9, step_s=0.4, node="n2", **own)
    found = written.explain(_record("RUNNING"))
    assert (
        "But rank 2 on n2 waits for data: 0.4 s a step of its own, others 0.1 s: the" in found.text
    )
    written.event("save_failed", step=20, error="[Errno 28] No space left on device")
    found = written.explain(_record("RUNNING"))
    assert "LAST SAVE FAILED" in found.text
    assert "make room" in found.hint


def test_running_but_not_training_yet(written: Written) -> None:
    written.event("queued", job_id="7")
    assert "just been started" in written.explain(_record("RUNNING")).text
    written.attempt(0)
    assert "reports no steps" in written.explain(_record("RUNNING")).text


@pytest.mark.parametrize(("state", "kind"), [("SUSPENDED", "suspended"), ("COMPLETING", "ending")])
def test_other_states(written: Written, state: str, kind: str) -> None:
    assert written.attempt(0, steps=3).explain(_record(state)).kind == kind


def test_a_verdict_that_slurm_has_not_carried_out_yet(written: Written) -> None:
    written.attempt(0, steps=3).verdict("preempted", "requeue")
    assert written.explain(_record("RUNNING")).kind == "ending"


# --- how it ended without a fault of its own ------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "kind", "words"),
    [
        ("preempted", "preempted", "preempted at step 20: a job of higher priority"),
        ("time limit", "time limit", "time limit at step 20"),
        ("notice", "stopped", "asked to stop at step 20"),
        ("node lost", "node lost", "lost a node at step 20 (no word from n2)"),
    ],
)
def test_what_can_go_on(written: Written, cause: str, kind: str, words: str) -> None:
    why = "no word from n2" if cause == "node lost" else cause
    written.attempt(0, steps=20, saved=12).verdict(cause, "requeue", why=why)
    found = written.explain()
    assert found.kind == kind
    assert words in found.text
    assert "but was not requeued" in found.text
    assert "The newest checkpoint is of step 12: 8 steps (11 s) are to be done again." in found.text
    assert found.hint == f"hpc-ddp submit --run {written.run.path}"


def test_a_preflight_that_would_fail_on_all_nodes(written: Written) -> None:
    why = "preflight: import torch: ModuleNotFoundError: No module named 'torch'"
    found = written.attempt(0).verdict("failed", "give up", why=why).explain()
    assert (found.kind, found.hint[:8]) == ("bad environment", "--python")
    assert "its preflight failed: import torch" in found.text
    assert "given up" not in found.text
    why = "preflight: 2 GPUs in place of 4 (by nvidia-smi and device files) (the same on all nodes)"
    assert written.attempt(1).verdict("failed", "give up", 1, why=why).explain().kind == "bad node"


def test_a_node_that_failed_its_preflight(written: Written) -> None:
    why = "preflight: n2 has 3 of 4 GPUs"
    written.attempt(0).verdict("bad node", "requeue", why=why, bad_nodes=["n2"])
    found = written.explain(_record("PENDING", "BeginTime"))
    assert "its preflight failed: n2 has 3 of 4 GPUs." in found.text
    assert written.attempt(1).verdict("bad node", "give up", 1, why=f"{why}; x").explain().kind == (
        "bad node"
    )


def test_a_polite_stop_loses_nothing(written: Written) -> None:
    written.attempt(0, steps=20, saved=20).event("stopped", step=20, reason="notice")
    found = written.verdict("preempted", "requeue").explain()
    assert "Nothing is lost: step 20 is saved." in found.text
    assert (found.lost_steps, found.lost_s) == (0, 0.0)


def test_a_script_of_others_starts_over(written: Written) -> None:
    found = written.attempt(0).verdict("preempted", "requeue").explain()
    assert "it starts over, or from its own snapshot" in found.text


def test_a_budget_that_is_spent(written: Written) -> None:
    written.attempt(0, steps=20, saved=20).verdict("preempted", "requeue")
    why = "3 of 2 GPU hours are spent (--budget-gpu-hours)"
    written.event("verdict", cause="budget", action="give up", why=why)
    found = written.explain()
    assert found.kind == "budget spent"
    assert f"was not started again: {why}." in found.text
    assert found.hint.endswith("--budget-gpu-hours HOURS")


def test_cancelled(written: Written, tmp_path: Path) -> None:
    written.attempt(0, steps=20, saved=12).verdict("cancelled", "none")
    assert written.explain().kind == "cancelled"
    waiting = Written(tmp_path / "b").event("submitted").event("queued", job_id="7")
    waiting.run.cancelled.touch()
    assert "cancelled before it began" in waiting.explain(_record("CANCELLED")).text
    cut = Written(tmp_path / "d").event("submitted").attempt(0, steps=20)
    cut.run.cancelled.touch()
    assert "was cancelled at step 20. Nothing had been" in cut.explain(_record("COMPLETING")).text
    requeued = Written(tmp_path / "c").event("submitted").attempt(0, steps=20)
    requeued.verdict("preempted", "requeue")
    found = requeued.explain(_record("CANCELLED"))
    assert found.kind == "cancelled"
    assert "Its last attempt was preempted at step 20" in found.text


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("TIMEOUT", "time limit"),
        ("NODE_FAIL", "node lost"),
        ("CANCELLED", "cancelled"),
        ("PREEMPTED", "preempted"),
        ("OUT_OF_MEMORY", "host out of memory"),
        ("FAILED", "lost"),
    ],
)
def test_without_a_verdict_slurms_word_counts(written: Written, state: str, kind: str) -> None:
    found = written.attempt(0, steps=20).explain(_record(state))
    assert found.kind == kind
    assert "at step 20" in found.text
    assert "Nothing had been saved: 20 steps" in found.text


def test_gone_without_a_word(written: Written) -> None:
    written.event("queued", job_id="7").attempt(0).said("hello\nlast words\n")
    found = written.explain()
    assert found.kind == "lost"
    assert 'The last line of its output: "last words"' in found.text


def test_an_output_folder_that_the_node_does_not_see(written: Written) -> None:
    found = written.event("queued", job_id="7").explain(_record("FAILED", "NonZero", "0:53"))
    assert (found.kind, "--runs-dir" in found.hint) == ("bad environment", True)


def test_no_run_finish(written: Written) -> None:
    written.attempt(0, steps=20, saved=12).verdict("failed", "give up", why="the script ended")
    found = written.explain()
    assert (found.kind, found.lost_steps) == ("unfinished", 8)
    assert "run.finish()" in found.hint


def test_no_progress_as_the_verdict_words_it(written: Written) -> None:
    events: list[dict[str, Any]] = [
        {"event": "verdict", "attempt": 0, "time": 0.0, "cause": "time limit", "progress": False},
        {"event": "first_step", "attempt": 1, "time": 0.0, "step": 1},
        {"event": "stopped", "attempt": 1, "time": 0.0, "step": 1, "reason": "time limit"},
    ]
    verdict = decide(
        VerdictFacts(JobSpec("t.py"), 1, False, False, None, 0, ["n1"], [], events=events)
    )
    written.attempt(0, steps=20).verdict("time limit", "requeue")
    written.attempt(1, steps=20).verdict(verdict.cause, verdict.action, 1, why=verdict.why)
    found = written.explain()
    assert found.kind == "no progress"
    assert "The last one ran into its time limit" in found.text
    assert "save more often" in found.hint


# --- failures ------------------------------------------------------------------------------

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
NCCL_SYSTEM = (
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/"
    "ProcessGroupNCCL.cpp:1333, unhandled system error (run with NCCL_DEBUG=INFO for details)"
)
SYNTAX = '  File "t.py", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        ("ValueError: at step 30", "python error", "rank 3 on n2 raised ValueError: at step 30"),
        (CUDA_OOM, "cuda out of memory", "full when it asked for 22.78 GiB more"),
        ("out of memory: killed by the kernel", "host out of memory", "the kernel killed"),
        ("MemoryError", "host out of memory", "no more memory to give"),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator:"
            " can't allocate memory: you tried to allocate 4000000000000000 bytes.",
            "host out of memory",
            "no more memory to give",
        ),
        (
            "RuntimeError: DataLoader worker (pid 71) is killed by signal: Killed. ",
            "host out of memory",
            "the kernel",
        ),
        (
            "RuntimeError: DataLoader worker (pid 71) is killed by signal: Bus error. It is"
            " possible that dataloader's workers are out of shared memory.",
            "host out of memory",
            "/dev/shm",
        ),
        (GLOO_TIMEOUT, "communication", "gloo waited 5000 ms for another rank (recv)"),
        (GLOO_CLOSED, "communication", "connection to another rank was lost"),
        (NCCL_SYSTEM, "communication", "collective communication failed"),
        (
            f"{NCCL_SYSTEM}\nLast error:\nError: network AWS Libfabric not found.",
            "bad environment",
            "NCCL could not use the network",
        ),
        (
            "torch.distributed.DistStoreError: wait timeout after 5000ms, keys: /default_pg/0//cpu",
            "communication",
            "waited 5000 ms for another one to join",
        ),
        (
            "HangError: no step for 1800 s at step 12; stacks in /x/stack-rank-3.txt",
            "hang",
            "no step was done for 1800 s after step 12",
        ),
        ("OSError: [Errno 28] No space left on device: 'x'", "disk full", "disk was full"),
        ("OSError: [Errno 122] Disk quota exceeded", "disk full", "quota"),
        (
            "hpc_ddp.run.errors.HpcDdpError: 3 saves in a row failed in /r/checkpoints: rank 0:"
            " [Errno 28] No space left for 4.0 MB: 3.1 MB are free",
            "disk full",
            "disk was full",
        ),
        ("OSError: [Errno 30] Read-only file system: 'x'", "disk read-only", "only be read"),
        ("OSError: [Errno 116] Stale file handle", "disk failed", "file system"),
        ("ModuleNotFoundError: No module named 'timm'", "bad environment", "the module timm"),
        (
            "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory",
            "bad environment",
            "libcudnn.so.9",
        ),
        (
            "AttributeError: partially initialized module 'torch' has no attribute 'zeros' (most"
            " likely due to a circular import)",
            "bad environment",
            "name of a module",
        ),
        (
            "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an",
            "bad environment",
            "no GPU to be seen",
        ),
        ("AssertionError: Torch not compiled with CUDA enabled", "bad environment", "CPUs only"),
        (
            "torch.AcceleratorError: CUDA error: invalid device ordinal",
            "bad environment",
            "more workers on the node than GPUs",
        ),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "gpu failed", "GPU"),
        (
            "hpc_ddp.run.errors.HpcDdpError: the weights have NaN or infinity in them; it came at",
            "non-finite weights",
            "NaN",
        ),
    ],
)
def test_errors_of_a_rank(written: Written, error: str, kind: str, words: str) -> None:
    found = written.attempt(0, steps=20, saved=12).failure(error).explain()
    assert (found.kind, found.node, found.rank) == (kind, "n2", 3)
    assert words in found.text
    assert "rank 3 on n2" in found.text
    assert "It was given up: it came before the first step. The newest" in found.text
    assert "8 steps (11 s) are to be done again" in found.text
    assert found.hint
    assert not set("{}") & set(found.hint)


def test_a_node_with_another_interconnect_is_named(written: Written) -> None:
    written.attempt(0, steps=20)
    for node, name in {"n1": "infiniband", "n2": "", "n3": "infiniband"}.items():
        written.event("fabric", node=node, name=name, cards=[], trouble="", env={})
    told = "The interconnect was infiniband, but not on n2 (none)."
    assert told in written.failure(NCCL_SYSTEM).explain().text


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        ("ModuleNotFoundError: No module named 'torch'", "bad environment", "has no torch"),
        (
            "[Errno 2] No such file or directory: '/no/such/python'",
            "bad environment",
            "/no/such/python could not be started on the node: No such file or directory",
        ),
        ("RendezvousTimeoutError: ", "rendezvous failure", "not all nodes had met"),
        (
            "RendezvousConnectionError: The connection to the C10d store has failed. See inner"
            " exception for details.",
            "rendezvous failure",
            "could not reach the first node's store",
        ),
    ],
)
def test_errors_of_torchrun(written: Written, error: str, kind: str, words: str) -> None:
    found = written.attempt(0).failure(error, rank=None).explain()
    assert (found.kind, found.node, found.rank) == (kind, "n2", None)
    assert words in found.text
    assert "torchrun on n2" in found.text


@pytest.mark.parametrize(
    ("code", "log", "kind", "words"),
    [
        (3, "bye\n", "exit code", 'exit code 3. The last line of its output: "bye"'),
        (-9, "", "killed", "it was killed (SIGKILL)"),
        (-11, "", "killed", "SIGSEGV"),
        (-35, "", "killed", "signal 35"),
        (-6, NCCL_WATCHDOG, "communication", "NCCL waited 600000 ms for the others in ALLREDUCE"),
        (2, "usage: t.py [-h]\nt.py: error: unrecognized arguments: --x\n", "script error", "--x"),
        (
            2,
            "[rank3]: error: run.track was called twice\n[rank3]: hint: name all in one call\n",
            "script error",
            "rank 3 on n2 said: run.track was called twice",
        ),
        (
            2,
            "/env/bin/python: can't open file '/run/code/0/t.py': [Errno 2] No such file\n",
            "bad environment",
            "the script /run/code/0/t.py was not there",
        ),
    ],
)
def test_ends_without_an_exception(
    written: Written, code: int, log: str, kind: str, words: str
) -> None:
    found = written.attempt(0, steps=20).failure(code=code, log=log).explain()
    assert found.kind == kind
    assert words in found.text


def test_where_in_the_script_it_was_raised(written: Written) -> None:
    log = (
        "[rank3]: Traceback (most recent call last):\n"
        '[rank3]:   File "/run/code/0/t.py", line 31, in <module>\n'
        "[rank3]:     main()\n"
        '[rank3]:   File "/run/code/0/t.py", line 12, in main\n'
        '[rank3]:   File "/env/lib/python3.11/site-packages/torch/x.py", line 9, in f\n'
        "[rank3]: ValueError: boom\n"
    )
    found = written.attempt(0, steps=20).failure("ValueError: boom", log=log).explain()
    assert "raised ValueError: boom, in t.py line 12." in found.text
    assert found.hint == f"fix it, then hpc-ddp submit --run {written.run.path}"


def test_who_was_late_is_named(written: Written) -> None:
    found = written.attempt(0, steps=20).failure(GLOO_TIMEOUT).explain()
    assert "Until then rank 0 had said nothing." in found.text
    assert "--rank 0 --attempt 0" in found.hint


def test_where_the_ranks_of_a_hang_stood(written: Written) -> None:
    written.attempt(0, steps=20).failure("HangError: no step for 9 s at step 20; stacks in x")
    for rank, line in ((0, 40), (1, 40), (2, 44)):
        written.run.attempt(0).node("n2").stacks(rank).write_text(
            "Thread 0x00007f01 (most recent call first):\n"
            '  File "/env/lib/python3.11/threading.py", line 320 in wait\n\n'
            "Thread 0x00007f02 (most recent call first):\n"
            '  File "/env/lib/python3.11/site-packages/torch/x.py", line 4 in all_reduce\n'
            f'  File "/run/code/0/t.py", line {line} in act\n'
            '  File "/run/code/0/t.py", line 99 in <module>\n'
        )
    text = written.explain().text
    assert "There stood ranks 0, 1 at t.py line 40; rank 2 at t.py line 44." in text


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        (
            "slurmstepd: error: execve(): /no/python: No such file or directory\n"
            "srun: error: n1: task 0: Exited with exit code 2\n",
            "bad environment",
            "/no/python could not be started on the node: No such file or directory",
        ),
        (
            "/var/spool/slurmd/job7/slurm_script: line 22: /home/me/env/bin/activate: No such file"
            " or directory\n",
            "bad environment",
            "no virtual environment /home/me/env/bin/activate",
        ),
        ("slurm_script: line 9: module: command not found\n", "bad environment", "command module"),
        (
            'Lmod has detected the following error: The following module(s) are unknown: "cuda/99"',
            "bad environment",
            "module cuda/99 does not exist",
        ),
        (
            "ERROR: Unable to locate a modulefile for 'cuda/99'\n",
            "bad environment",
            "module cuda/99 does not exist",
        ),
        (
            "slurm_script: line 20: cd: /home/me/gone: No such file or directory\n",
            "bad environment",
            "working directory /home/me/gone",
        ),
        (
            "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0. Some of your processes"
            " may have been killed by the cgroup out-of-memory handler.\n",
            "host out of memory",
            "the kernel killed",
        ),
    ],
)
@pytest.mark.parametrize("verdict", [False, True])
def test_what_only_the_jobs_output_tells(
    written: Written, said: str, kind: str, words: str, verdict: bool
) -> None:
    written.event("queued", job_id="7").said(said)
    if verdict:
        written.attempt(0).verdict("node lost", "give up", why="nothing was heard")
    found = written.explain(_record("FAILED", code="1:0"))
    assert found.kind == kind
    assert words in found.text
    if verdict:
        again = written.event("submitted", first_attempt=1).explain(_record("PENDING", "Priority"))
        assert (again.kind, again.hint) == ("waiting", found.hint)


def test_only_the_newest_attempts_output_counts(written: Written) -> None:
    written.attempt(0).verdict("node lost", "requeue").attempt(1)
    written.said(
        "slurmstepd: error: execve(): /no/python: No such file or directory\n"
        "hpc-ddp: attempt 0: no word from n1; it goes on\nhello\n"
    )
    assert written.verdict("node lost", "requeue", 1).explain().kind == "node lost"


def test_continued_with_mended_code_it_is_not_failed_any_more(written: Written) -> None:
    written.attempt(0, steps=20).failure("ValueError: boom")
    written.event("submitted", first_attempt=1).event("queued", job_id="8")
    found = written.explain(_record("PENDING", "Priority"))
    assert found.kind == "waiting"
    assert "Its last attempt failed at step 20: rank 3 on n2 raised ValueError: boom" in found.text


def _by_hand(root: Path) -> Written:
    """Return what a plain `python t.py` leaves, which nobody judges; it did 20 steps."""
    written = Written(root, backend="local")
    written.run.attempt(0).path.mkdir(parents=True)
    written.event("started", backend="local", host="h", pid=1, began="1")
    written.event("training", step=0).event("first_step", step=1)
    return written.event("metrics", step=20, total_steps=90, loss=0.5)


def test_stopped_by_hand(tmp_path: Path) -> None:
    written = _by_hand(tmp_path).event("stopped", step=20, reason="notice", source="SIGINT")
    status = status_of(written.run, {})
    assert status.state == "stopped"
    assert status.why == "notice (SIGINT), at step 20; can go on with the same command"
    found = written.explain()
    assert (found.kind, found.hint, found.lost_steps) == ("stopped", "the same command again", 0)
    assert "was asked to stop at step 20 (SIGINT), and did. Nothing is lost" in found.text
    written.event("started", 1, backend="local", host="h", pid=1, began="1")
    assert "Before that it was asked to stop once." in written.explain().text


def test_failed_by_hand(tmp_path: Path) -> None:
    written = _by_hand(tmp_path)
    written.event("failed", rank=0, node="h", step=20, error="ValueError: boom", traceback="")
    status = status_of(written.run, {})
    assert (status.state, status.why) == ("failed", "rank 0: ValueError: boom")
    found = written.explain()
    assert found.kind == "python error"
    assert "failed at step 20: rank 0 on h raised ValueError: boom" in found.text
    assert found.hint == "fix it, then the same command again"


def test_gone_by_hand_nobody_is_sent_to_its_logs(tmp_path: Path) -> None:
    written = _by_hand(tmp_path)
    assert status_of(written.run, {}).state == "lost"
    assert written.explain().kind == "lost"
    for found in (written.explain(), written.explain(live=True)):
        assert "hpc-ddp logs" not in found.hint
    with pytest.raises(UsageError, match="by hand: its output went to its terminal") as caught:
        show(written.run, LogQuery())
    assert str(caught.value.hint).startswith("hpc-ddp explain ")
    with pytest.raises(UsageError, match="by hand"):
        follow(written.run, LogQuery(), lambda: True)


def test_a_process_of_this_machine_is_seen_to_run(tmp_path: Path) -> None:
    written = Written(tmp_path, backend="local").event("started", nodes=["a"], **identity())
    assert written.explain().kind == "running"


@pytest.mark.parametrize("reason", ["Priority", "Resources"])
def test_preempted_it_has_only_to_wait(written: Written, reason: str) -> None:
    written.attempt(0, steps=20, saved=20).verdict("preempted", "requeue")
    assert written.explain(_record("PENDING", reason)).hint == "wait: it starts by itself"


def test_an_array_is_summed_up(tmp_path: Path) -> None:
    array = Written(tmp_path, array="0-2").event("submitted").event("queued", job_id="7")
    for number, end in enumerate(("finished", "failed")):
        task = Written(tmp_path / "other")
        task.attempt(0, steps=20)
        if end == "failed":
            task.failure("ValueError: boom")
        else:
            task.event("finished", step=20).verdict("finished", "none")
        shutil.move(task.run.path, array.run.path / f"task-{number}")
    found = array.explain(_record("PENDING", "Resources"))
    assert found.kind == "array"
    assert "2 tasks have begun: 1 finished, 1 python error. Others wait" in found.text
    assert "Task 1 of run digits (20261121-100000-abcd) failed at step 20" in found.text
    assert found.tasks["1"].kind == "python error"


def test_a_task_of_an_array_is_found_by_its_job_id(tmp_path: Path) -> None:
    array = Written(tmp_path, array="0-2")
    task = RunFolder(array.run.path / "task-1").make()
    task.job_json.write_text(array.run.job_json.read_text())
    (tmp_path / ".jobs").mkdir()
    (tmp_path / ".jobs" / "7").symlink_to(array.run.path)
    assert find_run(tmp_path, "7_1") == task


# --- the tables ----------------------------------------------------------------------------


@pytest.mark.parametrize("cause", FAILURES, ids=lambda cause: cause.pattern[:30])
def test_every_row_can_be_filled_in(written: Written, cause: Any) -> None:
    """Words and hints name only what is there to be filled in."""
    groups = dict.fromkeys(re.compile(cause.pattern).groupindex, "x")
    known = dict.fromkeys(("again", "python", "logs", "path"), "y")
    assert cause.words.format(**groups, when_size="")
    assert cause.hint.format(**groups, **known)


def test_ordinary_output_is_no_cause() -> None:
    said = "epoch 1  step 24  loss 0.8\ntest accuracy 0.93\nhpc-ddp: goodput 6 %\n"
    assert recognise(said) is None


# --- damage --------------------------------------------------------------------------------


def _whole(root: Path) -> Written:
    """Return a run in which about everything has happened."""
    whole = Written(root).event("submitted", backend="slurm", first_attempt=0)
    whole.attempt(0, steps=20, saved=12).event("stopped", step=20, reason="notice")
    whole.verdict("preempted", "requeue")
    whole.attempt(1, steps=40, saved=30)
    whole.event("failed", 1, rank=3, node="n2", step=40, error="HangError: x", traceback="y")
    whole.failure("HangError: no step for 9 s at step 20; stacks in x", number=1)
    whole.run.attempt(1).node("n2").stacks(3).write_text('Thread 0x1:\n  File "t.py", line 4 in f')
    whole.run.attempt(1).node("n2").rank_log(3).write_text(SYNTAX)
    return whole.said(GLOO_CLOSED)


def _paths(folder: Path) -> Sequence[Path]:
    return sorted(path for path in folder.rglob("*"))


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32))
def test_it_never_raises_on_a_damaged_folder(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    if not (tmp_path / "whole").exists():
        _whole(tmp_path / "whole")
    folder = shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
    run = RunFolder(next(folder.glob("*/*")))
    for _ in range(draw.randint(1, 6)):
        _damage(draw, draw.choice(_paths(run.path)))
    found = explain_run(run)
    assert found.kind
    assert paragraph(found)
    json.dumps(found.to_dict())
    shutil.rmtree(folder)


_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    1e300,
    float("nan"),
    "",
    "x",
    "../..",
    [],
    [1],
    {},
    {"rank": "x"},
)


def _damage(draw: random.Random, path: Path) -> None:
    """Cut a file short, change its bytes or a value in it, or put something else in its place."""
    if path.is_dir():
        (path / draw.choice(["attempt-x", "attempt-9", "task-z", "step-5", "a.jsonl"])).mkdir(
            exist_ok=True
        )
    elif path.exists():
        way = draw.randrange(5)
        data = path.read_bytes()
        at = draw.randrange(len(data) + 1)
        if way == 0:
            path.write_bytes(data[:at])
        elif way == 1:
            path.write_bytes(data[:at] + draw.randbytes(3) + data[at + 3 :])
        elif way == 2:
            path.unlink()
        elif way == 3:
            path.unlink()
            path.mkdir()
        else:
            _change_a_value(draw, path, data)


def _change_a_value(draw: random.Random, path: Path, data: bytes) -> None:
    lines = data.decode(errors="replace").splitlines()
    try:
        whole = path.suffix != ".jsonl"
        at = 0 if whole or not lines else draw.randrange(len(lines))
        value = json.loads("\n".join(lines) if whole else lines[at])
        value[draw.choice(list(value))] = draw.choice(_VALUES)
    except (ValueError, TypeError, IndexError, AttributeError):
        return
    lines[at : len(lines) if whole else at + 1] = [json.dumps(value)]
    path.write_text("\n".join(lines) + "\n")


def test_a_foreign_folder(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("[1]")
    assert explain_run(RunFolder(tmp_path)).kind == "rendered"
