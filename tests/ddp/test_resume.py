"""A run that was interrupted is the run that was not."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from crews import ends

WIDE = ("--width", "384", "--layers", "4")  # 2.5 MB in buckets of 1 MB


def interrupted(crew: Any, how: signal.Signals, *argv: str) -> bytes:
    """Let four ranks be signalled in step 9 of 21, and others go on; return the weights."""
    ranks = "1" if how is signal.SIGTERM else "0123"
    first = crew.launch(4, *argv, "--at", "9", "--signal", str(int(how)), "--ranks", ranks)
    if how is signal.SIGTERM:
        assert not any(first.wait()), first.output()
    else:
        first.wait_for_kill()
    crew.go(4, *argv)
    weights: bytes = crew.weights
    return weights


def test_four_ranks_end_with_the_same_bits(make_crew: Callable[[str], Any]) -> None:
    whole = make_crew("whole")
    whole.go(4, *WIDE)
    stopped = make_crew("stopped")
    assert interrupted(stopped, signal.SIGTERM, *WIDE) == whole.weights
    killed = make_crew("killed")
    # The kill comes in step 9: the steps from 6 on are done again.
    saved = ("--save-every-steps", "5", "--wait", str(killed.run.checkpoints / "step-5"))
    assert interrupted(killed, signal.SIGKILL, *WIDE, *saved) == whole.weights

    (stop,) = stopped.events("stopped")
    assert stop["reason"] == "notice"
    assert 9 <= stop["step"] < 21  # an exchange or two after the signal
    assert [event["step"] for event in stopped.events("first_step")] == [1, stop["step"] + 1]
    assert [event["step"] for event in killed.events("restored")] == [5]
    assert [event["step"] for event in killed.events("finished")] == [21]


def test_without_settled_buckets_they_would_not(make_crew: Callable[[str], Any]) -> None:
    whole = make_crew("whole")
    whole.go(4, *WIDE, "--unsettled")
    stopped = make_crew("stopped")
    assert interrupted(stopped, signal.SIGTERM, *WIDE, "--unsettled") != whole.weights


def test_loader_workers_change_nothing(make_crew: Callable[[str], Any]) -> None:
    plain, helped = make_crew("plain"), make_crew("helped")
    plain.go(2)
    stop = helped.launch(2, "--workers", "2", "--at", "5", "--signal", "15", "--ranks", "0")
    assert stop.wait() == [0, 0], stop.output()
    helped.go(2, "--workers", "1")
    assert plain.weights == helped.weights


@pytest.mark.parametrize("stream", [(), ("--stream",)])
def test_killed_between_micro_batches_it_does_the_step_again(
    make_crew: Callable[[str], Any], stream: tuple[str, ...]
) -> None:
    argv: tuple[str, ...] = (
        *WIDE,
        "--accumulate",
        "3",
        "--batch-size",
        "4",
        "--save-every-steps",
        "5",
    )
    argv += ("--epochs", "2", "--samples", "120", *stream)
    whole, killed = make_crew("whole"), make_crew("killed")
    whole.go(3, *argv)
    # Four steps an epoch. The signal comes after the first of step 7's micro-batches.
    saved = ("--wait", str(killed.run.checkpoints / "step-5"))
    launch = killed.launch(3, *argv, *saved, "--at", "7", "--signal", str(int(signal.SIGKILL)))
    launch.wait_for_kill()
    killed.go(3, *argv, *(("--workers", "1") if stream else ()))
    assert [event["step"] for event in killed.events("restored")] == [5]
    assert [event["step"] for event in killed.events("finished")] == [8]
    assert killed.weights == whole.weights


def test_another_number_of_ranks_sees_each_sample_once(crew: Any) -> None:
    sizes = ("--samples", "201", "--batch-size", "3", "--accumulate", "2", "--epochs", "2")
    common = (*sizes, "--seed", "5", "--workers", "1")
    for ranks, at in ((4, "2"), (2, "7")):
        stop = ("--at", at, "--signal", "15", "--ranks", "0", "--step-seconds", "0.05")
        launch = crew.launch(ranks, *common, *stop)
        assert launch.wait() == [0] * ranks, launch.output()
    crew.go(3, *common)
    stops = [event["step"] for event in crew.events("stopped")]
    assert len(stops) == 2
    assert stops[0] * 24 + (stops[1] - stops[0]) * 12 < 201  # both were in the first epoch

    seen = {0: Counter[int](), 1: Counter[int]()}
    for path in crew.run.path.glob("seen-*"):
        for line in path.read_text().splitlines():
            epoch, _, *indices = map(int, line.split())
            seen[epoch].update(indices)
    assert seen == {epoch: Counter(range(201)) for epoch in (0, 1)}


def test_settings_are_put_back_on_ranks_that_are_new(crew: Any) -> None:
    """The checkpoint has no generators of theirs, by which they once took it for another loop's."""
    crew.go(1, script="rate_by_epoch.py")
    output = crew.go(2, script="rate_by_epoch.py")
    assert sorted(re.findall(r"rank . rate \S+", output.replace(":", ""))) == [
        "rank 0 rate 0.01",
        "rank 1 rate 0.01",
    ]
    assert output.count("hpc-ddp: optimizer: lr is 0.01") == 1


@pytest.mark.parametrize("at", [11, 12], ids=["within an epoch", "behind its last step"])
def test_a_loader_of_the_scripts_own_goes_on_in_its_epoch(
    make_crew: Callable[[str], Any], at: int
) -> None:
    """Lines at the top of the epoch count once, and behind its last batch there is a loss."""
    whole = ends(make_crew("whole").go(1, script="stateful_loader.py"))
    crew = make_crew("killed")
    assert crew.launch(1, "--kill-at", str(at), script="stateful_loader.py").wait() == [9]
    output = crew.go(1, script="stateful_loader.py")
    assert "going on from step 9" in output
    assert ends(output) == [line for line in whole if line >= "RANK step 10"]
    assert len(ends(output)) == 11


@pytest.mark.parametrize(
    ("words", "at", "saved"), [((), 13, 12), (("--steps",), 11, 9), (("--steps",), 14, 12)]
)
def test_a_pass_that_is_loaded_draws_no_random_number_again(
    make_crew: Callable[[str], Any], words: tuple[str, ...], at: int, saved: int
) -> None:
    """It has drawn its seed before the checkpoint: else dropout has other numbers from then on."""
    script = "stateful_loader.py"
    whole = ends(make_crew("whole").go(1, *words, script=script))
    crew = make_crew("killed")
    assert crew.launch(1, *words, "--kill-at", str(at), script=script).wait() == [9]
    output = crew.go(1, *words, script=script)
    assert f"going on from step {saved}" in output
    later = f"RANK step {saved + 1:2}"
    of_later = [line for line in ends(output) if line >= later]
    assert of_later == [line for line in whole if line >= later]
    assert len(of_later) >= 6


@pytest.mark.parametrize("kind", [(), ("--shard",)])
def test_weights_that_lines_change_again_are_put_back(
    make_crew: Callable[[str], Any], kind: tuple[str, ...]
) -> None:
    """By each rank alone: one looks at a batch that the other does not look at."""
    script = "weights_again.py"
    whole = make_crew("whole").go(2, *kind, script=script)
    crew = make_crew("stopped")
    crew.go(2, *kind, "--stop-at", "6", script=script)
    output = crew.go(2, *kind, script=script)
    pattern = r"rank \d: weights .*"
    assert sorted(re.findall(pattern, output)) == sorted(re.findall(pattern, whole))
    assert output.count("model: its weights are as in the checkpoint again") == 1
    assert output.count("teacher: its weights are as in the checkpoint again") == 2
    assert output.count("optimizer: its state is as in the checkpoint again") == 1
    assert kind or output.count("TENSORS the same") == 2


def test_the_end_of_an_epoch_runs_once(make_crew: Callable[[str], Any]) -> None:
    twice_five = ("--samples", "40", "--epochs", "2", "--step-seconds", "0.11")
    whole = make_crew("whole").go(1, *twice_five)
    crew = make_crew("stopped")
    # Step 5 is the last one. The end of the epoch is waited for, since the next start would find
    # an epoch without a batch. What is known a step earlier stops the run there.
    output = crew.go(1, *twice_five, "--at", "5", "--signal", "15")
    assert output.count("END OF EPOCH") == 1
    output += crew.go(1, *twice_five, "--at", "9", "--signal", "15")
    assert [event["step"] for event in crew.events("stopped")] == [5, 9]
    assert output.count("END OF EPOCH") == 1
    output += crew.go(1, *twice_five)
    ends = [line for line in output.splitlines() if "END OF EPOCH" in line]
    assert ends == [line for line in whole.splitlines() if "END OF EPOCH" in line]
