"""Weights of a checkpoint as a safetensors file."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpc_ddp.core import checkpoints
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.training import export as export_module
from hpc_ddp.training.checkpoint.storage import disk
from hpc_ddp.training.checkpoint.storage.resharding import Reader
from hpc_ddp.training.data.batch_plan import Position
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


def test_a_checkpoint_reads_no_file_but_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A colleague's would lead to a secret, which is then in the model that the user hands on."""
    run, secret = claim_run(tmp_path), tmp_path / "id_rsa"
    secret.write_bytes(b"secret" * 100)
    manager = make_manager(make_saver(run), Position(step=1))
    manager.track({"model": torch.nn.Linear(2, 2)}, {}, ())
    manager.save_surely()
    (folder,) = run.checkpoints.iterdir()
    content = torch.load(folder / "state.pt", weights_only=True)
    (part,) = content["index"]["parts"]
    content["index"]["parts"] = [(str(secret), *part[1:])]
    torch.save(content, folder / "state.pt")
    manifest = checkpoints.read_manifest(folder)
    names = manifest.pop("files")
    (folder / "manifest.json").unlink()
    facts = {name: [checkpoints.facts_of(folder / name)] for name in names}
    disk.write_manifest(folder, manifest, facts)
    assert checkpoints.verify(folder) is None
    out = tmp_path / "model.safetensors"
    monkeypatch.setattr("sys.argv", ["export", str(run.path), str(out)])
    assert main() == 1
    text = capsys.readouterr().err
    assert f"names '{secret}', which is none of its files: hpc-ddp has not written it so" in text
    assert not out.exists()


def test_an_export_has_each_tensor_once_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied, transposed and empty ones as well."""
    read: list[int] = []
    written: list[int] = []

    def save(tensors: dict[str, torch.Tensor], path: Path, facts: dict[str, str]) -> None:
        written.extend(tensor.data_ptr() for tensor in tensors.values())
        save_file(tensors, path, facts)

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


def run_of(tmp_path: Path, model: torch.nn.Module) -> Path:
    """Return the folder of a run whose checkpoint of step 1 has the model."""
    run = claim_run(tmp_path)
    manager = make_manager(make_saver(run), Position(step=1))
    manager.track({"model": model}, {}, ())
    manager.save_surely()
    return run.path


@pytest.mark.parametrize(
    ("most", "names"),
    [
        (10**9, ["model.safetensors"]),
        (90, [*(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))]),
        (1, [*(f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4))]),
    ],
)
def test_a_folder_has_files_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, names: list[str]
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3))  # 80+20, 60+12 bytes
    monkeypatch.setattr(export_module, "MOST_BYTES", most)
    out = tmp_path / "exported"
    export(run_of(tmp_path, model), out)
    index = ["model.safetensors.index.json"] if len(names) > 1 else []
    assert sorted(path.name for path in out.iterdir()) == [*names, *index]
    exported = {name: t for file in names for name, t in load_file(out / file).items()}
    assert exported.keys() == model.state_dict().keys()
    assert all(torch.equal(exported[name], t) for name, t in model.state_dict().items())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    run = run_of(tmp_path, torch.nn.Linear(2, 2))
    (tmp_path / "exported").mkdir()
    with pytest.raises(UsageError, match="exported exists") as error:
        export(run, tmp_path / "exported")
    assert error.value.hint == "name a new folder, or a file: model.safetensors"
    with pytest.raises(HpcDdpError, match="can't be written"):
        export(run, tmp_path / "nowhere" / "exported")
    assert list((tmp_path / "exported").iterdir()) == []


@pytest.mark.more  # the import takes most of it
def test_transformers_reads_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = importlib.import_module("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 11, "n_positions": 4}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    monkeypatch.setattr(export_module, "MOST_BYTES", 1000)
    out = tmp_path / "exported"
    export(run_of(tmp_path, model), out)
    model.config.save_pretrained(out)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(out)
    assert all(torch.equal(loaded.state_dict()[n], t) for n, t in model.state_dict().items())
