"""An optimizer's state by names of parameters, taken out and loaded again, and those of the
script's settings that a load overrides."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.models.dtensor import is_sharded
from hpc_ddp.training.models.trained_parameters import TrainedParameters, parameters_of

KIND = "class"  # an optimizer's, beside its state
OF_NO_PARAMETER = "<state of no parameter>"  # an optimizer's, by keys of its own, beside its state
SETTINGS = "<settings>"  # of its groups, as the script made them, beside its state
# Settings of groups that say by which method a step is computed.
METHODS = ("foreach", "fused", "capturable", "differentiable")
PARAMETERS = "<parameters>"  # that are no tracked module's, such as a temperature, beside its state
# Settings of torch's schedulers that no step changes.
CONSTANTS = (
    *("T_max", "T_0", "T_mult", "eta_min", "total_steps", "total_iters", "step_size", "milestones"),
    *("_milestones", "gamma", "power", "start_factor", "end_factor", "factor", "patience"),
)


def params_of(optimizer: Optimizer, labels: Mapping[int, str]) -> dict[str, torch.Tensor]:
    """Return an optimizer's parameters by name, in the order of its state dict's numbers. `labels`
    has the names by the parameters' ids. A parameter that is not in it, as of no tracked module, is
    named ``parameter <number>``."""
    return {
        labels.get(id(parameter), f"parameter {i}"): parameter
        for i, parameter in enumerate(parameters_of(optimizer))
    }


def untracked_of(
    optimizer: Optimizer, labels: Mapping[int, str], addresses: Container[int]
) -> dict[str, torch.Tensor]:
    """Return, by name, the parameters that an optimizer trains and that no tracked object has: they
    are not in `labels` (names by ids), and their memory begins at none of the `addresses`, those of
    other tracked tensors. A parameter counts as trained if it needs gradients, or has a state. The
    tensors have no graph."""
    return {
        label: parameter.detach()
        for label, parameter in params_of(optimizer, labels).items()
        if id(parameter) not in labels
        and (parameter.requires_grad or optimizer.state.get(parameter))
        and address_of(parameter) not in addresses
    }


def address_of(tensor: Any) -> int:
    """Return the address at which this rank's numbers of a tensor begin in memory."""
    address: int = (tensor.to_local() if is_sharded(tensor) else tensor).data_ptr()
    return address


def is_setting(place: str) -> bool:
    """Return whether a tensor's place in a state is that of a setting of an optimizer's group, as
    ``optimizer.param_groups.0.lr``."""
    return place.partition(".")[2].startswith("param_groups.")


def label_state(
    optimizer: Optimizer,
    state: dict[str, Any],
    labels: Mapping[int, str],
    untracked: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """Return an optimizer's state dict `state` with names of parameters in place of their numbers:
    the numbers depend on which parameters a rank has, the names do not. `labels` has the names by
    the parameters' ids.

    The optimizer's class is added under `KIND`, the `untracked` parameters (`untracked_of`) under
    `PARAMETERS`. State of no parameter (MADGRAD counts steps so) moves to `OF_NO_PARAMETER`. Raise
    UsageError for a state dict without ``state`` or ``param_groups``.
    """
    if not {"state", "param_groups"} <= state.keys():
        raise UsageError(
            f"the state_dict of a {type(optimizer).__name__} has {', '.join(map(str, state))};"
            " accepted by run.track: an optimizer's with state and param_groups"
        )
    names = dict(enumerate(params_of(optimizer, labels)))
    groups = [[names[number] for number in group["params"]] for group in state["param_groups"]]
    extra = {key: entry for key, entry in state["state"].items() if key not in names}
    content = _with_keys(state, names, groups) | {KIND: type(optimizer).__name__}
    further = {OF_NO_PARAMETER: extra, PARAMETERS: dict(untracked)}
    return content | {key: entry for key, entry in further.items() if entry}


def number_state(
    state: dict[str, Any], params: Mapping[str, Any], groups: list[list[str]]
) -> dict[str, Any]:
    """Return an optimizer's state dict, from one of `label_state`, with numbers of parameters in
    place of their names, as torch loads it; `PARAMETERS` stays, by number.

    The keys of `params` are the names in the order of the numbers. `groups` has the names in each
    group: torch pairs the parameters of a group by their order. Raise KeyError for a name in
    `groups` or `PARAMETERS` that `params` lacks.
    """
    numbers = {label: number for number, label in enumerate(params)}
    content = _with_keys(state, numbers, [[numbers[label] for label in group] for group in groups])
    content["state"].update(content.pop(OF_NO_PARAMETER, {}))
    content.pop(SETTINGS, None)
    untracked = content.pop(PARAMETERS, {})
    return content | {PARAMETERS: {numbers[label]: stored for label, stored in untracked.items()}}


def ignored_settings(
    settings: Sequence[Mapping[str, Any]], state: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the settings of an optimizer that a load would override, by name, each as a pair: the
    script's present value, and the value with which the optimizer of the stored `state` was made.
    `settings` has the present ones of each group, as the script made them; of groups that differ in
    the same setting the first counts. `METHODS` are left out: a load keeps the present ones."""
    pairs: dict[str, tuple[Any, Any]] = {}
    for group, stored in zip(settings, state.get(SETTINGS, ()), strict=False):
        for key in group.keys() & stored.keys() - {*METHODS}:
            if group[key] != stored[key]:
                pairs.setdefault(key, (group[key], stored[key]))
    return pairs


def find_ignored_settings(
    objects: Mapping[str, Any], tree: Mapping[str, Any], trained: TrainedParameters
) -> list[str]:
    """Return a line of text for each setting of an optimizer or a scheduler among `objects`, such
    as ``lr`` or ``T_max``, that the script has now made otherwise than for the checkpoint with the
    state dicts `tree`. A load puts the stored value back, so that a ``--lr`` of this attempt has no
    effect. `trained` knows the optimizers' settings as the script has made them."""
    notes = []
    for name, tracked in objects.items():
        pairs: dict[str, tuple[Any, Any]] = {}
        stored = tree.get(name)
        if isinstance(tracked, Optimizer) and isinstance(stored, dict):
            pairs = ignored_settings(trained.settings(tracked), stored)
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
    """Yield the name of each of the `CONSTANTS` that differs between a scheduler's present `state`
    and its `stored` one, and the pair of both values; also those of the schedulers in it, as
    ``T_max of scheduler 1``."""
    for key in CONSTANTS:
        if isinstance(state.get(key), torch.Tensor):  # `stored` has a mark in its place
            continue
        if key in state and key in stored and state[key] != stored[key]:
            yield key, (state[key], stored[key])
    parts = state.get("_schedulers", ()), stored.get("_schedulers", ())
    for number, (part, stored_part) in enumerate(zip(*parts, strict=False)):
        for key, pair in _other_constants(part, stored_part):
            yield f"{key} of scheduler {number}", pair


def part_of(state: dict[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict by names with only those parameters that are in `params`, as
    one stage of a pipeline has them."""
    groups = [
        [name for name in group["params"] if name in params] for group in state["param_groups"]
    ]
    return _with_keys(state, {name: name for name in params}, groups)


def _with_keys(
    state: dict[str, Any], keys: Mapping[Any, Any], groups: list[list[Any]]
) -> dict[str, Any]:
    """Return an optimizer's state dict with new keys of its state, and with `groups` as the
    parameters in its groups. `keys` has the new keys by the old ones; state with another key is
    left out."""
    return {
        **state,
        "state": {keys[old]: entry for old, entry in state["state"].items() if old in keys},
        "param_groups": [
            {**group, "params": params}
            for group, params in zip(state["param_groups"], groups, strict=True)
        ],
    }


def names_like_parameters(
    name: str, optimizer: Optimizer, labels: Mapping[int, str], untracked: Container[str]
) -> Iterator[str]:
    """Yield the names, as ``NAME.state.LABEL.exp_avg``, of the tensors in the state of the
    optimizer `name` that have the shape of their parameter; none for a parameter that is a scalar,
    or in `untracked`. `labels` has the parameters' names by their ids."""
    for label, parameter in params_of(optimizer, labels).items():
        if label in untracked:
            continue
        for key, entry in optimizer.state.get(parameter, {}).items():
            if isinstance(entry, torch.Tensor) and entry.shape == parameter.shape != ():
                yield f"{name}.state.{label}.{key}"


def with_present_methods(stored: dict[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `stored` settings of a group, but `METHODS` as in its `present` settings."""
    return stored | {key: present[key] for key in METHODS if key in present}


def own_places(name: str, untracked: Collection[str]) -> tuple[str, ...]:
    """Return the beginnings of the names, in the optimizer `name`, of all tensors that belong to
    `untracked` parameters: nothing makes these tensors equal on all ranks."""
    return (f"{name}.{PARAMETERS}.", *(f"{name}.state.{label}." for label in untracked))


def places_of_shards(name: str, optimizer: Optimizer, labels: Mapping[int, str]) -> tuple[str, ...]:
    """Return the beginnings of the names, in the optimizer `name`, of the state of sharded
    parameters."""
    params = params_of(optimizer, labels)
    return tuple(f"{name}.state.{label}." for label, p in params.items() if is_sharded(p))


def load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load `state`, a state dict by numbers with `PARAMETERS`, which is removed from it, into an
    optimizer; overwrite these parameters, too. Tensors keep their stored types; those of one number
    stay on the CPU if they were there. A class with a ``load_state_dict`` of its own decides on
    both, and its errors come through.

    Tensors that the optimizer's state has already are overwritten in place: a CUDA graph knows
    their places. The groups, and tensors among their settings, as a learning rate that the script
    fills, stay the same objects: the script may keep them, and an optimizer inside another one, as
    SAM has it, shares them.
    """
    untracked = state.pop(PARAMETERS)
    groups = optimizer.param_groups
    settings = [dict(group) for group in groups]
    present = {parameter: optimizer.state.get(parameter) for parameter in parameters_of(optimizer)}
    optimizer.load_state_dict(state)
    _keep_groups(optimizer, groups)
    for number, parameter in enumerate(parameters_of(optimizer)):
        if number in untracked:
            parameter.data.copy_(untracked[number])
    _keep_setting_tensors(optimizer, settings)
    if type(optimizer).load_state_dict is Optimizer.load_state_dict:
        _restore_types(optimizer, state["state"], present)


def _keep_setting_tensors(optimizer: Optimizer, settings: list[dict[str, Any]]) -> None:
    """After a load put the tensors among the `settings` that the groups had before back into the
    groups, overwritten with the loaded numbers."""
    for group, earlier in zip(optimizer.param_groups, settings, strict=False):
        for key, setting in earlier.items():
            loaded = group.get(key)
            if isinstance(setting, torch.Tensor) and isinstance(loaded, torch.Tensor):
                group[key] = setting
                setting.data.copy_(loaded)
            elif key != "params":  # a list of views of a buffer, say
                group[key] = overwrite_tensors(setting, loaded)


def _restore_types(
    optimizer: Optimizer, stored: Mapping[int, Any], present: Mapping[torch.Tensor, Any]
) -> None:
    """After a load by torch give the state's tensors their types and devices in `stored`, the
    stored state by the parameters' numbers. Tensors in `present`, the state of every parameter
    before the load (None without any), are overwritten in place."""
    params = [(n, p) for n, p in enumerate(parameters_of(optimizer)) if n in stored]
    # The keys of single numbers on the CPU, by the state of parameters with a shape.
    constants = {key for number, parameter in params if parameter.shape
                 for key, entry in stored[number].items() if _is_constant(entry)}  # fmt: skip
    for number, parameter in params:
        of_cpu = None if parameter.shape else constants
        loaded = _with_types(optimizer.state[parameter], stored[number], of_cpu)
        optimizer.state[parameter] = overwrite_tensors(present[parameter], loaded)


def _keep_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """After a load copy the loaded settings into the `groups` that an optimizer had before, and
    give these lists and dicts back to the optimizer and to one inside it that shared them. Do
    nothing where the numbers of groups differ."""
    loaded = optimizer.param_groups
    if loaded is groups or len(loaded) != len(groups):
        return
    for group, settings in zip(groups, loaded, strict=True):
        content = dict(settings)
        group.clear()
        group.update(content)
    for part in (optimizer, *vars(optimizer).values()):
        if isinstance(part, Optimizer) and part.param_groups is loaded:
            part.param_groups = groups


def overwrite_tensors(present: Any, loaded: Any) -> Any:
    """Overwrite tensors of the `present` state with those of the `loaded` one where type, shape,
    order in memory and device are the same. Return the loaded state with the overwritten tensors in
    it; sharded tensors are the loaded ones. So views stay views, and tensors that a CUDA graph
    knows stay in their places."""
    if isinstance(present, torch.Tensor) and type(present) is type(loaded):
        kinds = [(t.dtype, t.shape, t.device, t.layout) for t in (present, loaded)]
        is_alike = kinds[0] == kinds[1] and not (is_sharded(present) or is_sharded(loaded))
        if is_alike and present.layout == torch.strided and present.stride() == loaded.stride():
            present.detach().copy_(loaded)
            return present
    if isinstance(present, dict) and isinstance(loaded, dict):
        pairs = ((key, present[key], entry) for key, entry in loaded.items() if key in present)
        return loaded | {key: overwrite_tensors(old, new) for key, old, new in pairs}
    is_row = type(present) is type(loaded) and type(loaded) in (list, tuple)
    if is_row and len(present) == len(loaded):
        return type(loaded)(map(overwrite_tensors, present, loaded))
    return loaded


def _is_constant(entry: Any) -> bool:
    """Return whether an entry of a state is one number on the CPU, as NAdam's ``mu_product``."""
    return isinstance(entry, torch.Tensor) and entry.device.type == "cpu" and not entry.shape


def _with_types(
    loaded: Any, stored: Any, constants: Container[object] | None, key: object = None
) -> Any:
    """Return a state that torch has `loaded`, with the `stored` tensors and texts in place of those
    that torch has converted. torch gives each tensor but the count ``step`` its parameter's type
    and device, by which averages in fp32 of weights in bf16 would lose bits; of a text it makes
    ``<generator object …>``.

    Tensors of one number that were stored from the CPU stay there: those whose key is in
    `constants`; None: all. A parameter that is one number itself needs the keys, since its averages
    are of one number, too. `key` is the state's own in its parent.
    """
    if isinstance(stored, torch.Tensor) and isinstance(loaded, torch.Tensor):
        is_on_cpu = _is_constant(stored) and (constants is None or key in constants)
        device = stored.device if is_on_cpu and key != "step" else loaded.device
        is_same = (loaded.dtype, loaded.device) == (stored.dtype, device)
        return loaded if is_same else stored.to(device)
    if isinstance(stored, dict) and isinstance(loaded, dict):
        return loaded | {
            k: _with_types(loaded[k], v, constants, k) for k, v in stored.items() if k in loaded
        }
    if type(stored) is type(loaded) and type(stored) in (list, tuple):
        pairs = zip(loaded, stored, strict=True)
        return type(stored)(_with_types(*pair, constants, key) for pair in pairs)
    return stored if isinstance(stored, (str, bytes)) else loaded
