"""The commands that submit, below their options."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hpc_ddp.cli import common, jobs
from hpc_ddp.cli.main import main
from hpc_ddp.submission import backends


@pytest.mark.parametrize("as_json", [False, True])
def test_a_submitted_job_is_no_failure_where_stdout_takes_nothing(
    tmp_path: Path, as_json: bool
) -> None:
    """A script that repeats what has failed would submit it twice."""
    code = (
        "from types import SimpleNamespace as N; from hpc_ddp.cli import jobs;"
        "jobs._start_run = lambda *words: N(process=None, job=N(id='7'));"
        "jobs._start_and_report(N(run=N(path='/r'), spec=N(backend='slurm')), "
        f"{as_json})"
    )
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ended.returncode == 0, ended.stderr
    assert ('{"job_id": "7", "run": "/r"}' if as_json else "7") in ended.stderr.splitlines()
    assert "stdout did not take this: No space left on device" in ended.stderr


def test_a_command_in_a_folder_that_is_gone_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    ended = CliRunner().invoke(main, ["render", "train.py"])
    assert ended.exit_code == 1
    assert ended.output.splitlines()[0] == "error: the folder of this shell is gone"


def test_a_closed_stream_is_none_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "set_threshold", lambda count: None)
    monkeypatch.setattr(sys, "stderr", None)  # as Python has it below 2>&-
    assert main.callback is not None
    main.callback()
    print("a warning", file=sys.stderr)
    assert not sys.stderr.isatty()
    sys.stderr.close()
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    monkeypatch.setattr(sys, "stderr", full)
    common.say("a note")
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space"):
        full.close()


def test_signals_before_the_process_runs_are_passed_on_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", lambda number, call: handlers.update({number: call}))
    forward = jobs.SignalForwarder().install()
    handlers[signal.SIGINT](signal.SIGINT, None)
    process = subprocess.Popen(["sleep", "600"])
    started = backends.StartedRun(process=process)
    assert forward.wait(started) == 128 + signal.SIGTERM  # as a shell has it
    assert handlers.keys() == {signal.SIGINT, signal.SIGTERM}


@pytest.mark.parametrize("words", [["tr.py"], ["tr.py", "--"], ["tr.py", "--lr", "2"]])
def test_arguments_that_are_kept_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPC_DDP_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tr.py").touch()
    (tmp_path / "hpc-ddp.toml").write_text('script = "tr.py"\nargs = ["--lr", "a b"]\n')
    CliRunner().invoke(main, ["render"], catch_exceptions=False)
    for origin, begin in (("hpc-ddp.toml", []), ("the run", ["--run", "tr"])):
        result = CliRunner().invoke(main, ["render", "--explain", *begin, *words])
        note = f"note: tr.py has the arguments of {origin}: --lr 'a b'; without: --, alone"
        assert (note in result.output) is (words == ["tr.py"]), result.output
        args = [line.split()[-1] for line in result.output.splitlines() if line[:5] == "args "]
        assert args == {1: ["--lr", "b"], 2: [], 3: ["--lr", "2"]}[len(words)], result.output
