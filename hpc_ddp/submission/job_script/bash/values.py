"""Values of a script's variables, and what can be done with them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence, Set
from dataclasses import replace
from enum import IntEnum

from hpc_ddp.submission.job_script.bash.words import Doubt, Part, Word


class Counted(IntEnum):
    """The commands that count as launches where a launcher stands in front of none: each member has
    those of the members before it as well."""

    PLAIN_PYTHON = 0  # as a line of its own
    PYTHON = 1  # also in a list or a pipeline
    COMMANDS = 2  # also those whose form or name suggests a training


# The value of a variable: a word, the words of an array, or None if only the job knows it.
Value = Word | list[Word] | None


def doubts_in(assigned: Value) -> set[Doubt]:
    """Return the doubts of all parts of a value."""
    words = assigned if isinstance(assigned, list) else [assigned]
    return {part.doubt for word in words if word for part in word.parts if part.doubt}


def text_of(assigned: Value) -> str:
    """Return the text of a value, with blanks between the words of an array; '' for None."""
    words = assigned if isinstance(assigned, list) else [assigned]
    return " ".join(word.text for word in words if word)


def with_doubt(assigned: Word | list[Word], doubt: Doubt) -> Value:
    """Return a value of which each part has a `doubt`; an empty word gets a part for that."""
    if isinstance(assigned, list):
        return [replace(w, parts=tuple(replace(p, doubt=doubt) for p in w.parts)) for w in assigned]
    parts = assigned.parts or (Part(""),)
    return replace(assigned, parts=tuple(replace(part, doubt=doubt) for part in parts))


def without_tail(words: list[Word], tail: Word) -> list[Word]:
    """Return `words` without the last one if that has the text of `tail`; else all of them."""
    return words[:-1] if words and words[-1].text == tail.text else words


def is_readable(assigned: Word, is_quoted: bool) -> bool:
    """Return whether a value can stand in place of its variable in a word; else the variable stays.
    `is_quoted` says that it is in double quotes.

    - ``a-$B``, text and plain names, can; so can a text with blanks, as ``srun $(which python)``
    - ``$(date)`` can't: the job has to run it once
    - ``*.py`` can with `is_quoted` alone: else bash makes names of files of it
    """
    texts = [part.text for part in assigned.parts if not part.is_code]
    if not is_quoted and any(re.search(r"[*?]", text) for text in texts):
        return False
    has_blanks = any(re.search(r"\s", text.strip()) for text in texts)
    return has_blanks or all(part.name for part in assigned.code)


def is_command(assigned: Value) -> bool:
    """Return whether a value is one text of several words that does not begin with code, as the
    command line ``srun $ARGS``; not an array."""
    if not isinstance(assigned, Word) or not assigned.parts or assigned.parts[0].is_code:
        return False
    text = "".join("$" if part.is_code else part.text for part in assigned.parts)  # $: any code
    return bool(re.search(r"\S\s+\S", text))


def is_known(assigned: Value) -> bool:
    """Return whether a value can be written in place of its variable: it is text and plain names of
    variables (``a-$B``), a command line (`is_command`), or an array with a word that is all text.
    None, a value that only the job knows, can't."""
    if isinstance(assigned, Word):
        return is_command(assigned) or all(part.name for part in assigned.code)
    return assigned is not None and any(word.is_static for word in assigned)


def fill_in_home(text: str) -> str:
    """Return a path with the home folder in place of ``~`` or ``$HOME`` at its beginning, and with
    the user's name in place of each ``$USER``, if this shell has it."""
    text = re.sub(r"\$(USER\b|\{USER\})", lambda match: os.environ.get("USER", match[0]), text)
    return os.path.expanduser(re.sub(r"^\$\{?HOME\}?(?=/|$)", "~", text))


def join_paths(folders: Sequence[Value], unknown: Set[str]) -> str:
    """Return the path to which a ``cd`` leads: `folders` are the one that it starts in, and the
    words behind ``cd``. '' where only the job knows it, as with one of the `unknown` variables, and
    for other than one word."""
    words = [folder for folder in folders if isinstance(folder, Word)]
    texts = [fill_in_home(word.text) for word in words]
    if [*map(len, (folders, words))] != [2, 2] or any({*word.names} & unknown for word in words):
        return ""
    has_code = any(
        word.code and re.search(r"[$`*?]", text) for word, text in zip(words, texts, strict=True)
    )
    return "" if has_code else os.path.normpath(os.path.join(*texts))


def join_values(old: Value, added: Value) -> Value:
    """Return the value of a variable after ``+=``, which puts `added` behind `old`; None where one
    is None, and where only one is an array."""
    if isinstance(old, list) and isinstance(added, list):
        return [*old, *added]
    if isinstance(old, Word) and isinstance(added, Word):
        return Word((*old.parts, *added.parts), added.line)
    return None
