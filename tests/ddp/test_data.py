"""Batches through real loader workers, and gradients through real ranks."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info
from torch.utils.data._utils import worker as worker_module

from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.training.data.batch_plan import BatchPlan, Position
from hpc_ddp.training.data.loader import Loader, Shard
from hpc_ddp.training.models import rng
from hpc_ddp.training.stops.loader_workers import outlive_notices
from tests.waiting import LIMIT_S, is_pending, wait_until

# More workers than this machine may have cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

CPU = torch.device("cpu")
WORKERS = [0, 1, 3]


def draw(index: int) -> torch.Tensor:
    """Return the number of a sample, and one from each of the generators."""
    return torch.tensor([float(index), random.random(), numpy.random.random(), torch.rand(())])


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> torch.Tensor:
        return draw(index)

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class NoisyStream(IterableDataset[torch.Tensor]):
    """Each epoch in another order; splits itself by worker, as many a stream does."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(45).add(100 * self.epoch).tolist()
        worker = get_worker_info()
        for index in order[worker.id :: worker.num_workers] if worker else order:
            yield draw(index)


def make_loader(
    dataset: Dataset[Any], cut: BatchPlan, position: Position, **options: Any
) -> Loader:
    place: dict[str, Any] = {"seed": 1, "position": position, "device": CPU}
    return Loader(
        dataset,
        cut,
        check_batch=lambda: None,
        set_sync=lambda on: None,
        end_batch=lambda: None,
        **place,
        **options,
    )


def load(
    dataset: Dataset[Any], cut: BatchPlan, epoch: int = 0, start: int = 0, **options: Any
) -> list[Any]:
    with rng.preserve_generators():
        return list(make_loader(dataset, cut, Position(0, epoch, start), **options))


def equal(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


@pytest.mark.parametrize("make", [Noisy, NoisyStream])
def test_workers_and_ranks_change_no_sample(make: Callable[[], Dataset[Any]]) -> None:
    alone = {
        int(row[0]): row for batch in load(make(), BatchPlan(4, 0, 1), epoch=2) for row in batch
    }
    assert sorted(alone) == list(range(200, 245) if make is NoisyStream else range(45))
    for rank in range(2):
        plain, *helped = (
            load(make(), BatchPlan(12, rank, 2, 3), epoch=2, num_workers=workers)
            for workers in WORKERS
        )
        assert all(equal(plain, batches) for batches in helped)
        assert all(torch.equal(row, alone[int(row[0])]) for batch in plain for row in batch)


@pytest.mark.parametrize("make", [Noisy, NoisyStream])
def test_a_batch_in_mid_epoch_is_what_it_would_have_been(
    make: Callable[[], Dataset[Any]],
) -> None:
    def mix(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) * numpy.random.random() + random.random() + torch.rand(())

    cut = BatchPlan(8, 1, 2, accumulate=2)
    for workers in WORKERS:
        whole = load(make(), cut, epoch=1, collate_fn=mix)
        rest = load(make(), cut, epoch=1, start=16, collate_fn=mix, num_workers=workers)
        assert equal(whole[4:], rest)
    assert not equal(whole, load(make(), cut, epoch=0, collate_fn=mix))


def test_what_a_collate_function_draws_from_tensors_is_its_batch_s() -> None:
    def mix(samples: list[Any]) -> torch.Tensor:
        return torch.stack([x for (x,) in samples]) + torch.rand(())

    tensors, cut = TensorDataset(torch.zeros(20)), BatchPlan(4, 0, 1)
    before = torch.get_rng_state()
    whole = load(tensors, cut, collate_fn=mix)
    assert torch.equal(before, torch.get_rng_state())
    assert equal(whole[2:], load(tensors, cut, start=8, collate_fn=mix, num_workers=2))
    assert not torch.equal(whole[0], whole[1])


def test_plain_tensors_come_as_torch_collates_them() -> None:
    tensors = TensorDataset(torch.rand(10, 2), torch.arange(10))
    for workers in (0, 1):
        ours = load(tensors, BatchPlan(4, 0, 1), shuffle=False, num_workers=workers)
        for batch, theirs in zip(ours, DataLoader(tensors, 4), strict=True):
            assert isinstance(batch, list)
            assert equal(batch, theirs)


def test_transforms_of_torchvision_draw_by_sample() -> None:
    from torchvision.transforms import v2  # it takes a second to import

    class Flipped(Dataset[torch.Tensor]):
        change = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(4)])

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> torch.Tensor:
            changed: torch.Tensor = self.change(torch.arange(64.0).reshape(1, 8, 8) + 100 * index)
            return changed

    whole = load(Flipped(), BatchPlan(4, 0, 1))
    assert equal(whole[2:], load(Flipped(), BatchPlan(4, 0, 1), start=8, num_workers=2))
    assert len({tuple((image.flatten() % 100).tolist()) for x in whole for image in x}) > 10


@pytest.mark.parametrize("make", [Noisy, NoisyStream])
@pytest.mark.parametrize("world_size", [1, 4, 50])
def test_a_shard_has_each_sample_once(make: Callable[[], Dataset[Any]], world_size: int) -> None:
    rows = []
    for rank in range(world_size):
        shard = Shard(make(), BatchPlan(3 * world_size, rank, world_size), seed=0, device=CPU)
        with rng.preserve_generators():
            batches = list(shard)
        assert make is NoisyStream or len(batches) == len(shard)
        assert all(1 <= len(batch) <= 3 for batch in batches)
        rows += [int(row[0]) for batch in batches for row in batch]
    assert sorted(rows) == list(range(45))


def test_a_worker_obeys_its_parent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_worker_loop", worker_module._worker_loop)
    outlive_notices()  # as `start` does
    loader = make_loader(Noisy(), BatchPlan(4, 0, 1), Position(), num_workers=1)
    batches = iter(loader)
    next(batches)
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    subprocess.run(["kill", str(worker.pid)], check=True)
    pid = worker.pid
    wait_until(lambda: not is_pending(pid, signal.SIGTERM), "the worker takes the signal")
    assert len(list(batches)) == 11  # all the others, more than it had made before
    worker.terminate()
    worker.join(LIMIT_S)
    assert worker.exitcode == 0


def test_workers_may_live_on_and_find_the_next_epoch() -> None:
    position = Position()
    loader = make_loader(
        Noisy(), BatchPlan(8, 0, 1), position, num_workers=2, persistent_workers=True
    )
    for epoch in range(3):
        position.epoch, position.samples = epoch, 0
        assert equal(list(loader), load(Noisy(), BatchPlan(8, 0, 1), epoch=epoch))


@pytest.mark.parametrize("option", ["shuffle", "persistent_workers"])
def test_what_a_stream_cannot_do_is_refused(option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} is True; accepted with an iterable"):
        load(NoisyStream(), BatchPlan(4, 0, 1), **{option: True})


def test_the_length_of_a_stream_is_unknown() -> None:
    shard = Shard(NoisyStream(), BatchPlan(4, 0, 1), seed=0, device=CPU)
    with pytest.raises(UsageError, match="not known before its end"):
        len(shard)
    assert len(list(shard)) == 12  # list() asks for a length too


class Deadly(Noisy):
    def __init__(self, how: signal.Signals) -> None:
        self.how = how

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 20:
            os.kill(os.getpid(), self.how)
        return draw(index)


# torch's handler of SIGCHLD raises wherever this thread happens to be: also in a finalizer, which
# Python reports, and in torch's own look for free file descriptors, which leaves a file open.
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning"
)
@pytest.mark.parametrize(
    ("how", "name"),
    [
        (signal.SIGKILL, "Killed"),
        (signal.SIGSEGV, "Segmentation fault"),
        (signal.SIGBUS, "Bus error"),
    ],
)
def test_a_worker_that_dies_is_named_as_the_cause(how: signal.Signals, name: str) -> None:
    with pytest.raises(HpcDdpError, match=f"^DataLoader worker is killed by signal: {name}$") as e:
        load(Deadly(how), BatchPlan(4, 0, 1), num_workers=2)
    assert ("/dev/shm" in str(e.value.hint)) == (how is signal.SIGBUS)
    for other in multiprocessing.active_children():  # torch's own end of it may be interrupted, too
        other.terminate()  # its code is 0 then, at which torch raises nothing
        other.join(LIMIT_S)
    del e
    gc.collect()  # what is left open is not to be reported in a later test


def test_what_a_data_set_raises_in_a_worker_reaches_the_journal(crew: Any) -> None:
    launch = crew.launch(1, "--workers", "1", "--bad-sample", "9")
    assert launch.wait() == [1]
    (failed,) = crew.events("failed")
    assert failed["error"] == "ValueError: no sample 9"
    assert "in __getitem__" in launch.output()


def expected(size: int) -> list[list[float]]:
    """Return the gradients that `gradients.py` is to print, by one backward per global batch."""
    x = torch.arange(81, dtype=torch.float64).sin().reshape(27, 3)
    found = []
    for block in (x[i : i + size] for i in range(0, 27, size)):
        error = block @ torch.full((3,), 0.5, dtype=torch.float64) + 0.25 - block.sum(1)
        weight = (2 * error[:, None] * block).mean(0)
        found.append([*weight.tolist(), (2 * error).mean().item()])
    return found


@pytest.mark.parametrize(
    ("ranks", "argv", "size"),
    [
        (2, ("--batch-size", "2", "--accumulate", "4"), 16),
        (3, ("--global-batch-size", "10", "--accumulate", "3"), 10),
        (3, ("--global-batch-size", "13"), 13),  # leaves one sample for three ranks
    ],
)
def test_micro_batches_have_the_gradient_of_one_big_batch(
    crew: Any, ranks: int, argv: tuple[str, ...], size: int
) -> None:
    lines = [
        json.loads(line) for line in go(crew, ranks, *argv).splitlines() if line.startswith("[[")
    ]
    gradients, calls, samples = zip(*lines, strict=True)
    assert torch.tensor(gradients).allclose(torch.tensor(expected(size)))
    assert set(calls) == {1}
    assert samples == (*range(size, 27, size), 27)
    (finished,) = crew.events("finished")
    assert finished["step"] == len(lines)


def go(crew: Any, ranks: int, *argv: str) -> str:
    launch = crew.launch(ranks, *argv, script="print_gradients.py")
    assert launch.wait() == [0] * ranks, launch.output()
    output: str = launch.logs[0].read_text()
    return output
