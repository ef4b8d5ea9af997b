"""Prints how often the host has waited for its device in the steps of a training.

The stand-in device of tests/device counts its waits; torch warns of those for a GPU of NVIDIA.
"""

import argparse
import pickle
import sys
import traceback
import warnings
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_ddp.training import start, worker
from hpc_ddp.training.process import hang_watchdog as watchdog
from hpc_ddp.training.telemetry import metrics

parser = argparse.ArgumentParser()
parser.add_argument("--precision", default="fp32")
parser.add_argument("--look", action="store_true", help="at the weights, after every exchange")
parser.add_argument("--sharded", action="store_true")
parser.add_argument("--offload", action="store_true")
parser.add_argument("--average", action="store_true")
parser.add_argument("--default-device", action="store_true", help="torch's: the data lie there")
parser.add_argument("--save-every-steps", type=int)
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()
metrics.EVERY_S = metrics.SELDOM_S = 0.0  # a line of the journal after each step, but the first
worker.LOOK_EVERY = 1 if args.look else 1 << 40

WAIT = "called a synchronizing CUDA operation"
stand_in: Any = sys.modules.get("sim.backend")
warned: list[str] = []


def count_waits() -> int:
    return int(stand_in.C.waits()) if stand_in else sum(WAIT in text for text in warned)


def keep_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    warned.append(str(message))
    if WAIT in str(message):
        traceback.print_stack()


if stand_in:
    stand_in.C.set_stream_delay(0)  # with a line each step, a late device would be waited for
now = start(precision=args.precision, save_every=None, save_every_steps=args.save_every_steps)
now._consensus._device = torch.device("cpu")  # it waits for the work of an exchange ago
torch.manual_seed(0)
if args.default_device:
    torch.set_default_device(now.device)
norm = nn.LayerNorm(32) if args.sharded else nn.BatchNorm1d(32)
net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), norm, nn.Linear(32, 2))
if args.sharded:
    net.insert(3, nn.PReLU())  # one number: of two ranks one has it
    net[0].unused = nn.Parameter(torch.zeros(2))
shards: dict[str, Any] = {"units": [net[0]], "offload": args.offload}
model = now.fully_shard(net, **shards) if args.sharded else now.wrap(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
average = now.ema(model).to(now.device) if args.average else None
batches = now.loader(
    TensorDataset(torch.randn(512, 8), torch.randint(2, (512,))), 4, accumulate=args.accumulate
)
now.track(model=model, optimizer=optimizer, scheduler=scheduler)
counts: list[int] = []
warnings.simplefilter("always")
warnings.showwarning = keep_warning
torch.set_warn_always(True)
for _ in now.epochs(1):
    for x, y in batches:
        with now.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        now.backward(loss)
        whole = None
        if not args.offload:  # torch's has no backend for gradients on the CPU
            whole = nn.utils.clip_grad_norm_(model.parameters(), 9.0)  # a DTensor, where sharded
        size = now.update(optimizer, clip_norm=1.0, scheduler=scheduler)
        if average:
            average.update_parameters(model)
        now.step(loss=loss, norm=size, whole=whole)
        if not counts:
            # torch 2.9 puts AdamW's count of steps on the default device, and waits for it.
            for state in optimizer.state.values():
                state["step"] = state["step"].cpu()
        counts.append(count_waits())
        if len(counts) == 2:
            if not stand_in:
                torch.cuda.set_sync_debug_mode("warn")
            looks = -now._consensus.exchanges
looks += now._consensus.exchanges
now.print(f"WAITS {counts[-2] - counts[1]} LOOKS {looks} STEPS {len(counts)}")
with suppress(NotImplementedError):  # torch 2.9 has no record of simccl
    record = pickle.loads(watchdog.flight_recorder(now.device))
    now.print("FLIGHT", *(entry["profiling_name"] for entry in record["entries"]))
now.finish()
