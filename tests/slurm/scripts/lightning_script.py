"""A PyTorch Lightning script. Two nodes of two workers.

lightning_script.py [seconds a step]
"""

import sys
import time
import warnings

import lightning as L
import torch

from hpc_ddp.integrations.lightning import StopCallback

PAUSE_S = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
STEPS = 80
warnings.filterwarnings("ignore")  # on the number of loader workers, and the like


class Line(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        (x,) = batch
        time.sleep(PAUSE_S)
        if self.global_step % 20 == 0 and self.trainer.is_global_zero:
            print(f"step {self.global_step} of {STEPS}", flush=True)
        return torch.nn.functional.mse_loss(self.layer(x), x.sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


L.seed_everything(1)
data = torch.utils.data.TensorDataset(torch.randn(2560, 4))  # 80 batches of 8 on each of 4 ranks
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
stop = StopCallback()
trainer = L.Trainer(
    accelerator="cpu",
    num_nodes=2,
    devices=2,
    strategy="ddp",
    max_epochs=1,
    callbacks=[stop],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Line(), loader, ckpt_path=stop.latest(trainer))
if trainer.is_global_zero:
    environment = type(trainer._accelerator_connector.cluster_environment).__name__
    print(f"done at step {trainer.global_step} with {trainer.world_size} ranks; {environment}")
