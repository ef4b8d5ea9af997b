"""`dry-run`: the same supervisors and verdicts on this machine, with real processes and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.journal.goodput import account
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.core.run_index import all_runs
from hpc_ddp.node.dry_run import AGAIN_S
from tests.children import start_child
from tests.command_line import call_here
from tests.devices import DEVICE, device_env
from tests.frames import frames_of_ours
from tests.raw_events import raw_events
from tests.waiting import LIMIT_S, pid_in, wait_until

REPO = Path(__file__).parents[2]
SCRIPTS = REPO / "tests" / "slurm" / "scripts"
TWO_BY_TWO = ("--nodes", "2", "--gpus-per-node", "2")
TWO_BY_ONE = ("--nodes", "2", "--gpus-per-node", "1")


FRESH = "hpc-ddp dry-run --run"


class DryRun:
    """A dry run in the background; `run` is its folder, once there is one."""

    def __init__(self, root: Path, *words: str, **environ: str) -> None:
        self.root = root
        env = {**os.environ, **device_env(), "HPC_DDP_RUNS": str(root), **environ}
        argv = [sys.executable, "-m", "hpc_ddp", "dry-run", *words]
        self.out = root.with_suffix(".out")
        with open(self.out, "ab") as out:
            self.process = start_child(argv, cwd=root.parent, env=env, stdout=out, stderr=out)

    @property
    def run(self) -> RunFolder:
        return all_runs(self.root)[0]

    def until(self, event: str, attempt: int = 0) -> None:
        self._wait(lambda: self.events(event, attempt), f"event {event} of attempt {attempt}")

    def until_printed(self, text: str) -> None:
        self._wait(lambda: text in self.printed(), f"{text!r} in the output")

    def _wait(self, condition: Callable[[], object], event: str) -> None:
        wait_until(condition, event, self.printed, ended=lambda: self.process.poll() is not None)

    def events(self, name: str, attempt: int | None = None) -> list[dict[str, object]]:
        if not all_runs(self.root):
            return []
        found = [event for event in raw_events(self.run.path) if event["event"] == name]
        return [event for event in found if attempt in (None, event["attempt"])]

    def end(self) -> int:
        """Wait for the end, which none of our own processes may have come to by an error."""
        code = self.process.wait(LIMIT_S)
        assert not frames_of_ours(self.printed())
        return code

    def printed(self) -> str:
        return self.out.read_text()

    def explain(self) -> dict[str, Any]:
        """Return what `explain --json` tells of the run."""
        words = ("explain", "--json", str(self.run.path))
        explanation: dict[str, Any] = json.loads(
            call_here(self.root.parent, os.environ, *words).stdout
        )
        return explanation


def test_stopped_politely_it_goes_on_at_the_next_step(tmp_path: Path) -> None:
    words = ("--nproc-per-node", "2", "--env", "SAMPLES=1600", str(SCRIPTS / "trouble.py"), "none")
    first = DryRun(tmp_path / "runs", *words)
    first.until("first_step")
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 75, first.printed()
    stopped = first.events("stopped")[0]["step"]
    assert "go on with: hpc-ddp dry-run --run" in first.printed()
    told = first.explain()
    assert (told["kind"], told["step"], told["lost_steps"]) == ("stopped", stopped, 0)
    assert told["hint"] == f"hpc-ddp dry-run --run {first.run.path}"
    second = DryRun(tmp_path / "runs", "--run", first.run.id)
    assert second.end() == 0, second.printed()
    assert second.events("first_step", 1)[0]["step"] == int(str(stopped)) + 1
    assert "Traceback" not in second.printed()
    assert second.printed().count("hpc-ddp: goodput ") == 2  # as it stopped, and at the end
    times = [event.time for event in first.run.events()]
    seconds = account(first.run.events())
    assert sum(seconds.values()) == pytest.approx(max(times) - min(times), rel=0.01)
    zero = {"running", "redone"}  # a polite stop has nothing done again
    assert {part for part, value in seconds.items() if not value} == zero, seconds
    assert "in 2 attempts" in first.explain()["text"]
    again = DryRun(tmp_path / "runs", "--run", first.run.id)
    assert again.end() == 2
    assert "is finished" in again.printed()


@pytest.mark.more  # four starts; its parts are unit tests
def test_fresh_begins_at_step_0_and_keeps_the_checkpoints(tmp_path: Path) -> None:
    words = ("--nproc-per-node", "2", str(SCRIPTS / "trouble.py"), "none")
    first = DryRun(tmp_path / "runs", *words)
    first.until("first_step")
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 75, first.printed()
    step = f"step-{first.events('stopped')[0]['step']}"
    manifest = first.run.checkpoints / step / "manifest.json"
    manifest.rename(manifest.with_name("lost"))
    damaged = DryRun(tmp_path / "runs", "--run", first.run.id)
    assert damaged.end() == 1, damaged.printed()
    assert (
        f"hint: to begin at step 0, and keep what there is: {FRESH} {first.run.path} --fresh"
        in (damaged.printed())
    )
    again = DryRun(tmp_path / "runs", "--run", first.run.id, "--fresh")
    assert again.end() == 0, again.printed()
    assert again.events("first_step", 2)[0]["step"] == 1
    aside = first.run.checkpoints / "aside-0"
    assert f"its checkpoints are kept in {aside}" in again.printed()
    assert [path.name for path in aside.iterdir()] == [f"{step}.bad-1"]


def test_a_script_of_others_is_ended_promptly(tmp_path: Path) -> None:
    words = ("--nproc-per-node", "2", str(SCRIPTS / "plain.py"))
    job = DryRun(tmp_path / "runs", *words, TICKS="600")
    job.until_printed('"argv"')
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 75, job.printed()


@pytest.mark.more  # a cluster's is in `make test`
def test_a_killed_worker_is_recovered_from(tmp_path: Path) -> None:
    job = DryRun(tmp_path / "runs", *TWO_BY_TWO, str(SCRIPTS / "trouble.py"), "none")
    job.until("checkpoint")
    (pid,) = job.run.logs.glob("attempt-0/*/rank-2.pid")
    os.kill(pid_in(pid), signal.SIGKILL)
    assert job.end() == 0, job.printed()
    assert [event["cause"] for event in job.events("verdict")] == ["failed", "finished"]
    assert "rank 2 on local-" in job.printed(), job.printed()


@pytest.mark.parametrize(
    ("trouble", "code"),
    [
        pytest.param("exit-before", 3, marks=pytest.mark.more),  # a cluster's is in `make test`
        ("raise-before", 1),
    ],
)
def test_an_error_before_the_first_step_ends_it(tmp_path: Path, trouble: str, code: int) -> None:
    job = DryRun(tmp_path / "runs", *TWO_BY_ONE, str(SCRIPTS / "trouble.py"), trouble)
    assert job.end() == code, job.printed()
    last = job.printed().splitlines()[-1]
    assert "rank 1 on local-1" in last
    if trouble == "raise-before":
        assert "ValueError: before the first step" in last
    told = job.explain()
    kind = "python error" if trouble == "raise-before" else "exit code"
    assert (told["kind"], told["node"], told["rank"]) == (kind, "local-1", 1)


TASK = """
import os, pathlib, sys, time
print(*(os.environ[name] for name in sys.argv[1].split()), flush=True)
if os.environ["RANK"] == "3":
    logs = pathlib.Path(os.environ["HPC_DDP_NODE_FOLDER"]).parent
    while sum(path.stat().st_size > 0 for path in logs.glob("*/rank-*.log")) < 4:
        time.sleep(0.1)
    raise ValueError("this rank fails")
time.sleep(600)
"""


def test_each_worker_is_a_task_of_its_own(tmp_path: Path) -> None:
    """The last rank fails, which ends the others; nothing here needs torch."""
    script = tmp_path / "task.py"
    script.write_text(TASK)
    names = (
        "RANK SLURM_PROCID LOCAL_RANK SLURM_LOCALID GROUP_RANK SLURM_NODEID"
        " WORLD_SIZE SLURM_NTASKS LOCAL_WORLD_SIZE SLURM_NTASKS_PER_NODE"
    )
    dry = DryRun(tmp_path / "runs", "--launcher", "srun", *TWO_BY_TWO, str(script), names)
    assert dry.end() == 1, dry.printed()
    assert "rank 3 on local-1: ValueError: this rank fails" in dry.printed()
    assert "rank 3" in dry.explain()["text"]
    for rank in range(4):
        log = dry.run.attempt(0).node(f"local-{rank // 2}").rank_log(rank).read_text()
        told = [rank, rank, rank % 2, rank % 2, rank // 2, rank // 2, 4, 4, 2, 2]
        assert log.splitlines()[0] == " ".join(map(str, told))
    torn_down = [record["torn_down"] for record in dry.run.attempt(0).records()]
    assert torn_down == ["local-1-3"] * 3 + [None]


def test_nobody_is_left_when_the_command_is_killed(tmp_path: Path) -> None:
    words = ("--launcher", "srun", *TWO_BY_ONE, str(SCRIPTS / "trouble.py"), "none")
    job = DryRun(tmp_path / "runs", *words)
    job.until("first_step")
    pids = [pid_in(path) for path in job.run.logs.glob("attempt-0/*/rank-*.pid")]
    assert len(pids) == 2
    job.process.kill()
    job.end()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the workers' end")
    assert job.events("stopped", 0)


def test_what_can_not_start_ends_with_the_reason(tmp_path: Path) -> None:
    words = ("--nodes", "2", "--python", "/no/such/python", str(SCRIPTS / "plain.py"))
    job = DryRun(tmp_path / "runs", *words)
    assert job.end() == 127
    assert "No such file or directory: '/no/such/python'" in job.printed()
    assert "/no/such/python could not be started" in job.explain()["text"]


DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.more)])
def test_a_second_signal_kills_the_workers(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "deaf.py").write_text(DEAF)
    job = DryRun(tmp_path / "runs", "--launcher", launcher, str(tmp_path / "deaf.py"))
    wait_until(
        lambda: any("deaf" in log.read_text() for log in tmp_path.glob("runs/*/*/logs/*/*/*.log")),
        "the script at work",
        job.printed,
    )
    (path,) = job.run.logs.glob("attempt-0/*/rank-0.pid")
    job.process.send_signal(signal.SIGTERM)
    job.until("notice")
    assert job.process.poll() is None
    time.sleep(AGAIN_S)  # a signal that comes sooner counts as the same one
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 75, job.printed()
    assert "a second signal: the workers are killed" in job.printed()
    wait_until(lambda: not Path(f"/proc/{pid_in(path)}").exists(), "the worker's end")


def test_an_interpreter_without_torch_is_named(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    words = ("--python", str(bare / "bin" / "python"), str(SCRIPTS / "plain.py"))
    job = DryRun(tmp_path / "runs", *words)
    assert job.end() == 1
    assert "No module named 'torch'" in job.printed()
    told = job.explain()
    assert (told["kind"], told["rank"]) == ("bad environment", None)
    assert "the job's Python has no torch" in told["text"]
    looked = DryRun(tmp_path / "looked", "--preflight", "--nodes", "2", *words)
    assert looked.end() == 1
    last = looked.printed().splitlines()[-1]
    assert "No module named 'torch' (the same on all nodes); given up" in last


@pytest.mark.more
@pytest.mark.parametrize(
    ("launcher", "hold"),
    [
        ("srun", "import socket; server = socket.create_server(('', port))"),
        # Of another dry run, say: torchrun's agent could join it.
        (
            "torchrun",
            "from torch.distributed import TCPStore; server = TCPStore('localhost', port,"
            " is_master=True)",
        ),
    ],
    ids=["a listener", "a store"],
)
def test_a_port_that_another_process_takes_is_no_failure(
    tmp_path: Path, launcher: str, hold: str
) -> None:
    """The port is taken after it was looked up: the job's Python stands in for the other
    process."""
    holder = "import os, sys, time; port = int(os.environ['HPC_DDP_PORT'])"
    holder += f"; {hold}; open(sys.argv[1], 'w').close(); time.sleep(600)"
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/bash\ncase $HPC_DDP_NODE_INDEX$* in\n"
        f"0*elastic_agent* | 0*plain.py*) if mkdir {tmp_path}/first 2>&-; then\n"
        f'    {sys.executable} -c "{holder}" {tmp_path}/taken & echo $! > {tmp_path}/pid\n'
        f"    until [ -e {tmp_path}/taken ]; do sleep 0.1; done\n"
        f'fi ;;\nesac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    words = ("--python", str(python), "--launcher", launcher, "--no-warm-start")
    job = DryRun(tmp_path / "runs", *words, str(SCRIPTS / "plain.py"))
    code = job.end()
    os.kill(pid_in(tmp_path / "pid"), signal.SIGKILL)
    assert code == 0, job.printed()
    assert [event["attempt"] for event in job.events("started")] == [0]


@pytest.mark.more  # which trains on the stand-in; test_devices_here.py hides that one
def test_a_dry_run_has_no_accelerator_but_the_stand_in(tmp_path: Path) -> None:
    kind = "torch.accelerator.current_accelerator(check_available=True)"
    (tmp_path / "kind.py").write_text(f"import torch\nprint('trains on', {kind})\n")
    job = DryRun(tmp_path / "runs", "--launcher", "srun", str(tmp_path / "kind.py"))
    assert job.end() == 0, job.printed()
    assert f"trains on {'sim' if DEVICE == 'sim' else None}" in job.printed()


@pytest.mark.more  # slurm/test_preflight.py has it on real nodes
def test_nodes_that_are_fit_are_trained_on(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text("print('trained')\n")
    job = DryRun(tmp_path / "runs", "--preflight", "--nodes", "2", str(tmp_path / "short.py"))
    assert job.end() == 0, job.printed()
    assert job.printed().index("2 nodes are fit") < job.printed().index("trained")
    (event,) = job.events("preflight")
    report: Any = event["report"]
    assert sorted(report) == ["local-0", "local-1"]
    assert all(checks["exchange_mb_s"] > 0 for checks in report.values())


def test_status_and_logs_of_a_run(tmp_path: Path) -> None:
    words = ("--nproc-per-node", "2", str(SCRIPTS / "words.py"), "a word")
    job = DryRun(tmp_path / "runs", *words)
    assert job.end() == 0, job.printed()
    env = dict(os.environ, HPC_DDP_RUNS=str(tmp_path / "runs"))

    def ask(*words: str) -> str:
        answer = call_here(tmp_path, env, *words)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    assert json.loads(ask("status", "--json"))[0]["state"] == "finished"
    assert "a word" in ask("logs", "words", "--rank", "0")
    head, *lines, end = ask("logs", "words").splitlines()
    assert head.startswith("--- attempt 0 began ")
    assert ": finished; WARNING: no process group was formed" in end
    assert lines[-1] == "all ranks | done".replace("all ranks", "all ranks".ljust(14))
    assert ask("logs", "-f", job.run.id, "--rank", "1").endswith("done\n")


@pytest.mark.parametrize(
    ("script", "said", "code"),
    [
        (
            "import argparse\nargparse.ArgumentParser('train.py').parse_args(['--rate', 'gloo'])",
            "rank 0 on local-0: train.py: error: unrecognized arguments: --rate gloo;",
            2,
        ),
        ("raise SystemExit('no data')", 'rank 0 on local-0: exit code 1 ("no data");', 1),
    ],
)
def test_the_verdict_quotes_what_a_script_said(
    tmp_path: Path, script: str, said: str, code: int
) -> None:
    (tmp_path / "train.py").write_text(script)
    dry_run = DryRun(tmp_path / "runs", "--launcher", "srun", str(tmp_path / "train.py"))
    assert dry_run.end() == code
    assert f"attempt 0: {said}" in dry_run.printed()
    assert "given up" in dry_run.printed()
    assert len(dry_run.events("started", None)) == 1


def test_its_end_is_told_by_a_command_of_the_users(tmp_path: Path) -> None:
    """The file with the addresses is no part of the run."""
    script, addresses = tmp_path / "t.py", tmp_path / "notify"
    script.write_text("raise SystemExit(3)")
    addresses.write_text(f'command = (echo "$HPC_DDP_SUBJECT"; cat) > {tmp_path}/message')
    refused = DryRun(tmp_path / "runs", "--notify", str(addresses), str(script))
    assert refused.end() == 2
    assert f"hint: chmod 600 {addresses}" in refused.printed()
    addresses.chmod(0o600)
    job = DryRun(tmp_path / "runs", "--launcher", "srun", "--notify", str(addresses), str(script))
    assert job.end() == 3, job.printed()
    subject, text, *_ = (tmp_path / "message").read_text().splitlines()
    assert subject == "hpc-ddp: t: given up"
    assert text.startswith("attempt 0 ended: rank 0 on local-0: exit code 3; it came in the")
    kept = [path for path in job.run.path.rglob("*") if path.is_file()]
    secret = str(tmp_path / "message").encode()
    assert [path for path in kept if secret in path.read_bytes()] == []
