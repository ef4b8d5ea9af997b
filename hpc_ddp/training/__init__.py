"""The worker's side: a training loop that can be stopped at any step and goes on there.

::

    from hpc_ddp.training import start

    run = start(seed=0)                               # group, device, notices, run folder
    model = run.wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = run.loader(train_set, batch_size=32)    # per rank; the order resumes
    run.track(model=model, optimizer=optimizer)       # what a checkpoint holds; restores here
    for epoch in run.epochs(10):
        for x, y in batches:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            run.backward(loss)                        # weighted where batches are uneven
            optimizer.step()
            run.step(loss=loss)                       # saves, stops, journals
    run.finish()

On the same number of ranks an interrupted run ends with the same weights, bit for bit, as
an undisturbed one; on GPUs with ``start(deterministic=True)``. The way of a decision::

    signal ─► notice ─► pace ─► exchange (all ranks) ─► run ─► checkpoint ─► storage
"""

from hpc_ddp.core.errors import UsageError  # for scripts: an error without a traceback
from hpc_ddp.training.checkpoint.save import SupersededError
from hpc_ddp.training.models.ddp import compile_for_resume
from hpc_ddp.training.process.start import start
from hpc_ddp.training.run import Run
from hpc_ddp.training.stops.signals import ignore_notices

__all__ = [
    "Run",
    "SupersededError",
    "UsageError",
    "compile_for_resume",
    "ignore_notices",
    "start",
]
