"""The best model, loaded back at the end and written for those who have only torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpc_ddp.training.checkpoint.restore import open_checkpoint
from hpc_ddp.training.export import export


def weights(run: Any, step: int) -> dict[str, torch.Tensor]:
    reader = open_checkpoint(run.checkpoints / f"step-{step}").reader
    return {name[6:]: reader.read(name) for name in reader if name.startswith("model.")}


def test_a_plain_script_has_the_best_model(crew: Any) -> None:
    assert "BEST 8" in crew.go(2, script="best_epoch.py")
    assert export(crew.run.path, crew.run.path / "model.safetensors", best=True) == 8
    assert "THE SAME" in crew.go(0, str(crew.run.path), script="exported_weights.py")


@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_behind_the_loop_it_exports_the_same(crew: Any, moment: str) -> None:
    launch = crew.launch(2, "--kill", moment, script="best_epoch.py")
    launch.wait_for_kill()
    output = crew.go(2, script="best_epoch.py")
    assert "BEST 8" in output
    assert [event["step"] for event in crew.events("finished")] == [12]
    export(crew.run.path, crew.run.path / "model.safetensors", best=True)
    exported = load_file(crew.run.path / "model.safetensors")
    best, last = weights(crew.run, 8), weights(crew.run, 12)
    assert all(torch.equal(exported[name], best[name]) for name in best)
    assert not torch.equal(last["0.weight"], best["0.weight"])  # the run itself went on
    if moment == "after":
        assert "going on from step 12" in output
        # A finished run is given another epoch: it goes on from its last state, not the best.
        more = ("--scores", "1", "3", "2", "4")
        assert "BEST 16" in crew.go(2, *more, script="best_epoch.py")


def test_a_best_that_is_gone_is_said(crew: Any) -> None:
    crew.go(2, script="best_epoch.py")
    shutil.rmtree(crew.run.checkpoints / "step-8")
    launch = crew.launch(2, script="best_epoch.py")
    assert launch.wait() == [1, 1]
    assert "step-8: it is not there" in launch.output()
    assert "Traceback" not in launch.output()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one process's
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch 2.9's own use
@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_sharded_weights_come_from_a_folder_and_go_to_one(
    make_crew: Callable[[str], Any], tmp_path: Path, kind: str
) -> None:
    """A resume reads none of it: the folder is gone by then."""
    from torch.distributed import checkpoint  # a second, which no other test is to pay

    dcp: Any = checkpoint  # it has no types
    crew, words = make_crew("crew"), ("--safetensors",) if kind == "safetensors" else ()
    source, part = tmp_path / "source", {"script": "pretrained.py"}
    numbers = torch.Generator().manual_seed(3)
    shapes = {"0.weight": (16, 6), "0.bias": (16,), "1.weight": (6, 16), "1.bias": (6,)}
    pretrained = {name: torch.randn(shape, generator=numbers) for name, shape in shapes.items()}
    if kind == "dcp":
        dcp.save(pretrained, checkpoint_id=source, no_dist=True)
    else:
        source.mkdir()
        for i, names in enumerate((["0.weight", "1.bias"], ["0.bias", "1.weight"])):
            tensors = {name: pretrained[name] for name in names}
            save_file(tensors, source / f"model-0000{i + 1}-of-00002.safetensors", {"format": "pt"})
    assert "LOADED" in crew.go(2, str(source), *words, "--epochs", "0", **part)
    begun = weights(crew.run, 0)
    assert all(torch.equal(begun[name], pretrained[name]) for name in pretrained)

    crew.go(2, str(source), *words, "--epochs", "1", **part)
    shutil.rmtree(source)
    assert "LOADED" not in crew.go(2, str(source), *words, **part)
    written = {name: torch.zeros(shape) for name, shape in shapes.items()}
    dcp.load(written, checkpoint_id=crew.run.path / "dcp", no_dist=True)
    trained = weights(crew.run, 8)
    assert all(torch.equal(written[name], trained[name]) for name in trained)
    assert not any(torch.equal(written[name], pretrained[name]) for name in trained)


def test_the_best_of_a_loop_that_was_left_by_break_is_saved_before_the_next_one(crew: Any) -> None:
    assert "STEP 2 True" in crew.go(1, script="two_phases.py")
