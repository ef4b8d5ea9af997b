"""`StopPoint` stops and saves a training that makes its own process group and checkpoints.

::

    stop = StopPoint()                                # before the process group: it takes signals
    torch.distributed.init_process_group()
    if folder := stop.latest():                       # the newest checkpoint that verifies
        dcp.load(state, checkpoint_id=folder)
    for step in range(stop.position.step, 10_000):
        ...
        if stop.step(loss=loss):                      # True on all ranks at the same step
            with stop.checkpoint() as folder:         # published at the end of the block
                dcp.save(state, checkpoint_id=folder)
    stop.finish()
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.journal.events import Finished, Stopped, TrainingBegun
from hpc_ddp.training import devices
from hpc_ddp.training.checkpoint.library_checkpoints import LibraryCheckpoints
from hpc_ddp.training.checkpoint.storage.retention import Retention
from hpc_ddp.training.models.ddp import BucketOrders
from hpc_ddp.training.models.dtensor import gather_whole
from hpc_ddp.training.options import Options
from hpc_ddp.training.process.control_tree import open_control
from hpc_ddp.training.process.environment import mark_trained, take_run
from hpc_ddp.training.process.failure import OuterError
from hpc_ddp.training.process.hang_watchdog import beat
from hpc_ddp.training.process.member import Member
from hpc_ddp.training.process.process_group import leave, skip_teardown_at_exit, timeout_beyond
from hpc_ddp.training.process.rank_messages import Control, LoneControl
from hpc_ddp.training.stops.consensus import Decision
from hpc_ddp.training.stops.signals import NONE, REASONS


class StopPoint(Member):
    """Stops and saves at the same step on all ranks; made first, since it takes the signals.

    All ranks call its methods, at the same steps. `position` has the steps done so far; `facts` has
    plain values, which a checkpoint keeps and `latest` brings back. `format` names the library that
    writes the checkpoints: `latest` refuses one of another format. The options are those of
    `hpc_ddp.training.start`: `save_every` and `hang_after` in seconds, `save_every_steps` and
    `keep_every` in steps, each None for never, and `keep_last`, a number of checkpoints. Making one
    takes over signals and exceptions of the process; it raises UsageError for a wrong option or a
    wrong variable of the launcher's, and ValueError outside of the main thread.
    """

    _own_names: frozenset[str] = frozenset()  # of files that a subclass adds to a checkpoint
    _is_taken = False  # of the class: True once a training of this process has the run

    def __init__(
        self,
        *,
        save_every: float | Literal["auto"] | None = 300.0,
        save_every_steps: int | None = None,
        keep_last: int = 3,
        keep_every: int | None = None,
        hang_after: float | None = 1800.0,
        format: str = "library",
    ) -> None:
        options = Options(
            save_every=save_every,
            save_every_steps=save_every_steps,
            keep_last=keep_last,
            keep_every=keep_every,
            hang_after=hang_after,
        )
        super().__init__(options)
        self.facts: dict[str, Any] = {}
        self._own_facts: dict[str, Any] = {}  # a subclass's, apart from the script's `facts`
        self._buckets = BucketOrders()
        self._format = format
        self._newest: Path | None = None
        self._decision = Decision()  # which `checkpoint` carries out
        self._is_open = self._is_restored = self._has_begun = self._is_over = False
        self._has_asked = False  # True once the script has called `latest`
        self._outer_error = OuterError()

    def latest(self) -> Path | None:
        """Return the folder of the newest checkpoint that verifies, None without any.

        The first call, for which the process group of several ranks exists already, opens the run,
        sets a damaged checkpoint aside, and sets `position` and `facts` to those of the checkpoint.
        Later calls return the same folder; after an error they look for a checkpoint again.

        Raises
        ------
        UsageError
            there is no process group, the checkpoint is another library's, or an earlier training
            of this process has the run
        HpcDdpError
            the run's folder or its checkpoints can't be read, or none of them is good
        RuntimeError
            a peer is gone
        """
        newest, self._has_asked = self._restore_once(), True
        return newest

    def _open_once(self) -> None:
        """Open the run, and mark it as taken for this process; later calls do nothing. Raise
        UsageError if an earlier training of this process has the run; raises as `_open`."""
        if self._is_open:
            return
        if StopPoint._is_taken:  # its checkpoints would be taken for this one's
            raise UsageError(
                "a second training has begun in this process; accepted: one for each run",
                hint="each training (a fold, say) as a job of its own: hpc-ddp sweep",
            )
        self._open()
        take_run(self._env)
        self._is_open = StopPoint._is_taken = True

    def _restore_once(self) -> Path | None:
        """Open the run, and set `position`, `facts` and the order of buckets to those of the newest
        checkpoint that verifies. Return the checkpoint's folder, None without one. Later calls
        return the same folder; after an error the next call looks for a checkpoint again. Raises as
        `latest`."""
        self._open_once()
        if not self._is_restored:
            if newest := self._checkpoints.find_newest_of_library():
                self._newest, manifest = newest
                vars(self.position).update(manifest["position"])
                self.facts.update(manifest["facts"])
                self._own_facts.update(manifest["own_facts"])
                self._buckets.load(manifest.get("buckets", ()))
            self._is_restored = True  # only now: after an error nothing may begin at step 0
        return self._newest

    def fix_order_of_sums(self, models: Iterable[Any]) -> None:
        """Have DDP add gradients in the same order before a restart and after it. All ranks call it
        with the wrapped `models`, before the first step, and again for the models of another try.

        Each DDP in them is added to the run's `BucketOrders`; after a restart that is a collective,
        which sets the gradients to None. Raise RuntimeError if a peer is gone.
        """
        self._buckets.clear()
        for model in models:
            for module in model.modules():
                if isinstance(module, DistributedDataParallel):
                    self._buckets.add(module)

    def take_signals(self) -> None:
        """Take the signals back from a library that has set handlers of its own. Raise ValueError
        outside of the main thread."""
        self._notices.take_signals()

    def begin(self) -> None:
        """Have rank 0 journal that the training begins, and start the clocks. Later calls do
        nothing; `step` calls it each time.

        Raises as `latest`, which it calls if the script has not; UsageError after `finish`, and
        where the run has a checkpoint and the script has not called `latest`.
        """
        if not self._has_asked and (newest := self._restore_once()):
            raise UsageError(
                f"the run has a checkpoint, {newest.name}, which the script has not loaded",
                hint="load what stop.latest() returns, before the first step",
            )
        if self._is_over:
            raise UsageError("a second training has begun in this run; accepted: one a run")
        if not self._has_begun:
            self._has_begun = True
            self._outer_error = OuterError()
            if self.rank == 0:
                self._journal.write(TrainingBegun(self.position.step))
            self._consensus.restart_step()
            self._timer.start_step()

    def step(
        self,
        number: int | None = None,
        *,
        epoch: int = 0,
        total_steps: int | None = None,
        samples: int = 0,
        wait_for_all: bool = False,
        **values: Any,
    ) -> bool:
        """End an optimizer step, and return whether all ranks are to save now, by `checkpoint`;
        until they have, the next steps return True as well. `number` is the step's in the run, None
        for the next.

        The journal gets `epoch`, `total_steps` of the run (None: not known), `samples` of all ranks
        in this step (0: not known) and rank 0's `values`: numbers, or tensors of one number; a
        DTensor is gathered, by a collective. With `wait_for_all` the ranks agree at this step and
        not some steps later, which costs 0.2 ms: for the step before one that ends late, as with an
        evaluation.

        Raises
        ------
        RuntimeError
            a peer is gone
        UsageError
            the first value of its name is no number, or the journal uses the name itself; a model
            is in a ``join`` of DDP's; or as `begin`
        HpcDdpError
            as `begin`, at the first call
        RuntimeError, ValueError, TypeError
            on rank 0, perhaps some steps later: a later value of a name is no scalar
        """
        self.begin()
        self._buckets.check_steps_are_even()
        self._timer.end_step()
        self.position.step = self.position.step + 1 if number is None else number
        self.position.epoch = epoch
        self._watchdog.step_done()
        values = {name: gather_whole(entry) for name, entry in values.items()}
        self._check_values(values)
        if self.rank == 0:
            self._metrics.add(self.position, samples, values, total_steps)
        decision = self._consensus.note_step(self.position.step, wait_for_all)
        self._decision = self._decision.combine_with(decision)
        self._timer.start_step()
        return self._decision.save or self._decision.reason != NONE

    @contextmanager
    def checkpoint(self) -> Iterator[Path]:
        """Yield a folder for the library's files, and have a thread publish it once the block has
        ended on all ranks. Called after a `step`, whatever that returned.

        On entry it waits for the save before. At the block's end the training goes on while the
        thread syncs the files and computes their checksums; an error of the disk in the thread is
        printed, and the next save is due soon. Where the ranks are to stop, they wait for the
        thread, and the process ends once all is saved; after a failed save it goes on, and the next
        `step` returns True again. An error in the block comes through, and nothing is published.

        Raises
        ------
        SystemExit
            code 0: the ranks are to stop, and all is saved
        HpcDdpError
            a save failed for at least the third time in a row, and has done so for half a minute;
            the folder can't be made; or another attempt has started since (SupersededError)
        RuntimeError
            a peer is gone
        """
        self._consensus.end_pause()
        began = time.monotonic()
        yield self._checkpoints.open_draft(self.position.step)
        facts = {
            "position": asdict(self.position),
            "facts": deepcopy(self.facts),
            "own_facts": deepcopy(self._own_facts),
            "buckets": self._buckets.values(),
        }
        self._checkpoints.commit(self.position.step, facts, began)
        decision, self._decision = self._decision, Decision()
        self._schedule.note_save()
        if decision.reason != NONE:
            if self._checkpoints.settle():
                self._leave(decision.reason)
            self._decision = decision  # the next step saves again
        self._consensus.restart_step()
        self._timer.start_step()
        beat()

    def finish(self) -> None:
        """End the training, and wait for the last save, which is not repeated if it has failed. No
        signal leads to another save.

        The run is done when the script ends without an error: rank 0 journals that at its exit.
        Until then a new attempt begins at the last checkpoint. A second call does nothing, nor does
        a call while an exception passes (in a ``finally``), the SystemExit of a stop among them.
        Raises as `begin`, and HpcDdpError as `checkpoint`.
        """
        if self._is_over or self._outer_error.has_inner():
            return
        self.begin()
        self._checkpoints.settle()
        self._checkpoints.tidy()
        self._watchdog.end()
        self._end_journal()
        self._is_over = True
        mark_trained(self._env)
        if self._env.notice is None:
            self._notices.end(then_exit=False)
        if self.rank == 0:
            atexit.register(self._journal_finished)

    def _open(self) -> None:
        """Open the run's folder, and make the parts that save, agree, time and journal, over two
        process groups of their own: one for the training, one for the thread that saves. A process
        without peers has no groups.

        All ranks call it. Raise UsageError without torch's process group, HpcDdpError as
        `run_directory.open_run`, and RuntimeError if a peer is gone.
        """
        control, background = self._make_controls()
        self._info = replace(self._info, rank=control.rank, world_size=control.world_size)
        self._hook.info = self._info
        self._open_run(control)
        options = self._options
        self._checkpoints = LibraryCheckpoints(
            self.folder,
            self._journal.attempt,
            control,
            background,
            self._journal,
            Retention(options.keep_last, options.keep_every),
        )
        self._checkpoints.library = self._format
        self._checkpoints.own_names = self._own_names
        self._checkpoints.syncs = self._info.local_rank == 0
        bound = getattr(dist.group.WORLD, "bound_device_id", None)  # else the current one
        device = bound or devices.current_type(self._info.local_rank) or devices.CPU
        self._make_metrics(self._prepare_decisions(self._checkpoints, device))

    def _make_controls(self) -> tuple[Control, Control]:
        """Return the channels of the training and of the thread that saves, with the ranks of
        torch's default group, each over a new group; a process without peers gets channels without
        a group. All ranks call it. Raise UsageError if the default group of several ranks is
        missing."""
        info = self._info
        if dist.is_initialized():
            info = replace(info, rank=dist.get_rank(), world_size=dist.get_world_size())
            timeout = timeout_beyond(self._options.hang_after)
            return open_control(info, timeout), open_control(info, timeout)
        if info.world_size > 1:
            raise UsageError(
                "torch's process group is missing; accepted: StopPoint.latest and .step after"
                " init_process_group",
                hint="the Trainer, Accelerator or Fabric is made first, and makes the group",
            )
        return LoneControl(), LoneControl()

    def _leave(self, reason: int) -> NoReturn:
        """Journal the stop, ignore signals from now on, wait for the ranks, print the stop and
        the goodput on rank 0, and raise SystemExit with 0. The process ends without a teardown of
        torch's process group."""
        source = self._notices.source
        self._is_over = True
        self._watchdog.end()
        self._end_journal(Stopped(self.position.step, REASONS[reason], source or None))
        self._notices.end(then_exit=True)
        leave(self._control, devices.CPU, then_exit=True, destroys=False)
        if self.rank == 0:
            self._say_stop()
            self._say_goodput()
        skip_teardown_at_exit()
        raise SystemExit(0)

    def _journal_finished(self) -> None:
        """Journal, as the script ends on rank 0, that the run is done if the exit code is 0, which
        is not known here (`at_exit`), and print the goodput; do nothing if a later attempt has
        begun. Raise OSError where the attempts can't be listed."""
        if self.folder.is_newest(self._journal.attempt):
            within = self._env.is_within or None
            self._journal.write_surely(Finished(self.position.step, at_exit=True, within=within))
            self._say_goodput()


def check_step(stop: StopPoint, step: int, call: str) -> None:
    """Raise UsageError where a training begins at another `step` than that of its run's checkpoint,
    or 0 without one. `call` is the hint: the call that begins there."""
    if step != stop.position.step:
        raise UsageError(
            f"the training begins at step {step}; accepted: {stop.position.step}, that of the"
            f" newest checkpoint of {stop.folder.path}",
            hint=call,
        )


def warn_of_ranks(stop: StopPoint, ranks: int) -> None:
    """Print a warning on rank 0 if another number of ranks has done the steps so far. Write
    `ranks`, the present number, into the facts of the checkpoints."""
    before = stop.facts.get("ranks", ranks)
    if before != ranks:
        stop._say(
            f"WARNING: {before} ranks have done {stop.position.step} steps, and there are {ranks}"
            " now: the Trainer takes them for steps of as many samples as its next ones have, so"
            " that some samples count twice or not at all"
        )
    stop.facts["ranks"] = ranks
