"""How a preflight talks with the nodes, and what comes of what they tell."""

from __future__ import annotations

import json
import os
import queue
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import Clock, Slurm

from hpc_ddp.core.checkpoints import manifest_crc
from hpc_ddp.core.job.spec import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node import preflight
from hpc_ddp.node.checks import MARK
from hpc_ddp.node.preflight import (
    Command,
    LaunchError,
    NodeReport,
    NoticedError,
    Talk,
    conclude,
    examine,
    outcome,
)
from tests.raw_events import raw_events


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "name" / "run").make()
    run.job_json.write_text(JobSpec("train.py").to_json())
    run.claim_attempt({}, lambda info: False)
    return run


def _line(node: str, **fields: Any) -> str:
    return f"{MARK}{json.dumps({'node': node, **fields})}"


def test_what_a_node_tells_adds_up() -> None:
    report = NodeReport()
    report.take({"stage": "hello", "port": 5})
    report.take({"stage": "checked", "values": {"a": 1}})
    report.take({"values": {"b": 2}})
    report.take({"bad": "gpus", "why": "none"})
    report.take({"pair": "n2", "check": "link", "why": "no way"})
    report.take({"note": "odd"})
    for speed in (5.0, 9.0, 7.0):
        report.take({"to": "n2", "mb_s": speed})
    report.take({"broken": "x"})
    report.take({"note": "again"})
    assert (report.hello["port"], report.stages) == (5, {"hello", "checked"})
    assert report.values == {"a": 1, "b": 2}
    assert (report.bad, report.notes) == ([("gpus", "none")], ["odd", "again"])
    assert report.pairs == [{"pair": "n2", "check": "link", "why": "no way"}]
    assert (report.speeds, report.broken) == ({"n2": 9.0}, "x")


# --- lines ---------------------------------------------------------------------------------


@pytest.fixture
def talk(tmp_path: Path) -> Talk:
    """A talk with two nodes through one srun that has ended already."""
    command = Command(["true"], dict(os.environ))
    talk = Talk(["n1", "n2"], [command], lambda: "", tmp_path / "log")
    talk._readers[0].join()
    talk.close(60.0)
    talk._lines = queue.Queue()
    return talk


ALL = Command((), {})
ONE = Command((), {}, "n2")


@pytest.mark.parametrize(
    ("command", "line", "node", "last", "ended"),
    [
        (ALL, "0: Killed", "n1", "Killed", False),
        (ALL, " 1: Killed", "n2", "Killed", False),
        (ALL, "2: no node of ours", None, "2: no node of ours", False),
        (ALL, "slurmstepd: error", None, "slurmstepd: error", False),
        (ALL, "", None, "", False),
        (ONE, "0: Killed", "n2", "0: Killed", False),
        (ALL, "srun: error: n2: task 1: Out Of Memory", "n2", "Out Of Memory", True),
        (ALL, "srun: error: n[1-2]: tasks 0-1: Exited", "n1", "Exited", True),
        (ONE, None, "n2", "", True),
        (ALL, None, "n1", "", False),
    ],
)
def test_each_line_is_somebodys(
    talk: Talk,
    tmp_path: Path,
    command: Command,
    line: str | None,
    node: str | None,
    last: str,
    ended: bool,
) -> None:
    talk._take(command, line)
    log = tmp_path / "log"
    assert (log.read_text() if log.exists() else None) == (None if line is None else f"{line}\n")
    if node is None:
        assert talk._last == last
        assert all(report == NodeReport() for report in talk.reports.values())
    else:
        assert (talk._last, talk.reports[node].last, talk.reports[node].ended) == ("", last, ended)


def test_the_first_reason_of_an_end_stays(talk: Talk) -> None:
    talk._take(ALL, "1: python: not found")
    talk._take(ALL, "srun: error: n2: task 1: Exited with exit code 127")
    assert (talk.reports["n2"].last, talk.reports["n2"].ended) == ("python: not found", True)
    assert not talk.reports["n1"].ended


def test_what_is_meant_for_us_is_heard(talk: Talk, tmp_path: Path) -> None:
    talk._take(ALL, "1: " + _line("n2", values={"a": 1}))
    talk._take(ONE, _line("n2", stage="checked"))
    for torn in (MARK, MARK + '{"node": ', _line("n9", note="x"), MARK + '{"bad": "x"}'):
        talk._take(ALL, torn)
    assert (talk.reports["n2"].values, talk.reports["n2"].stages) == ({"a": 1}, {"checked"})
    assert talk.reports["n1"] == NodeReport()
    assert not (tmp_path / "log").exists()
    with pytest.raises(NoticedError, match="SIGTERM"):
        talk._take(ALL, "0: " + _line("n1", notice="SIGTERM"))


def test_a_task_that_slurm_can_not_start_ends_all(talk: Talk) -> None:
    line = "srun: error: Task launch for StepId=7.0 failed on node n2: Not responding"
    with pytest.raises(LaunchError):
        talk._take(ALL, line)
    assert talk.reports["n2"].bad == [("silent", "Slurm can't start a task: Not responding")]
    with pytest.raises(LaunchError):
        talk._take(ALL, line.replace("n2", "n9"))
    assert talk.reports["n1"].bad == []


def test_numbers_of_a_list() -> None:
    assert preflight._numbers("1-3,5") == [1, 2, 3, 5]


# --- processes -----------------------------------------------------------------------------

Start = Callable[..., Talk]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start to talk with nodes that are a line of bash each."""
    talks: list[Talk] = []

    def begin(*scripts: str, notice: str = "") -> Talk:
        nodes = [f"n{index + 1}" for index in range(len(scripts))]
        commands = [
            Command(["bash", "-c", script], dict(os.environ), node)
            for node, script in zip(nodes, scripts, strict=True)
        ]
        talks.append(Talk(nodes, commands, lambda: notice, tmp_path / "no" / "log"))
        return talks[-1]

    yield begin
    for talk in talks:
        talk.close(60.0)


def _script(line: str, then: str = "") -> str:
    return f"read -r question; echo '{line}'; {then}"


def test_a_question_goes_to_all_nodes(start: Start) -> None:
    script = 'read -r question; echo "$question" >&2; '
    talk = start(script + f"echo '{_line('n1', stage='hello')}'", script + "exit 3")
    talk.ask(folder="x", gpus=2)
    assert talk.until("hello", ["n1", "n2"]) == ["n1"]
    (bad,) = talk.reports["n2"].bad
    assert bad == ("ended", 'ended early: {"folder": "x", "gpus": 2}')
    talk.ask(ports={})  # of what has ended


def test_a_node_that_ends_without_a_word(start: Start) -> None:
    talk = start("exit 0")
    assert talk.until("hello", ["n1"]) == []
    assert talk.reports["n1"].bad == [("ended", "ended early: without a word")]


def test_a_node_that_says_nothing_is_waited_for(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(preflight.STAGE_S, "hello", 0.05)
    talk = start("read -r question; read -r question")
    talk._last = "srun: waiting"
    assert talk.until("hello", ["n1"]) == []
    assert talk.reports["n1"].bad == [("silent", "no word within 0 s (srun: waiting)")]
    monkeypatch.setattr(preflight, "EXCHANGE_S", 0.05)
    talk.reports["n1"].bad.clear()
    talk._last = ""
    assert talk.until("again", ["n1"]) == []
    why = "the exchange with other nodes does not end within 0 s"
    assert talk.reports["n1"].bad == [("silent", why)]


def test_nodes_that_come_one_after_the_other_are_waited_for(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 32 busy nodes, healthy ones came after the time that one alone would have had."""
    clock = Clock()
    monkeypatch.setattr(preflight, "time", clock)
    talk = start(*["read -r question"] * 4)
    arrivals = iter(["n2", "n1", "n4", "n3"])

    def get(timeout: float) -> tuple[Command, str]:
        clock.now += 30.0
        return Command([], {}), f"0: {_line(next(arrivals), stage='hello')}"

    monkeypatch.setattr(talk._lines, "get", get)
    assert talk.until("hello", ["n1", "n2", "n3", "n4"]) == ["n1", "n2", "n3", "n4"]
    assert clock.now - 1000.0 == 120.0


def test_a_step_that_ends_without_a_node_is_slurms(tmp_path: Path) -> None:
    command = Command(["bash", "-c", "echo 'srun: error: no' >&2"], dict(os.environ))
    talk = Talk(["n1", "n2"], [command], lambda: "", tmp_path / "log")
    talk.reports["n2"].stages.add("hello")
    assert talk.until("hello", ["n1", "n2"]) == ["n2"]
    assert talk.reports["n1"].bad == [("step", "srun has ended without it: srun: error: no")]
    talk.close(60.0)


def test_a_node_whose_torch_is_bad_is_not_waited_for(start: Start) -> None:
    line = _line("n1", bad="torch", why="x")
    talk = start(_script(line, "read -r question"))
    talk.ask()
    assert talk.until("imported", ["n1"]) == []
    assert talk.reports["n1"].bad == [("torch", "x")]


def test_a_notice_ends_the_talk(start: Start) -> None:
    talk = start("read -r question", notice="SIGTERM")
    with pytest.raises(NoticedError, match="SIGTERM"):
        talk.until("hello", ["n1"])


def test_what_does_not_end_is_ended(start: Start) -> None:
    polite = start("read -r question; exit 5")
    polite.close(60.0)
    deaf = start("trap '' TERM; echo up >&2; while :; do read -t 60 -u 2; done; exit 1")
    while not deaf.reports["n1"].last:
        deaf._take(*deaf._lines.get(timeout=60))
    deaf.close(0.1)
    deaf._processes[0].wait(60)
    deaf._readers[0].join(60)
    codes = [talk._processes[0].returncode for talk in (polite, deaf)]
    assert codes == [5, -signal.SIGKILL]
    assert not any(thread.is_alive() for talk in (polite, deaf) for thread in talk._readers)


# --- the order of things -------------------------------------------------------------------


class Scripted:
    """Takes the place of a `Talk`: each stage brings what a test has laid down for it."""

    def __init__(self, *nodes: str, **stages: dict[str, dict[str, Any]]) -> None:
        self.reports = {node: NodeReport() for node in nodes}
        self.stages = stages
        self.asked: list[dict[str, Any]] = []
        self.waited: list[str] = []

    def ask(self, **question: Any) -> None:
        self.asked.append(question)

    def until(self, stage: str, nodes: Sequence[str]) -> list[str]:
        self.waited.append(f"{stage} {' '.join(nodes)}")
        default: dict[str, Any] = {}
        if stage == "imported":
            default = {"values": {"device": None, "devices": 0, "torch": "2"}}
        if stage == "hello":
            default = {"port": 5, "store_port": 6}
        for node in nodes:
            line = {
                "stage": stage,
                "host": f"host-{node}",
                **default,
                **self.stages.get(stage, {}).get(node, {}),
            }
            for item in line.pop("lines", []):
                self.reports[node].take(item)
            self.reports[node].take(line)
        return [node for node in nodes if not self.reports[node].bad]


def _converse(
    run: RunFolder, *nodes: str, spec: JobSpec | None = None, **stages: dict[str, dict[str, Any]]
) -> Scripted:
    folder = run.path / "look"
    folder.mkdir()
    talk: Any = Scripted(*nodes, **stages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight.secrets, "token_hex", lambda count: "secret")  # type: ignore[attr-defined]
        for node in nodes:
            (folder / node).write_text("secret" if node != "blind" else "")
        preflight._converse(talk, spec or JobSpec("t.py"), run, folder)
    assert (folder / ".shell").read_text() == "secret"
    return talk  # type: ignore[no-any-return]


FAST = {"lines": [{"to": "n2", "mb_s": 1000.0}, {"to": "n3", "mb_s": 1000.0}]}


def test_nodes_that_are_fit_exchange_once(run: RunFolder) -> None:
    talk = _converse(run, "n1", "n2", done={"n1": FAST})
    order, ports, go = talk.asked
    assert order == {
        **{"folder": str(run.path / "look"), "secret": "secret", "gpus": 0},
        "needed": preflight.NEEDED_BYTES,
    }
    assert ports == {"ports": {"n1": 5, "n2": 5}}
    assert go == {"members": ["n1", "n2"], "host": "host-n1", "port": 6, "device": "cpu"}
    stages = ("hello", "checked", "imported", "done")
    assert talk.waited == [f"{stage} n1 n2" for stage in stages]
    assert outcome(talk.reports)["ok"]


def test_one_node_alone_has_nobody_to_exchange_with(run: RunFolder) -> None:
    talk = _converse(run, "n1")
    assert len(talk.asked) == 2
    assert talk.waited[-1] == "imported n1"


@pytest.mark.parametrize(
    ("gpus", "kinds", "device"),
    [
        ("4", ("cuda", "cuda"), "cuda"),
        ("4", ("npu", "npu"), "npu"),
        ("4", (None, None), "cpu"),
        ("4", ("cuda", None), "cpu"),
        ("4", ("cuda", "xpu"), "cpu"),
        (None, ("cuda", "cuda"), "cpu"),
    ],
)
def test_speeds_are_of_devices_that_all_have(
    run: RunFolder, gpus: str | None, kinds: tuple[str | None, str | None], device: str
) -> None:
    imported = {
        node: {"values": {"device": kind, "devices": 4 if kind else 0, "torch": "2"}}
        for node, kind in zip(("n1", "n2"), kinds, strict=True)
    }
    talk = _converse(run, "n1", "n2", spec=JobSpec("t.py", gpus_per_node=gpus), imported=imported)
    assert talk.asked[2]["device"] == device
    assert talk.asked[0]["gpus"] == (4 if gpus else 0)
    notes = [talk.reports[node].notes for node in ("n1", "n2")]
    if len(set(kinds)) == 1:
        assert notes == [[], []]
    else:
        assert notes[0] == ["torch's device is cuda here; speeds are of CPUs, as they differ"]
        assert f"torch's device is {kinds[1] or 'cpu'} here" in notes[1][0]


@pytest.mark.parametrize(
    ("spec", "bad"),
    [
        ({"gpus_per_node": "4"}, ["blind", "n1"]),
        ({"gpus_per_node": "4", "fabric": "ethernet"}, ["blind"]),
        ({}, ["blind"]),
    ],
)
def test_who_is_unfit_does_not_go_on(run: RunFolder, spec: dict[str, Any], bad: list[str]) -> None:
    fabric = {n: {"values": {"fabric": "infiniband", "cards": 1}} for n in ("n2", "n3", "blind")}
    fabric["n1"] = {"values": {"fabric": None, "cards": 0}}
    talk = _converse(run, "n1", "n2", "n3", "blind", spec=JobSpec("t.py", **spec), checked=fabric)
    assert sorted(node for node, report in talk.reports.items() if report.bad) == bad
    assert talk.asked[2]["members"] == [n for n in ("n1", "n2", "n3") if n not in bad]
    assert talk.reports["blind"].bad[0] == (
        "scratch",
        "what it writes does not come to the first node",
    )


def test_links_and_torch_are_looked_at(run: RunFolder) -> None:
    cut = {"pair": "n3", "check": "link", "why": "no way"}
    talk = _converse(
        run,
        *("n1", "n2", "n3", "n4"),
        checked={"n1": cut, "n2": cut, "n4": {"values": {"load": 9.0}}},
        imported={"n4": {"values": {"torch": "1", "device": None, "devices": 0}}},
    )
    assert talk.reports["n3"].bad == [("link", "n1: no way")]
    assert talk.reports["n4"].bad == [("torch", "torch 1, while others have 2")]
    assert talk.reports["n4"].notes == ["busy already: a load of 9.0 per processor"]
    assert talk.asked[2]["members"] == ["n1", "n2"]


def _speeds(*pairs: str) -> dict[str, dict[str, Any]]:
    """Return lines of a stage: each way at 1000 MB/s, those of `pairs` at 1."""
    nodes = ("n1", "n2", "n3")
    return {
        a: {
            "lines": [{"to": b, "mb_s": 1.0 if a + b in pairs else 1000.0} for b in nodes if b != a]
        }
        for a in nodes
    }


def test_a_node_that_is_slow_three_times_is_bad(run: RunFolder) -> None:
    slow = _speeds("n1n2", "n3n2", "n2n1", "n2n3")
    talk = _converse(run, "n1", "n2", "n3", done=slow, again=slow, third=slow)
    assert [stage.split()[0] for stage in talk.waited][3:] == ["done", "again", "third"]
    assert talk.asked[3:] == [{"again": True}] * 3
    (bad,) = talk.reports["n2"].bad
    assert (bad[0], talk.reports["n1"].bad) == ("bandwidth", [])


def test_a_node_that_is_slow_once_is_not(run: RunFolder) -> None:
    slow, fine = _speeds("n1n2", "n3n2", "n2n1", "n2n3"), _speeds()
    talk = _converse(run, "n1", "n2", "n3", done=slow, again=fine, third=slow)
    assert [stage.split()[0] for stage in talk.waited][3:] == ["done", "again"]
    assert outcome(talk.reports)["ok"]


@pytest.mark.parametrize("nodes", [("n1", "n2"), ("n1", "n2", "n3")])
def test_that_all_are_slow_is_noted(run: RunFolder, nodes: tuple[str, ...]) -> None:
    ring = _speeds("n1n2", "n2n3", "n3n1") if len(nodes) == 3 else _speeds("n1n2")
    talk = _converse(run, *nodes, done=ring, again=ring, third=ring)
    if len(nodes) == 3:
        assert [len(report.notes) for report in talk.reports.values()] == [1, 1, 1]
    assert all(bool(report.bad) is (len(nodes) == 2) for report in talk.reports.values())


def test_a_broken_group_is_explained_by_pairs_or_by_itself(run: RunFolder) -> None:
    broken = {node: {"broken": "Connection reset"} for node in ("n1", "n2")}
    talk = _converse(run, "n1", "n2", "n3", done=broken)
    assert talk.reports["n1"].bad == [("bandwidth", "Connection reset")]
    assert talk.reports["n3"].bad == []
    assert talk.waited[-1].startswith("done")
    (run.path / "look").rename(run.path / "first")
    pair = {"pair": "n3", "check": "bandwidth", "why": "no exchange", "turn": 0}
    named = {node: {**pair, **broken[node]} for node in ("n1", "n2")}
    talk = _converse(run, "n1", "n2", "n3", done=named)
    assert talk.reports["n1"].bad == []
    assert talk.reports["n3"].bad == [("bandwidth", "n1: no exchange")]


# --- what is journalled --------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 10, 80 << 20])
def test_room_is_needed_for_two_checkpoints(run: RunFolder, size: int | None) -> None:
    assert preflight._needed(run) == preflight.NEEDED_BYTES
    for step in (1, 2):
        folder = run.checkpoints / f"step-{step}"
        folder.mkdir()
        if size is not None:
            value: dict[str, Any] = {"files": {"a": {"size": size if step == 2 else 1 << 40}}}
            value["files"]["b"] = {"size": 0}
            value["crc32"] = manifest_crc(value)
            (folder / "manifest.json").write_text(json.dumps(value))
    assert preflight._needed(run) == max(preflight.NEEDED_BYTES, 2 * (size or 0))


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said to the user."""
    words: list[str] = []
    monkeypatch.setattr(preflight, "say", words.append)
    return words


def test_the_outcome_is_journalled_and_said(run: RunFolder, printed: list[str]) -> None:
    report = {"n1": NodeReport(notes=["odd"]), "n2": NodeReport()}
    assert conclude(run, 0, {**outcome(report), "seconds": 1.5}) is True
    assert printed == ["preflight: n1: note: odd", "preflight: 2 nodes are fit, after 1.5 s"]
    printed.clear()
    assert conclude(run, 0, {**outcome({"n1": NodeReport()}), "seconds": 1.5}) is True
    assert printed == ["preflight: 1 node is fit, after 1.5 s"]
    printed.clear()
    report["n2"].bad.append(("gpus", "none"))
    assert conclude(run, 0, {**outcome(report), "seconds": 1.5}) is False
    assert printed == ["preflight: n1: note: odd", "preflight: n2: none"]
    event = raw_events(run.path)[-1]
    assert (event["event"], event["ok"], event["bad_nodes"]) == ("preflight", False, ["n2"])


def test_the_outcome_names_few_of_many() -> None:
    report = {f"n{number}": NodeReport(bad=[("gpus", f"why {number}")]) for number in range(5)}
    report["n9"] = NodeReport(values={"a": 1}, speeds={"n1": 3.0, "n2": 4.0})
    event = outcome(report)
    assert event["why"] == "n0: why 0; n1: why 1; n2: why 2; and 2 more"
    assert event["report"]["n9"] == {"a": 1, "send_mb_s": 4.0, "bad": [], "notes": []}
    assert event["report"]["n1"]["receive_mb_s"] == 3.0
    assert event["report"]["n0"]["bad"] == [{"check": "gpus", "why": "why 0"}]
    report.pop("n9")
    for item in report.values():
        item.bad = [("gpus", "all")]
    three = {node: report[node] for node in ("n0", "n1", "n2")}
    assert outcome(three)["why"] == "all (the same on all nodes)"
    alone = outcome({"n0": NodeReport(bad=[("torch", "no torch")])})
    assert (alone["why"], alone["hopeless"]) == ("no torch", True)


def _examine(
    run: RunFolder,
    act: Callable[[Talk], None],
    monkeypatch: pytest.MonkeyPatch,
    seconds: float = 7.04,
) -> tuple[dict[str, Any], list[float]]:
    """Return what comes of an examination that consists of `act`, and how long it ended for."""
    clock, patience = Clock(), []
    close = Talk.close

    def end(talk: Talk, patience_s: float) -> None:
        patience.append(patience_s)
        clock.now += seconds
        close(talk, 60.0)

    with monkeypatch.context() as patch:
        patch.setattr(preflight, "_converse", lambda talk, spec, run, folder: act(talk))
        patch.setattr(Talk, "close", end)
        patch.setattr(preflight.time, "monotonic", clock.monotonic)  # type: ignore[attr-defined]
        command = Command(["true"], {**os.environ, "HPC_DDP_ATTEMPT": "0"})
        event = examine(run, ["n1"], [command], lambda: "")
    assert not list(run.path.glob(".preflight-*"))
    return event, patience


def test_an_examination_ends_with_an_outcome(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    event, patience = _examine(run, lambda talk: None, monkeypatch)
    assert (event["ok"], event["seconds"], patience) == (True, 7.0, [preflight.CLOSE_S])

    def fail(talk: Talk) -> None:
        talk.reports["n1"].bad.append(("silent", "x"))
        raise LaunchError

    assert _examine(run, fail, monkeypatch)[0]["why"] == "n1: x"

    def notice(talk: Talk) -> None:
        raise NoticedError("SIGTERM")

    event, patience = _examine(run, notice, monkeypatch)
    assert patience == [0.5]
    assert event == {
        **{"ok": False, "bad_nodes": [], "hopeless": False, "why": "ended early: SIGTERM"},
        **{"report": {}, "notice": "SIGTERM", "seconds": 7.0},
    }


@pytest.fixture
def main(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, printed: list[str]
) -> Iterator[Callable[..., int]]:
    """Call `preflight` as the batch script does, with the process's signals as they were after."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    for name in ("ATTEMPT", "NODES", "FABRIC"):
        monkeypatch.delenv(f"HPC_DDP_{name}", raising=False)

    def call(**environ: str) -> int:
        for name, value in {"HPC_DDP_RUN": str(run.path), **environ}.items():
            monkeypatch.setenv(name, value)
        return preflight.main(["srun"])

    yield call
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_it_is_called_with_the_attempts_nodes(
    run: RunFolder, main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, slurm_commands: Slurm
) -> None:
    seen: list[tuple[Any, ...]] = []

    def look(
        run: RunFolder, nodes: Sequence[str], commands: Sequence[Command], notice: Callable[[], str]
    ) -> dict[str, Any]:
        env = commands[0].env
        words = [notice()]
        run.attempt(int(env["HPC_DDP_ATTEMPT"])).notice.write_text("warning signal")
        words.append(notice())
        for number in (signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
        words.append(notice())
        run.attempt(0).notice.write_text("")
        seen.append((nodes, commands[0].argv, env["HPC_DDP_FABRIC"], words))
        return {**outcome({node: NodeReport() for node in nodes}), "seconds": 1.0}

    monkeypatch.setattr(preflight, "examine", look)
    slurm_commands.answer("scontrol", "n1\nn2\n")
    words = ["", "warning signal", "SIGHUP"]
    assert main(SLURM_JOB_NODELIST="n[1-2]") == 0
    assert main(HPC_DDP_NODES="n3", HPC_DDP_FABRIC="efa", HPC_DDP_ATTEMPT="0") == 0
    assert seen == [(["n1", "n2"], ["srun"], "auto", words), (["n3"], ["srun"], "efa", words)]
    assert len(slurm_commands.calls("scontrol")) == 1


def test_a_preflight_that_can_not_be_made_is_nobodys_fault(
    run: RunFolder, main: Callable[..., int], printed: list[str], slurm_commands: Slurm
) -> None:
    slurm_commands.answer("scontrol", err="Access denied", code=1)
    assert main(SLURM_JOB_NODELIST="n[1-2]") == 1
    event = raw_events(run.path)[-1]
    assert (event["ok"], event["bad_nodes"], event["hopeless"]) == (False, [], False)
    assert event["why"] == "the preflight could not be made: scontrol refused: Access denied"
    assert printed == [f"preflight: {event['why']}"]
