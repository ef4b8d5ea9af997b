"""A Lightning Trainer; its data follow from the step with --plain, else from a shuffle."""

import os
import warnings

import lightning as L
import torch
from common import OPTIONS, args, disturb, leave_weights
from torch.utils.data import DataLoader, TensorDataset

from hpc_ddp.integrations.lightning import StopCallback, fit

warnings.filterwarnings("ignore")


class Line(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        disturb(self.global_step + 1)
        (x,) = batch
        if args.plain:
            seed = 2 * self.global_step + self.global_rank
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        return torch.nn.functional.mse_loss(self.layer(x), x.sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


L.seed_everything(1, verbose=False)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=args.batch_size, shuffle=True)
model = Line()
trainer = L.Trainer(
    accelerator="cpu",
    devices=int(os.environ.get("WORLD_SIZE", 1)),
    strategy="ddp" if "RANK" in os.environ else "auto",
    max_epochs=args.epochs,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
fit(trainer, model, loader, stop=StopCallback(**OPTIONS))
leave_weights(model)
