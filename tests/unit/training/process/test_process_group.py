"""Workers join, use and leave their process group; torch's calls are stand-ins."""

from __future__ import annotations

import inspect
import io
import itertools
import os
import threading
import time
from datetime import timedelta
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed import distributed_c10d

from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.training import devices
from hpc_ddp.training.process import process_group
from hpc_ddp.training.process.environment import DistEnv
from hpc_ddp.training.process.process_group import leave
from hpc_ddp.training.process.rank_messages import NEVER, Control, LoneControl
from unit.training.fakes import LeftError


def meet_in(monkeypatch: pytest.MonkeyPatch, store: HashStore) -> None:
    """Let this process be rank 1 of 2 in a store, and not wait for a peer there."""
    PrefixStore("default_pg", store).set("default", "of torch")
    monkeypatch.setattr(process_group, "rendezvous", lambda url, timeout: iter([(store, 1, 2)]))
    monkeypatch.setattr(process_group, "_compare_devices", lambda store, info, device: None)
    monkeypatch.setattr(process_group, "_set_global_ranks", lambda device, world_size: None)


@pytest.mark.parametrize(
    ("launched", "hang_after_s", "timeout_s"),
    [(True, 10.0, 1800), (True, 5000.0, 5300), (False, None, None)],
)
def test_a_process_joins_its_group(
    monkeypatch: pytest.MonkeyPatch,
    launched: bool,
    hang_after_s: float | None,
    timeout_s: float | None,
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda b, **values: calls.append((b, values)))
    monkeypatch.setattr(dist, "new_group", lambda **values: values)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(process_group, "_met_at_agents", [])
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    meet_in(monkeypatch, HashStore())
    dist_env = DistEnv(1, 1, 2, 2, launched=launched)
    group_of_all = process_group.join(dist_env, [torch.device("cpu")], hang_after_s)
    timeout = NEVER if timeout_s is None else timedelta(seconds=timeout_s)
    (backend, values) = calls[0]
    assert backend == "gloo"
    if launched:
        store = values.pop("store")
        assert values == {"timeout": timeout, "rank": 1, "world_size": 2}
        assert store.get("default") == b"of torch"
    else:
        assert (values["rank"], values["world_size"]) == (0, 1)
    group: Any = {"backend": "gloo", "timeout": timeout}
    for control in (group_of_all, Control(dist_env, group_of_all.timeout)):
        assert (control.rank, control.world_size, control._group) == (1, 2, group)
    if launched:
        with pytest.raises(UsageError, match="start\\(\\) was called again"):
            process_group.join(dist_env, [torch.device("cpu")], hang_after_s)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    with pytest.raises(HpcDdpError, match="MPI knows of 1 processes, and 2 were started"):
        process_group.join(dist_env, [torch.device("cpu")], hang_after_s)


def test_workers_of_two_attempts_at_one_store_form_no_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stores: list[Any] = []
    meet_in(monkeypatch, HashStore())
    monkeypatch.setattr(dist, "init_process_group", lambda b, **values: stores.append(values))
    monkeypatch.setattr(dist, "new_group", lambda **values: values)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for prefix in ("one", "two", "one"):
        monkeypatch.setenv("HPC_DDP_STORE_PREFIX", prefix)
        process_group.join(DistEnv(1, 1, 2, 2, launched=True), [torch.device("cpu")], None)
        assert (stores[-1]["rank"], stores[-1]["world_size"]) == (1, 2)
    one, two, again = (values["store"] for values in stores)
    one.set("address", "of a rank")
    assert (again.check(["address"]), two.check(["address"])) == (True, False)


CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ([True] * 3, ""),
        ([False] * 3, ""),
        ([True, False, True], "rank 1 on n1 has cpu, and the other ranks have cuda"),
        ([False, True], "rank 0 on n0 has cpu, and the other ranks have cuda"),
        ([True, False, False], "rank 0 on n0 has cuda, and the other ranks have cpu"),
        ([True] * 20 + [False] * 10, "rank 27 on n27 has cpu, 2 more as well, and the other"),
    ],
)
def test_ranks_with_other_devices_are_named_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, gpus: list[bool], words: str
) -> None:
    store, count, errors = HashStore(), len(gpus), list[str]()
    monkeypatch.setattr(process_group, "READ_S", 0.0)
    monkeypatch.setattr(devices, "name", lambda device: "")
    monkeypatch.setattr(
        process_group, "LaunchEnv", SimpleNamespace(from_env=lambda: threading.current_thread())
    )

    def compare(rank: int) -> None:
        setattr(threading.current_thread(), "node", f"n{rank}")  # noqa: B010
        device = CUDA if gpus[rank] else torch.device("cpu")
        for _ in range(2):  # a process may join again
            try:
                dist_env = DistEnv(rank, rank, count, count, launched=True)
                process_group._compare_devices(store, dist_env, device)
            except HpcDdpError as error:
                errors.append(error.message)

    threads = [threading.Thread(target=compare, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(errors) == (2 * count if words else 0)
    assert all(words in error for error in errors)


def test_ranks_with_other_models_of_gpu_are_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    store, count = HashStore(), 3
    monkeypatch.setattr(
        process_group,
        "LaunchEnv",
        SimpleNamespace(from_env=lambda: SimpleNamespace(node=threading.current_thread().name)),
    )
    monkeypatch.setattr(
        devices, "name", lambda _: "A100" if threading.current_thread().name == "n1" else "H100"
    )
    threads = [
        threading.Thread(
            target=process_group._compare_devices,
            args=(store, DistEnv(rank, rank, count, count, launched=True), CUDA),
            name=f"n{rank}",
        )
        for rank in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (line,) = capfd.readouterr().err.splitlines()
    assert "WARNING: rank 1 on n1 has A100, and the other ranks have H100: the slowest" in line


@pytest.mark.parametrize("count", [1, 2])
def test_a_group_of_workers_with_several_devices_is_bound_to_none(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: True)
    monkeypatch.setattr(dist, "init_process_group", lambda b, **values: calls.append(values))
    monkeypatch.setattr(dist, "new_group", lambda **values: values)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(devices, "name", lambda device: "NVIDIA H200")
    for variable in ("TORCH_DIST_USE_NCCL2", "NCCL_HOSTID"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    meet_in(monkeypatch, HashStore())
    gpus = [torch.device("cuda", index) for index in range(count)]
    process_group.join(DistEnv(1, 1, 2, 2, launched=True), gpus, None)
    assert calls[0].get("device_id") == (gpus[0] if count == 1 else None)
    # The newer NCCL backend binds itself: torch's own choice by that variable is the other one.
    assert os.environ.get("TORCH_DIST_USE_NCCL2") == (None if count == 1 else "0")
    assert "NCCL_HOSTID" not in os.environ


def test_slices_of_a_gpu_are_told_apart_before_the_group_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL refuses two ranks of one host on a GPU, as which it takes its slices."""
    hosts: list[str | None] = []
    monkeypatch.setattr(devices, "name", lambda device: "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: True)
    monkeypatch.setattr(
        dist, "init_process_group", lambda *_, **__: hosts.append(os.environ.get("NCCL_HOSTID"))
    )
    monkeypatch.setattr(dist, "new_group", lambda **values: values)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setenv("NCCL_HOSTID", "")
    monkeypatch.delenv("NCCL_HOSTID")
    meet_in(monkeypatch, HashStore())
    for name in ("rank-1", "of the user"):
        process_group.join(DistEnv(1, 0, 2, 2, launched=True), [CUDA], None)
        assert hosts.pop() == name
        monkeypatch.setenv("NCCL_HOSTID", "of the user")


def test_the_default_groups_backend_has_its_ranks() -> None:
    """Else a mesh that splits a process's second group ends by SIGSEGV, up to torch 2.13."""
    process_group.join(DistEnv(), [torch.device("cpu")], None)
    try:
        backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        assert backend.options.global_ranks_in_group == [0]
    finally:
        dist.destroy_process_group()


def test_the_variable_for_the_unbound_nccl_is_torchs() -> None:
    source = inspect.getsource(distributed_c10d)
    assert "nccl2" not in source or 'environ.get("TORCH_DIST_USE_NCCL2") == "0"' in source


@pytest.mark.parametrize(
    ("hanging", "then_exit"),
    [("", True), ("barrier", True), ("destroy", True), ("destroy", False)],
)
def test_a_hanging_teardown_is_abandoned(
    monkeypatch: pytest.MonkeyPatch,
    printed: list[str],
    capsys: pytest.CaptureFixture[str],
    hanging: str,
    then_exit: bool,
) -> None:
    calls: list[str] = []
    release, hangs = threading.Event(), bool(hanging)

    def call(name: str) -> None:
        calls.append(name)
        release.wait(60 if name == hanging else 0.1)  # each takes a moment

    group: Any = SimpleNamespace(barrier=lambda: call("barrier"))
    exits: list[Any] = []
    monkeypatch.setattr("atexit.register", exits.append)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: call("destroy"))
    monkeypatch.setattr(process_group, "TEARDOWN_S", 0.3 if hangs else 60.0)
    if hangs and then_exit:
        with pytest.raises(LeftError, match="0"):
            leave(group, torch.device("cpu"), then_exit)
    else:
        leave(group, torch.device("cpu"), then_exit)
    text = capsys.readouterr().err
    assert ("the process group did not come down" in text) is hangs
    assert calls == (["barrier"] if hanging == "barrier" else ["barrier", "destroy"])
    # The interpreter's own exit would abort the process, amid a call of C++.
    assert len(exits) == (hangs and not then_exit)
    release.set()
    _wait_for_teardowns()


def test_a_group_that_refuses_its_teardown_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NCCL's while a captured graph has its collectives; torch may abort at the ordinary exit."""

    def refuse() -> None:
        raise RuntimeError("a captured graph is alive\nException raised from finalize")

    exits: list[Any] = []
    group: Any = SimpleNamespace(barrier=lambda: None)
    monkeypatch.setattr("atexit.register", exits.append)
    monkeypatch.setattr(dist, "destroy_process_group", refuse)
    leave(group, torch.device("cpu"), then_exit=True)
    text = "hpc-ddp: the process group is left as it is: a captured graph is alive\n"
    assert capsys.readouterr().err == text
    assert len(exits) == 1


def _wait_for_teardowns() -> None:
    for thread in threading.enumerate():
        if (
            thread is not threading.current_thread()
            and thread.daemon
            and "tear_down" in thread.name
        ):
            thread.join(60)


def test_objects_are_exchanged_through_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(dist, "new_group", lambda **values: "group")

    def gather(values: Any, box: Any, dst: int, group: str, async_op: bool = False) -> str:
        calls.append(f"gather {dst} {group} {async_op} {box is None}")
        if box is not None:
            box[1] = values
        return "work"

    def broadcast(values: Any, src: int, group: str) -> None:
        calls.append(f"broadcast {src} {group}")
        values[0] = values[0] * 2

    monkeypatch.setattr(dist, "gather_object", gather)
    monkeypatch.setattr(dist, "gather", gather)
    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    first, second = (Control(DistEnv(rank, 0, 2, 1, launched=True), NEVER) for rank in (0, 1))
    assert first.to_first("x") == [None, "x"]
    assert second.to_first("x") == []
    assert first.from_first("x") == "xx"
    result, work = first.start_gather(torch.ones(3))
    assert (len(result), work) == (2, "work")
    assert second.start_gather(torch.ones(3)) == ([], "work")
    names = ["gather 0 group False False", "gather 0 group False True", "broadcast 0 group"]
    names += ["gather 0 group True False", "gather 0 group True True"]
    assert calls == names


def test_collectives_use_a_group_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's default group has gradients under way."""
    calls: list[tuple[Any, ...]] = []

    def reduce(values: Any, op: Any = "sum", group: Any = None, async_op: bool = False) -> str:
        calls.append((values.tolist(), op, group, async_op))
        return "work"

    monkeypatch.setattr(dist, "new_group", lambda **values: "own")
    monkeypatch.setattr(dist, "all_reduce", reduce)
    talk = Control(DistEnv(0, 0, 2, 2, launched=True), NEVER)
    assert talk.start_max(torch.tensor([1])) == "work"
    talk.sum(torch.tensor([2]))
    talk.barrier()
    assert calls == [
        ([1], dist.ReduceOp.MAX, "own", True),
        ([2], "sum", "own", False),
        ([0.0], "sum", "own", False),
    ]


def test_a_hanging_process_flushes_its_output(
    monkeypatch: pytest.MonkeyPatch, printed: list[str]
) -> None:
    release = threading.Event()
    group: Any = SimpleNamespace(barrier=lambda: release.wait(60))
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BufferedWriter(raw)))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(process_group, "TEARDOWN_S", 0.01)
    print("accuracy 0.97")
    with pytest.raises(LeftError):
        leave(group, torch.device("cpu"), True)
    assert raw.getvalue() == b"accuracy 0.97\n"
    release.set()
    _wait_for_teardowns()


def test_a_process_alone_hears_itself() -> None:
    control, numbers = LoneControl(), torch.tensor([3.0])
    control.start_max(numbers).wait()
    rows, work = control.start_gather(numbers)
    work.wait()
    control.sum(numbers)
    control.barrier()
    assert (rows, numbers.item(), control.from_first("a"), control.to_first("b")) == (
        [numbers],
        3.0,
        "a",
        ["b"],
    )
    assert (control.rank, control.world_size) == (0, 1)


def test_the_group_of_a_library_is_left_standing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroyed"))
    control: Any = SimpleNamespace(barrier=lambda: calls.append("all are here"))
    leave(control, torch.device("cpu"), then_exit=True, destroys=False)
    assert calls == ["all are here"]


class PairControl(LoneControl):
    """One of two ranks, which are threads: rank 0 sends messages to the other."""

    def __init__(self, rank: int, messages: Queue[Any]) -> None:
        super().__init__()
        self.rank, self._messages = rank, messages

    def from_first(self, message: Any) -> Any:
        if self.rank == 0:
            self._messages.put(message)
            return message
        return self._messages.get(timeout=60)


def test_the_others_wait_for_rank_0_beyond_the_limit_of_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_group, "REPORT_S", 0.001)
    messages, order, wakes = Queue[Any](), list[int](), Queue[None]()

    def enter_second() -> None:
        with process_group.run_first_alone(PairControl(1, messages), lambda: wakes.put(None)):
            order.append(1)

    second = threading.Thread(target=enter_second)
    second.start()
    with process_group.run_first_alone(PairControl(0, messages), lambda: None):
        for _ in range(3):
            wakes.get(timeout=60)
        order.append(0)
    second.join(60)
    assert order == [0, 1]


def test_a_block_of_rank_0_within_another_sends_one_message_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_group, "REPORT_S", 0.001)
    sending, clashes, count = threading.Lock(), list[Any](), itertools.count()
    enough = threading.Event()

    class Sender(LoneControl):
        def from_first(self, message: Any) -> Any:
            if not sending.acquire(blocking=False):
                clashes.append(message)
                return message
            if next(count) > 20:
                enough.set()
            time.sleep(0.001)
            sending.release()
            return message

    control = Sender()
    with process_group.run_first_alone(control, int), process_group.run_first_alone(control, int):
        assert enough.wait(60)
    assert clashes == []


def test_after_an_error_of_rank_0_no_other_goes_on() -> None:
    messages = Queue[Any]()
    with pytest.raises(KeyError), process_group.run_first_alone(PairControl(0, messages), int):
        raise KeyError
    assert messages.empty()


def test_a_backend_may_lack_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch 2.9 each but Gloo and NCCL does: MPI, and those of other vendors."""
    world = SimpleNamespace(_get_backend=lambda device: SimpleNamespace())
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    process_group._set_global_ranks(torch.device("cpu"), 2)
