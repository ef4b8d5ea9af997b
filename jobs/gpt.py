"""Train a small GPT on the characters of a text, with the model spread in any of torch's ways.

One process, two nodes of two workers on this machine, and two nodes of a cluster::

    python jobs/gpt.py
    hpc-ddp dry-run --nodes 2 --nproc-per-node 2 jobs/gpt.py --parallel fsdp
    hpc-ddp submit --nodes 2 --gpus-per-node 4 --time 30:00 jobs/gpt.py --precision bf16 --compile

One node, and how else the model can be spread (two workers for tp and pp, a multiple for more)::

    torchrun --nproc-per-node 4 jobs/gpt.py                           # ddp: a copy on each
    torchrun --nproc-per-node 4 jobs/gpt.py --parallel fsdp           # fully sharded (FSDP2)
    torchrun --nproc-per-node 4 jobs/gpt.py --parallel fsdp --replicas 2  # twice, over two each
    torchrun --nproc-per-node 2 jobs/gpt.py --parallel tp             # each layer over two
    torchrun --nproc-per-node 4 jobs/gpt.py --parallel fsdp --tp 2    # both, on a 2 x 2 mesh
    torchrun --nproc-per-node 4 jobs/gpt.py --parallel pp             # two stages, two pipelines
    torchrun --nproc-per-node 2 jobs/gpt.py --parallel mp             # two GPUs for each worker

The loss is that of one process in each of them, up to rounding: a step takes the same windows of
the text, however many workers share them. Stop it whenever you like and start it again with the
same command, or with another strategy: checkpoints hold the whole model by its parts' names.

Text: The Devil's Dictionary by Ambrose Bierce (1911), public domain; see jobs/data/README.md.
"""

import argparse
import gzip
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from hpc_ddp.training import Run, UsageError, compile_for_resume, start

TEXT = Path(__file__).parent / "data" / "devils-dictionary.txt.gz"


def read(path: Path) -> str:
    """Return a text in UTF-8, from a file that may end in .gz; raise UsageError if it can't be
    read."""
    opened: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            return str(file.read())
    except Exception as error:  # no file, no gzip, no UTF-8: of many kinds
        raise UsageError(f"--text {path} can't be read: {error}") from error


def windows(numbers: torch.Tensor, length: int) -> TensorDataset:
    """Return a text of shape (characters,) cut into windows, each with the characters that follow
    its own.

    Both are of shape (windows, length). Raise UsageError for a text that is shorter than a window.
    """
    count = (len(numbers) - 1) // length
    if count < 1:
        raise UsageError(f"the text is too short to train and to test with --length {length}")
    inputs, targets = numbers[: count * length], numbers[1 : count * length + 1]
    return TensorDataset(inputs.view(count, length), targets.view(count, length))


class Attention(nn.Module):
    """Causal self-attention. With tensor parallelism each rank has some of the heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width, self.dropout = width // heads, dropout
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a tensor (batch, length, width) to one of the same shape."""
        shape = (*x.shape[:2], -1, self.head_width)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.query, self.key, self.value))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        y = self.out(y.transpose(1, 2).flatten(2))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    """Two linear layers, applied to the vector of each character alone."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.dropout(self.down(F.gelu(self.up(x))))
        return y


class Block(nn.Module):
    """Adds to vectors (batch, length, width) first the output of attention, then that of the
    MLP."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, dropout)
        self.norm2, self.mlp = nn.LayerNorm(width), MLP(width, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        y: torch.Tensor = x + self.mlp(self.norm2(x))
        return y


class Embedding(nn.Module):
    """Maps numbers of characters (batch, length) to vectors (batch, length, width): the vector of
    the character plus the vector of its position in the window."""

    def __init__(self, characters: int, length: int, width: int) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, width)
        self.place = nn.Embedding(length, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.character(x) + self.place(torch.arange(x.shape[1], device=x.device))
        return y


class GPT(nn.Module):
    """Maps numbers of characters, of shape (batch, length), to logits (batch, length, characters).

    A stage of a pipeline has some of the blocks, with their names in the whole model. Only the
    first stage has the embedding, and only the last one has the head.
    """

    def __init__(self, characters: int, args: argparse.Namespace) -> None:
        """Draw the weights of a model for this number of different `characters`; `args` are those
        of the command line."""
        super().__init__()
        self.embedding: nn.Module | None = Embedding(characters, args.length, args.width)
        self.blocks = nn.ModuleDict(
            {str(i): Block(args.width, args.heads, args.dropout) for i in range(args.layers)}
        )
        norm, linear = nn.LayerNorm(args.width), nn.Linear(args.width, characters)
        self.head: nn.Module | None = nn.Sequential(norm, linear)
        self.recompute = args.activation_checkpointing
        self.devices: dict[str, torch.device] = {}  # of blocks, where they have different ones
        for name, weight in self.named_parameters():
            if weight.dim() > 1:  # those that end a branch smaller, since all branches add up
                ends = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * args.layers if ends else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits. A stage without a head returns vectors (batch, length, width), and one
        without an embedding gets such vectors in place of numbers."""
        if self.embedding is not None:
            x = self.embedding(x)
        for name, block in self.blocks.items():
            x = x.to(self.devices.get(name, x.device))
            if self.recompute and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x if self.head is None else self.head(x).float()


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of logits (batch, length, characters) for targets (batch, length), a
    scalar."""
    return F.cross_entropy(logits.flatten(0, 1), targets.to(logits.device).flatten())


def share_layers(run: Run, model: GPT) -> None:
    """Split the linear layers of each block over the ranks, in place (tensor parallel): of each
    pair the first layer by rows, the second by columns.

    So a block communicates twice, to add up what the second layers return. All ranks call it.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    first = ("attention.query", "attention.key", "attention.value", "mlp.up")
    second = ("attention.out", "mlp.down")
    plan: dict[str, Any] = {f"blocks.*.{name}": ColwiseParallel() for name in first}
    plan |= {f"blocks.*.{name}": RowwiseParallel() for name in second}
    run.parallelize(model, plan)


def cut_stage(model: GPT, stage: int, stages: int) -> None:
    """Delete all layers of a model but those of pipeline stage `stage`, from 0, of `stages`."""
    count = len(model.blocks)
    for i in range(count):
        if i * stages // count != stage:
            del model.blocks[str(i)]
    model.embedding = model.embedding if stage == 0 else None
    model.head = model.head if stage == stages - 1 else None


def use_devices(model: GPT, devices: list[torch.device]) -> None:
    """Move the parts of a model to this worker's devices (plain model parallel): the embedding to
    the first, an equal share of the blocks, in order, to each, and the head to the last."""
    for i, (name, block) in enumerate(model.blocks.items()):
        model.devices[name] = devices[i * len(devices) // len(model.blocks)]
        block.to(model.devices[name])
    for part, device in ((model.embedding, devices[0]), (model.head, devices[-1])):
        assert part
        part.to(device)


def spread(run: Run, model: GPT, args: argparse.Namespace) -> Any:
    """Spread a model in place as the command line says. Return the model that is tracked, and what
    the training calls: the same model, or a pipeline. All ranks call it."""
    if args.compile:  # block by block, in place: names stay, and it goes with every strategy
        for block in model.blocks.values():
            compile_for_resume(block)
    if args.tp > 1:
        share_layers(run, model)
    if args.parallel == "fsdp":
        run.fully_shard(model, model.blocks.values(), offload=args.offload)
    if args.parallel in ("fsdp", "tp"):
        return model, model
    if args.parallel == "mp":
        use_devices(model, run.devices)
    if args.parallel == "pp":
        cut_stage(model, run.mesh.get_local_rank("pp"), args.pp)
    wrapped = run.wrap(model)
    if args.parallel != "pp":
        return wrapped, wrapped
    order = {"schedule": args.schedule, "n_microbatches": args.microbatches}
    return wrapped, run.pipeline(wrapped, loss_fn, **order)


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices, and none for biases and the scales of norms."""
    weights = list(model.parameters())
    groups = [
        {"params": [weight for weight in weights if weight.dim() > 1], "weight_decay": args.decay},
        {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))


def cosine(step: int, warm_up: int, total: int) -> float:
    """Return the factor of the learning rate at a step of `total`: it rises in a line for `warm_up`
    steps, then falls as a cosine to a tenth."""
    if step < warm_up:
        return (step + 1) / warm_up
    done = min((step - warm_up) / max(total - warm_up, 1), 1.0)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def validate(run: Run, model: Any, text: TensorDataset, batch_size: int) -> float:
    """Return the mean loss of a character, over all ranks; each window counts once. All ranks call
    it."""
    loss_sum = count = 0.0
    batches = run.shard(text, batch_size, even=True)
    with run.evaluating(model) as plain, run.autocast():
        for inputs, targets in batches:
            loss = loss_fn(plain(inputs), targets)
            if batches.counts:
                loss_sum, count = loss_sum + loss.item() * len(inputs), count + len(inputs)
    loss_sum, count = run.sum(loss_sum, count)
    return loss_sum / count


def sample(run: Run, model: Any, prompt: torch.Tensor, length: int) -> list[int]:
    """Return the numbers of `length` characters that the model draws after a prompt, the numbers of
    a window of characters, of shape (characters,).

    All ranks call it.
    """
    generator = torch.Generator().manual_seed(run.seed)  # all ranks draw the same
    seen, drawn = prompt.to(run.device)[None], []
    with run.evaluating(model) as plain, run.autocast():
        for _ in range(length):
            chances = plain(seen)[0, -1].div(0.8).softmax(0).cpu()
            drawn.append(int(torch.multinomial(chances, 1, generator=generator)))
            seen = torch.cat([seen[:, 1:], seen.new_tensor([[drawn[-1]]])], 1)
    return drawn


def parse_args() -> argparse.Namespace:
    """Return the options of the command line; exit with 2 and a message for wrong ones."""
    parser = argparse.ArgumentParser(description="Train a small GPT on the characters of a text.")
    add = parser.add_argument
    add("--text", type=Path, default=TEXT, help="a file, which may end in .gz")
    add("--epochs", type=int, default=10)
    add("--batch-size", type=int, default=32, help="windows of all workers together per step")
    add("--accumulate", type=int, default=1, help="micro-batches of a step")
    add("--lr", type=float, default=1e-3, help="highest learning rate of AdamW")
    add("--warm-up", type=int, default=50, help="steps")
    add("--decay", type=float, default=0.1, help="weight decay")
    add("--clip", type=float, default=1.0, help="largest norm of the gradients")
    add("--layers", type=int, default=6)
    add("--heads", type=int, default=6)
    add("--width", type=int, default=192)
    add("--length", type=int, default=128, help="characters in a window")
    add("--dropout", type=float, default=0.0)
    add("--precision", choices=("fp32", "bf16"), default="fp32")
    add("--compile", action="store_true")
    add("--seed", type=int, default=0)
    add("--sample", type=int, default=300, help="characters to draw at the end")
    add("--curve", type=Path, help="write the loss of each step's whole batch to this file")
    add("--parallel", choices=("ddp", "fsdp", "tp", "pp", "mp"), default="ddp")
    add("--tp", type=int, help="workers that share each layer (with tp, fsdp; 2 with tp)")
    add("--replicas", type=int, default=1, help="of the sharded model (with fsdp), one a node")
    add("--pp", type=int, default=2, help="stages of the pipeline")
    add("--schedule", default="1F1B", help="of the pipeline: GPipe or 1F1B")
    add("--microbatches", type=int, default=4, help="of the pipeline, per batch")
    add("--devices", type=int, default=2, help="GPUs of each worker, with mp")
    add("--offload", action="store_true", help="fsdp: weights and their state in CPU memory")
    add("--activation-checkpointing", action="store_true", help="compute them again in backward")
    args = parser.parse_args()
    for name in ("layers", "heads", "width", "length"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; accepted: a whole number from 1")
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout is {args.dropout}; accepted: a number from 0, below 1")
    if args.curve and not args.curve.absolute().parent.is_dir():
        parser.error(f"--curve is {args.curve}; accepted: a file in a folder that is there")
    args.tp = args.tp or (2 if args.parallel == "tp" else 1)
    if args.tp > 1 and args.parallel not in ("tp", "fsdp"):
        parser.error(f"--tp with --parallel {args.parallel}; accepted: with tp or fsdp")
    if args.replicas > 1 and args.parallel != "fsdp":
        parser.error(f"--replicas with --parallel {args.parallel}; accepted: with fsdp")
    if args.heads % args.tp or args.width % args.heads:
        parser.error(f"--heads is {args.heads}; accepted: a multiple of --tp that divides --width")
    return args


def write_curve(run: Run, path: Path, losses: list[tuple[float, int]], norm: float) -> None:
    """Add a line to a file: a step's number, its loss and its gradient norm. `losses` has this
    rank's sums over the samples of each micro-batch, and their numbers of samples."""
    sums, counts = zip(*losses, strict=True)
    loss_sum, count = run.sum(sum(sums), sum(counts))
    if run.rank == 0:
        with open(path, "a") as file:
            print(run.position.step + 1, loss_sum / count, norm, file=file)


def main() -> None:
    """Train by the options of the command line, then print a text that the model draws."""
    args = parse_args()
    stages = args.pp if args.parallel == "pp" else 1
    gpus = args.devices if args.parallel == "mp" else 1
    sizes: dict[str, Any] = {"tp": args.tp, "pp": stages, "replicas": args.replicas}
    run = start(args.seed, precision=args.precision, devices_per_worker=gpus, **sizes)
    text = read(args.text)
    characters = sorted(set(text))
    number_of = {character: i for i, character in enumerate(characters)}
    numbers = torch.tensor([number_of[character] for character in text])
    held_out = max(len(numbers) // 20, args.length + 1)
    train_set = windows(numbers[:-held_out], args.length)
    test_set = windows(numbers[-held_out:], args.length)
    tracked, model = spread(run, GPT(len(characters), args), args)
    optimizer = make_optimizer(tracked, args)
    batches = run.loader(
        train_set, global_batch_size=args.batch_size, accumulate=args.accumulate, drop_last=True
    )
    total = args.epochs * len(batches)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: cosine(step, args.warm_up, total)
    )
    run.track(model=tracked, optimizer=optimizer, scheduler=scheduler)
    losses: list[tuple[float, int]] = []  # of this step's micro-batches
    for epoch in run.epochs(args.epochs):
        for inputs, targets in batches:
            if args.parallel == "pp":
                loss = model.step(inputs, targets)
            else:
                with run.autocast():
                    loss = loss_fn(model(inputs), targets)
                run.backward(loss)
            lr = scheduler.get_last_lr()[0]
            norm = run.update(optimizer, clip_norm=args.clip, scheduler=scheduler)
            if args.curve:
                losses.append((loss.item() * len(inputs), len(inputs)))
                if run.ends_step:
                    write_curve(run, args.curve, losses, float(norm or 0))
                    losses.clear()
            run.step(loss=loss, norm=norm, lr=lr)
        score = validate(run, model, test_set, args.batch_size)
        run.print(f"epoch {epoch}  step {run.position.step}  test {score:.4f}")

    if args.sample:
        drawn = sample(run, model, test_set.tensors[0][0], args.sample)
        run.print("".join(characters[number] for number in drawn))
    run.finish()


if __name__ == "__main__":
    main()
