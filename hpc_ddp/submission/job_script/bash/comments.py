"""Comments of a job script: here-documents that are comments, and backslashes at the end of a line
that a comment or a blank keeps from joining it with the next one."""

from __future__ import annotations

import re

from hpc_ddp.submission.job_script.bash.syntax import Node, all_below, parse, source


def is_comment(node: Node) -> bool:
    """Return whether a node is a comment in the form of a here-document, ``: <<EOT``, in which bash
    runs nothing: its word has quotes, or its text has no code but plain names of variables."""
    if node.type != "redirected_statement":
        return False
    command, *redirects = node.named_children
    word = source(redirects[0].named_children[0]) if redirects else ""
    is_quoted = word[:1] in ("'", '"', "\\")
    is_plain = is_quoted or not re.search(r"`|\$\(|\$\{\w*[^\w}]", source(node))
    is_document = [redirect.type for redirect in redirects] == ["heredoc_redirect"]
    return source(command) == ":" and is_document and is_plain


def lines_with_cutting_comment(text: str) -> list[int]:
    """Return the numbers, from 1, of lines that are a comment and cut a command in two: the line
    before ends with a backslash, and the lines behind seem to go on with it (``--lr 1``), while
    bash ends the command at the comment. Raise as `syntax.parse`."""
    lines = text.split("\n")
    comments = {node.start_point[0] for node in all_below(parse(text)) if node.type == "comment"}
    return [n + 1 for n in sorted(comments) if n and _comment_ends_command(lines[n - 1 :])]


def _comment_ends_command(lines: list[str]) -> bool:
    """Return whether a comment, the second of some `lines`, ends the command of the first, which a
    backslash would continue: ``srun a.out \\``, ``# old:``, ``  --lr 1``. The next line of code
    must begin with an option, or with blanks and a word."""
    behind = next((line for line in lines[1:] if line.strip()[:1] not in ("", "#")), "")
    starts = [line.lstrip()[:1] == "#" for line in lines[:2]]
    is_continued = re.search(r"(?<!\\)\\$", lines[0]) and starts == [False, True]
    return bool(is_continued and re.match(r"\s+\S|-", behind))


def join_lines_cut_by_blanks(text: str) -> tuple[str, list[int]]:
    """Return a script whose backslashes join two lines as they are meant, and the numbers of the
    changed lines, from 1. In these a blank or a comment stands behind the backslash, so that bash
    ends the command there, though the next line begins with an option or a file of Python. It is
    removed: ``a.out \\ # new`` becomes ``a.out \\``."""
    lines, cut = text.split("\n"), []
    for index, line in enumerate(lines[:-1]):
        ends = re.search(r"(?<!\\)\\[ \t]+(#.*)?$", line)
        goes_on = re.match(r"\s*(--?[A-Za-z]|[\"']?[\w./${}-]+\.py\b)", lines[index + 1])
        if ends and line.lstrip()[:1] != "#" and goes_on:
            lines[index] = f"{line[: ends.start()]}\\"
            cut.append(index + 1)
    return "\n".join(lines), cut
