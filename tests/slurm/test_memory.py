"""A worker that eats all memory of its cgroup: named as such, tried once more, then given up."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import SCRIPTS, Hpc

CONTROLLER = Path("/sys/fs/cgroup/memory")
LIMIT = 2 << 30  # bytes: torchrun and two workers without an appetite take 1 GB


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Path]:
    """Make a memory cgroup of version 1; it is gone once its last process is."""
    if not (CONTROLLER / "memory.limit_in_bytes").exists():
        pytest.skip(f"no memory controller of cgroup version 1 at {CONTROLLER}")
    made = CONTROLLER / f"hpc-ddp-{tmp_path.parent.name}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    (made / "memory.limit_in_bytes").write_text(str(LIMIT))
    yield made
    made.rmdir()


@pytest.mark.more
def test_a_worker_that_eats_all_memory(hpc: Hpc, group: Path, tmp_path: Path) -> None:
    enter = tmp_path / "enter"
    enter.write_text(f'#!/bin/sh\necho $$ >{group}/cgroup.procs || exit\nexec "$@"\n')
    enter.chmod(0o755)
    entered = ("--container", str(enter), "--python", sys.executable)  # or it would be another one
    words = ("--nodes", "1", "--nproc-per-node", "2", *entered)
    job = hpc.submit(*words, str(SCRIPTS / "trouble.py"), "eat-at-30")
    assert job.end() == "FAILED", job.output()
    assert job.verdicts() == [("failed", "requeue"), ("failed", "give up")]
    last = job.events("verdict", 1)[0]
    assert last["error"] == "out of memory: killed by the kernel"
    assert "the same error came at the same step" in last["why"]
    assert job.show()["ExitCode"] == "137:0"
    told = json.loads(hpc("explain", "--json", job.id).stdout)
    assert (told["kind"], told["rank"], told["node"]) == ("host out of memory", 1, last["node"])
    assert told["lost_steps"] > 0
    assert "Before that it failed once." in told["text"]
    assert "rank 1 on" in hpc("explain", job.id).stdout
