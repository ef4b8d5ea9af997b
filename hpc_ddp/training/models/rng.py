"""Random generators: seeding them, and their state as plain tensors and numbers.

numpy's generators count only in a process in which the user's code has imported numpy.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hpc_ddp.training import devices
from hpc_ddp.training.data.batch_plan import derive_seed


def seed_all(seed: int, places: Sequence[torch.device] = ()) -> None:
    """Seed the global generators of Python, of torch for the CPU and, if it is imported, of numpy,
    and those of the accelerators among `places`, a worker's own devices.

    It does not call `torch.manual_seed`, which would seed every GPU of the node. Each device has a
    seed of its own: a layer on the second device must not draw the numbers of the first device.
    """
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)  # numpy takes 32 bits
    for index, device in enumerate(_accelerators(places)):
        devices.seed(device, derive_seed(seed, index) if index else seed)


def snapshot(places: Sequence[torch.device] = ()) -> dict[str, Any]:
    """Return the states of the global generators, and of those of the accelerators among `places`,
    in types that ``torch.load`` with ``weights_only`` reads; `restore` puts them back. numpy's is
    left out if numpy is not imported."""
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
    """Put the global generators into the states that `snapshot` returned.

    Accelerators among `places` and states of devices are paired in order; an accelerator without a
    state, and numpy without one, stay as they are. Imports numpy for a state of it.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    for device, saved in zip(_accelerators(places), state.get("devices", ()), strict=False):
        devices.put_random_state(device, saved)
    if "numpy" in state:
        import numpy  # as the process had that made the state

        name, keys, *position = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *position))


def _accelerators(places: Sequence[torch.device]) -> list[torch.device]:
    """Return the devices among `places` that are no CPU, in order."""
    return [device for device in places if devices.is_accelerator(device)]


@contextmanager
def preserve_generators() -> Iterator[None]:
    """A context at whose end, also after an error, the global generators of the CPU are as they
    were before the context; numpy's only if numpy was imported before it."""
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
    state is kept until `restore`, so that the script may draw from the generator before its loop.
    """

    def __init__(self, generator: Any) -> None:
        """`generator` is one for which `is_generator` is true."""
        self._generator = generator
        self._loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state, or a loaded state that is not yet restored, in types that
        ``torch.load`` with ``weights_only`` reads."""
        state = raw_state(self._generator) if self._loaded is None else self._loaded
        return {"state": _to_tensors(state)}

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        """Keep a state of `state_dict` for `restore`. Raise ValueError for the state of another
        kind of generator."""
        self._loaded = _from_tensors(raw_state(self._generator), stored["state"])

    def restore(self) -> None:
        """Put the generator into the loaded state, once; do nothing without a loaded state."""
        generator, state, self._loaded = self._generator, self._loaded, None
        if state is None:
            return
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        elif hasattr(generator, "bit_generator"):  # numpy's Generator
            generator.bit_generator.state = state
        else:  # numpy's RandomState
            generator.set_state(state)


def is_generator(thing: Any) -> bool:
    """Return whether an object is a random generator of torch, numpy or Python with a state that
    can be read. Python's SystemRandom, the operating system's, has none."""
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy := sys.modules.get("numpy"):
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    # `type`, since isinstance asks a proxy for its class, which may raise an error.
    return issubclass(type(thing), kinds) and not isinstance(thing, random.SystemRandom)


def raw_state(generator: Any) -> Any:
    """Return the state of a generator for which `is_generator` is true, in its library's form."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):  # numpy's Generator
        return generator.bit_generator.state
    return generator.get_state(legacy=False)  # numpy's RandomState


def _to_tensors(state: Any) -> Any:
    """Return a state with int64 tensors in place of numpy's arrays and numbers, also in dicts."""
    if isinstance(state, dict):
        return {key: _to_tensors(part) for key, part in state.items()}
    if hasattr(state, "dtype") and not isinstance(state, torch.Tensor):
        return torch.tensor(state.astype("int64").tolist(), dtype=torch.int64, device="cpu")
    return state


def _from_tensors(current: Any, stored: Any) -> Any:
    """Return a `stored` state of `_to_tensors` with numpy's arrays again, with the types of the
    `current` state. Raise ValueError if `stored`, or an entry of it, is of another kind than in
    `current`, or an entry is missing. Entries that `current` lacks are dropped."""
    is_dict = isinstance(current, dict)
    is_alike = isinstance(stored, dict) == is_dict
    is_alike &= isinstance(stored, torch.Tensor) == hasattr(current, "dtype")
    if not is_alike or (is_dict and current.keys() - stored.keys()):
        raise ValueError("it is the state of another kind of generator")
    if is_dict:
        return {key: _from_tensors(part, stored[key]) for key, part in current.items()}
    if hasattr(current, "dtype") and not isinstance(current, torch.Tensor):
        return stored.numpy().astype(current.dtype)
    return stored
