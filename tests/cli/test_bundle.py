"""`hpc-ddp bundle`: what a support ticket needs of a run, and nothing that is secret."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.report import bundle
from hpc_ddp.report.bundle import REDACTED, Redaction
from tests.command_line import call_here
from tests.raw_events import raw

REPO = Path(__file__).parents[2]
Cli = Callable[..., subprocess.CompletedProcess[str]]
WORDS = (
    *("render", "--env", "A=env value\nof two lines", "--env", "B=it's", "--env", "MY_PASS_IT"),
    *("--setup", "export DATA_URL=setup-value", "train.py", "--api-key", "argument-secret"),
)


@pytest.fixture
def call(tmp_path: Path) -> Cli:
    (tmp_path / "train.py").write_text("password = 'in the code'\n")
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text('#!/bin/sh\necho "$@"; echo "SLURM_VERSION = 99.1"\n')
    scontrol.chmod(0o755)

    def hpc_ddp(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{scontrol.parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
        return call_here(
            tmp_path, env | {"HPC_DDP_RUNS": str(tmp_path / "runs"), **environ}, *words
        )

    return hpc_ddp


@pytest.fixture
def run(call: Cli) -> RunFolder:
    """A run with a log, a checkpoint, and secrets wherever a user may have put them."""
    done = call(*WORDS, MY_PASS_IT="secret-of-the-shell")
    run = RunFolder(Path(done.stderr.partition("run: ")[2].splitlines()[0]))
    node = run.attempt(0).node("n1").path
    node.mkdir(parents=True)
    node.joinpath("rank-0.log").write_text(
        "epoch 0\nHF_TOKEN=log-secret-1\nwandb: api_key: 'log-secret-2'\nsecret-of-the-shell\n"
        '{"access_token": "log-secret-3"}\nhttps://me:log-secret-4@host/path\n'
    )
    node.joinpath("flight-rank-0").write_bytes(b"\x80pickle")
    node.joinpath("linked").symlink_to("/etc/hostname")
    run.attempt(0).secret.write_bytes(b"attempt-secret")
    run.journal("submit").write(raw("queued", job_id="7"))
    run.journal("n1").write(raw("fabric", name="x", env={"NCCL_NET": "journal-value"}))
    (run.checkpoints / "step-1").mkdir()
    (run.checkpoints / "step-1" / "weights").write_text("weights")
    return run


def contents(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        files = {entry.name: archive.extractfile(entry) for entry in archive}
        return {name.partition("/")[2]: f.read().decode() for name, f in files.items() if f}


def test_a_bundle_has_what_a_ticket_needs(call: Cli, run: RunFolder, tmp_path: Path) -> None:
    done = call("bundle", run.id, MY_PASS_IT="secret-of-the-shell")
    assert done.returncode == 0, done.stderr
    archive = tmp_path / f"hpc-ddp-{run.id}.tar.gz"
    assert done.stdout == f"{archive}\n"
    assert archive.stat().st_mode & 0o777 == 0o600
    files = contents(archive)
    assert files.keys() == {
        *("versions.txt", "scontrol-7.txt", "job.json", "job.sbatch"),
        *("journal/n1.jsonl", "journal/submit.jsonl", "logs/attempt-0/n1/rank-0.log"),
    }
    assert files["scontrol-7.txt"].startswith("show job 7\n")
    assert "Slurm: 99.1" in files["versions.txt"]
    assert "hpc-ddp in the run: 0.1.0" in files["versions.txt"]
    assert files["logs/attempt-0/n1/rank-0.log"].startswith("epoch 0\n")
    for line in ("  journal/n1.jsonl", "  checkpoints (by rule)", "  code (by rule)"):
        assert f"{line}\n" in done.stderr
    assert "  logs/attempt-0/n1/flight-rank-0 (no text)\n" in done.stderr
    assert "  logs/attempt-0/n1/linked (no text)\n" in done.stderr
    assert "  logs/attempt-0/secret (no text)\n" in done.stderr


def test_a_place_that_can_not_be_written_is_named(call: Cli, run: RunFolder) -> None:
    done = call("bundle", run.id, "-o", "/nosuch/x.tar.gz")
    assert done.returncode == 1
    assert "can't write /nosuch/x.tar.gz: No such file or directory" in done.stderr
    assert "hint: -o FILE writes it elsewhere" in done.stderr


def test_a_bundle_has_no_secret(call: Cli, run: RunFolder, tmp_path: Path) -> None:
    assert call("bundle", run.id, MY_PASS_IT="secret-of-the-shell").returncode == 0
    files = contents(tmp_path / f"hpc-ddp-{run.id}.tar.gz")
    text = "\n".join(files.values())
    for secret in ("log-secret", "argument-secret", "secret-of-the-shell", "in the code", "pickle"):
        assert secret not in text
    for value in ("env value", "of two lines", "it's", "'it'", "setup-value", "journal-value"):
        assert value not in text
    assert json.loads(files["job.json"])["env"] == {"A": REDACTED, "B": REDACTED}
    assert f"export A={REDACTED}\n" in files["job.sbatch"]
    assert f"export DATA_URL={REDACTED}\n" in files["job.sbatch"]
    assert '"NCCL_NET": "[redacted]"' in files["journal/n1.jsonl"]
    assert "export HPC_DDP_RUN=/" in files["job.sbatch"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("TOKEN=x", f"TOKEN={REDACTED}"),
        ("my_api_key = 'a b', next", f"my_api_key = {REDACTED}, next"),
        ("Authorization-Token: Bearer abc", f"Authorization-Token: {REDACTED}"),
        ("train.py --api-key x --lr 1", f"train.py --api-key {REDACTED} --lr 1"),
        ("train.py --use-token --lr 1", "train.py --use-token --lr 1"),
        ("tokens=5 tokenizer=gpt monkey=1", "tokens=5 tokenizer=gpt monkey=1"),
        ("export A=1 B='a\nb' C=2", f"export A={REDACTED} B={REDACTED} C=2"),
    ],
)
def test_what_is_replaced(text: str, kept: str) -> None:
    redaction = Redaction(JobSpec("train.py", env={"A": "1"}, env_names=("B",)), {})
    assert redaction.redact_file(text, ".sbatch") == kept


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("Authorization: Bearer sk-1 x", f"Authorization: {REDACTED}"),
        ("curl -H 'Cookie: a=1; b=2' url", f"curl -H 'Cookie: {REDACTED}' url"),
        ('"Authorization": "Basic eA==", 1', f'"Authorization": {REDACTED}, 1'),
        (r"{\"token\": \"sk 1\"}", rf"{{\"token\": {REDACTED}}}"),
        ("passphrase=x set-cookie=y", f"passphrase={REDACTED} set-cookie={REDACTED}"),
        ("LOGIN=x B=y", f"LOGIN={REDACTED} B={REDACTED}"),
        ("{'B': 'y z', 'C': 1}", f"{{'B': {REDACTED}, 'C': 1}}"),
        ("B=it's\nthe next line's", f"B={REDACTED}'s\nthe next line's"),
        ("B: y", "B: y"),
    ],
)
def test_what_is_replaced_in_a_log(text: str, kept: str) -> None:
    redaction = Redaction(JobSpec("train.py", env={"B": "1"}, setup=("LOGIN=x ./go",)), {})
    assert redaction.redact_file(text, ".log") == kept


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("export FOO='a b' BAR=hunter5", f"export FOO={REDACTED} BAR={REDACTED}"),
        ("LOGIN=x ./go --mode=fast", f"LOGIN={REDACTED} ./go --mode=fast"),
        ("declare -x DBPW=x; go", f"declare -x DBPW={REDACTED}; go"),
        ("DBPW+=x", f"DBPW+={REDACTED}"),
        (r"DBPW=a\ b; go", f"DBPW={REDACTED}; go"),
        ("DBPW=(a b) go", f"DBPW={REDACTED} go"),
    ],
)
def test_what_is_replaced_of_a_set_up_line(line: str, kept: str) -> None:
    redaction = Redaction(JobSpec("train.py", setup=(line,)), {})
    assert redaction.redact_file(line, ".sbatch") == kept


def test_a_torn_line_of_a_journal_is_replaced() -> None:
    redaction = Redaction(JobSpec("train.py"), {})
    text = '{"event": "a", "n": 1}\n{"env": {"A": "sec'
    assert redaction.redact_file(text, ".jsonl") == f'{{"event": "a", "n": 1}}\n{REDACTED}'


def test_a_long_log_keeps_its_end(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "LOG_BYTES", 40)
    log = run.attempt(0).node("n1").rank_log(0)
    log.write_text("TOKEN=" + 30 * "s" + "\n" + "last lines of the log\n")
    packed, _ = bundle.write_bundle(run, tmp_path / "a.tar.gz")
    # A line that is cut has lost the name by which it is a secret.
    assert (
        contents(tmp_path / "a.tar.gz")["logs/attempt-0/n1/rank-0.log"] == "last lines of the log\n"
    )
    assert any(name.startswith("logs/attempt-0/n1/rank-0.log (its last") for name in packed)
    monkeypatch.setattr(bundle, "TOTAL_BYTES", 10)
    packed, left_out = bundle.write_bundle(run, tmp_path / "b.tar.gz")
    assert packed == []
    assert any(name.startswith("job.json (beyond") for name in left_out)


def test_a_bundle_of_an_array_and_of_a_task(run: RunFolder, tmp_path: Path) -> None:
    for index in (0, 1):
        task = run.task(index).make()
        task.job_json.write_text(run.job_json.read_text())
        task.journal("batch").write(raw("started", nodes=["n1"]))
    packed, left_out = bundle.write_bundle(run, tmp_path / "a.tar.gz")
    assert {"task-0/job.json", "task-1/journal/batch.jsonl"} <= {*packed}
    omissions = {"checkpoints (by rule)", *(f"task-{i}/checkpoints (by rule)" for i in (0, 1))}
    assert omissions <= {*left_out}
    packed, left_out = bundle.write_bundle(run.task(1), tmp_path / "b.tar.gz")
    assert {"job.sbatch", "task-1/journal/batch.jsonl"} <= {*packed}
    assert "task-0/job.json" not in packed
    assert [name for name in left_out if "task" in name] == ["task-1/checkpoints (by rule)"]


def test_an_archive_is_not_written_over(call: Cli, run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_text("mine")
    done = call("bundle", run.id, "-o", "a.tar.gz")
    assert done.returncode == 2
    assert "error: a.tar.gz exists; accepted: a new file\nhint: -o OTHER.tar.gz" in done.stderr
    assert (tmp_path / "a.tar.gz").read_text() == "mine"


def test_without_slurm_and_with_a_broken_job(call: Cli, run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    done = call("bundle", run.id)
    assert done.returncode == 0, done.stderr
    assert "  scontrol show job 7 (scontrol refused" in done.stderr
    run.job_json.write_text('{"setup": 5}')
    done = call("bundle", run.id, "-o", "b.tar.gz")
    assert done.returncode == 2
    assert "job.json is broken" in done.stderr
