"""The changes to torchrun are tested one by one, with stand-ins for torchrun's own parts."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
)

from hpc_ddp.core.job.attempt_folder import NodeFolder
from hpc_ddp.core.process import NOTICE_SIGNALS
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node import elastic_agent as agent
from hpc_ddp.node.net import elastic_rendezvous, fixed_rendezvous
from hpc_ddp.node.net.place import Place
from hpc_ddp.node.workers.worker import worker_command


class LeftError(Exception):
    """The process would have ended here, with a code."""


def test_dollars_are_doubled_for_torchrun() -> None:
    assert agent.escape_dollars(["a$b", "${x}", "c"]) == ["a$$b", "$${x}", "c"]


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


def test_restarts_are_counted_by_the_rounds_of_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those for which another node's workers had failed, and by a node that joins late."""
    counts: list[int] = []

    def start_workers(self: Any, group: Any) -> dict[int, int]:
        counts.append(group.spec.max_restarts - self._remaining_restarts)
        return {0: 7}

    monkeypatch.setattr(LocalElasticAgent, "_start_workers", start_workers)
    agent.count_rounds()
    handler = SimpleNamespace(joined_round=2)
    group = SimpleNamespace(spec=SimpleNamespace(max_restarts=1, rdzv_handler=handler))
    node: Any = SimpleNamespace(_remaining_restarts=1)
    start: Any = LocalElasticAgent._start_workers
    assert start(node, group) == {0: 7}
    assert (counts, node._remaining_restarts) == ([2], 1)


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

ELASTIC = ["--rdzv-conf=join_timeout=600,last_call_timeout=120"]
TORCHRUN = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=7"]


@pytest.mark.parametrize(
    ("options", "is_elastic", "shares"),
    [
        ([*ELASTIC, "--nnodes=1:2", "--max-restarts=3"], True, "1"),
        # With its least number it is elastic, too: Slurm ends no step of it for a lost node.
        ([*ELASTIC, "--nnodes=2:2", "--max-restarts=3"], True, "1"),
        (["--nnodes=2", "--max-restarts=0"], False, ""),
    ],
)
def test_torchrun_is_started_as_changed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    is_elastic: bool,
    shares: str,
) -> None:
    changes: list[Any] = []
    starts: list[list[str]] = []
    failures: dict[int, Any] = {}

    def elastic_launch(config: Any, entrypoint: str) -> Callable[..., None]:
        assert config.max_nodes == 2

        def start(*words: str) -> None:
            starts.append([entrypoint, *words])
            assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == shares
            assert os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] == shares
            if failures:
                raise ChildFailedError("t.py", failures)

        return start

    for name in ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_ELASTIC_WORKER_IDENTICAL"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", elastic_launch)
    monkeypatch.setattr(agent, "replace_signal_handler", lambda: changes.append("SIGTERM"))
    monkeypatch.setattr(agent, "end_after_notice", lambda node: changes.append(node.path.name))
    monkeypatch.setattr(agent, "count_rounds", lambda: changes.append("count"))
    for module in (elastic_rendezvous, fixed_rendezvous):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(
            module, "patch_torchrun", lambda *place, n=name: changes.append((n, *place))
        )
    words = [*TORCHRUN, *options, "train.py", "--cost=$5"]
    run = RunFolder(tmp_path)
    run.claim_attempt({"nodes": ["n2", "n10"]}, lambda identity: False)
    place = Place.from_env({"HPC_DDP_RUN": str(run.path), **ATTEMPT})
    assert agent.launch(words, place) is None
    script = worker_command(sys.executable, ["train.py", "--cost=$$5"])
    assert starts[0] == [sys.executable, *script[1:]]
    secret = place.attempt.secret.read_bytes()
    place_of_node = () if is_elastic else (1,)
    rendezvous = ("elastic_rendezvous" if is_elastic else "fixed_rendezvous", *place_of_node)
    assert changes == ["SIGTERM", "n10", "count", (*rendezvous, ["n2-ib", "n10-ib"], secret)]
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


@pytest.mark.parametrize("is_fit", [True, False])
def test_the_training_waits_for_the_preflight(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_fit: bool
) -> None:
    calls: list[str] = []

    def launch(argv: list[str], place: Place, server: None) -> None:
        calls.append("launch")

    def await_outcome(place: Place) -> bool:
        calls.append(f"preflight of {place.node}")
        return is_fit

    monkeypatch.setattr(agent, "launch", launch)
    monkeypatch.setattr(agent, "await_outcome", await_outcome)
    monkeypatch.setenv("HPC_DDP_PREFLIGHT_SHELL", "77")
    with pytest.raises(LeftError, match="0" if is_fit else "1"):
        agent.main(["train.py"])
    assert calls == ["preflight of n10", "launch"][: 1 + is_fit]


def test_a_preflight_names_the_node_on_which_torch_can_not_be_imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_server(argv: list[str]) -> None:
        raise ImportError("libtorch.so")

    monkeypatch.setattr(agent, "start_server", start_server)
    monkeypatch.setattr(agent, "await_outcome", lambda place: False)
    with pytest.raises(ImportError):
        agent.main(["train.py"])
    monkeypatch.setenv("HPC_DDP_PREFLIGHT_SHELL", "77")
    with pytest.raises(LeftError, match="1"):
        agent.main(["train.py"])


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
