"""Messages are sent by all ways at once, in five seconds at most, and name no address."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from hpc_ddp.core.console import notification
from hpc_ddp.core.console.notification import Addresses, read_addresses, send
from hpc_ddp.core.errors import UsageError


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_names_the_ways(tmp_path: Path) -> None:
    text = "# mine\n\nmail = me@example.org\nwebhook=https://x/y?a=b \ncommand = tell --to me=1\n"
    expected = Addresses("me@example.org", "https://x/y?a=b", "tell --to me=1")
    assert read_addresses(write(tmp_path / "n", text)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no way to reach you"),
        ("mail = a@b, c@d", "line 1 of .* is not understood"),
        ("mail = a@b\nmail = c@d", "line 2 of .* accepted, each once"),
        ("# x\nwebhook = file:///etc/passwd", "line 2 of"),
        (
            "slack = secret-token",
            "accepted, each once: mail = ADDRESS, webhook = URL, command = LINE",
        ),
        ("mail", "line 1 of"),
    ],
)
def test_other_files_are_refused_without_their_content(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read_addresses(write(tmp_path / "n", text))
    assert "secret" not in f"{caught.value.message} {caught.value.hint}"


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "n", "mail = me", mode=0o640)
    with pytest.raises(UsageError, match="is not yours alone \\(mode 0640\\)") as caught:
        read_addresses(path)
    assert caught.value.hint == f"chmod 600 {path}"
    path.unlink()
    with pytest.raises(UsageError, match="can't be read: No such file"):
        read_addresses(path)


class Receiver(BaseHTTPRequestHandler):
    """Keeps what it gets; refuses the path /no, and does not answer /slow before `released`."""

    bodies: list[str] = []  # noqa: RUF012
    released = threading.Event()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/slow":
            self.released.wait()
        self.bodies.append(json.loads(body)["text"])
        self.send_response(404 if self.path == "/no" else 200)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """Print nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    Receiver.bodies.clear()
    Receiver.released.clear()
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    Receiver.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_all_ways_get_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    sendmail = write(tmp_path / "sendmail", f'#!/bin/sh\necho "$@" > {tmp_path}/mail-argv\n', 0o755)
    sendmail.write_text(f"{sendmail.read_text()}cat > {tmp_path}/mail\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    command = f'(echo "$HPC_DDP_SUBJECT"; cat) > {tmp_path}/told'
    addresses = Addresses("me@example.org", f"{url}/hook", command)
    assert send(addresses, "a subject", "a text, ü") == []
    assert Receiver.bodies == ["a subject\na text, ü"]
    assert (tmp_path / "told").read_text() == "a subject\na text, ü"
    mail = (tmp_path / "mail").read_text()
    assert "To: me@example.org" in mail
    assert "Subject: a subject" in mail
    assert "example" not in (tmp_path / "mail-argv").read_text()  # `ps` would show it


def test_what_fails_is_named_without_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("shutil.which", lambda *words, **options: None)
    failures = send(Addresses("me@example.org", f"{url}/no", "exit 3"), "s", "t")
    assert failures[1:] == [
        "mail: no sendmail on this node (Slurm sends mail itself: --mail-type END)",
        "webhook: HTTP 404",
    ]
    assert send(Addresses(webhook="http://127.0.0.1:1/secret"), "s", "t") == [
        "webhook: Connection refused"
    ]


def test_a_way_that_does_not_answer_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setattr(notification, "LIMIT_S", 0.2)
    monkeypatch.setattr(notification, "KILL_S", 0.1)
    began = time.monotonic()
    pid = tmp_path / "pid"
    command = f"sleep 600 & echo $! > {pid}; wait"
    failures = send(Addresses(webhook=f"{url}/slow", command=command), "s", "t")
    assert failures == ["command: no answer in time", "webhook: no answer in time"]
    assert time.monotonic() - began < notification.LIMIT_S + 60  # and not 600


@pytest.mark.parametrize(
    "error", [TimeoutError(), urllib.error.URLError(TimeoutError("timed out"))]
)
def test_a_server_that_is_late_gives_no_answer_in_time(
    monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """In the connection, or in the answer: its limit is over just before the message's."""

    def open_late(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(urllib.request, "urlopen", open_late)
    assert send(Addresses(webhook="http://127.0.0.1:1/"), "s", "t") == [
        "webhook: no answer in time"
    ]


def test_a_pipe_in_the_files_place_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "n", 0o600)
    with pytest.raises(UsageError, match="can't be read: no regular file"):
        read_addresses(tmp_path / "n")
