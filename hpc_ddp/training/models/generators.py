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

    A checkpoint has their states as of its step and as of the begin of the epoch, since a resume
    runs the script's lines at the top of the epoch a second time.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._tracked: dict[str, GeneratorState] = {}
        # The loaded states as of the checkpoint's step, until they are put back: those of the
        # global generators, and of tracked ones that were put into the states of the epoch's begin.
        self._stored: dict[str, Any] | None = None
        self._later: dict[str, dict[str, Any]] = {}
        self._at_epoch: dict[str, Any] = {}  # states of all generators at the epoch's begin

    def track(self, objects: Mapping[str, Any]) -> None:
        """Note the generators among the tracked objects: those that are a GeneratorState."""
        self._tracked = {n: t for n, t in objects.items() if isinstance(t, GeneratorState)}

    def load(self, values: Mapping[str, Any]) -> None:
        """Keep the states in `values`, the entries of a checkpoint, until `begin_loop` puts them
        back. Tracked generators have loaded their states as of the checkpoint's step before."""
        self._stored, self._at_epoch = values["rng"], values.get("rng_at_epoch", {})

    def values(self) -> dict[str, Any]:
        """Return the entries of a checkpoint: the present states, or loaded states that are not yet
        put back. Those of tracked generators at its step are saved with the tracked objects."""
        return {"rng": self._stored or rng.snapshot(self._devices), "rng_at_epoch": self._at_epoch}

    def begin_loop(
        self, seed: int, *, is_checkpoints: bool, is_over: bool, is_in_epoch: bool
    ) -> None:
        """Seed the global generators by `seed`, unless the loop `is_over`. Then put back loaded
        states if `is_checkpoints`: the checkpoint was saved in this loop, or at its end. They are
        the states of its step; but if it was saved within an epoch (`is_in_epoch`) of a loop that
        goes on, they are those of the epoch's begin, until `restore_step_states`.

        So the numbers that the script draws before its loop make no difference to a resume.
        """
        if not is_over:
            # Also before a restore: the checkpoint of a run on CPUs lacks states of devices.
            rng.seed_all(seed, self._devices)
        if not is_checkpoints or self._stored is None:
            return
        if is_over or not (is_in_epoch and self._at_epoch):
            self._restore_step()
            return
        self._later = self._states_of_tracked()
        self._restore(self._at_epoch["global"], self._at_epoch["tracked"])

    def begin_epoch(self) -> None:
        """Note the present states of all generators as those of the epoch's begin."""
        self._at_epoch = {
            "global": rng.snapshot(self._devices),
            "tracked": self._states_of_tracked(),
        }

    def restore_step_states(self) -> Callable[[], None]:
        """If a checkpoint within an epoch was loaded, put back the states of its step, once: the
        script's lines at the top of the epoch have run again by now. Return a function that undoes
        this, for a peek at the epoch's first batch before the loop over batches."""
        stored, later = self._stored, self._later
        before = rng.snapshot(self._devices), self._states_of_tracked()
        self._restore_step()

        def undo() -> None:
            self._restore(*before)
            self._stored, self._later = stored, later

        return undo

    def _restore_step(self) -> None:
        """Put all generators into the loaded states of the checkpoint's step, once; do nothing
        without a loaded checkpoint."""
        if self._stored is not None:
            self._restore(self._stored, self._later)
        self._stored, self._later = None, {}

    def _restore(self, globals: dict[str, Any], tracked: Mapping[str, dict[str, Any]]) -> None:
        """Put the global generators into the states `globals`, and each tracked one into its state
        in `tracked`, by name, else into the state that it has loaded, if any."""
        rng.restore(globals, self._devices)
        for name in tracked.keys() & self._tracked.keys():
            self._tracked[name].load_state_dict(tracked[name])
        for generator in self._tracked.values():
            generator.restore()

    def _states_of_tracked(self) -> dict[str, dict[str, Any]]:
        """Return the state dicts of the tracked generators, by name."""
        return {name: generator.state_dict() for name, generator in self._tracked.items()}


def bytes_of(generator: Any) -> bytes:
    """Return bytes that are equal for equal states of a generator."""
    state = rng.raw_state(generator)
    if isinstance(state, torch.Tensor):  # a pickle of it would have its address in memory
        return bytes(state.tolist())
    return pickle.dumps(state)
