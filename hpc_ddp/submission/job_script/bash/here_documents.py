"""Here-documents, and a few other forms, that the parser would read otherwise than bash."""

from __future__ import annotations

import re
from itertools import count

_NO_END = r"(?:''|\"\")"  # of a line: all of the text is read
# read -r -d '' NAME <<EOT, with the text up to EOT.
_READ = re.compile(
    rf"^[ \t]*read[ \t]+(?:-r[ \t]+-d[ \t]+{_NO_END}|-d[ \t]+{_NO_END}[ \t]+-r|-rd[ \t]+{_NO_END})"
    r"[ \t]+(?P<name>\w+)[ \t]*"
    r"<<(?P<dash>-?)[ \t]*(?P<quote>['\"]?)(?P<mark>\w+)(?P=quote)[ \t]*"
    r"(?:\|\|[ \t]*(?:true|:))?[ \t]*\n(?P<body>(?:.*\n)*?)\t*(?P=mark)[ \t]*$",
    re.M,
)
# bash <<EOT, with the text up to EOT.
_SHELL = re.compile(
    r"^(?P<command>(?![ \t]*#)(?:[^\n]*[ \t/])?(?:bash|sh)(?:[ \t]+-[le]+)*)[ \t]*"
    r"<<-?[ \t]*(?P<quote>['\"]?)(?P<mark>\w+)(?P=quote)[ \t]*\n"
    r"(?P<body>(?:.*\n)*?)\t*(?P=mark)[ \t]*$",
    re.M,
)
# The beginning of a here-document: whether tabs are cut, and the word at its end, [2], [3] or [4].
_BEGIN = re.compile(
    r"(?<!<)<<(-?)[ \t]*(?:'([^'\n]+)'|\"([^\"\n]+)\"|(\\?[^\s;&|<>()'\"\\$`-][^\s;&|<>()'\"\\]*))"
)


# ${NAME:+text;} in double quotes: [1] is all before the text, [2].
_SEMICOLON = re.compile(r"(\".*?\$\{\w+:?[-+])([^{}\"]*(?:\$\{\w+\}[^{}\"]*)*;)\}")


def for_parser(text: str) -> str:
    """Return a script that the parser reads as bash reads `text`, with the same numbers of lines:

    - no line of a here-document begins with the word at its end (`with_plain_ends`)
    - ``read -r -d '' NAME <<EOF`` is an assignment of the document's text to NAME
    - a shell that reads its commands from a here-document, ``bash <<EOF``, is ``bash -c '…'``
    - in double quotes the text of ``${NAME:+text;}`` has quotes of its own
    """
    text = _READ.sub(_to_assignment, with_plain_ends(text))
    return _SEMICOLON.sub(r'\1"\2"}', _SHELL.sub(_to_bash_c, text))


def with_plain_ends(text: str) -> str:
    """Return a script in which no line of a here-document begins with the word at its end, also
    behind blanks: the parser would end the document there. Such a word gets another name, as
    ``END_1``. One with a backslash gets quotes. Lines keep their numbers."""
    lines, at = text.split("\n"), 0
    while at < len(lines):
        code = re.sub(r"^\s*#.*|(?<!\S)#[^'\"]*$", "", lines[at])  # without a comment
        line_at, shift = at, 0
        for begin in _BEGIN.finditer(code):
            written = next(group for group in begin.groups()[1:] if group)
            word = written.removeprefix("\\")
            tabs = "\t" if begin[1] else ""
            ends = (n for n in range(at + 1, len(lines)) if lines[n].lstrip(tabs or "\0") == word)
            if (end := next(ends, None)) is None:
                continue
            name = word
            if any(line.lstrip().startswith(word) for line in lines[at + 1 : end]):
                name = next(end_n for n in count(1) if (end_n := f"END_{n}") not in text)
            new = name if written == word else f"'{name}'"
            start, stop = (place + shift for place in begin.span(begin.lastindex or 0))
            lines[line_at] = lines[line_at][:start] + new + lines[line_at][stop:]
            shift += len(new) - len(written)
            lines[end] = lines[end].replace(word, name)
            text, at = "\n".join(lines), end
        at += 1
    return "\n".join(lines)


def _to_bash_c(match: re.Match[str]) -> str:
    """Return ``bash -c '…'``, with the commands as its text, for a match of `_SHELL`."""
    body = "\n" + match["body"]
    content = "'" + body.replace("'", r"'\''") + "'" if match["quote"] else as_quoted(body)
    return f"{match['command']} -c {content}"


def _to_assignment(match: re.Match[str]) -> str:
    """Return ``NAME='…'`` for a match of `_READ`, on as many lines. Blanks and ends of lines around
    the text are removed, as by `read`; a text in which bash fills in variables, since its mark has
    no quotes, stands in double quotes."""
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
    """Return the text of a here-document without quotes around its mark (``<<EOT``) as a word in
    double quotes, of which bash makes the same: each ``"`` in it gets a backslash."""
    # An odd number of backslashes before the quote gets one more.
    quoted = re.sub(r'(\\*)"', lambda m: m[1] + "\\" * (len(m[1]) % 2) + '\\"', text)
    return f'"{quoted}"'
