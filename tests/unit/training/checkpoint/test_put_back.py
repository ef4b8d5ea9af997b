"""A saved state is loaded into the objects of a script, by name."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.training.checkpoint import optimizer_state, plain_state, put_back, state
from hpc_ddp.training.checkpoint.rank_part import parts_of_rank
from hpc_ddp.training.checkpoint.storage import shards
from hpc_ddp.training.checkpoint.storage.layout import StoredShard
from hpc_ddp.training.checkpoint.storage.resharding import Reader
from hpc_ddp.training.models import rng
from hpc_ddp.training.models.mesh import ParallelDims
from hpc_ddp.training.models.trained_parameters import TrainedParameters
from unit.training.checkpoint.fakes import ManyParameters, reader_of, write_buffer
from unit.training.fakes import Holds


def test_containers_keep_their_types(tmp_path: Path) -> None:
    value = {"a": (1, [torch.ones(2)]), "b": {"x", 3}, "c": OrderedDict(z=None), 4: "torch"}
    saved, loaded = Holds(value), Holds()
    result = state.collect({"x": saved})
    load_state(tmp_path, result, {"x": loaded})
    assert torch.equal(loaded.value["a"][1].pop(), value["a"][1].pop())  # type: ignore[index]
    assert loaded.value == value
    assert type(loaded.value["c"]) is OrderedDict


def load_state(
    folder: Path,
    result: state.State,
    objects: dict[str, Any],
    stage: bool = False,
    added: tuple[str, ...] = (),
) -> None:
    reader = reader_of([write_buffer(folder / "data", parts_of_rank(result, ParallelDims()))])
    put_back.put_back(objects, result.tree, reader, 7, stage, added)


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


def test_a_trained_tensor_of_no_module_is_resumed(tmp_path: Path) -> None:
    """As SAC's temperature, or the weight of a loss; also a learning rate that the script fills."""

    def make() -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
        model, temperature = nn.Linear(1, 1), torch.zeros(1, requires_grad=True)
        rate, frozen = torch.tensor(0.1), torch.zeros(2)
        parameters = [frozen, *model.parameters(), temperature]
        optimizer = torch.optim.AdamW(parameters, lr=rate, foreach=False)
        return {"m": model, "o": optimizer}, temperature, rate

    objects, temperature, rate = make()
    (objects["m"](torch.ones(1)) * temperature.exp()).sum().backward()
    objects["o"].step()
    rate.fill_(0.5)
    result = state.collect(objects)
    own = {name for name in result.tensors if "parameter " in name}
    assert own == {
        "o.<parameters>.parameter 3",
        *(f"o.state.parameter 3.{key}" for key in ("step", "exp_avg", "exp_avg_sq")),
    }
    assert own <= result.buffers  # each rank may have its own
    assert not own & result.replicated
    others, later, later_rate = make()
    load_state(tmp_path, result, others)
    assert later.item() == temperature.item() != 0
    assert others["o"].state[later]["step"] == 1
    assert later_rate.item() == 0.5
    assert others["o"].param_groups[0]["lr"] is later_rate


class WideState(torch.optim.Optimizer):
    """Keeps states in fp32 whatever the weights are, as Adafactor does, one of them in a list, a
    count of no parameter, as MADGRAD does, and scalars on the CPU, as NAdam does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.state["count"] = torch.tensor([len(self.state)])  # type: ignore[index]
        for weight in self.param_groups[0]["params"]:
            average = weight.detach().float() / 3
            self.state[weight] = {"average": average, "rows": [average.sum(0)], "step": 1}
            self.state[weight]["product"] = average.sum().double()


def test_the_state_of_an_optimizer_keeps_its_types(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, WideState]:
        model = nn.Linear(3, 2).bfloat16()
        return model, WideState(model.parameters())

    model, optimizer = make()
    optimizer.step()
    result = state.collect({"m": model, "o": optimizer})
    assert "o.<state of no parameter>.count" in result.tensors
    other, later = make()
    load_state(tmp_path, result, {"m": other, "o": later})
    stored, loaded = optimizer.state_dict()["state"], later.state_dict()["state"]
    assert loaded["count"].item() == stored["count"].item() == 0
    for number in (0, 1):
        assert loaded[number]["average"].dtype == torch.float32
        assert torch.equal(loaded[number]["average"], stored[number]["average"])
        assert torch.equal(loaded[number]["rows"][0], stored[number]["rows"][0])
        assert loaded[number]["product"].item() == stored[number]["product"].item()
        assert loaded[number]["step"] == 1


def test_a_state_that_is_there_gets_the_numbers() -> None:
    """A CUDA graph of the optimizer's step has the addresses of its tensors."""
    weights = [nn.Parameter(torch.ones(2, 3)) for _ in range(2)]
    optimizers = [torch.optim.AdamW([weight], lr=0.1) for weight in weights]
    for weight, optimizer, steps in zip(weights, optimizers, (1, 2), strict=True):
        for _ in range(steps):
            weight.grad = torch.full_like(weight, float(steps))
            optimizer.step()
    first, second = (optimizer.state[w] for w, optimizer in zip(weights, optimizers, strict=True))
    tensors = dict(first)
    optimizer_state.load(
        optimizers[0], {**optimizers[1].state_dict(), optimizer_state.PARAMETERS: {}}
    )
    loaded = optimizers[0].state[weights[0]]
    assert all(loaded[key] is tensors[key] for key in tensors)
    assert all(torch.equal(loaded[key], second[key]) for key in tensors)


def test_a_text_in_an_optimizers_state_is_loaded_as_it_is() -> None:
    """torch makes a generator of it, and a text of that."""
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    before, after = (torch.optim.SGD([weight]) for weight in weights)
    before.state[weights[0]] = {"kind": "adam", "keys": ["a", "bc"]}
    optimizer_state.load(after, {**before.state_dict(), optimizer_state.PARAMETERS: {}})
    assert after.state[weights[1]] == {"kind": "adam", "keys": ["a", "bc"]}


def test_views_in_an_optimizers_settings_stay_views() -> None:
    """As the buffers of Muon, in which each rank's update arrives."""

    def make(number: float) -> torch.optim.Optimizer:
        buffer = torch.full((2, 3), number)
        group = {"params": [nn.Parameter(torch.ones(3))], "buffer": buffer, "views": [*buffer]}
        return torch.optim.SGD([group], lr=0.1)

    before, after = make(1.0), make(2.0)
    optimizer_state.load(after, {**before.state_dict(), optimizer_state.PARAMETERS: {}})
    (group,) = after.param_groups
    assert group["buffer"].eq(1).all()
    group["buffer"].fill_(3)
    assert [view.sum().item() for view in group["views"]] == [9, 9]
    assert group["params"][0] is not before.param_groups[0]["params"][0]


def test_a_cpus_state_of_a_parameter_that_is_one_number_follows_it_to_its_device() -> None:
    """Its averages are one number each, as the constants that NAdam keeps on the CPU."""

    def trained(device: str) -> torch.optim.Optimizer:
        weights = [nn.Parameter(torch.ones(shape, device=device)) for shape in ((), (2,))]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        return torch.optim.NAdam(weights, foreach=False)

    before, after = trained("cpu"), trained("meta")
    before.step()
    optimizer_state.load(after, {**before.state_dict(), optimizer_state.PARAMETERS: {}})
    for state_of_one in after.state.values():
        devices = {key: value.device.type for key, value in state_of_one.items()}
        assert devices.pop("mu_product") == devices.pop("step") == "cpu"
        assert set(devices.values()) == {"meta"}


@pytest.mark.parametrize("is_own_group", [False, True])
def test_a_part_that_is_new_on_purpose_begins_as_it_is_made(
    tmp_path: Path, is_own_group: bool
) -> None:
    def make(*names: str) -> tuple[Any, torch.optim.Optimizer]:
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
        first, *later = ([*layer.parameters()] for layer in model.values())
        groups: list[Any] = [{"params": first, "lr": 0.5}, *({"params": group} for group in later)]
        if not is_own_group:
            groups = [{"params": [*model.parameters()], "lr": 0.5}]
        return model, torch.optim.Adam(groups)

    model, optimizer = make("body")
    model["body"](torch.randn(1, 2)).sum().backward()
    optimizer.step()
    result = state.collect({"m": model, "o": optimizer})
    larger, later = make("body", "head")
    head = larger["head"].weight.detach().clone()
    objects = {"m": larger, "o": later}
    for added in ((), ("m.hea",), ("m.body",)):
        with pytest.raises(HpcDdpError, match=r"head\.bias is not in the checkpoint") as caught:
            load_state(tmp_path, result, objects, added=added)
        assert "added=('ema', 'model.head')" in str(caught.value.hint)
    load_state(tmp_path, result, objects, added=("m.head",))
    assert torch.equal(larger["body"].weight, model["body"].weight)
    assert torch.equal(larger["head"].weight, head)
    assert [len(later.state.get(weight, {})) for weight in larger.parameters()] == [3, 3, 0, 0]
    assert [group["lr"] for group in later.param_groups] == (
        [0.5, 0.001] if is_own_group else [0.5]
    )
    larger["head"](torch.randn(1, 2)).sum().backward()
    later.step()
    load_state(tmp_path, state.collect(objects), objects)  # now it is a part as the others


def test_few_of_many_differences_are_named(tmp_path: Path) -> None:
    result = state.collect({"m": nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))})
    wider = nn.Sequential(*(nn.Linear(3, 3) for _ in range(6)))
    with pytest.raises(HpcDdpError) as caught:
        load_state(tmp_path, result, {"m": wider})
    assert caught.value.message.count(" here and ") == 8
    assert ", and 4 more" in caught.value.message
    with pytest.raises(HpcDdpError, match=r"of step 7 is not of this program's .*: m: 0\.bias"):
        load_state(tmp_path, result, {"m": wider})


def test_groups_in_another_order_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    pair: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
    result = state.collect({"m": model, "o": torch.optim.SGD(pair)})
    backwards = torch.optim.SGD(pair[::-1])
    with pytest.raises(HpcDdpError, match="they are grouped otherwise"):
        load_state(tmp_path, result, {"m": model, "o": backwards})


@pytest.mark.parametrize(("count", "dots"), [(8, False), (9, True)])
def test_few_of_many_other_parameters_are_named(tmp_path: Path, count: int, dots: bool) -> None:
    model = nn.ParameterList(torch.ones(1) for _ in range(count + 1))
    optimizer = torch.optim.SGD(list(model.parameters()))
    result = state.collect({"m": model, "o": optimizer})
    smaller = torch.optim.SGD([model[0]])
    with pytest.raises(HpcDdpError) as caught:
        load_state(tmp_path, result, {"m": model, "o": smaller})
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
    saved, loaded = (state.collect(group) for group in objects)
    assert saved.tree == loaded.tree
    assert all(torch.equal(tensor, loaded.tensors[name]) for name, tensor in saved.tensors.items())
    assert loaded.tree["scheduler"]["last_epoch"] == 2


def store_state(folder: Path, objects: dict[str, Any], world_size: int = 1) -> None:
    """Write a state as `world_size` ranks would; no manifest."""
    collected = state.collect(objects)
    for rank in range(world_size):
        parts = parts_of_rank(collected, ParallelDims(rank, world_size))
        _, pieces = write_buffer(folder / f"tensors-{rank}", parts)
        torch.save(list(map(tuple, pieces)), folder / f"pieces-{rank}")
    torch.save(collected.tree, folder / "tree")


def load_stored(folder: Path, objects: dict[str, Any], step: int = 1) -> None:
    files = [
        (path, [StoredShard(*row) for row in torch.load(folder / f"pieces-{path.name[8:]}")])
        for path in folder.glob("tensors-*")
    ]
    tree = torch.load(folder / "tree", weights_only=True)
    put_back.put_back(objects, tree, reader_of(files), step)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 40])
def test_state_written_by_any_number_of_ranks_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setattr(shards, "LEAST_SHARE", 1)
    saved, loaded = ManyParameters(), ManyParameters()
    saved.part = torch.compile(saved.part)  # type: ignore[assignment]  # never run
    optimizers = [torch.optim.Adam(m.parameters()) for m in (saved, loaded)]
    for parameter in saved.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizers[0].step()
    with torch.no_grad():
        saved.count.add_(1)
    store_state(tmp_path, {"model": saved, "optimizer": optimizers[0]}, ranks)
    sizes = [path.stat().st_size for path in tmp_path.glob("tensors-*")]
    assert max(sizes) < sum(sizes) / ranks + 1500  # equal shares, but for rows and alignment
    load_stored(tmp_path, {"model": loaded, "optimizer": optimizers[1]})
    expected, actual = (
        state.collect({"m": m, "o": o}) for m, o in zip((saved, loaded), optimizers, strict=True)
    )
    assert expected.tree == actual.tree
    assert expected.tensors.keys() == actual.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(tensor, actual.tensors[name]), name
        assert tensor.dtype == actual.tensors[name].dtype
    assert loaded.tied is loaded.row


class Forgetful(Holds):
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        raise KeyError("best")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1)


def made(objects: dict[str, Any]) -> dict[str, Any]:
    """Make the optimizers among the objects: the first one imports torch's compiler, and not while
    the tests are collected."""
    return {name: item() if isinstance(item, partial) else item for name, item in objects.items()}


@pytest.mark.parametrize(
    ("saved", "tracked", "words"),
    [
        ({"model": nn.Linear(2, 3)}, {"model": nn.Linear(2, 2)}, r"bias is \(2,\) here and \(3,\)"),
        ({"model": nn.Linear(2, 2)}, {"model": nn.Linear(2, 2, bias=False)}, "bias is not in the"),
        ({"model": nn.Linear(2, 2)}, {"net": nn.Linear(2, 2)}, "it holds model, tracked are net"),
        ({"x": Holds()}, {"x": Forgetful()}, "x: 'best'"),
        (
            {"optimizer": partial(sgd, nn.Linear(2, 2))},
            {"optimizer": partial(sgd, nn.Linear(2, 2, bias=False))},
            "optimizer: its parameters differ: parameter 1",
        ),
    ],
)
def test_a_program_with_other_objects_is_told_the_difference(
    tmp_path: Path, saved: dict[str, Any], tracked: dict[str, Any], words: str
) -> None:
    store_state(tmp_path, made(saved))
    with pytest.raises(HpcDdpError, match=words) as caught:
        load_stored(tmp_path, made(tracked), 12)
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
    saved, loaded = Extra(), Extra()
    saved.extra = {"a": torch.arange(3), "n": 3}
    counters = [Holds(Counter({30: 1, 80: 2})), Holds()]
    store_state(tmp_path, {"model": saved, "thing": counters[0]})
    load_stored(tmp_path, {"model": loaded, "thing": counters[1]})
    assert torch.equal(loaded.extra["a"], torch.arange(3))
    assert loaded.extra["n"] == 3
    assert counters[1].value == counters[0].value
    assert type(counters[1].value) is Counter


class Second(nn.Linear):
    """A module of version 2, whose weights are twice those of older versions."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, facts: Any, *arguments: Any) -> None:
        if (facts.get("version") or 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state, prefix, facts, *arguments)


def test_modules_load_with_the_version_that_was_saved(tmp_path: Path) -> None:
    saved, loaded = (nn.Sequential(Second(2, 2)) for _ in range(2))
    saved[0] = torch.compile(saved[0])  # type: ignore[assignment]  # never run
    weights = [next(model.parameters()) for model in (saved, loaded)]
    expected = weights[0].clone()
    store_state(tmp_path, {"model": saved})
    for model in (saved, loaded):
        load_stored(tmp_path, {"model": model})
    assert all(torch.equal(weight, expected) for weight in weights)


def test_optimizer_state_is_loaded_by_parameter_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    ways = [list(model.parameters()), list(model.parameters())[::-1]]
    saved, loaded = (torch.optim.Adam(way) for way in ways)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    saved.step()
    store_state(tmp_path, {"model": model, "optimizer": saved})
    load_stored(tmp_path, {"model": model, "optimizer": loaded})
    for parameter in model.parameters():
        assert torch.equal(loaded.state[parameter]["exp_avg"], saved.state[parameter]["exp_avg"])
    with pytest.raises(HpcDdpError, match="optimizer: it is of Adam, and here of SGD"):
        load_stored(tmp_path, {"model": model, "optimizer": sgd(model)})


def test_optimizer_state_keeps_the_memory_format_of_its_parameter(tmp_path: Path) -> None:
    """A fused optimizer goes through both as raw memory."""
    models = [nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2)]
    saved, loaded = (torch.optim.AdamW(model.parameters(), fused=True) for model in models)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number, parameter in enumerate(model.parameters()):
            ramp = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
            parameter.grad = torch.empty_like(parameter).copy_(ramp + number)
        optimizer.step()

    step(models[0], saved)
    store_state(tmp_path, {"model": models[0], "optimizer": saved})
    load_stored(tmp_path, {"model": models[1], "optimizer": loaded})
    assert loaded.state[models[1].weight]["exp_avg"].stride() == models[1].weight.stride()
    for model, optimizer in zip(models, (saved, loaded), strict=True):
        step(model, optimizer)
    assert torch.equal(models[0].weight, models[1].weight)


def test_a_device_that_the_worker_lacks_now_is_its_first_one() -> None:
    reader = Reader([], [])
    reader.devices = [torch.device("cuda", 2), torch.device("cuda", 3)]
    assert [reader.device(number).index for number in (0, 1, 2)] == [2, 3, 2]


def test_a_tensor_that_no_rank_has_stored_is_named(tmp_path: Path) -> None:
    with pytest.raises(HpcDdpError, match=r"x\.value is a tensor that no rank has stored"):
        put_back.put_back({"x": Holds()}, {"x": {"value": plain_state.TENSOR}}, Reader([], []), 1)


@pytest.mark.parametrize("kind", put_back.DEVICE_ERRORS)
def test_an_error_of_the_device_is_none_of_the_checkpoint(
    tmp_path: Path, kind: type[RuntimeError]
) -> None:
    class Fails(Holds):
        def load_state_dict(self, saved: dict[str, Any]) -> None:
            raise kind("of a device")

    with pytest.raises(kind, match="of a device"):
        load_state(tmp_path, state.collect({"x": Holds(1)}), {"x": Fails()})


def test_an_error_of_a_weights_copy_is_none_of_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch catches it, and raises a RuntimeError of its own with the text."""

    def copy(tensor: torch.Tensor, source: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    saved = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    with pytest.raises(RuntimeError, match="CUDA out of memory") as caught:
        put_back._load_object("m", nn.Linear(2, 2), saved, step=4)
    assert "this program's objects" not in str(caught.value)


def test_a_peer_that_ends_during_a_restore_is_none_of_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def read(reader: Reader, name: str, template: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(Reader, "read", read)
    model = {"m": nn.Linear(2, 2)}
    with pytest.raises(RuntimeError, match=r"^Connection closed by peer"):
        load_state(tmp_path, state.collect(model), model)


class _Growing(nn.Module):
    """A module whose state grows with its first batch, as that of an observer and of fp8 does."""

    def __init__(self, size: int = 0, extra: Any = None) -> None:
        super().__init__()
        self.extra = extra
        self.register_buffer("low", torch.arange(float(size)))

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.low = torch.empty_like(state[f"{prefix}low"])
        super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize("at_first", [torch.empty(0), None])
def test_state_that_grows_in_training_is_loaded(tmp_path: Path, at_first: Any) -> None:
    grown = _Growing(3, torch.arange(5.0))
    fresh = _Growing(0, at_first)
    load_state(tmp_path, state.collect({"m": nn.Sequential(grown)}), {"m": nn.Sequential(fresh)})
    assert torch.equal(fresh.low, grown.low)
    assert torch.equal(fresh.extra, grown.extra)


def test_a_buffer_of_another_size_is_refused(tmp_path: Path) -> None:
    result = state.collect({"m": nn.BatchNorm1d(3, affine=False)})
    sizes = r"running_mean.*torch\.Size\(\[3\]\).*torch\.Size\(\[2\]\)"
    with pytest.raises(HpcDdpError, match=sizes):
        load_state(tmp_path, result, {"m": nn.BatchNorm1d(2, affine=False)})


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
    scales = [parameter for name, parameter in model.named_parameters() if name.endswith("weight")]
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    groups: list[dict[str, Any]] = [{"params": scales}, {"params": biases, "lr": 0.1}]
    optimizer = torch.optim.AdamW(groups)
    for parameter in model.parameters():
        parameter.data.normal_()
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def test_stages_make_a_whole_and_a_whole_makes_stages(tmp_path: Any) -> None:
    stages = [objects_of(range(2)), objects_of(range(2, 4))]
    trees, files = [], []
    for rank in range(4):
        collected = state.collect(stages[rank // 2])
        trees.append(collected.tree)
        parts = parts_of_rank(collected, ParallelDims(rank, 4, pp=2))
        files.append(write_buffer(tmp_path / f"tensors-{rank}", parts))
    tree, reader = state.merge_trees(trees[0], trees[2]), reader_of(files)

    full = objects_of(range(4))
    put_back.put_back(full, tree, reader, step=1)
    for stage in stages:
        weights = full["model"].state_dict()
        assert all(weights[k].equal(v) for k, v in stage["model"].state_dict().items())
    assert [len(stage_objects["params"]) for stage_objects in full["optimizer"].param_groups] == [
        4,
        4,
    ]
    moments = [
        state.collect({n: stage_objects[n] for n in ("model", "optimizer")}).tensors
        for stage_objects in stages
    ]
    all_moments = state.collect({n: full[n] for n in ("model", "optimizer")}).tensors
    assert all(all_moments[k].equal(v) for part in moments for k, v in part.items())
    assert len(all_moments) == sum(map(len, moments))

    middle = objects_of(range(1, 3))  # cut elsewhere
    put_back.put_back(middle, tree, reader, step=1, stage=True)
    weights = full["model"].state_dict()
    assert all(weights[k].equal(v) for k, v in middle["model"].state_dict().items())


class Packed(nn.Linear):
    """Writes the scale of its packed weights, and can't load it, as bitsandbytes' Linear4bit."""

    scale = 2.0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scale"] = torch.tensor(self.scale)


def test_entries_that_a_model_writes_and_does_not_load_have_to_be_equal(tmp_path: Path) -> None:
    model, fresh = nn.Sequential(Packed(2, 2)), nn.Sequential(Packed(2, 2))
    result = state.collect({"m": model})
    load_state(tmp_path, result, {"m": fresh})
    assert torch.equal(fresh.state_dict()["0.weight"], model.state_dict()["0.weight"])
    for scale in (3.0, 2):  # a whole number is of another type
        vars(fresh[0])["scale"] = scale
        with pytest.raises(HpcDdpError, match=r"m: the model does not load 0\.weight\.scale"):
            load_state(tmp_path, result, {"m": fresh})


def test_what_a_model_leaves_out_of_its_state_stays(tmp_path: Path) -> None:
    def drop(model: Any, entries: Any, prefix: str, metadata: Any) -> None:
        del entries[f"{prefix}weight"]

    model, fresh = [(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
    for frozen in (model[0], fresh[0]):
        hooked: Any = frozen.requires_grad_(False)
        hooked.register_state_dict_post_hook(drop)
    before = fresh[0].weight.clone()
    stored = state.collect({"m": nn.Sequential(*model)})
    load_state(tmp_path, stored, {"m": nn.Sequential(*fresh)})
    assert torch.equal(fresh[0].weight, before)
    assert torch.equal(fresh[1].weight, model[1].weight)


def test_weights_are_loaded_that_were_left_out_while_they_were_frozen(tmp_path: Path) -> None:
    def drop(model: Any, entries: Any, prefix: str, metadata: Any) -> None:
        for key, weight in model.named_parameters():
            if not weight.requires_grad:
                del entries[f"{prefix}{key}"]

    model: Any = nn.Linear(2, 2)
    fresh: Any = nn.Linear(2, 2).requires_grad_(False)  # the loop has trained it from some step on
    for net in (model, fresh):
        net.register_state_dict_post_hook(drop)
    load_state(tmp_path, state.collect({"m": model}), {"m": fresh})
    assert torch.equal(fresh.weight, model.weight)


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand(2, generator=g).tolist()),
        (lambda: random.Random(3), lambda g: [g.gauss(0, 1), g.random()]),
        (lambda: numpy.random.RandomState(3), lambda g: g.normal(size=3).tolist()),
        (lambda: numpy.random.default_rng(3), lambda g: g.random(2).tolist()),
        (lambda: numpy.random.Generator(numpy.random.MT19937(3)), lambda g: g.random(2).tolist()),
        (lambda: numpy.random.Generator(numpy.random.SFC64(3)), lambda g: g.random(2).tolist()),
        (lambda: numpy.random.Generator(numpy.random.Philox(3)), lambda g: g.random(2).tolist()),
    ],
)
def test_a_generator_of_the_script_goes_on(make: Any, draw: Any, tmp_path: Path) -> None:
    generator, fresh = make(), make()
    draw(generator)
    assert rng.is_generator(generator)
    objects, others = ({"g": rng.GeneratorState(g)} for g in (generator, fresh))
    load_state(tmp_path, state.collect(objects), others)
    assert draw(fresh) == draw(make())  # before the loop, as in each attempt
    load_state(tmp_path, state.collect(others), others)  # a save before the loop
    others["g"].restore()
    expected = draw(generator)
    assert draw(fresh) == expected
    others["g"].restore()
    assert draw(fresh) == draw(generator)


def test_the_systems_generator_has_no_state() -> None:
    assert not rng.is_generator(random.SystemRandom())
    assert not rng.is_generator(numpy.random)


def test_layers_stay_frozen_that_the_loop_has_frozen(tmp_path: Path) -> None:
    """What the loop has left alone is as the script makes it, perhaps otherwise by now."""
    saved, loaded = (nn.Sequential(*(nn.Linear(1, 1) for _ in range(3))) for _ in range(2))
    trained = TrainedParameters()
    trained.add([saved])
    saved[1].requires_grad_(False)
    result = state.collect({"m": saved}, trained=trained)
    load_state(tmp_path, result, {"m": loaded})
    loaded[0].requires_grad_(False)
    tree = {"m": result.tree["m"], "x": {}}
    (note,) = put_back.put_flags_back({"m": loaded, "x": Holds(1)}, tree, TrainedParameters())
    assert note == "m: 1.weight, … frozen or not as the loop had set it"
    assert [layer.weight.requires_grad for layer in loaded] == [False, False, True]
    trained.add([nn.Linear(1, 1)])
    saved[1].requires_grad_(True)
    assert state.GRADIENTS not in state.collect({"m": saved}, trained=trained).tree["m"]


def test_settings_that_a_checkpoint_undoes_are_named() -> None:
    """What a scheduler or the loop sets is no change of the script."""
    parameter = nn.Parameter(torch.ones(1))
    trained = TrainedParameters()
    make = [{"lr": 0.1}, {"lr": 0.1}, {"lr": 0.2, "betas": (0.5, 0.6)}]
    stored, equal, other = (torch.optim.Adam([parameter], **settings) for settings in make)  # type: ignore[arg-type]
    trained.add([stored, equal, other])
    stored.param_groups[0]["lr"] = 0.05
    tree = state.collect({"o": stored}, trained=trained).tree
    assert optimizer_state.find_ignored_settings({"o": equal, "x": Holds(1)}, tree, trained) == []
    notes = sorted(optimizer_state.find_ignored_settings({"o": other}, tree, trained))
    assert [note.partition(":")[2].partition(":")[0] for note in notes] == [
        " betas was (0.9, 0.999), and the script makes it (0.5, 0.6)",
        " lr was 0.1, and the script makes it 0.2",
    ]
    assert optimizer_state.find_ignored_settings({"o": other}, {"o": {}}, trained) == []


def test_a_schedule_that_a_checkpoint_undoes_is_named() -> None:
    """As where a run gets more epochs."""

    def make(epochs: int) -> SequentialLR:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        parts = [LinearLR(optimizer, 0.5), CosineAnnealingLR(optimizer, epochs)]
        return SequentialLR(optimizer, parts, [5])

    tree = state.collect({"s": make(10)}).tree
    trained = TrainedParameters()
    assert optimizer_state.find_ignored_settings({"s": make(10)}, tree, trained) == []
    (note,) = optimizer_state.find_ignored_settings({"s": make(20)}, tree, trained)
    assert note.startswith("s: T_max of scheduler 1 was 10, and the script makes it 20: the")


def test_the_way_in_which_a_step_is_computed_is_the_scripts(tmp_path: Path) -> None:
    """A fused optimizer is faster, and one without foreach needs less memory."""
    model = nn.Linear(2, 2)
    stored = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    stored.step()
    fused = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    load_state(tmp_path, state.collect({"m": model, "o": stored}), {"m": model, "o": fused})
    (group,) = fused.param_groups
    assert (group["lr"], group["fused"], group["foreach"]) == (0.5, True, None)
    fused.step()
    trained = TrainedParameters()
    plain = torch.optim.AdamW(model.parameters(), lr=0.5, foreach=False)
    trained.add([stored, plain])
    tree = state.collect({"o": stored}, trained=trained).tree
    assert optimizer_state.find_ignored_settings({"o": plain}, tree, trained) == []


def test_groups_of_an_optimizer_stay_the_same_objects() -> None:
    """The script may keep them, and an optimizer inside another one, as SAM has it, shares them."""

    class Outer(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.5)
            self.base = torch.optim.SGD(self.param_groups, lr=0.5)
            self.param_groups = self.base.param_groups

        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            self.base.param_groups = self.param_groups

    model = nn.Linear(1, 1)
    outer = Outer(model.parameters())
    groups, (group,) = outer.param_groups, outer.param_groups
    stored = copy.deepcopy(outer.state_dict())
    stored["param_groups"][0]["lr"] = 0.25
    optimizer_state.load(outer, {**stored, optimizer_state.PARAMETERS: {}})
    assert outer.param_groups is outer.base.param_groups is groups
    assert groups[0] is group
    assert group["lr"] == 0.25
    assert group["params"] == list(model.parameters())


def test_modes_of_modules_come_back() -> None:
    """As of a batch norm whose means the loop has stopped; others stay as the script makes them."""
    saved, loaded = (nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)) for _ in range(2))
    trained = TrainedParameters()
    trained.add([saved])
    saved[0].eval()
    tree = state.collect({"m": saved}, trained=trained).tree
    loaded[1].eval()
    put_back.put_flags_back({"m": loaded}, tree, TrainedParameters())
    assert [part.training for part in loaded.modules()] == [True, False, False]


def test_the_state_of_another_librarys_generator_is_refused() -> None:
    generators = random.Random(1), numpy.random.default_rng(1), torch.Generator()
    for first in generators:
        for second in generators:
            stored = rng.GeneratorState(second).state_dict()
            if first is second:
                rng.GeneratorState(first).load_state_dict(stored)
                continue
            with pytest.raises(ValueError, match="another kind of generator"):
                rng.GeneratorState(first).load_state_dict(stored)
