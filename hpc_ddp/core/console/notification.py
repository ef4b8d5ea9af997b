"""Sends messages that reach a user away from the terminal: by mail, to a webhook, or by a command.

The addresses stay in a file of the user's, which is read when a message is sent: no script, journal
or command line of a job has them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_io import open_data

LIMIT_S = 5.0  # for all ways together
KILL_S = LIMIT_S - 0.5  # for a program: before `send` returns, after which this process may end
NO_ANSWER = "no answer in time"
_EXAMPLE = "mail = me@example.org"
_FORMS = {"mail": r"[^\s,;:<>]+", "webhook": r"https?://\S+", "command": r".+"}


@dataclass(frozen=True)
class Addresses:
    """The ways to reach the user; a way that is not given is ''. `mail` is an address of mail,
    `webhook` a URL to which JSON with a ``text`` is posted, and `command` a line for ``sh``, which
    gets the text on its stdin and the subject as ``HPC_DDP_SUBJECT``."""

    mail: str = ""
    webhook: str = ""
    command: str = ""


def read_addresses(path: Path) -> Addresses:
    """Return the ways that a file names by lines ``mail = …``, ``webhook = …`` and ``command = …``,
    of which one is enough. Empty lines and comments (``#``) count for nothing.

    Raise UsageError where the file can't be read, belongs to another user, gives other users any
    right, names no way, or has any other line.
    """
    try:
        with open_data(path) as file:
            status, lines = os.fstat(file.fileno()), file.read().decode().splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(
            f"notify: {path} can't be read: {reason}",
            hint=f"echo '{_EXAMPLE}' > {path} && chmod 600 {path}",
        ) from None
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UsageError(
            f"notify: {path} is not yours alone (mode {stat.S_IMODE(status.st_mode):04o});"
            " accepted: a file of your own that others can't read",
            hint=f"chmod 600 {path}",
        )
    values: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not (text := line.strip()) or text.startswith("#"):
            continue
        key, _, value = map(str.strip, text.partition("="))
        if key not in _FORMS or key in values or not re.fullmatch(_FORMS[key], value):
            raise UsageError(  # without the value: it may be a secret
                f"notify: line {number} of {path} is not understood; accepted, each once: mail ="
                " ADDRESS, webhook = URL, command = LINE",
                hint=f"as in: {_EXAMPLE}",
            )
        values[key] = value
    if not values:
        raise UsageError(f"notify: {path} names no way to reach you", hint=f"as in: {_EXAMPLE}")
    return Addresses(**values)


def send(addresses: Addresses, subject: str, text: str) -> list[str]:
    """Send a message by all ways at the same time, and wait for the outcomes, `LIMIT_S` at most.
    Return the ways that failed, sorted, each with the reason, as ``webhook: HTTP 404``; [] where
    none has failed. No reason has an address in it. Nothing is raised.

    Each way has a thread. A way without an outcome after `LIMIT_S` has failed; its thread may go
    on.
    """
    ways: dict[str, Callable[[], str]] = {
        "mail": partial(_mail, addresses.mail, subject, text),
        "webhook": partial(_post, addresses.webhook, f"{subject}\n{text}"),
        "command": partial(_run, ["sh", "-c", addresses.command], text, subject),
    }
    failures = {name: NO_ANSWER for name in ways if getattr(addresses, name)}

    def act(name: str) -> None:
        """Send by one way, and note in `failures` why that has failed, '' if it has not."""
        try:
            failures[name] = ways[name]()
        except TimeoutError:  # its own limit was over before this process gave it up
            failures[name] = NO_ANSWER
        except Exception as error:  # nothing of it may end the process
            failures[name] = getattr(error, "strerror", None) or type(error).__name__

    threads = [threading.Thread(target=act, args=(name,), daemon=True) for name in failures]
    deadline = time.monotonic() + LIMIT_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [f"{name}: {why}" for name, why in sorted(failures.items()) if why]


def _mail(address: str, subject: str, text: str) -> str:
    """Hand a mail to sendmail, which reads the address from the mail; return why that failed, '' if
    it did not. Raise OSError where sendmail can't be started."""
    program = shutil.which("sendmail", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/lib")
    if program is None:
        return "no sendmail on this node (Slurm sends mail itself: --mail-type END)"
    # Here, as urllib: each start of a job would pay for them.
    from email.message import EmailMessage

    message = EmailMessage()
    message["To"], message["Subject"] = address, subject
    message.set_content(text)
    return _run([program, "-i", "-t"], message.as_string(), subject)


def _post(url: str, text: str) -> str:
    """Post a text as JSON; return why the server refuses it or can't be reached, '' if it took the
    text. Raise OSError where the server's answer breaks off or takes longer than `LIMIT_S`;
    ValueError or HTTPException for a URL or an answer that is malformed."""
    import urllib.error
    import urllib.request

    body = json.dumps({"text": text}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S):
            return ""
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            return NO_ANSWER
        return str(getattr(error.reason, "strerror", None) or "no connection")


def _run(argv: list[str], text: str, subject: str) -> str:
    """Run a program with a text on its stdin and the subject as ``HPC_DDP_SUBJECT``, and wait for
    its end; return why it failed, '' if it did not. After `KILL_S` the program and its children are
    killed. Raise OSError where it can't be started."""
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HPC_DDP_SUBJECT": subject},
        start_new_session=True,
    ) as process:
        try:
            process.communicate(text.encode(), timeout=KILL_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return NO_ANSWER
    return f"exit code {process.returncode}" if process.returncode else ""
