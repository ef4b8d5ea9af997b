"""A job script that another script submits, as a here-document in it: ``sbatch <<EOT``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpc_ddp.submission.job_script.bash import syntax
from hpc_ddp.submission.job_script.bash.quotes import without_quoted_texts
from hpc_ddp.submission.job_script.bash.scope import Scope
from hpc_ddp.submission.job_script.bash.syntax import Node, source
from hpc_ddp.submission.job_script.bash.words import Word
from hpc_ddp.submission.job_script.conversion import LOST, OURS, Mark
from hpc_ddp.submission.job_script.directives import Directives, read_directives, read_options
from hpc_ddp.submission.job_script.statements.reader import Reader

_SUBMIT = "hpc-ddp submit does it"
_BEHIND = "behind the submit: a script of yours, behind hpc-ddp submit"
# What a script may do with the file that has the job.
_OF_FILE = re.compile(r"(chmod|rm|echo|printf)\b")
# Where the script lies, which a job does not know.
_OF_ITSELF = re.compile(r"\$0\b|\$\{0|BASH_SOURCE")
# What an unquoted here-document has of its own: escapes, variables, arguments and other code.
_EXPANDED = re.compile(r"\\([$`\\])|\$(?:\w+|[@*#]|\{[^{}]*\})|`|\$\(")


@dataclass
class JobText:
    """The contents of a script for sbatch: its `directives`, and the `text` of its statements, at
    their lines. `marks` has (group, reason), by line, of lines that are neither; `line` is that of
    the sbatch which submits it, 0 where the user does."""

    directives: Directives
    text: str
    marks: dict[int, Mark] = field(default_factory=dict)
    line: int = 0


@dataclass(frozen=True)
class _Document:
    """A here-document with directives: its word, its text, and the file that ``cat`` writes it to,
    '' for a document that sbatch reads."""

    word: Node
    body: Node
    end: Node
    file: str

    @property
    def numbers(self) -> range:
        """The numbers of its lines."""
        return range(self.body.start_point[0] + 1, self.end.start_point[0] + 1)


def unwrap(text: str, scope: Scope) -> JobText:
    """Return the contents of a script, or those of the script that it submits.

    The latter is the only here-document with directives, which goes to the only sbatch or, by
    ``cat``, to its file or pipe; neither stands in a block or a list. The statements before it are
    in the text, too: the job has their variables, by the shell that submits. In an unquoted
    here-document their values stand as they are there; where one is not known here, or a line is of
    no use in a job, the script is taken as it is. `scope` is that of the script's begin; it is
    changed. Raises as `syntax.parse`.
    """
    directives = read_directives(text)
    plain = JobText(directives, text)
    if directives.options or not re.search(r"<<[\s\S]*^\s*#SBATCH", text, re.M):
        return plain
    root = syntax.parse(text)
    statements = [node for node in root.named_children if node.type != "comment"]
    documents = [(i, d) for i, node in enumerate(statements) if (d := _document_of(node))]
    commands = [node for node in syntax.all_below(root) if _name_of(node) == "sbatch"]
    submits = [(i, c) for i, node in enumerate(statements) if (c := _submit_of(node))]
    if not len(documents) == len(commands) == len(submits) == 1:
        return plain
    (at, document), (last, command) = documents[0], submits[0]
    lines, before = text.splitlines(), statements[:at]
    first = syntax.lines_of(statements[at])[0]
    if last < at or _OF_ITSELF.search("\n".join(map(source, before))):
        return plain
    reader = Reader(scope)
    reader.read("\n".join(lines[: first - 1]))
    unexported = {s.name for s in reader.statements if s.name and not s.exported}
    words = scope.words(command.named_children[1:])
    if not _is_for(words, document) or not _write_lines(lines, document, scope, unexported):
        return plain
    return _make_job(lines, statements, document, (at, last), words)


def _make_job(
    lines: list[str], statements: Sequence[Node], document: _Document, places: tuple[int, int],
    words: list[Word],
) -> JobText:  # fmt: skip
    """Return the job of a `document` whose text is in `lines` by now. `places` are the indexes of
    the statements that have it and submit it, `words` those behind ``sbatch``."""
    at, last = places
    only_body = (line if n in document.numbers else "" for n, line in enumerate(lines, 1))
    job = JobText(read_directives("\n".join(only_body)), "")
    job.line = syntax.lines_of(statements[last])[0]
    options = words[:-1] if document.file else words
    _take_options(job.directives, options, job.line)
    for index, node in enumerate(statements):
        code, (begin, end) = source(node), syntax.lines_of(node)
        is_of_file = document.file and document.file in code.split() and _OF_FILE.match(code)
        is_known = index in places or is_of_file or syntax.only_reports(node)
        is_known = is_known or code.startswith("set ")  # for the shell that submits
        is_known = is_known or (index < at and node.type == "function_definition")
        if is_known or index > at:
            mark = (OURS, _SUBMIT) if is_known else (LOST, _BEHIND)
            around = (n for n in range(begin, end + 1) if n not in document.numbers)
            job.marks |= dict.fromkeys(around, mark)
        elif "chdir" in job.directives.options and code.startswith("cd "):
            job.marks |= dict.fromkeys(range(begin, end + 1), (OURS, "the job has a --chdir"))
    start = lines[document.numbers[0] - 1]
    lines[0] = start if start.startswith("#!") else "#!/bin/bash"
    job.text = "\n".join("" if n in job.marks else line for n, line in enumerate(lines, 1))
    return job


def _name_of(node: Node) -> str:
    """Return the name of a command that has no variables of its own; '' for another node."""
    kinds = {child.type for child in node.named_children}
    is_command = node.type == "command" and "variable_assignment" not in kinds
    return source(node.child_by_field_name("name")) if is_command else ""


def _without_assignment(node: Node) -> Node:
    """Return the command of ``X=$(…)``, of another node itself."""
    inner = node.child_by_field_name("value") if node.type == "variable_assignment" else None
    if inner is None or inner.type != "command_substitution" or len(inner.named_children) != 1:
        return node
    return inner.named_children[0]


def _document_of(node: Node) -> _Document | None:
    """Return the here-document with directives that a statement of ``sbatch`` or ``cat`` has; None
    for another statement."""
    node = _without_assignment(node)
    if node.type != "redirected_statement":
        return None
    command, *redirects = node.named_children
    document = next((r for r in redirects if r.type == "heredoc_redirect"), None)
    if document is None:
        return None
    parts = {child.type.removeprefix("heredoc_"): child for child in document.children}
    if not {"start", "body", "end"} <= parts.keys():
        return None
    if not re.search(r"^\s*#SBATCH", source(parts["body"]), re.M):
        return None
    files = [r for r in (*redirects, *document.named_children) if r.type == "file_redirect"]
    file = source(files[0].named_children[-1]).strip("\"'") if files else ""
    is_written = len(files) == 1 and source(files[0]).startswith(">") and "pipeline" not in parts
    is_cat = source(command) == "cat" and (is_written if files else "pipeline" in parts)
    is_submit = _name_of(command) == "sbatch" and not files and "pipeline" not in parts
    triple = parts["start"], parts["body"], parts["end"]
    return _Document(*triple, file) if is_cat or is_submit else None


def _submit_of(node: Node) -> Node | None:
    """Return the command ``sbatch`` of a statement that is no more than it, or than ``cat`` of a
    here-document before it; None for another statement."""
    node = _without_assignment(node)
    if node.type == "redirected_statement" and _document_of(node):
        command, document = node.named_children[0], node.named_children[-1]
        pipes = [c for c in document.named_children if c.type == "pipeline"]
        behind = pipes[0].named_children if pipes else [command]
        node = behind[0] if len(behind) == 1 else node
    return node if _name_of(node) == "sbatch" else None


def _is_for(words: Sequence[Word], document: _Document) -> bool:
    """Return whether the words behind ``sbatch`` are options, and the document's file where it has
    one; options are known but for their values."""
    options = words[:-1] if document.file else words
    is_named = not document.file or (words[-1:] and words[-1].text in _forms(document.file))
    return bool(is_named) and all(
        word.text.startswith("-") if index == 0 or not word.is_static else True
        for index, word in enumerate(options)
    )


def _forms(file: str) -> set[str]:
    """Return the texts by which a file may be named that is written so in a script."""
    return {file, file.removeprefix("./"), f"./{file}", re.sub(r"\$\{(\w+)\}", r"$\1", file)}


def _write_lines(lines: list[str], document: _Document, scope: Scope, unexported: set[str]) -> bool:
    """Write the lines of a here-document into a script's `lines` as its reader gets them. Return
    whether that can be done: all that bash puts into an unquoted one is known, but for directives;
    and what only the job expands is no variable of the script that it does not export
    (`unexported`), unless the document sets it."""
    for number in document.numbers:
        is_cut = source(document.word.prev_sibling) == "<<-"
        line = lines[number - 1].lstrip("\t" if is_cut else "")
        if source(document.word)[:1] not in "\"'\\":
            expanded = _expand(line, scope)
            if expanded is None and not line.startswith("#SBATCH"):
                return False
            line = line if expanded is None else expanded
        lines[number - 1] = line
    body = [lines[n - 1] for n in document.numbers if not lines[n - 1].lstrip().startswith("#")]
    text = "\n".join(body)
    is_set = {*re.findall(r"^\s*(?:export\s+)?(\w+)=", text, re.M)}
    return not ({*syntax.names_in(without_quoted_texts(text))} & unexported) - is_set


def _expand(text: str, scope: Scope) -> str | None:
    """Return a line of an unquoted here-document as bash writes it; None where it has code whose
    result is not known. A variable of the shell that submits stays, for the job has it, too."""
    unknown = []

    def value_of(match: re.Match[str]) -> str:
        if match[1]:
            return match[1]
        if match[0] in ("`", "$("):
            unknown.append(match[0])
            return match[0]
        assignment = syntax.parse(f'X="{match[0]}"').named_children[0]
        word = scope.word(assignment.child_by_field_name("value"))
        names = syntax.names_in(match[0])
        if not word.is_static and (not names or {*names} & scope.values.keys()):
            unknown.append(match[0])
        return word.text if word.is_static else match[0]

    expanded = _EXPANDED.sub(value_of, text)
    return None if unknown else expanded


def _take_options(directives: Directives, words: list[Word], line: int) -> None:
    """Put the options on sbatch's command line, of a `line`, before equal directives. Options with
    code in their values, also those of directives, are lost."""
    for name, operand in read_options(words):
        if name in directives.options:
            reason = f"--{name} of line {line} replaces it"
            directives.replaced.append((directives.options[name][1], reason))
        directives.options[name] = operand, line
    for name, (operand, at) in [*directives.options.items()]:
        if re.search("[$`]", operand):
            del directives.options[name]
            reason = f"--{name}={operand}: only the shell that submits knows it: write it"
            directives.marks[at] = LOST, reason
