"""Nodes measure how fast they exchange data, and report their torch."""

from __future__ import annotations

import os
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from hpc_ddp.node.preflight import bandwidth
from hpc_ddp.node.preflight.bandwidth import Meter, measure_links, partner
from unit.fakes import Clock
from unit.node.preflight.fakes import Lines


@pytest.mark.parametrize("world", range(2, 10))
def test_each_rank_meets_each_other_once(world: int) -> None:
    meetings: Counter[tuple[int, int]] = Counter()
    for turn in range(1, 1 + world):
        for rank in range(world):
            peer = partner(rank, world, turn)
            if peer is not None:
                assert partner(peer, world, turn) == rank
                meetings[rank, peer] += 1
    assert len(meetings) == world * (world - 1)
    assert set(meetings.values()) == {1}


@pytest.mark.parametrize("world", [4, 5, 16, 33, 1024])
def test_each_rank_has_several_partners(world: int) -> None:
    for rank in range(world):
        peers = {partner(rank, world, turn) for turn in range(1, 1 + bandwidth.TURNS)}
        assert len(peers - {None}) >= 3


# --- a meter -------------------------------------------------------------------------------


class FakeDist:
    """The part of torch.distributed that a `Meter` uses: sent tensors come back at once."""

    class P2POp(NamedTuple):
        operation: str
        tensor: torch.Tensor
        peer: int

    isend, irecv = "send", "receive"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.total = 6.0
        self.durations = [0.5, 0.1, 0.2, 1.0, 1.0]
        self.speed_there = 1000.0
        self.operations: list[tuple[str, int, int]] = []

    def batch_isend_irecv(self, operations: list[P2POp]) -> list[Any]:
        """Return what does its work once it is waited for."""

        def wait() -> None:
            self._clock.now += self.durations.pop(0) if self.durations else 1.0
            for operation in operations:
                if operation.operation == "receive" and operation.tensor.numel() == 1:
                    operation.tensor.fill_(self.speed_there)
                row = (operation.operation, operation.tensor.numel(), operation.peer)
                self.operations.append(row)

        return [SimpleNamespace(wait=wait)]

    def get_world_size(self) -> int:
        return 3

    def get_rank(self) -> int:
        return 1

    def all_reduce(self, values: torch.Tensor) -> None:
        assert bool((values == 2).all())
        self._clock.now += 0.01
        values.fill_(self.total)


class Ticking(Clock):
    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = Ticking(0.0)
    monkeypatch.setattr(bandwidth, "time", clock)
    monkeypatch.setattr(bandwidth, "SMALL_ELEMENTS", 1000)
    monkeypatch.setattr(bandwidth, "LARGE_ELEMENTS", 10000)

    def full(shape: tuple[int], number: float, dtype: Any, device: str) -> torch.Tensor:
        return torch.full(shape, number)

    return SimpleNamespace(
        full=full, float32=torch.float32, device=torch.device, distributed=FakeDist(clock)
    )


def test_the_best_of_several_exchanges_counts(fake: Any) -> None:
    assert Meter(fake, "cpu").exchange(2) == pytest.approx(4 * 1000 / 0.1 / 1e6)
    small = [("send", 1000, 2), ("receive", 1000, 2)] * bandwidth.EXCHANGE_REPEATS
    assert fake.distributed.operations == [*small, ("send", 1, 2), ("receive", 1, 2)]


@pytest.mark.parametrize(("speed_there", "is_repeated"), [(0.05, True), (0.03, False)])
def test_large_tensors_follow_where_both_ends_are_fast(
    fake: Any, monkeypatch: pytest.MonkeyPatch, speed_there: float, is_repeated: bool
) -> None:
    monkeypatch.setattr(bandwidth, "FAST_MB_S", 0.039)
    dist = fake.distributed
    dist.speed_there = speed_there
    dist.durations += [0.0, 1.0, 0.2, 1.0, 1.0, 1.0]
    speed = Meter(fake, "cpu").exchange(2)
    assert speed == pytest.approx(0.2 if is_repeated else 0.03)
    assert (("send", 10000, 2) in dist.operations) is is_repeated


def test_a_gpu_is_waited_for(fake: Any) -> None:
    waits: list[int] = []
    fake.accelerator = SimpleNamespace(synchronize=lambda: waits.append(1))
    Meter(fake, "xpu").exchange(2)
    assert len(waits) == bandwidth.EXCHANGE_REPEATS + 1


def test_a_sum_is_right_or_wrong(fake: Any) -> None:
    speed, is_right = Meter(fake, "cpu").all_reduce(1000)
    assert is_right
    assert speed == pytest.approx(0.4)
    fake.distributed.total = 5.0
    assert Meter(fake, "cpu").all_reduce(1000)[1] is False


class FakeMeter:
    """A meter of speeds that are known."""

    def __init__(self, right: bool = True, broken: int | None = None) -> None:
        self.right, self.broken = right, broken
        self.peers: list[int] = []
        self.counts: list[int] = []

    def exchange(self, peer: int) -> float:
        self.peers.append(peer)
        if peer == self.broken:
            raise RuntimeError("Connection reset\nby peer")
        return 100.06 - peer

    def all_reduce(self, count: int) -> tuple[float, bool]:
        self.counts.append(count)
        return 7.77, self.right


def test_speeds_are_reported(lines: Lines) -> None:
    meter: Any = FakeMeter()
    measure_links(meter, ["n1", "n2", "n3"], 0, 1)
    assert meter.peers == [1, 2]
    assert meter.counts == [1, bandwidth.ALL_REDUCE_ELEMENTS]
    assert lines() == [{"values": {"exchange_mb_s": 99.1, "all_reduce_mb_s": 7.8}}]
    wrong: Any = FakeMeter(right=False)
    measure_links(wrong, ["n1", "n2"], 0, 1)
    assert lines()[-1] == {"fault": "bandwidth", "why": "the sum of an all-reduce is wrong here"}


def test_trouble_in_an_exchange_is_reported_with_its_turn(lines: Lines) -> None:
    meter: Any = FakeMeter(broken=2)
    measure_links(meter, ["n1", "n2", "n3"], 0, 1)
    why = "no exchange with n3: Connection reset"
    assert lines() == [{"trouble": "n3", "check": "bandwidth", "why": why, "turn": 2}]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_dead_link_is_named_where_an_all_reduce_fails_on_all_nodes(
    fake: Any, lines: Lines, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    class Dist(FakeDist):
        def batch_isend_irecv(self, operations: list[FakeDist.P2POp]) -> list[Any]:
            if operations[0].peer == 2:
                raise RuntimeError("NCCL error: remote process exited or there was a network error")
            return super().batch_isend_irecv(operations)

        def all_reduce(self, values: torch.Tensor) -> None:
            raise RuntimeError("timed out")

    dist: Any = Dist(fake.distributed._clock)
    dist.TCPStore = dist.init_process_group = lambda *words, **values: None
    dist.get_default_backend_for_device = str
    fake.distributed = dist
    fake.accelerator = SimpleNamespace(synchronize=int, set_device_index=int)
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_GLOO_LAZY_INIT"):
        monkeypatch.setenv(name, "1")
    group = RUN._replace(members=["n1", "n2", "n3"], device=device, first=1)
    server: Any = SimpleNamespace(detach=lambda: 7)
    bandwidth.measure_group(fake, "n2", server, group)
    trouble, stage = lines()
    assert (trouble["trouble"], trouble["check"]) == ("n3", "bandwidth")
    assert stage == {"stage": "exchange"}


# --- torch ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "backends", "device", "count"),
    [
        ("cuda", ["nccl"], "cuda", 3),
        ("cuda", [], None, 0),  # a torch without NCCL
        ("xpu", ["xccl"], "xpu", 3),
        ("npu", ["hccl"], None, 0),  # whose package named no backend
        ("mps", ["gloo"], None, 0),  # Gloo does not send its tensors
        (None, ["nccl"], None, 0),
    ],
)
def test_the_torch_of_a_node_is_reported(
    lines: Lines,
    monkeypatch: pytest.MonkeyPatch,
    kind: str | None,
    backends: list[str],
    device: str | None,
    count: int,
) -> None:
    current = SimpleNamespace(type=kind) if kind else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: current)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name in backends)
    assert bandwidth.import_torch() is torch
    values = {"torch": torch.__version__, "device": device, "devices": count}
    assert lines() == [{"stage": "torch", "values": values}]


def test_a_torch_that_can_not_be_imported_is_a_fault(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert bandwidth.import_torch() is None
    (message,) = lines()
    assert message["fault"] == "torch"
    assert message["why"].startswith("import torch: ModuleNotFoundError: import of torch halted")


RUN = bandwidth.Group(["n2", "n1"], "h", 5, "cpu", first=3, timeout_s=60.0)


def test_members_join_and_measure(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(bandwidth, "join_group", lambda *words: words)
    monkeypatch.setattr(bandwidth, "measure_links", lambda *words: calls.append(words))
    bandwidth.measure_group("torch", "n1", "server", RUN)  # type: ignore[arg-type]
    assert calls == [(("torch", "server", RUN, 1), ["n2", "n1"], 1, 3)]
    assert lines() == [{"stage": "exchange"}]


@pytest.mark.parametrize(
    ("error", "why"),
    [(RuntimeError("Timed out\nafter 20 s"), "Timed out"), (RuntimeError(), "RuntimeError")],
)
def test_a_process_group_that_breaks_is_reported(
    lines: Lines, monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    def refuse(*words: Any) -> None:
        raise error

    monkeypatch.setattr(bandwidth, "join_group", refuse)
    bandwidth.measure_group("torch", "n1", "server", RUN)  # type: ignore[arg-type]
    assert lines() == [{"values": {"exchange_error": why}}, {"stage": "exchange"}]


@pytest.mark.parametrize(
    ("device", "backend", "rank"), [("cpu", "gloo", 0), ("cuda", "nccl", 1), ("xpu", "xccl", 0)]
)
def test_the_members_join(
    fake: Any, monkeypatch: pytest.MonkeyPatch, device: str, backend: str, rank: int
) -> None:
    calls: list[tuple[Any, ...]] = []

    class Dist(FakeDist):
        def TCPStore(self, *words: Any, timeout: Any, master_listen_fd: int = -1) -> str:
            calls.append((*words, timeout.total_seconds(), master_listen_fd))
            return "store"

        def all_reduce(self, values: torch.Tensor) -> None:
            calls.append(("all-reduce",))
            super().all_reduce(values)

        def get_default_backend_for_device(self, device: str) -> str:
            return str(torch.distributed.get_default_backend_for_device(device))

        def init_process_group(self, backend: str, **values: Any) -> None:
            assert values.pop("timeout").total_seconds() == 60.0
            calls.append((backend, values))

    fake.distributed = Dist(fake.distributed._clock)
    fake.accelerator = SimpleNamespace(
        set_device_index=lambda index: calls.append(("device", index))
    )
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_GLOO_LAZY_INIT"):
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        monkeypatch.delenv(name)
    server: Any = SimpleNamespace(detach=lambda: 7)
    bandwidth.join_group(fake, server, RUN._replace(device=device), rank)
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1"  # else each connects to each other
    bound = {"device_id": torch.device("cuda", 0)} if device == "cuda" else {}
    group = (backend, {"store": "store", "rank": rank, "world_size": 2, **bound})
    index = [("device", 0)] if device != "cpu" else []
    connect = [("all-reduce",)] if device == "xpu" else []  # NCCL's communicator is there, bound
    store = ("h", 5, 2, rank == 0, 60.0, -1 if rank else 7)
    assert calls == [store, *index, group, *connect]
