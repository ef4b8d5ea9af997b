"""The purposes of loops in a job script: the nodes, the arguments, or a launch that may fail."""

from __future__ import annotations

import re

from hpc_ddp.submission.job_script.bash.syntax import (
    Node,
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
    """Return the variable by which a loop counts from 0, or from 1 to one less than a number: `i`
    of ``for ((i=0; …`` and of ``for i in $(seq 0 …``; '' for another loop."""
    match = re.match(
        r"for\s*(?:\(\(\s*(\w+)\s*=\s*(?:0|1\s*;\s*\w+\s*<(?!=)[^;]*)\s*;"
        r"|(\w+)\s+in\s+\$\(seq (?:0 |1 [^;\n]*-\s*1\b))",
        loop,
    )
    return (match[1] or match[2]) if match else ""


def retried_command(loop: Node) -> Node | None:
    """Return the command that a loop starts until it succeeds, as ``until srun a.out; do sleep 5;
    done`` and ``for i in 1 2 3; do srun a.out && break; done``; None for another loop, and where
    the command depends on the loop's variables."""
    body, first = loop.child_by_field_name("body"), loop.named_children[0]
    statements = [node for node in body.named_children if node.type != "comment"] if body else []
    ends = [node for node in statements if re.search(r"\bbreak\b|\bexit\s+0\b", source(node))]
    command = None
    if loop.children[0].type == "until":
        command = first
    elif loop.children[0].type == "while" and first.type == "negated_command":
        command = first.named_children[-1]
    elif len(ends) == 1 and "$?" in source(ends[0]):
        command = ends[0].prev_named_sibling
    elif len(ends) == 1 and ends[0].type in ("list", "if_statement"):
        command = ends[0].named_children[0]
    if command is None or set_in(loop) & {*names_in(source(command))}:
        return None
    of_command = {node.start_byte for node in commands_of(command)}
    between = [node for part in statements for node in commands_of(part)]
    names = {
        source(n.child_by_field_name("name")) for n in between if n.start_byte not in of_command
    }
    return command if names <= _PAUSES else None
