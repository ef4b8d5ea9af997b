"""What a script gets to read for the mistakes that people make."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.devices import DEVICE

# What these two backends can carry depends on the device that is tested.
REFUSED = "the backend '{}' can't be used: {}"
NCCL = {
    "cpu": (1, REFUSED.format("nccl", "there is no GPU here")),
    "sim": (1, REFUSED.format("nccl", "it sends no tensors of sim")),
    "cuda": (0, ""),
}[DEVICE]
GLOO = (1, REFUSED.format("gloo", "it sends no tensors of sim")) if DEVICE == "sim" else (0, "")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("options", "keep_last is 2.5; accepted: a whole number from 2"),
        ("accumulate", "optimizer.step() was called in the midst of accumulating gradients"),
        ("sampler", "sampler was given; the run has its own"),
        ("batch size", "batch_size is '8'; accepted: a whole number from 1"),
        ("too few", "the training set has 64 samples; accepted: enough for one step of 65"),
        ("late loader", "run.loader was called after run.track"),
        ("number", "best is a builtins.float; accepted by run.track: objects with state_dict"),
        ("per rank", "per_rank is ('loader',); accepted: a tuple of names of tracked objects"),
        ("per rank word", "per_rank is 'model'; accepted: a tuple of names"),
        ("no model", "run.track names an optimizer, and not the model that it trains"),
        ("no track", "run.track was not called"),
        ("no scalar", "run.step was given loss, a Tensor that is no number"),
        ("late word", "run.step was given note, a str that is no number"),
        ("two steps", "run.step was called twice for one batch"),
        ("no loop", "run.step was called outside of run.epochs and run.steps"),
        ("no step", "the body of run.steps has ended without run.step()"),
        ("short step", "a body of run.steps has taken more micro-batches than its step has"),
        ("two loops", "run.steps was called inside run.epochs"),
        ("no best", "the run has no best checkpoint: run.best was not called"),
        ("untracked", "the model is none that run.track was given"),
        ("clip", "clip_norm is 0.0; accepted: a number above 0"),
        ("best None", "run.best was given value, a NoneType that is no number"),
        ("best word", "run.best was given value, a str that is no number"),
        ("best two", "run.best was given value, a Tensor that is no number"),
        ("result", "run.finish was given accuracy, a list that is no number"),
        ("half shard", "precision is 'fp16' with run.fully_shard; accepted: 'fp32', 'bf16'"),
        ("own group", "torch's process group exists already; accepted: start() makes it"),
        ("two starts", "a second training has begun in a process that hpc-ddp has started"),
    ],
)
def test_a_mistake_ends_in_a_sentence(crew: Any, case: str, words: str) -> None:
    launch = crew.launch(1, case, script="misuse.py")
    assert launch.wait() == [2], launch.output()
    assert words in launch.output()
    assert "Traceback" not in launch.output()


def test_replicas_in_ddp_end_in_a_sentence(crew: Any) -> None:
    launch = crew.launch(2, "replicas", script="misuse.py")
    assert launch.wait() == [2, 2], launch.output()
    assert "run.wrap (DDP) was called with replicas=2; accepted: fully_shard" in launch.output()


def test_ranks_with_other_seeds_end_in_a_sentence(crew: Any) -> None:
    launch = crew.launch(2, "seeds", script="misuse.py")
    assert launch.wait() == [2, 2], launch.output()
    assert "seed is 2 on rank 1, and 1 on rank 0; accepted: one value on all" in launch.output()
    assert "Traceback" not in launch.output()


def test_stages_that_track_other_objects_end_in_a_sentence(crew: Any) -> None:
    launch = crew.launch(2, "stages", script="misuse.py")
    assert launch.wait() == [2, 2], launch.output()
    assert "rank 1 shares other objects than rank 0: optimizer" in launch.output()
    assert "Traceback" not in launch.output()


def test_without_a_finish_it_is_said(crew: Any) -> None:
    launch = crew.launch(1, "no finish", script="misuse.py")
    launch.wait()
    assert "the script ended without run.finish()" in launch.output()
    assert not crew.events("finished")


def test_a_rank_that_leaves_the_loop_is_in_the_journal(crew: Any) -> None:
    launch = crew.launch(2, "early exit", script="misuse.py")
    codes = launch.wait()
    # Rank 0 meets the end of rank 1 in a collective: Gloo raises there, NCCL's watchdog aborts.
    assert codes in ([1, 0], [-signal.SIGABRT, 0]), launch.output()
    (left,) = [event for event in crew.events("failed") if event["rank"] == 1]
    assert (left["error"], left["step"]) == ("the script ended without run.finish()", 1)


def test_a_fork_that_ends_is_no_rank_that_leaves(crew: Any) -> None:
    assert "without run.finish()" not in crew.go(1, "fork", script="misuse.py")
    assert not crew.events("failed")


def test_a_best_checkpoint_that_could_not_be_saved_has_no_step(crew: Any) -> None:
    output = crew.go(1, "full disk", script="misuse.py")
    assert "SAVED False BEST None" in output
    assert "LOADED 16" in output


def test_a_second_finish_does_nothing(crew: Any) -> None:
    launch = crew.launch(1, "none", script="misuse.py")
    assert launch.wait() == [0], launch.output()
    assert len(crew.events("finished")) == 1


def test_weights_that_are_nan_end_it(crew: Any) -> None:
    launch = crew.launch(1, "poison", script="misuse.py")
    assert launch.wait() == [1], launch.output()
    assert "the weights have NaN or infinity in them" in launch.output()


def test_a_result_that_is_nan_is_null_in_the_journal(crew: Any) -> None:
    crew.go(1, "nan", script="misuse.py")
    assert [event["results"] for event in crew.events("finished")] == [{"loss": None}]


def test_what_the_environment_says_wrong_is_said(crew: Any) -> None:
    launch = crew.launch(1, "none", script="misuse.py", HPC_DDP_SAVE_EVERY="often")
    assert launch.wait() == [2]
    assert "HPC_DDP_SAVE_EVERY is 'often'" in launch.output()
    assert "Traceback" not in launch.output()


@pytest.mark.parametrize(
    ("backend", "code", "words"),
    [
        ("mpi", 1, "the backend 'mpi' can't be used: this torch has"),
        ("nccl", *NCCL),
        ("glue", 1, "the backend 'glue' can't be used: this torch has"),
        ("cuda:", 1, "the backend 'cuda:' can't be used: it names none for "),
        ("gloo", *GLOO),
    ],
)
def test_backends(crew: Any, backend: str, code: int, words: str) -> None:
    launch = crew.launch(1, "none", script="misuse.py", HPC_DDP_BACKEND=backend)
    assert launch.wait() == [code], launch.output()
    assert words in launch.output()
    assert "Traceback" not in launch.output()


def test_a_script_without_a_main_block_does_not_start_twice(crew: Any) -> None:
    """A process that multiprocessing starts anew runs such a script from its top."""
    launch = crew.launch(1, "child", script="misuse.py")
    assert launch.wait() != [0]
    assert "start() was called by a process that multiprocessing has started" in launch.output()
    assert 'if __name__ == "__main__"' in launch.output()
