"""The files that a script sources, and the texts that it evaluates: the variables in them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from pathlib import Path

from hpc_ddp.core.file_io import read_text
from hpc_ddp.core.job.variables import is_of_hpc_ddp
from hpc_ddp.submission.job_script.bash.blocks import (
    commands_of_unknown_names,
    may_set_unknown_names,
    names_set_in,
)
from hpc_ddp.submission.job_script.bash.syntax import (
    Node,
    body_of,
    commands_of,
    functions_in,
    names_in,
    parse,
    source,
)
from hpc_ddp.submission.job_script.bash.values import doubts_in, text_of
from hpc_ddp.submission.job_script.bash.variables import Scope
from hpc_ddp.submission.job_script.bash.words import Doubt, Word
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.statements.statement import KnownFunction, Statement

# An eval of what a program for environments prints, and the files that begin such programs and
# those of compilers: they set no variable of a job script.
_OF_ENVIRONMENT = re.compile(
    r"eval\b.*[(`].*\b(conda|(micro)?mamba|pixi|spack|modulecmd|lmod|pyenv|ssh-agent)\b"
    r"|(source|\.)\s.*/(init/(ba|k|z)?sh|setvars\.sh|setup-env\.sh|\.cargo/env)(?=[\"'\s]|$)",
    re.S,
)


def names_of_files(statement: Statement, start: str) -> Set[str] | None:
    """Return the names that a file may use which the statement sources; the empty set for a
    statement that may set no variable of an unknown name (`may_set_unknown_names`).

    None stands for names that are not known: the statement is no ``source FILE`` of a known file,
    the file can't be read here, or it loads others. A relative path is one from the folder `start`;
    '' for a folder that is not known.
    """
    if not may_set_unknown_names(statement.text):
        return frozenset()
    words = statement.words
    is_one_file = len(words) == 2 and words[0].text in ("source", ".")
    text = _text_of_file(words[1], start) if is_one_file else None
    is_unknown = text is None or may_set_unknown_names(text)
    return None if is_unknown else {*re.findall(r"[A-Za-z_]\w*", text or "")}


def forget_loaded_names(
    node: Node, line: int, scope: Scope, functions: Mapping[str, KnownFunction]
) -> set[str]:
    """Have the scope forget the values that a command or block, `node`, may change by files that it
    sources, and by texts that it evaluates, also in functions that it calls. Return the variables
    that these files and texts set, but for hpc-ddp's and search paths.

    A variable that a text does not set keeps its value. Where a text is not known, as that of a
    file which can't be read here, each value gets a doubt, with the `line` of the command
    (`Scope.doubt_values`). Functions that the texts define go to ``scope.loaded_functions``: a call
    of one is a text as well. `functions` is as in `names_set_by_calls`. Raise as `syntax.parse`.
    """
    texts, is_unknown = _loaded_texts(node, scope, functions)
    names = set[str]()
    for text in texts:
        names |= (of_text := names_set_in(parse(text)))
        scope.forget_changes(text, "", of_text, frozenset())
    if is_unknown:
        scope.doubt_values(line)
    return {name for name in names if not (is_of_hpc_ddp(name) or name.endswith("PATH"))}


def _loaded_texts(
    node: Node, scope: Scope, functions: Mapping[str, KnownFunction]
) -> tuple[list[str], bool]:
    """Return the texts of `forget_loaded_names` that are known, each once, and whether there are
    others, but for those of environments. Note the functions that the texts define."""
    # What the words set, and take to be unset, counts where the statement itself is read.
    scope = replace(scope, values={**scope.values}, versions=Counter(), defaults=set())
    texts, is_unknown, functions_read, pending = list[str](), False, set[str](), [node]
    while pending:
        block = pending.pop()
        names = {source(c.child_by_field_name("name")) for c in commands_of(block)}
        pending += [body_of(functions[n].node) for n in names & functions.keys() - functions_read]
        functions_read |= names
        known_texts = [scope.loaded_functions[n] for n in names & scope.loaded_functions.keys()]
        for command in commands_of_unknown_names(block):
            if _OF_ENVIRONMENT.match(source(command)):
                continue
            text = _loaded_text(command, scope)
            is_unknown |= text is None
            known_texts += [] if text is None else [text]
        for text in known_texts:
            if text not in texts:
                texts.append(text)
                pending.append(parse(text))
                scope.loaded_functions |= {
                    source(n.child_by_field_name("name")): source(body_of(n))
                    for n in functions_in(pending[-1])
                }
    return texts, is_unknown


def _loaded_text(command: Node, scope: Scope) -> str | None:
    """Return the text of the file that a command sources, or that which it evaluates; None for a
    text that is not known, and for another command."""
    nodes = [child for child in command.named_children if child.type != "variable_assignment"]
    words = scope.words(nodes)
    while words and words[0].text in ("builtin", "command"):
        del words[0]
    if len(words) > 1 and words[0].text == "eval":
        is_known = all(word.is_static and not doubts_in(word) for word in words)
        return " ".join(word.text for word in words[1:]) if is_known else None
    if len(words) > 1 and words[0].text in ("source", "."):
        return _text_of_file(words[1], text_of(scope.values.get("PWD")))
    return None


def _text_of_file(path: Word, folder: str) -> str | None:
    """Return the text of a file that a word names by its path, from a `folder` on, '' for one that
    is not known; None where the path is not known, or the file can't be read here."""
    file = Path(folder, path.text)
    if not (path.is_static and file.is_absolute()):
        return None
    try:
        return read_text(file)
    except OSError:
        return None


def note_doubts(launch: Launch, node: Node, scope: Scope, line: int) -> None:
    """Give a launch, of the command `node` and its `line`, a note on each command of the script
    that may have set anew a variable whose value the launch has (`Part.doubt`). That is a value in
    one of its words or in a number, and an empty one that `node` names."""
    operands = [word for word, _ in launch.options.values() if word]
    doubts = {d for w in (*launch.words, *operands) for d in doubts_in(w)} | doubts_in(launch.inner)
    doubts |= {d for w in operands for n in w.names for d in doubts_in(scope.values.get(n))}
    values = (scope.values.get(name) for name in names_in(source(node)))
    doubts |= {doubt for v in values if not text_of(v) for doubt in doubts_in(v)}
    for text in sentences_on(doubts):
        launch.mark(line, "", text)


def doubts_on_names(nodes: Iterable[Node], scope: Scope) -> set[Doubt]:
    """Return the doubts of the values of all variables that the `nodes` name."""
    names = {name for node in nodes for name in names_in(source(node))}
    return {doubt for name in names for doubt in doubts_in(scope.values.get(name))}


def sentences_on(doubts: Set[Doubt]) -> list[str]:
    """Return a sentence for the user on the variables of each command that raises `doubts`, without
    those of hpc-ddp, whose values here do not count."""
    names_by_line: dict[int, list[str]] = {}
    for name, line in sorted(doubts):
        if not (is_of_hpc_ddp(name) or name.startswith("VALUE_")):
            names_by_line.setdefault(line, []).append(f"${name}")
    return [
        f"{', '.join(names)}: taken as set before line {line}, which may set "
        f"{'it' if len(names) == 1 else 'them'} anew"
        for line, names in names_by_line.items()
    ]
