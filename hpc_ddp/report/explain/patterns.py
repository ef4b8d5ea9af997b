"""Known failures, in ``failures.txt``, and Slurm's reasons for waiting, in ``pending_reasons.txt``.

Both are tables of a few lines for each row; the first row whose pattern matches counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class FailurePattern(NamedTuple):
    """A known failure: its kind, a regular expression for texts that show it, and templates of its
    words and its hint."""

    kind: str
    pattern: str
    words: str
    hint: str


class PendingReason(NamedTuple):
    """A reason for which Slurm lets jobs wait: a regular expression for Slurm's name of it, and
    templates of its words and its hint."""

    pattern: str
    words: str
    hint: str


class Diagnosis(NamedTuple):
    """A known failure that a text shows. Its words are filled in; its hint is a template for
    `fill_hint`. `groups` has the parts of the text that the pattern names."""

    kind: str
    words: str
    hint: str
    groups: Mapping[str, str]


def _read_rows(name: str) -> list[list[str]]:
    """Return the rows of a file of this folder, each as the list of its lines. Blank lines stand
    between rows; comments are left out. Raise OSError where the file can't be read."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    blocks = re.sub(r"^#.*\n", "", text, flags=re.M).strip().split("\n\n")
    return [block.strip().splitlines() for block in blocks]


FAILURES = [FailurePattern(*row) for row in _read_rows("failures.txt")]
PENDING_REASONS = [PendingReason(*row) for row in _read_rows("pending_reasons.txt")]

# Signals that are no notice, and their usual reason.
SIGNALS = {
    6: "it gave up by itself (SIGABRT), as C++ code does after an error",
    7: "a file that it had mapped into memory was cut short, or /dev/shm was full (SIGBUS)",
    9: "it was killed (SIGKILL); the kernel does so where memory runs out, but has not reported it",
    11: "compiled code touched memory that it must not (SIGSEGV)",
}
# The owner and the resource of a limit, by their names in Slurm's reasons.
_OWNERS = {"Assoc": "your account", "QOS": "your QOS"}
_RESOURCES = {
    "gres": "GPUs (GRES)",
    "cpu": "CPUs",
    "node": "nodes",
    "mem": "memory",
    "memory": "memory",
    "jobs": "running jobs",
    "submitjobs": "submitted jobs",
    "submitjob": "submitted jobs",
    "wall": "run time",
    "wallduration": "run time",
    "bb": "burst buffer",
    "license": "licenses",
}


def recognise_failure(text: str) -> Diagnosis | None:
    """Return the first of `FAILURES` whose pattern matches in a text; None where none does."""
    for row in FAILURES:
        match = re.search(row.pattern, text, re.M)
        if match:
            groups = {name: group or "" for name, group in match.groupdict().items()}
            size = groups.get("size")
            groups["when_size"] = f" when it asked for {size} more" if size else ""  # for the words
            return Diagnosis(row.kind, row.words.format(**groups), row.hint, groups)
    return None


def explain_pending(reason: str, job: str) -> tuple[str, str]:
    """Return two texts: the meaning of Slurm's `reason` for letting a job wait, and a hint with the
    job's id `job`. An unknown reason is named as Slurm has it; for '' the text
    says that Slurm has not looked at the job yet."""
    for row in PENDING_REASONS:
        match = re.match(row.pattern, reason)
        if match:
            groups = {name: text or "" for name, text in match.groupdict().items()}
            groups["owner"] = _OWNERS.get(groups.get("owner", ""), "")
            limit = groups.get("limit", "")
            groups["limit"] = _RESOURCES.get(limit.lower(), limit)
            return row.words.format(**groups), row.hint.format(job=job)
    return f"Slurm gives the reason {reason}", f"scontrol show job {job}"
