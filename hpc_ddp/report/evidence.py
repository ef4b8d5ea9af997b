"""What is known of a run: its journal, the nodes' records, the logs, and Slurm's own record.

Whatever is half-written, damaged or somebody else's reads as missing; nothing here raises for it.
"""

from __future__ import annotations

import re
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from hpc_ddp import slurm
from hpc_ddp.report.causes import recognise
from hpc_ddp.run import checkpoints, process
from hpc_ddp.run.errors import HpcDdpError
from hpc_ddp.run.folder import AttemptFolder, NodeFolder, RunFolder, read_json, read_tail
from hpc_ddp.run.journal import Event, last_event

TAIL_BYTES = 32 * 1024

T = TypeVar("T")


def number(event: Mapping[str, Any], name: str) -> int | None:
    value = event.get(name)
    return int(value) if isinstance(value, (int, float)) and abs(value) < 1e15 else None


def text_of(event: Mapping[str, Any], name: str) -> str:
    value = event.get(name)
    return value if isinstance(value, str) else ""


def is_by_hand(events: Sequence[Event]) -> bool:
    """Tell whether the newest attempt is a plain ``python X.py``, or torchrun: nobody kept what
    it printed, and nobody has judged its end."""
    last = last_event(list(events), "submitted", "started")
    return last is not None and last["event"] == "started" and last.get("backend") == "local"


@dataclass(frozen=True)
class Failure:
    """A rank (None: torchrun itself) that did not end well; `code` negative for a signal."""

    rank: int | None
    node: str
    error: str
    code: int = 1
    time: float = 0.0

    @property
    def was_ended(self) -> bool:
        return self.code in (-signal.SIGTERM, 128 + signal.SIGTERM)

    @property
    def follows(self) -> bool:
        """It says that others had gone, or was ended by us: hardly the cause."""
        found = recognise(self.error) if self.error else None
        return self.was_ended or (found is not None and found[0].kind == "communication")


@dataclass(frozen=True)
class Facts:
    """All that an explanation rests on.

    Attributes
    ----------
    path, spec
        the run's folder, and what its ``job.json`` says
    events
        the journal; `attempts` the numbers of the attempts that have a folder
    job_id, record, refusal
        the job that counts now, and Slurm's record of it; None, and what Slurm said, without one
    cancelled, live
        the user's mark; a process of this machine plays the run
    saved
        the step of the newest checkpoint on disk
    failure
        what ended the newest attempt, as far as the nodes' records tell
    ended
        the ranks that were ended by us, since others failed
    rank_log, agent_log, job_log
        the ends of what the failed rank, its torchrun, and the job have printed
    stands
        of a hang: rank to the place in the code where it stood
    tasks
        the same of an array's tasks, by their number
    """

    path: Path
    now: float
    spec: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Event] = ()
    attempts: Sequence[int] = ()
    job_id: str | None = None
    record: slurm.Record | None = None
    refusal: str = ""
    cancelled: bool = False
    live: bool = False
    saved: int | None = None
    failure: Failure | None = None
    ended: Sequence[int] = ()
    rank_log: str = ""
    agent_log: str = ""
    job_log: str = ""
    stands: Mapping[int, str] = field(default_factory=dict)
    tasks: Mapping[str, Facts] = field(default_factory=dict)

    @cached_property  # asked for each event
    def newest(self) -> int | None:
        """The newest attempt, by its folder or by what it has journaled."""
        told = [e["attempt"] for e in self.events if e["event"] == "started"]
        return max([*self.attempts, *told], default=None)

    @property
    def verdict(self) -> Event | None:
        """The newest attempt's verdict, unless the run was submitted again after it."""
        last = last_event(list(self.events), "verdict")
        again = max((number(e, "first_attempt") or 0 for e in self.of("submitted")), default=0)
        if last is None or last["attempt"] != self.newest or last["attempt"] < again:
            return None
        return last

    def of(self, *names: str, attempt: int | None = None) -> list[Event]:
        return [e for e in self.events if e["event"] in names and attempt in (None, e["attempt"])]

    @property
    def is_ours(self) -> bool:
        """The script uses hpc_ddp.training, so that its progress is known."""
        return bool(self.of("first_step", "restored", "training", "finished"))

    @property
    def by_hand(self) -> bool:
        return is_by_hand(self.events)

    @property
    def again(self) -> str:
        """The command that goes on with the run."""
        if self.by_hand:
            return "the same command again"
        command = {
            "local": "hpc-ddp dry-run",
            "salloc": "hpc-ddp submit --backend salloc",
        }.get(str(self.spec.get("backend")), "hpc-ddp submit")
        return f"{command} --run {shlex.quote(str(self.path))}"


# --- gathering -----------------------------------------------------------------------------


def gather(run: RunFolder) -> Facts:
    """Read a run's folder, and ask Slurm where the run has a job."""
    events = [event for event in _try(run.events, list[Event]()) if _is_sound(event)]
    attempts = _try(run.attempts, list[AttemptFolder]())
    facts = Facts(
        path=run.path,
        now=time.time(),
        spec=read_json(run.job_json),
        events=events,
        attempts=[attempt.number for attempt in attempts],
        cancelled=_try(run.cancelled.exists, False),
        live=_is_live(events),
        saved=_try(lambda: _newest_checkpoint(run.checkpoints), None),
        job_log=_job_log(run),
        tasks=_tasks(run),
    )
    facts = replace(facts, **_asked(_try(lambda: run.job_ids(events), list[str]())))
    if attempts:
        facts = replace(facts, **_end_of(facts, attempts[-1]))
    return facts


def _try(call: Callable[[], T], otherwise: T) -> T:
    """Return what a look at the disk or at Slurm gives, `otherwise` where that fails."""
    try:
        return call()
    except (OSError, ValueError, HpcDdpError):
        return otherwise


_NUMBERS = ("step", "total_steps", "stall_s", "write_s", "restore_s", "began", "called", "rank")


def _is_sound(event: Event) -> bool:
    """Tell whether what we reckon with is numbers; damage can make anything of a line."""
    return all(
        event.get(name) is None
        or (isinstance(event[name], (int, float)) and abs(event[name]) < 1e15)
        for name in ("time", "attempt", *_NUMBERS)
        if (event.get("event"), name) != ("started", "began")  # of a process: only compared
    )


def _is_live(events: Sequence[Event]) -> bool:
    started = last_event(list(events), "started")
    return started is not None and _try(lambda: process.is_live(started), False)


def _newest_checkpoint(folder: Path) -> int | None:
    found = checkpoints.published(folder)
    return checkpoints.step_of(found[0]) if found else None


def _job_log(run: RunFolder) -> str:
    paths = _try(lambda: sorted(run.logs.glob("slurm*.out")), list[Path]())
    return _tail(paths[-1]) if paths else ""


def _tasks(run: RunFolder) -> dict[str, Facts]:
    return {str(task.index): gather(task) for task in _try(run.tasks, list[RunFolder]())}


def _asked(jobs: Sequence[str]) -> dict[str, Any]:
    """Ask Slurm for the job that counts: of a chain the link that runs, else the newest known."""
    known: dict[str, slurm.Record] = {}
    refusal = ""
    for job in jobs[-2:]:
        try:
            known[job] = slurm.record(job)
        except HpcDdpError as error:
            refusal = error.message
            continue
        if known[job].state in ("RUNNING", "COMPLETING"):
            return {"job_id": job, "record": known[job]}
    newest = jobs[-1] if jobs else None
    last = next(reversed(known), newest)
    return {"job_id": last, "record": known.get(last or ""), "refusal": refusal}


def _end_of(facts: Facts, attempt: AttemptFolder) -> dict[str, Any]:
    """Read what the nodes and ranks of an attempt left of its end."""
    nodes = _try(attempt.nodes, list[NodeFolder]())
    found = [failure for node in nodes for failure in _failures(node)]
    # Of the last start: workers may have failed before and been started again.
    begun = max((e["time"] for e in facts.of("worker", attempt=attempt.number)), default=0)
    found += [
        Failure(number(e, "rank"), text_of(e, "node"), text_of(e, "error"), 1, e["time"])
        for e in facts.of("failed", attempt=attempt.number)
        if e["time"] > begun
    ]
    failure = _culprit(facts, found)
    node = attempt.node(failure.node) if failure and _is_name(failure.node) else None
    rank = failure.rank if failure else None
    return {
        "failure": failure,
        "ended": sorted({f.rank for f in found if f.was_ended and f.rank is not None}),
        "rank_log": _tail(node.rank_log(rank)) if node and rank is not None else "",
        "agent_log": _tail(node.agent_log) if node else "".join(map(_agent_tail, nodes)),
        "stands": _stands(nodes),
    }


def _agent_tail(node: NodeFolder) -> str:
    return _tail(node.agent_log)[-2000:]


def _is_name(node: str) -> bool:
    return bool(node) and not set(node) & {"/", "\0"}


def _failures(node: NodeFolder) -> list[Failure]:
    lists = [read_json(path).get("failures") for path in node.records()]
    return [
        Failure(
            rank=number(each, "rank"),
            node=node.path.name,
            error=text_of(each, "error"),
            code=number(each, "code") or 1,
            time=float(number(each, "time") or 0),
        )
        for listed in lists
        for each in (listed if isinstance(listed, list) else [])
        if isinstance(each, dict)
    ]


def _culprit(facts: Facts, found: Sequence[Failure]) -> Failure | None:
    """Return the failure that the verdict names, and without one the first that is a cause."""
    verdict = facts.verdict
    if verdict and "node" in verdict:
        rank, node, error = (
            number(verdict, "rank"),
            text_of(verdict, "node"),
            text_of(verdict, "error"),
        )
        same = [f for f in found if (f.rank, f.node) == (rank, node)]
        code = next((f.code for f in same), number(verdict, "exit_code") or 1)
        told = next((f.error for f in same if f.error), "")
        return Failure(rank, node, error or told, code)
    return min(found, key=lambda f: (f.follows, f.time), default=None)


def _tail(path: Path) -> str:
    return read_tail(path, TAIL_BYTES)


_FRAME = re.compile(r'^ +File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>.+)$', re.M)
_LIBRARY = re.compile(r"site-packages|/lib/python|/lib/hpc_ddp/|^<")


def _stands(nodes: Sequence[NodeFolder]) -> dict[int, str]:
    """Return where in the user's code the ranks stood that wrote their stacks as they hung."""
    found = {}
    for node in nodes:
        for path in sorted(node.path.glob("stack-rank-*.txt")):
            number = path.stem.removeprefix("stack-rank-")
            main = _tail(path).rpartition("hread 0x")[2]  # the main thread comes last
            place = place_in(main, newest_first=True)
            if number.isdecimal() and place:
                found[int(number)] = place
    return found


def place_in(text: str, newest_first: bool = False) -> str:
    """Return the innermost line of a traceback that is in the user's code."""
    frames = list(_FRAME.finditer(text))
    if newest_first:
        frames.reverse()
    own = [frame for frame in frames if not _LIBRARY.search(frame["file"])]
    if not own:
        return ""
    return f"{Path(own[-1]['file']).name} line {own[-1]['line']}"
