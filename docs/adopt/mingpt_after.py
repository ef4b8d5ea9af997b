"""Train a small GPT on characters, with mixed precision, gradient clipping and a test pass."""

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from hpc_ddp.training import start
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, random_split


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
        self.model = run.wrap(model)
        self.device = next(model.parameters()).device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.use_amp)
        self.train_loader = run.loader(train_set, config.batch_size)
        self.test_loader = run.shard(test_set, config.batch_size)
        run.track(model=self.model, optimizer=self.optimizer, scaler=self.scaler)

    def _loss(self, model, tokens, targets):
        with torch.autocast(self.device.type, torch.float16, enabled=self.config.use_amp):
            return model(tokens, targets)

    def _train_batch(self, tokens, targets):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(self.model, tokens, targets)
        run.backward(self.scaler.scale(loss))
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        run.step(loss=loss)
        return loss

    def _train_epoch(self, epoch):
        self.model.train()
        for tokens, targets in self.train_loader:
            loss = self._train_batch(tokens, targets)
        if self.rank == 0:
            print(f"epoch {epoch} | train loss {loss.item():.5f}")

    def _test_epoch(self, epoch):
        total = torch.zeros(2, device=self.device)
        with run.evaluating(self.model) as model:
            for tokens, targets in self.test_loader:
                total[0] += self._loss(model, tokens, targets) * len(tokens)
                total[1] += len(tokens)
        dist.all_reduce(total)
        if self.rank == 0:
            print(f"epoch {epoch} | test loss {total[0] / total[1]:.5f}")

    def train(self):
        for epoch in run.epochs(self.config.max_epochs):
            self._train_epoch(epoch)
            self._test_epoch(epoch)
        if self.rank == 0:
            torch.save(self.model.module.state_dict(), "gpt.pt")


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

    with start() as run:
        main(args)
