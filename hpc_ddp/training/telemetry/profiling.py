"""Where the time goes: a trace of some steps, and the share of the GPUs' peak that is used."""

from __future__ import annotations

from pathlib import Path

import torch

from hpc_ddp.core.console.terminal import say
from hpc_ddp.training import devices
from hpc_ddp.training.options import Options

# Dense peaks in TFLOP/s by the data sheets of NVIDIA and AMD: with 16-bit operands, and with 32-bit
# ones (TF32 where there is such a thing). NVIDIA's newer sheets count sparsity, which is twice as
# much; an MI250X shows as two devices, each half of it. The first name within the device's counts.
PEAKS = {
    "V100": (125.0, 15.7),
    "A100": (312.0, 156.0),
    "L40S": (362.0, 183.0),
    "H100 PCIe": (756.0, 378.0),
    "H100 NVL": (835.0, 417.5),
    "H100": (989.4, 494.7),
    "H200": (989.4, 494.7),
    "MI250X": (191.5, 47.9),
    "MI300X": (1307.4, 653.7),
}


def peak_flops(name: str, precision: str) -> float | None:
    """Return the dense peak of a GPU in FLOP/s, None for a name that has none in the table.

    `precision` is one of ``start``'s: fp32, bf16 or fp16.
    """
    peaks = next((pair for model, pair in PEAKS.items() if model in name), None)
    return peaks and 1e12 * peaks[precision == "fp32"]


def use_per_sample(options: Options, device: torch.device, world_size: int) -> float | None:
    """Return the share of all GPUs' peak that one sample per second takes; None where the peak, or
    the FLOPs of a sample, are not known."""
    peak = options.peak_flops
    if peak is None:
        peak = peak_flops(devices.name(device), options.precision)
    if peak is None or options.flops_per_sample is None:
        return None
    return options.flops_per_sample / (peak * world_size)


class Profiler:
    """Traces the steps of a window (first, last), counted from 1 in this attempt.

    Leaves a Chrome trace at `path`, and prints its path where it `announces`.
    """

    def __init__(self, window: tuple[int, ...] | None, path: Path, announces: bool) -> None:
        """Trace the steps of a window, none without one."""
        self._first, self._last = window or (0, 0)
        self._path, self._announces = path, announces
        self._steps = 0
        self._profile: torch.profiler.profile | None = None

    def step_done(self) -> None:
        """Count a step; begin the trace, or end and write it, where it is time to."""
        self._steps += 1
        if self._steps == self._first - 1:
            self._profile = torch.profiler.profile()
            self._profile.start()
        elif self._steps == self._last:
            self.end()

    def end(self) -> None:
        """Write what has been traced, if anything; also when the run stops inside the window.

        An OSError is printed: a trace ends no training.
        """
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        profile.stop()
        try:
            self._path.parent.mkdir(exist_ok=True)
            profile.export_chrome_trace(str(self._path))
        except OSError as error:
            say(f"the profile can't be written: {error}")
            return
        if self._announces:
            steps = f"steps {self._first} to {min(self._steps, self._last)} of this attempt"
            say(f"profile of {steps}: {self._path}")
