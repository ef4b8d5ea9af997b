"""A Lightning Trainer; its data follow from the step with --plain, else from a shuffle."""

import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from common import KIND, OPTIONS, args, disturb, leave_weights
from lightning.pytorch import callbacks
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau
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
        self.first = torch.nn.Linear(4, 4) if args.part == "unfreeze" else torch.nn.Identity()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(self.first(x)), x.sum(1, keepdim=True))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        disturb(self.global_step + 1)
        (x,) = batch
        if args.plain:
            seed = 2 * self.global_step + self.global_rank
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)).to(self.device)
        loss: torch.Tensor = self(x)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        if index == 0 and not self.trainer.sanity_checking:
            print("validates at", self.global_step, flush=True)
        self.log("val", self(batch[0]))

    def configure_optimizers(self) -> Any:
        weights = self.layer.parameters() if args.part == "unfreeze" else self.parameters()
        optimizer = torch.optim.Adam(weights, lr=0.1)
        if args.part == "plateau":
            plateau = ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
            return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val"}
        if args.part == "cycle":
            cycle = OneCycleLR(optimizer, 0.1, int(self.trainer.estimated_stepping_batches))
            return [optimizer], [{"scheduler": cycle, "interval": "step"}]
        if args.part == "average":
            return [optimizer], [ExponentialLR(optimizer, 0.9)]
        return optimizer


class Unfreeze(callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.first)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.first, optimizer, lr=0.01)


PARTS: dict[str | None, list[Any]] = {
    "accumulate": [callbacks.GradientAccumulationScheduler({0: 4, 1: 2, 2: 1})],
    "unfreeze": [Unfreeze()],
    "average": [callbacks.StochasticWeightAveraging(0.02, 1, annealing_epochs=2)],
    "finder": [callbacks.LearningRateFinder(num_training_steps=5)],
}


L.seed_everything(1, verbose=False)
samples = torch.randn(64, 4)
data = TensorDataset(samples)
kind: Any = StatefulDataLoader if args.stateful else DataLoader
source = Stream(samples) if args.order == "stream" else data
sampler = StatefulDistributedSampler(data, 1, 0) if args.order == "counted" else None
loader = kind(source, args.batch_size, shuffle=args.order == "shuffle", sampler=sampler)
model = Line(Widths())
local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
trainer = L.Trainer(
    accelerator=KIND,
    devices=local,
    num_nodes=int(os.environ.get("WORLD_SIZE", 1)) // local,
    strategy="ddp" if "RANK" in os.environ else "auto",
    max_epochs=args.epochs,
    accumulate_grad_batches=args.accumulate,
    callbacks=PARTS.get(args.part, []),
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
