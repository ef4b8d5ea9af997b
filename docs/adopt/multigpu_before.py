"""Train a toy model on several processes, with a trainer class around the loop."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset
from torch.utils.data.dataloader import DataLoader
from torch.utils.data.distributed import DistributedSampler


class ToyData(Dataset):
    """Points in 20 dimensions, and the sum of the sines of their coordinates."""

    def __init__(self, size):
        self.points = torch.rand(size, 20)
        self.values = torch.sin(3 * self.points).sum(dim=1, keepdim=True)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], self.values[index]


class Trainer:
    def __init__(
        self,
        model,
        train_data,
        optimizer,
        save_every,
        snapshot_path,
    ):
        self.rank = dist.get_rank()
        self.device = torch.accelerator.current_accelerator(True) or torch.device("cpu")
        self.model = DDP(model.to(self.device))
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.snapshot_path = snapshot_path
        self.epochs_run = 0
        if os.path.exists(snapshot_path):
            self._load_snapshot()

    def _load_snapshot(self):
        snapshot = torch.load(self.snapshot_path, map_location=self.device)
        self.model.module.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.epochs_run = snapshot["epochs_run"]
        print(f"rank {self.rank}: resuming from the snapshot after epoch {self.epochs_run - 1}")

    def _save_snapshot(self, epoch):
        snapshot = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epochs_run": epoch + 1,
        }
        torch.save(snapshot, self.snapshot_path)
        print(f"epoch {epoch}: snapshot saved to {self.snapshot_path}")

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            source = source.to(self.device)
            targets = targets.to(self.device)
            loss = self._run_batch(source, targets)
        if self.rank == 0:
            print(f"epoch {epoch}: {len(self.train_data)} steps, loss {loss.item():.6f}")

    def train(self, total_epochs):
        for epoch in range(self.epochs_run, total_epochs):
            self._run_epoch(epoch)
            if self.rank == 0 and (epoch + 1) % self.save_every == 0:
                self._save_snapshot(epoch)
        if self.rank == 0:
            torch.save(self.model.module.state_dict(), "model.pt")


def load_train_objs():
    dataset = ToyData(2048)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return dataset, model, optimizer


def ddp_setup():
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    torch.manual_seed(0)


def main(args):
    dataset, model, optimizer = load_train_objs()
    sampler = DistributedSampler(dataset)
    train_data = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    trainer = Trainer(model, train_data, optimizer, args.save_every, args.snapshot_path)
    trainer.train(args.total_epochs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A toy job for several processes.")
    parser.add_argument("total_epochs", type=int, help="epochs to train the model")
    parser.add_argument("save_every", type=int, help="epochs from one snapshot to the next")
    parser.add_argument("--batch_size", type=int, default=32, help="samples per process and step")
    parser.add_argument("--snapshot_path", default="snapshot.pt")
    args = parser.parse_args()

    ddp_setup()
    main(args)
    dist.destroy_process_group()
