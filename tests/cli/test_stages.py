"""Workers whose script starts other trainings: before it ends, and behind its own."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from test_dry_run import DryRun

from hpc_ddp.core.run_folder import RunFolder
from tests.raw_events import raw_events
from tests.waiting import pid_in, wait_until

TRAIN = """
import os, subprocess, sys, torch
from hpc_ddp.training import start
run = start(save_every=None, progress=False)
model = run.wrap(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(3):
    run.backward(model(torch.ones(1, 2)).sum())
    run.update(optimizer)
    run.step()
    if step == 1 and sys.argv[1:] == ["evaluate"]:
        env = {name: text for name, text in os.environ.items() if name != "RANK"}
        subprocess.run([sys.executable, __file__], env=env, check=True)
print("steps", run.position.step, run.folder.path)
run.finish()
"""


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.more), 2])
def test_a_worker_trains_once_and_its_script_counts_to_the_end(tmp_path: Path, stages: int) -> None:
    """A training that the first one starts has a run of its own; a later stage is refused."""
    (tmp_path / "train.py").write_text(TRAIN)
    lines = [f"{sys.executable} {tmp_path}/train.py {word}" for word in ("evaluate", "")]
    (tmp_path / "run.sh").write_text("\n".join(["set -e", *lines[:stages]]))
    words = ("--nproc-per-node", "1", "--max-failures", "0", "--no-python", "bash")
    job = DryRun(tmp_path / "runs", *words, str(tmp_path / "run.sh"))
    assert job.end() == (0, 2)[stages - 1], job.printed()
    (run,) = (RunFolder(path) for path in (tmp_path / "runs" / "bash").iterdir())
    for path in (tmp_path / "runs" / "train" / "local", run.path):
        assert f"steps 3 {path}" in job.printed()
    ends = [event for event in raw_events(run.path) if event["event"] == "finished"]
    assert [event["within"] for event in ends] == [True]
    assert "WARNING" not in job.printed()
    assert run.finished() is (stages == 1)
    refusal = "a second process of this worker has begun a training in the run"
    assert (refusal in job.printed()) is (stages > 1)


SLOW = """
import time, torch
from hpc_ddp.training import start
class Slow:
    def state_dict(self):
        print("saves", flush=True)
        time.sleep(2)
        return {}
    def load_state_dict(self, state):
        pass
run = start(save_every=None, progress=False)
model = run.wrap(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer, slow=Slow())
for step in run.steps(10000):
    run.backward(model(torch.ones(1, 2)).sum())
    run.update(optimizer)
    run.step()
    time.sleep(0.02)
run.finish()
"""


@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.more)])
def test_a_training_saves_though_the_shell_around_it_dies(tmp_path: Path, launcher: str) -> None:
    """Slurm sends a preemption's signal to each process of a step, at some sites."""
    (tmp_path / "train.py").write_text(SLOW)
    script = tmp_path / "run.sh"
    lines = f"cd {tmp_path}", "echo $$ > shell", f"{sys.executable} train.py", "touch behind"
    script.write_text("\n".join(lines))
    words = ("--nproc-per-node", "1", "--launcher", launcher, "--no-python", "bash", str(script))
    job = DryRun(tmp_path / "runs", *words)
    job.until("first_step")
    os.kill(pid_in(tmp_path / "shell"), signal.SIGTERM)
    job.process.send_signal(signal.SIGTERM)
    job.until_printed("saves")
    assert job.end() == 75, job.printed()
    assert not (tmp_path / "behind").exists()
    assert len(job.events("stopped")) == 1
    assert job.explain()["lost_steps"] == 0


def test_a_notice_ends_a_shell_around_a_program_of_others(tmp_path: Path) -> None:
    """Its own handler saves; the lines behind it do not run."""
    program = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: exit(0))\n"
    program += f"open({str(tmp_path / 'ready')!r}, 'w').close()\ntime.sleep(600)\n"
    (tmp_path / "program.py").write_text(program)
    script = tmp_path / "run.sh"
    script.write_text(f"{sys.executable} {tmp_path}/program.py\ntouch {tmp_path}/behind\n")
    words = ("--nproc-per-node", "1", "--launcher", "srun", "--no-python", "bash", str(script))
    job = DryRun(tmp_path / "runs", *words)
    wait_until((tmp_path / "ready").exists, "the program", job.printed)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 75, job.printed()
    assert not (tmp_path / "behind").exists()
