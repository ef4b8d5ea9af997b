"""The changes to torchrun are tested one by one, with stand-ins for torchrun's own parts."""

from __future__ import annotations

import base64
import inspect
import json
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it untyped
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
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

from hpc_ddp.core.job.attempt_folder import NodeFolder
from hpc_ddp.core.process import NOTICE_SIGNALS
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node import elastic_agent as agent
from hpc_ddp.node.net.place import Place
from hpc_ddp.node.workers.worker import started_by


class LeftError(Exception):
    """The process would have ended here, with a code."""


def test_dollars_are_doubled_for_torchrun() -> None:
    assert agent.escape(["a$b", "${x}", "c"]) == ["a$$b", "$${x}", "c"]


def test_torchrun_outlives_the_signals_of_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(
        api, "_terminate_process_handler", lambda number, frame: calls.append(number)
    )
    agent.replace_signal_handler()
    for number in (*NOTICE_SIGNALS, signal.SIGQUIT):
        api._terminate_process_handler(number, None)
    assert calls == [signal.SIGQUIT]


def test_workers_are_not_started_again_after_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(
        SimpleElasticAgent, "_restart_workers", lambda handler, group: calls.append(group)
    )
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", None)
    node, handler = NodeFolder(tmp_path), SimpleNamespace(failures={})
    agent.end_after_notice(node)
    restart: Any = SimpleElasticAgent._restart_workers
    restart(handler, "group")
    node.notice.write_text("SIGTERM")
    with pytest.raises(agent.EndingError, match="the workers failed after a notice"):
        restart(handler, "again")
    assert calls == ["group"]


@pytest.mark.parametrize("is_told", [False, True])
def test_workers_that_can_not_be_started_again_keep_their_codes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_told: bool
) -> None:
    failures = {1: ProcessFailure(0, 1, 3, "none")}

    def close(handler: Any, group: Any) -> None:
        raise RendezvousClosedError("another node has ended for good")

    monkeypatch.setattr(SimpleElasticAgent, "_restart_workers", close)
    result = SimpleNamespace(failures=failures)
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda handler, group: result)
    node = NodeFolder(tmp_path)
    agent.end_after_notice(node)
    if is_told:
        node.notice.write_text("SIGTERM")
    handler: Any = SimpleNamespace()
    group = SimpleNamespace(spec=SimpleNamespace(get_entrypoint_name=lambda: "script"))
    monitor: Any = LocalElasticAgent._monitor_workers
    restart: Any = SimpleElasticAgent._restart_workers
    assert monitor(handler, group) is result
    with pytest.raises(ChildFailedError) as ended:
        restart(handler, group)
    assert ended.value.failures == failures
    result.failures = {}  # another node's have failed
    monitor(handler, group)
    with pytest.raises((agent.EndingError, RendezvousClosedError)):
        restart(handler, group)


def test_a_node_that_is_done_closes_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(SimpleElasticAgent, "_exit_barrier", lambda handler: calls.append("wait"))
    monkeypatch.setattr(
        "torch.distributed.elastic.rendezvous.registry.get_rendezvous_handler", None
    )
    agent.meet_by_index(0, ["n1", "n2"], b"")
    rendezvous = SimpleNamespace(shutdown=lambda: calls.append("close"))
    group = SimpleNamespace(spec=SimpleNamespace(rdzv_handler=rendezvous))
    wait: Any = SimpleElasticAgent._exit_barrier
    wait(SimpleNamespace(_worker_group=group))
    assert calls == ["close", "wait"]


def test_a_node_that_is_lost_counts_as_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DynamicRendezvousHandler, "num_nodes_waiting", lambda handler: 1)
    rendezvous = SimpleNamespace(world_size=3)
    monkeypatch.setattr(DynamicRendezvousHandler, "next_rendezvous", lambda handler: rendezvous)
    agent.count_lost_nodes()
    timeout, state = SimpleNamespace(_last_call=None), SimpleNamespace(participants=["a", "b"])
    handler: Any = SimpleNamespace(
        _settings=SimpleNamespace(timeout=timeout), _state_holder=SimpleNamespace(state=state)
    )
    assert DynamicRendezvousHandler.next_rendezvous(handler) is rendezvous  # type: ignore[comparison-overlap]
    assert timeout._last_call == timedelta(seconds=15)
    assert DynamicRendezvousHandler.num_nodes_waiting(handler) == 2
    state.participants.append("c")
    assert DynamicRendezvousHandler.num_nodes_waiting(handler) == 1


def test_torchruns_options_are_read_by_torchrun() -> None:
    args = agent.read_options(["--nnodes=1:2", "--max-restarts=3"])
    assert (args.nnodes, args.max_restarts, args.no_python) == ("1:2", 3, True)
    with pytest.raises(ValueError, match=r"^unrecognized arguments: --no-such-option=1"):
        agent.read_options(["--no-such-option=1"])


ATTEMPT = {
    "HPC_DDP_ATTEMPT": "0",
    "HPC_DDP_NODE_INDEX": "1",
    "HPC_DDP_HOST_SUFFIX": "-ib",
}

TORCHRUN = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=7"]


@pytest.mark.parametrize(
    ("options", "counts", "shares"),
    [
        (["--nnodes=1:2", "--max-restarts=3"], True, "1"),
        (["--nnodes=2", "--max-restarts=0"], False, ""),
    ],
)
def test_torchrun_is_started_as_changed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    counts: bool,
    shares: str,
) -> None:
    changes: list[str] = []
    starts: list[list[str]] = []
    failures: dict[int, Any] = {}

    def elastic_launch(config: Any, entrypoint: str) -> Callable[..., None]:
        assert config.max_nodes == 2

        def start(*words: str) -> None:
            starts.append([entrypoint, *words])
            assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == shares
            if failures:
                raise ChildFailedError("t.py", failures)

        return start

    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "")
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", elastic_launch)
    monkeypatch.setattr(agent, "replace_signal_handler", lambda: changes.append("SIGTERM"))
    monkeypatch.setattr(agent, "end_after_notice", lambda node: changes.append(node.path.name))
    monkeypatch.setattr(agent, "count_lost_nodes", lambda: changes.append("lost"))
    monkeypatch.setattr(agent, "leave_sources_alone", lambda: changes.append("names"))
    monkeypatch.setattr(agent, "rank_in_order", lambda h: changes.append(f"order of {' '.join(h)}"))
    monkeypatch.setattr(agent, "sign_state", lambda key: changes.append(f"signed {key.hex()}"))
    monkeypatch.setattr(agent, "meet_by_index", lambda *place: changes.extend(map(str, place)))
    words = [*TORCHRUN, *options, "train.py", "--cost=$5"]
    run = RunFolder(tmp_path)
    run.claim_attempt({"nodes": ["n2", "n10"]}, lambda identity: False)
    place = Place.from_env({"HPC_DDP_RUN": str(run.path), **ATTEMPT})
    assert agent.launch(words, place) is None
    script = started_by(sys.executable, ["train.py", "--cost=$$5"])
    assert starts[0] == [sys.executable, *script[1:]]
    secret = place.attempt.secret.read_bytes()
    assert changes[:2] == ["SIGTERM", "n10"]
    assert changes[2:] == (
        ["names", "order of n2-ib n10-ib", f"signed {secret.hex()}", "lost"]
        if counts
        else ["1", "['n2-ib', 'n10-ib']", str(secret)]
    )
    for rank, code in ((1, 3), (0, -9)):
        failures[rank] = ProcessFailure(0, 1, code, "none")
        failures[rank].timestamp = 5
    ended = agent.launch(words, place)
    assert ended == {
        "failures": [{"rank": 0, "code": -9, "time": 5}, {"rank": 1, "code": 3, "time": 5}]
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A node's folder in an attempt; the process neither ends nor depends on its parent."""

    def leave(code: int) -> None:
        raise LeftError(code)

    before = {number: signal.getsignal(number) for number in NOTICE_SIGNALS}
    attempt = RunFolder(tmp_path).claim_attempt({"nodes": ["n2", "n10"]}, lambda identity: False)
    folder = attempt.node("n10").path
    folder.mkdir()
    for name, value in {"HPC_DDP_RUN": str(tmp_path), **ATTEMPT}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(agent, "die_with_parent", lambda: None)
    monkeypatch.setenv("HPC_DDP_NODE_FOLDER", str(folder))
    monkeypatch.setenv("HPC_DDP_AGENT_PID", "")
    yield folder
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("ended", "code"), [(None, "0"), ({"failures": [{"rank": 0, "code": 3, "time": 1.0}]}, "1")]
)
def test_failed_workers_are_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ended: dict[str, Any] | None, code: str
) -> None:
    monkeypatch.setattr(agent, "launch", lambda argv, place, server: ended)
    path = folder / "failures.json"
    path.touch()  # by the supervisor
    file_number = path.stat().st_ino
    with pytest.raises(LeftError, match=code):
        agent.main(["train.py"])
    assert json.loads(path.read_text() or "null") == ended
    assert path.stat().st_ino == file_number  # a disk without inodes has no room for another
    assert os.environ["HPC_DDP_AGENT_PID"] == str(os.getpid())
    for number in NOTICE_SIGNALS:  # to each process of the step, as some sites signal it
        os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGTERM)  # does nothing


@pytest.mark.parametrize(("text", "is_taken"), [("EADDRINUSE: port 5", True), ("no store", False)])
def test_a_port_that_is_taken_is_marked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, is_taken: bool
) -> None:
    def launch(argv: list[str], place: Place, server: None) -> None:
        raise RuntimeError("rendezvous") from OSError(text)

    monkeypatch.setattr(agent, "launch", launch)
    with pytest.raises(RuntimeError, match="rendezvous"):
        agent.main(["train.py"])
    assert (folder.parent / "port-taken").exists() is is_taken
    assert json.loads((folder / "failures.json").read_text()) == {
        "agent": "RuntimeError: rendezvous"
    }


def test_an_agent_dies_with_its_supervisor_and_loses_no_output(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ties: list[str] = []
    monkeypatch.setattr(agent, "die_with_parent", lambda: ties.append("parent"))
    monkeypatch.setattr(agent, "launch", lambda argv, place, server: None)
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        out.write("to the end")
        err.write("to the end")
        with pytest.raises(LeftError):
            agent.main(["train.py"])
        assert (folder / "out").read_text() == (folder / "err").read_text() == "to the end"
    assert ties == ["parent"]


def test_a_failure_has_rank_code_and_time() -> None:
    failure = SimpleNamespace(exitcode=-9, timestamp=5.0)
    assert agent._failure(3, failure) == {"rank": 3, "code": -9, "time": 5.0}


# --- the rendezvous ------------------------------------------------------------------------


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
        agent.sign_state(b"the attempt's secret")
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
    agent.rank_in_order(hosts)
    agent.sign_state(b"the attempt's secret")
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
        agent.leave_sources_alone()
    handler = rendezvous("127.0.0.1")
    handler.next_rendezvous()
    handler.shutdown()
    assert {"DynamicRendezvousHandler.next_rendezvous", "_DistributedRendezvousOpExecutor.run"} <= {
        *names
    }
    assert bool(looks) is not patched


def test_torchrun_takes_no_option_from_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: list[list[str]] = []

    def launch(argv: list[str], place: Place, server: None) -> None:
        options.append([name for name in os.environ if name.startswith("PET_")])

    monkeypatch.setenv("PET_NO_PYTHON", "1")
    monkeypatch.setattr(agent, "launch", launch)
    with pytest.raises(LeftError):
        agent.main(["train.py"])
    assert options == [[]]
