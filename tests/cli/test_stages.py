"""Workers whose script starts other trainings: before it ends, and behind its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_dry_run import DryRun

from hpc_ddp.core.run_folder import RunFolder
from tests.raw_events import raw_events

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
    assert "this training runs below bash, which dies of a notice" in job.printed()
    assert run.finished() is (stages == 1)
    refusal = "a second process of this worker has begun a training in the run"
    assert (refusal in job.printed()) is (stages > 1)
