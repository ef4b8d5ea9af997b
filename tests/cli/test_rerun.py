"""`rerun`: the same job once more, with another value or the code of that day."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.task_folder import make_task
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.core.run_index import all_runs
from hpc_ddp.live_jobs import Queue
from hpc_ddp.report.explain.explain import explain_run
from hpc_ddp.report.status.run_status import status_of
from hpc_ddp.submission import plan, restart
from hpc_ddp.submission.plan import PreparedRun
from hpc_ddp.submission.restart import with_values
from hpc_ddp.submission.settings import config
from tests.waiting import LIMIT_S

REPO = Path(__file__).parents[2]
SCRIPT = "import sys; print('{}', *sys.argv[1:])\n"
HERE = ("--backend", "local", "--launcher", "srun")


@pytest.mark.parametrize(
    ("args", "changes", "found"),
    [
        (["--lr", "1"], {"lr": "2"}, ["--lr=2"]),
        (["--lr=1", "x"], {"lr": "2"}, ["--lr=2", "x"]),
        (["--lr", "-1", "x"], {"lr": "2"}, ["--lr=2", "x"]),
        (["--amp", "--lr", "1"], {"amp": "no"}, ["--amp=no", "--lr", "1"]),
        (["--lr", "1", "--lr=3"], {"lr": "2"}, ["--lr=2"]),
        (["lr", "-lr"], {"lr": "2"}, ["lr", "-lr", "--lr=2"]),
        (["--lr"], {"lr": "a b=c"}, ["--lr=a b=c"]),
        (["--note", "lr=1", "--lr=1"], {"lr": "2"}, ["--note", "lr=1", "--lr=2"]),
        (["+lr=1", "a=1"], {"++lr": "2", "+b": "3"}, ["++lr=2", "a=1", "+b=3"]),
        (["--multirun", "lr=1"], {"lr": "2"}, ["--multirun", "lr=2"]),
        (["m=vit", "o.lr=1"], {"o.lr": "2", "seed": "3"}, ["m=vit", "o.lr=2", "seed=3"]),
        (
            ["++o.lr=1", "--multirun"],
            {"o.lr": "2", "seed": "3"},
            ["++o.lr=2", "--multirun", "--seed=3"],
        ),
    ],
)
def test_values_are_put_in_their_place(
    args: list[str], changes: dict[str, str], found: list[str]
) -> None:
    assert with_values(args, changes) == found


def call(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ, HPC_DDP_RUNS=str(folder / "runs"), PYTHONPATH=str(REPO))
    env["HOME"] = str(folder)
    argv = [sys.executable, "-m", "hpc_ddp", *words]
    return subprocess.run(
        argv, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S
    )


def printed(run: RunFolder) -> str:
    return run.attempt(0).node("local-0").rank_log(0).read_text()


def all_named(folder: Path, name: str) -> list[RunFolder]:
    return [run for run in all_runs(folder / "runs") if run.name == name]


def test_once_more_with_another_value(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format("then"))
    assert call(tmp_path, "submit", *HERE, "train.py", "--lr", "1", "data").returncode == 0
    (first,) = all_runs(tmp_path / "runs")
    (tmp_path / "train.py").write_text(SCRIPT.format("now"))
    words = ("--set", "lr=2", "--job-name", "again", "--setup", "true")
    done = call(tmp_path, "rerun", first.id, *words)
    assert done.returncode == 0, done.stderr
    (run,) = all_named(tmp_path, "again")
    assert (printed(first), printed(run)) == ("then --lr 1 data\n", "now --lr=2 data\n")
    assert "warning: --setup: no effect in a dry run" in done.stderr
    assert "note: 'data', behind the old value of --lr, stays as it is" in done.stderr
    status = status_of(run, Queue({}))
    assert (status.state, status.rerun_of) == ("finished", str(first.path))
    assert explain_run(run).text.endswith(f"It is a rerun of {first.path}.")


@pytest.fixture
def again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PreparedRun]:
    """What makes a new run like another, without starting it."""
    (tmp_path / "train.py").write_text(SCRIPT.format("then"))
    monkeypatch.setenv("HOME", str(tmp_path.with_name("home")))

    def make(run: RunFolder, same_code: bool = False, **changes: str) -> PreparedRun:
        settings = config.load({}, tmp_path, tmp_path)
        root = tmp_path / "runs"
        return restart.plan_rerun(run, changes, {}, settings, tmp_path, root, same_code).write()

    return make


def test_the_addresses_of_a_run_lie_where_they_were_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format("then"))
    (tmp_path / "to.txt").write_text("mail = me@here.org\n")
    (tmp_path / "to.txt").chmod(0o600)
    options, settings = {"notify": "to.txt"}, config.load({}, tmp_path, tmp_path)
    runs = tmp_path / "runs"
    plan = restart.plan_rerun(begun(tmp_path), {}, options, settings, tmp_path, runs, False)
    run = plan.write().run
    assert JobSpec.from_json(run.job_json.read_text()).notify == str(tmp_path / "to.txt")


def begun(folder: Path, **said: Any) -> RunFolder:
    values = {"script": "train.py", **said}
    settings = config.load(values, folder, folder)
    return plan.plan_new(settings, folder, folder / "runs").write().run


def test_of_a_sweep_all_or_one_point(again: Callable[..., PreparedRun], tmp_path: Path) -> None:
    sweep = begun(tmp_path, args=["--steps", "5"], sweep={"lr": ["1", "2"]}, array="0-1%3")
    one = again(make_task(sweep, 1)).spec
    assert (one.args, one.sweep, one.array) == (("--steps", "5", "--lr=2"), {}, None)
    told = json.loads(sweep.job_json.read_text())
    sweep.job_json.write_text(json.dumps(told | {"array": "1%3"}))  # gone on with that alone
    whole = again(sweep, steps="6").spec
    assert (whole.array, whole.args, whole.trials) == ("0-1%3", ("--steps=6",), one_and_two())
    with pytest.raises(UsageError, match="lr is a parameter of the sweep"):
        again(sweep, lr="3")
    array = begun(tmp_path, array="2,5%2")
    assert again(array).spec.array == "2,5%2"
    assert again(make_task(array, 5)).spec.array == "5"  # the script asks for its index


def one_and_two() -> list[dict[str, str]]:
    return [{"lr": "1"}, {"lr": "2"}]


def test_the_code_is_that_of_today_or_that_day(
    again: Callable[..., PreparedRun], tmp_path: Path
) -> None:
    (tmp_path / "deep").mkdir()
    script = tmp_path / "deep" / "train.py"
    script.write_text("then")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    run, live = begun(tmp_path, script=str(script)), begun(tmp_path, snapshot=False)
    script.write_text("now")
    assert again(run).script.read_text() == "now"
    script.unlink()
    same = again(run, same_code=True)
    assert same.script == same.run.code / "0" / "deep" / "train.py"
    assert same.script.read_text() == "then"
    with pytest.raises(UsageError, match="does not exist any more"):
        again(run)
    with pytest.raises(UsageError, match="has no snapshot of"):
        again(live, same_code=True)
    shutil.rmtree(live.lib)
    with pytest.raises(UsageError, match="was started by hand"):
        again(live)


def test_what_is_not_a_value_is_said(tmp_path: Path) -> None:
    done = call(tmp_path, "rerun", "train", "--set", "lr")
    assert done.returncode == 2
    assert "is not of the form NAME=VALUE" in done.stderr
