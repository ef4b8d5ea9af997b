"""The launch that a command of a job script is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpc_ddp.core.job.variables import is_of_hpc_ddp
from hpc_ddp.submission.job_script.bash.counts import (
    is_gpus_of_all_nodes,
    tasks_per_node,
    whole_number,
)
from hpc_ddp.submission.job_script.bash.scope import Scope
from hpc_ddp.submission.job_script.bash.words import Word, join_words, literal, split_at
from hpc_ddp.submission.job_script.conversion import LOST, NO_COMPONENTS, OURS
from hpc_ddp.submission.job_script.launchers.options import Options, option_name


@dataclass
class Launch:
    """A launch, as far as it is known.

    Attributes
    ----------
    weight
        how surely it is the training: 0 for a command that is none, 1 for Python in the batch
        script, 2 for a command in a task, 3 for Python in a task, 4 for torchrun and the like
    kind
        ``torchrun``, also for its like, or ``accelerate``; "" where a task is a worker
    step
        the command that starts the tasks, as ``srun``; "" where the batch script runs the launch
    workers, cpus
        numbers of workers on a node, and of CPUs of a task; None where the launch does not say
    gpus
        the launch's options that ask for GPUs: values by name
    options, settings
        (value, line) by the name of a launcher's option; words by the key of a project file
    unset
        (line, whether each task unsets it) by the name of a variable that the program does not get
    marks
        (line, group, text) of options that hpc-ddp decides itself, and of what can't be said; a
        note for the user has the group ""
    """

    line: int
    weight: int = 0
    kind: str = ""
    step: str = ""
    program: Word | None = None
    args: list[Word] = field(default_factory=list)
    workers: int | None = None
    nodes: int | None = None
    tasks: int | None = None  # in all
    tasks_per_node: int | None = None
    processes: int | None = None  # of Accelerate, in all
    cpus: int | None = None
    gpus: dict[str, str] = field(default_factory=dict)
    node_words: bool = False  # it names the nodes that it runs on
    in_loop: bool = False  # it stands in a loop over the nodes
    is_evaluated: bool = False  # by ``eval``, which reads its words once more
    enters_container: bool = False  # after lines that each task runs outside of it
    folder: str | None = ""  # the working directory there; None where only the job knows it
    options: dict[str, tuple[Word | None, int]] = field(default_factory=dict)
    settings: dict[str, list[Word]] = field(default_factory=dict)
    env: dict[str, Word] = field(default_factory=dict)
    passed_on: set[str] = field(default_factory=set)  # variables that the launcher sets itself
    unset: dict[str, tuple[int, bool]] = field(default_factory=dict)
    inner: Word | None = None  # the text of bash -c
    marks: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, key: str, *words: Word) -> None:
        self.settings.setdefault(key, []).extend(words)

    def mark(self, line: int, group: str, text: str) -> None:
        self.marks.append((line, group, text))

    def mark_stale(self, words: Sequence[Word], scope: Scope, line: int) -> None:
        """Mark a line as lost if a variable in `words` has been set again since they were read."""
        if any(map(scope.is_stale, words)):
            self.mark(line, LOST, "a variable in it was set anew before it is used")

    def mark_evaluated(self, words: Sequence[Word], scope: Scope, line: int) -> None:
        """Note that ``eval`` of `words` in a line makes the launch, as with `mark_stale`."""
        self.is_evaluated = True
        self.mark_stale(words, scope, line)

    def set_variable(self, word: Word) -> bool:
        """Put a word ``NAME=value`` into the program's environment, where it is no longer unset;
        return whether the word has that form. Another word changes nothing."""
        match = re.match(r"([A-Za-z_]\w*)=", word.text)
        if match:
            self.env[match[1]] = word.without_start(len(match[0]))
            self.unset.pop(match[1], None)
        return bool(match)

    def take_program(self, words: Sequence[Word]) -> None:
        """Set the program and its arguments to `words`, those behind a launcher's options; without
        words nothing changes. A blank at the program's begin stands behind a backslash that was to
        end a line: then the line is lost."""
        if words and words[0].text[:1].isspace():
            text = "a backslash before a blank does not go on in the next line"
            self.mark(words[0].line, LOST, text)
        if words:
            self.program, self.args = words[0], list(words[1:])

    def take_first_component(self, words: list[Word]) -> list[Word]:
        """Return the words of srun's or mpirun's first program: those before a lone colon. The
        lines from the colon on, which have the other programs, are marked as lost."""
        at = next((i for i, word in enumerate(words) if word.text == ":"), len(words))
        for line in dict.fromkeys(word.line for word in words[at:]):
            text = f"{words[0].text} … : …: {NO_COMPONENTS}: submit the others as jobs of their own"
            self.mark(line, LOST, text)
        return words[:at]

    def take_options(self, words: Sequence[Word], rules: Options, scope: Scope) -> list[Word]:
        """Read the options at the beginning of `words`, behind a launcher's name, and return the
        words behind the options. Each option is noted in `options`. Its use is that of the first
        pattern in ``rules.uses`` that fits its name:

        ``ours`` (hpc-ddp decides), ``lost``, ``later`` (the caller uses it), ``env`` (variables,
        ``NAME=value`` with commas between them), ``#NAME`` (a number, for the launch's attribute of
        that name), ``=KEY`` (a setting with one value), ``!KEY`` (a setting that is true), ``+KEY``
        (an entry of a list, ``--name=value``), ``&KEY`` (the same, as one word or two, as written),
        ``%KEY`` (the same, as one word, as written).

        `marks` gets the options that are ``ours`` or ``lost``, and numbers of nodes or tasks, which
        are lost where only the job knows them. Requests for GPUs are noted in `gpus` as well.
        """
        launcher, remaining = words[0].text.rsplit("/", 1)[-1], list(words[1:])
        while remaining and re.match(r"-{1,2}[A-Za-z]", remaining[0].text):
            word = remaining.pop(0)
            name, operand = option_name(word, rules.letters, rules.names)
            is_inside = operand is not None
            if not is_inside and not rules.flags.fullmatch(name) and remaining:
                operand = remaining.pop(0)
            self.options[name] = operand, word.line
            use = rules.use(name)
            kind, key = use[0], use[1:]
            if use == "lost":
                self.mark(word.line, LOST, f"{launcher} {word.text}: see {launcher}'s own page")
            elif use == "env":
                if operand:
                    for pair in split_at(operand, ","):
                        self.set_variable(pair)
            elif kind in "=!":
                self.settings[key] = [operand if operand and kind == "=" else word]
            elif kind in "+&%":
                self._add_option(kind, key, name, word, operand, is_inside)
            elif use != "later" and key not in ("workers", "cpus"):
                self.mark(word.line, OURS, f"{launcher} --{name}")
            if kind == "#":
                self._set_number(key, operand, scope, word.line, f"{launcher} --{name}")
            if operand and re.match(r"gres|gpus", name):
                self.gpus[name] = operand.text
            self.node_words |= name == "nodelist"
        return remaining[1:] if remaining and remaining[0].text == "--" else remaining

    def _add_option(
        self, kind: str, key: str, name: str, word: Word, operand: Word | None, is_inside: bool
    ) -> None:
        """Add an option `name` to the list of `key` in the form of `kind` (``+``, ``&`` or ``%``,
        as in `take_options`). `word` is the option as it is written, with its `operand`, if any,
        where `is_inside`."""
        behind = None if is_inside else operand
        if kind == "+":
            option = literal(f"--{name}", word.line)
            self.add(key, join_words(f"--{name}=", operand) if operand else option)
        elif kind == "%":
            self.add(key, join_words(word, " ", behind) if behind else word)
        else:
            self.add(key, *([word, behind] if behind else [word]))

    def _set_number(
        self, key: str, operand: Word | None, scope: Scope, line: int, option: str
    ) -> None:
        """Set the attribute `key` to the number of an operand, also of a range with equal ends
        (``4-4``); to None for another range, and where only the job knows it. A number of nodes,
        tasks or processes is then lost, unless it is Slurm's own variable, or, of tasks and
        processes, as many on each node; `option` is named in the reason."""
        ends = re.fullmatch(r"(\d+)-(\d+)", operand.text) if operand else None
        number = whole_number(operand, scope) if ends is None else None
        if ends and ends[1] == ends[2]:
            number = int(ends[1])
        setattr(self, key, number)
        of_node = {"tasks": "tasks_per_node", "processes": "workers"}.get(key)
        if of_node and (per_node := tasks_per_node(operand, scope)):
            setattr(self, of_node, per_node)
            return
        is_counted = key[:2] in ("no", "ta", "pr")
        is_known = operand is None or re.fullmatch(r"\$\{?SLURM_\w+\}?", operand.text)
        is_each_gpu = key == "processes" and operand and is_gpus_of_all_nodes(operand, scope)
        if number is None and is_counted and not (is_known or is_each_gpu):
            text = f"{option}: only the job knows it: nodes, nproc-per-node = N"
            if ends:
                text = f'{option}: a range: nodes = "{ends[0]}"'
            self.mark(line, LOST, text)

    def take_from(self, outer: Launch) -> None:
        """Add to this launch what the launch around it says, as srun's options before ``bash -c``.
        The settings of both are joined; otherwise this launch's word stands where both have one.
        Plain Python weighs more in a task."""
        if not self.kind and outer.step:
            self.weight = 3 if self.weight == 1 else self.weight
        for key in ("step", "nodes", "tasks", "tasks_per_node", "cpus"):
            setattr(self, key, getattr(self, key) or getattr(outer, key))
        unset = {name: place for name, place in outer.unset.items() if name not in self.env}
        if not outer.step:
            for name, (line, _) in unset.items():
                self.mark(line, LOST, f'env -u {name} before a script: setup = ["unset {name}"]')
        self.unset = (unset if outer.step else {}) | self.unset
        self.gpus, self.env = outer.gpus | self.gpus, outer.env | self.env
        self.node_words |= outer.node_words
        self.enters_container = bool(self.settings.keys() & {"image", "container"})
        self.marks = [*outer.marks, *self.marks]
        for key, words in outer.settings.items():
            self.settings[key] = [*words, *self.settings.get(key, [])]

    @property
    def words(self) -> list[Word]:
        """All words that the settings are made of: the program, its arguments, its variables except
        hpc-ddp's, and the words of `settings`."""
        lists = [word for words in self.settings.values() for word in words]
        program = [self.program] if self.program else []
        env = [word for name, word in self.env.items() if not is_of_hpc_ddp(name)]
        return [*program, *self.args, *env, *lists]
