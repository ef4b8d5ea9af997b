"""A run, read once for a page: its facts, its state, its curves; and amounts as text."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any

from hpc_ddp import slurm
from hpc_ddp.report.curves import Curve, curves_of
from hpc_ddp.report.evidence import Facts, gather
from hpc_ddp.report.explain import Explanation, explain
from hpc_ddp.report.status import Status, status_of
from hpc_ddp.run import goodput
from hpc_ddp.run.errors import HpcDdpError
from hpc_ddp.run.folder import RunFolder
from hpc_ddp.run.journal import FROM_LOGIN_NODE, Event
from hpc_ddp.run.spec import JobSpec

AT_WORK = ("running", "starting", "ending", "suspended")
_LOOKS = {  # state: a sign beside its word, and the kind of colour
    "finished": ("✓", "good"),
    "running": ("▶", "busy"),
    "starting": ("▶", "busy"),
    "ending": ("▶", "busy"),
    "waiting": ("…", "calm"),
    "rendered": ("○", "calm"),
    "suspended": ("⏸", "warn"),
    "stopped": ("⏸", "warn"),
    "cancelled": ("⏹", "warn"),
    "array": ("▤", "calm"),
}
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True)
class Story:
    """A run, read once: `begin` and `end` of its wall time in unix seconds."""

    run: RunFolder
    facts: Facts
    status: Status
    found: Explanation
    pieces: Sequence[goodput.Piece]
    curves: Mapping[str, Curve]

    @property
    def events(self) -> list[Event]:
        return list(self.facts.events)

    @cached_property
    def attempts(self) -> dict[int, list[Event]]:
        """The events of each attempt, without the login node's."""
        found: dict[int, list[Event]] = {}
        for event in self.facts.events:
            if event["event"] not in FROM_LOGIN_NODE:
                found.setdefault(event["attempt"], []).append(event)
        return found

    @property
    def begin(self) -> float:
        return self.pieces[0].begin if self.pieces else self.facts.now

    @property
    def end(self) -> float:
        return self.pieces[-1].end if self.pieces else self.facts.now

    @cached_property
    def seconds(self) -> dict[str, float]:
        """What the wall time went into, by the parts of the goodput."""
        found = dict.fromkeys(goodput.PARTS, 0.0)
        for piece in self.pieces:
            found[piece.part] += piece.end - piece.begin
        return found

    @property
    def goodput(self) -> str:
        found = goodput.share(self.seconds)
        return "–" if found is None else f"{found:.0%}"

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())


def read_story(run: RunFolder, jobs: Mapping[str, slurm.Queued]) -> Story:
    facts = gather(run)
    status = status_of(run, jobs)
    waits = status.state == "waiting"
    now = facts.now if waits or status.state in AT_WORK else None
    pieces = goodput.pieces(list(facts.events), now, waits)
    begin = pieces[0].begin if pieces else 0.0
    return Story(run, facts, status, explain(facts), pieces, curves_of(facts.events, begin))


def head_of(story: Story) -> dict[str, Any]:
    sign, look = _LOOKS.get(story.status.state, ("✕", "bad"))
    return {
        "name": story.run.name,
        "id": story.run.id,
        "path": str(story.run.path),
        "job": story.status.job_id,
        "state": story.status.state,
        "sign": sign,
        "look": look,
        "text": story.found.text,
        "hint": story.found.hint,
    }


def spec_of(run: RunFolder) -> JobSpec | None:
    try:
        return JobSpec.from_json(run.job_json.read_text())
    except (OSError, ValueError, HpcDdpError):
        return None


def settings_of(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that are not what they are by themselves, as text."""
    usual = {f.name: f.default for f in fields(JobSpec) if f.default is not MISSING}
    found = {}
    for name, value in spec.items():
        if name in ("name", "args") or value in (None, [], {}, False, ""):
            continue
        if usual.get(name, MISSING) == value and name != "nodes":
            continue
        found[name.replace("_", "-")] = as_text(value)
    return found


def as_text(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{name}={as_text(each)}" for name, each in value.items())
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def nodes_of(events: Sequence[Event]) -> list[str]:
    listed = [e.get("nodes") or e.get("hosts") for e in events]
    return next(([str(node) for node in each] for each in listed if isinstance(each, list)), [])


def natural(name: str) -> list[tuple[int, str]]:
    return [(int(p) if p.isdecimal() else -1, p) for p in re.split(r"(\d+)", name)]


def numbers_in(value: Any) -> list[float]:
    good = isinstance(value, list) and all(isinstance(v, (int, float)) for v in value)
    return [max(0.0, float(v)) for v in value] if good else []


def clean(text: str) -> str:
    """Return a text without colours and other control characters."""
    return _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def span(value: float) -> str:
    """Return a time span in its two biggest units."""
    if value < 9.95:
        return f"{value:.1f} s"
    if value < 119.5:
        return f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02} min"
    return f"{hours // 24} d {hours % 24} h"


def brief(value: float | None) -> str:
    """Return a short time in seconds or milliseconds."""
    if value is None:
        return "–"
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


def count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def size(value: float | None) -> str:
    if value is None:
        return "–"
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    size, unit = next(((s, u) for s, u in units if value >= s), (1.0, "B"))
    return f"{value / size:.3g} {unit}"


def clock(when: float) -> str:
    try:
        return time.strftime("%a %d %b %H:%M:%S", time.localtime(when))
    except (OverflowError, ValueError, OSError):
        return "–"
