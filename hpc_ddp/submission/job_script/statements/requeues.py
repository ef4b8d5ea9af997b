"""Commands of a job script that requeue it, as hpc-ddp does, and what stands beside them."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

from hpc_ddp.submission.job_script.bash import blocks, syntax
from hpc_ddp.submission.job_script.bash.syntax import Node, source
from hpc_ddp.submission.job_script.conversion import REQUEUES
from hpc_ddp.submission.job_script.statements.statement import Statement, with_functions

_IDLE = {
    *blocks.REPORTING,
    "sleep",
    "[",
    "trap",
    "kill",
    "set",
    "cd",
    "module",
    "scontrol",
    "squeue",
}


def does_more(text: str, functions: Container[str] = ()) -> bool:
    """Return whether bash code, `text`, with a command that requeues the job, has one that neither
    requeues, prints, waits, asks Slurm, ends something, nor calls one of the `functions`. Raise as
    `syntax.parse`."""
    commands = map(source, syntax.commands_of(syntax.parse(text)))
    return any(not (_is_idle(text) or _name_of(text) in functions) for text in commands)


def only_reports_or_requeues(node: Node) -> bool:
    """Return whether a block only prints, ends the script (`blocks.only_reports`) or requeues the
    job."""
    text = source(node)
    return blocks.only_reports(node) or bool(re.search(REQUEUES, text) and not does_more(text))


def separate_requeue(statement: Statement, functions: Mapping[str, Statement]) -> None:
    """Take a requeue of the job out of a statement that does more: a ``:`` stands in its place.
    Where it stands in a trap, or in one of the `functions` (by name) that the statement calls, the
    statement is lost. A launch, an assignment and a definition stay as they are. Raise as
    `syntax.parse`."""
    text = "\n".join(s.text for s in with_functions(statement, functions))
    is_plain = not (statement.launch or statement.name or statement.defines or statement.lost)
    if not (is_plain and re.search(REQUEUES, text)):
        return
    inner = statement.words[1].text if statement.first == "trap" and statement.words[1:] else ""
    called = "\n".join(source(syntax.body_of(d)) for d in _definitions(text))
    if does_more(inner, functions) or does_more(called, functions):
        statement.lost = (
            "it requeues the job, which hpc-ddp does, and does more: teardown, if needed"
        )
    elif not inner and does_more(statement.text, functions):
        root = syntax.parse(statement.text)
        code = root.text
        for command in reversed(syntax.commands_of(root)):
            if re.search(REQUEUES, source(command)):
                code = code[: command.start_byte] + b":" + code[command.end_byte :]
        statement.text = code.decode().strip()


def _definitions(text: str) -> list[Node]:
    """Return the definitions of functions in bash code."""
    nodes = syntax.all_below(syntax.parse(text))
    return [node for node in nodes if node.type == "function_definition"]


def _is_idle(command: str) -> bool:
    """Return whether a command requeues the job, prints, waits, asks Slurm or ends something."""
    return _name_of(command) in _IDLE or bool(re.search(REQUEUES, command))


def _name_of(command: str) -> str:
    """Return the first word of a command."""
    return re.split(r"\s", command.strip(), maxsplit=1)[0]
