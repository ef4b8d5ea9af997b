"""One model spread in every way is the same model, and its checkpoints go from one to another."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_ddp.core import checkpoints
from hpc_ddp.training.checkpoint.restore import open_checkpoint
from hpc_ddp.training.checkpoint.storage.layout import Layout
from tests.devices import DEVICE

TEXT = "the quick brown fox jumps over the lazy dog. " * 14  # 18 windows a batch: 4 steps
# By name: ranks, and what jobs/gpt.py is given.
WAYS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "ddp on 2": (2, ()),
    "ddp on 4": (4, ()),
    "mp": (2, ("--parallel", "mp")),
    "fsdp": (4, ("--parallel", "fsdp")),
    "fsdp, sparing": (2, ("--parallel", "fsdp", "--offload", "--activation-checkpointing")),
    "hsdp": (4, ("--parallel", "fsdp", "--replicas", "2")),
    "hsdp x tp": (4, ("--parallel", "fsdp", "--replicas", "2", "--tp", "2")),
    "tp": (2, ("--parallel", "tp")),
    "fsdp x tp": (4, ("--parallel", "fsdp", "--tp", "2")),
    "pp": (2, ("--parallel", "pp")),
    "pp x ddp": (4, ("--parallel", "pp", "--schedule", "GPipe", "--microbatches", "2")),
}
SPREAD = [name for name in WAYS if name != "one"]


class Trial:
    """Runs of the same training, each in a folder of its own."""

    def __init__(self, make_crew: Callable[[str], Any], base: Path) -> None:
        self.crew = make_crew
        (base / "text").write_text(TEXT)
        self.argv = ("--text", str(base / "text"), "--batch-size", "16", "--epochs", "2")

    def run(self, name: str, *ways: str, at: int = 0, extra: tuple[str, ...] = ()) -> Any:
        """Go one way until the step `at`, if it is given, and another from there."""
        crew = self.crew(name)
        for i, way in enumerate(ways):
            self.go(crew, way, at if i < len(ways) - 1 else 0, extra)
        return crew

    def go(self, crew: Any, way: str, at: int = 0, extra: tuple[str, ...] = ()) -> None:
        if way == "mp" and DEVICE == "cuda" and torch.cuda.device_count() < 2:
            pytest.skip("a rank has two GPUs there, and this machine one")
        ranks, spread = WAYS[way]
        argv = (*self.argv, *spread, *extra)
        places = {"LOCAL_WORLD_SIZE": "1"}  # so that ranks read for each other
        launch = crew.launch(ranks, *argv, script="small_gpt.py", AT=str(at), **places)
        assert launch.wait() == [0] * ranks, launch.output()


def curve(crew: Any) -> torch.Tensor:
    """Return what each step came to: step, loss and norm of the gradients, of shape (steps, 3)."""
    lines = (crew.base / "curve").read_text().splitlines()
    return torch.tensor([[float(word) for word in line.split()] for line in lines])


def scores(crew: Any) -> list[float]:
    """Return the test loss of each epoch. Of four workers one has no window to test."""
    logs = [path.read_text() for path in sorted(crew.base.glob("*-0.log"))]
    return [float(score) for log in logs for score in re.findall(r"test (\d\S+)", log)]


def content(crew: Any) -> dict[str, torch.Tensor]:
    newest = checkpoints.published(crew.run.checkpoints)[0]
    reader = open_checkpoint(newest).reader
    return {name: reader.read(name).clone() for name in sorted(reader)}


def layouts_of(crew: Any) -> list[Layout]:
    """Return the layouts of the oldest checkpoint, from that of the second rank on."""
    index = open_checkpoint(checkpoints.published(crew.run.checkpoints)[-1]).index
    return [index.layouts[number] for number in sorted({p.layouts[0] for p in index.parts[1:]})]


def assert_equal(one: Any, other: Any, exactly: bool = False) -> None:
    torch.testing.assert_close(curve(one), curve(other), rtol=0, atol=0 if exactly else 2e-5)
    assert len(scores(one)) == 2
    assert scores(one) == pytest.approx(scores(other), rel=0, abs=1.1e-4)
    left, right = content(one), content(other)
    assert left.keys() == right.keys()
    # Adam divides by what may be next to nothing: there rounding shows in single weights.
    near = 0 if exactly else 2e-4
    for name, tensor in left.items():
        assert torch.allclose(tensor, right[name], rtol=0, atol=near), name


@pytest.fixture
def trial(make_crew: Callable[[str], Any], tmp_path: Path) -> Trial:
    return Trial(make_crew, tmp_path)


def test_each_way_goes_on_as_another(trial: Trial) -> None:
    one = trial.run("one", "one")
    assert len(curve(one)) == 8
    sharded, replicated = (trial.run(way, way, "ddp on 2", at=2) for way in ("fsdp", "hsdp"))
    assert_equal(sharded, one)
    assert_equal(replicated, one)
    (layout,) = layouts_of(sharded)  # one of three ranks
    assert len(layout) > 100
    assert all(entry.cuts for entry in layout)
    counts = list(map(len, layouts_of(replicated)))  # of both replicas
    assert (len(counts), sum(counts), min(counts) > 40) == (2, len(layout), True)
    # With two batches in a step, of which the pipeline cuts each.
    halves = trial.run("b", "fsdp x tp", "pp", at=2, extra=("--accumulate", "2"))
    torch.testing.assert_close(curve(halves), curve(one), rtol=0, atol=2e-5)


@pytest.mark.more
@pytest.mark.parametrize("way", SPREAD)
def test_it_trains_like_one_process(trial: Trial, way: str) -> None:
    assert_equal(trial.run("spread", way), trial.run("one", "one"))


@pytest.mark.more
@pytest.mark.parametrize("way", SPREAD)
def test_interrupted_it_ends_with_the_same_bits(trial: Trial, way: str) -> None:
    noisy = ("--dropout", "0.1")
    whole, stopped = trial.run("w", way, extra=noisy), trial.run("s", way, way, at=2, extra=noisy)
    assert [event["step"] for event in stopped.events("stopped")] != []
    assert_equal(whole, stopped, exactly=True)


@pytest.mark.more
@pytest.mark.parametrize("way", ["fsdp", "fsdp x tp", "pp"])
def test_bf16_is_near(trial: Trial, way: str) -> None:
    one, spread = (trial.run(each, each, extra=("--precision", "bf16")) for each in ("one", way))
    torch.testing.assert_close(curve(one)[:, 1], curve(spread)[:, 1], rtol=0, atol=0.02)


@pytest.mark.more
def test_copies_that_nobody_averages_are_refused(trial: Trial) -> None:
    launch = trial.crew("crew").launch(4, *trial.argv, "--parallel", "tp", script="small_gpt.py")
    assert launch.wait() == [2] * 4, launch.output()
    assert "tp=2 and pp=1 leave 2 copies of the model" in launch.output()


@pytest.mark.more
@pytest.mark.parametrize("way", SPREAD)
def test_infinite_weights_end_it(trial: Trial, way: str) -> None:
    ranks, spread = WAYS[way]
    crew = trial.crew("poisoned")
    launch = crew.launch(ranks, *trial.argv, *spread, "--lr", "1e37", script="small_gpt.py")
    assert launch.wait() == [1] * ranks, launch.output()
    assert "the weights have NaN or infinity in them" in launch.output()
    assert not checkpoints.published(crew.run.checkpoints)


@pytest.mark.more
@pytest.mark.parametrize("way", SPREAD)
def test_its_checkpoint_goes_to_ddp(trial: Trial, way: str) -> None:
    assert_equal(trial.run("spread", way, "ddp on 2", at=2), trial.run("one", "one"))


@pytest.mark.more
@pytest.mark.parametrize("way", SPREAD)
def test_it_takes_up_a_checkpoint_of_ddp(trial: Trial, way: str) -> None:
    assert_equal(trial.run("spread", "ddp on 4", way, at=2), trial.run("one", "one"))


@pytest.mark.parametrize("way", ["grid", "both"])
def test_a_mesh_of_the_scripts_own_is_saved_in_whole(crew: Any, way: str) -> None:
    """Also one with copies, of which the run knows nothing."""
    first = crew.launch(4, way, "3", script="meshes_of_the_script.py")
    assert first.wait() == [0] * 4, first.output()
    newest = checkpoints.published(crew.run.checkpoints)[0]
    weight = open_checkpoint(newest).reader.read("model.weight")
    assert weight.shape == (4, 8)
    assert f"SUM {weight.sum().item():.3f}"[:-1] in first.output()


def test_a_tensor_that_some_ranks_shard_is_refused_before_the_training(crew: Any) -> None:
    launch = crew.launch(4, "half", "3", script="meshes_of_the_script.py")
    assert launch.wait() == [1] * 4, launch.output()
    assert "rank 2 has other tensors to save than rank 0: model.weight" in launch.output()
    assert "Traceback" not in launch.output()
    assert not checkpoints.published(crew.run.checkpoints)


@pytest.mark.parametrize("place", [(), ("meta",)], ids=["here", "meta"])
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("rest", "TIED 3 True"),
        ("plan", "TIED 3 True"),
        ("unit", "the units of run.fully_shard part words.weight and head.weight"),
        ("half", "the plan of run.parallelize parts words.weight and head.weight"),
    ],
)
def test_tied_weights_stay_one(crew: Any, case: str, words: str, place: tuple[str, ...]) -> None:
    launch = crew.launch(2, case, *place, script="tied_weights.py")
    code = 0 if words.startswith("TIED") else 2
    assert launch.wait() == [code, code], launch.output()
    assert launch.output().count(words) == 2


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_experts_of_each_rank_leave_the_other_weights_equal(crew: Any, precision: str) -> None:
    """The norm that is clipped to has those of all ranks, and all of them skip a step, or none."""
    output = crew.go(2, precision, script="own_experts.py").splitlines()
    gates = [line for line in output if line.startswith("GATE")]
    assert len(gates) == 2
    assert gates[0] == gates[1]
    assert (gates[0].split()[-1] == "8") == (precision == "fp32")  # steps
    for word in ("EXPERT", "USES"):  # weights, and a buffer in an evaluation
        assert len({line for line in output if line.startswith(word)}) == 2
