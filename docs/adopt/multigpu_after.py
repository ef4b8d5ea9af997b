"""Train a toy model on several processes, with a trainer class around the loop."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hpc_ddp.training import start
from torch.utils.data import Dataset


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
    ):
        self.rank = dist.get_rank()
        self.model = run.wrap(model)
        self.train_data = train_data
        self.optimizer = optimizer
        run.track(model=self.model, optimizer=self.optimizer)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        run.backward(loss)
        self.optimizer.step()
        run.step(loss=loss)
        return loss

    def _run_epoch(self, epoch):
        for source, targets in self.train_data:
            loss = self._run_batch(source, targets)
        if self.rank == 0:
            print(f"epoch {epoch}: {len(self.train_data)} steps, loss {loss.item():.6f}")

    def train(self, total_epochs):
        for epoch in run.epochs(total_epochs):
            self._run_epoch(epoch)
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


def main(args):
    dataset, model, optimizer = load_train_objs()
    train_data = run.loader(dataset, batch_size=args.batch_size)
    trainer = Trainer(model, train_data, optimizer)
    trainer.train(args.total_epochs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A toy job for several processes.")
    parser.add_argument("total_epochs", type=int, help="epochs to train the model")
    parser.add_argument("--batch_size", type=int, default=32, help="samples per process and step")
    args = parser.parse_args()

    run = start()
    main(args)
    run.finish()
