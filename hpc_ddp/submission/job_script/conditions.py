"""Conditions whose truth follows from the script alone, and what is in parts of a syntax tree."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from hpc_ddp.submission.job_script.shell import (
    Node,
    Part,
    Scope,
    is_positional,
    literal,
    parse,
    source,
)


def truth_of(node: Node, scope: Scope) -> bool | None:
    """Return whether a condition holds; None where only the job knows."""
    text = source(node).strip()
    match = re.fullmatch(r"\[\[?\s+(.*?)\s+\]\]?", text, re.S)
    if not match or is_positional(text):
        return {"true": True, "false": False}.get(text)
    if single := re.fullmatch(r"(-[zn])\s+(.+)", match[1]):
        root = parse(f": {single[2]}")
        words = scope.words(commands_of(root)[0].named_children[1:])
        text = words[0].text if words else ""
        for name in words[0].names if words else ():
            if name.startswith("SLURM_"):
                break  # it is set, and not empty
            if scope.is_open or name in scope.values:
                return None
            text = ""  # what the shell that submits has is not known
        return bool(text) == (single[1] == "-n")
    pair = re.fullmatch(
        r"(\S+|\".*?\")\s+(==|=|!=|-eq|-ne|-gt|-lt|-ge|-le)\s+(\S+|\".*?\")", match[1]
    )
    if not pair:
        return None
    sides = []
    for side in (pair[1], pair[3]):
        root = parse(f": {side}")
        words = scope.words(commands_of(root)[0].named_children[1:])
        word = words[0] if words else literal("")
        number = scope.number(word)
        if number is None and (not word.is_static or re.search(r"[*?]", side)):
            return None
        sides.append(word.text if number is None else number)
    first, second = sides
    if pair[2] in ("==", "="):
        return first == second
    if pair[2] == "!=":
        return first != second
    if not (isinstance(first, int) and isinstance(second, int)):
        return None
    return {"-eq": first == second, "-ne": first != second, "-gt": first > second,
            "-lt": first < second,
            "-ge": first >= second, "-le": first <= second}[pair[2]]  # fmt: skip


def code_of(name: str) -> Part:
    """Return the part of a word that a variable is which only the job knows."""
    return Part("code", f"${{{name}}}")


def commands_of(node: Node) -> list[Node]:
    """Return all commands below a node, in order, but for those of substitutions."""
    return list(_descend(node, ("command",)))


def assigned_in(node: Node) -> Iterable[str]:
    return [source(n.child_by_field_name("name")) for n in _descend(node, ("variable_assignment",))]


def _descend(node: Node, types: tuple[str, ...]) -> Iterator[Node]:
    if node.type in types:
        yield node
    elif node.type not in ("command_substitution", "process_substitution"):
        for child in node.named_children:
            yield from _descend(child, types)
