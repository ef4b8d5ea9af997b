"""`Run`: the methods that a training script calls."""

from __future__ import annotations

import atexit
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from hpc_ddp.core.errors import EARLY_EXIT, UsageError
from hpc_ddp.core.journal.events import Finished
from hpc_ddp.training.checkpoint.rank_comparison import check_facts
from hpc_ddp.training.data.batch_plan import make_plan
from hpc_ddp.training.data.call_order import check_tracked
from hpc_ddp.training.data.loader import Loader
from hpc_ddp.training.data.loop_site import LoopSite
from hpc_ddp.training.data.own_data import OwnData, StatefulLoaders
from hpc_ddp.training.data.rerun_lines import Resume
from hpc_ddp.training.models.ddp import check_steps_are_even
from hpc_ddp.training.models.dtensor import gather_whole
from hpc_ddp.training.models.setup import ModelSetup
from hpc_ddp.training.models.tracked_objects import GradientWatch, warn_of_untracked
from hpc_ddp.training.options import Options
from hpc_ddp.training.process.hang_watchdog import beat
from hpc_ddp.training.stops.consensus import Decision
from hpc_ddp.training.stops.loader_workers import outlive_notices
from hpc_ddp.training.stops.signals import NONE
from hpc_ddp.training.telemetry.metrics import read_number


class Run(ModelSetup):
    """One worker's view of a run; `start` makes it. A context manager that finishes the run."""

    def __init__(self, options: Options) -> None:
        """Make the run as `start` does, with its errors, and have an early exit reported."""
        super().__init__(options)
        self._decision = Decision()  # all that was decided since the last `_act_on_decision`
        atexit.register(self._note_early_exit)

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
        """Return the loader of the training data, one per run, for `epochs` or `steps`.

        A batch counts once its `step` is done, so a look at one (``next(iter(loader))``) costs
        nothing. Every rank and loader worker reads all of an iterable data set, which must not
        split itself by rank. A resume reads it from the start, unless ``skip(n)`` returns the rest.

        Parameters
        ----------
        dataset
            iterable, or map-style with a length (else TypeError); its random numbers depend on
            (seed, epoch, index) only
        batch_size
            samples per data parallel rank and micro-batch
        global_batch_size
            in its place: samples of all ranks together per optimizer step
        accumulate
            micro-batches per optimizer step; an optimizer steps where `ends_step` is true
        drop_last
            drops the last incomplete global batch, of which a rank may get one sample, or none
        options
            ``shuffle`` (default: all but an iterable data set), and those of torch's DataLoader;
            ``even=True``: as many samples on each rank, for a forward with collectives of its own

        Raises
        ------
        UsageError
            a second loader, or one after `track`; too few samples for a step; or a refused option
        """
        self._calls.check_loader(self._loader is not None, self._has_tracked)
        rank, count, even = self._dims.dp_rank, self._dims.dp, options.pop("even", False)
        self._loader = self._epoch = Loader(
            dataset,
            make_plan(batch_size, global_batch_size, accumulate, rank, count, drop_last, even),
            seed=self.seed,
            position=self.position,
            device=self.device,
            check_batch=self._calls.note_batch,
            set_sync=self._sync_gradients,
            end_batch=self._end_batch,
            time_batches=self._timer.time_batches,
            warn=self._say if self.rank == 0 else None,
            **options,
        )
        self._loader.is_before_loop = True
        return self._loader

    def track(
        self, *, per_rank: Sequence[str] = (), added: Sequence[str] = (), **objects: Any
    ) -> None:
        """Name what a checkpoint holds, and load it from the newest one if there is any.

        Each object has ``state_dict`` and ``load_state_dict``, of tensors and plain values. A
        wrapped model is stored without its wrapper. Weights must be the same on all ranks, which
        some saves check (the first, then ever fewer); of other objects rank 0's state is saved.
        Data parallel ranks have random numbers of their own from here on. All ranks call it.

        Parameters
        ----------
        per_rank
            names of the objects that each rank has its own of, and gets back: a
            StatefulDataLoader, a sampler, an environment. On another number of ranks they begin
            anew, with a warning; models and optimizers are refused there
        added
            names of objects and parts of models that begin as made where a checkpoint lacks them

        Raises
        ------
        HpcDdpError
            the checkpoint is of other objects or can't be read, or a state can't be saved
        UsageError
            called twice; another seed or training set than rank 0's or the checkpoint's; a wrong
            object or name; ranks' objects differ; an optimizer's model is not tracked or wrapped
        RuntimeError
            a peer is gone
        """
        check_tracked(objects, per_rank, added)
        outlive_notices(objects.values())  # now the loaders' libraries are imported
        self._check_tracked(objects)
        self._precision.watch_trained(self._manager.trained)
        data = {} if self._loader is None else self._loader.facts
        check_facts(self._control, {"seed": self.seed, **data})
        self._manager.track({**objects, "_precision": self._precision}, data, per_rank, added)
        if is_resumed := self._manager.resumed:
            self._resume = Resume(objects, self._manager.put_back, self._say, self.position.loops)
        if self._loader is None:
            self._epoch = StatefulLoaders(objects, self.position, self._control, is_resumed)
        is_own = self._loader is None and not per_rank
        self._own_data = OwnData(is_own and self.position.step > 0, self._say)
        self._gradients = GradientWatch(
            objects.values(), self._say, lambda: self._calls.check_update(self.ends_step)
        )

    # -- the loop --------------------------------------------------------------------------

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left, of `total`; all ranks iterate.

        The first one may be partly done: the loader then yields the rest of it, at least one batch.
        The script's code at the end of an epoch is part of it: a checkpoint that falls due in the
        last step comes after it. Raises as `step`; UsageError also before `track`, or if `total` is
        no int; OSError where `tensorboard` can't be written.
        """
        self._act_on_decision()  # of the last loop, if it was left by break
        loop = self._calls.enter_loop("epochs", total, self._has_tracked, self.position)
        with loop as (is_over, site):
            if not is_over and self._loader is not None and self._loader.is_epoch_done:
                self.position.begin_epoch()
            self._begin_loop(is_over)
            if not is_over:
                self._own_data.warn_of_epoch(self.position)
            while not is_over and self.position.epoch < total:
                self._consensus.restart_step()
                self._timer.start_step()
                self._manager.generators.begin_epoch()
                yield self.position.epoch
                self._go_on(site)
                self.position.begin_epoch()
                if self._epoch.clear():  # no batch of it was taken
                    self._manager.generators.restore_step_states()
                beat()
                self._consensus.end_pause()
                self._add_decision(self._consensus.decide_now())
                self._act_on_decision()

    def steps(self, total: int) -> Iterator[int]:
        """Yield the numbers of the steps left of `total`, in place of `epochs`; all ranks iterate.

        The loop's body calls `step`, and is part of the step: the run saves and stops at its end. A
        resume's random numbers go on as if nothing had happened: batches that are drawn need
        nothing else. A run's loader begins its next epoch by itself. Raises as `epochs`, and
        UsageError for a body without a `step`.
        """
        self._act_on_decision()
        loop = self._calls.enter_loop("steps", total, self._has_tracked, self.position)
        with loop as (is_over, site):
            self._begin_loop(is_over)
            while not is_over and self.position.step < total:
                self._no_loader.is_trained = False  # by which `step` refuses a second call
                yield (steps_before := self.position.step)
                self._go_on(site)
                self._calls.check_body(self.position.step > steps_before or not self.ends_step)
                self._act_on_decision()

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward of this rank's mean loss over its micro-batch, a scalar.

        The loss is weighted by the number of the micro-batch's own samples, so that the accumulated
        and averaged gradient is the mean over the global batch, also where micro-batches differ in
        size at the end of an epoch. DDP averages in the last one of a step. All ranks call it."""
        self._gradients.begin_backward(self.ends_step, self.position.epoch)
        weighted = self._weigh(loss)
        self._timer.end_forward()
        self._precision.backward(weighted)

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> torch.Tensor | None:
        """Clip the gradients, step, and set them to None; do nothing unless `ends_step`.

        A script may make these calls itself, except with fp16: `update` also undoes the scaling,
        and skips both steps if a gradient has overflowed. All ranks call it.

        Parameters
        ----------
        clip_norm
            scales the gradients to this norm at most, over the optimizer; UsageError if <= 0
        scheduler
            stepped once per optimizer step

        Returns
        -------
        torch.Tensor or None
            the gradients' norm before clipping, a scalar; None without `clip_norm` or `ends_step`
        """
        if clip_norm is not None and not read_number("run.update", "clip_norm", clip_norm) > 0:
            raise UsageError(  # a negative one would turn the gradients around
                f"clip_norm is {clip_norm}; accepted: a number above 0, or None for no clipping"
            )
        if not self.ends_step:
            return None
        self._gradients.has_updated = True  # also where fp16's scaler skips the step
        return self._precision.update(optimizer, clip_norm, scheduler)

    def step(self, **values: Any) -> None:
        """End an optimizer step: the run saves, and stops when it has to.

        Every rank calls it once per batch of the run's loader. The run saves and stops when the
        loop asks for the next batch: code behind `step` is part of the step, as it is in `steps`.
        In `epochs` without that loader `step` itself saves and stops, and a resume skips the code
        behind; not after a tracked loader's last batch. It does nothing unless `ends_step`. Rank
        0's `values` (numbers) are journalled: at first twice a second, later every ten seconds.

        Raises
        ------
        SystemExit
            code 0: all ranks have agreed to stop, and all is saved
        HpcDdpError
            saves have failed three times in a row or more, for half a minute; a weight isn't finite
            or a state can't be saved; or another attempt has started since (SupersededError)
        UsageError
            called outside of `epochs` and `steps`, or twice for a batch; a value is no number, or
            of a reserved name; fp16 and no `update`
        RuntimeError
            a peer is gone (torch's own)
        """
        if not self.ends_step:
            return
        self._calls.check_step(self._batch.is_trained)
        self._no_loader.is_trained = self._calls.loop == "steps"
        if self._loader is not None:
            self._loader.count_batch()
        self._own_data.warn_of_step()
        if self._is_unchecked:  # the first step of a loop that this attempt has begun
            self._is_unchecked = False
            warn_of_untracked(self._manager.objects.values(), self._say)
        check_steps_are_even(self._wrapped)
        self._gradients.end_step()
        self._timer.end_step()
        self._precision.end_step()
        self.position.step += 1
        self.position.epoch_steps += 1
        self._watchdog.step_done()
        self._measure({name: gather_whole(value) for name, value in values.items()})
        waits = self._calls.loop == "epochs" and self._epoch.has_left(1)  # before the last step
        self._add_decision(self._consensus.note_step(self.position.step, wait_for_all=waits))
        self._watch_weights(self._consensus.exchanges)
        self._timer.start_step()
        if self._acts_in_step:
            self._act_on_decision()

    def best(self, value: float, *, higher: bool = True) -> bool:
        """Note `value`; return whether it is the best so far: the greatest, with ``higher=False``
        the least, never NaN. If so, this step is saved and kept, else `stale` grows by 1.

        Rank 0's value counts on all ranks, so they can decide together: ``if run.stale >= 5:
        break`` is an early stop. All ranks call it, once after an evaluation: at the end of an
        epoch, or within it (without the run's loader before `step`). Raise UsageError if `value` is
        no number, by the save if the weights have changed since; RuntimeError if a peer is gone.
        """
        is_best = self._manager.judge(read_number("run.best", "value", value), higher)
        self._add_decision(Decision(save=is_best))
        if is_best:
            self._calls.judged_at = self._gradients.weights_step(self.position.step)
        return is_best

    @property
    def stale(self) -> int:
        """How many values `best` was given since the best one."""
        return self._manager.best.stale

    def finish(self, **results: float | torch.Tensor) -> None:
        """Save the last state, journal that the run is done, and leave the process group.

        The last checkpoint has what lines behind the loop have changed, unless the loop's last one
        is the best one, or `load_best` saved it. A second call does nothing, nor does a call on the
        way out of an exception (``finally``). All ranks call it.

        Parameters
        ----------
        results
            numbers by name: rank 0's go into the journal, and from there into the table of a
            sweep's ``hpc-ddp status``; NaN and infinity as null

        Raises
        ------
        UsageError
            a result is no number
        HpcDdpError
            the last state could not be saved, a weight is not finite, or a later attempt has begun
        RuntimeError
            a peer is gone
        """
        if not self._calls.is_failing():
            scalars = {
                name: read_number("run.finish", name, result) for name, result in results.items()
            }
            finite = {n: v if math.isfinite(v) else None for n, v in scalars.items()}  # for JSON
            within = self._env.is_within or None
            self._end(Finished(self.position.step, finite or None, within=within))
            atexit.unregister(self._note_early_exit)  # it would keep the model in memory

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish, unless an exception ends the block; the exception goes on."""
        if kind is None:
            self.finish()

    # -- inside ----------------------------------------------------------------------------

    def _note_early_exit(self) -> None:
        """At the process's exit, if a loop has begun and no `finish` or stop has ended the run:
        journal that, and print it on rank 0. Do nothing in a fork."""
        if self._calls.has_looped and not (self._is_over or self._hook.is_forked):
            self._hook.note_early_exit()
            self._say(f"{EARLY_EXIT}: what came after the last checkpoint is lost")

    def _measure(self, values: dict[str, Any]) -> None:
        """Check a step's values (UsageError), journal them on rank 0, and count the traced step."""
        self._check_values(values)
        if self.rank == 0:
            total = self._calls.total_steps(self._loader)
            self._metrics.add(self.position, self._micro_batch.total, values, total)
        self._profiler.count_step()

    def _end_batch(self) -> None:
        """Save or stop as the last step decided. The loader calls it when the loop asks for another
        batch. Do nothing in `steps`, after a batch without a step, and at the end of an epoch."""
        # At the end of an epoch `epochs` does it: a resume in an epoch without a batch would trip
        # over what a loop leaves behind, such as the last loss. Most stops come a step earlier.
        batch = self._batch
        if self._calls.loop == "epochs" and batch.is_trained and not batch.micro_batch.ends_epoch:
            self._act_on_decision()

    @property
    def _acts_in_step(self) -> bool:
        """Whether `step` itself saves and stops: in `epochs` without the run's loader nothing shows
        when the code behind `step` has run. After a tracked loader's last batch it does so only for
        a value that `best` has judged; else `epochs` does, for the reason in `_end_batch`."""
        has_own = self._loader is None and self._calls.loop == "epochs"
        return has_own and (self._calls.judged_at is not None or not self._epoch.has_left(0))

    def _go_on(self, site: LoopSite) -> None:
        """Note that the loop at `site` goes on. If it was taken for left, have this saved soon."""
        if self._calls.continue_loop(site, self.position):
            self._add_decision(Decision(save=True))

    def _add_decision(self, decision: Decision) -> None:
        self._decision = self._decision.combine_with(decision)

    def _act_on_decision(self) -> None:
        """Stop, or else save, as all ranks have decided since the last call. Raises as `step`."""
        decision, self._decision = self._decision, Decision()
        if decision.reason != NONE:
            self._stop(decision.reason)
        if decision.save:
            self._calls.close_judgement(self.position.step)
            self._consensus.end_pause()
            self._manager.save()
            self._schedule.note_save()
            self._consensus.restart_step()
            self._timer.start_step()
            beat()
