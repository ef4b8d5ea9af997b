"""The checkpoints that stay, and the removal of the others."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_ddp.core.checkpoints import candidates, milestones, published, read_manifest, step_of
from hpc_ddp.training.checkpoint.storage.disk import remove

LEAST_KEPT = 2  # of the newest checkpoints, even where there is no space for another


@dataclass(frozen=True)
class Retention:
    """The checkpoints that stay: the newest `last`, and the first one of every `every` steps (None:
    no such ones)."""

    last: int
    every: int | None = None


def best_steps(folder: Path) -> list[int]:
    """Return the step of the best checkpoint, in a list, by the manifest of the newest checkpoint
    in `folder`; [] where that names none or can't be read, and without a checkpoint. Raise OSError
    if the folder can't be listed."""
    newest_first = published(folder)
    best = None
    if newest_first:
        with suppress(OSError, ValueError):
            best = read_manifest(newest_first[0]).get("best")
    return [best["step"]] if best else []


def prune(folder: Path, keep: Retention, pinned: Collection[int] = ()) -> None:
    """Remove the checkpoints in `folder` that `keep` does not name. A replaced one (`.old-`) is
    removed, too; if no other one has its step, it counts like the others.

    Checkpoints of the steps in `pinned`, such as the best one's, stay at any age. Raise OSError if
    the folder can't be listed; a checkpoint that can't be removed stays.
    """
    paths = candidates(folder)
    # From the oldest on, in which order an `.old-` comes before the one that has replaced it.
    by_step = {step_of(path): path for path in reversed(paths)}
    newest_first = [*reversed(by_step.values())]
    stays = set(newest_first[: keep.last])
    stays |= {path for path in newest_first if step_of(path) in pinned}
    stays |= milestones(newest_first, keep.every)
    for path in paths:
        if path not in stays:
            remove(path)
