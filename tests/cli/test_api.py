"""The Python API: a job played here, in the background, and looked after by its handle."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import hpc_ddp
from hpc_ddp import api
from hpc_ddp.cli.main import main
from hpc_ddp.core.run_folder import RunFolder
from tests.waiting import LIMIT_S, wait_until

SCRIPT = """
import sys, time
print("hello", *sys.argv[1:], flush=True)
time.sleep(600 if "600" in sys.argv else 0)
"""
HERE = {"backend": "local", "launcher": "srun"}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HPC_DDP_RUNS", str(tmp_path / "runs"))
    return tmp_path


def test_the_examples_of_its_documentation() -> None:
    # In the order of the text: what one example has submitted, another one finds.
    tests = doctest.DocTestFinder().find(api)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in sorted(tests, key=lambda test: test.lineno or 0):
        runner.run(test)
    assert runner.summarize(verbose=False).attempted >= 8
    assert runner.summarize(verbose=False).failed == 0


def test_a_run_is_cancelled(project: Path) -> None:
    run = hpc_ddp.submit(script=Path("train.py"), args=["600"], job_name="long", **HERE)
    with pytest.raises(TimeoutError, match=r"is not over after 0\.1 s"):
        run.wait(timeout=0.1)
    log = run.path / "logs" / "attempt-0" / "local-0" / "rank-0.log"
    wait_until(lambda: log.exists() and log.read_text(), "the script at work")
    other = hpc_ddp.find("long")
    assert (other, other.job_id, other.state) == (run, None, "running")
    assert "long" in str(other.path)
    assert other.logs(rank=0) == "hello 600\n"
    other.cancel()
    assert other.wait(LIMIT_S) == run.wait(LIMIT_S) == "cancelled"
    with pytest.raises(hpc_ddp.UsageError, match="no log of rank 7"):
        run.logs(rank=7)


def test_files_count_and_a_default_is_not_said(project: Path) -> None:
    (project / "hpc-ddp.toml").write_text('nodes = 3\nbackend = "local"\n[env]\nA = "1"\n')
    spec = hpc_ddp.JobSpec("train.py", env={"B": "2"}, gpus_per_node="2", nodes=1)
    merged = api._checked_settings(api._non_default_fields(spec) | {"site": "generic"})
    assert merged == {
        "script": "train.py",
        "env": {"B": "2"},
        "gpus-per-node": "2",
        "site": "generic",
    }
    with pytest.raises(hpc_ddp.UsageError, match="must be a whole number, or a range"):
        hpc_ddp.submit(script="train.py", nodes=[2])
    with pytest.raises(hpc_ddp.UsageError, match="does not exist"):
        hpc_ddp.submit(hpc_ddp.JobSpec("gone.py"))
    with pytest.raises(hpc_ddp.UsageError, match="no run 'nope'"):
        hpc_ddp.find("nope")
    assert not (project / "runs").exists()


def test_a_job_has_the_warnings_of_the_command(project: Path) -> None:
    """A filter that makes errors of them ends it before anything is written."""
    words = ["--backend", "local", "--launcher", "srun", "--setup", "export RANK=1"]
    result = CliRunner().invoke(main, ["render", "--runs-dir", "x", *words, "train.py", "$PLACE"])
    lines = result.stderr.splitlines()
    texts = [line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")]
    assert [text.split()[0] for text in texts] == ["$PLACE", "--setup:", "setup"]
    with pytest.raises(hpc_ddp.HpcDdpWarning, match="PLACE"):  # as pyproject.toml has it
        hpc_ddp.submit(script="train.py", args=["$PLACE"], **HERE)
    assert not (project / "runs").exists()
    job = {"script": "train.py", "args": ["$PLACE"], "setup": ["export RANK=1"]}
    with pytest.warns(hpc_ddp.HpcDdpWarning) as records:
        run = hpc_ddp.submit(**job, **HERE)
    assert [(str(warning.message), warning.filename) for warning in records] == [
        (text, __file__) for text in texts
    ]
    assert run.wait(LIMIT_S) == "finished"


def test_a_sweep_has_a_task_for_each_point() -> None:
    said = api._sweep_settings({"lr": [0.1, 0.2], "seed": range(3)})
    assert said == {"sweep": {"lr": ("0.1", "0.2"), "seed": ("0", "1", "2")}, "array": "0-5"}
    assert len(hpc_ddp.JobSpec("train.py", **said).trials) == 6
    assert api._sweep_settings(None) == api._sweep_settings({}) == {}


@pytest.mark.parametrize("sweep", [[], "", 0, {1: [2]}, {"lr": "0.1"}, {"lr": b"1"}, {"lr": 0.1}])
def test_a_sweep_that_is_none_is_refused(sweep: Any) -> None:
    with pytest.raises(hpc_ddp.UsageError, match="accepted: names, each with its values"):
        api._sweep_settings(sweep)


def test_no_such_name() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'sumbit'"):
        hpc_ddp.sumbit  # type: ignore[attr-defined]  # noqa: B018


def test_nothing_stays_of_a_run_whose_output_can_not_be_written(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "slurm_out", property(lambda run: run.path))  # a folder
    with pytest.raises(IsADirectoryError):
        hpc_ddp.submit(script="train.py", **HERE)
    assert not list(project.glob("runs/*/*"))
