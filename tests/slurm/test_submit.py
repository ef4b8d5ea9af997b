"""A job that nothing happens to, by each way of starting it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cluster import Cluster
from harness import (
    DIGITS,
    DIGITS_ARGS,
    ONE_BY_TWO,
    SCRIPTS,
    TWO_BY_ONE,
    TWO_BY_TWO,
    Hpc,
    Job,
    same_weights,
)

from hpc_ddp.core.run_folder import RunFolder


def _ran_on_two_nodes(job: Job) -> bool:
    first = job.events("first_step")[0]
    return first["world_size"] == 4 and len(set(first["hosts"])) == 2


def test_slurm(undisturbed: Job) -> None:
    assert _ran_on_two_nodes(undisturbed)
    assert undisturbed.verdicts() == [("finished", "none")]
    assert "test accuracy" in undisturbed.output()
    assert "Traceback" not in undisturbed.output()


def test_submitit(hpc: Hpc, undisturbed: Job) -> None:
    job = hpc.submit("--backend", "submitit", *TWO_BY_TWO, str(DIGITS), *DIGITS_ARGS)
    assert job.end() == "COMPLETED", job.output()
    assert _ran_on_two_nodes(job)
    assert same_weights(job, undisturbed)
    assert "test accuracy" in job.output()


@pytest.mark.more
def test_a_rendered_script_by_hand(
    hpc: Hpc, cluster: Cluster, undisturbed: Job, tmp_path: Path
) -> None:
    """From a shell in another job, a task of an array that was started again: sbatch passes on what
    Slurm has told that one. A signal to all processes, as to a script with a handler, is no end."""
    done = hpc("render", "--json", *TWO_BY_TWO, str(DIGITS), *DIGITS_ARGS)
    run = RunFolder(Path(json.loads(done.stdout)["run"]))
    around = ("SLURM_RESTART_COUNT=2", "SLURM_ARRAY_JOB_ID=1", "SLURM_ARRAY_TASK_ID=3")
    argv = ("env", *around, "HPC_DDP_INTERACTIVE=1", "sbatch", "--parsable", str(run.script))
    job = Job(cluster, cluster.run(*argv, cwd=tmp_path).stdout.strip(), run)
    job.at_step(20)
    cluster.run("scancel", "--full", "--signal=USR1", job.id)
    job.event("first_step", attempt=1)
    job.preempt()
    assert job.end() == "COMPLETED", job.output()
    assert len(run.attempts()) == 3
    assert _ran_on_two_nodes(job)
    assert same_weights(job, undisturbed)


def test_inside_an_allocation(hpc: Hpc, cluster: Cluster, tmp_path: Path) -> None:
    """In a shell on its first node, as salloc starts one at many sites: such a step has a CPU, and
    variables for its own task."""
    shown = cluster.run(
        "salloc",
        "--nodes=2",
        "--gpus-per-node=2",
        *("srun", "--nodes=1", "--ntasks=1", "--overlap"),
        *("env", "SLURM_CPU_BIND=quiet,map_cpu:99"),
        f"HPC_DDP_RUNS={tmp_path}",
        f"PYTHONPATH={DIGITS.parents[1]}",
        sys.executable,
        "-m",
        "hpc_ddp",
        "submit",
        "--backend",
        "salloc",
        *TWO_BY_ONE,
        str(SCRIPTS / "plain.py"),
    )
    assert "done" in shown.stdout
    assert "attempt 0: finished" in shown.stderr


def test_every_word_arrives_in_the_worker(hpc: Hpc, tmp_path: Path) -> None:
    folder = tmp_path / "my $(touch x) 'co;de' é"
    folder.mkdir()
    script = folder / 'tr"ain $HOME.py'
    script.write_bytes((SCRIPTS / "words.py").read_bytes())
    words = [
        "a b",
        "'",
        '"',
        ";",
        "$(touch x)",
        "$$",
        "${local_rank}",
        "one\ntwo",
        "é",
        "--",
        "-x",
        "",
    ]
    job = hpc.submit(*ONE_BY_TWO, str(script), *words)
    assert job.end() == "COMPLETED", job.output()
    (line,) = (line for line in job.output().splitlines() if line.startswith('{"argv"'))
    seen = json.loads(line)["argv"]
    assert seen[1:] == words
    assert Path(seen[0]).name == script.name
    assert not list(tmp_path.rglob("x"))
    assert not Path("x").exists()


def test_a_taken_port_is_no_failure(hpc: Hpc, cluster: Cluster, tmp_path: Path) -> None:
    """The port is taken after it was looked up: the set-up line stands in for the other job."""
    template = tmp_path / "own.j2"
    template.write_text(
        "{% extends 'job.sbatch.j2' %}\n{% block attempt %}{{ super() }}\n"
        "python3 -c 'import socket, sys, time; s = socket.socket();"
        ' s.bind(("", int(sys.argv[1]))); s.listen(); time.sleep(600)\' "$HPC_DDP_PORT" &\n'
        'until (exec 3<>"/dev/tcp/127.0.0.1/$HPC_DDP_PORT") 2>&-; do sleep 0.1; done\n'
        "{% endblock %}"
    )
    job = hpc.submit("--nodes", "1", "--template", str(template), str(SCRIPTS / "plain.py"))
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("finished", "none")]


def test_what_a_profile_or_an_outer_job_left_does_not_matter(
    hpc: Hpc, cluster: Cluster, tmp_path: Path
) -> None:
    """And a site's own sbatch, which prints a banner where the job id is read."""
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text('#!/bin/sh\necho " Welcome to 9 nodes"\nPATH=${PATH#*:} exec sbatch "$@"\n')
    sbatch.chmod(0o755)
    env = {
        "PATH": f"{sbatch.parent}:{cluster.env()['PATH']}",
        "SLURM_CPU_BIND": "map_cpu:99",
        "SBATCH_PARTITION": "gone",
        "SRUN_CPUS_PER_TASK": "77",
        "SLURM_NTASKS": "9",
        "SBATCH_EXPORT": "NONE",
        "SBATCH_DELAY_BOOT": "1:10",
    }
    words = ("--partition", "low", *ONE_BY_TWO, str(SCRIPTS / "words.py"))
    done = hpc("submit", "--json", *words, env=env)
    assert "SBATCH_PARTITION=gone is not used: the job has --partition" in done.stderr
    told = json.loads(done.stdout)
    job = Job(cluster, told["job_id"], RunFolder(Path(told["run"])))
    assert job.end() == "COMPLETED", job.output()
    shown = cluster.run("scontrol", "show", "job", job.id).stdout
    assert "Partition=low " in shown
    assert "DelayBoot=00:01:10" in shown


def test_a_sweep_has_a_run_for_each_point(hpc: Hpc, cluster: Cluster, tmp_path: Path) -> None:
    """Both on one node, at the same time; in a folder of any name."""
    hpc.runs = tmp_path / 'it\'s "b" per%j cent $(touch x);é'
    node = cluster.nodes[0]
    words = ("--nodes", "1", "--nproc-per-node", "1", "--nodelist", node, "--job-name", "a b")
    job = hpc.submit(*words, str(SCRIPTS / "words.py"), "a word", sets=("name=x,y z",))
    job.until(lambda: "2 of 2 tasks" in hpc("status", job.id).stdout, "end of both tasks")
    printed = job.output()
    assert printed.count('"a word"') == 2
    assert '"--name=x"]' in printed
    assert '"--name=y z"]' in printed
    assert "2 tasks: 2 finished" in hpc("status", job.id).stdout
    assert job.nodes() == node
    assert not Path("x").exists()


def test_a_refused_submit_leaves_nothing_behind(hpc: Hpc) -> None:
    done = hpc("submit", "--partition", "nope", str(DIGITS), check=False)
    assert done.returncode == 1
    assert "invalid partition specified: nope" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(hpc.runs.glob("digits/*"))


@pytest.mark.more
def test_from_the_wheel_with_a_torch_from_elsewhere(
    cluster: Cluster, wheel_env: Path, torch_env: Path, tmp_path: Path
) -> None:
    """hpc-ddp without torch on the login node, torch without hpc-ddp on the nodes."""
    python = str(torch_env / "bin" / "python")
    words = ("--json", "--python", python, *TWO_BY_ONE, str(DIGITS), "--epochs", "1")
    env = cluster.env() | {"HPC_DDP_RUNS": str(tmp_path / "runs")}
    env.pop("PYTHONPATH", None)
    done = cluster.run(str(wheel_env / "bin" / "hpc-ddp"), "submit", *words, env=env, cwd=tmp_path)
    told = json.loads(done.stdout)
    job = Job(cluster, told["job_id"], RunFolder(Path(told["run"])))
    assert job.end() == "COMPLETED", job.output()
    assert "test accuracy" in job.output()
    cluster.reset()
