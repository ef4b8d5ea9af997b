"""A worker that is forked sees what one that is started by exec sees."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_dry_run import REPO, SCRIPTS, DryRun

from hpc_ddp.core.journal.recorded_imports import recorded_imports

OF_A_RUN = (
    *("HPC_DDP_AGENT_PID", "HPC_DDP_PARENT", "HPC_DDP_PORT", "HPC_DDP_WARM_START"),
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
    numbers = [number for facts in (*by_fork, *by_exec) for number in facts["random"]]
    assert len(set(numbers)) == len(numbers)
    logs = []
    for job in (forked, started):
        (log,) = job.run.logs.glob("attempt-0/*/rank-0.log")
        logs.append(log.read_text().replace(str(job.run.path), "RUN"))
    assert logs[0] == logs[1]
    assert "a child has __mp_main__ surroundings.py" in logs[0]
    assert logs[0].endswith("ValueError: the end\n")


def test_a_later_attempt_imports_ahead_what_the_first_one_imported(tmp_path: Path) -> None:
    job = DryRun(tmp_path / "runs", str(SCRIPTS / "lazy.py"), "sortedcontainers")
    assert job.end() == 0, job.printed()
    logs = [log.read_text() for log in sorted(job.run.logs.glob("attempt-*/*/rank-0.log"))]
    assert [log.partition("\n")[0] for log in logs] == [
        "imported ahead: False",
        "imported ahead: True",
    ]


def test_a_recorded_import_that_no_fork_survives_is_left_out(tmp_path: Path) -> None:
    """A package that starts a thread, and is installed for this test alone."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    thread = (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    (packages / "starts_a_thread.py").write_text(thread)
    words = (str(SCRIPTS / "lazy.py"), "starts_a_thread")
    job = DryRun(tmp_path / "runs", *words, PYTHONPATH=f"{packages}:{REPO}")
    assert job.end() == 0, job.printed()
    logs = [log.read_text() for log in sorted(job.run.logs.glob("attempt-*/*/rank-0.log"))]
    assert [log.partition("\n")[0] for log in logs] == ["imported ahead: False"] * 2
    assert recorded_imports(job.run.journal_folder) == []
    text = (job.run.attempt(1).path / "local-0" / "agent.log").read_text()
    assert "an import has started 1 threads" in text
    assert "by exec" not in text
