"""A run under `hpc-ddp drill`: writes down what each step took and left, and is disturbed on cue.

`start` returns a `DrilledRun` where the environment has a plan. Each rank then writes, into
``<run>/drill/rank-<r>.jsonl``, a `record` when the loop begins, after each step and each epoch,
and at the end: a digest of every part of the training's state, and of what the step consumed. Two
runs that are equal bit for bit have equal records, and where they part, the first part that
differs is the cause. `hpc_ddp.launch.compare` has the reader's side.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpc_ddp.run.errors import HpcDdpError
from hpc_ddp.run.events import ANY_RANK, JournalEvent
from hpc_ddp.run.journal import Journal
from hpc_ddp.training import randomness
from hpc_ddp.training.loader import Loader
from hpc_ddp.training.metrics import check_values
from hpc_ddp.training.notice import CANCELLED, NONE
from hpc_ddp.training.parts import Parts
from hpc_ddp.training.run import Run
from hpc_ddp.training.sharded import is_sharded
from hpc_ddp.training.state import unwrap

HOLD_S = 60.0
LEAST_STEPS = 12
# What a scheduler counts for itself, or has in its optimizer too.
OWN_OF_SCHEDULER = {"_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial"}
KINDS = {"optimizer": Optimizer, "scheduler": LRScheduler, "scaler": torch.amp.GradScaler}
SMALL = 65_536  # numbers in a variable of the script that is looked at
ATOMS = (bool, int, float, complex, str, bytes, type(None))
PACKAGE = str(Path(__file__).parents[1])


class DrilledRun(Run):
    """A `Run` that is watched and disturbed. The plan's keys, all optional:

    - ``end``: the step to end at; else after ``seconds`` of training
    - ``save``: the step to save at
    - ``hold``: what is to come from outside, at step ``at``: ``"stop"``, ``"kill"``, or
      ``"save"``, a kill before the save of that step is published
    """

    def __init__(self, parts: Parts, seed: int, plan: Mapping[str, Any]) -> None:
        super().__init__(parts, seed)
        self._plan = plan
        self._folder = parts.folder.path / "drill"
        self._attempt = parts.journal.attempt
        self._journal = Journal(self._folder, f"rank-{self.rank}", self._attempt)
        self._tracked: dict[str, Any] = {"precision": parts.precision}
        self._state = State(self._tracked, self._wrapped)
        self._consumed = Consumed()
        self._began = time.monotonic()
        parts.checkpoints.before_publishing = self._hold_save

    def loader(self, *args: Any, **options: Any) -> Loader:
        made = super().loader(*args, **options)
        made.on_batch = self._consumed.batch
        return made

    def track(self, *, per_rank: Sequence[str] = (), **objects: Any) -> None:
        super().track(per_rank=per_rank, **objects)
        self._tracked |= objects

    def epochs(self, total: int) -> Iterator[int]:
        at = "start"
        for epoch in super().epochs(total):
            self._state.look()
            if at == "start":
                self._consumed.watch(self._state.outermost())
                self._began = time.monotonic()
            self._record(at, self.position.step, {})
            at = "epoch"
            yield epoch

    def step(self, **values: Any) -> None:
        if not self.ends_step:
            return
        step = self.position.step + 1
        check_values(values)
        self._record("step", step, values)
        here = step == self._plan.get("at")
        if here and self._plan["hold"] == "stop":
            self._hold_until_notice()
        if step == self._plan.get("save") or (here and self._plan["hold"] == "save"):
            self._save_due = True
        if self._is_end(step):
            self._parts.notices.reason = CANCELLED  # all stop, and nobody goes on
        super().step(**values)
        if here and self._plan["hold"] == "kill":
            self._parts.keeper.settle()
            self._hold("kill")
        if not self._ends_epoch():
            self._act(self._parts.pace.hear_all())

    def finish(self, **results: float | torch.Tensor) -> None:
        if sys.exc_info()[0] is None and not self._over:
            self._record("end", self.position.step, {})
        super().finish(**results)

    def _is_end(self, step: int) -> bool:
        if (end := self._plan.get("end")) is not None:
            return bool(step >= end)
        limit_s = self._plan.get("seconds")
        since = time.monotonic() - self._began
        return limit_s is not None and step >= LEAST_STEPS and since > limit_s

    # -- disturbances ----------------------------------------------------------------------

    def _ready(self) -> None:
        """Tell the drill that this is the moment."""
        if self.rank == 0:
            (self._folder / f"ready-{self._attempt}").touch()

    def _hold_until_notice(self) -> None:
        self._ready()
        if self.rank == 0:  # the others wait for it at the next exchange
            end = time.monotonic() + HOLD_S
            while self._parts.notices.reason == NONE and time.monotonic() < end:
                time.sleep(0.01)

    def _hold_save(self, step: int) -> None:
        """In the saving thread of rank 0, with all files of the draft but the manifest written."""
        if self._plan.get("hold") == "save" and step == self._plan["at"]:
            self._hold("kill in a save")

    def _hold(self, what: str) -> None:
        self._ready()
        time.sleep(HOLD_S)
        raise HpcDdpError(f"the drill's {what} did not come")

    # -- records ---------------------------------------------------------------------------

    def _record(self, at: str, step: int, values: Mapping[str, Any]) -> None:
        """Write one record; the parts stand in the order in which one follows from another."""
        used = self._consumed.take() if at == "step" else {}
        record = dict(
            rank=self.rank,
            at=at,
            step=step,
            epoch=self.position.epoch,
            samples=self.position.samples,
            used=used,
            state={**self._state.digests(), **_generators(self.devices)},
            values={name: _number(value) for name, value in values.items()},
            sizes={"gradients": self._consumed.gradients_size, "weights": self._state.size()},
            untracked=self._state.untracked(),
            variables=_variables(sys._getframe()),
        )
        self._journal.write(DrillRecord(record))


@dataclass(frozen=True)
class DrillRecord(JournalEvent):
    """What a rank used and had at one step, as digests, in a journal of the drill's own."""

    event = "record"
    writer = ANY_RANK
    values: Mapping[str, Any]

    def to_fields(self) -> dict[str, Any]:
        return {**self.values}


class Consumed:
    """What a step takes: batches of the loader, inputs of the model, gradients."""

    def __init__(self) -> None:
        self._parts: dict[str, Any] = {}
        self.gradients_size = 0.0
        register_optimizer_step_pre_hook(self._gradients)

    def watch(self, models: Iterable[torch.nn.Module]) -> None:
        for model in models:
            model.register_forward_pre_hook(self._inputs, with_kwargs=True)

    def take(self) -> dict[str, str]:
        """Return the digests of this step, and begin the next."""
        found = {name: digest.hexdigest() for name, digest in self._parts.items()}
        self._parts = {}
        return found

    def batch(self, batch: Any) -> None:
        _feed(self._of("data"), batch)

    def _inputs(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():  # not those of an evaluation
            _feed(self._of("inputs"), [args, kwargs])

    def _gradients(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        params = [each for group in optimizer.param_groups for each in group["params"]]
        found = [each.grad for each in params]
        _feed(self._of("gradients"), found)
        self.gradients_size = _size(each for each in found if each is not None)

    def _of(self, name: str) -> Any:
        return self._parts.setdefault(name, blake2b(digest_size=8))


class State:
    """The objects that hold the training's state, whether the script tracks them or not."""

    def __init__(self, tracked: dict[str, Any], wrapped: list[Any]) -> None:
        self._tracked, self._wrapped = tracked, wrapped
        self._others: dict[str, Any] = {}

    def look(self) -> None:
        """Find what the script did not name in `track`: all there is of the kinds that count."""
        gc.collect()  # what the script has replaced is no part of it any more
        known = {id(unwrap(each)) for each in self._tracked.values()}
        names = {id(each): name for name, each in _named(sys._getframe())}
        alive = gc.get_objects()
        kinds = {each: _kind_of(each) for each in {type(each) for each in alive}}
        found = [("model", each) for each in self._wrapped]
        found += [(kind, each) for each in alive if (kind := kinds.get(type(each)))]
        self._others = {}
        for kind, each in found:
            if id(unwrap(each)) not in known:
                stem = label = f"{kind} {names.get(id(each), type(each).__name__)}"
                while label in self._others:
                    label = f"{stem} {len(self._others)}"
                self._others[label] = each

    def outermost(self) -> list[torch.nn.Module]:
        """Return the models that the script calls, less what is inside of another one."""
        inside = {id(unwrap(each)) for each in self._wrapped}
        models = [each for each in self._tracked.values() if isinstance(each, torch.nn.Module)]
        return [*self._wrapped, *(each for each in models if id(unwrap(each)) not in inside)]

    def untracked(self) -> list[str]:
        return list(self._others)

    def digests(self) -> dict[str, str]:
        """Return a digest of each object's state: models, then optimizers, then the others."""
        named = {f"{_kind(each)} {name}": each for name, each in self._tracked.items()}
        named |= self._others
        order = ["model", *KINDS, "object"]
        parts = sorted(named.items(), key=lambda item: order.index(item[0].split()[0]))
        return {name: _digest(_state_of(each)) for name, each in parts}

    def size(self) -> float:
        models = [each for each in self._tracked.values() if isinstance(each, torch.nn.Module)]
        return _size(p for each in [*models, *self._wrapped] for p in each.parameters())


def _kind(each: Any) -> str:
    if isinstance(unwrap(each), torch.nn.Module):
        return "model"
    return _kind_of(type(each)) or "object"


def _kind_of(cls: type) -> str | None:
    return next((kind for kind, base in KINDS.items() if issubclass(cls, base)), None)


def _state_of(each: Any) -> Any:
    state = unwrap(each).state_dict()
    return _without(state, OWN_OF_SCHEDULER) if isinstance(each, LRScheduler) else state


def _without(value: Any, keys: set[str]) -> Any:
    if isinstance(value, Mapping):
        return {k: _without(item, keys) for k, item in value.items() if k not in keys}
    return [_without(item, keys) for item in value] if isinstance(value, list) else value


def _generators(devices: Sequence[torch.device]) -> dict[str, str]:
    state = randomness.snapshot(devices)
    return {f"random {name}": _digest(each) for name, each in state.items()}


# -- digests -------------------------------------------------------------------------------


def _digest(value: Any) -> str:
    found = blake2b(digest_size=8)
    _feed(found, value)
    return found.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    """Put a value into a digest, bit for bit; of what is no plain value, only its type."""
    if isinstance(value, torch.Tensor):
        flat = _local(value).contiguous()
        digest.update(f"{flat.dtype}{tuple(flat.shape)}".encode())
        if flat.nbytes:
            digest.update((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            digest.update(repr(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, (list, tuple, deque)):
        digest.update(f"[{len(value)}".encode())
        for each in value:
            _feed(digest, each)
    elif isinstance(value, ATOMS):
        digest.update(repr(value).encode())
    else:
        digest.update(type(value).__name__.encode())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor, on the CPU and with strides."""
    local: Any = tensor.detach()
    local = local.to_local() if is_sharded(tensor) else local
    found: torch.Tensor = (local if local.layout == torch.strided else local.to_dense()).cpu()
    return found


def _size(tensors: Iterable[torch.Tensor]) -> float:
    """Return the sum of all absolute values, in double precision."""
    parts = [_local(each) for each in tensors]
    norms = [torch.linalg.vector_norm(p, 1, dtype=torch.float64) for p in parts if p.numel()]
    return float(sum(norms))


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


# -- the script's own variables ------------------------------------------------------------


def _variables(frame: FrameType) -> dict[str, tuple[str, str]]:
    """Return a digest and the text of each plain variable that the script has by a name.

    They say nothing by themselves (a clock differs, too), but where two runs have parted, they
    tell which of them was not taken up again.
    """
    found: dict[str, tuple[str, str]] = {}
    for name, value in _named(frame):
        plain = _plain(value)
        if plain is not None and name not in found:
            found[name] = _digest(plain[0]), _shown(value)
    return found


def _shown(value: Any) -> str:
    with suppress(Exception):  # no scalar
        value = _number(value)
    return f"{value!r:.24}" if isinstance(value, (bool, int, float)) else type(value).__name__


def _plain(value: Any) -> tuple[Any] | None:
    """Return the value, or a generator's state, in a tuple; None for what is not looked at."""
    if isinstance(value, torch.Tensor):
        return (value,) if value.numel() <= SMALL else None
    if isinstance(value, torch.Generator):
        return (value.get_state(),)
    if isinstance(value, random.Random):
        return (value.getstate(),)
    if type(value).__module__.startswith("numpy.random"):
        state: Any = getattr(value, "bit_generator", value)
        return (repr(getattr(state, "state", None)),)
    if hasattr(value, "tobytes") and hasattr(value, "nbytes"):  # numpy's
        return (value.tobytes(),) if value.nbytes <= SMALL else None
    if isinstance(value, (list, tuple, deque, dict)) and len(value) <= SMALL:
        items = value.values() if isinstance(value, dict) else value
        return (value,) if all(isinstance(each, ATOMS) for each in items) else None
    return (value,) if isinstance(value, ATOMS) else None


def _named(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Yield what the script can name: its functions' variables, innermost first, then the main
    module's, and the attributes of those that are of a class of its own."""
    spaces: list[dict[str, Any]] = []
    while frame is not None:
        if not frame.f_code.co_filename.startswith((PACKAGE, torch.__path__[0])):
            spaces.append(frame.f_locals)
        frame = frame.f_back
    spaces.append(vars(sys.modules["__main__"]))
    for space in spaces:
        for name, value in list(space.items()):
            if name.startswith("__") or isinstance(value, Run):
                continue
            yield name, value
            inner = unwrap(value)
            if _is_theirs(type(inner)):
                yield from ((f"{name}.{key}", each) for key, each in list(vars(inner).items()))


def _is_theirs(kind: type) -> bool:
    """Tell whether a class was written for the script: its instances have attributes to look at."""
    module = sys.modules.get(kind.__module__)
    file = str(getattr(module, "__file__", None) or "")
    code = os.environ.get("HPC_DDP_CODE") or os.getcwd()
    theirs = file.startswith(code) and "site-packages" not in file
    return theirs and "__dict__" in dir(kind)
