"""The purposes of loops in a job script: the nodes, the arguments, or a launch that may fail."""

from __future__ import annotations

import re

from hpc_ddp.submission.job_script.bash.syntax import (
    Node,
    all_below,
    commands_of,
    names_in,
    set_in,
    source,
)

_HAS_ARGUMENTS = re.compile(
    r"(\[\[?|test)\s+(\"?\$(#|\{#\})\"?\s+((-gt|-ne|!=|>)\s*\"?0\"?|-ge\s*1)"
    r"|-n\s+\"?\$(1|\{1:?-?\})\"?|\"?\$(1|\{1:?-?\})\"?\s*!=\s*\"\")(\s+\]\]?)?"
    r"|\(\(\s*\$(#|\{#\})\s*((>|!=)\s*0\s*)?\)\)"
)
_GETOPTS = re.compile(r"getopts\s+\S+\s+\w+$")
_ENDS = re.compile(r"\bbreak\b|\bexit\s+0\b")
_ASKS = r"(?:\[\[?|test|\(\()\s*\"?\$\?\"?\s*(?:{})\s*0\s*(?:\]\]?|\)\))?"
_AFTER_SUCCESS = re.compile(
    rf"{_ASKS.format('-eq|==?')}\s*&&\s*(?:break|exit\s+0|\{{[^{{}}]*\bbreak\b[^{{}}]*\}})"
    rf"|{_ASKS.format('-ne|!=')}\s*\|\|\s*(?:break|exit\s+0)"
    rf"|if\s+{_ASKS.format('-eq|==?')}\s*;?\s*then\b(?:(?!\bel).)*\bbreak\b(?:(?!\bel).)*\bfi",
    re.S,
)
_SETTERS = {"variable_assignment", "declaration_command", "unset_command"}
# Commands between two tries of a launch.
_PAUSES = {"echo", "printf", "date", "sleep", "break", "exit", "true", ":", "test", "let"}


def starts_on_nodes(loop: str) -> bool:
    """Return whether a loop's text has a step on a node of its own, as by ``srun -w $NODE`` or
    ``ssh $NODE``."""
    words = r"[^\n;]*(\\\n[^\n;]*)*"
    return bool(
        re.search(rf"(srun|\$\{{?SRUN\w*){words}\s(-w|-r|--nodelist)|\bssh\s{words}\$", loop)
    )


def is_for_arguments(loop: Node) -> bool:
    """Return whether a loop goes through the script's own arguments, as ``while [ $# -gt 0 ]``,
    ``while getopts a:b opt`` and ``for i in "$@"``."""
    if loop.type == "for_statement":
        texts = [source(node) for node in loop.children_by_field_name("value")]
        return texts in (['"$@"'], ["$@"])
    is_while = loop.type == "while_statement" and source(loop).startswith("while")
    condition = source(loop.named_children[0])
    return is_while and bool(_HAS_ARGUMENTS.fullmatch(condition) or _GETOPTS.match(condition))


def counter_of(loop: str) -> str:
    """Return the variable by which a loop counts from 0, or from 1 to the number of the last node,
    by the names of variables: `i` of ``for ((i=0; …`` and of ``for i in $(seq 0 …``; '' for another
    loop."""
    match = re.match(
        r"for\s*(?:\(\(\s*(\w+)\s*=\s*(?:0|1\s*;\s*\w+\s*<(?!=)[^;]*(?:node|#)[^;]*)\s*;"
        r"|(\w+)\s+in\s+\$\(seq (?:0 |1 [^;\n]*(?:node|#)[^;\n]*-\s*1\b))",
        loop,
        re.I,
    )
    return (match[1] or match[2]) if match else ""


def retried_command(loop: Node) -> Node | None:
    """Return the command that a loop starts until it succeeds, as ``until srun a.out; do sleep 5;
    done`` and ``for i in 1 2 3; do srun a.out && break; done``; None for another loop, and where
    it sets variables, or the command depends on the loop's own."""
    body, first = loop.child_by_field_name("body"), loop.named_children[0]
    statements = [node for node in body.named_children if node.type != "comment"] if body else []
    ends = [node for node in statements if _ENDS.search(source(node))]
    command = None
    if loop.children[0].type == "until":
        command = first
    elif loop.children[0].type == "while" and first.type == "negated_command":
        command = first.named_children[-1]
    elif len(ends) == 1:
        command = _command_before(ends[0])
    nodes = [inner for part in statements for inner in all_below(part)]
    if command is None or {node.type for node in nodes} & _SETTERS:
        return None
    if set_in(loop) & {*names_in(source(command))}:
        return None
    starts = {node.start_byte for node in commands_of(command)}
    between = [node for part in statements for node in commands_of(part)]
    names = {source(n.child_by_field_name("name")) for n in between if n.start_byte not in starts}
    return command if names <= _PAUSES else None


def _command_before(end: Node) -> Node | None:
    """Return the command after whose success a statement of a loop ends it: ``command && break``,
    ``if command; then break; fi``, or ``[ $? -eq 0 ] && break`` behind it. None for another."""
    text = source(end)
    if _AFTER_SUCCESS.fullmatch(text):
        before: Node | None = end.prev_named_sibling
        return before
    if "$?" in text:
        return None
    if end.type == "list" and end.children[1].type == "&&":
        return end.named_children[0]
    branches = [child for child in end.named_children if child.type.startswith("el")]
    is_plain = end.type == "if_statement" and end.named_children[0].type != "negated_command"
    is_plain = is_plain and not any(_ENDS.search(source(child)) for child in branches)
    return end.named_children[0] if is_plain else None
