"""Files that another user or a torn write may leave: no reader ends in a traceback."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hpc_ddp.core.console.units import duration
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_io import read_json, read_seconds, read_word
from hpc_ddp.core.job.spec import JobSpec
from hpc_ddp.core.run_folder import AttemptFolder
from hpc_ddp.report.bundle import REDACTED, Redaction

NESTED = "[" * 100_000
BROKEN = {"nested": NESTED.encode(), "no UTF-8": b"\xff\xfe", "torn": b'{"a": ', "no object": b"7"}


@pytest.mark.parametrize("content", BROKEN.values(), ids=list(BROKEN))
def test_a_broken_json_file_reads_as_empty(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "job.json"
    path.write_bytes(content)
    assert read_json(path) == {}


@pytest.mark.parametrize("text", [NESTED, '{"a": ', "7", "[]"])
def test_a_broken_job_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"the run's job\.json is broken"):
        JobSpec.from_json(text)


def test_a_bundle_leaves_out_json_that_can_not_be_parsed() -> None:
    redaction = Redaction(JobSpec("train.py"), {})
    assert redaction.clean(NESTED, ".json") == REDACTED
    assert redaction.clean(f'{{"a": 1}}\n{NESTED}', ".jsonl") == f'{{"a": 1}}\n{REDACTED}'


@pytest.mark.parametrize("content", BROKEN.values(), ids=list(BROKEN))
def test_a_damaged_notice_still_reads(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notice"
    path.write_bytes(content)
    assert read_word(path)
    assert read_seconds(path) in (7.0, None)


def test_a_folder_that_is_away_names_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_error(path: Path, pattern: str) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "glob", raise_error)
    assert AttemptFolder(tmp_path).node("n1").pids() == []


def test_a_time_that_is_no_number_is_printed() -> None:
    assert (duration(math.inf), duration(math.nan)) == ("inf d", "nan d")
