"""What reaches the disk, and what a damaged or full one does to a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crews import ends, ends_whole_and_stopped
from safetensors import safe_open

from hpc_ddp.core.checkpoints import set_aside, verify_all
from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.checkpoint.restore import open_checkpoint
from hpc_ddp.training.export import export
from tests.skips import skip_or_fail

SMALL = ("--samples", "80", "--epochs", "3", "--save-every-steps", "4")  # 30 steps on one rank


def kill_in(crew: Any, step: int, *argv: str, ranks: int = 1) -> None:
    """Kill all ranks in a step, once the save before it (see SMALL) is durable."""
    wait = ("--wait", str(crew.run.checkpoints / f"step-{(step - 1) // 4 * 4}"))
    kill = ("--at", str(step), "--signal", str(int(signal.SIGKILL)))
    launch = crew.launch(ranks, *argv, *wait, *kill)
    launch.wait_for_kill()


def test_the_last_three_are_kept_and_complete(crew: Any) -> None:
    crew.go(1, *SMALL, "--epochs", "2")
    folders = sorted(path.name for path in crew.run.checkpoints.iterdir())
    # The save due in step 20, the last one of an epoch, comes behind the epoch's end.
    assert folders == ["step-12", "step-16", "step-20"]
    manifest = json.loads((crew.run.checkpoints / "step-20" / "manifest.json").read_text())
    assert (manifest["epoch"], manifest["samples"], manifest["world_size"]) == (2, 0, 1)
    assert sorted(manifest["files"]) == ["rank-0.bin", "state.pt"]
    assert crew.events("checkpoint")[-1].keys() >= {"stall_s", "write_s", "bytes"}


def test_damage_is_passed_over_loudly(make_crew: Callable[[str], Any]) -> None:
    whole = make_crew("whole")
    whole.go(1, *SMALL)
    crew = make_crew("damaged")
    kill_in(crew, 27, *SMALL)
    newest, second = crew.run.checkpoints / "step-24", crew.run.checkpoints / "step-20"
    flip_a_byte(newest / "rank-0.bin")
    os.truncate(second / "rank-0.bin", 100)
    (crew.run.checkpoints / "step-25.tmp-0").mkdir()

    output = crew.go(1, *SMALL)
    assert "PASSED OVER the checkpoint step-24: rank-0.bin has been damaged" in output
    assert "PASSED OVER the checkpoint step-20: rank-0.bin has 100 bytes instead of" in output
    assert "going on from step 16" in output
    (restored,) = crew.events("restored")
    assert restored["step"] == 16
    assert [text.split(":")[0] for text in restored["passed_over"]] == ["step-24", "step-20"]
    assert crew.weights == whole.weights
    left = sorted(path.name for path in crew.run.checkpoints.iterdir())
    assert left == ["step-20.bad-1", "step-24", "step-24.bad-1", "step-28", "step-30"]


def test_with_nothing_good_left_it_begins_again_only_once_told(
    make_crew: Callable[[str], Any],
) -> None:
    whole = make_crew("whole")
    whole.go(1, *SMALL)
    crew = make_crew("damaged")
    kill_in(crew, 7, *SMALL, ranks=2)
    (crew.run.checkpoints / "step-4" / "manifest.json").unlink()
    for problem in ("step-4: manifest.json is missing", "step-4.bad-1: it was found damaged"):
        launch = crew.launch(2, *SMALL)
        assert launch.wait() == [1, 1]
        assert launch.output().count(f"does not begin at step 0 by itself: {problem}") == 2
        assert "Traceback" not in launch.output()
    set_aside(crew.run)
    crew.go(1, *SMALL)
    assert crew.weights == whole.weights


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_superseded_attempt_publishes_nothing(crew: Any) -> None:
    later = crew.run.logs / "attempt-1"
    act = ("--at", "6", "--wait", str(crew.run.checkpoints / "step-4"), "--make", str(later))
    launch = crew.launch(2, "--save-every-steps", "4", *act, "--ranks", "0")
    assert launch.wait() == [1, 1]
    assert "superseded by a later one" in launch.output()
    assert [path.name for path in crew.run.checkpoints.iterdir()] == ["step-4"]
    assert not crew.events("failed", "save_failed")


def test_a_checkpoint_of_another_model_is_refused_clearly(crew: Any) -> None:
    kill_in(crew, 7, *SMALL)
    launch = crew.launch(1, *SMALL, "--width", "24")
    assert launch.wait() == [1]
    assert "0.weight is (24, 33) here and (16, 33) in the checkpoint" in launch.output()
    assert "Traceback" not in launch.output()
    launch = crew.launch(1, *SMALL, "--seed", "9")
    assert launch.wait() == [2]
    assert "seed is 9, but 0 in the run's checkpoint" in launch.output()


@pytest.fixture
def tiny_disk(crew: Any) -> Iterator[Path]:
    """A file system of 1 MB below the run's checkpoints."""
    disk = crew.run.checkpoints
    if os.geteuid() != 0 or shutil.which("mount") is None:
        skip_or_fail("mounting a tiny tmpfs needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        skip_or_fail("mounting a tiny tmpfs is not allowed here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.usefixtures("tiny_disk")
def test_a_full_disk_is_survived_for_a_while(crew: Any, tiny_disk: Path) -> None:
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(1_030_000))
    flag = crew.base / "go-on"
    save = ("--save-every-steps", "4", "--epochs", "1")
    launch = crew.launch(2, *save, "--at", "6", "--wait", str(flag))
    launch.until("ACTING")
    launch.until("could not be saved")
    (failed,) = crew.events("save_failed")
    assert failed["step"] == 4
    assert "No space left" in failed["error"]
    ballast.unlink()
    flag.touch()
    assert launch.wait() == [0, 0], launch.output()
    assert crew.events("checkpoint")[0]["step"] == 8

    for path in tiny_disk.iterdir():
        shutil.rmtree(path)
    set_aside(crew.run)
    ballast.write_bytes(bytes(1_030_000))
    launch = crew.launch(2, *save, "--patience", "0")
    assert launch.wait() == [1, 1]
    assert "3 saves in a row failed" in launch.output()
    assert not list(tiny_disk.glob("step-*"))


@pytest.mark.parametrize(
    ("ways", "shares"),
    [
        (("ddp", "sharded", "ddp"), ("--nodes",)),
        (("sharded", "ddp", "sharded"), ("--share-files",)),
    ],
)
def test_any_number_of_ranks_goes_on_replicated_or_sharded(
    crew: Any, ways: tuple[str, ...], shares: tuple[str, ...]
) -> None:
    """Four ranks, then two, then three; each on a node of its own, or all with one file."""
    common = ("--samples", "240", "--batch-size", "3", "--epochs", "1", "--width", "30")
    for ranks, way, at in zip((4, 2, 3), ways, ("4", "12", "-1"), strict=True):
        stop = ("--at", at, "--signal", "15", "--ranks", "0", "--step-seconds", "0.05")
        sharded = ("--sharded",) if way == "sharded" else ()
        output = crew.go(ranks, *common, *stop, *sharded, *shares)
    assert output.count("going on from step") == 1
    counts = {len([*path.glob("rank-*")]) for path in saved(crew)}
    assert counts == ({1} if shares == ("--share-files",) else {2, 3, 4})
    if reads := [int(path.read_text()) for path in crew.run.path.glob("read-*")]:
        step = crew.events("restored")[-1]["step"]
        index = open_checkpoint(crew.run.checkpoints / f"step-{step}").index
        size = sum(part.tensors for part in index.parts)
        assert 0.8 * size < sum(reads) <= size, "not once for all ranks"
    seen = Counter[int]()
    for path in crew.run.path.glob("seen-*"):
        for line in path.read_text().splitlines():
            seen.update(map(int, line.split()[2:]))
    assert seen == Counter(range(240))


def saved(crew: Any) -> list[Path]:
    return sorted(crew.run.checkpoints.glob("step-*"))


def test_the_same_ranks_sharded_end_with_the_same_bits(make_crew: Callable[[str], Any]) -> None:
    whole = make_crew("whole")
    whole.go(2, *SMALL, "--sharded")
    crew = make_crew("killed")
    kill_in(crew, 11, *SMALL, "--sharded", ranks=2)
    crew.go(2, *SMALL, "--sharded")
    assert crew.weights == whole.weights


def test_the_best_stays_and_ends_the_run_early(crew: Any, tmp_path: Path) -> None:
    scores = ("--scores", "1", "3", "2", "nan", "9")
    common = ("--samples", "80", "--epochs", "5", "--save-every-steps", "3", *scores)
    stop = crew.launch(2, *common, "--at", "12", "--signal", "15", "--ranks", "0")
    assert stop.wait() == [0, 0]
    output = crew.go(2, *common)
    assert output.count("STALE") == 1
    assert [event["step"] for event in crew.events("finished")] == [20]
    rows = verify_all(crew.run.checkpoints)
    assert [(row.name, row.best) for row in rows if not row.problem] == [
        ("step-10", True),
        ("step-15", False),
        ("step-18", False),
        ("step-20", False),
    ]
    out = tmp_path / "best.safetensors"
    assert export(crew.run.path, out, best=True) == 10
    with safe_open(out, "pt") as file:
        assert "0.weight" in file.keys()  # noqa: SIM118  # it is no dict
    with pytest.raises(UsageError, match="no checkpoint of step 11; accepted: 20, 18, 15, 10"):
        export(crew.run.path, out, step=11)


def test_a_read_only_folder_is_a_failed_save(crew: Any) -> None:
    shutil.rmtree(crew.run.checkpoints)
    crew.run.checkpoints.write_text("no folder")  # root may write into read-only ones
    launch = crew.launch(2, *SMALL, "--patience", "0")
    assert launch.wait() == [1, 1]
    assert "the checkpoint of step 4 could not be saved" in launch.output()
    assert "3 saves in a row failed" in launch.output()
    assert "Traceback" not in launch.output()


def test_an_emptied_manifest_and_a_missing_file_are_passed_over(crew: Any) -> None:
    kill_in(crew, 15, *SMALL, ranks=2)
    (crew.run.checkpoints / "step-12" / "manifest.json").write_bytes(b"")
    (crew.run.checkpoints / "step-8" / "rank-1.bin").unlink()
    output = crew.go(2, *SMALL)
    assert "step-12: manifest.json can't be read" in output
    assert "step-8: rank-1.bin is missing" in output
    assert "going on from step 4" in output


PER_RANK = ("--per-rank", "loader")


@pytest.mark.parametrize(
    "words",
    [
        ("loader", *PER_RANK),
        ("ignored", *PER_RANK),
        ("local", "--per-rank", "loader", "model", "optimizer"),
    ],
)
def test_what_each_rank_has_its_own_of_comes_back_there(
    make_crew: Callable[[str], Any], words: tuple[str, ...]
) -> None:
    whole, crew = make_crew("whole"), make_crew("two")
    expected = ends(whole.go(2, *words, "--steps", "8", script="state_per_rank.py"))
    assert expected[0].partition(":")[2] != expected[1].partition(":")[2]
    crew.go(2, *words, "--steps", "4", script="state_per_rank.py")
    assert ends(crew.go(2, *words, "--steps", "8", script="state_per_rank.py")) == expected


def test_on_other_ranks_a_loader_begins_anew_and_weights_do_not(
    make_crew: Callable[[str], Any],
) -> None:
    crew = make_crew("loader")
    crew.go(2, "loader", *PER_RANK, script="state_per_rank.py")
    output = crew.go(1, "loader", *PER_RANK, "--steps", "6", script="state_per_rank.py")
    warning = (
        "each of the 2 ranks that wrote the checkpoint of step 4 had its own loader, and 1 run"
    )
    assert f"WARNING: {warning} here: it begins anew" in output
    assert "RANK 0: place 2 buffer 1" in output

    crew = make_crew("local")
    words = ("local", "--per-rank", "loader", "model", "optimizer")
    crew.go(2, *words, script="state_per_rank.py")
    launch = crew.launch(1, *words, script="state_per_rank.py")
    assert launch.wait() == [1]
    assert "had its own loader, model, optimizer, and 1 run here" in launch.output()

    crew = make_crew("ignored")
    crew.go(2, "ignored", *PER_RANK, script="state_per_rank.py")
    launch = crew.launch(1, "ignored", *PER_RANK, script="state_per_rank.py")
    assert launch.wait() == [1]
    assert "had its own loader, optimizer, and 1 run here" in launch.output()


def test_weights_that_differ_between_ranks_are_refused_at_the_first_save(crew: Any) -> None:
    """As of a local SGD between two averagings: of some rows from each rank comes a mixture."""
    launch = crew.launch(3, "local", *PER_RANK, script="state_per_rank.py")
    assert launch.wait() == [1] * 3, launch.output()
    assert "model.0.weight differs between rank 0 and ranks 1, 2" in launch.output()
    assert "per_rank=('model', 'optimizer')" in launch.output()
    assert "Traceback" not in launch.output()
    assert not list(crew.run.checkpoints.iterdir())


@pytest.mark.parametrize(("words", "warnings"), [((), 1), (PER_RANK, 0)])
def test_a_loader_that_begins_the_epoch_again_is_warned_of(
    crew: Any, words: tuple[str, ...], warnings: int
) -> None:
    output = crew.go(2, "loader", *words, script="state_per_rank.py")
    output += crew.go(2, "loader", *words, "--steps", "6", script="state_per_rank.py")
    warning = "WARNING: the checkpoint is from epoch 0, after 4 of its steps, and the script has no"
    assert output.count(warning) == warnings


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_second_loader_goes_on_where_each_rank_was(
    make_crew: Callable[[str], Any], workers: str
) -> None:
    """Beside the run's loader a real StatefulDataLoader, whose workers get the notice, too."""
    words = ("--num-workers", workers)
    whole, stopped = ends_whole_and_stopped(make_crew, "two_loaders.py", 7, *words)
    assert len(whole) == 2
    assert stopped == whole
