"""A job script that another script submits, as a here-document in it: ``sbatch <<EOT``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpc_ddp.submission.job_script.bash import syntax
from hpc_ddp.submission.job_script.bash.scope import Scope
from hpc_ddp.submission.job_script.bash.syntax import Node, source
from hpc_ddp.submission.job_script.conversion import LOST, OURS, Mark
from hpc_ddp.submission.job_script.directives import Directives, read_directives
from hpc_ddp.submission.job_script.statements.reader import Reader

_BLOCKS = (  # on which a submit depends, or which are read where they are called
    "if_statement", "for_statement", "while_statement", "case_statement", "function_definition",
    "c_style_for_statement",
)  # fmt: skip
_SUBMIT = "hpc-ddp submit does it"
_OF_FILE = re.compile(r"(rm|chmod|cat)\b")  # what a script does with the file, but for sbatch
_COMMAND_LINE = re.compile(r"\bsbatch\b((?:\\\n|[^\n;&|<>()`])*)")
# What an unquoted here-document has of its own: escapes, variables and arguments.
_EXPANDED = re.compile(r"\\([$`\\])|\$(?:\w+|[@*#]|\{[^{}]*\})")


@dataclass
class JobText:
    """The contents of a script for sbatch: its `directives`, and the `text` of its statements, at
    their lines. `marks` has (group, reason), by line, of lines that are neither; `line` is that of
    the sbatch which submits it, 0 where the user does."""

    directives: Directives
    text: str
    marks: dict[int, Mark] = field(default_factory=dict)
    line: int = 0


def unwrap(text: str, scope: Scope) -> JobText:
    """Return what a script's text says to sbatch, or what the script says that it submits.

    The latter is the only here-document with directives, which goes to sbatch or, by ``cat``, to a
    file or a pipe, and stands in no block. The statements around it stay in the text: the job has
    their variables, by the shell that submits. Their values, as they are there, stand in an
    unquoted here-document. `scope` is that of the script's begin; it is changed. Raises as
    `syntax.parse`.
    """
    directives = read_directives(text)
    if directives.options or not re.search(r"<<[\s\S]*^\s*#SBATCH", text, re.M):
        return JobText(directives, text)
    statements = syntax.parse(text).named_children
    candidates = [(node, inner) for node in statements for inner in _documents(node)]
    if len(candidates) != 1 or "sbatch" not in text:
        return JobText(directives, text)
    statement, document = candidates[0]
    lines, (first, _) = text.splitlines(), syntax.lines_of(statement)
    Reader(scope).read("\n".join(lines[: first - 1]))
    inner = _write_lines(lines, document, scope)
    only_inner = "\n".join(line if n in inner else "" for n, line in enumerate(lines, 1))
    job, file = JobText(read_directives(only_inner), "", line=first), _target(document[0].parent)
    for node in statements:
        is_of_file = file and file in source(node) and _OF_FILE.match(source(node))
        submits = node is statement or re.search(r"\bsbatch\b", source(node))
        if submits or is_of_file or syntax.only_reports(node):
            begin, end = syntax.lines_of(node)
            around = [n for n in range(begin, end + 1) if n not in inner]
            code = "\n".join(lines[n - 1] for n in around)
            _take_command_line(job.directives, code, begin, scope)
            job.marks |= dict.fromkeys(around, (OURS, _SUBMIT))
    _refuse_code(job.directives)
    job.text = "\n".join("" if n in job.marks else line for n, line in enumerate(lines, 1))
    return job


def _documents(node: Node) -> Iterator[tuple[Node, Node, Node]]:
    """Yield the word, the body and the end of each here-document with directives in a statement
    that is no block."""
    pending = [node] if node.type not in _BLOCKS else []
    while pending:
        inner = pending.pop()
        pending += inner.named_children
        parts = {child.type.removeprefix("heredoc_"): child for child in inner.children}
        if inner.type == "heredoc_redirect" and re.search(r"^\s*#SBATCH", source(inner), re.M):
            yield parts["start"], parts["body"], parts["end"]


def _write_lines(lines: list[str], document: tuple[Node, Node, Node], scope: Scope) -> range:
    """Write the lines of a here-document into a script's `lines` as its reader gets them; return
    their numbers."""
    start, body, end = document
    numbers = range(body.start_point[0] + 1, end.start_point[0] + 1)
    for number in numbers:
        line = lines[number - 1].lstrip("\t" if source(start.prev_sibling) == "<<-" else "")
        lines[number - 1] = line if source(start)[:1] in "\"'\\" else _expand(line, scope)
    return numbers


def _target(redirect: Node) -> str:
    """Return the file, as it is written, that a command with a here-document, whose node is
    `redirect`, writes to; '' without one."""
    nodes = [*redirect.parent.named_children, *redirect.named_children]
    files = [node.named_children[-1] for node in nodes if node.type == "file_redirect"]
    return source(files[0]).strip("\"'") if files else ""


def _expand(text: str, scope: Scope) -> str:
    """Return a line of an unquoted here-document as bash writes it; a variable whose value is not
    known stays."""

    def value_of(match: re.Match[str]) -> str:
        if match[1]:
            return match[1]
        assignment = syntax.parse(f'X="{match[0]}"').named_children[0]
        word = scope.word(assignment.child_by_field_name("value"))
        return word.text if word.is_static else match[0]

    return _EXPANDED.sub(value_of, text)


def _take_command_line(directives: Directives, text: str, line: int, scope: Scope) -> None:
    """Put the options on sbatch's command line in some code, which begins in `line`, before equal
    directives."""
    match = _COMMAND_LINE.search(text)
    words = _expand(match[1].replace("\\\n", " "), scope) if match else ""
    for name, (operand, _) in read_directives(f"#SBATCH {words}").options.items():
        if name in directives.options:
            reason = f"--{name} of line {line} replaces it"
            directives.replaced.append((directives.options[name][1], reason))
        directives.options[name] = operand, line


def _refuse_code(directives: Directives) -> None:
    """Take options with code in their values out of `directives`."""
    for name, (operand, line) in [*directives.options.items()]:
        if re.search("[$`]", operand):
            del directives.options[name]
            reason = f"--{name}={operand}: only the shell that submits knows it: write it"
            directives.marks[line] = LOST, reason
