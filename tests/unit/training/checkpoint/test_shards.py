"""Batches, streams, and the pieces of a state, in their details."""

from __future__ import annotations

import math
import os
import random
from collections import OrderedDict, UserDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from hpc_ddp.core import file_io
from hpc_ddp.core.errors import CAN_GO_ON, HpcDdpError, UsageError
from hpc_ddp.training.checkpoint import loading, shards, state
from hpc_ddp.training.checkpoint.shards import (
    OWN,
    Reader,
    StagingBuffer,
    StoredShard,
    rows,
    whole,
)
from hpc_ddp.training.data import loader as module
from hpc_ddp.training.data import worker_death
from hpc_ddp.training.data.batches import to_device
from hpc_ddp.training.data.iterable import IterableBatches
from hpc_ddp.training.data.loader import Loader, Shard, UnknownLengthError, _Batch, batches_of
from hpc_ddp.training.data.order import NO_BATCH, BatchPlan, Position
from hpc_ddp.training.models import dtensor, rng
from hpc_ddp.training.models.mesh import ParallelDims
from unit.fakes import stop_clock
from unit.training.fakes import Holds

CPU = torch.device("cpu")


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        return index


class Endless(IterableDataset[float]):
    """Numbers and what is drawn for them; knows the epoch, if that is told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        offset = random.random()
        for number in range(9):
            yield number, self.epoch, offset, random.random()


def _loader(dataset: Any = None, cut: BatchPlan | None = None, **options: Any) -> Loader:
    fields: dict[str, Any] = {"position": Position(), "device": CPU, "seed": 1}
    fields |= {"check": lambda: None, "sync": lambda on: None}
    return Loader(dataset or Numbers(), cut or BatchPlan(4, 0, 1), **{**fields, **options})


# --- batches -------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


class Encoding(UserDict[str, torch.Tensor]):
    """As Transformers' BatchEncoding: no dict, and it moves itself."""

    def to(self, device: torch.device) -> Encoding:
        return Encoding({name: value.to(device) for name, value in self.items()})


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    boxes: list[torch.Tensor]
    name: str
    area: int = field(init=False, default=3)


def test_batches_of_other_libraries_are_moved() -> None:
    meta = torch.device("meta")
    encoding, sample = to_device(
        [Encoding({"ids": torch.ones(2)}), Sample(torch.ones(1), [torch.ones(2)], "n")], meta
    )
    assert isinstance(encoding, Encoding)
    assert encoding["ids"].device == meta
    assert sample.image.device == sample.boxes[0].device == meta
    assert (sample.name, sample.area) == ("n", 3)
    assert to_device(Sample, meta) is Sample
    features = UserDict[str, Any]({"ids": [torch.ones(2)], "name": "n"})
    moved = to_device(features, meta)
    assert (type(moved), moved["ids"][0].device, moved["name"]) == (UserDict, meta, "n")
    assert features["ids"][0].device == CPU


def test_what_is_in_the_cpus_memory_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a dataclass's tensors; not what a data set has on a device already."""
    there = torch.device("meta")
    data = TensorDataset(torch.ones(8))
    assert batches_of(data, BatchPlan(4, 0, 1), 0, Position(), there, False).pin_memory
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 100)
    on_device, sparse = torch.ones(2, device="meta"), torch.ones(2).to_sparse()
    packed = pack_sequence([torch.ones(1)])
    sample = Sample(torch.ones(1), [torch.ones(2)], "n")
    batch = _Batch(NO_BATCH, [sample, {"a": on_device, "b": sparse}, packed])
    content = batch.pin_memory().content
    assert content[0].image.item() == content[0].boxes[0][0].item() == 101
    assert content[1]["a"] is on_device
    assert content[1]["b"] is sparse
    assert content[2].data.item() == 101


def test_a_batch_that_can_be_moved_without_a_wait_is() -> None:
    asked: list[dict[str, Any]] = []

    class Quick(Encoding):
        def to(self, device: torch.device, **options: Any) -> Encoding:
            asked.append(options)
            return super().to(device)

    to_device([Quick({"ids": torch.ones(2)})], torch.device("meta"))
    assert asked == [{"non_blocking": True}]


def test_a_named_tuple_stays_one() -> None:
    moved = to_device({"a": Pair(torch.zeros(1), "n")}, torch.device("meta"))
    assert moved["a"].x.is_meta
    assert moved["a"].name == "n"


def test_what_a_loader_does_with_each_batch() -> None:
    position, synced = Position(), list[bool]()
    batches = _loader(
        cut=BatchPlan(8, 0, 1, accumulate=2), position=position, sync=synced.append, shuffle=False
    )
    samples = [(len(batch), position.samples) for batch in batches]
    assert samples == [(4, 0), (4, 8), (4, 8), (4, 16), (4, 16), (3, 23)]
    assert synced == [False, True] * 3
    assert batches.facts == {"size of the training set": 23, "shuffle": False}
    assert _loader().facts["shuffle"] is True
    assert (batches.steps(8), len(batches)) == (2, 3)


def test_of_a_stream_little_is_known() -> None:
    batches = _loader(Endless())
    assert batches.facts == {"size of the training set": None, "shuffle": False}
    assert batches.steps(3) is None
    with pytest.raises(UnknownLengthError, match="not known before its end"):
        len(batches)
    assert len(list(batches)) == 3


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (None, {"sampler": None}, "sampler was given"),
        (None, {"generator": None}, "generator was given"),
        (Endless(), {"shuffle": True}, "shuffle is True; accepted with an iterable"),
        (Endless(), {"persistent_workers": True}, "persistent_workers is True"),
        (None, {"prefetch_factor": 2}, "torch's DataLoader refuses the options"),
        (None, {"no_such": 2}, "torch's DataLoader refuses the options"),
        (
            None,
            {"cut": BatchPlan(24, 0, 1, drop_last=True)},
            "23 samples; accepted: enough for one step",
        ),
    ],
)
def test_options_that_a_loader_can_not_have(
    dataset: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        _loader(dataset, **options)


def test_an_even_shard_fills_up() -> None:
    for even, counts in ((False, [2, 1, 1]), (True, [2, 2, 2])):
        for rank in range(3):
            data = TensorDataset(torch.arange(10))
            batches = Shard(data, BatchPlan(9, rank, 3), seed=0, device=CPU, even=even)
            flags = [batches.counts for _ in batches]
            assert len(flags) == counts[rank] == len(batches)
            assert flags.count(True) == [2, 1, 1][rank]
    with pytest.raises(UsageError, match="no shuffle, no drop_last"):
        Shard(Numbers(), BatchPlan(9, 0, 3), seed=0, device=CPU, drop_last=True)
    with pytest.raises(UsageError, match="no shuffle, no drop_last"):
        Shard(Numbers(), BatchPlan(9, 0, 3), seed=0, device=CPU, shuffle=True)


def test_tensors_are_fetched_at_once_unless_they_are_collated() -> None:
    data = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    (x, y), *_ = list(_loader(data, shuffle=False))
    assert (x.tolist(), y.tolist()) == ([0, 1, 2, 3], [0, 2, 4, 6])
    rows, *_ = list(_loader(data, shuffle=False, collate_fn=list))
    assert [row[1].item() for row in rows] == [0, 2, 4, 6]


class Worker:
    """A loader worker: it has ended with `exitcode`, or lives where that is None."""

    def __init__(self, exitcode: int | None) -> None:
        self.exitcode = exitcode


class Batches:
    """An iterator of torch's whose next batch is an error."""

    def __init__(self, error: BaseException, *workers: Worker) -> None:
        self._error, self._workers = error, workers
        self._iterator: Batches | None = None

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        raise self._error


def _watch(error: BaseException, *exit_codes: int | None) -> BaseException:
    """Return what comes of an error of a loader whose workers have these exit codes."""
    workers = [Worker(code) for code in exit_codes]
    seen: BaseException | None = None
    try:
        list(worker_death.watched(cast(Any, Batches(error, *workers))))
    except Exception as raised:
        seen = raised
    assert seen is not None
    return seen


GONE = "DataLoader worker (pid(s) 41) exited unexpectedly"
EXITED = "DataLoader worker (pid 41) exited unexpectedly with exit code 7"
KILLED = "DataLoader worker (pid 41) is killed by signal: Killed. "


@pytest.mark.parametrize(
    ("error", "exit_codes", "message", "hint"),
    [
        (RuntimeError(GONE), (None, -9), "is killed by signal: Killed", "out of memory"),
        (RuntimeError(KILLED), (-9, None), "is killed by signal: Killed", "out of memory"),
        (ConnectionResetError(), (-7, None), "is killed by signal: Bus error", "/dev/shm"),
        (EOFError(), (-11,), "is killed by signal: Segmentation fault", "num_workers=0"),
        (RuntimeError(GONE), (7,), "exited unexpectedly with code 7", "num_workers=0"),
        (RuntimeError(GONE), (0,), "exited unexpectedly", "num_workers=0"),
        (RuntimeError(GONE), (0, -9), "is killed by signal: Killed", "out of memory"),
        (EOFError(), (0, 0, -9), "is killed by signal: Killed", "out of memory"),
        # Another loader's worker: torch's handler is the same for all.
        (RuntimeError(KILLED), (None, None), "is killed by signal: Killed", "out of memory"),
        (RuntimeError(KILLED), (), "is killed by signal: Killed", "out of memory"),
        (RuntimeError(f"{EXITED}. Details"), (), "exited unexpectedly with code 7", "num_workers"),
        (RuntimeError(GONE), (-40,), "is killed by signal: Real-time signal 6", "num_workers=0"),
    ],
)
def test_a_worker_that_has_died_is_named_by_its_exit_code(
    error: BaseException, exit_codes: tuple[int | None, ...], message: str, hint: str
) -> None:
    seen = _watch(error, *exit_codes)
    assert isinstance(seen, HpcDdpError)
    assert seen.message == f"DataLoader worker {message}"
    assert hint in str(seen.hint)
    assert seen.__cause__ is error


def test_no_worker_is_waited_for_where_torch_has_named_the_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_death, "_exit_of", pytest.fail)
    assert "signal: Killed" in str(_watch(RuntimeError(KILLED), None))


def test_workers_that_persist_may_fail_before_there_is_an_iterator() -> None:
    class Persistent(Batches):
        def __iter__(self) -> Batches:
            raise self._error

    batches = Persistent(RuntimeError(GONE))
    batches._iterator = Batches(KeyError(), Worker(-9))
    with pytest.raises(HpcDdpError, match="killed by signal: Killed"):
        list(worker_death.watched(cast(Any, batches)))


def test_the_cause_of_an_error_may_name_the_worker() -> None:
    error = RuntimeError("unable to open a file")
    error.__cause__ = RuntimeError(KILLED)
    assert "signal: Killed" in str(_watch(error, -9))


@pytest.mark.parametrize(
    ("error", "exit_codes"),
    [
        (RuntimeError("mine"), (-9,)),
        (ConnectionResetError("the data set's own, without workers"), ()),
        (EOFError("x"), (None,)),
        (ValueError("x"), (-9,)),
        (ConnectionError("Caught ConnectionError in DataLoader worker process 0."), (-9,)),
    ],
)
def test_another_error_stays_as_it_is(
    error: BaseException, exit_codes: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_death, "DEATH_S", 0.0)
    assert _watch(error, *exit_codes) is error


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("Caught UsageError in DataLoader worker process 0.\nTrace\na.b.Error: no x\n", "no x"),
        ("two\nlines", "two\nlines"),
    ],
)
def test_a_sentence_that_a_data_set_raises_is_shown_without_torchs_words(
    message: str, shown: str
) -> None:
    error = HpcDdpError(message)
    assert _watch(error) is error
    assert error.message == shown


# --- streams -------------------------------------------------------------------------------


def _stream(position: Position, seed: int = 1) -> list[Any]:
    with rng.untouched():
        random.seed(position.samples)
        walk = IterableBatches(Endless(), BatchPlan(3, 0, 1), seed, position, list)
        return [row for _, batch in walk for row in batch]


def test_what_a_stream_draws_depends_on_seed_and_epoch_alone() -> None:
    whole_epoch = _stream(Position(epoch=2))
    assert [row[:2] for row in whole_epoch] == [(number, 2) for number in range(9)]
    assert _stream(Position(epoch=2, samples=6)) == whole_epoch[6:]
    for other in (_stream(Position(epoch=3)), _stream(Position(epoch=2), seed=2)):
        assert all(row[2:] != there[2:] for row, there in zip(other, whole_epoch, strict=True))
    assert len({row[3] for row in whole_epoch}) == 9


class Shuffled(IterableDataset[int]):
    """Draws its order before its first sample."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(90), 90))


def test_a_stream_that_shuffles_itself_goes_on_in_its_order() -> None:
    def numbers(position: Position) -> list[int]:
        walk = IterableBatches(Shuffled(), BatchPlan(3, 0, 1), 1, position, list)
        return [number for _, batch in walk for number in batch]

    every = numbers(Position(epoch=2))
    assert numbers(Position(epoch=2, samples=6)) == every[6:]
    assert numbers(Position(epoch=3)) != every


def test_what_collate_draws_for_a_stream_depends_on_seed_and_epoch_alone() -> None:
    def draws(position: Position) -> list[float]:
        with rng.untouched():
            walk = IterableBatches(
                Endless(), BatchPlan(3, 0, 1), 1, position, lambda batch: random.random()
            )
            return [drawn for _, drawn in walk]

    every = draws(Position(epoch=2))
    assert draws(Position(epoch=2)) == every
    assert draws(Position(epoch=2, samples=3)) == every[1:]
    assert len({*every, *draws(Position(epoch=3))}) == 6


def test_a_loader_worker_makes_its_turns_and_hides_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sees(Endless):
        def __iter__(self) -> Iterator[Any]:
            for number in range(9):
                yield number, get_worker_info() is None

    monkeypatch.setattr(torch_worker, "_worker_info", SimpleNamespace(id=1, num_workers=2))
    walk = list(IterableBatches(Sees(), BatchPlan(2, 0, 1), 1, Position(), list))
    assert [batch for _, batch in walk] == [[(2, True), (3, True)], [(6, True), (7, True)]]


# --- what is collected ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({(1, 2): 3}, r"a key of x\.value is a builtins\.tuple"),
        ([1, {"a": object()}], r"x\.value\.1\.a is a builtins\.object"),
        (torch.eye(2).to_sparse(), r"x\.value is a tensor of layout torch\.sparse_coo"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "is the second one of this name"),
    ],
)
def test_state_that_could_not_be_loaded_names_its_place(value: Any, words: str) -> None:
    with pytest.raises(HpcDdpError, match=words):
        state.collect({"x": Holds(value)})


def test_only_what_has_a_state_is_tracked() -> None:
    with pytest.raises(UsageError, match=r"x is a builtins.int; accepted by run.track"):
        state.collect({"x": 5})


def test_containers_come_back_as_they_were(tmp_path: Path) -> None:
    value = {"a": (1, [torch.ones(2)]), "b": {"x", 3}, "c": OrderedDict(z=None), 4: "torch"}
    there, here = Holds(value), Holds()
    result = state.collect({"x": there})
    _put_back(tmp_path, result, {"x": here})
    assert torch.equal(here.value["a"][1].pop(), value["a"][1].pop())  # type: ignore[index]
    assert here.value == value
    assert type(here.value["c"]) is OrderedDict


def _put_back(
    folder: Path, result: state.State, objects: dict[str, Any], stage: bool = False
) -> None:
    buffer = StagingBuffer(CPU)
    buffer.fill(state.my_parts(result, ParallelDims()))
    (folder / "data").write_bytes(b"".join(buffer.bytes))
    reader = Reader([(folder / "data", buffer.pieces)])
    loading.put_back(objects, result.tree, reader, 7, stage)


def test_trees_of_stages_are_put_together() -> None:
    def tree(label: str, value: int, *params: str) -> dict[str, Any]:
        groups = [{"lr": 1, "params": list(params)}]
        return {"model": {label: value, "n": 5}, "o": {"state": {label: 2}, "groups": groups}}

    both = tree("a", 1, "a", "b", "c")
    both["model"]["b"], both["o"]["state"]["b"] = 3, 2
    assert state.joined(tree("a", 1, "a", "b"), tree("b", 3, "b", "c")) == both
    assert state.joined([1, 2], [3, 4]) == [1, 2]


def test_a_stage_takes_its_own_part(tmp_path: Path) -> None:
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
        _put_back(tmp_path, result, {"m": stage, "o": batches})
    _put_back(tmp_path, result, {"m": stage, "o": batches}, stage=True)
    assert torch.equal(stage[0].weight, model[0].weight)
    assert len(batches.state) == 2
    wanted = optimizer.state[model[0].weight]["exp_avg"]
    assert torch.equal(batches.state[stage[0].weight]["exp_avg"], wanted)


def test_few_of_many_differences_are_named(tmp_path: Path) -> None:
    result = state.collect({"m": nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))})
    there = nn.Sequential(*(nn.Linear(3, 3) for _ in range(6)))
    with pytest.raises(HpcDdpError) as caught:
        _put_back(tmp_path, result, {"m": there})
    assert caught.value.message.count(" here and ") == 8
    assert ", and 4 more" in caught.value.message
    with pytest.raises(HpcDdpError, match=r"of step 7 is not of this program's .*: m: 0\.bias"):
        _put_back(tmp_path, result, {"m": there})


def test_groups_in_another_order_are_others(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    pair: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
    result = state.collect({"m": model, "o": torch.optim.SGD(pair)})
    other = torch.optim.SGD(pair[::-1])
    with pytest.raises(HpcDdpError, match="they are grouped otherwise"):
        _put_back(tmp_path, result, {"m": model, "o": other})


def test_who_writes_what() -> None:
    model = nn.BatchNorm1d(4)
    result = state.collect({"m": model, "x": Holds(torch.ones(3))})
    first, second = (state.my_parts(result, ParallelDims(rank, 2)) for rank in (0, 1))
    assert "x.value" in first
    assert "x.value" not in second
    assert "m.running_mean" in first
    assert f"m.running_mean{OWN}1" in second
    sizes = [
        {k: p.numbers.numel() for k, p in parts.items() if "@" not in k}
        for parts in (first, second)
    ]
    assert sizes[0]["m.weight"] + sizes[1].get("m.weight", 0) == 4
    assert sizes[0].get("m.bias", 0) + sizes[1]["m.bias"] == 4


# --- pieces --------------------------------------------------------------------------------


def test_rows_begin_between_two_bytes() -> None:
    tensor = torch.arange(12.0).view(6, 2)  # 8 bytes a row
    result = [
        rows(tensor, *edges) for edges in ((0, 48), (0, 8), (1, 17), (-5, 9), (48, 60), (8, 8))
    ]
    spans = [None if part is None else (part.start[0], part.size[0]) for part in result]
    assert spans == [(0, 6), (0, 1), (1, 2), (0, 2), None, None]
    assert rows(torch.tensor(5.0), 1, 9) is None
    alone = rows(torch.tensor(5.0), -1, 2)
    assert alone is not None
    assert alone.size == ()


def test_a_tensor_is_put_together_from_boxes(tmp_path: Path) -> None:
    full = torch.arange(12.0).view(4, 3)
    parts = {"t": rows(full, 0, 24), "u": whole(torch.ones(0, 3)), "v": whole(torch.tensor(7))}
    files = []
    for index, (low, high) in enumerate(((0, 24), (24, 48))):
        buffer = StagingBuffer(CPU)
        part = rows(full, low, high)
        assert part is not None
        buffer.fill({**{k: p for k, p in parts.items() if index == 0 and p}, "t": part})
        (tmp_path / str(index)).write_bytes(b"".join(buffer.bytes))
        files.append((tmp_path / str(index), buffer.pieces))
    reader = Reader(files)
    assert torch.equal(reader.read("t"), full)
    assert reader.read("u").shape == (0, 3)
    assert reader.read("v").item() == 7
    assert (reader.describe("t").shape, reader.describe("t").is_meta) == ((4, 3), True)
    assert sorted(reader) == ["t", "u", "v"]
    assert "t" in reader
    assert "w" not in reader
    with pytest.raises(HpcDdpError, match="t: only 6 of 12 numbers are stored"):
        Reader(files[1:]).read("t")
    with pytest.raises(HpcDdpError, match="t: only 6 of 12"):
        Reader(files[:1]).read("t")


def test_each_ranks_own_is_read_where_there_is_one(tmp_path: Path) -> None:
    buffer = StagingBuffer(CPU)
    buffer.fill({"b": whole(torch.tensor(1)), f"b{OWN}2": whole(torch.tensor(2))})
    (tmp_path / "data").write_bytes(b"".join(buffer.bytes))
    files = [(tmp_path / "data", buffer.pieces)]
    assert [Reader(files, rank).read("b").item() for rank in (0, 2, None)] == [1, 2, 1]
    assert list(Reader(files)) == ["b"]
    assert buffer.pieces[1].offset == 64
    assert math.prod(buffer.pieces[1].size) == 1
    assert isinstance(buffer.pieces[0], StoredShard)


def test_numbers_that_are_not_finite_are_seen() -> None:
    big = torch.full((4,), 60000.0, dtype=torch.float16)  # their sum is finite, not in halves
    for bad, names, finite in (
        (big, ("a",), True),
        (torch.tensor([1.0, torch.nan]), ("a",), False),
        (torch.tensor([1.0, torch.inf]), ("a",), False),
        (torch.tensor([1.0, torch.inf]), (), True),
        (torch.tensor([1, 2]), ("a",), True),
        (torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn), ("a",), False),
        (torch.tensor([1.0, 448.0]).to(torch.float8_e4m3fn), ("a",), True),
    ):
        buffer = StagingBuffer(CPU)
        buffer.fill({"n": whole(torch.ones(1)), "a": whole(bad)})
        assert buffer.is_finite(names) is finite


def test_memory_in_blocks_holds_the_same_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On an accelerator it is pinned, or, where that can't be had as here, left as it is."""
    parts = {
        "a": whole(torch.arange(70.0, dtype=torch.float64)),
        "b": whole(torch.randn(4, 6, 5).transpose(0, 2)),
        "c": whole(torch.randn(3).to(torch.bfloat16)),
        "d": whole(torch.empty(0)),
    }
    one = StagingBuffer(CPU)
    one.fill(parts)
    monkeypatch.setattr(shards, "BLOCK", 256)
    blocks = StagingBuffer(torch.device("cuda"))
    blocks.fill(parts)
    blocks.wait()
    assert blocks.pieces == one.pieces
    readers = []
    for name, buffer in {"one": one, "blocks": blocks}.items():
        (tmp_path / name).write_bytes(b"".join(buffer.bytes))
        readers.append(Reader([(tmp_path / name, buffer.pieces)]))
    assert all(torch.equal(*(reader.read(name) for reader in readers)) for name in parts)
    assert [len(block) for block in blocks.bytes] == [256, 256, 256, 256, 128]
    assert blocks.is_finite(parts)
    parts["b"].numbers[2, 3, 1] = torch.inf
    blocks.fill(parts)
    assert not blocks.is_finite(["b"])


def test_each_batch_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[None] = []
    monkeypatch.setattr(module, "beat", lambda: beats.append(None))
    list(_loader())
    assert len(beats) == 6
    list(Shard(Numbers(), BatchPlan(4, 0, 1), seed=0, device=CPU))
    assert len(beats) == 12


# --- what is easily overlooked -------------------------------------------------------------


def test_before_the_first_batch_there_is_none() -> None:
    assert _loader().micro_batch is NO_BATCH
    assert Shard(Numbers(), BatchPlan(4, 0, 1), seed=0, device=CPU).counts


class Late(Worker):
    """A loader worker whose exit code is known only a moment later."""

    def __init__(self, code: int) -> None:
        self._codes = iter([None, None])
        self._code = code

    @property
    def exitcode(self) -> int | None:  # type: ignore[override]
        return next(self._codes, self._code)


def test_a_worker_that_has_just_ended_is_waited_for() -> None:
    with pytest.raises(HpcDdpError, match="killed by signal: Killed"):
        list(worker_death.watched(cast(Any, Batches(RuntimeError(GONE), Late(-9)))))


class Interrupted:
    """A loader worker during whose burial torch's handler raises once more."""

    @property
    def exitcode(self) -> int:
        raise RuntimeError(KILLED)


def test_a_handler_that_interrupts_the_search_for_the_dead_is_heard() -> None:
    batches = Batches(RuntimeError(GONE))
    batches._workers = cast(Any, [Interrupted()])
    with pytest.raises(HpcDdpError, match="killed by signal: Killed"):
        list(worker_death.watched(cast(Any, batches)))


class Unreadable(ConnectionResetError):
    """A broken connection to a worker; torch's handler raises while it is looked at."""

    def __str__(self) -> str:
        raise RuntimeError(KILLED)


def test_a_handler_that_interrupts_the_explanation_is_heard() -> None:
    with pytest.raises(HpcDdpError, match="killed by signal: Killed"):
        list(worker_death.watched(cast(Any, Batches(Unreadable()))))


def test_batches_made_in_a_worker_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    here = list(_loader())
    monkeypatch.setattr(module, "get_worker_info", object)
    assert all(map(torch.equal, _loader(), here))


@pytest.mark.parametrize("given", [True, False])
def test_a_worker_begins_with_what_the_script_wants(
    monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(module, "ignore_in_loader", lambda worker: calls.append(("ours", worker)))
    module._begin_worker((lambda worker: calls.append(("theirs", worker))) if given else None, 3)
    assert calls == [("ours", 3), ("theirs", 3)][: 2 if given else 1]


def test_any_box_of_a_tensor_is_read(tmp_path: Path) -> None:
    """As ranks that have another part of a tensor than those that wrote it."""
    full = torch.arange(18.0).view(6, 3)
    files = []
    for index, low in enumerate((0, 24, 48)):  # two rows each
        buffer = StagingBuffer(CPU)
        part = rows(full, low, low + 24)
        assert part is not None
        buffer.fill({"t": part})
        (tmp_path / str(index)).write_bytes(b"".join(buffer.bytes))
        files.append((tmp_path / str(index), buffer.pieces))
    boxes = [((0, 0), (2, 3)), ((1, 0), (2, 3)), ((1, 1), (4, 2)), ((4, 2), (2, 1))]
    boxes += [((6, 0), (0, 3)), ((3, 0), (0, 3))]
    for start, size in boxes:
        wanted = full[start[0] : start[0] + size[0], start[1] : start[1] + size[1]]
        assert torch.equal(Reader(files)._box("t", start, size), wanted)
    with pytest.raises(HpcDdpError, match="t: only 0 of 6 numbers are stored"):
        Reader(files[:1])._box("t", (4, 0), (2, 3))


def _stored(folder: Path) -> Reader:
    buffer = StagingBuffer(CPU)
    buffer.fill({"t": whole(torch.arange(6.0).view(3, 2))})
    (folder / "data").write_bytes(b"".join(buffer.bytes))
    return Reader([(folder / "data", buffer.pieces)])


def test_a_data_file_that_is_away_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, clock = _stored(tmp_path), stop_clock(monkeypatch, file_io)
    (tmp_path / "data").rename(tmp_path / "away")

    def sleep(seconds: float) -> None:
        (tmp_path / "away").rename(tmp_path / "data")

    monkeypatch.setattr(clock, "sleep", sleep)
    assert torch.equal(reader.read("t"), torch.arange(6.0).view(3, 2))


def test_a_data_file_that_can_not_be_read_is_not_of_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No SIGBUS either, which ends a process that has mapped a file at an I/O error."""
    reader, clock = _stored(tmp_path), stop_clock(monkeypatch, file_io)
    os.truncate(tmp_path / "data", 20)
    holds = Holds(torch.zeros(3, 2))
    with pytest.raises(
        shards.UnreadableError, match=r"data can't be read.*it ends too early"
    ) as caught:
        loading.put_back({"t": holds}, {"t": state.TENSOR}, reader, 1)
    assert caught.value.exit_code == CAN_GO_ON  # another attempt may find that the disk answers
    assert sum(clock.slept) >= file_io.PATIENCE_S


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MOST_FILES", 2)
    files = []
    for index in range(5):
        buffer = StagingBuffer(CPU)
        buffer.fill({f"t{index}": whole(torch.tensor(index))})
        (tmp_path / str(index)).write_bytes(b"".join(buffer.bytes))
        files.append((tmp_path / str(index), buffer.pieces))
    reader = Reader(files)
    for _ in range(2):
        assert [int(reader.read(f"t{index}")) for index in range(5)] == [0, 1, 2, 3, 4]
        assert len(reader._files) <= 2


def test_with_workers_batches_keep_their_order_and_notices_are_survived() -> None:
    batches = _loader(num_workers=2)._batches
    assert batches.in_order
    assert batches.worker_init_fn is not None


def test_what_the_training_changes_is_known() -> None:
    linear = nn.Linear(2, 2)
    model = nn.Sequential(linear, nn.BatchNorm1d(2, affine=False))
    scale = nn.Parameter(torch.ones(()))
    model.register_parameter("scale", scale)
    model.register_parameter("tied", scale)
    linear.bias.requires_grad = False
    optimizer = torch.optim.Adam([linear.weight, scale])
    (model(torch.randn(3, 2)) * scale).sum().backward()
    optimizer.step()
    result = state.collect({"m": model, "o": optimizer, "x": Holds(torch.ones(2))})
    moments = {f"o.state.m.0.weight.{name}" for name in ("exp_avg", "exp_avg_sq")}
    assert result.trained == {"m.0.weight", "m.scale", "m.tied", *moments}
    assert result.replicated == {*result.trained, "m.0.bias"}
    names = ("running_mean", "running_var", "num_batches_tracked")
    assert result.buffers == {f"m.1.{name}" for name in names}


@pytest.mark.parametrize(("count", "dots"), [(8, False), (9, True)])
def test_few_of_many_other_parameters_are_named(tmp_path: Path, count: int, dots: bool) -> None:
    model = nn.ParameterList(torch.ones(1) for _ in range(count + 1))
    optimizer = torch.optim.SGD(list(model.parameters()))
    result = state.collect({"m": model, "o": optimizer})
    other = torch.optim.SGD([model[0]])
    with pytest.raises(HpcDdpError) as caught:
        _put_back(tmp_path, result, {"m": model, "o": other})
    assert caught.value.message.count("m.") == 8
    assert caught.value.message.endswith(" …") is dots


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A process group whose other rank is not there: sums over ranks are what this one has."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_a_gradient_whose_sum_is_pending_is_clipped(two_ranks: None) -> None:
    """As those of replicated weights on sharded activations."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh: Any = init_device_mesh("cpu", (2,))
    weight: Any = nn.Parameter(DTensor.from_local(torch.ones(4), mesh))
    weight.grad = DTensor.from_local(torch.full((4,), 3.0), mesh, [Partial()])
    norm = dtensor.clip_([weight], 1.5, ParallelDims(), CPU)
    assert norm.item() == 6.0
    assert weight.grad.to_local().tolist() == pytest.approx([0.75] * 4)
