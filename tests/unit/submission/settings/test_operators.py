"""Operators of a cluster have a mark on its jobs, a site file and limits."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp import __version__
from hpc_ddp.cli.click_options import settings_of
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission.plan import Plan
from hpc_ddp.submission.restart import plan_continuation
from hpc_ddp.submission.settings import operators, sites
from hpc_ddp.submission.settings.config import Settings
from hpc_ddp.submission.settings.operators import comment_pairs
from tests.skips import skip_or_fail

LIMITS = """
[limits]
max-requeues = 50
nodes = 8
time = "1-00:00:00"
budget-gpu-hours = 1000
"""


def test_jobs_name_the_version_in_their_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert comment_pairs(["--network=x", "--commentary"]) == [("comment", f"hpc-ddp/{__version__}")]
    assert comment_pairs(["--comment=mine"]) == []
    monkeypatch.setenv("SBATCH_COMMENT", "mine")  # sbatch takes a script's option over it
    assert comment_pairs([]) == []


def test_the_operators_file_goes_over_a_profile_and_below_the_users(
    site_file: Path, settings: Callable[..., Settings]
) -> None:
    assert settings(site="frontera").get("partition") == "rtx"
    site_file.write_text(
        'title = "Ours"\npartition = "p"\naccount = "a"\n[env]\nA = "1"\nB = "1"\n'
    )
    user = site_file.parents[1] / ".config" / "hpc-ddp" / "frontera.toml"
    user.parent.mkdir(parents=True)
    user.write_text('account = "mine"\n[env]\nA = "2"\n')
    merged = settings(site="frontera")
    assert [merged.get(key) for key in ("step-launcher", "partition", "account")] == [
        "ibrun",
        "p",
        "mine",
    ]
    assert merged.get("env") == {"A": "2", "B": "1"}
    assert settings(partition="q").get("partition") == "q"
    layer = merged.layer("partition")
    assert layer
    assert (layer.kind, layer.path) == ("operators", site_file)
    home = site_file.parents[1]
    assert [path.parent.name for path in sites.find_files("frontera", home, site_file)] == [
        "hpc-ddp",
        "etc",
        "sites",
    ]
    assert site_file in sites.all_files(home)


def test_a_module_names_another_file(
    site_file: Path, settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    site_file.write_text('account = "a"\n')
    second = site_file.with_name("other.toml")
    monkeypatch.setenv(operators.VARIABLE, str(second))
    with pytest.raises(UsageError, match=r"HPC_DDP_SITE_FILE is '.*other.toml', which is no file"):
        settings()
    second.write_text('account = "b"\n')
    assert settings().get("account") == "b"
    monkeypatch.setenv(operators.VARIABLE, "")
    assert settings().get("account") == "a"


@pytest.mark.parametrize("variable", [True, False])
def test_a_file_of_another_user_does_not_speak_for_the_operators(
    site_file: Path,
    settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
    variable: bool,
) -> None:
    if os.geteuid() != 0:
        skip_or_fail("only root can give a file to another user")
    site_file.write_text('account = "a"\n')
    os.chown(site_file, 54321, -1)
    if variable:
        monkeypatch.setenv(operators.VARIABLE, str(site_file))
    with pytest.raises(UsageError, match="it belongs to uid 54321"):
        settings()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 9}, "nodes is 9, and FILE limits it; accepted: up to 8"),
        ({"nodes": "1-9"}, "nodes is 1-9, and FILE limits it"),
        ({"time": "1-00:00:01"}, "time is 1-00:00:01, and FILE limits it; accepted: up to 1-00:00"),
        ({"max_requeues": 51}, "max-requeues is 51, and FILE limits it; accepted: up to 50"),
        ({"budget_gpu_hours": 1000.5}, "budget-gpu-hours is 1000.5, and FILE limits it"),
    ],
)
def test_a_job_beyond_a_limit_is_refused(
    site_file: Path, planned: Callable[..., Plan], options: dict[str, Any], message: str
) -> None:
    site_file.write_text(LIMITS)
    with pytest.raises(UsageError) as caught:
        planned(**options)
    assert message.replace("FILE", str(site_file)) in caught.value.message
    assert caught.value.hint
    assert planned(**options, backend="local").spec.backend == "local"  # asks Slurm for nothing


@pytest.mark.parametrize("time", ["5-0", "0", "UNLIMITED"])
def test_a_limit_of_time_counts_for_a_raw_option_and_a_variable(
    site_file: Path,
    planned: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    time: str,
) -> None:
    site_file.write_text(LIMITS)
    with pytest.raises(UsageError, match=r"time is (5-0|UNLIMITED), and|'0' is zero"):
        planned(**settings_of({"sbatch": (f"--time={time}",)}))
    monkeypatch.setenv("SBATCH_TIMELIMIT", time)
    with pytest.raises(UsageError, match=f"time is {time}, and"):
        planned()
    assert planned(time="60").spec.time == "60"


def test_a_limit_bounds_jobs_that_name_none(site_file: Path, planned: Callable[..., Plan]) -> None:
    site_file.write_text(LIMITS)
    spec = planned(nodes="2-8", time="24:00:00").spec
    assert (spec.max_requeues, spec.budget_gpu_hours) == (None, 1000)
    assert planned().spec.time is None  # the partition's
    site_file.write_text(f"max-requeues = 5\n{LIMITS}")
    assert planned().spec.max_requeues == 5


def test_a_limit_does_not_loosen_how_often_a_script_starts_over(
    site_file: Path, planned: Callable[..., Plan], settings: Callable[..., Settings]
) -> None:
    """Without ``max-requeues`` a script that starts over has ``max-failures`` (`verdict`)."""
    site_file.write_text("[limits]\nmax-requeues = 50\n")
    assert planned(max_requeues=40).spec.max_requeues == 40
    run = RunFolder(site_file.parents[1] / "runs" / "train" / "1").make()
    place: dict[str, Any] = {"run": run, "code": run.code / "0", "is_new": False}
    job = replace(planned(), **place)
    assert job.spec.max_requeues is None
    job.write()
    assert run.most_requeues == RunFolder(run.path / "task-3").most_requeues == 50
    site_file.write_text("[limits]\nnodes = 2\n")
    replace(planned(), **place).write()
    assert run.most_requeues == math.inf


def test_a_run_from_before_the_limits_is_checked(
    site_file: Path, planned: Callable[..., Plan], settings: Callable[..., Settings]
) -> None:
    run = RunFolder(site_file.parents[1] / "runs" / "train" / "1").make()
    run.job_json.write_text(replace(planned().spec).to_json())
    site_file.write_text(LIMITS)
    with pytest.raises(UsageError, match="budget-gpu-hours is unbounded") as caught:
        plan_continuation(run, {}, settings(), Path.cwd())
    assert caught.value.hint == "--budget-gpu-hours 1000"
    bounds = {"max-requeues": 50, "budget-gpu-hours": 10}
    assert plan_continuation(run, bounds, settings(), Path.cwd()).spec.max_requeues == 50
    site_file.write_text("[limits]\nmax-requeues = 2\n")
    assert plan_continuation(run, {}, settings(), Path.cwd()).spec.max_requeues is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("limits = 3", "limits is 3, but must be a table"),
        ("[limits]\nnodes = 0", r"\[limits\]: nodes is 0; accepted: a whole number from 1"),
        ("[limits]\nnodes = [3]", r"\[limits\]: "),
        ("[limits]\ntime = 'soon'", r"\[limits\]: time 'soon' is not a Slurm time"),
        ("[limits]\ntime = 3", r"\[limits\]: "),
        ("[limits]\nmax-requeues = 'x'", r"\[limits\]: max-requeues is 'x'; accepted: a whole"),
        ("[limits]\nbudget-gpu-hours = -1", r"\[limits\]: budget-gpu-hours is -1"),
    ],
)
def test_broken_limits_name_their_file(
    site_file: Path, settings: Callable[..., Settings], text: str, message: str
) -> None:
    site_file.write_text(text)
    with pytest.raises(UsageError, match=f"^{site_file}: {message}") as caught:
        settings()
    assert caught.value.hint == f"tell the operators of this cluster: {site_file}"


def test_unknown_keys_of_the_operators_file_are_warnings(
    site_file: Path, settings: Callable[..., Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    site_file.write_text(
        'acount = "a"\npartition = "p"\n[limits]\nnode = 3\ntime = "1:00:00"\n'
        "[when.account.a]\nnodes = 2\n"
    )
    merged = settings()
    assert merged.get("partition") == "p"
    assert merged.limits
    assert dict(merged.limits.bounds) == {"time": "1:00:00"}
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(
        f"warning: {site_file}: unknown key 'acount', did you mean 'account'"
    )
    assert lines[2] == f"warning: {site_file}: no table [when.account.…]; it is left out"
    assert lines[3].startswith(f"warning: {site_file}: unknown limit 'node', did you mean 'nodes'?")
    assert lines[1] == lines[4] == f"hint: tell the operators of this cluster: {site_file}"


def test_only_the_operators_have_limits(site_file: Path, settings: Callable[..., Settings]) -> None:
    Path("hpc-ddp.toml").write_text(LIMITS)
    with pytest.raises(UsageError, match="unknown key 'limits'"):
        settings()
