"""Measures `hpc-ddp status` over many runs, beside what it can't be faster than.

``python bench/status.py [N]`` makes N run folders (2,000) with journals as real ones are, prints a
table of medians and writes it to ``bench/results/``. Most runs are short, one in seven took an hour
(1,500 lines of metrics), one in twenty some hours (5,000), one in three was preempted once.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).parents[1]
ROUNDS = 7


def make(root: Path, number: int) -> None:
    """Make one run: its folders, settings and journal."""
    from hpc_ddp.core.job.job_ref import JobRef
    from hpc_ddp.core.job.options import JobSpec
    from hpc_ddp.core.run_folder import RunFolder
    from hpc_ddp.core.run_index import link_job

    draw = random.Random(number)
    began = 1.75e9 + 3600 * number
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(began))
    name = f"study-{number % 12}"
    run = RunFolder(root / name / f"{stamp}-{number:04x}").make()
    run.job_json.write_text(JobSpec("train.py", job_name=name, nodes=2).to_json())
    link_job(JobRef(str(number)), run)
    lines = draw.choices((60, 1500, 5000), (80, 15, 5))[0]
    attempts = draw.choices((1, 2), (2, 1))[0]
    at, step = began, 0
    files: dict[str, list[str]] = {"submit": [], "batch": [], "rank-0": []}

    def tell(writer: str, event: str, attempt: int, **fields: object) -> None:
        line = {"time": round(at, 3), "event": event, "attempt": attempt, **fields}
        files[writer].append(json.dumps(line))

    tell("submit", "submitted", 0, backend="slurm", script="train.py", first_attempt=0)
    tell("submit", "queued", 0, job_id=str(number))
    for attempt in range(attempts):
        info = {"job_id": str(number), "restarts": attempt, "host": "node1"}
        folder = run.attempt(attempt).path
        folder.mkdir()
        (folder / "attempt.json").write_text(json.dumps(info))
        at += 60
        tell("batch", "started", attempt, nodes=["node1", "node2"], **info)
        at += 20
        tell("rank-0", "worker", attempt, began=at - 9, called=at - 1)
        tell("rank-0", "restored", attempt, step=step, passed_over=[], restore_s=0.4)
        tell("rank-0", "training", attempt, step=step)
        tell("rank-0", "first_step", attempt, step=step + 1, world_size=8, hosts=["node1", "node2"])
        for line in range(lines // attempts):
            at, step = at + max(0.5, line / 1000), step + 7
            values = {"loss": round(2 / (1 + step / 900), 6), "lr": 0.001, "accuracy": 0.5123}
            more = {"step": step, "total_steps": 7 * lines, "epoch": step // 1000, **values}
            tell("rank-0", "metrics", attempt, **more, samples_per_s=3512.7)
            if line % 500 == 499:
                save = {"stall_s": 0.12, "write_s": 2.5, "bytes": 10**9}
                tell("rank-0", "checkpoint", attempt, step=step, **save)
        last = attempt == attempts - 1
        tell("rank-0", "finished" if last else "stopped", attempt, step=step, reason="notice")
        at += 2
        cause, action = ("finished", "none") if last else ("preempted", "requeue")
        tell("batch", "verdict", attempt, cause=cause, action=action, why=cause, exit_code=0)
    for writer, text in files.items():
        (run.journal_folder / f"{writer}.jsonl").write_text("\n".join(text) + "\n")


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for number in range(count):
            make(root, number)
        paths = sorted(root.glob("*/*/journal/*.jsonl"))
        size = sum(path.stat().st_size for path in paths)
        env = {**os.environ, "PYTHONPATH": str(REPO), "HPC_DDP_RUNS": folder, "COLUMNS": "160"}

        def ask(*words: str) -> None:
            argv = [sys.executable, "-m", "hpc_ddp", *words]
            subprocess.run(argv, env=env, check=True, capture_output=True)

        def read() -> None:
            for path in paths:
                path.read_bytes()

        def ls() -> None:
            subprocess.run(["ls", "-lR", folder], check=True, capture_output=True)

        def first() -> None:
            (root / f".status-{os.geteuid()}.json").unlink(missing_ok=True)
            ask("status", "--all")

        rows = {
            "`hpc-ddp status`": lambda: ask("status"),
            "`hpc-ddp status --all`, for the first time": first,
            "`hpc-ddp status --all`": lambda: ask("status", "--all"),
            "`hpc-ddp status --json`": lambda: ask("status", "--json"),
            "`hpc-ddp --version`: Python's start": lambda: ask("--version"),
            "`ls -lR`": ls,
            "reading the journals": read,
        }
        found = {what: [seconds(work) for _ in range(ROUNDS)] for what, work in rows.items()}
    today = datetime.date.today().isoformat()
    lines = [
        f"# {today}: status of {count:,} runs, {os.cpu_count()} cores, {platform.machine()},"
        f" Python {platform.python_version()}",
        "",
        f"Journals of {size / 2**20:.0f} MiB in all, on a local disk, read before.",
        "",
        f"| what | median of {ROUNDS} | fastest |",
        "|---|---|---|",
        *(f"| {w} | {statistics.median(t):.2f} s | {min(t):.2f} s |" for w, t in found.items()),
        "",
    ]
    print("\n".join(lines))
    (REPO / "bench" / "results" / f"{today}-status.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
