from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.training.checkpoint import loading, state
from hpc_ddp.training.checkpoint.shards import OWN, Reader, StagingBuffer
from hpc_ddp.training.data.batches import to_device
from hpc_ddp.training.data.loader import Loader, Shard
from hpc_ddp.training.data.order import BatchPlan, Position
from hpc_ddp.training.devices import choose_devices
from hpc_ddp.training.models import rng
from hpc_ddp.training.models.mesh import ParallelDims
from hpc_ddp.training.process.environment import DistEnv, LaunchEnv
from hpc_ddp.training.run import Run
from unit.training.fakes import Holds, give_gpus

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_randomness() -> Iterator[None]:
    with rng.untouched():
        yield


def draw() -> tuple[float, float, float]:
    return random.random(), torch.rand(()).item(), numpy.random.random()


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), *draw()])


def make_loader(rank: int = 0, world_size: int = 1, **options: Any) -> Loader:
    place: dict[str, Any] = {"position": Position(), "device": CPU, "check": lambda: None}
    cut = BatchPlan(4 * world_size, rank, world_size)
    return Loader(Noisy(), cut, seed=1, sync=lambda on: None, **{**place, **options})


def test_generators_go_through_a_file_as_plain_values(tmp_path: Any) -> None:
    random.gauss(0, 1)  # leaves a second number behind
    torch.save(rng.snapshot([CPU]), tmp_path / "rng")
    expected = [draw() for _ in range(3)]
    gauss = random.gauss(0, 1)
    rng.restore(torch.load(tmp_path / "rng", weights_only=True), [CPU])
    assert [draw() for _ in range(3)] == expected
    assert random.gauss(0, 1) == gauss


def test_a_sample_is_the_same_in_any_batch_and_leaves_no_trace() -> None:
    before = rng.snapshot()
    alone = {row[0].item(): row for batch in make_loader() for row in batch}
    shared = [row for rank in range(3) for batch in make_loader(rank, 3) for row in batch]
    assert len(alone) == 23
    assert all(torch.equal(row, alone[row[0].item()]) for row in shared)
    after = rng.snapshot()
    assert torch.equal(before["torch"], after["torch"])
    assert torch.equal(before["python"][1], after["python"][1])
    assert torch.equal(before["numpy"][1], after["numpy"][1])


def test_the_loader_goes_on_where_it_was() -> None:
    position = Position(epoch=3)
    loader = make_loader(position=position)
    assert len(loader) == 6
    batches = list(loader)
    assert position.samples == 23
    assert loader.micro_batch.ends_epoch
    assert list(loader) == []
    position.samples = 8
    assert all(map(torch.equal, loader, batches[2:]))
    assert len(loader) == 6


def test_a_shard_pads_nothing() -> None:
    shards = [Shard(Noisy(), BatchPlan(4 * 5, rank, 5), seed=0, device=CPU) for rank in range(5)]
    rows = [int(row[0]) for shard in shards for batch in shard for row in batch]
    assert sorted(rows) == list(range(23))


def test_the_shards_of_a_run_have_each_sample_once() -> None:
    rows = []
    for rank in range(5):
        dims = ParallelDims(rank, 5)
        own: Any = SimpleNamespace(_dims=dims, seed=0, device=CPU)
        rows += [int(row[0]) for batch in Run.shard(own, Noisy(), 4) for row in batch]
    assert sorted(rows) == list(range(23))


def test_batches_of_any_shape_move() -> None:
    batch = {"x": torch.zeros(1), "y": [torch.zeros(1), ("name", 3)]}
    moved = to_device(batch, torch.device("meta"))
    assert moved["x"].is_meta
    assert moved["y"][0].is_meta
    assert moved["y"][1] == ("name", 3)


@pytest.mark.parametrize(
    "value",
    [
        *(numpy.float64(1), object(), {"a": [1, numpy.zeros(2)]}),
        *(b"", {b"": 1}, [1 << 2039], {-(1 << 2039): 1}, state.TENSOR),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_could_not_be_loaded_is_not_saved(value: Any) -> None:
    with pytest.raises(HpcDdpError, match="accepted in a state_dict"):
        state.collect({"thing": Holds(value)})


@pytest.mark.parametrize("kind", [int, float])
def test_a_long_list_of_numbers_is_copied_at_once(
    kind: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(state, "_check_atom", lambda value, where: calls.append(where))
    row = list(map(kind, range(999)))
    tree = state.collect({"thing": Holds(row)}).tree["thing"]
    assert tree["value"] == row
    assert tree["value"] is not row
    assert calls == ["a key of thing"]


@pytest.mark.parametrize("value", [b"\0", (1 << 2039) - 1, 1 - (1 << 2039), {b"a": "\ud800"}])
def test_the_largest_that_is_saved_is_loaded(tmp_path: Path, value: Any) -> None:
    store(tmp_path, {"thing": Holds(value)})
    put_back(tmp_path, {"thing": (loaded := Holds())})
    assert loaded.value == value


def test_ordinary_state_is_loaded_as_it_was(tmp_path: Path) -> None:
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
    store(tmp_path, objects[0])
    put_back(tmp_path, objects[1])
    there, here = (state.collect(each) for each in objects)
    assert there.tree == here.tree
    assert all(torch.equal(tensor, here.tensors[name]) for name, tensor in there.tensors.items())
    assert here.tree["scheduler"]["last_epoch"] == 2


def store(folder: Path, objects: dict[str, Any], world_size: int = 1) -> None:
    """Write a state as `world_size` ranks would; no manifest."""
    found = state.collect(objects)
    for rank in range(world_size):
        buffer = StagingBuffer(CPU)
        buffer.fill(state.my_parts(found, ParallelDims(rank, world_size)))
        (folder / f"tensors-{rank}.bin").write_bytes(b"".join(buffer.bytes))
        torch.save(list(map(tuple, buffer.pieces)), folder / f"pieces-{rank}")
    torch.save(found.tree, folder / "tree")


def put_back(folder: Path, objects: dict[str, Any], step: int = 1) -> None:
    files = [
        (path, torch.load(path.with_name(f"pieces-{path.stem[8:]}"), weights_only=True))
        for path in folder.glob("tensors-*")
    ]
    tree = torch.load(folder / "tree", weights_only=True)
    loading.put_back(objects, tree, Reader(files), step)


class Many(nn.Module):
    """Parameters of awkward shapes and types, a tied one, buffers, and a compiled part."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.randn(0, 3))
        self.big = nn.Parameter(torch.randn(37, 5).t())
        self.short = nn.Parameter(torch.randn(3, 2).to(torch.bfloat16))
        self.row = nn.Parameter(torch.randn(1, 50))
        self.tied = self.row
        self.count: torch.Tensor
        self.register_buffer("count", torch.tensor(7))
        self.part = nn.Linear(3, 4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 40])
def test_what_any_number_of_ranks_wrote_is_read_as_it_was(tmp_path: Path, ranks: int) -> None:
    there, here = Many(), Many()
    there.part = torch.compile(there.part)  # type: ignore[assignment]  # never run
    optimizers = [torch.optim.Adam(m.parameters()) for m in (there, here)]
    for parameter in there.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizers[0].step()
    with torch.no_grad():
        there.count.add_(1)
    store(tmp_path, {"model": there, "optimizer": optimizers[0]}, ranks)
    sizes = [path.stat().st_size for path in tmp_path.glob("tensors-*")]
    assert max(sizes) < sum(sizes) / ranks + 1500  # equal shares, but for rows and alignment
    put_back(tmp_path, {"model": here, "optimizer": optimizers[1]})
    theirs, ours = (
        state.collect({"m": m, "o": o}) for m, o in zip((there, here), optimizers, strict=True)
    )
    assert theirs.tree == ours.tree
    assert theirs.tensors.keys() == ours.tensors.keys()
    for name, tensor in theirs.tensors.items():
        assert torch.equal(tensor, ours.tensors[name]), name
        assert tensor.dtype == ours.tensors[name].dtype
    assert here.tied is here.row


def test_a_buffer_is_allocated_once() -> None:
    model = Many()
    found = state.collect({"model": model})
    buffer = StagingBuffer(CPU)
    places = []
    for _ in range(2):
        buffer.fill(state.my_parts(found, ParallelDims()))
        places.append(buffer._blocks[0].data_ptr())
    assert places[0] == places[1]
    assert buffer._blocks[0].numel() < sum(t.nbytes for t in found.tensors.values()) + 64 * 20


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
def test_another_program_is_told_what_differs(
    tmp_path: Path, there: dict[str, Any], here: dict[str, Any], words: str
) -> None:
    store(tmp_path, there)
    with pytest.raises(HpcDdpError, match=words) as caught:
        put_back(tmp_path, here, 12)
    assert "step 12" in caught.value.message


def test_rank_facts_come_from_torchrun_or_are_those_of_one_process() -> None:
    assert DistEnv.from_env({}) == DistEnv(0, 0, 1, 1, launched=False)
    env = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert DistEnv.from_env(env) == DistEnv(3, 1, 4, 2, launched=True)
    with pytest.raises(UsageError, match="WORLD_SIZE is None"):
        DistEnv.from_env({"RANK": "0", "LOCAL_RANK": "0"})


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_worker_that_srun_lets_see_one_gpu_takes_it(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_gpus(monkeypatch, gpus)
    info = DistEnv(rank=6, local_rank=2, world_size=8, local_world_size=4, launched=True)
    assert choose_devices(info) == [torch.device("cuda", 0 if gpus == 1 else 2)]
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    if gpus == 1:
        with pytest.raises(HpcDdpError, match="4 workers on this node, but 1 visible GPU"):
            choose_devices(info)
    else:
        assert choose_devices(info) == [torch.device("cuda", 2)]


def test_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/a/train me.py", "--lr", "1"])
    said = LaunchEnv.from_env({"HPC_DDP_END_TIME": "", "HPC_DDP_NODE": "n1"})
    assert (said.run, said.attempt, said.end_time, said.node) == (None, None, None, "n1")
    assert said.stem == "train me"
    with pytest.raises(UsageError, match="HPC_DDP_SAVE_EVERY is 'often'"):
        LaunchEnv.from_env({"HPC_DDP_SAVE_EVERY": "often"})


@pytest.mark.parametrize("build", [lambda: make_loader(check=_refuse)])
def test_a_loader_outside_its_loop_is_refused(build: Callable[[], Loader]) -> None:
    with pytest.raises(UsageError, match="outside"):
        next(iter(build()))


def _refuse() -> None:
    raise UsageError("outside")


class Extra(nn.Module):
    """State that is no tensor of the model's own, with a tensor in it."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: dict[str, Any] = {}

    def get_extra_state(self) -> dict[str, Any]:
        return self.extra

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state


def test_extra_state_and_counters_come_back_whole(tmp_path: Path) -> None:
    there, here = Extra(), Extra()
    there.extra = {"a": torch.arange(3), "n": 3}
    counters = [Holds(Counter({30: 1, 80: 2})), Holds()]
    store(tmp_path, {"model": there, "thing": counters[0]})
    put_back(tmp_path, {"model": here, "thing": counters[1]})
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


def test_parts_of_a_module_know_the_version_that_was_saved(tmp_path: Path) -> None:
    there, here = (nn.Sequential(Second(2, 2)) for _ in range(2))
    there[0] = torch.compile(there[0])  # type: ignore[assignment]  # never run
    weights = [next(model.parameters()) for model in (there, here)]
    expected = weights[0].clone()
    store(tmp_path, {"model": there})
    for model in (there, here):
        put_back(tmp_path, {"model": model})
    assert all(torch.equal(weight, expected) for weight in weights)


def test_optimizer_state_goes_by_name_whatever_the_order(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    ways = [list(model.parameters()), list(model.parameters())[::-1]]
    there, here = (torch.optim.Adam(way) for way in ways)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    there.step()
    store(tmp_path, {"model": model, "optimizer": there})
    put_back(tmp_path, {"model": model, "optimizer": here})
    for parameter in model.parameters():
        assert torch.equal(here.state[parameter]["exp_avg"], there.state[parameter]["exp_avg"])
    with pytest.raises(HpcDdpError, match="optimizer: it is of Adam, and here of SGD"):
        put_back(tmp_path, {"model": model, "optimizer": sgd(model)})


def test_optimizer_state_keeps_the_order_of_its_parameter_in_memory(tmp_path: Path) -> None:
    """A fused optimizer goes through both as raw memory."""
    models = [nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2)]
    there, here = (torch.optim.AdamW(model.parameters(), fused=True) for model in models)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number, parameter in enumerate(model.parameters()):
            ramp = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
            parameter.grad = torch.empty_like(parameter).copy_(ramp + number)
        optimizer.step()

    step(models[0], there)
    store(tmp_path, {"model": models[0], "optimizer": there})
    put_back(tmp_path, {"model": models[1], "optimizer": here})
    assert here.state[models[1].weight]["exp_avg"].stride() == models[1].weight.stride()
    for model, optimizer in zip(models, (there, here), strict=True):
        step(model, optimizer)
    assert torch.equal(models[0].weight, models[1].weight)


@pytest.mark.parametrize("ignored", [False, True])
def test_each_rank_has_its_buffers_and_others_take_the_first_one_s(
    tmp_path: Path, ignored: bool
) -> None:
    models = [nn.BatchNorm1d(2) for _ in range(3)]
    ddp: Any = nn.parallel.DistributedDataParallel
    for model in models if ignored else ():
        ddp._set_params_and_buffers_to_ignore_for_model(model, ["running_mean"])
    for rank, model in enumerate(models[:2]):
        model.running_mean = torch.full((2,), rank + 1.0)
        found = state.collect({"model": model})
        buffer = StagingBuffer(CPU)
        buffer.fill(state.my_parts(found, ParallelDims(rank, 2)))
        (tmp_path / f"tensors-{rank}.bin").write_bytes(b"".join(buffer.bytes))
        torch.save(list(map(tuple, buffer.pieces)), tmp_path / f"pieces-{rank}")
    files = [
        (path, torch.load(path.with_name(f"pieces-{path.stem[8:]}"), weights_only=True))
        for path in tmp_path.glob("tensors-*")
    ]
    means = [Reader(files, rank).read("model.running_mean")[0].item() for rank in (0, 1, None)]
    assert means == [1.0, 2.0, 1.0]


def test_objects_and_weights_of_each_rank_are_its_own() -> None:
    """Also without numbers, which no other rank's would be read for."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ddp: Any = nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    objects = {"optimizer": optimizer, "model": model, "loader": Holds(torch.empty(0))}
    found = state.collect(objects, ("loader",))
    of_adam = {f"optimizer.state.model.1.weight.{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    assert found.private == {"model.1.weight", "loader.value", *of_adam}
    assert sorted(found.tree) == ["model", "optimizer"]
    assert sorted(found.private_tree) == ["loader", "optimizer"]
    assert "model.1.weight" not in found.tree["optimizer"]["state"]
    assert found.shared.keys() | found.private == found.tensors.keys()
    assert "model.0.weight" in found.equal
    assert not found.equal.keys() & found.private
    for rank in (0, 1):
        parts = state.my_parts(found, ParallelDims(rank, 2))
        assert {name for name in parts if OWN in name} == {f"{n}{OWN}{rank}" for n in found.private}
    buffer = StagingBuffer(CPU)
    buffer.fill(parts)
    assert buffer.is_finite(found.trained)
    with torch.no_grad():
        model.get_parameter("1.weight").fill_(torch.inf)
    buffer.fill(state.my_parts(found, ParallelDims(1, 2)))
    assert not buffer.is_finite(found.trained)


def test_a_tensor_that_no_rank_has_stored_is_named(tmp_path: Path) -> None:
    with pytest.raises(HpcDdpError, match=r"x\.value is a tensor that no rank has stored"):
        loading.put_back({"x": Holds()}, {"x": {"value": state.TENSOR}}, Reader([]), 1)


def test_what_was_other_ranks_own_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    ddp: Any = nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, ["weight"])
    store(tmp_path, {"model": model}, 2)
    with pytest.raises(HpcDdpError, match="weight was each rank's own"):
        put_back(tmp_path, {"model": nn.Linear(2, 2)})


def test_a_frozen_mask_of_infinities_is_sound() -> None:
    model = nn.Linear(2, 2)
    model.mask = nn.Parameter(torch.full((2,), -torch.inf), requires_grad=False)
    found = state.collect({"model": model})
    buffer = StagingBuffer(CPU)
    buffer.fill(state.my_parts(found, ParallelDims()))
    assert buffer.is_finite(found.trained)
    assert not buffer.is_finite(found.replicated)
