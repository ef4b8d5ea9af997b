"""State of the script's objects, taken out and checked.

Tensors are named as a person would, without wrappers: ``model.fc.weight``,
``optimizer.state.model.fc.weight.exp_avg``. So a model can be loaded under another wrapper.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.checkpoint import optimizer_state
from hpc_ddp.training.checkpoint.plain_state import kind_of, refusal, take_apart
from hpc_ddp.training.checkpoint.storage.layout import OWN
from hpc_ddp.training.models.dtensor import is_sharded, reshard
from hpc_ddp.training.models.trained_parameters import TrainedParameters, parameters_of

VERSIONS = "<versions>"  # of a module's state dict, by the names of its parts, beside it
GRADIENTS = "<gradients>"  # whether they are needed, by names of parameters that the loop changes
MODES = "<modes>"  # whether they train, by names of modules that the loop changes
BESIDE = (VERSIONS, GRADIENTS, MODES)
# What torch.compile, and its wrapper of a module that is computed again in the backward, put into
# names; `state_dict` leaves the latter out by itself.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")

LARGE_BUFFER = 1 << 16  # bytes
SHOWN = 8  # names in an error


def unwrap(thing: Any) -> Any:
    """Return the module inside the wrappers of DDP, DataParallel and torch.compile, so that its
    names do not begin with ``module.``; return anything else as it is."""
    while True:
        if isinstance(thing, (DistributedDataParallel, DataParallel)):
            thing = thing.module
        elif isinstance(thing, torch.nn.Module) and hasattr(thing, "_orig_mod"):  # torch.compile's
            thing = thing._orig_mod
        else:
            return thing


def without_ddp(model: torch.nn.Module) -> torch.nn.Module:
    """Return a module without the wrappers of DDP and DataParallel, whose forward has collectives
    or copies. torch.compile's wrapper goes if it is around them, and stays if it is inside."""
    wrappers = (DistributedDataParallel, DataParallel)
    inner: Any = model
    while isinstance(inner, wrappers) or isinstance(getattr(inner, "_orig_mod", None), wrappers):
        inner = inner.module if isinstance(inner, wrappers) else inner._orig_mod
    plain: torch.nn.Module = inner
    return plain


@dataclass(frozen=True)
class State:
    """The objects' state, taken apart.

    Attributes
    ----------
    tree
        the state dicts by object, with a mark in place of each tensor (`plain_state`)
    tensors
        the objects' own tensors, not copies, by name; DTensors as they are
    replicated
        names of the tensors that are the same on all ranks: parameters, and an optimizer's tensors
        of their parameter's shape
    trained
        names of the replicated tensors that the training changes
    frozen
        names of other parameters, without gradients, which it most likely does not change
    buffers
        names of the modules' buffers, and of parameters of no tracked module with their optimizer's
        state; each rank may have its own (running means)
    large_buffers
        names of modules' buffers of `LARGE_BUFFER` bytes or more: masks, weights of few bits
    private_tree
        the state dicts of the objects of which each rank has its own, and an optimizer's state for
        parameters that DDP ignores
    rank_0_objects
        the tensors by name, by the objects that are no optimizers and of which rank 0's are saved;
        of a module those that are neither parameters nor buffers, as a metric's
    private
        names of the tensors that each rank saves for itself: those of objects of its own,
        parameters that DDP ignores and their optimizer's state, plain state of sharded parameters
    """

    tree: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    replicated: set[str] = field(default_factory=set)
    trained: set[str] = field(default_factory=set)
    frozen: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)
    large_buffers: set[str] = field(default_factory=set)
    private_tree: dict[str, Any] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    rank_0_objects: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    @property
    def shared(self) -> dict[str, torch.Tensor]:
        """The tensors that the ranks of a stage save together, by name."""
        return {name: tensor for name, tensor in self.tensors.items() if name not in self.private}

    @property
    def equal(self) -> dict[str, torch.Tensor]:
        """The shared tensors that are the same on all ranks, each as a whole."""
        return {
            name: tensor
            for name, tensor in self.shared.items()
            if name in self.replicated and not is_sharded(tensor)
        }

    @property
    def seldom_changed(self) -> set[str]:
        """The names of frozen tensors and large buffers, as a save's parts have them: most likely
        they are as at the previous save."""
        return {*self.frozen, *self.large_buffers, *(f"{name}{OWN}" for name in self.large_buffers)}


def collect(
    objects: Mapping[str, Any],
    per_rank: Container[str] = (),
    trained: TrainedParameters | None = None,
    devices: Sequence[torch.device] = (),
) -> State:
    """Return the state of the objects, which are given by name.

    `per_rank` names the objects of which each rank has its own. `trained` knows parameters that are
    trained though they may need no gradients now. `devices` are this worker's. Modules that FSDP2
    has sharded get their shards back for parameters (`reshard`).

    Raises
    ------
    UsageError
        an object has no state_dict or load_state_dict, or has its state on one rank alone
    HpcDdpError
        ``weights_only`` would refuse to load an entry again, which the error names; or an
        optimizer's DTensor can't be loaded (`_check_shards`)
    """
    for plain in map(unwrap, objects.values()):
        if isinstance(plain, torch.nn.Module):
            reshard(plain)
    labels = labels_of(objects)
    untracked = untracked_parameters(objects, labels)
    trained = trained or TrainedParameters()
    ignored = {name for name, _ in ignored_by_ddp(objects)}
    state = State()
    for name, wrapped in objects.items():
        plain = unwrap(wrapped)
        if not (hasattr(plain, "state_dict") and hasattr(plain, "load_state_dict")):
            raise UsageError(
                f"{name} is {kind_of(plain)}; accepted by run.track: objects with state_dict and"
                " load_state_dict, and random generators",
                hint="for a best value there is run.best",
            )
        content = _take_content(name, plain, labels, state, trained, untracked.get(name, {}))
        tensors: dict[str, torch.Tensor] = {}
        is_private = name in per_rank
        tree = state.private_tree if is_private else state.tree
        tree[name] = take_apart(content, name, tensors, devices)
        state.tensors.update(tensors)
        if not is_private and not isinstance(plain, Optimizer):
            _note_rank_0_object(name, plain, tensors, state)
        # Each rank saves these tensors for itself.
        prefixes = ("",) if is_private else tuple(f"{name}.state.{n}." for n in ignored)
        private = {key for key in tensors if key in ignored or key.startswith(prefixes)}
        if isinstance(plain, Optimizer):
            _note_untracked_state(name, tensors, untracked[name], state)
            # A plain tensor beside a shard, as of an optimizer that takes `to_local`.
            shards = optimizer_state.places_of_shards(name, plain, labels)
            private |= {key for key, t in tensors.items() if t.shape and key.startswith(shards)}
        state.private.update(key for key in private if not is_sharded(tensors[key]))
        if isinstance(plain, Optimizer) and not is_private:
            _move_ignored_state(name, ignored, state)
    state.replicated.update(state.trained, state.frozen)
    return state


def _note_rank_0_object(
    name: str, plain: Any, tensors: Mapping[str, torch.Tensor], state: State
) -> None:
    """Add the object `name` (`plain`, no optimizer) to `state.rank_0_objects`, with those of its
    `tensors` that are neither parameters nor buffers, nor sharded. A module without such tensors is
    not added."""
    of_ranks = state.trained | state.frozen | state.buffers
    further = {k: t for k, t in tensors.items() if k not in of_ranks and not is_sharded(t)}
    if further or not isinstance(plain, torch.nn.Module):
        state.rank_0_objects[name] = further


def _note_untracked_state(
    name: str, tensors: Mapping[str, Any], untracked: Collection[str], state: State
) -> None:
    """Add those `tensors` of the optimizer `name` that belong to `untracked` parameters to
    `state.buffers`. Raises as `_check_shards`."""
    places = optimizer_state.own_places(name, untracked)
    state.buffers.update(key for key in tensors if key.startswith(places))
    _check_shards(tensors, state.trained | state.buffers)


def _move_ignored_state(name: str, ignored: Set[str], state: State) -> None:
    """Move the state that the optimizer `name` has for parameters which DDP ignores from
    `state.tree` to `state.private_tree`: another rank may have none, as for an expert."""
    states = state.tree[name]["state"]
    if of_rank := {label: states.pop(label) for label in ignored & states.keys()}:
        state.private_tree[name] = {"state": of_rank}


def untracked_parameters(
    objects: Mapping[str, Any], labels: Mapping[int, str]
) -> dict[str, dict[str, torch.Tensor]]:
    """Return, for each optimizer among `objects`, by its name, the parameters that it trains and
    that no tracked object has, by their names; {} for an optimizer without any. `labels` has the
    names of modules' parameters (`labels_of`). Raises as `take_apart`."""
    things = {name: unwrap(wrapped) for name, wrapped in objects.items()}
    optimizers = {name: plain for name, plain in things.items() if isinstance(plain, Optimizer)}
    parameters = chain.from_iterable(map(parameters_of, optimizers.values()))
    tensors: dict[str, torch.Tensor] = {}
    if any(id(parameter) not in labels for parameter in parameters):
        for name, plain in things.items():
            is_other = not isinstance(plain, (torch.nn.Module, Optimizer))
            if is_other and hasattr(plain, "state_dict"):
                take_apart(plain.state_dict(), name, tensors)
    addresses = set(map(optimizer_state.address_of, tensors.values()))
    return {
        name: optimizer_state.untracked_of(optimizer, labels, addresses)
        for name, optimizer in optimizers.items()
    }


def _take_content(
    name: str,
    plain: Any,
    labels: Mapping[int, str],
    state: State,
    trained: TrainedParameters,
    untracked: Mapping[str, torch.Tensor],
) -> Any:
    """Return the state dict of the object `name`, which is `plain` without its wrappers, and add
    names of its tensors to sets in `state` (`trained`, `frozen`, `buffers`, `large_buffers`). Raise
    UsageError for an optimizer that has its state on one rank alone, or a state dict without
    ``state`` or ``param_groups``.

    An optimizer's dict has parameters by name (`optimizer_state`), for which `labels` has the names
    by ids, and `untracked` the parameters that no tracked object has. A module's dict is that of
    `_content_of_module`. Any other stays as it is.
    """
    if hasattr(plain, "consolidate_state_dict"):
        raise UsageError(
            f"{name} is {kind_of(plain)}, which has its state on one rank alone; accepted by"
            " run.track: other optimizers",
            hint="model = run.fully_shard(model), and the optimizer inside, shard its state, too",
        )
    content: Any = trained.state_of(plain)
    if isinstance(plain, Optimizer):
        state.trained.update(optimizer_state.names_like_parameters(name, plain, labels, untracked))
        content = optimizer_state.label_state(plain, content, labels, untracked)
        return content | {optimizer_state.SETTINGS: trained.settings(plain)}
    if isinstance(plain, torch.nn.Module):
        _note_module_tensors(name, plain, state, trained)
        return _content_of_module(plain, content, trained)
    return content


def _note_module_tensors(
    name: str, module: torch.nn.Module, state: State, trained: TrainedParameters
) -> None:
    """Add the names of the parameters and buffers of the module `name` to sets in `state`. A
    parameter without gradients counts as trained, too, if `trained` knows it."""
    ids = trained.ids()
    for key, parameter in module.named_parameters(remove_duplicate=False):
        is_trained = parameter.requires_grad or id(parameter) in ids
        (state.trained if is_trained else state.frozen).add(f"{name}.{plain_name(key)}")
    for key, buffer in module.named_buffers(remove_duplicate=False):
        state.buffers.add(f"{name}.{plain_name(key)}")
        if buffer.layout == torch.strided and buffer.nbytes >= LARGE_BUFFER:
            state.large_buffers.add(f"{name}.{plain_name(key)}")


def _content_of_module(
    module: torch.nn.Module, content: Mapping[str, Any], trained: TrainedParameters
) -> dict[str, Any]:
    """Return a module's state dict `content` with `plain_name`s as keys, and three further entries:
    under `VERSIONS` the versions of the module's parts, under `GRADIENTS` and `MODES` what the loop
    has changed of ``requires_grad`` and ``training``. An entry without changes is left out."""
    versions = {part: notes.get("version") for _, part, notes in metadata_of(content)}
    changes = {plain_name(key): needed for key, needed in trained.changes_of(module).items()}
    modes = {plain_part(key): mode for key, mode in trained.modes_of(module).items()}
    content = {plain_name(key): entry for key, entry in content.items()}
    further = {VERSIONS: versions, GRADIENTS: changes, MODES: modes}
    return content | {key: facts for key, facts in further.items() if facts or key == VERSIONS}


def _check_shards(tensors: Mapping[str, Any], like_parameters: Container[str]) -> None:
    """Raise HpcDdpError for an optimizer's DTensor that would be loaded as plain numbers: its
    shards are of a subclass, as of 8 bits, or its name is not in `like_parameters` though it has
    several numbers."""
    for name, tensor in tensors.items():
        if not is_sharded(tensor):
            continue
        if is_traceable_wrapper_subclass(tensor.to_local()):
            raise refusal(name, f"a DTensor of {kind_of(tensor.to_local())}")
        if name not in like_parameters and tensor.numel() > 1:
            raise refusal(name, "a DTensor of another shape than its parameter")


def ignored_by_ddp(objects: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the tensor of each parameter and buffer of the modules among `objects`
    that DDP leaves to each rank (experts, parts of an embedding). Sharded ones are left out: each
    rank saves its shard anyway. So are the buffers of a model with no such parameter: tables that
    are alike on all ranks."""
    plain = {name: unwrap(wrapped) for name, wrapped in objects.items()}
    for name, model in plain.items():
        parts = model.named_modules(prefix=name) if isinstance(model, torch.nn.Module) else ()
        for place, module in parts:  # a part may be the DDP one, as the model in an average
            keys = set(map(plain_name, getattr(module, "_ddp_params_and_buffers_to_ignore", ())))
            tensors = dict(module.named_parameters(remove_duplicate=False)) if keys else {}
            if any(plain_name(key) in keys for key in tensors):
                tensors |= module.named_buffers(remove_duplicate=False)
            for key, tensor in tensors.items():
                if plain_name(key) in keys and not is_sharded(tensor):
                    yield plain_name(f"{place}.{key}"), tensor


def merge_trees(first: Any, second: Any, key: object = None) -> Any:
    """Return one tree from two: from those of two pipeline stages, or from the tree of all ranks
    and that which this rank has alone.

    Dicts are united by key, lists of dicts entry by entry; a list under the key ``params`` gets the
    entries of `second` that it lacks. Any other entry is taken from `first`, if both have it. `key`
    is that of both in their parents. Raise ValueError where lists of dicts differ in length.
    """
    if isinstance(first, dict):
        common = {k: merge_trees(first[k], entry, k) for k, entry in second.items() if k in first}
        return type(first)({**first, **second, **common})
    if isinstance(first, list) and key == "params":
        return first + [entry for entry in second if entry not in first]
    if isinstance(first, list) and any(isinstance(entry, dict) for entry in first):
        return [merge_trees(*pair) for pair in zip(first, second, strict=True)]
    return first


def plain_name(key: str) -> str:
    """Return a parameter's name without what torch's `WRAPPERS` put into it."""
    for wrapper in WRAPPERS:
        key = key.replace(wrapper, "")
    return key


def plain_part(key: str) -> str:
    """Return the name of a part of a module without what torch's `WRAPPERS` put into it."""
    return plain_name(f"{key}.")[:-1]  # the part's own name may end with a wrapper's


def labels_of(objects: Mapping[str, Any]) -> dict[int, str]:
    """Return the names of the parameters of all modules among the tracked `objects`, by the
    parameters' ids. A parameter with several names has the first."""
    labels: dict[int, str] = {}
    for name, wrapped in objects.items():
        plain = unwrap(wrapped)
        if isinstance(plain, torch.nn.Module):
            for key, parameter in plain.named_parameters():
                labels.setdefault(id(parameter), f"{name}.{plain_name(key)}")
    return labels


def metadata_of(state: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield, for each part of a module, what torch notes on it in the module's state dict: the
    part's key there, its plain name, and the notes. Nothing is yielded for a dict without notes."""
    for key, facts in getattr(state, "_metadata", {}).items():
        yield key, plain_part(key), facts
