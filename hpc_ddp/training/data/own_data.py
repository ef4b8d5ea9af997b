"""Data that a script loads by itself, and that a resume repeats."""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.data.dataloader import _BaseDataLoaderIter

from hpc_ddp.training.data.dataloader import Seeded
from hpc_ddp.training.data.iterable import IterableBatches
from hpc_ddp.training.data.order import Position
from hpc_ddp.training.models.tracked import find_living

HINT = "write run.loader(dataset, batch_size) in place of DataLoader(dataset, …)"


class OwnData:
    """Warns of samples that are seen twice after a resume, by a call of `warn` with the text.

    `is_likely`: the run was resumed, and the script has neither a loader of the run nor objects
    that each rank has its own of, such as a StatefulDataLoader. Otherwise no method does anything.
    """

    def __init__(self, is_likely: bool, warn: Callable[[str], None]) -> None:
        self._is_likely, self._warn = is_likely, warn

    def warn_of_epoch(self, position: Position) -> None:
        """Called before the loop's first epoch. If the epoch was partly done, warn, once: its first
        samples are seen again. At the start of an epoch samples are repeated only where the
        iteration of a DataLoader is under way by now; then `warn_of_step` looks again."""
        if self._is_likely and not position.epoch_steps:
            self._is_likely = is_own_loader_open()
        elif self._is_likely:
            self._is_likely = False
            self._warn(
                f"WARNING: the checkpoint is from epoch {position.epoch}, after"
                f" {position.epoch_steps} of its steps, and the script has no run.loader: a"
                f" DataLoader begins the epoch again, and its first samples are seen twice; {HINT}"
            )

    def warn_of_step(self) -> None:
        """At the first step after a resume, warn if a DataLoader of the script is being iterated;
        later calls do nothing."""
        if self._is_likely and is_own_loader_open():
            self._warn(
                "WARNING: the run goes on in the midst of a training, and a DataLoader of the"
                f" script has begun again: its first samples are seen twice; {HINT}"
            )
        self._is_likely = False


def is_own_loader_open() -> bool:
    """Return whether an iteration of a DataLoader is under way in this process that is none of a
    run's. The search through all objects of the process takes some 0.1 s."""
    iterations = find_living(_BaseDataLoaderIter)
    return any(not isinstance(entry._dataset, (Seeded, IterableBatches)) for entry in iterations)
