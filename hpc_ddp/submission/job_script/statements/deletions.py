"""Commands that delete something in a text that another shell of a job script reads."""

from __future__ import annotations

import re

from hpc_ddp.submission.job_script.bash import syntax
from hpc_ddp.submission.job_script.bash.syntax import source
from hpc_ddp.submission.job_script.conversion import DELETES, REFUSED, first_reason
from hpc_ddp.submission.job_script.statements.statement import Statement

# A here-document that a shell reads, with its text.
_DOCUMENT = re.compile(
    r"\b(?:ba)?sh\b[^\n;|&]*<<-?\s*(?P<quote>[\"']?)(?P<end>\w+)(?P=quote)[^\n]*\n"
    r"(?P<text>.*?)^\s*(?P=end)$", re.S | re.M
)  # fmt: skip


def separate_deletions(statements: list[Statement], at: int) -> int:
    """Take each command that deletes something out of the here-documents of `statements` before the
    launch, whose index is `at`, that a shell reads: a ``:`` stands in its place, and behind the
    statement the command as a lost statement of its own. Return the launch's new index. Raise as
    `syntax.parse`."""
    separated = list[Statement]()
    for statement in statements[:at]:
        separated.append(statement)
        document = _DOCUMENT.search(statement.text)
        has_own_lines = statement.text.count("\n") == statement.lines[1] - statement.lines[0]
        if statement.lost or statement.launch or not (document and has_own_lines):
            continue
        for command in map(source, syntax.commands_of(syntax.parse(document["text"]))):
            before, found, behind = statement.text.partition(command)
            if found and first_reason(REFUSED, command, is_after=False) == DELETES:
                first = statement.lines[0] + before.count("\n")
                lines = first, first + command.count("\n")
                separated.append(Statement(command, lines, lost=DELETES, shells=statement.shells))
                statement.text = before + ":" + " \\\n" * command.count("\n") + behind
    separated += statements[at:]
    shift, statements[:] = len(separated) - len(statements), separated
    return at + shift
