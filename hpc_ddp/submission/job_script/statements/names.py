"""The variables that set-up lines and settings need: the shell's, and those of files they load."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from hpc_ddp.core.file_io import read_text
from hpc_ddp.core.job.variables import is_of_hpc_ddp
from hpc_ddp.submission.job_script.bash.quotes import without_quoted_texts
from hpc_ddp.submission.job_script.bash.scope import OF_A_JOB
from hpc_ddp.submission.job_script.bash.syntax import names_in, sets_anything
from hpc_ddp.submission.job_script.conversion import PRINTED_TEXT, Conversion
from hpc_ddp.submission.job_script.statements.statement import Statement

# Variables of bash itself, of hpc-ddp, and those that modules and Conda set.
_OF_BASH = re.compile(
    r"PWD|OLDPWD|RANDOM|SECONDS|E?UID|BASH|FUNCNAME|LINENO|IFS|PIPESTATUS|OPT|REPLY|SHELL|LANG|LC_"
    r"|EPOCH|ARGUMENTS_|VALUE_|CUDA|CONDA|ROCM|EBROOT|EBVERSION|HPC_DDP"
    r"|((LD_)?(LIBRARY|RUN)_|(CPLUS_|C_)?INCLUDE_|CMAKE_PREFIX_|PKG_CONFIG_|PYTHON|MAN|C|MODULE)?PATH$"
)
_OF_LINES = {"setup", "node-setup", "worker-setup", "teardown"}
# A variable for which the code has a default, and one that has none.
_WITH_DEFAULT = re.compile(r"\$\{(\w+):?[-=+]")
_SETS_DEFAULT = re.compile(r"\$\{(\w+):?=")


def names_of_files(statement: Statement, start: str) -> Set[str] | None:
    """Return the names that a file which the statement sources may use; the empty set where it
    sources and evaluates nothing, None where the names are not known: the file can't be read here,
    from the folder `start`, or it loads others."""
    if not sets_anything(statement.text):
        return frozenset()
    words = statement.words
    if len(words) == 2 and words[0].text in ("source", ".") and words[1].is_static:
        try:
            text = read_text(Path(start, words[1].text))
        except OSError:
            return None
        return None if sets_anything(text) else {*re.findall(r"[A-Za-z_]\w*", text)}
    return None


def pass_on(
    statements: Sequence[Statement],
    set_by_lines: Set[str],
    result: Conversion,
    environ: Mapping[str, str],
) -> tuple[set[str], set[str]]:
    """Return the variables that the settings in `result` need, the script never sets and the
    submitting shell (`environ`) lacks: those without and those with a default. Put those that the
    shell has into ``env-names``. Note each variable of the script that a setting uses and nothing
    sets any more: `set_by_lines` are those that lines still set. To be called last, after
    `program.take`."""
    lists = {key: dict(entries) for key, entries in result.lists.items()}
    texts = [text for key in lists.keys() - {"env-names"} for text in lists[key]]
    used = {name for text in texts for name in (*names_in(text), text.removesuffix("[@]"))}
    outer = [s for s in statements if not s.inside and s.launch is None]
    lines = [text for key in _OF_LINES & lists.keys() for text in lists[key]]
    code = without_quoted_texts("\n".join(lines))
    names = {*re.findall(r"\$\{?([A-Za-z_]\w*)", code), *lists.get("expand", ())}
    is_set, of_itself = {*lists.get("env-names", ())}, set()
    for statement in statements:  # one that only adds to a value needs that
        if statement.name not in is_set and statement.name in names_in(statement.text):
            of_itself.add(statement.name)
        is_set |= {statement.name, *statement.sets}
    commands = PRINTED_TEXT.sub(" ", "\n".join(lines))
    names -= (is_set | set_by_lines | {*re.findall(r"\b(\w+)=", commands)}) - of_itself
    names = {n for n in names if not OF_A_JOB.fullmatch(n) and not _OF_BASH.match(n)}
    for name in sorted(names & environ.keys()):
        result.append("env-names", name, 0)
    for statement in outer:
        for name in sorted({statement.name, *statement.sets} & used - set_by_lines):
            if not is_of_hpc_ddp(name) and not (statement.lost or name in result.unknown):
                text = f"not taken over: ${name}, which a line that is left uses"
                result.note(statement.lines[0], text)
    bare = _WITH_DEFAULT.sub(" ", code)
    needed = {*re.findall(r"\$\{?([A-Za-z_]\w*)", bare), *lists.get("expand", ())}
    missing = names - environ.keys() - {*_SETS_DEFAULT.findall(code)}
    return missing & needed, missing - needed
