"""The message that the user gets when a run ends, stands still, or waits for a person."""

from __future__ import annotations

import threading
from pathlib import Path

from hpc_ddp.core.console.notification import LIMIT_S, read_addresses, send
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import CAN_GO_ON, UsageError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.enums import Action, Cause
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome.verdict import AttemptFacts, Verdict

GIVEN_UP = "given up"


def notify_of_end(
    run: RunFolder, facts: AttemptFacts, decided: Verdict, exit_code: int | None = None
) -> None:
    """Send the message of the verdict `decided`, if `_event_of` has an event for it. The batch
    script calls this twice: without `exit_code` before the verdict is carried out, and afterwards
    with its own exit code. Waits `LIMIT_S` + 1 s at most; a failure to send is printed."""
    if event := _event_of(run, facts, decided, exit_code):
        step = "" if facts.step is None else f", at step {facts.step}"
        reason = f": {decided.why}" if decided.why else f": {decided.cause}"
        notify(run, facts.spec, event, f"attempt {facts.attempt} ended{step}{reason}")


def _event_of(
    run: RunFolder, facts: AttemptFacts, decided: Verdict, exit_code: int | None
) -> str | None:
    """Return the event in words, None where the user gets no message. Without `exit_code` that is
    only a hang that is requeued; with it, a run that is given up, needs the user, or has finished
    (but not a single task of an array)."""
    if exit_code is None:  # a requeue ends the batch shell, and with it this process
        is_hang = facts.failure is not None and facts.failure.kind == "hang"
        goes_on = decided.action == Action.REQUEUE
        return "stood still, and starts again" if is_hang and goes_on else None
    if decided.action == Action.GIVE_UP:
        return GIVEN_UP
    if decided.action == Action.REQUEUE and exit_code == CAN_GO_ON:
        return "needs you: it could go on, and was not requeued"
    # A sweep has a task for each trial: those that end well are many.
    is_whole = run.path == run.whole
    return "finished" if decided.cause == Cause.FINISHED and is_whole else None


def notify(run: RunFolder, spec: JobSpec, event: str, text: str) -> None:
    """Send a message about a run to the addresses in the file of ``--notify``; do nothing where the
    job has no such file. Waits `LIMIT_S` + 1 s at most; a failure is printed, and nothing
    raised."""
    if spec.notify is None:
        return
    lines = [text, f"run: {run.path}", f"hpc-ddp explain {RunFolder(run.whole).quoted}"]
    path, subject = Path(spec.notify), f"hpc-ddp: {spec.job_name}: {event}"
    failures = [f"{path} can't be read: no answer in time"]

    def act() -> None:
        try:
            failures[:] = send(read_addresses(path), subject, "\n".join(lines))
        except UsageError as error:
            failures[:] = [error.message]

    # In a thread: the disk with the file may be away, and reading it then has no end.
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(LIMIT_S + 1)
    for failure in failures:
        say(f"no message was sent: {failure}")
