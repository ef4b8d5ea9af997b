"""The variables of a script at one point, and the words that its nodes stand for there."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

from hpc_ddp.core.job.variables import OF_A_RANK
from hpc_ddp.submission.job_script.bash import counts
from hpc_ddp.submission.job_script.bash.blocks import adds_words
from hpc_ddp.submission.job_script.bash.syntax import (
    ALL_ARGUMENTS,
    Node,
    is_pattern,
    names_in,
    source,
)
from hpc_ddp.submission.job_script.bash.values import (
    Counted,
    Value,
    is_readable,
    join_paths,
    join_values,
    with_doubt,
    without_tail,
)
from hpc_ddp.submission.job_script.bash.words import (
    Part,
    Word,
    literal,
    split_text,
    split_words,
    text_part,
)

# [1] or [2] the name in $NAME and ${NAME}; [3] the operator before a default, as :- of ${NAME:-x}.
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?[-=?])(.*))?\})", re.S)
_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
# A job, or each of its workers, has these whatever its script does.
OF_A_JOB = re.compile(
    rf"SLURM\w*|HOME|USER|LOGNAME|TMPDIR|HOSTNAME|CUDA_VISIBLE_DEVICES|WITH_CONDA|{OF_A_RANK}"
)
# Code that `leave_open` puts behind the value of an array, ${NAME[@]:0}, and of another variable,
# ${NAME-}. These forms are no plain names, so that no value takes their place.
TAILS = ("[@]:0", "-")
# IFS as it was, or as it is in bash.
_DEFAULT_IFS = re.compile(r"\"?\$\{?\w+\}?\"?|\$' \\t\\n'")
# Attributes by which bash changes a value: a whole number, lower case, upper case.
_FORMATS = re.compile(r"(declare|typeset|local|export)\s+(-\w+\s+)*-\w*[ilu]")
_LEAVES = ("word", "number", "variable_name", "command_name")
_CHANGES = re.compile(r"S?RANDOM|SECONDS|LINENO|BASHPID|EPOCH(REAL)?SECONDS")  # by themselves


@dataclass
class Scope:
    """The variables of a script at one point, and what follows from its directives."""

    values: dict[str, Value] = field(default_factory=dict)  # None: only the job knows the value
    numbers: dict[str, int] = field(default_factory=dict)  # of Slurm's variables, by directives
    texts: dict[str, str] = field(default_factory=dict)  # the same as Slurm writes them, and others
    not_set: set[str] = field(default_factory=set)  # by Slurm, for lack of an option
    arguments: Sequence[Word] | None = None  # of the script, function or bash -c; None: unknown
    arguments_are_set: bool = False  # a set-up line gives the job the script's arguments
    lacks_arguments: bool = False  # the script is taken to be submitted without any
    has_unknown_names: bool = False  # a file or text that is not known may have set any variable
    secrets: dict[str, Word] = field(default_factory=dict)  # values of variables that hold one
    hides: Callable[[str, str], bool] = lambda name, text: False  # whether a value is a secret
    formatted: set[str] = field(default_factory=set)  # variables whose values bash changes
    counted: Counted = Counted.PLAIN_PYTHON  # as launches
    has_other_ifs: bool = False  # IFS is not bash's own
    shell_names: Set[str] = frozenset()  # the variables of the shell that will submit
    earlier: dict[str, Value] = field(default_factory=dict)  # the last known value of each None
    gpu_counts: dict[str, str] = field(default_factory=dict)  # lengths of arrays of GPUs, by name
    versions: Counter[str] = field(default_factory=Counter)  # how often each has been set so far
    guesses: set[str] = field(default_factory=set)  # variables that are taken to be unset
    loaded_functions: dict[str, str] = field(default_factory=dict)  # bodies, of files, by name
    defaults: set[str] = field(default_factory=set)  # those whose defaults are used: ${NAME:-x}

    def child(self, arguments: Sequence[Word] | None, arguments_are_set: bool) -> Scope:
        """Return the scope of a child shell with its own `arguments` and `arguments_are_set`, as in
        the fields. Its assignments change no value here, while `secrets`, `formatted`, `earlier`,
        `gpu_counts`, `guesses` and `defaults` are shared."""
        scope = replace(self, arguments=arguments, arguments_are_set=arguments_are_set)
        scope.values, scope.versions = {**self.values}, Counter(self.versions)
        return scope

    def words(self, nodes: Iterable[Node], line: int | None = None) -> list[Word]:
        """Return the words that the shell makes of a command's nodes. ``${NAME:=x}`` also sets
        NAME; ``$(which NAME)`` becomes NAME. Each word's line is `line`; for None that of its
        node, or an array's element's own. The words of ``$@`` always keep their lines."""
        result: list[Word] = []
        for node in nodes:
            text, at = source(node), line or node.start_point[0] + 1
            # In quotes only [@] gives all words: "${A[*]}" is one word.
            match = _ARRAY.fullmatch(text.strip('"') if "@" in text else text)
            array = self.values.get(match[1]) if match else None
            if isinstance(array, list):
                is_quoted = text[0] == '"'
                words = array if is_quoted else [piece for w in array for piece in split_text(w)]
                result += [replace(word, line=word.line if line is None else at) for word in words]
            elif which := re.fullmatch(r"(?:\$\(|`)(?:which|command -v) ([\w.-]+)[`)]", text):
                result.append(literal(which[1], at))
            elif self._is_all_arguments(text.strip('"')):
                result += self.arguments or ()
            else:
                words = split_words(Word(tuple(self._parts(node, False)), at))
                is_empty = not words and node.type in ("string", "raw_string")  # "", '' or "$A"
                result += [literal("", at)] if is_empty else words
        return result

    def word(self, node: Node | None) -> Word:
        """Return the value in an assignment, `node`, as one word, which is not split at blanks; an
        empty word for None, as of ``A=``."""
        if node is None:
            return literal("")
        is_plain = not node.named_children  # is read as if quoted: in A=*.py the star is a star
        parts = (replace(part, splits=False) for part in self._parts(node, is_plain))
        return Word(tuple(parts), node.start_point[0] + 1)

    def assign(self, node: Node) -> str:
        """Set the variable of an assignment, `node`, also by ``+=``, and return its name.

        The value becomes None by an assignment to one element of an array, or that needs an old
        value which is not known, and for one of `_CHANGES`, `formatted` or `secrets`. A secret's
        value goes to `secrets`. Words added to an open variable (`leave_open`) change only its
        version."""
        target, content = node.child_by_field_name("name"), node.child_by_field_name("value")
        name = re.match(r"\w*", source(target))[0]  # type: ignore[index]
        if name == "IFS":
            self.has_other_ifs = not _DEFAULT_IFS.fullmatch(source(content))
        assigned: Value = None  # of an element of an array
        if content is not None and content.type == "array":
            assigned = self.words([n for n in content.named_children if n.type != "comment"])
        elif target.type == "variable_name":
            assigned = self.word(content)
        old = self.values.get(name)
        if self._is_left_open(name) and adds_words(name, source(node)):
            self.leave_open(name)
            return name
        if source(node)[len(source(target)) :].startswith("+="):
            assigned = None if self._is_left_open(name) else join_values(old, assigned)
        if isinstance(assigned, Word) and self.hides(name, assigned.text):
            self.secrets[name] = assigned
        if isinstance(assigned, Word) and name in assigned.names:
            # A=$A leaves the old value; that of A=${A#*:} may be known, not that of A=x$A.
            is_old = len(assigned.parts) == 1 and assigned.parts[0].name
            self.earlier[name] = assigned
            assigned = old if is_old else counts.known_part(assigned, self)
        is_unknown = _CHANGES.fullmatch(name) or name in {*self.secrets, *self.formatted}
        self.set(name, None if is_unknown else assigned)
        return name

    def value_of(self, name: str) -> Value:
        """Return the value of a variable of `values`, from `secrets` if it holds one."""
        return self.secrets.get(name, self.values[name])

    def leave_open(self, name: str) -> None:
        """Leave the variable `name`, which must be set, open for words that the job adds to it: the
        value ``srun a.out`` becomes ``srun a.out ${NAME-}``. Where that code is there already, or
        the value is None, only the version changes.

        In the job the variable has to be empty at first (`open_commands.leave_empty`): then
        ``${NAME-}`` is the added words alone.
        """
        old = self.values[name]
        self.versions[name] += 1
        code = [f"${{{name}{tail}}}" for tail in TAILS]
        if isinstance(old, list):
            tail = Word((self._code_part(code[0], True),), old[-1].line if old else 0)
            self.values[name] = [*without_tail(old, tail), tail]
        elif old is not None:
            part = self._code_part(code[1], False)
            is_left_open = old.parts[-1:] and old.parts[-1].text == part.text
            parts = old.parts[:-1] if is_left_open else (*old.parts, Part(" "))
            self.values[name] = replace(old, parts=(*parts, part))

    def _is_left_open(self, name: str) -> bool:
        """Return whether `leave_open` has left the variable `name` open."""
        old = self.values.get(name)
        words = old[-1:] if isinstance(old, list) else [old] if old else []
        parts = [part for word in words for part in word.parts[-1:]]
        return any(part.text in {f"${{{name}{tail}}}" for tail in TAILS} for part in parts)

    def set(self, name: str, assigned: Value) -> None:
        """Set the value of the variable `name` from here on, None if only the job knows it."""
        old, self.values[name] = self.values.get(name), assigned
        self.earlier |= {name: old} if old and assigned is None else {}
        self.versions[name] += 1
        self.gpu_counts.pop(name, None)

    def forget_changes(self, text: str, first: str, names: Set[str], growing: Set[str]) -> None:
        """Forget the values that a command may change. `text` is the command, `first` its first
        word, `names` the variables that it may set, `growing` those of them, all set, to which it
        only adds words: these keep their values, with code behind them (`leave_open`). The other
        ones, and those that the text of an ``eval`` assigns, become None. So do the arguments
        (`_forget_arguments`), and PWD by a ``cd`` in the text (one that is the command itself is
        left to `change_folder`).

        `has_other_ifs` may change (by ``unset IFS``), `formatted` (by ``declare -i`` and the like)
        and `gpu_counts` (`count_read_devices`).
        """
        names = names | ({*re.findall(r"\b([A-Za-z_]\w*)=", text)} if first == "eval" else set())
        for name in growing:
            self.leave_open(name)
        for name in names - growing:
            self.set(name, None)
        self.has_other_ifs = self.has_other_ifs and not (first == "unset" and "IFS" in names)
        self._forget_arguments(text, first)
        self.formatted |= names if _FORMATS.match(text) else set()
        self.gpu_counts.update(counts.count_read_devices(text, self.values))
        before = r"[\s;&\"']" if first == "eval" else r"[\s;&]"  # eval runs texts in quotes, too
        if first != "cd" and re.search(rf"(^|{before})(cd|pushd|popd)\b", text):
            self.set("PWD", None)

    def doubt_values(self, line: int) -> None:
        """Set `has_unknown_names`, for a command of a `line` that may set any variable. The values
        that the script has set so far stay, with that line as their parts' `doubt`."""
        self.has_unknown_names = True
        for name, assigned in self.values.items():
            if self.versions[name] and assigned and name != "PWD":
                self.values[name] = with_doubt(assigned, (name, line))

    def _forget_arguments(self, text: str, first: str) -> None:
        """Forget the script's arguments where a command's `text` has ``set --``, ``getopts`` or
        ``shift``. If ``shift`` is its `first` word, arguments that are known stay so."""
        if re.search(r"\bshift\b|\bset\s+--|\bgetopts\b", text):
            self.lacks_arguments = False
            if first != "shift":
                self.arguments = None

    def change_folder(self, words: Sequence[Word]) -> None:
        """Set PWD to the folder to which a ``cd`` of these `words` leads; to None where only the
        job knows it, and for a ``cd`` without a folder or with options."""
        changed = {"HOME", "USER"} & self.values.keys()  # set by the script, to what is not known
        path = join_paths([self.values.get("PWD"), *words[1:]], changed)
        self.set("PWD", literal(path) if path else None)

    def is_stale(self, word: Word) -> bool:
        """Return whether a word is stale: a variable of its code has been set again since the word
        was read, so that the code would have another value now."""
        return any(part.version < self._version(part.text) for part in word.code)

    def _version(self, code: str) -> int:
        """Return how often the variables in code have been set so far, all together."""
        return sum(self.versions[name] for name in names_in(code))

    def _code_part(self, text: str, is_quoted: bool) -> Part:
        """Return code as a part of a word, with the version that its variables have now."""
        return Part(text, is_code=True, splits=not is_quoted, version=self._version(text))

    def _parts(self, node: Node, is_quoted: bool) -> Iterator[Part]:
        """Yield the parts of one node of a word, which stands in double quotes if `is_quoted`.

        Text is without its quotes and escapes, with the home folder for ``~``. A variable becomes
        what `_expand_variable` yields, ``$(pwd)`` the folder if it is known. All other code, and a
        pattern of files, stays code. ``${NAME:=x}`` sets NAME.
        """
        text, kind = source(node), node.type
        if kind in ("simple_expansion", "expansion", "command_substitution"):
            code = re.sub(r"^(\s|\\\n)+", "", text)
            blank, text = text[: -len(code)].replace("\\\n", ""), code  # tree-sitter has it there
            yield from [Part(blank, splits=not is_quoted)] if blank else []
        if not is_quoted and is_pattern(node):
            yield self._code_part(text, False)
        elif not node.named_children and kind in _LEAVES:
            # Of ~/file, ~user/file and NAME=~/file.
            start = re.match(r"([A-Za-z_]\w*=)?(?=~[\w.-]*(/|$))", text)
            at = start.end() if start else len(text)
            path = text[:at] + os.path.expanduser(text[at:])
            yield Part(re.sub(r"\\(.)", r"\1", path.replace("\\\n", "")))
        elif kind == "raw_string":  # 'text', in which a backslash before a line's end is a letter
            yield from map(Part, re.split(r"(?<=\\)(?=\n)", text[1:-1]))
        elif kind == "ansi_c_string" and not re.search(r"\\[^nt]", text):  # $'text'
            yield Part(text[2:-1].replace(r"\n", "\n").replace(r"\t", "\t"))
        elif kind == "arithmetic_expansion" and not names_in(text):  # $((2*4))
            number = counts.whole_number(Word((Part(text, is_code=True),)), self)
            yield self._code_part(text, True) if number is None else Part(str(number))
        elif text in ("$(pwd)", "`pwd`") and isinstance(folder := self.values.get("PWD"), Word):
            yield from folder.parts
        elif re.fullmatch(r"(\$\(|`)(whoami|id -un)[)`]", text):
            yield self._code_part("$USER", is_quoted)
        elif kind in ("simple_expansion", "expansion"):
            yield from self._expand_variable(node, text, is_quoted)
        elif kind in ("string", "concatenation", "command_name", "word"):
            yield from self._parts_of_children(node, is_quoted or kind == "string")
        else:
            yield self._code_part(text, is_quoted or kind == "arithmetic_expansion")

    def _parts_of_children(self, node: Node, is_quoted: bool) -> Iterator[Part]:
        """Yield the parts of a node's children, and of the text between them, which is in no child;
        all of it stands in double quotes if `is_quoted`."""
        at = node.start_byte
        for child in node.children:
            yield from text_part(node, at, child.start_byte, is_quoted)
            if child.type == "string_content":
                yield from text_part(node, child.start_byte, child.end_byte, True)
            elif child.is_named:
                yield from self._parts(child, is_quoted)
            elif child.type == "$":  # at the end, and so a letter; or $$, the shell's process id
                sign = source(child)
                yield Part(sign) if sign == "$" else self._code_part(sign, is_quoted)
            elif child.type == '"':  # tree-sitter has blanks before it in the node
                yield from text_part(node, child.start_byte, child.end_byte - 1, True)
            at = child.end_byte

    def _expand_variable(self, node: Node, text: str, is_quoted: bool) -> Iterator[Part]:
        """Yield the parts of the value of ``$NAME``, ``$1``, ``$#``, ``$@``, ``${NAME[@]}`` or
        ``${NAME}``, also with a default: ``${NAME:-x}``, and so with ``-``, ``:=`` and ``=``.

        `text` is that of `node`, in double quotes if `is_quoted`. Another form stays code; so does
        a value that only the job knows, or that can't stand in its place (`is_readable`).
        """
        match, array = _VARIABLE.fullmatch(text), _ARRAY.fullmatch(text)
        name = array[1] if array else (match[1] or match[2]) if match else ""
        operator = match[3] if match else None
        is_all = bool(re.fullmatch(r"\$\{?[@*]\}?", text)) and self._knows_all_arguments()
        if self.has_other_ifs and (not is_quoted or "[*]" in text):  # it splits and joins words
            yield self._code_part(text, is_quoted)
            return
        assigned = list(self.arguments or ()) if is_all else self.values.get(name)
        is_number = name.isdigit() and int(name) > 0 and self.arguments is not None
        is_given = is_number and len(self.arguments or ()) >= int(name)
        if text in ("$#", "${#}") and self.arguments is not None:
            yield Part(str(len(self.arguments)))
        elif is_number and (is_given or not operator):
            words = (self.arguments or ())[int(name) - 1 : int(name)]  # none where there is none
            yield from (replace(p, splits=not is_quoted) for word in words for p in word.parts)
        elif isinstance(assigned, list) and (array or not match or not operator):
            elements = assigned if array or is_all else assigned[:1]  # $A: the first element
            for index, word in enumerate(elements):
                yield from [Part(" ", splits=not is_quoted)] if index else []
                yield from (replace(part, splits=not is_quoted) for part in word.parts)
        elif (
            isinstance(assigned, Word)
            and is_readable(assigned, is_quoted)
            and (not operator or (assigned.text and assigned.is_static))
        ):
            yield from (replace(part, splits=not is_quoted) for part in assigned.parts)
        # A number is never empty: ${N:-4} of Slurm's number of GPUs is that number.
        elif isinstance(assigned, Word) and operator and counts.whole_number(assigned, self):
            yield from assigned.parts
        elif match and operator and "?" not in operator and self.needs_default(name, operator):
            yield from self._default_parts(match, node.named_children[1:], is_quoted)
        else:
            is_one_word = name in self.secrets and " " not in self.secrets[name].text
            yield self._code_part(text, is_quoted or is_one_word)

    def _default_parts(
        self, match: re.Match[str], nodes: list[Node], is_quoted: bool
    ) -> Iterator[Part]:
        """Yield the parts of a default, whose `nodes` stand in double quotes if `is_quoted`. Behind
        ``:=`` and ``=`` the variable is set to it, too. `match` is by `_VARIABLE`."""
        for child in nodes:
            yield from (replace(p, splits=not is_quoted) for p in self._parts(child, is_quoted))
        if match[3].endswith("=") and nodes:
            parts = (part for child in nodes for part in self._parts(child, True))
            self.set(match[1] or match[2], Word(tuple(parts)))

    def _is_all_arguments(self, text: str) -> bool:
        """Return whether a word is ``$@``, or ``${@:2}`` of a script without arguments, and the
        arguments are known, as by `_knows_all_arguments`."""
        is_whole = ":" not in text or not self.arguments
        return bool(ALL_ARGUMENTS.fullmatch(text)) and is_whole and self._knows_all_arguments()

    def _knows_all_arguments(self) -> bool:
        """Return whether ``$@`` is known. Where it is taken to be empty, since no argument is
        given, ``@`` is added to `defaults`."""
        if self.arguments is None and self.lacks_arguments:
            self.defaults.add("@")
        return self.arguments is not None or self.lacks_arguments

    def needs_default(self, name: str, operator: str) -> bool:
        """Return whether the default behind `operator` (``:-``, ``-``, ``:=``, ``=``) is used:
        where the variable's value is empty and the operator has a colon; where Slurm does not set
        the variable (`not_set`); and where neither the script, a file that it sources, its
        arguments, the submitting shell nor each job (`OF_A_JOB`) sets it.

        In the last two cases `name` is added to `defaults`, since the shell may set it by the time
        of the submit; the number of an argument which is known to be missing is not added.
        """
        if name in self.values:
            assigned = self.values[name]
            is_empty = isinstance(assigned, Word) and assigned.is_static and not assigned.text
            return is_empty and operator[0] == ":"
        if name in self.not_set:
            self.defaults.add(name)
            return True
        # Only the job knows an argument behind a `set --` or `getopts`.
        is_of_job = name.isdigit() and self.arguments_are_set and self.arguments is None
        is_of_job = is_of_job or bool(OF_A_JOB.fullmatch(name))
        if self.has_unknown_names or is_of_job or name in self.shell_names:
            return False
        if self.arguments is None or not name.isdigit():
            self.defaults.add(name)
        return True
