"""Stand-ins for what a unit test has not: Slurm's commands, and time that passes."""

from __future__ import annotations

import os
import shlex
import struct
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hpc_ddp import slurm
from tests.skips import skip_or_fail

_COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "sacct", "sacctmgr", "sinfo")

_HEAD = """\
#!/bin/bash
here=${0%/*} name=${0##*/} count=0
printf '%s\\0' "$name" "$@" >>"$here/calls" && echo >>"$here/calls"
[ ! -e "$here/$name.count" ] || read -r count <"$here/$name.count"
echo $((count + 1)) >"$here/$name.count"
"""


class Slurm:
    """Slurm's commands as scripts in a folder, for the parsing and the retries of `slurm.py`.

    Each prints what a test has laid down for it with `answer`: one answer after the other, and
    the last one again and again. A command without an answer fails.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._answers: dict[str, list[str]] = {name: [] for name in _COMMANDS}
        for name in _COMMANDS:
            self._write(name)

    def answer(self, command: str, out: str = "", err: str = "", code: int = 0) -> None:
        """Lay down the next answer of a command."""
        self.answer_by(
            command, f"printf %s {shlex.quote(out)}; printf %s {shlex.quote(err)} >&2; exit {code}"
        )

    def answer_by(self, command: str, script: str) -> None:
        """Lay down a line of bash that makes the next answer."""
        slurm.show_config.cache_clear()
        self._answers[command].append(script)
        self._write(command)

    def calls(self, command: str) -> list[list[str]]:
        """Return the arguments of each call of a command so far."""
        path = self.folder / "calls"
        lines = path.read_text().split("\0\n")[:-1] if path.exists() else []
        return [words[1:] for words in (line.split("\0") for line in lines) if words[0] == command]

    def _write(self, name: str) -> None:
        answers = self._answers[name] or [f"echo no answer is laid down for {name} >&2; exit 1"]
        cases = [f"{i}) {answer} ;;" for i, answer in enumerate(answers[:-1])]
        path = self.folder / name
        path.write_text(
            "\n".join([_HEAD + "case $count in", *cases, f"*) {answers[-1]} ;;", "esac"])
        )
        path.chmod(0o755)


def squeue_rows(text: str) -> str:
    """Return rows of squeue as `slurm.list_jobs` reads them, from rows with ``|`` and without names
    and tasks."""
    rows = [line.split("|", 7) for line in text.splitlines()]
    full = [[*row[:2], "N/A", *row[2:6], "name", *row[6:]] for row in rows]
    return "".join("\x1f".join(row) + "\n" for row in full)


class Clock:
    """Takes the place of a module's `time`: it stands still but for what is slept."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.set_back_s = 0.0  # of the time of day
        self.slept: list[float] = []

    def time(self) -> float:
        return self.now - self.set_back_s

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def stop_clock(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType, now: float = 1000.0) -> Clock:
    """Give the modules one clock in place of `time`, and return it."""
    clock = Clock(now)
    for module in modules:
        monkeypatch.setattr(module, "time", clock)
    return clock


USER, STRANGER, GROUP = 54321, 54322, 54323


def raise_disk_full(*args: Any, **options: Any) -> Any:
    raise OSError(28, "No space left on device")


def set_acl(path: Path, kind: str = "access") -> None:
    """Let a group besides the owner's read, write and enter a folder, by an ACL of POSIX; with the
    `kind` "default", whatever will be made in it."""
    nobody, any_id = 65534, 0xFFFFFFFF
    # The owner, the owner's group, the group of `nobody`, the mask and all others.
    entries = ((1, 7, any_id), (4, 5, any_id), (8, 7, nobody), (16, 7, any_id), (32, 5, any_id))
    text = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(path, f"system.posix_acl_{kind}", text)
    except OSError as error:
        skip_or_fail(f"this file system has no ACL: {error}")
