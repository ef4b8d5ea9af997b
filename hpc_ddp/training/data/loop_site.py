"""Where in the script a loop stands, and whether the script is still in it."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import NamedTuple

from hpc_ddp.training.data.iteration import instruction_at

# Flags of a code whose frame may be suspended.
SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class _For(NamedTuple):
    """A ``for`` in a function: the function's code, the bytecode offset at which the ``for`` asks
    for an element, and its lines, from its head to the end of its body."""

    code: CodeType
    offset: int
    lines: range


class LoopSite:
    """The places of the script at which a loop begins, and at which it asks for an element. A place
    has the code and bytecode offset of each frame, from the one that asks for the element outwards.
    Sites of loops that begin at one place are equal. `thread` is the identifier of the thread in
    which the loop began."""

    def __init__(self, depth: int) -> None:
        """Note the present place; `depth` frames, the caller's first, are not the script's and are
        left out."""
        self._calls = _calls_of(sys._getframe(depth + 1))  # the place of the last element
        self._begin = self._calls
        self.thread = threading.get_ident()

    def __eq__(self, site: object) -> bool:
        return isinstance(site, LoopSite) and self._begin == site._begin

    __hash__ = None  # type: ignore[assignment]

    def move(self, depth: int) -> None:
        """Note the present place as the one at which the loop asks for elements: a loop in parts
        has several. `depth` is as in `__init__`."""
        self._calls = _calls_of(sys._getframe(depth + 1))

    def is_left(self, begins: bool) -> bool:
        """Return whether the script has left the ``for`` that asks for the loop's elements: whether
        the line that it is at now lies outside of the ``for``. Where several ask, as a progress
        bar's and its caller's, the innermost one whose function runs decides; if none runs, the
        loop is left unless the outermost function may be suspended.

        `begins`: another loop is about to begin. A ``for`` that is asking for an element then asks
        for that loop's first one, as in a second call of a function, and is left. Otherwise it may
        be in the loop's body, which ``map(train, loop)`` calls in place of an element.

        False where nothing shows it: in another thread, for a ``next``, for a script that can't be
        read or was changed. No finalizer may call it, since Python can't parse amid parsing.
        """
        if self.thread != threading.get_ident():
            return False
        frames: list[FrameType] = []
        frame: FrameType | None = sys._getframe(1)
        while frame:
            frames.append(frame)
            frame = frame.f_back
        loops = self._find_loops()
        for code, offset, lines in loops:
            if running := [frame for frame in frames if frame.f_code is code]:
                return not any(
                    frame.f_lineno in lines and not (begins and frame.f_lasti == offset)
                    for frame in running
                )
        return bool(loops) and not loops[-1].code.co_flags & SUSPENDED

    def _find_loops(self) -> list[_For]:
        """Return the ``for`` of each frame of the present place that asks for an element by one,
        the innermost first.

        The list ends with the ``for`` that the script runs: its function can't be suspended, as
        generators and coroutines can, nor is it called by a ``for``, as ``__next__`` is.
        """
        loops: list[_For] = []
        asks = [instruction_at(*call) == "FOR_ITER" for call in self._calls]
        callers_ask = [*asks[1:], False]
        for (code, offset), is_for, is_caller_for in zip(
            self._calls, asks, callers_ask, strict=True
        ):
            if is_for and (lines := _lines_of_loop(code, offset)):
                loops.append(_For(code, offset, lines))
                if not (code.co_flags & SUSPENDED or is_caller_for):
                    break
        return loops


def _calls_of(frame: FrameType | None) -> list[tuple[CodeType, int]]:
    """Return the code and bytecode offset of a frame, and of each frame that has called it, in this
    order. The frames themselves are not kept: they would keep the loop from being closed."""
    calls = []
    while frame:
        calls.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return calls


def _lines_of_loop(code: CodeType, offset: int) -> range:
    """Return the lines of the ``for`` that asks its iterator at the bytecode `offset` of `code`; an
    empty range where the source can't be read, or has changed since."""
    text = "".join(linecache.getlines(code.co_filename))
    line = next((n for low, high, n in code.co_lines() if low <= offset < high), None)
    try:
        tree = ast.parse(text)
        # Codes of the same source are equal. 0, True: without this module's ``__future__`` imports.
        if line is None or code not in codes_in(compile(text, code.co_filename, "exec", 0, True)):
            return range(0)
    except (SyntaxError, ValueError):
        return range(0)
    for node in ast.walk(tree):  # of two in one line the outer one, which `walk` yields first
        if isinstance(node, ast.For) and node.lineno <= line <= (node.iter.end_lineno or 0):
            return range(node.lineno, (node.body[-1].end_lineno or 0) + 1)
    return range(0)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a module or function, and those of functions and classes within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)
