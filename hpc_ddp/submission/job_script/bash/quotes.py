"""The quotes of bash code."""

from __future__ import annotations

import re
from collections.abc import Iterator

_SIGN = re.compile(r"\\.|(?<!\S)#[^\n]*|\$?\(|[)\"'`]|<<-?[ \t]*([\"'\\]?)(\w+)\1?", re.S)


def without_quoted_texts(code: str) -> str:
    """Return bash code with a blank for each text in single quotes, and for each here-document with
    quotes around its word, in which bash expands nothing, and for each comment. A single quote in
    double quotes stays, for it is a letter there, except within ``$(…)``; so does one that nothing
    closes."""
    return " ".join(text for text, is_expanded in split_quoted(code) if is_expanded)


def split_quoted(code: str) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of bash code in order, each with whether bash expands what is in it; the
    others are texts in single quotes, with the quotes, here-documents with quotes around their
    word, and comments."""
    around = [""]  # the open signs, the last one innermost; '"' for double quotes
    at = start = 0
    document: re.Match[str] | None = None  # the sign of the one that begins in the next line
    while (sign := _SIGN.search(code, at)) or document:
        line_end = code.find("\n", document.end()) if document else -1
        if document and -1 < line_end < (sign.start() if sign else len(code)):
            ending = re.compile(rf"^\s*{document[2]}$", re.M).search(code, line_end)
            at = ending.end() if ending else len(code)
            if document[1]:
                yield from ((code[start:line_end], True), (code[line_end:at], False))
                start = at
            document = None
            continue
        if sign is None:
            break
        at, text, is_quoted = sign.end(), sign[0], around[-1] == '"'
        end = code.find("'", at) + 1 if text == "'" else at if text[0] == "#" else 0
        if text[0] == "#" and is_quoted:
            at = sign.start() + 1
        elif end and not is_quoted:
            yield from ((code[start : sign.start()], True), (code[sign.start() : end], False))
            at = start = end
        elif text[:2] == "<<":
            document = document if is_quoted else sign
        else:
            _open_or_close(around, text)
    yield code[start:], True


def _open_or_close(around: list[str], sign: str) -> None:
    """Add a sign that opens something to the open ones, or remove those that it closes."""
    if sign == '"':
        around.pop() if around[-1] == sign else around.append(sign)
    elif sign == "$(" or (sign == "(" and around[-1] != '"'):
        around.append("(")
    elif sign == "`" and "`" in around:
        del around[len(around) - 1 - around[::-1].index("`") :]
    elif sign == "`":
        around.append(sign)
    elif sign == ")" and around[-1] == "(":
        around.pop()
