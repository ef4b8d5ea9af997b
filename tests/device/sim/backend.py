"""torch's side of the stand-in device: its module, its process group, its missing kernels."""

from __future__ import annotations

import atexit
import sys
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # torch.distributed re-exports it untyped

import sim

C: Any = None  # the extension


def install() -> None:
    """Register the device, once for each process."""
    global C
    if C is not None:
        return
    torch.utils.rename_privateuse1_backend("sim")
    C = sim.load_extension()
    C.use_cpu_kernels(sorted(_decomposed()))
    torch._register_device_module("sim", _device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("simccl", _process_group, devices=["sim"])
    from sim import kernels

    kernels.register()
    # torch's own out variants, by which a device without the kernel computes, as of mse_loss.
    warnings.filterwarnings("ignore", message="An output with one or more elements was resized")
    atexit.register(show_reports)


def show_reports() -> None:
    """Print what has been found wrong: accesses that nothing orders. Tests look for the line."""
    for text, count in Counter(C.take_reports()).most_common():
        print(f"sim: {count} x {text}", file=sys.stderr, flush=True)


def _decomposed() -> set[str]:
    """Return the operators that have a kernel for CPUs, and one made of others for the rest."""
    cpu, explicit, implicit, own = (
        set(torch._C._dispatch_get_registrations_for_dispatch_key(key))
        for key in ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "PrivateUse1")
    )
    names = cpu & (explicit | implicit) - own
    return {name for name in names if name.startswith("aten::")}


def _process_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout=timeout)
    return C.SimCcl(gloo, rank, size)


def _index(device: Any = None) -> int:
    if device is None or (isinstance(device, int) and device < 0):
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **options: Any) -> Stream:
        if not options:
            options = {"device": torch.device("sim", _index(device))}
        return super().__new__(cls, priority=priority, **options)


def make_event(enable_timing: bool = False, blocking: bool = False, **_: Any) -> torch.Event:
    return torch.Event(device="sim", enable_timing=enable_timing, blocking=blocking)


@contextmanager
def use_device(device: Any) -> Iterator[None]:
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(_index(device))
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def _device_module() -> Any:
    """Return what ``torch.sim`` is: the functions that ``torch.cuda`` has, as far as needed."""
    generators = [C.default_generator(index) for index in range(C.device_count())]
    module: Any = types.ModuleType("torch.sim")
    module.Stream, module.Event, module.device = Stream, make_event, use_device
    module.is_available = lambda: C.device_count() > 0
    module.is_initialized = C.is_used
    module.init = module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = C.device_count
    module.current_device = torch.accelerator.current_device_index
    module.set_device = lambda device: torch.accelerator.set_device_index(_index(device))
    module.synchronize = lambda device=None: torch.accelerator.synchronize(_index(device))
    module.current_stream = lambda device=None: torch.accelerator.current_stream(_index(device))
    module.default_stream = lambda device=None: torch.Stream(
        stream_id=0, device_index=_index(device), device_type=20
    )
    module.set_stream = torch.accelerator.set_stream
    module.stream = lambda stream: nullcontext() if stream is None else stream
    module.get_device_name = lambda device=None: "sim"
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.is_bf16_supported = lambda *_: True
    module.default_generators = generators
    module.get_rng_state = lambda device="sim": generators[_index(device)].get_state()
    module.set_rng_state = lambda state, device="sim": generators[_index(device)].set_state(state)
    module.manual_seed = lambda seed: generators[_index()].manual_seed(seed)
    module.manual_seed_all = lambda seed: [each.manual_seed(seed) for each in generators]
    module.memory_allocated = lambda device=None: C.bytes_held(_index(device))
    module.max_memory_allocated = lambda device=None: C.bytes_at_peak(_index(device))
    module.reset_peak_memory_stats = lambda device=None: C.reset_peak(_index(device))
    module.empty_cache = lambda: None
    return module
