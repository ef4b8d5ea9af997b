"""A node checks itself, and answers the driver's questions in order."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hpc_ddp.core.process import NOTICE_SIGNALS
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.net import fabric_lookup, interface
from hpc_ddp.node.net.place import Place
from hpc_ddp.node.preflight import agent_link, bandwidth, checks
from hpc_ddp.node.preflight.checks import UnfitError
from hpc_ddp.node.preflight.messages import report
from unit.node.preflight.fakes import Lines


def _place(*nodes: str, index: int = 0) -> Place:
    run = RunFolder(Path("/r/name/run"))
    return Place(run, run.attempt(0), nodes or ("n1", "n2"), index, "", None, 0.0, None)


# --- the node itself -----------------------------------------------------------------------


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """The addresses of this node's interfaces; eth0 is the one to the others."""
    addresses: dict[str, str | None] = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": None}
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(addresses, 1)))
    monkeypatch.setattr(interface, "address_of", addresses.get)
    monkeypatch.setattr(Place, "chosen_interface", "eth0")
    monkeypatch.setattr(interface, "has_ipv6", lambda name: False)
    return addresses


def test_the_interface_has_an_address(
    interfaces: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checks.check_interface(_place()) == {"interface": "eth0", "address": "10.0.0.1"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert checks.check_interface(_place()) == {"interface": "lo", "address": "127.0.0.1"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    with pytest.raises(UnfitError, match="the interface ib0 has no address"):
        checks.check_interface(_place())
    monkeypatch.setattr(interface, "has_ipv6", lambda name: name == "ib0")
    assert checks.check_interface(_place()) == {"interface": "ib0", "address": None}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib1")
    with pytest.raises(UnfitError, match="there is no interface 'ib1', only lo, eth0, ib0"):
        checks.check_interface(_place())


def test_only_a_node_among_others_needs_an_interface(
    interfaces: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Place, "chosen_interface", None)
    assert checks.check_interface(_place("n1")) == {}
    with pytest.raises(UnfitError, match="no interface leads to n2"):
        checks.check_interface(_place())


def test_the_interconnect_is_checked_on_several_nodes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    result = [fabric_lookup.Interconnect("infiniband", ("a", "b"))]
    monkeypatch.setattr(fabric_lookup, "find_fabric", lambda: result[0])
    assert checks.check_interconnect(_place()) == {"fabric": "infiniband", "cards": 2}
    result[0] = fabric_lookup.Interconnect("", (), "no port is active")
    assert checks.check_interconnect(_place()) == {
        **{"fabric": None, "cards": 0, "note": "fabric: no port is active"}
    }
    assert checks.check_interconnect(_place("n1")) == {}
    assert checks.check_interconnect(_place("local-0", "local-1")) == {}


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_space_in_tmpdir_and_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = checks.TMPDIR_BYTES
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: Usage(2 * free, 0, free))  # type: ignore[attr-defined]
    assert checks.try_tmpdir(tmp_path) == {"tmpdir": str(tmp_path), "tmpdir_free": free}
    assert checks.try_run_folder(_place(), tmp_path, "secret", free) == {"scratch_free": free}
    assert (tmp_path / "n1").read_text() == "secret"
    with pytest.raises(UnfitError, match="the run folder has 67 MB free, and needs 68 MB"):
        checks.try_run_folder(_place(), tmp_path, "secret", free + 500_000)
    monkeypatch.setattr(checks, "TMPDIR_BYTES", free + 1)
    with pytest.raises(UnfitError, match="has only 67 MB free"):
        checks.try_tmpdir(tmp_path)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: Usage(0, 0, 0))  # type: ignore[attr-defined]
    assert checks.try_tmpdir(tmp_path)["tmpdir_free"] == 0  # a disk that reports no sizes
    assert checks.try_run_folder(_place(), tmp_path, "secret", 1) == {"scratch_free": 0}


def test_missing_folders_are_faults(tmp_path: Path) -> None:
    with pytest.raises(UnfitError, match="can't be written: No such file"):
        checks.try_tmpdir(tmp_path / "gone")
    with pytest.raises(UnfitError, match="can't write in the run folder /r/name/run: No such file"):
        checks.try_run_folder(_place(), tmp_path / "gone", "secret", 1)


def test_a_full_tmpdir_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk tells only when the bytes go there."""

    class Full(io.BytesIO):
        def flush(self) -> None:
            if self.getbuffer().nbytes >= 1 << 20:
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checks.tempfile, "TemporaryFile", lambda dir: Full())  # type: ignore[attr-defined]
    with pytest.raises(UnfitError, match="can't be written: No space left on device"):
        checks.try_tmpdir(tmp_path)


def test_a_machine_may_have_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> tuple[float, float, float]:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", lambda: (4.84, 50.0, 50.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert checks.read_load() == {"load": 1.2}
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert checks.read_load() == {"load": 4.8}
    monkeypatch.setattr(os, "getloadavg", refuse)
    assert checks.read_load() == {}


def test_a_check_reports_values_a_note_or_a_fault(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(place: Place) -> dict[str, Any]:
        raise UnfitError("x is y")

    monkeypatch.setattr(checks, "read_load", lambda: {"load": 1.0})
    monkeypatch.setattr(checks, "check_interface", broken)
    monkeypatch.setattr(checks, "check_interconnect", lambda place: {"cards": 1, "note": "odd"})
    for name in ("count_gpus", "try_tmpdir", "try_run_folder"):
        monkeypatch.setattr(checks, name, lambda *words: {})
    checks.check_node(_place(), checks.Order([], "/f", "s", gpus=0, needed=1, port=4, again=False))
    assert [line for line in lines() if line != {"values": {}}] == [
        {"values": {"load": 1.0}},
        {"fault": "interface", "why": "x is y"},
        {"note": "odd"},
        {"values": {"cards": 1}},
    ]


# --- the order of its answers --------------------------------------------------------------


class LeftError(Exception):
    """The process would have ended here, with a code."""


Handlers = dict[int, Callable[[int, None], None]]
Answer = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> Handlers:
    """The signal handlers that are set, instead of the test's own."""
    handlers: Handlers = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    return handlers


@pytest.fixture
def answer(
    interfaces: dict[str, str | None],
    handlers: Handlers,
    lines: Lines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Answer:
    """Answer questions as one of two nodes; return the messages. Its torch is a stand-in."""

    def leave(code: int) -> None:
        raise LeftError(code)

    def check_partners(place: Place, ports: Mapping[str, int], folder: Path, secret: str) -> None:
        report(note=f"partners {ports} {folder.name} {secret}")

    def import_torch() -> str:
        report(stage="torch", values={name: os.environ.get(name) for name in NETWORK})
        return "torch"

    def run(torch: str, node: str, server: socket.socket, group: bandwidth.Group) -> None:
        with server:
            values = group._asdict()
            report(stage="exchange", values=values | {"held": server.getsockname()[1]})

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "CCL_KVS_IFACE"):
        monkeypatch.setenv(name, "")  # is set anew
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(checks, "check_node", lambda place, order: report(note="node"))
    monkeypatch.setattr(checks, "check_partners", check_partners)
    monkeypatch.setattr(bandwidth, "import_torch", import_torch)
    monkeypatch.setattr(bandwidth, "measure_group", run)
    monkeypatch.setattr(
        fabric_lookup, "find_fabric", lambda: fabric_lookup.Interconnect("efa", ("a",))
    )

    def call(*questions: Any) -> list[dict[str, Any]]:
        # Without the attempt's file, as where the node's disk is another one.
        environ = {"RUN": tmp_path, "ATTEMPT": 0, "NODE_INDEX": 0}
        for name, value in environ.items():
            monkeypatch.setenv(f"HPC_DDP_{name}", str(value))
        text = "".join(json.dumps(question) + "\n" for question in questions)
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        with pytest.raises(LeftError, match=r"^0$"):
            checks.main([])
        return lines()

    return call


NETWORK = ("GLOO_SOCKET_IFNAME", "MARKED")
ORDER = {"nodes": ["n1", "n2"], "folder": "/x/shared", "secret": "secret", "gpus": 2, "needed": 5}
ORDER |= {"port": 0, "again": False}
FIT = {"missing": [], "ports": {"n1": 4, "n2": 5}}
GO = {
    "members": ["n1", "n2"],
    "host": "h",
    "port": 5,
    "device": "cpu",
    "first": 1,
    "timeout_s": 9.0,
}


def test_a_node_answers_each_question(
    answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib = RunFolder(tmp_path).lib
    lib.mkdir()
    (lib / fabric_lookup.TABLE).write_text('{"efa": {"MARKED": "1"}}')
    for name in (*NETWORK, "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_CONF_FILE"):
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("HPC_DDP_FABRIC", "auto")
    begin, node, local, partners, *messages = answer(ORDER, FIT, {}, GO)
    assert begin == {"stage": "start"}
    assert (node, local["stage"]) == ({"note": "node"}, "local")
    contact = local["contact"]
    assert contact["host"] == "n1"
    assert contact["store_port"] != contact["port"]
    assert partners == {"note": "partners {'n2': 5, 'n1': 4} shared secret"}
    assert messages == [
        {"stage": "partners"},
        {"stage": "torch", "values": {"GLOO_SOCKET_IFNAME": "eth0", "MARKED": "1"}},
        {"stage": "exchange", "values": {**GO, "held": contact["store_port"]}},
    ]


def test_an_unfit_node_leaves_out_the_others(answer: Answer) -> None:
    messages = answer(ORDER, {"missing": ["n1"], "ports": {}}, {}, {**GO, "members": ["n2"]})
    assert [line["stage"] for line in messages if "stage" in line] == [
        "start",
        "local",
        "partners",
        "torch",
    ]
    assert not any("partners" in line.get("note", "") for line in messages)


@pytest.mark.parametrize("count", range(4))
def test_a_node_without_a_further_question_leaves(answer: Answer, count: int) -> None:
    questions = [ORDER, FIT, {}][:count]
    stages = [line["stage"] for line in answer(*questions) if "stage" in line]
    assert stages == ["start", "local", "partners", "torch"][: count and count + 1]


def test_torchruns_agent_answers_the_rest(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    sockets: list[int] = []

    answers = iter([True, False, False])

    def pass_dialogue(place: Place, store_socket: socket.socket) -> bool:
        sockets.append(store_socket.getsockname()[1])
        return next(answers)

    monkeypatch.setattr(agent_link, "pass_dialogue", pass_dialogue)
    monkeypatch.setenv("HPC_DDP_PREFLIGHT_SHELL", "77")
    messages = answer(ORDER, FIT, {})
    stages = {line["stage"]: line for line in messages if "stage" in line}
    assert [*stages] == ["start", "local", "partners"]
    assert sockets == [stages["local"]["contact"]["store_port"]]
    for question, last in (({"fit": False}, "partners"), ({}, "torch")):  # it does not come
        assert answer(ORDER, FIT, question)[-1]["stage"] == last


def test_a_node_without_torch_measures_nothing(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "import_torch", lambda: None)
    messages = answer(ORDER, FIT, {}, GO)
    assert messages[-1] == {"stage": "partners"}


def test_a_notice_is_passed_on(answer: Answer, handlers: Handlers, lines: Lines) -> None:
    answer()
    assert handlers.keys() == {*NOTICE_SIGNALS}
    for number, handler in handlers.items():
        with pytest.raises(LeftError, match=r"^0$"):
            handler(number, None)
    names = [line["notice"] for line in lines()]
    assert sorted(names) == sorted(number.name for number in NOTICE_SIGNALS)
