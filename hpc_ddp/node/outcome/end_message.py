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
from hpc_ddp.node.outcome.attempt_facts import AttemptFacts
from hpc_ddp.node.outcome.verdict import Verdict

GIVEN_UP = "given up"


def notify_of_end(
    run: RunFolder, facts: AttemptFacts, verdict: Verdict, exit_code: int | None = None
) -> None:
    """Send the user the message about the end of an attempt, if `_event_of` has an event for it.

    The batch script calls this twice: without `exit_code` before the verdict is carried out, and
    afterwards with the batch script's own exit code. Waits `LIMIT_S` + 1 s at most. A failure to
    send is printed; nothing is raised for it."""
    if event := _event_of(run, facts, verdict, exit_code):
        place = "" if facts.step is None else f", at step {facts.step}"
        reason = verdict.why or verdict.cause
        notify(run, facts.spec, event, f"attempt {facts.attempt} ended{place}: {reason}")


def _event_of(
    run: RunFolder, facts: AttemptFacts, verdict: Verdict, exit_code: int | None
) -> str | None:
    """Return the event in words, None where the user gets no message.

    Without `exit_code` the only event is a hang that is requeued. With it the events are: the run
    is given up; only the user can continue it; the run, but not a single task of an array, has
    finished."""
    if exit_code is None:  # before a requeue, which ends the batch shell, and this process with it
        is_hang = facts.failure is not None and facts.failure.kind == "hang"
        goes_on = verdict.action == Action.REQUEUE
        return "stood still, and starts again" if is_hang and goes_on else None
    if verdict.action == Action.GIVE_UP:
        return GIVEN_UP
    if verdict.action == Action.REQUEUE and exit_code == CAN_GO_ON:
        return "needs you: it could go on, and was not requeued"
    # A sweep has a task for each trial: those that end well are many.
    is_whole = run.path == run.whole
    return "finished" if verdict.cause == Cause.FINISHED and is_whole else None


def notify(run: RunFolder, spec: JobSpec, event: str, text: str) -> None:
    """Send a message about a run to the addresses in the file of ``--notify``; do nothing where the
    job has no such file. `event` ends the message's subject, `text` is its first line.

    Waits `LIMIT_S` + 1 s at most; a failure is printed, and nothing is raised."""
    if spec.notify is None:
        return
    lines = [text, f"run: {run.path}", f"hpc-ddp explain {RunFolder(run.whole).quoted}"]
    path, subject = Path(spec.notify), f"hpc-ddp: {spec.job_name}: {event}"
    failures = [f"{path} can't be read: no answer in time"]  # this stays if the thread hangs

    def send_message() -> None:
        """Send the message, and replace the content of `failures` by the ways that failed."""
        try:
            failures[:] = send(read_addresses(path), subject, "\n".join(lines))
        except UsageError as error:
            failures[:] = [error.message]

    # In a thread: the disk with the file may be away, and reading it then has no end.
    thread = threading.Thread(target=send_message, daemon=True)
    thread.start()
    thread.join(LIMIT_S + 1)
    for failure in failures:
        say(f"no message was sent: {failure}")
