"""A checkpoint's state on its way back into the script's objects."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.training.checkpoint import optimizer_state
from hpc_ddp.training.checkpoint import state as states
from hpc_ddp.training.checkpoint.plain_state import TENSOR, device_number, is_mark, take_apart
from hpc_ddp.training.checkpoint.state import plain_name, plain_part, unwrap
from hpc_ddp.training.checkpoint.storage.resharding import Reader, UnreadableError
from hpc_ddp.training.models.dtensor import is_sharded
from hpc_ddp.training.models.evaluation import set_modes
from hpc_ddp.training.models.trained_parameters import TrainedParameters

# RuntimeErrors that are not the checkpoint's: a device is full or broken, a peer is gone. For those
# of a parameter's copy torch raises its own, with these words in the text.
DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError)
COPY_ERROR = "an exception occurred"
EXTRA_STATE = "_extra_state"  # the end of the key of what a module's get_extra_state returns


def put_back(
    objects: Mapping[str, Any],
    tree: Mapping[str, Any],
    reader: Reader,
    step: int,
    stage: bool = False,
    added: Sequence[str] = (),
) -> None:
    """Load a checkpoint into the objects, which are given by their names in ``run.track``. Errors
    name its `step`.

    `tree` has the objects' stored states with marks for the tensors, which `reader` reads. This
    rank's shard of a sharded tensor is read, however the tensor was stored. With `stage` each model
    is one pipeline stage of the stored one, whose further entries are ignored. Parts of models that
    `added` names, as ``model.head``, stay as they are where the checkpoint has none, and get no
    state in an optimizer. After an error some objects may have been loaded.

    Raises
    ------
    HpcDdpError
        the checkpoint is of other objects (the error names keys and shapes that differ); or the
        files lack a part of a tensor; or a ``load_state_dict`` raises ValueError, RuntimeError or
        KeyError (any other error comes through, and so does a device's)
    UnreadableError, RuntimeError
        the disk does not answer; a peer is gone, or a device is broken, while tensors are read
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
                content = _content_for_module(name, plain, tree[name], reader, stage, added)
            elif isinstance(plain, Optimizer):
                params = optimizer_state.params_of(plain, labels)
                stored = optimizer_state.part_of(tree[name], params) if stage else tree[name]
                content = _content_for_optimizer(name, plain, params, stored, reader, added)
            else:
                current = _tensors_of(plain.state_dict(), name)
                content = _assemble(tree[name], name, reader, current=current)
        except UnreadableError:
            raise
        except HpcDdpError as error:
            raise _other_objects(step, error.message) from None
        except (ValueError, KeyError) as error:
            raise _other_objects(step, f"{name}: {error}") from error
        _load_object(name, plain, content, step)


def put_flags_back(
    objects: Mapping[str, Any], tree: Mapping[str, Any], trained: TrainedParameters
) -> list[str]:
    """Set requires_grad of parameters, and the training mode of parts of modules, to what they were
    at a save with the state dicts `tree`: the checkpoint's flag where the loop had changed it
    before the save, else the script's, which `trained` knows. Return a line of text for each module
    of which the requires_grad of a parameter was different; modes have no line."""
    notes = []
    for name, tracked in objects.items():
        module = unwrap(tracked)
        if isinstance(module, torch.nn.Module):
            _put_modes_back(module, tree[name].get(states.MODES, {}), trained)
            flags = tree[name].get(states.GRADIENTS, {})
            if changed := _put_gradient_flags_back(module, flags, trained):
                more = ", …" if changed[1:] else ""
                notes.append(f"{name}: {changed[0]}{more} frozen or not as the loop had set it")
    return notes


def _put_modes_back(
    module: torch.nn.Module, modes: Mapping[str, bool], trained: TrainedParameters
) -> None:
    """Set the training mode of each part of a module: as in `modes`, by the part's plain name, else
    as the script has made it."""
    mode_of: dict[int, bool] = {}
    for key, part in module.named_modules():
        as_made = trained.flag_as_made(part, part.training)
        mode_of[id(part)] = modes.get(plain_part(key), as_made)
    set_modes(module, mode_of)


def _put_gradient_flags_back(
    module: torch.nn.Module, flags: Mapping[str, bool], trained: TrainedParameters
) -> list[str]:
    """Set requires_grad of each parameter of a module: as in `flags`, by the parameter's plain
    name, else as the script has made it. Return the names of the parameters that had another."""
    changed = []
    for key, parameter in module.named_parameters(remove_duplicate=False):
        as_made = trained.flag_as_made(parameter, parameter.requires_grad)
        flag = flags.get(plain_name(key), as_made)
        if flag != parameter.requires_grad:
            parameter.requires_grad_(flag)
            changed.append(plain_name(key))
    return changed


def _load_object(name: str, plain: Any, content: Any, step: int) -> None:
    """Load the state dict `content` into the unwrapped object `plain`. If the object refuses it by
    an HpcDdpError, ValueError, RuntimeError or KeyError, raise HpcDdpError with the object's `name`
    and the checkpoint's `step`. Other errors come through, and so do a device's."""
    try:
        if isinstance(plain, torch.nn.Module):
            _load_module(name, plain, content)
        elif isinstance(plain, Optimizer):
            optimizer_state.load(plain, content)
        else:
            plain.load_state_dict(content)
    except DEVICE_ERRORS:
        raise
    except HpcDdpError as error:
        raise _other_objects(step, error.message) from None
    except (ValueError, RuntimeError, KeyError) as error:
        if isinstance(plain, torch.nn.Module) and COPY_ERROR in str(error):  # a device's
            raise
        raise _other_objects(step, f"{name}: {error}") from error


def _load_module(name: str, module: torch.nn.Module, state: OrderedDict[str, Any]) -> None:
    """Load a state dict into the module `name`. Raise HpcDdpError if `state` lacks an entry that
    the module loads and that its own state dict has: an entry that is left out there, as frozen
    weights that the script loads, may be missing. Raise it also if an entry that the module saves
    but does not load, as of weights in 4 bits, is not equal to the module's present one. A class
    with a ``load_state_dict`` of its own decides by itself; its errors, and torch's, come
    through."""
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


def _content_for_module(
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
    and that `tree` lacks, keep their present entries. The stored versions of the parts come along,
    for torch's own conversions of older states. Raise HpcDdpError with a text on keys that one of
    both lacks and on `_differences`, or if the files lack a part of a tensor; UnreadableError if
    the disk does not answer.
    """
    state = module.state_dict()
    # Keys and entries of the module's own state dict, by the keys without wrappers, as stored.
    entries = {plain_name(key): (key, entry) for key, entry in state.items()}
    parameters = {plain_name(k): (k, w) for k, w in module.named_parameters(remove_duplicate=False)}
    versions = tree.get(states.VERSIONS)
    tree = {key: entry for key, entry in tree.items() if key not in states.BESIDE}
    # A model may leave frozen parameters out of its state that were not frozen at the save.
    entries |= {k: parameters[k] for k in parameters.keys() & tree.keys() - entries.keys()}
    new = {key for key in entries if key not in tree and _is_in(f"{name}.{key}", added)}
    present = {key: entry for key, (_, entry) in entries.items()}
    problems = _differences(name, present, parameters.keys(), tree, reader)
    problems += [f"{key} is not in the checkpoint" for key in entries.keys() - tree.keys() - new]
    problems += [f"{key} is not in the model" for key in tree if key not in entries and not stage]
    if problems:
        more = f", and {len(problems) - states.SHOWN} more" if problems[states.SHOWN :] else ""
        raise HpcDdpError(f"{name}: {', '.join(sorted(problems)[: states.SHOWN])}{more}")
    loaded = OrderedDict[str, Any]()
    for label, (key, entry) in entries.items():
        stored = f"{name}.{label}"
        if label in new:
            loaded[key] = entry
        elif stored in reader:
            loaded[key] = reader.read(stored, entry if isinstance(entry, torch.Tensor) else None)
        else:  # an extra_state
            loaded[key] = _assemble(tree[label], stored, reader, current=_tensors_of(entry, stored))
    if versions is not None:  # without, a part takes its own state for that of an older version
        parts = states.metadata_of(state)
        facts_of = {key: {**facts, "version": versions.get(part)} for key, part, facts in parts}
        loaded._metadata = facts_of  # type: ignore[attr-defined]
    return loaded


def _differences(
    name: str,
    present: Mapping[str, Any],
    parameters: Container[str],
    tree: Mapping[str, Any],
    reader: Reader,
) -> list[str]:
    """Return a text for each entry, by its key in both `present` and `tree`, that the module `name`
    can't load: a tensor has another shape, only one of both is a tensor, or each of another number
    of ranks had its own. `parameters` are the keys of parameters.

    Shapes of plain buffers and of extra states may change in training, as those of observers: they
    are left to ``load_state_dict``.
    """
    problems = []
    for key in present.keys() & tree.keys():
        stored = f"{name}.{key}"
        shape = getattr(present[key], "shape", None)
        saved = reader.describe(stored).shape if stored in reader else None
        is_fixed = key in parameters or None in (shape, saved) or is_sharded(present[key])
        if stored in reader.of_other_ranks:
            problems.append(f"{key} was each rank's own, of as many ranks as do not run here")
        elif shape != saved and is_fixed and not key.endswith(EXTRA_STATE):
            problems.append(f"{key} is {_shape(shape)} here and {_shape(saved)} in the checkpoint")
    return problems


def _content_for_optimizer(
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
    names = iter(params)  # which come group by group
    groups = [[next(names) for _ in group["params"]] for group in optimizer.param_groups]
    is_new = _new_groups(name, groups, tree, added)
    if tree[optimizer_state.KIND] != (kind := type(optimizer).__name__):
        raise HpcDdpError(f"{name}: it is of {tree[optimizer_state.KIND]}, and here of {kind}")
    templates = {}  # a parameter by the place of each stored tensor of its shape
    for label, parameter in params.items():
        for key in tree["state"].get(label, {}):
            stored = f"{name}.state.{label}.{key}"
            if stored in reader and reader.describe(stored).shape == parameter.shape:
                templates[stored] = parameter
    saved = {key: entry for key, entry in tree.items() if key != optimizer_state.KIND}
    current, older = iter(optimizer.state_dict()["param_groups"]), iter(tree["param_groups"])
    # Each group with its stored one, None for a new group: the checkpoint has none for it.
    pairs = [(next(current), None if is_added else next(older)) for is_added in is_new]
    saved["param_groups"] = [
        group if stored is None else optimizer_state.with_present_methods(stored, group)
        for group, stored in pairs
    ]
    settings = _tensors_of(optimizer.param_groups, f"{name}.param_groups")  # as a learning rate
    content = _assemble(saved, name, reader, templates, settings)
    return optimizer_state.number_state(content, params, groups)


def _new_groups(
    name: str, groups: Sequence[Sequence[str]], tree: Any, added: Sequence[str]
) -> list[bool]:
    """Return for each of an optimizer's `groups` (names of parameters) whether all its parameters
    are new: named by `added`, and not in `tree`, the optimizer's stored state; False for a group
    without parameters.

    `name` is the optimizer's. Raise HpcDdpError if the groups that are not new, without their new
    parameters, differ from the stored groups; KeyError if `tree` is not an optimizer's.
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


def _tensors_of(state: Any, place: str) -> dict[str, torch.Tensor]:
    """Return the tensors in the `state` of an object by their places, as ``PLACE.KEY.0``. Tensors
    behind an entry that can't be saved are left out."""
    tensors: dict[str, torch.Tensor] = {}
    with suppress(HpcDdpError):
        take_apart(state, place, tensors)
    return tensors


def _assemble(
    stored: Any,
    place: str,
    reader: Reader,
    templates: Mapping[str, torch.Tensor] = MappingProxyType({}),
    current: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Any:
    """Return a copy of the entry of a tree that was `stored` at `place`, with a new tensor in place
    of each mark of `take_apart` (`_read_tensor`, with its arguments and errors)."""
    if is_mark(stored):
        return _read_tensor(stored, place, reader, templates.get(place), current.get(place))
    if isinstance(stored, dict):
        return type(stored)(
            {k: _assemble(v, f"{place}.{k}", reader, templates, current) for k, v in stored.items()}
        )
    if isinstance(stored, (list, tuple)):
        row = [
            _assemble(v, f"{place}.{i}", reader, templates, current) for i, v in enumerate(stored)
        ]
        return tuple(row) if isinstance(stored, tuple) else row
    return stored


def _read_tensor(
    mark: str,
    place: str,
    reader: Reader,
    parameter: torch.Tensor | None,
    current: torch.Tensor | None,
) -> torch.Tensor:
    """Return the tensor for which the `mark` at `place` stands, newly read by `reader`.

    The tensor gets the sharding, or the order in memory, of `parameter` if there is one; else the
    device of `current` if there is one. Any other tensor comes to one of the reader's devices if it
    was on an accelerator, else to the CPU. Raise HpcDdpError for a tensor that is not stored for
    this rank, or not as a whole; UnreadableError if the disk does not answer.
    """
    if place not in reader:
        raise HpcDdpError(f"{place} is a tensor that no rank has stored for this one")
    tensor = reader.read(place, parameter)
    if parameter is not None and not is_sharded(parameter):
        # The order in memory: fused optimizers walk a parameter and its state side by side. A
        # single number goes to the parameter's device if it was on one: see `_with_types`.
        is_number = mark != TENSOR and not tensor.shape
        device = parameter.device if is_number else tensor.device
        layout = torch.empty_like(parameter, dtype=tensor.dtype, device=device)
        return layout.copy_(tensor)
    if current is not None:
        return tensor.to(current.device)
    number = device_number(mark)
    return tensor if number is None else tensor.to(reader.device(number))


def _is_in(name: str, places: Sequence[str]) -> bool:
    """Return whether `name` is one of the `places`, or begins with one and a dot."""
    return any(name == place or name.startswith(f"{place}.") for place in places)


def _shape(shape: Any) -> str:
    """Return a shape for people; ``no tensor`` for None."""
    return "no tensor" if shape is None else str(tuple(shape))


def _other_objects(step: int, difference: str) -> HpcDdpError:
    """Return the error for a checkpoint of step `step` that is of other objects; `difference` is a
    text on what differs."""
    return HpcDdpError(
        f"the checkpoint of step {step} is not of this program's objects: {difference}",
        hint="start another run, or undo the change to the script; for what is new on purpose:"
        " run.track(…, added=('ema', 'model.head'))",
    )
