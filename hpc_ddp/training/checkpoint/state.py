"""State of the user's objects: taking it out, checking it, putting it back.

Names are a person's: ``model.fc.weight``, ``optimizer.state.model.fc.weight.exp_avg``. So what was
trained under one wrapper is found again under another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
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
from hpc_ddp.training.checkpoint.storage.shards import LocalShard, rows, shard, share_of, whole
from hpc_ddp.training.models.dtensor import is_sharded, place_among_copies, reshard
from hpc_ddp.training.models.mesh import ParallelDims
from hpc_ddp.training.models.trained import TrainedParameters, parameters_of

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
        ``weights_only`` would refuse to load an entry again, which the error names
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
        content = _content_of(name, plain, labels, state, trained, untracked.get(name, {}))
        tensors: dict[str, torch.Tensor] = {}
        tree = state.private_tree if name in per_rank else state.tree
        tree[name] = take_apart(content, name, tensors, devices)
        state.tensors.update(tensors)
        if tree is state.tree and not isinstance(plain, Optimizer):
            of_ranks = state.trained | state.frozen | state.buffers
            apart = {k: t for k, t in tensors.items() if k not in of_ranks and not is_sharded(t)}
            if apart or not isinstance(plain, torch.nn.Module):
                state.rank_0_objects[name] = apart
        prefixes = ("",) if name in per_rank else tuple(f"{name}.state.{n}." for n in ignored)
        private = {key for key in tensors if key in ignored or key.startswith(prefixes)}
        if isinstance(plain, Optimizer):
            places = optimizer_state.own_places(name, untracked[name])
            state.buffers.update(key for key in tensors if key.startswith(places))
            _check_shards(tensors, state.trained | state.buffers)
            # A plain tensor beside a shard, as of an optimizer that takes `to_local`.
            shards = optimizer_state.places_of_shards(name, plain, labels)
            private |= {key for key, t in tensors.items() if t.shape and key.startswith(shards)}
        state.private.update(key for key in private if not is_sharded(tensors[key]))
        if isinstance(plain, Optimizer) and tree is state.tree:  # an expert may lack it elsewhere
            states = tree[name]["state"]
            if of_rank := {label: states.pop(label) for label in ignored & states.keys()}:
                state.private_tree[name] = {"state": of_rank}
    state.replicated.update(state.trained, state.frozen)
    return state


def untracked_parameters(
    objects: Mapping[str, Any], labels: Mapping[int, str]
) -> dict[str, dict[str, torch.Tensor]]:
    """Return, for each optimizer among `objects` by name, the parameters that it trains and that no
    tracked object has, by their names. `labels` are as `labels_of` returns them. Raises as
    `take_apart`."""
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


def _content_of(
    name: str,
    plain: Any,
    labels: Mapping[int, str],
    state: State,
    trained: TrainedParameters,
    untracked: Mapping[str, torch.Tensor],
) -> Any:
    """Return the state dict of the object `name`, and add its tensors to the sets of names in
    `state`. Raise UsageError for an optimizer that has its state on one rank alone.

    An optimizer's dict has parameters by name (`optimizer_state`); a module's has `plain_name`s,
    and the entries `BESIDE`; any other stays as it is. `untracked` has those of an optimizer's
    parameters that no tracked object has.
    """
    if hasattr(plain, "consolidate_state_dict"):
        raise UsageError(
            f"{name} is {kind_of(plain)}, which has its state on one rank alone; accepted by"
            " run.track: other optimizers",
            hint="model = run.fully_shard(model), and the optimizer inside, shard its state, too",
        )
    content: Any = trained.state_of(plain)
    if isinstance(plain, Optimizer):
        state.trained.update(optimizer_state.like_parameters(name, plain, labels, untracked))
        content = optimizer_state.by_label(plain, content, labels, untracked)
        return content | {optimizer_state.SETTINGS: trained.settings(plain)}
    if not isinstance(plain, torch.nn.Module):
        return content
    numbers = trained.ids()
    for key, parameter in plain.named_parameters(remove_duplicate=False):
        is_trained = parameter.requires_grad or id(parameter) in numbers
        (state.trained if is_trained else state.frozen).add(f"{name}.{plain_name(key)}")
    for key, buffer in plain.named_buffers(remove_duplicate=False):
        state.buffers.add(f"{name}.{plain_name(key)}")
        if buffer.layout == torch.strided and buffer.nbytes >= LARGE_BUFFER:
            state.large_buffers.add(f"{name}.{plain_name(key)}")
    versions = {part: facts.get("version") for _, part, facts in metadata_of(content)}
    changes = {plain_name(key): needed for key, needed in trained.changes_of(plain).items()}
    modes = {plain_part(key): mode for key, mode in trained.modes_of(plain).items()}
    content = {plain_name(key): value for key, value in content.items()}
    beside = {VERSIONS: versions, GRADIENTS: changes, MODES: modes}
    return content | {key: facts for key, facts in beside.items() if facts or key == VERSIONS}


def _check_shards(tensors: Mapping[str, Any], like_parameters: Container[str]) -> None:
    """Raise HpcDdpError for an optimizer's DTensor that would be loaded as plain numbers: its
    shards are of a subclass, as of 8 bits, or it is not in `like_parameters`."""
    for name, tensor in ((key, one) for key, one in tensors.items() if is_sharded(one)):
        if is_traceable_wrapper_subclass(tensor.to_local()):
            raise refusal(name, f"a DTensor of {kind_of(tensor.to_local())}")
        if name not in like_parameters and tensor.numel() > 1:
            raise refusal(name, "a DTensor of another shape than its parameter")


def my_parts(state: State, dims: ParallelDims) -> dict[str, LocalShard]:
    """Return the parts of the tensors that this rank writes, by name. All ranks of a stage have the
    same names in `state`, apart from private tensors.

    Sharded tensors (FSDP2, tensor parallel): its own shard; of equal shards one rank's
    (`_my_copies`).
    Private tensors, of which each rank has its own: all of each, as ``NAME@rank``.
    Replicated tensors: whole rows, by its share of all bytes (`share_of`); frozen ones apart from
    others.
    Buffers: its own, as ``NAME@rank``; the first rank of the stage writes ``NAME``, from which a
    run on another number of ranks goes on.
    Any other tensor: all of it on the first rank of the stage, nothing on others.
    A part without numbers is left out, unless it is ``NAME@rank``, or on the first rank of the
    stage: so a tensor without any is stored once.

    Raise HpcDdpError for a DTensor with a pending reduction.
    """
    shared = {name: tensor.nbytes for name, tensor in state.equal.items()}
    rank, size = dims.stage_rank, dims.stage_size
    totals = Counter[bool]()
    for name, nbytes in shared.items():
        totals[name in state.frozen] += nbytes
    edges = {kind: share_of(n, rank, size) for kind, n in totals.items()}
    copies = _my_copies(state, dims)
    parts: dict[str, LocalShard] = {}
    for name, tensor in state.tensors.items():
        if is_sharded(tensor):
            if name in copies:
                parts[name] = shard(tensor)
        elif name in state.private:
            parts[f"{name}{OWN}"] = whole(tensor)
        elif length := shared.get(name):
            low, high = edges[is_frozen := name in state.frozen]
            if part := rows(tensor, low, high):
                parts[name] = part
            edges[is_frozen] = (low - length, high - length)
        elif rank == 0:
            parts[name] = whole(tensor)
        elif name in state.buffers:
            parts[f"{name}{OWN}"] = whole(tensor)
    is_empty = {name: not part.numbers.numel() for name, part in parts.items()}
    return {n: part for n, part in parts.items() if rank == 0 or n.endswith(OWN) or not is_empty[n]}


def _my_copies(state: State, dims: ParallelDims) -> set[str]:
    """Return the names of the DTensors of which this rank writes its part. Raises as `my_parts`.

    One of several ranks with equal parts, as those of replicas, writes a part; the parts are shared
    out by bytes (`share_of`), frozen ones apart. All ranks compute this alike, without messages.
    """
    places: dict[str, tuple[Any, int, int, int]] = {}  # with the bytes, number and count of copies
    totals = Counter[Any]()
    for name, tensor in state.tensors.items():
        if is_sharded(tensor) and (place := place_among_copies(tensor, dims)):
            sharded: Any = tensor
            equals = tuple(placement.is_replicate() for placement in sharded.placements)
            group = sharded.device_mesh, equals, name in state.frozen
            nbytes = sharded.to_local().nbytes
            places[name] = group, nbytes, *place
            totals[group] += nbytes
    names, begins = set(), Counter[Any]()
    for name, (group, nbytes, number, count) in places.items():
        low, high = share_of(totals[group], number, count)
        if low <= begins[group] < high if nbytes else number == 0:
            names.add(name)
        begins[group] += nbytes
    return names


def ignored_by_ddp(objects: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the tensor of each parameter and buffer that DDP leaves to each rank
    (experts, parts of an embedding). Sharded ones are left out: each rank saves its part anyway. So
    are the buffers of a model with no such parameter: tables that are alike on all ranks."""
    plain = {name: unwrap(wrapped) for name, wrapped in objects.items()}
    for name, model in plain.items():
        parts = model.named_modules(prefix=name) if isinstance(model, torch.nn.Module) else ()
        for place, module in parts:  # an average has the model in it
            keys = set(map(plain_name, getattr(module, "_ddp_params_and_buffers_to_ignore", ())))
            tensors = dict(module.named_parameters(remove_duplicate=False)) if keys else {}
            if any(plain_name(key) in keys for key in tensors):
                tensors |= module.named_buffers(remove_duplicate=False)
            for key, tensor in tensors.items():
                if plain_name(key) in keys and not is_sharded(tensor):
                    yield plain_name(f"{place}.{key}"), tensor


def merge_trees(first: Any, second: Any, key: object = None) -> Any:
    """Return one tree from two: those of two pipeline stages, or that of all ranks and what this
    rank has alone.

    Dicts are united by key, lists of dicts entry by entry; a list under the key ``params`` gets the
    entries of `second` that it lacks. In place of anything else there is `first`. `key` is that of
    both in their parents. Raise ValueError where lists of dicts differ in length.
    """
    if isinstance(first, dict):
        common = {k: merge_trees(first[k], item, k) for k, item in second.items() if k in first}
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
    return plain_name(f"{key}.")[:-1]


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
