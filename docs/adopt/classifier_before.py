"""Train a ConvNet on images of digits: validation, a learning rate that drops, the best model."""

import argparse
import gzip
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.utils.data
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
    model.eval()
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            right[0] += (model(images).argmax(1) == labels).sum()
            right[1] += len(labels)
    dist.all_reduce(right)
    return (right[0] / right[1]).item()


def setup():
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    torch.manual_seed(0)


def main(args):
    rank = dist.get_rank()
    device = torch.accelerator.current_accelerator(True) or torch.device("cpu")
    train_set, val_set = load_digits()
    train_sampler = torch.utils.data.distributed.DistributedSampler(train_set)
    train_loader = torch.utils.data.DataLoader(
        train_set, args.batch_size, sampler=train_sampler, num_workers=args.workers
    )
    val_sampler = torch.utils.data.distributed.DistributedSampler(val_set, shuffle=False)
    val_loader = torch.utils.data.DataLoader(val_set, args.batch_size, sampler=val_sampler)

    model = nn.parallel.DistributedDataParallel(make_model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=1)

    start_epoch = 0
    if os.path.exists(args.checkpoint):
        checkpoint = torch.load(args.checkpoint, map_location=device)
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        start_epoch = checkpoint["epoch"] + 1
        print(f"rank {rank}: going on with epoch {start_epoch}")

    for epoch in range(start_epoch, args.epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()

        accuracy = evaluate(model, val_loader)
        is_best = accuracy > scheduler.best
        scheduler.step(accuracy)
        if rank == 0:
            lr = scheduler.get_last_lr()[0]
            print(f"epoch {epoch}  loss {loss.item():.4f}  accuracy {accuracy:.4f}  lr {lr:.1e}")
            if is_best:
                torch.save(model.module.state_dict(), "best.pt")
            checkpoint = {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "epoch": epoch,
            }
            torch.save(checkpoint, args.checkpoint)

    if rank == 0:
        torch.save(model.module.state_dict(), "last.pt")
        print(f"best accuracy {scheduler.best:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a ConvNet on 8x8 digits.")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--workers", type=int, default=0, help="processes that load images")
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    args = parser.parse_args()

    setup()
    try:
        main(args)
    finally:
        dist.destroy_process_group()
