"""A Hugging Face Accelerate script; knows nothing of hpc-ddp.

accelerate_script.py FOLDER [seconds a step]
"""

import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

FOLDER, PAUSE_S = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
EPOCHS, SAVE_EVERY = 4, 5

accelerator = Accelerator(cpu=True)
set_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(640, 4))  # 20 batches of 8 on each of 4 ranks
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

step, steps = 0, EPOCHS * len(loader)
saved = sorted(FOLDER.glob("step-*"), key=lambda path: int(path.name[5:]))
if saved:
    accelerator.load_state(saved[-1])
    step = int(saved[-1].name[5:])
    accelerator.print(f"going on from step {step}", flush=True)
for epoch in range(step // len(loader), EPOCHS):
    loader.set_epoch(epoch)
    done = step % len(loader)
    batches = accelerator.skip_first_batches(loader, done) if done else loader
    for (x,) in batches:
        time.sleep(PAUSE_S)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        if step % 20 == 0:
            accelerator.print(f"step {step} of {steps}", flush=True)
        if step % SAVE_EVERY == 0:
            accelerator.save_state(FOLDER / "writing")
            accelerator.wait_for_everyone()  # each rank writes a part
            if accelerator.is_main_process:
                (FOLDER / "writing").rename(FOLDER / f"step-{step}")
            accelerator.wait_for_everyone()
accelerator.print(f"done at step {step} with {accelerator.num_processes} ranks", flush=True)
accelerator.end_training()
