"""Kernels and buckets of a model under DistributedDataParallel that resume bit for bit."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.devices import is_accelerator
from hpc_ddp.training.models.tracked_objects import LivingModels

PACKING = "_hpc_ddp_packing"  # an attribute of a model's DDP
MOST_SHAPES = 64  # the most shapes of batches for which a compiled model has kernels of their own


def compile_for_resume(model: torch.nn.Module) -> None:
    """Compile a model in place, so that a resumed process computes with the same kernels.

    The first forward with a shape compiles, up to `MOST_SHAPES` shapes: torch's limit of
    recompilations is raised to this number for the process. A torch without the option
    ``deterministic`` compiles without it.
    """
    # Static shapes: a kernel for any shape, made at the epoch's shorter last batch, would take over
    # from then on. Deterministic: kernels that are chosen by their speed add up in other orders.
    config = importlib.import_module("torch._inductor.config")
    options: dict[str, Any] | None = None
    if hasattr(config, "deterministic"):
        options = {"deterministic": True}
    # Beyond the limit torch computes eagerly: for other shapes in a resumed process, which may meet
    # the shapes in another order.
    dynamo: Any = importlib.import_module("torch._dynamo.config")
    dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_SHAPES)
    model.compile(dynamic=False, options=options)


def convert_to_sync_batchnorm(
    model: torch.nn.Module,
    device: torch.device,
    group: dist.ProcessGroup | None,
    say: Callable[[str], None],
) -> torch.nn.Module:
    """Replace a model's batch norms, in place, by ones that take their statistics over the ranks of
    a group, the default one for None. Return the model, or what replaces it if it is a batch norm
    itself. On a CPU change nothing, and call `say` with a message.

    Raise UsageError for a part whose class is derived from a batch norm and has a forward of its
    own: torch would put a plain batch norm in its place.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and not type(module).forward.__module__.startswith(
            "torch.nn."
        ):
            raise UsageError(
                f"sync_batchnorm=True would replace {name}, a {type(module).__name__}, by a batch"
                " norm alone: what else its forward does, as an activation, would be lost",
                hint="timm.layers.convert_sync_batchnorm(model) before run.wrap(model), without"
                " sync_batchnorm",
            )
    if not is_accelerator(device):
        say("sync_batchnorm is off: torch has it for GPUs only")
        return model
    convert: Any = torch.nn.SyncBatchNorm.convert_sync_batchnorm
    converted: torch.nn.Module = convert(model, group)
    return converted


class _StandIn(torch.nn.Module):
    """A module whose forward uses every one of some parameters once; in the backward the gradients
    are zero, and arrive in the reverse order of `parameters`. Parameters whose ids are in `sparse`
    get sparse gradients, as DDP expects."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], sparse: Container[int]) -> None:
        super().__init__()
        self._parameters_of_model = tuple(parameters)  # a tuple, so nothing is registered
        self._sparse = sparse

    def forward(self, _: None) -> torch.Tensor:
        """Return 0 as a sum over all parameters; the argument is ignored."""
        first, *later = self._parameters_of_model
        total = self._zero(first)
        for parameter in later:
            # autograd runs later nodes first: this term's before those of the terms before it
            total = total + self._zero(parameter).to(total)
        return total

    __call__ = forward  # so that hooks of all modules, as a profiler's, are not called

    def _zero(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return 0, a real scalar, whose backward gives the parameter a gradient of zeros."""
        numbers: torch.Tensor = parameter
        if id(parameter) in self._sparse:
            row = torch.zeros(1, dtype=torch.int64, device=parameter.device)
            numbers = torch.nn.functional.embedding(row, parameter, sparse=True)
        return (torch.view_as_real(numbers) if numbers.is_complex() else numbers).sum() * 0


@contextmanager
def _suspend_hooks(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """A context in which parameters have no hooks, which may be an optimizer's step; at its end
    they have them again."""
    names = "_backward_hooks", "_post_accumulate_grad_hooks"
    tables = [getattr(parameter, name, None) for parameter in parameters for name in names]
    hooks = [(table, dict(table)) for table in tables if table]
    for table, _ in hooks:
        table.clear()
    try:
        yield
    finally:
        for table, entries in hooks:
            table.update(entries)


def _sparse_embeddings(model: torch.nn.Module) -> dict[int, str]:
    """Return the names of embeddings with ``sparse=True``, by the ids of their weights."""
    kinds = torch.nn.Embedding, torch.nn.EmbeddingBag
    named = ((name, one) for name, one in model.named_modules() if isinstance(one, kinds))
    return {id(embedding.weight): name for name, embedding in named if embedding.sparse}


def check_sparse_gradients(model: torch.nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise UsageError if a model has embeddings with sparse gradients, and the backend of a group,
    the default one for None, adds up only dense ones on their device, as NCCL does. A sum of one
    sparse number over the ranks shows it, so all ranks must call this."""
    names = _sparse_embeddings(model)
    sparse = [w for w in model.parameters() if id(w) in names and w.requires_grad]
    try:
        for weight in sparse[:1]:  # one, if there is any
            zero = torch.zeros(1, dtype=weight.dtype, device=weight.device)
            dist.all_reduce(zero.to_sparse(), group=group)
    except RuntimeError as error:
        raise UsageError(
            f"the gradients of {', '.join(names[id(weight)] for weight in sparse)} are sparse, and"
            " the backend of this device adds up dense ones only",
            hint="take nn.Embedding with sparse=False, or start(backend='gloo')",
        ) from error


def _averaged_parameters(ddp: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """Return the parameters whose gradients a model's DDP averages, in the order of definition."""
    named = ddp.module.named_parameters()
    ignored = ddp.parameters_to_ignore
    return [weight for name, weight in named if weight.requires_grad and name not in ignored]


def fix_bucket_order(
    ddp: DistributedDataParallel,
    arriving: Sequence[torch.nn.Parameter] = (),
) -> None:
    """Have DDP pack gradients in the order of `arriving`, from the next backward on. `arriving` has
    all the parameters that `ddp` was made with; if it is empty, the order is the reverse order of
    definition.

    It runs one forward and backward of `ddp`, whose gradients are zero and arrive in this order:
    all ranks must call it. Parameters, buffers and generators stay as they are, gradients are None
    afterwards, and no hooks of parameters are called. Does nothing under ``static_graph``.
    """
    if ddp.static_graph:
        return
    parameters = arriving or _averaged_parameters(ddp)[::-1]
    model: Any = ddp.module
    syncs = ddp.broadcast_buffers
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    ddp.module = _StandIn(parameters[::-1], _sparse_embeddings(model))
    ddp.broadcast_buffers = False  # DDP would look for them in the stand-in, which has none
    try:
        for parameter in frozen:  # after `ddp` was made: DDP waits for their gradients, too
            parameter.requires_grad_(True)
        with _suspend_hooks(parameters):
            forward: Any = ddp.forward  # a call of `ddp` would have hooks, and may be compiled
            forward(None).backward()  # None, since with device_ids DDP needs an argument to move
    finally:
        ddp.module, ddp.broadcast_buffers = model, syncs
        for parameter in frozen:
            parameter.requires_grad_(False)
    for parameter in parameters:
        parameter.grad = None


class _Packing:
    """The parameters whose gradients a model's DDP averages, also if they are frozen later. The
    keys of `arrived` are their indices, in the order in which their gradients have arrived so far.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.parameters = _averaged_parameters(ddp)
        self.arrived: dict[int, None] = {}

    @property
    def order(self) -> list[int]:
        """The indices of all parameters in the order of arrival, [] while it is not known."""
        return [*self.arrived] if len(self.arrived) == len(self.parameters) else []

    def fix_order(self, ddp: DistributedDataParallel, order: Sequence[int]) -> bool:
        """Have DDP pack gradients in `order`, set the gradients to None (`fix_bucket_order`), and
        return True: a collective, which raises RuntimeError if a peer is gone. Do nothing and
        return False if `order` is no permutation of this model's indices, or is empty. `ddp` is one
        that packs anew (`_packs_anew`)."""
        if not order or sorted(order) != [*range(len(self.parameters))]:
            return False
        fix_bucket_order(ddp, [self.parameters[number] for number in order])
        self.arrived = dict.fromkeys(order)
        return True

    def note_arrivals(self, ddp: DistributedDataParallel) -> None:
        """Register hooks that note the order of arrival in the next backward that DDP averages. At
        the end of this backward the hooks remove themselves. A backward counts only if a forward of
        `ddp` with averaging comes before it: DDP does not see a training of the plain module."""
        handles: list[RemovableHandle] = []
        # The hooks refer to nothing that holds the parameters: Python's collector does not see
        # hooks of a tensor, so a model without a backward would never be freed.
        wrapper, arrived = weakref.ref(ddp), self.arrived

        def note(number: int, _: torch.Tensor) -> None:
            """Note that the gradient of parameter `number` has arrived, if the backward counts; at
            the last one, or if the model is gone, remove the hooks."""
            model: Any = wrapper()
            # A forward of DDP sets both: the second one to whether the backward averages.
            if model is not None and not (
                model._lazy_init_ran and model.require_forward_param_sync
            ):
                return
            arrived[number] = None
            if model is None or len(arrived) == len(handles):
                for handle in handles:
                    handle.remove()

        parameters: list[Any] = self.parameters
        for number, parameter in enumerate(parameters):
            handles.append(parameter.register_post_accumulate_grad_hook(partial(note, number)))


class BucketOrders:
    """Has the DDP models of a run pack gradients alike in each attempt.

    DDP packs gradients into buckets, and after the first backward of every process packs them
    anew, in the order in which they have arrived. So a resumed process would take its first step
    with the first packing, where the undisturbed run had the second; and from three ranks on the
    same numbers, added in another order, give other bits. So the order is noted in the run's first
    backward with averaging, and kept in the run's checkpoints; a process that resumes has its
    "first backward" before it trains, on a stand-in whose gradients arrive in this order.

    Models are known by their number, in the order in which they were added, without those that the
    script has let go. With ``find_unused_parameters`` DDP packs nothing anew. Under
    ``static_graph`` DDP would take the stand-in's graph for the model's: such a resumed run is
    equal to an undisturbed one up to rounding only.
    """

    def __init__(self) -> None:
        self._models = LivingModels[DistributedDataParallel]()
        self._loaded: Sequence[Sequence[int]] = ()  # the orders of `load`

    def add(self, ddp: DistributedDataParallel) -> None:
        """Add a model, which gets the next number. If DDP packs its gradients anew (`_packs_anew`),
        fix the order that was loaded for this number: a collective, which sets the gradients to
        None. Without a loaded order that fits the model, have the order noted in its first backward
        with averaging. Raise RuntimeError if a peer is gone."""
        packing = vars(ddp)[PACKING] = _Packing(ddp)  # as the model's, to be freed with it
        self._models.add(ddp)
        if self._loaded:
            self._free_dead_models()
        number = len(self._models) - 1
        order = self._loaded[number] if number < len(self._loaded) else ()
        if _packs_anew(ddp) and not packing.fix_order(ddp, order):
            packing.note_arrivals(ddp)

    def check_steps_are_even(self) -> None:
        """Raise UsageError as the function of this name does, for the models added."""
        check_steps_are_even(self._models)

    def clear(self) -> None:
        """Forget the models: others will be added in their place."""
        self._models.clear()

    def load(self, orders: Sequence[Sequence[int]]) -> None:
        """Keep `orders`, which `values` has returned in an earlier attempt, for models that will be
        added, and fix the orders of the models that were added already: a collective, which sets
        the gradients of these models to None. Raise RuntimeError if a peer is gone."""
        self._loaded = orders
        self._free_dead_models()
        for ddp, order in zip(self._models, orders, strict=False):
            if _packs_anew(ddp):
                vars(ddp)[PACKING].fix_order(ddp, order)

    def _free_dead_models(self) -> None:
        """Have Python free models that the script has let go: they may live on some of the ranks,
        where the models behind them would have other numbers."""
        if len(self._models) > 1:
            gc.collect()

    def values(self) -> list[list[int]]:
        """Return the order of each model, in the order of `add`: the indices of its parameters as
        their gradients arrive, [] while that is not known."""
        return [vars(ddp)[PACKING].order for ddp in self._models]


def _packs_anew(ddp: DistributedDataParallel) -> bool:
    """Return whether DDP, made with its present options, packs gradients anew after the first
    backward, in the order of their arrival."""
    return not (ddp.static_graph or ddp.find_unused_parameters)


def check_steps_are_even(models: Iterable[Any]) -> None:
    """Raise UsageError if one of `models` is, or has been, in a ``join`` of DDP's, in which ranks
    may have different numbers of steps: saves and stops are agreed on by the number of the step."""
    for model in models:
        config = getattr(model, "_join_config", None)
        if config is not None and config.enable:
            raise UsageError(
                "a step ends with a model in model.join(), in which ranks may have other numbers of"
                " steps; accepted: as many on all ranks",
                hint="run.loader, or Accelerate's even_batches=True: as many batches on each rank",
            )


def set_averaging(model: Any, on: bool) -> None:
    """Choose whether a model's next backward averages gradients, `on`, or not: over ranks by DDP,
    or over the replicas of a model that FSDP2 has sharded. Call it before the forward. FSDP2 shards
    gradients in each backward in any case: whole ones would need the memory that sharding saves.

    For DDP it sets the flag of `no_sync`. Under ``static_graph`` the gradients of the first
    backward are averaged in any case, since torch records the graph in it: the accumulated
    gradients are the same up to rounding.
    """
    if hasattr(model, "set_requires_all_reduce"):  # FSDP2
        model.set_requires_all_reduce(on)
        return
    is_recorded = not model.static_graph or model._static_graph_delay_allreduce_enqueued
    model.require_backward_grad_sync = on or not is_recorded
