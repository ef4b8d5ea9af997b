"""A bundle of a run leaves out secrets and other users' files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.file_io import read_tail
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.report import bundle
from hpc_ddp.report.bundle import REDACTED, Redaction
from unit.core.fakes import NESTED


def test_a_bundle_leaves_out_json_that_can_not_be_parsed() -> None:
    redaction = Redaction(JobSpec("train.py"), {})
    assert redaction.redact_file(NESTED, ".json") == REDACTED
    assert redaction.redact_file(f'{{"a": 1}}\n{NESTED}', ".jsonl") == f'{{"a": 1}}\n{REDACTED}'


@pytest.mark.parametrize(
    ("job", "secret"),
    [
        ({"args": ("--password", "argsecret5", "--lr", "1")}, "argsecret5"),
        ({"args": ("--password=argsecret5",)}, "argsecret5"),
        ({"args": ("db.password='arg secret 5'",)}, "arg secret 5"),
        ({"args": ("--db", "postgres://me:argsecret5@host/db")}, "argsecret5"),
        ({"setup": ("login --api-key setupsecret",)}, "setupsecret"),
        ({"srun": ("--export=ALL,MY_TOKEN=srunsecret",)}, "srunsecret"),
    ],
)
def test_a_secret_of_the_job_is_left_out_of_its_logs(job: dict[str, Any], secret: str) -> None:
    """Whatever stands before it there."""
    redaction = Redaction(JobSpec("train.py", **job), {"A_TOKEN": f"{secret}-and-more"})
    text = f"joined as {secret}, and as {secret}-and-more"
    assert redaction.redact_file(text, ".log") == f"joined as {REDACTED}, and as {REDACTED}"


def test_options_and_short_values_are_no_secrets_of_a_log() -> None:
    args = ("--use-token", "--learning-rate", "0.1", "--key", "1", "--tokenizer", "gpt2-medium")
    redaction = Redaction(JobSpec("train.py", args=args), {})
    text = "--learning-rate 0.1 of gpt2-medium, 1 rank"
    assert redaction.redact_file(text, ".log") == text


def test_links_of_another_user_reach_no_bundle(
    tmp_path: Path, secret: Path, run: RunFolder, links_are_anothers: None
) -> None:
    log = run.attempt(0).node("n1").rank_log(0)
    log.parent.mkdir(parents=True)
    log.symlink_to(secret / "key")
    (run.path / "task-0").symlink_to(secret)
    (run.logs / "slurm.out").symlink_to(secret / "key")
    assert read_tail(log, 100) == ""
    _, omissions = bundle.write_bundle(run, tmp_path / "bundle.tar.gz")
    assert [line for line in omissions if "slurm.out" in line]
    run.journal_folder.joinpath("keys.jsonl").symlink_to(secret / "keys.jsonl")
    with pytest.raises(OSError, match="a link of another user"):
        run.events()


def test_the_environment_of_the_batch_script_is_left_out(run: RunFolder, tmp_path: Path) -> None:
    (run.logs / ".environ-7").write_text("INTERNAL=a-word\0")
    (run.logs / "slurm.out").write_text("out")
    packed, omissions = bundle.write_bundle(run, tmp_path / "bundle.tar.gz")
    assert [line for line in omissions if ".environ-7" in line]
    assert not [line for line in packed if ".environ" in line]


@pytest.mark.parametrize("text", ["-" * 10**5, "--" + "token" * 20_000, "key" + " " * 10**5])
def test_a_long_line_is_redacted_in_linear_time(text: str) -> None:
    """With a look from each dash over all others, 10,000 took 28 s."""
    redaction = Redaction(JobSpec("t.py"), {})
    began = time.process_time()
    redaction.redact_file(text, ".log")
    assert time.process_time() - began < 10
