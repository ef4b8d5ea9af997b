"""`Explanation`, the result of ``hpc-ddp explain``, and phrases that several explanations share."""

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
    """The state or the end of a run, as text.

    Attributes
    ----------
    kind
        one to three words for programs: ``finished``, ``running``, ``waiting``, ``preempted``,
        ``python error``, ``cuda out of memory`` …
    text, hint
        for the user: a paragraph, and one thing to do ('' where there is nothing to do)
    node, rank
        the node and the rank of a failure; None where they are not known
    job_id, attempt
        the job that counts now, and the number of the newest attempt; None before the first
    step, lost_steps, lost_s
        the last step that is known to be done; how many steps of the newest attempt no checkpoint
        has, and their seconds; None where they are not known
    tasks
        the explanations of an array's tasks, by their index as text
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
        """Return the attributes by name, for JSON; the tasks as such tables, too."""
        return asdict(self)


def paragraph(explanation: Explanation) -> str:
    """Return the explanation for a terminal: the text in lines of `WIDTH` characters, and the hint,
    if there is one, below it as a single line, so that a command can be copied. Control characters
    are replaced."""
    text = textwrap.fill(explanation.text, WIDTH, break_long_words=False, break_on_hyphens=False)
    return printable(f"{text}\nhint: {explanation.hint}" if explanation.hint else text)


def step_phrase(facts: RunFacts) -> str:
    """Return the newest attempt's last step as `` at step n``, or `` before its first step``; ''
    without an attempt, and for a script that reports no steps."""
    if not facts.has_progress or facts.newest is None:
        return ""
    if not facts.select(FirstStep, attempt=facts.newest):
        return " before its first step"
    return f" at step {last_step(facts.events)}"


def quoted_path(facts: RunFacts) -> str:
    """Return the path of the run's folder, quoted for a shell."""
    return shlex.quote(str(facts.path))


def log_hint(facts: RunFacts) -> str:
    """Return the command that shows the run's output; for a standalone script, whose output is not
    kept, the advice to look where it was started."""
    if facts.standalone:
        return "see its output, where it was started"
    return f"hpc-ddp logs {quoted_path(facts)}"


def fill_hint(
    facts: RunFacts, hint: str, groups: Mapping[str, str], rank: int | None = None
) -> str:
    """Return a hint with its fields filled in: ``{again}``, ``{with_new_code}``, ``{path}``,
    ``{python}``, ``{logs}``, and those of `groups`, which go first.

    ``{logs}`` is `log_hint`; with `rank`, unless the script is standalone, the command shows the
    log of that rank in the newest attempt. Raise KeyError for another field.
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
    """Return at most the first 240 characters of a text, and … behind them where it is cut."""
    return text if len(text) <= 240 else f"{text[:240]}…"
