"""A run under `hpc-ddp drill`: records each step as digests, and waits to be disturbed on cue.

`start` returns a `DrilledRun` where the environment has a plan. Each rank then writes, into
``<run>/drill/rank-<r>.jsonl``, a `record` when the loop begins, after each step and each epoch,
and at the end: a digest of each tracked object and each random generator, and of what the
optimizers read in the step. Two runs that are equal bit for bit have equal records, and where
they differ, the first part that differs is the cause. `submission/drill/compare.py` reads them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.journal.events import DrillRecord
from hpc_ddp.core.journal.journal import Journal
from hpc_ddp.training.checkpoint.state import unwrap
from hpc_ddp.training.checkpoint.storage.shards import memory_of
from hpc_ddp.training.devices import plain
from hpc_ddp.training.models import rng
from hpc_ddp.training.models.dtensor import is_sharded
from hpc_ddp.training.options import Options
from hpc_ddp.training.run import Run
from hpc_ddp.training.stops.consensus import Decision
from hpc_ddp.training.stops.signals import CANCELLED, NONE
from hpc_ddp.training.telemetry.metrics import check_values

HOLD_S = 60.0  # the longest wait for a disturbance
LEAST_STEPS = 12  # before ``seconds`` end a run
KINDS = {"model": torch.nn.Module, "optimizer": Optimizer, "scheduler": LRScheduler}
ATOMS = (bool, int, float, complex, str, bytes, type(None))  # digested by their values


class DrilledRun(Run):
    """A `Run` that is recorded and disturbed. The plan's keys, all optional, ``hold`` with ``at``:

    - ``end``: the step to end at; else after ``seconds`` of training, and `LEAST_STEPS` at least
    - ``save``: the step to save at
    - ``hold``: the disturbance that is to come from outside, at step ``at``: ``"stop"``,
      ``"kill"``, or ``"save"``, a kill before the save of that step is published
    """

    def __init__(self, options: Options, plan: Mapping[str, Any]) -> None:
        """Start the run and its recording, for which all optimizers of the process are hooked;
        `plan` has the keys above. Raises as `start`."""
        super().__init__(options)
        self._plan = plan
        self._folder = self.folder.path / "drill"
        self._attempt = self._journal.attempt
        self._records = Journal(self._folder, f"rank-{self.rank}", self._attempt)
        self._tracked: dict[str, Any] = {"precision": self._precision}
        self._steps = OptimizerSteps(self._tracked)
        self._step_record: DrillRecord | None = None  # of a step that may go on behind `step`
        self._began = time.monotonic()  # the loop, once there is one
        self._checkpoints.before_publishing = self._hold_save

    def track(
        self, *, per_rank: Sequence[str] = (), added: Sequence[str] = (), **objects: Any
    ) -> None:
        """Track `objects` as `Run.track` does, and record them."""
        super().track(per_rank=per_rank, added=added, **objects)
        self._tracked |= objects

    def _begin_loop(self, is_over: bool) -> None:
        """Begin the loop as `Run` does, and record its start. Nothing is recorded for a loop that
        an earlier attempt has finished (`is_over`): the generators have the states of a later loop
        then. After a resume within an epoch `_restore_step_states` records the start, at the first
        batch: until then the generators have their states of the epoch's begin."""
        super()._begin_loop(is_over)
        self._began = time.monotonic()
        if self._epoch.on_first_batch is None and not is_over:
            self._record("start")

    def _restore_step_states(self) -> Callable[[], None]:
        """Put the checkpoint's state back, record the start of the loop, and return a function that
        undoes the first for the generators."""
        undo = super()._restore_step_states()
        self._record("start")
        return undo

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the epochs as `Run.epochs` does, and record the begin of each but the first, which
        is the loop's start."""
        for number, epoch in enumerate(super().epochs(total)):
            if number:
                self._record("epoch")
            yield epoch

    def step(self, **values: Any) -> None:
        """Record the step, do as `Run.step`, and save, stop or wait for a disturbance as the plan
        says. Do nothing amid accumulating. The state is recorded where the run would save it: that
        may be behind further code of the script, such as a scheduler's step.

        All ranks call it. Raise HpcDdpError if a disturbance that is to end this process does not
        come, OSError if the drill can't be signalled; else as `Run.step`.
        """
        if not self.ends_step:
            return
        step = self.position.step + 1
        check_values(values)
        numbers = {name: plain(scalar) for name, scalar in values.items()}
        # The loader has not counted its batch yet.
        samples = self.position.samples if self._loader is None else self._batch.end
        self._step_record = self._make_record("step", step, samples, numbers)
        hold = self._plan["hold"] if step == self._plan.get("at") else ""
        if hold == "stop":
            self._hold_until_notice()
        if step == self._plan.get("save") or hold == "save":
            self._add_decision(Decision(save=True))
        if self._is_end(step):
            self._notices.reason = CANCELLED  # all stop, and no attempt follows
        super().step(**values)
        if hold == "kill":
            self._manager.settle()  # the kill is to come after the save, if there is one
            self._hold("kill")
        self._add_decision(self._consensus.decide_now())
        if self._acts_in_step:
            self._act_on_decision()

    def finish(self, **results: float | torch.Tensor) -> None:
        """Record the end, unless the run has ended before or fails; then do as `Run.finish`."""
        if not self._calls.is_failing() and not self._is_over:
            self._end_step_record()
            self._record("end")
        super().finish(**results)

    def _act_on_decision(self) -> None:
        """Record the state after a step, which is to be saved now if it is saved at all; then do as
        `Run`."""
        self._end_step_record()
        super()._act_on_decision()

    def _is_end(self, step: int) -> bool:
        """Return whether the plan ends the run at this step: by ``end``, or without it by
        ``seconds`` since the loop's begin."""
        if (end := self._plan.get("end")) is not None:
            return bool(step >= end)
        limit_s = self._plan.get("seconds")
        since_s = time.monotonic() - self._began
        return limit_s is not None and step >= LEAST_STEPS and since_s > limit_s

    def _signal_ready(self) -> None:
        """On rank 0 make an empty file, at which the drill disturbs the run; raise OSError if the
        disk refuses."""
        if self.rank == 0:
            (self._folder / f"ready-{self._attempt}").touch()

    def _hold_until_notice(self) -> None:
        """Signal the drill, then wait on rank 0 for a notice, `HOLD_S` seconds at most; raises as
        `_signal_ready`."""
        self._signal_ready()
        if self.rank == 0:  # the other ranks wait for it at the next exchange
            end = time.monotonic() + HOLD_S
            while self._notices.reason == NONE and time.monotonic() < end:
                time.sleep(0.01)

    def _hold_save(self, step: int) -> None:
        """Wait to be killed if the plan holds the save of this step, else do nothing.

        The saving thread of rank 0 calls it before a save is published, when all files of the draft
        but the manifest are written. Raises as `_hold`.
        """
        if self._plan.get("hold") == "save" and step == self._plan["at"]:
            self._hold("kill in a save")

    def _hold(self, disturbance: str) -> None:
        """Signal the drill, and wait to be killed; raise HpcDdpError, which names the
        `disturbance`, after `HOLD_S` seconds, OSError if the disk refuses the signal."""
        self._signal_ready()
        time.sleep(HOLD_S)
        raise HpcDdpError(f"the drill's {disturbance} did not come")

    def _record(self, moment: str) -> None:
        """Append a record of this rank's state: `moment` is start, epoch or end. If the disk
        refuses, a message is printed once."""
        self._write_record(self._make_record(moment, self.position.step, self.position.samples, {}))

    def _make_record(
        self, moment: str, step: int, samples: int, numbers: Mapping[str, Any]
    ) -> DrillRecord:
        """Return a record without the state: that of a step has the digests of what the optimizers
        have read, and the `numbers` of the script. The optimizers' digests begin anew."""
        digests, gradients_size = self._steps.take()
        return DrillRecord(
            rank=self.rank,
            at=moment,
            step=step,
            epoch=self.position.epoch,
            samples=samples,
            used=digests if moment == "step" else {},
            state={},
            values=numbers,
            sizes={"gradients": gradients_size},
        )

    def _end_step_record(self) -> None:
        """Append the record of the newest step, unless it is written; raises nothing, as
        `_record`."""
        record, self._step_record = self._step_record, None
        if record is not None:
            self._write_record(record)

    def _write_record(self, record: DrillRecord) -> None:
        """Append a record, with the digests of this rank's state and the size of its weights."""
        models = [
            tracked for tracked in self._tracked.values() if isinstance(tracked, torch.nn.Module)
        ]
        weights = size_of(weight for model in models for weight in model.parameters())
        state = {part: digest_of(state) for part, state in self._states().items()}
        self._records.write(
            replace(record, state=state, sizes={**record.sizes, "weights": weights})
        )

    def _states(self) -> dict[str, Any]:
        """Return the states of the tracked objects and of the random generators, by kind and name
        (``model net``); an optimizer's groups are apart, as ``settings NAME``."""
        states: dict[str, Any] = {}
        for name, tracked in self._tracked.items():
            state = dict(unwrap(tracked).state_dict())
            if isinstance(tracked, Optimizer):  # a learning rate, say, which a scheduler changes
                states[f"settings {name}"] = state.pop("param_groups")
            states[f"{_kind(tracked)} {name}"] = state
        for name, generator in rng.snapshot(self.devices).items():
            states[f"random {name}"] = generator
        return states


class OptimizerSteps:
    """Digests of what the process's optimizers read in a step: the gradients and, of an optimizer
    that is not tracked, its state before the step."""

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        """Hook all optimizers of this process, for good. `tracked` has objects by name, and may get
        further ones later; the states of its optimizers are not digested."""
        self._tracked = tracked
        self._digests: dict[str, str] = {}
        self._gradients_size = 0.0
        register_optimizer_step_pre_hook(self._digest_step)

    def take(self) -> tuple[dict[str, str], float]:
        """Return the digests since the last call, by "gradients" and "untracked CLASS", and the sum
        of the gradients' absolute values; both begin anew."""
        digests, self._digests = self._digests, {}
        size, self._gradients_size = self._gradients_size, 0.0
        return digests, size

    def _digest_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Add what an optimizer is about to read to the digests. torch calls it before each step of
        any optimizer, with the step's arguments, which are ignored."""
        groups = optimizer.param_groups
        gradients = [weight.grad for group in groups for weight in group["params"]]
        # A process may step several optimizers, or one of them twice: all count.
        self._digests["gradients"] = digest_of([self._digests.get("gradients"), gradients])
        if not any(tracked is optimizer for tracked in self._tracked.values()):
            self._digests[f"untracked {type(optimizer).__name__}"] = digest_of(
                optimizer.state_dict()
            )
        self._gradients_size += size_of(grad for grad in gradients if grad is not None)


def _kind(tracked: Any) -> str:
    """Return the kind of a tracked object: model, optimizer, scheduler or object."""
    plain_object = unwrap(tracked)
    return next((kind for kind, cls in KINDS.items() if isinstance(plain_object, cls)), "object")


def digest_of(state: Any) -> str:
    """Return the digest, 16 hex digits, of a tree of tensors and plain values, equal where these
    are, bit for bit. A DTensor counts by this rank's part, other objects by their type only."""
    digest = blake2b(digest_size=8)
    _feed(digest, state)
    return digest.hexdigest()


def _feed(digest: Any, state: Any) -> None:
    """Update a blake2b digest by a tree of tensors and plain values; entries of a mapping come in
    the order of their keys' texts. Any other object counts by the name of its type."""
    if isinstance(state, torch.Tensor):
        flat = _local(state).contiguous()
        digest.update(f"{flat.dtype}{tuple(flat.shape)}".encode())
        digest.update(memory_of(flat) if flat.nbytes else b"")
    elif isinstance(state, Mapping):
        digest.update(f"{{{len(state)}".encode())
        for key in sorted(state, key=repr):
            digest.update(f"{key!r}:".encode())
            _feed(digest, state[key])
    elif isinstance(state, (list, tuple, deque)):
        digest.update(f"[{len(state)}".encode())
        for entry in state:
            _feed(digest, entry)
    else:
        text = repr(state) if isinstance(state, ATOMS) else type(state).__name__
        digest.update(f"{text};".encode())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor, as a dense tensor on the CPU, without a graph."""
    local: Any = tensor.detach()
    local = local.to_local() if is_sharded(tensor) else local
    dense: torch.Tensor = (local if local.layout == torch.strided else local.to_dense()).cpu()
    return dense


def size_of(tensors: Iterable[torch.Tensor]) -> float:
    """Return the sum of all absolute values that this rank has, in double precision; 0 without any.
    The real and the imaginary part of a complex number count as two numbers."""
    parts = [_local(tensor).resolve_conj() for tensor in tensors]
    reals = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
    # torch has no norm for other types, as fp8 and whole numbers.
    normed = torch.float16, torch.bfloat16, torch.float32, torch.float64
    numbers = [part if part.dtype in normed else part.double() for part in reals if part.numel()]
    return float(sum(torch.linalg.vector_norm(part, 1, dtype=torch.float64) for part in numbers))
