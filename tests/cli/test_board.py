"""TensorBoard on runs, under names that a person knows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from hpc_ddp.report import board
from hpc_ddp.run.errors import HpcDdpError
from hpc_ddp.run.folder import RunFolder, all_runs
from hpc_ddp.run.spec import JobSpec
from tests.waiting import LIMIT_S, wait_until

REPO = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run and a sweep that have events, and a run that has none."""
    root = tmp_path / "runs"
    spec = JobSpec("train.py", sweep={"lr": ("0.1",), "data": ("a/b",)}, array="0", python="no")
    for name in ("digits/1", "sweep/2", "quiet/3"):
        run = RunFolder(root / name).make()
        run.job_json.write_text(spec.to_json())
    for each in (RunFolder(root / "digits" / "1"), RunFolder(root / "sweep" / "2").task(0)):
        (each.path / "tensorboard").mkdir(parents=True)
        (each.path / "tensorboard" / "events.out.tfevents.1.n1.1.0").touch()
    return root


def test_names_are_those_of_the_runs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(board.event_folders(all_runs(root))) == {
        "digits/1",
        "sweep/2/task-0 lr=0.1 data=a_b",
    }
    quiet = RunFolder(root / "quiet" / "3")
    with pytest.raises(HpcDdpError, match="no run has events"):
        board.event_folders([quiet])
    monkeypatch.setattr(board, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(HpcDdpError, match=r"not installed, neither here nor .* \(no\)"):
        board.command(quiet)
    with (
        pytest.raises(HpcDdpError, match="did not come up: too bad"),
        board.served({}, [sys.executable, "-c", "print('too bad')"], None),
    ):
        pass


@pytest.mark.more
def test_it_is_served_until_it_is_stopped(root: Path, tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for folder in board.event_folders(all_runs(root)).values():
        (folder / "events.out.tfevents.1.n1.1.0").unlink()
        with SummaryWriter(str(folder)) as writer:
            writer.add_scalar("loss", 1.0, 1)
    env = os.environ | {"PYTHONPATH": str(REPO), "TMPDIR": str(tmp_path)}
    argv = [sys.executable, "-m", "hpc_ddp", "tensorboard", "--runs-dir", str(root)]
    with subprocess.Popen(argv, env=env, stdout=-1, stderr=-1, text=True) as served:
        assert served.stdout
        assert served.stderr
        url = served.stdout.readline().strip()
        assert f"ssh -N -L {url.split(':')[2].strip('/')}:127.0.0.1:" in served.stderr.readline()

        def names() -> list[str]:
            with urllib.request.urlopen(f"{url}data/runs", timeout=LIMIT_S) as answer:
                return sorted(json.load(answer))

        wait_until(lambda: len(names()) == 2, "both runs", names)  # read behind the first answers
        assert names() == ["digits/1", "sweep/2/task-0 lr=0.1 data=a_b"]
        served.send_signal(signal.SIGTERM)
        assert served.wait(LIMIT_S) == 0
    assert not [*tmp_path.glob("hpc-ddp-tensorboard-*")]
