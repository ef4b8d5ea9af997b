"""Train a small ConvNet on MNIST, and test the model that validates best.

Compute nodes have no internet, so first on the login node, once::

    python jobs/mnist.py --data ~/data --download

Then in one process, on one node, on two nodes of a cluster, or on two nodes played here::

    python jobs/mnist.py --data ~/data
    hpc-ddp submit --nodes 1 --gpus-per-node 4 --time 10:00 jobs/mnist.py --data ~/data
    hpc-ddp submit --nodes 2 --gpus-per-node 4 --time 10:00 jobs/mnist.py --data ~/data
    hpc-ddp dry-run --nodes 2 --gpus-per-node 2 jobs/mnist.py

Without `--data` it takes the 8x8 digits that lie beside it; see jobs/data/README.md. The weights
of the best model come out of the run's folder by
`python -m hpc_ddp.training.export RUN_FOLDER model.safetensors --best`.
"""

import argparse
import gzip
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_ddp.training import Run, UsageError, start

DIGITS = Path(__file__).parent / "data" / "digits.csv.gz"


def load_mnist(folder: Path, train: bool) -> TensorDataset:
    """Return images (n, 1, 28, 28) from 0 to 1, and labels (n,), of the training or the test set.

    Raise UsageError if `folder` has no MNIST.
    """
    from torchvision.datasets import MNIST  # seconds, which the shipped digits need not wait for

    try:
        mnist = MNIST(str(folder), train=train)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        raise UsageError(
            f"{folder} has no MNIST that torchvision can read: {error}",
            hint=f"on the login node: python {sys.argv[0]} --data {folder} --download",
        ) from error
    return TensorDataset(mnist.data[:, None] / 255, mnist.targets)


def load_digits(train: bool) -> TensorDataset:
    """Return images (n, 1, 8, 8) from 0 to 1, and labels (n,), of the training or the test set."""
    with gzip.open(DIGITS, "rt") as lines:
        table = torch.tensor([[float(number) for number in line.split(",")] for line in lines])
    table = table[(torch.arange(len(table)) % 5 == 4) != train]  # each fifth one is for the test
    return TensorDataset(table[:, :64].reshape(-1, 1, 8, 8) / 16, table[:, 64].long())


def split(whole: TensorDataset) -> tuple[TensorDataset, TensorDataset]:
    """Return two sets: the samples for training, and for validation each tenth sample, which is
    left out of the first set."""
    held_out = torch.arange(len(whole)) % 10 == 9
    images, labels = whole.tensors
    training = TensorDataset(images[~held_out], labels[~held_out])
    return training, TensorDataset(images[held_out], labels[held_out])


def make_model(side: int) -> nn.Module:
    """Return a network for images (n, 1, side, side), with ten classes; 4 divides `side`."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * (side // 4) ** 2, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def accuracy(run: Run, model: nn.Module, images_and_labels: TensorDataset) -> float:
    """Return the share of images that are read right, over all ranks; each image counts once. All
    ranks call it."""
    right = seen = 0
    with run.evaluating(model) as plain:
        for images, labels in run.shard(images_and_labels, batch_size=256):
            right += int((plain(images).argmax(1) == labels).sum())
            seen += len(labels)
    all_right, all_seen = run.sum(right, seen)
    return all_right / all_seen


def parse_args() -> argparse.Namespace:
    """Return the options of the command line; exit with 2 and a message for wrong ones."""
    parser = argparse.ArgumentParser(description="Train a small ConvNet on MNIST.")
    parser.add_argument("--data", type=Path, help="folder with MNIST/raw (default: the 8x8 digits)")
    parser.add_argument("--download", action="store_true", help="fetch MNIST into --data, and end")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of Adam, per process")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.download and (args.data is None or int(os.environ.get("WORLD_SIZE", "1")) > 1):
        parser.error("--download needs --data, and one process: python jobs/mnist.py --data DIR …")
    if args.epochs < 1:
        parser.error(f"--epochs is {args.epochs}; accepted: a whole number from 1")
    return args


def main() -> None:
    """Download MNIST and exit, or train, load the best checkpoint, and test it."""
    args = parse_args()
    if args.download:
        from torchvision.datasets import MNIST

        try:
            MNIST(str(args.data), download=True)
        except (OSError, RuntimeError) as error:
            sys.exit(f"error: MNIST can't be downloaded into {args.data}: {error}")
        sys.exit(print(f"MNIST is in {args.data}"))

    run = start(seed=args.seed)
    if args.data is None:
        run.print("no --data: training on the shipped 8x8 digits, not on MNIST")
    load = load_digits if args.data is None else lambda train: load_mnist(args.data, train)
    train_set, validation_set = split(load(True))
    model = run.wrap(make_model(side=train_set.tensors[0].shape[-1]))
    # Each step averages over as many more images as there are processes, and there are fewer steps.
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr * run.world_size)
    batches = run.loader(train_set, batch_size=args.batch_size)
    run.track(model=model, optimizer=optimizer)

    for epoch in run.epochs(args.epochs):
        for images, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            run.backward(loss)
            optimizer.step()
            run.step(loss=loss)
        score = accuracy(run, model, validation_set)
        best = "  best so far" if run.best(score) else ""  # its checkpoint stays
        run.print(f"epoch {epoch}  loss {loss.item():.4f}  validation accuracy {score:.4f}{best}")

    step = run.load_best(model)
    score = accuracy(run, model, load(False))
    run.print(f"test accuracy {score:.4f} of the model of step {step}")
    run.finish(accuracy=score)


if __name__ == "__main__":
    main()
