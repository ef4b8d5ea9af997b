"""A Lightning Trainer; its data follow from the step with --plain, else from a shuffle."""

import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from common import OPTIONS, args, disturb, leave_weights
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from hpc_ddp.integrations.lightning import StopCallback, fit

warnings.filterwarnings("ignore")


class Widths:
    """Hyperparameters."""


class Stream(IterableDataset[tuple[torch.Tensor, ...]]):
    """Samples without a length, which a loader with a state resumes."""

    def __init__(self, samples: torch.Tensor) -> None:
        self.samples = samples
        self.count = 0  # of those that are fetched

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        while self.count < len(self.samples):
            self.count += 1
            yield (self.samples[self.count - 1],)
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Line(L.LightningModule):
    def __init__(self, widths: Widths) -> None:
        super().__init__()
        self.save_hyperparameters()  # an object, which torch.load refuses with weights_only
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        disturb(self.global_step + 1)
        (x,) = batch
        if args.plain:
            seed = 2 * self.global_step + self.global_rank
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        return torch.nn.functional.mse_loss(self.layer(x), x.sum(1, keepdim=True))

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        if index == 0 and not self.trainer.sanity_checking:
            print("validates at", self.global_step, flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


L.seed_everything(1, verbose=False)
samples = torch.randn(64, 4)
data = TensorDataset(samples)
kind: Any = StatefulDataLoader if args.stateful else DataLoader
source = Stream(samples) if args.order == "stream" else data
sampler = StatefulDistributedSampler(data, 1, 0) if args.order == "counted" else None
loader = kind(source, args.batch_size, shuffle=args.order == "shuffle", sampler=sampler)
model = Line(Widths())
trainer = L.Trainer(
    accelerator="cpu",
    devices=int(os.environ.get("WORLD_SIZE", 1)),
    strategy="ddp" if "RANK" in os.environ else "auto",
    max_epochs=args.epochs,
    accumulate_grad_batches=args.accumulate,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    val_check_interval=7 if args.stateful else None,  # over the epochs
    check_val_every_n_epoch=None if args.stateful else 1,
)
validation = DataLoader(data, batch_size=32) if args.stateful else None
fit(trainer, model, loader, validation, stop=StopCallback(**OPTIONS))
print("has logged up to step", trainer.fit_loop.epoch_loop._batches_that_stepped, flush=True)
print("SIGTERM is ended by", signal.getsignal(signal.SIGTERM), flush=True)
leave_weights(model)
