"""The content of a checkpoint, collected from the script's objects and put back into them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.training import devices
from hpc_ddp.training.checkpoint import optimizer_state, put_back, state
from hpc_ddp.training.checkpoint.rank_comparison import (
    Inventory,
    find_misfit,
    inventory_of,
    start_checksums,
    with_checksums,
)
from hpc_ddp.training.checkpoint.rank_part import Content, parts_of_rank
from hpc_ddp.training.checkpoint.restore import Loaded, Restored
from hpc_ddp.training.checkpoint.save import Checkpoints
from hpc_ddp.training.checkpoint.schedule import Best, BestValues
from hpc_ddp.training.checkpoint.state import State, merge_trees, unwrap
from hpc_ddp.training.checkpoint.storage.resharding import Sharing
from hpc_ddp.training.checkpoint.storage.shards import StagingBuffer
from hpc_ddp.training.data.batch_plan import Position, derive_seed
from hpc_ddp.training.models import rng
from hpc_ddp.training.models.ddp import BucketOrders
from hpc_ddp.training.models.dtensor import is_sharded, local_copies
from hpc_ddp.training.models.generators import Generators
from hpc_ddp.training.models.mesh import ParallelDims
from hpc_ddp.training.models.trained_parameters import TrainedParameters

RETRY_S = 1.0  # between two tries of `save_surely`


class CheckpointManager:
    """Saves and restores one rank's part of the run, by `checkpoints`. `position` is shared with
    the Run: `track` changes it.

    `devices` are this rank's, `seed` the run's; `dims` has this rank's place among all ranks. With
    `only_finite` a save with NaN or infinity in trained weights ends the run with an error. All
    ranks must call its public methods at the same step, apart from `note_flags` and `put_back`.
    `track`, `judge` and `load_best` raise RuntimeError if a peer is gone.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        position: Position,
        devices: Sequence[torch.device],
        seed: int,
        dims: ParallelDims,
        only_finite: bool,
    ) -> None:
        self._checkpoints, self._position = checkpoints, position
        self._devices, self._seed = devices, seed
        self._dims, self._only_finite = dims, only_finite
        self.trained = TrainedParameters()
        self._best_values = BestValues()
        self.resumed = False  # by `track`
        self.has_tracked = False  # `track` has ended without an error
        # Whether one rank reads tensors for all ranks that need the same ones, and sends them.
        self.shares_reads = False
        self.objects: dict[str, Any] = {}  # and the next two: the arguments of `track`
        self._data: dict[str, Any] = {}
        self._per_rank: tuple[str, ...] = ()
        self.generators = Generators(devices)
        self.buckets = BucketOrders()
        self._buffer = StagingBuffer(devices[0])
        self._loaded: Loaded | None = None
        self._has_noted = False  # the flags of models
        self._written: tuple[Position, Best] | None = None  # `_identity` of the newest good save
        self._has_loaded_best = False

    def track(
        self,
        objects: Mapping[str, Any],
        data: Mapping[str, Any],
        per_rank: Sequence[str] = (),
        added: Sequence[str] = (),
    ) -> None:
        """Note the script's objects, and load the newest checkpoint, if there is one, into them,
        the position and `best`. Seed the global random generators for this rank's stream, in each
        attempt alike; a loop puts back their states from the checkpoint (`generators`).

        `data` has the plain values that decide the order of the training's samples, by name.
        `per_rank` names the objects of which each rank has its own: they stay as they are where
        another number of ranks wrote the checkpoint. Objects and parts of models that `added` names
        stay as they are where the checkpoint has none. After an error some objects may be loaded.
        Rank 0 prints a line for each setting that the checkpoint overrides.

        Raises
        ------
        UsageError
            called twice, an object has no state_dict, only some ranks have an object, or the seed
            or the training set is not the checkpoint's
        HpcDdpError
            a state can't be saved, the ranks' tensors do not make a whole, or no checkpoint is good
            though there was one; or the checkpoint can't be read, is of other objects, or of
            another number of ranks that had their own weights
        """
        if self.objects:
            raise UsageError("run.track was called twice", hint="name all objects in one call")
        generators = {n: rng.GeneratorState(g) for n, g in objects.items() if rng.is_generator(g)}
        self.generators.track(generators)
        objects, per_rank = {**objects, **generators}, (*per_rank, *generators)
        self.trained.add(map(unwrap, objects.values()))
        self._refuse_misfits(state.collect(objects, per_rank))  # what can't be saved is refused now
        self.objects, self._data, self._per_rank = dict(objects), dict(data), tuple(per_rank)
        # By now models and splits are made, with random numbers that are equal on all ranks.
        rng.seed_all(derive_seed(self._seed, self._dims.stream, 0, 0), self._devices)
        checkpoint = self._checkpoints.restore()
        if checkpoint is not None:
            self._take_up(checkpoint, added)
        self.has_tracked = True

    def _take_up(self, checkpoint: Restored, added: Sequence[str]) -> None:
        """Load a checkpoint into the tracked objects, the position, `best` and `generators`; print
        and raise as `track`."""
        for name, current in self._facts().items():
            if (stored := checkpoint.index.shared.get(name)) != current:
                raise UsageError(
                    f"{name} is {current}, but {stored} in the run's checkpoint:"
                    " the data would not go on in the same order",
                    hint="start another run, or go on with the same value",
                )
        tree = self._tree_of(checkpoint)
        anew = {*(self._per_rank if checkpoint.is_resized else ()), *added}
        objects = {n: tracked for n, tracked in self.objects.items() if n in tree or n not in anew}
        # Before the objects: an optimizer in the backward may do a step.
        self.buckets.load(checkpoint.index.shared.get("buckets", ()))
        notes = optimizer_state.find_ignored_settings(objects, tree, self.trained)
        self._put_back(objects, tree, checkpoint, added)
        self._loaded = Loaded(objects, tree, checkpoint, self.trained, added)
        if self._dims.rank == 0:
            for note in notes:
                say(note)
        vars(self._position).update(checkpoint.index.shared["position"])
        self._best_values = BestValues(Best(**checkpoint.index.shared["best"]))
        self._written, self.resumed = self._identity(), True
        # All ranks of a stream have the same generators: those of its first rank serve for all.
        first = checkpoint.index.first_of_stream(self._dims.stream)
        if first is not None:
            self.generators.load(checkpoint.values_of(first))

    def note_flags(self) -> None:
        """Note, for each tracked model, which parameters need gradients and which parts are in
        training mode: later differences count as the loop's changes. A second call does nothing."""
        if self._has_noted:
            return
        self._has_noted = True
        for module in map(unwrap, self.objects.values()):
            if isinstance(module, torch.nn.Module):
                self.trained.note_flags(module)

    def put_back(self, accepts_settings: bool) -> list[str]:
        """Load models and optimizers anew where they differ from the checkpoint that `track` has
        loaded, and set models' flags as in it; do nothing without one, or after the first save.
        With `accepts_settings` a change of optimizers' settings alone is left. Return the lines of
        `Loaded.put_back`. Raises as `put_back.put_back`. No collective: each rank reads alone."""
        return self._loaded.put_back(self._dims.pp > 1, accepts_settings) if self._loaded else []

    def _tree_of(self, checkpoint: Restored) -> dict[str, Any]:
        """Return the objects' state dicts from a checkpoint, by name: those that all ranks share,
        joined with those that this rank had of its own.

        Where another number of ranks wrote the checkpoint, objects of which each rank had its own
        are left out, and rank 0 prints a warning. Raise HpcDdpError if a model or an optimizer is
        among these, DiskError if this rank's values can't be read.
        """
        index = checkpoint.index
        tree: dict[str, Any] = index.shared["tree"]
        if not index.objects:
            return tree
        if not checkpoint.is_resized:
            own_values = checkpoint.values_of(self._dims.rank)
            return dict(merge_trees(tree, own_values.get("objects", {})))
        text = (
            f"each of the {index.world_size} ranks that wrote the checkpoint of step"
            f" {checkpoint.step} had its own {', '.join(index.objects)},"
            f" and {self._dims.world_size} run here"
        )
        kinds = (torch.nn.Module, torch.optim.Optimizer)
        if any(isinstance(unwrap(self.objects.get(name)), kinds) for name in index.objects):
            raise HpcDdpError(text, hint=f"start {index.world_size} workers, as before")
        if self._dims.rank == 0:
            say(f"WARNING: {text}: it begins anew")
        return tree

    def _refuse_misfits(self, current: State) -> None:
        """Compare the names of all ranks' tracked objects, and how DTensors are sharded, before the
        training; it is a collective. Raise UsageError if only some ranks have an object,
        HpcDdpError if a DTensor is not sharded alike on all ranks, or has a pending reduction,
        RuntimeError if a peer is gone."""
        sharded = {name: tensor for name, tensor in current.shared.items() if is_sharded(tensor)}
        parts = parts_of_rank(State(tensors=sharded), self._dims)
        inventory = inventory_of(self._dims.pp_rank, sharded, parts, current.tree)
        if misfit := find_misfit(self._checkpoints.control, inventory):
            raise misfit

    def save(self, *, is_last: bool = False) -> None:
        """Wait for the previous save, then begin to copy the state, and to write it in a thread.

        Where the previous save has the same position and best value, it only waits. A best value
        without a checkpoint gets this one (`BestValues.begin_save`); rank 0 prints a warning if a
        best value is lost. Rank 0's thread prints on stderr that a save has failed; the next call
        then saves again. Tensors that must be the same on all ranks are compared at saves 1, 2, 4,
        8, … of this attempt, and with `is_last`, since there may be no other save.

        Raises
        ------
        HpcDdpError
            as `Checkpoints.settle` for the previous save; or an object's state can't be saved
        SupersededError
            a later attempt of this run has started
        """
        self.settle()
        if self._written == self._identity():
            return
        self._loaded, self._has_loaded_best, began = None, False, time.monotonic()
        lost = self._best_values.begin_save(self._position.step)
        if lost is not None and self._dims.rank == 0:
            say(f"WARNING: the best value, {lost:g}, has no checkpoint: its save has failed")
        # Ranks may come to differ later, too; at ever fewer saves this costs little in all.
        compares = is_last or (self._checkpoints.saves + 1).bit_count() == 1  # a power of two
        content = self._copy_state(compares and self._dims.stage_size > 1)
        self._written = self._identity()
        self._checkpoints.begin(replace(content, stall_s=time.monotonic() - began))

    def _copy_state(self, compares: bool) -> Content:
        """Begin to copy the objects' state into the buffer, and return the content of a save. With
        `compares` also begin the checksums of all that must be the same on several ranks. It waits
        for the devices that have frozen weights. Raise HpcDdpError for a state that can't be
        saved."""
        current = state.collect(self.objects, self._per_rank, self.trained, self._devices)
        add_checksums = _start_inventory_checksums(current) if compares else None
        parts = parts_of_rank(current, self._dims)
        inventory = inventory_of(self._dims.pp_rank, current.shared, parts, current.tree)
        frozen = self._checkpoints.frozen.take_out(parts, current.seldom_changed)
        self._buffer.fill(parts)
        return Content(
            step=self._position.step,
            facts={
                "epoch": self._position.epoch,
                "samples": self._position.samples,
                "best": None if self.best.step is None else asdict(self.best),
            },
            shared={
                **self._facts(),
                "position": asdict(self._position),
                "best": asdict(self.best),
                "buckets": self.buckets.values(),
                "tree": current.tree,
            },
            stream=self._dims.stream,
            rank_values=self._rank_values(current),
            buffer=self._buffer,
            frozen=frozen,
            trained=current.trained if self._only_finite else set(),
            inventory=lambda: add_checksums(inventory) if add_checksums else inventory,
        )

    def _rank_values(self, current: State) -> dict[str, Any]:
        """Return the plain values that this rank alone saves: the states of its generators, and of
        the objects of which each rank has its own; on the first rank of a later pipeline stage also
        the stage's tree."""
        values = {
            **self.generators.values(),
            **({"objects": current.private_tree} if current.private_tree else {}),
        }
        if self._dims.pp_rank and self._dims.stage_rank == 0:
            values["tree"] = current.tree  # rank 0 writes the tree of its own stage only
        return values

    @property
    def best(self) -> Best:
        """The run's best value."""
        return self._best_values.best

    def judge(self, value: float, higher: bool) -> bool:
        """Compare rank 0's `value` with the best value, and note it (`BestValues.judge`). Return
        whether it is better, on all ranks the same. It is a collective. `higher`: greater values
        are better."""
        return self._best_values.judge(self._checkpoints.control.from_first(value), higher)

    def load_best(self, model: torch.nn.Module, saves: bool = True) -> int:
        """Load the best checkpoint's state into a tracked model, given with or without its wrapper;
        return the checkpoint's step. With `saves` the present state is saved first. If the best
        value has no checkpoint even then, it is the present state's: the model stays as it is, and
        the present step is returned.

        Raises
        ------
        UsageError
            the model is not tracked, or the run has no best value
        HpcDdpError
            as `save_surely`; or the checkpoint is not there, damaged, or of another model; or
            another number of ranks wrote it, each with weights of its own
        """
        names = [n for n, tracked in self.objects.items() if unwrap(tracked) is unwrap(model)]
        if not names:
            raise UsageError(
                "the model is none that run.track was given",
                hint="run.track(model=model, …) before the loop",
            )
        if saves and self.best.value is not None:
            self.save_surely()
            self._has_loaded_best = True
        else:
            self.settle()
        if self.best.value is None:
            raise UsageError(
                "the run has no best checkpoint: run.best was not called, or with NaN only, or the"
                " save of the one best value has failed",
                hint="run.best(accuracy) at the end of each epoch",
            )
        if self.best.step is None:
            return self._position.step
        checkpoint = self._checkpoints.load(self.best.step)
        tree = {names[0]: self._tree_of(checkpoint)[names[0]]}
        self._put_back({names[0]: model}, tree, checkpoint)
        return checkpoint.step

    def _put_back(
        self,
        objects: Mapping[str, Any],
        tree: Mapping[str, Any],
        checkpoint: Restored,
        added: Sequence[str] = (),
    ) -> None:
        """Wait for the devices, then load a checkpoint into `objects`, with the arguments and
        errors of `put_back.put_back`. With `shares_reads`, and without pipeline stages, it is a
        collective."""
        for device in self._devices:  # an evaluation may still copy weights from the host
            devices.wait_for(device)
        step, is_stage = checkpoint.step, self._dims.pp > 1
        checkpoint.reader.devices = self._devices
        if self.shares_reads and not is_stage:
            dims = self._dims
            checkpoint.reader.sharing = Sharing(dims.rank, dims.world_size, self._devices[0])
        put_back.put_back(objects, tree, checkpoint.reader, step, is_stage, added)
        checkpoint.reader.close_files()

    def settle(self) -> bool:
        """Wait for the save under way, if there is one. Return False if it has failed, else True.
        After a failure the next `save` writes again. Raises as `Checkpoints.settle`."""
        done = False
        try:
            done = self._checkpoints.settle()
            return done
        finally:
            self._written = self._written if done else None
            self._best_values.end_save(done)

    def save_surely(self, anew: bool = False) -> None:
        """Save, and wait until the save is durable. After a failure try again, `RETRY_S` seconds
        later, until a save succeeds or an error of `save` is raised.

        With `anew` save also where a save has this position, since lines behind the loop may have
        changed the state; not after `load_best`, nor where that save is of the best value."""
        if anew and not self._has_loaded_best and self.best.step != self._position.step:
            self.settle()
            self._written = None
        self.save(is_last=True)
        while not self.settle():
            time.sleep(RETRY_S)
            self.save(is_last=True)

    def _identity(self) -> tuple[Position, Best]:
        """Return copies of the position and the best value. Two saves are the same if both are
        equal."""
        return replace(self._position), replace(self.best)

    def _facts(self) -> dict[str, Any]:
        """Return the values, by name, that must be the same in a checkpoint as here: the seed, and
        those that decide the data order."""
        return {"seed": self._seed, **self._data}


def _start_inventory_checksums(current: State) -> Callable[[Inventory], Inventory]:
    """Begin the checksums of all that must be the same on several ranks, in the devices' current
    streams. Return a function that waits for them, and returns an inventory with them."""
    copies = local_copies(current.shared)
    copied = {place: part for place, (part, _) in copies.items()}
    weights = {place: weight for place, (_, weight) in copies.items()}
    wait_for_checksums = start_checksums({**current.equal, **copied})
    # Objects of which rank 0's state is saved count by their plain values and by their tensors.
    trees = {name: current.tree[name] for name in current.rank_0_objects}
    waits = {name: start_checksums(current.rank_0_objects[name]) for name in trees}

    def add(inventory: Inventory) -> Inventory:
        contents = {name: (trees[name], wait()) for name, wait in waits.items()}
        return with_checksums(inventory, wait_for_checksums(), weights, contents)

    return add
