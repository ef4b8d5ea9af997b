"""torchrun's rendezvous as an elastic job has it, between handlers that share a store."""

from __future__ import annotations

import base64
import inspect
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it untyped
from torch.distributed.elastic.rendezvous import (
    RendezvousParameters,
    RendezvousStateError,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend as Backend,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    create_handler,
)

from hpc_ddp.node.net import elastic_rendezvous

HEARTBEATS = SimpleNamespace(
    keep_alive_interval=timedelta(seconds=5), keep_alive_max_attempt=3, min_nodes=1
)


def test_a_node_that_is_lost_counts_as_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DynamicRendezvousHandler, "num_nodes_waiting", lambda handler: 1)
    rendezvous = SimpleNamespace(world_size=3)
    monkeypatch.setattr(DynamicRendezvousHandler, "next_rendezvous", lambda handler: rendezvous)
    elastic_rendezvous.count_lost_nodes()
    timeout = SimpleNamespace(_last_call=None)
    state = SimpleNamespace(participants=["a", "b"], round=1, closed=False)
    handler: Any = SimpleNamespace(
        _settings=SimpleNamespace(timeout=timeout), _state_holder=SimpleNamespace(state=state)
    )
    assert DynamicRendezvousHandler.next_rendezvous(handler) is rendezvous  # type: ignore[comparison-overlap]
    assert timeout._last_call == timedelta(seconds=15)
    assert handler.joined_round == 1
    assert DynamicRendezvousHandler.num_nodes_waiting(handler) == 2
    state.participants.append("c")
    assert DynamicRendezvousHandler.num_nodes_waiting(handler) == 1
    state.participants, state.closed = ["a"], True  # the others have ended well
    assert DynamicRendezvousHandler.num_nodes_waiting(handler) == 0


def test_a_suspension_of_the_job_loses_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """After it all heartbeats are old; a node without one stays lost when there was time for it."""
    holder_type = dynamic_rendezvous._BackendRendezvousStateHolder
    dropped: list[float] = []
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(holder_type, "_sanitize", lambda holder: dropped.append(clock.now))
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    elastic_rendezvous.time_heartbeats()
    holder: Any = SimpleNamespace(_settings=HEARTBEATS, _state=SimpleNamespace(last_heartbeats={}))
    for seconds in (0, 5, 35, 5, 5, 5, 5):
        clock.now += seconds
        holder_type._sanitize(holder)
    assert dropped == [100.0, 105.0, 155.0, 160.0]


@pytest.mark.parametrize("ahead", [-3600, 0, 3600])
def test_a_clock_that_is_off_loses_no_node(monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """A node is lost whose heartbeat does not change; the times in the state stay its own."""
    holder_type = dynamic_rendezvous._BackendRendezvousStateHolder
    monkeypatch.setattr(holder_type, "_sanitize", holder_type._sanitize)
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    elastic_rendezvous.time_heartbeats()
    state = dynamic_rendezvous._RendezvousState()
    holder: Any = SimpleNamespace(_settings=HEARTBEATS, _state=state)
    nodes = [dynamic_rendezvous._NodeDesc(name, 1, 0) for name in ("n1", "n2")]
    state.participants = {node: number for number, node in enumerate(nodes)}
    there = datetime.now(timezone.utc) + timedelta(seconds=ahead)
    for seconds in range(0, 24, 4):
        clock.now += 4
        state.last_heartbeats[nodes[0]] = there + timedelta(seconds=seconds)
        if seconds == 0:
            state.last_heartbeats[nodes[1]] = there
        holder_type._sanitize(holder)
        assert [*state.participants] == (nodes if seconds <= 12 else nodes[:1])
    assert state.last_heartbeats == {nodes[0]: there + timedelta(seconds=20)}


class Marker:
    """Creates a file where it is loaded from a pickle."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> Callable[..., DynamicRendezvousHandler]:
    """Make a node's handler, as torchrun does; all of them meet in one store on this machine."""
    monkeypatch.setattr(dynamic_rendezvous, "sorted", sorted, raising=False)
    for name in ("_decode_state", "set_state"):
        monkeypatch.setattr(Backend, name, getattr(Backend, name))
    stores: list[Any] = []

    def make(address: str, nodes: int = 1) -> DynamicRendezvousHandler:
        port = stores[0].port if stores else 0
        parameters = RendezvousParameters(
            *("c10d", f"127.0.0.1:{port}", "7.0", nodes, nodes, address),
            is_host=not stores,
            read_timeout=60,
        )
        backend, store = create_backend(parameters)
        stores.append(store)
        return create_handler(store, backend, parameters)

    return make


@pytest.mark.parametrize("signed", [True, False])
def test_a_stranger_at_the_rendezvous_can_not_run_code(
    rendezvous: Callable[..., Any], tmp_path: Path, signed: bool
) -> None:
    """A stranger knows host and port, lists the keys, and puts a pickle in place of each value."""
    if signed:
        elastic_rendezvous.sign_state(b"the attempt's secret")
    handler = rendezvous("127.0.0.1")
    handler._state_holder._cache_duration = 0
    handler._state_holder.sync()
    handler._state_holder.state.round = 5
    handler._state_holder.mark_dirty()
    assert handler._state_holder.sync()
    port = handler._store.port
    stranger = TCPStore("127.0.0.1", port, is_master=False)
    # Since torch 2.10 a client may list the keys; before, it had to guess the run's id.
    key = handler._state_holder._backend._key
    assert key in getattr(stranger, "list_keys", lambda: [key])()
    forged = base64.b64encode(pickle.dumps(Marker(tmp_path / "ran")))
    stranger.set(key, forged.decode())
    if not signed:  # what torchrun itself does: it runs the code, and then has no state
        with pytest.raises(AttributeError):
            handler._state_holder.sync()
        assert (tmp_path / "ran").exists()
        return
    with pytest.raises(RendezvousStateError, match="a stranger has written it"):
        handler._state_holder.sync()
    assert not (tmp_path / "ran").exists()


def test_agents_that_know_the_secret_meet_in_the_order_of_their_nodes(
    rendezvous: Callable[..., Any],
) -> None:
    hosts = [f"127.0.0.{number}" for number in (9, 10, 1, 100)]  # as text 1, 10, 100, 9
    elastic_rendezvous.rank_in_order(hosts)
    elastic_rendezvous.sign_state(b"the attempt's secret")
    handlers = [rendezvous(host, len(hosts)) for host in hosts]
    with ThreadPoolExecutor(len(hosts)) as pool:
        infos = list(pool.map(lambda handler: handler.next_rendezvous(), handlers))
    assert [result.rank for result in infos] == [0, 1, 2, 3]
    assert {result.bootstrap_store_info.master_addr for result in infos} == {"127.0.0.9"}
    for handler in handlers:
        handler.shutdown()


@pytest.mark.parametrize("patched", [False, True])
def test_the_rendezvous_reads_no_source_files(
    rendezvous: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, patched: bool
) -> None:
    """The events have the same names with the patch; they have them without a look at any file."""
    names: list[str] = []
    looks: list[str] = []
    getsourcefile = inspect.getsourcefile

    def note(value: Any) -> str | None:
        looks.append(str(value))
        return getsourcefile(value)

    monkeypatch.setattr(inspect, "getsourcefile", note)
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", dynamic_rendezvous.get_method_name)
    record = "construct_and_record_rdzv_event"
    monkeypatch.setattr(dynamic_rendezvous, record, lambda **fields: names.append(fields["name"]))
    if patched:
        elastic_rendezvous.leave_sources_alone()
    handler = rendezvous("127.0.0.1")
    handler.next_rendezvous()
    handler.shutdown()
    assert {"DynamicRendezvousHandler.next_rendezvous", "_DistributedRendezvousOpExecutor.run"} <= {
        *names
    }
    assert bool(looks) is not patched
