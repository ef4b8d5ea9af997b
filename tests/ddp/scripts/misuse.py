"""A script that makes one of the mistakes that people make."""

import multiprocessing
import os
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_ddp.training import start
from hpc_ddp.training.checkpoint.storage import disk

NOT_NUMBERS: dict[str, Any] = {"best None": None, "best word": "1", "best two": torch.ones(2)}
case = sys.argv[1]
if case == "own group":
    torch.distributed.init_process_group("gloo")
if case == "stages":  # the optimizer on one stage only
    run = start(pp=2)
    stage = run.wrap(nn.Linear(4, 4))
    own = torch.optim.SGD(stage.parameters(), lr=0.1)
    run.track(**({"model": stage, "optimizer": own} if run.rank else {"model": stage}))
if case == "replicas":
    start(replicas=2).wrap(nn.Linear(4, 4))
if case == "child":  # Python 3.14 starts processes so, if nothing else is set
    start()
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()
    sys.exit(process.exitcode)
if case == "seeds":  # as of scripts that draw other numbers on each rank
    start(seed=1 + int(os.environ["RANK"])).track(model=nn.Linear(4, 4))
HALF = {"half shard": "fp16"}
if case == "options":
    start(keep_last=2.5)  # type: ignore[arg-type]
options_of_start: dict[str, Any] = {"precision": HALF.get(case, "fp32")}
if case == "sparse beside gloo":
    kind = torch.accelerator.current_accelerator() or torch.device("cpu")
    backend = torch.distributed.get_default_backend_for_device(kind.type)
    options_of_start["backend"] = f"cpu:gloo,{kind.type}:{backend}"
run = start(**options_of_start)
if case == "half shard":
    run.fully_shard(nn.Linear(4, 1), [])
if case.startswith("sparse"):
    run.wrap(nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 1)))
data = TensorDataset(torch.randn(64, 4))
model = run.wrap(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
options: dict[str, Any] = {"accumulate": 3} if case == "short step" else {}
options |= {"accumulate": 2} if case == "accumulate" else {}
if case == "sampler":
    options["sampler"] = torch.utils.data.RandomSampler(data)
if case == "batch size":
    options["batch_size"] = "8"
if case == "too few":
    options |= {"batch_size": 65, "drop_last": True}
if case == "late loader":
    run.track(model=model)
batches = run.loader(data, **{"batch_size": 8, **options})
if case == "number":
    run.track(model=model, optimizer=optimizer, best=0.5)
if case == "no model":
    run.track(optimizer=optimizer)
PER_RANK: dict[str, Any] = {"per rank": ("loader",), "per rank word": "model"}
if case != "no track":
    run.track(model=model, optimizer=optimizer, per_rank=PER_RANK.get(case, ()))
if case == "no loop":
    run.step()
if case == "no step":
    list(run.steps(2))
if case == "short step":  # of 64 samples in micro-batches of 8 the epoch's last step has two
    micro_batches = (batch for _ in range(9) for batch in batches)
    for _ in run.steps(9):
        for _ in range(3):
            run.backward(model(next(micro_batches)[0]).square().mean())
        run.update(optimizer)
        run.step()
if case == "two loops":
    [list(run.steps(2)) for _ in run.epochs(1)]
for _ in run.epochs(2):
    for (x,) in batches:
        if case == "poison":
            next(model.parameters()).data.fill_(torch.nan)
        loss = model(x).square().mean()
        run.backward(loss)
        if case == "clip":
            run.update(optimizer, clip_norm=0.0)
        optimizer.step()
        optimizer.zero_grad()
        late = {"note": "a word"} if case == "late word" and run.position.step else {}
        run.step(loss=loss.expand(3) if case == "no scalar" else loss, **late)
        if case == "early exit" and run.rank == 1:
            sys.exit()
        if case == "fork" and not os.fork():
            sys.exit()
        if case == "two steps":
            run.step(loss=loss)
if case in NOT_NUMBERS:
    run.best(NOT_NUMBERS[case])
if case == "full disk":  # for one save, that of the best
    module: Any = disk
    write = disk.write_manifest

    def fail(*args: Any) -> None:
        module.write_manifest = write
        raise OSError("no space")

    module.write_manifest = fail
    run.best(1.0)
    run._manager.save()
    print("SAVED", run._manager.settle(), "BEST", run._manager.best.step)
    run.print("LOADED", run.load_best(model))
if case == "no best":
    run.load_best(model)
if case == "untracked":
    run.load_best(nn.Linear(4, 1))
if case != "no finish":
    results: dict[str, Any] = {"result": {"accuracy": [1.0]}, "nan": {"loss": loss * torch.nan}}
    run.finish(**results.get(case, {}))
    if case == "two starts":
        start()
    run.finish()
