"""Bash, as far as a job script can be understood without running it: words and variables.

A word is a sequence of parts: text that is literal, names of variables that only the job knows, and
code (``$(…)``, arithmetic, ``${NAME%x}``) that only a shell can run. tree-sitter parses; decision
018 has the reasons.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_ddp.core.errors import UsageError

Node = Any  # a tree_sitter.Node: the package is optional
_NAME = re.compile(r"\$(\w+)|\$\{(\w+)\}")
_DEFAULT = re.compile(r"\$\{(\w+)(:?[-=])(.*)\}", re.S)
_ARRAY = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
_POSITIONAL = re.compile(r"(?<!\\)\$(?:[1-9@*#]|\{(?:[1-9@*](?!:?-)[^}]*|#)\})")


@dataclass(frozen=True)
class Part:
    """Text, the name of a variable, or code; `splits` where the shell splits it at blanks."""

    kind: str
    text: str
    splits: bool = False


@dataclass(frozen=True)
class Word:
    """A word of a command, and the line of the script that it stands in."""

    parts: tuple[Part, ...]
    line: int = 0

    @property
    def text(self) -> str:
        """The word with ``$NAME`` for variables, and code as it is."""
        texts = []
        for part, after in zip(self.parts, [*self.parts[1:], Part("text", "")], strict=False):
            is_joined = after.kind == "text" and re.match(r"\w|\[", after.text)
            name = f"${{{part.text}}}" if is_joined else f"${part.text}"
            texts.append(name if part.kind == "name" else part.text)
        return "".join(texts).replace("\\\n", "")

    @property
    def script(self) -> str:
        """The word as a script of its own: its lines are those of the word."""
        return "".join(f"${{{p.text}}}" if p.kind == "name" else p.text for p in self.parts)

    @property
    def is_static(self) -> bool:
        return all(part.kind == "text" for part in self.parts)

    @property
    def has_code(self) -> bool:
        return any(part.kind == "code" for part in self.parts)

    @property
    def names(self) -> list[str]:
        """The variables that it stands for; of code those that it mentions."""
        mentions = [[p.text] if p.kind == "name" else names_in(p.text) for p in self.parts]
        return [name for part, names in zip(self.parts, mentions, strict=True) for name in names
                if part.kind != "text"]  # fmt: skip

    @property
    def source(self) -> str:
        """The word as bash has it, in double quotes around what is not text."""
        return "".join(
            shlex.quote(part.text) if part.kind == "text" else f'"{Word((part,)).text}"'
            for part in self.parts
            if part.text
        )

    def after(self, count: int) -> Word:
        """Return the word without its first `count` characters, which are text."""
        first = self.parts[0]
        parts = (replace(first, text=first.text[count:]), *self.parts[1:])
        return replace(self, parts=tuple(part for part in parts if part.text))


def literal(text: str, line: int = 0) -> Word:
    """Return a word of known text."""
    return Word((Part("text", text),), line)


def names_in(code: str) -> list[str]:
    """Return the variables that some code mentions, those of arithmetic too."""
    inside = " ".join(re.findall(r"\$?\(\((.*?)\)\)", code, re.S))
    return re.findall(r"\$\{?[#!]?([A-Za-z_]\w*)", code) + re.findall(r"[A-Za-z_]\w*", inside)


def parse(text: str) -> Node:
    """Return the root of the syntax tree of a bash script; raise UsageError without the parser."""
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError:
        raise UsageError(
            "import needs a parser of bash, which is not installed; accepted: hpc-ddp[import]",
            hint="pip install tree-sitter tree-sitter-bash pyyaml",
        ) from None
    language = tree_sitter.Language(tree_sitter_bash.language())
    text = re.sub(r"(\\\n|[ \t])*$", "", text)  # a line that goes on, and does not
    return tree_sitter.Parser(language).parse(text.encode()).root_node


def source(node: Node) -> str:
    """Return the text of a node."""
    text: str = node.text.decode()
    return text


def is_positional(text: str) -> bool:
    """Return whether some code uses the script's own arguments; those of awk or Python, in single
    quotes, do not count."""
    return bool(_POSITIONAL.search(re.sub(r"'[^']*'", "", text)))


@dataclass
class Scope:
    """The variables of a script at one point: words, or lists of words for arrays.

    `numbers` are those of Slurm's variables that follow from the directives.
    """

    values: dict[str, Word | list[Word]] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    positional: Sequence[Word] | None = None  # of a function that is looked into
    is_open: bool = False  # a file has been sourced, which may have set any variable
    pending: list[str] = field(default_factory=list)  # whose numbers are being looked up
    spliced: set[str] = field(default_factory=set)  # variables whose values stand in words

    def words(self, nodes: Iterable[Node], line: int | None = None) -> list[Word]:
        """Return the words that some nodes of a command become, split as by the shell."""
        result: list[Word] = []
        for node in nodes:
            at = line or node.start_point[0] + 1
            match = _ARRAY.fullmatch(source(node))
            array = self.values.get(match[1]) if match else None
            if isinstance(array, list):
                result += [replace(word, line=word.line if line is None else at) for word in array]
            elif re.fullmatch(r'"?\$\{?[@*]\}?"?', source(node)) and self.positional is not None:
                result += self.positional
            else:
                words = _split(Word(tuple(self._parts(node, False)), at))
                is_empty = not words and node.type in ("string", "raw_string")
                result += [literal("", at)] if is_empty else words
        return result

    def word(self, node: Node | None) -> Word:
        """Return the value of an assignment, which is not split."""
        if node is None:
            return literal("")
        parts = (replace(part, splits=False) for part in self._parts(node, False))
        return Word(tuple(parts), node.start_point[0] + 1)

    def assign(self, node: Node) -> tuple[str, Word | list[Word]]:
        """Note a ``variable_assignment`` and return its name and value."""
        target, content = node.child_by_field_name("name"), node.child_by_field_name("value")
        name, assigned = source(target), self._content(content)
        old = self.values.get(name)
        if source(node)[len(name) :].startswith("+="):
            if isinstance(old, list) and isinstance(assigned, list):
                assigned = [*old, *assigned]
            elif isinstance(old, Word) and isinstance(assigned, Word):
                assigned = Word((*old.parts, *assigned.parts), assigned.line)
        if target.type == "variable_name":  # an element of an array is code
            self.values[name] = assigned
        return name, assigned

    def _content(self, node: Node | None) -> Word | list[Word]:
        if node is not None and node.type == "array":
            words = self.words([n for n in node.named_children if n.type != "comment"])
            if not any(word.parts[0].kind == "code" for word in words if word.parts):
                return words
            return Word((Part("code", source(node)),), node.start_point[0] + 1)
        return self.word(node)

    def _parts(self, node: Node, is_quoted: bool) -> Iterator[Part]:
        """Yield the parts of one node of a word."""
        text, kind = source(node), node.type
        if kind in ("word", "number", "variable_name", "command_name") and not node.named_children:
            yield Part("text", re.sub(r"\\(.)", r"\1", text.replace("\\\n", "")))
        elif kind == "raw_string":
            yield Part("text", text[1:-1])
        elif kind == "ansi_c_string":
            yield Part("text", re.sub(r"\\n", "\n", text[2:-1]))
        elif kind == "arithmetic_expansion" and not names_in(text):
            number = self.number(Word((Part("code", text),)))
            yield Part(
                "code" if number is None else "text", text if number is None else str(number)
            )
        elif text in ("$(pwd)", "`pwd`") and isinstance(folder := self.values.get("PWD"), Word):
            yield from folder.parts
        elif kind in ("simple_expansion", "expansion"):
            yield from self._expanded(node, text, is_quoted)
        elif kind in ("string", "concatenation", "command_name", "word"):
            inner = is_quoted or kind == "string"
            at = node.start_byte
            for child in node.children:
                yield from _literal(node, at, child.start_byte, inner)
                if child.type == "string_content":
                    yield from _literal(node, child.start_byte, child.end_byte, True)
                elif child.is_named:
                    yield from self._parts(child, inner)
                at = child.end_byte
        else:
            yield Part("code", text, not is_quoted)

    def _expanded(self, node: Node, text: str, is_quoted: bool) -> Iterator[Part]:
        """Yield the parts of ``$NAME``, ``${NAME}``, ``${NAME:-x}``; of others the code."""
        if blank := text[: -len(text.lstrip())]:  # tree-sitter has it in the node
            yield Part("text", blank, not is_quoted)
            text = text.lstrip()
        default, plain = _DEFAULT.fullmatch(text), _NAME.fullmatch(text)
        array = _ARRAY.fullmatch(text)
        name = next((match[1] or (match[2] if match is plain else None)
                     for match in (default, plain, array) if match), None)  # fmt: skip
        if name and name.isdigit() and self.positional is not None:
            index = int(name) - 1
            words = self.positional[index : index + 1] if index >= 0 else ()
            yield from (part for word in words for part in word.parts)
            return
        assigned = self.values.get(name or "")
        if (
            not name
            or (name.isdigit() and not default)  # the job has no arguments
            or (array and isinstance(assigned, Word) and assigned.has_code)
        ):
            yield Part("code", text, not is_quoted)
            return
        if isinstance(assigned, list):
            joined = [p for word in assigned for p in (*word.parts, Part("text", " "))][:-1]
            assigned = Word(tuple(joined))
        if assigned is not None and not _is_opaque(assigned):
            self.spliced.add(name)
            yield from (replace(part, splits=not is_quoted) for part in assigned.parts)
        elif default and assigned is None and not name.startswith("SLURM_"):
            remaining = [child for child in node.named_children[1:]]
            for child in remaining:
                yield from (replace(p, splits=not is_quoted) for p in self._parts(child, is_quoted))
            if default[2].endswith("=") and remaining:
                self.values[name] = Word(tuple(p for c in remaining for p in self._parts(c, True)))
        else:
            yield Part("name", name, not is_quoted)

    def number(self, word: Word | None) -> int | None:
        """Return the whole number that a word stands for in the job; None where it is not known."""
        text = self.as_code(word, 0) if word else ""
        text = re.sub(r"\$\(\((.*?)\)\)", r"(\1)", text, flags=re.S)
        text = re.sub(r"\$\(expr (.*?)\)", lambda m: "(" + m[1].replace("\\", "") + ")", text)
        text = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda m: str(self._number_of(m[1])), text)
        if not re.fullmatch(r"[\d()+*/% -]+", text):
            return None
        try:  # digits and operators alone
            return int(eval(text.replace("/", "//"), {"__builtins__": {}}))
        except (SyntaxError, ArithmeticError, TypeError, ValueError):
            return None

    def as_code(self, word: Word, depth: int) -> str:
        """Return a word's text with those variables filled in that the script has set."""
        texts = []
        for part in word.parts:
            assigned = self.values.get(part.text) if part.kind == "name" else None
            if isinstance(assigned, Word) and depth < 9:
                texts.append(self.as_code(assigned, depth + 1))
            else:
                texts.append(Word((part,)).text)
        return "".join(texts)

    def _number_of(self, name: str) -> int | str:
        assigned = self.values.get(name)
        if isinstance(assigned, Word) and name not in self.pending:
            self.pending.append(name)  # a variable may refer to itself, through others
            number = self.number(assigned)
            self.pending.pop()
            return name if number is None else number
        return self.numbers.get(name, "?")


def _is_opaque(assigned: Word) -> bool:
    """Return whether a value is one word with code in it: it stays a variable."""
    return assigned.has_code and not any(
        part.kind == "text" and re.search(r"\s", part.text.strip()) for part in assigned.parts
    )


def _literal(node: Node, start: int, end: int, is_quoted: bool) -> Iterator[Part]:
    """Yield the text of a word between two of its nodes, without the quotes and escapes."""
    text = node.text[start - node.start_byte : end - node.start_byte].decode()
    if is_quoted:
        text = re.sub(r'\\([$`"\\\n])', lambda m: m[0] if m[1] == "\n" else m[1], text)
        if text == '"':
            return
    if text:
        yield Part("text", text)


def _split(word: Word) -> list[Word]:
    """Return the words that one becomes by the shell's splitting at blanks."""
    groups: list[list[Part]] = [[]]
    for part in word.parts:
        if part.kind != "text" or not part.splits:
            groups[-1].append(part)
            continue
        for piece in re.split(r"((?:\s|\\\n)+)", part.text):
            if re.match(r"\s|\\\n", piece):
                groups.append([])
            elif piece:
                groups[-1].append(Part("text", piece))
    return [Word(tuple(group), word.line) for group in groups if group]
