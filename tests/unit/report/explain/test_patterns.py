from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.errors import EARLY_EXIT
from hpc_ddp.report.explain.patterns import (
    FAILURES,
    PENDING_REASONS,
    explain_pending,
    recognise_failure,
)
from tests.accept import is_accepted
from unit.report.written_runs import (
    CUDA_OOM,
    GLOO_CLOSED,
    GLOO_TIMEOUT,
    NCCL2_TIMEOUT,
    NCCL_SYSTEM,
    NCCL_WATCHDOG,
    Written,
    record,
)


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
def test_slurms_reasons_have_plain_words(written: Written, reason: str, words: str) -> None:
    explanation = written.event("queued", job_id="7").explain(record("PENDING", reason, nodes=""))
    assert explanation.kind == "waiting"
    assert words in explanation.text
    assert explanation.hint == explain_pending(reason, "7")[1]


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        ("ValueError: at step 30", "python error", "rank 3 on n2 raised ValueError: at step 30"),
        (f"{EARLY_EXIT}, at step 5", "early exit", "rank 3 on n2 left the training: the script"),
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
        (
            "[enforce fail at gloo/transport/tcp/pair.cc:464] op.preamble.length <= op.nbytes. 8",
            "collective mismatch",
            "the ranks called different collectives",
        ),
        (
            "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running",
            "collective mismatch",
            "the ranks called different collectives",
        ),
        (
            "t.py: error: argument --backend: invalid choice: 'x' (choose from 'gloo', 'nccl')",
            "script error",
            "rank 3 on n2 said: argument --backend: invalid choice: 'x'",
        ),
        (GLOO_CLOSED, "communication", "connection to another rank was lost"),
        (NCCL2_TIMEOUT, "communication", "NCCL waited in vain for the others"),
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
            "hpc_ddp.core.errors.HpcDdpError: 3 saves in a row failed in /r/checkpoints: rank 0:"
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
        (
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 98000",
            "bad environment",
            "two ranks had one GPU",
        ),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "gpu failed", "GPU"),
        (
            "hpc_ddp.core.errors.HpcDdpError: the weights have NaN or infinity in them; it came at",
            "non-finite weights",
            "NaN",
        ),
        (
            "hpc_ddp.core.errors.HpcDdpError: fp16 skips nearly all steps, since gradients have",
            "non-finite weights",
            "NaN",
        ),
    ],
)
def test_errors_of_a_rank_are_recognised(
    written: Written, error: str, kind: str, words: str
) -> None:
    explanation = written.attempt(0, steps=20, saved=12).failure(error).explain()
    assert (explanation.kind, explanation.node, explanation.rank) == (kind, "n2", 3)
    assert words in explanation.text
    assert "rank 3 on n2" in explanation.text
    assert "It was given up: it came before the first step. The newest" in explanation.text
    assert "8 steps (11 s) are to be done again" in explanation.text
    assert explanation.hint
    assert not set("{}") & set(explanation.hint)


def test_a_node_with_another_interconnect_is_named(written: Written) -> None:
    written.attempt(0, steps=20)
    for node, name in {"n1": "infiniband", "n2": "", "n3": "infiniband"}.items():
        written.event("fabric", node=node, name=name, cards=[], trouble="", env={})
    sentence = "The interconnect was infiniband, but not on n2 (none)."
    assert sentence in written.failure(NCCL_SYSTEM).explain().text


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
def test_errors_of_torchrun_are_recognised(
    written: Written, error: str, kind: str, words: str
) -> None:
    explanation = written.attempt(0).failure(error, rank=None).explain()
    assert (explanation.kind, explanation.node, explanation.rank) == (kind, "n2", None)
    assert words in explanation.text
    assert "torchrun on n2" in explanation.text


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
def test_ends_without_an_exception_are_recognised(
    written: Written, code: int, log: str, kind: str, words: str
) -> None:
    explanation = written.attempt(0, steps=20).failure(code=code, log=log).explain()
    assert explanation.kind == kind
    assert words in explanation.text


@pytest.mark.parametrize("error", ["No CUDA GPUs", "nccl2 requires at least one CUDA"])
def test_a_dry_run_has_no_gpu_to_ask_for(tmp_path: Path, error: str) -> None:
    written = Written(tmp_path, backend="local").event("submitted", backend="local")
    explanation = written.attempt(0).failure(f"RuntimeError: {error}").explain()
    assert explanation.hint.startswith("a dry run has CPUs and gloo only")


def test_the_line_of_the_script_is_named(written: Written) -> None:
    log = (
        "[rank3]: Traceback (most recent call last):\n"
        '[rank3]:   File "/run/code/0/t.py", line 31, in <module>\n'
        "[rank3]:     main()\n"
        '[rank3]:   File "/run/code/0/t.py", line 12, in main\n'
        '[rank3]:   File "/env/lib/python3.11/site-packages/torch/x.py", line 9, in f\n'
        "[rank3]: ValueError: boom\n"
    )
    explanation = written.attempt(0, steps=20).failure("ValueError: boom", log=log).explain()
    assert "raised ValueError: boom, in t.py line 12." in explanation.text
    assert explanation.hint == f"fix it, then hpc-ddp submit --run {written.run.path} --new-code"


def test_a_late_rank_is_named(written: Written) -> None:
    explanation = written.attempt(0, steps=20).failure(GLOO_TIMEOUT).explain()
    assert "Until then rank 0 had said nothing." in explanation.text
    assert "--rank 0 --attempt 0" in explanation.hint


def test_the_lines_of_hanging_ranks_are_named(written: Written) -> None:
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
    ("output", "kind", "words"),
    [
        (
            "slurmstepd: error: execve(): /no/python: No such file or directory\n"
            "srun: error: n1: task 0: Exited with exit code 2\n",
            "bad environment",
            "/no/python could not be started on the node: No such file or directory",
        ),
        (
            "srun: error: Unable to layout tasks on given cpus\n",
            "bad environment",
            "Slurm refused to start the step: Unable to layout tasks on given cpus",
        ),
        (
            "srun: error: Unable to create step for job 7: Invalid generic resource (gres)"
            " specification\n",
            "bad environment",
            "Slurm refused to start the step: Invalid generic resource (gres) specification",
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
def test_causes_in_the_jobs_output_are_recognised(
    written: Written, output: str, kind: str, words: str, verdict: bool
) -> None:
    written.event("queued", job_id="7").said(output)
    if verdict:
        written.attempt(0).verdict("node lost", "give up", why="nothing was heard")
    explanation = written.explain(record("FAILED", code="1:0"))
    assert explanation.kind == kind
    assert words in explanation.text
    if verdict:
        again = written.event("submitted", first_attempt=1).explain(record("PENDING", "Priority"))
        assert (again.kind, again.hint) == ("waiting", explanation.hint)


def test_only_the_newest_attempts_output_counts(written: Written) -> None:
    written.attempt(0).verdict("node lost", "requeue").attempt(1)
    written.said(
        "slurmstepd: error: execve(): /no/python: No such file or directory\n"
        "hpc-ddp: attempt 0: no word from n1; it goes on\nhello\n"
    )
    assert written.verdict("node lost", "requeue", 1).explain().kind == "node lost"


@pytest.mark.parametrize("cause", FAILURES, ids=lambda cause: cause.pattern[:30])
def test_every_row_can_be_filled_in(written: Written, cause: Any) -> None:
    """Words and hints name only what is there to be filled in."""
    groups = dict.fromkeys(re.compile(cause.pattern).groupindex, "x")
    replacements = dict.fromkeys(("again", "with_new_code", "python", "logs", "path"), "y")
    assert cause.words.format(**groups, when_size="")
    assert cause.hint.format(**groups, **replacements)


def test_ordinary_output_is_no_cause() -> None:
    output = "epoch 1  step 24  loss 0.8\ntest accuracy 0.93\nhpc-ddp: goodput 6 %\n"
    assert recognise_failure(output) is None


PAGE = Path(__file__).parents[4] / "docs" / "troubleshooting.md"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _filled(text: str, name: str, table: str) -> str:
    pattern = rf"(<!-- {name}: [^>]*-->\n).*?(<!-- /{name} -->)"
    new, count = re.subn(pattern, lambda match: f"{match[1]}{table}{match[2]}", text, flags=re.S)
    assert count == 1, f"the page has {count} places for the table of {name}"
    return new


def _words(text: str) -> str:
    """Fill in what `explain` would of a run."""
    again = "hpc-ddp submit --run RUN"
    replacements = {"again": f"`{again}`", "with_new_code": f"`{again} --new-code`"}
    replacements |= {"logs": "`hpc-ddp logs RUN --rank 3`"}
    replacements |= {"python": "the job's Python", "job": "JOB"}
    text = re.sub(r"\{(\w+)\}", lambda match: replacements.get(match[1], "…"), text)
    return text.replace("<", "&lt;").replace("*", "\\*")


def _reason(pattern: str) -> str:
    """Return a pattern of Slurm's reasons for a reader."""
    pattern = re.sub(r"\(\?P<\w+>|\)|\$$", "", pattern).replace(r"\w+?", "…").replace(r"\w*", "…")
    pattern = re.sub(r"\(\w+\??$|\(|\?|\.\*", "", pattern.partition("|$")[0])
    return ", ".join(f"`{part}`" for part in pattern.split("|") if part)


def test_the_tables_of_the_troubleshooting_page_are_current() -> None:
    """To accept a change, run with ``HPC_DDP_ACCEPT=1``."""
    causes = [(cause.kind, _words(cause.words), _words(cause.hint)) for cause in FAILURES]
    reasons = [
        (_reason(row.pattern), _words(row.words), _words(row.hint)) for row in PENDING_REASONS
    ]
    text = PAGE.read_text()
    new = _filled(text, "causes", _table(("kind", "what happened", "what to do"), causes))
    new = _filled(new, "reasons", _table(("Slurm's reason", "it is", "what to do"), reasons))
    if is_accepted():
        PAGE.write_text(new)
    assert new == PAGE.read_text()
