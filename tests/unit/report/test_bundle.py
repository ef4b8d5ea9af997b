"""A bundle of a run leaves out secrets and other users' files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ddp.core.file_io import read_tail
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.report import bundle
from hpc_ddp.report.bundle import REDACTED, Redaction
from unit.core.fakes import NESTED


def test_a_bundle_leaves_out_json_that_can_not_be_parsed() -> None:
    redaction = Redaction(JobSpec("train.py"), {})
    assert redaction.clean(NESTED, ".json") == REDACTED
    assert redaction.clean(f'{{"a": 1}}\n{NESTED}', ".jsonl") == f'{{"a": 1}}\n{REDACTED}'


def test_links_of_another_user_reach_no_bundle(
    tmp_path: Path, secret: Path, run: RunFolder, links_are_anothers: None
) -> None:
    log = run.attempt(0).node("n1").rank_log(0)
    log.parent.mkdir(parents=True)
    log.symlink_to(secret / "key")
    (run.path / "task-0").symlink_to(secret)
    (run.logs / "slurm.out").symlink_to(secret / "key")
    assert read_tail(log, 100) == ""
    _, omissions = bundle.write(run, tmp_path / "bundle.tar.gz")
    assert [line for line in omissions if "slurm.out" in line]
    run.journal_folder.joinpath("keys.jsonl").symlink_to(secret / "keys.jsonl")
    with pytest.raises(OSError, match="a link of another user"):
        run.events()
