"""The purposes of loops in a job script: the nodes, the arguments, or a launch that may fail."""

from __future__ import annotations

import re

from hpc_ddp.submission.job_script.bash.blocks import names_set_in
from hpc_ddp.submission.job_script.bash.syntax import Node, all_below, commands_of, names_in, source

# The conditions of a loop that goes on while the script has arguments: [ $# -gt 0 ], [ -n "$1" ],
# [ "$1" != "" ], (($#)), and others like them.
_HAS_ARGUMENTS = re.compile(
    r"(\[\[?|test)\s+(\"?\$(#|\{#\})\"?\s+((-gt|-ne|!=|>)\s*\"?0\"?|-ge\s*1)"
    r"|-n\s+\"?\$(1|\{1:?-?\})\"?|\"?\$(1|\{1:?-?\})\"?\s*!=\s*\"\")(\s+\]\]?)?"
    r"|\(\(\s*\$(#|\{#\})\s*((>|!=)\s*0\s*)?\)\)"
)
_GETOPTS = re.compile(r"getopts\s+\S+\s+\w+$")
_ENDS = re.compile(r"\bbreak\b|\bexit\s+0\b")  # the loop
_ASKS = r"(?:\[\[?|test|\(\()\s*\"?\$\?\"?\s*(?:{})\s*0\s*(?:\]\]?|\)\))?"  # [ $? -eq 0 ]
# A statement that ends a loop if the command before it succeeded: [ $? -eq 0 ] && break,
# [ $? -ne 0 ] || break, if [ $? -eq 0 ]; then …; break; fi without another branch.
_AFTER_SUCCESS = re.compile(
    rf"{_ASKS.format('-eq|==?')}\s*&&\s*(?:break|exit\s+0|\{{[^{{}}]*\bbreak\b[^{{}}]*\}})"
    rf"|{_ASKS.format('-ne|!=')}\s*\|\|\s*(?:break|exit\s+0)"
    rf"|if\s+{_ASKS.format('-eq|==?')}\s*;?\s*then\b(?:(?!\bel).)*\bbreak\b(?:(?!\bel).)*\bfi",
    re.S,
)
_SETTERS = {"variable_assignment", "declaration_command", "unset_command"}
# Commands that may stand between two tries of a launch.
_PAUSES = {"echo", "printf", "date", "sleep", "break", "exit", "true", ":", "test", "let"}


def starts_on_nodes(loop: str) -> bool:
    """Return whether the text of a `loop` starts a command on a node of its choice, as by
    ``srun -w $NODE``, ``srun -r 1`` or ``ssh $NODE``."""
    words = r"[^\n;]*(\\\n[^\n;]*)*"  # also those of a line that goes on
    return bool(
        re.search(rf"(srun|\$\{{?SRUN\w*){words}\s(-w|-r|--nodelist)|\bssh\s{words}\$", loop)
    )


def is_for_arguments(loop: Node) -> bool:
    """Return whether a loop goes through the script's own arguments: ``while [ $# -gt 0 ]`` and
    other forms of `_HAS_ARGUMENTS`, ``while getopts a:b opt``, ``for i in "$@"``."""
    if loop.type == "for_statement":
        texts = [source(node) for node in loop.children_by_field_name("value")]
        return texts in (['"$@"'], ["$@"])
    is_while = loop.type == "while_statement" and source(loop).startswith("while")  # not until
    condition = source(loop.named_children[0])
    return is_while and bool(_HAS_ARGUMENTS.fullmatch(condition) or _GETOPTS.match(condition))


def counter_of(loop: str) -> str:
    """Return the variable by which a `loop`, a text, counts nodes; '' for another loop.

    It counts from 0, or from 1 for the nodes behind the first: `i` of ``for ((i=0; i<4; i++))``,
    ``for i in $(seq 0 3)``, ``for i in {0..3}``, ``for i in ${!NODES[@]}``, ``for ((i=1; i<NNODES;
    i++))`` and ``for i in $(seq 1 $((NNODES-1)))``. From 1 on, the bound must have ``node`` in its
    name, or be a length, as ``${#A[@]}``.
    """
    match = re.match(
        r"for\s*(?:\(\(\s*(\w+)\s*=\s*(?:0|1\s*;\s*\w+\s*<(?!=)[^;]*(?:node|#)[^;]*)\s*;"
        r"|(\w+)\s+in\s+(?:\$\(seq (?:0 |1 [^;\n]*(?:node|#)[^;\n]*-\s*1\b)|\{0\.\."
        r"|\"?\$\{!\w+\[@\]\}))",
        loop,
        re.I,
    )
    return (match[1] or match[2]) if match else ""


def retried_command(loop: Node) -> Node | None:
    """Return the command that a loop starts again until it succeeds; None for another loop.

    It is ``srun a.out`` of ``until srun a.out; do sleep 5; done``, ``while ! srun a.out; do …`` and
    ``for i in 1 2 3; do srun a.out && break; done``. Between two tries there may be no commands but
    `_PAUSES`, no line may set a variable, and the command must use none that the loop sets.
    """
    body = loop.child_by_field_name("body")
    statements = [node for node in body.named_children if node.type != "comment"] if body else []
    command = _tried_command(loop, statements)
    nodes = [inner for statement in statements for inner in all_below(statement)]
    if command is None or {node.type for node in nodes} & _SETTERS:
        return None
    if names_set_in(loop) & {*names_in(source(command))}:
        return None
    starts = {node.start_byte for node in commands_of(command)}
    between = [
        node
        for statement in statements
        for node in commands_of(statement)
        if node.start_byte not in starts
    ]
    names = {source(node.child_by_field_name("name")) for node in between}
    return command if names <= _PAUSES else None


def _tried_command(loop: Node, statements: list[Node]) -> Node | None:
    """Return the command whose success ends a loop: its condition, or, of the `statements` in it,
    that before its only ``break`` or ``exit 0``. None without such a command."""
    condition = loop.named_children[0]
    if loop.children[0].type == "until":
        return condition
    if loop.children[0].type == "while" and condition.type == "negated_command":
        return condition.named_children[-1]
    ends = [node for node in statements if _ENDS.search(source(node))]
    return _command_before(ends[0]) if len(ends) == 1 else None


def _command_before(end: Node) -> Node | None:
    """Return the command after whose success the statement `end` leaves its loop: it is in that, as
    in ``command && break`` and ``if command; then break; fi``, or in front of it, as of ``[ $? -eq
    0 ] && break``. None for a statement of another form."""
    text = source(end)
    if _AFTER_SUCCESS.fullmatch(text):
        command: Node | None = end.prev_named_sibling
        return command
    if "$?" in text:
        return None
    if end.type == "list" and end.children[1].type == "&&":
        return end.named_children[0]
    other_branches = [child for child in end.named_children if child.type.startswith("el")]
    is_plain = end.type == "if_statement" and end.named_children[0].type != "negated_command"
    ends_elsewhere = any(_ENDS.search(source(child)) for child in other_branches)
    return end.named_children[0] if is_plain and not ends_elsewhere else None
