"""Prints, for each optimizer step of an epoch, its gradient and how often DDP spoke for it."""

import argparse
import json

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # torch.distributed re-exports it untyped
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import TensorDataset

from hpc_ddp.training import start

parser = argparse.ArgumentParser()
for name in ("--batch-size", "--global-batch-size"):
    parser.add_argument(name, type=int)
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()

run = start()
x = torch.arange(81, dtype=torch.float64).sin().reshape(27, 3)
net = torch.nn.Linear(3, 1, dtype=torch.float64)
torch.nn.init.constant_(net.weight, 0.5)
torch.nn.init.constant_(net.bias, 0.25)
model = run.wrap(net)
calls: list[int] = []


def count(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    calls.append(1)
    return allreduce_hook(group, bucket)


model.register_comm_hook(None, count)  # type: ignore[operator]  # a DDP model
batches = run.loader(TensorDataset(x, x.sum(1)), **vars(args), shuffle=False)
run.track(model=model)
for _ in run.epochs(1):
    for inputs, targets in batches:
        loss = (model(inputs).squeeze(1) - targets).square().mean()
        run.backward(loss)
        if run.ends_step:
            assert net.weight.grad is not None
            assert net.bias.grad is not None
            gradients = [*net.weight.grad.flatten().tolist(), *net.bias.grad.tolist()]
            model.zero_grad()
        run.step(loss=loss)
        if run.ends_step:
            run.print(json.dumps([gradients, len(calls), run.position.samples]))
            calls.clear()
run.finish()
