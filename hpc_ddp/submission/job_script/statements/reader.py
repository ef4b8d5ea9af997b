"""The statements of a job script, in the order in which they run, and the launches among them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from hpc_ddp.submission.job_script.bash import blocks, loops, syntax
from hpc_ddp.submission.job_script.bash.blocks import names_set_in
from hpc_ddp.submission.job_script.bash.comments import is_comment
from hpc_ddp.submission.job_script.bash.syntax import Node, commands_of, source
from hpc_ddp.submission.job_script.bash.values import doubts_in
from hpc_ddp.submission.job_script.bash.words import Part, Word
from hpc_ddp.submission.job_script.conversion import OURS
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.statements.branch_reader import CHOOSES, BranchReader
from hpc_ddp.submission.job_script.statements.loaded_texts import sentences_on
from hpc_ddp.submission.job_script.statements.reader_state import OF_ARGUMENTS
from hpc_ddp.submission.job_script.statements.requeues_and_deletions import does_more
from hpc_ddp.submission.job_script.statements.rules import DECIDED, ENDED, first_reason
from hpc_ddp.submission.job_script.statements.statement import (
    Statement,
    bash_c_text,
    changes_folder,
)

_ENDS = re.compile(r"exit\b[^;&|\n]*$|exec\s+[^-<>&\d\s][^;&|\n]*$")  # exec of a program
_EXPORTS_ALL = re.compile(r"(?<!\s--)\s([-+])(?:\w*a\w*|\w*o\s+allexport)(?=\s|$)")
_PRINTS_ONLY = r"(echo|printf|date|hostname|nvidia-smi|pwd|ls|export|unset|set|module list)\b"


class Reader(BranchReader):
    """Reads a script into `statements`; `scope` then has its variables as they are at the end.

    A method that is named after a type of node in tree-sitter-bash, as ``_if_statement``, appends
    the statements of such a node.
    """

    def read(self, text: str) -> None:
        """Append the statements of a script's text. Raise as `syntax.parse`."""
        self._read_node(syntax.parse(text))

    def _read_node(self, node: Node) -> None:
        """Append the statements of a node: those of its lines for ``{ … }`` with a launch, and for
        ``( … )`` with one, which is a child shell; else those of the method for its type. A node
        without such a method is one statement, which is lost if a launch is in it."""
        kind = node.type
        is_block = kind in ("compound_statement", "subshell") and self._has_launch(node)
        with self._as_part(node):
            if is_block or kind in ("program", "do_group"):
                self._read_children(node)
            elif is_comment(node):
                self._mark_lines(node, "a comment", OURS)
            elif handler := getattr(self, f"_{kind}", None):
                handler(node)
            elif kind == "ERROR":
                self._add(node, lost="hpc-ddp's parser can't read it: setup, if needed")
            elif node.is_named and kind != "comment":
                reason = "only the job knows which launch it chooses: a job for each"
                self._add(node, lost=reason if self._has_launch(node) else "")

    def _read_children(self, node: Node) -> None:
        """Append the statements of a node's children, one by one. Behind the end of a program
        nothing is read."""
        end = 0
        for child in node.children:
            if end and child.is_named and not is_comment(child):
                self._mark_lines(child, f"never reached: line {end} ends the script", OURS)
            elif child.is_named:
                self._read_node(child)
                if node.type == "program" and _ENDS.match(source(child)):
                    end = self._lines_of(child)[0]
        if node.type != "program":
            self._mark_lines(node, "its lines were taken one by one")

    _variable_assignments = _read_children  # several assignments in one line

    def _declaration_command(self, node: Node) -> None:
        """Append the statements of ``export``, ``declare`` and the like: an assignment for each
        variable, also without a value if it is exported; one statement for an array, for functions
        (``-A``, ``-f`` …), or without names."""
        text, kinds = source(node), {child.type for child in node.named_children}
        exported = bool(re.match(r"export\b|\w+\s+-\w*x", text)) or self._exports_all
        start = re.match(r"\w+\s+(-\w+\s+)*(?=\w+=)", text)  # all before the first assignment
        if self._refuse_blank_value(node):
            return
        if re.match(r"\w+\s+(-\w+\s+)*-\w*[Afilun]", text) or "variable_" not in str(kinds):
            self._add(node)
        elif "concatenation" in kinds and start:  # tree-sitter reads "a"b=$c"d" as two words here
            before, self._exports_all = self._exports_all, exported
            self.read("\n" * node.start_point[0] + text[start.end() :])  # in the same line
            self._exports_all = before
        else:
            for child in node.named_children:
                if child.type == "variable_assignment":
                    self._variable_assignment(child, exported)
                elif child.type == "variable_name" and not exported:
                    self._mark_lines(child, "it sets nothing", OURS)
                elif child.type == "variable_name":
                    name = source(child)
                    self._add(child, name=name, assigned=self.scope.values.get(name), exported=True)

    def _command(self, node: Node, output: str = "", around: Node | None = None) -> None:
        """Append the statement of a simple command, with its launch if it is one. A function,
        ``eval`` or ``bash -c`` with a launch in it is replaced by the statements of its body or
        text. ``cd``, ``shift`` and ``set`` change what is known of the statements behind them.

        `around` is the pipeline or redirection around the command, None without one; `output` is
        the file or pipe that the command writes to, '' without one.
        """
        assignments = [c for c in node.named_children if c.type == "variable_assignment"]
        kinds = ("variable_assignment", "comment", "herestring_redirect")
        nodes = [child for child in node.named_children if child.type not in kinds]
        is_inner = self._place.lines is not None  # the nodes' lines are not the script's
        words = [
            word for child in nodes
            for word in self.scope.words([child], self._lines_of(child)[0] if is_inner else None)
        ]  # fmt: skip
        if around is None and self._enclosing:  # by this command itself
            self._enclosing[-1].words = words
        first = words[0].text if words else ""
        function = self._functions.get(first)
        if function and self._has_launch(function.node, "", words[1:]):
            with self._output_to(output):
                self._read_call(first, words[1:], node)
            return
        code = " ".join(map(bash_c_text, words[1:])) if first == "eval" else ""
        is_printed = re.match(r"\s*[\"']?(\$\(|`)", code)  # what another command prints
        if code and not is_printed and self._has_launch(code):
            with self._output_to(output):
                self._read_eval(code, words, node)
            return
        if first == "shift" and self.scope.arguments is not None:
            self._read_shift(words, node)
            return
        if first == "cd":
            self.scope.change_folder(words)
        if first == "set" and (switch := _EXPORTS_ALL.search(source(node))):
            self._exports_all = switch[1] == "-"
        # A function of no launch is none, whatever its name.
        launch = self._make_launch(node, [] if function else words, assignments, around or node)
        if launch.inner and self._has_launch(bash_c_text(launch.inner), launch.step, launch.args):
            self._mark_lines(around or node, "the launch")
            self._read_inner(launch, node, output)
        elif not launch.weight or launch.inner is not None:
            is_of_arguments = first in ("shift", "getopts") and not self.scope.arguments_are_set
            lost = OF_ARGUMENTS if is_of_arguments or not (words or assignments) else ""
            self._add(around or node, words=words, output=output, lost=lost)
            if function:
                self._follow_folder(first, words[1:])
        else:
            self._add(around or node, words=words, launch=launch, output=output)

    def _follow_folder(self, name: str, arguments: list[Word]) -> None:
        """Set PWD to the folder in which a call of the function `name` leaves the script."""
        if changes_folder(name, self._functions):
            probe = Reader(self.scope.child(arguments, False))
            probe._place = self._place
            probe._functions = {n: f for n, f in self._functions.items() if n != name}
            probe._read_children(syntax.body_of(self._functions[name].node))
            self.scope.set("PWD", probe.scope.values.get("PWD"))

    def _read_eval(self, code: str, words: list[Word], node: Node) -> None:
        """Append the statements in `code`, the text of an ``eval`` of `words`, `node`. Its launches
        get `is_evaluated`, and a note on each doubtful value in the words."""
        count = len(self.statements)
        self._read_text(code, node, self._place.step)
        for launch in (s.launch for s in self.statements[count:] if s.launch):
            launch.mark_evaluated(words, self.scope, self._lines_of(node)[0])
            for text in sentences_on({doubt for word in words for doubt in doubts_in(word)}):
                launch.mark(self._lines_of(node)[0], "", text)

    def _read_inner(self, outer: Launch, node: Node, output: str) -> None:
        """Append the statements in the text of a ``bash -c``, read in a child shell: `outer` is its
        launch, `node` its command. Each of them gets what the command says by `_give_to_inner`,
        which has the same `output`. Note the variables that the batch script expands in the text,
        and its arguments. Raise as `syntax.parse`."""
        assert outer.inner is not None
        word = self._name_outer_code(outer.inner, node)  # which appends statements, too
        earlier = set(map(id, self.statements))  # equal statements are no same ones
        self.batch_variables |= {*word.names}
        self.batch_words |= {argument.text for argument in outer.args}
        step = outer.step or self._place.step
        place, in_image = self._place, bool(outer.settings.keys() & {"image", "container"})
        self._place = replace(place, in_image=place.in_image or in_image)
        with self._child_shell(outer.args, False):
            self.scope.set("0", outer.inner_name)
            self._read_text(bash_c_text(word), node, step, outer.inner.line)
        self._place = place
        for statement in (s for s in self.statements if id(s) not in earlier):
            self._give_to_inner(statement, outer, node, output)

    @staticmethod
    def _give_to_inner(statement: Statement, outer: Launch, node: Node, output: str) -> None:
        """Give a statement in the text of a ``bash -c`` what its command, `node`, says: `outer`,
        the command's launch, if each task runs the statement. If it is a launch, it takes over the
        options of `outer`, the text of `node`, and the file `output` unless it writes to one."""
        statement.outer = outer if statement.in_task else None
        if statement.launch is not None:
            statement.launch.inherit_from(outer)
            statement.output = statement.output or output
            statement.text = source(node)

    def _read_text(self, text: str, node: Node, step: str, line: int = 0) -> None:
        """Append the statements of `text`, a script that is a word of the command `node`, from
        `line` on. Tasks of `step` run it, or for '' the batch script. Each statement has all lines
        of `node`, unless its own are known (`syntax.shift_of`). Raise as `syntax.parse`."""
        before, count = self._place, len(self.statements)
        shift = syntax.shift_of(node, text, line) if before.lines is None else None
        lines = self._lines_of(node)
        self._place = replace(before, lines=lines, shift=shift, step=step, in_text=True)
        self.read(text)
        for statement in self.statements[count:]:
            if re.fullmatch(r"\$\{\w+\}", statement.text):  # commands, and not the words of one
                statement.text = f'eval "{statement.text}"'
        self._place = before

    def _has_launch(
        self, part: Node | str, step: str = "", arguments: Sequence[Word] | None = None
    ) -> bool:
        """Return whether a part of the script, or a text in it, may start the training. Plain
        Python counts in a text or a task; elsewhere only by ``Scope.counted``.

        The part is read apart, so that no statement is added here: in tasks of `step` and with
        `arguments`, which are those of the present place for '' and None.
        """
        arguments = self.scope.arguments if arguments is None else arguments
        probe = Reader(self.scope.child(arguments, self.scope.arguments_are_set))
        probe._place = self._place.search_place(step)
        # A function that calls itself would be searched for ever.
        probe._functions = {n: f for n, f in self._functions.items() if f.node is not part}
        node = syntax.parse(part) if isinstance(part, str) else part
        for command in commands_of(syntax.body_of(node)):
            probe._command(command)
        is_apart = isinstance(part, str) or probe._place.step or probe._place.in_text
        least = 0 if is_apart or self.scope.counted else 1  # 1: the weight of plain Python
        return any(s.launch is not None and s.launch.weight > least for s in probe.statements)

    def _list(self, node: Node) -> None:
        """Append a pipeline, a list (``a && b``) or a command with redirections: as one statement,
        or, where a launch is in it, as those of its parts."""
        commands = [child for child in commands_of(node) if self._has_launch(child)]
        first = node.named_children[0]
        is_command = syntax.redirected_command(first).type == "command"
        if node.type == "list" and node.children[1].type == "&&":  # [ -z "$A" ] && A=8
            branch = [first], [node.named_children[-1]]
            if self._gives_default([branch]):
                self._mark_lines(node, "a default")
                self._read_node(branch[1][0])
                return
        if commands and node.type == "list":
            self._read_list_with_launch(node)
        elif commands and not is_command and self._has_launch(first):
            with self._output_to(syntax.target_of(node)):
                self._read_node(first)  # a block
        elif commands:
            self._command(commands[0], syntax.target_of(node), node)
        elif first.type == "command" and re.match(r"cd\s[^;&]*\|\|", source(node)):
            self._command(first, "", node)  # cd FOLDER || exit
        else:
            self._add(node)

    _pipeline = _redirected_statement = _list

    def _read_list_with_launch(self, node: Node) -> None:
        """Append the statements of both sides of ``a && b`` or ``a || b`` with a launch. The side
        behind it, as ``|| exit 1``, has `ENDED` in its place. Whether one behind a test or ``||``
        runs, only the job knows: the first side ends the script where it does not, or, where more
        than prints follows, the whole is one lost statement."""
        first, sign, last = node.named_children[0], node.children[1].type, node.named_children[-1]
        is_test = re.match(r"(\[|test\b|!)", source(first)) or sign == "||"
        if is_test and not self._has_launch(first):
            if self._place.in_text or not blocks.is_last(node):
                self._add_as_one(node, CHOOSES)
                return
            self._add(first, f"{source(first)} {'||' if sign == '&&' else '&&'} exit")
            self._read_node(last)
            return
        count, parts = len(self.statements), [first]  # between two launches each is read by itself
        is_between = self._has_launch(last)
        while is_between and parts[0].type == "list" and "||" not in source(parts[0]):
            parts[:1] = parts[0].named_children[0], parts[0].named_children[-1]
        for part in parts:
            self._read_node(part)
        starts_launch = self._has_launch(last)  # by now also by a variable that a part has set
        launching = next((s for s in reversed(self.statements) if s.launch), self.statements[-1])
        if sign == "&&" and starts_launch:
            self._end_after_failures(count)
        if starts_launch or not self._has_launch(first):
            self._read_node(last)
            return
        reported = syntax.parse(re.sub(r"\b\w+=[\"']?\$\?[\"']?", ":", source(last)))
        reports = blocks.only_reports(reported, self._find_reporting_functions())
        of_ours = not (reports or does_more(source(last)))
        if of_ours and (reason := first_reason(DECIDED, source(last), True)):
            self._mark_lines(last, reason, OURS)
            self.notes.append((self._lines_of(last)[0], reason))  # the line may be the launch's
        else:
            text = f"{ENDED} {sign} {source(last)}"
            self._add(last, text, is_report=reports, reported_launch=launching.launch)

    def _end_after_failures(self, count: int) -> None:
        """Put ``|| exit`` behind each command from the statement `count` on, which stands in front
        of ``&& LAUNCH``; not behind a print, a ``cd``, an assignment, or a list of commands."""
        for statement in self.statements[count:]:
            code = re.sub(r"(['\"]).*?\1", "''", statement.text)
            if re.search(r"\|\||;|(?<![\w-])exit(?![\w-])|\n", code):
                continue
            is_plain = "|" in code or not re.match(_PRINTS_ONLY, code)
            if statement.launch:  # for one that prepares the training
                command = statement.enclosing[len(self._enclosing)]
                command.text = f"{command.text.removesuffix(' || exit')} || exit"
            elif is_plain and not statement.name and (statement.first != "cd" or statement.in_task):
                statement.text += " || exit"

    def _find_reporting_functions(self) -> set[str]:
        """Return the names of functions that only print or end the script."""
        return {
            n for n, f in self._functions.items() if blocks.only_reports(syntax.body_of(f.node))
        }

    def _read_call(self, name: str, words: list[Word], node: Node) -> None:
        """Append the statements in the body of the function `name`, which `node` calls with the
        arguments `words`. Remove the statements of its definition and of its export."""
        function = self._functions.pop(name)  # it may call itself
        definition, statement, place = function
        before = self.scope.arguments, self.scope.arguments_are_set, self._place
        self._mark_lines(node, f"calls {name}")
        self._place = self._place.of_call(place, Statement(source(node), self._lines_of(node)))
        self._mark_lines(definition, f"the function {name}, read where it is called")
        exports = rf"(export|declare)\s+-\w*f\s+{name}\s*"
        removed = [s for s in self.statements if s is statement or re.fullmatch(exports, s.text)]
        for line in (s.lines[0] for s in removed):
            self.other_marks.setdefault(line, (OURS, f"{name} is read where it is called"))
        self.called_definitions += [s for s in removed if s is statement]
        removed_ids = set(map(id, removed))
        self.statements = [s for s in self.statements if id(s) not in removed_ids]
        self.scope.arguments, self.scope.arguments_are_set = words, False
        self._read_node(definition.child_by_field_name("body"))
        self.scope.arguments, self.scope.arguments_are_set, self._place = before
        self._functions[name] = function

    def _for_statement(self, node: Node) -> None:
        """Append a loop of any kind: one without a launch as one statement; one over a single word,
        one that starts a command until it succeeds, or one over the nodes as the statements in its
        body; any other with a launch as one that is lost. A loop over arguments that are not there
        is left out."""
        has_launch, lacks_arguments = self._has_launch(node), self.scope.lacks_arguments
        if self.scope.arguments is None and lacks_arguments and loops.is_for_arguments(node):
            self.scope.defaults.add("@")
            self._mark_lines(node, "the script's arguments: there are none", OURS)
            return
        words = self.scope.words(node.children_by_field_name("value")) if has_launch else []
        if len(words) == 1 and words[0].is_static:
            self._read_loop_over_word(node, words[0])
        elif has_launch and (command := loops.retried_command(node)):
            self._mark_lines(node, "hpc-ddp starts it again after a failure", OURS)
            self._read_node(command)
        elif has_launch and loops.starts_on_nodes(source(node)):
            self._read_loop_over_nodes(node)
        else:
            reason = "a loop of launches: hpc-ddp sweep, or a job for each"
            self._add_as_one(node, reason if has_launch else "")

    _c_style_for_statement = _while_statement = _for_statement

    def _read_loop_over_word(self, node: Node, word: Word) -> None:
        """Append an assignment of the one word of a loop to its variable, and the statements in the
        loop's body."""
        name = source(node.child_by_field_name("variable"))
        self.scope.set(name, word)
        self._add(node.children[0], f"{name}={word.as_bash()}", name=name, assigned=word)
        self._mark_lines(node, "a loop over one word")
        before = self._place
        leave_commands = "|".join(filter(None, (before.leave_commands, "continue|break")))
        self._place = replace(before, leave_commands=leave_commands)
        self._read_node(node.child_by_field_name("body"))
        self._place = before

    def _read_loop_over_nodes(self, node: Node) -> None:
        """Append the statements in the body of a loop over the nodes, as they are for one node. The
        variables that the loop sets have no known value, and go to `node_variables`; a counter of
        the nodes has the value ``$SLURM_NODEID`` instead."""
        for name in names_set_in(node):
            self.scope.set(name, None)
            self.node_variables.add(name)
        if name := loops.counter_of(source(node)):
            self.scope.set(name, Word((Part("$SLURM_NODEID", is_code=True),)))
            self.node_variables.discard(name)
        self._mark_lines(node, "a loop over the nodes: hpc-ddp starts all of them")
        before, self._place = self._place, replace(self._place, in_loop=True)
        self._read_node(node.child_by_field_name("body"))
        self._place = before
