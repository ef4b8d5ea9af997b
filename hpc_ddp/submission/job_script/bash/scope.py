"""The variables of a script at one point, and the words that its nodes stand for there.

tree-sitter parses; decision 018 has the reasons.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

from hpc_ddp.core.job.variables import OF_A_RANK
from hpc_ddp.submission.job_script.bash.syntax import (
    Node,
    count_devices,
    is_added,
    is_pattern,
    names_in,
    sets_anything,
    source,
    with_counts,
)
from hpc_ddp.submission.job_script.bash.values import Value, is_readable, without_tail
from hpc_ddp.submission.job_script.bash.words import Part, Word, literal, split_text, split_words

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?[-=])(.*))?\})", re.S)
_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
# A job, or each of its workers, has these whatever its script does.
OF_A_JOB = re.compile(
    rf"SLURM\w*|HOME|USER|LOGNAME|TMPDIR|HOSTNAME|CUDA_VISIBLE_DEVICES|{OF_A_RANK}"
)
# Behind its name: all of an array, or of another variable, that `leave_open` has left open.
TAILS = ("[@]:0", "-")
_READS_DEVICES = re.compile(
    r"IFS=[\"']?,[\"']?\s+read\s+-r?a\s+(\w+)\s*<<<\s*\"?\$\{?CUDA_VISIBLE_DEVICES\}?\"?$"
)
# IFS as it was, or as it is in bash.
_DEFAULT_IFS = re.compile(r"\"?\$\{?\w+\}?\"?|\$' \\t\\n'")
_FORMATS = re.compile(r"(declare|typeset|local|export)\s+(-\w+\s+)*-\w*[ilu]")
# Bash's own variables that have another value each time.
_CHANGES = re.compile(r"S?RANDOM|SECONDS|LINENO|BASHPID|EPOCH(REAL)?SECONDS")


@dataclass
class Scope:
    """The variables of a script at one point: `values` by name, None for a value that only the job
    knows. `numbers` are the values of Slurm's variables that follow from the directives. `is_open`
    says that a file has been sourced or a text evaluated, which may have set any variable."""

    values: dict[str, Value] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    not_set: set[str] = field(default_factory=set)  # by Slurm, for lack of an option
    arguments: Sequence[Word] | None = None  # of the script, function or bash -c; None: unknown
    are_set: bool = False  # a set-up line gives the job the script's arguments
    has_none: bool = False  # the script is taken to be submitted without any
    is_open: bool = False
    secrets: dict[str, Word] = field(default_factory=dict)  # values of variables that hold one
    hides: Callable[[str, str], bool] = lambda name, text: False  # whether a value is a secret
    formatted: set[str] = field(default_factory=set)  # variables whose values bash changes
    counts_python: bool = False  # plain Python is a launch also in a list or a pipeline
    has_ifs: bool = False  # IFS is not bash's own
    of_shell: Set[str] = frozenset()  # the variables of the shell that will submit
    of_devices: dict[str, str] = field(default_factory=dict)  # lengths of arrays of GPUs, by name
    versions: Counter[str] = field(default_factory=Counter)
    guesses: set[str] = field(default_factory=set)  # variables that are taken to be unset
    defaults: set[str] = field(default_factory=set)  # those whose defaults are used: ${NAME:-x}

    def child(self, arguments: Sequence[Word] | None, are_set: bool) -> Scope:
        """Return the scope of a child shell, whose assignments change nothing here."""
        scope = replace(self, arguments=arguments, are_set=are_set)
        scope.values, scope.versions = {**self.values}, Counter(self.versions)
        return scope

    def words(self, nodes: Iterable[Node], line: int | None = None) -> list[Word]:
        """Expand nodes of a command into words, as the shell does; ``${NAME:=x}`` sets NAME. Their
        line is `line`, or that of each node, or of ``$@``. ``$(which NAME)`` becomes NAME."""
        result: list[Word] = []
        for node in nodes:
            text, at = source(node), line or node.start_point[0] + 1
            match = _ARRAY.fullmatch(text.strip('"') if "@" in text else text)
            array = self.values.get(match[1]) if match else None
            if isinstance(array, list):
                words = array if text[0] == '"' else [w for word in array for w in split_text(word)]
                result += [replace(word, line=word.line if line is None else at) for word in words]
            elif place := re.fullmatch(r"(?:\$\(|`)(?:which|command -v) ([\w.-]+)[`)]", text):
                result.append(literal(place[1], at))
            elif re.fullmatch(r'"?\$\{?[@*]\}?"?', text) and self._has_all():
                result += self.arguments or ()
            else:
                words = split_words(Word(tuple(self._parts(node, False)), at))
                is_empty = not words and node.type in ("string", "raw_string")
                result += [literal("", at)] if is_empty else words
        return result

    def word(self, node: Node | None) -> Word:
        """Return the value in an assignment as one word, not split; an empty word for None."""
        if node is None:
            return literal("")
        is_plain = not node.named_children
        parts = (replace(part, splits=False) for part in self._parts(node, is_plain))
        return Word(tuple(parts), node.start_point[0] + 1)

    def assign(self, node: Node) -> str:
        """Set the variable of a ``variable_assignment``, also by ``+=``, and return its name. It
        becomes None, known by the job alone, by an assignment to one element of an array, or by one
        that needs an old value which is not known."""
        target, content = node.child_by_field_name("name"), node.child_by_field_name("value")
        name = re.match(r"\w*", source(target))[0]  # type: ignore[index]
        if name == "IFS":
            self.has_ifs = not _DEFAULT_IFS.fullmatch(source(content))
        assigned: Value = None  # of an element of an array
        if content is not None and content.type == "array":
            assigned = self.words([n for n in content.named_children if n.type != "comment"])
        elif target.type == "variable_name":
            assigned = self.word(content)
        old = self.values.get(name)
        if self._is_open_at_its_end(name) and is_added(name, source(node)):
            self.leave_open(name)
            return name
        if source(node)[len(source(target)) :].startswith("+="):
            if self._is_open_at_its_end(name):
                assigned = None
            elif isinstance(old, list) and isinstance(assigned, list):
                assigned = [*old, *assigned]
            elif isinstance(old, Word) and isinstance(assigned, Word):
                assigned = Word((*old.parts, *assigned.parts), assigned.line)
            else:
                assigned = None
        if isinstance(assigned, Word) and self.hides(name, assigned.text):
            self.secrets[name] = assigned  # words have its name alone
        if isinstance(assigned, Word) and name in assigned.names:
            # Another value that has it only the job knows.
            assigned = old if len(assigned.parts) == 1 and assigned.parts[0].name else None
        is_named = _CHANGES.fullmatch(name) or name in {*self.secrets, *self.formatted}
        self.set(name, None if is_named else assigned)
        return name

    def value_of(self, name: str) -> Value:
        """Return the value of a variable that is set, also of one that holds a secret."""
        return self.secrets.get(name, self.values[name])

    def leave_open(self, name: str) -> None:
        """Put code for all that the job adds to the variable `name`, which is known, behind its
        value; further additions belong to that code. The lines that set the variable up to here
        are to leave it empty in the job."""
        old = self.values[name]
        self.versions[name] += 1
        code = [f"${{{name}{tail}}}" for tail in TAILS]  # in a form that is not expanded again
        if isinstance(old, list):
            tail = Word((self._code_part(code[0], True),), old[-1].line if old else 0)
            self.values[name] = [*without_tail(old, tail), tail]
        elif old is not None:
            part = self._code_part(code[1], False)
            is_open = old.parts[-1:] and old.parts[-1].text == part.text
            parts = old.parts[:-1] if is_open else (*old.parts, Part(" "))
            self.values[name] = replace(old, parts=(*parts, part))

    def _is_open_at_its_end(self, name: str) -> bool:
        """Return whether `leave_open` has put code behind the value of the variable `name`."""
        old = self.values.get(name)
        parts = (
            [p for word in old[-1:] for p in word.parts]
            if isinstance(old, list)
            else ([*old.parts[-1:]] if old else [])
        )
        return any(part.text in {f"${{{name}{tail}}}" for tail in TAILS} for part in parts)

    def set(self, name: str, assigned: Value) -> None:
        """Set the variable `name`; to None where from here on only the job knows its value."""
        self.values[name] = assigned
        self.versions[name] += 1
        self.of_devices.pop(name, None)

    def forget_changes(self, text: str, first: str, names: Set[str], growing: Set[str]) -> None:
        """Forget what a command may change, by its `text` and its `first` word: the variables
        `names`, of which `growing` keep what they have (`leave_open`), the script's arguments, and
        the folder."""
        if first == "eval":
            names = names | {*re.findall(r"\b([A-Za-z_]\w*)=", text)}
        for name in growing:
            self.leave_open(name)
        for name in names - growing:
            self.set(name, None)
        self.has_ifs = self.has_ifs and not (first == "unset" and "IFS" in names)
        if re.search(r"\bshift\b|\bset\s+--|\bgetopts\b", text):
            self.has_none = False
            if first != "shift":
                self.arguments = None  # from here on only the job knows them
        if sets_anything(text):
            self.is_open = True
        self.formatted |= names if _FORMATS.match(text) else set()
        if match := _READS_DEVICES.match(text):
            self.of_devices[match[1]] = count_devices(self.values.get("CUDA_VISIBLE_DEVICES"))
        before = r"[\s;&\"']" if first == "eval" else r"[\s;&]"
        if first != "cd" and re.search(rf"(^|{before})(cd|pushd|popd)\b", text):
            self.set("PWD", None)

    def shift_arguments(self, last: Word) -> None:
        """Drop the arguments that a ``shift`` drops, whose `last` word is their number, if any."""
        count = self.number(last)  # of `shift` alone there is none
        self.arguments = (self.arguments or ())[1 if count is None else count :]

    def change_folder(self, words: Sequence[Word]) -> None:
        """Set PWD to the folder of a ``cd`` of `words`; to None where only the job knows it."""
        way = [self.values.get("PWD"), *words[1:]]
        texts = [w.text for w in way if isinstance(w, Word) and w.is_static]
        path = os.path.normpath(os.path.join(*texts)) if len(texts) == 2 else ""
        self.set("PWD", literal(path) if path else None)

    def is_stale(self, word: Word) -> bool:
        """Return whether a variable of a word has been set again since the word was read."""
        return any(part.version < self._version(part.text) for part in word.code)

    def _version(self, code: str) -> int:
        return sum(self.versions[name] for name in names_in(code))

    def _code_part(self, text: str, is_quoted: bool) -> Part:
        return Part(text, True, not is_quoted, self._version(text))

    def _parts(self, node: Node, is_quoted: bool) -> Iterator[Part]:
        """Yield the parts of one node of a word, which stands in double quotes if `is_quoted`. Text
        is without its quotes and escapes, with the home folder for ``~``; a variable becomes what
        `_expanded` yields; anything else, as a pattern of files, is code."""
        text, kind = source(node), node.type
        is_leaf = not node.named_children
        if not is_quoted and is_pattern(node):
            yield self._code_part(text, False)
        elif is_leaf and kind in ("word", "number", "variable_name", "command_name"):
            start = re.match(r"([A-Za-z_]\w*=)?(?=~(/|$))", text)  # also of NAME=~/file
            at = start.end() if start else 0
            home = text[:at] + os.path.expanduser(text[at:]) if start else text
            yield Part(re.sub(r"\\(.)", r"\1", home.replace("\\\n", "")))
        elif kind == "raw_string":
            yield Part(text[1:-1])
        elif kind == "ansi_c_string" and not re.search(r"\\[^nt]", text):
            yield Part(text[2:-1].replace(r"\n", "\n").replace(r"\t", "\t"))
        elif kind == "arithmetic_expansion" and not names_in(text):
            number = self.number(Word((Part(text, True),)))
            yield self._code_part(text, True) if number is None else Part(str(number))
        elif text in ("$(pwd)", "`pwd`") and isinstance(folder := self.values.get("PWD"), Word):
            yield from folder.parts
        elif re.fullmatch(r"(\$\(|`)(whoami|id -un)[)`]", text):
            yield self._code_part("$USER", is_quoted)
        elif kind in ("simple_expansion", "expansion"):
            variable = re.sub(r"^(\s|\\\n)+", "", text)
            blank = text[: -len(variable)]  # tree-sitter has it in the node
            yield from [Part(blank, False, not is_quoted)] if blank else []
            yield from self._expanded(node, variable, is_quoted)
        elif kind in ("string", "concatenation", "command_name", "word"):
            inner = is_quoted or kind == "string"
            at = node.start_byte
            for child in node.children:
                yield from _literal(node, at, child.start_byte, inner)
                if child.type == "string_content":
                    yield from _literal(node, child.start_byte, child.end_byte, True)
                elif child.is_named:
                    yield from self._parts(child, inner)
                elif child.type == "$":  # at the end, and so a letter, or the shell's process id
                    sign = source(child)
                    yield Part(sign) if sign == "$" else self._code_part(sign, inner)
                elif child.type == '"':  # tree-sitter has blanks before it in the node
                    yield from _literal(node, child.start_byte, child.end_byte - 1, True)
                at = child.end_byte
        else:
            yield self._code_part(text, is_quoted or kind == "arithmetic_expansion")

    def _expanded(self, node: Node, text: str, is_quoted: bool) -> Iterator[Part]:
        """Yield the parts of the value of ``$NAME``, ``$1``, ``$#``, ``${NAME[@]}`` or ``${NAME}``,
        also with a default (``:-``, ``-``, ``:=``, ``=``); `text` is that of `node`, which stands
        in double quotes if `is_quoted`. Another form, or a value that only the job knows or that
        can't stand there (`_is_readable`), stays code."""
        match, array = _VARIABLE.fullmatch(text), _ARRAY.fullmatch(text)
        name = array[1] if array else (match[1] or match[2]) if match else ""
        is_all = bool(re.fullmatch(r"\$\{?[@*]\}?", text)) and self._has_all()
        if self.has_ifs and (not is_quoted or "[*]" in text):  # which splits and joins otherwise
            yield self._code_part(text, is_quoted)
            return
        assigned = list(self.arguments or ()) if is_all else self.values.get(name)
        is_given = len(self.arguments or ()) >= int(name or 0) if name.isdigit() else False
        if text in ("$#", "${#}") and self.arguments is not None:
            yield Part(str(len(self.arguments)))
        elif name.isdigit() and self.arguments is not None and (is_given or not match[3]):  # type: ignore[index]
            if name != "0":
                for word in self.arguments[int(name) - 1 : int(name)]:
                    yield from word.parts
        elif isinstance(assigned, list) and (array or not match or not match[3]):
            words = assigned if array or is_all else assigned[:1]
            for index, word in enumerate(words):
                yield from [Part(" ", False, not is_quoted)] if index else []
                yield from (replace(part, splits=not is_quoted) for part in word.parts)
        elif (
            isinstance(assigned, Word)
            and is_readable(assigned, is_quoted)
            and (not (match and match[3]) or (assigned.text and assigned.is_static))
        ):
            yield from (replace(part, splits=not is_quoted) for part in assigned.parts)
        elif match and match[3] and self._is_unset(name, match[3]):
            yield from self._default(match, node.named_children[1:], is_quoted)
        else:
            yield self._code_part(text, is_quoted or name in self.secrets)

    def _default(self, match: re.Match[str], nodes: list[Node], is_quoted: bool) -> Iterator[Part]:
        """Yield the parts of the default, `nodes`, of a variable that `_VARIABLE` matches, in
        double quotes if `is_quoted`. Behind ``:=`` and ``=`` the variable is set to it, too."""
        for child in nodes:
            yield from (replace(p, splits=not is_quoted) for p in self._parts(child, is_quoted))
        if match[3].endswith("=") and nodes:
            parts = (part for child in nodes for part in self._parts(child, True))
            self.set(match[1] or match[2], Word(tuple(parts)))

    def _has_all(self) -> bool:
        """Return whether ``$@`` is known; note it in `defaults` where no argument is known."""
        if self.arguments is None and self.has_none:
            self.defaults.add("@")
        return self.arguments is not None or self.has_none

    def _is_unset(self, name: str, operator: str) -> bool:
        """Return whether the default behind `operator` (``:-``, ``-``, ``:=``, ``=``) is used: the
        variable is empty and the operator has a colon, or neither the script, a file that it
        sources, its arguments nor each job (`OF_A_JOB`) sets the variable. The latter is noted in
        `defaults`, since the shell that submits may set it."""
        if name in self.values:
            assigned = self.values[name]
            is_empty = isinstance(assigned, Word) and assigned.is_static and not assigned.text
            return is_empty and operator[0] == ":"
        if name in self.not_set:
            self.defaults.add(name)
            return True
        is_gone = name.isdigit() and self.are_set and self.arguments is None
        if self.is_open or OF_A_JOB.fullmatch(name) or is_gone or name in self.of_shell:
            return False
        if self.arguments is None or not name.isdigit():
            self.defaults.add(name)
        return True

    def number_per_node(self, word: Word | None) -> int | None:
        """Return the factor n where a word stands for n times the job's number of nodes, which is
        not known; None for another word."""
        counts = [
            replace(self, numbers={**self.numbers, "SLURM_NNODES": n, "SLURM_JOB_NUM_NODES": n})
            for n in (1, 2, 3)
        ]
        once, twice, thrice = (scope.number(word) for scope in counts)
        is_factor = once and (twice, thrice) == (2 * once, 3 * once)
        return once if is_factor and "SLURM_NNODES" not in self.numbers else None

    def is_each_gpu(self, word: Word) -> bool:
        """Return whether a word stands for the product of the job's nodes and a node's GPUs, both
        of which are not known."""
        names = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE")
        if self.numbers.keys() & {*names}:
            return False
        products = [
            replace(self, numbers={**dict.fromkeys(names[:2], n), **dict.fromkeys(names[2:], 10)})
            for n in (2, 3)
        ]
        return [scope.number(word) for scope in products] == [20, 30]

    def number(self, word: Word | None, pending: tuple[str, ...] = ()) -> int | None:
        """Return the whole number that a word stands for in the job, as 16 for
        ``$((8*SLURM_NNODES))`` on two nodes; None where it is not known. `pending` has the
        variables that are being looked up: one that refers to itself ends the search."""

        def number_of(match: re.Match[str]) -> str:
            name, assigned = match[1], self.values.get(match[1])
            if isinstance(assigned, Word) and name not in pending:
                inner = self.number(assigned, (*pending, name))
                return name if inner is None else str(inner)
            return str(self.numbers.get(name, "?"))

        text = word.text if word else ""
        default = re.compile(r"\$\{(\w+):?-([^}]*)\}")
        text = default.sub(lambda m: m[2] if m[1] in self.not_set else f"${m[1]}", text)
        text = re.sub(r"\$\(\((.*?)\)\)", r"(\1)", text, flags=re.S)
        text = with_counts(text, self)
        text = re.sub(r"\$\(expr (.*?)\)", lambda m: "(" + m[1].replace("\\", "") + ")", text)
        text = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", number_of, text)
        if not re.fullmatch(r"[\d()+*/% -]+", text) or "**" in text:
            return None
        try:  # digits and operators alone
            return int(eval(text.replace("/", "//"), {"__builtins__": {}}))
        except (SyntaxError, ArithmeticError, TypeError, ValueError):
            return None


def _literal(node: Node, start: int, end: int, is_quoted: bool) -> Iterator[Part]:
    """Yield, as one part, the text of a word (`node`) from byte `start` of the script to `end`;
    within double quotes (`is_quoted`) without them and without the backslashes of escapes, except
    at a line's end."""
    text = node.text[start - node.start_byte : end - node.start_byte].decode()
    if is_quoted and text != '"':
        text = re.sub(r'\\([$`"\\\n])', lambda m: m[0] if m[1] == "\n" else m[1], text)
    elif is_quoted:
        return
    if text:
        yield Part(text)
