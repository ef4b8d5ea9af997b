"""The statements of a job script, in the order in which they run, and the launches among them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hpc_ddp.core.job.variables import is_of_hpc_ddp
from hpc_ddp.submission.job_script.bash import loops, syntax
from hpc_ddp.submission.job_script.bash.conditions import branches_of, idle_lines, running_branch
from hpc_ddp.submission.job_script.bash.scope import Scope
from hpc_ddp.submission.job_script.bash.syntax import Node, commands_of, names_set_in, source
from hpc_ddp.submission.job_script.bash.words import Part, Word, literal
from hpc_ddp.submission.job_script.conversion import LOST, OURS, TAKEN, VERDICT, Mark
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.launchers.read import read_launch
from hpc_ddp.submission.job_script.statements.open_commands import extends_launch
from hpc_ddp.submission.job_script.statements.statement import (
    Place,
    Statement,
    inner_text,
    names_set_by_calls,
)

_CHOOSES = "a condition that only the job knows chooses a launch"
OF_ARGUMENTS = "it uses the job script's own arguments"


class Reader:
    """Reads a script into `statements`; `scope` then has its variables as they are at the end.

    `resolved` has (group, reason) of lines that are no part of a statement: they only choose among
    others (``if``, ``fi``), or do not run. `of_nodes` are variables of loops over the nodes,
    `of_batch` variables whose values the batch script puts into the text of a ``bash -c``. A method
    that is named after a type of node, as ``_if_statement``, reads such a node.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.statements: list[Statement] = []
        self.resolved: dict[int, Mark] = {}
        self.of_nodes: set[str] = set()
        self.of_batch: set[str] = set()
        self._functions: dict[str, tuple[Node, Statement, Place]] = {}
        self._place, self._exports_all = Place(), False
        self.child_shells: list[Statement] = []  # each as one statement, by its number
        self.open_commands: dict[str, list[Statement]] = {}  # assignments (see `extends_launch`)
        self._shells: tuple[int, ...] = ()  # the child shells that are being read

    def read(self, text: str) -> None:
        """Append the statements of a script's text. Raises as `parse`."""
        self._walk(syntax.parse(text))

    def _walk(self, node: Node) -> None:
        """Append the statements of a node: of a block that has a launch each line's, of another
        node what the method for its type makes of it. A node without such a method is one
        statement, which is lost if a launch is in it."""
        kind = node.type
        is_block = kind in ("compound_statement", "subshell") and self._has_launch(node)
        if is_block and kind == "subshell":
            with self._child_shell(node, self.scope.arguments, self.scope.arguments_are_set):
                self._walk_children(node)
        elif is_block or kind in ("program", "do_group"):
            self._walk_children(node)
        elif syntax.is_comment(node):
            self._resolve(node, "a comment", OURS)
        elif handler := getattr(self, f"_{kind}", None):
            handler(node)
        elif kind == "ERROR":
            self._add(node, lost="bash can't read it: is a quote missing?")
        elif node.is_named and kind != "comment":
            reason = "only the job knows which launch it chooses: a job for each"
            self._add(node, lost=reason if self._has_launch(node) else "")

    def _walk_children(self, node: Node) -> None:
        """Append the statements of a node's children, one by one; an ``&`` behind a child goes to
        the text of its last statement."""
        for child in node.children:
            if child.is_named:
                self._walk(child)
            elif child.type == "&" and self.statements:
                self.statements[-1].text += " &"
        if node.type != "program":
            self._resolve(node, "its lines were taken one by one")

    _variable_assignments = _walk_children

    @contextmanager
    def _child_shell(
        self, node: Node, arguments: Sequence[Word] | None, arguments_are_set: bool
    ) -> Iterator[None]:
        """A context for the statements of a child shell, `node`; then the scope is as before."""
        text = source(node).strip()
        shell = Statement(text, self._at(node), in_task=self._place.in_task, shells=self._shells)
        self.child_shells.append(shell)
        before = self.scope, self._functions, self._exports_all, self._shells
        self.scope = self.scope.child(arguments, arguments_are_set)
        self._functions = {**self._functions}
        self._shells = (*self._shells, len(self.child_shells) - 1)
        yield
        before[0].is_open |= self.scope.is_open  # for the launch's own variables
        self.scope, self._functions, self._exports_all, self._shells = before

    def _at(self, node: Node) -> tuple[int, int]:
        """Return the first and the last line of a node in the script, from 1."""
        shift, (first, last) = self._place.shift or 0, syntax.lines_of(node)
        if self._place.lines and self._place.shift is None:
            return self._place.lines
        return first + shift, last + shift

    def _add(self, node: Node, text: str = "", **known_facts: Any) -> Statement:
        """Append a statement of `text`, else the node's text, with the attributes `known_facts`,
        and return it. The scope forgets the variables, arguments and folder that a command may
        change. A statement that uses arguments which are not known is lost."""
        text = text or source(node).strip()
        statement = Statement(
            text, self._at(node), in_task=self._place.in_task, shells=self._shells, **known_facts
        )
        if not (statement.name or statement.launch or statement.defines):
            statement.sets = names_set_in(node)
            names = statement.sets | names_set_by_calls(node, self._functions)
            longer = {n for n in statement.sets if extends_launch(n, node, self.scope, self._place)}
            self.scope.forget_changes(text, statement.first, names, longer)
            for name in longer - self.open_commands.keys():
                before = [s for s in self.statements if s.name == name and not s.in_task]
                self.open_commands[name] = before
        is_plain = not (statement.launch or statement.defines or self.scope.arguments_are_set)
        if is_plain and syntax.uses_arguments(text, are_none=self.scope.lacks_arguments):
            if self.scope.arguments is None:
                statement.lost = statement.lost or OF_ARGUMENTS
            elif statement.name and isinstance(statement.assigned, Word):
                statement.text = f"{statement.name}={statement.assigned.as_bash()}"
            else:
                statement.lost = statement.lost or "it uses the arguments of its function"
        self.statements.append(statement)
        return statement

    def _variable_assignment(self, node: Node, exported: bool = False) -> None:
        name, exported = self.scope.assign(node), exported or self._exports_all
        self._add(node, name=name, assigned=self.scope.value_of(name), exported=exported)

    def _declaration_command(self, node: Node) -> None:
        """Append the statements of ``export`` or ``declare``: one for each variable; a single one
        for an array, for functions, or without names."""
        text, kinds = source(node), {child.type for child in node.named_children}
        exported = bool(re.match(r"export\b|\w+\s+-\w*x", text)) or self._exports_all
        start = re.match(r"\w+\s+(-\w+\s+)*(?=\w+=)", text)
        if re.match(r"\w+\s+(-\w+\s+)*-\w*[Afilun]", text) or "variable_" not in str(kinds):
            self._add(node)
        elif "concatenation" in kinds and start:  # "a"b=$c"d" is not read as one word there
            before, self._exports_all = self._exports_all, exported
            self.read("\n" * node.start_point[0] + text[start.end() :])
            self._exports_all = before
        else:
            for child in node.named_children:
                if child.type == "variable_assignment":
                    self._variable_assignment(child, exported)
                elif child.type == "variable_name" and not exported:
                    self._resolve(child, "it sets nothing", OURS)
                elif child.type == "variable_name":
                    name = source(child)
                    self._add(child, name=name, assigned=self.scope.values.get(name), exported=True)

    def _command(self, node: Node, output: str = "", around: Node | None = None) -> None:
        """Append the statement of a simple command, with its launch if it is one. A call of a
        function that launches, an ``eval`` or a ``bash -c`` with a launch give way to their own
        statements. ``cd``, ``shift`` and ``set -a`` also change what is known. `around` is the
        pipeline or redirection around the command, if any, `output` the file that it writes to."""
        before = [c for c in node.named_children if c.type == "variable_assignment"]
        kinds = ("variable_assignment", "comment", "herestring_redirect")
        nodes = [child for child in node.named_children if child.type not in kinds]
        at = self._at(node)[0]
        words = self.scope.words(nodes, at if self._place.lines else None)
        first = words[0].text if words else ""
        if first in self._functions and self._has_launch(self._functions[first][0], "", words[1:]):
            self._call(first, words[1:], node)
            return
        code = " ".join(map(inner_text, words[1:])) if first == "eval" else ""
        if code and self._has_launch(code):
            count = len(self.statements)
            self._read_text(code, node, self._place.step)
            for launch in (s.launch for s in self.statements[count:] if s.launch):
                launch.mark_evaluated(words, self.scope, at)
            return
        if first == "shift" and self.scope.arguments is not None:
            self.scope.shift_arguments(words[-1])
            if self.scope.arguments_are_set:  # set-up lines give the job the script's arguments
                self._add(node, words=words)
            self._resolve(node, "the arguments of a function")
            return
        if first == "cd":
            self.scope.change_folder(words)
        self._exports_all |= first == "set" and bool(re.search(r"\s-\w*a|allexport", source(node)))
        launch = read_launch(words, self.scope, self._place.step, self._place.in_loop)
        launch.line = at
        for child in before:
            assigned = self.scope.word(child.child_by_field_name("value"))
            name = source(child.child_by_field_name("name"))
            launch.env.setdefault(name, replace(assigned, line=at))
        if syntax.reads_input(around or node, node):
            launch.mark(at, LOST, "its standard input: the program has none")
        launch.mark_stale([*launch.words, launch.inner or literal("")], self.scope, at)
        if launch.inner is not None and self._has_launch(inner_text(launch.inner), launch.step):
            self._resolve(around or node, "the launch")
            self._read_inner(launch, node, output)
        elif not launch.weight or launch.inner is not None:
            is_of_arguments = first in ("shift", "getopts") and not self.scope.arguments_are_set
            lost = OF_ARGUMENTS if is_of_arguments or not (words or before) else ""
            self._add(around or node, words=words, output=output, lost=lost)
        else:
            self._add(around or node, words=words, launch=launch, output=output)

    def _read_inner(self, outer: Launch, node: Node, output: str) -> None:
        """Append the statements in the text of the ``bash -c`` that the launch `outer`, of `node`,
        is, read in a child shell. Launches among them take over `outer`'s options, the text of
        `node`, and `output`, the file written to ('' for none), unless they have one. `of_batch`
        gets the variables that the batch script expands in the text. Raises as `parse`."""
        assert outer.inner is not None
        word, before = self._name_outer_code(outer.inner, node), [*self.statements]
        self.of_batch |= {*word.names}
        step = outer.step or self._place.step
        place, in_image = self._place, bool(outer.settings.keys() & {"image", "container"})
        self._place = replace(place, in_image=place.in_image or in_image)
        with self._child_shell(node, outer.args, False):
            self._read_text(inner_text(word), node, step, outer.inner.line)
        self._place = place
        earlier = set(map(id, before))
        for statement in (s for s in self.statements if id(s) not in earlier):
            statement.outer = outer if statement.in_task else None
            if statement.launch is not None:
                statement.launch.take_from(outer)
                statement.output, statement.text = statement.output or output, source(node)

    def _name_outer_code(self, word: Word, node: Node) -> Word:
        """Append the assignment of a variable ``VALUE_n`` for each part of a text of ``bash -c``
        that only the batch script can expand; return the text with these variables."""
        parts = list(word.parts)
        for index, part in enumerate(parts):
            is_ours = is_of_hpc_ddp(part.name) and part.name in self.scope.values
            if part.is_code and (not part.name or is_ours):
                count = sum(name.startswith("VALUE_") for name in self.scope.values)
                name = f"VALUE_{count + 1}"
                content = Word((part,)) if part.text.startswith("$((") else None
                self.scope.set(name, self.scope.values[part.name] if is_ours else content)
                text, place = f'{name}="{part.text}"', self._place
                self._place = replace(place, step="", in_image=False)
                statement = self._add(node, text, name=name, of_script=False)
                statement.lines = (statement.lines[0],) * 2
                parts[index], self._place = Part(f"${{{name}}}", True), place
        return Word(tuple(parts))

    def _read_text(self, text: str, node: Node, step: str, line: int = 0) -> None:
        """Append the statements of a script that is a text in `node`, and that tasks of `step` run,
        or the batch script if it is ''. Each has all lines of `node`, unless the text's own are
        known (`syntax.shift_of`). Raises as `parse`."""
        before = self._place
        shift = syntax.shift_of(node, text, line) if before.lines is None else None
        self._place = replace(before, lines=self._at(node), shift=shift, step=step, in_text=True)
        self.read(text)
        self._place = before

    def _has_launch(
        self, part: Node | str, step: str = "", arguments: Sequence[Word] | None = None
    ) -> bool:
        """Return whether a part of the script, or the text of a part, may start the training. It is
        read apart, in tasks of `step` and with `arguments` ('', None: as at the place read now), so
        that no statement is added here. Plain Python counts in a text or a task, else by
        `Scope.counts_python`."""
        arguments = self.scope.arguments if arguments is None else arguments
        probe = Reader(self.scope.child(arguments, self.scope.arguments_are_set))
        probe._place = self._place.search_place(step)
        probe._functions = {n: f for n, f in self._functions.items() if f[0] is not part}
        node = syntax.parse(part) if isinstance(part, str) else part
        for command in commands_of(syntax.body_of(node)):
            probe._command(command)
        is_apart = isinstance(part, str) or probe._place.step or probe._place.in_text
        least = 0 if is_apart or self.scope.counts_python else 1
        return any(s.launch is not None and s.launch.weight > least for s in probe.statements)

    def _list(self, node: Node) -> None:
        """Append a pipeline, a list or a command with redirections: as one statement, or, where a
        launch is in it, as those of its parts."""
        commands = [child for child in commands_of(node) if self._has_launch(child)]
        first, last = node.named_children[0], node.named_children[-1]
        if commands and node.type == "list":
            is_test = re.match(r"(\[|test\b|!)", source(first)) or node.children[1].type == "||"
            if is_test and not self._has_launch(first):
                self._add(node, lost=_CHOOSES)
                return
            self._walk(first)
            self.statements[-1].around = source(node)
            if not self._has_launch(first):
                self._walk(last)
            elif syntax.only_reports(last):
                self._resolve(last, VERDICT, OURS)
            else:
                reason = f"`{source(last):.30}` asks how the launch ended: see hpc-ddp's verdict"
                self._add(last, lost=reason)
        elif (
            commands
            and syntax.redirected_command(first).type != "command"
            and self._has_launch(first)
        ):
            self._walk(first)  # a block
        elif commands:
            self._command(commands[0], syntax.target_of(node), node)
        elif first.type == "command" and re.match(r"cd\s[^;&]*\|\|", source(node)):
            self._command(first, "", node)
        else:
            self._add(node)

    _pipeline = _redirected_statement = _list

    def _call(self, name: str, words: list[Word], node: Node) -> None:
        """Append the statements of a function's body where it is called with `words`, and remove
        the statement of its definition."""
        definition, statement, place = self._functions.pop(name)  # it may call itself
        before = self.scope.arguments, self.scope.arguments_are_set, self._place
        self._resolve(node, f"calls {name}")
        self._place = replace(self._place, lines=place.lines, shift=place.shift)
        self._resolve(definition, f"the function {name}, read where it is called")
        exports = rf"(export|declare)\s+-\w*f\s+{name}\s*"
        removed = [s for s in self.statements if s is statement or re.fullmatch(exports, s.text)]
        for one in removed:
            self.resolved.setdefault(one.lines[0], (OURS, f"{name} is read where it is called"))
        self.statements = [s for s in self.statements if all(s is not one for one in removed)]
        self.scope.arguments, self.scope.arguments_are_set = words, False
        self._walk(definition.child_by_field_name("body"))
        self.scope.arguments, self.scope.arguments_are_set, self._place = before
        self._functions[name] = definition, statement, place

    def _resolve(self, node: Node, text: str, group: str = TAKEN) -> None:
        """Note group and reason, in `resolved`, for those lines of a node that have none there."""
        for line in range(self._at(node)[0], self._at(node)[1] + 1):
            self.resolved.setdefault(line, (group, text))

    def _function_definition(self, node: Node) -> None:
        name = source(node.child_by_field_name("name"))
        sets = names_set_in(node) | names_set_by_calls(node, self._functions)
        self._functions[name] = node, self._add(node, defines=name, sets=sets), self._place

    def _if_statement(self, node: Node) -> None:
        """If the condition has the launch, and the branches only print or exit, append the
        condition's statements. Else, if the job script tells which branch runs, maybe none, append
        the statements of that one. Else append the whole as one statement, which is lost if a
        launch is in it."""
        has_launch, branches = self._has_launch(node), list(branches_of(node))
        first, *bodies = node.named_children
        if has_launch and all(map(syntax.only_reports, bodies)) and self._has_launch(first):
            self._resolve(node, VERDICT, OURS)
            self._walk(first.named_children[-1] if first.type == "negated_command" else first)
            self.statements[-1].around = source(node)
            return
        chosen = running_branch(branches, self.scope, has_launch)
        if chosen is None:
            self._add(node, lost=_CHOOSES if has_launch else "")
            return
        for child, reason in idle_lines(branches, chosen):
            self._resolve(child, reason, OURS)
        self._resolve(node, "its condition is known")
        for _, lines in branches[chosen : chosen + 1]:  # none where each condition is false
            for child in lines:
                self._walk(child)

    def _for_statement(self, node: Node) -> None:
        """Append a loop of any kind: without a launch as one statement; with one over one word, or
        over the nodes (`of_nodes` then gets its variables, but for a counter), as the statements of
        its body; any other as one that is lost. One over arguments that are not there goes."""
        text, has_launch = source(node), self._has_launch(node)
        if (
            self.scope.arguments is None
            and self.scope.lacks_arguments
            and loops.is_for_arguments(node)
        ):
            self.scope.defaults.add("@")
            self._resolve(node, "the script's arguments: there are none", OURS)
            return
        words = self.scope.words(node.children_by_field_name("value")) if has_launch else []
        if len(words) == 1 and words[0].is_static:
            name = source(node.child_by_field_name("variable"))
            self.scope.set(name, words[0])
            self._add(
                node.children[0], f"{name}={words[0].as_bash()}", name=name, assigned=words[0]
            )
            self._resolve(node, "a loop over one word")
            self._walk(node.child_by_field_name("body"))
            return
        if has_launch and (command := loops.retried_command(node)):
            self._resolve(node, "hpc-ddp starts it again after a failure", OURS)
            self._walk(command)
            return
        if not has_launch or not loops.starts_on_nodes(text):
            reason = "a loop of launches: hpc-ddp sweep, or a job for each"
            self._add(node, lost=reason if has_launch else "")
            return
        for name in names_set_in(node):
            self.scope.set(name, None)
            self.of_nodes.add(name)
        if name := loops.counter_of(text):  # it is the node's number, which each task knows
            self.scope.set(name, Word((Part("$SLURM_NODEID", True),)))
            self.of_nodes.discard(name)
        self._resolve(node, "a loop over the nodes: hpc-ddp starts all of them")
        before, self._place = self._place, replace(self._place, in_loop=True)
        self._walk(node.child_by_field_name("body"))
        self._place = before

    _c_style_for_statement = _while_statement = _for_statement
