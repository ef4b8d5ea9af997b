"""The quotes of bash code."""

from __future__ import annotations

import re

_SIGN = re.compile(r"\\.|(?<!\S)#[^\n]*|\$?\(|[)\"'`]", re.S)


def without_quoted_texts(code: str) -> str:
    """Return bash code with a blank for each text in single quotes, in which bash expands nothing.
    A single quote in double quotes stays, for it is a letter there, except within ``$(…)``; so does
    one in a comment, and one that nothing closes."""
    texts: list[str] = []
    around = [""]  # the open signs, the last one innermost; '"' for double quotes
    at = start = 0
    while sign := _SIGN.search(code, at):
        at, text, is_quoted = sign.end(), sign[0], around[-1] == '"'
        if text[0] == "#" and is_quoted:
            at = sign.start() + 1
        end = code.find("'", at) + 1 if text == "'" else 0
        if end and not is_quoted:
            texts.append(code[start : sign.start()])
            at = start = end
        elif text == '"':
            if is_quoted:
                around.pop()
            else:
                around.append(text)
        elif text == "$(" or (text == "(" and not is_quoted):
            around.append("(")
        elif text == "`":
            if "`" in around:
                del around[len(around) - 1 - around[::-1].index("`") :]
            else:
                around.append(text)
        elif text == ")" and around[-1] == "(":
            around.pop()
    return " ".join([*texts, code[start:]])
