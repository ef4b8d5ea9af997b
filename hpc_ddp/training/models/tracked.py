"""Checks of what is tracked, against the models, optimizers and schedulers of the script."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.checkpoint.optimizer_state import params_of
from hpc_ddp.training.checkpoint.state import labels_of, untracked_parameters, unwrap
from hpc_ddp.training.models.mesh import ParallelDims
from hpc_ddp.training.models.trained import parameters_of


def check_models(
    objects: Mapping[str, Any], wrapped: Iterable[torch.nn.Module], is_stage: bool = False
) -> None:
    """Refuse tracked `objects` with an optimizer, but without the model it trains, or an optimizer
    inside it: checkpoints would lack their state. `wrapped` went through `Run.wrap` and others;
    with `is_stage` they belong to one stage of a pipeline.

    Raises
    ------
    UsageError
        an optimizer has a parameter of such a model, or another optimizer, or, in a stage, a
        tensor of no tracked object
    HpcDdpError
        the state of an object can't be saved
    """
    tracked = [unwrap(thing) for thing in objects.values()]
    stored = labels_of(objects)
    of_wrapped = {id(weight) for model in wrapped for weight in model.parameters()} - stored.keys()
    for optimizer in (thing for thing in tracked if isinstance(thing, Optimizer)):
        if any(id(weight) in of_wrapped for weight in parameters_of(optimizer)):
            raise UsageError(
                "run.track names an optimizer, and not the model that it trains, whose weights"
                " no checkpoint would have",
                hint="run.track(model=model, optimizer=optimizer)",
            )
        if key := inner_optimizer(optimizer, tracked):
            raise UsageError(
                f"an optimizer has another one, {key}, and no checkpoint would have its state",
                hint=f"run.track(…, base=optimizer.{key})",
            )
    for name, untracked in untracked_parameters(objects, stored).items():
        params = params_of(unwrap(objects[name]), stored) if untracked else {}
        if module := _module_of([params[label] for label in untracked]):
            raise UsageError(
                f"{name} trains a {type(module).__name__} that run.track was not given: no"
                " checkpoint would have its buffers, and the names of its weights",
                hint=f"run.track(model=model, {name}={name})",
            )
        if untracked and is_stage:
            raise UsageError(
                f"{name} trains a tensor of no tracked object, whose name may be another one's in"
                " another stage; accepted in a pipeline: parameters of tracked models",
                hint="make it a parameter of the stage's module",
            )


def check_copies(
    objects: Iterable[Any], wrapped: Iterable[torch.nn.Module], dims: ParallelDims
) -> None:
    """Refuse to train copies of a model whose gradients nothing averages.

    Only optimizers among `objects` are checked, and only where some ranks share a copy and
    others have another one: with one copy, or one on each rank, nothing is refused.

    Raises
    ------
    UsageError
        an optimizer has a parameter of a model that is not in fully_shard or wrap
    """
    if dims.dp in (1, dims.world_size):
        return
    averaged = {id(parameter) for model in wrapped for parameter in model.parameters()}
    for optimizer in (thing for thing in objects if isinstance(thing, Optimizer)):
        if any(id(weight) not in averaged for weight in parameters_of(optimizer)):
            raise UsageError(
                f"tp={dims.tp} and pp={dims.pp} leave {dims.dp} copies of the model, whose"
                " gradients are not averaged; accepted: an optimizer of what has gone through"
                " run.fully_shard or run.wrap",
                hint="run.fully_shard(model, units) after run.parallelize, or run.wrap(stage)",
            )


def inner_optimizer(outer: Optimizer, tracked: Collection[Any]) -> str:
    """Return the attribute by which an optimizer has another one, as SAM has it, that is not
    `tracked`, and whose state is its own; '' without one, and where the outer one's class has a
    ``state_dict`` that may have that state."""
    if type(outer).state_dict is Optimizer.state_dict:
        for key, inner in vars(outer).items():
            is_apart = isinstance(inner, Optimizer) and inner.state is not outer.state
            if is_apart and all(inner is not thing for thing in tracked):
                return key
    return ""


def warn_of_untracked(
    objects: Iterable[Any], warn: Callable[[str], None], remedy: str = "name it in run.track(…)"
) -> None:
    """Warn, by calls of `warn` with the text, of a scheduler of a tracked optimizer, and of an
    optimizer with a state, that are neither among the tracked `objects` nor an attribute of one: a
    resume begins them anew. Called after a step; it looks at all objects, so it takes 0.1 s."""
    reachable = list(_with_attributes(objects))
    if any(_find_untracked(reachable)):
        gc.collect()  # one that the script has replaced may wait for it
        for noun in _find_untracked(reachable):
            warn(f"WARNING: {noun}, is in no checkpoint, and a resume begins it anew; {remedy}")


def _find_untracked(reachable: Collection[Any]) -> list[str]:
    """Return the kinds of schedulers of `reachable` optimizers, and of optimizers with a state,
    that are not `reachable` themselves."""
    numbers = set(map(id, reachable))
    states = {id(getattr(thing, "state", None)) for thing in reachable}
    nouns = []
    for thing in find_living(Optimizer, LRScheduler):
        if isinstance(thing, LRScheduler):
            is_missing = id(getattr(thing, "optimizer", None)) in numbers
        else:
            state = getattr(thing, "state", None)  # a class may do without
            is_missing = bool(state) and id(state) not in states
        if is_missing and id(thing) not in numbers:
            noun = "a scheduler" if isinstance(thing, LRScheduler) else "an optimizer"
            nouns.append(f"{noun}, {type(thing).__name__}")
    return sorted(nouns)


def find_living(*kinds: type) -> list[Any]:
    """Return the objects of this process that are of some classes, by their type: a proxy that is
    asked for its class may warn."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]


def _module_of(parameters: Collection[torch.Tensor]) -> torch.nn.Module | None:
    """Return a module that has one of some parameters itself, None without one."""
    numbers = set(map(id, parameters))
    modules: list[torch.nn.Module] = find_living(torch.nn.Module) if numbers else []
    for module in modules:
        if not numbers.isdisjoint(map(id, vars(module).get("_parameters", {}).values())):
            return module
    return None


def _with_attributes(objects: Iterable[Any]) -> Iterator[Any]:
    """Yield objects, their attributes, and what lists and dicts among these hold."""
    for thing in map(unwrap, objects):
        yield thing
        for entry in vars(thing).values() if hasattr(thing, "__dict__") else ():
            yield entry
            if isinstance(entry, dict):
                yield from entry.values()
            elif isinstance(entry, (list, tuple)):
                yield from entry
