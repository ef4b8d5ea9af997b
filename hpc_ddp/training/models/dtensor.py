"""DTensors, as FSDP2 and tensor parallelism shard them, and norms over ranks.

Importing DTensor takes a second: it is used only where a script has loaded it already.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Container, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_, get_total_norm

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.training.checkpoint.storage.layout import Box, MeshCut, cut_box
from hpc_ddp.training.devices import sum_type
from hpc_ddp.training.models.mesh import ParallelDims


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor; False where DTensor was never imported."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def gather_whole(value: Any) -> Any:
    """Return a tensor without its graph; a DTensor as a whole, plain tensor, which is a collective
    of its ranks. Return other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    plain: Any = value.detach()
    return plain.full_tensor() if is_sharded(plain) else plain


def fsdp_modules(model: torch.nn.Module) -> list[Any]:
    """Return the modules of a model that FSDP2 gathers, one at a time; [] for a model that FSDP2
    has not sharded."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if not fsdp:
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def reshard(model: torch.nn.Module) -> None:
    """Give a model that FSDP2 has sharded its shards as parameters again; any other model stays as
    it is.

    After a forward without a backward, as in an evaluation, the outermost module has the gathered
    parameters, which no optimizer knows.
    """
    for module in fsdp_modules(model):
        module.reshard()


def local_box(tensor: Any) -> Box:
    """Return start and size of this rank's part in a DTensor, each with a number per dimension; on
    a rank outside of the mesh the part is empty."""
    return _box_and_cuts(tensor.shape, tensor.device_mesh, tensor.placements)[0]


def cuts_of(tensor: Any) -> tuple[MeshCut, ...]:
    """Return the cuts that give this rank's part of a DTensor, in the order in which they are made.
    The result is () where nothing is cut, where torch does not cut as ``torch.chunk``, and on a
    rank outside of the mesh."""
    return _box_and_cuts(tensor.shape, tensor.device_mesh, tensor.placements)[1]


@lru_cache(maxsize=1 << 16)  # asked for each tensor at each save
def _box_and_cuts(
    shape: torch.Size, mesh: Any, placements: tuple[Any, ...]
) -> tuple[Box, tuple[MeshCut, ...]]:
    """Return the part of a DTensor that this rank has, as a box, and the cuts that `cuts_of`
    returns. Both are cached."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, start = compute_local_shape_and_global_offset(shape, mesh, placements)
    box = tuple(start), tuple(size)
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # a rank outside of the mesh has nothing
        return box, ()
    # FSDP2 cuts after tensor parallelism, although its dimension of the mesh comes first.
    is_last = [isinstance(placement, _strided_shard()) for placement in placements]
    cuts = tuple(
        MeshCut(placements[axis].dim, mesh.size(axis), coordinate[axis], (mesh, axis))
        for axis in sorted(range(len(placements)), key=is_last.__getitem__)  # False before True
        if placements[axis].is_shard() or is_last[axis]
    )
    # Not so where torch's cuts are no chunks. An empty part has no start that counts.
    start, size = cut_box(tuple(shape), (cut[:3] for cut in cuts))
    gives_box = size == box[1] and (start == box[0] or 0 in size)
    return box, cuts if gives_box else ()


@cache
def _strided_shard() -> Any:
    """Return torch's class of a shard that FSDP2 cuts after tensor parallelism; imported late,
    since the import of DTensor takes a second."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard


def place_among_copies(tensor: Any, dims: ParallelDims) -> tuple[int, int] | None:
    """Return this rank's number among the ranks of its stage that hold the same part of a DTensor,
    and the count of these ranks; None if this rank's part does not count.

    All ranks of a stage, which `dims` knows, have the tensor, on one mesh or on several, each of
    which has all of the tensor. Only the mesh that has the stage's first rank counts. Raise
    HpcDdpError for a tensor with a pending reduction.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise HpcDdpError("a tensor with a pending reduction (Partial) can't be saved")
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or dims.stage_first not in _ranks_of(mesh):
        return None
    number, count = 0, 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            number = number * mesh.size(axis) + coordinate[axis]
            count *= mesh.size(axis)
    return number, count


def holds_first_copy(tensor: Any, dims: ParallelDims) -> bool:
    """Return whether this rank is the first of the ranks that hold its part of a DTensor; False if
    the part does not count. Raise HpcDdpError for a tensor with a pending reduction."""
    place = place_among_copies(tensor, dims)
    return place is not None and place[0] == 0


class CopyGroup(NamedTuple):
    """A process group whose ranks have the same part of a DTensor."""

    group: Any
    first: int  # the group's first rank, counted over all ranks
    is_first: bool  # whether this rank is that one


def copies_of(tensor: Any) -> list[CopyGroup]:
    """Return this rank's process groups whose ranks have the same part of a DTensor: one group for
    each dimension of the mesh that replicates the tensor over several ranks."""
    mesh = tensor.device_mesh
    groups = [
        mesh.get_group(axis)
        for axis, placement in enumerate(tensor.placements)
        if placement.is_replicate() and mesh.size(axis) > 1
    ]
    firsts = [dist.get_global_rank(group, 0) for group in groups]
    return [
        CopyGroup(group, first, first == dist.get_rank())
        for group, first in zip(groups, firsts, strict=True)
    ]


def local_copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, int]]:
    """Return this rank's part of each DTensor among `tensors` of which other ranks have a copy,
    with a weight, by ``NAME at START``.

    The weight is -1, but on the first rank with the part it is the number of the other ranks. So
    the weights of all copies of a part add up to 0, and so do values times weights if the values
    are equal.
    """
    copies: dict[str, tuple[torch.Tensor, int]] = {}
    for name, tensor in tensors.items():
        if groups := copies_of(tensor) if is_sharded(tensor) else []:
            sharded: Any = tensor
            count = math.prod(group.size() for group, _, _ in groups)  # copies of this part
            weight = count - 1 if all(is_first for _, _, is_first in groups) else -1
            copies[f"{name} at {local_box(tensor)[0]}"] = sharded.to_local().detach(), weight
    return copies


def make_copies_equal(model: torch.nn.Module, device: torch.device) -> None:
    """Overwrite this rank's part of each parameter that is a DTensor with the numbers of the first
    rank that has the same part; they travel on `device`. Buffers stay as they are. All ranks call
    it; raise RuntimeError if a peer is gone."""
    for parameter in model.parameters():
        if not is_sharded(parameter):
            continue
        sharded: Any = parameter.detach()
        part = sharded.to_local()
        if not part.numel():
            continue
        for group, first, _ in copies_of(parameter):
            buffer = part.to(device).contiguous()
            # As bytes: a backend refuses some types of numbers.
            dist.broadcast(buffer.view(-1).view(torch.uint8), first, group)
            if buffer.data_ptr() != part.data_ptr():  # `to` or `contiguous` has made a copy
                part.copy_(buffer)


@lru_cache(maxsize=64)  # there are few meshes, and thousands of tensors
def _ranks_of(mesh: Any) -> frozenset[int]:
    """Return the global ranks of a DeviceMesh."""
    return frozenset(mesh.mesh.flatten().tolist())


def finish_reduction(tensor: Any) -> torch.Tensor:
    """Return a gradient as it is; but a DTensor with a pending reduction (Partial) as a copy for
    which the reduction is done, which is a collective."""
    if not is_sharded(tensor) or not any(placement.is_partial() for placement in tensor.placements):
        gradient: torch.Tensor = tensor
        return gradient
    from torch.distributed.tensor import Replicate

    full = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    gradient = tensor.redistribute(placements=full)
    return gradient


def split_mixed_groups(optimizer: torch.optim.Optimizer) -> None:
    """Register hooks of an optimizer that split, for the time of a step, each parameter group with
    DTensors and plain tensors in two. A group for which the script has set ``foreach`` or ``fused``
    stays whole.

    On accelerators torch's optimizers pass all tensors of a group to one call (foreach), which
    refuses a mixture of both kinds. Tensor parallelism leaves a mixture, since its plan names only
    the layers that are cut. One call for each tensor takes several times as long. The groups are
    split for the step only: a checkpoint may be loaded again where there is no mixture.
    """
    # By a group's id and its size, since parameters may be added to a group.
    mixed: dict[tuple[int, int], bool] = {}
    # During a step: each group, and the groups that stand in its place.
    parts: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []

    def is_mixed(group: dict[str, Any]) -> bool:
        """Return whether a group has both DTensors and plain tensors."""
        key = id(group), len(group["params"])
        if key not in mixed:
            mixed[key] = len(set(map(is_sharded, group["params"]))) == 2
        return mixed[key]

    def split_groups(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Replace each mixed group that leaves the choice of ``foreach`` to torch by two groups."""
        join_groups(optimizer)  # after a step that has raised an error: its hook was not called
        groups = optimizer.param_groups
        if not any(map(is_mixed, groups)):
            return
        for group in groups:
            # None is torch's default for ``foreach``.
            is_open = group.get("foreach", False) is None and not group.get("fused")
            parts.append((group, _split_group(group) if is_open and is_mixed(group) else [group]))
        groups[:] = [part for _, of_group in parts for part in of_group]

    def join_groups(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Put the groups back, with the settings that the step has left in their first parts."""
        for group, of_group in parts:
            group.update({key: v for key, v in of_group[0].items() if key != "params"})
        if parts:
            optimizer.param_groups[:] = [group for group, _ in parts]
        parts.clear()

    optimizer.register_step_pre_hook(split_groups)
    optimizer.register_step_post_hook(join_groups)


def make_dtensor(local: torch.Tensor, template: Any) -> torch.Tensor:
    """Return a DTensor with `local` as this rank's part, sharded as the DTensor `template` is.

    `local` stays on its device. `DTensor.from_local` would move it to the mesh's device, which may
    have no room for parts that FSDP2 keeps on the CPU.
    """
    from torch.distributed.tensor import DTensor

    make: Any = DTensor
    sharded: torch.Tensor = make(local, template._spec, requires_grad=False)
    return sharded


# -- norms of tensors that lie on several ranks --------------------------------------------


def clip_gradients(
    parameters: Sequence[torch.Tensor],
    limit: float,
    dims: ParallelDims,
    device: torch.device,
    private: Container[int] = (),
) -> torch.Tensor:
    """Scale the gradients down, in place, if their 2-norm over all ranks is above `limit`; return
    the norm before that, a scalar. Parameters without a gradient are passed over. `private` has the
    ids of parameters of which each rank has its own; `dims` is this rank's place, and `device` the
    one on which the ranks add up.

    It is a collective with private or sharded parameters, or with pipeline stages. Else the norm is
    that of this rank's gradients, which are the same on all ranks.
    """
    if not private and not _is_spread(parameters, dims):
        return clip_grad_norm_(parameters, limit)
    with_grads = [(id(one), one.grad) for one in parameters if one.grad is not None]
    grads = [grad for _, grad in with_grads]
    private_grads = {id(grad) for number, grad in with_grads if number in private}
    norm = _norm_over_ranks([finish_reduction(grad) for grad in grads], dims, device, private_grads)
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)  # torch's own clipping adds 1e-6, too
    # Scaled are `grads`, not the copies that `finish_reduction` returns of some.
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in map(_local_part, grads):
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    # The factor is copied once for each place and type: the host waits for a copy to the CPU, where
    # offloaded gradients are.
    for (place, dtype), local_grads in groups.items():
        torch._foreach_mul_(local_grads, factor.to(place, dtype))
    return norm


def total_norm(
    tensors: Sequence[torch.Tensor], dims: ParallelDims, device: torch.device
) -> torch.Tensor:
    """Return the 2-norm of all tensors of all ranks, each counted once: a scalar, equal on all
    ranks; 0 without tensors. `dims` and `device` are as in `clip_gradients`.

    It is a collective with sharded tensors or pipeline stages. Else this rank's tensors are assumed
    to be the same on all ranks. Raise HpcDdpError for a DTensor with a pending reduction.
    """
    if not _is_spread(tensors, dims):
        return _norm_here(tensors)
    return _norm_over_ranks(tensors, dims, device)


def _is_spread(tensors: Sequence[torch.Tensor], dims: ParallelDims) -> bool:
    """Return whether parts of the tensors, or tensors of other stages, lie on other ranks."""
    return dims.pp > 1 or any(map(is_sharded, tensors))


def _norm_over_ranks(
    tensors: Sequence[torch.Tensor],
    dims: ParallelDims,
    device: torch.device,
    private: Container[int] = (),
) -> torch.Tensor:
    """Return the 2-norm over all ranks, a scalar on `device`; it is a collective. Raise HpcDdpError
    for a DTensor with a pending reduction.

    Each rank adds up the tensors of which it has the first copy, and those whose ids are in
    `private`. Only one number of each rank travels.
    """
    counted = (one for one in tensors if id(one) in private or _is_counted_here(one, dims))
    first_copies = [_local_part(tensor) for tensor in counted]
    filled = [tensor for tensor in first_copies if tensor.numel()]
    norm = _norm_here(filled) if filled else torch.zeros((), dtype=torch.float32, device=device)
    square = norm.to(device, sum_type(device)) ** 2
    dist.all_reduce(square)
    return square.sqrt().float()


def _norm_here(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of plain tensors, a scalar; 0 without tensors. For fp16 tensors it is
    computed in fp32, since the largest number in fp16 is 65504."""
    fp16, wider = list[torch.Tensor](), list[torch.Tensor]()
    for tensor in tensors:
        (fp16 if tensor.dtype == torch.float16 else wider).append(tensor)
    if not fp16:
        return get_total_norm(wider)
    norms = torch._foreach_norm(fp16, 2, dtype=torch.float32)
    return get_total_norm([*norms, *([get_total_norm(wider).float()] if wider else [])])


def _is_counted_here(tensor: torch.Tensor, dims: ParallelDims) -> bool:
    """Return whether this rank counts a tensor in a norm over ranks: it is the first of the ranks
    of its stage with this tensor, or with this part of a DTensor. Raise HpcDdpError for a DTensor
    with a pending reduction."""
    return holds_first_copy(tensor, dims) if is_sharded(tensor) else dims.stage_rank == 0


def _local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor, or a plain tensor, without its graph."""
    local: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return local.detach()


def _split_group(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Return two groups with the settings of an optimizer's group: one of its DTensors, and one of
    its plain tensors."""
    kinds: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for parameter in group["params"]:
        kinds[is_sharded(parameter)].append(parameter)
    return [{**group, "params": parameters} for parameters in kinds.values()]
