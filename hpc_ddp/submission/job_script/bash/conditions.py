"""Conditions of ``if`` and ``case`` in a job script: whether they hold in the job, as far as the
script tells, and the branches that they choose."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator

from hpc_ddp.submission.job_script.bash.counts import whole_number
from hpc_ddp.submission.job_script.bash.syntax import (
    Node,
    commands_of,
    parse,
    source,
    uses_arguments,
)
from hpc_ddp.submission.job_script.bash.variables import Scope
from hpc_ddp.submission.job_script.bash.words import Word, literal

Branch = tuple[list[Node], list[Node]]  # the commands of its condition, and its lines
# What the operators of a test ask of the two words around them.
_OPERATORS: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(("=", "==", "-eq"), operator.eq),
    **{"!=": operator.ne, "-ne": operator.ne, "-gt": operator.gt, "-lt": operator.lt},
    **{"-ge": operator.ge, "-le": operator.le},
}

# Operators of arithmetic, and those of a test on numbers.
_COMPARISONS = {"==": "-eq", "!=": "-ne", ">": "-gt", "<": "-lt", ">=": "-ge", "<=": "-le"}
_OPERAND = r"(\w+|\$\w+|\$\{#?\w+(?:\[[@*]\])?\})"  # a number, NAME, $NAME, ${#NAME[@]} …
# One comparison in arithmetic, as ((N > 1)): its operands are [1] and [3], the operator [2].
_ARITHMETIC = re.compile(rf"^\(\(\s*{_OPERAND}\s*([=!<>]=|[<>])\s*{_OPERAND}\s*\)\)$")
# A test, as [ -z "$A" ] or [[ $A == x ]]: [1] the first operand, '' without, [2] the operator, and
# [3] the last operand.
_TEST = re.compile(r"\[\[?(|\s.*?)\s+(==?|!=|-\w+)\s+(.*?)\s+\]\]?", re.S)
# A test on a pattern of text and stars, or an expression of text.
_PATTERN_TEST = re.compile(
    r"\[\[\s+(\"?\$\{?\w+(?::?-)?\}?\"?)\s+(=~(?!\s+\S*[*.])|(?:==?|!=)(?=\s+\S*\*))"
    r"\s+((?:[\w:./*-]|\"[\w:./-]*\"|'[\w:./-]*')+)\s+\]\]"
)
_NEGATED = re.compile(r"(?P<start>\[\[?)\s+!\s+(?P<operator>-[nz])(?P<end>\s.*)", re.S)
_ASKS_ARGUMENT = re.compile(r"\[\[?\s+(!\s+)?-([nz])\s+\"?\$\{?\d(?::?-)?\}?\"?\s+\]\]?")
_ASKS_UNSET = re.compile(r"\[\[?\s+-z\s+\"?\$\{?([A-Za-z_]\w*)(?::?-)?\}?\"?\s+\]\]?")
# Variables that Slurm sets in each job, or in each of an array; then those of a job with GPUs.
_OF_EACH_JOB = re.compile(
    r"SLURM_(JOB_?ID|JOB_(NAME|NODELIST|NUM_NODES|PARTITION|CPUS_PER_NODE|UID|USER)|NNODES|NODELIST"
    r"|NODEID|PROCID|LOCALID|SUBMIT_(DIR|HOST)|TASKS_PER_NODE|CPUS_ON_NODE|CLUSTER_NAME|TASK_PID"
    r"|GTIDS|ARRAY_\w+)"
)
_OF_GPUS = ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS")


def truth_of(node: Node, scope: Scope, is_guessed: bool) -> bool | None:
    """Return whether the condition `node` holds in the job: ``[ $N -gt 1 ]``, ``[[ -n $A ]]``,
    ``((N > 1))``, ``true``, ``false``, or two such with ``&&`` or ``||``. None where only the job
    knows, and for any other condition, as two comparisons in one or a pattern. With `is_guessed` a
    variable that nothing sets is taken to be empty, and noted in ``scope.guesses``: see
    `_is_empty`."""
    if node.type == "list":
        sides = node.named_children[0], node.named_children[-1]
        truths = [truth_of(side, scope, is_guessed) for side in sides]
        decides = node.children[1].type == "||"  # the truth of one side that decides
        return decides if decides in truths else None if None in truths else not decides
    return _truth_of_text(source(node).strip(), scope, is_guessed)


def _truth_of_text(text: str, scope: Scope, is_guessed: bool) -> bool | None:
    """Return whether the one test in `text` holds, as `truth_of` does; in ``[[ … ]]`` it may have
    several parts, all with ``&&`` or all with ``||`` between, in which no variable is guessed."""
    code = re.sub(r"'[^']*'|\"[^\"]*\"", "", text)
    signs = re.findall(r"&&|\|\||[()]", code)
    inner = re.fullmatch(r"\[\[\s(.*)\s\]\]", text, re.S)
    if inner and {*signs} in ({"&&"}, {"||"}) and text.count(signs[0]) == len(signs):
        pieces = inner[1].split(signs[0])
        truths = [_truth_of_text(f"[[ {piece.strip()} ]]", scope, False) for piece in pieces]
        decides = signs[0] == "||"
        return decides if decides in truths else None if None in truths else not decides
    text = _ARITHMETIC.sub(_test_of_comparison, text)
    text = re.sub(r"^\[\[\s+(!\s+)?-v\s+(\w+)\s+\]\]$", _test_of_name, text)
    text = re.sub(r"^test\s+(?=\S)(.*)$", r"[ \1 ]", text, flags=re.S)
    if negated := _NEGATED.fullmatch(text):  # [ ! -z "$A" ]
        text = f"{negated['start']} {'-z' if negated['operator'] == '-n' else '-n'}{negated['end']}"
    text = re.sub(r"\$\{(\w+):?-\}", r"$\1", text)  # ${A-} serves `set -u`: it is $A
    text = re.sub(r"(-[nz]\s+\"?)\$\{(SLURM_\w+):?\+\w+\}", r"\1$\2", text)  # so does ${A+x}
    test = _TEST.fullmatch(text)
    if match := _PATTERN_TEST.fullmatch(text):
        operand, sign, pattern = match.groups()
        return _fits_pattern(operand, sign, pattern, scope)
    is_unknown = uses_arguments(text) and scope.arguments is None
    is_more = re.search(r"[&|<>()*?]", text)  # several comparisons, a substitution or a pattern
    if not test or is_unknown or is_more:
        return {"true": True, "false": False}.get(text)
    first, operator_text, last = test.groups()
    words = [_fill_in_text(w, scope, scope.numbers) for w in _words_in(f"{first} {last}", scope)]
    if operator_text in ("-z", "-n") and not first and len(words) < 2:
        is_empty = _is_empty(words, scope, is_guessed)
        return None if is_empty is None else is_empty == (operator_text == "-z")
    return _compare(words, operator_text, scope)


def _words_in(code: str, scope: Scope) -> list[Word]:
    """Return the operands of a test, which are read as arguments of the command ``:``."""
    return scope.words(commands_of(parse(f": {code}"))[0].named_children[1:])


def _fits_pattern(operand: str, sign: str, pattern: str, scope: Scope) -> bool | None:
    """Return whether a variable, `operand`, fits a `pattern`, as ``*:*`` of ``$A == *:*`` and ``:``
    of ``$A =~ :``, or for ``!=`` does not; None where only the job knows its value."""
    words = [_fill_in_text(word, scope, {}) for word in _words_in(operand, scope)]
    if len(words) != 1 or not words[0].is_static or uses_arguments(operand):
        return None
    pattern = re.sub("[\"']", "", pattern)
    if sign == "=~":
        return bool(re.search(pattern, words[0].text))
    return fnmatch.fnmatchcase(words[0].text, pattern) == (sign != "!=")


def _test_of_name(match: re.Match[str]) -> str:
    """Return the test ``[ -n "$NAME" ]`` for ``[[ -v NAME ]]`` of one of Slurm's variables, which
    are not empty where they are set; for that of another variable the test itself."""
    sign = "-z" if match[1] else "-n"
    return f'[ {sign} "${match[2]}" ]' if match[2].startswith("SLURM_") else match[0]


def _fill_in_text(word: Word, scope: Scope, numbers: Collection[str]) -> Word:
    """Return a variable of Slurm's, `word`, as the text that it has in the job by the directives;
    another word, a variable that the script sets, and one of the `numbers`, as it is."""
    name = word.parts[0].name if len(word.parts) == 1 else ""
    is_known = name in scope.texts and name not in {*scope.values, *numbers}
    return literal(scope.texts[name], word.line) if is_known else word


def _compare(words: list[Word], operator_text: str, scope: Scope) -> bool | None:
    """Return whether a test holds that has an operator between two `words`: ``4 -gt 1``, ``a = b``.
    Words that are numbers, also by the numbers in `scope`, are compared as numbers. None where only
    the job knows a word, for another operator (``-f``), and for more or fewer words."""
    if len(words) != 2 or operator_text not in _OPERATORS:
        return None
    compare = _OPERATORS[operator_text]
    numbers = [whole_number(word, scope) for word in words]
    if all(number is not None for number in numbers):
        return bool(compare(*numbers))
    if operator_text.startswith("-") or not all(word.is_static for word in words):
        return None
    return bool(compare(*(word.text for word in words)))


def _test_of_comparison(match: re.Match[str]) -> str:
    """Return the test for an arithmetic comparison, a match of `_ARITHMETIC`: ``[ $N -gt 1 ]`` for
    ``((N > 1))``."""
    first, comparison, second = match.groups()
    # A variable of arithmetic has no $ of its own.
    operands = [re.sub(r"^(?=[A-Za-z_])", "$", operand) for operand in (first, second)]
    return f"[ {operands[0]} {_COMPARISONS[comparison]} {operands[1]} ]"


def _is_empty(words: list[Word], scope: Scope, is_guessed: bool) -> bool | None:
    """Return whether the operand of ``-z`` or ``-n`` is empty: `words` has one word, or none where
    nothing is left of it. None where only the job knows.

    Slurm's variables that each job has, or that follow from its options, are not empty, and those
    of ``scope.not_set`` are. CUDA_VISIBLE_DEVICES and the like are not empty in a job with GPUs,
    where the script does not set them. Only the job knows others of Slurm's: SLURM_RESTART_COUNT,
    which its first start lacks, and SLURM_MEM_PER_NODE. A variable that neither the script, a file
    that it sources nor the submitting shell sets is taken to be empty with `is_guessed`, and is
    then added to ``scope.guesses``; without it, if it is there already.
    """
    if any(part.text for word in words for part in word.parts if not part.is_code):
        return False  # as "x$FOO"
    names = [name for word in words for name in word.names]
    of_slurm = {name for name in names if name.startswith("SLURM_")}
    has_gpus = scope.numbers.get("SLURM_GPUS_ON_NODE")
    of_gpus = {*_OF_GPUS} & {*names} - scope.values.keys() if has_gpus else set()
    if any(n.startswith("SLURM_ARRAY_") for n in of_slurm) and "SLURM_ARRAY" in scope.not_set:
        return None  # the command line may have --array
    if of_slurm & scope.not_set:
        return True
    if of_slurm or of_gpus:
        is_set = all(
            name in of_gpus or name in scope.texts or _OF_EACH_JOB.fullmatch(name) for name in names
        )
        return False if is_set else None
    is_known = not {*names}.isdisjoint(scope.values.keys() | scope.shell_names)
    if is_known or (names and scope.has_unknown_names):
        return None
    if not is_guessed and not scope.guesses.issuperset(names):
        return None
    scope.guesses.update(names)
    return True


def branches_of(node: Node) -> Iterable[Branch]:
    """Yield, for each branch of an ``if`` in order, the commands of its condition and its lines.
    The last of these commands decides; an ``else`` has none."""
    clauses = [child for child in node.children if child.type in ("elif_clause", "else_clause")]
    for clause in (node, *clauses):  # the node itself is the first branch
        types = [child.type for child in clause.children]
        start = types.index("then") if "then" in types else 0  # else
        yield (
            [child for child in clause.children[:start] if child.is_named],
            [child for child in clause.children[start:] if child.is_named and child not in clauses],
        )


def variable_with_default(branches: list[Branch]) -> str:
    """Return the variable, A, for the branches of an ``if`` that only gives it a default: ``if [ -z
    "$A" ]; then A=8; fi``. '' for any other ``if``."""
    (condition, lines), *elses = branches
    test = _ASKS_UNSET.fullmatch(source(condition[0]).strip()) if len(condition) == 1 else None
    if elses or test is None:
        return ""
    assigns = re.compile(rf"(?:export\s+)?{test[1]}=(?!\()")
    kinds = {"variable_assignment", "declaration_command"}
    commands = [line for line in lines if line.type != "comment"]
    is_default = all(n.type in kinds and assigns.match(source(n)) for n in commands)
    return test[1] if is_default else ""


def branch_without_arguments(branches: list[Branch]) -> int | None:
    """Return the index of that one of the `branches` of an ``if [ -n "$1" ]``, or with ``-z``,
    which runs if the script has no arguments; the number of branches if none does. None for another
    ``if``, and if the branch ends the script."""
    (condition, _), *elses = branches
    test = _ASKS_ARGUMENT.fullmatch(source(condition[0]).strip()) if len(condition) == 1 else None
    if test is None or len(elses) > 1 or (elses and elses[0][0]):
        return None
    chosen = 0 if (test[2] == "z") != bool(test[1]) else 1
    lines = branches[chosen][1] if chosen < len(branches) else []
    ends = any(re.search(r"\b(exit|usage)\b", source(line)) for line in lines)
    return None if ends else chosen


def running_branch(branches: list[Branch], scope: Scope, is_guessed: bool) -> int | None:
    """Return the index of the branch of an ``if`` that runs; the number of branches where none
    does; None where only the job knows, or a condition has several commands. `scope`, which may be
    changed, and `is_guessed` are as in `truth_of`."""
    for index, (condition, _) in enumerate(branches):
        truths = [truth_of(command, scope, is_guessed) for command in condition]
        is_else = not truths
        is_true = is_else or (truths[0] if len(truths) == 1 else None)
        if is_true is None:
            return None
        if is_true:
            return index
    return len(branches)


def find_outside(command: Node, scope: Scope) -> tuple[Node, list[Node]] | None:
    """Return the ``if`` or list whose condition, on a variable of Slurm's, keeps each job from a
    `command`, and the statements of the command's branch. None without such a condition."""
    node, place = command, None
    while node := node.parent:
        if node.type == "list" and place:  # test && sbatch && exit
            place = node, place[1]
        elif node.type == "list":
            test, last = node.named_children[0], node.named_children[-1]
            truth = truth_of(test, scope, False) if "SLURM_" in source(test) else None
            if truth == (node.children[1].type == "||") and last.end_byte >= command.end_byte:
                is_block = last.type == "compound_statement"
                place = node, last.named_children if is_block else [last]
        elif node.type == "if_statement" and not place:
            branches = [*branches_of(node)]
            chosen = running_branch(branches, scope, False)
            is_on_slurm = "SLURM_" in "".join(source(c) for test, _ in branches for c in test)
            for index, (_, lines) in enumerate(branches):
                is_own = any(n.start_byte <= command.start_byte < n.end_byte for n in lines)
                if is_own and is_on_slurm and chosen not in (None, index):
                    place = node, lines
    return place


def running_case_branch(node: Node, scope: Scope) -> int | None:
    """Return the index of the branch of a ``case``, `node`, that runs; the number of branches where
    none does; None where only the job knows."""
    tested = scope.words([node.child_by_field_name("value")])
    if len(tested) != 1 or uses_arguments(source(node.named_children[0])):
        return None
    word = _fill_in_text(tested[0], scope, scope.numbers)
    number = whole_number(word, scope)
    if not (word.is_static or number is not None):
        return None
    text = word.text if word.is_static else str(number)
    items = [child for child in node.named_children if child.type == "case_item"]
    for index, case_item in enumerate(items):
        patterns = [
            source(pattern).strip("\"'") for pattern in case_item.children_by_field_name("value")
        ]
        if any(re.search(r"[$`\\(]", pattern) for pattern in patterns):
            return None
        if any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns):
            return index
    return len(items)


def lines_that_do_not_run(branches: Iterable[Branch], chosen: int) -> Iterator[tuple[Node, str]]:
    """Yield the lines of all `branches` but the `chosen` one (an index, as from `running_branch`),
    each with the reason why it does not run."""
    for index, (_, lines) in enumerate(branches):
        reason = "its condition is false" if index < chosen else "an earlier branch runs"
        yield from ((line, reason) for line in lines if index != chosen)
