"""What is changed in torchrun: each change by itself, with stand-ins for torchrun's own parts."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from hpc_ddp.node import agent
from hpc_ddp.node.worker import started_by
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
    monkeypatch.setattr(agent, "ignore_sigterm", lambda: changes.append("SIGTERM"))
    monkeypatch.setattr(agent, "end_when_told", lambda node: changes.append(node.path.name))
    monkeypatch.setattr(agent, "count_the_lost", lambda: changes.append("lost"))
    words = [*TORCHRUN, *options, "train.py", "--cost=$5"]
    assert agent.launch(words, NodeFolder(tmp_path / "n1")) is None
    script = started_by(sys.executable, ["train.py", "--cost=$$5"])
    assert starts[0] == [sys.executable, *script[1:]]
    assert changes == ["SIGTERM", "n1", *["lost"] * counts]
    for rank, code in ((1, 3), (0, -9)):
        failures[rank] = ProcessFailure(0, 1, code, "none")
        failures[rank].timestamp = 5
    ended = agent.launch(words, NodeFolder(tmp_path / "n1"))
    assert ended == {
        "failures": [{"rank": 0, "code": -9, "time": 5}, {"rank": 1, "code": 3, "time": 5}]
    }


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


def test_an_agent_dies_with_its_supervisor_and_loses_no_output(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ties: list[str] = []
    monkeypatch.setattr(agent, "die_with_parent", lambda: ties.append("parent"))
    monkeypatch.setattr(agent, "launch", lambda argv, node: None)
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        out.write("to the end")
        err.write("to the end")
        with pytest.raises(LeftError):
            agent.main(["train.py"])
        assert (folder / "out").read_text() == (folder / "err").read_text() == "to the end"
    assert ties == ["parent"]


def test_a_failure_of_a_worker_as_it_is_told() -> None:
    failure = SimpleNamespace(exitcode=-9, timestamp=5.0)
    assert agent._failure(3, failure) == {"rank": 3, "code": -9, "time": 5.0}
