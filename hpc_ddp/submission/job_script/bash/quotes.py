"""The quotes of bash code."""

from __future__ import annotations

import re
from collections.abc import Iterator

# All that changes how bash reads the text behind it: an escaped character, a comment, a bracket, a
# quote, and the operator of a here-document with [1] the quote before its word, and [2] the word.
_SIGN = re.compile(r"\\.|(?<!\S)#[^\n]*|\$?\(|[)\"'`]|<<-?[ \t]*([\"'\\]?)(\w+)\1?", re.S)


def without_quoted_texts(code: str) -> str:
    """Return bash code with a blank in place of each piece in which bash expands nothing, as
    `split_quoted` yields them: ``echo '$A' "it's $B"`` becomes ``echo   "it's $B"``."""
    return " ".join(text for text, is_expanded in split_quoted(code) if is_expanded)


def split_quoted(code: str) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of bash code in order, each with whether bash expands variables in it:
    ``echo '$A' $B`` has ("echo ", True), ("'$A'", False) and (" $B", True). Pieces may be empty;
    joined they are the code.

    Bash expands nothing in a text in single quotes, in a here-document whose word has quotes, as
    ``<<'EOT'``, and in a comment. A single quote is a mere letter in two places: in double quotes,
    but not within a ``$(…)`` there; and where no other single quote follows.
    """
    open_signs = [""]  # the innermost last: '"' of a text in quotes, "(" or "`" of a substitution
    position = start = 0  # of the search; of the piece that is not yielded yet
    document: re.Match[str] | None = None  # <<EOT of a document that begins in the next line
    while (sign := _SIGN.search(code, position)) or document:
        line_end = code.find("\n", document.end()) if document else -1
        if document and -1 < line_end < (sign.start() if sign else len(code)):
            position = _end_of_document(code, document[2], line_end)
            if document[1]:  # with quotes around its word
                yield from ((code[start:line_end], True), (code[line_end:position], False))
                start = position
            document = None
            continue
        if sign is None:
            break
        position, text, is_quoted = sign.end(), sign[0], open_signs[-1] == '"'
        end = _end_of_unexpanded(code, sign)
        if text[0] == "#" and is_quoted:
            position = sign.start() + 1  # no comment: its text may have signs
        elif end and not is_quoted:
            yield from ((code[start : sign.start()], True), (code[sign.start() : end], False))
            position = start = end
        elif text[:2] == "<<":
            document = document if is_quoted else sign
        else:
            _open_or_close(open_signs, text)
    yield code[start:], True


def _end_of_document(code: str, word: str, start: int) -> int:
    """Return where a here-document from `start` on ends: behind the line that is its `word`; at the
    end of the code without such a line."""
    last_line = re.compile(rf"^\s*{word}$", re.M).search(code, start)
    return last_line.end() if last_line else len(code)


def _end_of_unexpanded(code: str, sign: re.Match[str]) -> int:
    """Return where the comment, or the text in single quotes, that begins with a sign ends; 0 for
    another sign, and for a quote that nothing closes."""
    if sign[0] == "'":
        return code.find("'", sign.end()) + 1
    return sign.end() if sign[0][0] == "#" else 0


def _open_or_close(open_signs: list[str], sign: str) -> None:
    """Append a sign that opens a quote or substitution to `open_signs` (the innermost is the last),
    or remove from these what it closes. Any other sign changes nothing."""
    if sign == '"':
        open_signs.pop() if open_signs[-1] == sign else open_signs.append(sign)
    elif sign == "$(" or (sign == "(" and open_signs[-1] != '"'):
        open_signs.append("(")
    elif sign == "`" and "`" in open_signs:  # with all that is open within it
        del open_signs[len(open_signs) - 1 - open_signs[::-1].index("`") :]
    elif sign == "`":
        open_signs.append(sign)
    elif sign == ")" and open_signs[-1] == "(":
        open_signs.pop()
