"""Steps that are replays of a CUDA graph, captured behind `run.track` as in torch's notes, or in
which the model's forward and backward are (``graph_replays.py callables``). A device without such
graphs takes the steps. ``--stop-at N``: the first attempt stops at that step.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_ddp.training import start
from hpc_ddp.training.stops.signals import NOTICE

stop_at = int(sys.argv[-1]) if "--stop-at" in sys.argv else 0
has_callables = "callables" in sys.argv
run = start(deterministic=True, seed=0)
has_graphs = run.device.type == "cuda"
cuda: Any = torch.cuda
net: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4)).to(
    run.device
)
loss_fn = nn.CrossEntropyLoss()
if has_callables and has_graphs:
    net = cuda.make_graphed_callables(net, (torch.zeros(8, 8, device=run.device),))
model = run.wrap(net) if has_callables else net
whole = not has_callables
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=whole and has_graphs)
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(128, 8, generator=generator)
labels = torch.randint(4, (128,), generator=generator)
batches = run.loader(TensorDataset(inputs, labels), batch_size=8)
run.track(model=model, optimizer=optimizer)
x_place = torch.zeros(8, 8, device=run.device)
y_place = torch.zeros(8, dtype=torch.long, device=run.device)


def train_in_place() -> torch.Tensor:
    loss: torch.Tensor = loss_fn(model(x_place), y_place)
    torch.autograd.backward(loss)
    optimizer.step()
    return loss


def warm_up() -> None:
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        train_in_place()
    optimizer.zero_grad(set_to_none=True)


def capture() -> Callable[[], torch.Tensor]:
    """Return what replays a step; its warm-up takes three steps, which `run` takes back."""
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        warm_up()
    cuda.current_stream().wait_stream(stream)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        loss = train_in_place()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    return replay


def train_anew() -> torch.Tensor:
    optimizer.zero_grad()
    return train_in_place()


step = train_anew
if whole and has_graphs:
    step = capture()
elif whole:
    warm_up()
for _ in run.epochs(3):
    for x, y in batches:
        x_place.copy_(x)
        y_place.copy_(y)
        loss = step()
        if run.position.step + 1 == stop_at and not run.resumed:
            run._notices.reason = NOTICE
        run.step(loss=loss)
print("WEIGHTS", sum(weight.double().sum().item() for weight in net.parameters()), loss.item())
run.finish()
