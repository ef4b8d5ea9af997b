"""A saved state is loaded into the objects of a script, by name."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.training.checkpoint import loading, state
from hpc_ddp.training.checkpoint.shards import (
    Reader,
    StagingBuffer,
)
from hpc_ddp.training.devices import CPU
from hpc_ddp.training.models.mesh import ParallelDims
from unit.training.checkpoint.fakes import ManyParameters
from unit.training.fakes import Holds


def test_containers_keep_their_types(tmp_path: Path) -> None:
    value = {"a": (1, [torch.ones(2)]), "b": {"x", 3}, "c": OrderedDict(z=None), 4: "torch"}
    there, here = Holds(value), Holds()
    result = state.collect({"x": there})
    load_state(tmp_path, result, {"x": here})
    assert torch.equal(here.value["a"][1].pop(), value["a"][1].pop())  # type: ignore[index]
    assert here.value == value
    assert type(here.value["c"]) is OrderedDict


def load_state(
    folder: Path, result: state.State, objects: dict[str, Any], stage: bool = False
) -> None:
    buffer = StagingBuffer(CPU)
    buffer.fill(state.my_parts(result, ParallelDims()))
    (folder / "data").write_bytes(b"".join(buffer.bytes))
    reader = Reader([(folder / "data", buffer.pieces)])
    loading.put_back(objects, result.tree, reader, 7, stage)


def test_a_stage_loads_its_part_of_a_whole_model(tmp_path: Path) -> None:
    def make() -> tuple[Any, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(1, 2)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = make()
    result = state.collect({"m": model, "o": optimizer})
    stage, _ = make()
    del stage[1]
    batches = torch.optim.Adam(stage.parameters())
    with pytest.raises(HpcDdpError, match=r"1\.bias is not in the model, 1\.weight is not"):
        load_state(tmp_path, result, {"m": stage, "o": batches})
    load_state(tmp_path, result, {"m": stage, "o": batches}, stage=True)
    assert torch.equal(stage[0].weight, model[0].weight)
    assert len(batches.state) == 2
    wanted = optimizer.state[model[0].weight]["exp_avg"]
    assert torch.equal(batches.state[stage[0].weight]["exp_avg"], wanted)


def test_few_of_many_differences_are_named(tmp_path: Path) -> None:
    result = state.collect({"m": nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))})
    there = nn.Sequential(*(nn.Linear(3, 3) for _ in range(6)))
    with pytest.raises(HpcDdpError) as caught:
        load_state(tmp_path, result, {"m": there})
    assert caught.value.message.count(" here and ") == 8
    assert ", and 4 more" in caught.value.message
    with pytest.raises(HpcDdpError, match=r"of step 7 is not of this program's .*: m: 0\.bias"):
        load_state(tmp_path, result, {"m": there})


def test_groups_in_another_order_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    pair: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
    result = state.collect({"m": model, "o": torch.optim.SGD(pair)})
    other = torch.optim.SGD(pair[::-1])
    with pytest.raises(HpcDdpError, match="they are grouped otherwise"):
        load_state(tmp_path, result, {"m": model, "o": other})


@pytest.mark.parametrize(("count", "dots"), [(8, False), (9, True)])
def test_few_of_many_other_parameters_are_named(tmp_path: Path, count: int, dots: bool) -> None:
    model = nn.ParameterList(torch.ones(1) for _ in range(count + 1))
    optimizer = torch.optim.SGD(list(model.parameters()))
    result = state.collect({"m": model, "o": optimizer})
    other = torch.optim.SGD([model[0]])
    with pytest.raises(HpcDdpError) as caught:
        load_state(tmp_path, result, {"m": model, "o": other})
    assert caught.value.message.count("m.") == 8
    assert caught.value.message.endswith(" …") is dots


@pytest.mark.parametrize("value", [b"\0", (1 << 2039) - 1, 1 - (1 << 2039), {b"a": "\ud800"}])
def test_the_largest_numbers_that_are_saved_are_loaded(tmp_path: Path, value: Any) -> None:
    store_state(tmp_path, {"thing": Holds(value)})
    load_stored(tmp_path, {"thing": (loaded := Holds())})
    assert loaded.value == value


def test_model_optimizer_and_scheduler_are_loaded(tmp_path: Path) -> None:
    objects = []
    for steps in (2, 1):  # to be saved, and to be overwritten
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
        for _ in range(steps):
            model(torch.randn(1, 2)).sum().backward()
            optimizer.step()
            scheduler.step()
        objects.append({"model": model, "optimizer": optimizer, "scheduler": scheduler})
    store_state(tmp_path, objects[0])
    load_stored(tmp_path, objects[1])
    there, here = (state.collect(each) for each in objects)
    assert there.tree == here.tree
    assert all(torch.equal(tensor, here.tensors[name]) for name, tensor in there.tensors.items())
    assert here.tree["scheduler"]["last_epoch"] == 2


def store_state(folder: Path, objects: dict[str, Any], world_size: int = 1) -> None:
    """Write a state as `world_size` ranks would; no manifest."""
    found = state.collect(objects)
    for rank in range(world_size):
        buffer = StagingBuffer(CPU)
        buffer.fill(state.my_parts(found, ParallelDims(rank, world_size)))
        (folder / f"tensors-{rank}.bin").write_bytes(b"".join(buffer.bytes))
        torch.save(list(map(tuple, buffer.pieces)), folder / f"pieces-{rank}")
    torch.save(found.tree, folder / "tree")


def load_stored(folder: Path, objects: dict[str, Any], step: int = 1) -> None:
    files = [
        (path, torch.load(path.with_name(f"pieces-{path.stem[8:]}"), weights_only=True))
        for path in folder.glob("tensors-*")
    ]
    tree = torch.load(folder / "tree", weights_only=True)
    loading.put_back(objects, tree, Reader(files), step)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 40])
def test_state_written_by_any_number_of_ranks_is_loaded(tmp_path: Path, ranks: int) -> None:
    there, here = ManyParameters(), ManyParameters()
    there.part = torch.compile(there.part)  # type: ignore[assignment]  # never run
    optimizers = [torch.optim.Adam(m.parameters()) for m in (there, here)]
    for parameter in there.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizers[0].step()
    with torch.no_grad():
        there.count.add_(1)
    store_state(tmp_path, {"model": there, "optimizer": optimizers[0]}, ranks)
    sizes = [path.stat().st_size for path in tmp_path.glob("tensors-*")]
    assert max(sizes) < sum(sizes) / ranks + 1500  # equal shares, but for rows and alignment
    load_stored(tmp_path, {"model": here, "optimizer": optimizers[1]})
    theirs, ours = (
        state.collect({"m": m, "o": o}) for m, o in zip((there, here), optimizers, strict=True)
    )
    assert theirs.tree == ours.tree
    assert theirs.tensors.keys() == ours.tensors.keys()
    for name, tensor in theirs.tensors.items():
        assert torch.equal(tensor, ours.tensors[name]), name
        assert tensor.dtype == ours.tensors[name].dtype
    assert here.tied is here.row


class Forgetful(Holds):
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        raise KeyError("best")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1)


@pytest.mark.parametrize(
    ("there", "here", "words"),
    [
        ({"model": nn.Linear(2, 3)}, {"model": nn.Linear(2, 2)}, r"bias is \(2,\) here and \(3,\)"),
        ({"model": nn.Linear(2, 2)}, {"model": nn.Linear(2, 2, bias=False)}, "bias is not in the"),
        ({"model": nn.Linear(2, 2)}, {"net": nn.Linear(2, 2)}, "it holds model, tracked are net"),
        ({"x": Holds()}, {"x": Forgetful()}, "x: 'best'"),
        (
            {"optimizer": sgd(nn.Linear(2, 2))},
            {"optimizer": sgd(nn.Linear(2, 2, bias=False))},
            "optimizer: its parameters differ: parameter 1",
        ),
    ],
)
def test_a_program_with_other_objects_is_told_the_difference(
    tmp_path: Path, there: dict[str, Any], here: dict[str, Any], words: str
) -> None:
    store_state(tmp_path, there)
    with pytest.raises(HpcDdpError, match=words) as caught:
        load_stored(tmp_path, here, 12)
    assert "step 12" in caught.value.message


class Extra(nn.Module):
    """State that is no tensor of the model's own, with a tensor in it."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: dict[str, Any] = {}

    def get_extra_state(self) -> dict[str, Any]:
        return self.extra

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state


def test_extra_state_and_counters_are_loaded(tmp_path: Path) -> None:
    there, here = Extra(), Extra()
    there.extra = {"a": torch.arange(3), "n": 3}
    counters = [Holds(Counter({30: 1, 80: 2})), Holds()]
    store_state(tmp_path, {"model": there, "thing": counters[0]})
    load_stored(tmp_path, {"model": here, "thing": counters[1]})
    assert torch.equal(here.extra["a"], torch.arange(3))
    assert here.extra["n"] == 3
    assert counters[1].value == counters[0].value
    assert type(counters[1].value) is Counter


class Second(nn.Linear):
    """Of version 2; what older ones have saved is twice as large here."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, facts: Any, *rest: Any) -> None:
        if (facts.get("version") or 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state, prefix, facts, *rest)


def test_modules_load_with_the_version_that_was_saved(tmp_path: Path) -> None:
    there, here = (nn.Sequential(Second(2, 2)) for _ in range(2))
    there[0] = torch.compile(there[0])  # type: ignore[assignment]  # never run
    weights = [next(model.parameters()) for model in (there, here)]
    expected = weights[0].clone()
    store_state(tmp_path, {"model": there})
    for model in (there, here):
        load_stored(tmp_path, {"model": model})
    assert all(torch.equal(weight, expected) for weight in weights)


def test_optimizer_state_is_loaded_by_parameter_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    ways = [list(model.parameters()), list(model.parameters())[::-1]]
    there, here = (torch.optim.Adam(way) for way in ways)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    there.step()
    store_state(tmp_path, {"model": model, "optimizer": there})
    load_stored(tmp_path, {"model": model, "optimizer": here})
    for parameter in model.parameters():
        assert torch.equal(here.state[parameter]["exp_avg"], there.state[parameter]["exp_avg"])
    with pytest.raises(HpcDdpError, match="optimizer: it is of Adam, and here of SGD"):
        load_stored(tmp_path, {"model": model, "optimizer": sgd(model)})


def test_optimizer_state_keeps_the_memory_format_of_its_parameter(tmp_path: Path) -> None:
    """A fused optimizer goes through both as raw memory."""
    models = [nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2)]
    there, here = (torch.optim.AdamW(model.parameters(), fused=True) for model in models)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number, parameter in enumerate(model.parameters()):
            ramp = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
            parameter.grad = torch.empty_like(parameter).copy_(ramp + number)
        optimizer.step()

    step(models[0], there)
    store_state(tmp_path, {"model": models[0], "optimizer": there})
    load_stored(tmp_path, {"model": models[1], "optimizer": here})
    assert here.state[models[1].weight]["exp_avg"].stride() == models[1].weight.stride()
    for model, optimizer in zip(models, (there, here), strict=True):
        step(model, optimizer)
    assert torch.equal(models[0].weight, models[1].weight)


def test_a_tensor_that_no_rank_has_stored_is_named(tmp_path: Path) -> None:
    with pytest.raises(HpcDdpError, match=r"x\.value is a tensor that no rank has stored"):
        loading.put_back({"x": Holds()}, {"x": {"value": state.TENSOR}}, Reader([]), 1)


def test_private_weights_of_other_ranks_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    ddp: Any = nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, ["weight"])
    store_state(tmp_path, {"model": model}, 2)
    with pytest.raises(HpcDdpError, match="weight was each rank's own"):
        load_stored(tmp_path, {"model": nn.Linear(2, 2)})


class Model(nn.Module):
    """Four layers, or those of one stage under the same names, with a buffer in each."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.BatchNorm1d(3) for i in layers})


def objects_of(layers: range) -> dict[str, Any]:
    torch.manual_seed(layers.start)
    model = Model(layers)
    scales = [each for name, each in model.named_parameters() if name.endswith("weight")]
    rest = [each for name, each in model.named_parameters() if name.endswith("bias")]
    groups: list[dict[str, Any]] = [{"params": scales}, {"params": rest, "lr": 0.1}]
    optimizer = torch.optim.AdamW(groups)
    for each in model.parameters():
        each.data.normal_()
        each.grad = torch.randn_like(each)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def test_stages_make_a_whole_and_a_whole_makes_stages(tmp_path: Any) -> None:
    stages = [objects_of(range(2)), objects_of(range(2, 4))]
    trees, files = [], []
    for rank in range(4):
        found = state.collect(stages[rank // 2])
        trees.append(found.tree)
        buffer = StagingBuffer(torch.device("cpu"))
        buffer.fill(state.my_parts(found, ParallelDims(rank, 4, pp=2)))
        path = tmp_path / f"tensors-{rank}"
        path.write_bytes(b"".join(buffer.bytes))
        files.append((path, buffer.pieces))
    tree, reader = state.joined(trees[0], trees[2]), Reader(files)

    whole = objects_of(range(4))
    loading.put_back(whole, tree, reader, step=1)
    for stage in stages:
        weights = whole["model"].state_dict()
        assert all(weights[k].equal(v) for k, v in stage["model"].state_dict().items())
    assert [len(each["params"]) for each in whole["optimizer"].param_groups] == [4, 4]
    moments = [
        state.collect({n: each[n] for n in ("model", "optimizer")}).tensors for each in stages
    ]
    all_moments = state.collect({n: whole[n] for n in ("model", "optimizer")}).tensors
    assert all(all_moments[k].equal(v) for part in moments for k, v in part.items())
    assert len(all_moments) == sum(map(len, moments))

    other = objects_of(range(1, 3))  # cut elsewhere
    loading.put_back(other, tree, reader, step=1, stage=True)
    weights = whole["model"].state_dict()
    assert all(weights[k].equal(v) for k, v in other["model"].state_dict().items())
