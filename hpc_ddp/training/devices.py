"""Accelerators: the one module that uses torch's devices, streams and backends.

Everything goes through torch's device-independent interface (`torch.accelerator`, `torch.Event`,
`torch.get_device_module`), so NVIDIA, AMD, Intel and Ascend devices, and the tests' own, take the
same path. `KINDS` has the facts of single vendors.
"""

from __future__ import annotations

import inspect
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpc_ddp.core import accelerators
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.training.process.environment import DistEnv

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Kind:
    """Facts of a device type that torch does not give.

    `vendor` is a name in `accelerators.VENDORS`. `binds`: the backend takes a ``device_id``, to
    connect at once. `adds_float64`: the backend adds up float64.
    """

    vendor: str
    binds: bool = False
    adds_float64: bool = True


KINDS = {
    "cuda": Kind("AMD" if torch.version.hip else "NVIDIA", binds=True),
    "xpu": Kind("Intel"),
    "npu": Kind("Ascend", adds_float64=False),
}


def is_accelerator(device: torch.device) -> bool:
    return device.type != "cpu"


def usable() -> torch.device | None:
    """Return the type of accelerator to train on, as a device without an index; None where the run
    is to train on the CPU."""
    device: torch.device | None = accelerators.usable_accelerator(torch)
    return device


def hiding_words() -> str:
    """Return the shell's assignments that hide this machine's accelerators; "" where there are
    none, or their vendor is not known."""
    device = usable()
    kind = KINDS.get(device.type) if device else None
    return _hiding(kind.vendor) if kind else ""


def _hiding(vendor: str) -> str:
    """Return the shell's assignments that hide a vendor's accelerators."""
    hidden = accelerators.VENDORS[vendor].hidden
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in hidden.items())


def shares_devices() -> bool:
    """Return whether a developer lets the workers of a dry run share accelerators."""
    return os.environ.get(accelerators.SHOW_DEVICES) == "shared"


def count() -> int:
    """Return how many accelerators this process can train on; 0 without any."""
    return torch.accelerator.device_count() if usable() else 0


def current_type(local_rank: int) -> torch.device | None:
    """Return the type of accelerator, as a device without an index, that the worker `local_rank`
    uses where its script chooses the device; None on the CPU. None also where the current one is
    the first of several and `local_rank` is not 0: the script has set none, and an event would open
    that first one."""
    device = usable()
    # `current_device_index` opens the first device of a process that has used none.
    is_set = bool(device and is_used(device)) and torch.accelerator.current_device_index() > 0
    return device if is_set or local_rank == 0 or count() == 1 else None


def take(first: int, number: int) -> list[torch.device]:
    """Return `number` accelerators from index `first` on, and make the first the current one.

    The caller has counted them: `usable` is not None, and there are as many.
    """
    kind = usable()
    assert kind is not None
    torch.accelerator.set_device_index(first)
    return [torch.device(kind.type, first + i) for i in range(number)]


def use(device: torch.device) -> None:
    """Make an accelerator the current one of this thread; a new thread has the first one. Do
    nothing for the CPU."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device.index)


def default_backend(device: torch.device) -> str:
    """Return the name of the backend by which torch sends a device's tensors: that of NCCL, XCCL,
    HCCL, or Gloo for the CPU. Raise ValueError for a type of device that torch has none for;
    `usable` returns no such type."""
    return dist.get_default_backend_for_device(device)


def carries(backend: str, device: torch.device) -> bool:
    """Return whether a backend sends a device's tensors, as far as torch knows of it."""
    return accelerators.backend_carries(torch, backend, device.type)


def binding(backend: str, device: torch.device) -> dict[str, Any]:
    """Return ``device_id``, the argument of ``init_process_group`` that binds the group to a
    device; {} where torch's own backend for the device is not the `backend` (or in its pairs, as
    ``cpu:gloo,cuda:nccl``), or can't be bound. Raises as `default_backend`."""
    kind = KINDS.get(device.type)
    own_backends = (default_backend(device), f"{device.type}:{default_backend(device)}")
    binds = kind is not None and kind.binds and bool({*own_backends} & {*backend.split(",")})
    return {"device_id": device} if binds else {}


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in double precision, which Intel's Arc does not; True where
    torch does not tell."""
    tell = getattr(torch.get_device_module(device), "get_device_properties", None)
    return bool(getattr(tell(device), "has_fp64", True)) if tell else True


def has_bf16(device: torch.device) -> bool:
    """Return whether an accelerator, the current one, computes in bfloat16 itself: NVIDIA's do from
    compute capability 8.0 on, and older ones emulate it. True where torch does not tell."""
    tell = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    if tell is None:
        return True
    emulates = "including_emulation" in inspect.signature(tell).parameters  # NVIDIA's function
    return bool(tell(including_emulation=False) if emulates else tell())


def uses_tf32() -> bool:
    """Return whether torch is set to multiply fp32 matrices in TF32 where a GPU can; it is not by
    default."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def sum_type(device: torch.device) -> torch.dtype:
    """Return the type in which a device's numbers are added up over ranks: float64 where that is
    possible, else float32. HCCL adds up no float64 (its API reference, HcclAllReduce)."""
    kind = KINDS.get(device.type)
    can = has_float64(device) and (not kind or kind.adds_float64)
    return torch.float64 if can else torch.float32


def name(device: torch.device) -> str:
    """Return the name of a device's model, as the driver has it; "" where torch does not tell."""
    tell = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(tell(device)) if tell else ""


def is_used(device: torch.device) -> bool:
    """Return whether this process has opened an accelerator of a device's type: True where torch
    does not tell, False for the CPU."""
    if not is_accelerator(device):
        return False
    tell = getattr(torch.get_device_module(device), "is_initialized", None)
    return bool(tell()) if tell else True


def tell_sharers_apart(device: torch.device, rank: int) -> None:
    """If this rank shares its GPU, set ``NCCL_HOSTID``, unless the user has: NCCL then takes the
    rank for one on a host of its own. Call it before the group is made.

    NCCL refuses two ranks of a host on one GPU. It knows a slice (MIG) by its GPU alone
    (https://github.com/NVIDIA/nccl/issues/1716).
    """
    if shares_devices() or " MIG " in name(device):
        os.environ.setdefault("NCCL_HOSTID", f"rank-{rank}")


def mark(device: torch.device, *, timed: bool = False) -> torch.Event:
    """Record an event in the current stream of an accelerator, and return the event; `elapsed_s`
    takes `timed` ones only."""
    event = torch.Event(device, enable_timing=timed)
    event.record(torch.accelerator.current_stream(device))
    return event


def is_capturing(device: torch.device) -> bool:
    """Return whether an accelerator's current stream records a graph; False where torch does not
    tell."""
    tell = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return bool(tell()) if tell else False


def wait_for(device: torch.device) -> None:
    """Wait until an accelerator has done all that it was given; nothing on the CPU."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def elapsed_s(begin: torch.Event, end: torch.Event) -> float:
    """Return the seconds between two timed events that are over; nan where the device's events have
    no times, as in torch_npu 2.9.0."""
    try:
        return begin.elapsed_time(end) / 1000
    except RuntimeError:
        return math.nan


class Transfer:
    """Numbers on their way from their devices to the host, in the current streams.

    Reading a number off a device waits for all that the stream has been given before. So values
    are read some steps after their transfer began.

    Parameters
    ----------
    values
        numbers, and tensors of one number, by name
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Begin to copy the values of accelerators; the others are kept as they are."""
        self._values = {name: _start_copy(value) for name, value in values.items()}
        sources = {value.device for value in values.values() if _is_away(value)}
        self._marks = [mark(device) for device in sources]

    def is_over(self) -> bool:
        """Return whether all values are here; waits for nothing."""
        return all(event.query() for event in self._marks)

    def numbers(self) -> dict[str, Any]:
        """Return the values by name, as `plain` returns them; wait for those under way. Raises as
        `plain`."""
        for event in self._marks:
            if not event.query():
                event.synchronize()
        return {name: plain(value) for name, value in self._values.items()}


def plain(value: Any) -> Any:
    """Return the number in a tensor or a numpy scalar as Python's; other values as they are. Waits
    for a tensor's device. Raise RuntimeError or ValueError for several numbers."""
    return value.item() if hasattr(value, "item") else value


def is_number(value: Any) -> bool:
    """Return whether `plain` makes a real number, or a bool, of a value. No tensor is read: that
    would wait for a device, and raise its errors."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex() and not value.is_meta
    try:
        return isinstance(plain(value), (int, float))
    except Exception:  # numpy's, of several numbers
        return False


def _is_away(value: Any) -> bool:
    """Return whether a value is a tensor on an accelerator."""
    return isinstance(value, torch.Tensor) and is_accelerator(value.device)


def _start_copy(value: Any) -> Any:
    """Begin to copy a tensor of one number from an accelerator into pinned memory, and return the
    copy. Return other values as they are."""
    if not _is_away(value) or value.numel() != 1:  # `plain` refuses a tensor of several
        return value
    source = value.detach()
    copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
    return copy.copy_(source, non_blocking=True)


def seed(device: torch.device, value: int) -> None:
    """Seed the generator of one accelerator with `value`; the others' stay as they are."""
    with torch.accelerator.device_index(device.index):
        torch.get_device_module(device).manual_seed(value)


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of an accelerator's generator, a byte tensor on the CPU."""
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def put_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Put an accelerator's generator into a state that `random_state` returned."""
    torch.get_device_module(device).set_rng_state(state, device)


def choose_devices(info: DistEnv, per_worker: int = 1) -> list[torch.device]:
    """Return this rank's `per_worker` GPUs, and make the first the current one. Without GPUs return
    the CPU, `per_worker` times. With `shares_devices`, workers for which there are too few GPUs
    share those of the first workers.

    Raise HpcDdpError where there are GPUs, but fewer than this worker and those before it on its
    node need; or where there are some, and torch sees none.
    """
    visible = count()
    if not visible:
        _refuse_unseen()
        return [CPU] * per_worker
    # Where each worker is a Slurm task, srun may have given each GPUs of its own to see.
    sees_own = visible == per_worker and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
    first = 0 if sees_own else info.local_rank * per_worker
    if shares_devices() and visible >= per_worker:
        first %= visible // per_worker * per_worker  # of the GPUs that whole workers fill
    if first + per_worker > visible:
        raise _too_few_error(info, per_worker, visible)
    return take(first, per_worker)


def _too_few_error(info: DistEnv, per_worker: int, visible: int) -> HpcDdpError:
    """Return the error for a node whose workers need `per_worker` GPUs each, where this worker
    sees `visible`; the hint says how many workers fit."""
    needs = f" of {per_worker} GPUs" if per_worker > 1 else ""
    words = hiding_words()
    hide = f", or hide the GPUs with {words}" if words else ""
    fitting = "take fewer GPUs"
    if visible >= per_worker:
        fitting = f"start {visible // per_worker} workers per node"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "").count("MIG-") > visible:  # slices of GPUs
        fitting = "CUDA shows a process one MIG slice: give each a Slurm task and a slice of its"
        fitting += " own (--launcher srun --gpu-request gpus-per-task)"
    return HpcDdpError(
        f"{info.local_world_size} workers{needs} on this node, but {visible} visible GPU(s)",
        hint=f"{fitting}{hide}",
    )


def _refuse_unseen() -> None:
    """Raise HpcDdpError where torch sees no device, and there are some that nothing hides: a run
    would train on CPUs without a word, as torch raises no error for a driver that fails."""
    expected = accelerators.expected_devices(os.environ)
    if not expected or torch.accelerator.current_accelerator(check_available=True) is not None:
        return
    vendor, files = max(expected.items(), key=lambda pair: pair[1])  # with the most devices
    built = {"NVIDIA": torch.version.cuda, "AMD": torch.version.hip, "Intel": torch.version.xpu}
    names = " and ".join(name for name, version in built.items() if version) or "CPUs"
    remedy = f"install a torch for {vendor}"
    if built.get(vendor):
        remedy = "look at the driver (too old for this torch?), in a container at its option for"
        remedy += " GPUs"
    raise HpcDdpError(
        f"{files} device(s) of {vendor} are here, and torch {torch.__version__}, which is built"
        f" for {names}, sees none",
        hint=f"{remedy}; to train on CPUs, hide them: {_hiding(vendor)}",
    )


def choose_backend(requested: str | None, device: torch.device) -> str:
    """Return the name of the backend that carries gradients, in small letters: `requested`, else
    the device's own: NCCL for NVIDIA and AMD, XCCL for Intel, HCCL for Ascend, Gloo for the CPU.
    From pairs, as ``cpu:gloo,cuda:nccl``, return those of the CPU and of the device's type; where
    one is left, as in a dry run without a GPU, return its name alone.

    Raise HpcDdpError where pairs have none for the device, this torch was built without its
    backend, or that sends none of its tensors (NCCL without a GPU).
    """
    backend = str(requested or default_backend(device)).lower()
    by_type: dict[str, str] = {}
    if ":" in backend:
        pairs = [pair.partition(":") for pair in backend.split(",")]
        by_type = {kind: name for kind, _, name in pairs if kind in ("cpu", device.type)}
        backend = by_type.get(device.type, "")
    reason = ""
    if not backend:
        reason = f"it names none for {device.type}"
    elif not dist.is_backend_available(backend):
        names = filter(dist.is_backend_available, ("nccl", "gloo", "mpi", "xccl", "hccl"))
        reason = f"this torch has {', '.join(names)}, and no {backend}"
    elif not carries(backend, device):
        reason = f"it sends no tensors of {device.type}" if count() else "there is no GPU here"
    if reason:
        slower = "; slower: HPC_DDP_BACKEND=gloo" if carries("gloo", device) else ""
        raise HpcDdpError(
            f"the backend {requested or backend!r} can't be used: {reason}",
            hint=f"leave it out: this run's own is {default_backend(device)!r}"
            if requested
            else f"install a torch that has it{slower}",
        )
    return ",".join(map(":".join, by_type.items())) if len(by_type) > 1 else backend
