"""Try on this machine whether a script resumes right: disturb it, and compare.

One undisturbed run, and one that is disturbed three times and resumed after each:

1. stopped politely, as by a preemption with a grace time
2. killed hard, some steps after a checkpoint
3. killed while it saves; then a byte of the newest checkpoint is flipped

`hpc_ddp.training.drill` records each step of both runs as digests. At the first attempt that
differs from the undisturbed run, by more than rounding, the drill ends: the disturbance before it
is the cause.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_ddp.core.errors import CAN_GO_ON, HpcDdpError, UsageError
from hpc_ddp.core.journal.enums import StopReason
from hpc_ddp.core.journal.events import (
    CheckpointRestored,
    DrillRecord,
    Finished,
    FirstStep,
    JournalEvent,
    Stopped,
    VerdictGiven,
    WorkerStarted,
    step_of,
)
from hpc_ddp.core.journal.journal import last_event, last_step, read_events
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission.backends import LocalBackend
from hpc_ddp.submission.drill import compare
from hpc_ddp.submission.drill.compare import Difference
from hpc_ddp.submission.drill.disturb import (
    LEAST_STEPS,
    Disturbance,
    Leg,
    Points,
    choose_points,
    flip_bit,
    kill_run,
    make_legs,
    terminate_run,
)
from hpc_ddp.submission.drill.result import DrillResult, Row
from hpc_ddp.submission.plan import PreparedRun, new_run_id, plan_new
from hpc_ddp.submission.settings.config import Settings

PLAN = "HPC_DDP_DRILL"  # the variable by which the recorder gets its plan, as JSON
TRAINING_S = 30.0  # an undisturbed run trains so long, without --steps
START_S = 600.0  # a script has to call `start` within this time
PRINT_EVERY_S = 15.0
LOG_LINES = 30
TOO_LONG = 124  # as the code of timeout(1)

Say = Callable[[str], None]


def drill(settings: Settings, cwd: Path, root: Path, steps: int | None, say: Say) -> DrillResult:
    """Run the job on this machine, undisturbed and disturbed, and compare the runs; return the
    result, also for a script that does not resume right.

    Parameters
    ----------
    settings
        of the job, merged
    cwd
        folder that the job's relative paths are seen from
    root
        folder of all runs; the drill's are below ``<root>/.drills``. They are removed after a good
        result and a UsageError, and stay after a bad result and other errors
    steps
        the step at which all runs end; None: the step after `TRAINING_S` of training, or the
        script's end
    say
        is called with each line of the report on the drill's progress, and of a failed run's log

    Raises
    ------
    UsageError
        a setting is refused, the run folders can't be written, or the code is too large to copy;
        `steps` is less than `LEAST_STEPS`; or the script takes fewer steps than that, or does not
        call start() within `START_S`
    HpcDdpError
        the script fails undisturbed
    OSError
        the run folders can't be read, a log or checkpoint can't be written, or a process can't be
        started
    """
    if steps is not None and steps < LEAST_STEPS:
        raise UsageError(
            f"steps is {steps}; accepted: a whole number from {LEAST_STEPS}",
            hint=f"--steps {4 * LEAST_STEPS}",
        )
    folder = root / ".drills" / new_run_id()
    try:
        report = _Drill(settings, cwd, folder, steps, say).play()
    except UsageError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if report.ok:
        shutil.rmtree(folder, ignore_errors=True)
    return report


class _Drill:
    """The runs of one drill, below `folder`; the other parameters are those of `drill`. Only `play`
    writes and starts runs."""

    _base: PreparedRun  # the undisturbed run; `play` sets both
    _result: DrillResult

    def __init__(
        self, settings: Settings, cwd: Path, folder: Path, steps: int | None, say: Say
    ) -> None:
        self._settings, self._cwd, self._folder = settings, cwd, folder
        self._steps, self._say = steps, say
        self._limit_s: float | None = None  # how long an attempt may take, once known

    def _write_run(self, name: str, code_of: PreparedRun | None = None) -> PreparedRun:
        """Write the folder of a new run `name`, and return the run. It runs the code of the run
        `code_of`, which is not copied; None: a new snapshot, or the live code if the settings want
        no snapshot.

        Raises
        ------
        UsageError
            a setting is refused, the folder can't be written, or the code is too large for a
            snapshot
        OSError
            the script can't be read
        """
        values = {**self._settings.values, "job-name": name, "max-failures": 0}
        if code_of is not None:
            values["snapshot"] = False
        prepared = plan_new(Settings(values), self._cwd, self._folder).write()
        if code_of is None:
            return prepared
        return replace(prepared, code=code_of.code, script=code_of.script)

    def play(self) -> DrillResult:
        """Play the undisturbed run, then the disturbed one, and return the result; called once.
        Raise UsageError for a script that a drill can't try, HpcDdpError where the script fails
        undisturbed, and OSError where a file of the runs can't be read or written."""
        self._base = self._write_run("undisturbed")
        self._result = DrillResult(str(self._base.spec.script), self._folder)
        stopped = self._play_undisturbed()
        base = self._read_records(self._base.run)
        steps = self._result.steps = max((record.step for record in base), default=0)
        epoch_ends = [r.step for r in base if r.at == "epoch" and r.rank == 0]
        points = choose_points(steps, epoch_ends)
        self._result.rows.append(Row(f"undisturbed, {steps} steps", survived=True))
        if not epoch_ends:
            self._result.notes.append(
                f"all {steps} steps lie in the first epoch: what the script does at an"
                " epoch's end was not tried (more with --steps)"
            )
        self._play_disturbed(base, points, steps if stopped else None)
        return self._result

    def _play_undisturbed(self) -> bool:
        """Play the undisturbed run, and set the limit of time for later attempts. Return whether
        the recorder stopped the run, at ``--steps`` or after `TRAINING_S`; False: the script came
        to its end. Raise as `play`."""
        self._say(f"undisturbed: {Path(self._result.script).name}")
        began = time.monotonic()
        limits = {"seconds": TRAINING_S} if self._steps is None else {"end": self._steps}
        code = self._run_attempt(self._base, limits)
        self._limit_s = 120 + 5 * (time.monotonic() - began)
        events = self._base.run.events()
        stopped = last_event(events, Stopped)
        # The recorder stops a run as one that is cancelled, which ends with another code than 0.
        if code not in (0, TOO_LONG) and not (stopped and stopped.reason == StopReason.CANCELLED):
            raise self._undisturbed_failure()
        if last_event(events, WorkerStarted) is None:
            raise self._missing_start("docs/adopt shows what to add to a script")
        return stopped is not None

    def _play_disturbed(
        self, undisturbed: list[DrillRecord], points: Points, end: int | None
    ) -> None:
        """Play the attempts of the disturbed run, until one goes wrong or differs by more than
        rounding. Write the outcome into the result: a row for each attempt but the first, and a
        verdict unless all is equal.

        `undisturbed` are the undisturbed run's records; `end` is the step at which the run ends,
        None: at the script's end. Raise UsageError where a folder can't be written; OSError where a
        log or journal can't be read, or a process can't be started.
        """
        prepared = self._write_run("disturbed", self._base)
        run, before = prepared.run, ""
        for number, leg in enumerate(make_legs(points, end)):
            self._say(f"disturbed: to be {leg.name}" if leg.name else f"{before}; now to the end")
            code = self._run_attempt(prepared, leg.plan, leg.disturbance)
            events = [event for event in run.events() if event.attempt == number]
            all_records = self._read_records(run)
            records = [record for record in all_records if record.attempt == number]
            earlier = [record for record in all_records if record.attempt < number]
            difference = compare.first_difference(undisturbed, records, earlier)
            fault = self._find_fault(run, number, leg, events, code)
            if number > 0:
                restored = last_event(events, CheckpointRestored)
                self._result.rows.append(
                    Row(
                        before,
                        survived=not fault,
                        resumed_from=step_of(restored),
                        passed_over=tuple(restored.passed_over if restored else ()),
                        difference=difference,
                    )
                )
            if fault:
                self._print_log(run)
                self._result.verdict = "broken"
                self._result.why = f"When it was {before or leg.name}, {fault}"
                return
            if difference and not self._judge(difference, undisturbed, before):
                return
            before = leg.name
            if number == 2:  # the third attempt, killed while it saves: see the module's list
                before += f", and a byte flipped in {flip_bit(run)}"

    def _judge(self, difference: Difference, base: list[DrillRecord], before: str) -> bool:
        """Write the verdict on a difference into the result, with the reason and a hint. Return
        True if the difference is only rounding, so that the drill can go on.

        A difference before the first disturbance is the script's own ("unsteady"); a difference
        right at an attempt's start is the resume's ("wrong"). For any other difference the
        undisturbed run is played once more, until that step: if the two undisturbed runs differ,
        the script is unsteady, else the resume is wrong. `base` are the undisturbed run's records;
        `before` is the disturbance before the difference, as text. Raise UsageError where the
        folder of a run can't be written, and OSError where a log or journal can't be read.
        """
        result = self._result
        if difference.is_rounding:
            result.verdict = "sums"
            result.why = result.why or compare.describe_rounding(difference)
            return True
        result.verdict = "wrong"
        if difference.attempt == 0:
            result.verdict = "unsteady"
        elif not difference.at_start:
            self._say("something differs: once more undisturbed, to see if it is the script itself")
            again = self._write_run("again", self._base)
            self._run_attempt(again, {"end": difference.step})
            undisturbed = compare.first_difference(base, self._read_records(again.run))
            if undisturbed is not None and not undisturbed.is_rounding:
                difference, result.verdict = undisturbed, "unsteady"
        is_steady = result.verdict != "unsteady"
        result.why, result.hint = compare.explain(difference, is_steady, before)
        return False

    def _find_fault(
        self, run: RunFolder, number: int, leg: Leg, events: list[JournalEvent], code: int
    ) -> str | None:
        """Return the fault of an attempt, as the end of a sentence; None where it went right: it
        resumed from the step that `leg` asks for (the last attempt from the checkpoint before the
        damaged one), and ended in the way that `leg` asks for.

        `number` is the attempt's, from 0; `events` are its events; `code` is its exit code, or
        `TOO_LONG`.
        """
        restored = last_event(events, CheckpointRestored)
        why = _verdict_reason(events)
        if code == TOO_LONG:
            return f"it did not get through within {self._limit_s:.0f} s"
        if number and restored is None:
            return "it starts from its beginning, since no checkpoint was found"
        # The newest checkpoint was damaged before the last attempt.
        if number == 3 and restored and not restored.passed_over:
            return "the damaged checkpoint was not passed over"
        if leg.disturbance is kill_run:  # the file is written where the attempt is to be killed
            ready = run.path / "drill" / f"ready-{number}"
            fault = None if ready.exists() else why or "it ended too early"
        elif leg.disturbance is terminate_run:
            stopped = last_event(events, Stopped)
            is_polite = code == CAN_GO_ON and stopped and stopped.step == leg.plan["at"]
            fault = None if is_polite else f"a polite stop ended it with code {code}"
        else:
            last = last_event(events, Stopped if "end" in leg.plan else Finished)
            fault = None if last else why or f"it ended with code {code}"
        if not fault and restored and restored.step < leg.least_step:
            fault = f"it went on from step {restored.step} and not from step {leg.least_step}"
        return fault

    def _run_attempt(
        self, prepared: PreparedRun, plan: dict[str, Any], disturbance: Disturbance | None = None
    ) -> int:
        """Run the next attempt until it ends, and return its exit code. `disturbance` is called as
        soon as the recorder has written its file ``ready-N``. Every `PRINT_EVERY_S` the attempt's
        step is reported.

        `plan` is the recorder's. An attempt that takes longer than `_limit_s` is killed, and the
        code is `TOO_LONG`; so is, while that limit is not known, an attempt that takes longer than
        `START_S` to its call of start(). After an error an attempt that still runs is killed, too.

        Raise UsageError once the script makes steps without a call of start(), and as
        `LocalBackend.launch`; OSError where the process can't be started, its log can't be written
        or its journal can't be read.
        """
        run, spec = prepared.run, prepared.spec
        ready = run.path / "drill" / f"ready-{run.next_attempt()}"
        env = {**spec.env, PLAN: json.dumps(plan)}
        with open(_log_file(run), "ab") as log:
            drilled = replace(prepared, spec=replace(spec, env=env))
            process = LocalBackend().launch(drilled, log)
        began = printed_at = time.monotonic()
        limit_s = math.inf
        try:
            while process.poll() is None:
                now = time.monotonic()
                if disturbance and ready.exists():
                    disturbance(process, run)
                    disturbance = None
                if now - printed_at > PRINT_EVERY_S:
                    printed_at = now
                    self._print_step(run)
                    limit_s = self._limit_s or self._start_limit_s(run)
                if now - began > limit_s:
                    return TOO_LONG
                time.sleep(0.05)
        finally:
            if process.poll() is None:
                kill_run(process, run)
        return process.returncode

    def _start_limit_s(self, run: RunFolder) -> float:
        """Return how many seconds an attempt without a known limit may take in all: `START_S` while
        its script has not called start(), then inf. Raise UsageError if the script has made a step
        without start(), as with a library of `hpc_ddp.integrations`, and OSError where the journal
        can't be read."""
        events = run.events()
        if last_event(events, WorkerStarted):
            return math.inf
        if last_event(events, FirstStep):
            raise self._missing_start(
                "docs/other-libraries.md has a way to try one that uses a library"
            )
        return START_S

    def _missing_start(self, hint: str) -> UsageError:
        """Return the error for a script that does not call start()."""
        return UsageError(
            f"{self._result.script} has not called start() of hpc_ddp.training; accepted: a script"
            " that does, since a drill compares its steps",
            hint=hint,
        )

    def _print_step(self, run: RunFolder) -> None:
        """Report the step of the newest attempt, or that it is starting; raise OSError where the
        journal can't be read."""
        number = run.next_attempt() - 1
        events = [event for event in run.events() if event.attempt == number]
        step = last_step(events)
        self._say("  starting" if step is None else f"  step {step}")

    def _read_records(self, run: RunFolder) -> list[DrillRecord]:
        """Return the recorder's records of a run, by attempt and time; [] without any. Raise
        OSError where they can't be read."""
        events = read_events(run.path / "drill")
        return [event for event in events if isinstance(event, DrillRecord)]

    def _undisturbed_failure(self) -> HpcDdpError:
        """Report the end of the undisturbed run's log, and return the error for a script that fails
        undisturbed; raise OSError where log or journal can't be read."""
        run = self._base.run
        self._print_log(run)
        reason = _verdict_reason(run.events()) or "no reason is known"
        return HpcDdpError(
            f"the script fails undisturbed: {reason}",
            hint=f"get it through `hpc-ddp dry-run` first; its log: {_log_file(run)}",
        )

    def _print_log(self, run: RunFolder) -> None:
        """Report the last `LOG_LINES` lines of a run's log. Raise OSError where it can't be
        read."""
        lines = _log_file(run).read_text(errors="replace").splitlines()
        for line in lines[-LOG_LINES:]:
            self._say(f"| {line}")


def _log_file(run: RunFolder) -> Path:
    """Return the path of the file with the output of a run of the drill."""
    return run.logs / "drill.out"


def _verdict_reason(events: list[JournalEvent]) -> str:
    """Return the reason of the last verdict, '' without one."""
    verdict = last_event(events, VerdictGiven)
    return verdict.why if verdict else ""
