"""Here-documents that are values of variables: ``read -r -d '' CMD <<EOF``."""

from __future__ import annotations

import re

_NO_END = r"(?:''|\"\")"  # of a line: all of the text is read
_READ = re.compile(
    rf"^[ \t]*read[ \t]+(?:-r[ \t]+-d[ \t]+{_NO_END}|-d[ \t]+{_NO_END}[ \t]+-r|-rd[ \t]+{_NO_END})"
    r"[ \t]+(?P<name>\w+)[ \t]*"
    r"<<(?P<dash>-?)[ \t]*(?P<quote>['\"]?)(?P<mark>\w+)(?P=quote)[ \t]*"
    r"(?:\|\|[ \t]*(?:true|:))?[ \t]*\n(?P<body>(?:.*\n)*?)\t*(?P=mark)[ \t]*$",
    re.M,
)


def as_assignments(text: str) -> str:
    """Return a script in which each ``read -r -d '' NAME <<EOF``, with its text up to ``EOF``, is
    an assignment of that text to NAME, on as many lines."""
    return _READ.sub(_assignment, text)


def _assignment(match: re.Match[str]) -> str:
    """Return the assignment for a match of `_READ`. Blanks and ends of lines around the text are
    removed, as by `read`. In a text whose mark has no quotes bash fills in variables."""
    body = match["body"]
    if match["dash"]:
        body = re.sub(r"^\t+", "", body, flags=re.M)
    content = body.strip()
    literal = "'" + content.replace("'", r"'\''") + "'"
    content = literal if match["quote"] else as_quoted(content)
    lines_before = 1 + (len(body) - len(body.lstrip()) and body[: -len(body.lstrip())].count("\n"))
    lines_behind = match[0].count("\n") - lines_before - content.count("\n")
    return f"{match['name']}=" + "\\\n" * lines_before + content + "\n" * lines_behind


def as_quoted(text: str) -> str:
    """Return the text of a here-document whose mark has no quotes in double quotes, in which bash
    makes the same of it: a quote alone needs a backslash; one before it, another."""
    return '"' + re.sub(r'(\\*)"', _escape_quote, text) + '"'


def _escape_quote(match: re.Match[str]) -> str:
    """Return a double quote, and the backslashes before it, as they are written in quotes."""
    backslashes: str = match[1]
    return backslashes + "\\" * (len(backslashes) % 2) + '\\"'
