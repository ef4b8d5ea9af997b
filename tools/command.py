"""The options and the way to run that all tools share."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from tools.store import ToolError, require_clean_tree


def make_parser(target: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all tools have.

    Args:
        target: The target of make, for the usage line.
        doc: The module's docstring; its first line is the description.
    """
    parser = argparse.ArgumentParser(prog=target, description=(doc or "").split("\n")[0])
    parser.add_argument("--report", action="store_true", help="only show the results")
    parser.add_argument("--dirty", action="store_true", help="uncommitted changes; keep nothing")
    return parser


def run_command(parser: argparse.ArgumentParser, act: Callable[[argparse.Namespace], bool]) -> int:
    """Parse the command line, and call `act` with the options. Return the exit code: 0 if `act`
    returns true, 1 if it does not, 2 for a ToolError, which is printed.

    A tree with uncommitted changes is refused, unless the results are not kept (``--dirty``).
    """
    args = parser.parse_args()
    _unwind_on_signals()
    try:
        if not args.dirty:
            require_clean_tree()
        return 0 if act(args) else 1
    except ToolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _unwind_on_signals() -> None:
    """Have signals that would kill this process raise SystemExit, so that its children are
    ended."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, leave)
