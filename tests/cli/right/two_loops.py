"""Two loops, each left by ``break`` while a progress bar keeps it, and the best weights behind. A
scheduler is stepped behind `run.step`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import TensorDataset

from hpc_ddp import training


class Bar:
    """As tqdm's, which does not close what it iterates over."""

    def __init__(self, epochs: Iterator[int]) -> None:
        self.epochs = epochs

    def __iter__(self) -> Iterator[int]:
        for epoch in self.epochs:  # noqa: UP028
            yield epoch


def main() -> None:
    run = training.start(seed=1)
    torch.manual_seed(0)
    model = run.wrap(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    loader = run.loader(TensorDataset(torch.randn(48, 4)), batch_size=8)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    for total, last in ((4, 1), (6, 4)):
        bar = Bar(run.epochs(total))
        for epoch in bar:
            for (inputs,) in loader:
                loss = model(inputs).square().mean()
                run.backward(loss)
                run.update(optimizer)
                run.step(loss=loss)
                scheduler.step()  # code behind `step` is part of the step
            run.best(epoch)
            if epoch == last:
                break
        run.load_best(model)
    run.finish()


main()
