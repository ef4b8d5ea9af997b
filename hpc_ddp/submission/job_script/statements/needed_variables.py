"""The variables that set-up lines and settings need and do not set: those of the shell that
submits, and those that the script sets in lines that are not taken over."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set

from hpc_ddp.core.job.variables import is_of_hpc_ddp
from hpc_ddp.submission.job_script.bash.quotes import without_quoted_texts
from hpc_ddp.submission.job_script.bash.syntax import names_in
from hpc_ddp.submission.job_script.bash.variables import OF_A_JOB
from hpc_ddp.submission.job_script.conversion import Conversion
from hpc_ddp.submission.job_script.statements.rules import PRINTED_TEXT
from hpc_ddp.submission.job_script.statements.statement import Statement

# Variables of bash itself, of hpc-ddp, and those that modules and Conda set.
_OF_BASH = re.compile(
    r"(PWD|OLDPWD|S?RANDOM|SECONDS|E?UID|BASH|FUNCNAME|LINENO|IFS|PIPESTATUS|OPT(ARG|IND|ERR)|REPLY|SHELL"
    r"|LANG|EPOCH(REAL)?SECONDS|CUDA_(HOME|PATH|ROOT|DIR)|ROCM_(HOME|PATH))$"
    r"|BASH_|LC_|ARGUMENTS_|VALUE_|CONDA_|EBROOT|EBVERSION|HPC_DDP"
    r"|((LD_)?(LIBRARY|RUN)_|(CPLUS_|C_)?INCLUDE_|CMAKE_PREFIX_|PKG_CONFIG_|PYTHON|MAN|C|MODULE)?PATH$"
)
_OF_LINES = {"setup", "node-setup", "worker-setup", "teardown"}  # settings of bash
# Variables in code: all, those with a default, and those that are set to it.
_NAMES = re.compile(r"(?<!\\)\$\{?([A-Za-z_]\w*)")
_WITH_DEFAULT = re.compile(r"\$\{(\w+):?[-=+]")
# [ -z "$A" ], of the variable [1].
_ASKS_FOR = re.compile(r"\[\s+(?:!\s+)?-[nz]\s+\"?\$\{?(\w+)(?::?-)?\}?\"?(?=\s)")
# What code sets, in a command's place, and not in an argument as lr=$lr.
_SETS = re.compile(
    r"(?:^|[;&|{`]|(?<!=)\(|(?:-\w*c|\beval)\s+[\"']|\b(?:then|do|else|export|local|declare|env)\s)"
    r"\s*(?:-\w+\s+|\w+=[^\s;&|]*\s+)*\w+=|\bfor\s+\w+\s", re.M
)  # fmt: skip
_SET_NAMES = re.compile(r"(?<![\w=$/.:-])(\w+)(?==|\s+$)")
_SETS_DEFAULT = re.compile(r"\$\{(\w+):?=")


def take_shell_variables(
    statements: Sequence[Statement],
    set_by_lines: Set[str],
    result: Conversion,
    environ: Mapping[str, str],
) -> tuple[set[str], set[str]]:
    """Put the variables of the submitting shell (`environ`) that the settings in `result` need, and
    that the script does not set, into ``env-names``. Return those that the shell lacks: first the
    ones that are used without a default, then those that always have one, as ``${A:-x}``, or are
    asked for in the same line, as by ``[ -n $A ]``.

    The `statements` are those of the script; `set_by_lines` are the variables that lines in
    `result` set. Variables of each job and of bash itself do not count. To be called when all
    settings are in `result`, after `launch_settings.take_launch`.
    """
    lists = {key: dict(entries) for key, entries in result.lists.items()}
    lines = "\n".join(text for key in _OF_LINES & lists.keys() for text in lists[key])
    code = without_quoted_texts(lines)
    names = {*_NAMES.findall(code), *lists.get("expand", ())}
    is_set, need_themselves, with_default = {*lists.get("env-names", ())}, set[str](), set[str]()
    for statement in statements:
        # PATH=/a:$PATH, if it is the first to set PATH, needs the shell's value.
        if statement.name not in is_set and statement.name in names_in(statement.text):
            need_themselves.add(statement.name)
            if statement.name not in names_in(_WITH_DEFAULT.sub("{", statement.text)):
                with_default.add(statement.name)  # A=${A:-x}: the line reads the shell's
        is_set |= {statement.name, *statement.sets}
    assignments = (match[0] for match in _SETS.finditer(PRINTED_TEXT.sub(" ", lines)))
    of_commands = {name for text in assignments for name in _SET_NAMES.findall(text)}
    set_by_lines = {*set_by_lines, *of_commands}
    names -= (is_set | set_by_lines | result.env.keys()) - need_themselves
    names = {n for n in names if not OF_A_JOB.fullmatch(n) and not _OF_BASH.match(n)}
    for name in sorted(names & environ.keys()):
        result.append("env-names", name, 0)
    missing = names - environ.keys() - with_default - {*_SETS_DEFAULT.findall(code)}
    without_default = {*lists.get("expand", ())}
    for line in (text for key in _OF_LINES & lists.keys() for text in lists[key]):
        needs = without_quoted_texts(_WITH_DEFAULT.sub(" ", _ASKS_FOR.sub(" ", line)))
        without_default |= {*_NAMES.findall(needs)} - {*_ASKS_FOR.findall(line)}
    return missing & without_default, missing - without_default


def note_lost_variables(
    statements: Sequence[Statement], set_by_lines: Set[str], result: Conversion
) -> None:
    """Add a note to `result` on each variable that is needed and lost: a statement of the batch
    script sets it, an entry of a list in `result` uses it (``expand`` has the names that single
    settings use), and no line in `result` sets it. `set_by_lines` has the variables that these set.

    No note is added for hpc-ddp's variables, nor for those of launches, of lines that each task
    runs, of lost statements, and in ``result.unknown``: these have reasons of their own.
    """
    lists = {k: entries for k, entries in result.lists.items() if k not in ("env-names", "expand")}
    used = {name for entries in lists.values() for text, _ in entries for name in names_in(text)}
    used |= {text.removesuffix("[@]") for text, _ in result.lists.get("expand", ())}
    for statement in (s for s in statements if not s.in_task and s.launch is None):
        for name in sorted({statement.name, *statement.sets} & used - set_by_lines):
            if not is_of_hpc_ddp(name) and not (statement.lost or name in result.unknown):
                text = f"not taken over: ${name}, which a line that is left uses"
                result.note(statement.lines[0], text)
