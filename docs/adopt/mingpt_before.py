"""Train a small GPT on characters, with mixed precision, gradient clipping and a test pass."""

import argparse
import os
import random
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset, random_split
from torch.utils.data.dataloader import DataLoader
from torch.utils.data.distributed import DistributedSampler


@dataclass
class GPTConfig:
    vocab_size: int
    block_size: int
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 48
    dropout: float = 0.1


@dataclass
class TrainerConfig:
    max_epochs: int
    batch_size: int
    learning_rate: float
    use_amp: bool
    grad_norm_clip: float = 1.0
    save_every: int = 1
    snapshot_path: str = "gpt_snapshot.pt"


def sums(count):
    """Return that many lines like 28+7=35: a language of twelve letters to learn."""
    pick = random.Random(0)
    pairs = [(pick.randrange(100), pick.randrange(100)) for _ in range(count)]
    return "".join(f"{a}+{b}={a + b}\n" for a, b in pairs)


class CharDataset(Dataset):
    """All windows of a text: `block_size` characters, and the same shifted by one."""

    def __init__(self, text, block_size):
        self.letters = sorted(set(text))
        number = {letter: i for i, letter in enumerate(self.letters)}
        self.text = torch.tensor([number[letter] for letter in text])
        self.block_size = block_size

    def __len__(self):
        return len(self.text) - self.block_size

    def __getitem__(self, index):
        window = self.text[index : index + self.block_size + 1]
        return window[:-1], window[1:]


class SelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.project = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.n_head, width // self.n_head)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.project(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.n_embd)
        self.attention = SelfAttention(config)
        self.norm2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd),
            nn.GELU(),
            nn.Linear(4 * config.n_embd, config.n_embd),
            nn.Dropout(config.dropout),
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.n_embd)
        self.place = nn.Parameter(torch.zeros(1, config.block_size, config.n_embd))
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.n_layer)))
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, tokens, targets):
        x = self.token(tokens) + self.place[:, : tokens.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainer:
    def __init__(self, config, model, train_set, test_set):
        self.config = config
        self.rank = dist.get_rank()
        device = torch.accelerator.current_accelerator(True) or torch.device("cpu")
        self.model = DDP(model.to(device))
        self.device = next(model.parameters()).device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.use_amp)
        self.train_loader = self._prepare_loader(train_set, shuffle=True)
        self.test_loader = self._prepare_loader(test_set, shuffle=False)
        self.epochs_run = 0
        if os.path.exists(config.snapshot_path):
            self._load_snapshot()

    def _prepare_loader(self, dataset, shuffle):
        sampler = DistributedSampler(dataset, shuffle=shuffle)
        return DataLoader(dataset, batch_size=self.config.batch_size, sampler=sampler)

    def _load_snapshot(self):
        snapshot = torch.load(self.config.snapshot_path, map_location=self.device)
        self.model.module.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.scaler.load_state_dict(snapshot["scaler"])
        self.epochs_run = snapshot["epochs_run"]
        print(f"rank {self.rank}: resuming from the snapshot after epoch {self.epochs_run - 1}")

    def _save_snapshot(self, epoch):
        snapshot = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "epochs_run": epoch + 1,
        }
        torch.save(snapshot, self.config.snapshot_path)
        print(f"epoch {epoch} | snapshot saved to {self.config.snapshot_path}")

    def _loss(self, model, tokens, targets):
        with torch.autocast(self.device.type, torch.float16, enabled=self.config.use_amp):
            return model(tokens, targets)

    def _train_batch(self, tokens, targets):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(self.model, tokens, targets)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def _train_epoch(self, epoch):
        self.train_loader.sampler.set_epoch(epoch)
        self.model.train()
        for tokens, targets in self.train_loader:
            tokens, targets = tokens.to(self.device), targets.to(self.device)
            loss = self._train_batch(tokens, targets)
        if self.rank == 0:
            print(f"epoch {epoch} | train loss {loss.item():.5f}")

    def _test_epoch(self, epoch):
        total = torch.zeros(2, device=self.device)
        model = self.model.eval()
        with torch.no_grad():
            for tokens, targets in self.test_loader:
                tokens, targets = tokens.to(self.device), targets.to(self.device)
                total[0] += self._loss(model, tokens, targets) * len(tokens)
                total[1] += len(tokens)
        dist.all_reduce(total)
        if self.rank == 0:
            print(f"epoch {epoch} | test loss {total[0] / total[1]:.5f}")

    def train(self):
        for epoch in range(self.epochs_run, self.config.max_epochs):
            self._train_epoch(epoch)
            if self.rank == 0 and (epoch + 1) % self.config.save_every == 0:
                self._save_snapshot(epoch)
            self._test_epoch(epoch)
        if self.rank == 0:
            torch.save(self.model.module.state_dict(), "gpt.pt")


def ddp_setup():
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    torch.manual_seed(0)


def main(args):
    text = args.text.read_text() if args.text else sums(args.sums)
    dataset = CharDataset(text, args.block_size)
    train_set, test_set = random_split(dataset, [0.9, 0.1])
    model = GPT(GPTConfig(len(dataset.letters), args.block_size))
    config = TrainerConfig(args.epochs, args.batch_size, args.lr, args.amp)
    Trainer(config, model, train_set, test_set).train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A small GPT that learns characters.")
    parser.add_argument("--text", type=Path, help="a file to learn from, instead of sums")
    parser.add_argument("--sums", type=int, default=400, help="lines of the text that is made up")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="windows per process and step")
    parser.add_argument("--block-size", type=int, default=24, help="characters in a window")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--amp",
        action=argparse.BooleanOptionalAction,
        default=torch.accelerator.is_available(),
        help="float16 where it is safe: fast on a GPU, slow on a CPU",
    )
    args = parser.parse_args()

    ddp_setup()
    try:
        main(args)
    finally:
        dist.destroy_process_group()
