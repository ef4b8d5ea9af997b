"""A checkpoint's state on its way back into the script's objects."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.training.checkpoint import optimizer_state
from hpc_ddp.training.checkpoint import state as states
from hpc_ddp.training.checkpoint.plain_state import TENSOR, device_number, is_mark, take_apart
from hpc_ddp.training.checkpoint.state import plain_name, plain_part, unwrap
from hpc_ddp.training.checkpoint.storage.resharding import Reader, UnreadableError
from hpc_ddp.training.models.dtensor import is_sharded
from hpc_ddp.training.models.evaluation import set_modes
from hpc_ddp.training.models.trained import TrainedParameters

# RuntimeErrors that say nothing of a checkpoint: a device is full or broken, a peer is gone. For
# those of a parameter's copy torch raises its own, with these words in the text.
OF_DEVICES = (torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError)
OF_A_COPY = "an exception occurred"
# Settings of torch's schedulers that no step changes.
CONSTANTS = (
    *("T_max", "T_0", "T_mult", "eta_min", "total_steps", "total_iters", "step_size", "milestones"),
    *("_milestones", "gamma", "power", "start_factor", "end_factor", "factor", "patience"),
)
EXTRA_STATE = "_extra_state"  # the end of the key of what a module's get_extra_state returns


def put_back(
    objects: Mapping[str, Any],
    tree: Mapping[str, Any],
    reader: Reader,
    step: int,
    stage: bool = False,
    added: Sequence[str] = (),
) -> None:
    """Load a checkpoint into the objects, by their names in ``run.track``. Errors name its `step`.

    `tree` has their stored states without tensors, which `reader` reads. A sharded object reads its
    own part of each tensor, however the tensor was stored. With `stage` each model is a part of the
    stored one, of which further entries are ignored. Parts of models that `added` names, as
    ``model.head``, stay as they are where the checkpoint has none, and get no state in an
    optimizer. After an error some objects may have been loaded.

    Raises
    ------
    HpcDdpError
        the checkpoint is of other objects (the error names keys and shapes that differ); or the
        files lack a part of a tensor; or a ``load_state_dict`` raises ValueError, RuntimeError or
        KeyError (any other error comes through, and so does a device's)
    UnreadableError
        the disk does not answer
    RuntimeError
        a peer is gone, or a device is broken, while tensors are read
    """
    if set(objects) != set(tree):
        raise _other_objects(
            step, f"it holds {', '.join(sorted(tree))}, tracked are {', '.join(sorted(objects))}"
        )
    labels = states.labels_of(objects)
    for name, wrapped in objects.items():
        plain = unwrap(wrapped)
        content: Any
        try:
            if isinstance(plain, torch.nn.Module):
                content = _for_module(name, plain, tree[name], reader, stage, added)
            elif isinstance(plain, Optimizer):
                params = optimizer_state.params_of(plain, labels)
                stored = optimizer_state.part_of(tree[name], params) if stage else tree[name]
                content = _for_optimizer(name, plain, params, stored, reader, added)
            else:
                current = _tensors_of(plain.state_dict(), name)
                content = _assemble(tree[name], name, reader, current=current)
        except UnreadableError:
            raise
        except HpcDdpError as error:
            raise _other_objects(step, error.message) from None
        except (ValueError, KeyError) as error:
            raise _other_objects(step, f"{name}: {error}") from error
        _load(name, plain, content, step)


def find_ignored_settings(
    objects: Mapping[str, Any], tree: Mapping[str, Any], trained: TrainedParameters
) -> list[str]:
    """Return a line of text for each setting of an optimizer or a scheduler, such as ``lr`` or
    ``T_max``, that the script has now made otherwise than for the checkpoint with the state dicts
    `tree`. Loading puts the stored value back, so that a ``--lr`` of this attempt has no effect."""
    notes = []
    for name, tracked in objects.items():
        pairs: dict[str, tuple[Any, Any]] = {}
        stored = tree.get(name)
        if isinstance(tracked, Optimizer) and isinstance(stored, dict):
            pairs = optimizer_state.ignored_settings(trained.settings(tracked), stored)
        elif isinstance(tracked, LRScheduler) and isinstance(stored, dict):
            pairs = dict(_other_constants(tracked.state_dict(), stored))
        for key, (present, earlier) in pairs.items():
            notes.append(
                f"{name}: {key} was {earlier!s:.60}, and the script makes it {present!s:.60}: the"
                " checkpoint's state counts, unless the script sets it behind run.track"
            )
    return notes


def _other_constants(
    state: Mapping[str, Any], stored: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield, by name, those `CONSTANTS` of a scheduler's `state` that are others in its `stored`
    state, and both values; also those of the schedulers in it."""
    for key in CONSTANTS:
        if isinstance(state.get(key), torch.Tensor):  # which has a mark in the tree
            continue
        if key in state and key in stored and state[key] != stored[key]:
            yield key, (state[key], stored[key])
    parts = state.get("_schedulers", ()), stored.get("_schedulers", ())
    for number, (part, stored_part) in enumerate(zip(*parts, strict=False)):
        for key, pair in _other_constants(part, stored_part):
            yield f"{key} of scheduler {number}", pair


def put_flags_back(
    objects: Mapping[str, Any], tree: Mapping[str, Any], trained: TrainedParameters
) -> list[str]:
    """Set requires_grad of parameters, and the training mode of parts of modules, to what they were
    at a save with the state dicts `tree`: the checkpoint's flag where the loop had changed it
    before the save, else the script's. Return a line of text for each module of which the
    requires_grad of a parameter was different; modes have no line."""
    notes = []
    for name, module in ((name, unwrap(thing)) for name, thing in objects.items()):
        if isinstance(module, torch.nn.Module):
            needed = tree[name].get(states.GRADIENTS, {})
            modes = tree[name].get(states.MODES, {})
            changed = []
            parts = [(plain_part(key), part) for key, part in module.named_modules()]
            as_made = {id(part): trained.flag_as_made(part, part.training) for _, part in parts}
            set_modes(module, {id(part): modes.get(key, as_made[id(part)]) for key, part in parts})
            for key, parameter in module.named_parameters(remove_duplicate=False):
                flag = needed.get(
                    plain_name(key), trained.flag_as_made(parameter, parameter.requires_grad)
                )
                if flag != parameter.requires_grad:
                    parameter.requires_grad_(flag)
                    changed.append(plain_name(key))
            if changed:
                more = ", …" if changed[1:] else ""
                notes.append(f"{name}: {changed[0]}{more} frozen or not as the loop had set it")
    return notes


def _load(name: str, plain: Any, content: Any, step: int) -> None:
    """Load the state dict `content` into the unwrapped object `plain`. Raise HpcDdpError, with its
    `name` and the checkpoint's `step`, if the object refuses it; errors of a device come
    through."""
    try:
        if isinstance(plain, torch.nn.Module):
            _load_module(name, plain, content)
        elif isinstance(plain, Optimizer):
            optimizer_state.load(plain, content)
        else:
            plain.load_state_dict(content)
    except OF_DEVICES:
        raise
    except HpcDdpError as error:
        raise _other_objects(step, error.message) from None
    except (ValueError, RuntimeError, KeyError) as error:
        if isinstance(plain, torch.nn.Module) and OF_A_COPY in str(error):
            raise
        raise _other_objects(step, f"{name}: {error}") from error


def _load_module(name: str, module: torch.nn.Module, state: OrderedDict[str, Any]) -> None:
    """Load a state dict into the module `name`. Entries that the module saves but does not load, as
    those of weights in 4 bits, must be equal to its present ones: raise HpcDdpError if they differ,
    or if the module expects an entry that `state` lacks. One that it leaves out of its own state,
    as frozen weights that the script loads, may be missing. A class with a ``load_state_dict`` of
    its own decides by itself, and its errors come through."""
    if type(module).load_state_dict is not torch.nn.Module.load_state_dict:
        module.load_state_dict(state)
        return
    missing, unexpected = module.load_state_dict(state, strict=False)
    if missing or unexpected:
        current = module.state_dict()
        missing = [key for key in missing if key in current]
        missing += [key for key in unexpected if not _is_equal(current.get(key), state[key])]
    if missing:
        raise HpcDdpError(f"{name}: the model does not load {', '.join(missing[: states.SHOWN])}")


def _is_equal(current: Any, stored: Any) -> bool:
    """Return whether two entries of a state dict have the same type and value; devices may
    differ."""
    if isinstance(current, torch.Tensor) and isinstance(stored, torch.Tensor):
        return current.dtype == stored.dtype and torch.equal(current.cpu(), stored.cpu())
    return type(current) is type(stored) and bool(current == stored)


def _for_module(
    name: str,
    module: torch.nn.Module,
    tree: Mapping[str, Any],
    reader: Reader,
    stage: bool,
    added: Sequence[str],
) -> OrderedDict[str, Any]:
    """Return the state dict that `module` (unwrapped) is to load, from `tree`, its stored one.

    `name` is the module's in ``run.track``: its tensors are stored as ``NAME.KEY``. With `stage` it
    is a part of the stored module, and further keys of `tree` are ignored. Keys that `added` names,
    and that `tree` lacks, keep their values. The stored versions of the parts come along, for
    torch's own conversions of older states.

    Raise HpcDdpError if keys or shapes differ, which it names, if a tensor was each rank's own on
    another number of ranks, or if the files lack a part of one; UnreadableError if the disk does
    not answer. Shapes of plain buffers and of extra states may change in training, as those of
    observers: they are left to ``load_state_dict``.
    """
    state = module.state_dict()
    entries = {plain_name(key): (key, value) for key, value in state.items()}
    parameters = {plain_name(k): (k, w) for k, w in module.named_parameters(remove_duplicate=False)}
    versions = tree.get(states.VERSIONS)
    tree = {key: value for key, value in tree.items() if key not in states.BESIDE}
    # A model may leave out what is frozen, and at the save it was not, or not yet.
    entries |= {k: parameters[k] for k in parameters.keys() & tree.keys() - entries.keys()}
    new = {key for key in entries if key not in tree and _is_in(f"{name}.{key}", added)}
    problems = [f"{key} is not in the checkpoint" for key in entries.keys() - tree.keys() - new]
    problems += [f"{key} is not in the model" for key in tree if key not in entries and not stage]
    for key in entries.keys() & tree.keys():
        stored = f"{name}.{key}"
        shape = getattr(entries[key][1], "shape", None)
        saved = reader.describe(stored).shape if stored in reader else None
        is_fixed = key in parameters or None in (shape, saved) or is_sharded(entries[key][1])
        if stored in reader.of_other_ranks:
            problems.append(f"{key} was each rank's own, of as many ranks as do not run here")
        elif shape != saved and is_fixed and not key.endswith(EXTRA_STATE):
            problems.append(f"{key} is {_shape(shape)} here and {_shape(saved)} in the checkpoint")
    if problems:
        more = f", and {len(problems) - states.SHOWN} more" if problems[states.SHOWN :] else ""
        raise HpcDdpError(f"{name}: {', '.join(sorted(problems)[: states.SHOWN])}{more}")
    loaded = OrderedDict[str, Any]()
    for plain, (key, value) in entries.items():
        stored = f"{name}.{plain}"
        if plain in new:
            loaded[key] = value
        elif stored in reader:
            loaded[key] = reader.read(stored, value if isinstance(value, torch.Tensor) else None)
        else:  # an extra_state
            loaded[key] = _assemble(tree[plain], stored, reader, current=_tensors_of(value, stored))
    if versions is not None:  # without, a part takes its own state for that of an older version
        parts = states.metadata_of(state)
        facts_of = {key: {**facts, "version": versions.get(part)} for key, part, facts in parts}
        loaded._metadata = facts_of  # type: ignore[attr-defined]
    return loaded


def _for_optimizer(
    name: str,
    optimizer: Optimizer,
    params: Mapping[str, torch.Tensor],
    tree: Any,
    reader: Reader,
    added: Sequence[str],
) -> dict[str, Any]:
    """Return the state dict that `optimizer` is to load, from `tree`, its stored one by names.

    `params` are its parameters by name, in its own order; `name` is the optimizer's in
    ``run.track``. Parameters that `added` names, and that `tree` lacks, get no state. A group made
    of such parameters alone keeps its present settings.

    Raise HpcDdpError if the class, the parameters or their groups differ, or as `_assemble`;
    KeyError if `tree` is not an optimizer's; UnreadableError if the disk does not answer.
    """
    names = iter(params)
    groups = [[next(names) for _ in group["params"]] for group in optimizer.param_groups]
    is_new = _new_groups(name, groups, tree, added)
    if tree[optimizer_state.KIND] != (kind := type(optimizer).__name__):
        raise HpcDdpError(f"{name}: it is of {tree[optimizer_state.KIND]}, and here of {kind}")
    shards = {}
    for label, parameter in params.items():
        for key in tree["state"].get(label, {}):
            stored = f"{name}.state.{label}.{key}"
            if stored in reader and reader.describe(stored).shape == parameter.shape:
                shards[stored] = parameter
    saved = {key: value for key, value in tree.items() if key != optimizer_state.KIND}
    current, stored_rows = iter(optimizer.state_dict()["param_groups"]), iter(tree["param_groups"])
    pairs = [(next(current), None if alone else next(stored_rows)) for alone in is_new]
    saved["param_groups"] = [
        group if stored is None else optimizer_state.with_present_methods(stored, group)
        for group, stored in pairs
    ]
    settings = _tensors_of(optimizer.param_groups, f"{name}.param_groups")  # a learning rate, say
    return optimizer_state.by_number(
        _assemble(saved, name, reader, shards, settings), params, groups
    )


def _new_groups(
    name: str, groups: Sequence[Sequence[str]], tree: Any, added: Sequence[str]
) -> list[bool]:
    """Return for each of an optimizer's `groups` (names of parameters) whether all its parameters
    are new: in `added`, and not in `tree`, the optimizer's stored state.

    `name` is the optimizer's. Raise HpcDdpError if the other groups, without their new parameters,
    differ from the stored groups; KeyError if `tree` is not an optimizer's.
    """
    stored_groups = [group["params"] for group in tree["param_groups"]]
    stored_names = set(chain(*stored_groups))
    new = {label for label in chain(*groups) if label not in stored_names and _is_in(label, added)}
    is_new = [bool(group) and new.issuperset(group) for group in groups]
    pairs = zip(groups, is_new, strict=True)
    older_groups = [sorted({*group} - new) for group, is_added in pairs if not is_added]
    if older_groups != list(map(sorted, stored_groups)):
        differing = sorted({*chain(*older_groups)} ^ stored_names) or ["they are grouped otherwise"]
        more = " …" if differing[states.SHOWN :] else ""
        raise HpcDdpError(
            f"{name}: its parameters differ: {', '.join(differing[: states.SHOWN])}{more}"
        )
    return is_new


def _tensors_of(state: Any, where: str) -> dict[str, torch.Tensor]:
    """Return the tensors in an object's state by place, as ``WHERE.KEY.0``. Tensors behind an entry
    that can't be saved are left out."""
    tensors: dict[str, torch.Tensor] = {}
    with suppress(HpcDdpError):
        take_apart(state, where, tensors)
    return tensors


def _assemble(
    value: Any,
    where: str,
    reader: Reader,
    templates: Mapping[str, torch.Tensor] = MappingProxyType({}),
    current: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Any:
    """Return a value that was stored at `where`, with a new tensor, read by `reader`, in place of
    each mark of `take_apart`.

    A tensor whose place is in `templates` gets the sharding or the order in memory of that
    template. A tensor whose place is in `current` gets the device of that one. Any other tensor
    comes to one of the reader's devices if it was on an accelerator, else to the CPU. Raise
    HpcDdpError for a tensor that is not stored for this rank, or not as a whole; UnreadableError if
    the disk does not answer.
    """
    if is_mark(value):
        if where not in reader:
            raise HpcDdpError(f"{where} is a tensor that no rank has stored for this one")
        parameter = templates.get(where)
        tensor = reader.read(where, parameter)
        if parameter is not None and not is_sharded(parameter):
            # Fused optimizers walk a parameter's memory and its state's side by side. What is one
            # number may be a constant of the CPU's: no later step could tell it from an average.
            is_number = value != TENSOR and not tensor.shape
            device = parameter.device if is_number else tensor.device
            layout = torch.empty_like(parameter, dtype=tensor.dtype, device=device)
            return layout.copy_(tensor)
        if where in current:
            return tensor.to(current[where].device)
        number = device_number(value)
        return tensor if number is None else tensor.to(reader.device(number))
    if isinstance(value, dict):
        items = {
            k: _assemble(v, f"{where}.{k}", reader, templates, current) for k, v in value.items()
        }
        return type(value)(items)
    if isinstance(value, (list, tuple)):
        row = [
            _assemble(v, f"{where}.{i}", reader, templates, current) for i, v in enumerate(value)
        ]
        return tuple(row) if isinstance(value, tuple) else row
    return value


def _is_in(name: str, places: Sequence[str]) -> bool:
    """Return whether `name` is one of the `places`, or begins with one and a dot."""
    return any(name == place or name.startswith(f"{place}.") for place in places)


def _shape(shape: Any) -> str:
    """Return a shape for people; ``no tensor`` for None."""
    return "no tensor" if shape is None else str(tuple(shape))


def _other_objects(step: int, how: str) -> HpcDdpError:
    """Return the error for a checkpoint of step `step` that is of other objects; `how` says what
    differs."""
    return HpcDdpError(
        f"the checkpoint of step {step} is not of this program's objects: {how}",
        hint="start another run, or undo the change to the script; for what is new on purpose:"
        " run.track(…, added=('ema', 'model.head'))",
    )
