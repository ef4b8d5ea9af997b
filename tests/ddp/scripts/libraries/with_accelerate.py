"""An Accelerate loop with dropout, shuffled data and a scheduler."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import OPTIONS, args, disturb, leave_weights
from torch.utils.data import DataLoader, TensorDataset

from hpc_ddp.integrations.accelerate import Stop

accelerator = Accelerator(cpu=True)
stop = Stop(accelerator, **OPTIONS)
set_seed(1)
model = torch.nn.Sequential(
    torch.nn.Linear(4, args.width),
    torch.nn.Dropout(0.2),
    torch.nn.Linear(args.width, args.width),
    torch.nn.Linear(args.width, 1),
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
stop.load(model)
for epoch in range(stop.position.epoch, args.epochs):
    for (x,) in stop.batches(loader, epoch):
        disturb(stop.position.step + 1)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        stop.save(loss=loss, total_steps=args.epochs * len(loader))
stop.finish()
leave_weights(accelerator.unwrap_model(model))
accelerator.end_training()
