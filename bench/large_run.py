"""Measures `hpc-ddp status`, `logs`, `explain` and `report` of one large run, by its nodes.

``python bench/large_run.py --nodes 4 64 256 1024`` makes a run of each size in a temporary folder,
with 8 ranks a node, and prints a table of each command: seconds, in brackets those of a processor,
and peak memory. Beside it stand a run of 2 x 2 ranks with the same history, and the bare time to
list and read the same files. ``--folder`` keeps the runs. Seconds are the median of `ROUNDS`, and
files are in the page cache.

The run is a week long: `ATTEMPTS` attempts, most of them preempted, one ended by 16 failed ranks
on two nodes, the last one by a hang that all ranks report. Rank 0 prints 50 MB in all, a line each
1.2 s, and each other rank some hundred bytes in each attempt. Its preflight was not asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

REPO = Path(__file__).parents[1]
sys.path.insert(0, str(REPO))

from hpc_ddp.core.checkpoints import manifest_crc  # noqa: E402
from hpc_ddp.core.job.options import JobSpec  # noqa: E402
from hpc_ddp.core.journal import events as e  # noqa: E402
from hpc_ddp.core.journal.enums import Action, Cause, StopReason  # noqa: E402
from hpc_ddp.core.journal.stragglers import summarize_times  # noqa: E402
from hpc_ddp.core.run_folder import RunFolder  # noqa: E402

ROUNDS = 3
BEGAN, WEEK_S, ATTEMPTS = 1.79e9, 7 * 86400.0, 12
FAILED_IN, SAVE_EVERY_S, STEP_S, LINE_EVERY_S = 5, 600.0, 0.8, 1.2
NOISE = (
    "[Gloo] Rank {rank} is connected to 8191 peer ranks. "
    "Expected number of connected peer ranks is : 8191\n"
)
WARNING = (
    "/opt/venv/lib/python3.11/site-packages/torch/utils/checkpoint.py:86: FutureWarning: "
    "use_reentrant is not passed\n  warnings.warn(\n"
)
TRACEBACK = "Traceback (most recent call last):\n" + "".join(
    f'  File "/runs/code/0/train.py", line {line}, in part_{line}\n    loss = step(batch, {line})\n'
    for line in range(10, 20)
)
THREAD = "Thread 0x00007f{thread:010x} (most recent call first):\n" + "".join(
    f'  File "/opt/venv/lib/python3.11/site-packages/torch/nn/module.py", line {line} in forward\n'
    for line in range(10, 18)
)


@dataclass
class LargeRun:
    """Writes one run's folder; `files` has the journal's lines by writer."""

    run: RunFolder
    nodes: int
    per_node: int
    files: dict[str, list[str]] = field(default_factory=dict)
    step: int = 0

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def names(self) -> list[str]:
        return [f"node{index:04d}" for index in range(self.nodes)]

    def name_of(self, rank: int) -> str:
        return f"node{rank // self.per_node:04d}"

    def note(self, writer: str, event: e.JournalEvent, at: float, attempt: int) -> None:
        line = replace(event, time=round(at, 3), attempt=attempt).to_line()
        self.files.setdefault(writer, []).append(json.dumps(line) + "\n")

    def make(self) -> None:
        self.run.make()
        spec = JobSpec(
            "train.py",
            job_name="large",
            nodes=self.nodes,
            nproc_per_node=self.per_node,
            gpus_per_node=str(self.per_node),
            backend="slurm",
        )
        self.run.job_json.write_text(spec.to_json())
        self.note("submit", e.Submitted(0, "slurm", "train.py"), BEGAN, 0)
        self.note("submit", e.Queued("1000", "cluster"), BEGAN + 1, 0)
        length_s = WEEK_S / ATTEMPTS
        with open(self.run.slurm_out, "w") as job_log:
            for attempt in range(ATTEMPTS):
                begin, end = BEGAN + attempt * length_s + 60, BEGAN + (attempt + 1) * length_s
                self.begin(attempt, begin)
                self.train(attempt, begin + 40, end - 30)
                job_log.write(self.logs(attempt, begin + 40, end - 30))
                self.end(attempt, end - 30)
        for writer, lines in self.files.items():
            (self.run.journal_folder / f"{writer}.jsonl").write_text("".join(lines))
        self.checkpoint()

    def begin(self, attempt: int, at: float) -> None:
        """The batch script, the supervisors, and rank 0 until the first step."""
        folder = self.run.attempt(attempt).path
        folder.mkdir()
        info = {"job_id": "1000", "restarts": attempt, "host": "node0000", "nodes": self.names}
        (folder / "attempt.json").write_text(json.dumps({**info, "cluster": "cluster"}))
        for name in ("notice", "failed", "fabric", "end-time", "trackers"):
            (folder / name).touch()
        started = e.Started("node0000", self.names, "cluster", "1000", attempt)
        self.note("batch", started, at, attempt)
        cards, env = [f"mlx5_{card}" for card in range(8)], {"NCCL_NET": "IB"}
        for name in self.names:
            fabric = e.FabricChosen(name, "infiniband", cards, "", env)
            self.note(name, fabric, at + 5, attempt)
        self.note("rank-0", e.WorkerStarted(at + 10, at + 12, at + 6, at + 10), at + 15, attempt)
        self.note("rank-0", e.CheckpointRestored(self.step, (), 9.0), at + 30, attempt)
        self.note("rank-0", e.TrainingBegun(self.step), at + 35, attempt)
        first = e.FirstStep(self.step + 1, self.ranks, self.names)
        self.note("rank-0", first, at + 40, attempt)

    def train(self, attempt: int, begin: float, end: float) -> None:
        """Rank 0's metrics, checkpoints and `ranks` events, at the times of the real code."""
        from hpc_ddp.training.telemetry import metrics, step_timing  # with torch

        draw, first = random.Random(attempt), self.step
        timings = _times(begin, end, step_timing.EVERY_S, step_timing.SELDOM_S)
        saves = (begin + SAVE_EVERY_S * k for k in range(1, int((end - begin) / SAVE_EVERY_S)))
        values = _times(begin, end, metrics.EVERY_S, metrics.SELDOM_S)
        kinds = [(at, "metrics") for at in values]
        kinds += [(at, "ranks") for at in timings] + [(at, "save") for at in saves]
        for at, kind in sorted(kinds):
            self.step = step = first + 1 + int((at - begin) / STEP_S)
            event: e.JournalEvent = e.CheckpointSaved(step, 0.412, 38.25, 412345678901)
            if kind == "ranks":
                event = self.timing(step, draw)
            elif kind == "metrics":
                event = e.MetricsLine(
                    {
                        "step": step,
                        "total_steps": 1_000_000,
                        "epoch": step // 100_000,
                        "loss": 2 + draw.random() + 8 / (1 + step / 9000),
                        "lr": 3e-4 * draw.random(),
                        "grad_norm": draw.random(),
                        "samples_per_s": 20480.5,
                        "mfu": 0.4123,
                    }
                )
            self.note("rank-0", event, at, attempt)

    def timing(self, step: int, draw: random.Random) -> e.StepTiming:
        """A `ranks` event as `StepTimer.report` writes it."""
        data_s = [0.0004 + draw.random() / 1e4 for _ in range(self.ranks)]
        busy_s = [0.25 + draw.random() / 1e2 for _ in range(self.ranks)]
        nodes = [self.name_of(rank) for rank in range(self.ranks)]
        return summarize_times(step, 375, 0.8, data_s, busy_s, nodes)

    def logs(self, attempt: int, begin: float, end: float) -> str:
        """The logs of the ranks and the notes of their sizes; return that of rank 0."""
        lines, notes, size = [WARNING], [], len(WARNING)
        for k in range(int((end - begin) / LINE_EVERY_S)):
            lines.append(f"step {self.step + k:9d}  loss 2.4123  lr 3.00e-04  " + "x" * 60 + "\n")
            size += len(lines[-1])
            notes.append(f"{begin + k * LINE_EVERY_S:.3f} 0 {size}\n")
        log_of_0, is_hang = "".join(lines), attempt == ATTEMPTS - 1
        for index, name in enumerate(self.names):
            node = self.run.attempt(attempt).node(name)
            node.path.mkdir()
            printed = []
            for rank in range(index * self.per_node, (index + 1) * self.per_node):
                text = log_of_0 if rank == 0 else NOISE.format(rank=rank) + WARNING
                size = len(text) if rank else len(WARNING)
                printed.append(f"{begin + index % 3 / 2:.3f} {rank} {size}\n")
                if is_hang:
                    error = self.hang(node.stacks(rank), end)
                    text += "".join(f"[rank{rank}]: {line}\n" for line in error.splitlines())
                    printed.append(f"{end + index % 3 / 2:.3f} {rank} {len(text)}\n")
                node.rank_log(rank).write_text(text)
                (node.path / f"rank-{rank}.pid").write_text(f"{10_000 + rank} {12345678}\n")
            printed[1:1] = notes if index == 0 else []
            node.printed.write_text("".join(printed))
            node.agent_log.write_text("W1126 01:40:19 torch/distributed/elastic: closing\n" * 9)
        return log_of_0

    def hang(self, stacks: Path, at: float) -> str:
        """The files of a rank's watchdog; return the text of its error."""
        rank = int(stacks.stem.removeprefix("stack-rank-"))
        main = "Current thread 0x00007f0000000000 (most recent call first):\n" + THREAD[40:]
        main += f'  File "/runs/code/0/train.py", line {41 if rank == 77 else 40} in step\n'
        stacks.write_text("".join(THREAD.format(thread=n) for n in range(9)) + "\n" + main)
        stacks.with_name(f"flight-rank-{rank}").write_bytes(b"\0" * 4000)
        error = f"HangError: no step for 1800 s at step {self.step}; stacks in {stacks}"
        text = f"{TRACEBACK}{error}\n"
        failed = e.RankFailed(rank, self.name_of(rank), self.step, error, text)
        self.note(f"rank-{rank}", failed, at + rank % 50 / 10, ATTEMPTS - 1)
        return text

    def end(self, attempt: int, at: float) -> None:
        """The nodes' notices and records, and the verdict."""
        cause = Cause.PREEMPTED
        if attempt in (FAILED_IN, ATTEMPTS - 1):
            cause = Cause.FAILED
        else:
            self.note("rank-0", e.Stopped(self.step, StopReason.NOTICE, "SIGTERM"), at, attempt)
        error = "RuntimeError: CUDA error: an illegal memory access was encountered"
        if attempt == ATTEMPTS - 1:
            error = f"HangError: no step for 1800 s at step {self.step}; stacks in /runs"
        bad = range(self.ranks if attempt == ATTEMPTS - 1 else 2 * self.per_node)
        for index, name in enumerate(self.names):
            failures = []
            for rank in range(index * self.per_node, (index + 1) * self.per_node):
                is_cause = cause is Cause.FAILED and rank in bad
                code, text = (1, error) if is_cause else (-15, "")
                if cause is Cause.FAILED:
                    part = {"rank": rank, "code": code, "time": int(at), "error": text}
                    failures.append({**part, "last_line": ""})
                if is_cause and attempt == FAILED_IN:
                    failed = e.RankFailed(rank, name, self.step, error, f"{TRACEBACK}{error}\n")
                    self.note(f"rank-{rank}", failed, at, attempt)
            if cause is Cause.PREEMPTED:
                self.note(name, e.NoticeGiven("SIGTERM"), at - 5, attempt)
            record = {"node": name, "code": int(bool(failures)), "failures": failures}
            record |= {"notice": None if failures else "SIGTERM", "torn_down": None}
            path = self.run.attempt(attempt).node(name).record
            path.write_text(json.dumps({**record, "outlasted": False, "left": False}, indent=1))
        why = f"rank 0 on node0000: {error}" if cause is Cause.FAILED else "preempted"
        where = (0, "node0000", error) if cause is Cause.FAILED else ()
        last = attempt == ATTEMPTS - 1
        action = Action.GIVE_UP if last else Action.REQUEUE
        verdict = e.VerdictGiven(cause, action, why, 1, True, self.step, (), *where)
        self.note("batch", verdict, at + 20, attempt)

    def checkpoint(self) -> None:
        """The newest checkpoint's manifest: no command reads more of it."""
        folder = self.run.checkpoints / f"step-{self.step - 100}"
        folder.mkdir()
        parts = [[412345678, 1234567890]] * 8  # a node's ranks share a file
        node_file = {"size": sum(size for size, _ in parts), "parts": parts}
        files = {f"rank-{rank}.bin": node_file for rank in range(0, self.ranks, len(parts))}
        manifest = {"step": self.step - 100, "world_size": self.ranks, "files": files}
        manifest |= {"crc32": manifest_crc(manifest)}
        (folder / "manifest.json").write_text(json.dumps(manifest))


def _times(begin: float, end: float, every_s: float, seldom_s: float) -> Iterator[float]:
    """Yield times that lie a hundredth of the time since `begin` apart, within both bounds."""
    at = begin
    while (at := at + min(max(every_s, (at - begin) / 100), seldom_s)) < end:
        yield at


def read_all(folder: Path, pattern: str = "") -> tuple[int, int]:
    """List a folder, and read the files below whose name has the pattern; return their number and
    bytes."""
    files = size = 0
    pending = [str(folder)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    pending.append(entry.path)
                elif pattern in entry.name:
                    descriptor = os.open(entry.path, os.O_RDONLY)
                    while part := os.read(descriptor, 1 << 20):
                        size += len(part)
                    os.close(descriptor)
                    files += 1
    return files, size


@dataclass(frozen=True)
class Cost:
    """Seconds, those of a processor, and MB of peak memory."""

    seconds: float
    cpu_s: float
    peak_mb: float

    def __str__(self) -> str:
        return f"{self.seconds:.2f} ({self.cpu_s:.2f}) s, {self.peak_mb:.0f} MB"


def cost_of(work: Callable[[], object]) -> Cost:
    """Return what a function costs in a process of its own; its peak is at least this one's."""
    begin = time.perf_counter()
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException as error:
            print(f"failed: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    _, code, usage = os.wait4(pid, 0)
    assert code == 0, "the work has failed"
    cpu_s = usage.ru_utime + usage.ru_stime
    return Cost(time.perf_counter() - begin, cpu_s, usage.ru_maxrss / 1024)


def command(root: Path, *words: str) -> Callable[[], object]:
    """Return a function that becomes a command of hpc-ddp's, in a place without Slurm."""

    def become() -> None:
        (root / f".status-{os.geteuid()}.json").unlink(missing_ok=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        env = {**os.environ, "PYTHONPATH": str(REPO), "HPC_DDP_RUNS": str(root), "PATH": "/none"}
        env.pop("PYTHONUNBUFFERED", None)
        os.execve(sys.executable, [sys.executable, "-m", "hpc_ddp", *words], env)

    return become


def works(run: RunFolder) -> dict[str, Callable[[], object]]:
    """Return what is measured, by its words in the table."""
    path, root, page = str(run.path), run.root, str(run.path / "report.html")
    newest = run.attempt(ATTEMPTS - 1).path
    return {
        "`status`": command(root, "status"),
        "`status RUN`": command(root, "status", path),
        "`explain RUN`": command(root, "explain", path),
        "`report RUN`": command(root, "report", path, "-o", page),
        "`logs RUN`": command(root, "logs", path),
        "`logs RUN --raw`": command(root, "logs", path, "--raw"),
        f"`logs RUN --attempt {FAILED_IN}`": command(
            root, "logs", path, "--attempt", str(FAILED_IN)
        ),
        f"`logs RUN --attempt {ATTEMPTS - 1}`, of the hang": command(
            root, "logs", path, "--attempt", str(ATTEMPTS - 1)
        ),
        "`logs RUN --rank 0`": command(root, "logs", path, "--rank", "0"),
        "`logs RUN --rank 3`": command(root, "logs", path, "--rank", "3"),
        "`logs RUN --job`": command(root, "logs", path, "--job"),
        "`--version`: Python's start": command(root, "--version"),
        "bare: the journal": lambda: read_all(run.journal_folder),
        "bare: the newest attempt's records and stacks": lambda: (
            read_all(newest, "record"),
            read_all(newest, "stack"),
        ),
        "bare: the ranks' logs": lambda: read_all(run.logs, ".log"),
    }


def sizes(run: RunFolder) -> str:
    """Return how large the journal, the logs and the page are, in words."""
    journal, logs = read_all(run.journal_folder), read_all(run.logs, ".log")
    page = (run.path / "report.html").stat().st_size
    return (
        f"journal {journal[1] / 1e6:.1f} MB in {journal[0]:,} files,"
        f" logs {logs[1] / 1e6:.0f} MB in {logs[0]:,} files, page {page / 1e6:.2f} MB"
    )


def measure(run: RunFolder) -> dict[str, Cost]:
    """Return the median costs of all works, by their words."""
    costs: dict[str, Cost] = {}
    for words, work in works(run).items():
        rounds = [cost_of(work) for _ in range(ROUNDS)]
        seconds = statistics.median(cost.seconds for cost in rounds)
        cpu_s = statistics.median(cost.cpu_s for cost in rounds)
        costs[words] = Cost(seconds, cpu_s, max(cost.peak_mb for cost in rounds))
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 64, 256, 1024])
    parser.add_argument("--folder", type=Path, help="where the runs are made, and kept")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="large-run-"))
    columns: dict[str, dict[str, Cost]] = {}
    notes = []
    try:
        for nodes, per_node in [(2, 2), *((count, 8) for count in options.nodes)]:
            run = RunFolder(folder / f"{nodes}x{per_node}" / "large" / "20261101-000000-abcd")
            if not run.path.exists():
                cost_of(LargeRun(run, nodes, per_node).make)
            name = f"{nodes} x {per_node}"
            columns[name] = measure(run)
            notes.append(f"- {name}: {sizes(run)}")
            print(notes[-1], file=sys.stderr)
    finally:
        if not options.folder:
            shutil.rmtree(folder)
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}\n")
    print("\n".join(notes), "\n")
    print(f"| what | {' | '.join(columns)} |")
    print(f"|{'---|' * (len(columns) + 1)}")
    for words in next(iter(columns.values())):
        print(f"| {words} | {' | '.join(str(column[words]) for column in columns.values())} |")


if __name__ == "__main__":
    main()
