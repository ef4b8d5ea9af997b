"""Measures trainings on accelerators side by side with bare loops: speed, MFU, stall of a save.

``python bench/gpu.py --workers 8 --write`` trains the models of jobs/gpt.py and jobs/designsafe.py
with hpc-ddp and in a loop of torch alone, in turn, in the same processes, in fp32, bf16 and bf16
compiled. It prints medians, and writes them to ``bench/results/``. ``--small`` tries the bench
itself, on any machine.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
sys.path[:0] = [str(REPO), str(REPO / "jobs")]
STEPS, ROUNDS = 30, 7  # of each side in turn
WAYS = {"fp32": ("fp32", False), "bf16": ("bf16", False), "bf16 compiled": ("bf16", True)}
GPT_SIZE = {"layers": 12, "heads": 12, "width": 768, "length": 1024, "dropout": 0.0}
SMALL_GPT_SIZE = {"layers": 2, "heads": 2, "width": 32, "length": 16, "dropout": 0.0}


def make_gpt(small: bool) -> tuple[Any, Any, Any, int]:
    """Return model, loss function, data set and batch size; GPT-2 small unless `small`."""
    import torch

    gpt = import_module("gpt")
    size = SMALL_GPT_SIZE if small else GPT_SIZE
    args = argparse.Namespace(**size, activation_checkpointing=False)
    tokens = torch.randint(1000, (64 if small else 2048, int(size["length"])))
    data = torch.utils.data.TensorDataset(tokens, tokens.roll(-1, 1))
    return gpt.GPT(1000, args), gpt.loss_fn, data, 4 if small else 32


def make_resnet(small: bool) -> tuple[Any, Any, Any, int]:
    """Return the same for the network of jobs/designsafe.py, with its three classes."""
    import torch

    designsafe = import_module("designsafe")
    model = designsafe.make_model("resnet18" if small else "resnet34", None, 3, freeze=False)
    count, side = (32, 32) if small else (1024, 244)
    images = torch.randn(count, 3, side, side)
    data = torch.utils.data.TensorDataset(images, torch.randint(3, (count,)))
    return model, torch.nn.functional.cross_entropy, data, 4 if small else 64


MODELS = {"gpt": make_gpt, "resnet": make_resnet}


def ours(run: Any, model: Any, loss_fn: Any, batches: Any) -> Iterator[None]:
    """Train with hpc-ddp; a step each time that it is asked for one."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run.track(model=model, optimizer=optimizer)
    for _ in run.epochs(1_000_000):
        for x, y in batches:
            with run.autocast():
                loss = loss_fn(model(x), y)
            run.backward(loss)
            run.update(optimizer, clip_norm=1.0)
            run.step(loss=loss)
            yield


def bare(device: Any, dtype: Any, model: Any, loss_fn: Any, data: Any, size: int) -> Iterator[None]:
    """Train with torch alone, as its tutorials do."""
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sampler: Any = DistributedSampler(data)
    pin = device.type != "cpu"
    batches: Any = DataLoader(data, size, sampler=sampler, pin_memory=pin, drop_last=True)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for x, y in batches:
            x, y = (tensor.to(device, non_blocking=True) for tensor in (x, y))
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            yield


def flops_of_step(model: Any, loss_fn: Any, batch: Any, device: Any) -> int:
    """Return the floating-point operations of forward and backward of one rank's batch."""
    from torch.utils.flop_counter import FlopCounterMode

    x, y = (tensor.to(device) for tensor in batch)
    with FlopCounterMode(display=False) as counter:
        loss_fn(model(x), y).backward()
    model.zero_grad()
    return int(counter.get_total_flops())


def measure(model_name: str, way: str, small: bool) -> dict[str, Any]:
    """In a worker: train both ways in turn; return medians in seconds, and what else was seen."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from hpc_ddp.training import devices, start
    from hpc_ddp.training.stops.consensus import Decision
    from hpc_ddp.training.telemetry.peak_flops import peak_flops

    precision, compiled = WAYS[way]
    run = start(precision=precision, save_every=None, progress=False, hang_after=None)
    model, loss_fn, data, size = MODELS[model_name](small)
    other = copy.deepcopy(model).to(run.device)
    batch = torch.utils.data.default_collate([data[index] for index in range(size)])
    flops = flops_of_step(other, loss_fn, batch, run.device)
    if compiled:
        other.compile(dynamic=False)
    ids: dict[str, Any] = (
        {"device_ids": [run.device.index]} if devices.is_accelerator(run.device) else {}
    )
    wrapped = run.wrap(model, compile=compiled)
    batches = run.loader(data, size, drop_last=True)
    dtype = torch.bfloat16 if precision == "bf16" else None
    sides = {
        "ours": ours(run, wrapped, loss_fn, batches),
        "bare": bare(run.device, dtype, DistributedDataParallel(other, **ids), loss_fn, data, size),
    }

    def seconds(side: str, steps: int) -> float:
        torch.distributed.barrier()
        _synchronize(run.device)
        begin = time.perf_counter()
        for _ in range(steps):
            next(sides[side])
        _synchronize(run.device)
        return (time.perf_counter() - begin) / steps

    steps, rounds = (3, 2) if small else (STEPS, ROUNDS)
    times: dict[str, list[float]] = {side: [] for side in (*sides, "saving", "copy")}
    for side in sides:
        seconds(side, steps)  # compiles, allocates
    for _ in range(rounds):
        for side in sides:
            times[side].append(seconds(side, steps))
        run._add_decision(Decision(save=True))
        times["saving"].append(seconds("ours", steps) * steps - times["ours"][-1] * steps)
        run._manager.settle()
        times["copy"].append(_copy_seconds(wrapped, run.device))
    medians = {name: statistics.median(values) for name, values in times.items()}
    name = devices.name(run.device) or run.device.type
    peak = peak_flops(name, precision)
    mfu = flops / medians["ours"] / peak if peak else None
    counts = {"steps": steps, "rounds": rounds, "world_size": run.world_size}
    return {"device": name, "mfu": mfu, **counts, **medians}


def _synchronize(device: Any) -> None:
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _copy_seconds(model: Any, device: Any) -> float:
    """Return how long this rank's share of weights and AdamW's state takes to pinned memory."""
    import torch

    from hpc_ddp.training import devices

    numbers = 3 * sum(parameter.numel() for parameter in model.parameters())
    there = torch.empty(numbers // torch.distributed.get_world_size(), device=device)
    here = torch.empty(there.shape, pin_memory=devices.is_accelerator(device))
    _synchronize(device)
    begin = time.perf_counter()
    here.copy_(there, non_blocking=True)
    _synchronize(device)
    return time.perf_counter() - begin


def run_part(model: str, way: str, workers: int, small: bool) -> dict[str, Any] | None:
    """Start the workers of one row; return what rank 0 has measured, None after a failure."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={workers}", __file__, "--part", model, way, str(out)]
        command += ["--small"] if small else []
        env = {**os.environ, "HPC_DDP_RUNS": folder}
        if subprocess.run(command, cwd=folder, env=env).returncode:
            return None
        row: dict[str, Any] = json.loads(out.read_text())
        return row


def table(rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    import torch

    first = next(iter(rows.values()))
    lines = [
        f"# {datetime.date.today()}: {first['world_size']} x {first['device']}, torch"
        f" {torch.__version__}",
        "",
        f"Medians of {first['rounds']} rounds of {first['steps']} steps; ours and a bare loop in"
        " turn.",
        "",
        "| model | precision | ours, ms/step | bare, ms/step | ratio | MFU | a save adds, ms |"
        " copy to the host, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (model, way), row in rows.items():
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
        lines.append(
            f"| {model} | {way} | {1e3 * row['ours']:.2f} | {1e3 * row['bare']:.2f} |"
            f" {row['ours'] / row['bare']:.3f} | {mfu} | {1e3 * row['saving']:.1f} |"
            f" {1e3 * row['copy']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1, help="accelerators, and ranks")
    parser.add_argument("--small", action="store_true", help="small models, few steps")
    parser.add_argument("--only", help="rows whose model and precision contain this")
    parser.add_argument("--write", action="store_true", help="keep the table in bench/results")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        model, way, out = args.part
        row = measure(model, way, args.small)
        if int(os.environ["RANK"]) == 0:
            Path(out).write_text(json.dumps(row))
        return
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for key in itertools.product(MODELS, WAYS):
        if args.only is None or args.only in " ".join(key):
            measured = run_part(*key, args.workers, args.small)
            print(key, measured or "failed", flush=True)
            rows |= {key: measured} if measured else {}
    if not rows:
        sys.exit("no row could be measured")
    page = table(rows)
    print(page)
    if args.write:
        path = REPO / "bench" / "results" / f"{datetime.date.today()}-gpu.md"
        path.write_text(page)


if __name__ == "__main__":
    main()
