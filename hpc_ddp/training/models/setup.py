"""A run's methods on models: onto the device, wrapped, sharded, in stages, evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.journal.events import TrainingBegun
from hpc_ddp.training.checkpoint.state import unwrap, without_ddp
from hpc_ddp.training.data.batch_plan import MicroBatch, derive_seed, make_plan
from hpc_ddp.training.data.call_order import CallOrder
from hpc_ddp.training.data.loader import Batch, Loader, Shard
from hpc_ddp.training.data.own_data import StatefulLoaders
from hpc_ddp.training.data.rerun_lines import Resume
from hpc_ddp.training.devices import is_accelerator
from hpc_ddp.training.models import tracked_objects
from hpc_ddp.training.models.ddp import (
    check_sparse_gradients,
    compile_for_resume,
    convert_to_sync_batchnorm,
    fix_bucket_order,
    set_averaging,
)
from hpc_ddp.training.models.evaluation import Average, in_eval_mode, make_average, share_buffers
from hpc_ddp.training.models.meta import Init, materialize
from hpc_ddp.training.options import Options
from hpc_ddp.training.process.hang_watchdog import beat
from hpc_ddp.training.worker import Worker

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from hpc_ddp.training.models.sharding import Pipeline


class ModelSetup(Worker):
    """The methods of a `Run` on models. With `stop_on_nan` the weights of models that went through
    `wrap`, `parallelize` or `fully_shard` are checked."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._wrapped = tracked_objects.LivingModels[Any]()  # whose gradients DDP or FSDP2 averages
        self._averages = WeakKeyDictionary[Average, ref[torch.nn.Module]]()  # each with its model
        self._mesh: DeviceMesh | None = None
        self._loader: Loader | None = None
        self._calls = CallOrder(self._say)
        self._is_unchecked = False  # whether a loop's first step is still to warn of untracked ones
        self._resume = Resume()
        self._gradients = tracked_objects.GradientWatch()
        self._no_loader = Batch()  # in place of a batch in a script without a loader of the run
        self._epoch: Loader | StatefulLoaders = StatefulLoaders()  # knows an epoch's begin and end

    @property
    def _batch(self) -> Batch:
        """The present batch of the run's loader; an empty one without a loader."""
        return self._no_loader if self._loader is None else self._loader.batch

    @property
    def _micro_batch(self) -> MicroBatch:
        """The present micro-batch of the run's loader; `NO_BATCH` without a loader."""
        return self._batch.micro_batch

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context that computes in the run's precision; for fp32 it does nothing."""
        return self._precision.autocast()

    def wrap(
        self,
        model: torch.nn.Module,
        sync_batchnorm: bool = False,
        compile: bool = False,
        **options: Any,
    ) -> torch.nn.Module:
        """Move a model to the device and wrap it in DistributedDataParallel; return the wrapper.

        `options` are DDP's. A model with nothing to train is returned without a wrapper; a model
        over several devices of the worker stays where it is. Averages from `ema` move along. In a
        pipeline, `model` is this rank's stage. All ranks call it.

        Parameters
        ----------
        sync_batchnorm
            replaces batch norms, in place, by ones with statistics over the global batch; on CPUs
            it is off, with a message
        compile
            compiles the model in place, so that the keys of its state stay; once for each shape of
            a batch, of which there should be few

        Raises
        ------
        UsageError
            it would move a model behind `track`; the run has `tp` or `replicas`; the forward of a
            class derived from a batch norm would be lost; or sparse gradients can't be averaged
        """
        dims = self._dims
        if dims.tp > 1:
            raise UsageError(
                f"run.wrap (DDP) was called with tp={dims.tp}; accepted there: run.parallelize, and"
                " run.fully_shard for the data parallel ranks",
                hint="fully_shard(model, units) works with any number of ranks, also with one",
            )
        if dims.replicas > 1:
            raise UsageError(
                f"run.wrap (DDP) was called with replicas={dims.replicas}; accepted: fully_shard",
                hint="without replicas= each rank has a whole model in DDP",
            )
        # The ranks of other stages have other layers.
        group = self.mesh["dp"].get_group() if dims.pp > 1 else None
        if sync_batchnorm:
            model = convert_to_sync_batchnorm(model, self.device, group, self._say)
        self._precision.watch_model(model)
        if len(self.devices) == 1:
            tracked_objects.check_place(model, self.device, self._has_tracked)
            model.to(self.device)
            for average, source in self._averages.items():
                average.follow(source())
        if compile:
            compile_for_resume(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        return self._wrap_in_ddp(model, {"process_group": group, **options})

    def _wrap_in_ddp(self, model: torch.nn.Module, options: dict[str, Any]) -> torch.nn.Module:
        """Wrap a model in DDP, have its bucket order fixed, note the wrapper and return it. May add
        ``device_ids`` to `options`. All ranks call it. Raise UsageError for sparse gradients that
        can't be averaged."""
        if is_accelerator(self.device) and len(self.devices) == 1:
            options.setdefault("device_ids", [self.device.index])
        ddp = DistributedDataParallel(model, **options)
        check_sparse_gradients(model, options["process_group"])
        if self._dims.pp == 1 and len(self.devices) == 1:
            self._manager.buckets.add(ddp)
        else:  # the ranks have no common order that a checkpoint could keep
            fix_bucket_order(ddp)
        self._timer.has_ddp = self._dims.pp == 1
        self._wrapped.add(ddp)
        return ddp

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks as torch's mesh with the dimensions "pp", "dp", "tp"; with replicas, "dp" is
        made of "replica" and "shard". All ranks read it: the first read makes process groups."""
        if self._mesh is None:
            from hpc_ddp.training.models.sharding import make_mesh

            self._mesh = make_mesh(self._dims, self.device, self._control.timeout)
        return self._mesh

    def parallelize(
        self,
        model: torch.nn.Module,
        plan: Mapping[str, ParallelStyle],
        *,
        init: Init | None = None,
    ) -> torch.nn.Module:
        """Split a model's layers, in place, among the tensor parallel ranks, on the device; return
        the model.

        With several data parallel ranks `fully_shard` must follow: it moves the layers outside of
        the plan to the device. Without them these layers are moved here. All ranks call it.

        Parameters
        ----------
        plan
            how modules are cut (torch's ``ColwiseParallel`` and others), by their names in
            ``model.named_modules()``, in which ``*`` is any part between dots: ``blocks.*.mlp.up``
        init
            see `fully_shard`

        Raises
        ------
        UsageError
            no module of the model has a name in the plan; tied weights are cut in different ways;
            or nothing gives numbers to a tensor that is on ``meta``
        """
        from hpc_ddp.training.models.sharding import share_layers

        self._precision.watch_model(model)
        share_layers(model, plan, self.mesh["tp"], self.device, init)
        if self._dims.dp == 1:
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
        **options: Any,
    ) -> torch.nn.Module:
        """Shard a model, in place and on the device, over the data parallel ranks (FSDP2), or over
        the ranks of each of the run's replicas (HSDP); return the model.

        The model computes in the run's precision: with "bf16" FSDP2 gathers the weights in bf16,
        and the optimizer sees fp32. The units are moved to the device one by one, so the model may
        be larger than the device's memory. A model on ``torch.device("meta")`` does not need the
        CPU's memory either: its numbers are drawn here, the same on all ranks. All ranks call it.

        Parameters
        ----------
        units
            parts of the model, of which one at a time is gathered: its blocks
        offload
            keeps weights, gradients and the optimizer's state in the CPU's memory
        init
            fills the tensors of one submodule of a model on ``meta``, after its
            ``reset_parameters``; called for each submodule that has tensors of its own
        options
            of torch's ``fully_shard``; "bf16" rounds inputs, too, unless ``mp_policy`` says not to

        Raises
        ------
        UsageError
            the precision is fp16; tied weights are in different units; or nothing gives numbers to
            a tensor that is on ``meta``
        """
        from hpc_ddp.training.models.sharding import shard_fully

        precision = self._precision
        if precision.dtype is torch.float16:
            raise UsageError(
                "precision is 'fp16' with run.fully_shard; accepted: 'fp32', 'bf16'",
                hint="bf16 needs no scaled gradients",
            )
        precision.watch_model(model)
        mesh = self.mesh["replica", "shard"] if self._dims.replicas > 1 else self.mesh["dp"]
        shard_fully(model, units, mesh, self.device, precision.dtype, offload, init, **options)
        self._wrapped.add(model)
        return model

    def pipeline(
        self,
        stage: torch.nn.Module,
        loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        schedule: str = "GPipe",
        n_microbatches: int = 4,
    ) -> Pipeline:
        """Return a `Pipeline`, which trains a model whose stages lie on the ranks of
        ``run.mesh["pp"]``. All ranks call it.

        Parameters
        ----------
        stage
            this rank's part of the model, wrapped (`wrap`); one tensor goes in, one comes out. Its
            parts have their names in the whole model, so that a checkpoint is of the whole model
        loss_fn
            returns the mean loss of outputs and targets
        schedule
            torch's name of the order in which micro-batches pass: "GPipe" or "1F1B"
        n_microbatches
            into which each batch is cut, at least as many as stages

        Raises
        ------
        UsageError
            there is no such schedule, or too few micro-batches, or the backend can't carry them
        """
        from hpc_ddp.training.models.sharding import Pipeline, check_schedule

        check_schedule(schedule, n_microbatches, self._dims.pp, self.device)
        return Pipeline(self, stage, loss_fn, schedule, n_microbatches)

    def _weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the weight of the present micro-batch (see `backward`)."""
        return loss if self._micro_batch.weight == 1.0 else loss * self._micro_batch.weight

    def ema(self, model: torch.nn.Module, decay: float = 0.999) -> Average:
        """Return a copy of the model, without its wrappers, whose weights become an exponential
        moving average of the model's: an update keeps the share `decay` of it. Name it in `track`,
        and call its ``update_parameters(model)`` after each optimizer step. Raise UsageError, and
        print a warning, as `make_average`."""
        average = make_average(unwrap(model), decay, self._say)
        self._averages[average] = ref(model)
        return average

    def shard(self, dataset: Dataset[Any], batch_size: int, **options: Any) -> Shard:
        """Return this rank's part of an evaluation set, in order, every sample on exactly one rank.

        Every rank reads all of an iterable data set. `batch_size` counts samples per rank. Options
        are DataLoader's, and ``even=True``: all ranks get the same number of batches, for a forward
        with collectives (see `Shard`). Ranks that share layers or stages get the same batches.
        Raise UsageError for a batch size below 1 and for an option that is refused, TypeError for a
        map-style data set without a length.
        """
        dims = self._dims
        plan = make_plan(batch_size, None, 1, dims.dp_rank, dims.dp)
        return Shard(dataset, plan, seed=self.seed, device=self.device, **options)

    @property
    def ends_step(self) -> bool:
        """Whether the present micro-batch is the last one of its optimizer step."""
        return self._micro_batch.ends_step

    @contextmanager
    def evaluating(self, model: torch.nn.Module | Pipeline) -> Iterator[Any]:
        """A context for an evaluation: gives the model without DDP (a `Pipeline` as it is), in eval
        mode and without gradients. At the end its parts are in their former modes.

        All ranks must enter. Persistent buffers (running means of batch norm, say) become those of
        rank 0, or of the stage's first rank, and stay so. The time does not count as training. With
        collectives in the forward (a sharded model, a pipeline), all ranks need the same number of
        batches: ``run.shard(..., even=True)``.
        """
        plain = unwrap(model if isinstance(model, torch.nn.Module) else model.stage)
        group = self.mesh["dp"].get_group() if self._dims.pp > 1 else None
        share_buffers(plain, self.device, group)
        with self.untimed(), in_eval_mode(plain):
            yield without_ddp(model) if isinstance(model, torch.nn.Module) else model

    def _check_tracked(self, objects: Mapping[str, Any]) -> None:
        """Raise UsageError or HpcDdpError as `check_models` and `check_copies`, and print warnings
        as `warn_of_stateless`."""
        tracked_objects.check_models(objects, self._wrapped, self._dims.pp > 1)
        tracked_objects.warn_of_stateless(objects, self._say)
        tracked_objects.check_copies(objects.values(), self._wrapped, self._dims)

    def _begin_loop(self, is_over: bool) -> None:
        """Set random generators, note models' flags, undo changes by lines that have run a second
        time, journal the begin of a loop, which may be over, open `tensorboard` (or raise OSError),
        start the clocks."""
        calls, position = self._calls, self.position
        has_epochs, self._no_loader.is_trained = calls.loop == "epochs", False
        if self._loader is not None:
            self._loader.begin_loop()
            self._loader.rolls = not has_epochs
        is_in_epoch = has_epochs and self._epoch.is_watched and position.epoch_steps > 0
        self._manager.generators.begin_loop(
            derive_seed(self.seed, position.step, self._dims.stream),
            is_checkpoints=calls.is_checkpoints,
            is_over=is_over,
            is_in_epoch=is_in_epoch,
        )
        self._manager.note_flags()
        if self._resume.begin_loop(calls, position, is_over) and is_in_epoch:
            self._epoch.on_first_batch = self._restore_step_states
        is_new = position.step == 0 or calls.number > 1
        self._is_unchecked = self.rank == 0 and not is_over and is_new
        if self.rank == 0:
            self._journal.write(TrainingBegun(position.step))
        _ = self.tensorboard  # the read opens it here, where the position is the checkpoint's
        self._consensus.restart_step()
        self._timer.start_step()

    def _restore_step_states(self) -> Callable[[], None]:
        """At the first batch after a resume within an epoch, put generators, settings and models
        into the checkpoint's state; return a function that undoes this for the generators."""
        undo = self._manager.generators.restore_step_states()
        self._resume.put_back()
        return undo

    def _sync_gradients(self, on: bool) -> None:
        """Choose whether the next micro-batch's gradients are averaged over ranks."""
        for model in self._wrapped:
            set_averaging(model, on)

    def load_best(self, model: torch.nn.Module) -> int:
        """Put the weights of the best checkpoint (see `best`) into the model; return its step.

        All ranks call it. Behind the loop the last state is saved first, so a run that is stopped
        from here on starts behind the loop, and can be given more epochs later. In a loop nothing
        is saved: a run that is stopped there goes on from its last checkpoint. Between two loops,
        at a resume in the second one, it loads nothing and prints a message.

        Raises
        ------
        UsageError
            `best` was never called, or with NaN alone, or `track` does not know the model
        HpcDdpError
            the best checkpoint is gone, damaged or can't be read, or is of another number of ranks
            that had weights of their own; or the save before it fails as in `finish`
        """
        calls, position = self._calls, self.position
        calls.end_left_loop()
        if calls.is_before_loop_of(position):
            self._say(
                "run.load_best was called before a loop that the run is in by now: the checkpoint's"
                " weights stay"
            )
            return self._manager.best.step or position.step
        if not calls.loop:
            self._resume.go_behind_loop(position)
            calls.abandon_loops(position)
        step = self._manager.load_best(model, saves=not calls.loop)
        beat()
        return step
