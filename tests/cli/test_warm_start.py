"""A worker that is forked sees what one that is started by exec sees."""

from __future__ import annotations

import gzip
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_dry_run import SCRIPTS, DryRun

OF_A_RUN = (
    "HPC_DDP_WARM_START",
    *("HPC_DDP_AGENT_PID", "HPC_DDP_LOCAL_NOTICE", "HPC_DDP_PARENT", "HPC_DDP_PORT"),
    "HPC_DDP_WORKER",
    "HPC_DDP_STORE_PREFIX",
    *("MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "COMET_EXPERIMENT_KEY"),
)


def _surroundings(tmp_path: Path, *words: str) -> tuple[DryRun, list[dict[str, Any]]]:
    """Run the script on two ranks; return the dry run, and what each rank has seen."""
    out = tmp_path / "out"
    out.mkdir(parents=True)
    options = ("--nproc-per-node", "2", "--max-failures", "0", *words)
    job = DryRun(
        tmp_path / "runs", *options, str(SCRIPTS / "surroundings.py"), "--x", "$HOME", OUT=str(out)
    )
    assert job.end() == 1, job.printed()
    run, text = job.run, ""
    seen = []
    for rank in range(2):
        text = (out / f"{rank}.json").read_text()
        for word, name in ((str(run.path), "RUN"), (run.id, "ID"), (str(tmp_path), "TMP")):
            text = text.replace(word, name)
        seen.append(json.loads(text))
    return job, seen


def _environment(facts: dict[str, Any]) -> dict[str, Any]:
    """Take what differs between any two runs from the facts."""
    env = [pair for pair in facts["environment"] if pair[0] not in OF_A_RUN]
    pairs = [text for text in facts["seen environment"] if text.partition("=")[0] not in OF_A_RUN]
    return {**facts, "environment": env, "seen environment": pairs}


@pytest.fixture
def ignored_signals() -> Iterator[None]:
    """Ignore some signals in this process and those that it starts, as nohup and a shell do."""
    handlers = {
        number: signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2)
    }
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("ignored_signals")
def test_a_forked_worker_sees_what_a_started_one_sees(tmp_path: Path) -> None:
    forked, by_fork = _surroundings(tmp_path / "fork")
    started, by_exec = _surroundings(tmp_path / "exec", "--no-warm-start")
    (agent_log,) = forked.run.logs.glob("attempt-0/*/agent.log")
    assert "by exec" not in agent_log.read_text()
    for records in zip(by_fork, by_exec, strict=True):
        facts, others = (_environment(record["facts"]) for record in records)
        differences = [
            (name, facts[name], others[name]) for name in facts if facts[name] != others[name]
        ]
        assert not differences, differences
    for name in ("fork", "exec"):
        record = tmp_path / name / "out/0.json.gz"
        assert gzip.decompress(record.read_bytes()) == b"complete"
    numbers = [number for facts in (*by_fork, *by_exec) for number in facts["random"]]
    assert len(set(numbers)) == len(numbers)
    logs = []
    for job in (forked, started):
        (log,) = job.run.logs.glob("attempt-0/*/rank-0.log")
        logs.append(log.read_text().replace(str(job.run.path), "RUN"))
    assert logs[0] == logs[1]
    assert "a child has __mp_main__ surroundings.py" in logs[0]
    assert logs[0].endswith("ValueError: the end\n")


def test_a_script_that_imports_torch_late_has_none_before(tmp_path: Path) -> None:
    """An import before it, or a variable, may matter to torch."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\ndef main():\n    print('torch' in sys.modules)\n    import torch\nmain()\n"
    )
    job = DryRun(tmp_path / "runs", "--nproc-per-node", "1", "--max-failures", "0", str(script))
    assert job.end() == 0, job.printed()
    (log,) = job.run.logs.glob("attempt-0/*/rank-0.log")
    assert log.read_text() == "False\n"
    text = (log.parent / "agent.log").read_text()
    assert "by exec: train.py, line 5, comes before the import of torch" in text


def test_a_script_that_changes_a_variable_unseen_starts_again_by_exec(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "print('torch' in sys.modules, os.environ.get('HF_HOME'))\n"
        "saved = os.dup(1)\n"
        "os.dup2(os.open(os.devnull, os.O_WRONLY), 1)\n"
        "env = os.environ\n"
        "env.update(HF_HOME='1', OMP_NUM_THREADS='2')\n"
        "from torch.nn import Linear\n"
        "import torch\n"
        "os.dup2(saved, 1)\n"
        "print(torch.get_num_threads(), sys.argv[1:], os.environ['HF_HOME'])\n"
    )
    job = DryRun(
        tmp_path / "runs", "--nproc-per-node", "1", "--max-failures", "0", str(script), "--a"
    )
    assert job.end() == 0, job.printed()
    (log,) = job.run.logs.glob("attempt-0/*/rank-0.log")
    assert log.read_text().splitlines() == [
        "False None",
        "hpc-ddp: OMP_NUM_THREADS has changed before the import of torch: the script starts again,"
        " by exec",
        "False None",
        "2 ['--a'] 1",
    ]
