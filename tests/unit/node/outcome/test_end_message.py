"""A run's end is worth a message; what goes on by itself is not."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.console.notification import Addresses
from hpc_ddp.core.errors import CAN_GO_ON
from hpc_ddp.core.journal.enums import Action, Cause
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome import end_message
from hpc_ddp.node.outcome.end_message import notify_of_end
from hpc_ddp.node.outcome.verdict import Verdict
from unit.node.outcome.requeue.fakes import facts_of

FINISHED = Verdict(Cause.FINISHED, Action.NONE, "")
GIVEN_UP = Verdict(Cause.FAILED, Action.GIVE_UP, "rank 1 on n2: ValueError: x", 1)
AGAIN = Verdict(Cause.PREEMPTED, Action.REQUEUE, "preempted, at step 7")
CANCELLED = Verdict(Cause.CANCELLED, Action.NONE, "by the user", 143)
NEEDS = "needs you: it could go on, and was not requeued"


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    messages: list[tuple[str, str]] = []

    def send(addresses: Any, subject: str, text: str) -> list[str]:
        messages.append((subject, text))
        return ["mail: no sendmail here"]

    monkeypatch.setattr(end_message, "send", send)
    return messages


def play(tmp_path: Path, verdict: Verdict, code: int | None, **fields: Any) -> None:
    path = tmp_path / "notify"
    path.write_text("mail = me@example.org")
    path.chmod(0o600)
    run = RunFolder(tmp_path / "name" / "run").make()
    notify_of_end(run, facts_of(run, notify=str(path), **fields), verdict, code)


@pytest.mark.parametrize(
    ("verdict", "code", "event"),
    [
        (FINISHED, 0, "finished"),
        (GIVEN_UP, 1, "given up"),
        (AGAIN, CAN_GO_ON, NEEDS),
        (AGAIN, 0, None),
        (AGAIN, None, None),
        (FINISHED, None, None),
        (CANCELLED, 143, None),
        (Verdict(Cause.SUPERSEDED, Action.NONE, ""), 0, None),
    ],
)
def test_an_end_is_told_once(
    tmp_path: Path,
    messages: list[tuple[str, str]],
    capsys: pytest.CaptureFixture[str],
    verdict: Verdict,
    code: int | None,
    event: str | None,
) -> None:
    play(tmp_path, verdict, code)
    subjects = [subject for subject, _ in messages]
    assert subjects == ([f"hpc-ddp: job: {event}"] if event else [])
    if event:
        assert f"attempt 0 ended: {verdict.why or verdict.cause}" in messages[0][1]
        assert "hpc-ddp explain " in messages[0][1]
        assert "no message was sent: mail: no sendmail here" in capsys.readouterr().err


def test_a_file_that_has_been_opened_to_others_sends_nothing(
    tmp_path: Path, messages: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    play(tmp_path, FINISHED, 0)
    messages.clear()
    (tmp_path / "notify").chmod(0o644)
    run = RunFolder(tmp_path / "name" / "run")
    notify_of_end(run, facts_of(run, notify=str(tmp_path / "notify")), FINISHED, 0)
    assert not messages
    assert "no message was sent: notify: " in capsys.readouterr().err


def test_a_disk_that_is_away_does_not_hold_up_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_back = threading.Event()
    monkeypatch.setattr(end_message, "LIMIT_S", -0.99)

    def read(path: Path) -> Addresses:
        is_back.wait()
        return Addresses()

    monkeypatch.setattr(end_message, "read_addresses", read)
    play(tmp_path, FINISHED, 0)
    is_back.set()
    assert "no message was sent: " in capsys.readouterr().err
