"""The state of a `Reader`: the statements so far, the variables, and the place that is read now."""

from __future__ import annotations

import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from hpc_ddp.core.job.variables import is_of_hpc_ddp
from hpc_ddp.submission.job_script.bash import syntax
from hpc_ddp.submission.job_script.bash.blocks import exit_in_place_of, names_set_in
from hpc_ddp.submission.job_script.bash.counts import whole_number
from hpc_ddp.submission.job_script.bash.syntax import Node, source
from hpc_ddp.submission.job_script.bash.variables import Scope
from hpc_ddp.submission.job_script.bash.words import Part, Word, literal
from hpc_ddp.submission.job_script.bash.written_texts import write_texts
from hpc_ddp.submission.job_script.conversion import LOST, TAKEN, Mark
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.launchers.launch_reader import read_launch
from hpc_ddp.submission.job_script.statements.loaded_texts import forget_loaded_names, note_doubts
from hpc_ddp.submission.job_script.statements.open_commands import extends_launch
from hpc_ddp.submission.job_script.statements.rules import BLANK_VALUE
from hpc_ddp.submission.job_script.statements.statement import (
    KnownFunction,
    Place,
    Statement,
    names_set_by_calls,
)

OF_ARGUMENTS = "it uses the job script's own arguments"
_OF_SHELL = ("", "set", "shift", "getopts", "eval", "trap", "return", "exit")

_COMMANDS = ("command", "list", "pipeline", "redirected_statement", "negated_command", "subshell")

# An empty value, and behind a blank what looks like the value: no name, and no other assignment.
_BLANK_VALUE = re.compile(r"\b\w+=\s+(?!\w+=)(?![A-Za-z_]{1,15}(?:\s|$))[\w<\[\"'/]")


class ReaderState(ABC):
    """The statements that `Reader` has read so far, and the methods that add one.

    Attributes
    ----------
    scope
        the variables at the place that is read now
    other_marks
        (group, reason), by line, of lines that are no part of a statement: they only choose among
        others (``if``, ``fi``), or do not run
    node_variables, batch_variables
        the variables of loops over the nodes; those whose values the batch script puts into the
        text of a ``bash -c``
    batch_words
        words behind such a text, which the batch script expands
    notes
        (line, sentence) for the user
    called_definitions
        the definitions of functions that are read where they are called
    files
        the texts of files that commands have written (`written_texts`)
    open_commands
        the assignments, by name, of variables to which a condition or a loop adds words of a
        launch (`open_commands`)
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.statements: list[Statement] = []
        self.other_marks: dict[int, Mark] = {}
        self.node_variables: set[str] = set()
        self.batch_variables: set[str] = set()
        self.batch_words: set[str] = set()
        self.open_commands: dict[str, list[Statement]] = {}
        self.files: dict[str, str] = {}
        self.notes: list[tuple[int, str]] = []
        self._functions: dict[str, KnownFunction] = {}
        self.called_definitions: list[
            Statement
        ] = []  # definitions of functions that are read where called
        self._place = Place()
        self._exports_all = False  # by `set -a`
        self._move_count = 0  # of the assignments to PWD when `files` was changed
        self._shells: tuple[int, ...] = ()  # the numbers of the child shells that are being read
        self._shell_count = 0
        self._enclosing: tuple[Statement, ...] = ()  # the commands that are being read in parts

    @contextmanager
    def _child_shell(
        self, arguments: Sequence[Word] | None, arguments_are_set: bool
    ) -> Iterator[None]:
        """Within this context, read statements as those of a child shell, which gets a number. For
        its arguments see `Scope`. The shell's variables and functions end with the context, if no
        error leaves it. Only `has_unknown_names` stays: if the child shell may have set unknown
        variables, it is True for the outer scope, too, since the launch in the child shell uses
        them."""
        outer_scope = self.scope
        before = self._functions, self._exports_all, self._shells
        self.scope = outer_scope.child(arguments, arguments_are_set)
        self._functions = {**self._functions}
        self._shells, self._shell_count = (*self._shells, self._shell_count), self._shell_count + 1
        yield
        outer_scope.has_unknown_names |= self.scope.has_unknown_names
        self.scope, (self._functions, self._exports_all, self._shells) = outer_scope, before

    @contextmanager
    def _enclose(self, node: Node) -> Iterator[None]:
        """Within this context, read statements as parts of the command `node`: each gets it, as a
        statement of its own, as the last of its ``enclosing``."""
        text = source(node).strip()
        command = Statement(
            text, self._lines_of(node), in_task=self._place.in_task, shells=self._shells
        )
        command.call = self._place.call
        before, self._enclosing = self._enclosing, (*self._enclosing, command)
        yield
        self._enclosing = before
        command.text = exit_in_place_of(self._place.leave_commands, command.text)
        self._fill_in_arguments(command, node)
        command.text += " &" * _is_in_background(node)

    @contextmanager
    def _as_part(self, node: Node) -> Iterator[None]:
        """Within this context, read a node: its statements as parts of it (`_enclose`) if it is a
        command or a list of them, or if an ``&`` stands behind it; and in a child shell if it is
        ``( … )``, or a list with an ``&``, with a launch in it."""
        is_behind, is_list = _is_in_background(node), node.type == "list"
        is_shell = node.type == "subshell" or (is_behind and is_list)
        with ExitStack() as contexts:
            if is_behind or node.type in _COMMANDS:
                contexts.enter_context(self._enclose(node))
            if is_shell and self._has_launch(node):
                shell = self._child_shell(self.scope.arguments, self.scope.arguments_are_set)
                contexts.enter_context(shell)
            yield

    @contextmanager
    def _output_to(self, output: str) -> Iterator[None]:
        """Set `output` of the launches that are read within this context, unless they have one: the
        file or pipe of a block around them, '' for none."""
        before = [*self.statements]  # which keeps their ids
        earlier = set(map(id, before))
        yield
        for statement in self.statements:
            if statement.launch and id(statement) not in earlier:
                statement.output = statement.output or output

    def _lines_of(self, node: Node) -> tuple[int, int]:
        """Return the first and the last line of a node in the script, from 1. For a node of a text
        whose lines are not the script's, as of an ``eval``, they are those of the statement around
        that text."""
        shift, (first, last) = self._place.shift or 0, syntax.lines_of(node)
        if self._place.lines and self._place.shift is None:
            return self._place.lines
        return first + shift, last + shift

    def _mark_lines(self, node: Node, reason: str, group: str = TAKEN) -> None:
        """Put (`group`, `reason`) into `other_marks` for each line of a node that has no entry
        there."""
        for line in range(self._lines_of(node)[0], self._lines_of(node)[1] + 1):
            self.other_marks.setdefault(line, (group, reason))

    def _add(self, node: Node, text: str = "", **attributes: Any) -> Statement:
        """Append a statement with a `text`, by default the node's own, and the `attributes` of
        `Statement`, and return it. The scope forgets what a command or block may change
        (`_forget_changes`); an assignment, a launch or a definition changes nothing here. A
        statement that uses arguments which the job does not have is lost."""
        text = text or source(node).strip()
        statement = Statement(
            text,
            self._lines_of(node),
            in_task=self._place.in_task,
            shells=self._shells,
            **attributes,
        )
        statement.call, statement.enclosing = self._place.call, self._enclosing
        if not (statement.name or statement.launch or statement.defines):
            self._follow_writes(statement, node)
            self._forget_changes(statement, node)
        if not (statement.launch or statement.defines):  # no function or loop is there in the job
            statement.text = exit_in_place_of(self._place.leave_commands, statement.text)
            self._fill_in_arguments(statement, node)
            statement.text += " &" * _is_in_background(node)
        self.statements.append(statement)
        return statement

    def _refuse_blank_value(self, node: Node) -> bool:
        """Return whether an ``export`` or the like has its value behind a blank, as ``export KEY=
        abc``, where bash does not take it. If so, append it as a lost statement: the value may be a
        secret."""
        has_blank = bool(_BLANK_VALUE.search(source(node)))
        if has_blank:
            self._add(node, lost=BLANK_VALUE)
        return has_blank

    def _variable_assignment(self, node: Node, exported: bool = False) -> None:
        """Append an assignment, `exported` or not, and set its variable in the scope. Behind ``set
        -a`` it is exported in any case."""
        name, exported = self.scope.assign(node), exported or self._exports_all
        self._add(node, name=name, assigned=self.scope.value_of(name), exported=exported)

    def _read_shift(self, words: list[Word], node: Node) -> None:
        """Drop known arguments by a ``shift`` of `words`, `node`. Append it as a statement only
        where set-up lines give the job the script's arguments."""
        count, arguments = whole_number(words[-1], self.scope), self.scope.arguments or ()
        self.scope.arguments = arguments[1 if count is None else count :]  # None: shift alone
        if self.scope.arguments_are_set:
            self._add(node, words=words)
        self._mark_lines(node, "the arguments of a function")

    def _function_definition(self, node: Node) -> None:
        """Append the definition of a function, and note it for calls (`_read_call`)."""
        name = source(node.child_by_field_name("name"))
        sets = names_set_in(node) | names_set_by_calls(node, self._functions)
        statement = self._add(node, defines=name, sets=sets)
        self._functions[name] = KnownFunction(node, statement, self._place)

    @abstractmethod
    def _read_node(self, node: Node) -> None:
        """Append the statements of a node."""

    @abstractmethod
    def _has_launch(
        self, part: Node | str, step: str = "", arguments: Sequence[Word] | None = None
    ) -> bool:
        """Return whether a part of the script, or a text in it, may start the training."""

    def _make_launch(
        self, node: Node, words: list[Word], assignments: list[Node], around: Node
    ) -> Launch:
        """Return the launch that the `words` of a command make, with weight 0 if they are none, and
        with the variables of the `assignments` before the words. It is marked where the command
        reads input, by `around`, or uses a variable that was set again."""
        at = self._lines_of(node)[0]
        launch = read_launch(words, self.scope, self._place.step, self._place.in_loop)
        self._forget_relative_files()
        launch.line, launch.files = at, {**self.files}
        for child in assignments:
            assigned = self.scope.word(child.child_by_field_name("value"))
            name = source(child.child_by_field_name("name"))
            launch.env.setdefault(name, replace(assigned, line=at))
        if syntax.reads_input(around, node):
            launch.mark(at, LOST, "its standard input: the program has none")
        launch.mark_stale([*launch.words, launch.inner or literal("")], self.scope, at)
        note_doubts(launch, node, self.scope, at)
        return launch

    def _follow_writes(self, statement: Statement, node: Node) -> None:
        """Set in `files` what a command or block, `node`, writes into files, or the function that
        it calls by its first word."""
        self._forget_relative_files()
        scope = self.scope
        if statement.first in self._functions:
            node = syntax.body_of(self._functions[statement.first].node)
            scope = replace(scope, arguments=statement.words[1:])
        write_texts(node, scope, self.files)

    def _forget_relative_files(self) -> None:
        """Remove relative paths from `files` if the script has moved, since the last call, to a
        folder that is not known: they were seen from another one."""
        count = self.scope.versions["PWD"]
        if count != self._move_count and self.scope.values.get("PWD") is None:
            self.files = {path: text for path, text in self.files.items() if path[0] in "/$~"}
        self._move_count = count

    def _forget_changes(self, statement: Statement, node: Node) -> None:
        """Set `sets` of a statement to the variables that it, a command or block `node`, may set,
        also by calls and by files that it sources; and have the scope forget their values. A
        variable that holds a launch, and only gets more words, is left open (`Scope.leave_open`):
        its assignments so far go to `open_commands`."""
        statement.sets = names_set_in(node)
        names = statement.sets | names_set_by_calls(node, self._functions)
        growing = {n for n in statement.sets if extends_launch(n, node, self.scope, self._place)}
        self.scope.forget_changes(statement.text, statement.first, names, growing)
        line = statement.lines[0]
        statement.sets |= forget_loaded_names(node, line, self.scope, self._functions)
        for name in growing - self.open_commands.keys():
            before = [s for s in self.statements if s.name == name and not s.in_task]
            self.open_commands[name] = before

    def _fill_in_arguments(self, statement: Statement, node: Node) -> None:
        """Change a statement that uses the arguments of the script or of a function, unless the job
        has them: an assignment, or a simple command (`node`), gets their values into its text if
        they are known; any other is lost."""
        are_none = self.scope.lacks_arguments and self.scope.arguments is None
        uses_arguments = syntax.uses_arguments(statement.text, are_none)
        if self.scope.arguments_are_set or not uses_arguments:
            return
        is_command = node.type == "command" and statement.text == source(node).strip()
        if self.scope.arguments is None:
            statement.lost = statement.lost or OF_ARGUMENTS
        elif statement.name and isinstance(statement.assigned, Word):
            statement.text = f"{statement.name}={statement.assigned.as_bash()}"
        elif is_command and statement.first not in _OF_SHELL and _has_words_alone(node):
            words = statement.words
            texts = (shlex.quote(w.script) if w.is_static else w.as_bash() for w in words)
            statement.text = " ".join(texts)
        else:
            statement.lost = statement.lost or "it uses the arguments of its function"

    def _name_outer_code(self, word: Word, node: Node) -> Word:
        """Return the text of a ``bash -c``, `word`, with a variable ``VALUE_1``, ``VALUE_2`` … in
        place of each part that only the batch script can expand: code that is no plain name, and
        variables of hpc-ddp's that the script sets. Append the assignments of these variables to
        the statements of the batch script, with the first line of `node`."""
        parts = list(word.parts)
        for index, part in enumerate(parts):
            is_ours = is_of_hpc_ddp(part.name) and part.name in self.scope.values
            if part.is_code and (not part.name or is_ours):
                count = sum(name.startswith("VALUE_") for name in self.scope.values)
                name = f"VALUE_{count + 1}"
                content = Word((part,)) if part.text.startswith("$((") else None  # arithmetic
                self.scope.set(name, self.scope.values[part.name] if is_ours else content)
                text, place = f'{name}="{part.text}"', self._place
                self._place = replace(place, step="", in_image=False)  # it is the batch script's
                statement = self._add(node, text, name=name, of_script=False)
                statement.lines = (statement.lines[0],) * 2
                parts[index], self._place = Part(f"${{{name}}}", is_code=True), place
        return Word(tuple(parts))


def _is_in_background(node: Node) -> bool:
    """Return whether an ``&`` stands behind a node."""
    return node.next_sibling is not None and node.next_sibling.type == "&"


def _has_words_alone(node: Node) -> bool:
    """Return whether a simple command has no assignments or redirections among its words."""
    kinds = {child.type for child in node.named_children}
    return not any(kind.endswith(("_assignment", "_redirect")) for kind in kinds)
