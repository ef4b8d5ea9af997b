"""Measures the training module side by side with what it can't be faster than, and with peers.

``python bench/training.py`` prints a table of medians and writes it to ``bench/results/``. Each
part runs in processes of its own, ours and the reference in turn. 1 GiB of state is a model of
1/3 GiB with Adam. With a GPU (`--device cuda`) the model is on it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
ROUNDS = 7
LAYERS, WIDTH = 85, 1024  # with Adam: 1.0 GiB
SAMPLES = 20_000_000


def seconds(work: Callable[[], object]) -> float:
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


class Subject:
    """A run with 1 GiB of state, and its parts; all ranks make one."""

    def __init__(self, device: str) -> None:
        import torch

        from hpc_ddp.training import start

        if device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self.run = start(save_every=None)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.model = torch.nn.Sequential(*layers).to(self.run.device)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.objects: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.run.track(**self.objects)
        self.keeper = self.run._manager
        self.checkpoints = self.run._manager._checkpoints

    @property
    def tensors(self) -> list[Any]:
        states = self.optimizer.state.values()
        return [
            *self.model.parameters(),
            *(s[k] for s in states for k in ("exp_avg", "exp_avg_sq")),
        ]

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def state(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in self.objects.items()}

    def save(self) -> float:
        """Begin a save; return how long the training is held up."""
        self.run.position.step += 1
        return seconds(self.keeper.save)

    def wait(self) -> None:
        self.keeper.settle()
        os.sync()  # nothing of one round is written during the next


def part_stall(device: str, folder: Path) -> dict[str, list[float]]:
    import torch
    from torch.distributed.checkpoint.state_dict_saver import async_save

    subject = Subject(device)
    pinned = device == "cuda"
    buffers = [torch.empty(t.shape, dtype=t.dtype, pin_memory=pinned) for t in subject.tensors]

    def copy() -> None:
        for buffer, tensor in zip(buffers, subject.tensors, strict=True):
            buffer.copy_(tensor.detach(), non_blocking=True)
        if pinned:
            torch.cuda.synchronize()

    def save() -> None:
        with open(folder / "plain.pt", "wb") as file:
            torch.save(subject.state(), file)
            os.fsync(file.fileno())

    found: dict[str, list[float]] = {"ours": [], "copy": [], "torch.save": [], "dcp": []}
    for round_ in range(ROUNDS + 1):  # the first one allocates, for all of them
        times = {"ours": subject.save()}
        subject.wait()
        times["copy"] = seconds(copy)
        times["torch.save"] = seconds(save)
        begin = time.monotonic()
        pending: Any = async_save(subject.state(), checkpoint_id=folder / f"dcp-{round_}")
        times["dcp"] = time.monotonic() - begin
        pending.result()
        os.sync()
        for name, value in times.items():
            found[name] += [value] if round_ else []
        subprocess.run(["rm", "-rf", str(folder / f"dcp-{round_}")], check=True)
    return found


def part_durable(device: str, folder: Path) -> dict[str, list[float]]:
    subject = Subject(device)
    control, rank = subject.run._control, subject.run.rank
    subject.save()
    subject.wait()
    mine = b"".join(subject.keeper._buffer.bytes)

    def write() -> None:
        with open(folder / f"raw-{rank}", "wb", buffering=0) as file:
            view = memoryview(mine)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        control.barrier()

    def durable() -> None:
        subject.save()
        subject.keeper.settle()

    found: dict[str, list[float]] = {"ours": [], "raw": []}
    for _ in range(ROUNDS):
        for name, work in (("ours", durable), ("raw", write)):
            control.barrier()
            found[name].append(seconds(work))
            subprocess.run(["rm", "-f", str(folder / f"raw-{rank}")], check=True)
            os.sync()
    return found


def part_load(device: str, folder: Path) -> dict[str, list[float]]:
    from hpc_ddp.training.checkpoint import put_back

    subject = Subject(device)
    subject.save()
    subject.wait()
    path = next(subject.run.folder.checkpoints.glob("step-*/rank-0.bin"))

    def load() -> None:
        restored = subject.checkpoints.restore()
        assert restored
        put_back.put_back(subject.keeper.objects, restored.index.shared["tree"], restored.reader, 1)

    def raw() -> None:
        zlib.crc32(path.read_bytes())

    found: dict[str, list[float]] = {"ours": [], "raw": []}
    for _ in range(ROUNDS):
        found["raw"].append(seconds(raw))
        found["ours"].append(seconds(load))
    return found


def part_memory(device: str, folder: Path) -> dict[str, list[float]]:
    subject = Subject(device)
    subject.state()  # what it imports is not the save's

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    for _ in range(3):
        subject.save()
        subject.keeper.settle()
    return {"ours": [float(status("VmHWM") - before)], "state": [float(subject.size)]}


def part_steps(device: str, folder: Path) -> dict[str, list[float]]:
    """A model with steps of about 5 ms, in blocks of 100 steps: ours, then the bare loop."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from hpc_ddp.training import start

    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    block, batch, blocks = 100, 32, 82
    run = start(save_every=300)
    data = TensorDataset(torch.randn(block * batch * run.world_size, 256))

    def make() -> nn.Module:
        layers = [nn.Linear(256, 256), nn.ReLU(), *(nn.Linear(256, 256) for _ in range(2))]
        return nn.Sequential(*layers).to(run.device)

    model = run.wrap(make())
    bare = DistributedDataParallel(make())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, bare)]
    batches = run.loader(data, batch)
    run.track(model=model, optimizer=optimizers[0])
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch, sampler=sampler, pin_memory=device == "cuda")

    def bare_block() -> None:
        for (x,) in loader:
            optimizers[1].zero_grad()
            loss = bare(x.to(run.device)).pow(2).mean()
            loss.backward()
            optimizers[1].step()

    found: dict[str, list[float]] = {"ours": [], "bare": []}
    for epoch in run.epochs(blocks):
        begin = time.monotonic()
        for (x,) in batches:
            optimizers[0].zero_grad()
            loss = model(x).pow(2).mean()
            run.backward(loss)
            optimizers[0].step()
            run.step(loss=loss)
        ours = time.monotonic() - begin
        sampler.set_epoch(epoch)
        theirs = seconds(bare_block)
        if epoch >= 2:
            found["ours"].append(block / ours)
            found["bare"].append(block / theirs)
    run.finish()
    return found


def part_jump(device: str, folder: Path) -> dict[str, list[float]]:
    """Seconds to the first batch of a big data set, at sample 10 million and at sample 0."""
    import torch
    from torch.utils.data import Dataset

    from hpc_ddp.training import start

    class Big(Dataset[Any]):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> Any:
            return torch.tensor(index)

    run = start(save_every=None)
    batches = run.loader(Big(), 32)
    run.track()
    found: dict[str, list[float]] = {"ten million": [], "zero": []}
    for epoch in run.epochs(ROUNDS + 1):
        for name, at in (("ten million", 10_000_000), ("zero", 0)):
            run.position.samples = at
            took = seconds(lambda: next(iter(batches)))
            found[name] += [took] if epoch else []
        run.position.samples = SAMPLES
    return found


PARTS = {
    "stall": (part_stall, 1),
    "durable": (part_durable, 2),
    "load": (part_load, 1),
    "memory": (part_memory, 1),
    "steps": (part_steps, 2),
    "jump": (part_jump, 1),
}


def measure(part: str, device: str) -> dict[str, list[float]]:
    """Run a part in fresh processes; return what rank 0 measured."""
    ranks = PARTS[part][1]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, *(torchrun if ranks > 1 else [])]
        argv += [__file__, "--part", part, "--device", device, "--folder", folder]
        env = {**os.environ, "PYTHONPATH": str(REPO), "HPC_DDP_RUNS": f"{folder}/runs"}
        if ranks > 1 and device == "cpu":
            env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
        done = subprocess.run(argv, env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        found: dict[str, list[float]] = json.loads(Path(folder, "result").read_text())
    print(part, {k: [round(v, 4) for v in vs] for k, vs in found.items()}, file=sys.stderr)
    return found


def table(device: str) -> list[str]:
    found = {part: measure(part, device) for part in PARTS}
    mid = {
        part: {name: statistics.median(values) for name, values in each.items()}
        for part, each in found.items()
    }

    def line(what: str, part: str, ours: str, theirs: str, reach: str, unit: str = "s") -> str:
        a, b = mid[part][ours], mid[part][theirs]
        scale = 2**20 if unit == "MiB" else 1
        shown = f"{a / scale:.4g} {unit} | {theirs} {b / scale:.4g} {unit}"
        return f"| {what} | {shown} | {reach} | {a / b:.3f} x |"

    return [
        "| what (medians) | hpc-ddp | reference | reach | measured |",
        "|---|---|---|---|---|",
        line("stall of a save, 1 GiB, 1 rank", "stall", "ours", "copy", "at most 1.3 x"),
        line("the same", "stall", "ours", "torch.save", "at most 0.1 x"),
        line("the same", "stall", "ours", "dcp", "below 1 x"),
        line("seconds until durable, 1 GiB, 2 ranks", "durable", "ours", "raw", "at most 1.5 x"),
        line("load and verify, 1 GiB", "load", "ours", "raw", "at most 1.5 x"),
        line("steps/s, 2 ranks", "steps", "ours", "bare", "at least 0.99 x", "steps/s"),
        line("first batch at sample 10 million", "jump", "ten million", "zero", "at most 1.1 x"),
        line("peak memory of a save", "memory", "ours", "state", "at most 1.1 x", "MiB"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--part", choices=PARTS, help="measure one part, in this process")
    parser.add_argument("--folder", type=Path, help="for --part")
    args = parser.parse_args()
    if args.part:
        found = PARTS[args.part][0](args.device, args.folder)
        if os.environ.get("RANK", "0") == "0":
            (args.folder / "result").write_text(json.dumps(found))
        return
    import torch

    lines = table(args.device)
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"{os.cpu_count()} cores"
    today = datetime.date.today().isoformat()
    head = f"# {today}: {where}, {platform.machine()}, torch {torch.__version__}"
    text = "\n".join([head, "", *lines, ""])
    print(text)
    (REPO / "bench" / "results" / f"{today}-training-{args.device}.md").write_text(text)


if __name__ == "__main__":
    main()
