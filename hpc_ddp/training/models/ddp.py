"""Kernels and buckets of a model under DistributedDataParallel that resume bit for bit."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.devices import is_accelerator


def compile_for_resume(model: torch.nn.Module) -> None:
    """Compile a model in place, so that a resumed process computes with the same kernels.

    The first forward with a shape compiles. A torch without the option ``deterministic`` compiles
    without it.
    """
    # Static shapes: a kernel for any shape, made at the epoch's shorter last batch, would take over
    # from then on. Deterministic: kernels that are chosen by their speed add up in other orders.
    can = hasattr(importlib.import_module("torch._inductor.config"), "deterministic")
    model.compile(dynamic=False, options={"deterministic": True} if can else None)


def with_sync_batchnorm(
    model: torch.nn.Module,
    device: torch.device,
    group: dist.ProcessGroup | None,
    say: Callable[[str], None],
) -> torch.nn.Module:
    """Return a model whose batch norms, on an accelerator, take their statistics over a group, the
    default one for None; on a CPU `say` is called, and the model stays as it is.

    Raise UsageError for a class that is derived of a batch norm and has a forward of its own: torch
    would put a plain batch norm in its place.
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
    """Uses every parameter once; its gradients are zero and arrive last parameter first. DDP
    expects sparse ones of the weights whose ids are in `sparse`."""

    def __init__(self, parameters: list[torch.nn.Parameter], sparse: Container[int]) -> None:
        super().__init__()
        self._parameters_of_model = tuple(parameters)  # a tuple, so nothing is registered
        self._sparse = sparse

    def forward(self, _: None) -> torch.Tensor:
        """Return 0 as a sum over all parameters; the argument is ignored."""
        first, *later = self._parameters_of_model
        total = self._zero(first)
        for parameter in later:
            # autograd runs later nodes first: this term's before those of the terms so far
            total = total + self._zero(parameter).to(total)
        return total

    def _zero(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return 0, a real scalar, whose backward gives the parameter a gradient of zeros."""
        numbers: torch.Tensor = parameter
        if id(parameter) in self._sparse:
            row = torch.zeros(1, dtype=torch.int64, device=parameter.device)
            numbers = torch.nn.functional.embedding(row, parameter, sparse=True)
        return (torch.view_as_real(numbers) if numbers.is_complex() else numbers).sum() * 0


@contextmanager
def _without_hooks(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Take the hooks of parameters away inside the block: one may be an optimizer's step."""
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


def fix_bucket_order(ddp: DistributedDataParallel) -> None:
    """Run one forward and backward of `ddp` that changes nothing but the packing of gradients.

    DDP packs gradients into buckets, and after the first backward of every process packs them
    anew in the order in which they arrived. A resumed process so takes its first step with the
    first packing, where the undisturbed run had the second, and from three ranks on the same
    numbers added in another order give other bits. So every process, the first one too, has its
    "first backward" before training: on a stand-in whose gradients are zero and arrive in an
    order that depends on nothing but the model.

    All ranks must call it. Leaves parameters, buffers, generators as they are and gradients
    None, and calls no hooks of parameters. Does nothing under ``static_graph``, which would take
    the stand-in's graph for the model's: such a run is equal to an undisturbed one up to rounding
    only. Raises UsageError for embeddings with sparse gradients where the group's backend, as
    NCCL, adds up dense ones only.
    """
    if ddp.static_graph:
        return
    parameters = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
    model: Any = ddp.module
    syncs = ddp.broadcast_buffers
    sparse = _sparse_embeddings(model)
    ddp.module = _StandIn(parameters, sparse)
    ddp.broadcast_buffers = False  # it would look for them in the stand-in, which has none
    try:
        # With device_ids, DDP takes the first of the arguments that it has moved there.
        with _without_hooks(parameters):
            ddp(None).backward()
    except RuntimeError as error:
        if not sparse or "sparse" not in str(error):
            raise
        raise UsageError(
            f"the gradients of {', '.join(sparse.values())} are sparse, and the backend of this"
            " device adds up dense ones only",
            hint="take nn.Embedding with sparse=False, or start(backend='gloo')",
        ) from error
    finally:
        ddp.module, ddp.broadcast_buffers = model, syncs
    for parameter in parameters:
        parameter.grad = None


def set_averaging(model: Any, on: bool) -> None:
    """Choose whether the gradients of a model's coming backward are averaged: by DDP, and over the
    replicas of a sharded one. FSDP2 shards them in each: whole ones, which it would add up
    otherwise, need the memory that sharding is to save.

    For DDP by the flag of its `no_sync`, which counts in forward already. Under ``static_graph``
    the first backward's are averaged in any case, since torch records the graph in it: what
    accumulates is the same up to rounding.
    """
    if hasattr(model, "set_requires_all_reduce"):  # FSDP2
        model.set_requires_all_reduce(on)
        return
    is_recorded = not model.static_graph or model._static_graph_delay_allreduce_enqueued
    model.require_backward_grad_sync = on or not is_recorded
