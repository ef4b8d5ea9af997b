from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.journal.events import Queued, Started
from hpc_ddp.core.run_folder import RunFolder, all_runs, find_run, link_job


def _run(root: Path, name: str = "n", run_id: str = "20260101-000000-aa") -> RunFolder:
    run = RunFolder(root / name / run_id).make()
    run.job_json.write_text("{}")
    return run


def test_attempts_are_numbered_and_only_one_lives(tmp_path: Path) -> None:
    run = _run(tmp_path)
    first = run.claim_attempt({"job_id": "1"}, lambda info: True)
    assert first.number == 0
    assert first.notice.read_text() == first.failed.read_text() == ""
    with pytest.raises(HpcDdpError, match="attempt 0, job 1"):
        run.claim_attempt({"job_id": "2"}, lambda info: True)
    assert run.claim_attempt({"job_id": "2"}, lambda info: False).number == 1
    assert run.is_newest(1)
    assert not run.is_newest(0)


def test_of_many_that_claim_at_once_one_wins(tmp_path: Path) -> None:
    run, won = _run(tmp_path), []

    def claim(me: int) -> None:
        with contextlib.suppress(HpcDdpError):
            won.append(run.claim_attempt({"me": me}, lambda info: True).number)

    threads = [threading.Thread(target=claim, args=(me,)) for me in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [0]
    assert [path.name for path in run.logs.iterdir()] == ["attempt-0"]


def test_a_run_is_found_by_all_its_names(tmp_path: Path) -> None:
    old, new = _run(tmp_path, run_id="20250101-000000-aa"), _run(tmp_path)
    link_job("77", old)
    for run, job in ((old, "77"), (new, "78")):
        run.journal("submit").write(Queued(job))
    assert find_run(tmp_path, str(old.path)) == old
    assert find_run(tmp_path, old.id) == old
    assert find_run(tmp_path, "n") == new
    assert find_run(tmp_path, "77") == old
    assert all_runs(tmp_path) == [new, old]


def test_the_newest_is_the_one_begun_last_whatever_its_id(tmp_path: Path) -> None:
    names = ["20250101-000000-aa", "local-1", "20250301-000000-aa", "local", "20250501-000000-aa"]
    runs = [_run(tmp_path, run_id=name) for name in names]
    for run, month in ((runs[1], 2), (runs[3], 4)):
        when = time.mktime((2025, month, 1, 0, 0, 0, 0, 0, -1))
        os.utime(run.job_json, (when, when))
    (tmp_path / "n" / "zzz").mkdir()  # no run
    assert all_runs(tmp_path) == runs[::-1]
    assert find_run(tmp_path, "n") == runs[-1]
    other = _run(tmp_path, "a", "local")
    assert find_run(tmp_path, "local") == other
    runs[-1].job_json.unlink()
    assert find_run(tmp_path, "n") == runs[3]


def test_a_task_of_an_array_is_found_by_the_id_that_is_shown(tmp_path: Path) -> None:
    array = _run(tmp_path)
    task = RunFolder(array.path / "task-3").make()
    task.job_json.write_text("{}")
    link_job("12", array)
    link_job("15", task)
    array.journal("submit").write(Queued("12"))
    task.journal("batch").write(Started("n1", job_id="15"))
    assert (task.name, task.id, task.root) == ("n", f"{array.id}/task-3", tmp_path)
    for text in (task.id, "15", "12_3", str(task.path)):
        assert find_run(tmp_path, text) == task
    assert find_run(tmp_path, "12") == array


@pytest.mark.parametrize("text", ["nope", "*", "../..", "", "a/b", "[", "~nobody-here/x", "\0"])
def test_an_unknown_run_is_an_error_with_a_hint(tmp_path: Path, text: str) -> None:
    _run(tmp_path)
    with pytest.raises(UsageError, match="no run") as caught:
        find_run(tmp_path, text)
    assert "hpc-ddp status" in str(caught.value.hint)


def test_run_folders_are_private(tmp_path: Path) -> None:
    assert _run(tmp_path).path.stat().st_mode & 0o777 == 0o700


def test_a_full_disk_keeps_no_drafts_of_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run(tmp_path)

    def fill(path: Path, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(OSError, match="No space left"):
        run.claim_attempt({"pid": 1}, lambda info: False)
    assert list(run.logs.iterdir()) == []


def test_a_number_that_was_taken_meanwhile_is_passed_over(tmp_path: Path) -> None:
    run, asked = _run(tmp_path), list[dict[str, Any]]()
    run.claim_attempt({"pid": 1}, lambda info: False)

    def is_live(info: dict[str, Any]) -> bool:
        asked.append(info)
        if len(asked) == 1:
            run.claim_attempt({"pid": 2}, lambda info: False)
        return False

    assert run.claim_attempt({"pid": 3}, is_live).number == 2
    assert [attempt.info for attempt in run.attempts()] == [{"pid": pid} for pid in (1, 2, 3)]
    assert sorted(path.name for path in run.logs.iterdir()) == [f"attempt-{n}" for n in range(3)]
