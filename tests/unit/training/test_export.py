"""Weights of a checkpoint as a safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.training.checkpoint.shards import Reader
from hpc_ddp.training.data.order import Position
from hpc_ddp.training.export import export, main
from unit.training.checkpoint.fakes import claim_run, make_manager, make_saver


@pytest.mark.parametrize("per_rank", [(), ("model",)])
def test_an_export_refuses_tensors_that_differ_between_ranks(
    tmp_path: Path, per_rank: tuple[str, ...]
) -> None:
    run, model = claim_run(tmp_path), torch.nn.Linear(2, 2)
    manager = make_manager(make_saver(run), Position(step=1))
    if not per_rank:
        ddp: Any = torch.nn.parallel.DistributedDataParallel
        ddp._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
    manager.track({"model": model}, {}, per_rank)
    manager.save_surely()
    with pytest.raises(HpcDdpError, match=r"each rank had its own model\.bias"):
        export(run.path, run.path / "model.safetensors")


def test_an_export_names_the_objects_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = claim_run(tmp_path)
    manager = make_manager(make_saver(run), Position(step=1))
    manager.track({"net": torch.nn.Linear(2, 2), "_precision": torch.nn.Linear(1, 1)}, {}, ())
    manager.save_surely()
    out = tmp_path / "model.safetensors"
    monkeypatch.setattr("sys.argv", ["export", str(run.path), str(out)])
    assert main() == 2
    said = capsys.readouterr().err
    assert "has no tensors of 'model'; accepted: net\n" in said
    assert "hint: --object NAME, as run.track has it: --object net\n" in said
    monkeypatch.setattr("sys.argv", ["export", str(run.path), str(out), "--object", "net"])
    assert main() == 0
    assert load_file(out).keys() == {"weight", "bias"}


def test_an_export_has_each_tensor_once_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied, transposed and empty ones as well."""
    read: list[int] = []
    written: list[int] = []

    def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
        written.extend(tensor.data_ptr() for tensor in tensors.values())
        save_file(tensors, path)

    def read_one(reader: Reader, name: str) -> torch.Tensor:
        tensor = original(reader, name)
        read.append(tensor.data_ptr())
        return tensor

    original = Reader.read
    monkeypatch.setattr(Reader, "read", read_one)
    monkeypatch.setattr("safetensors.torch.save_file", save)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model.register_buffer("empty", torch.zeros(0, 4))
    model.register_buffer("other", torch.zeros(0))
    model.register_buffer("transposed", torch.arange(6).view(2, 3).t())
    run = claim_run(tmp_path)
    manager = make_manager(make_saver(run), Position(step=1))
    manager.track({"model": model}, {}, ())
    manager.save_surely()
    export(run.path, run.path / "model.safetensors")
    assert written == read
    exported = load_file(run.path / "model.safetensors")
    expected = model.state_dict()
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
