"""Values of variables."""

from __future__ import annotations

import re

from hpc_ddp.submission.job_script.bash.words import Word

# A variable's: a word, those of an array, or None for what only the job knows.
Value = Word | list[Word] | None


def without_tail(words: list[Word], tail: Word) -> list[Word]:
    """Return words without the last one if that is `tail`."""
    return words[:-1] if words and words[-1].text == tail.text else words


def is_readable(assigned: Word, is_quoted: bool) -> bool:
    """Return whether a value can stand where its variable is used: it is text and names of
    variables, or has blanks in it, as a command line. Unless `is_quoted`, it must not be a pattern
    of files, as ``*.py``."""
    if not is_quoted and any(re.search(r"[*?]", p.text) for p in assigned.parts if not p.is_code):
        return False
    blanks = any(re.search(r"\s", p.text.strip()) for p in assigned.parts if not p.is_code)
    return blanks or all(part.name for part in assigned.code)


def is_command(assigned: Value) -> bool:
    """Return whether a value is one text of several words that does not begin with code, as a
    command line."""
    if not isinstance(assigned, Word) or not assigned.parts or assigned.parts[0].is_code:
        return False
    text = "".join("$" if part.is_code else part.text for part in assigned.parts)
    return bool(re.search(r"\S\s+\S", text))


def is_known(assigned: Value) -> bool:
    """Return whether a value can be written in place of its variable: it is text and names of
    variables, or a command line (`is_command`); for an array one word at least is text."""
    if isinstance(assigned, Word):
        return is_command(assigned) or all(part.name for part in assigned.code)
    return assigned is not None and any(word.is_static for word in assigned)
