"""The commands that the documentation shows are ones that there are."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path

import click
import pytest

from hpc_ddp.cli.main import COMMANDS, main
from tests.page_blocks import REPO, blocks, pages

_LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")


def _shown() -> list[tuple[str, str]]:
    """Return each page with each of its commands that is hpc-ddp's, in blocks and in sentences."""
    found = []
    for page in pages():
        text = page.read_text()
        in_blocks = [c.text for block in blocks(text) for c in block.commands]
        spans = [code for code in re.findall(r"`(hpc-ddp [^`]+)`", text)]
        found += [(str(page.relative_to(REPO)), each) for each in (*in_blocks, *spans)]
    return [(page, text) for page, text in found if "hpc-ddp " in text]


@pytest.mark.parametrize(("page", "text"), _shown())
def test_each_command_is_one(page: str, text: str) -> None:
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    words = words[words.index("hpc-ddp") + 1 :]
    ends = (i for i, word in enumerate(words) if word in ("|", "&&", ";", "&", ">"))
    name, *args = words[: next(ends, len(words))]
    if name.startswith("-"):
        return
    assert name in COMMANDS, text
    command = main.get_command(click.Context(main), name)
    assert command
    args = [word for word in args if word not in ("…", "...")]
    with contextlib.suppress(click.MissingParameter):  # a sentence need not name the run
        command.make_context(name, args)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(REPO)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in _LINK.findall(text):
        assert (page.parent / target).exists(), target
