"""The words of a launch as texts of a project file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hpc_ddp.core.job.variables import is_of_hpc_ddp, is_of_worker, names_in
from hpc_ddp.submission.job_script.bash.syntax import uses_arguments
from hpc_ddp.submission.job_script.bash.words import Word
from hpc_ddp.submission.job_script.conversion import LOST, Conversion

# A token of a language model's vocabulary, as <mask> and </s>: an argument, and no placeholder.
_TOKEN = re.compile(
    r"<\|\w+\|>|<[|/]?(?!(path|dir|folder|file|name|user|account|project|partition|email|model|data|dataset|config"
    r"|checkpoint|ckpt|output|input|token|key|id|number|num|value|args?|script|port|host|node|time|n)>)"
    r"[a-z]+[|]?>"
)
_ADDRESS = "MASTER_ADDR"  # of the first node: a worker has it, whatever line would set it
# Settings that the batch script fills in, before a task has variables of its own.
_OF_A_NODE = {"SLURMD_NODENAME", "HOSTNAME"}
_OF_THE_STEP = ("image", "container", "container-options", "srun", "mpirun", "python")


@dataclass
class ArgumentWriter:
    """Writes words of a launch as texts of a project file. Adds to `result` the entries of
    ``expand`` (names of variables that hpc-ddp fills in there) and the set-up lines that these
    texts need."""

    result: Conversion
    assigned: set[str]  # the variables that the batch script sets
    batch_variables: set[str]  # those whose values it puts into the text that a task runs
    task_variables: set[str]  # those that each task sets for itself
    batch_words: set[str] = field(default_factory=set)  # which the batch script expands
    has_unknown_names: bool = False  # a line of the batch script may set any variable
    is_evaluated: bool = False  # an ``eval`` makes the launch: bash reads the variables' values
    key: str = "setup"  # of the set-up lines that run where the launch does
    count: int = 0  # of the variables ARGUMENTS_1, ARGUMENTS_2 … that are set so far
    has_arguments: bool = False  # a set-up line sets the script's own arguments

    def write_argument(self, word: Word, line: int) -> str:
        """Return the text of an argument of a `line`, as ``--lr=$LR``, and add LR to ``expand``.

        A word becomes ``${ARGUMENTS_1[@]}`` if the shell may split it, if it has other code than
        names of variables, or if, in the batch script, it has a variable of hpc-ddp's with the
        script's own value. A new set-up line fills that array with all that bash makes of the word.
        """
        key = "setup" if word.text in self.batch_words else self.key
        is_of_batch = key == "setup"
        from_batch = [name for name in word.names if name in self.batch_variables]
        has_own_value = any(
            is_of_hpc_ddp(name) and name in self.assigned - self.result.unknown.keys()
            for name in word.names
        )
        has_own_value |= bool({*word.names} & _OF_A_NODE)
        # In a worker $NAME would be hpc-ddp's value, or that of another node.
        if word.stays_one_word and not (is_of_batch and has_own_value):
            return self.write_single_word(word, line)
        name = self._make_name()
        if self.is_evaluated or (from_batch and not is_of_batch):  # bash reads the values again
            self.add_to_expand(from_batch, line)  # which exports them for the task
            self.result.append(key, f'eval "{name}=({word.as_bash(True)})"', line)
        else:
            self.result.append(key, f"{name}=({word.as_bash()})", line)
            of_batch = self.assigned - self.task_variables if not is_of_batch else set()
            self.add_to_expand([n for n in word.names if n in of_batch], line)
        self.add_to_expand([f"{name}[@]"], line)
        return f"${{{name}[@]}}"

    def refuse_word(self, word: Word, key: str, line: int, option: str = "") -> bool:
        """Return whether a word can't be written into the setting `key`: it is a placeholder, or
        needs a lost variable, one that only the tasks set (in a setting of the step), or the
        script's own arguments. Then mark its line (`line` for a word without one) as lost, with
        `key` and the `option` in front of the word ('' for none) in the reason.
        """
        unknown = self.result.unknown
        lacking = [f"{n}, of {unknown[n]}" for n in word.names if n in unknown and n != _ADDRESS]
        if word.code and uses_arguments(word.script) and not self.has_arguments:
            lacking.append("the job script's own arguments")
        of_task = self.task_variables - {"HOME", "USER"}  # these the batch script has, too
        if key in _OF_THE_STEP and (names := {*word.names} & of_task):
            lacking.append(f"{min(names)}, which each task sets")
        is_token = key == "args" and _TOKEN.fullmatch(word.text)
        holds_placeholder = key != "args" and re.search(r"<[A-Za-z][\w .-]*>", word.text)
        form = r"<.*>|(--[\w-]+=)?your[-_]\w+|([^<]*=)?<[A-Za-z][\w .-]*>[/:].*|.*/<[A-Za-z].*>.*"
        form += r"|([\w-]+=)?#(your|YOUR)[-_].*"
        is_placeholder = re.fullmatch(form, word.text, re.S) or "<{{" in word.text
        if (is_placeholder and not is_token) or holds_placeholder:
            lacking.append("a value of yours")
        if lacking:
            written = re.sub(r"<(\{\{[^{}]*\})>", r"$\1}", word.text)  # as `syntax.parse` has it
            text = f"{option} {written}: it needs {lacking[0]}: write it into {key}"
            self.result.mark(word.line or line, word.line or line, LOST, text.strip())
        return bool(lacking)

    def write_single_word(self, word: Word, line: int) -> str:
        """Return the text of a word of a `line`, as ``--lr=$LR``, and add LR to ``expand``. The
        word counts as one, though the shell may split it. If it has other code than names, all of
        it behind ``--option=`` becomes ``$ARGUMENTS_1``, which a new line of ``setup`` sets."""
        if all(part.name for part in word.code):
            self.add_to_expand(word.names, line)
            return word.text
        name = self._make_name()
        quoted = Word(tuple(replace(part, splits=False) for part in word.parts))
        option = "".join(re.findall(r"^--[\w-]+=", word.text))
        self.result.append("setup", f"{name}={quoted.without_start(len(option)).as_bash()}", line)
        self.add_to_expand([name], line)
        return f"{option}${name}"

    def write_variable(self, name: str, word: Word, line: int) -> None:
        """Write a variable of the program, with the value `word`, of a `line`.

        It goes into ``env``, which is set before the set-up lines run. If these set it or may do
        so, or if its value has code, it becomes a set-up line behind them: one of the task's
        (`key`) if each task sets the variable, or has another value in it (`is_of_worker`)."""
        export = f"export {name}={word.as_bash()}"
        is_of_task = name in self.task_variables or any(map(is_of_worker, word.names))
        if is_of_task and self.key != "setup":
            self.result.append(self.key, export, line)
        elif not self.has_unknown_names and name not in self.assigned and word.is_static:
            self.result.env[name] = word.text, line
        else:
            self.result.append("setup", export, line)

    def protect_texts(self, texts: Mapping[int, Word]) -> None:
        """Keep hpc-ddp from filling in ``$NAME`` in arguments that are mere text in the script, as
        ``'$HOME'`` beside ``"$HOME"``: such an argument becomes an array that a set-up line fills.
        `texts` has the arguments without code by their index in ``args``."""
        names = [name for name, _ in self.result.lists.get("expand", ()) if name.isidentifier()]
        for index, word in texts.items():
            _, line = self.result.lists["args"][index]
            if names_in(word.text, names):
                name = self._make_name()
                self.result.append(self.key, f"{name}=({word.as_bash()})", line)
                self.add_to_expand([f"{name}[@]"], line)
                self.result.lists["args"][index] = f"${{{name}[@]}}", line

    def _make_name(self) -> str:
        """Return a new variable's name for a set-up line: ARGUMENTS_1, ARGUMENTS_2 …"""
        self.count += 1
        return f"ARGUMENTS_{self.count}"

    def add_to_expand(self, names: list[str], line: int) -> None:
        """Add `names`, of a `line`, to ``expand``."""
        for name in names:
            self.result.append("expand", name, line)
