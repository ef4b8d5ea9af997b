"""Paths of a run, its attempts, records and hours."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.file_io import make_folders, write_json
from hpc_ddp.core.job.attempt_folder import AttemptFolder, NodeFolder
from hpc_ddp.core.journal.events import JournalEvent
from hpc_ddp.core.run_folder import RunFolder
from tests.raw_events import typed
from unit.core.fakes import make_run
from unit.fakes import set_acl


def test_below_a_default_acl_others_write_nothing_of_an_attempt(tmp_path: Path) -> None:
    """A link there, or a file of another name, would be followed and believed."""
    run = make_run(tmp_path)
    set_acl(run.logs, "default")
    umask = os.umask(0o022)
    try:
        node = run.claim_attempt({}, lambda identity: True).node("n1")
        make_folders(node.path)
        node.failures.write_text("")
        os.close(os.open(node.rank_log(0), os.O_WRONLY | os.O_CREAT, 0o666))
    finally:
        os.umask(umask)
    made = [node.path.parent, *node.path.parent.rglob("*")]
    assert len(made) > 4
    assert [path for path in made if path.stat().st_mode & 0o022] == []
    acls = [path for path in made if any("acl" in name for name in os.listxattr(path))]
    assert acls in ([], [node.path.parent])  # of the folder itself, whose mask is empty
    assert node.path.parent.stat().st_mode & 0o077 == 0


def test_attempts_are_numbered_and_only_one_lives(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    first = run.claim_attempt({"job_id": "1"}, lambda identity: True)
    assert first.number == 0
    assert first.notice.read_text() == first.failed.read_text() == ""
    with pytest.raises(HpcDdpError, match="attempt 0, job 1"):
        run.claim_attempt({"job_id": "2"}, lambda identity: True)
    assert run.claim_attempt({"job_id": "2"}, lambda identity: False).number == 1
    assert run.is_newest(1)
    assert not run.is_newest(0)


def test_one_of_many_concurrent_claims_wins(tmp_path: Path) -> None:
    run, won = make_run(tmp_path), []

    def claim(me: int) -> None:
        with contextlib.suppress(HpcDdpError):
            won.append(run.claim_attempt({"me": me}, lambda identity: True).number)

    threads = [threading.Thread(target=claim, args=(me,)) for me in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [0]
    assert [path.name for path in run.logs.iterdir()] == ["attempt-0"]


def test_run_folders_are_private(tmp_path: Path) -> None:
    assert make_run(tmp_path).path.stat().st_mode & 0o777 == 0o700


def test_a_full_disk_keeps_no_drafts_of_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)

    def fill(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    with pytest.raises(OSError, match="No space left"):
        run.claim_attempt({"pid": 1}, lambda identity: False)
    assert list(run.logs.iterdir()) == []


def test_a_number_that_was_claimed_meanwhile_is_skipped(tmp_path: Path) -> None:
    run, identities = make_run(tmp_path), list[dict[str, Any]]()
    run.claim_attempt({"pid": 1}, lambda identity: False)

    def is_live(identity: dict[str, Any]) -> bool:
        identities.append(identity)
        if len(identities) == 1:
            run.claim_attempt({"pid": 2}, lambda identity: False)
        return False

    assert run.claim_attempt({"pid": 3}, is_live).number == 2
    assert [attempt.info for attempt in run.attempts()] == [{"pid": pid} for pid in (1, 2, 3)]
    assert sorted(path.name for path in run.logs.iterdir()) == [f"attempt-{n}" for n in range(3)]


@pytest.mark.parametrize("remaining", [(), (1,)])
def test_a_run_without_its_logs_goes_on_counting(
    tmp_path: Path, remaining: tuple[int, ...]
) -> None:
    """A user has removed them, for room: the next one is no first attempt."""
    run = make_run(tmp_path)
    assert run.next_attempt() == 0
    run.journal("submit").write(_event("submitted", first_attempt=0))
    assert run.next_attempt() == 0
    for number in range(2):
        run.claim_attempt({}, lambda identity: False)
        run.journal("batch", number).write(_event("started", attempt=number))
    for attempt in run.attempts():
        if attempt.number not in remaining:
            shutil.rmtree(attempt.path)
    assert run.next_attempt() == 2
    assert run.claim_attempt({}, lambda identity: False).number == 2


def _event(event: str, time: float = 1.0, attempt: int = 0, **fields: Any) -> JournalEvent:
    return typed(event, time, attempt, **fields)


def test_files_of_a_run_have_their_places(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "name" / "id")
    task = run.task(12)
    assert (run.is_task, task.is_task, task.index) == (False, True, 12)
    assert (run.whole, task.whole, task.name) == (run.path, run.path, "name")
    assert (task.root, run.root, run.id, task.id) == (tmp_path, tmp_path, "id", "id/task-12")
    attempt = run.attempt(3)
    assert (attempt.number, attempt.path) == (3, run.path / "logs" / "attempt-3")
    names = ("notice", "failed", "fabric", "port_taken")
    result = [str(getattr(attempt, name).relative_to(attempt.path)) for name in names]
    assert result == ["notice", "failed", "fabric", "port-taken"]
    files = ("notice", "record", "failures", "printed")
    of_node, of_task = attempt.node("n1"), attempt.node("n1", 2)
    assert [getattr(of_node, name).name for name in files] == [
        *("notice", "record.json", "failures.json", "printed")
    ]
    assert [getattr(of_task, name).name for name in files] == [
        *("notice-2", "record-2.json", "failures-2.json", "printed-2")
    ]
    per_rank = [of_node.rank_log(4), of_node.stacks(4), of_node.flight(4), of_node.agent_log]
    assert [path.name for path in per_rank] == [
        *("rank-4.log", "stack-rank-4.txt", "flight-rank-4", "agent.log")
    ]
    paths = [run.job_json, run.script, run.lib, run.code, run.slurm_out]
    paths += [run.checkpoints, run.cancelled, run.journal_folder]
    assert [str(path.relative_to(run.path)) for path in paths] == [
        *("job.json", "job.sbatch", "lib", "code", "logs/slurm.out"),
        *("checkpoints", "cancelled", "journal"),
    ]


def test_the_output_of_a_task_is_its_arrays_until_it_goes_on_alone(tmp_path: Path) -> None:
    array = RunFolder(tmp_path / "name" / "id").make()
    task = array.task(3).make()
    assert task.outputs() == []
    of_array, other = array.logs / "slurm-3.out", array.logs / "slurm-13.out"
    for path in (of_array, other):
        path.touch()
    os.utime(of_array, (1, 1))
    assert task.outputs() == [of_array]
    assert array.outputs() == [other, of_array]
    alone = task.logs / "slurm-3.out"
    alone.touch()
    assert task.outputs() == [of_array, alone]


def test_attempts_tasks_and_code_are_sorted_by_number(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "name" / "id").make()
    assert (run.newest_code, run.attempts(), run.tasks()) == (None, [], [])
    for number in (9, 10):
        for folder in (run.code / str(number), run.task(number).path):
            folder.mkdir(parents=True)
        run.attempt(number).path.mkdir()
    for stray in (run.code / "x", run.path / "task-x", run.logs / "attempt-x"):
        stray.mkdir()
    assert run.newest_code == run.task(9).newest_code == run.code / "10"
    (run.task(9).code / "11").mkdir(parents=True)  # by --new-code for this task
    (run.code / "12").mkdir()
    assert run.task(9).newest_code == run.task(9).code / "11"
    assert [attempt.number for attempt in run.attempts()] == [9, 10]
    assert [task.index for task in run.tasks()] == [9, 10]
    assert (run.is_newest(10), run.is_newest(9), run.is_newest(11)) == (True, False, True)
    assert run.claim_attempt({"pid": 7, "host": "h"}, lambda identity: False).number == 11
    with pytest.raises(HpcDdpError, match="attempt 11, process 7 on h"):
        run.claim_attempt({}, lambda identity: True)


def test_an_attempt_that_can_not_be_made_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "name" / "id").make()

    def refuse(draft: Path, target: Path) -> Path:
        raise OSError(errno.EDQUOT, "quota")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="quota"):
        run.claim_attempt({}, lambda identity: False)
    assert list(run.logs.iterdir()) == []


def test_records_of_nodes_are_read(tmp_path: Path) -> None:
    attempt = AttemptFolder(tmp_path / "attempt-0")
    for node, name, content in (
        ("n2", "record.json", {"code": 0, "node": "n2"}),
        ("n1", "record-0.json", {"code": 1, "node": "n1"}),
        ("n1", "record-1.json", {"node": "torn"}),
        ("n1", "other.json", {"code": 5}),
    ):
        (attempt.path / node).mkdir(parents=True, exist_ok=True)
        (attempt.path / node / name).write_text(json.dumps(content))
    (attempt.path / "notice").touch()
    assert [node.path.name for node in attempt.nodes()] == ["n1", "n2"]
    assert [record["node"] for record in attempt.records()] == ["n1", "n2"]
    assert len(NodeFolder(attempt.path / "n1").records()) == 2


@pytest.mark.parametrize("refused", ["n1", "n1/record-0.json"])
def test_a_record_that_the_disk_refuses_is_no_lost_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    attempt = AttemptFolder(tmp_path / "attempt-0")
    (attempt.path / "n1").mkdir(parents=True)
    write_json(attempt.path / "n1" / "record-0.json", {"code": 0})
    assert attempt.records() == [{"code": 0}]
    for name in ("listdir", "open"):
        monkeypatch.setattr(os, name, _refusing(getattr(os, name), attempt.path / refused))
    with pytest.raises(OSError, match="Stale"):
        attempt.records()


def _refusing(call: Callable[..., Any], path: Path) -> Callable[..., Any]:
    """Return `call`, whose first argument is a path, with an error of the disk for `path`."""

    def refuse(first: Any, *args: Any, **options: Any) -> Any:
        if first == path:
            raise OSError(errno.ESTALE, "Stale file handle")
        return call(first, *args, **options)

    return refuse


def test_job_ids_are_listed_oldest_first(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "name" / "id").make()
    for number, link in enumerate(("8", "", 9, "7")):
        attempt = run.claim_attempt({}, lambda identity: False)
        assert attempt.number == number
        write_json(attempt.path / "next.json", {"job_id": link})
    events = [_event("queued", job_id="7"), _event("started", job_id=""), _event("cancelled")]
    jobs = run.jobs([*events, _event("started", job_id="6"), events[0]])
    assert [job.id for job in jobs] == ["7", "6", "8", "9"]


def test_gpu_hours_count_all_tasks(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "name" / "id").make()
    tasks = [run.task(index).make() for index in (0, 1)]
    for folder, hours in zip((run, *tasks), (9, 1, 2), strict=True):
        path = folder.journal_folder / "batch.jsonl"
        end = hours * 3600.0
        events = [_event("started", 0.0, nodes=["a", "b"])]
        events += [_event("verdict", end, why="")]
        path.write_text("".join(json.dumps(event.to_line()) + "\n" for event in events))
    assert tasks[0].gpu_hours(4) == run.gpu_hours(4) == 3 * 2 * 4
    assert not run.finished()


def test_a_new_run_takes_no_folder_of_another_one(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "train" / "1").make(is_new=True)
    run.make()
    with pytest.raises(FileExistsError):
        run.make(is_new=True)


def test_a_folder_that_is_removed_while_empty_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a `clean`, or a submit of the same name that is refused."""
    removals = iter(range(3))

    def mkdir(path: object, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if path == "1" and next(removals, None) is not None:
            (tmp_path / "train").rmdir()
        make(path, mode, dir_fd=dir_fd)  # type: ignore[arg-type]

    make = os.mkdir
    monkeypatch.setattr(os, "mkdir", mkdir)
    assert RunFolder(tmp_path / "train" / "1").make(is_new=True).journal_folder.is_dir()
    assert next(removals, None) is None


def test_a_folder_that_can_not_be_listed_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python 3.12 on a glob has nothing then: the newest attempt would be an old one."""
    run = RunFolder(tmp_path / "name" / "id").make()

    def refuse(folder: object) -> list[str]:
        raise OSError(errno.ESTALE, "Stale file handle", folder)

    monkeypatch.setattr(os, "listdir", refuse)
    looks: list[Callable[[], object]] = [
        run.attempts,
        run.tasks,
        run.links,
        lambda: run.newest_code,
        lambda: run.is_newest(0),
        run.attempt(0).node("n1").pids,
    ]
    for look in looks:
        with pytest.raises(OSError, match="Stale"):
            look()


@pytest.mark.parametrize("text", ["null", "[]", "{}", '{"nodes": null}', '{"nodes": "n1"}', "{"])
def test_a_damaged_record_of_an_attempt_has_no_node_names(tmp_path: Path, text: str) -> None:
    (tmp_path / "attempt.json").write_text(text)
    with pytest.raises((ValueError, KeyError)):
        _ = AttemptFolder(tmp_path).node_names
