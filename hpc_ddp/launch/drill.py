"""Try on this machine whether a script resumes right: disturb it, and compare.

One undisturbed run, and one that is disturbed three times and resumed after each:

1. stopped politely, as by a preemption with a grace time
2. killed hard, some steps after a checkpoint
3. killed while it saves; then a byte of the newest checkpoint is flipped

`hpc_ddp.training.drill` records each step of both as digests. As soon as an attempt differs from
the undisturbed run the drill is over, since the disturbance before is the cause.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_ddp.launch import compare
from hpc_ddp.launch.backends import LocalBackend
from hpc_ddp.launch.compare import Curve, Difference, Record
from hpc_ddp.launch.config import Settings
from hpc_ddp.launch.plan import PreparedRun, plan_new
from hpc_ddp.run import checkpoints
from hpc_ddp.run.errors import CAN_GO_ON, HpcDdpError, UsageError
from hpc_ddp.run.folder import RunFolder
from hpc_ddp.run.journal import Event, last_event, read_events
from hpc_ddp.run.process import signal_recorded

PLAN = "HPC_DDP_DRILL"
LEAST_STEPS = 8
TRAINING_S = 30.0  # of an undisturbed run, without --steps
PLAIN_S = 600.0  # in this time a script has to call `start`, or to end by itself
PRINT_EVERY_S = 15.0
LOG_LINES = 30
TOO_LONG = 124  # as the code of timeout(1)

Disturbance = Callable[[subprocess.Popen[bytes], RunFolder], None]
NOT_RESTORED: Event = {"step": None, "passed_over": []}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Points:
    """The steps at which a run is disturbed: it is stopped, saves, is killed (in a save, too)."""

    stop: int
    save: int
    kill: int


@dataclass(frozen=True)
class Leg:
    """One attempt of the disturbed run: the recorder's plan, and how the attempt is ended.

    The run has to resume from step `least_step` at the earliest.
    """

    name: str
    plan: dict[str, Any]
    disturbance: Disturbance | None = None
    least_step: int = 0


@dataclass(frozen=True)
class Row:
    """A disturbance and its outcome; `resumed_from` is the step of the checkpoint taken up."""

    done: str
    survived: bool
    resumed_from: int | None = None
    passed_over: tuple[str, ...] = ()
    curve: Curve = field(default_factory=Curve)
    difference: Difference | None = None


@dataclass
class Report:
    """`verdict` is ``right``, ``sums`` (right but for the order of sums), ``wrong``,
    ``unsteady`` (two undisturbed runs differ already), ``broken`` (it did not go on), or
    ``plain`` (a script that uses nothing of hpc-ddp has survived)."""

    script: str
    folder: Path
    steps: int = 0
    verdict: str = "right"
    why: str = ""
    hint: str = ""
    notes: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.verdict in ("right", "sums", "plain")

    def text(self) -> str:
        """Return the result as a person reads it: what was done, what came of it, the verdict."""
        lines = [" ".join(cells).rstrip() for cells in _aligned([HEAD, *map(_cells, self.rows)])]
        lines += [f"note: {note}" for note in self.notes]
        name = Path(self.script).name
        verdict = {
            "right": f"{name} resumes right: every step is equal, bit for bit, and so are the final"
            " weights",
            "sums": f"{name} resumes right, up to rounding: {self.why}",
            "wrong": f"{name} does NOT resume right. {self.why}",
            "unsteady": f"{name} is not reproducible: {self.why}",
            "broken": f"{name} does NOT go on. {self.why}",
            "plain": f"{name} survives. {self.why}",
        }[self.verdict]
        lines += ["", verdict]
        lines += [f"hint: {self.hint}"] if self.hint else []
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok, "folder": str(self.folder) if not self.ok else None}


def drill(settings: Settings, cwd: Path, root: Path, steps: int | None, say: Say) -> Report:
    """Play the job here, undisturbed and disturbed, and compare. All run folders are below
    ``<root>/.drills``, and stay only where something was wrong.

    Parameters
    ----------
    steps
        at which to end all runs; None: after `TRAINING_S` of training, or where the script ends
    say
        gets one line for each thing done

    Raises
    ------
    UsageError
        a setting is refused, or the script takes too few steps, or too long
    HpcDdpError
        the script fails undisturbed
    """
    if steps is not None and steps < LEAST_STEPS:
        raise UsageError(
            f"steps is {steps}; accepted: a whole number from {LEAST_STEPS}",
            hint=f"--steps {4 * LEAST_STEPS}",
        )
    folder = root / ".drills" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    try:
        report = _Drill(settings, cwd, folder, steps, say).play()
    except UsageError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if report.ok:
        shutil.rmtree(folder, ignore_errors=True)
    return report


def choose(total: int, epoch_ends: Sequence[int]) -> Points:
    """Return when to disturb a run of `total` steps.

    The stop comes in mid-epoch, after an epoch's end where there is one. The save is at the next
    epoch's end, which is a place of its own to go on from; the kill comes well after it.

    Raises
    ------
    UsageError
        the run is too short to be disturbed
    """
    if total < LEAST_STEPS:
        raise UsageError(
            f"the script takes {total} steps, and a drill needs {LEAST_STEPS}",
            hint="more epochs or a smaller batch, in the script's own arguments"
            if total
            else "call run.step() behind each optimizer.step()",
        )
    ends = [step for step in epoch_ends if step <= total - 6]
    stop = max(2, total * 3 // 10, ends[0] + 1 if ends else 0)
    while stop in epoch_ends and stop < total - 5:
        stop += 1
    later = [step for step in epoch_ends if stop < step <= total - 3]
    save = later[0] if later else stop + max(1, (total - stop) // 4)
    return Points(stop, save, min(total - 2, save + max(1, (total - save) // 3)))


def _legs(points: Points, end: int | None) -> list[Leg]:
    """Return the attempts of the disturbed run, which end at step `end`, or with the script."""
    plan = {} if end is None else {"end": end}
    stop = {**plan, "hold": "stop", "at": points.stop}
    kill = {**plan, "hold": "kill", "at": points.kill, "save": points.save}
    save = {**plan, "hold": "save", "at": points.kill}
    return [
        Leg(f"stopped politely (SIGTERM) at step {points.stop}", stop, _terminate),
        Leg(f"killed (SIGKILL) at step {points.kill}", kill, _kill, points.stop),
        Leg(f"killed while saving step {points.kill}", save, _kill, points.save),
        Leg("", plan),
    ]


class _Drill:
    """The runs of one drill, below `folder`."""

    def __init__(
        self, settings: Settings, cwd: Path, folder: Path, steps: int | None, say: Say
    ) -> None:
        self._settings, self._cwd, self._folder = settings, cwd, folder
        self._steps, self._say = steps, say
        self._limit_s: float | None = None  # how long an attempt may take
        self._base = self._make("undisturbed")
        self._report = Report(str(self._base.spec.script), folder)

    def _make(self, name: str) -> PreparedRun:
        """Make another run of the same code."""
        first = getattr(self, "_base", None)
        values = {**self._settings.values, "job-name": name, "max-failures": 0}
        if first is not None:
            values["snapshot"] = False
        prepared = plan_new(Settings(values), self._cwd, self._folder).write()
        return (
            prepared if first is None else replace(prepared, code=first.code, script=first.script)
        )

    def play(self) -> Report:
        report = self._report
        self._say(f"undisturbed: {Path(report.script).name}")
        began = time.monotonic()
        limits = {"seconds": TRAINING_S} if self._steps is None else {"end": self._steps}
        code = self._launch(self._base, limits)
        self._limit_s = 120 + 5 * (time.monotonic() - began)
        events = self._base.run.events()
        if last_event(events, "worker") is None:
            return self._play_plain(code, time.monotonic() - began)
        base = self._records(self._base.run)
        stopped = last_event(events, "stopped")
        if code != 0 and not (stopped and stopped["reason"] == "cancelled"):
            raise self._failed(self._base.run, "undisturbed")
        report.steps = max((record["step"] for record in base), default=0)
        ends = [r["step"] for r in base if r["at"] == "epoch" and r["rank"] == 0]
        points = choose(report.steps, ends)
        report.rows.append(Row(f"undisturbed, {report.steps} steps", survived=True))
        self._notes(base, ends)
        self._disturb(base, points, report.steps if stopped else None)
        return report

    def _notes(self, base: list[Record], epoch_ends: list[int]) -> None:
        if not epoch_ends:
            self._report.notes.append(
                f"all {self._report.steps} steps lie in the first epoch: what the script does at"
                " an epoch's end was not tried (more with --steps)"
            )
        if not any(record["values"] for record in base):
            self._report.notes.append(
                "run.step was given no values, so there is no loss curve to compare; with"
                " run.step(loss=loss) there is"
            )

    # -- with hpc_ddp.training -------------------------------------------------------------

    def _disturb(self, base: list[Record], points: Points, end: int | None) -> None:
        prepared = self._make("disturbed")
        run, before = prepared.run, ""
        for number, leg in enumerate(_legs(points, end)):
            self._say(f"disturbed: to be {leg.name}" if leg.name else f"{before}; now to the end")
            code = self._launch(prepared, leg.plan, leg.disturbance)
            events = [event for event in run.events() if event["attempt"] == number]
            written = self._records(run)
            records = [record for record in written if record["attempt"] == number]
            earlier = [record for record in written if record["attempt"] < number]
            difference = compare.first_difference(base, records, earlier)
            fault = self._find_fault(run, number, leg, events, code)
            if number > 0:
                restored = last_event(events, "restored") or NOT_RESTORED
                self._report.rows.append(
                    Row(
                        before,
                        survived=not fault,
                        resumed_from=restored["step"],
                        passed_over=tuple(restored["passed_over"]),
                        curve=compare.curve(base, records),
                        difference=difference,
                    )
                )
            if fault:
                self._print_log(run)
                self._report.verdict = "broken"
                self._report.why = f"When it was {before or leg.name}, {fault}"
                return
            if difference and not self._is_harmless(difference, base, before):
                return
            before = leg.name
            if number == 2:
                before += f", and a byte flipped in {_flip(run)}"

    def _is_harmless(self, difference: Difference, base: list[Record], before: str) -> bool:
        """Take a difference into the report; True when the drill can go on."""
        report = self._report
        if difference.is_rounding:
            report.verdict = "sums"
            report.why = report.why or compare.rounding(difference)
            return True
        report.verdict = "wrong"
        if difference.attempt == 0:
            report.verdict = "unsteady"
        elif not difference.at_start:  # else the state alone shows it
            self._say("something differs: once more undisturbed, to see if it is the script itself")
            again = self._make("again")
            self._launch(again, {"end": difference.step})
            undisturbed = compare.first_difference(base, self._records(again.run))
            if undisturbed is not None and not undisturbed.is_rounding:
                difference, report.verdict = undisturbed, "unsteady"
        is_steady = report.verdict != "unsteady"
        report.why, report.hint = compare.explain(difference, is_steady, before)
        return False

    def _find_fault(
        self, run: RunFolder, number: int, leg: Leg, events: list[Event], code: int
    ) -> str | None:
        """Return in what an attempt was not what it has to be, None when it was."""
        restored = last_event(events, "restored") or NOT_RESTORED
        why = (last_event(events, "verdict") or {}).get("why")
        if code == TOO_LONG:
            return f"it did not get through within {self._limit_s:.0f} s"
        if number and restored["step"] is None:
            return "it starts from its beginning, since no checkpoint was found"
        if number == 3 and not restored["passed_over"]:
            return "the damaged checkpoint was not passed over"
        if leg.disturbance is _kill:
            ready = run.path / "drill" / f"ready-{number}"
            fault = None if ready.exists() else why or "it ended too early"
        elif leg.disturbance is _terminate:
            stopped = last_event(events, "stopped")
            is_polite = code == CAN_GO_ON and stopped and stopped["step"] == leg.plan["at"]
            fault = None if is_polite else f"a polite stop ended it with code {code}"
        else:
            last = last_event(events, "stopped" if "end" in leg.plan else "finished")
            fault = None if last else why or f"it ended with code {code}"
        if not fault and restored["step"] is not None and restored["step"] < leg.least_step:
            fault = f"it went on from step {restored['step']} and not from step {leg.least_step}"
        return fault

    # -- without ---------------------------------------------------------------------------

    def _play_plain(self, code: int, took_s: float) -> Report:
        """Disturb a script that says nothing of itself half-way, by the clock."""
        report = self._report
        report.verdict = "plain"
        if code == TOO_LONG:
            self._print_log(self._base.run)
            raise UsageError(
                f"in {PLAIN_S:.0f} s the script has neither called start() nor ended",
                hint="give it arguments with which it ends sooner",
            )
        if code != 0:
            raise self._failed(self._base.run, "undisturbed")
        report.rows.append(Row(f"undisturbed, {took_s:.0f} s", survived=True))
        prepared = self._make("disturbed")
        run, before = prepared.run, ""
        legs = (
            Leg("stopped politely (SIGTERM)", {}, _terminate),
            Leg("killed (SIGKILL)", {}, _kill),
        )
        for leg in (*legs, Leg("", {})):
            self._say(f"disturbed: to be {leg.name} half-way" if leg.name else "now to the end")
            code = self._launch(prepared, {}, leg.disturbance, after_s=took_s / 2)
            if leg.disturbance and run.finished():
                raise UsageError(
                    f"the script was through before it could be {leg.name}: this run took less than"
                    f" half of the first one's {took_s:.0f} s",
                    hint="the same again: torch and data are in the machine's memory now; or"
                    " arguments with which it takes longer",
                )
            if before:
                report.rows.append(Row(before, survived=bool(leg.disturbance) or code == 0))
            before = leg.name
        if run.finished() and code == 0:
            report.why = (
                "it uses nothing of hpc_ddp.training, so only survival and the end could be"
                " compared: it starts from its beginning each time, and ends with code 0 as the"
                " undisturbed run does"
            )
        else:
            self._print_log(run)
            report.verdict, report.why = "broken", f"started again it ended with code {code}"
        return report

    # -- launches --------------------------------------------------------------------------

    def _launch(
        self,
        prepared: PreparedRun,
        plan: dict[str, Any],
        disturbance: Disturbance | None = None,
        after_s: float | None = None,
    ) -> int:
        """Run until it ends, and disturb it when it is ready, or after a time."""
        run, spec = prepared.run, prepared.spec
        ready = run.path / "drill" / f"ready-{len(run.attempts())}"
        env = {**spec.env, PLAN: json.dumps(plan)}
        with open(_log(run), "ab") as log:
            drilled = replace(prepared, spec=replace(spec, env=env))
            process = LocalBackend().launch(drilled, log)
        began = printed_at = time.monotonic()
        limit_s = math.inf
        try:
            while process.poll() is None:
                now = time.monotonic()
                if disturbance and (now - began > after_s if after_s else ready.exists()):
                    disturbance(process, run)
                    disturbance = None
                if now - printed_at > PRINT_EVERY_S:
                    printed_at = now
                    self._print_step(run)
                    if self._limit_s is None and not last_event(run.events(), "worker"):
                        limit_s = PLAIN_S
                    else:
                        limit_s = self._limit_s or math.inf
                if now - began > limit_s:
                    return TOO_LONG
                time.sleep(0.05)
        finally:
            if process.poll() is None:
                _kill(process, run)
        return process.returncode

    def _print_step(self, run: RunFolder) -> None:
        number = len(run.attempts()) - 1
        events = [event for event in run.events() if event["attempt"] == number]
        step = last_event(events, "metrics", "first_step", "restored")
        self._say(f"  step {step['step']}" if step else "  starting")

    def _records(self, run: RunFolder) -> list[Record]:
        return compare.records(read_events(run.path / "drill"))

    def _failed(self, run: RunFolder, when: str) -> HpcDdpError:
        self._print_log(run)
        verdict = last_event(run.events(), "verdict") or {}
        why = verdict.get("why") or "no reason is known"
        return HpcDdpError(
            f"the script fails {when}: {why}",
            hint=f"get it through `hpc-ddp dry-run` first; its log: {_log(run)}",
        )

    def _print_log(self, run: RunFolder) -> None:
        lines = _log(run).read_text(errors="replace").splitlines()
        for line in lines[-LOG_LINES:]:
            self._say(f"| {line}")


def _log(run: RunFolder) -> Path:
    return run.logs / "drill.out"


HEAD = ["done", "survived", "went on from", "loss curve", "state"]


def _cells(row: Row) -> list[str]:
    if row.resumed_from is None:
        return [row.done, "yes" if row.survived else "NO", "", "", ""]
    damaged = ", ".join(text.partition(":")[0] for text in row.passed_over)
    difference, curve, state = row.difference, row.curve, "equal"
    if difference is not None:
        judgement = "rounding" if difference.is_rounding else "DIFFERS"
        state = f"{judgement}: {difference.label} from step {difference.step}"
    return [
        row.done,
        "yes" if row.survived else "NO",
        f"step {row.resumed_from}" + (f", past {damaged}" if damaged else ""),
        f"{curve.equal} of {curve.steps} steps equal" if curve.steps else "-",
        state,
    ]


def _aligned(rows: Sequence[list[str]]) -> list[list[str]]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [[cell.ljust(n + 1) for cell, n in zip(row, widths, strict=True)] for row in rows]


# -- disturbances ----------------------------------------------------------------------------


def _terminate(process: subprocess.Popen[bytes], run: RunFolder) -> None:
    process.terminate()


def _kill(process: subprocess.Popen[bytes], run: RunFolder) -> None:
    """Kill all of a run at once, the launcher first, so that nobody is left to react."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its session: launcher and supervisors
    for attempt in run.attempts()[-1:]:
        signal_recorded(attempt.path.glob("*/rank-*.pid"), signal.SIGKILL)
    process.wait()


def _flip(run: RunFolder) -> str:
    """Flip a bit in the middle of the newest checkpoint's largest file; return its name."""
    newest = checkpoints.published(run.checkpoints)[0]
    path = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return newest.name
