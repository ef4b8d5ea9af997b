"""Loaders and shards hand out each sample once, and continue where they stopped."""

from __future__ import annotations

import dis
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.data import batch_plan, dataloader
from hpc_ddp.training.data import loader as module
from hpc_ddp.training.data.batch_plan import NO_BATCH, BatchPlan, Position
from hpc_ddp.training.data.batches import pin_tensors
from hpc_ddp.training.data.dataloader import _Batch, make_dataloader
from hpc_ddp.training.data.iteration import instruction_of
from hpc_ddp.training.data.loader import Loader, Shard, UnknownLengthError
from hpc_ddp.training.devices import CPU
from hpc_ddp.training.models import rng
from unit.training.data.fakes import (
    EndlessStream,
    NoisyNumbers,
    Numbers,
    Sample,
    make_loader,
    make_noisy_loader,
)


def test_tensors_in_cpu_memory_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a dataclass are pinned, too; those that are on a device already are not."""
    device = torch.device("meta")
    dataset = TensorDataset(torch.ones(8))
    assert make_dataloader(dataset, BatchPlan(4, 0, 1), 0, Position(), device, False).pin_memory
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


def test_an_expanded_tensor_is_pinned_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory with its strides would have one number for many."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: (tensor, tensor.stride()))
    image = torch.arange(4.0).reshape(1, 2, 2).expand(3, 2, 2)  # as of torchvision's Grayscale(3)
    copy, strides = pin_tensors([image])[0]
    assert torch.equal(copy, image)
    assert strides == (4, 2, 1)


@pytest.mark.parametrize(
    ("done", "steps", "left"),
    [(0, 0, False), (12, 1, False), (24, 2, True), (24, 3, True)],  # the last one of other batches
)
def test_an_epoch_whose_batches_are_all_done_is_not_entered_again(
    done: int, steps: int, left: bool
) -> None:
    """As by an early stop: the position was saved behind the loop, by run.finish."""
    plan, position = BatchPlan(12, 0, 1), Position(samples=done, epoch_steps=steps)
    loader = make_loader(TensorDataset(torch.ones(24)), plan, position=position)
    assert loader.is_epoch_done is left


def test_a_data_set_may_change_its_tensors_and_not_its_size() -> None:
    """Labels of self-training are others in each epoch; samples of active learning are more."""
    dataset = TensorDataset(torch.zeros(8))
    loader = make_loader(dataset)
    for epoch in range(2):
        dataset.tensors = (torch.full((8,), float(epoch)),)
        loader._position.begin_epoch()
        assert next(iter(loader))[0].eq(epoch).all()
    dataset.tensors = (torch.zeros(12),)
    with pytest.raises(UsageError, match=r"has 12 samples, and had 8 as run\.loader was called"):
        next(iter(loader))


def test_samples_that_an_even_share_leaves_out_are_reported() -> None:
    for size, reports in ((10, 1), (12, 0)):
        lines: list[str] = []
        plan = BatchPlan(size, 0, 4, even=True)
        make_loader(TensorDataset(torch.ones(24)), plan, warn=lines.append)
        assert len(lines) == reports
    make_loader(TensorDataset(torch.ones(24)), BatchPlan(10, 0, 4, even=True), warn=lines.append)
    assert lines == [
        "even=True leaves out 2 of the 10 samples of each step on 4 ranks; a multiple of their"
        " number leaves none"
    ]


def test_seeds_of_loader_workers_differ_between_ranks_and_runs() -> None:
    """Libraries with a generator of their own are seeded by them, in `worker_init_fn`."""
    seeds = set()
    for seed, rank in ((0, 0), (0, 1), (7, 0)):
        batches: Any = make_loader(Numbers(), BatchPlan(12, rank, 3), seed=seed)._batches
        seeds.add(batches.generator.initial_seed())
    assert len(seeds) == 3


def test_loaders_have_the_attributes_that_scripts_print() -> None:
    dataset, plan = Numbers(), BatchPlan(12, 1, 3)
    for batches in (make_loader(dataset, plan), Shard(dataset, plan, seed=0, device=CPU)):
        assert batches.dataset is dataset
        assert batches.batch_size == 4


def test_a_loader_advances_the_position_with_each_step() -> None:
    position, synced = Position(), list[bool]()
    batches = make_loader(
        cut=BatchPlan(8, 0, 1, accumulate=2),
        position=position,
        set_sync=synced.append,
        shuffle=False,
    )
    samples = []
    for batch in batches:
        samples.append((len(batch), position.samples))
        if batches.micro_batch.ends_step:
            batches.count_batch()
    assert samples == [(4, 0), (4, 0), (4, 8), (4, 8), (4, 16), (3, 16)]
    assert position.samples == 23
    assert synced == [False, True] * 3
    assert batches.facts == {"size of the training set": 23, "shuffle": False}
    assert make_loader().facts["shuffle"] is True
    assert (batches.steps(8), len(batches)) == (2, 3)


def test_a_stream_has_no_length_before_its_end() -> None:
    batches = make_loader(EndlessStream())
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
        (EndlessStream(), {"shuffle": True}, "shuffle is True; accepted with an iterable"),
        (EndlessStream(), {"persistent_workers": True}, "persistent_workers is True"),
        (None, {"prefetch_factor": 2}, "torch's DataLoader refuses the options"),
        (None, {"no_such": 2}, "torch's DataLoader refuses the options"),
        (
            None,
            {"cut": BatchPlan(24, 0, 1, drop_last=True)},
            "23 samples; accepted: enough for one step",
        ),
    ],
)
def test_unsupported_options_of_a_loader_are_refused(
    dataset: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        make_loader(dataset, **options)


def test_an_even_shard_is_padded() -> None:
    for even, counts in ((False, [2, 1, 1]), (True, [2, 2, 2])):
        for rank in range(3):
            dataset = TensorDataset(torch.arange(10))
            batches = Shard(dataset, BatchPlan(9, rank, 3), seed=0, device=CPU, even=even)
            flags = [batches.counts for _ in batches]
            assert len(flags) == counts[rank] == len(batches)
            assert flags.count(True) == [2, 1, 1][rank]
    with pytest.raises(UsageError, match="no shuffle, no drop_last"):
        Shard(Numbers(), BatchPlan(9, 0, 3), seed=0, device=CPU, drop_last=True)
    with pytest.raises(UsageError, match="no shuffle, no drop_last"):
        Shard(Numbers(), BatchPlan(9, 0, 3), seed=0, device=CPU, shuffle=True)


def test_tensors_are_fetched_at_once_unless_they_are_collated() -> None:
    dataset = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    (inputs, targets), *_ = list(make_loader(dataset, shuffle=False))
    assert (inputs.tolist(), targets.tolist()) == ([0, 1, 2, 3], [0, 2, 4, 6])
    rows, *_ = list(make_loader(dataset, shuffle=False, collate_fn=list))
    assert [row[1].item() for row in rows] == [0, 2, 4, 6]


def test_each_batch_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[None] = []
    monkeypatch.setattr(module, "beat", lambda: beats.append(None))
    list(make_loader())
    assert len(beats) == 6
    list(Shard(Numbers(), BatchPlan(4, 0, 1), seed=0, device=CPU))
    assert len(beats) == 12


def test_a_loader_has_no_micro_batch_before_the_first() -> None:
    assert make_loader().micro_batch is NO_BATCH
    assert Shard(Numbers(), BatchPlan(4, 0, 1), seed=0, device=CPU).counts


def test_batches_made_in_a_worker_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(make_loader())
    monkeypatch.setattr(dataloader, "get_worker_info", object)
    assert all(map(torch.equal, make_loader(), expected))


class Offset(Dataset[int]):
    """Its samples are what the function that begins a loader worker has set."""

    offset = -1

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return self.offset


class OffsetStream(IterableDataset[int]):
    offset = -1

    def __iter__(self) -> Iterator[int]:
        return iter([self.offset] * 12)


def open_in_worker(number: int) -> None:
    """As torch's documentation has it for files, which each worker opens for itself."""
    info: Any = get_worker_info()
    assert info.id == number
    info.dataset.offset = 100 + number


def test_loader_workers_keep_the_order_and_begin_as_the_script_says() -> None:
    assert make_loader(num_workers=2)._batches.in_order
    for dataset in (Offset(), OffsetStream()):
        batches = make_loader(dataset, num_workers=2, worker_init_fn=open_in_worker)
        assert [set(batch.tolist()) for batch in batches] == [{100}, {101}, {100}]
    assert make_loader(Offset(), worker_init_fn=open_in_worker)._batches.num_workers == 0


class Modes(Dataset[int]):
    """Tells how many contexts each call of torch goes through."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return torch._C._len_torch_function_stack()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_runs_below_no_context_of_torchs(workers: int) -> None:
    """Each one slows down all small operations of a transform."""
    (batch,) = make_loader(Modes(), BatchPlan(2, 0, 1), num_workers=workers)
    assert batch.tolist() == [0, 0]


def test_a_sample_is_the_same_in_any_batch_and_leaves_no_trace() -> None:
    before = rng.snapshot()
    alone = {row[0].item(): row for batch in make_noisy_loader() for row in batch}
    shared = [row for rank in range(3) for batch in make_noisy_loader(rank, 3) for row in batch]
    assert len(alone) == 23
    assert all(torch.equal(row, alone[row[0].item()]) for row in shared)
    after = rng.snapshot()
    assert torch.equal(before["torch"], after["torch"])
    assert torch.equal(before["python"][1], after["python"][1])
    assert torch.equal(before["numpy"][1], after["numpy"][1])


def test_a_loader_continues_at_its_position() -> None:
    position = Position(epoch=3)
    loader = make_noisy_loader(position=position)
    assert len(loader) == 6
    batches = list(loader)
    assert position.samples == 0  # no step was done
    loader.count_batch()
    assert position.samples == 23
    assert loader.micro_batch.ends_epoch
    assert torch.equal(next(iter(loader)), batches[0])  # a look, as torch's loaders have it
    assert loader.micro_batch.ends_epoch
    assert position.samples == 23
    with pytest.raises(UsageError, match="an epoch whose batches are all taken"):
        list(loader)
    position.samples = 8
    assert all(map(torch.equal, loader, batches[2:]))
    assert len(loader) == 6


def test_a_loader_of_many_samples_continues_at_its_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_plan, "LISTED", 10)
    whole = [batch.tolist() for batch in make_loader()]
    rest = make_loader(position=Position(step=2, samples=8, epoch_steps=2))
    assert [batch.tolist() for batch in rest] == whole[2:]
    assert sorted(itertools.chain(*whole)) == list(range(len(Numbers())))
    assert rest.facts["order"] == "by formula"  # a checkpoint of a list does not go on with it
    assert "order" not in make_loader(shuffle=False).facts


def test_a_shard_pads_nothing() -> None:
    shards = [
        Shard(NoisyNumbers(), BatchPlan(4 * 5, rank, 5), seed=0, device=CPU) for rank in range(5)
    ]
    rows = [int(row[0]) for shard in shards for batch in shard for row in batch]
    assert sorted(rows) == list(range(23))


def test_a_loader_outside_its_loop_gives_one_batch() -> None:
    loader = make_noisy_loader(check_batch=_refuse)
    assert torch.equal(next(iter(loader)), next(iter(make_noisy_loader())))
    with pytest.raises(UsageError, match="outside"):
        list(loader)


def _refuse() -> None:
    raise UsageError("outside")


def _peek(loader: Loader, count: int, kept: list[Any]) -> None:
    """Look at some batches from the present position on, as a script may at any moment; with `kept`
    the iterator stays open."""
    iterator = iter(loader)
    for _ in range(count):
        next(iterator)
    if kept:
        kept.append(iterator)


@pytest.mark.parametrize("moment", ["before the loop", "before the step", "behind the step"])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_peek_costs_no_sample_and_no_save(moment: str, keeps: bool, persistent: bool) -> None:
    position, done, synced, kept = Position(), list[int](), list[bool](), [None] if keeps else []
    loader: Loader = make_loader(
        cut=BatchPlan(8, 0, 1, accumulate=2),
        position=position,
        set_sync=synced.append,
        end_batch=lambda: done.append(position.samples) if loader.batch.is_trained else None,
        **({"num_workers": 1, "persistent_workers": True} if persistent else {}),
    )
    whole = [batch.tolist() for batch in make_loader(cut=BatchPlan(8, 0, 1, accumulate=2))]
    if moment == "before the loop":
        _peek(loader, 1, kept)
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        micro_batch = loader.micro_batch
        if moment == "before the step":
            _peek(loader, 2, [])
            assert loader.micro_batch == micro_batch
            assert synced[-1] == micro_batch.ends_step
        if micro_batch.ends_step:
            loader.count_batch()
        if moment == "behind the step":
            _peek(loader, 1, kept)
    assert seen == whole
    assert position.samples == 23
    assert done == [8, 16, 23]


def test_a_batch_without_a_step_is_given_again_after_a_break() -> None:
    loader = make_loader(shuffle=False)
    for batch in loader:
        if 4 in batch:
            break
        loader.count_batch()
    assert next(iter(loader)).tolist() == [4, 5, 6, 7]
    assert loader.batch.is_trained  # of the one before


def test_a_batch_that_the_loop_passes_over_is_not_given_again() -> None:
    position = Position()
    loader = make_loader(shuffle=False, position=position)
    for batch in loader:
        if 4 in batch:
            continue
        loader.count_batch()
        if 8 in batch:
            break
    assert position.samples == 12


def test_a_loop_by_steps_begins_the_next_epoch_by_itself() -> None:
    position = Position()
    loader = make_loader(position=position)
    loader.rolls = True
    seen = []
    for _ in range(2):
        for batch in loader:
            seen += batch.tolist()
            loader.count_batch()
            position.epoch_steps += 1
    assert (position.epoch, position.samples, position.epoch_steps) == (2, 0, 0)
    epochs = [seen[:23], seen[23:]]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(23))
    position.samples = 23  # of a checkpoint after an epoch's last step
    assert len(next(iter(loader))) == 4
    assert (position.epoch, position.samples) == (3, 0)


def test_batches_that_are_grouped_by_the_script_are_missed() -> None:
    lines: list[str] = []
    loader = make_loader(cut=BatchPlan(2, 0, 1), warn=lines.append)  # 12 batches
    for number, _ in enumerate(loader):
        if number % 3 == 2:
            loader.count_batch()
    assert len(lines) == 1
    assert "run.step comes after 3 batches each" in lines[0]
    lines.clear()
    whole = make_loader(cut=BatchPlan(2, 0, 1, accumulate=2), warn=lines.append)
    for number, _ in enumerate(whole):
        if whole.micro_batch.ends_step and number != 3:  # one is left out, as for a loss of NaN
            whole.count_batch()
    assert lines == []


def test_a_batch_that_is_fetched_ahead_is_warned_of() -> None:
    """As timm's loader does; a look at a batch before the first step is none."""
    for ahead, expected in ((1, 1), (0, 0)):
        lines: list[str] = []
        loader = make_loader(
            TensorDataset(torch.ones(24)),
            BatchPlan(4, 0, 1),
            position=Position(),
            warn=lines.append,
        )
        look: Any = iter(loader)
        next(look)
        look.close()
        batches = iter(loader)
        for _ in range(ahead):
            next(batches)
        for _ in range(3):
            next(batches)
            loader.count_batch()
        assert sum("fetched before the step" in line for line in lines) == expected


def test_a_look_before_the_loop_is_at_the_first_batch_and_ends_there() -> None:
    position = Position(epoch=2, samples=8)
    loader = make_loader(shuffle=False, position=position)
    loader.is_before_loop = True
    kept: Any = iter(loader)
    assert next(kept).tolist() == [0, 1, 2, 3]
    loader.begin_loop()
    with pytest.raises(UsageError, match="was begun before the loop"):
        next(kept)
    assert next(iter(loader)).tolist() == [8, 9, 10, 11]


def on_first_batch(calls: list[str]) -> Callable[[], Callable[[], None]]:
    """Return a function that notes its call, and returns one that notes its own."""

    def begin() -> Callable[[], None]:
        calls.append("begin")
        return lambda: calls.append("undo")

    return begin


@pytest.mark.parametrize("asks", ["for", "yield from"])
def test_a_look_whose_iterator_is_kept_ends_before_the_loop_over_batches(asks: str) -> None:
    lines, calls = list[str](), list[str]()
    position = Position()
    loader = make_loader(cut=BatchPlan(4, 0, 1), position=position, warn=lines.append)
    loader.on_first_batch = on_first_batch(calls)
    position.passes = 2  # the checkpoint is in the second iteration of its epoch
    kept: Any = iter(loader)
    next(kept)
    assert calls == ["begin"]

    def batches() -> Iterator[Any]:
        yield from loader

    for _ in loader if asks == "for" else batches():
        loader.count_batch()
    assert calls == ["begin", "undo", "begin"]
    assert (position.samples, position.passes, lines) == (23, 2, [])


def test_a_look_that_goes_on_is_warned_of() -> None:
    """No statement tells it from the training, which is by ``next``, too."""
    lines: list[str] = []
    loader = make_loader(cut=BatchPlan(4, 0, 1), position=Position(), warn=lines.append)
    look: Any = iter(loader)
    next(look)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
        loader.count_batch()
    assert [line.partition(" is kept")[0] for line in lines] == [
        "WARNING: an iterator of the training loader"
    ]


@pytest.mark.parametrize(("passes", "expected"), [(1, ["begin"]), (2, ["begin", "undo"])])
def test_a_limit_before_the_training_is_no_look(passes: int, expected: list[str]) -> None:
    """The checkpoint's position has the number of the iteration that it is in."""
    calls: list[str] = []
    loader = make_loader(position=Position(samples=8, passes=passes))
    loader.on_first_batch = on_first_batch(calls)
    for _ in loader:
        break
    assert calls == expected
    assert loader.clear() == (passes == 2)


def test_a_look_behind_the_step_of_a_batch_by_next_ends_nothing() -> None:
    lines, calls = list[str](), list[str]()
    loader = make_loader(
        cut=BatchPlan(4, 0, 1), position=Position(passes=2), warn=lines.append, shuffle=False
    )
    loader.on_first_batch = on_first_batch(calls)
    batches: Any = iter(loader)
    for number in range(5):
        assert next(batches)[0] == 4 * number
        loader.count_batch()
        for _ in loader:
            break
    assert calls == ["begin"]
    assert (loader.groups.since_step, lines) == (0, [])


def test_a_loop_by_steps_goes_on_beside_a_look_that_is_kept() -> None:
    position = Position()
    loader = make_loader(cut=BatchPlan(4, 0, 1), position=position)
    loader.rolls = True
    look: Any = iter(loader)
    next(look)
    for epoch in range(2):
        assert position.epoch == epoch
        batches = iter(loader)
        while next(batches, None) is not None:
            loader.count_batch()
    assert (position.epoch, position.samples) == (2, 0)


@pytest.mark.skipif("CACHE" not in dis.opmap, reason="instructions of this Python have no caches")
def test_the_instruction_of_a_frame_is_found_behind_its_cache() -> None:
    """Some Pythons have a frame stand at the last of the caches that follow an instruction."""
    loop, cache = dis.opmap["FOR_ITER"], dis.opmap["CACHE"]
    code = bytes([dis.opmap["NOP"], 7, loop, 9, cache, 0, cache, 0])
    for at in (2, 4, 6):
        frame: Any = SimpleNamespace(f_code=SimpleNamespace(co_code=code), f_lasti=at)
        assert instruction_of(frame) == "FOR_ITER"
