"""The branches of an ``if`` or ``case``: which one runs, as far as the script tells; and else, the
launch that all branches, or only one of them, have."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from hpc_ddp.submission.job_script.bash import blocks
from hpc_ddp.submission.job_script.bash.blocks import names_set_in
from hpc_ddp.submission.job_script.bash.conditions import (
    Branch,
    branch_without_arguments,
    branches_of,
    lines_that_do_not_run,
    running_branch,
    running_case_branch,
    variable_with_default,
)
from hpc_ddp.submission.job_script.bash.syntax import Node, commands_of, source
from hpc_ddp.submission.job_script.bash.words import Part, Word
from hpc_ddp.submission.job_script.conversion import OURS
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.launchers.program_names import prepares_training
from hpc_ddp.submission.job_script.statements.loaded_texts import doubts_on_names, sentences_on
from hpc_ddp.submission.job_script.statements.open_commands import replaces_launch
from hpc_ddp.submission.job_script.statements.reader_state import ReaderState
from hpc_ddp.submission.job_script.statements.requeues_and_deletions import only_reports_or_requeues
from hpc_ddp.submission.job_script.statements.rules import ENDED, STARTS_PYTHON, VERDICT
from hpc_ddp.submission.job_script.statements.statement import Statement

# Fields in which launches of the same program may differ.
_OF_ONE = {"line", "weight", "args", "marks"}
CHOSEN = "ARGUMENTS_CHOSEN"  # the array that has the words of the branch that runs
# Returns the statements of some lines, which it reads apart.
ReadLines = Callable[[Sequence[Node]], list[Statement]]
CHOOSES = "a condition that only the job knows chooses a launch"


class BranchReader(ReaderState):
    """Reads ``if`` and ``case``: methods of `Reader`, which says how they are called."""

    def _if_statement(self, node: Node) -> None:
        """Append the statements of the branch that runs, maybe none, where the script tells which
        one it is. Else append the whole as one statement, which is lost if a launch is in it.

        Where the condition is the launch, append the launch, and the whole behind it, with `ENDED`
        in its place.
        """
        has_launch, branches = self._has_launch(node), list(branches_of(node))
        condition, *bodies = node.named_children
        reports, is_list = all(map(only_reports_or_requeues, bodies)), condition.type == "list"
        is_asked = has_launch and (reports or not (is_list or any(map(self._has_launch, bodies))))
        if is_asked and self._has_launch(condition):
            self._mark_lines(node, VERDICT, OURS)
            first = condition.named_children[0] if condition.type == "pipeline" else condition
            command = first.named_children[-1] if first.type == "negated_command" else first
            text = edit_code(node, [(command.start_byte, condition.end_byte, ENDED)])
            with self._enclose(node):
                self._read_node(condition)
                if not is_list:
                    launch = self.statements[-1].launch
                    self._add(node, text, is_report=reports, reported_launch=launch)
            return
        chosen = self._choose_branch(node, branches, has_launch)
        common = find_common_launch(branches, self._read_apart) if has_launch else None
        if chosen is None and common:
            chosen, launch = common
            text = "every branch starts this program: it is the launch in all cases"
            self.notes.append(
                (launch.line, f"{text}; for another number of tasks: --nproc-per-node N")
            )
            for line in (
                line for i, (_, lines) in enumerate(branches) if i != chosen for line in lines
            ):
                self._mark_lines(line, "the same program, in another branch", OURS)
        if chosen is None:
            self._add_unknown_branches(node, branches)
            return
        self._read_branch(node, branches, chosen)

    def _negated_command(self, node: Node) -> None:
        """Append the launch of ``! LAUNCH``; a command without one as one statement."""
        if self._has_launch(node):
            self._read_node(node.named_children[-1])
        else:
            self._add(node)

    def _case_statement(self, node: Node) -> None:
        """Append a ``case``: as an ``if`` with a condition for each pattern (`_if_statement`)."""
        chosen = running_case_branch(node, self.scope)
        branches = branches_of_case(node)
        if chosen is None or (self._is_check(branches, chosen) and not self._has_launch(node)):
            self._add_unknown_branches(node, branches)
        else:
            self._read_branch(node, branches, chosen)

    def _read_branch(self, node: Node, branches: list[Branch], chosen: int) -> None:
        """Append the statements of the `branches` of an ``if`` or ``case``, `node`, that runs."""
        for child, reason in lines_that_do_not_run(branches, chosen):
            self._mark_lines(child, reason, OURS)
        self._mark_lines(node, "it chooses one branch")
        conditions = [command for condition, _ in branches for command in condition]
        conditions += node.children_by_field_name("value") if node.type == "case_statement" else []
        for text in sentences_on(doubts_on_names(conditions, self.scope)):
            self.notes.append((self._lines_of(node)[0], text))
        for _, lines in branches[chosen : chosen + 1]:  # none where each condition is false
            self._read_lines(lines)

    def _add_unknown_branches(self, node: Node, branches: list[Branch]) -> None:
        """Append an ``if`` or ``case``, `node`, of which only the job knows the branch that runs.

        Where all branches start one program with other arguments, append the block with an
        assignment in place of each launch, and then the launch (`choose_arguments`). Where a single
        branch has a launch, append the block without its lines, and then these
        (`guard_only_launch`). Else append it as one statement, which is lost if a launch is in it.
        """
        has_launch = self._has_launch(node)
        statements = self._read_apart(commands_of(node)) if has_launch else []
        has_launch = any(s.launch and not prepares_training(s.launch) for s in statements)
        is_chosen = has_launch and not self._place.in_task
        chosen = choose_arguments(node, branches, self._read_apart) if is_chosen else None
        is_guarded = has_launch and not self._place.in_text and blocks.is_last(node)
        if chosen:
            self._add(node, chosen[0]).sets |= {CHOSEN}
            self.scope.set(CHOSEN, None)
            self._add(node, launch=chosen[1])
        elif is_guarded and (guard := guard_only_launch(node, branches, self._read_apart)):
            self._add(node, guard[0])
            self._read_lines(branches[guard[1]][1])
        else:
            self._add_as_one(node, CHOOSES if has_launch else "")

    def _add_as_one(self, node: Node, lost: str) -> None:
        """Append a condition or loop, `node`, as one statement. If it is `lost`, a reason,
        `choices` of the statement has the launches in it; '' for one that is not lost."""
        parts = self._read_apart(commands_of(node)) if lost else []
        self._add(node, lost=lost, choices=[part.launch for part in parts if part.launch])

    def _read_apart(self, lines: Sequence[Node]) -> list[Statement]:
        """Return the statements of some lines, which leave this reader as it is."""
        probe = type(self)(self.scope.child(self.scope.arguments, self.scope.arguments_are_set))
        probe._place, probe._functions = self._place, {**self._functions}
        probe._read_lines(lines)
        return probe.statements

    def _read_lines(self, lines: Sequence[Node]) -> None:
        """Append the statements of the lines of a branch."""
        for line in lines:
            self._read_node(line)

    def _choose_branch(self, node: Node, branches: list[Branch], has_launch: bool) -> int | None:
        """Return the index of the one of the `branches` of an ``if``, `node`, that runs, the number
        of branches if none does, None where only the job knows. Variables that nothing sets are
        taken to be unset where a launch is in a branch, or a branch replaces the words of one, and
        where the branch is the default of the variable that it asks for (`variable_with_default`).
        None, too, for a branch without a launch that ends the script: it checks what is not known
        here."""
        if self._gives_default(branches):
            return 0
        without_arguments = branch_without_arguments(branches)
        lacks_arguments = self.scope.lacks_arguments and self.scope.arguments is None
        if without_arguments is not None and lacks_arguments:
            self.scope.defaults.add("@")
            return without_arguments
        is_guessed = has_launch or any(
            replaces_launch(name, node, self.scope, self._place) for name in names_set_in(node)
        )
        chosen = running_branch(branches, self.scope, is_guessed)
        is_check = chosen is not None and not has_launch and self._is_check(branches, chosen)
        return None if is_check else chosen

    @staticmethod
    def _is_check(branches: list[Branch], chosen: int) -> bool:
        """Return whether the branch with the index `chosen` ends the script by ``exit``, so that
        the condition is a check; False for the number of branches, with which none runs."""
        lines = [line for _, lines in branches[chosen : chosen + 1] for line in lines]
        return any(re.match(r"exit\b", source(line)) for line in lines)

    def _gives_default(self, branches: list[Branch]) -> bool:
        """Return whether the only one of the `branches` of an ``if`` gives a variable its default,
        and the variable is taken to need it."""
        name = variable_with_default(branches)
        return bool(name) and self.scope.needs_default(name, ":-")


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
    """Return the launch that all branches of an ``if`` have, and the index of its branch: of equal
    launches, the one that weighs most. All branches, an ``else`` among them, must start one program
    with the same words, and run the same other commands; prints, and a ``cd`` in a task, do not
    count. None for other branches. `read` returns the statements of some lines."""
    launches, commands = list[Launch](), set[tuple[str, ...]]()
    for _, lines in branches:
        statements = read([n for n in lines if not (n.type == "comment" or blocks.only_reports(n))])
        launches += [s.launch for s in statements if s.launch and not s.lost]
        texts = [s.text for s in statements if not (s.launch or (s.in_task and s.first == "cd"))]
        commands.add(tuple(texts))
    is_common = len(launches) == len(branches) and len(commands) == 1 and not branches[-1][0]
    if not is_common or len({launch.training_key for launch in launches}) > 1:
        return None
    return max(enumerate(launches), key=lambda pair: pair[1].weight)


def choose_arguments(
    node: Node, branches: list[Branch], read: ReadLines
) -> tuple[str, Launch] | None:
    """Return the text of an ``if`` or ``case``, `node`, in which each branch puts the arguments of
    its launch into the array `CHOSEN`, and the launch that has this array as its arguments: for
    ``if …; then srun a.py --x; else srun a.py; fi``. `read` returns the statements of some lines.

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
    """Return the code of a node with `edits`: (first byte, byte behind the last, new text), where
    the bytes are counted in the script."""
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
