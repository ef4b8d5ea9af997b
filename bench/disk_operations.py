"""Counts what a job asks of the shared disk while it only trains.

``python bench/disk_operations.py [--nodes 2] [--workers 2] [--seconds 120] [--launcher torchrun]``
plays a dry run of a script that neither prints nor saves, waits until it is in its stride, and has
strace count each open, stat, listing, write, sync and rename of a file, by process: of the run's
folder as of the Python environment, since both may be on a shared disk; not of /proc, /sys and
/dev. Reads of an open file are not counted, nor is what the script itself prints. Needs strace (as
root: apt-get install strace).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

REPO = Path(__file__).parents[1]
SETTLE_S = 45.0  # after the first step: connections are made, folders have been listed
CALLS = "open,openat,stat,lstat,fstat,newfstatat,statx,access,faccessat,faccessat2,getdents64"
WRITES = "write,pwrite64,writev,fsync,fdatasync,rename,renameat2,unlink,unlinkat,mkdir,mkdirat"
IN_MEMORY = ("/proc/", "/sys/", "/dev/", "/memfd:")
SCRIPT = """
import time

import torch
from torch.utils.data import TensorDataset

from hpc_ddp.training import start

run = start(seed=0, save_every=None)
model = run.wrap(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = run.loader(TensorDataset(torch.randn(65536, 8)), batch_size=4)
run.track(model=model, optimizer=optimizer)
for epoch in run.epochs(100):
    for (inputs,) in batches:
        optimizer.zero_grad()
        run.backward(model(inputs).sum())
        optimizer.step()
        time.sleep(0.05)
        run.step()
"""


def wait_for(event: str, run: Path) -> None:
    """Return once the run's journal has an event; raise RuntimeError after some minutes."""
    for _ in range(3000):
        for file in run.glob("journal/*.jsonl"):
            if f'"{event}"' in file.read_text():
                return
        time.sleep(0.1)
    raise RuntimeError(f"no {event} in {run}")


def processes_below(parent: int) -> dict[int, str]:
    """Return the role of each process that is a descendant of `parent`, by its id."""
    parents, words = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            words[int(path.name)] = (path / "cmdline").read_bytes().decode().split("\0")
        except (OSError, ValueError):
            continue
    below = {parent}
    while more := {pid for pid, of in parents.items() if of in below} - below:
        below |= more
    return {pid: role_of(pid, words[pid]) for pid in sorted(below & words.keys())}


def role_of(pid: int, words: list[str]) -> str:
    """Return what a process is, by its command line and its environment."""
    try:
        environ = dict(
            line.split("=", 1)
            for line in Path(f"/proc/{pid}/environ").read_text().split("\0")
            if "=" in line
        )
    except OSError:
        environ = {}
    node = environ.get("HPC_DDP_NODE_INDEX", "")
    roles = {"supervisor": "supervisor", "dry_run": "batch", "elastic_agent": "torchrun"}
    role = next((role for word, role in roles.items() if word in words), "")
    if not role:
        role = "command" if "dry-run" in words else "workers"
    return f"{role} {node}".strip()


def count(pids: dict[int, str], seconds: float) -> dict[str, Counter[str]]:
    """Return how often each role's processes made each call on files of a disk."""
    counts: dict[str, Counter[str]] = {role: Counter() for role in pids.values()}
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch) / "trace"
        argv = ["strace", "-f", "-ff", "-y", "-qq", "-e", f"trace={CALLS},{WRITES}"]
        argv += ["-o", str(trace), *(word for pid in pids for word in ("-p", str(pid)))]
        tracer = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
        time.sleep(seconds)
        tracer.send_signal(signal.SIGINT)
        tracer.wait()
        for file in Path(scratch).iterdir():
            thread = int(file.suffix[1:])
            role = next((r for pid, r in pids.items() if _is_of(thread, pid)), "command")
            for line in file.read_text(errors="replace").splitlines():
                call = re.match(r"(\w+)\(", line)
                if call and is_of_a_disk(line) and not is_printed(line):
                    counts[role][call[1]] += 1
    return counts


def _is_of(thread: int, pid: int) -> bool:
    return Path(f"/proc/{pid}/task/{thread}").exists()


def is_of_a_disk(line: str) -> bool:
    """Return whether a traced call, whose descriptors have their paths, is one of a file on a
    disk."""
    path = re.match(r'\w+\((?:\d+<(/[^>]*)>|(?:AT_FDCWD<[^>]*>, )?"(/[^"]*)")', line)
    return path is not None and not (path[1] or path[2]).startswith(IN_MEMORY)


def is_printed(line: str) -> bool:
    """Return whether a traced call writes what the script prints."""
    return bool(re.match(r"write\([12]<", line))


def play(options: argparse.Namespace, folder: Path) -> dict[str, Counter[str]]:
    """Play the job, and return the counts of `count`."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    argv = [sys.executable, "-m", "hpc_ddp", "dry-run", "--nodes", str(options.nodes)]
    argv += ["--nproc-per-node", str(options.workers)]
    argv += ["--launcher", options.launcher, "--runs-dir", str(folder / "runs"), str(script)]
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.DEVNULL)
    try:
        while not (runs := list(folder.glob("runs/*/*/journal"))):
            if job.poll() is not None:
                raise RuntimeError("the dry run has ended")
            time.sleep(0.1)
        run = runs[0].parent
        wait_for("first_step", run)
        time.sleep(SETTLE_S)
        counts = count(processes_below(job.pid), options.seconds)
    finally:
        job.terminate()
        job.wait()
    return counts


def main() -> None:
    """Print the table, calls a second by process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--launcher", default="torchrun")
    options = parser.parse_args()
    if not shutil.which("strace"):
        sys.exit("strace is missing; as root: apt-get install strace")
    with tempfile.TemporaryDirectory() as folder:
        counts = play(options, Path(folder))
    print(f"{options.nodes} nodes x {options.workers} workers, {options.seconds:.0f} s\n")
    print("| process | calls a second | of them |\n|---|---|---|")
    for role, calls in sorted(counts.items()):
        rate = calls.total() / options.seconds
        parts = ", ".join(f"{name} {n / options.seconds:.3f}" for name, n in calls.most_common())
        print(f"| {role} | {rate:.3f} | {parts} |")
    print(json.dumps({role: calls.total() for role, calls in counts.items()}), file=sys.stderr)


if __name__ == "__main__":
    main()
