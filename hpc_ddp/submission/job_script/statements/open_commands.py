"""Variables that hold a launch, to which a condition or a loop adds words in the job.

The words that are known are read as the launch. In the job the variable begins empty, so that it
has the added words alone, and these follow the launch's own arguments.
"""

from __future__ import annotations

import re

from hpc_ddp.submission.job_script.bash import syntax
from hpc_ddp.submission.job_script.bash.scope import TAILS, Scope
from hpc_ddp.submission.job_script.bash.words import Word, literal, split_text
from hpc_ddp.submission.job_script.conversion import PRINTS
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.launchers.read import read_launch
from hpc_ddp.submission.job_script.statements.statement import Place, Statement

_KEEPS = re.compile(r">|\btee\b")  # a print that does more


def extends_launch(name: str, block: syntax.Node, scope: Scope, place: Place) -> bool:
    """Return whether the variable `name` holds the words of a launch, and `block`, a condition or a
    loop, does nothing with it but add words. ``place.step`` is the command whose tasks run the
    words, '' for the batch script."""
    assigned = scope.values.get(name)
    words = split_text(assigned) if isinstance(assigned, Word) else assigned or []
    if not words or not syntax.only_adds_words(name, block):
        return False
    return read_launch(words, scope, place.step).weight > 0  # 0: no launch


def leave_empty(
    training: Launch, statements: list[Statement], commands: dict[str, list[Statement]]
) -> None:
    """Change the assignments, `commands` by variable, so that those which the `training` is made of
    leave the variable empty. Where the training needs such a variable in another form than by its
    known words and what the job adds, nothing is changed. Another statement that needs it, except
    a print or an assignment whose value is known, is lost."""
    names = {name for word in training.words for name in word.names}
    inner = [s for s in statements if s.name in names and not s.of_script]  # the text of bash -c
    code = [part.text for word in training.words for part in word.code] + [s.text for s in inner]
    for name in (names | {name for s in inner for name in s.names}) & commands.keys():
        uses = re.findall(rf"\$\{{?[!#]?{name}\b(?:\[@\]:0|-)?\}}?", " ".join(code))
        if {*uses} - {f"${{{name}{tail}}}" for tail in TAILS}:
            continue
        for statement in commands[name]:
            is_array = isinstance(statement.assigned, list)
            statement.text = f"{name}=()" if is_array else f"{name}="
            statement.assigned = [] if is_array else literal("")
        for statement in statements:
            adds = name == statement.name or name in statement.sets or statement in inner
            lines = (s for s in statements if s is not statement and s.launch is not training)
            is_known = statement.name and statement.assigned is not None
            is_known = is_known and not any(statement.name in s.names for s in lines)
            is_other = name in statement.names and statement.launch is not training and not adds
            is_other = is_other and not is_known
            is_print = PRINTS.match(statement.text) and not _KEEPS.search(statement.text)
            if is_other and not is_print:
                statement.lost = f"it uses {name}, which the launch is made of: setup"
