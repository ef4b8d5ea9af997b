"""Mixed precision, gradient accumulation, clipping and batch norm, each done right, on one ConvNet.

In one process, on one node, on two nodes of a cluster, and on two nodes played here::

    python jobs/convnet_amp.py --precision bf16
    hpc-ddp submit --nodes 1 --gpus-per-node 4 --time 10:00 jobs/convnet_amp.py --precision bf16
    hpc-ddp submit --nodes 2 --gpus-per-node 4 --time 10:00 jobs/convnet_amp.py --precision fp16
    hpc-ddp dry-run --nodes 2 --gpus-per-node 2 jobs/convnet_amp.py --precision bf16

The places to look at, where other scripts go wrong:

- one backward per loss; `run.backward` scales it for fp16 and weights it, so no division by
  `--accumulate`; DDP averages gradients in the last micro-batch of a step only
- `run.update` undoes the scaling before it clips; where fp16 overflows it skips step and scheduler;
  the scale is in the checkpoint, as are optimizer and scheduler
- the scheduler counts optimizer steps, which is what `len(batches)` says
- validation runs on the plain model, in eval mode, with the same running statistics on all ranks

Data: the 8x8 digits beside it (jobs/data/README.md), or MNIST: `--data DIR`, where `python
jobs/mnist.py --data DIR --download` has put it.
"""

import argparse
import gzip
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
        raise UsageError(f"{folder} has no MNIST that torchvision can read: {error}") from error
    return TensorDataset(mnist.data[:, None] / 255, mnist.targets)


def load_digits(train: bool) -> TensorDataset:
    """Return images (n, 1, 8, 8) from 0 to 1, and labels (n,), of the training or the test set."""
    with gzip.open(DIGITS, "rt") as lines:
        table = torch.tensor([[float(number) for number in line.split(",")] for line in lines])
    table = table[(torch.arange(len(table)) % 5 == 4) != train]  # each fifth one is for the test
    return TensorDataset(table[:, :64].reshape(-1, 1, 8, 8) / 16, table[:, 64].long())


def block(channels_in: int, channels_out: int) -> list[nn.Module]:
    """Return the layers of a convolution that halves the sides of an image."""
    return [
        nn.Conv2d(channels_in, channels_out, 5, padding=2),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]


def make_model(side: int) -> nn.Module:
    """Return a network for images (n, 1, side, side), with ten classes; 4 divides `side`."""
    features = 32 * (side // 4) ** 2
    return nn.Sequential(*block(1, 16), *block(16, 32), nn.Flatten(), nn.Linear(features, 10))


def evaluate(run: Run, model: nn.Module, test_set: TensorDataset) -> tuple[float, float]:
    """Return mean loss and accuracy over all ranks; each image counts once. All ranks call it."""
    loss_sum = right = seen = 0.0
    with run.evaluating(model) as plain:
        for images, labels in run.shard(test_set, batch_size=256):
            with run.autocast():
                logits = plain(images).float()  # sums of losses need more than 16 bits
            loss_sum += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            right += int((logits.argmax(1) == labels).sum())
            seen += len(labels)
    loss_sum, right, seen = run.sum(loss_sum, right, seen)
    return loss_sum / seen, right / seen


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a ConvNet in mixed precision.")
    parser.add_argument("--data", type=Path, help="folder with MNIST/raw (default: the 8x8 digits)")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="bf16")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="images per micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--clip-norm", type=float, default=5.0, help="the most of a gradient")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of SGD")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    run = start(seed=args.seed, precision=args.precision)
    if args.data is None:
        run.print("no --data: training on the shipped 8x8 digits, not on MNIST")
    load = load_digits if args.data is None else lambda train: load_mnist(args.data, train)
    train_set, test_set = load(True), load(False)
    side = train_set.tensors[0].shape[-1]
    model = run.wrap(make_model(side), sync_batchnorm=True)  # on GPUs; elsewhere it says so
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # Batch norm and an incomplete batch are no friends, so the rest of each epoch is dropped.
    batches = run.loader(train_set, args.batch_size, accumulate=args.accumulate, drop_last=True)
    steps = args.epochs * len(batches)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)

    for epoch in run.epochs(args.epochs):
        for images, labels in batches:
            with run.autocast():
                loss = nn.functional.cross_entropy(model(images), labels)
            run.backward(loss)
            norm = run.update(optimizer, clip_norm=args.clip_norm, scheduler=scheduler)
            run.step(loss=loss, norm=norm, lr=scheduler.get_last_lr()[0])
        test_loss, score = evaluate(run, model, test_set)
        run.print(f"epoch {epoch}  test loss {test_loss:.4f}  accuracy {score:.4f}")

    _, score = evaluate(run, model, test_set)
    run.print(f"test accuracy {score:.4f} in {args.precision}")
    run.finish(accuracy=score)


if __name__ == "__main__":
    main()
