"""Random generators: seeding them, and their state as plain tensors and numbers.

numpy is looked after only where the user's code has loaded it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def seed_all(seed: int, device: torch.device | None = None) -> None:
    """Seed python, torch's CPU generator, numpy, and the generator of `device` if it is a GPU.

    Not `torch.manual_seed`, which would seed every GPU as well.
    """
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def snapshot(device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of the generators, loadable with ``weights_only=True``."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, torch.tensor(words), gauss],
        "torch": torch.get_rng_state(),
    }
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, torch.tensor(keys.astype("int64")), *rest]
    return state


def restore(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Put the generators into a state that `snapshot` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    if device is not None and device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state:
        import numpy  # it was loaded when the state was taken

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))


@contextmanager
def untouched() -> Iterator[None]:
    """Leave the CPU generators as they were, whatever happens inside."""
    python, torch_state = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(torch_state)
        if numpy:
            numpy.random.set_state(numpy_state)
