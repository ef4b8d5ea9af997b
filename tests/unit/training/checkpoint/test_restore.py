"""A restore takes the newest good checkpoint, and names the others' faults."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_ddp.core import checkpoints, file_io
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.training.checkpoint import restore
from hpc_ddp.training.checkpoint.restore import Restorer, open_checkpoint
from hpc_ddp.training.checkpoint.storage import disk
from hpc_ddp.training.checkpoint.storage.index import RankPart, read_index
from hpc_ddp.training.process.rank_messages import LoneControl
from unit.fakes import stop_clock
from unit.training.checkpoint.fakes import (
    Finding,
    Make,
    checkpoint_names,
    events_named,
    save_steps,
    stub_verification,
)
from unit.training.fakes import Holds


def test_a_saved_checkpoint_is_restored(run: RunFolder, make: Make) -> None:
    saver = make()
    assert saver.settle()  # nothing was begun
    assert save_steps(saver, 3, 5, 9) == [True] * 3
    assert checkpoint_names(run) == ["step-5", "step-9"]
    manifest = checkpoints.read_manifest(run.checkpoints / "step-9")
    assert (manifest["step"], manifest["world_size"], manifest["epoch"]) == (9, 1, 1)
    assert sorted(manifest["files"]) == ["rank-0.bin", "state.pt"]
    saved = events_named(run, "checkpoint")[-1]
    size = sum(facts["size"] for facts in manifest["files"].values())
    assert (saved["step"], saved["bytes"]) == (9, size)
    assert 0.25 <= saved["stall_s"] <= 0.25 + saved["write_s"] + 0.1
    assert saver.stall_s == 0.25
    assert saver.slowest_save_s >= 0.25
    restored = make().restore()
    assert restored is not None
    assert (restored.step, restored.index.shared) == (9, {"tree": {"a": 9}})
    assert (restored.index.world_size, restored.is_resized) == (1, False)
    assert restored.values_of(0) == {}


def test_a_run_without_checkpoints_starts_at_step_0(run: RunFolder, make: Make) -> None:
    (run.checkpoints / "step-1.tmp-0").mkdir()
    assert make().restore() is None
    assert checkpoint_names(run) == []
    assert events_named(run, "restored") == []


@pytest.mark.parametrize(
    ("findings", "looks", "step", "remaining"),
    [
        ((None,), ["step-2"], 2, ["step-1", "step-2"]),
        (("a bad read", None), ["step-2"] * 2, 2, ["step-1", "step-2"]),
        (
            ("damaged", "damaged", None),
            ["step-2", "step-2", "step-1"],
            1,
            ["step-1", "step-2.bad-0"],
        ),
    ],
)
def test_a_bad_checkpoint_is_verified_twice_and_skipped(
    run: RunFolder,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    findings: tuple[Finding, ...],
    looks: list[str],
    step: int,
    remaining: list[str],
) -> None:
    save_steps(make(), 1, 2)
    names = stub_verification(monkeypatch, *findings)
    restored = make().restore()
    assert restored is not None
    assert (restored.step, names, checkpoint_names(run)) == (step, looks, remaining)
    (event,) = events_named(run, "restored")
    bad = [f"step-{2 - index}: damaged" for index in range(str(remaining).count("bad"))]
    assert (event["step"], event["passed_over"]) == (step, bad)
    assert 0 <= event["restore_s"] < 60
    printed = capsys.readouterr().err
    assert printed.count("PASSED OVER the checkpoint step-") == len(bad)
    assert f"going on from step {step}" in printed


def test_a_later_attempt_without_a_checkpoint_says_that_it_begins_at_step_0(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make().restore() is None
    assert capsys.readouterr().err == ""
    assert make(attempt=2).restore() is None
    expected = "hpc-ddp: no checkpoint to go on from: attempt 2 begins at step 0\n"
    assert capsys.readouterr().err == expected


def test_a_run_with_only_damaged_checkpoints_does_not_start_over(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run fails at once and at the next attempt, until all of them have been set aside."""
    save_steps(make(), 1, 2)
    with monkeypatch.context() as patch:
        stub_verification(patch, *["damaged"] * 4)
        with pytest.raises(HpcDdpError, match=r"no good checkpoint.*step-2: damaged; step-1: dam"):
            make().restore()
    assert capsys.readouterr().err.count("PASSED OVER the checkpoint step-") == 2
    assert checkpoint_names(run) == ["step-1.bad-0", "step-2.bad-0"]
    (event,) = events_named(run, "restored")
    assert (event["step"], len(event["passed_over"])) == (0, 2)
    with pytest.raises(HpcDdpError, match=r"step-2\.bad-0: it was found damaged") as caught:
        make().restore()
    assert caught.value.hint
    assert caught.value.hint.endswith(f"mv {run.path} {run.path}-old")
    assert checkpoints.set_aside(run) == run.checkpoints / "aside-0"
    assert make().restore() is None
    assert sorted(os.listdir(run.checkpoints / "aside-0")) == ["step-1.bad-0", "step-2.bad-0"]


def test_a_run_whose_checkpoints_are_gone_does_not_start_over(run: RunFolder, make: Make) -> None:
    """A purge of the scratch leaves such a run."""
    save_steps(make(), 7)
    shutil.rmtree(run.checkpoints / "step-7")
    with pytest.raises(HpcDdpError, match="step-7: it was saved, and is gone"):
        make().restore()
    assert checkpoints.set_aside(run) is None
    run.claim_attempt({}, lambda identity: False)
    assert make().restore() is None


def test_a_damaged_checkpoint_in_a_read_only_folder_is_skipped(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_steps(make(), 1, 2)
    stub_verification(monkeypatch, "damaged", "damaged", None)

    def refuse(folder: Path, kind: str, attempt: int) -> Path:
        raise OSError("Read-only file system")

    monkeypatch.setattr(disk, "set_aside", refuse)
    assert make().restore() is not None
    assert "damaged; kept as step-2: Read-only file system" in capsys.readouterr().err


def test_a_checkpoint_of_a_step_is_loaded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = make()
    save_steps(saver, 1, 2)
    assert saver.load(1).index.shared == {"tree": {"a": 1}}
    with pytest.raises(HpcDdpError, match=r"step-7: it is not there") as caught:
        saver.load(7)
    assert "hpc-ddp verify" in str(caught.value.hint)


def test_a_checkpoint_of_another_format_is_refused(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "FORMAT", 99)
        save_steps(make(), 1)
    with pytest.raises(HpcDdpError, match="has format 99; this hpc-ddp reads format 4"):
        open_checkpoint(run.checkpoints / "step-1")


def test_pickled_code_is_not_run(run: RunFolder, make: Make) -> None:
    save_steps(make(), 1)
    torch.save({"tree": Holds(0)}, run.checkpoints / "step-1" / "state.pt")
    with pytest.raises(pickle.UnpicklingError):
        open_checkpoint(run.checkpoints / "step-1")


def test_a_rank_opens_no_file_of_the_others(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 reads what the checkpoint consists of, and tells the others."""
    save_steps(make(), 1)
    folder = run.checkpoints / "step-1"
    index = read_index(folder)
    index = replace(index, parts=index.parts * 3)
    control = LoneControl()
    monkeypatch.setattr(control, "rank", 1)
    monkeypatch.setattr(control, "world_size", 3)
    monkeypatch.setattr(control, "from_first", lambda message: index)
    read: list[RankPart] = []
    monkeypatch.setattr(restore, "read_values", lambda folder, part: read.append(part))
    restored = Restorer(run, 0, control, run.journal("rank-1", 0))._open(folder)
    assert (restored.index, restored.is_resized, read) == (index, False, [])
    restored.values_of(1)
    assert read == [index.parts[1]]


def test_files_that_can_not_be_opened_end_all_ranks(run: RunFolder, make: Make) -> None:
    save_steps(make(), 1)
    torch.save({"tree": Holds(0)}, run.checkpoints / "step-1" / "state.pt")
    with pytest.raises(HpcDdpError, match=r"step-1 can't be opened: UnpicklingError"):
        make()._open(run.checkpoints / "step-1")


def test_a_disk_that_is_away_is_waited_for(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(make(), 1, 2)
    clock = stop_clock(monkeypatch, file_io)
    error = OSError(errno.EIO, "rank-0.bin can't be read: Input/output error")
    names = stub_verification(monkeypatch, error, error, None)
    restored = make().restore()
    assert restored is not None
    assert (restored.step, names, clock.slept) == (2, ["step-2"] * 3, [1, 1])


def test_a_disk_that_stays_away_fails_the_attempt_and_keeps_its_checkpoints(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No checkpoint is taken for damaged: the older one might come next, and then step 0."""
    save_steps(make(), 1, 2)
    clock = stop_clock(monkeypatch, file_io)
    names = stub_verification(monkeypatch, *[OSError(errno.EIO, "Input/output error")] * 99)
    with pytest.raises(HpcDdpError, match=r"step-2 can't be read on rank 0.*: Input/output error"):
        make().restore()
    assert sum(clock.slept) >= file_io.PATIENCE_S
    assert set(names) == {"step-2"}
    assert checkpoint_names(run) == ["step-1", "step-2"]


def test_an_unreadable_checkpoint_hints_at_permissions(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(make(), 1)
    stop_clock(monkeypatch, file_io)
    stub_verification(monkeypatch, *[OSError(errno.EACCES, "Permission denied")] * 99)
    with pytest.raises(HpcDdpError, match="Permission denied") as caught:
        make().restore()
    assert "with permission to read all of it: ls -l" in str(caught.value.hint)


def test_stray_names_do_not_keep_a_run_from_starting(run: RunFolder, make: Make) -> None:
    save_steps(make(), 1)
    (run.checkpoints / "step-8").symlink_to("nowhere")
    (run.checkpoints / "step-9").touch()
    restored = make().restore()
    assert restored is not None
    assert restored.step == 1
    assert checkpoint_names(run) == ["step-1", "step-8.bad-0", "step-9.bad-0"]


def test_a_checkpoint_that_a_peer_can_not_read_fails_all_ranks(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = make()
    save_steps(saver, 1)
    peers: Any = saver.control
    peers.peers = [HpcDdpError("step-1 can't be read on rank 1")]
    stub_verification(monkeypatch, "damaged")
    with pytest.raises(HpcDdpError, match="can't be read on rank 1"):
        saver.restore()
    assert checkpoint_names(run) == ["step-1"]


def test_an_absent_folder_of_checkpoints_is_no_empty_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(make(), 1)
    stop_clock(monkeypatch, file_io)

    def fail(folder: Path) -> list[Path]:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(checkpoints, "candidates", fail)
    with pytest.raises(HpcDdpError, match=r"can't be read on rank 0.*Stale file handle"):
        make().restore()
