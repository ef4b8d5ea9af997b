"""The lines that sbatch reads."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.attempt_env import submit_env
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.slurm_text import parse_options
from hpc_ddp.submission.script.directives import directives, header_pairs, sbatch_line
from hpc_ddp.submission.script.render import Rendering


def test_cpus_of_a_node_are_shared_by_its_tasks() -> None:
    for launcher, tasks, share in (("torchrun", 1, "32"), ("srun", 4, "8")):
        spec = JobSpec("t.py", launcher=launcher, gpus_per_node="4", cpus_per_node=32)
        assert spec.tasks_per_node == tasks
        assert ("cpus-per-task", share) in directives(spec)


def test_cpus_of_a_task_are_passed_to_sbatch() -> None:
    for launcher in ("torchrun", "srun"):
        spec = JobSpec("t.py", launcher=launcher, gpus_per_node="4", cpus_per_task=7)
        assert ("cpus-per-task", "7") in directives(spec)
    with pytest.raises(UsageError, match="two ways to set the same"):
        JobSpec("t.py", cpus_per_node=8, cpus_per_task=8)


@pytest.mark.parametrize(
    ("variable", "raw", "export"),
    [
        (None, (), None),
        ("ALL", (), None),
        ("A,all", (), None),
        ("NONE", (), "KEY,MORE"),
        ("nil", (), "KEY,MORE"),
        ("A,KEY", (), "A,KEY,MORE"),
        ("KEY,MORE", (), None),
        ("NONE", ("--export=ALL",), "ALL"),
        (None, ("--export=NONE",), "KEY,MORE"),
        (None, ("--export=A,B=1",), "A,B=1,KEY,MORE"),
        (None, ("--export=KEY=1,B=1",), "KEY=1,B=1,MORE"),
    ],
)
def test_variables_to_pass_on_reach_a_job_without_the_others(
    variable: str | None,
    raw: tuple[str, ...],
    export: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if variable is not None:
        monkeypatch.setenv("SBATCH_EXPORT", variable)
    spec = JobSpec("t.py", env_names=("KEY", "MORE"), sbatch=raw)
    text = Rendering(spec, RunFolder(tmp_path), tmp_path, tmp_path / "t.py").text()
    exports = [line for line in text.splitlines() if line.startswith("#SBATCH --export")]
    assert exports[-1:] == ([f"#SBATCH --export={export}"] if export else [])


def test_variables_that_place_a_job_stand_in_its_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that each job of a chain has them, also where a job has no variables of its shell."""
    ours = {"PARTITION": "high", "TIMELIMIT": "20", "MEM_PER_NODE": "4G", "COMMENT": "a b"}
    ours |= {"EXCLUSIVE": "", "REQ_SWITCH": "1", "ACCOUNT": ""}
    others = {"GRES": "gpu:1", "QOS": "low", "NODELIST": "n1", "CLUSTERS": "c", "EXPORT": "NONE"}
    for name, text in {**ours, **others}.items():
        monkeypatch.setenv(f"SBATCH_{name}", text)
    spec = JobSpec("t.py", gpus_per_node="1", qos="high", continue_by="resubmit")
    text = Rendering(spec, RunFolder(tmp_path), tmp_path, tmp_path / "t.py").text()
    options = parse_options(text)
    expected = {"partition": "high", "time": "20", "mem": "4G", "comment": "a b"}
    expected |= {"exclusive": "", "switches": "1"}
    assert options.items() >= expected.items()
    assert not options.keys() & {"gres", "nodelist", "clusters", "export", "account"}
    assert options["qos"] == "high"
    submit_env(os.environ, options)
    assert sorted(line.split()[1] for line in capsys.readouterr().err.splitlines()) == [
        "SBATCH_GRES=gpu:1",
        "SBATCH_QOS=low",
    ]


@pytest.mark.parametrize(
    ("values", "pairs"),
    [
        ({}, []),
        ({"gpus_per_node": "a100:4"}, [("gpus-per-node", "a100:4")]),
        ({"gpus_per_node": "4", "gpu_request": "gres"}, [("gres", "gpu:4")]),
        ({"gpus_per_node": "4", "gpu_request": "none"}, []),
        ({"gpus_per_node": "4", "gpu_request": "gpus-per-task"}, [("gpus-per-task", "4")]),
        (
            {"gpus_per_node": "a:4", "gpu_request": "gpus-per-task", "launcher": "srun"},
            [("gpus-per-task", "a:1")],
        ),
        (
            {"gpus_per_node": "2", "gpu_request": "gpus-per-task", "launcher": "srun"}
            | {"nproc_per_node": 4},
            [("gpus-per-task", "1")],
        ),
    ],
)
def test_gpus_are_requested_as_the_site_wants(
    values: dict[str, Any], pairs: list[tuple[str, str]]
) -> None:
    spec = JobSpec("t.py", exclusive=True, sbatch=("--hint=b=c", "--flag"), **values)
    names = ("job-name", "nodes", "cpus-per-task")
    remaining = [pair for pair in directives(spec) if pair[0] not in names]
    assert remaining == [*pairs, ("exclusive", ""), ("hint", "b=c"), ("flag", "")]


def test_a_job_that_starts_once_is_not_requeued_by_slurm_either(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for most, option in ((None, "requeue"), (1, "requeue"), (0, "no-requeue")):
        pairs = header_pairs(JobSpec("t.py", max_requeues=most), run)
        assert [name for name, _ in pairs if name.endswith("requeue")] == [option]


def test_the_output_has_a_link_where_the_user_wants_it(tmp_path: Path) -> None:
    """Nothing of the user's is replaced; Slurm's own file stays in the run."""
    run = RunFolder(tmp_path / "r $X%")
    run.logs.mkdir(parents=True)
    run.slurm_out.write_text("printed")
    names = ("out/%x-%j $Y%%.txt", "%03A_%a.err")
    spec = JobSpec("/t.py", chdir=str(tmp_path), output=names[0], error=names[1])
    rendering = Rendering(spec, run, tmp_path, tmp_path / "t.py")
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "a b", "PATH": os.environ["PATH"]}
    text = rendering.block("settings")

    def play() -> str:
        done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True)
        return done.stderr

    assert play() == play() == ""  # a requeue finds its own link
    for name in ("out/a b-7 $Y%.txt", "007_.err"):
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / name).read_text() == "printed"
    (tmp_path / "007_.err").unlink()
    (tmp_path / "007_.err").write_text("the user's")
    assert "007_.err is there, and is left as it is" in play()
    assert (tmp_path / "007_.err").read_text() == "the user's"
    with pytest.raises(UsageError, match="has %4x; accepted: %j"):
        Rendering(replace(spec, output="%4x"), run, tmp_path, tmp_path / "t.py")


def test_plain_values_are_written_as_typed() -> None:
    assert sbatch_line("nodelist", "n[1-3,5]") == "#SBATCH --nodelist=n[1-3,5]"
    assert sbatch_line("exclusive", "") == "#SBATCH --exclusive"
    assert sbatch_line("comment", 'a "b" \\') == '#SBATCH --comment="a \\"b\\" \\\\"'


@pytest.mark.parametrize(
    ("request_", "more", "expected"),
    [
        ("gpus-per-node", {}, [("gpus-per-node", "a100:4")]),
        ("gres", {}, [("gres", "gpu:a100:4")]),
        ("gpus-per-task", {}, [("gpus-per-task", "a100:4")]),
        ("gpus-per-task", {"launcher": "srun"}, [("gpus-per-task", "a100:1")]),
        ("none", {}, []),
    ],
)
def test_gpu_requests_have_their_forms(
    request_: str, more: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    spec = JobSpec(script="/s.py", gpus_per_node="a100:4", gpu_request=request_, **more)
    assert [pair for pair in directives(spec) if "g" in pair[0]] == expected
    assert spec.workers_per_node == 4
