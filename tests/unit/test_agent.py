"""What is changed in torchrun: each change by itself, with stand-ins for torchrun's own parts."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from hpc_ddp.node import agent
from hpc_ddp.run.folder import NodeFolder


class LeftError(Exception):
    """The process would have ended here, with a code."""


def test_dollars_are_doubled_for_torchrun() -> None:
    assert agent.escape(["a$b", "${x}", "c"]) == ["a$$b", "$${x}", "c"]


def test_torchrun_outlives_sigterm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(
        api, "_terminate_process_handler", lambda number, frame: calls.append(number)
    )
    agent.ignore_sigterm()
    for number in (signal.SIGTERM, signal.SIGINT):
        api._terminate_process_handler(number, None)
    assert calls == [signal.SIGINT]


def test_workers_are_not_started_again_after_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(
        SimpleElasticAgent, "_restart_workers", lambda handler, group: calls.append(group)
    )
    node, handler = NodeFolder(tmp_path), Any
    agent.end_when_told(node)
    restart: Any = SimpleElasticAgent._restart_workers
    restart(handler, "group")
    node.notice.write_text("SIGTERM")
    with pytest.raises(agent.EndingError, match="the workers failed after a notice"):
        restart(handler, "again")
    assert calls == ["group"]


def test_a_node_that_is_lost_counts_as_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DynamicRendezvousHandler, "num_nodes_waiting", lambda handler: 1)
    info = SimpleNamespace(world_size=3)
    monkeypatch.setattr(DynamicRendezvousHandler, "next_rendezvous", lambda handler: info)
    agent.count_the_lost()
    timeout, state = SimpleNamespace(_last_call=None), SimpleNamespace(participants=["a", "b"])
    handler: Any = SimpleNamespace(
        _settings=SimpleNamespace(timeout=timeout), _state_holder=SimpleNamespace(state=state)
    )
    assert DynamicRendezvousHandler.next_rendezvous(handler) is info  # type: ignore[comparison-overlap]
    assert timeout._last_call == timedelta(seconds=15)
    assert DynamicRendezvousHandler.num_nodes_waiting(handler) == 2
    state.participants.append("c")
    assert DynamicRendezvousHandler.num_nodes_waiting(handler) == 1


def test_torchruns_options_are_read_by_torchrun() -> None:
    args = agent.read_options(["--nnodes=1:2", "--max-restarts=3"])
    assert (args.nnodes, args.max_restarts, args.no_python) == ("1:2", 3, True)
    with pytest.raises(ValueError, match=r"^unrecognized arguments: --no-such-option=1"):
        agent.read_options(["--no-such-option=1"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A node's folder in an attempt; the process neither ends nor depends on its parent."""

    def leave(code: int) -> None:
        raise LeftError(code)

    before = signal.getsignal(signal.SIGTERM)
    folder = tmp_path / "attempt-0" / "n1"
    folder.mkdir(parents=True)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(agent, "die_with_parent", lambda: None)
    monkeypatch.setenv("HPC_DDP_NODE_FOLDER", str(folder))
    monkeypatch.setenv("HPC_DDP_AGENT_PID", "")
    yield folder
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("ended", "code"), [(None, "0"), ({"failures": [{"rank": 0, "code": 3, "time": 1.0}]}, "1")]
)
def test_which_workers_failed_is_written_down(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ended: dict[str, Any] | None, code: str
) -> None:
    monkeypatch.setattr(agent, "launch", lambda argv, node: ended)
    with pytest.raises(LeftError, match=code):
        agent.main(["train.py"])
    path = folder / "failures.json"
    assert (json.loads(path.read_text()) if path.exists() else None) == ended
    assert os.environ["HPC_DDP_AGENT_PID"] == str(os.getpid())
    os.kill(os.getpid(), signal.SIGTERM)  # does nothing


@pytest.mark.parametrize(("text", "taken"), [("EADDRINUSE: port 5", True), ("no store", False)])
def test_a_port_that_is_taken_is_marked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, taken: bool
) -> None:
    def launch(argv: list[str], node: NodeFolder) -> None:
        raise RuntimeError("rendezvous") from OSError(text)

    monkeypatch.setattr(agent, "launch", launch)
    with pytest.raises(RuntimeError, match="rendezvous"):
        agent.main(["train.py"])
    assert (folder.parent / "port-taken").exists() is taken
    assert json.loads((folder / "failures.json").read_text()) == {
        "agent": "RuntimeError: rendezvous"
    }


def test_a_failure_of_a_worker_as_it_is_told() -> None:
    failure = SimpleNamespace(exitcode=-9, timestamp=5.0)
    assert agent._failure(3, failure) == {"rank": 3, "code": -9, "time": 5.0}
