"""What a checkpoint of this run holds, taken from the user's objects and put back into them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hpc_ddp.run.errors import UsageError
from hpc_ddp.training import randomness, state
from hpc_ddp.training.checkpoint import Checkpoints
from hpc_ddp.training.order import Position, derive

RETRY_S = 1.0


class Keeper:
    """Saves and restores one rank's part of the run. `position` is shared with the Run."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        position: Position,
        device: torch.device,
        seed: int,
        rank: int,
    ) -> None:
        self._checkpoints, self._position = checkpoints, position
        self._device, self._seed, self._rank = device, seed, rank
        self._objects: dict[str, Any] = {}
        self._samples: int | None = None
        self._rng: dict[str, Any] | None = None  # of the checkpoint, until the training starts
        self._saved: Position | None = None

    def track(self, objects: Mapping[str, Any], samples: int | None) -> None:
        """Name the objects, and put back the newest checkpoint if there is one.

        `samples` is the size of the training set, which decides the order of its samples.

        Raises
        ------
        UsageError
            called twice, or the seed or the training set is not the checkpoint's
        HpcDdpError
            the checkpoint is of other objects
        """
        if self._objects:
            raise UsageError("run.track was called twice", hint="name all objects in one call")
        self._objects, self._samples = dict(objects), samples
        found = self._checkpoints.restore()
        if found is None:
            return
        for name, here in self._facts().items():
            if found.facts.get(name) != here:
                raise UsageError(
                    f"{name} is {here}, but {found.facts.get(name)} in the run's checkpoint:"
                    " the data would not go on in the same order",
                    hint="start another run, or go on with the same value",
                )
        state.put_back(self._objects, found.objects, found.position.step)
        vars(self._position).update(vars(found.position))
        self._saved = replace(self._position)
        self._rng = found.rng

    def start_random(self) -> None:
        """Give the generators the state of the checkpoint, or one of this rank's own.

        Called at the start of the loop, so that whatever the script draws before it makes no
        difference to a resume.
        """
        if self._rng is not None:
            randomness.restore(self._rng, self._device)
        else:
            seed = derive(self._seed, self._position.step, self._rank)
            randomness.seed_all(seed, self._device)
        self._rng = None

    def save(self) -> bool:
        """Save, unless this very position is saved; False after a failure worth a retry."""
        if self._saved == self._position:
            return True
        objects = state.collect(self._objects) if self._rank == 0 else {}
        if self._saved is None:
            state.check_loadable(objects, "state")
        rng = randomness.snapshot(self._device)
        done = self._checkpoints.save(self._position, self._facts(), objects, rng)
        if done:
            self._saved = replace(self._position)
        return done

    def save_surely(self) -> None:
        """Save, trying again after a failure until the run has to give up (HpcDdpError)."""
        while not self.save():
            time.sleep(RETRY_S)

    @property
    def slowest_save_s(self) -> float:
        return self._checkpoints.slowest_save_s

    def _facts(self) -> dict[str, Any]:
        return {"seed": self._seed, "samples": self._samples}
