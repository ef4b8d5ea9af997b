"""Precision, update, stop on NaN, TensorBoard and profiles, with ranks and across attempts."""

from __future__ import annotations

import gzip
import json
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
from crews import ends_whole_and_stopped

from tests.devices import DEVICE

SAVING = ("--save-every-steps", "5")


def go(crew: Any, ranks: int, *argv: str, code: int = 0, **env: str) -> str:
    """With ``--kill-at`` all ranks are killed there: NCCL may abort one that sees another's end."""
    launch = crew.launch(ranks, *argv, script="run_update.py", **env)
    codes = launch.wait()
    if DEVICE == "cuda" and "--kill-at" in argv:
        codes = [-signal.SIGKILL if end == -signal.SIGABRT else end for end in codes]
    assert codes == [-signal.SIGKILL if "--kill-at" in argv else code] * ranks, launch.output()
    output: str = launch.output()
    return output


def test_a_loop_of_ones_own_has_its_helpers(make_crew: Callable[[str], Any]) -> None:
    """Pretrained weights are loaded once: a resume takes those of the checkpoint."""
    whole, stopped = make_crew("whole"), make_crew("stopped")
    output = whole.go(2, script="own_loop.py")
    assert "BEGIN False 7.0" in output
    assert "CACHE 0 False" in output
    assert "CACHE 1 True" in output
    assert output.count("LOSSES True") == 40
    assert "LAST 40 True" in output
    stopped.go(2, "--stop", script="own_loop.py")
    again = stopped.go(2, "--stop", script="own_loop.py")
    assert "BEGIN True" in again
    assert "BEGIN True 7.0" not in again
    assert stopped.weights == whole.weights


def told(output: str, what: str) -> list[float]:
    return [float(number) for number in re.findall(rf"{what} (\S+)", output)]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_overflow_and_a_kill_leave_the_same_bits(
    make_crew: Callable[[str], Any], precision: str
) -> None:
    common = ["--precision", precision, *SAVING]
    if precision == "fp16":  # in the others it ends the run
        common += ["--bad", "inf", "--bad-at", "4"]
    whole, killed = make_crew("whole"), make_crew("killed")
    output = go(whole, 2, *common)
    go(killed, 2, *common, "--kill-at", "8")
    again = go(killed, 2, *common)
    assert killed.weights == whole.weights
    assert told(again, "STEP")[0] == 6
    if precision == "fp16":
        rates = told(output, "LR")[:5]
        skipped = [step for step in range(5) if rates[step] == [0.05, *rates][step]]
        assert 3 in skipped  # the first ones may be too, until the scale suits the gradients
        assert 4 not in skipped
        assert told(output, "SCALE") == [2.0**16]
        assert told(again, "SCALE") == [2.0 ** (16 - len(skipped))]


def test_the_clipped_norm_is_that_of_one_process(make_crew: Callable[[str], Any]) -> None:
    alone = told(go(make_crew("alone"), 1, "--batch-size", "16"), "NORM")
    shared = told(go(make_crew("shared"), 2), "NORM")
    assert len(alone) == 20
    assert max(alone) > 1
    assert shared == pytest.approx(alone, rel=1e-4)


def test_nan_ends_all_ranks_and_is_never_saved(crew: Any) -> None:
    saving = ("--save-every-steps", "2")
    output = go(crew, 2, *saving, "--bad", "nan", "--bad-at", "7", code=1)
    assert output.count("the weights have NaN or infinity in them") == 2
    assert "at or before step 8; last checkpoint: step-6" in output
    assert "Traceback" not in output
    names = sorted(path.name for path in crew.run.checkpoints.iterdir())
    assert names == ["step-2", "step-4", "step-6"]
    assert told(go(crew, 2, *saving), "STEP")[0] == 7


def test_an_option_that_makes_no_sense_is_said_plainly(crew: Any) -> None:
    output = go(crew, 1, HPC_DDP_PROFILE="9:4", code=2)
    assert output.startswith("error: profile is (9, 4); accepted: the first step to trace")


def test_tensorboard_shows_each_step_once(crew: Any) -> None:
    go(crew, 2, *SAVING, "--tensorboard", "--kill-at", "8")
    go(crew, 2, *SAVING, "--tensorboard", HPC_DDP_PROFILE="3:4")
    from tensorboard.backend.event_processing import event_accumulator

    events = event_accumulator.EventAccumulator(str(crew.run.path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 21))
    assert {"samples_per_s", "epoch"} < set(events.Tags()["scalars"])
    traces = sorted((crew.run.path / "profile").iterdir())
    assert [path.name for path in traces] == [f"attempt-1-rank-{r}.json.gz" for r in (0, 1)]
    with gzip.open(traces[1]) as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    assert any(name.startswith("Optimizer.step") for name in names)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_own_batches_and_two_optimizers_go_on(
    make_crew: Callable[[str], Any], precision: str
) -> None:
    words = ("--precision", precision)
    whole, stopped = ends_whole_and_stopped(make_crew, "own_batches.py", 8, *words)
    assert stopped == whole
    assert len({line.partition(":")[2] for line in whole}) == 1


@pytest.mark.parametrize("late", ["0", "1"])
def test_a_rank_that_finishes_late_is_waited_for(crew: Any, late: str) -> None:
    """The run is finished once all ranks are."""
    launch = crew.launch(2, late, script="late_rank.py")
    assert launch.wait() == [0, 0], launch.output()
    output = launch.output()
    assert output.count("DRAWN") == 2
    assert "UNFINISHED" in output
    assert "did not come down" not in output
