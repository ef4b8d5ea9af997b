"""Loops drawn at random, each played whole, without its peeks, and with a stop and a resume.

``random_loops.py FIRST COUNT [FAULT]`` prints a line for each seed whose loop a peek or a resume
has changed without a warning. FAULT puts an old fault back, which has to be found.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training import start
from hpc_ddp.training.checkpoint import put_back as checkpoint
from hpc_ddp.training.checkpoint.manager import CheckpointManager
from hpc_ddp.training.data.loader import Loader
from hpc_ddp.training.data.rerun_lines import Settings
from hpc_ddp.training.data.sample_seeds import SampleSeeds
from hpc_ddp.training.models import rng
from hpc_ddp.training.models.generators import Generators
from hpc_ddp.training.process import member, process_group, run_directory
from hpc_ddp.training.stops import consensus
from hpc_ddp.training.stops.signals import NOTICE

SAMPLES = 23
MOMENTS = ("before the loop", "in an epoch", "before a step", "behind a step", "behind an epoch")
BEGINS = ("train", "look", "look at two", "draw", "decay", "schedule", "sync", "reset")
CHANGES = ("rate", "weights", "rate before the best")  # between two loops
Row = tuple[Any, ...]


class Killed(Exception):  # what a SIGKILL would do
    pass


class Noise:
    """A transform with a generator of its own, as MONAI has them."""

    def __init__(self) -> None:
        self.set_random_state(7)

    def set_random_state(self, seed: int) -> None:
        self.R = random.Random(seed)

    def __call__(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers + self.R.random()


class Noisy(Dataset[tuple[int, torch.Tensor]]):
    def __init__(self, transform: Noise | None = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        numbers = torch.randn(3) + random.random()
        return index, self.transform(numbers) if self.transform else numbers


class Stream(Noisy, IterableDataset[tuple[int, torch.Tensor]]):
    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        yield from (self[index] for index in range(SAMPLES))


class Schedule:
    """A scheduler of the script's own class."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, torch.zeros(())

    def step(self) -> None:
        self.count = self.count + 1
        self.optimizer.param_groups[0]["lr"] = 0.01 * 0.7 ** self.count.item()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.count = state["count"]


@dataclass(frozen=True)
class Loop:
    """A loop: how it counts, where its batches come from, and what else it does."""

    by: str  # epochs or steps
    source: str  # loader, stream, drawn or own
    batch_size: int
    accumulate: int
    total: int  # epochs, or steps
    length: int | None  # batches after which an epoch is left
    passed_over: int | None  # every so many batches one without a step
    evaluates: str  # "", shard, or own: a DataLoader inside the loop
    draws: bool  # random numbers beside those of the data
    behind: bool  # weights change behind run.step
    peeks: tuple[str, ...]
    end: str  # stop or kill, or kill behind the loop
    end_at: int  # the step at which it comes
    save_every: int
    has_noise: bool  # of a transform that is the data set's
    has_generator: bool  # of the script, for what it draws
    frozen_at: int | None  # the epoch or step at which a weight is
    left_at: int | None  # the epoch or step behind which the loop is
    reloads: bool  # the best weights in the loop, where they get worse
    begins: tuple[str, ...]  # what each epoch does before its batches, of `BEGINS`
    stages: int  # loops, one behind the other
    changes: tuple[str, ...]  # between them
    skips: bool  # a loop, where the position is behind it
    sets_rate: bool  # the learning rate, before the first loop
    looks_first: bool  # at the model in eval mode, before the first loop
    mixes: bool  # by a tracked generator where batches are made
    quiet_at: int | None  # the step from which there is no dropout
    keeps: bool  # the iterators of its looks
    looks_behind: bool  # at a batch, behind run.track
    asks_first: bool  # for the length of the epoch, before it trains
    thawed_at: int | None  # the epoch or step at which a weight is that is frozen behind run.track

    @classmethod
    def draw(cls, seed: int) -> Loop:
        dice = random.Random(seed)
        by = dice.choice(("epochs", "steps"))
        source = dice.choice(("loader", "loader", "stream", "drawn", "own"))
        has_loader = source in ("loader", "stream")
        end = dice.choice(("stop", "kill"))
        return cls(
            by=by,
            source=source,
            batch_size=dice.randint(2, 5),
            accumulate=dice.choice((1, 1, 2, 3)) if has_loader else 1,
            total=dice.randint(2, 3) if by == "epochs" else dice.randint(9, 14),
            length=dice.randint(4, 9) if by == "epochs" and dice.random() < 0.3 else None,
            passed_over=dice.randint(3, 5) if has_loader and dice.random() < 0.3 else None,
            evaluates=dice.choice(("", "shard", "own")),
            draws=dice.random() < 0.5,
            # Without a batch to ask for, run.step has the save, and is the last line.
            behind=dice.random() < 0.5 and (has_loader or by == "steps"),
            peeks=tuple(m for m in MOMENTS if dice.random() < 0.4) if has_loader else (),
            end=end,
            end_at=dice.randint(2, 7),
            save_every=dice.randint(1, 3),
            has_noise=dice.random() < 0.5,
            has_generator=dice.random() < 0.5,
            frozen_at=dice.randint(0, 3) if dice.random() < 0.4 else None,
            left_at=dice.randint(0, 2 if by == "epochs" else 12) if dice.random() < 0.4 else None,
            reloads=dice.random() < 0.3,
            begins=tuple(b for b in BEGINS if has_loader and dice.random() < 0.3),
            stages=dice.choice((1, 1, 1, 2, 2, 3)),
            changes=tuple(c for c in CHANGES if dice.random() < 0.4),
            skips=dice.random() < 0.3,
            sets_rate=dice.random() < 0.3,
            looks_first=by == "epochs" and dice.random() < 0.3,
            mixes=dice.random() < 0.3,
            quiet_at=dice.randint(1, 6) if dice.random() < 0.3 else None,
            keeps=dice.random() < 0.4,
            looks_behind=has_loader and dice.random() < 0.3,
            asks_first=dice.random() < 0.4,
            thawed_at=dice.randint(1, 4) if dice.random() < 0.3 else None,
        ).with_end(dice.choice((end, "kill behind the loop")), dice.randint(2, 18))

    def with_end(self, end: str, late: int) -> Loop:
        """Return the loop with another end, if it is for loops that are left early, and one with a
        second stage with an end at the step `late`; one that mixes has no peeks, which draw."""
        loop = self if self.left_at is None else replace(self, end=end)
        if loop.thawed_at is not None:  # one weight of two is trained
            loop = replace(loop, frozen_at=None)
        if loop.mixes:
            begins = tuple(begin for begin in loop.begins if "look" not in begin)
            loop = replace(loop, peeks=(), begins=begins, looks_behind=False)
        return replace(loop, end_at=late) if self.stages > 1 else loop


def play(loop: Loop, rows: list[Row], end_at: int | None = None) -> int:
    """Play a loop in the working directory, to its end or to the step `end_at`; append a row for
    each step and evaluation to `rows`, and return the step from which it went on."""
    run = start(progress=False, hang_after=None, save_every=None, save_every_steps=loop.save_every)
    layer, dropout = nn.Linear(3, 1), nn.Dropout(0.2)
    model = run.wrap(nn.Sequential(dropout, layer), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batches: Any = None
    mixture = random.Random(11)

    def mixed(samples: list[tuple[int, torch.Tensor]]) -> Any:
        """Make a batch, in parts of itself."""
        indices, inputs = default_collate(samples)
        return indices, inputs + mixture.random() * inputs.flip(0)

    if loop.source in ("loader", "stream"):
        noise = Noise() if loop.has_noise else None
        data: Any = Noisy(noise) if loop.source == "loader" else Stream(noise)
        options: dict[str, Any] = {"collate_fn": mixed} if loop.mixes else {}
        batches = run.loader(data, loop.batch_size, accumulate=loop.accumulate, **options)
    looks: list[Any] = []  # that are kept

    def look() -> Any:
        """Look at a batch."""
        looks[:] = [iter(batches)]
        batch = next(looks[0])
        if not loop.keeps:
            looks.clear()
        return batch

    own = DataLoader(Noisy(), loop.batch_size, shuffle=True)
    shard = run.shard(Noisy(), loop.batch_size)
    if "before the loop" in loop.peeks:
        look()
    teacher = nn.Linear(3, 1).to(run.device)
    generator = torch.Generator().manual_seed(5) if loop.has_generator else None
    schedule = Schedule(optimizer)
    more: dict[str, Any] = {"schedule": schedule, "mixture": mixture}
    more |= {"generator": generator} if generator else {}
    run.track(model=model, optimizer=optimizer, teacher=teacher, **more)
    if loop.thawed_at is not None:
        layer.weight.requires_grad_(False)
    first = look()[1].mean() if loop.looks_behind else torch.zeros((), device=run.device)
    begun_at = run.position.step
    shift = [0.0]  # of the inputs in an epoch

    def peek(moment: str) -> None:
        if moment in loop.peeks:
            list(islice(batches, 2 if moment in ("in an epoch", "before a step") else 1))

    def draw_batches() -> Iterator[Any]:
        """Yield the batches of an epoch; by steps without an end."""
        while True:
            if loop.source == "drawn":
                for _ in range(6):
                    yield (
                        torch.randint(SAMPLES, (loop.batch_size,)),
                        torch.randn(loop.batch_size, 3),
                    )
            else:
                yield from own if loop.source == "own" else batches
            if loop.by == "epochs":
                return

    def weights() -> tuple[float, ...]:
        return tuple(torch.cat([w.detach().flatten() for w in model.parameters()]).tolist())

    def train(batch: Any) -> None:
        """Train on a batch: the body of the loop."""
        indices, inputs = batch
        peek("before a step")
        if run.position.step == loop.quiet_at:
            dropout.eval()
        target = teacher(inputs).detach() if "sync" in loop.begins else first
        run.backward((model(inputs + shift[0]) - target).square().mean())
        if not run.ends_step:
            return
        optimizer.step()
        optimizer.zero_grad()
        drawn = (torch.rand((), generator=generator).item(), random.random()) if loop.draws else ()
        step = run.position.step + 1
        row = (step, tuple(indices.tolist()), drawn, weights())
        if step == end_at and loop.end == "kill":
            run._checkpoints.settle()
            run._notices._ended = True
            raise Killed
        if step == end_at:
            run._notices.reason = NOTICE
        if loop.source == "loader" or loop.by == "steps":
            run.step()
            rows.append(row)
        else:  # behind run.step nothing is sure to run without a batch to ask for
            rows.append(row)
            run.step()
        peek("behind a step")
        if loop.behind:
            with torch.no_grad():
                layer.bias.mul_(0.9)

    def evaluate() -> None:
        if loop.evaluates:
            with run.evaluating(model) as plain:
                source: Any = shard if loop.evaluates == "shard" else own
                sums = [plain(inputs.to(run.device)).sum().item() for _, inputs in source]
            rows.append((run.position.step, "evaluated", tuple(sums), weights()))

    def begin(epoch: int) -> None:
        """Do what stands at the top of an epoch, and runs a second time at a resume in it."""
        if "train" in loop.begins or loop.looks_first:
            model.train()
        if "look" in loop.begins:
            look()
        if "look at two" in loop.begins:
            for number, _ in enumerate(batches):
                if number == 1:
                    break
        if "sync" in loop.begins:
            teacher.load_state_dict(layer.state_dict())
        if "reset" in loop.begins:
            for state in optimizer.state.values():
                state["momentum_buffer"].mul_(0.5)
        if "draw" in loop.begins:
            shift[0] = torch.rand((), generator=generator).item()
        if "decay" in loop.begins and epoch:
            optimizer.param_groups[0]["lr"] *= 0.5
        if "schedule" in loop.begins and epoch:
            schedule.step()

    def freeze(number: int) -> None:
        if number == loop.frozen_at:
            layer.bias.requires_grad_(False)
        if number == loop.thawed_at:
            layer.weight.requires_grad_(True)

    def judge_weights() -> None:
        if not run.best(run.position.step % 4) and loop.reloads:
            rows.append((run.position.step, "reloaded", run.load_best(model), weights()))

    def end_behind_the_loop() -> None:
        """Load the best weights, as behind an early stop; a test pass would follow."""
        step = run.load_best(model)
        if end_at is not None and loop.end == "kill behind the loop":
            run._notices._ended = True
            raise Killed
        rows.append((run.position.step, "best", step, weights()))

    def is_passed_over(batch: Any) -> bool:
        if loop.passed_over is None or loop.accumulate > 1:
            return False
        return int(batch[0].sum()) % loop.passed_over == 1

    def train_until(total: int, left_at: int | None = None) -> None:
        """Train for epochs or steps: a loop."""
        if loop.by == "steps":
            source = draw_batches()
            for step in run.steps(total):
                freeze(step)
                while run.position.step == step:
                    batch = next(source)
                    if not is_passed_over(batch):
                        train(batch)
                if run.position.step % 4 == 0:
                    evaluate()
                if run.position.step % 3 == 1:
                    judge_weights()
                if step == left_at:
                    break
        else:
            for epoch in run.epochs(total):
                begin(epoch)
                freeze(epoch)
                peek("in an epoch")
                for batch in draw_batches():
                    is_full = loop.length and run.position.epoch_steps >= loop.length
                    if is_full and loop.asks_first:
                        break
                    if is_passed_over(batch):
                        continue
                    train(batch)
                    is_full = loop.length and run.position.epoch_steps >= loop.length
                    if is_full and not loop.asks_first:
                        break
                evaluate()
                peek("behind an epoch")
                judge_weights()
                if epoch == left_at:
                    break

    def change_between() -> None:
        """Do what stands between two loops."""
        if "rate" in loop.changes:
            optimizer.param_groups[0]["lr"] *= 0.5
        if "weights" in loop.changes:
            with torch.no_grad():
                layer.bias.zero_()

    if loop.looks_first:
        model.eval()
    if loop.sets_rate:
        optimizer.param_groups[0]["lr"] = 0.01
    for stage in range(loop.stages):
        total = loop.total + stage * (2 if loop.by == "epochs" else 6)
        done = run.position.epoch if loop.by == "epochs" else run.position.step
        if stage:
            change_between()
        if not (loop.skips and stage < loop.stages - 1 and done >= total):
            train_until(total, None if stage else loop.left_at)
        if stage < loop.stages - 1:
            if "rate before the best" in loop.changes:
                optimizer.param_groups[0]["lr"] *= 0.6
            run.load_best(model)
    end_behind_the_loop()
    run.finish()
    return begun_at


@contextmanager
def folder(name: str) -> Iterator[None]:
    """Be in a new folder of that name: a plain start has its run there."""
    Path(name).mkdir()
    os.chdir(name)
    try:
        yield
    finally:
        os.chdir("..")


def is_ended(loop: Loop, rows: list[Row]) -> bool:
    """Play a loop until its end comes, as a process of its own would; return whether it came."""
    try:
        play(loop, rows, loop.end_at)
    except SystemExit:
        return True
    except Killed:
        dist.destroy_process_group()
        return True
    return False


def judge(seed: int) -> str:
    """Return what is wrong with the loop of a seed, "" if nothing is."""
    loop, warnings = Loop.draw(seed), list[str]()
    whole, plain, before, behind = list[Row](), list[Row](), list[Row](), list[Row]()
    vars(member)["say"] = warnings.append
    with folder(f"{seed}-whole"):
        play(loop, whole)
    with folder(f"{seed}-plain"):
        play(replace(loop, peeks=()), plain)
    if whole != plain:
        return f"peeks change {loop}"
    with folder(f"{seed}-disturbed"):
        if is_ended(loop, before):
            warnings.clear()
            begun_at = play(loop, behind)
            before = [row for row in before if row[0] <= begun_at]
            if is_undecidable(loop, begun_at):
                return ""
    is_warned = any("WARNING" in text for text in warnings)
    return "" if before + behind == whole or is_warned else f"a {loop.end} changes {loop}"


def is_undecidable(loop: Loop, begun_at: int) -> bool:
    """Return whether nothing tells what a resume at a step has to do (decision 020). A look that
    stays open may be the loop's own iteration: what is drawn behind it, before the first step, is
    of that step. A first loop that the script skips, with a stop at its last step, may be the
    second one with more steps."""
    is_kept = loop.keeps and "draw" in loop.begins and "look" in loop.begins
    is_skipped = loop.skips and loop.stages > 1 and loop.by == "steps" and begun_at == loop.total
    return is_kept or is_skipped


def put_back(fault: str) -> None:
    """Put an old fault back: a batch counts when it is yielded, or part of the state is not
    restored."""
    if fault == "peek":
        iterate = Loader.__iter__

        def count_at_once(self: Loader) -> Iterator[Any]:
            for content in iterate(self):
                self._position.samples = self.batch.end
                yield content

        Loader.__iter__ = count_at_once  # type: ignore[method-assign]
    elif fault == "random":
        Generators.begin_loop = lambda *loop, **ways: None  # type: ignore[method-assign]
    elif fault == "top":
        Generators.restore_step_states = lambda self: lambda: None  # type: ignore[method-assign]
    elif fault == "settings":
        Settings.put_back = lambda self, say: None  # type: ignore[method-assign]
    elif fault == "stage":
        begin_loop = Generators.begin_loop

        def begin_first(self: Generators, seed: int, **ways: bool) -> None:
            begin_loop(self, seed, **{**ways, "is_checkpoints": True, "is_over": False})

        Generators.begin_loop = begin_first  # type: ignore[method-assign]
    elif fault == "left":
        track = CheckpointManager.track

        def forget(self: CheckpointManager, *things: Any) -> None:
            track(self, *things)
            self._position.abandoned = {}

        CheckpointManager.track = forget  # type: ignore[assignment, method-assign]
    elif fault == "frozen":
        vars(checkpoint)["put_flags_back"] = lambda *things: []
    elif fault == "generator":
        rng.GeneratorState.load_state_dict = lambda self, stored: None  # type: ignore[method-assign]
    elif fault == "noise":
        SampleSeeds.seed = lambda self, number: rng.seed_all(number)  # type: ignore[method-assign]


if __name__ == "__main__":
    first, count, *faults = sys.argv[1:]
    put_back(*faults or [""])
    vars(consensus)["next_period"] = lambda current, step_us: 1  # a stop comes at the next step
    vars(process_group)["skip_teardown_at_exit"] = lambda: None
    vars(run_directory)["_may_be_live"] = lambda *attempt: (
        False
    )  # the killed run was this process's
    for name in ("HPC_DDP_RUN", "HPC_DDP_ATTEMPT"):  # each loop is a run of its own
        os.environ.pop(name, None)
    os.chdir(tempfile.mkdtemp(dir="."))
    for seed in range(int(first), int(first) + int(count)):
        try:
            wrong = judge(seed)
        except UsageError as error:
            wrong = f"a right loop is refused: {error}; {Loop.draw(seed)}"
            dist.destroy_process_group()
        gc.collect()  # process groups and their sockets
        if wrong:
            print(f"SEED {seed}: {wrong}", flush=True)
            if faults:
                break
    print(f"PLAYED {seed - int(first) + 1}")
