"""A Hugging Face Accelerate script.

accelerate_script.py [seconds a step]
"""

import sys
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from hpc_ddp.integrations.accelerate import Stop

PAUSE_S = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
EPOCHS = 4

accelerator = Accelerator(cpu=True)
stop = Stop(accelerator)
set_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(640, 4))  # 20 batches of 8 on each of 4 ranks
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

stop.load(model)
steps = EPOCHS * len(loader)
for epoch in range(stop.position.epoch, EPOCHS):
    for (x,) in stop.batches(loader, epoch):
        time.sleep(PAUSE_S)
        if stop.position.step % 20 == 0:
            accelerator.print(f"step {stop.position.step} of {steps}", flush=True)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        stop.save(loss=loss, total_steps=steps)
stop.finish()
step, ranks = stop.position.step, accelerator.num_processes
accelerator.print(f"done at step {step} with {ranks} ranks", flush=True)
accelerator.end_training()
