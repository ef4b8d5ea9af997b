"""Branches of which only the job knows the one that runs, and which all start the same program."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from hpc_ddp.submission.job_script.bash import blocks
from hpc_ddp.submission.job_script.bash.conditions import Branch
from hpc_ddp.submission.job_script.bash.syntax import Node, source
from hpc_ddp.submission.job_script.bash.words import Part, Word
from hpc_ddp.submission.job_script.conversion import STARTS_PYTHON
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.statements.statement import Statement

# Fields in which launches of the same program may differ.
_OF_ONE = {"line", "weight", "args", "marks"}
CHOSEN = "ARGUMENTS_CHOSEN"  # the array that has the words of the branch that runs
# Returns the statements of some lines, which it reads apart.
ReadLines = Callable[[Sequence[Node]], list[Statement]]


def branches_of_case(node: Node) -> list[Branch]:
    """Return the branches of a ``case``, `node`; that of ``*)`` has no condition."""
    branches = []
    for case_item in (c for c in node.named_children if c.type == "case_item"):
        values = case_item.children_by_field_name("value")
        starts = {child.start_byte for child in values}
        lines = [child for child in case_item.named_children if child.start_byte not in starts]
        is_else = [source(child) for child in values] == ["*"]
        branches.append(([] if is_else else values, lines))
    return branches


def find_common_launch(branches: list[Branch], read: ReadLines) -> tuple[int, Launch] | None:
    """Return the index of the branch whose launch starts tasks, or weighs most, and the launch,
    where all branches of an ``if``, an ``else`` among them, start one program with the same words,
    and otherwise only print, or run the same commands; a ``cd`` in a task does not count. None for
    other branches."""
    launches, commands = list[Launch](), set[tuple[str, ...]]()
    for _, lines in branches:
        statements = read([n for n in lines if not (n.type == "comment" or blocks.only_reports(n))])
        launches += [s.launch for s in statements if s.launch and not s.lost]
        texts = [s.text for s in statements if not (s.launch or (s.in_task and s.first == "cd"))]
        commands.add(tuple(texts))
    is_common = len(launches) == len(branches) and len(commands) == 1 and not branches[-1][0]
    if not is_common or len({launch.command for launch in launches}) > 1:
        return None
    return max(enumerate(launches), key=lambda pair: pair[1].weight)


def choose_arguments(
    node: Node, branches: list[Branch], read: ReadLines
) -> tuple[str, Launch] | None:
    """Return the text of an ``if`` or ``case``, `node`, in which each branch puts the arguments of
    its launch into the array `CHOSEN`, and the launch that has this array as its arguments.

    None unless the last command of each branch is a launch, two at least, and all of these differ
    in their arguments alone. A branch without a launch must end the script. Where no branch may
    run, the text has one more, which ends the script, too.
    """
    edits, launches = [], list[Launch]()
    for _, lines in branches:
        commands = [line for line in lines if line.type != "comment"]
        statements = read(commands)
        of_branch = [s.launch for s in statements if s.launch and not s.lost]
        if not of_branch and any(re.search(r"\bexit\b", source(line)) for line in commands):
            continue
        is_last = bool(of_branch) and statements[-1].launch is of_branch[0]
        if len(of_branch) != 1 or not is_last or commands[-1].type != "command":
            return None
        words = " ".join(word.as_bash() for word in of_branch[0].args)
        edits.append((commands[-1].start_byte, commands[-1].end_byte, f"{CHOSEN}=({words})"))
        launches.append(of_branch[0])
    keys = [_key_besides_arguments(launch) for launch in launches]
    if len(launches) < 2 or any(key != keys[0] for key in keys):
        return None
    if branches[-1][0]:  # no else
        end = node.children[-1]
        last = "else exit 1; " if source(end) == "fi" else "*) exit 1 ;; "
        edits.append((end.start_byte, end.start_byte, last))
    array = Word((Part(f"${{{CHOSEN}[@]}}", is_code=True, splits=False),), launches[0].line)
    notes = [mark for launch in launches[1:] for mark in launch.marks if not mark[1]]
    marks = [*launches[0].marks, *(mark for mark in notes if mark not in launches[0].marks)]
    return edit_code(node, edits), replace(launches[0], args=[array], marks=marks)


def guard_only_launch(
    node: Node, branches: list[Branch], read: ReadLines
) -> tuple[str, int] | None:
    """Return the text of an ``if`` or ``case``, `node`, without the lines of its only branch that
    has a launch, and the index of this branch. In the text all other branches end the script, as
    they do where `node` is the script's last command. None where another branch has a launch,
    starts Python or is empty.
    """
    launches = [any(s.launch and not s.lost for s in read(lines)) for _, lines in branches]
    idle = [lines for (_, lines), starts in zip(branches, launches, strict=True) if not starts]
    starts_python = any(re.match(STARTS_PYTHON, source(line)) for lines in idle for line in lines)
    if launches.count(True) != 1 or starts_python or not all(idle):
        return None
    chosen, end = launches.index(True), node.children[-1]
    edits = []
    for last_line in (lines[-1] for lines in idle):
        exit_line = f"\n{' ' * last_line.start_point[1]}exit"
        edits.append((last_line.end_byte, last_line.end_byte, exit_line))
    edits.append((branches[chosen][1][0].start_byte, branches[chosen][1][-1].end_byte, ":"))
    if branches[-1][0]:  # no else
        last = "else exit 0; " if source(end) == "fi" else "*) exit 0 ;; "
        edits.append((end.start_byte, end.start_byte, last))
    return edit_code(node, edits), chosen


def edit_code(node: Node, edits: list[tuple[int, int, str]]) -> str:
    """Return the code of a node in which each of the `edits` has replaced the code between two
    bytes of the script by a text."""
    code, start = source(node).encode(), node.start_byte
    for begin, stop, text in sorted(edits, reverse=True):
        code = code[: begin - start] + text.encode() + code[stop - start :]
    return code.decode()


def _key_besides_arguments(launch: Launch) -> dict[str, str]:
    """Return a key that two launches share if they differ at most in the program's arguments: the
    texts of all other fields, without numbers of lines. Marks do not count, which follow from the
    other fields."""
    values = {f.name: getattr(launch, f.name) for f in fields(launch) if f.name not in _OF_ONE}
    values["options"] = {name: word for name, (word, _) in launch.options.items()}
    values["unset"] = {name: in_tasks for name, (_, in_tasks) in launch.unset.items()}
    return {name: _text_of(field_value) for name, field_value in values.items()}


def _text_of(content: Any) -> str:
    """Return the text of a field of a launch, in which words have neither lines nor quotes."""
    if isinstance(content, Word):
        return repr(content.text)
    if isinstance(content, dict):
        return str(sorted((key, _text_of(entry)) for key, entry in content.items()))
    if isinstance(content, list):
        return str([_text_of(entry) for entry in content])
    return repr(sorted(content) if isinstance(content, set) else content)
