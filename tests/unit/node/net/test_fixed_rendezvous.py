"""`FixedRendezvous`: nodes that know their ranks meet over a store that a stranger may write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from hpc_ddp.node.net import fixed_rendezvous
from hpc_ddp.node.net.fixed_rendezvous import FixedRendezvous
from tests.waiting import wait_until

SECRET = b"the attempt's secret"
Make = Callable[..., list[FixedRendezvous]]


def count_keys(node: FixedRendezvous, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return how many keys the node asks its store for, by function, from now on."""
    call, keys = node._call, Counter[str]()

    def count(function: Any, *arguments: Any) -> Any:
        keys[function.__name__] += len(arguments[0]) if isinstance(arguments[0], list) else 1
        return call(function, *arguments)

    monkeypatch.setattr(node, "_call", count)
    return keys


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make the rendezvous of each of some nodes, as torchrun does, on this machine."""
    monkeypatch.setattr(fixed_rendezvous, "ASK_EVERY_S", 0.0)
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)

    def make(size: int, secret: bytes = SECRET, join_s: int = 600) -> list[FixedRendezvous]:
        hosts = [f"127.0.0.{index + 1}" for index in range(size)]
        nodes: list[FixedRendezvous] = []
        for rank in range(size):
            port = nodes[0].store.port if nodes else 0
            parameters = RendezvousParameters(
                *("c10d", f"127.0.0.1:{port}", "7.0", size, size, hosts[rank]),
                is_host=not nodes,
                read_timeout=60,
                join_timeout=join_s,
            )
            nodes.append(FixedRendezvous.create(parameters, rank, hosts, secret))
        return nodes

    return make


def meet(nodes: list[FixedRendezvous]) -> list[Any]:
    """Return what each node gets to know of the next round."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(lambda node: node.next_rendezvous(), nodes))


def test_each_node_has_the_rank_of_its_place(make: Make) -> None:
    nodes = make(3)
    infos = meet(nodes)
    assert [(info.rank, info.world_size) for info in infos] == [(0, 3), (1, 3), (2, 3)]
    stores = {
        (i.bootstrap_store_info.master_addr, i.bootstrap_store_info.master_port) for i in infos
    }
    ((host, port),) = stores
    infos[0].store.set("of the agents", "1")
    assert infos[2].store.get("of the agents") == b"1"
    TCPStore(host, port, is_master=False).set("of the workers", "1")
    assert [node.num_nodes_waiting() for node in nodes] == [0, 0, 0]
    assert nodes[0].use_agent_store
    assert (nodes[1].get_backend(), nodes[1].get_run_id()) == ("c10d", "7.0")


def test_a_restart_has_all_nodes_meet_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as `launch` with restarts
    nodes = make(2)
    first = meet(nodes)
    with ThreadPoolExecutor() as pool:
        again: Future[Any] = pool.submit(nodes[1].next_rendezvous)
        wait_until(lambda: nodes[0].num_nodes_waiting() == 1, "the wish of the other node")
        assert not again.done()
        second = [nodes[0].next_rendezvous(), again.result(60)]
    assert [info.rank for info in second] == [0, 1]
    assert [node.num_nodes_waiting() for node in nodes] == [0, 0]
    assert not nodes[0].use_agent_store
    first[0].store.set("a key", "of the first start")
    assert not second[1].store.check(["a key"])


@pytest.mark.parametrize("ended", [0, 1])
def test_a_node_that_has_ended_keeps_no_other_waiting(make: Make, ended: int) -> None:
    nodes = make(2)
    meet(nodes)
    with ThreadPoolExecutor() as pool:
        waiting: Future[Any] = pool.submit(nodes[1 - ended].next_rendezvous)
        wait_until(lambda: nodes[ended].num_nodes_waiting() == 1, "the node that waits")
        assert not nodes[ended].is_closed()
        assert nodes[ended].shutdown()
        with pytest.raises(RendezvousClosedError, match="another node has ended for good"):
            waiting.result(60)


def test_a_round_that_has_begun_is_not_closed(make: Make) -> None:
    nodes = make(2)
    with ThreadPoolExecutor() as pool:
        first: Future[Any] = pool.submit(nodes[0].next_rendezvous)
        second = nodes[1].next_rendezvous()
        first.result(60)
    nodes[0].round = 0
    nodes[0].set_closed()
    assert not nodes[0].is_closed()
    assert second.rank == 1


def test_the_first_node_names_those_that_are_missing(make: Make) -> None:
    nodes = make(12, join_s=0)
    with pytest.raises(RendezvousTimeoutError) as error:
        nodes[0].next_rendezvous()
    names = ", ".join(f"127.0.0.{index}" for index in range(2, 10))
    assert str(error.value) == f"{names} and 3 more did not join within 0 s"


def test_another_node_reports_that_it_waited_in_vain(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = make(2, join_s=0)
    monkeypatch.setattr(fixed_rendezvous, "GRACE_S", 0.0)
    with pytest.raises(RendezvousTimeoutError, match=r"^not all nodes joined within 0 s$"):
        nodes[1].next_rendezvous()


@pytest.mark.parametrize("name", ["joined/1", "outcome", "wanted"])
def test_a_strangers_key_is_believed_by_no_node(make: Make, name: str) -> None:
    """A stranger lists the keys, and writes what a node of another attempt would."""
    nodes, (stranger,) = make(2), make(1, b"a stranger's guess")
    stranger.store = TCPStore("127.0.0.1", nodes[0].store.port, is_master=False)
    stranger._write(name, {"outcome": "begun"}.get(name, name.partition("/")[0]))
    with pytest.raises(RendezvousStateError, match="a stranger has written it"):
        nodes[0].num_nodes_waiting() if name == "wanted" else nodes[0].next_rendezvous()


def test_an_answer_of_another_round_or_rank_is_not_taken(make: Make) -> None:
    """A stranger can read keys, and write their contents to others."""
    nodes = make(3)
    meet(nodes)
    content = nodes[0].store.get("hpc-ddp/7.0/0/joined/0")
    nodes[0].store.set("hpc-ddp/7.0/1/joined/1", content)
    nodes[0].store.set("hpc-ddp/7.0/1/joined/2", content)
    with pytest.raises(RendezvousStateError):
        nodes[0].next_rendezvous()


def test_a_store_that_is_gone_is_reported(make: Make) -> None:
    nodes = make(2)
    meet(nodes)
    nodes[0].store = None  # with its last owner the server ends
    with pytest.raises(RendezvousConnectionError, match=r"on 127\.0\.0\.1, does not answer"):
        wait_until(lambda: nodes[1].num_nodes_waiting() and False, "the end of the store")
    assert not nodes[1].shutdown()


def test_a_nodes_requests_do_not_grow_with_the_job(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first node ask for the same keys whatever the number of nodes."""
    counts = []
    for size in (2, 8):
        nodes = make(size)
        counts += [count_keys(node, monkeypatch) for node in nodes[1:]]
        meet(nodes)
        for node in nodes:
            node.num_nodes_waiting()
            node.shutdown()
    assert counts == [counts[0]] * 8
    assert counts[0].total() < 10


def test_a_node_that_is_done_closes_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(SimpleElasticAgent, "_exit_barrier", lambda handler: calls.append("wait"))
    monkeypatch.setattr(
        "torch.distributed.elastic.rendezvous.registry.get_rendezvous_handler", None
    )
    fixed_rendezvous.patch_torchrun(0, ["n1", "n2"], b"")
    rendezvous = SimpleNamespace(shutdown=lambda: calls.append("close"))
    group = SimpleNamespace(spec=SimpleNamespace(rdzv_handler=rendezvous))
    wait: Any = SimpleElasticAgent._exit_barrier
    wait(SimpleNamespace(_worker_group=group))
    assert calls == ["close", "wait"]
