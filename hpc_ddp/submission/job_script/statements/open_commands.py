"""Variables that hold a launch, to which a condition or a loop adds words in the job.

The words that are known are read as the launch. In the job the variable begins empty, so that it
has the added words alone, and these follow the launch's own arguments.
"""

from __future__ import annotations

import re

from hpc_ddp.submission.job_script.bash import syntax
from hpc_ddp.submission.job_script.bash.scope import Scope
from hpc_ddp.submission.job_script.bash.words import Word, literal, split_text
from hpc_ddp.submission.job_script.conversion import PRINTS
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.launchers.read import read_launch
from hpc_ddp.submission.job_script.statements.statement import Statement


def grows(name: str, node: syntax.Node, scope: Scope, step: str) -> bool:
    """Return whether a block only adds to the variable `name`, and that is a launch so far, in
    tasks of `step`, or of the batch script if `step` is ''."""
    assigned = scope.values.get(name)
    words = split_text(assigned) if isinstance(assigned, Word) else assigned or []
    is_launch = words and syntax.is_only_added(name, node)
    return bool(is_launch and read_launch(words, scope, step).weight)


def leave_empty(
    training: Launch, statements: list[Statement], commands: dict[str, list[Statement]]
) -> None:
    """Change the assignments, `commands` by variable, so that those which the `training` is made of
    leave the variable empty. Another statement that needs such a variable, except a print, is
    lost."""
    names = {name for word in training.words for name in word.names}
    inner = [s for s in statements if s.name in names and not s.of_script]  # the text of bash -c
    for name in (names | {name for s in inner for name in s.names}) & commands.keys():
        for statement in commands[name]:
            is_array = isinstance(statement.assigned, list)
            statement.text = f"{name}=()" if is_array else f"{name}="
            statement.assigned = [] if is_array else literal("")
        for statement in statements:
            adds = name == statement.name or name in statement.sets or statement in inner
            is_other = name in statement.names and statement.launch is not training and not adds
            is_print = PRINTS.match(statement.text) and not re.search(r">|\btee\b", statement.text)
            if is_other and not is_print:
                statement.lost = f"it uses {name}, which the launch is made of: setup"
