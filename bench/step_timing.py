"""Measures what it costs that each rank times its own work, for the journal's `ranks` events.

``python bench/step_timing.py`` prints a table and writes it to ``bench/results/``. A step's cost is
timed by itself, over many empty steps: in whole trainings it is lost in the noise.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
STEPS, ROUNDS, GATHERS, RANKS = 2000, 9, 200, 4


def work(folder: Path) -> None:
    """What each rank does; rank 0 leaves what it found in `folder`."""
    import torch

    from hpc_ddp.training import start
    from hpc_ddp.training.telemetry import step_timing

    run = start(save_every=None)
    model = run.wrap(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1)))
    run.track(model=model)
    timer = run._timer
    weight = torch.ones(1, requires_grad=True)
    sync = timer._control.barrier

    def steps(of: str) -> float:
        """Return the mean seconds of a step that is one multiplication, and its backward."""
        timer.has_ddp = of == "measured"
        step_timing.SAMPLE_S = 0.0
        begin = time.process_time()  # others work on this machine
        for _ in range(STEPS):
            if of == "bare":
                torch.autograd.backward(weight * 2)
                continue
            timer.start_step()
            loss = weight * 2
            timer.end_forward()
            torch.autograd.backward(loss)
            timer.end_step()
        return (time.process_time() - begin) / STEPS

    found: dict[str, list[float]] = {"bare": [], "not measured": [], "measured": []}
    for _ in range(ROUNDS):
        for of in found:
            found[of].append(steps(of))
    gathers = []
    for _ in range(GATHERS):
        sync()
        begin = time.perf_counter()
        timer.gather()
        gathers.append(time.perf_counter() - begin)
        sync()
        begin = time.perf_counter()
        timer.report()
        gathers[-1] += time.perf_counter() - begin
    run.finish()
    if run.rank == 0:
        (folder / "found").write_text(json.dumps({**found, "gather": gathers}))


def main() -> None:
    if len(sys.argv) > 1:
        work(Path(sys.argv[1]))
        return
    import torch

    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "PYTHONPATH": str(REPO), "HPC_DDP_RUNS": f"{folder}/runs"}
        env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        subprocess.run([sys.executable, "-m", *torchrun, __file__, folder], env=env, check=True)
        found: dict[str, Any] = json.loads((Path(folder) / "found").read_text())
    us = {name: 1e6 * min(values) for name, values in found.items()}
    us["gather"] = 1e6 * sorted(found["gather"])[GATHERS // 2]
    more = {name: us[name] - us["bare"] for name in ("not measured", "measured")}
    today = datetime.date.today().isoformat()
    lines = [
        f"# {today}: the time of each rank's own work, {os.cpu_count()} cores,"
        f" {platform.machine()}, torch {torch.__version__}",
        "",
        f"The best of {ROUNDS} times {STEPS} steps, in time of the CPU, on rank 0 of {RANKS}; the"
        f" median of {GATHERS} gathers, by the clock.",
        "",
        "| what | costs | how often | at most |",
        "|---|---|---|---|",
        f"| a step that is measured | {more['measured']:.1f} us | one in 50 ms |"
        f" {more['measured'] / 50_000:.2%} |",
        f"| a step that is not | {more['not measured']:.1f} us | each, if shorter than 50 ms |"
        f" {more['not measured'] / 1000:.2%} of a step of 1 ms |",
        f"| gather and journal | {us['gather']:.0f} us | every 30 to 300 s |"
        f" {us['gather'] / 30e6:.4%} |",
        "",
    ]
    print("\n".join(lines))
    (REPO / "bench" / "results" / f"{today}-step-timing.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
