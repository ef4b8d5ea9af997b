"""The training of test_day.py: `Run.update` in any precision, with a bad loss in a given step."""

import argparse
import os
import signal
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_ddp.training import start
from hpc_ddp.training.telemetry import metrics

parser = argparse.ArgumentParser()
parser.add_argument("--precision", default="fp32")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--save-every-steps", type=int)
parser.add_argument(
    "--bad", type=float, default=1.0, help="factor of the loss on the last rank ..."
)
parser.add_argument("--bad-at", type=int, default=-1, help="... in this step, from 1")
parser.add_argument("--kill-at", type=int, default=-1)
parser.add_argument("--tensorboard", action="store_true")
args = parser.parse_args()
# A line for each step: the later in an attempt, the longer is the least time between two lines.
vars(metrics).update(EVERY_S=0.0, SELDOM_S=0.0)

run = start(
    precision=args.precision,
    save_every_steps=args.save_every_steps,
    tensorboard=args.tensorboard,
)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
model = run.wrap(net, sync_batchnorm=True)
ema = run.ema(model, decay=0.9)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
x = torch.randn(160, 8)
batches = run.loader(TensorDataset(x, x.sum(1, keepdim=True)), args.batch_size)
run.track(model=model, optimizer=optimizer, scheduler=scheduler, ema=ema)
precision = run._precision
run.print(f"SCALE {precision.state_dict().get('scale')}")

for _ in run.epochs(2):
    for inputs, targets in batches:
        step = run.position.step + 1
        bad = args.bad if step == args.bad_at and run.rank == run.world_size - 1 else 1.0
        with run.autocast():
            loss = nn.functional.mse_loss(model(inputs).float(), targets)
        run.backward(loss * bad)
        norm = run.update(optimizer, clip_norm=1.0, scheduler=scheduler)
        assert norm is not None
        ema.update_parameters(model)
        run.print(f"STEP {step} NORM {norm.item():.7g} LR {scheduler.get_last_lr()[0]:.6g}")
        run.step(loss=loss)
        if run.tensorboard is not None:
            run.tensorboard.flush()
        if step == args.kill_at:
            while not any(run.folder.checkpoints.glob("step-[0-9]")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

with run.evaluating(ema) as averaged:
    assert torch.isfinite(averaged(x.to(run.device))).all()
if run.rank == 0:
    state = [*net.state_dict().values(), *ema.state_dict().values()]
    (run.folder.path / "weights").write_bytes(b"".join(v.cpu().numpy().tobytes() for v in state))
run.finish()
