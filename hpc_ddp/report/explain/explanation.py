"""An explanation of a run, and the phrases that several explanations share."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hpc_ddp.core.console.terminal import printable
from hpc_ddp.core.journal.events import FirstStep
from hpc_ddp.core.journal.journal import last_step
from hpc_ddp.report.explain.facts import RunFacts

WIDTH = 100  # of the paragraph, in characters


@dataclass(frozen=True)
class Explanation:
    """The state or the end of a run, in words.

    Attributes
    ----------
    kind
        one to three words for programs: ``finished``, ``running``, ``waiting``, ``preempted``,
        ``python error``, ``cuda out of memory`` …
    text, hint
        for people: a paragraph, and one thing to do ('' where there is nothing to do)
    node, rank
        where it happened; None where that is not known
    job_id, attempt
        the job that counts now, and the newest attempt; None before the first
    step, lost_steps, lost_s
        the last step that is known to be done; the number of the last attempt's steps that no
        checkpoint has, and their seconds
    tasks
        the explanations of an array's tasks, by their number
    """

    kind: str
    text: str
    hint: str = ""
    job_id: str | None = None
    attempt: int | None = None
    node: str | None = None
    rank: int | None = None
    step: int | None = None
    lost_steps: int | None = None
    lost_s: float | None = None
    tasks: Mapping[str, Explanation] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def paragraph(explanation: Explanation) -> str:
    """Return the text for a terminal, in lines of `WIDTH`, and the hint, if there is one, as one
    line below, so that a command can be copied. Control characters are replaced."""
    text = textwrap.fill(explanation.text, WIDTH, break_long_words=False, break_on_hyphens=False)
    return printable(f"{text}\nhint: {explanation.hint}" if explanation.hint else text)


def at_step(facts: RunFacts) -> str:
    """Return where the newest attempt was: `` at step n``, or `` before its first step``. ''
    without an attempt, and where the progress is unknown."""
    if not facts.has_progress or facts.newest is None:
        return ""
    if not facts.select(FirstStep, attempt=facts.newest):
        return " before its first step"
    return f" at step {last_step(facts.events)}"


def quoted_path(facts: RunFacts) -> str:
    """Return the run's folder, quoted for a shell."""
    return shlex.quote(str(facts.path))


def log_hint(facts: RunFacts) -> str:
    """Return the command that shows the run's output; for a standalone script the words for where
    its output is."""
    if facts.standalone:
        return "see its output, where it was started"
    return f"hpc-ddp logs {quoted_path(facts)}"


def fill_hint(
    facts: RunFacts, hint: str, groups: Mapping[str, str], rank: int | None = None
) -> str:
    """Return a hint with its fields filled: ``{again}``, ``{with_new_code}``, ``{path}``,
    ``{python}``, ``{logs}``, and `groups`.

    ``{logs}`` is the command that shows the log of `rank` in the newest attempt, or (None) the
    run's output; for a standalone script it is `log_hint`. Raise KeyError for another field.
    """
    option = "" if rank is None or facts.standalone else f" --rank {rank} --attempt {facts.newest}"
    fields = {
        "again": facts.again,
        "with_new_code": facts.with_new_code,
        "path": quoted_path(facts),
        "python": str(facts.spec.get("python", "python3")),
        "logs": f"{log_hint(facts)}{option}",
    }
    return hint.format(**{**groups, **fields})


def shorten(text: str) -> str:
    """Return the first 240 characters of a text, with … where it is cut."""
    return text if len(text) <= 240 else f"{text[:240]}…"
