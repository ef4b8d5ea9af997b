"""Variables that hold a launch, to which a condition or a loop adds words in the job.

The words that are known are read as the launch. In the job the variable begins empty, so that it
has the added words alone, and these follow the launch's own arguments.
"""

from __future__ import annotations

import re

from hpc_ddp.submission.job_script.bash import blocks, syntax
from hpc_ddp.submission.job_script.bash.variables import TAILS, Scope
from hpc_ddp.submission.job_script.bash.words import Word, literal, split_text
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.launchers.launch_reader import read_launch
from hpc_ddp.submission.job_script.statements.rules import PRINTS
from hpc_ddp.submission.job_script.statements.statement import Place, Statement

_KEEPS = re.compile(r">|\btee\b")  # a print that does more


def extends_launch(name: str, block: syntax.Node, scope: Scope, place: Place) -> bool:
    """Return whether the variable `name` holds the words of a launch, and `block`, a condition or a
    loop, only adds words to it: ``CMD+=" --x"``. ``place.step`` is the command whose tasks run the
    words, '' for the batch script; nothing else of `place` counts."""
    if not (blocks.only_adds_words(name, block) and _holds_launch(name, scope, place)):
        return False
    assigned = scope.values[name]
    words = [assigned] if isinstance(assigned, Word) else assigned or []
    # Words that are added behind a redirection, or another command, are none of the program's.
    texts = (part.text for word in words for part in word.parts if not part.is_code)
    return not any(re.search(r"[<>|;&]", text) for text in texts)


def replaces_launch(name: str, block: syntax.Node, scope: Scope, place: Place) -> bool:
    """Return whether the variable `name`, which `block` sets, holds the words of a launch, and
    `block` does other things with it than add words. `place` is as in `extends_launch`."""
    return not blocks.only_adds_words(name, block) and _holds_launch(name, scope, place)


def _holds_launch(name: str, scope: Scope, place: Place) -> bool:
    """Return whether the value of the variable `name` is the words of a launch. `place` is as in
    `extends_launch`."""
    assigned = scope.values.get(name)
    words = split_text(assigned) if isinstance(assigned, Word) else assigned or []
    return bool(words) and read_launch(words, scope, place.step).weight > 0  # 0: no launch


def leave_empty(
    training: Launch, statements: list[Statement], open_commands: dict[str, list[Statement]]
) -> None:
    """Change the assignments to the variables that hold the words of the `training`, so that these
    are empty in the job until it adds words: ``CMD="srun a.out"`` becomes ``CMD=``. Statements that
    need the words in such a variable get `lost`, those that print them `decided`.

    `open_commands` has the assignments by variable. Those of a variable that the training needs in
    another form than by `TAILS`, as ``${CMD%out}``, stay as they are.
    """
    names = {name for word in training.words for name in word.names}
    # Assignments of parts of the text of bash -c (`Reader._name_outer_code`).
    of_text = [s for s in statements if s.name in names and not s.of_script]
    code = [part.text for word in training.words for part in word.code] + [s.text for s in of_text]
    for name in (names | {name for s in of_text for name in s.names}) & open_commands.keys():
        uses = re.findall(rf"\$\{{?[!#]?{name}\b(?:\[@\]:0|-)?\}}?", " ".join(code))
        if {*uses} - {f"${{{name}{tail}}}" for tail in TAILS}:
            continue
        for statement in open_commands[name]:
            is_array = isinstance(statement.assigned, list)
            statement.text = f"{name}=()" if is_array else f"{name}="
            statement.assigned = [] if is_array else literal("")
        for statement in statements:
            lines = [s for s in statements if s is not statement and s.launch is not training]
            is_of_launch = statement.launch is training or statement in of_text
            if not is_of_launch and _needs_words(statement, name, lines):
                statement.lost = f"it uses {name}, which the launch is made of: setup"
            elif PRINTS.match(statement.text) and name in statement.names - statement.sets:
                statement.decided = "it prints the launch, which hpc-ddp render shows"


def _needs_words(statement: Statement, name: str, lines: list[Statement]) -> bool:
    """Return whether a statement needs the words that the variable `name` had before it was left
    empty. Statements that set the variable do not, nor do prints, nor an assignment whose value is
    known and whose variable none of the `lines`, all further statements, needs."""
    sets = name == statement.name or name in statement.sets
    if sets or name not in statement.names:
        return False
    is_known = statement.name and statement.assigned is not None
    if is_known and not any(statement.name in line.names for line in lines):
        return False
    return not PRINTS.match(statement.text) or bool(_KEEPS.search(statement.text))
