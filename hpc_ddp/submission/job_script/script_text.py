"""Changes of a job script's text before it is parsed: the first line, scripts for other shells and
languages, the question for the script's own path, lines that a blank or a comment cuts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from hpc_ddp.submission.job_script.bash import blocks
from hpc_ddp.submission.job_script.bash.comments import (
    join_lines_cut_by_blanks,
    lines_with_cutting_comment,
)
from hpc_ddp.submission.job_script.bash.conditions import branches_of
from hpc_ddp.submission.job_script.bash.syntax import Node, lines_of, parse, source
from hpc_ddp.submission.job_script.conversion import LOST, OURS, Conversion, Mark
from hpc_ddp.submission.job_script.launchers.tasks import LOGIN
from hpc_ddp.submission.job_script.output import is_code

SUBMIT, _OUTSIDE = "hpc-ddp submit does it", "it runs where sbatch is called"
# The program of a script's first line, and those that do not read it as bash does.
_INTERPRETER = re.compile(r"#!\s*(?:\S*/env\s+(?:-\S+\s+)*)?(?:\S*/)?([A-Za-z][\w.+-]*)")
_OTHERS = re.compile(
    r"t?csh|fish|python[\d.]*|pypy\d*|perl|ruby|Rscript|julia|node|lua|tclsh|expect|g?awk|php"
)
# A line that only zsh reads; and a variable without quotes, [1], as against texts and comments.
_OF_ZSH = re.compile(r"\s*((un)?setopt|autoload|zmodload|emulate|(source|\.)\s+\S*\.?zsh\w*)(\s|$)")
_PLAIN_VARIABLE = re.compile(
    r"(?<!\S)#[^\n]*|\"(?:\\.|[^\"\\])*\"|'[^']*'|(?<!\S)\$\{?(\w+)\}?(?=[\s;|&)]|$)", re.S
)
# The question to Slurm for the path of the job's own script, and for the folder of a path.
_OWN_PATH = re.compile(
    r"\$\(\s*scontrol\s+show\s+job(?:id)?\s+(?:-\w+\s+)*\"?\$\{?SLURM_JOB_?ID\}?\"?\s*\|"
    r"[^()\n]*Command=[^()\n]*(?:\([^()\n]*\)[^()\n]*)*\)"
)
_FOLDER_OF = re.compile(r"\$\(\s*dirname\s+\"?(/[\w./+@:,=-]+)\"?\s*\)")


def leave_out_other_languages(text: str, name: str, result: Conversion) -> str:
    """Return a script's text without lines that bash does not read, which are marked as lost in
    `result`. If the first line names a program that reads no bash, as Python, only ``#!/bin/bash``,
    directives and comments are left; a script for zsh is changed (`_as_bash`), with a note. `name`
    is the name of the script's file."""
    match = _INTERPRETER.match(text)
    if match and match[1] == "zsh":
        result.note(1, "zsh reads it, hpc-ddp's job is of bash: there $A without quotes is split")
        return _as_bash(text, result)
    if match is None or not _OTHERS.fullmatch(match[1]):
        return text
    reason = f"{match[1]} reads it, hpc-ddp's job is of bash: write it so, in setup or env"
    if match[1].startswith("python"):
        reason = f"Python: it may be the program: script = {json.dumps(name)}"
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if is_code(line) and not line.startswith("#"):
            result.mark(number, number, LOST, reason)
            lines[number - 1] = ""
    return "\n".join(["#!/bin/bash", *lines[1:]])


def _as_bash(text: str, result: Conversion) -> str:
    """Return the text of a script for zsh so that bash does the same: ``"${A[@]}"`` for ``$A`` of
    an array. Lines that only zsh understands are empty, and marked as lost in `result`."""
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if _OF_ZSH.match(line):
            reason = "of zsh: in its place source ~/.bashrc or the hook of conda in setup"
            result.mark(number, number, LOST, reason)
            lines[number - 1] = ""
    arrays = {
        *re.findall(
            r"^\s*(?:(?:local|typeset|declare|export)\s+(?:-\w+\s+)*)?(\w+)\+?=\(", text, re.M
        )
    }
    return _PLAIN_VARIABLE.sub(
        lambda match: f'"${{{match[1]}[@]}}"' if match[1] in arrays else match[0], "\n".join(lines)
    )


def fill_in_own_path(text: str, path: Path, result: Conversion) -> str:
    """Return a script's text with its own `path` in place of ``$(scontrol show job $SLURM_JOB_ID |
    …Command=…)``, which in hpc-ddp's job has the path of another script. Where the text is changed,
    `result` gets a note. A path with blanks or the like changes nothing."""
    filled = _OWN_PATH.sub(str(path), text)
    if filled != text and re.fullmatch(r"[\w./+@:,=-]+", str(path)):
        result.note(0, f"the job script's own path is written where it asks Slurm for it: {path}")
        return _FOLDER_OF.sub(lambda match: os.path.dirname(match[1]), filled)
    return text


def take_shebang(first_line: str, result: Conversion) -> None:
    """Put the options of bash in a script's first line into set-up lines: those of a login shell by
    the files that it reads, others by ``set``. ``#!/bin/bash -le`` gives two lines."""
    if shebang := re.match(r"#!.*\s-(-login|\w+)\s*$", first_line):
        if "l" in shebang[1]:
            result.append("setup", LOGIN, 1)
        if options := re.sub("-login|l", "", shebang[1]):
            result.append("setup", f"set -{options}", 1)


def _message_of_bash(text: str, bash: str) -> str:
    """Return what the program `bash` says about bash code that it only reads (``-n``), as ``line 3:
    syntax error …``; '' where it can read all of it."""
    process = subprocess.run(
        [bash, "-O", "extglob", "-n"], input=text, env={"LC_ALL": "C"}, capture_output=True,
        text=True, errors="replace", check=False,
    )  # fmt: skip
    return process.stderr.partition("\n")[0].partition(": ")[2]


def leave_out_refused(text: str, result: Conversion) -> str:
    """Return a script's text with empty lines from the first command on that bash can't read, where
    bash itself ends the script; they are marked as lost in `result`. Without a bash here, and for
    one that zsh reads, the text is as it was. Raise as `syntax.parse`."""
    bash = shutil.which("bash")
    if bash is None or re.match(r"#!.*\bzsh\b", text) or not _message_of_bash(text, bash):
        return text
    code = source(parse(text))  # with quotes around placeholders
    message = _message_of_bash(code, bash)
    if not message or "warning: " in message:  # of a here-document up to the text's end
        return text
    lines = code.split("\n")
    end = int((re.search(r"\d+", message) or "1")[0]) - 1
    while lines[:end][-1:] and (
        lines[end - 1].endswith("\\") or _message_of_bash("\n".join(lines[:end]) + "\n", bash)
    ):
        end -= 1
    lines = text.split("\n")
    reason = f"bash itself refuses the script from here on: {message}"
    result.mark(end + 1, len(lines), LOST, reason)
    return "\n".join([*lines[:end], *("" for _ in lines[end:])])


def leave_out_branch(
    text: str, place: tuple[Node, Node, list[Node]], marks: dict[int, Mark]
) -> str:
    """Return a script's text in which the statements of a branch that no job reaches are empty
    lines, and marked in `marks`; so is the whole condition, unless it has another branch. `place`
    has the submit in the branch, the condition, and the branch's statements."""
    (command, condition, branch), lines = place, text.split("\n")
    begin, end = lines_of(condition)
    if condition.type == "if_statement" and len([*branches_of(condition)]) > 1:
        begin, end = lines_of(branch[0])[0], lines_of(branch[-1])[1]
        if not re.search(r"\b(then|else)\s*$", lines[begin - 2]):
            return text
        lines[begin - 2] += " :"
    marks |= dict.fromkeys(range(begin, end + 1), (OURS, _OUTSIDE))
    for node in branch:
        first, last = lines_of(node)
        mark = LOST, f"{_OUTSIDE}: before hpc-ddp submit, if needed"
        if node.start_byte <= command.start_byte < node.end_byte:
            mark = OURS, SUBMIT
        elif blocks.only_reports(node) or node.type in ("comment", "variable_assignment"):
            continue
        marks |= dict.fromkeys(range(first, last + 1), mark)
    return "\n".join("" if begin <= n <= end else line for n, line in enumerate(lines, 1))


def note_misspelt_directives(text: str, result: Conversion) -> None:
    """Add a note to `result` on each comment that looks like a directive, as ``#BATCH --mem=1G``,
    and on each that stands for a word, as ``cd #YOUR PATH``."""
    for number, line in enumerate(text.split("\n"), 1):
        if re.match(r"#[A-RT-Z]?BATCH\s+-", line):
            reason = "is no directive of sbatch: is #SBATCH meant?"
            result.note(number, f"{line.split()[0]} {reason}")
        if blank := re.match(r"\s*(source|\.|cd|conda activate)\s+#", line):
            result.note(number, f"{blank[1]} has no word but a comment: a placeholder? write yours")


def join_lines(text: str, result: Conversion) -> str:
    """Return a script's text with lines joined as their backslashes are meant
    (`join_lines_cut_by_blanks`), with a note in `result` on each, and on each comment that ends a
    command; and without ``time`` before a child shell or block. Raise as `syntax.parse`."""
    text, cut_lines = join_lines_cut_by_blanks(text)
    # tree-sitter takes a child shell or a block behind it for a word.
    text = re.sub(r"^([ \t]*)time([ \t]+-p)?[ \t]+(?=[({])", r"\1", text, flags=re.M)
    for line in cut_lines:
        reason = "a backslash before a blank does not go on in the next line: read as it is meant"
        result.note(line, reason)
    for line in lines_with_cutting_comment(text):
        reason = "the lines behind it are a command of their own"
        result.note(line, f"this comment ends the command before it: {reason}")
    return text
