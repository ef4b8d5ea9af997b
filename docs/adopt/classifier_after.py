"""Train a ConvNet on images of digits: validation, a learning rate that drops, the best model."""

import argparse
import gzip
from pathlib import Path

import torch
import torch.distributed as dist
import torch.utils.data
from hpc_ddp.training import start
from torch import nn

DATA = Path(__file__).parents[2] / "jobs" / "data" / "digits.csv.gz"


class Digits(torch.utils.data.Dataset):
    """Images (1, 8, 8) from 0 to 1, and which digit it is; `augment` moves them about a little."""

    def __init__(self, rows, augment):
        self.images, self.labels = rows[:, :64].reshape(-1, 1, 8, 8) / 16, rows[:, 64].long()
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment:
            down, right = torch.randint(-1, 2, (2,)).tolist()
            image = image.roll((down, right), dims=(1, 2))
        return image, self.labels[index]


def load_digits():
    with gzip.open(DATA, "rt") as lines:
        rows = torch.tensor([[float(number) for number in line.split(",")] for line in lines])
    is_val = torch.arange(len(rows)) % 5 == 4
    return Digits(rows[~is_val], augment=True), Digits(rows[is_val], augment=False)


def make_model():
    def block(inputs, outputs):
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))

    head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 2 * 2, 10))
    return nn.Sequential(block(1, 16), block(16, 32), head)


def evaluate(model, loader):
    """Return the share of images that are read right, over all processes."""
    device = next(model.parameters()).device
    right = torch.zeros(2, device=device)
    with run.evaluating(model) as model:
        for images, labels in loader:
            right[0] += (model(images).argmax(1) == labels).sum()
            right[1] += len(labels)
    dist.all_reduce(right)
    return (right[0] / right[1]).item()


def main(args):
    rank = dist.get_rank()
    train_set, val_set = load_digits()
    train_loader = run.loader(train_set, args.batch_size, num_workers=args.workers)
    val_loader = run.shard(val_set, args.batch_size)

    model = run.wrap(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=1)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)

    for epoch in run.epochs(args.epochs):
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            run.backward(loss)
            optimizer.step()
            run.step(loss=loss)

        accuracy = evaluate(model, val_loader)
        is_best = accuracy > scheduler.best
        scheduler.step(accuracy)
        if rank == 0:
            lr = scheduler.get_last_lr()[0]
            print(f"epoch {epoch}  loss {loss.item():.4f}  accuracy {accuracy:.4f}  lr {lr:.1e}")
            if is_best:
                torch.save(model.module.state_dict(), "best.pt")

    if rank == 0:
        torch.save(model.module.state_dict(), "last.pt")
        print(f"best accuracy {scheduler.best:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a ConvNet on 8x8 digits.")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--workers", type=int, default=0, help="processes that load images")
    args = parser.parse_args()

    with start() as run:
        main(args)
