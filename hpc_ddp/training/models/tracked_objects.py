"""Checks of what is tracked, against the models, optimizers and schedulers of the script."""

from __future__ import annotations

import gc
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any, Generic, TypeVar

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.checkpoint.optimizer_state import params_of
from hpc_ddp.training.checkpoint.state import labels_of, untracked_parameters, unwrap
from hpc_ddp.training.models.dtensor import split_mixed_groups
from hpc_ddp.training.models.mesh import ParallelDims
from hpc_ddp.training.models.trained_parameters import parameters_of

LEVELS = 10  # the depth of attributes, lists and dicts to which a tracked object is searched
MOST_PARTS = 10_000  # the most objects of a level: a replay buffer may be a list
OF_WEIGHTS = ("state", "param_groups")  # an optimizer's attributes with an entry for each weight
# Names of classes that have this rank's shards as plain parameters, and not as DTensors.
LOCAL_SHARDS = {"FullyShardedDataParallel", "DeepSpeedEngine"}
M = TypeVar("M", bound=torch.nn.Module)


class LivingModels(Generic[M]):
    """Models in the order in which they were added, without those that the script has let go: a
    trial of a batch size, say, is to give its memory back."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[M]] = []

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[M]:
        # A list keeps the models alive for the time of the iteration.
        models = [reference() for reference in self._references]
        return iter([model for model in models if model is not None])

    def add(self, model: M) -> None:
        """Add a model; a second call for it does nothing."""
        if not any(added is model for added in self):
            self._references = [*map(weakref.ref, self), weakref.ref(model)]

    def clear(self) -> None:
        """Forget the models."""
        self._references.clear()


def check_models(
    objects: Mapping[str, Any], wrapped: Iterable[torch.nn.Module], is_stage: bool = False
) -> None:
    """Refuse tracked `objects`, by name, if a checkpoint would lack what an optimizer among them
    trains, or an optimizer inside it. `wrapped` are the models that went through `Run.wrap` and its
    like; with `is_stage` the objects belong to one stage of a pipeline. A model that leaves a
    trained parameter out of its state loads its own state.

    Raises
    ------
    UsageError
        a model is sharded by a class of `LOCAL_SHARDS`, or does not load a trained weight from its
        own state; an optimizer has a parameter twice, trains a model that is not tracked, has
        another optimizer that is not tracked, or trains, in a stage, a tensor of no tracked object
    HpcDdpError
        the state of an object can't be saved
    """
    tracked = [unwrap(thing) for thing in objects.values()]
    _check_shards(objects)
    stored = labels_of(objects)
    optimizers = [thing for thing in tracked if isinstance(thing, Optimizer)]
    parameters = chain.from_iterable(map(parameters_of, optimizers))
    _check_names(objects, {id(parameter) for parameter in parameters})
    of_wrapped = {id(weight) for model in wrapped for weight in model.parameters()} - stored.keys()
    for optimizer in optimizers:
        _check_repeated(optimizer, stored)
        if any(id(weight) in of_wrapped for weight in parameters_of(optimizer)):
            raise UsageError(
                "run.track names an optimizer, and not the model that it trains, whose weights"
                " no checkpoint would have",
                hint="run.track(model=model, optimizer=optimizer)",
            )
        if key := find_inner_optimizer(optimizer, tracked):
            raise UsageError(
                f"an optimizer has another one, {key}, and no checkpoint would have its state",
                hint=f"run.track(…, base=optimizer.{key})",
            )
    _check_untracked(objects, stored, is_stage)


def _check_untracked(objects: Mapping[str, Any], labels: Mapping[int, str], is_stage: bool) -> None:
    """Raise UsageError if an optimizer among `objects` trains a parameter of a module that is not
    tracked; with `is_stage` also for any other tensor of no tracked object. `labels` has the names
    of the tracked modules' parameters by their ids. Raise HpcDdpError as `check_models`."""
    within = _parameters_of(_objects_within(objects.values()))
    for name, untracked in untracked_parameters(objects, labels).items():
        params = params_of(unwrap(objects[name]), labels) if untracked else {}
        weights = [params[label] for label in untracked if id(params[label]) not in within]
        if module := _find_module_with(weights):
            kind = type(module).__name__
            raise UsageError(
                f"{name} trains a {kind} that run.track was not given: no checkpoint would have its"
                " buffers, and the names of its weights",
                hint=f"run.track(…, {kind.lower()}=…), or the model that it is part of",
            )
        if untracked and is_stage:
            raise UsageError(
                f"{name} trains a tensor of no tracked object, whose name may be another one's in"
                " another stage; accepted in a pipeline: parameters of tracked models",
                hint="make it a parameter of the stage's module",
            )


def _check_repeated(optimizer: Optimizer, labels: Mapping[int, str]) -> None:
    """Raise UsageError for a parameter that an optimizer has twice, of which torch only warns;
    `labels` has the names of parameters by their ids."""
    counts = Counter(id(parameter) for parameter in parameters_of(optimizer))
    if repeated := next((number for number, count in counts.items() if count > 1), None):
        raise UsageError(
            f"{type(optimizer).__name__} has the parameter {labels.get(repeated, 'of no model')}"
            " twice, and each step moves it twice; accepted: each once",
            hint=f"{type(optimizer).__name__}(dict.fromkeys(PARAMETERS), …)",
        )


def _check_shards(objects: Mapping[str, Any]) -> None:
    """Raise UsageError for a model, or a part of one, of a class of `LOCAL_SHARDS`."""
    models = {n: thing for n, thing in objects.items() if isinstance(thing, torch.nn.Module)}
    for name, model in models.items():
        for part in model.modules():
            if names := LOCAL_SHARDS & {kind.__name__ for kind in type(part).__mro__}:
                raise UsageError(
                    f"{name} is a {min(names)}, each rank's shard of which looks like a whole"
                    " model: norms and checkpoints would be wrong; accepted: run.fully_shard",
                    hint="run.fully_shard(model, model.blocks), or a StopPoint beside the"
                    " library's own checkpoints (docs/other-libraries.md)",
                )


def _check_names(objects: Mapping[str, Any], of_optimizers: Container[int]) -> None:
    """Raise UsageError for a model that saves a parameter of an optimizer (`of_optimizers` has the
    ids) by another name, and does not load the parameter from there. A model whose state lacks such
    a parameter loads its own state. A class with its own ``load_state_dict`` is passed over."""
    for name, model in objects.items():
        plain = unwrap(model)
        if getattr(type(plain), "load_state_dict", None) is not torch.nn.Module.load_state_dict:
            continue
        entries = plain.state_dict()
        left_out = {
            key
            for key, weight in plain.named_parameters()
            if key not in entries and weight.requires_grad and id(weight) in of_optimizers
        }
        if left_out:
            missing, unexpected = plain.load_state_dict(entries, strict=False)
            if unexpected and left_out & {*missing}:
                key = min(left_out & {*missing})
                raise UsageError(
                    f"{name} saves {key} by another name, {unexpected[0]}, and does not load it"
                    " from there: a resume would begin it anew; accepted: a model that loads its"
                    " own state dict",
                    hint="a load_state_dict pre-hook that names it back",
                )


def check_copies(
    objects: Iterable[Any], wrapped: Iterable[torch.nn.Module], dims: ParallelDims
) -> None:
    """Raise UsageError if an optimizer among `objects` has a parameter of none of the `wrapped`
    models, those in fully_shard or wrap: nothing averages its gradient over the copies of the
    model. With one copy, or with a copy on each rank, nothing is refused."""
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


def check_place(model: torch.nn.Module, device: torch.device, is_tracked: bool) -> None:
    """Raise UsageError for a model that is still to move to `device`, if a call of `track` has been
    (`is_tracked`): at a resume its optimizer's state would be where the weights were before."""
    if is_tracked and any(weight.device.type != device.type for weight in model.parameters()):
        raise UsageError(
            f"run.wrap was called after run.track, and moves the model to {device.type}; accepted:"
            " before it",
            hint="model = run.wrap(model), then the optimizer, then run.track(…)",
        )


def find_inner_optimizer(outer: Optimizer, tracked: Collection[Any]) -> str:
    """Return the name of the attribute by which the optimizer `outer` has another optimizer, as
    SAM. The inner one must have a state of its own, and not be among the objects `tracked`. Return
    '' without one, and if outer's class has its own ``state_dict``: that may have its state."""
    if type(outer).state_dict is Optimizer.state_dict:
        for key, inner in vars(outer).items():
            is_apart = isinstance(inner, Optimizer) and inner.state is not outer.state
            if is_apart and all(inner is not thing for thing in tracked):
                return key
    return ""


def add_hook_tables(optimizer: Optimizer) -> None:
    """Give an optimizer whose class leaves out ``Optimizer.__init__``, as torch_optimizer's
    Lookahead, the tables in which hooks are registered, empty. Its steps call no hooks."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        vars(optimizer).setdefault(name, OrderedDict())


def warn_of_untracked(
    objects: Iterable[Any], warn: Callable[[str], None], remedy: str = "name it in run.track(…)"
) -> None:
    """Call `warn` with a text, which ends in `remedy`, for each object of the process that is
    neither among the tracked `objects` nor within one, so that a resume begins it anew: schedulers
    of a tracked optimizer, optimizers with a state for a tracked model, averages of models, and
    enabled scalers of gradients that were used. Called after a step; as slow as `find_living`."""
    within = list(_objects_within(objects))
    if any(_find_untracked(within)):
        gc.collect()  # an object that the script has replaced may still be in memory
        for noun in _find_untracked(within):
            warn(f"WARNING: {noun}, is in no checkpoint, and a resume begins it anew; {remedy}")


def warn_of_stateless(objects: Mapping[str, Any], warn: Callable[[str], None]) -> None:
    """Call `warn` with a text for each metric of torchmetrics among `objects` whose state dict is
    empty, as it is by default: each attempt begins it anew."""
    for name, thing in objects.items():
        is_metric = isinstance(thing, torch.nn.Module) and hasattr(thing, "persistent")
        if is_metric and not thing.state_dict():
            warn(
                f"WARNING: {name}, a {type(thing).__name__}, has nothing in its state_dict, so a"
                f" resume begins it anew; {name}.persistent(True) before run.track keeps it"
            )


_EARLY = 64  # the first steps of an attempt, in which `GradientWatch` looks at the gradients


class GradientWatch:
    """Warns, once in all, in the first `_EARLY` steps, of gradients that a script accumulates by
    hand over ``run.step`` (a step ends with gradients and without an update, after a step that had
    one), or drops within a step, between two of its micro-batches. Optimizers among the tracked
    `objects` that are ``capturable`` are left out: their updates may be replays of a CUDA graph,
    which are not seen. All optimizers get hooks: `check` is called before each update, and may
    refuse it by an error; mixed groups are split (`split_mixed_groups`)."""

    def __init__(
        self,
        objects: Iterable[Any] = (),
        warn: Callable[[str], None] = print,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        optimizers = [thing for thing in objects if isinstance(thing, Optimizer)]
        self._optimizers = [
            one for one in optimizers if not any(g.get("capturable") for g in one.param_groups)
        ]
        self._warn, self._steps_left = warn, _EARLY if self._optimizers else 0
        self._check = check
        self.has_updated = False  # whether an optimizer has, in this step
        self._had_update = False  # whether a step before had an update
        # The epoch of the last micro-batch with a backward, if its step has more micro-batches.
        self._epoch_amid_step: int | None = None
        for optimizer in optimizers:
            add_hook_tables(optimizer)
            split_mixed_groups(optimizer)
            optimizer.register_step_pre_hook(self._note_update)

    def _note_update(self, *_: Any) -> None:
        """The hook before an update; errors of `check` come through."""
        self._check()
        self.has_updated = True

    def begin_backward(self, ends_step: bool, epoch: int) -> None:
        """Called before the backward of each micro-batch, which may be the last one of its step
        (`ends_step`). Warn if earlier ones of the step, in the same epoch, left no gradients."""
        if self._epoch_amid_step == epoch and self._steps_left:
            weights = [weight for one in self._optimizers for weight in parameters_of(one)]
            if all(weight.grad is None for weight in weights):
                self._steps_left = 0
                self._warn(
                    "WARNING: within a step of several micro-batches (accumulate) the gradients of"
                    " the earlier ones are gone, as by optimizer.zero_grad() before each: the last"
                    " one alone counts; drop that line: run.update sets them to None"
                )
        self._epoch_amid_step = None if ends_step else epoch

    def weights_step(self, step: int) -> int | None:
        """Return the step whose weights the models have, where `step` steps have ended: the next
        one if it had its update. Return None where updates are not seen."""
        return step + self.has_updated if self._optimizers else None

    def end_step(self) -> None:
        """Called behind each step. Note whether the step had an update, and warn if gradients are
        kept over it."""
        has_updated, self.has_updated, self._epoch_amid_step = self.has_updated, False, None
        if not self._steps_left:
            return
        self._steps_left -= 1
        is_without = self._had_update and not has_updated
        self._had_update = self._had_update or has_updated
        weights = (weight for one in self._optimizers for weight in parameters_of(one))
        if is_without and any(weight.grad is not None for weight in weights):
            self._steps_left = 0
            scales = any(scaler.is_enabled() for scaler in find_living(GradScaler))
            if not scales:  # a scaler leaves out a step now and then
                self._warn(
                    "WARNING: run.step without an optimizer's step: a resume loses gradients that"
                    " are kept over it; run.loader(…, accumulate=N) has N batches for a step, and"
                    " run.ends_step"
                )


def _find_untracked(within: Collection[Any]) -> list[str]:
    """Return, sorted, the kind and class name, as ``a scheduler, StepLR``, of each object that
    `warn_of_untracked` warns of; `within` are the tracked objects and what they hold."""
    numbers = set(map(id, within))
    modules = [thing for thing in within if isinstance(thing, torch.nn.Module)]
    numbers |= {id(part) for module in modules for part in module.modules()}
    states = {id(getattr(thing, "state", None)) for thing in within}
    weights = _parameters_of(within)
    nouns = []
    for thing in find_living(Optimizer, LRScheduler, AveragedModel, GradScaler):
        if isinstance(thing, AveragedModel):
            noun, is_missing = "an average", True
        elif isinstance(thing, GradScaler):
            is_used = getattr(thing, "_scale", thing) is not None  # the first loss makes it
            noun, is_missing = "a scaler", is_used and thing.is_enabled()
        elif isinstance(thing, LRScheduler):
            noun, is_missing = "a scheduler", id(getattr(thing, "optimizer", None)) in numbers
        else:
            state = getattr(thing, "state", None)  # a class may have none
            is_ours = bool(state) and any(id(weight) in weights for weight in parameters_of(thing))
            noun, is_missing = "an optimizer", is_ours and id(state) not in states
        if is_missing and id(thing) not in numbers:
            nouns.append(f"{noun}, {type(thing).__name__}")
    return sorted(nouns)


def find_living(*kinds: type) -> list[Any]:
    """Return the objects of this process whose class is one of `kinds` or derived from one. It
    takes 0.1 s for a million objects."""
    classes: list[type] = list(kinds)
    for kind in classes:  # the list grows meanwhile
        classes += type.__subclasses__(kind)
    numbers = set(map(id, classes))  # not all classes can be hashed
    # `type`, and not isinstance, since a proxy that is asked for its class may warn.
    return [thing for thing in gc.get_objects() if id(type(thing)) in numbers]


def _find_module_with(parameters: Collection[torch.Tensor]) -> torch.nn.Module | None:
    """Return a module of this process that has one of `parameters` itself, not by a submodule;
    None if there is none."""
    numbers = set(map(id, parameters))
    modules: list[torch.nn.Module] = find_living(torch.nn.Module) if numbers else []
    parts = ((module, vars(module).get("_parameters", {}).values()) for module in modules)
    return next((m for m, direct in parts if not numbers.isdisjoint(map(id, direct))), None)


def _parameters_of(things: Iterable[Any]) -> set[int]:
    """Return the ids of the parameters of the modules among some things."""
    modules = (thing for thing in things if isinstance(thing, torch.nn.Module))
    return {id(parameter) for module in modules for parameter in module.parameters()}


def _objects_within(objects: Iterable[Any]) -> Iterator[Any]:
    """Yield objects, without wrappers, and what they hold by attributes, dicts, lists and tuples,
    each once. The search is `LEVELS` deep; of a level the first `MOST_PARTS` count. An optimizer's
    attributes `OF_WEIGHTS` are passed over. Modules and functions are yielded without their parts;
    tensors, texts and classes not at all."""
    level, visited = list(map(unwrap, objects)), set[int]()
    for _ in range(LEVELS):
        parts: list[Any] = []
        for thing in level:
            if id(thing) in visited or isinstance(thing, (torch.Tensor, str, bytes, type)):
                continue
            visited.add(id(thing))
            yield thing
            if isinstance(thing, dict):
                parts += thing.values()
            elif isinstance(thing, (list, tuple)):
                parts += thing
            elif not isinstance(thing, (torch.nn.Module, ModuleType, FunctionType)):
                left_out = OF_WEIGHTS if isinstance(thing, Optimizer) else ()
                attributes = getattr(thing, "__dict__", {}).items()
                parts += [part for key, part in attributes if key not in left_out]
        level = list(map(unwrap, parts[:MOST_PARTS]))
