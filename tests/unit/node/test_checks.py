"""What one node finds out about itself, and about its way to the others."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from fakes import Clock, stop_clock

from hpc_ddp.core.accelerators import device_files
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node import bandwidth, checks
from hpc_ddp.node.bandwidth import Meter, measure, turns
from hpc_ddp.node.checks import UnfitError, Way
from hpc_ddp.node.net import fabric, network
from hpc_ddp.node.net.place import Place
from hpc_ddp.node.supervisor import NOTICE_SIGNALS
from tests.waiting import wait_until


def _place(*nodes: str, index: int = 0) -> Place:
    run = RunFolder(Path("/r/name/run"))
    return Place(run, run.attempt(0), nodes or ("n1", "n2"), index, "", None, 0.0, None)


Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Lines:
    """Return what has been told since the last call, without the node's name."""
    monkeypatch.setenv("HPC_DDP_NODE", "n1")

    def read() -> list[dict[str, Any]]:
        texts = [line.removeprefix(checks.MARK) for line in capfd.readouterr().out.splitlines()]
        return [{k: v for k, v in json.loads(text).items() if k != "node"} for text in texts]

    return read


# --- the node itself -----------------------------------------------------------------------


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """The addresses of this node's interfaces; eth0 is the one to the others."""
    addresses: dict[str, str | None] = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": None}
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(addresses, 1)))
    monkeypatch.setattr(network, "address_of", addresses.get)
    monkeypatch.setattr(Place, "chosen_interface", "eth0")
    monkeypatch.setattr(checks, "_has_ipv6", lambda name: False)
    return addresses


def test_the_interface_has_an_address(
    interfaces: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checks.interface(_place()) == {"interface": "eth0", "address": "10.0.0.1"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert checks.interface(_place()) == {"interface": "lo", "address": "127.0.0.1"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    with pytest.raises(UnfitError, match="the interface ib0 has no address"):
        checks.interface(_place())
    monkeypatch.setattr(checks, "_has_ipv6", lambda name: name == "ib0")
    assert checks.interface(_place()) == {"interface": "ib0", "address": None}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib1")
    with pytest.raises(UnfitError, match="there is no interface 'ib1', only lo, eth0, ib0"):
        checks.interface(_place())


def test_only_a_node_among_others_needs_an_interface(
    interfaces: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Place, "chosen_interface", None)
    assert checks.interface(_place("n1")) == {}
    with pytest.raises(UnfitError, match="no interface leads to n2"):
        checks.interface(_place())


def test_an_address_of_ipv6_counts_beyond_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "if_inet6").write_text(
        "fe800000000000000000000000000001 02 40 20 80     eth0\n"
        "fd000000000000000000000000000001 03 40 00 80      ib0\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr(checks, "Path", lambda text: tmp_path / Path(text).name)
        assert [checks._has_ipv6(name) for name in ("eth0", "ib0", "lo")] == [False, True, False]
        patch.setattr(checks, "Path", lambda text: tmp_path / "none")
        assert checks._has_ipv6("ib0") is False


def test_the_interconnect_of_a_node_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    result = [fabric.Found("infiniband", ("a", "b"))]
    monkeypatch.setattr(fabric, "look", lambda: result[0])
    assert checks.interconnect(_place()) == {"fabric": "infiniband", "cards": 2}
    result[0] = fabric.Found("", (), "no port is active")
    assert checks.interconnect(_place()) == {
        **{"fabric": None, "cards": 0, "note": "fabric: no port is active"}
    }
    assert checks.interconnect(_place("n1")) == {}
    assert checks.interconnect(_place("local-0", "local-1")) == {}


NVIDIA, AMD, INTEL = ({name: 4} for name in ("NVIDIA", "AMD", "Intel"))
CUDA, ROCR, ZE = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"
FOUR = {"gpus": 4, "gpus_there": 4}


@pytest.mark.parametrize(
    ("asked", "environ", "listed", "files", "expected"),
    [
        (2, {CUDA: "0,1"}, None, {}, {"gpus": 2, "note": "only CUDA"}),
        (0, {CUDA: "0,1"}, None, {}, {"gpus": 2}),
        (1, {CUDA: "0"}, 0, NVIDIA, "0 GPUs in place of 1 .by nvidia-smi"),
        (2, {ROCR: "0"}, None, AMD, "1 GPUs in place of 2 .by ROCR_VISIBLE"),
        (2, {ROCR: "0,1", "HIP_VISIBLE_DEVICES": "0"}, None, AMD, "1 GPUs .* .by HIP_VISIBLE"),
        (2, {ROCR: "0", ZE: "0"}, None, NVIDIA, FOUR),  # those of other vendors don't count
        (1, {CUDA: ""}, None, {}, "0 GPUs in place of 1 .by CUDA_VISIBLE"),
        (1, {CUDA: "NoDevFiles"}, None, {}, "0 GPUs in place of 1 .by CUDA_VISIBLE"),
        (2, {CUDA: "0,-1,1"}, None, NVIDIA, "1 GPUs in place of 2"),
        (2, {"ASCEND_RT_VISIBLE_DEVICES": "3"}, None, {"Ascend": 8}, "1 GPUs in place of 2"),
        (2, {ZE: "0.0,0.1"}, None, {"Intel": 1}, {"gpus": 2, "gpus_there": 1}),
        (3, {ZE: "0.0,0.1,1.0"}, None, {"Intel": 1}, "2 GPUs in place of 3 .by nvidia-smi and dev"),
        (4, {ZE: "", CUDA: "0"}, None, INTEL, FOUR),  # an empty mask hides nothing
        (4, {"ONEAPI_DEVICE_SELECTOR": "level_zero:gpu"}, None, INTEL, FOUR),
        (4, {"ONEAPI_DEVICE_SELECTOR": "level_zero:0,2"}, None, INTEL, "2 GPUs in place of 4"),
        (4, {}, None, {"Intel": 1, "NVIDIA": 4}, FOUR),  # one is on the main board
        (4, {}, 4, {"NVIDIA": 2}, FOUR),
        (4, {}, None, NVIDIA, FOUR),
        (1, {}, None, {}, {"gpus": None, "note": "can't tell whether there are 1 GPUs"}),
        (0, {}, None, {}, {"gpus": 0}),
        (0, {}, None, INTEL, {"gpus": 4}),  # a display's: torch need not see it
        (4, {"HIP_VISIBLE_DEVICES": ""}, None, AMD, FOUR),
        (4, {"ONEAPI_DEVICE_SELECTOR": "!level_zero:0"}, None, INTEL, FOUR),
        (8, {}, None, {"AMD": 1}, {"gpus": 8, "gpus_there": 1}),  # one in partitions
    ],
)
def test_gpus_by_what_tells_of_them(
    asked: int,
    environ: dict[str, str],
    listed: int | None,
    files: dict[str, int],
    expected: dict[str, Any] | str,
) -> None:
    if isinstance(expected, str):
        with pytest.raises(UnfitError, match=expected):
            checks.gpus(asked, environ, listed, files)
        return
    result = checks.gpus(asked, environ, listed, files)
    note = result.pop("note", "")
    assert bool(note) is ("note" in expected)
    assert note.startswith(expected.get("note", ""))
    assert result == {key: value for key, value in expected.items() if key != "note"}


@pytest.mark.parametrize(
    ("script", "result"),
    [
        (None, None),
        ("echo 'GPU 0: a'; echo ' MIG'; echo 'GPU 1: a'", 2),
        ("echo 'GPU 0: a'; echo '  MIG 1g: a'; echo '  MIG 1g: a'", 2),
        ("echo; echo broken >&2; echo more; exit 9", "nvidia-smi: more"),
        ("exit 9", "nvidia-smi: exit code 9"),
        ("exec sleep 60", "nvidia-smi gave no answer within 0 s"),
    ],
)
def test_nvidia_smi_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, result: str | int | None
) -> None:
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if script else str(tmp_path))
    monkeypatch.setattr(checks, "GPU_S", 0.3 if script and "sleep" in script else 60.0)
    if isinstance(result, str):
        with pytest.raises(UnfitError, match=result):
            checks._nvidia_smi()
    else:
        assert checks._nvidia_smi() == result


def test_gpus_are_looked_for_where_some_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int | None]] = []
    files: dict[str, int] = {}
    monkeypatch.setattr(checks, "_nvidia_smi", lambda: 4)
    monkeypatch.setattr(checks, "device_files", lambda: files)
    monkeypatch.setattr(
        checks, "gpus", lambda asked, env, listed, files: calls.append((asked, listed))
    )
    checks._check_gpus(_place(), 4)
    checks._check_gpus(_place(), 0)
    assert checks._check_gpus(_place("local-0"), 4) == {}
    files["AMD"] = 4
    checks._check_gpus(_place(), 4)  # an nvidia-smi of an image for all nodes fails there
    assert calls == [(4, 4), (0, None), (4, None)]


def test_device_files_belong_to_the_vendor_of_the_device(tmp_path: Path) -> None:
    vendors = {"renderD128": "0x1002", "renderD129": "0x1002", "renderD130": "0x8086"}
    names = ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "davinci3", "davinci_manager")
    for name in (*names, *(f"dri/{name}" for name in (*vendors, "renderD131"))):
        (tmp_path / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev" / name).touch()
    assert device_files(tmp_path) == {"NVIDIA": 3, "Ascend": 1}
    for name, number in vendors.items():
        folder = tmp_path / "sys/class/drm" / name / "device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{number}\n")
    assert device_files(tmp_path) == {"NVIDIA": 3, "AMD": 2, "Intel": 1, "Ascend": 1}
    assert device_files(tmp_path / "none") == {}


def test_space_is_compared_with_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage(NamedTuple):
        free: int

    free = checks.TMPDIR_BYTES
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: Usage(free))  # type: ignore[attr-defined]
    assert checks.tmpdir(tmp_path) == {"tmpdir": str(tmp_path), "tmpdir_free": free}
    assert checks.space(tmp_path, free) == {"scratch_free": free}
    with pytest.raises(UnfitError, match="the run folder has 67 MB free, and needs 68 MB"):
        checks.space(tmp_path, free + 500_000)
    monkeypatch.setattr(checks, "TMPDIR_BYTES", free + 1)
    with pytest.raises(UnfitError, match="has only 67 MB free"):
        checks.tmpdir(tmp_path)


def test_a_tmpdir_that_is_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk tells only when the bytes go there."""

    class Full(io.BytesIO):
        def flush(self) -> None:
            if self.getbuffer().nbytes >= 1 << 20:
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checks.tempfile, "TemporaryFile", lambda dir: Full())  # type: ignore[attr-defined]
    with pytest.raises(UnfitError, match="can't be written: No space left on device"):
        checks.tmpdir(tmp_path)


def test_a_run_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnfitError, match="the run folder is not there: No such file"):
        checks.space(tmp_path / "gone", 1)


def test_a_check_tells_what_it_finds(lines: Lines) -> None:
    def broken() -> dict[str, Any]:
        raise UnfitError("x is y")

    checks._look("a", lambda: {"x": 1})
    checks._look("b", lambda: {"x": 1, "note": "odd"})
    checks._look("c", broken)
    assert lines() == [
        {"values": {"x": 1}},
        {"values": {"x": 1}},
        {"note": "odd"},
        {"bad": "c", "why": "x is y"},
    ]


# --- the way to the others -----------------------------------------------------------------


def test_a_connection_that_is_closed_in_the_middle() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            peer, _ = server.accept()
            with peer, peer.makefile("rb") as received:
                received.readline()
                peer.sendall(b"b\n")
                received.readline()
                peer.sendall(b"0\n")
                received.read(checks.PAYLOAD)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError, match="closed in the middle"):
            checks.reach("b", "127.0.0.1", server.getsockname()[1], "secret")
        thread.join()


def test_a_clock_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = checks.Listener("b", "secret")
    clock = Clock(5000.0)
    here = threading.current_thread()
    monkeypatch.setattr(
        clock, "time", lambda: 5000.0 if here is threading.current_thread() else 5007.5
    )
    monkeypatch.setattr(checks, "time", clock)
    assert checks.reach("b", "127.0.0.1", listener.port, "secret") == 7.5
    listener.close()


def _connect(listener: checks.Listener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", listener.port), timeout=60)


def test_a_listener_that_is_closed_answers_nobody() -> None:
    before = set(threading.enumerate())
    listener = checks.Listener("b", "secret")
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon  # it keeps no process alive
    listener.close()
    thread.join()
    with pytest.raises(ConnectionRefusedError):
        _connect(listener)
    assert listener._socket.fileno() == -1


def test_each_listener_has_a_port_of_its_own() -> None:
    listeners = [checks.Listener("b", "secret") for _ in range(2)]
    assert listeners[0].port != listeners[1].port
    for listener in listeners:
        listener.close()


def test_who_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "LINK_S", 0.1)
    listener = checks.Listener("b", "secret")
    with _connect(listener) as peer:
        assert peer.recv(1) == b""
    listener.close()


def test_the_time_is_that_of_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(5000.0)
    monkeypatch.setattr(checks, "time", clock)
    listener = checks.Listener("b", "secret")
    with _connect(listener) as peer, peer.makefile("rb") as lines:
        peer.sendall(b"secret\n")
        assert lines.readline() == b"b\n"
        clock.now = 6000.0
        peer.sendall(b"\n")
        assert float(lines.readline()) == 6000.0
    listener.close()


@pytest.mark.parametrize(
    ("addresses", "loopback"),
    [
        (["127.0.1.1"], True),
        (["::1", "127.0.0.1"], True),
        (["127.0.0.1", "10.0.0.1"], False),
        (["fe80::1%eth0"], False),
    ],
)
def test_what_is_loopback(addresses: list[str], loopback: bool) -> None:
    assert checks.is_loopback(addresses) is loopback


def test_a_name_has_each_address_once() -> None:
    assert checks.addresses_of("127.0.0.1") == ["127.0.0.1"]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str] | Exception]:
    """What names resolve to here; links lead to 10.0.0.2 alone, whose clock is ahead."""
    known: dict[str, list[str] | Exception] = {"n1": ["10.0.0.1"], "n2": ["10.0.0.2"]}

    def resolve(host: str) -> list[str]:
        addresses = known[host]
        if isinstance(addresses, Exception):
            raise addresses
        return addresses

    def reach(node: str, address: str, port: int, secret: str) -> float:
        if address != "10.0.0.2":
            raise TimeoutError("timed out")
        assert (node, port, secret) == ("n2", 5, "secret")
        return 1.23456

    monkeypatch.setattr(checks, "addresses_of", resolve)
    monkeypatch.setattr(checks, "reach", reach)
    return known


@pytest.mark.parametrize(
    ("node", "address", "port", "first", "expected"),
    [
        ("n2", ["10.0.0.2"], 5, "n1", []),
        ("n2", ["10.0.0.2"], 5, "n2", [{"values": {"clock_s": -1.235}}]),
        ("n2", ["10.0.0.2"], None, "n2", []),
        ("n1", ["10.0.0.1"], 5, "n1", []),
        (
            *("n2", ["10.0.0.9"], 5, "n1"),
            [{"pair": "n2", "check": "link", "address": "10.0.0.9"}],
        ),
        ("n2", ["127.0.1.1"], 5, "n1", [{"pair": "n2", "check": "name"}]),
        ("n1", ["127.0.1.1"], 5, "n1", [{"note": 0}]),
        ("n2", OSError(2, "Name unknown"), 5, "n1", [{"pair": "n2", "check": "name"}]),
        ("n2", UnicodeError("label"), 5, "n1", [{"pair": "n2", "check": "name"}]),
    ],
)
def test_a_name_and_a_link(
    names: dict[str, list[str] | Exception],
    lines: Lines,
    node: str,
    address: list[str] | Exception,
    port: int | None,
    first: str,
    expected: list[dict[str, Any]],
) -> None:
    names[node] = address
    nodes = ("n1", "n2") if first == "n1" else ("n2", "n1")
    way = Way(_place(*nodes, index=nodes.index("n1")), Path("/no"), "secret")
    way._name_and_link(node, node, port)
    for link in way._failed_links:
        way._link_again(*link)
    messages = lines()
    words = [str(line.pop("why", line.get("note", ""))) for line in messages]
    if expected and "note" in expected[0]:
        expected = [{"note": words[0]}]
    assert messages == expected
    for text in words:
        reasons = ("timed out", "which is loopback", "Name unknown", "label", "")
        assert any(reason in text for reason in reasons)
    if isinstance(address, OSError):
        assert words == ["the name n2 does not resolve here: Name unknown"]
    elif words and address == ["10.0.0.9"]:
        assert words == ["no way from here to n2 (10.0.0.9): timed out"]
    elif words and address == ["127.0.1.1"]:
        assert words == [f"the name {node} resolves to 127.0.1.1, which is loopback"]


def test_a_link_that_fails_once_is_no_fault(
    names: dict[str, list[str] | Exception],
    lines: Lines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each healthy node of 32 was asked by 31 others, and late with an answer or two."""
    answers: dict[str, Any] = {"n2": [TimeoutError("timed out"), 0.5], "n3": [0.25]}

    def reach(node: str, *link: Any) -> float:
        answer = answers[node].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return float(answer)

    monkeypatch.setattr(checks, "reach", reach)
    monkeypatch.setattr(checks.socket, "gethostbyaddr", lambda a: (f"n{a[-1]}", [], []))  # type: ignore[attr-defined]
    names["n3"] = ["10.0.0.3"]
    for node in answers:
        (tmp_path / node).write_text("secret")
    Way(_place("n1", "n2", "n3"), tmp_path, "secret").look({"n2": 5, "n3": 6})
    assert (lines(), answers) == ([], {"n2": [], "n3": []})


def test_loopback_is_right_between_processes_of_one_machine(
    names: dict[str, list[str] | Exception], lines: Lines
) -> None:
    names["local-1"] = ["127.0.0.2"]
    way = Way(_place("local-0", "local-1"), Path("/no"), "secret")
    way._name_and_link("local-1", "local-1", None)
    assert lines() == []


def test_all_are_looked_for(
    names: dict[str, list[str] | Exception],
    lines: Lines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "VISIBLE_S", 0.0)
    monkeypatch.setattr(checks, "REVERSE_S", 60.0)
    monkeypatch.setattr(checks.socket, "gethostbyaddr", lambda a: ("n9", ["n1.org"], []))  # type: ignore[attr-defined]
    (tmp_path / "n2").write_text("secret")
    names["n3"] = ["10.0.0.3"]
    Way(_place("n1", "n2", "n3"), tmp_path, "secret").look({"n2": 5, "n3": 6})
    messages = sorted(lines(), key=str)
    assert messages == [
        {"note": "no reverse name: 10.0.0.2 is n9, not n2 (and 1 more)"},
        {"pair": "n3", "check": "link", "address": "10.0.0.3", "why": messages[1]["why"]},
        {"pair": "n3", "check": "scratch", "why": "does not see what n3 writes"},
    ]


def test_a_file_that_comes_late_is_seen(
    tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = stop_clock(monkeypatch, checks)
    monkeypatch.setattr(checks, "holds", lambda path, text: clock.now > 1000 + checks.VISIBLE_S - 1)
    Way(_place(), tmp_path, "secret")._disk("n2")
    assert lines() == []
    monkeypatch.setattr(checks, "holds", lambda path, text: False)
    begin = clock.now
    Way(_place(), tmp_path, "secret")._disk("n2")
    assert checks.VISIBLE_S < clock.now - begin < checks.VISIBLE_S + 1
    assert len(lines()) == 1


def test_a_name_server_that_is_slow_is_noted(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = threading.Event()

    def look(address: str) -> tuple[str, list[str], list[str]]:
        hold.wait(60)
        raise OSError

    monkeypatch.setattr(checks, "REVERSE_S", 0.01)
    monkeypatch.setattr(checks.socket, "gethostbyaddr", look)  # type: ignore[attr-defined]
    way = Way(_place(), Path("/no"), "secret")
    way._resolved["n2"] = "10.0.0.2"
    before = threading.active_count()
    way._reverse()
    assert lines() == [{"note": "reverse look-ups of names take longer than 0 s"}]
    hold.set()
    for thread in threading.enumerate()[before:]:
        assert thread.daemon  # it keeps no process alive
        thread.join()

    class Waiting(Clock):
        """A clock that is looked at once to begin, and then when the look-ups are waited for."""

        looks = 0

        def monotonic(self) -> float:
            self.looks += 1
            if self.looks == 2:
                hold.set()
            return super().monotonic()

    hold.clear()
    monkeypatch.setattr(checks, "REVERSE_S", 60.0)
    monkeypatch.setattr(checks, "time", Waiting())
    way._reverse()
    assert lines() == [{"note": "no reverse name: 10.0.0.2 is nobody, not n2"}]
    monkeypatch.setattr(checks.socket, "gethostbyaddr", lambda a: ("x", ["n2.org"], []))  # type: ignore[attr-defined]
    way._reverse()
    assert lines() == []


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("n2", None),
        ("n2.elsewhere", None),  # domains differ by who asks
        ("n3.org", "no reverse name: 10.0.0.2 is n3.org, not n2.org"),
    ],
)
def test_a_reverse_name_is_compared_without_its_domain(
    name: str, note: str | None, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "REVERSE_S", 60.0)
    monkeypatch.setattr(checks.socket, "gethostbyaddr", lambda address: (name, [], []))  # type: ignore[attr-defined]
    way = Way(_place(), Path("/no"), "secret")
    way._resolved["n2.org"] = "10.0.0.2"
    way._reverse()
    assert lines() == ([] if note is None else [{"note": note}])


def test_a_file_holds_a_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("secret")
    assert checks.holds(tmp_path / "a", "secret")
    assert not checks.holds(tmp_path / "a", "other")
    assert checks.holds(tmp_path / "b", "secret") is False


# --- the whole of it -----------------------------------------------------------------------


class AskedTorch:
    """Torch's process, which is only asked."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def ask(self) -> None:
        checks.tell(stage="imported", questions=sys.stdin.read())


class LeftError(Exception):
    """The process would have ended here, with a code."""


@pytest.fixture
def check(
    interfaces: dict[str, str | None],
    names: dict[str, list[str] | Exception],
    lines: Lines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., list[dict[str, Any]]]:
    """Make the checks of one of two nodes, and return what it tells; all that it has is fake."""

    class Usage(NamedTuple):
        free: int

    def leave(code: int) -> None:
        raise LeftError(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(
        signal, "signal", lambda number, handler: handlers.update({number: handler})
    )
    monkeypatch.setattr(os, "getloadavg", lambda: (4.84, 50.0, 50.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(fabric, "look", lambda: fabric.Found("efa", ("a",)))
    monkeypatch.setattr(checks, "_check_gpus", lambda place, asked: {"gpus": asked})
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: Usage(1 << 40))  # type: ignore[attr-defined]
    monkeypatch.setattr(checks.socket, "gethostbyaddr", lambda a: ("n1", ["n2"], []))  # type: ignore[attr-defined]
    monkeypatch.setattr(checks, "Torch", AskedTorch)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "shared").mkdir()
    handlers: dict[int, Callable[[int, None], None]] = {}

    def call(*questions: Any, index: int = 0, signals: bool = False) -> list[dict[str, Any]]:
        environ = {"RUN": tmp_path, "ATTEMPT": 0, "NODES": "n1 n2", "NODE_INDEX": index}
        for name, value in environ.items():
            monkeypatch.setenv(f"HPC_DDP_{name}", str(value))
        text = "".join(json.dumps(question) + "\n" for question in questions)
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        with pytest.raises(LeftError, match=r"^0$"):
            checks.main([])
        if signals:
            assert handlers.keys() == {*NOTICE_SIGNALS}
            for number, handler in handlers.items():
                with pytest.raises(LeftError, match=r"^0$"):
                    handler(number, None)
        return lines()

    return call


def _order(tmp_path: Path) -> dict[str, Any]:
    return {"folder": str(tmp_path / "shared"), "secret": "secret", "gpus": 2, "needed": 5}


def test_a_node_tells_all_that_it_finds(
    check: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    (tmp_path / "shared/n2").write_text("secret")
    hello, *messages = check(_order(tmp_path), {"ports": {"n2": 5}}, {"go": 1})
    assert (hello["stage"], hello["host"], hello["addresses"]) == ("hello", "n1", ["10.0.0.1"])
    assert hello["store_port"] != hello["port"]
    assert messages == [
        {"values": {"clock_s": 0.0}},
        {"values": {"load": 1.2}},
        {"values": {"interface": "eth0", "address": "10.0.0.1"}},
        {"values": {"fabric": "efa", "cards": 1}},
        {"values": {"gpus": 2}},
        {"values": {"tmpdir": str(tmp_path), "tmpdir_free": 1 << 40}},
        {"values": {"scratch_free": 1 << 40}},
        {"stage": "checked"},
        {"stage": "imported", "questions": '{"go": 1}\n'},
    ]
    assert (tmp_path / "shared/n1").read_text() == "secret"


def test_only_the_first_node_has_the_clock(
    check: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    messages = check(_order(tmp_path), index=1)
    assert messages[0]["host"] == "n2"
    assert not any("clock_s" in line.get("values", {}) for line in messages)


def test_a_run_folder_that_can_not_be_written_is_told(
    check: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    (tmp_path / "shared").rmdir()
    why = f"can't write in the run folder {tmp_path}: No such file or directory"
    first, second, *_ = check(_order(tmp_path))
    assert first == {"bad": "scratch", "why": why}
    assert second["stage"] == "hello"


def test_a_node_that_is_not_told_of_the_others_leaves(
    check: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    assert [line["stage"] for line in check(_order(tmp_path)) if "stage" in line] == ["hello"]


def test_a_node_without_an_order_tells_nothing(
    check: Callable[..., list[dict[str, Any]]], lines: Lines, tmp_path: Path
) -> None:
    check(_order(tmp_path))
    assert checks.main([]) == 1  # nothing more is on stdin
    assert lines() == []


def test_a_node_with_many_addresses_tells_ten(
    check: Callable[..., list[dict[str, Any]]],
    interfaces: dict[str, str | None],
    tmp_path: Path,
) -> None:
    """The line is not to be broken by Slurm."""
    interfaces.update({f"ib{index}": f"10.0.1.{index}" for index in range(20)})
    assert len(check(_order(tmp_path))[0]["addresses"]) == 10


def test_a_notice_is_passed_on(check: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    messages = check(_order(tmp_path), signals=True)
    names = [line["notice"] for line in messages if "notice" in line]
    assert sorted(names) == sorted(number.name for number in NOTICE_SIGNALS)


def test_a_machine_may_not_tell_its_load(
    check: Callable[..., list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> tuple[float, float, float]:
        raise OSError

    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert {"values": {"load": 4.8}} in check(_order(tmp_path))
    monkeypatch.setattr(os, "getloadavg", refuse)
    messages = check(_order(tmp_path))
    assert not any("load" in line.get("values", {}) for line in messages)


# --- torch's process -----------------------------------------------------------------------


def _torch(script: str) -> checks.Torch:
    pipe = subprocess.PIPE
    child = checks.Torch.__new__(checks.Torch)
    child._process = subprocess.Popen(["bash", "-c", script], stdin=pipe, stdout=pipe, stderr=pipe)
    child._teller = threading.Thread(target=child._tell)
    child._teller.start()
    return child


def _ask(child: checks.Torch) -> None:
    child.ask()
    assert child._process.stdout is not None
    assert child._process.stderr is not None
    child._process.stdout.close()
    child._process.stderr.close()


def test_torchs_process_has_the_settings_of_the_network(
    interfaces: dict[str, str | None],
    tmp_path: Path,
    lines: Lines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_CONF_FILE", "MARKED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(fabric, "look", lambda: fabric.Found("efa", ("a",)))
    run = RunFolder(tmp_path)
    run.lib.mkdir()
    (run.lib / fabric.TABLE).write_text('{"efa": {"MARKED": "1"}}')
    (run.lib / "node.py").write_text(
        "import json, os, sys\n"
        "words = [sys.argv[1], os.environ.get('MARKED'), os.environ['GLOO_SOCKET_IFNAME']]\n"
        f"print({checks.MARK!r} + json.dumps({{'node': 'n1', 'words': words}}))\n"
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    for name in ("auto", ""):
        _ask(checks.Torch(replace(_place(), run=run, fabric=name)))
    assert [line["words"] for line in lines()] == [
        ["bandwidth", "1", "eth0"],
        ["bandwidth", None, "eth0"],
    ]


@pytest.mark.parametrize(
    ("script", "bad"),
    [
        ("cat >/dev/null", []),
        ("echo first >&2; echo last >&2; echo >&2; exit 3", ["exit code 3: last"]),
        ("exit 3", ["exit code 3: -"]),
        ("seq 20000 >&2; exit 3", ["exit code 3: 20000"]),
        ("kill -SEGV $$", ["SIGSEGV: -"]),
    ],
)
def test_the_end_of_torchs_process_is_told(
    script: str, bad: list[str], lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f'echo noise; echo \'{checks.MARK}{{"node": "n1", "x": 1}}\'; '
    child = _torch(mark + script)
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\n"))
    _ask(child)
    whys = [f"torch's process ended with {why}" for why in bad]
    assert lines() == [{"x": 1}, *({"bad": "torch", "why": why} for why in whys)]


def test_each_question_is_passed_on_at_once(
    tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preflight asks again when it has heard the answer."""

    def questions() -> Iterator[str]:
        for word in ("go", "again"):
            yield f"{word}\n"
            wait_until((tmp_path / word).exists, "the answer")

    child = _torch(f"while read -r word; do touch {tmp_path}/$word; done")
    monkeypatch.setattr(sys, "stdin", questions())
    _ask(child)
    assert lines() == []


# --- how fast nodes exchange ---------------------------------------------------------------


class FakeDist:
    """What a `Meter` takes of torch.distributed: two ranks of one process, as two threads."""

    class P2POp(NamedTuple):
        operation: str
        tensor: torch.Tensor
        peer: int

    isend, irecv = "send", "receive"

    def __init__(self, mine: deque[torch.Tensor], theirs: deque[torch.Tensor]) -> None:
        self._mine, self._theirs = mine, theirs
        self.sizes: list[int] = []

    def batch_isend_irecv(self, operations: list[P2POp]) -> list[Any]:
        """Return what does its work once it is waited for."""

        class Work(NamedTuple):
            wait: Callable[[], None]

        return [Work(partial(self._do, *operation)) for operation in operations]

    def _do(self, operation: str, tensor: torch.Tensor, peer: int) -> None:
        assert peer == 1
        if operation == "send":
            self._theirs.append(tensor.clone())
            self.sizes.append(tensor.numel())
        elif self._mine:
            tensor.copy_(self._mine.popleft())

    def get_world_size(self) -> int:
        return 3

    def get_rank(self) -> int:
        return 1

    def all_reduce(self, values: torch.Tensor) -> None:
        assert bool((values == 2).all())
        values.fill_(6.0)


class FakeTorch:
    device, float32 = torch.device, torch.float32
    zeros = staticmethod(torch.zeros)

    def __init__(self) -> None:
        self.mine: deque[torch.Tensor] = deque()
        self.theirs: deque[torch.Tensor] = deque()
        self.distributed = FakeDist(self.mine, self.theirs)


class Ticking(Clock):
    """A clock whose performance counter goes on by `step` each time that it is looked at."""

    step = 0.01

    def perf_counter(self) -> float:
        self.now += self.step
        return self.now


@pytest.mark.parametrize(
    ("step", "sizes"),
    [
        (0.011, [1, 2, *[4] * 17]),  # MiB: for as long as a burst, more and more
        (0.05, [1] * 6),
        (1.0, [1] * 3),
        (2.0, [1] * 2),  # less than 1 MB/s
    ],
)
def test_a_burst_is_measured(
    step: float, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Ticking(0.0)
    clock.step = step
    monkeypatch.setattr(bandwidth, "time", clock)
    monkeypatch.setattr(bandwidth, "LAST_BYTES", 4 << 20)
    fake = FakeTorch()
    best = Meter(fake, "cpu").send(1)
    words = [size for size in fake.distributed.sizes if size != 1]
    assert words == [size * (1 << 18) for size in sizes]
    assert best == pytest.approx(max(sizes) * (1 << 20) / step / 1e6)
    assert fake.theirs[-1].item() == 0  # the end of it
    assert fake.theirs[0].item() == 1 << 20


def test_a_gpu_is_waited_for() -> None:
    waits: list[int] = []

    class Accelerator:
        def synchronize(self) -> None:
            waits.append(len(fake.theirs))

    fake: Any = FakeTorch()
    fake.accelerator = Accelerator()
    fake.zeros = lambda count, dtype, device: torch.zeros(count)
    fake.mine += [torch.tensor([4.0]), torch.ones(1), torch.tensor([0.0])]
    Meter(fake, "xpu").receive(1)
    assert waits == [0, 0, 1, 1]  # after each of the four moves


def test_the_other_end_takes_what_comes() -> None:
    fake = FakeTorch()
    for size in (8, 4):
        fake.mine += [torch.tensor([float(size)]), torch.ones(size // 4)]
    fake.mine.append(torch.tensor([0.0]))
    Meter(fake, "cpu").receive(1)
    assert [tensor.item() for tensor in fake.theirs] == [8.0, 4.0]
    assert not fake.mine


def test_a_sum_is_right_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "time", Ticking(0.0))
    fake = FakeTorch()
    speed, right = Meter(fake, "cpu").all_reduce(1000)
    assert right
    assert speed == pytest.approx(0.4)
    monkeypatch.setattr(fake.distributed, "all_reduce", lambda values: values.fill_(5.0))
    assert Meter(fake, "cpu").all_reduce(1000)[1] is False


class FakeMeter:
    """A meter of speeds that are known."""

    def __init__(self, right: bool = True, broken: str = "") -> None:
        self.right, self.broken = right, broken
        self.calls: list[str] = []

    def send(self, other: int) -> float:
        if self.broken:
            raise RuntimeError(self.broken)
        self.calls.append(f"to {other}")
        return 100.06

    def receive(self, other: int) -> None:
        self.calls.append(f"from {other}")

    def all_reduce(self, count: int) -> tuple[float, bool]:
        assert count == bandwidth.REDUCED
        return 7.77, self.right


@pytest.mark.parametrize(
    ("rank", "calls"),
    [(0, ["from 1", "to 1"]), (1, ["from 0", "to 0"]), (2, [])],
)
def test_each_pair_takes_turns(rank: int, calls: list[str], lines: Lines) -> None:
    meter: Any = FakeMeter()
    names = ["n1", "n2", "n3"][: max(2, rank + 1)]
    measure(meter, names, rank)
    expected = sorted(calls) if rank else ["to 1", "from 1"]
    if rank == 2:
        assert sorted(meter.calls) == ["from 0", "from 1", "to 0", "to 1"]
        assert [line["to"] for line in lines() if "to" in line] in (["n1", "n2"], ["n2", "n1"])
        return
    assert meter.calls == expected
    other = names[1 - rank]
    assert lines() == [{"to": other, "mb_s": 100.1}, {"values": {"all_reduce_mb_s": 7.8}}]


def test_trouble_in_an_exchange_is_told_with_its_turn(lines: Lines) -> None:
    meter: Any = FakeMeter(broken="Connection reset\nby peer")
    with pytest.raises(RuntimeError):
        measure(meter, ["n1", "n2"], 0)
    why = "no exchange with n2: Connection reset"
    assert lines() == [{"pair": "n2", "check": "bandwidth", "why": why, "turn": 0}]
    wrong: Any = FakeMeter(right=False)
    measure(wrong, ["n1", "n2"], 0)
    assert lines()[-1] == {"bad": "bandwidth", "why": "the sum of an all-reduce is wrong here"}


def test_how_many_turns_there_are() -> None:
    assert [turns(world) for world in (2, 3, 4, 5, 6, 100)] == [1, 3, 3, 4, 4, 4]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, lines: Lines) -> Callable[..., int | None]:
    """Call `bandwidth` with lines on its stdin; None where it has left the process."""

    def leave(code: int) -> None:
        assert code == 0
        raise LeftError

    monkeypatch.setattr(os, "_exit", leave)
    ties: list[str] = []
    monkeypatch.setattr(bandwidth, "die_with_parent", lambda: ties.append("parent"))

    def call(*questions: dict[str, Any]) -> int | None:
        ties.clear()
        text = "".join(json.dumps(question) + "\n" for question in questions)
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        try:
            return bandwidth.main([])
        except LeftError:
            return None
        finally:
            assert ties == ["parent"]

    return call


GO = {"members": ["n2", "n1"], "host": "h", "port": 5, "device": "cpu"}


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
def test_what_torch_is_there_is_told(
    asked: Callable[..., int | None],
    lines: Lines,
    monkeypatch: pytest.MonkeyPatch,
    kind: str | None,
    backends: list[str],
    device: str | None,
    count: int,
) -> None:
    moments = iter([1000.0, 1002.34])
    current = SimpleNamespace(type=kind) if kind else None
    monkeypatch.setattr(bandwidth, "time", SimpleNamespace(time=lambda: next(moments)))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: current)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name in backends)
    assert asked() == 0
    values = {"torch": torch.__version__, "device": device, "devices": count, "import_s": 2.3}
    assert lines() == [{"stage": "imported", "values": values}]


@pytest.mark.parametrize("questions", [(), ({"members": ["n2"]},)])
def test_a_node_that_is_not_asked_to_measure_ends_well(
    asked: Callable[..., int | None], lines: Lines, questions: tuple[dict[str, Any], ...]
) -> None:
    assert asked(*questions) == 0
    (messages,) = lines()
    assert (messages["stage"], messages["values"]["torch"]) == ("imported", torch.__version__)


def test_it_measures_as_often_as_it_is_asked(
    asked: Callable[..., int | None], lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[list[str], int]] = []
    monkeypatch.setattr(bandwidth, "join", lambda torch, go, rank: "meter")
    monkeypatch.setattr(
        bandwidth, "measure", lambda meter, names, rank: calls.append((names, rank))
    )
    assert asked(GO, {"again": True}) is None
    assert [messages["stage"] for messages in lines()] == ["imported", "done", "again"]
    assert calls == [(["n2", "n1"], 1)] * 2
    asked(GO, *[{"again": True}] * 3)
    assert [messages["stage"] for messages in lines()] == ["imported", "done", "again", "third"]


def test_a_process_group_that_does_not_come_about_is_told(
    asked: Callable[..., int | None], lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [RuntimeError("Timed out\nafter 20 s"), RuntimeError()]

    def refuse(torch: Any, go: Any, rank: int) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(bandwidth, "join", refuse)
    for text in ("Timed out", "RuntimeError"):
        assert asked(GO) is None
        assert lines()[1] == {"stage": "done", "broken": text}


def test_a_torch_that_can_not_be_imported_is_told(
    asked: Callable[..., int | None], lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert asked() == 0
    (messages,) = lines()
    assert messages["bad"] == "torch"
    assert messages["why"].startswith("import torch: ModuleNotFoundError: import of torch halted")


@pytest.mark.parametrize(
    ("device", "backend", "rank"), [("cpu", "gloo", 0), ("cuda", "nccl", 1), ("xpu", "xccl", 0)]
)
def test_the_members_join(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str, rank: int
) -> None:
    calls: list[tuple[Any, ...]] = []

    class Dist(FakeDist):
        def TCPStore(self, *words: Any, timeout: Any) -> str:
            calls.append((*words, timeout.total_seconds()))
            return "store"

        def all_reduce(self, values: torch.Tensor) -> None:
            calls.append(("all-reduce",))

        def get_default_backend_for_device(self, device: str) -> str:
            return str(torch.distributed.get_default_backend_for_device(device))

        def init_process_group(self, backend: str, **values: Any) -> None:
            assert values.pop("timeout").total_seconds() == bandwidth.TIMEOUT_S
            calls.append((backend, values))

    class Accelerator:
        def set_device_index(self, index: int) -> None:
            calls.append(("device", index))

    fake: Any = FakeTorch()
    fake.distributed, fake.accelerator = Dist(fake.mine, fake.theirs), Accelerator()
    fake.zeros = lambda count, dtype, device: torch.zeros(count)
    monkeypatch.setattr(bandwidth, "REDUCED", 16)
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    meter = bandwidth.join(fake, {**GO, "device": device}, rank)
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert meter._device == device
    bound = {"device_id": torch.device("cuda", 0)} if device == "cuda" else {}
    group = (backend, {"store": "store", "rank": rank, "world_size": 2, **bound})
    index = [("device", 0)] if device != "cpu" else []
    connect = ("all-reduce",)
    assert calls == [("h", 5, 2, rank == 0, bandwidth.TIMEOUT_S), *index, group, connect]
