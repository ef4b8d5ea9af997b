"""The process group of a run: how the ranks join it, meet and leave."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore  # torch.distributed: untyped
from torch.distributed.rendezvous import rendezvous

from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.training import devices
from hpc_ddp.training.process.control_tree import open_control
from hpc_ddp.training.process.environment import DistEnv, LaunchEnv
from hpc_ddp.training.process.rank_messages import NEVER, Control

T = TypeVar("T")

TEARDOWN_S = 10.0  # the longest wait for the end of the process group
WAKE_S = 1.0  # between two looks at a wait, so that Python handles a Ctrl-C
TIMEOUT_S = 1800.0  # torch's own for gloo
SHOWN = 8  # ranks, in an error
REPORT_S = 60.0  # between rank 0's messages that its block still runs
_reporting = threading.Lock()  # one message at a time, also of a block within another
READ_S = 2.0  # for which rank 0, whose process may hold the store, lets the others read an error
_met_at_agents: list[DistEnv] = []  # this process's runs that use torchrun's store: one at most


def join(
    info: DistEnv,
    rank_devices: Sequence[torch.device],
    hang_after_s: float | None,
    requested: str | None = None,
) -> Control:
    """Create the default process group, and return a `Control` of its ranks; every rank must call
    it.

    `rank_devices` are this rank's, the first of which is the current one. Collectives wait longer
    than `hang_after_s`: the watchdog comes first, and reports more; without one (None or 0) 20
    days. `requested` is the name of a backend, None for the device's own.

    The environment variables TORCH_DIST_USE_NCCL2 (with several devices) and NCCL_HOSTID (where
    ranks share a GPU) are set, if they are not. Rank 0 prints a warning if the ranks' devices are
    of different models.

    Raise UsageError if there is a group already, or there was one that met in torchrun's store, in
    which a second group of the same process would read the first one's keys, and hang. Raise
    HpcDdpError if the backend can't be used, ranks have devices of different types, or MPI counts
    another number of processes; RuntimeError if the peers do not come.
    """
    if dist.is_initialized():
        raise UsageError(
            "torch's process group exists already; accepted: start() makes it",
            hint="remove init_process_group, or call run.finish() before another start()",
        )
    uses_agent_store = info.launched and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if uses_agent_store and _met_at_agents:
        raise UsageError(
            "start() was called again in a process that torchrun has started; accepted: once",
            hint="start the second run in a process of its own",
        )
    device, *more_devices = rank_devices
    backend = devices.choose_backend(requested, device)
    bind = devices.binding(backend, device)
    if more_devices:  # a group that is bound to one device refuses the tensors of the others
        bind = {}
        # The NCCL backend of torch 2.15 is always bound, by LOCAL_RANK if need be; the one before
        # it is not. torch reads this when it first makes a group.
        os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
    timeout = timeout_beyond(hang_after_s)
    if uses_agent_store:
        _met_at_agents.append(info)
    if info.launched:
        meeting = _store_of(timeout) if backend != "mpi" else {}
        if meeting:
            _compare_devices(meeting["store"], info, device)
            devices.tell_sharers_apart(device, info.rank)
        dist.init_process_group(backend, timeout=timeout, **meeting, **bind)
    else:  # a store in memory: a process alone needs no port
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, **bind)
    if dist.get_world_size() != info.world_size:  # MPI asks its own launcher
        raise HpcDdpError(
            f"MPI knows of {dist.get_world_size()} processes, and {info.world_size} were started",
            hint="leave out the backend: torchrun's workers are none of MPI's",
        )
    _set_global_ranks(device, info.world_size)
    return open_control(info, timeout)


def _set_global_ranks(device: torch.device, world_size: int) -> None:
    """Set `global_ranks_in_group` of the default group's backend to 0, 1, … `world_size` - 1. Do
    nothing where the backend has no such option, or has set it.

    Up to torch 2.13 (2.15 is cured) NCCL sets it for the first group of a process only. A mesh that
    splits a later group, as of a second `start`, ends the process by SIGSEGV
    (pytorch/pytorch#191952).
    """
    backend: Any = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    with suppress(RuntimeError, AttributeError):  # a backend without options; 2.9 lacks the name
        if not backend.options.global_ranks_in_group:
            backend.options.global_ranks_in_group = list(range(world_size))


def _store_of(timeout: timedelta) -> dict[str, Any]:
    """Return arguments of ``init_process_group``: ``store``, torch's own for ``env://`` with a
    prefix before all keys, ``rank`` and ``world_size``. The store waits `timeout` for a key. Raise
    torch's errors where it can't be reached or made.

    The supervisor sets the prefix, since ranks of two runs that have come to one port would form a
    group without it; under a plain start the prefix is torch's own.
    """
    prefix = os.environ.get("HPC_DDP_STORE_PREFIX") or "default_pg"
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return {"store": PrefixStore(prefix, store), "rank": rank, "world_size": world_size}


def _compare_devices(store: Any, env: DistEnv, device: torch.device) -> None:
    """Raise HpcDdpError, on all ranks, where the first devices of ranks are of different types: on
    a node whose driver is broken ranks would take Gloo, and wait for those with NCCL for ever. Rank
    0 prints a warning where they are of different models. `device` is the first of this rank's.

    Each rank writes its device into `store`; the last rank to come reads all devices at once, and
    writes an answer, for which the others wait. Raise torch's error if a peer does not come.
    """
    # torchrun may keep the store for its next start of the workers, or a process its own store for
    # a second group: the keys have the number of the start, the answer's that of the group.
    keys = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{env.world_size}"
    place = (device.type, devices.name(device), LaunchEnv.from_env().node)
    store.set(f"{keys}/device/{env.rank}", json.dumps(place))
    count = store.add(f"{keys}/count", 1)  # of ranks that have come, over all groups
    answer = f"{keys}/odd/{(count - 1) // env.world_size}"
    if count % env.world_size == 0:
        texts = store.multi_get([f"{keys}/device/{rank}" for rank in range(env.world_size)])
        types, models, nodes = zip(*map(json.loads, texts), strict=True)
        store.set(answer, json.dumps([_odd_ranks(types, nodes), _odd_ranks(models, nodes)]))
    other_types, other_models = json.loads(store.get(answer))
    if other_types:
        if env.rank == 0:
            time.sleep(READ_S)
        raise HpcDdpError(
            f"{other_types}: they can't train together",
            hint="find out why torch sees other devices there; --exclude NODE leaves a node out",
        )
    if other_models and env.rank == 0:
        say(
            f"WARNING: {other_models}: the slowest sets the pace, and numbers may differ in their"
            " last bits; hint: --constraint, or --gpus-per-node TYPE:N"
        )


def _odd_ranks(kinds: Sequence[str], nodes: Sequence[str]) -> str:
    """Return a text on the ranks whose device is of another kind than most ranks' devices, `SHOWN`
    of them with their nodes; "" where all are alike. `kinds` and `nodes` are by rank."""
    counts = Counter(kinds)
    if len(counts) == 1:
        return ""
    # Of two kinds that are as frequent, a CPU is the odd one.
    most_frequent = max(counts, key=lambda kind: (counts[kind], kind != "cpu"))
    odd = [rank for rank, kind in enumerate(kinds) if kind != most_frequent]
    shown = [f"rank {rank} on {nodes[rank]} has {kinds[rank]}" for rank in odd[:SHOWN]]
    more = f", {len(odd) - SHOWN} more as well" if odd[SHOWN:] else ""
    return f"{', '.join(shown)}{more}, and the other ranks have {most_frequent}"


def timeout_beyond(hang_after_s: float | None) -> timedelta:
    """Return how long collectives wait: longer than the watchdog does, which waits `hang_after_s`;
    20 days without one (None or 0)."""
    return timedelta(seconds=max(TIMEOUT_S, hang_after_s + 300)) if hang_after_s else NEVER


def call_on_first(control: Control, act: Callable[[], T]) -> T:
    """Call `act` on rank 0; return its result, which can be pickled, on all ranks. An HpcDdpError
    of `act` is raised on all ranks, and so is an OSError, as an HpcDdpError.

    Every rank must call it. Any other error of `act` is raised on rank 0 alone, and the others wait
    in vain. Raise RuntimeError if a peer is gone.
    """
    answer: Any = None
    if control.rank == 0:
        try:
            answer = act()
        except HpcDdpError as error:  # the other ranks wait for an answer
            answer = error
        except OSError as error:
            answer = HpcDdpError(f"rank 0: {error}")
    answer = control.from_first(answer)
    if isinstance(answer, HpcDdpError):
        raise answer
    result: T = answer
    return result


@contextmanager
def run_first_alone(control: Control, wake: Callable[[], object]) -> Iterator[None]:
    """Run the block on rank 0; when it has ended there, however long that takes, on the other
    ranks. All ranks enter. While the others wait, they call `wake` every `REPORT_S` seconds. After
    an error of the block on rank 0 they wait in vain, up to the limit of `control`. Raise
    RuntimeError if a peer is gone."""
    if control.rank > 0:
        while control.from_first(None):  # True: the block on rank 0 still runs
            wake()
        yield
        return
    is_over = threading.Event()

    def report() -> None:
        """Have the others begin another wait, before theirs comes to its limit."""
        with suppress(RuntimeError):  # the last message raises it again
            while not is_over.wait(REPORT_S):
                with _reporting:
                    control.from_first(True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
    thread.join()
    with _reporting:
        control.from_first(False)


def meet(control: Control) -> bool:
    """Wait until all ranks have called it, for as long as the timeout of `control`. Return whether
    all have: False where one is gone, or is still at work of its own, as plots that rank 0 alone
    draws. Signals are handled meanwhile."""
    errors: list[RuntimeError] = []

    def wait() -> None:
        """Wait for the peers in the barrier, whose error goes into `errors`."""
        try:
            control.barrier()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(WAKE_S)
    return not errors


def leave(control: Control, device: torch.device, then_exit: bool, destroys: bool = True) -> None:
    """Wait for all ranks, then tear the process group down; every rank must call it.

    With `destroys` false the group, which a library made, stays, and `leave` only waits. With
    `then_exit` the ranks and the teardown have `TEARDOWN_S` seconds together; else the ranks have
    all the time that their own work takes, such as the plots that rank 0 alone draws, and the
    teardown has `TEARDOWN_S`.

    A teardown is known to hang when a peer is gone or a collective is stuck. All is saved by now,
    so after that time a message is printed. With `then_exit` the process ends on the spot, with
    code 0; else `leave` returns, and the process's exit skips torch's teardown
    (`skip_teardown_at_exit`). Where the group refuses to be destroyed, as NCCL's while a captured
    graph has its collectives, `leave` returns in this way in any case. Other errors of torch in the
    teardown are printed, and not raised.
    """
    are_here = threading.Event()
    refusals: list[RuntimeError] = []

    def tear_down() -> None:
        """Wait for all ranks, then destroy the group with `destroys`; `refusals` gets an error."""
        devices.use(device)  # a new thread has the first GPU as its own, which NCCL would open
        control.barrier()
        are_here.set()
        if destroys:
            try:
                dist.destroy_process_group()
            except RuntimeError as error:
                refusals.append(error)

    thread = threading.Thread(target=tear_down, daemon=True)
    thread.start()
    while not then_exit and thread.is_alive() and not are_here.wait(WAKE_S):
        pass  # the barrier ends with an error where a peer is gone
    thread.join(TEARDOWN_S)
    if thread.is_alive():
        say("the process group did not come down; left as it is")
        sys.stdout.flush()
        sys.stderr.flush()
        if then_exit:
            os._exit(0)
        skip_teardown_at_exit()  # the interpreter's exit would abort: a thread is still in C++
    elif refusals:
        reason = str(refusals[0]).partition("\n")[0]
        say(f"the process group is left as it is: {reason}")
        skip_teardown_at_exit()  # torch may abort a process whose group is not destroyed


def skip_teardown_at_exit() -> None:
    """Register an exit function that ends the process by `os._exit`: torch's teardown and
    destructors do not run. Before that it calls the exit functions registered earlier, the
    script's among them, and flushes stdout and stderr. The exit code is 0 in any case."""

    def end_process() -> None:
        """Call the exit functions registered earlier, and exit with 0."""
        atexit.unregister(end_process)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    atexit.register(end_process)  # the last one registered is the first to run
