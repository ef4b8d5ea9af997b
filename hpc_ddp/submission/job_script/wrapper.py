"""A job script that another script submits, as a here-document in it: ``sbatch <<EOT``; or that
submits itself, by a line that only the shell outside of a job reaches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

from hpc_ddp.submission.job_script.bash import blocks, syntax
from hpc_ddp.submission.job_script.bash.conditions import find_outside
from hpc_ddp.submission.job_script.bash.quotes import without_quoted_texts
from hpc_ddp.submission.job_script.bash.syntax import Node, source
from hpc_ddp.submission.job_script.bash.values import doubts_in
from hpc_ddp.submission.job_script.bash.variables import Scope
from hpc_ddp.submission.job_script.bash.words import Doubt, Word
from hpc_ddp.submission.job_script.conversion import LOST, OURS, Mark
from hpc_ddp.submission.job_script.directives import Directives, read_directives, read_options
from hpc_ddp.submission.job_script.script_text import SUBMIT, leave_out_branch
from hpc_ddp.submission.job_script.statements.reader import Reader

_BEHIND = "behind the submit: a script of yours, behind hpc-ddp submit"
_IN_PARTS = (
    "it submits a script that it writes in parts: run it once without the sbatch, and import that"
)
# Commands of a script on the file that has the job.
_OF_FILE = re.compile(r"(chmod|rm|echo|printf)\b")
# The script's own path, which a job does not know.
_OF_ITSELF = re.compile(r"\$0\b|\$\{0|BASH_SOURCE")
# All that bash replaces in an unquoted here-document: an escaped character, [1], variables,
# arguments, and the beginning of other code.
_OF_A_PRINT = re.compile(r"\$\((date|hostname|whoami|pwd)\b[^()]*\)")
_EXPANDED = re.compile(r"\\([$`\\])|\$(?:\d|\w+|[@*#]|\{[^{}]*\})|`|\$\(")


@dataclass
class JobText:
    """A job script as sbatch gets it: the script itself, or one that it submits.

    Attributes
    ----------
    directives, text
        its ``#SBATCH`` lines, and its statements, which keep the numbers of their lines
    marks
        (group, reason), by line, of lines that are neither
    line
        that of the sbatch which submits it, in the script; 0 where the user calls sbatch
    first_line, first_number
        the first line that sbatch reads, and its number in the script
    doubts
        those of values in the text (`Part.doubt`)
    """

    directives: Directives
    text: str
    marks: dict[int, Mark] = field(default_factory=dict)
    line: int = 0
    first_line: str = ""
    first_number: int = 1
    doubts: set[Doubt] = field(default_factory=set)


@dataclass(frozen=True)
class _Document:
    """A here-document with directives, ``<<EOT``: the nodes of its word, its text and the word at
    its end; and the file that ``cat`` writes it to, '' for a document that sbatch reads."""

    word: Node
    body: Node
    end: Node
    file: str

    @property
    def numbers(self) -> range:
        """The numbers of the text's lines in the script, from 1."""
        return range(self.body.start_point[0] + 1, self.end.start_point[0] + 1)


def unwrap(text: str, scope: Scope) -> JobText:
    """Return the job of a script's `text`: the script that it submits, or else the script itself.
    `scope` is that of the script's begin; it is changed. Raise as `syntax.parse`.

    The submitted script is the only here-document with directives. The only sbatch must read it:
    by ``sbatch <<EOT`` or ``cat <<EOT | sbatch``, or from the file of ``cat > FILE <<EOT``. Neither
    may stand in a block or a list. Statements in front of it are in the result, too, since the job
    has their variables from the shell that submits. In an unquoted here-document (``<<EOT``) bash
    puts values of variables into the text, and so does this function. Where it does not know one,
    or where those statements need the script's own path, the result is the script itself.
    """
    directives = read_directives(text)
    as_it_is = JobText(directives, text, first_line=text.partition("\n")[0])
    if re.search(rf"sbatch\s.*({_OF_ITSELF.pattern})", text) and _take_own_submit(as_it_is, scope):
        return as_it_is
    if directives.options or not re.search(r"<<[\s\S]*^\s*#SBATCH|sbatch\b.*<<", text, re.M):
        return as_it_is
    root = syntax.parse(text)
    statements = [node for node in _statements_in(root) if node.type != "comment"]
    documents = [(i, d) for i, node in enumerate(statements) if (d := _find_document(node))]
    commands = [node for node in syntax.all_below(root) if _command_name(node) == "sbatch"]
    submits = [(i, c) for i, node in enumerate(statements) if (c := _find_submit(node))]
    if commands and any(_adds_to(d, node) for _, d in documents for node in statements):
        as_it_is.marks[syntax.lines_of(commands[-1])[0]] = LOST, _IN_PARTS
        return as_it_is
    if not len(documents) == len(commands) == len(submits) == 1:
        return as_it_is
    (at, document), (submit_at, command) = documents[0], submits[0]
    lines, before = text.splitlines(), statements[:at]
    first = syntax.lines_of(statements[at])[0]
    if submit_at < at or _OF_ITSELF.search("\n".join(map(source, before))):
        return as_it_is
    reader = Reader(scope)
    reader.read("\n".join(lines[: first - 1]))
    exported = {s.name for s in reader.statements if s.exported}
    unexported = {s.name for s in reader.statements if s.name} - exported
    words = scope.words(command.named_children[1:])
    if not _reads_document(words, document, scope):
        return as_it_is
    doubts = set[Doubt]()
    if not _write_lines(lines, document, scope, unexported, doubts):
        return as_it_is
    job = _make_job(lines, statements, document, (at, submit_at), words)
    return replace(job, doubts=doubts)


def _take_own_submit(job: JobText, scope: Scope) -> bool:
    """Return whether a script, `job`, submits itself where no job runs (``[ -n "$SLURM_JOB_ID" ] ||
    sbatch -N 2 "$0"``). If so, the options are put into its directives, and the lines that no job
    reaches are marked, and empty in its text. `scope` is that of the script's begin; it is changed.
    Raise as `syntax.parse`."""
    lines = job.text.split("\n")
    for command in syntax.all_below(syntax.parse(job.text)):
        texts = [source(child) for child in command.named_children]
        is_submit = command.type == "command" and "sbatch" in texts[:2] and texts[0] != "echo"
        files = (i for i, text in enumerate(texts) if _OF_ITSELF.search(text) and text[0] != "-")
        file = next(files, 0) if is_submit else 0
        condition, branch = (file and find_outside(command, scope)) or (None, [])
        if condition is None:
            continue
        reader, line = Reader(scope), syntax.lines_of(command)[0]
        reader.read("\n".join(lines[: syntax.lines_of(condition)[0] - 1]))
        for node in (node for node in branch if node.end_byte <= command.start_byte):
            reader.read(source(node))
        begin = texts.index("sbatch")
        words = scope.words(command.named_children[begin + 1 : file])
        job.doubts = {doubt for word in words for doubt in doubts_in(word)}
        _take_options(job.directives, words, line, is_expanded=False)
        texts = [*texts[:begin], *(word.text for word in words), *texts[file + 1 :]]
        if extra := [text for text in texts if not re.fullmatch(r"exec|\"?\$[@*]\"?", text)]:
            _refuse(job.directives, line, f"{' '.join(extra)}: what this sbatch alone has: yours")
        job.text = leave_out_branch(job.text, (command, condition, branch), job.marks)
        return True
    return False


def _statements_in(root: Node) -> Iterator[Node]:
    """Yield the statements of a script, and in place of a block, ``{ … }``, those in it."""
    for node in root.named_children:
        yield from _statements_in(node) if node.type == "compound_statement" else [node]


def _make_job(
    lines: list[str], statements: Sequence[Node], document: _Document, places: tuple[int, int],
    words: list[Word],
) -> JobText:  # fmt: skip
    """Return the job that a script submits as a here-document, the `document`. `lines` are the
    script's, with the document's as sbatch gets them; the first of them is changed to the job's
    ``#!``. `places` are the indexes of those `statements` that have the document and submit it;
    `words` stand behind ``sbatch``.

    ``marks`` of the result: statements for the submit alone are OURS, others behind the document
    are LOST; statements in front of it are in the job's text.
    """
    at, submit_at = places
    only_body = (line if n in document.numbers else "" for n, line in enumerate(lines, 1))
    job = JobText(read_directives("\n".join(only_body)), "")
    job.line = syntax.lines_of(statements[submit_at])[0]
    options = words[:-1] if document.file else words
    _take_options(job.directives, options, job.line)
    for index, node in enumerate(statements):
        code, (begin, end) = source(node), syntax.lines_of(node)
        is_before = index < at
        if index in places or _is_for_submit(node, document, is_before):
            mark = OURS, SUBMIT
        elif not is_before:
            mark = LOST, _BEHIND
        elif "chdir" in job.directives.options and code.startswith("cd "):
            mark = OURS, "the job has a --chdir"
        else:
            continue
        around = (n for n in range(begin, end + 1) if n not in document.numbers)
        job.marks |= dict.fromkeys(around, mark)
    job.first_number = document.numbers[0]
    job.first_line = lines[job.first_number - 1]
    lines[0] = job.first_line if job.first_line.startswith("#!") else "#!/bin/bash"
    job.text = "\n".join("" if n in job.marks else line for n, line in enumerate(lines, 1))
    return job


def _adds_to(document: _Document, node: Node) -> bool:
    """Return whether a statement other than that of the document changes the document's file."""
    code, is_apart = source(node), node.end_byte <= document.body.start_byte
    is_apart |= node.start_byte >= document.end.end_byte
    file = "|".join(rf"[\"']?{re.escape(form)}(?![\w./-])" for form in _spellings(document.file))
    changes = rf">\s*(?:{file})|\b(?:tee|sed\s+-\w*i)\b[^\n;|&]*\s(?:{file})"
    return bool(document.file and is_apart and re.search(changes, code))


def _is_for_submit(node: Node, document: _Document, is_before: bool) -> bool:
    """Return whether a statement is of use for the submit alone: it changes the document's file or
    prints its name, prints something, sets options of the shell, or, in front of the document
    (`is_before`), defines a function."""
    code = source(node)
    is_of_file = document.file and document.file in code.split() and _OF_FILE.match(code)
    is_function = is_before and node.type == "function_definition"
    is_setting = code.startswith("set ") or is_function
    return bool(is_of_file or is_setting or blocks.only_reports(node))


def _command_name(node: Node) -> str:
    """Return the name of a command without assignments in front of it; '' for any other node."""
    kinds = {child.type for child in node.named_children}
    is_command = node.type == "command" and "variable_assignment" not in kinds
    return source(node.child_by_field_name("name")) if is_command else ""


def _without_assignment(node: Node) -> Node:
    """Return the command in ``X=$(command)``; any other node itself."""
    inner = node.child_by_field_name("value") if node.type == "variable_assignment" else None
    if inner is None or inner.type != "command_substitution" or len(inner.named_children) != 1:
        return node
    return inner.named_children[0]


def _find_document(node: Node) -> _Document | None:
    """Return the here-document of a statement ``sbatch <<EOT``, or with directives of ``cat > FILE
    <<EOT`` or ``cat <<EOT | …``, also in ``X=$(…)``; None for any other statement."""
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
    # tree-sitter has a > behind the word, and the pipe, in the node of the document.
    files = [r for r in (*redirects, *document.named_children) if r.type == "file_redirect"]
    file = source(files[0].named_children[-1]).strip("\"'") if files else ""
    is_written = len(files) == 1 and source(files[0]).startswith(">") and "pipeline" not in parts
    is_cat = source(command) == "cat" and (is_written if files else "pipeline" in parts)
    is_submit = _command_name(command) == "sbatch" and not files and "pipeline" not in parts
    has_directives = re.search(r"^\s*#SBATCH", source(parts["body"]), re.M)
    if (is_cat and has_directives) or is_submit:
        return _Document(parts["start"], parts["body"], parts["end"], file)
    return None


def _find_submit(node: Node) -> Node | None:
    """Return the node of sbatch in a statement of one of these forms: ``sbatch FILE``, ``sbatch
    <<EOT``, ``cat <<EOT | sbatch``, and each of them in ``X=$(…)``. None for any other form."""
    node = _without_assignment(node)
    if node.type == "redirected_statement" and _find_document(node):
        command, document = node.named_children[0], node.named_children[-1]
        pipeline = next((c for c in document.named_children if c.type == "pipeline"), None)
        readers = pipeline.named_children if pipeline else [command]
        if len(readers) != 1:
            return None
        node = readers[0]
    return node if _command_name(node) == "sbatch" else None


def _reads_document(words: Sequence[Word], document: _Document, scope: Scope) -> bool:
    """Return whether sbatch, with the `words` behind it, reads the document: from stdin, or from
    the document's file, whose name must then be the last word.

    The other words must be options and their values: another one is the script that sbatch reads in
    place of the document. A word with code must begin with ``-``, for only the job may know whether
    ``$X`` is a value or a script."""
    options = words[:-1] if document.file else words
    words_by_name = {n: word for n, word in scope.values.items() if isinstance(word, Word)}
    texts = {name: word.text for name, word in words_by_name.items() if word.is_static}
    path = re.sub(r"\$\{?(\w+)\}?", lambda match: texts.get(match[1], match[0]), document.file)
    if path and not (words and words[-1].text in _spellings(document.file) | _spellings(path)):
        return False
    with_code = (word for word in options if not word.is_static)
    remaining = [*options]
    list(read_options(remaining))  # which removes them
    return not remaining and all(word.text.startswith("-") for word in with_code)


def _spellings(file: str) -> set[str]:
    """Return the texts by which another line of the script may name a `file`: with or without
    ``./`` before it, or with ``$A`` for ``${A}``."""
    return {file, file.removeprefix("./"), f"./{file}", re.sub(r"\$\{(\w+)\}", r"$\1", file)}


def _write_lines(
    lines: list[str], document: _Document, scope: Scope, unexported: set[str], doubts: set[Doubt]
) -> bool:
    """Change the lines of a here-document in `lines`, those of the script, to what its reader gets,
    and return whether they can be those of a job. Add the doubts of values in them to `doubts`.

    They can't where bash puts something into an unquoted document that is not known here, except in
    a directive; then some lines are not changed. A variable that the script sets in front of the
    document stays as it is: the job has its assignment. Nor can they where the job would need a
    variable that the script sets and does not export (`unexported`), and the document does not set.
    """
    of_job: set[str] = set()
    public = {name for name in unexported if not scope.hides(name, "unknown")}
    for number in document.numbers:
        is_cut = source(document.word.prev_sibling) == "<<-"
        line = lines[number - 1].lstrip("\t" if is_cut else "")  # "": nothing is cut
        if source(document.word)[:1] not in "\"'\\":  # unquoted
            expanded = _expand(line, scope, public, of_job, doubts)
            if expanded is None and not line.startswith("#SBATCH"):
                return False
            line = line if expanded is None else expanded
        lines[number - 1] = line
    body = [lines[n - 1] for n in document.numbers if not lines[n - 1].lstrip().startswith("#")]
    text = "\n".join(body)
    is_set = {*re.findall(r"^\s*(?:export\s+)?(\w+)=", text, re.M)}
    return not ({*syntax.names_in(without_quoted_texts(text))} & unexported) - is_set - of_job


def _expand(
    text: str, scope: Scope, assigned: Set[str], of_job: set[str], doubts: set[Doubt]
) -> str | None:
    """Return a line of an unquoted here-document as bash writes it; None where it has code whose
    result is not known. A variable that the script does not set stays as it is, since the job has
    it from the shell that submits; so does one of those `assigned`, behind no single quote, which
    is added to `of_job`; and so does one whose value a file may have set anew, but for the value in
    a directive or behind a single quote, whose doubt is added to `doubts`. `scope` is changed by
    ``${A:=x}``. Raise as `syntax.parse`."""
    unknown = []

    def value_of(match: re.Match[str]) -> str:
        if match[1]:  # an escaped character
            return match[1]
        if match[0] in ("`", "$("):
            # The day, or the machine, of a print matters little.
            is_print = re.match(r"\s*(echo|printf)\b", text) and _OF_A_PRINT.match(
                text, match.start()
            )
            unknown.extend([] if is_print else [match[0]])
            return match[0]
        assignment = syntax.parse(f'X="{match[0]}"').named_children[0]
        word = scope.word(assignment.child_by_field_name("value"))
        names = syntax.names_in(match[0])
        is_quoted = text.count("'", 0, match.start()) % 2 == 1
        is_plain = re.fullmatch(r"\$\{?\w+\}?", match[0]) and not is_quoted
        # In the job the statements in front of the document tell what the value is by then.
        is_left = bool(doubts_in(word)) and is_plain and not text.startswith("#SBATCH")
        if is_left or (not word.is_static and is_plain and {*names} <= assigned):
            of_job.update(names)
            return match[0]
        if not word.is_static and (not names or {*names} & scope.values.keys()):
            unknown.append(match[0])
        doubts.update(doubts_in(word))
        return word.text if word.is_static else match[0]

    expanded = _EXPANDED.sub(value_of, text)
    return None if unknown else expanded


def _refuse(directives: Directives, line: int, reason: str) -> None:
    """Mark a line as lost in `directives`, for a reason behind those that it has."""
    reasons = [mark[1] for mark in (directives.marks.get(line),) if mark and mark[0] == LOST]
    directives.marks[line] = LOST, "; ".join([*reasons, reason])


def _take_options(
    directives: Directives, words: list[Word], line: int, is_expanded: bool = True
) -> None:
    """Put the options on sbatch's command line, `words` of a `line`, into `directives`, where they
    replace equal ones; other words stay in `words`. Remove options that have code in their values,
    also those of directives if bash expands these (`is_expanded`), and mark their lines as lost."""
    for name, operand in read_options(words):
        if name in directives.options:
            reason = f"--{name} of line {line} replaces it"
            directives.replaced.append((directives.options[name][1], reason))
        directives.options[name] = operand, line
    for name, (operand, at) in [*directives.options.items()]:
        if re.search("[$`]", operand) and (is_expanded or at == line):
            del directives.options[name]
            reason = f"--{name}={operand}: only the shell that submits knows it: write it"
            _refuse(directives, at, reason)
