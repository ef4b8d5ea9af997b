"""The pages of the documentation as what they show: commands and their output.

A block of commands is fenced as ``console``; a line that begins with ``$`` is a command, what
follows it is what it printed. In a comment before a block may stand::

    <!-- first: SHELL LINES -->      done before it, and not shown: to wait, to preempt
    <!-- not run: REASON -->         shown only

All blocks of a page are one session, in one shell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[1]
_BLOCK = re.compile(
    r"(?:<!-- (?P<word>first|not run): (?P<text>[^>]*?) -->\n)?```console\n(?P<body>.*?)^```$",
    re.S | re.M,
)
_ANY = "…"  # a line of its own: whatever is printed there
_RUN_ID = re.compile(r"\b\d{8}-\d{6}-[0-9a-f]{4}\b")
_NUMBER = re.compile(
    r"(?<![A-Za-z_])[-+]?\d[\d,]*(?:[.:]\d+)*(?:e[-+]\d+)?(?: ?(?:%|[kMG]?B|m?s|min|h|d)\b)?"
)
_DAY = re.compile(r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b")
# Of the test cluster: it has no reverse names, and only pretends to have GPUs.
_CLUSTER = re.compile(r"\bhd\d+\b")  # of the process of pytest that has it
_EPOCH = re.compile(r"^epoch \d+ +step .*\n?", re.M)
_PROGRESS = re.compile(r"^step \d+/\d+ .*\n?", re.M)  # a line every so many seconds
NOISE = re.compile(r"^\[W.*(?:hostname of the client socket|socket\.cpp).*\n?", re.M)


@dataclass(frozen=True)
class Command:
    """A command as it is shown, with what it printed."""

    text: str
    output: str


@dataclass(frozen=True)
class Block:
    """Commands that stand together; `start` and `end` are where their lines are on the page."""

    start: int
    end: int
    first: str
    not_run: str
    commands: tuple[Command, ...]


def pages() -> list[Path]:
    """Return all pages, by their path in the repository."""
    docs = (path for path in REPO.glob("docs/**/*.md"))
    return [REPO / "README.md", *sorted(docs)]


def blocks(text: str) -> Iterator[Block]:
    for match in _BLOCK.finditer(text):
        said = {match["word"]: match["text"]}
        yield Block(
            start=match.start("body"),
            end=match.end("body"),
            first=said.get("first", ""),
            not_run=said.get("not run", ""),
            commands=tuple(_commands(match["body"])),
        )


def _commands(body: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", body, flags=re.M)[1:]:
        lines = part.splitlines(keepends=True)
        count = 1 + next(i for i, line in enumerate(lines) if not line.endswith("\\\n"))
        yield Command("".join(lines[:count]), "".join(lines[count:]))


def same(shown: str, printed: str) -> bool:
    """Tell whether a page shows what was printed, but for numbers, times, spaces and progress."""
    return _matches(_plain(shown), _plain(printed))


def _plain(text: str) -> list[str]:
    # A loaded machine trains longer before a preemption comes.
    epochs = sorted(set(_EPOCH.findall(text)))
    text = "\n".join([_EPOCH.sub("", text), *epochs])
    text = _PROGRESS.sub("", NOISE.sub("", text))
    text = _CLUSTER.sub("CLUSTER", _RUN_ID.sub("RUN", text))
    text = _DAY.sub("DAY", _NUMBER.sub("0", text))
    text = re.sub(
        r"goodput 0[ %]*:.*", "goodput", text
    )  # which parts there are depends on the moment
    lines = (
        re.sub(r"\s+", " ", re.sub(r"(?<= )-(?= |$)", "0", line)).strip()
        for line in text.splitlines()
    )
    return [line for line in lines if line]


def _matches(shown: Sequence[str], printed: Sequence[str]) -> bool:
    if not shown:
        return not printed
    if shown[0] == _ANY:
        return any(_matches(shown[1:], printed[i:]) for i in range(len(printed) + 1))
    return bool(printed) and shown[0] == printed[0] and _matches(shown[1:], printed[1:])
