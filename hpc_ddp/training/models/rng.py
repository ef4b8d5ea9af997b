"""Random generators: seeding them, and their state as plain tensors and numbers.

numpy is looked after only where the user's code has loaded it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hpc_ddp.training import devices
from hpc_ddp.training.data.order import derive_seed


def seed_all(seed: int, places: Sequence[torch.device] = ()) -> None:
    """Seed the global generators of Python, torch's CPU and, if it is loaded, numpy, and those of a
    worker's own devices, `places`.

    It does not call `torch.manual_seed`, which would seed every GPU of the node. Each device has a
    seed of its own: a layer on the second one must not draw what the same layer on the first draws.
    """
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    for index, device in enumerate(_accelerators(places)):
        devices.seed(device, derive_seed(seed, index) if index else seed)


def snapshot(places: Sequence[torch.device] = ()) -> dict[str, Any]:
    """Return the state of the global generators, with those of the devices in `places`, in types
    that ``torch.load`` with ``weights_only`` reads; `restore` puts it back."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss],
        "torch": torch.get_rng_state(),
    }
    if accelerators := _accelerators(places):
        state["devices"] = [devices.random_state(device) for device in accelerators]
    if "numpy" in sys.modules:
        name, keys, *position = sys.modules["numpy"].random.get_state()
        state["numpy"] = [
            name,
            torch.tensor(keys.astype("int64"), dtype=torch.int64, device="cpu"),
            *position,
        ]
    return state


def restore(state: dict[str, Any], places: Sequence[torch.device] = ()) -> None:
    """Put the global generators into a state that `snapshot` returned, as far as the state has
    them.

    Devices are paired in order; those without a state stay as they are.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    for device, saved in zip(_accelerators(places), state.get("devices", ()), strict=False):
        devices.put_random_state(device, saved)
    if "numpy" in state:
        import numpy  # it was loaded when the state was taken

        name, keys, *position = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *position))


def _accelerators(places: Sequence[torch.device]) -> list[torch.device]:
    """Return the devices that are no CPU."""
    return [device for device in places if devices.is_accelerator(device)]


@contextmanager
def untouched() -> Iterator[None]:
    """A context at whose end, also after an error, the CPU generators are as they were before it;
    numpy's only if it was loaded then."""
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


class GeneratorState:
    """A random generator of the script as an object with a state dict, for a checkpoint. A loaded
    state waits for `restore`, so that the script may draw from the generator before its loop."""

    def __init__(self, generator: Any) -> None:
        """`generator` is one for which `is_generator` is true."""
        self._generator = generator
        self._loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state, or a loaded one that waits for `restore`, in types that
        ``torch.load`` with ``weights_only`` reads."""
        state = raw_state(self._generator) if self._loaded is None else self._loaded
        return {"state": _with_tensors(state)}

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        """Keep a state from `state_dict` for `restore`. Raise ValueError for the state of another
        library's generator, or of one with other entries."""
        self._loaded = _like(raw_state(self._generator), stored["state"])

    def restore(self) -> None:
        """Put the generator into the loaded state, once; do nothing if no state waits."""
        generator, state, self._loaded = self._generator, self._loaded, None
        if state is None:
            return
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = state
        else:
            generator.set_state(state)


def is_generator(thing: Any) -> bool:
    """Return whether an object is a random generator of torch, numpy or python whose state can be
    read. Its type decides, since a proxy that is asked for its class may raise an error."""
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy := sys.modules.get("numpy"):
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    return issubclass(type(thing), kinds) and not isinstance(thing, random.SystemRandom)


def raw_state(generator: Any) -> Any:
    """Return the state of a generator for which `is_generator` is true, as its library has it."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def _with_tensors(state: Any) -> Any:
    """Return a state with int64 tensors in place of numpy's arrays and numbers."""
    if isinstance(state, dict):
        return {key: _with_tensors(part) for key, part in state.items()}
    if hasattr(state, "dtype") and not isinstance(state, torch.Tensor):
        return torch.tensor(state.astype("int64").tolist(), dtype=torch.int64, device="cpu")
    return state


def _like(current: Any, stored: Any) -> Any:
    """Undo `_with_tensors` of a `stored` state, by a `current` one of the same kind. Raise
    ValueError where an entry, or the whole, is of another kind than in it, or is missing."""
    is_dict = isinstance(current, dict)
    is_alike = isinstance(stored, dict) == is_dict
    is_alike &= isinstance(stored, torch.Tensor) == hasattr(current, "dtype")
    if not is_alike or (is_dict and current.keys() - stored.keys()):
        raise ValueError("it is the state of another kind of generator")
    if is_dict:
        return {key: _like(part, stored[key]) for key, part in current.items()}
    if hasattr(current, "dtype") and not isinstance(current, torch.Tensor):
        return stored.numpy().astype(current.dtype)
    return stored
