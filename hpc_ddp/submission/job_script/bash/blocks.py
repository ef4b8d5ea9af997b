"""Blocks of a job script (functions, branches, loops): whether they only print, the variables that
they set or add words to, and commands in them that may set variables of any name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set

from hpc_ddp.submission.job_script.bash.quotes import split_quoted
from hpc_ddp.submission.job_script.bash.syntax import Node, commands_of, descend, parse, source

# What is added to a text in double quotes: no operator of the shell, but within ``$(…)``.
_ADDED_TEXT = r"(?:\\[\s\S]|\$\((?:[^()]|\([^()]*\))*\)|(?!\$\()[^\"\\;&|<>])*"
# Commands that a block which only reports may have: they print, wait, or end the script.
REPORTING = {"echo", "printf", "date", "exit", "return", "true", ":", "test", "wait"}
# Commands that may set variables whose names are among their words.
_SETTERS = ("read", "mapfile", "readarray", "printf", "let", "getopts", "declare")
# Commands that may set variables whose names are not among their words: one that sources the file
# `path`, one that evaluates a text, and one with a name in a variable.
_SOURCES = re.compile(r"(?:(?:builtin|command)\s+)?(?:source|\.)\s+[\"']?(?P<path>\S+)")
_EVALUATES = re.compile(r"(?:(?:builtin|command)\s+)?eval\s(?!.*\bconda\b)")
_SETS_BY_NAME = re.compile(
    r"(?:export|declare|typeset|local|readonly|read|printf\s+-v)\s(?:[^'\"$`]*\s)?[\"']?[$`]"
)
# Files of the system and of environments, which set none that a job script asks for.
_OF_SYSTEM = re.compile(
    r"/etc/.*|(.*/)?((de)?activate|conda\.sh|modules\.sh|\.?bashrc|\.?(bash_|z)?profile)[\"']?"
)
# A quick search, before code is parsed, for what one of the commands above may be.
_MAY_BE_SUCH = re.compile(
    r"\b(?:eval|source)\s|(?<!\S)\.\s|\b(?:export|declare|typeset|local|readonly|read|printf)\s.*[$`]"
)


def only_reports(node: Node, commands: Set[str] = frozenset()) -> bool:
    """Return whether a block only reports: with all its branches, it only prints or ends the
    script. It must have commands, all of whose names are in `REPORTING` or `commands`, and may
    neither write a file, set a variable nor run others by ``$(…)``, except ``$(date)`` and
    ``$(hostname)``. A comment only reports, too; an empty block does not."""
    kinds = {inner.type for inner in descend(node)}
    names = {source(command.child_by_field_name("name")) for command in commands_of(node)}
    runs_others = re.search(r"`|\$\((?!\(|date|hostname)", source(node))
    setters = {"variable_assignment", "unset_command", "declaration_command", "function_definition"}
    files = (source(inner) for inner in descend(node) if inner.type == "file_redirect")
    writes = any(not re.fullmatch(r"\d?>>?&?\s*(\d|/dev/(null|stderr|stdout))", f) for f in files)
    does_more = runs_others or writes or kinds & setters
    is_empty = not names and node.type != "comment"
    return names <= REPORTING | commands and not (is_empty or does_more)


def is_last(node: Node) -> bool:
    """Return whether a node is the last in its script that does something: at most prints, and
    other branches of an ``if`` or ``case`` around it, stand behind it. A node in a loop, a function
    or another command is never the last."""
    blocks = {"program", "if_statement", "elif_clause", "else_clause", "case_statement",
              "case_item", "compound_statement"}  # fmt: skip
    while node.parent and node.parent.type in blocks:
        siblings = node.parent.named_children
        behind = [sibling for sibling in siblings if sibling.start_byte >= node.end_byte]
        in_branch = ("elif_clause", "else_clause", "case_item")
        if not all(s.type in in_branch or only_reports(s) for s in behind):
            return False
        node = node.parent
    return node.parent is None


def names_set_in(node: Node) -> set[str]:
    """Return the variables that a block may set, as ``N`` by ``N=1``, ``for N in 1 2``, ``read N``
    or ``((N++))``; some of its other words may be among them."""
    names: set[str] = set()
    for inner in descend(node):
        words, kind = [source(child) for child in inner.named_children], inner.type
        if kind in ("variable_assignment", "for_statement"):
            names.add(re.split(r"\W", words[0])[0])  # A of A[1]
        elif kind == "unset_command" or _sets_by_words(inner):
            names |= {re.split(r"\W", word.strip("\"'"))[0] for word in words if word != "printf"}
        elif kind.endswith("_expression") and re.search(r"[^=!<>]=[^=]|\+\+|--", source(inner)):
            names |= {*words[:1]}  # N of ((N=1)), ((N+=1)) and ((N++))
    return {name for name in names if re.fullmatch(r"[A-Za-z_]\w*", name)}


def commands_of_unknown_names(node: Node) -> Iterator[Node]:
    """Yield the commands in a block that may set variables whose names are not in them: each that
    sources a file, unless this is one of the system or of an environment (`_OF_SYSTEM`); each
    ``eval``, but for Conda's; and each that has a variable's name in another variable, as ``export
    $NAME=1``. Those in ``( … )`` set nothing outside of it, and are left out."""
    if node.type in ("command", "declaration_command"):
        first = node.child_by_field_name("name") or node  # behind the assignments of A=1 command
        code = node.text[first.start_byte - node.start_byte :].decode()
        source_line = _SOURCES.match(code)
        is_own_file = source_line and not _OF_SYSTEM.fullmatch(source_line["path"])
        if is_own_file or _EVALUATES.match(code) or _SETS_BY_NAME.match(code):
            yield node
    elif node.type not in ("subshell", "command_substitution", "process_substitution"):
        for child in node.named_children:
            yield from commands_of_unknown_names(child)


def may_set_unknown_names(text: str) -> bool:
    """Return whether bash code, `text`, may set variables whose names are not in it, by one of
    `commands_of_unknown_names`. Raise as `syntax.parse`."""
    return bool(_MAY_BE_SUCH.search(text)) and any(commands_of_unknown_names(parse(text)))


def _sets_by_words(node: Node) -> bool:
    """Return whether a node is a command that may set variables which its words name."""
    name = source(node.child_by_field_name("name"))
    return name in _SETTERS and (name != "printf" or bool(re.search(r"\s-v", source(node))))


def adds_words(name: str, text: str) -> bool:
    """Return whether an assignment, `text`, only adds words to the end of the variable `name`: to
    an array by ``NAME+=(…)`` or ``NAME=("${NAME[@]}" …)``; or to a text by ``NAME+=" …"``,
    ``NAME+=' …'`` or ``NAME="$NAME …"``, where a blank must come first. The words may not have
    operators of the shell, as ``;`` for ``eval``, except within ``$(…)``."""
    array = rf"{name}(\+=\(|=\(\s*\"\$\{{{name}\[@\]\}}\"\s)"
    blank = r"(?=\s|\\\n)"
    double = rf"{name}(\+=\"|=\"\$({name}|\{{{name}\}})){blank}{_ADDED_TEXT}\"$"
    if re.match(array, text):
        return not re.search(r"[;&|<>]", re.sub(r"\$\((?:[^()]|\([^()]*\))*\)", "", text))
    return any(re.match(form, text) for form in (double, rf"{name}\+='\s[^';&|<>]*'$"))


def only_adds_words(name: str, node: Node) -> bool:
    """Return whether a block has assignments to the variable `name`, all of which add words to it
    (`adds_words`), and names it nowhere else but in comments and prints."""
    nodes = [*descend(node)]
    assignments = [source(n) for n in nodes if n.type == "variable_assignment"]
    assignments = [text for text in assignments if re.match(rf"{name}\b", text)]
    prints = [source(n) for n in nodes if n.type == "comment" or _is_print(n)]
    remaining = source(node)
    for text in (*assignments, *prints):
        remaining = remaining.replace(text, " ", 1)
    is_elsewhere = re.search(rf"\b{name}\b", remaining)
    add_words = all(adds_words(name, text) for text in assignments)
    return bool(assignments) and not is_elsewhere and add_words


def _is_print(node: Node) -> bool:
    """Return whether a node is an ``echo`` or ``printf``, and not into a file or a pipe."""
    is_plain = node.type == "command" and node.parent.type not in (
        "redirected_statement",
        "pipeline",
    )
    return is_plain and source(node.child_by_field_name("name")) in ("echo", "printf")


def exit_in_place_of(words: str, text: str) -> str:
    """Return bash code, `text`, with ``exit`` in place of commands that would leave a function or a
    loop around it, which the job does not have: ``[ -d a ] || exit 1`` for ``[ -d a ] || return
    1``. `words` are those commands, with ``|`` between (``return|continue|break``), '' for none.
    Commands of a loop, or a function, in the text itself stay."""
    if re.search(r"\b(for|while|until|select)\s", text):
        words = "return" if "return" in words else ""
    if not words or re.search(r"\bfunction\s|\(\s*\)", text):
        return text
    start = r"(?P<start>^|[;&|\n{]\s*|\b(?:then|else)\s+)"
    in_quotes = r"\"(?:\\.|[^\"\\])*\""
    command = re.compile(rf"{in_quotes}|{start}(?P<name>{words})\b(?![-.=/])(?P<code>[ \t]+\d+)?")

    def ending(match: re.Match[str]) -> str:
        code = (match["code"] or "") if match["name"] == "return" else " 0"
        return f"{match['start']}exit{code}" if match["name"] else match[0]

    pieces = split_quoted(text)
    return "".join(command.sub(ending, piece) if is_code else piece for piece, is_code in pieces)
