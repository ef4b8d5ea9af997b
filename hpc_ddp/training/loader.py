"""The training loader: what `order` says, through torch's DataLoader."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from hpc_ddp.training import order, randomness
from hpc_ddp.training.notice import ignore_in_loader
from hpc_ddp.training.order import Position, Share
from hpc_ddp.training.watchdog import beat


class Loader:
    """Yields this rank's batches of the current epoch, from the current position on.

    Made by `Run.loader`. Batches are on the run's device. One batch is one share of a global
    batch of ``batch_size * world_size`` samples; `share` describes the one last yielded.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        position: Position,
        device: torch.device,
        check: Callable[[], None],
        shuffle: bool = True,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.samples = len(dataset)  # type: ignore[arg-type]  # map-style ones have a length
        self.batch_size = batch_size
        self.share: Share | None = None
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._position, self._device, self._check = position, device, check
        self._shuffle, self._drop_last = shuffle, drop_last
        self._dataset = _Seeded(dataset, seed)
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": device.type == "cuda",
            "worker_init_fn": ignore_in_loader if num_workers else None,
        }

    def __len__(self) -> int:
        """Steps of a whole epoch, wherever in it the run is (what a scheduler wants to know)."""
        return self.steps(0)

    def steps(self, start: int) -> int:
        """Return the steps from position `start` (in samples) to the end of an epoch."""
        return order.step_count(
            self.samples - start, self.batch_size, self._world_size, self._drop_last
        )

    def last_of_epoch(self) -> bool:
        """Tell whether the position is behind the epoch's last step."""
        return self.steps(self._position.samples) == 0

    def __iter__(self) -> Iterator[Any]:
        self._check()
        epoch = self._position.epoch
        ahead: deque[Share] = deque()  # fetched or being fetched, not yet yielded
        batches: DataLoader[Any] = DataLoader(
            self._dataset,  # type: ignore[arg-type]  # fetched by (epoch, index)
            batch_sampler=self._keys(epoch, ahead),
            # Without a generator of its own an iterator draws from the global one.
            generator=torch.Generator().manual_seed(order.derive(self._seed, epoch, self._rank)),
            **self._options,
        )
        for batch in batches:
            self.share = ahead.popleft()
            self._position.samples += self.share.total
            beat()
            yield to_device(batch, self._device)

    def _keys(self, epoch: int, ahead: deque[Share]) -> Iterator[list[tuple[int, int]]]:
        """Yield what to fetch, batch by batch, and note each share in `ahead`."""
        indices = order.permutation(self.samples, self._seed, epoch, self._shuffle)
        start, size = self._position.samples, self.batch_size
        for share in order.shares(
            indices, start, size, self._rank, self._world_size, self._drop_last
        ):
            ahead.append(share)
            yield [(epoch, index) for index in share.indices]


class _Seeded:
    """A data set whose randomness depends on (seed, epoch, index) and on nothing else.

    Neither the number of ranks or loader workers nor an interruption changes what an
    augmentation draws, and it takes nothing from the generators of the training itself.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._plain = type(dataset) is TensorDataset  # draws nothing: skip 20 us a sample

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        if self._plain:
            return [self._dataset[index] for _, index in keys]
        if get_worker_info() is not None:
            return [self._seeded(*key) for key in keys]
        with randomness.untouched():
            return [self._seeded(*key) for key in keys]

    def _seeded(self, epoch: int, index: int) -> Any:
        randomness.seed_all(order.derive(self._seed, epoch, index))
        return self._dataset[index]


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with the tensors in its tuples, lists and dicts on `device`."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


class Shard:
    """This rank's part of a data set, in order, each sample on one rank only: for evaluation.

    Made by `Run.shard`. Nothing is padded, so ranks may have different numbers of batches, or
    none: call nothing collective per batch, and add the sums up afterwards with `Run.sum`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        device: torch.device,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        mine = range(rank, len(dataset), world_size)  # type: ignore[arg-type]  # as above
        keys = [(0, index) for index in mine]
        self._device = device
        self._loader: DataLoader[Any] = DataLoader(
            _Seeded(dataset, seed),  # type: ignore[arg-type]  # fetched by (epoch, index)
            batch_sampler=[keys[i : i + batch_size] for i in range(0, len(keys), batch_size)],
            generator=torch.Generator(),
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=device.type == "cuda",
            worker_init_fn=ignore_in_loader if num_workers else None,
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            beat()
            yield to_device(batch, self._device)
