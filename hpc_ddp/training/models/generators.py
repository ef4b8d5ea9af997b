"""The random generators of one rank of a run: as a checkpoint has them, and as a loop begins."""

from __future__ import annotations

import inspect
import pickle
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import torch

from hpc_ddp.training.models import rng
from hpc_ddp.training.models.rng import GeneratorState

ALONE = 3  # references to a frame's dictionary: the frame's, one variable's, one argument's


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


class DrawWatch:
    """Finds the generators of the script that its second step draws from."""

    def __init__(self) -> None:
        self._steps = 0
        self._states: list[tuple[str, Any, int | None, bytes]] = []  # as of the first step's end

    def end_step(self) -> list[tuple[str, Any]]:
        """Called by the script at the end of each step; return nothing but at the second one: the
        generators that have another state than at the first one, each with a variable's name. One
        of torch's that was seeded meanwhile is left out."""
        self._steps += 1
        if self._steps == 1:
            pairs = find_script_generators()
            self._states = [(n, g, _seed_of(g), bytes_of(g)) for n, g in pairs]
            return []
        states, self._states = self._states, []
        return [
            (name, generator)
            for name, generator, seed, state in states
            if bytes_of(generator) != state and _seed_of(generator) == seed
        ]


def find_script_generators() -> list[tuple[str, Any]]:
    """Return the generators in variables of the script, each with a name: those that are local or
    global in a function that is running, or an attribute of its ``self``. Global generators of a
    library are left out, and what can't be looked at."""
    names: dict[int, tuple[str, Any]] = {}  # one for each generator
    frame: FrameType | None = sys._getframe(1)
    while frame:
        if not str(frame.f_globals.get("__name__")).startswith("hpc_ddp."):
            with suppress(Exception):  # as of a property that raises: no reason to end a training
                variables = _locals_of(frame)
                attributes = getattr(variables.get("self"), "__dict__", {})
                for scope in (frame.f_globals, variables, attributes):
                    pairs = [(n, g) for n, g in list(scope.items()) if rng.is_generator(g)]
                    names |= {id(g): (n, g) for n, g in pairs if bytes_of(g)}
        frame = frame.f_back
    numpy: Any = sys.modules.get("numpy.random.mtrand")
    for general in (torch.default_generator, random.__dict__["_inst"], getattr(numpy, "_rand", 0)):
        names.pop(id(general), None)
    return list(names.values())


def _locals_of(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of a frame, by name. Up to Python 3.12 the frame itself keeps what
    it returns of a function, so that outputs of the model would live as long as the function: that
    is emptied, unless the script has it, too, from ``locals()``."""
    variables: Any = frame.f_locals
    copied = dict(variables)
    is_of_function = isinstance(variables, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_of_function and sys.getrefcount(variables) == ALONE:
        variables.clear()
    return copied


def _seed_of(generator: Any) -> int | None:
    """Return the seed that a generator of torch was given last; None for another library's."""
    return generator.initial_seed() if isinstance(generator, torch.Generator) else None


def bytes_of(generator: Any) -> bytes:
    """Return a generator's state as bytes to compare."""
    state = rng.raw_state(generator)
    if isinstance(state, torch.Tensor):  # pickled, it would have its address
        return bytes(state.tolist())
    return pickle.dumps(state)
