"""The preflight: are this attempt's nodes fit for it, and if not, which of them are unfit, and why?

``python <run>/lib/node.py preflight <srun …> <python> <run>/lib/node.py checks``

Runs in the batch shell, and starts `checks` as one task per node. What goes between them is carried
by srun, so that a node without the shared disk, or without a link to the others, is heard too. The
outcome is journalled as the event `preflight`; exit code 0 means that the training can start.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

from hpc_ddp import slurm
from hpc_ddp.core.attempt_env import AttemptEnv, variable
from hpc_ddp.core.checkpoints import published, read_manifest
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.file_io import read_word
from hpc_ddp.core.job.spec import JobSpec
from hpc_ddp.core.journal.events import PreflightEnded
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.checks import MARK, holds

# How long a stage may take after the last node that has come to it, in seconds. All but the import
# take less than two on healthy nodes; where many are busy, they come one after the other.
STAGE_S = {"hello": 40.0, "checked": 40.0, "imported": 300.0}
EXCHANGE_S = 60.0
EXCHANGES = ("done", "again", "third")  # the later ones only where a node seems to be slow
CLOSE_S = 5.0
SLOW = 5  # times slower than usual is a fault, not the weather, while processors are free
BUSY = 2.0  # load per processor
CLOCK_S = 1.0
NEEDED_BYTES = 100 << 20  # in the run folder, as long as no checkpoint tells what it takes

_TASK = re.compile(r"srun: error: .*?: tasks? ([\d,-]+): (.*)")
_LAUNCH = re.compile(r"srun: error: Task launch for \S+ failed on node (\S+): (.*)")
_LABEL = re.compile(r"\s*(\d+): ")


@dataclass
class NodeReport:
    """The report of one node.

    `bad` has a check and a reason each, `pairs` is the trouble with other nodes, `speeds` are
    those of sending to other nodes, in MB/s. `broken` is why it came into no process group, which
    may be any node's fault; `last` is its last word that was not meant for us.
    """

    hello: dict[str, Any] = field(default_factory=dict)
    stages: set[str] = field(default_factory=set)
    values: dict[str, Any] = field(default_factory=dict)
    bad: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    speeds: dict[str, float] = field(default_factory=dict)
    last: str = ""
    broken: str = ""
    ended: bool = False

    def take(self, line: dict[str, Any]) -> None:
        """Take in one line of `checks`."""
        if "stage" in line:
            self.stages.add(line["stage"])
        if line.get("stage") == "hello":
            self.hello = line
        self.values |= line.get("values", {})
        if "bad" in line:
            self.bad.append((line["bad"], line["why"]))
        elif "pair" in line:
            self.pairs.append(line)
        if "note" in line:
            self.notes.append(line["note"])
        self.broken = line.get("broken", self.broken)
        if "to" in line:
            self.speeds[line["to"]] = max(line["mb_s"], self.speeds.get(line["to"], 0.0))


Reports = dict[str, NodeReport]

# --- who is to blame -----------------------------------------------------------------------


def blame(pairs: Iterable[tuple[str, str]]) -> set[str]:
    """Return the fewest nodes that explain trouble between pairs of nodes.

    Whoever is in trouble with the most others is taken out first. Where that is more than one, as
    with the only link of two nodes, it can't be told which, and it is all of them.
    """
    uncovered, covering = {frozenset(pair) for pair in pairs}, set[str]()
    while uncovered:
        counts = Counter(node for pair in uncovered for node in pair)
        most = max(counts.values())
        covering |= {node for node, count in counts.items() if count == most}
        uncovered = {pair for pair in uncovered if not pair & covering}
    return covering


def find_misnamed(reports: Reports) -> None:
    """Tell apart who knows a wrong name from whose name is wrong.

    A way that leads to an address which the other node has not is a wrong name, too.
    """
    failing: dict[str, dict[str, str]] = {}
    for node, report in reports.items():
        for trouble in report.pairs:
            peer = trouble["pair"]
            addresses = reports[peer].hello.get("addresses", []) if peer in reports else []
            strange = (
                addresses
                and "." in trouble.get("address", "")
                and trouble["address"] not in addresses
            )
            if trouble["check"] == "name" or (trouble["check"] == "link" and strange):
                if trouble["check"] == "link":
                    trouble["why"] += f"; {peer} itself has {', '.join(addresses)}"
                trouble["check"] = "name"
                failing.setdefault(peer, {})[node] = trouble["why"]
    for name, why in failing.items():
        peers = set(reports) - {name}
        if peers <= set(why) and (len(peers) > 1 or name in why) and name in reports:
            reports[name].bad.append(("name", next(iter(why.values()))))
        else:
            for node in why:
                reports[node].bad.append(("name", why[node]))


def find_cut_off(reports: Reports, check: str, more: Iterable[tuple[str, str]] = ()) -> None:
    """Find whom the trouble of one kind between pairs of nodes comes from.

    `more` are pairs that no node has told of; a name that no node has stands for this shell.
    """
    blamed = {node for node, report in reports.items() if report.bad}  # these explain themselves
    lines = [
        (node, t) for node, report in reports.items() for t in report.pairs if t["check"] == check
    ]
    lines = [(node, t) for node, t in lines if not blamed & {node, t["pair"]}]
    first = min((t.get("turn", 0) for _, t in lines), default=0)  # the rest follows from these
    lines = [(node, t) for node, t in lines if t.get("turn", 0) == first]
    more = [pair for pair in more if not blamed & set(pair)]
    guilty = blame([*((node, t["pair"]) for node, t in lines), *more])
    for node in guilty & set(reports):
        of_node = [t["why"] for peer, t in lines if peer == node]
        of_peers = [f"{peer}: {t['why']}" for peer, t in lines if t["pair"] == node]
        why = (of_node or of_peers or ["what it writes does not come to the first node"])[0]
        reports[node].bad.append((check, why))


def find_slow(reports: Reports) -> dict[str, str]:
    """Return the nodes that are far slower than most others at their best, with the reasons.

    Of two nodes the link between them is judged: slow in one direction only. Where a node's load
    is n times its processors, each node may be n times slower.
    """
    slack = SLOW * max([1.0, *(report.values.get("load", 0.0) for report in reports.values())])
    best = {
        node: max([*reports[node].speeds.values(), *_into(reports, node).values()], default=0.0)
        for node in reports
    }
    usual = median([speed for speed in best.values() if speed] or [0.0])
    ways = [(a, b, speed) for a, report in reports.items() for b, speed in report.speeds.items()]
    slow = [(a, b) for a, b, speed in ways if speed < usual / slack]
    reasons = {}
    for node in blame(slow):
        a, b = next(pair for pair in slow if node in pair)
        way = f"to {b}" if a == node else f"from {a}"
        reasons[node] = (
            f"{_speed(reports[a].speeds[b])} {way}, while others come to {_speed(usual)}"
        )
    return reasons


def _speed(mb_s: float) -> str:
    return f"{mb_s / 1000:.1f} GB/s" if mb_s >= 1000 else f"{mb_s:.3g} MB/s"


def _into(reports: Reports, node: str) -> dict[str, float]:
    """Return the speeds of the others' sending to a node."""
    return {a: report.speeds[node] for a, report in reports.items() if node in report.speeds}


def find_other_torch(reports: Reports) -> None:
    """Find nodes whose torch is not that of most others, or of the first one."""
    versions = [report.values["torch"] for report in reports.values() if "torch" in report.values]
    usual = Counter(versions).most_common(1)[0][0] if versions else None  # ties: the first
    for report in reports.values():
        version = report.values.get("torch", usual)
        if version != usual:
            report.bad.append(("torch", f"torch {version}, while others have {usual}"))
        if report.values.get("devices") == 0 and report.values.get("gpus_there"):
            why = "torch sees no GPU here, or is built without their backend, as NCCL"
            report.bad.append(("torch", why))


def find_other_fabric(reports: Reports, used: bool) -> None:
    """Find nodes without the interconnect that others have, or with fewer cards of it.

    Without GPUs, or over Ethernet by wish, it is not `used`, and only noted.
    """
    fabrics = [
        (report.values["fabric"], report.values["cards"])
        for report in reports.values()
        if "fabric" in report.values
    ]
    usual = Counter(pair for pair in fabrics if pair[0]).most_common(1)
    if not usual:
        return
    (name, cards), _ = usual[0]
    for report in reports.values():
        fabric, count = report.values.get("fabric", name), report.values.get("cards", cards)
        if fabric != name:
            why = f"{fabric or 'no fast network that we know'} here, while others have {name}"
            report.bad.append(("fabric", why)) if used else report.notes.append(why)
        elif count != cards:
            report.notes.append(f"{count} cards of {name}, while others have {cards}")


def note_odd(reports: Reports) -> None:
    """Note busy processors, and clocks that differ: logs are hard to read then, for one."""
    for report in reports.values():
        if report.values.get("load", 0.0) > BUSY:
            report.notes.append(f"busy already: a load of {report.values['load']} per processor")
    ahead = {node: report.values.get("clock_s", 0.0) for node, report in reports.items()}
    usual = median(ahead.values())
    if max(ahead.values()) - min(ahead.values()) > CLOCK_S:
        node = max(ahead, key=lambda node: abs(ahead[node] - usual))
        reports[node].notes.append(
            f"its clock is {ahead[node] - usual:+.1f} s off that of the others"
        )


def outcome(reports: Reports) -> dict[str, Any]:
    """Return what is journalled, from all that the nodes have told and that was found.

    What all nodes have in common is not theirs: then `bad_nodes` is empty. `hopeless` says that it
    would be the same with other nodes.
    """
    bad = [node for node, faults in reports.items() if faults.bad]
    checks = [{check for check, _ in faults.bad} for faults in reports.values()]
    # Who says nothing may have the same to say, but one alone speaks for itself.
    telling = [faults for faults in checks if not faults or faults - {"silent", "step"}]
    alone = len(telling) < 2 <= len(reports)
    shared = set.intersection(*(checks if alone or not telling else telling))
    if len(reports) == 1:  # it can't be compared with another one
        shared &= {"torch", "ended", "scratch", "step"}
    if len(reports) == 2:  # what is between them is not in common
        shared -= {"link", "bandwidth"}
    reasons = [f"{node}: {reports[node].bad[0][1]}" for node in bad]
    if shared:
        reasons = [next(why for check, why in reports[bad[0]].bad if check in shared)]
        reasons[0] += " (the same on all nodes)" if len(reports) > 1 else ""
    more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return {
        "ok": not bad,
        "bad_nodes": [] if shared else bad,
        "hopeless": bool(shared - {"silent", "step"}),
        "why": "; ".join(reasons[:3]) + more,
        "report": {node: _report(reports, node) for node in reports},
    }


def _report(reports: Reports, node: str) -> dict[str, Any]:
    """Return what the journal has of one node."""
    report = reports[node]
    speeds = {"send_mb_s": report.speeds, "receive_mb_s": _into(reports, node)}
    return {
        **report.values,
        **{name: max(values.values()) for name, values in speeds.items() if values},
        "bad": [{"check": check, "why": why} for check, why in report.bad],
        "notes": report.notes,
    }


# --- talking with the nodes ----------------------------------------------------------------


class NoticedError(Exception):
    """A notice asks the attempt to end."""


class LaunchError(Exception):
    """Slurm could not start a node's task, and ends those of the others for it."""


@dataclass(frozen=True)
class Command:
    """The command that starts `checks`: on all nodes, or on the one named `node`."""

    argv: Sequence[str]
    env: Mapping[str, str]
    node: str | None = None


class Talk:
    """Asks all nodes, and listens to them.

    Parameters
    ----------
    notice
        returns a word once somebody wants the attempt to end, '' before
    log
        where to put what is not meant for us
    """

    def __init__(
        self,
        nodes: Sequence[str],
        commands: Sequence[Command],
        notice: Callable[[], str],
        log: Path,
    ) -> None:
        self.reports: Reports = {node: NodeReport() for node in nodes}
        self._nodes, self._notice = nodes, notice
        self._lines: queue.Queue[tuple[Command, str | None]] = queue.Queue()
        self._log = log if log.parent.is_dir() else None
        self._last = ""
        self._processes = []
        self._readers = []
        for command in commands:
            pipe = subprocess.PIPE
            process = subprocess.Popen(
                command.argv, env=command.env, stdin=pipe, stdout=pipe, stderr=pipe
            )
            self._processes.append(process)
            args = (command, process)
            self._readers.append(threading.Thread(target=self._read, args=args, daemon=True))
            self._readers[-1].start()

    def _read(self, command: Command, process: subprocess.Popen[bytes]) -> None:
        """Put all lines of a process into the queue, and None at its end."""

        def put(stream: IO[bytes] | None) -> None:
            for line in stream or ():
                self._lines.put((command, line.decode(errors="replace").rstrip()))

        errors = threading.Thread(target=put, args=(process.stderr,), daemon=True)
        errors.start()
        put(process.stdout)
        errors.join()
        self._lines.put((command, None))

    def ask(self, **question: Any) -> None:
        """Send a line to all nodes."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.write(json.dumps(question).encode() + b"\n")
                process.stdin.flush()

    def until(self, stage: str, nodes: Sequence[str]) -> list[str]:
        """Wait until nodes have come to a stage, are bad, or time is over; return the ones there.

        Those that are not there without having told why are bad from now on. The time begins anew
        with each node that comes: one that is lost is late by comparison with the others.

        Raises
        ------
        NoticedError
            somebody wants the attempt to end
        LaunchError
            Slurm could not start a node's task
        """
        limit_s = STAGE_S.get(stage, EXCHANGE_S)
        begin = came_at = time.monotonic()
        waiting = set(nodes)
        while waiting and time.monotonic() < came_at + limit_s:
            with contextlib.suppress(queue.Empty):
                self._take(*self._lines.get(timeout=0.2))
            if word := self._notice():
                raise NoticedError(word)
            missing = {
                n for n in waiting if stage not in self.reports[n].stages and not self._over(n)
            }
            if missing < waiting:
                came_at = time.monotonic()
            waiting = missing
        waited_s = time.monotonic() - begin
        for node in nodes:
            report = self.reports[node]
            if stage in report.stages or report.bad:
                continue
            if report.ended:
                report.bad.append(("ended", f"ended early: {report.last or 'without a word'}"))
            elif not self._running():  # for the controller's sake, say: no fault of a node
                report.bad.append(("step", f"srun has ended without it: {self._last or 'no word'}"))
            else:
                last_words = f" ({self._last})" if self._last else ""
                report.bad.append(
                    ("silent", _LATE.get(stage, _LATE["done"]).format(s=waited_s) + last_words)
                )
        return [node for node in nodes if not self.reports[node].bad]

    def _over(self, node: str) -> bool:
        """Tell whether no more is to be expected of a node."""
        report = self.reports[node]
        return report.ended or not self._running() or "torch" in dict(report.bad)

    def _running(self) -> bool:
        return any(thread.is_alive() for thread in self._readers) or not self._lines.empty()

    def _take(self, command: Command, line: str | None) -> None:
        if line is None:
            if command.node:
                self.reports[command.node].ended = True
            return
        label = None if command.node else _LABEL.match(line)
        node = self._nodes[int(label[1])] if label and int(label[1]) < len(self._nodes) else None
        text = line[label.end() :] if label and node else line
        if text.startswith(MARK):
            self._hear(text[len(MARK) :])
            return
        if self._log:
            with open(self._log, "a") as log:
                print(line, file=log)
        if failed := _LAUNCH.match(text):
            if failed[1] in self.reports:
                self.reports[failed[1]].bad.append(
                    ("silent", f"Slurm can't start a task: {failed[2]}")
                )
            raise LaunchError
        if task := _TASK.match(text):
            for index in _numbers(task[1]):
                self.reports[self._nodes[index]].ended = True
                self.reports[self._nodes[index]].last = (
                    self.reports[self._nodes[index]].last or task[2]
                )
        elif node or command.node:
            self.reports[node or command.node or ""].last = text
        elif text:
            self._last = text

    def _hear(self, text: str) -> None:
        try:
            line = json.loads(text)
            if "notice" in line:
                raise NoticedError(line["notice"])
            self.reports[line["node"]].take(line)
        except (ValueError, KeyError):  # torn: its node will be missed
            return

    def close(self, patience_s: float) -> None:
        """Let the nodes end, then end them."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
        for end_it in (lambda p: None, subprocess.Popen.terminate, subprocess.Popen.kill):
            for process in self._processes:
                end_it(process)
            end = time.monotonic() + patience_s
            while any(p.poll() is None for p in self._processes) and time.monotonic() < end:
                time.sleep(0.02)
        for thread in self._readers:
            thread.join(1)
        for process in self._processes:
            for stream in (process.stdout, process.stderr):
                if stream:
                    stream.close()


_LATE = {
    "hello": "no word within {s:.0f} s",
    "checked": "its checks do not end within {s:.0f} s: a disk or a name server gives no answer",
    "imported": "import torch does not end within {s:.0f} s",
    "done": "the exchange with other nodes does not end within {s:.0f} s",
}


def _numbers(text: str) -> list[int]:
    """Return the numbers of a list such as ``1-3,5``."""
    cpus: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        cpus += range(int(low), int(high or low) + 1)
    return cpus


# --- the order of things -------------------------------------------------------------------


def examine(
    run: RunFolder, nodes: Sequence[str], commands: Sequence[Command], notice: Callable[[], str]
) -> dict[str, Any]:
    """Have all nodes looked at; return the fields of the event `preflight`."""
    spec = JobSpec.from_json(run.job_json.read_text())
    attempt = AttemptEnv.from_env(commands[0].env).attempt_folder
    folder = Path(tempfile.mkdtemp(prefix=".preflight-", dir=run.path))
    begin = time.monotonic()
    talk = Talk(nodes, commands, notice, attempt.path / "preflight.log")
    patience_s = CLOSE_S
    try:
        _converse(talk, spec, run, folder)
        result = outcome(talk.reports)
    except LaunchError:
        result = outcome(talk.reports)
    except NoticedError as error:
        patience_s = 0.5
        why = f"ended early: {error}"
        result = {"ok": False, "bad_nodes": [], "hopeless": False, "why": why, "report": {}}
        result["notice"] = str(error)
    finally:
        talk.close(patience_s)
        shutil.rmtree(folder, ignore_errors=True)
    return {**result, "seconds": round(time.monotonic() - begin, 1)}


def _converse(talk: Talk, spec: JobSpec, run: RunFolder, folder: Path) -> None:
    reports, secret = talk.reports, secrets.token_hex(16)
    (folder / ".shell").write_text(secret)
    talk.ask(folder=str(folder), secret=secret, gpus=spec.gpu_count, needed=_needed(run))
    heard = talk.until("hello", list(reports))
    talk.ask(ports={node: reports[node].hello["port"] for node in heard})
    checked = talk.until("checked", heard)
    unseen = [(".shell", node) for node in checked if not holds(folder / node, secret)]
    find_misnamed(reports)
    find_cut_off(reports, "scratch", unseen)
    find_cut_off(reports, "link")
    find_other_fabric(reports, used=bool(spec.gpu_count) and spec.fabric != "ethernet")
    note_odd(reports)
    imported = talk.until("imported", [node for node in checked if not reports[node].bad])
    find_other_torch(reports)
    members = [node for node in imported if not reports[node].bad]
    if len(members) < 2:
        return
    first = reports[members[0]]
    device = _common_device(reports, members) if spec.gpu_count else "cpu"
    host, port = first.hello["host"], first.hello["store_port"]
    talk.ask(members=members, host=host, port=port, device=device)
    for stage in EXCHANGES:
        talk.until(stage, members)
        find_cut_off(reports, "bandwidth")
        broken = [node for node in members if reports[node].broken]
        if broken and not any(report.bad for report in reports.values()):
            for node in broken:
                reports[node].bad.append(("bandwidth", reports[node].broken))
        slow = find_slow(reports)
        if not slow or broken:
            break
        talk.ask(again=True)  # a busy processor may have made it seem so
    else:
        for node, why in slow.items():
            # That all are slower than each other is nobody's fault.
            too_many = len(slow) == len(members) > 2
            reports[node].notes.append(why) if too_many else reports[node].bad.append(
                ("bandwidth", why)
            )


def _common_device(reports: Reports, members: Sequence[str]) -> str:
    """Return the type of device that all members send from: the CPU where they differ, noted."""
    kinds = {node: reports[node].values["device"] or "cpu" for node in members}
    if len(set(kinds.values())) == 1:
        return kinds[members[0]]
    for node, kind in kinds.items():
        reports[node].notes.append(
            f"torch's device is {kind} here; speeds are of CPUs, as they differ"
        )
    return "cpu"


def _needed(run: RunFolder) -> int:
    """Return the bytes that the run's folder needs: the newest checkpoint, and a new one."""
    for path in published(run.checkpoints)[:1]:
        with contextlib.suppress(OSError, ValueError, KeyError):
            sizes = [facts["size"] for facts in read_manifest(path)["files"].values()]
            return max(NEEDED_BYTES, 2 * int(sum(sizes)))
    return NEEDED_BYTES


def conclude(run: RunFolder, attempt: int, result: dict[str, Any]) -> bool:
    """Journal the outcome, say it, and return whether the training can start."""
    run.journal("batch", attempt).write(PreflightEnded(**result))
    for node, report in result["report"].items():
        for bad in report["bad"]:
            say(f"preflight: {node}: {bad['why']}")
        for note in report["notes"]:
            say(f"preflight: {node}: note: {note}")
    if result["ok"]:
        count = len(result["report"])
        are = "nodes are" if count > 1 else "node is"
        say(f"preflight: {count} {are} fit, after {result['seconds']} s")
    return bool(result["ok"])


def main(argv: list[str]) -> int:
    environ = dict(os.environ)
    signals: list[str] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: signals.append(signal.Signals(number).name))
    environ.setdefault(variable("attempt"), "0")  # by hand in an allocation there is no attempt
    env = AttemptEnv.from_env(environ)
    run, attempt = env.run_folder, env.attempt_folder
    try:
        spec = JobSpec.from_json(run.job_json.read_text())
        environ.setdefault(variable("fabric"), spec.fabric)
        nodes = [*env.nodes] or slurm.expand_hosts(environ["SLURM_JOB_NODELIST"])
        environ[variable("nodes")] = " ".join(nodes)
        result = examine(
            run,
            nodes,
            [Command(argv, environ)],
            lambda: signals[0] if signals else read_word(attempt.notice),
        )
    except (HpcDdpError, OSError) as error:  # no answer, no srun, no space for a word
        why = f"the preflight could not be made: {error}"
        result = {"ok": False, "bad_nodes": [], "hopeless": False, "why": why, "report": {}}
        result["seconds"] = 0.0
        say(f"preflight: {why}")
    return 0 if conclude(run, attempt.number, result) else 1
