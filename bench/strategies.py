"""Trains jobs/gpt.py with the model spread in every way, and draws the loss curves side by side.

``python bench/strategies.py`` writes a picture and a table of the largest deviation from one
process to ``bench/results/``. Some minutes; two thirds of the text are left out.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).parents[1]
RESULTS = REPO / "bench" / "results"
TEXT = REPO / "jobs" / "data" / "devils-dictionary.txt.gz"
SIZE = "--width 96 --length 64 --batch-size 32 --epochs 1 --warm-up 10 --sample 0"
ONE = "one process"
# By name: workers, and how they share the model.
WAYS: dict[str, tuple[int, str]] = {
    ONE: (1, ""),
    "ddp on 4": (4, ""),
    "fsdp on 4": (4, "--parallel fsdp"),
    "fsdp on 2, offload, activation checkpointing": (
        2,
        "--parallel fsdp --offload --activation-checkpointing",
    ),
    "tp 2": (2, "--parallel tp"),
    "fsdp 2 x tp 2": (4, "--parallel fsdp --tp 2"),
    "pp 2, 1F1B": (2, "--parallel pp"),
    "pp 2 x ddp 2, GPipe": (4, "--parallel pp --schedule GPipe"),
    "mp over 2 devices": (1, "--parallel mp"),
}


def train(name: str, folder: Path, text: Path) -> list[list[float]]:
    """Return step, loss and norm of the gradients of each step."""
    workers, how = WAYS[name]
    curve = folder / f"curve-{len(list(folder.glob('curve-*')))}"
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(workers), str(REPO / "jobs" / "gpt.py")]
    command += [*SIZE.split(), *how.split(), "--text", str(text), "--curve", str(curve)]
    env = dict(os.environ, PYTHONPATH=str(REPO), OMP_NUM_THREADS="1")
    env |= {"HPC_DDP_RUNS": str(folder / curve.name.replace("curve", "runs"))}
    subprocess.run(command, env=env, check=True, capture_output=True)
    return [[float(word) for word in line.split()] for line in curve.read_text().splitlines()]


def draw(curves: dict[str, list[list[float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for i, (name, rows) in enumerate(curves.items()):
        steps = [step for step, *_ in rows]
        # One line over the other: each a little thinner than the one below.
        width = 1 + 0.9 * (len(curves) - i)
        left.plot(steps, [loss for _, loss, _ in rows], label=name, linewidth=width)
        away = [abs(row[1] - one[1]) for row, one in zip(rows, curves[ONE], strict=True)]
        right.plot(steps, [max(each, 1e-9) for each in away], label=name, color=f"C{i}")
    left.set(xlabel="step", ylabel="loss of the step's batch", title="Loss")
    right.set(xlabel="step", ylabel="difference of the loss", title=f"Away from {ONE}")
    right.set_yscale("log")
    left.legend(fontsize="small", frameon=False)
    figure.savefig(path, dpi=100)


def table(curves: dict[str, list[list[float]]]) -> list[str]:
    lines = ["| spread | workers | last loss | away from one process, loss | norm of gradients |"]
    lines += ["|---|---|---|---|---|"]
    for name, rows in curves.items():
        loss, norm = (
            max(abs(row[k] - one[k]) for row, one in zip(rows, curves[ONE], strict=True))
            for k in (1, 2)
        )
        lines.append(f"| {name} | {WAYS[name][0]} | {rows[-1][1]:.6f} | {loss:.1e} | {norm:.1e} |")
    return lines


def write(curves: dict[str, list[list[float]]]) -> str:
    """Write the picture and the page that has it; return the page."""
    import torch

    today = datetime.date.today().isoformat()
    draw(curves, RESULTS / f"{today}-strategies.png")
    where = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    steps = len(curves[ONE])
    head = [f"# {today}: {where}", "", f"`jobs/gpt.py {SIZE}`, fp32, gloo, {steps} steps.", ""]
    body = ["", "The largest difference in any step.", "", f"![]({today}-strategies.png)", ""]
    page = "\n".join([*head, *table(curves), *body])
    (RESULTS / f"{today}-strategies.md").write_text(page)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--characters", type=int, default=130_000, help="of the text")
    args = parser.parse_args()
    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.write_text(gzip.decompress(TEXT.read_bytes()).decode()[: args.characters])
        for name in WAYS:
            curves[name] = train(name, Path(folder), text)
            print(f"{name}: {curves[name][-1]}", flush=True)
    print(write(curves))


if __name__ == "__main__":
    main()
