"""The random generators of one rank of a run: as a checkpoint has them, and as a loop begins."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hpc_ddp.training.models import rng
from hpc_ddp.training.models.rng import GeneratorState


class Generators:
    """The random generators of a rank: the global ones, those of the worker's `devices`, and those
    that the script tracks, by name.

    A checkpoint has their states as of its step and, since a resume runs the script's lines at the
    top of an epoch a second time, as of the begin of the epoch.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._tracked: dict[str, GeneratorState] = {}
        self._stored: dict[str, Any] | None = None  # global ones, until they are put back
        self._later: dict[str, dict[str, Any]] = {}  # tracked ones, in the same way
        self._at_epoch: dict[str, Any] = {}  # all, as of the epoch's begin

    def track(self, objects: Mapping[str, Any]) -> None:
        """Note the generators among the tracked objects."""
        self._tracked = {n: t for n, t in objects.items() if isinstance(t, GeneratorState)}

    def load(self, values: Mapping[str, Any]) -> None:
        """Keep the states in `values`, the entries of a checkpoint, until `begin_loop` puts them
        back; tracked generators have loaded theirs as of the checkpoint's step already."""
        self._stored, self._at_epoch = values["rng"], values.get("rng_at_epoch", {})

    def values(self) -> dict[str, Any]:
        """Return the entries of a checkpoint: the present states, or loaded ones that are not yet
        put back."""
        return {"rng": self._stored or rng.snapshot(self._devices), "rng_at_epoch": self._at_epoch}

    def begin_loop(
        self, seed: int, *, is_checkpoints: bool, is_over: bool, is_in_epoch: bool
    ) -> None:
        """Seed the global generators by `seed`, unless the loop `is_over`. Then, if
        `is_checkpoints` (the loaded checkpoint is of this loop, or of its end), put back the states
        of its step; if it also `is_in_epoch` of a loop that goes on, those of the epoch's begin
        until `restore_step_states`.

        So what the script draws before its loop makes no difference to a resume. No collective.
        """
        if not is_over:  # first for generators that the checkpoint lacks, as one of a run on CPUs
            rng.seed_all(seed, self._devices)
        if not is_checkpoints or self._stored is None:
            return
        if is_over or not (is_in_epoch and self._at_epoch):
            self._put_back()
            return
        self._later = self._states_of_tracked()
        self._restore(self._at_epoch["global"], self._at_epoch["tracked"])

    def begin_epoch(self) -> None:
        """Note the present states of all generators as those of the begin of an epoch."""
        self._at_epoch = {
            "global": rng.snapshot(self._devices),
            "tracked": self._states_of_tracked(),
        }

    def restore_step_states(self) -> Callable[[], None]:
        """If a checkpoint within an epoch was loaded, put its step's states back, once: the
        script's lines at the top of the epoch have run again by now. Return a function that undoes
        this, for a look at the epoch's first batch before its loop."""
        stored, later = self._stored, self._later
        before = rng.snapshot(self._devices), self._states_of_tracked()
        self._put_back()

        def undo() -> None:
            self._restore(*before)
            self._stored, self._later = stored, later

        return undo

    def _put_back(self) -> None:
        """Put all generators into the loaded states of the checkpoint's step; do nothing after the
        first time."""
        if self._stored is not None:
            self._restore(self._stored, self._later)
        self._stored, self._later = None, {}

    def _restore(self, globals: dict[str, Any], tracked: Mapping[str, dict[str, Any]]) -> None:
        """Put the global generators into the states `globals`, and the tracked ones into those that
        `tracked` has by name, or else into the ones that they have loaded."""
        rng.restore(globals, self._devices)
        for name in tracked.keys() & self._tracked.keys():
            self._tracked[name].load_state_dict(tracked[name])
        for generator in self._tracked.values():
            generator.restore()

    def _states_of_tracked(self) -> dict[str, dict[str, Any]]:
        return {name: generator.state_dict() for name, generator in self._tracked.items()}


def bytes_of(generator: Any) -> bytes:
    """Return a generator's state as bytes to compare."""
    state = rng.raw_state(generator)
    if isinstance(state, torch.Tensor):  # pickled, it would have its address
        return bytes(state.tolist())
    return pickle.dumps(state)
