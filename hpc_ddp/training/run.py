"""`start` and `Run`: what a training script talks to."""

from __future__ import annotations

import atexit
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Dataset

from hpc_ddp.run import goodput
from hpc_ddp.run.errors import HpcDdpError, UsageError
from hpc_ddp.run.events import Finished, JournalEvent, Stopped, TrainingBegun
from hpc_ddp.training import control as groups
from hpc_ddp.training.averaging import averaged
from hpc_ddp.training.devices import is_accelerator
from hpc_ddp.training.evaluating import in_eval_mode
from hpc_ddp.training.exchange import Decision
from hpc_ddp.training.failure import leave_quickly
from hpc_ddp.training.loader import Loader, Shard
from hpc_ddp.training.meta import Init, materialize
from hpc_ddp.training.metrics import check_values, number
from hpc_ddp.training.notice import NONE, REASONS
from hpc_ddp.training.order import Share, make_cut
from hpc_ddp.training.parts import Parts, assemble
from hpc_ddp.training.settle import settle
from hpc_ddp.training.sharded import gathered, is_sharded, step_apart
from hpc_ddp.training.state import unwrap
from hpc_ddp.training.watchdog import beat

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.utils.tensorboard import SummaryWriter

    from hpc_ddp.training.strategies import Pipeline

LOOK_EVERY = 10  # exchanges, so about a second, and with slow steps every tenth


def start(
    seed: int = 0,
    *,
    save_every: float | Literal["auto"] | None = 300.0,
    save_every_steps: int | None = None,
    keep_last: int = 3,
    keep_every: int | None = None,
    hang_after: float | None = 1800.0,
    precision: str = "fp32",
    backend: Literal["nccl", "gloo", "mpi"] | None = None,
    stop_on_nan: bool = True,
    deterministic: bool = False,
    tensorboard: bool = False,
    progress: bool = True,
    profile: tuple[int, int] | None = None,
    flops_per_sample: float | None = None,
    peak_flops: float | None = None,
    tp: int = 1,
    pp: int = 1,
    devices_per_worker: int = 1,
) -> Run:
    """Join the process group, listen for notices, and open the run's folder.

    Call it first, on every rank: until then a SIGTERM just ends the process. Seeds all
    generators with `seed`, the same on all ranks, so that they build the same model and data;
    `Run.epochs` then gives each rank its own.

    Parameters
    ----------
    seed
        decides initial weights, order of the data, and every other random number
    save_every
        seconds between checkpoints, ``"auto"`` for the interval that is expected to lose the
        least time, None for no such clock; ``HPC_DDP_SAVE_EVERY`` overrides
    save_every_steps
        a checkpoint after every so many optimizer steps as well
    keep_last
        how many of the newest checkpoints stay, at least 2; the best one does (see `Run.best`)
    keep_every
        of every so many steps one checkpoint stays for good
    hang_after
        seconds without a sign of progress, from the first step on, after which a rank writes
        its threads' stacks into the run's folder and fails, so that the run can be retried;
        None: never; ``HPC_DDP_HANG_AFTER`` overrides (0: never). Progress is a step, a batch
        of the run's `loader` or of a `shard`, a `sum`, a save, an epoch's end: code between
        steps that takes longer than this calls ``run.sum()`` now and then, on all ranks
    precision
        "fp32", "bf16" or "fp16": what `Run.autocast` computes in; "fp16" scales the loss, and so
        needs `Run.update` in place of ``optimizer.step()``
    backend
        what carries gradients between ranks; None: NCCL on GPUs and Gloo on CPUs. Gloo works on
        GPUs too, slowly, to tell whether NCCL is to blame; MPI needs a torch that was built with
        it, and its own launcher; ``HPC_DDP_BACKEND`` overrides
    stop_on_nan
        ends the run with an error once a weight is NaN or infinite; such weights are never saved.
        Each save's copy is looked through behind the training, and the weights about once a
        second (every tenth step where steps take long): 0.13 ms of a 1 ms step, 15 ms of a 530 ms
        one, measured on a CPU
    deterministic
        has torch use deterministic algorithms only, which is slower
    tensorboard
        writes what goes to `Run.step` into ``<run folder>/tensorboard`` as well
    progress
        shows a line with step, values, speed and time left on stderr
    profile
        the first step of this attempt to trace, from 2, and the last; ``HPC_DDP_PROFILE=10:15``
        overrides
    flops_per_sample
        of forward and backward; gives ``mfu``, the share of the GPUs' peak that is used
    peak_flops
        of one GPU per second, where `hpc_ddp.training.profiling` does not know it
    tp
        ranks that share each layer (tensor parallel); neighbours, so on one node where they fit
    pp
        stages of a pipeline. The other ``world size / (tp * pp)`` ranks are data parallel: only
        these take different samples
    devices_per_worker
        GPUs of each worker, `Run.devices`, for a model that the script itself spreads over them

    Raises
    ------
    UsageError
        a variable of the environment, or a parameter, makes no sense
    HpcDdpError
        more workers than GPUs on this node, the backend can't be used, or another process works
        in the run's folder
    """
    parts = assemble(dict(locals()))
    if plan := os.environ.get("HPC_DDP_DRILL"):
        from hpc_ddp.training.drill import DrilledRun

        return DrilledRun(parts, seed, json.loads(plan))
    return Run(parts, seed)


class Run:
    """One worker's view of a run; `start` makes it. A context manager that finishes the run.

    `device` is this rank's (`devices` all of them), `folder` the run's, `position` where the
    training is.
    """

    def __init__(self, parts: Parts, seed: int) -> None:
        self.rank, self.world_size = parts.info.rank, parts.info.world_size
        self.devices, self.device = parts.devices, parts.devices[0]
        self.folder, self.seed = parts.folder, seed
        self.position = parts.position
        self._parts = parts
        parts.metrics.total_steps = self._total_steps
        self._loader: Loader | None = None
        self._wrapped: list[Any] = []
        self._mesh: DeviceMesh | None = None
        self._epochs: int | None = None
        self._save_due = False
        self._stepped = True  # since the loader's last batch
        self._over = False
        self._check_values = True  # the first ones: on all ranks, so that all end
        self._look_at = 0  # the number of exchanges
        self._look_answers_at: int | None = None
        if self.rank == 0:
            atexit.register(self._warn_unless_over)

    # -- before the loop -------------------------------------------------------------------

    def wrap(
        self,
        model: torch.nn.Module,
        sync_batchnorm: bool = False,
        compile: bool = False,
        **options: Any,
    ) -> torch.nn.Module:
        """Move a model to the device and wrap it in DistributedDataParallel.

        `options` go to DDP as they are. A model with nothing to train is only moved; one over
        several devices of the worker stays where it is. Of a pipeline it takes the stage.

        Parameters
        ----------
        sync_batchnorm
            takes batch norm's statistics over the global batch; torch can do that on GPUs only
        compile
            compiles the model in place, so that the keys of its state stay as they are; once for
            each shape of a batch, of which there should be few

        Raises
        ------
        UsageError
            the run is tensor parallel
        """
        grid = self._parts.grid
        if grid.tp > 1:
            raise UsageError(
                f"run.wrap (DDP) was called with tp={grid.tp}; accepted there: run.parallelize, and"
                " run.fully_shard for the data parallel ranks",
                hint="fully_shard(model, units) works with any number of ranks, also with one",
            )
        if sync_batchnorm and is_accelerator(self.device):
            convert: Any = torch.nn.SyncBatchNorm.convert_sync_batchnorm
            # Of a stage's ranks: the others have other layers.
            model = convert(model, self.mesh["dp"].get_group() if grid.pp > 1 else None)
        elif sync_batchnorm:
            self._say("sync_batchnorm is off: torch has it for GPUs only")
        self._take(model)
        if compile:
            # Else a kernel for any shape, made at the epoch's shorter last batch, would take over
            # from then on, and a process resumed later would compute with another one.
            # And kernels that are chosen by their speed, here and now, add up in other orders.
            can = hasattr(importlib.import_module("torch._inductor.config"), "deterministic")
            model.compile(dynamic=False, options={"deterministic": True} if can else None)
        if not any(each.requires_grad for each in model.parameters()):
            return model
        if grid.pp > 1:
            options["process_group"] = self.mesh["dp"].get_group()
        if is_accelerator(self.device) and len(self.devices) == 1:
            options.setdefault("device_ids", [self.device.index])
        ddp = DistributedDataParallel(model, **options)
        settle(ddp)
        self._parts.timer.has_ddp = grid.pp == 1
        self._wrapped.append(ddp)
        return ddp

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks as torch's mesh with the dimensions "pp", "dp", "tp". All ranks ask for it."""
        if self._mesh is None:
            from hpc_ddp.training.strategies import make_mesh

            self._mesh = make_mesh(self._parts.grid, self.device, self._parts.control.timeout)
        return self._mesh

    def parallelize(
        self,
        model: torch.nn.Module,
        plan: Mapping[str, ParallelStyle],
        *,
        init: Init | None = None,
    ) -> torch.nn.Module:
        """Share a model's layers among the tensor parallel ranks, on the device.

        `fully_shard` comes after it, and is needed where there are data parallel ranks as well:
        what the plan does not name stays where it is until then.

        Parameters
        ----------
        plan
            which module, by its name, is cut in which way: torch's ``ColwiseParallel`` and others
        init
            see `fully_shard`

        Raises
        ------
        UsageError
            the model has no module of a name in the plan
        """
        from hpc_ddp.training.strategies import share_layers

        self._parts.precision.watch(model)
        share_layers(model, plan, self.mesh["tp"], self.device, init)
        if self._parts.grid.dp == 1:
            materialize(model, self.device, init)
            model.to(self.device)
        return model

    def fully_shard(
        self,
        model: torch.nn.Module,
        units: Iterable[torch.nn.Module],
        *,
        offload: bool = False,
        init: Init | None = None,
    ) -> torch.nn.Module:
        """Shard a model over the data parallel ranks (FSDP2), each part of it on its device.

        In place, and in the run's precision: computing gathers the weights in bf16, say, and the
        optimizer sees fp32. One unit after the other comes to the device, so the model may be
        larger than that. If it is made on ``torch.device("meta")``, it does not need the CPU's
        memory either: its numbers are drawn here, on all ranks the same.

        Parameters
        ----------
        units
            parts of the model, of which one at a time is gathered: its blocks
        offload
            keeps weights, gradients and the optimizer's state in the CPU's memory
        init
            fills the tensors of one submodule of a model on ``meta``, after its
            ``reset_parameters``; called for each submodule that has tensors of its own

        Raises
        ------
        UsageError
            the precision is fp16; or nothing gives numbers to a tensor that is on ``meta``
        """
        from hpc_ddp.training.strategies import shard_fully

        precision = self._parts.precision
        if precision.dtype is torch.float16:
            raise UsageError(
                "precision is 'fp16' with run.fully_shard; accepted: 'fp32', 'bf16'",
                hint="bf16 needs no scaled gradients",
            )
        precision.watch(model)
        shard_fully(model, units, self.mesh["dp"], self.device, precision.dtype, offload, init)
        self._wrapped.append(model)
        return model

    def pipeline(
        self,
        stage: torch.nn.Module,
        loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        schedule: str = "GPipe",
        n_microbatches: int = 4,
    ) -> Pipeline:
        """Return what trains a model whose stages lie on the ranks of ``run.mesh["pp"]``.

        Parameters
        ----------
        stage
            this rank's part of the model, wrapped (`wrap`); one tensor goes in, one comes out. Its
            parts have the names that they have in the whole model, so that a checkpoint is one
            of the whole model
        loss_fn
            the mean loss of outputs and targets
        schedule
            torch's name of the order in which micro-batches pass: "GPipe" or "1F1B"
        n_microbatches
            into which each batch is cut, at least as many as stages

        Raises
        ------
        UsageError
            there is no such schedule, or too few micro-batches, or the backend can't carry them
        """
        from hpc_ddp.training.strategies import Pipeline, check_schedule

        grid = self._parts.grid
        check_schedule(schedule, n_microbatches, grid.pp, self.device)
        return Pipeline(
            stage,
            loss_fn,
            schedule,
            n_microbatches,
            grid,
            self.mesh["pp"].get_group(),
            self.device,
            self.autocast,
            lambda: 1.0 if self._share is None else self._share.weight,
        )

    def ema(self, model: torch.nn.Module, decay: float = 0.999) -> AveragedModel:
        """Return a copy of the model whose weights follow it: an exponential moving average.

        Name it in `track`, and call its ``update_parameters(model)`` after each optimizer step.

        Raises
        ------
        UsageError
            `decay` is not from 0 to 1
        """
        return averaged(unwrap(model), decay)

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        accumulate: int = 1,
        drop_last: bool = False,
        **options: Any,
    ) -> Loader:
        """Return the loader of the training data, one per run, to be iterated in `epochs`.

        An iterable data set is read in whole by every rank and loader worker, each of which
        keeps its part; so it must not split itself by rank. Let it yield references, such as
        paths, and decode them in ``collate_fn``. After an interruption, what was consumed is
        read again, unless the data set has a ``skip(n)`` that returns the rest of it.

        Parameters
        ----------
        dataset
            map-style or iterable; what it draws from the global generators depends on (seed,
            epoch, index) only
        batch_size
            samples per data parallel rank and micro-batch
        global_batch_size
            in its place: samples of all ranks together per optimizer step, so that the steps
            do not depend on the number of ranks; need not be divisible by it
        accumulate
            micro-batches per optimizer step: ``optimizer.step()`` belongs to those where
            `ends_step` is true
        drop_last
            drops the last incomplete global batch; without it the last step of an epoch has
            fewer samples, on some ranks maybe none that count (see `backward`); batch norm
            refuses a single one, so use `drop_last` with it
        options
            ``shuffle`` (by default all but an iterable data set), ``num_workers``,
            ``collate_fn``, and others of torch's DataLoader

        Raises
        ------
        UsageError
            the run has a loader already, or the options make no sense
        """
        if self._loader is not None:
            raise UsageError(
                "the run has a training loader already, and its position belongs to that one",
                hint="for evaluation use run.shard",
            )
        if self._parts.keeper.tracked:
            raise UsageError(
                "run.loader was called after run.track, which has to know the training set",
                hint="make the loader first",
            )
        grid = self._parts.grid
        self._loader = Loader(
            dataset,
            make_cut(batch_size, global_batch_size, accumulate, grid.dp_rank, grid.dp, drop_last),
            seed=self.seed,
            position=self.position,
            device=self.device,
            check=self._check_epoch,
            sync=self._sync_gradients,
            **options,
        )
        self._loader.timed = self._parts.timer.batches
        return self._loader

    def track(self, *, per_rank: Sequence[str] = (), **objects: Any) -> None:
        """Name what a checkpoint holds, and take it up from the newest one if there is any.

        Each object has ``state_dict`` and ``load_state_dict``, which speak in tensors and
        plain values. A wrapped model is stored without its wrapper. Weights are taken to be the
        same on all ranks, which some saves check (the first, and ever fewer), and of other objects
        rank 0's are saved.

        Parameters
        ----------
        per_rank
            names of the objects that each rank has its own of, and gets back: a
            StatefulDataLoader, a sampler, an environment. On another number of ranks they begin
            anew, with a warning; models and optimizers are refused there

        Raises
        ------
        HpcDdpError
            the checkpoint is of other objects
        UsageError
            it was made with another seed or training set, or an object can't be saved
        """
        if isinstance(per_rank, str) or not set(per_rank) <= set(objects):
            raise UsageError(
                f"per_rank is {per_rank!r}; accepted: a tuple of names of tracked objects, here of"
                f" {', '.join(objects) or 'none'}",
                hint="run.track(model=model, loader=loader, per_rank=('loader',))",
            )
        self._check_copies(objects.values())
        if self._parts.grid.pp > 1:
            self._check_stages(sorted(objects))
        data = {} if self._loader is None else self._loader.facts
        objects = {**objects, "_precision": self._parts.precision}
        self._parts.keeper.track(objects, data, per_rank)
        if self.position.epoch_steps and self._loader is None and not per_rank:
            self._say(
                f"WARNING: the checkpoint is from epoch {self.position.epoch}, after"
                f" {self.position.epoch_steps} of its steps, and the script has no run.loader: a"
                " DataLoader begins the epoch again, and its first samples are seen twice; write"
                " run.loader(dataset, batch_size) in place of DataLoader(dataset, …)"
            )
        for each in objects.values():
            if isinstance(each, torch.optim.Optimizer):
                step_apart(each)
                each.register_step_pre_hook(self._check_ends_step)

    # -- the loop --------------------------------------------------------------------------

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left, of `total`.

        The first one may be partly done: the loader then yields the rest of it, at least one
        batch. What the script does at the end of an epoch is part of it: a checkpoint that falls
        due in the last step is made after that.
        """
        if not isinstance(total, int):
            raise UsageError(f"run.epochs was given {total!r}; accepted: a whole number")
        if not self._parts.keeper.tracked:
            raise UsageError(
                "run.track was not called: a checkpoint would hold nothing",
                hint="run.track(model=model, optimizer=optimizer) before the loop",
            )
        self._epochs = total
        self._parts.keeper.start_random()
        if self.rank == 0:
            self._parts.journal.write(TrainingBegun(self.position.step))
        _ = self.tensorboard  # opened here, where the position is the checkpoint's
        while self.position.epoch < total:
            self._parts.pace.restart_step()
            self._parts.timer.start_step()
            yield self.position.epoch
            self.position.epoch += 1
            self.position.samples = self.position.epoch_steps = 0
            if self._loader is not None:
                self._loader.share = None
            beat()
            self._parts.pace.end_pause()
            self._act(self._parts.pace.hear_all())

    @property
    def ends_step(self) -> bool:
        """Whether the current micro-batch is the last one of its optimizer step."""
        return self._share is None or self._share.ends_step

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward of this rank's mean loss over its micro-batch, a scalar.

        It is weighted by the number of samples that are really in it, so that the accumulated
        and averaged gradient is the mean over the global batch, also where micro-batches differ
        in size at the end of an epoch. DDP talks to its peers in the last one of a step only.
        """
        weight = 1.0 if self._share is None else self._share.weight
        weighted = loss if weight == 1.0 else loss * weight
        self._parts.timer.end_forward()
        self._parts.precision.backward(weighted)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context that computes in the run's precision; it does nothing for fp32."""
        return self._parts.precision.autocast()

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> torch.Tensor | None:
        """Clip, step, and zero the gradients; nothing in the midst of accumulating them.

        Does no more than the calls of one's own would (``optimizer.step()`` above all) unless
        the precision is fp16, where it also undoes the scaling, and skips the step, and the
        scheduler's, if a gradient has overflowed.

        Parameters
        ----------
        clip_norm
            scales the gradients down to this norm over all of the optimizer's parameters
        scheduler
            stepped once per optimizer step

        Returns
        -------
        torch.Tensor or None
            the gradients' norm before clipping, a scalar on the device; None without `clip_norm`

        Raises
        ------
        UsageError
            `clip_norm` is not above 0
        """
        if clip_norm is not None and not number("run.update", "clip_norm", clip_norm) > 0:
            raise UsageError(  # a negative one would turn the gradients around
                f"clip_norm is {clip_norm}; accepted: a number above 0, or None for no clipping"
            )
        if not self.ends_step:
            return None
        return self._parts.precision.update(optimizer, clip_norm, scheduler)

    def step(self, **values: Any) -> None:
        """End an optimizer step: here the run saves, and stops when it has to.

        Every rank calls it after every ``optimizer.step()``; where gradients accumulate it may
        be called after every micro-batch, and does nothing unless `ends_step`. Once per batch of
        the run's loader, before the next one is taken from it. `values` (numbers or scalar
        tensors; this rank's own) go into the journal, from rank 0 and about twice a second.

        Raises
        ------
        SystemExit
            code 0: all ranks have agreed to stop, and all is saved
        HpcDdpError
            three checkpoints in a row could not be saved, or a weight is not finite
        UsageError
            called twice for a batch; a value is no scalar; or the precision is fp16, and
            `update` was not called
        SupersededError
            a later attempt of this run has started
        """
        if not self.ends_step:
            return
        if self._stepped and self._loader is not None:
            raise UsageError(
                "run.step was called twice for one batch of the run's loader",
                hint="call it once per batch, behind all optimizers' steps",
            )
        self._stepped = True
        self._parts.timer.end_step()
        self._parts.precision.end_step()
        self.position.step += 1
        self.position.epoch_steps += 1
        self._parts.watchdog.step_done()
        values = {name: gathered(value) for name, value in values.items()}
        if self._check_values:
            check_values(values)
            self._check_values = False
        if self.rank == 0:
            samples = self._share.total if self._share else 0
            self._parts.metrics.add(self.position, samples, values)
        self._parts.profiler.step_done()
        left = None if self._loader is None else self._loader.steps(self.position.samples)
        decision = self._parts.pace.step_done(self.position.step, hear_all=left == 1)
        self._watch_weights(self._parts.pace.exchanges)
        if self._ends_epoch():
            # The end of the epoch comes first: a start that finds an epoch without a batch would
            # trip over what a loop leaves behind, the last loss say. What makes all ranks stop
            # makes them stop there too; most stops come a step earlier, see `hear_all`.
            self._save_due = self._save_due or decision.save
        else:
            self._act(decision)
            self._parts.timer.start_step()

    def best(self, value: float, *, higher: bool = True) -> bool:
        """Tell whether `value` is the best so far; if so, the checkpoint of this moment stays.

        Rank 0's value counts on all ranks, so they can decide together: ``if run.stale >= 5:
        break`` is an early stop. All ranks call it, after an evaluation: at the end of an epoch,
        or behind `step`. (In the midst of a step, the checkpoint is the one after it.)
        """
        found = self._parts.keeper.judge(number("run.best", "value", value), higher)
        if found and self._share is not None and self._stepped and not self._ends_epoch():
            self._parts.keeper.save()
        else:
            self._save_due = self._save_due or found
        return found

    @property
    def stale(self) -> int:
        """How many values `best` was given since the best one."""
        return self._parts.keeper.best.stale

    def finish(self, **results: float | torch.Tensor) -> None:
        """Save the last state, journal that the run is done, and leave the process group.

        Does nothing where that is done, and on the way out of an exception (``finally``).

        Parameters
        ----------
        results
            what came out, as numbers by name: rank 0's go into the journal, from where
            ``hpc-ddp status`` of a sweep takes them into its table; NaN goes there as null

        Raises
        ------
        UsageError
            a result is no number
        """
        if sys.exc_info()[0] is None:
            found = {name: number("run.finish", name, each) for name, each in results.items()}
            # JSON has neither NaN nor infinity.
            numbers = {name: each if math.isfinite(each) else None for name, each in found.items()}
            self._end(Finished(self.position.step, numbers or None))

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()

    # -- beside the loop -------------------------------------------------------------------

    def shard(self, dataset: Dataset[Any], batch_size: int, **options: Any) -> Shard:
        """Return this rank's part of an evaluation set, every sample on exactly one rank.

        In order. An iterable data set is read by every rank. `options`: ``num_workers``,
        ``collate_fn``, and others of torch's DataLoader; and ``even=True``, with which all ranks
        get the same number of batches, for a forward that talks to its peers, as FSDP's does (see
        `Shard`). Ranks that share a model's layers or stages get the same batches.
        """
        grid = self._parts.grid
        cut = make_cut(batch_size, None, 1, grid.dp_rank, grid.dp)
        return Shard(dataset, cut, seed=self.seed, device=self.device, **options)

    @contextmanager
    def evaluating(self, model: torch.nn.Module | Pipeline) -> Iterator[Any]:
        """Give the plain model, in eval mode and without gradients, the same on all ranks.

        The plain one, because the DDP wrapper may talk to its peers in every forward, and
        they may have fewer batches. Buffers (running means of batch norm, say) are rank 0's,
        as in a checkpoint. All ranks must enter. A sharded model's forward and a pipeline's talk
        to peers nevertheless: give them ``run.shard(..., even=True)``.
        """
        plain: torch.nn.Module = unwrap(getattr(model, "stage", model))
        for buffer in plain.buffers():
            if self._parts.grid.pp > 1:  # rank 0's are another stage's
                dist.broadcast(buffer, group=self.mesh["dp"].get_group(), group_src=0)
            else:
                self._parts.control.first_copy(buffer)
        with in_eval_mode(plain):
            yield plain if isinstance(model, torch.nn.Module) else model
        self._parts.timer.start_step()  # no part of a step
        self._parts.pace.end_pause()

    def sum(self, *values: float | torch.Tensor) -> list[float]:
        """Return the sums of numbers over all ranks, in double precision. All ranks call it.

        Of the ranks that take the same samples one counts: the last stage's, with pipelines.
        """
        counts = self._parts.grid.counts
        mine = [float(value) if counts else 0.0 for value in values]
        sums = torch.tensor(mine, dtype=torch.float64, device="cpu")
        self._parts.control.sum(sums)
        beat()
        numbers: list[float] = sums.tolist()
        return numbers

    def print(self, *values: Any) -> None:
        """Print on rank 0 only, at once."""
        if self.rank == 0:
            print(*values, flush=True)

    @property
    def tensorboard(self) -> SummaryWriter | None:
        """TensorBoard's writer on rank 0, where `start` was asked for it; for use after `track`."""
        return self._parts.board.writer if self._parts.board else None

    # -- behind the loop -------------------------------------------------------------------

    def load_best(self, model: torch.nn.Module) -> int:
        """Put the weights of the best checkpoint (see `best`) into the model; return its step.

        All ranks call it, behind the loop. The last state is saved first, so a run that is
        stopped from here on starts behind the loop, and can be given more epochs later.

        Raises
        ------
        UsageError
            `best` was never called, or `track` does not know the model
        HpcDdpError
            the best checkpoint is not there any more, or damaged
        """
        step = self._parts.keeper.load_best(model)
        beat()
        return step

    def export(self, model: torch.nn.Module, example: torch.Tensor) -> Path:
        """Write the model, as it is now, for programs without hpc-ddp; return the folder.

        ``<run folder>/export`` then has ``model.safetensors``, the weights, and ``model.pt2``,
        which `torch.export.load` reads, for batches of any size. Rank 0 writes; all ranks call it.

        Parameters
        ----------
        example
            a batch of inputs, on any device

        Raises
        ------
        UsageError
            torch.export can't trace the model, or it is in parts (FSDP2, tensor parallel, stages);
            the example is no batch; or the run is finished
        HpcDdpError
            a file can't be written
        """
        from hpc_ddp.training.export import export_model  # a program of its own, too

        folder = self.folder.path / "export"
        failed: HpcDdpError | None = None
        if self._parts.grid.pp > 1 or any(map(is_sharded, model.parameters())):
            raise UsageError(
                "run.export was given a part of a model; accepted: one that each rank has whole",
                hint="python -m hpc_ddp.training.export writes the weights of a checkpoint",
            )
        if not isinstance(example, torch.Tensor) or example.dim() < 1:
            scalar = " of no dimension" if isinstance(example, torch.Tensor) else ""
            raise UsageError(
                f"run.export was given a {type(example).__name__}{scalar} as an example; accepted:"
                " a tensor, of which the"
                " first dimension counts samples",
                hint="run.export(model, inputs), or inputs[None] for one sample",
            )
        if self._over:
            raise UsageError(
                "run.export was called after run.finish, when the ranks have parted",
                hint="call it before run.finish()",
            )
        with self.evaluating(model) as plain:
            if self.rank == 0:
                try:
                    export_model(plain, example, folder)
                except HpcDdpError as error:
                    failed = error
                except Exception as error:  # the others wait for an answer
                    failed = HpcDdpError(f"the model can't be exported into {folder}: {error}")
        failed = self._parts.control.from_first(failed)
        beat()
        if failed is not None:
            raise failed
        return folder

    # -- inside ----------------------------------------------------------------------------

    @property
    def _share(self) -> Share | None:
        return None if self._loader is None else self._loader.share

    def _take(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move a model to the device, and have an eye on its weights from now on."""
        self._parts.precision.watch(model)
        return model.to(self.device) if len(self.devices) == 1 else model

    def _check_copies(self, objects: Iterable[Any]) -> None:
        """Refuse to train copies of a model that would go different ways; DDP alone is as it is."""
        grid = self._parts.grid
        if grid.dp == 1 or grid.dp == self.world_size:
            return
        averaged = {id(each) for model in self._wrapped for each in model.parameters()}
        for each in objects:
            groups = each.param_groups if isinstance(each, torch.optim.Optimizer) else []
            if any(id(weight) not in averaged for group in groups for weight in group["params"]):
                raise UsageError(
                    f"tp={grid.tp} and pp={grid.pp} leave {grid.dp} copies of the model, whose"
                    " gradients nobody averages; accepted: an optimizer of what has gone through"
                    " run.fully_shard or run.wrap",
                    hint="run.fully_shard(model, units) after run.parallelize, or run.wrap(stage)",
                )

    def _check_stages(self, names: list[str]) -> None:
        """Refuse stages of a pipeline that track other objects: a checkpoint would lack them."""
        control = self._parts.control
        for rank, theirs in enumerate(control.from_first(control.to_first(names))):
            if theirs != names:
                raise UsageError(
                    f"run.track was given {', '.join(names) or 'nothing'} on rank {self.rank}, and"
                    f" {', '.join(theirs) or 'nothing'} on rank {rank}; accepted: the same names"
                    " on all ranks",
                    hint="each stage has its own model and optimizer, under the same names",
                )

    def _check_ends_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.ends_step:
            raise UsageError(
                "optimizer.step() was called in the midst of accumulating gradients",
                hint="run.update(optimizer) waits for the last micro-batch; or ask run.ends_step",
            )

    def _warn_unless_over(self) -> None:
        if self._epochs is not None and not self._over:
            self._say(
                "the script ended without run.finish(): what came after the last checkpoint is lost"
            )

    def _check_epoch(self) -> None:
        if self._epochs is None:
            raise UsageError(
                "the training loader was iterated outside run.epochs",
                hint="write `for epoch in run.epochs(n):` around the loop over batches",
            )

    def _sync_gradients(self, on: bool) -> None:
        """Say if the gradients of the coming micro-batch are to be averaged over ranks.

        For DDP what its `no_sync` switches, which counts in forward already.
        """
        self._stepped = False
        for model in self._wrapped:
            if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
                model.set_requires_gradient_sync(on)
            else:
                model.require_backward_grad_sync = on

    def _ends_epoch(self) -> bool:
        return self._share is not None and self._share.ends_epoch

    def _total_steps(self) -> int | None:
        """Return the steps of the whole run, where the length of an epoch is known."""
        if self._loader is None or self._epochs is None:
            return None
        left = self._loader.steps(self.position.samples)
        later = self._epochs - self.position.epoch - 1
        return None if left is None else self.position.step + left + later * len(self._loader)

    def _watch_weights(self, exchanges: int) -> None:
        """Look at the weights now and then; all ranks do so, and hear of it, at the same steps."""
        if self._look_answers_at is not None and exchanges >= self._look_answers_at:
            self._look_answers_at = None
            self._refuse_poison()
        if exchanges >= self._look_at:
            self._look_at, self._look_answers_at = exchanges + LOOK_EVERY, exchanges + 1
            self._parts.precision.look()

    def _refuse_poison(self) -> None:
        if self._parts.precision.poisoned():
            raise self._parts.checkpoints.unsound(self.position.step)

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(f"hpc-ddp: {text}", file=sys.stderr, flush=True)

    def _act(self, decision: Decision) -> None:
        if decision.reason != NONE:
            self._stop(decision.reason)
        if decision.save or self._save_due:
            self._save_due = False
            self._parts.keeper.save()
            self._parts.schedule.saved()
            self._parts.pace.restart_step()
            beat()

    def _stop(self, reason: int) -> NoReturn:
        source = self._parts.notices.source
        self._end(Stopped(self.position.step, REASONS[reason], source or None))
        leave_quickly()
        raise SystemExit(0)

    def _end(self, event: JournalEvent) -> None:
        """Save, journal the event, and leave; all ranks come here together."""
        if self._over:
            return
        is_stop = isinstance(event, Stopped)
        parts = self._parts
        parts.precision.look()
        self._refuse_poison()
        parts.keeper.save_surely()
        if not is_stop:  # a stop has no time for it, and the next start does it
            parts.checkpoints.tidy()
        parts.watchdog.end()
        if self.rank == 0:
            parts.metrics.flush()
            parts.journal.drain()
            parts.journal.write_surely(event)
        for end in [each.end for each in (parts.board, parts.progress, parts.profiler) if each]:
            end()
        self._over = True
        parts.notices.end(then_exit=is_stop)
        groups.leave(parts.control, self.device, then_exit=is_stop)
        if self.rank == 0:
            if is_stop:
                self._say(
                    f"stopped and saved at step {self.position.step}; it can go on from there"
                )
            self._say_goodput()

    def _say_goodput(self) -> None:
        with suppress(OSError):  # all is done: no reason left to fail
            told = goodput.line(goodput.account(self.folder.events(), time.time()))
            print(f"hpc-ddp: {told}", file=sys.stderr, flush=True)
