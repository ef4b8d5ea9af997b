"""Train a small ConvNet on 8x8 images of hand-written digits.

Alone, on two processes of this machine, and on two nodes of a cluster::

    python jobs/digits.py
    torchrun --nproc-per-node 2 jobs/digits.py
    hpc-ddp dry-run --nproc-per-node 2 jobs/digits.py --epochs 5
    hpc-ddp submit --nodes 2 --gpus-per-node 4 --time 10:00 jobs/digits.py

Stop it whenever you like (Ctrl-C, `hpc-ddp cancel`, preemption) and start it again with the
same command: it goes on at the next step, and ends with the same weights.

Data: Optical Recognition of Handwritten Digits (E. Alpaydin, C. Kaynak, 1998), UCI Machine
Learning Repository, CC BY 4.0; see jobs/data/README.md. Nothing is downloaded.
"""

import argparse
import gzip
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_ddp.training import Run, start

DATA = Path(__file__).parent / "data" / "digits.csv.gz"


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return training and test set: images (n, 1, 8, 8) from 0 to 1, and labels (n,)."""
    with gzip.open(DATA, "rt") as lines:
        table = torch.tensor([[float(number) for number in line.split(",")] for line in lines])
    images, labels = table[:, :64].reshape(-1, 1, 8, 8) / 16, table[:, 64].long()
    test = torch.arange(len(table)) % 5 == 4  # each fifth one, whatever the seed
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def make_model() -> nn.Module:
    """Return a network for images (n, 1, 8, 8), with ten classes."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def accuracy(run: Run, model: nn.Module, test_set: TensorDataset) -> float:
    """Return the share of test images that are read right, over all ranks; each image counts once.
    All ranks call it."""
    right = seen = 0
    with run.evaluating(model) as plain:
        for images, labels in run.shard(test_set, batch_size=128):
            right += int((plain(images).argmax(1) == labels).sum())
            seen += len(labels)
    all_right, all_seen = run.sum(right, seen)
    return all_right / all_seen


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small ConvNet on 8x8 digits.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.005, help="learning rate of Adam")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--step-seconds",
        type=float,
        default=0.0,
        help="sleep this long in each step, to have a run that is long enough to interrupt",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    run = start(seed=args.seed)
    train_set, test_set = load_digits()
    model = run.wrap(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    batches = run.loader(train_set, batch_size=args.batch_size)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)

    for epoch in run.epochs(args.epochs):
        for images, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            run.backward(loss)
            optimizer.step()
            time.sleep(args.step_seconds)
            run.step(loss=loss, lr=scheduler.get_last_lr()[0])
        scheduler.step()
        step, score = run.position.step, accuracy(run, model, test_set)
        run.print(f"epoch {epoch}  step {step}  loss {loss.item():.4f}  accuracy {score:.4f}")

    score = accuracy(run, model, test_set)
    run.print(f"test accuracy {score:.4f}")
    run.finish(accuracy=score)


if __name__ == "__main__":
    main()
