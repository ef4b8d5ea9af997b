"""The statements of a job script, in the order in which they run, and the launches among them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hpc_ddp.submission.job_script.conditions import assigned_in, code_of, commands_of, truth_of
from hpc_ddp.submission.job_script.launch import Launch
from hpc_ddp.submission.job_script.launchers import read_launch
from hpc_ddp.submission.job_script.shell import (
    Node,
    Scope,
    Word,
    is_positional,
    literal,
    names_in,
    parse,
    source,
)

# What is sourced of these sets no variable that a job script asks for.
_OF_SYSTEM = re.compile(r"/etc/|.*(activate|conda\.sh|bashrc|profile|modules\.sh)$")


@dataclass
class Statement:
    """One statement: an assignment (`name` and `assigned`), a launch, or another command or block.

    `lines` are the first and last one in the script; `inside` says that it runs in each task, in
    ``bash -c``; `output` is the file that it writes to; `lost` why it can't be taken over.
    """

    text: str
    lines: tuple[int, int]
    words: list[Word] = field(default_factory=list)
    name: str = ""
    assigned: Word | list[Word] | None = None
    exported: bool = False
    launch: Launch | None = None
    inside: bool = False
    output: str = ""
    lost: str = ""
    defines: str = ""  # a function
    assigns: list[str] = field(default_factory=list)  # by a block that does nothing else

    @property
    def first(self) -> str:
        return self.words[0].text if self.words else ""

    @property
    def names(self) -> list[str]:
        """The variables, and the functions, that it needs."""
        quoted = re.sub(r"(?<!\\)'[^']*'", "", self.text)
        assigned = [self.name] if self.name else []
        mentioned = [
            *names_in(quoted),
            *re.findall(r"[A-Za-z_]\w*", quoted if self.words else "")[:1],
        ]
        names = [name for name in mentioned if name not in assigned]
        return names + [name for name in assigned if re.search(rf"\$\{{?{name}\b", quoted)]


class Reader:
    """Reads a script, and notes its statements.

    `resolved` are lines that only choose among others (``if``, ``fi``), with what was chosen;
    `skipped` are those that do not run.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.statements: list[Statement] = []
        self.resolved: dict[int, str] = {}
        self.of_nodes: set[str] = set()  # variables of loops over the nodes
        self.skipped: dict[int, str] = {}
        self._functions: dict[str, tuple[Node, Statement]] = {}
        self._lines: tuple[int, int] | None = None  # of the text that is looked into
        self._shift: int | None = None  # from its lines to the script's
        self._inside = False
        self._step = ""  # what starts the tasks of the text that is looked into
        self._loop = False
        self._exports_all = False

    def read(self, text: str) -> None:
        """Read the text of a whole script."""
        self._walk(parse(text))

    def _walk(self, node: Node) -> None:
        handlers: dict[str, Any] = {
            "comment": lambda _: None,
            "variable_assignment": self._assignment,
            "variable_assignments": self._each,
            "declaration_command": self._declaration,
            "command": self._command,
            "if_statement": self._if,
            "for_statement": self._loop_of,
            "c_style_for_statement": self._loop_of,
            "while_statement": self._loop_of,
            "function_definition": self._function,
            **dict.fromkeys(("program", "compound_statement", "subshell", "do_group"), self._each),
            **dict.fromkeys(("list", "pipeline", "redirected_statement"), self._compound),
        }
        handler = handlers.get(node.type)
        if handler:
            handler(node)
        elif node.is_named:
            reason = "bash can't read it: is a quote missing?" if node.type == "ERROR" else ""
            if not reason and self._has_launch(node):
                reason = "what only the job knows chooses a launch"
            self._add(node, lost=reason)

    def _forget(self, names: Iterable[str]) -> None:
        """Note that from here on only the job knows some variables."""
        for name in names:
            self.scope.values[name] = Word((code_of(name),))

    def _each(self, node: Node) -> None:
        for child in node.named_children:
            self._walk(child)
        if node.type in ("compound_statement", "subshell", "do_group"):
            for line in (node.start_point[0] + 1, node.end_point[0] + 1):
                self.resolved.setdefault(line, "its lines were taken one by one")

    def _at(self, node: Node) -> tuple[int, int]:
        end = node.end_point[0] + (1 if node.end_point[1] else 0)
        first = node.start_point[0] + 1
        if self._lines and self._shift is not None:
            first, end = first + self._shift, end + self._shift
        elif self._lines:
            return self._lines
        return first, max(first, end)

    def _add(self, node: Node, **known_facts: Any) -> Statement:
        text = source(node).strip()
        if node.type not in ("variable_assignment", "declaration_command", "command"):
            self._forget(assigned_in(node))
        statement = Statement(text, self._at(node), inside=self._inside, **known_facts)
        if self.scope.positional is None and is_positional(text) and not statement.launch:
            statement.lost = statement.lost or "it uses the job script's own arguments"
        self.statements.append(statement)
        return statement

    def _assignment(self, node: Node, exported: bool = False) -> None:
        name, assigned = self.scope.assign(node)
        exported = exported or self._exports_all
        self._add(node, name=name, assigned=assigned, exported=exported)

    def _declaration(self, node: Node) -> None:
        exported = source(node).startswith("export") or " -x" in source(node)[:12]
        for child in node.named_children:
            if child.type == "variable_assignment":
                self._assignment(child, exported)
            elif child.type == "variable_name" and exported:
                name = source(child)
                assigned = self.scope.values.get(name)
                self._add(node, name=name, assigned=assigned, exported=True)
        if not any(c.type in ("variable_assignment", "variable_name") for c in node.named_children):
            self._add(node)

    def _command(self, node: Node, output: str = "", around: Node | None = None) -> None:
        """Note a command: `around` is the pipeline around it."""
        name_node = node.child_by_field_name("name")
        before = [c for c in node.named_children if c.type == "variable_assignment"]
        nodes = [c for c in node.named_children if c.type not in ("variable_assignment", "comment")]
        line = self._at(node)[0] if self._lines else None
        words = self.scope.words(nodes, line)
        first = words[0].text if words else ""
        if first in self._functions and self._has_launch(self._functions[first][0]):
            self._call(first, words[1:], node)
            return
        if first == "eval":
            self._look_into(" ".join(word.script for word in words[1:]), node, self._inside)
            return
        if first in ("shift", "getopts") or (name_node is None and not before):
            self._add(node, words=words, lost="it uses the job script's own arguments")
            return
        if first in ("source", ".") and not _OF_SYSTEM.match(words[-1].text):
            self.scope.is_open = True
        if first in ("read", "mapfile", "readarray"):
            self._forget(w.text for w in words[1:] if re.fullmatch(r"[A-Za-z_]\w*", w.text))
        if first in ("pushd", "popd") or (first == "cd" and not all(w.is_static for w in words)):
            self._forget(["PWD"])
        elif first == "cd" and len(words) == 2:
            folder = self.scope.values.get("PWD")
            place = os.path.join(folder.text if isinstance(folder, Word) else "", words[1].text)
            self.scope.values["PWD"] = literal(place)
        if first == "set" and re.search(r"\s-\w*a|allexport", source(node)):
            self._exports_all = True
        launch = read_launch(words, self.scope, self._step)
        launch.line = self._at(node)[0]
        working = self.scope.values.get("PWD")
        launch.folder = working.text if isinstance(working, Word) and working.is_static else None
        for child in before:
            assigned = self.scope.word(child.child_by_field_name("value"))
            launch.env[source(child.child_by_field_name("name"))] = assigned
        if launch.inner is not None:
            if self._launches(launch.inner.script, launch.step):
                self._inner(launch, node, output)
                return
            launch.weight = 0
        if launch.weight:
            launch.in_loop = self._loop
            self._add(around or node, words=words, launch=launch, output=output)
        else:
            self._add(around or node, words=words, output=output)

    def _inner(self, outer: Launch, node: Node, output: str) -> None:
        """Read the text of ``bash -c``; its launch has the options of the outer one, too."""
        assert outer.inner is not None
        count = len(self.statements)
        inside = outer.step != "" or self._inside
        before, self._step = self._step, outer.step or self._step
        self._look_into(outer.inner.script, node, inside, outer.inner.line)
        self._step = before
        first, last = self._at(node)
        for line in range(first, last + 1):
            self.resolved.setdefault(line, "the launch")
        for statement in self.statements[count:]:
            launch = statement.launch
            if launch is None:
                continue
            if not launch.kind and outer.step:
                launch.weight = 3 if launch.weight == 1 else launch.weight
            launch.step = launch.step or outer.step
            for key in ("nodes", "tasks", "tasks_per_node"):
                setattr(launch, key, getattr(launch, key) or getattr(outer, key))
            launch.gpus = outer.gpus | launch.gpus
            launch.env = outer.env | launch.env
            launch.node_words |= outer.node_words
            launch.in_loop |= self._loop
            launch.ours, launch.lost = [*outer.ours, *launch.ours], [*outer.lost, *launch.lost]
            for key, words in outer.settings.items():
                launch.settings[key] = [*words, *launch.settings.get(key, [])]
            statement.output = statement.output or output

    def _look_into(self, text: str, node: Node, inside: bool, line: int = 0) -> None:
        """Read a text of the script as a script: its lines are those from `line` on, where it is
        one word of `node`, else all of `node`'s."""
        before = self._lines, self._inside, self._shift
        last = list(node.named_children)[-1]
        is_one = last.type in ("string", "raw_string") and source(last).count("\n") == text.count(
            "\n"
        )
        is_one = is_one and line == last.start_point[0] + 1 and self._lines is None
        self._lines, self._inside = self._at(node), inside
        self._shift = line - 1 if is_one and line else None
        self._walk(parse(text))
        self._lines, self._inside, self._shift = before

    def _launches(self, text: str, step: str = "") -> bool:
        return self._has_launch(parse(text), True, step)

    def _has_launch(self, node: Node, is_inner: bool = False, step: str = "") -> bool:
        """Return whether a part of the script may start the training; nothing is noted."""
        reader = Reader(Scope(dict(self.scope.values), self.scope.numbers, []))
        step = step or self._step
        reader._functions = {} if node.type == "function_definition" else self._functions
        body = node.child_by_field_name("body") if node.type == "function_definition" else node
        for child in commands_of(body):
            nodes = [
                c for c in child.named_children if c.type not in ("variable_assignment", "comment")
            ]
            words = reader.scope.words(nodes)
            launch = read_launch(words, reader.scope, step)
            if launch.weight > (0 if is_inner or step else 1):
                return True
            if launch.inner and self._launches(launch.inner.script, launch.step):
                return True
            called = reader._functions.get(words[0].text) if words else None
            if called and self._has_launch(called[0]):
                return True
            if words and words[0].text == "eval":
                return self._launches(" ".join(word.script for word in words[1:]))
        return False

    def _compound(self, node: Node) -> None:
        """Note a pipeline, a list or a command with redirections, or the launch in it."""
        if node.type == "list" and self._has_launch(node):
            for child in node.named_children:
                self._walk(child)
            return
        commands = [child for child in commands_of(node) if self._has_launch(child)]
        if commands or (node.type == "redirected_statement" and _is_block(node)):
            targets = re.findall(r"(?:>>?|\btee (?:-a )?)\s*([^\s&|;>]+)", source(node))
            if commands:
                self._command(commands[0], next((t for t in targets if t != "1"), ""), node)
            else:
                self._walk(node.named_children[0])
            return
        words = (
            self.scope.words(commands_of(node)[:1][0].named_children) if commands_of(node) else []
        )
        self._add(node, words=words)

    def _call(self, name: str, words: list[Word], node: Node) -> None:
        """Read a function's body where it is called."""
        definition, statement = self._functions[name]
        for line in range(statement.lines[0], statement.lines[1] + 1):
            self.resolved.setdefault(line, f"the function {name}, read where it is called")
        self.resolved.setdefault(self._at(node)[0], f"calls {name}")
        if statement in self.statements:
            self.statements.remove(statement)
        before = self.scope.positional
        self.scope.positional = words
        self._walk(definition.child_by_field_name("body"))
        self.scope.positional = before

    def _function(self, node: Node) -> None:
        name = source(node.child_by_field_name("name"))
        before, self.scope.positional = self.scope.positional, []
        self._functions[name] = node, self._add(node, defines=name)
        self.scope.positional = before

    def _if(self, node: Node) -> None:
        """Take the branch that is known to run; keep the whole where that is not known."""
        branches: list[tuple[Node, list[Node]]] = []
        condition: Node = None
        body: list[Node] = []
        for child in [*node.named_children, None]:
            if child is None or child.type in ("elif_clause", "else_clause"):
                branches.append((condition, body))
                if child is not None:
                    inner = list(child.named_children)
                    is_else = child.type == "else_clause"
                    condition, body = (None, inner) if is_else else (inner[0], inner[1:])
            elif condition is None and not body:
                condition = child
            else:
                body.append(child)
        chosen: list[Node] | None = []
        for test, lines in branches:
            truth = True if test is None else truth_of(test, self.scope)
            if truth is None:
                chosen = None
                break
            if truth:
                chosen = lines
                break
        if chosen is None:
            launches = self._has_launch(node)
            lost = (
                "a condition that only the job knows chooses between launches" if launches else ""
            )
            names = list(assigned_in(node))
            only = all(re.match(r"\[|test\b", source(c)) for c in commands_of(node))
            self._add(node, lost=lost, assigns=names if only else [])
            return
        first, last = self._at(node)
        for line in range(first, last + 1):
            self.resolved.setdefault(line, "its condition is known")
        for _, lines in branches:
            for child in lines if lines is not chosen else ():
                low, high = self._at(child)
                for line in range(low, high + 1):
                    self.skipped[line] = "the condition is false: it never runs"
        for child in chosen:
            self._walk(child)

    def _loop_of(self, node: Node) -> None:
        """Keep a loop; of one over the nodes that starts the training take its launch."""
        if not self._has_launch(node):
            self._add(node)
            return
        text = source(node)
        if not re.search(r"\b(ssh|pdsh|clush)\b|srun[^\n;]*(\\\n[^\n;]*)*(\s-w|nodelist)", text):
            self._add(node, lost="a loop of launches: hpc-ddp sweep, or a job for each")
            return
        variables = re.findall(r"for\s+(?:\(\(\s*)?(\w+)", text)[:1]
        self._forget(variables)
        self.of_nodes.update(variables)
        first, last = self._at(node)
        for line in range(first, last + 1):
            self.resolved.setdefault(line, "a loop over the nodes: hpc-ddp starts all of them")
        self._loop, before = True, self._loop
        self._walk(node.child_by_field_name("body"))
        self._loop = before


def _is_block(node: Node) -> bool:
    return bool(node.named_children) and node.named_children[0].type in (
        "compound_statement",
        "subshell",
    )
