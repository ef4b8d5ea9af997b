"""First contact with a node's accelerators: train a tiny model with each feature once.

On this machine, in an allocation, and as a job, which goes on after its own kill::

    hpc-ddp preflight --train
    salloc --nodes 2 --gpus-per-node 4 hpc-ddp preflight --train
    hpc-ddp submit --nodes 2 --gpus-per-node 4 --max-restarts 8 jobs/preflight_train.py

Rank 0 writes a table of what works and what does not into ``<run folder>/first-contact.md``, to
be pasted into an issue. A feature that fails ends the workers; torchrun starts them again
(``--max-restarts``), and they go on with the next feature.
"""

import hashlib
import os
import platform
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import hpc_ddp
from hpc_ddp.core.file_io import read_json, write_json
from hpc_ddp.training import Run, UsageError, devices, start

Details = dict[str, Any]
BATCH, STEPS_PER_EPOCH, EPOCHS = 16, 8, 2
SAVED, KILLED = 6, 9  # steps of the last feature: its checkpoint, and the kill of the last rank
REDUCED = 4 << 20  # elements of an all-reduce, 16 MiB
# For a feature: the first collective of a wrong set-up hangs. And for the first one of a start, in
# which many nodes load their libraries from one disk.
PATIENCE_S, FIRST_PATIENCE_S = 90.0, 300.0
SAVE_S = 60.0  # for a small checkpoint
DRIVERS = ("nvidia", "amdgpu", "i915", "xe", "drv_davinci")  # kernel modules


class UnexpectedError(Exception):
    """A feature ran, and the outcome is not the right one."""


def make_model() -> nn.Sequential:
    """Return a small network from 16 numbers to one, in several layers, so that FSDP2 has some to
    shard."""
    return nn.Sequential(
        nn.Linear(16, 64),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 1),
    )


def make_data(world_size: int) -> TensorDataset:
    """Return inputs (n, 16) and targets (n, 1); n is enough for `STEPS_PER_EPOCH` steps of all
    ranks."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(world_size * BATCH * STEPS_PER_EPOCH, 16, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) / 4)


def digest(model: nn.Module) -> str:
    """Return a short checksum of all weights of a model; each rank has all of them."""
    text = b"".join(weight.detach().cpu().numpy().tobytes() for weight in model.parameters())
    return hashlib.sha256(text).hexdigest()[:12]


def train(run: Run, *, sharded: bool = False, kill: bool = False) -> Details:
    """Train for `EPOCHS`. Return the row's details: the mean losses of the first and of the last
    four steps, a digest of the weights, and the step at which a run has resumed. All ranks call it.

    With `kill` the last rank kills itself at step `KILLED`, unless the run has resumed. For a
    `sharded` model there is no digest.

    Raises
    ------
    UnexpectedError
        the loss did not fall, or the checkpoint before the kill did not come
    """
    model: nn.Module = make_model()
    if sharded:
        model = run.fully_shard(model, [part for part in model.children() if [*part.parameters()]])
    else:
        model = run.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = run.loader(make_data(run.world_size), batch_size=BATCH)
    run.track(model=model, optimizer=optimizer)
    resumed = run.position.step
    losses = []
    for _ in run.epochs(EPOCHS):
        for inputs, targets in batches:
            with run.autocast():
                loss = nn.functional.mse_loss(model(inputs), targets)
            run.backward(loss)
            run.update(optimizer, clip_norm=1.0)
            run.step(loss=loss)
            losses.append(loss.item())
            if kill and not resumed and run.position.step == KILLED:
                # A thread writes it.
                saved = run.folder.checkpoints / f"step-{SAVED}"
                wait_for(saved, f"the checkpoint of step {SAVED}", SAVE_S)
                if run.rank == run.world_size - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
    first, last = (sum(part) / len(part) for part in (losses[:4], losses[-4:]))
    if not last < first:
        raise UnexpectedError(f"the loss went from {first:.3g} to {last:.3g}")
    details: Details = {"resumed at": resumed} if resumed else {}
    details["loss"] = f"{first:.3f} to {last:.3f}"
    return details if sharded else {**details, "weights": digest(model)}


def wait_for(path: Path, noun: str, patience_s: float) -> None:
    """Wait until a file or folder exists, for `patience_s` at most. Then raise UnexpectedError, in
    which `noun` names it."""
    end = time.monotonic() + patience_s
    while not path.exists():
        if time.monotonic() > end:
            raise UnexpectedError(f"{noun} was not there within {patience_s:.0f} s")
        time.sleep(0.05)


def all_reduce(run: Run) -> Details:
    """Add up a tensor of the device over all ranks; return the backend and the speed. All ranks
    call it.

    Raises
    ------
    UnexpectedError
        the sum is wrong
    """
    for _ in range(2):  # the first one connects the ranks
        values = torch.full((REDUCED,), run.rank + 1.0, device=run.device)
        begin = time.perf_counter()
        dist.all_reduce(values)
        right = bool((values == run.world_size * (run.world_size + 1) / 2).all())
        seconds = time.perf_counter() - begin
    run.sum()  # no rank leaves while another one still receives
    if not right:
        raise UnexpectedError("the sum is wrong")
    return {"backend": dist.get_backend(), "speed": f"{4 * REDUCED / seconds / 1e9:.2f} GB/s"}


FEATURES: dict[str, tuple[dict[str, Any], Callable[[Run], Details]]] = {
    "all-reduce": ({}, all_reduce),
    "wrap, fp32": ({}, train),
    "bf16": ({"precision": "bf16"}, train),
    "fp16": ({"precision": "fp16"}, train),
    "FSDP2, bf16": ({"precision": "bf16"}, partial(train, sharded=True)),
    # The last one is the run itself: its end is the run's.
    "save, kill, resume": ({"save_every_steps": SAVED}, partial(train, kill=True)),
}
LAST = [*FEATURES][-1]


class Table:
    """The outcomes of all features: a JSON file for each, which all ranks read at their start.

    `start` names this start of all workers. A file may be newer than that: rank 0 may have begun a
    feature before another rank reads. Methods that write raise OSError if the disk refuses.
    """

    def __init__(self, folder: Path, rank: int, start: str) -> None:
        self._folder, self._rank, self._start = folder, rank, start
        self._rows = {name: self._read(name) for name in FEATURES}
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """Return the JSON file of a feature."""
        return self._folder / f"{name.replace(', ', '-').replace(' ', '-').lower()}.json"

    def _read(self, name: str) -> Details:
        """Return the row of a feature, {} for a feature that has not begun. Where an earlier start
        had errors, the row has the first one as ``error``."""
        path = self.path(name)
        of_this_start = f"{path.stem}.{self._start}."  # a rank has failed before this one read
        errors = sorted(path.parent.glob(f"{path.stem}.*.rank-*"))
        errors = [error for error in errors if not error.name.startswith(of_this_start)]
        errors.sort(key=lambda error: error.stat().st_mtime_ns)  # others follow from the first
        row: Details = read_json(path)
        return {**row, "error": errors[0].read_text()} if errors else row

    def meet(self, name: str) -> int:
        """Return the port at which the ranks of a feature meet. Rank 0 finds a free one, and writes
        it to a file, for which the others wait.

        Raises
        ------
        UnexpectedError
            there was no such file within `PATIENCE_S`
        """
        path = self.path(name).with_suffix(f".{self._start}.port")
        if self._rank == 0:
            with socket.create_server(("", 0)) as server:
                write_json(path, {"port": server.getsockname()[1]})
        wait_for(path, "a port of rank 0", PATIENCE_S)
        return int(read_json(path)["port"])

    def is_left(self, name: str) -> bool:
        """Return whether a feature is to be tried: it has neither worked nor failed, and no earlier
        start of the workers has ended in it. In the last feature, whose kill is planned, one start
        may have ended."""
        row = self._rows[name]
        return not row.get("ok") and "error" not in row and self._crashes(name) < 1 + (name == LAST)

    def _crashes(self, name: str) -> int:
        """Return how many earlier starts have begun a feature."""
        return len({*self._rows[name].get("starts", ())} - {self._start})

    def put(self, name: str, **details: Any) -> None:
        """Add details to the row of a feature. Rank 0 also writes the row and the whole table."""
        self._rows[name] = self._rows[name] | details
        if self._rank == 0:
            write_json(self.path(name), self._rows[name])
            self.write()

    def begin(self, name: str) -> None:
        """Note in its row that this start has begun a feature."""
        self.put(name, starts=[*self._rows[name].get("starts", ()), self._start])

    def fail(self, name: str, error: Exception) -> None:
        """Write an error of this rank into a file, which the next start reads. An error in the last
        feature before the planned kill has ended a start is left out: it may follow from the
        kill."""
        if name == LAST and not self._crashes(name):
            return
        text = f"rank {self._rank}: {type(error).__name__}: {error}".splitlines()[0]
        path = self.path(name)
        path.with_name(f"{path.stem}.{self._start}.rank-{self._rank}").write_text(text)

    def compare(self, name: str) -> None:
        """Check that the training that was killed resumed, and ended with the weights of an
        undisturbed one.

        Raises
        ------
        UnexpectedError
            it resumed at another step than `SAVED`, or ended with other weights
        """
        row, undisturbed = self._rows[name], self._rows["wrap, fp32"]
        if row.get("resumed at") != SAVED:
            raise UnexpectedError(f"it went on at step {row.get('resumed at')}, not at {SAVED}")
        if undisturbed.get("weights", row["weights"]) != row["weights"]:
            raise UnexpectedError("its weights are not those of the undisturbed training")

    def write(self) -> None:
        """Write the table as Markdown."""
        self._folder.with_suffix(".md").write_text(self.markdown())

    def markdown(self) -> str:
        """Return the facts and the outcomes so far as two tables."""
        lines = ["| what | which |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in facts().items()]
        lines += ["", "| feature | works | seconds | details |", "|---|---|---|---|"]
        for name, row in self._rows.items():
            tried = "starts" in row or "error" in row  # rank 0 counts starts, any rank may fail
            works = (
                "yes" if row.get("ok") and "error" not in row else "no" if tried else "not tried"
            )
            hidden = ("ok", "starts", "seconds", "error")
            details = [f"{key} {value}" for key, value in row.items() if key not in hidden]
            if works == "no":
                details = [row.get("error", "the workers ended without an exception: see the logs")]
            lines.append(f"| {name} | {works} | {row.get('seconds', '')} | {', '.join(details)} |")
        return "\n".join([*lines, ""])


def give_up(table: Table, name: str, patience_s: float) -> None:
    """Keep the error of a feature that has not ended, and exit with 1; run by a timer."""
    table.fail(name, UnexpectedError(f"no end within {patience_s:.0f} s"))
    os._exit(1)


def facts() -> dict[str, Any]:
    """Return what an issue needs to know besides the features: versions, devices, drivers."""
    device = devices.usable() or devices.CPU
    paths = [(name, Path("/sys/module") / name / "version") for name in DRIVERS]
    drivers = [f"{name} {path.read_text().strip()}" for name, path in paths if path.exists()]
    return {
        "hpc-ddp": hpc_ddp.__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "Linux": platform.release(),
        "Slurm": slurm_version(),
        "device": f"{device.type} {devices.name(device)}".strip(),
        "driver": ", ".join(drivers) or "none known",
        "ranks": os.environ.get("WORLD_SIZE", "1"),
        "nodes": int(os.environ.get("HPC_DDP_NNODES", 1)),
    }


def slurm_version() -> str:
    """Return Slurm's version, ``none`` outside of a job, ``unknown`` where sinfo does not tell
    it."""
    if "SLURM_JOB_ID" not in os.environ:
        return "none"
    with suppress(OSError, subprocess.SubprocessError):
        words = subprocess.run(["sinfo", "--version"], capture_output=True, text=True, timeout=10)
        return words.stdout.strip().removeprefix("slurm ") or "unknown"
    return "unknown"


def main() -> None:
    """Try the features that are left, one after the other; the first that fails ends the process.
    At the end rank 0 writes and prints the table.

    Raise UsageError without hpc-ddp, and the error of a feature, which is kept for the table.
    """
    if "HPC_DDP_RUN" not in os.environ:
        raise UsageError(
            "this script needs a run folder, and was started without hpc-ddp",
            hint="hpc-ddp preflight --train",
        )
    folder = Path(os.environ["HPC_DDP_RUN"])
    rank = int(os.environ["RANK"])
    number = (os.environ.get(f, "0") for f in ("HPC_DDP_ATTEMPT", "TORCHELASTIC_RESTART_COUNT"))
    table = Table(folder / "first-contact", rank, ".".join(number))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # rank 0 hosts the stores
    patience_s = FIRST_PATIENCE_S
    for name, (options, work) in FEATURES.items():
        if not table.is_left(name):
            continue
        part = folder if name == LAST else table.path(name).with_suffix("")
        (part / "checkpoints").mkdir(parents=True, exist_ok=True)
        os.environ["HPC_DDP_RUN"] = str(part)
        table.begin(name)
        began = time.monotonic()
        timer = threading.Timer(patience_s, give_up, (table, name, patience_s))
        timer.daemon = True
        timer.start()
        patience_s = PATIENCE_S
        try:
            # A store of its own for each process group: keys of the one before name closed ports.
            os.environ["MASTER_PORT"] = str(table.meet(name))
            os.environ.pop("HPC_DDP_TRAINER", None)  # each feature trains in a run of its own
            run = start(seed=1, hang_after=60, progress=False, **options)
            details = work(run)
            table.put(name, **details, seconds=round(time.monotonic() - began, 1))
            if name == LAST:
                table.compare(name)
            run.sum()  # all ranks are well, or this one fails here
            run.finish()
        except Exception as error:
            table.fail(name, error)
            raise
        table.put(name, ok=True)
        timer.cancel()
    if rank == 0:
        table.write()
        print(table.markdown(), flush=True)


if __name__ == "__main__":
    main()
