"""Models over several ranks with torch's own means: FSDP2, tensor and pipeline parallel.

Imported only where a script asks for one of them: the import of torch's parts takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import _random
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import UsageError
from hpc_ddp.training import devices
from hpc_ddp.training.checkpoint.state import unwrap
from hpc_ddp.training.models.dtensor import is_sharded, make_copies_equal
from hpc_ddp.training.models.evaluation import in_eval_mode
from hpc_ddp.training.models.mesh import ParallelDims
from hpc_ddp.training.models.meta import Init, materialize

if TYPE_CHECKING:
    from hpc_ddp.training.models.setup import ModelSetup

SCHEDULES = ("GPipe", "1F1B")  # torch's schedules with one stage on each rank
MOST_SCHEDULES = 3  # kept at a time: for batches of a usual shape, and for an epoch's last one
# Methods of a group's backend: of Gloo and NCCL; of NCCL in torch 2.15.
SET_TIMEOUT = ("_set_default_timeout", "set_timeout")


def make_mesh(dims: ParallelDims, device: torch.device, timeout: timedelta) -> DeviceMesh:
    """Return torch's mesh of the run's ranks, with the dimensions of `Run.mesh`, for tensors on
    `device`. All ranks call it at the same time, since it makes process groups.

    The mesh's groups and the default group get the `timeout` of the run's collectives; rank 0
    prints a message where a backend accepts none. On accelerators DTensor's random generator is
    replaced for the process.
    """
    sizes = {"pp": dims.pp, "dp": dims.dp, "tp": dims.tp}
    if dims.replicas > 1:
        sizes = {"pp": dims.pp, "replica": dims.replicas, "shard": dims.shards, "tp": dims.tp}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    groups = [mesh.get_group(name) for name in sizes]
    if dims.replicas > 1:
        groups.append(mesh["replica", "shard"]._flatten("dp").get_group())
    if devices.is_accelerator(device):
        # torch would make it at the first random operation on a DTensor, and give all ranks rank
        # 0's random numbers by a broadcast. Stages without such an operation never join this
        # broadcast, and a resumed run repeats it in the midst of its numbers. Ranks that share a
        # layer have the same seed from `Run.epochs`.
        _random._rng_tracker = _Tracker(device)
    _set_timeouts([dist.group.WORLD, *groups], device, timeout, dims.rank)
    return mesh


def _set_timeouts(
    groups: Sequence[Any], device: torch.device, timeout: timedelta, rank: int
) -> None:
    """Set the timeout of the collectives of `groups` on `device`; on rank 0 print a message if a
    backend refuses it. With NCCL a new mesh has set ten minutes, also for the default group."""
    refused = False
    for group in groups:
        backend: Any = group._get_backend(device)
        for name in SET_TIMEOUT:
            if hasattr(backend, name):
                try:
                    getattr(backend, name)(timeout)
                except RuntimeError:  # of XCCL, which has the method in torch 2.9 to 2.11
                    refused = True
                break
    if refused and rank == 0:
        say(
            f"the backend {dist.get_backend()!r} of this torch takes no other timeout: collectives"
            " of run.mesh may end with an error before hang_after"
        )


class _Stage(PipelineStage):
    """torch's stage of a pipeline, with changes; torch's schedule calls the methods."""

    def backward_maybe_with_nosync(
        self, kind: Any, options: Any, last_backward: bool = False
    ) -> Any:
        """Have gradients averaged only in the last micro-batch of a batch, and only if the batch
        ends a step: DDP then has the flag of `set_averaging`, which a stage without DDP lacks."""
        is_last = last_backward and getattr(self.submod, "require_backward_grad_sync", True)
        backward: Any = super().backward_maybe_with_nosync
        return backward(kind, options, last_backward=is_last)

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        """Return a micro-batch's output; keep none, as they may need more memory than the model."""
        output = super().forward_one_chunk(*args, **options)
        self.output_chunks.clear()
        return output

    def backward_one_chunk(self, *args: Any, **options: Any) -> None:
        """Run a backward without the autocast of the forward, as torch recommends."""
        torch.clear_autocast_cache()
        with torch.autocast(self.device.type, enabled=False):
            super().backward_one_chunk(*args, **options)


class _Tracker(_random.OffsetBasedRNGTracker):
    """torch's tracker of random numbers, on this rank's device: torch's own would take the device
    with the number of the global rank."""

    def __init__(self, device: torch.device) -> None:
        # The constructor of the base's base: the base's own chooses the device, and broadcasts.
        super(_random.OffsetBasedRNGTracker, self).__init__(device)


def share_layers(
    model: nn.Module,
    plan: Mapping[str, ParallelStyle],
    mesh: DeviceMesh,
    device: torch.device,
    init: Init | None,
) -> None:
    """Split the modules that match a name in `plan` among the ranks of `mesh`, in place, and move
    them to `device` one by one; arguments as in `Run.parallelize`. All ranks call it.

    Raise UsageError for a name in the plan that no module has, for a parameter with several names
    that the plan cuts in different ways, and as `materialize`.
    """
    tied = _tied_names(model)
    for pattern, style in plan.items():
        modules = list(_find_modules(model, pattern))
        if not modules:
            raise UsageError(
                f"run.parallelize was given a plan for {pattern!r}, and the model has no such"
                " module; accepted: names as in model.named_modules(), with * for a part of one"
            )
        for module in modules:
            materialize(module, device, init)
            parallelize_module(module, mesh, style)
    for names in tied:  # torch has made a parameter for each of the names
        _tie_again(model, names)


def _tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several names."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    return [names for names in names_of.values() if len(names) > 1]


def _tie_again(model: nn.Module, names: Sequence[str]) -> None:
    """Make all `names` name one parameter of the model again, that of the first name; raise
    UsageError if their tensors are cut in different ways."""
    first = model.get_parameter(names[0])
    for name in names[1:]:
        tensor = model.get_parameter(name)
        if tensor is not first and _layout_of(tensor) != _layout_of(first):
            raise UsageError(
                f"the plan of run.parallelize parts {names[0]} and {name}, which are one parameter;"
                " accepted: both of them, with the same cut",
                hint="RowwiseParallel cuts an Embedding as ColwiseParallel cuts a Linear",
            )
        path, _, key = name.rpartition(".")
        setattr(model.get_submodule(path), key, first)


def _layout_of(tensor: Any) -> Any:
    """Return the mesh and the placements of a DTensor, None for a plain tensor."""
    return (tensor.device_mesh, tuple(tensor.placements)) if is_sharded(tensor) else None


def _check_units(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Raise UsageError for a parameter with several names in different units, or in a unit and in
    none: each unit would make a parameter of its own."""
    for names in _tied_names(model):
        modules = [model.get_submodule(name.rpartition(".")[0]) for name in names]
        is_in_unit = [[module in unit.modules() for unit in units] for module in modules]
        # For each name the index of its first unit; one behind the last for a name in none.
        firsts = [flags.index(True) if any(flags) else len(units) for flags in is_in_unit]
        for name, first in zip(names, firsts, strict=True):
            if first != firsts[0]:
                raise UsageError(
                    f"the units of run.fully_shard part {names[0]} and {name}, which are one"
                    " parameter; accepted: both in one unit, or in none",
                    hint="leave an embedding that is tied to the head out of the units",
                )


def _find_modules(model: nn.Module, pattern: str) -> Iterator[nn.Module]:
    """Yield the modules of a model whose name matches a pattern. The parts between the dots are
    compared one by one, by `fnmatchcase`: so ``*`` stands for text without a dot."""
    parts = pattern.split(".")
    for name, module in model.named_modules():
        names = name.split(".")
        if len(names) == len(parts) and all(map(fnmatchcase, names, parts)):
            yield module


def shard_fully(
    model: nn.Module,
    units: Iterable[nn.Module],
    dp_mesh: DeviceMesh,
    device: torch.device,
    dtype: torch.dtype | None,
    offload: bool,
    init: Init | None,
    **options: Any,
) -> None:
    """Shard a model over ranks, in place, by torch's FSDP2, which averages gradients over ranks.

    torch moves each unit to `device` as it shards the unit, so a device never has the whole model.
    Replicas get the numbers of the first replica. All ranks call it. `units`, `offload` and `init`
    are as in `Run.fully_shard`.

    Parameters
    ----------
    dp_mesh
        the ranks that share each parameter: the mesh's dimension ``dp``; or two dimensions, over
        which each parameter is replicated and sharded
    dtype
        to compute in, with gradients averaged in fp32; None: that of the parameters for both
    options
        of torch's ``fully_shard``; ``mp_policy`` replaces that of `dtype`

    Raises
    ------
    UsageError
        as `materialize`; or a parameter has several names, in different units
    """
    units = list(units)
    _check_units(model, units)
    if dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        options.setdefault("mp_policy", policy)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=devices.is_accelerator(device))
    for module in (*units, model):
        materialize(module, device, init)
        fully_shard(module, mesh=dp_mesh, **options)
    # Different kinds of GPUs draw different numbers, and a script may load weights on one rank.
    make_copies_equal(model, device)


class Pipeline:
    """A model in stages, each on a rank of its own (see `Run.pipeline`). `stage` is this rank's.

    All ranks of a pipeline call `step`, or the pipeline itself, with the same batch, and get the
    same result: both are collectives. They raise RuntimeError if a peer is gone.
    """

    def __init__(
        self,
        run: ModelSetup,
        stage: nn.Module,
        loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        schedule: str,
        n_microbatches: int,
    ) -> None:
        """Prepare this rank's `stage`; arguments as in `Run.pipeline`. All ranks make it at the
        same time, since it may make the groups of `run.mesh`."""
        self.stage = stage
        self._schedule, self._count = schedule, n_microbatches
        self._device, self._autocast = run.device, run.autocast
        mesh = run.mesh["pp"]
        self._group = mesh.get_group()
        self._index, self._last = mesh.get_local_rank(), mesh.size() - 1
        self._losses: list[torch.Tensor] = []  # of the micro-batches, on the last stage
        self._shapes: dict[Any, list[Any]] = {}  # by the shape of inputs: see `_find_boundaries`
        # torch's, by the shape of a batch, the last used one last. Each has memory for what a stage
        # receives.
        self._schedules: dict[Any, Any] = {}

        def weigh_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            """Return a micro-batch's loss times the batch's weight (`Run.backward`), divided by the
            number of micro-batches; keep the plain loss for `step`."""
            loss = loss_fn(output, target)
            self._losses.append(loss.detach())
            return run._weigh(loss) / self._count

        self._loss_fn = weigh_loss

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run forward and backward of a batch, as `Run.backward` would; return the batch's mean
        loss, a scalar in fp32, the same on all ranks of the pipeline. Raise UsageError for a batch
        that can't be cut into equal micro-batches."""
        if len(inputs) % self._count:
            raise UsageError(
                f"a batch of {len(inputs)} samples for {self._count} micro-batches of the pipeline;"
                " accepted: a multiple",
                hint="give run.loader such a batch size, and drop_last=True",
            )
        key = tuple(inputs.shape)
        schedule = self._schedules.pop(key, None)
        if schedule is None:
            while len(self._schedules) >= MOST_SCHEDULES:
                del self._schedules[next(iter(self._schedules))]  # not used for the longest time
            schedule = self._make_schedule(inputs[: len(inputs) // self._count])
        self._schedules[key] = schedule
        self._losses.clear()
        first, last = self._index == 0, self._index == self._last
        with self._autocast():
            schedule.step(*([inputs] if first else []), **({"target": targets} if last else {}))
        # In fp32, as the other stages receive it, also where the loss is computed in bf16.
        mean = torch.stack(self._losses).mean(dtype=torch.float32) if last else None
        loss = torch.zeros((), dtype=torch.float32, device=self._device) if mean is None else mean
        dist.broadcast(loss, group=self._group, group_src=self._last)
        return loss

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the whole model's output for `inputs`, in eval mode and without gradients."""
        boundaries = self._find_boundaries(inputs)
        if self._index:
            inputs = torch.empty_like(boundaries[self._index], device=self._device)
            dist.recv(inputs, group=self._group, group_src=self._index - 1)
        output = self._forward(inputs)
        if self._index < self._last:
            dist.send(output, group=self._group, group_dst=self._index + 1)
            output = torch.empty_like(boundaries[-1], device=self._device)
        dist.broadcast(output, group=self._group, group_src=self._last)
        return output

    def _make_schedule(self, inputs: torch.Tensor) -> Any:
        """Return torch's schedule for micro-batches like `inputs`, which is one of them; a
        collective."""
        boundaries = self._find_boundaries(inputs)
        stage = _Stage(
            self.stage,
            self._index,
            self._last + 1,
            self._device,
            input_args=boundaries[self._index].requires_grad_(self._index > 0),
            output_args=boundaries[self._index + 1].requires_grad_(),
            group=self._group,
        )
        # `list` in place of a method returns []. torch 2.9 would connect the stages, and send an
        # int64 into a float32; `_find_boundaries` has connected them.
        vars(stage)["_get_init_p2p_neighbors_ops"] = list
        # scale_grads would divide the whole gradients, those of earlier batches of a step, too.
        kind = get_schedule_class(self._schedule)
        schedule = kind(stage, self._count, loss_fn=self._loss_fn, scale_grads=False)
        vars(schedule)["_merge_outputs"] = list  # of no outputs, which `_Stage` does not keep
        return schedule

    def _find_boundaries(self, inputs: torch.Tensor) -> list[torch.Tensor]:
        """Return the first stage's input, then each stage's output, on ``meta``, for inputs of the
        shape of `inputs`. For a new shape it is a collective, and runs a forward of each stage.

        torch would run training steps on made-up numbers, which draw random numbers: a resumed run
        would differ from an undisturbed one.
        """
        key = tuple(inputs.shape)
        if key not in self._shapes:
            shapes: list[Any] = [(inputs.shape, inputs.dtype)]
            for index in range(self._last + 1):
                box: list[Any] = [None]
                if index == self._index:
                    shape, dtype = shapes[-1]
                    output = self._forward(torch.zeros(shape, dtype=dtype, device=self._device))
                    box = [(output.shape, output.dtype)]
                dist.broadcast_object_list(box, group=self._group, group_src=index)
                shapes += box
            self._shapes[key] = shapes
        return [
            torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in self._shapes[key]
        ]

    def _forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the output of this rank's stage for the stage's `inputs`, contiguous: in eval
        mode, without gradients, and in the run's precision."""
        plain = unwrap(self.stage)
        with in_eval_mode(plain), self._autocast():
            output: torch.Tensor = plain(inputs).contiguous()
        # torch 2.9 would use the cached casts, which have no gradients, in the training.
        torch.clear_autocast_cache()
        return output


def check_schedule(name: str, n_microbatches: int, stages: int, device: torch.device) -> None:
    """Raise UsageError for a schedule `name` that is not in `SCHEDULES` (in any case of letters),
    for fewer micro-batches than stages, and for Gloo with accelerators and several stages."""
    if devices.is_accelerator(device) and dist.get_backend() == "gloo" and stages > 1:
        raise UsageError(
            f"the backend is 'gloo' on {device.type} with pp={stages}; accepted: the device's own,"
            " since Gloo sends no tensor of a device to a single peer",
            hint="leave out backend= and HPC_DDP_BACKEND",
        )
    if name.lower() not in map(str.lower, SCHEDULES):
        raise UsageError(f"schedule is {name!r}; accepted: {', '.join(SCHEDULES)}")
    if n_microbatches < stages:
        raise UsageError(
            f"n_microbatches is {n_microbatches} for {stages} stages; accepted: {stages} or more",
            hint="with fewer, most stages would wait most of the time",
        )
