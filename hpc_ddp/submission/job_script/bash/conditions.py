"""Conditions of a job script whose truth follows from it, and the branches that they choose."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator

from hpc_ddp.submission.job_script.bash.scope import Scope
from hpc_ddp.submission.job_script.bash.syntax import (
    Node,
    commands_of,
    parse,
    source,
    uses_arguments,
)
from hpc_ddp.submission.job_script.bash.words import Word

Branch = tuple[list[Node], list[Node]]  # the commands of its condition, and its lines
_OPERATORS: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(("=", "==", "-eq"), operator.eq),
    **{"!=": operator.ne, "-ne": operator.ne, "-gt": operator.gt, "-lt": operator.lt},
    **{"-ge": operator.ge, "-le": operator.le},
}

_COMPARISONS = {"==": "-eq", "!=": "-ne", ">": "-gt", "<": "-lt", ">=": "-ge", "<=": "-le"}

_OPERAND = r"(\w+|\$\w+|\$\{#?\w+(?:\[[@*]\])?\})"

_ARITHMETIC = re.compile(rf"^\(\(\s*{_OPERAND}\s*([=!<>]=|[<>])\s*{_OPERAND}\s*\)\)$")


def truth_of(node: Node, scope: Scope, is_guessed: bool) -> bool | None:
    """Return whether a condition holds, as ``[ $N -gt 1 ]`` or ``((N > 1))``; None where only the
    job knows, or where the condition is more than one comparison. `is_guessed` is as in
    `_is_empty`."""
    text = _ARITHMETIC.sub(_as_test, source(node).strip())
    text = re.sub(r"\$\{(\w+):?-\}", r"$\1", text)  # by `set -u`: no other value
    match = re.fullmatch(r"\[\[?(|\s.*?)\s+(==?|!=|-\w+)\s+(.*?)\s+\]\]?", text, re.S)
    is_unknown = uses_arguments(text) and scope.arguments is None
    if not match or is_unknown or re.search(r"[&|<>()*?]", text.replace("$((", "")):
        return {"true": True, "false": False}.get(text)
    words = scope.words(commands_of(parse(f": {match[1]} {match[3]}"))[0].named_children[1:])
    texts = [word.text for word in words]
    if match[2] in ("-z", "-n") and not match[1] and len(words) < 2:
        is_empty = _is_empty(words, scope, is_guessed)
        return None if is_empty is None else is_empty == (match[2] == "-z")
    if len(words) != 2 or match[2] not in _OPERATORS:
        return None
    numbers = [scope.number(word) for word in words]
    if all(number is not None for number in numbers):
        return bool(_OPERATORS[match[2]](*numbers))
    if match[2].startswith("-") or not all(word.is_static for word in words):
        return None
    return bool(_OPERATORS[match[2]](*texts))


def _as_test(match: re.Match[str]) -> str:
    """Return the test that an arithmetic comparison of `_ARITHMETIC` is."""
    first, comparison, second = match.groups()
    operands = [re.sub(r"^(?=[A-Za-z_])", "$", operand) for operand in (first, second)]
    return f"[ {operands[0]} {_COMPARISONS[comparison]} {operands[1]} ]"


def _is_empty(words: list[Word], scope: Scope, is_guessed: bool) -> bool | None:
    """Return whether the words of a test by ``-z`` or ``-n``, one or none, are empty; None where
    only the job knows. Slurm's variables count as set, also that of a job's GPUs. A variable that
    nothing in the script sets counts as unset if `is_guessed`, and is then added to
    ``scope.guesses``, or if it is there."""
    names = [name for word in words for name in word.names]
    of_slurm = {name for name in names if name.startswith("SLURM_")}
    if scope.numbers.get("SLURM_GPUS_ON_NODE"):
        of_slurm |= {"CUDA_VISIBLE_DEVICES"} & {*names} - scope.values.keys()
    if of_slurm:
        return bool(of_slurm & scope.not_set)  # one that is set is not empty
    if any(scope.is_open or name in scope.values or name in scope.of_shell for name in names):
        return None
    if not is_guessed and not scope.guesses.issuperset(names):
        return None
    scope.guesses.update(names)
    return bool(names) or not any(word.text for word in words)


def branches_of(node: Node) -> Iterable[Branch]:
    """Yield the commands of the condition (none for ``else``) and the lines of each branch of an
    ``if``. The last command decides."""
    clauses = [child for child in node.children if child.type in ("elif_clause", "else_clause")]
    for clause in (node, *clauses):
        types = [child.type for child in clause.children]
        start = types.index("then") if "then" in types else 0
        yield (
            [child for child in clause.children[:start] if child.is_named],
            [child for child in clause.children[start:] if child.is_named and child not in clauses],
        )


def running_branch(branches: list[Branch], scope: Scope, is_guessed: bool) -> int | None:
    """Return the index of the branch that runs, and the number of branches where none does; None
    where only the job knows. `scope` and `is_guessed` are as in `truth_of`."""
    for number, (condition, _) in enumerate(branches):
        truths = [truth_of(command, scope, is_guessed) for command in condition]
        is_true = truths[0] if len(truths) == 1 else None if truths else True
        if is_true is None:
            return None
        if is_true:
            return number
    return len(branches)


def idle_lines(branches: Iterable[Branch], chosen: int) -> Iterator[tuple[Node, str]]:
    """Yield the lines of the branches of an ``if`` that do not run, each with the reason; `chosen`
    is the number of the branch that runs."""
    for number, (_, lines) in enumerate(branches):
        reason = "its condition is false" if number < chosen else "an earlier branch runs"
        yield from ((line, reason) for line in lines if number != chosen)
