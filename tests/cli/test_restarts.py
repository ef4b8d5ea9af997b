"""Restarts within an attempt, and lost nodes, under `dry-run`: they take longer than its others."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from test_dry_run import SCRIPTS, TWO_BY_ONE, TWO_BY_TWO, DryRun

from tests.waiting import pid_in, wait_until

pytestmark = pytest.mark.more


def _pid(job: DryRun, rank: int) -> int:
    (path,) = job.run.logs.glob(f"attempt-0/*/rank-{rank}.pid")
    return pid_in(path)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _starts(job: DryRun) -> list[tuple[object, object]]:
    return [(event["step"], event["world_size"]) for event in job.events("first_step")]


def test_a_notice_while_the_workers_start_again_ends_it(tmp_path: Path) -> None:
    words = ("--max-restarts", "2", *TWO_BY_TWO, str(SCRIPTS / "trouble.py"), "none")
    job = DryRun(tmp_path / "runs", *words)
    job.until("checkpoint")
    other = _pid(job, 0)
    os.kill(_pid(job, 3), signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{other}").exists(), "the end of rank 0", job.printed)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 75, job.printed()
    again = DryRun(tmp_path / "runs", "--run", job.run.id)
    assert again.end() == 0, again.printed()


def test_restarts_are_counted(tmp_path: Path) -> None:
    words = ("--max-restarts", "1", "--max-failures", "0", *TWO_BY_TWO)
    job = DryRun(tmp_path / "runs", *words, str(SCRIPTS / "trouble.py"), "raise-at-30")
    assert job.end() == 1, job.printed()
    assert _starts(job) == [(1, 4), (21, 4)]
    assert "rank 3 on local-1: ValueError: at step 30" in job.printed()
    assert job.explain()["node"] == "local-1"


RESTARTED = """
import os, sys, time
rank, count = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("START", rank, count, *sys.argv[1:], flush=True)
if count == "0" and rank == "1":
    sys.exit(1)
if count == "0":
    time.sleep(3600)  # as in NCCL's collective, which does not end with the peer
"""


@pytest.mark.parametrize("words", [(), ("--no-warm-start",), ("--elastic",)])
def test_a_node_whose_workers_have_not_failed_counts_the_restart_too(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """By its number ranks meet, and by it `--resume-args` decides."""
    script = tmp_path / "train.py"
    script.write_text(RESTARTED)
    resume = ("--max-restarts", "1", "--resume-args=--resume last.pt")
    job = DryRun(tmp_path / "runs", *TWO_BY_ONE, *resume, *words, str(script))
    assert job.end() == 0, job.printed()
    logs = "".join(path.read_text() for path in job.run.logs.rglob("*.log"))
    for rank in (0, 1):
        assert f"START {rank} 1 --resume last.pt" in logs


def test_the_others_go_on_without_a_node(tmp_path: Path) -> None:
    words = ("--elastic", "--nodes", "3", "--nproc-per-node", "1", str(SCRIPTS / "walk.py"))
    job = DryRun(tmp_path / "runs", *words, "--step-seconds", "0.1")
    job.until("checkpoint")
    os.kill(_parent(_parent(_pid(job, 1))), signal.SIGKILL)  # a supervisor: all of its node goes
    assert job.end() == 0, job.printed()
    (_, three), (first, two) = _starts(job)
    assert (three, two) == (3, 2)
    (done,) = (event["step"] for event in job.events("finished"))
    consumed = 3 * 4 * (int(str(first)) - 1)
    assert int(str(done)) == int(str(first)) - 1 + -(-(1600 - consumed) // 8)
