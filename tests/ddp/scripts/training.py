"""The training that the tests interrupt: several gradient buckets, and every kind of randomness."""

import argparse
import ctypes
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from hpc_ddp.training import Run, start
from hpc_ddp.training.checkpoint import save as saver
from hpc_ddp.training.checkpoint.storage import index, shards
from hpc_ddp.training.checkpoint.storage.resharding import Reader
from hpc_ddp.training.models.ddp import BucketOrders
from hpc_ddp.training.process import control_tree
from hpc_ddp.training.stops import signals

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=203)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--stream", action="store_true")
parser.add_argument("--bad-sample", type=int)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save-every-steps", type=int)
parser.add_argument("--save-every", type=lambda text: text if text == "auto" else float(text))
parser.add_argument("--keep-every", type=int)
parser.add_argument("--scores", type=float, nargs="*", help="what run.best is given, by epoch")
parser.add_argument("--sharded", action="store_true", help="FSDP2 in place of DDP")
parser.add_argument("--step-seconds", type=float, default=0.0)
parser.add_argument("--at", type=int, default=-1, help="the step, from 1, in which to ...")
parser.add_argument("--signal", type=int, help="... send a signal to this very process,")
parser.add_argument("--wait", help="... wait for a file,")
parser.add_argument("--hold", help="... wait in C for a `group`, or with Python's `lock`,")
parser.add_argument("--make", help="... make a folder,")
parser.add_argument("--exit", type=int, help="... leave with a code,")
parser.add_argument("--fail", action="store_true", help="... raise,")
parser.add_argument("--ranks", default="0123", help="... on these ranks")
parser.add_argument("--word-seconds", type=float, help="how long a signal waits for its word")
parser.add_argument("--print-save-seconds", action="store_true")
parser.add_argument("--unsettled", action="store_true")
parser.add_argument("--late", type=float, default=0.0, help="seconds to stay after the end")
parser.add_argument("--patience", type=float, help="seconds for which saves may fail")
parser.add_argument("--share-files", action="store_true", help="the ranks write into one file")
parser.add_argument("--nodes", action="store_true", help="each rank has a node of its own")
parser.add_argument("--fanout", type=int, help="ranks in a group of the control tree")
args = parser.parse_args()
shards.LEAST_SHARE = 1  # all ranks write, as they do with larger models
if args.patience is not None:
    saver.PATIENCE_S = args.patience
if args.nodes:
    os.environ.update(LOCAL_WORLD_SIZE="1", HPC_DDP_NODE=f"n{os.environ['RANK']}")
    read = Reader._read
    sizes: list[int] = []

    def count(reader: Reader, path: Path, offset: int, memory: memoryview) -> None:
        sizes.append(len(memory))
        read(reader, path, offset, memory)

    Reader._read = count  # type: ignore[method-assign, assignment]
if args.share_files:
    index.MOST_FILES = 1
if args.fanout is not None:
    control_tree.FANOUT = control_tree.MOST_IN_ONE_GROUP = args.fanout
if args.word_seconds is not None:
    signals.WORD_S = args.word_seconds

if args.unsettled:
    BucketOrders.load = lambda self, orders: None  # type: ignore[method-assign]


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sample i is i in the first number, and noise from all three generators in the others."""

    def __len__(self) -> int:
        return int(args.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == args.bad_sample:
            raise ValueError(f"no sample {index}")
        noise = torch.randn(30)
        more = torch.tensor([float(index), random.random(), numpy.random.random()])
        return torch.cat([more, noise]), torch.tensor(index % 10)


class IterableBatches(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """The same samples one after the other."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return (Noisy()[index] for index in range(args.samples))


def act(run: Run) -> None:
    if run.position.step + 1 != args.at or str(run.rank) not in args.ranks:
        return
    print("ACTING", flush=True)
    if args.wait:
        while not Path(args.wait).exists():
            time.sleep(0.01)
    if args.make:
        Path(args.make).mkdir()
    if args.hold == "group":
        torch.distributed.all_reduce(torch.zeros(1, device=run.device), group=aside)
    if args.hold == "lock":
        ctypes.PyDLL(None).sleep(600)
    if args.signal:
        os.kill(os.getpid(), args.signal)
        while args.signal == signal.SIGTERM and not run._notices.reason:
            time.sleep(0.001)  # for the listening thread
    if args.exit:
        sys.exit(args.exit)
    if args.fail:
        raise ValueError("a bad batch")


run = start(
    args.seed,
    save_every=args.save_every or 300.0,
    save_every_steps=args.save_every_steps,
    keep_every=args.keep_every,
)
if args.print_save_seconds:
    print(f"a save takes {run._schedule.save_s()!r} s", flush=True)
aside: Any = torch.distributed.new_group() if args.hold == "group" else None
layers: list[nn.Module] = [nn.Linear(33, args.width)]
for _ in range(args.layers):
    layers += [nn.ReLU(), nn.Dropout(0.1), nn.Linear(args.width, args.width)]
    layers += [nn.BatchNorm1d(args.width) if args.batch_size > 3 else nn.LayerNorm(args.width)]
head = nn.Linear(args.width, 10)
net = nn.Sequential(*layers, head)
if args.sharded:
    from torch.distributed.fsdp import fully_shard

    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    model: nn.Module = net
else:
    model = run.wrap(net, bucket_cap_mb=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
batches = run.loader(
    IterableBatches() if args.stream else Noisy(),
    args.batch_size,
    accumulate=args.accumulate,
    num_workers=args.workers,
)
run.track(model=model, optimizer=optimizer, scheduler=scheduler)
if args.nodes:
    (run.folder.path / f"read-{run.rank}").write_text(str(sum(sizes)))

for epoch in run.epochs(args.epochs):
    seen: list[int] = []
    for x, y in batches:
        micro_batch = batches.micro_batch
        seen = x[:, 0].round().int().tolist() if micro_batch.weight else []
        loss = nn.functional.cross_entropy(model(x), y)
        run.backward(loss)
        if run.ends_step:
            optimizer.step()
            optimizer.zero_grad()
        with open(run.folder.path / f"seen-{run.rank}", "a") as file:
            file.write(f"{epoch} {run.position.step + 1} {' '.join(map(str, seen))}\n")
        time.sleep(args.step_seconds)
        act(run)
        run.step(loss=loss)
        if run.ends_step and run.position.step % 3 == 0:  # part of the step, too
            with torch.no_grad():
                for parameter in head.parameters():
                    parameter.mul_(0.99)
    scheduler.step()
    run.print(f"END OF EPOCH {epoch} lr {scheduler.get_last_lr()[0]:.6f}")
    if args.scores and not run.best(args.scores[epoch]) and run.stale == 2:
        run.print("STALE")
        break

state = {name: getattr(v, "full_tensor", lambda v=v: v)() for name, v in net.state_dict().items()}
if run.rank == 0:
    (run.folder.path / "weights").write_bytes(
        b"".join(v.cpu().numpy().tobytes() for v in state.values())
    )
run.finish()
time.sleep(args.late)
