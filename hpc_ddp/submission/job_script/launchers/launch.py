"""A launch: what a command of a job script starts, as far as it is known."""

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
from hpc_ddp.submission.job_script.bash.variables import Scope
from hpc_ddp.submission.job_script.bash.words import Word, join_words, literal, split_at
from hpc_ddp.submission.job_script.conversion import LOST, NO_COMPONENTS, OURS
from hpc_ddp.submission.job_script.launchers.option_names import Options, option_name


@dataclass
class Launch:
    """A launch: a command that may be the training, with all that its launchers say.

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
    files
        the texts of files that the script has written before (`written_texts`)
    outputs
        files that options of the step name for its output
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
    machines: int | None = None  # nodes of each training of the launcher, 1 by its default
    gpus: dict[str, str] = field(default_factory=dict)
    names_nodes: bool = False  # it names the nodes that it runs on
    in_loop: bool = False  # it stands in a loop over the nodes
    is_evaluated: bool = False  # by ``eval``, which reads its words once more
    enters_container: bool = False  # after lines that each task runs outside of it
    folder: str | None = ""  # the working directory there; None where only the job knows it
    options: dict[str, tuple[Word | None, int]] = field(default_factory=dict)
    settings: dict[str, list[Word]] = field(default_factory=dict)
    env: dict[str, Word] = field(default_factory=dict)
    launcher_variables: set[str] = field(default_factory=set)  # which the launcher sets itself
    files: dict[str, str] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    unset: dict[str, tuple[int, bool]] = field(default_factory=dict)
    inner: Word | None = None  # the text of bash -c
    inner_name: Word | None = None  # its $0
    marks: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, key: str, *words: Word) -> None:
        """Append words to those of a setting, a key of a project file."""
        self.settings.setdefault(key, []).extend(words)

    def mark(self, line: int, group: str, text: str) -> None:
        """Append a mark to `marks`, which says what a group is."""
        self.marks.append((line, group, text))

    def mark_stale(self, words: Sequence[Word], scope: Scope, line: int) -> None:
        """Mark a line as lost if a variable in `words` has been set again since they were read."""
        if any(map(scope.is_stale, words)):
            self.mark(line, LOST, "a variable in it was set anew before it is used")

    def mark_evaluated(self, words: Sequence[Word], scope: Scope, line: int) -> None:
        """Set `is_evaluated`, since an ``eval`` of `words`, in a `line`, makes the launch; mark the
        line as lost if a variable in the words is stale (`mark_stale`)."""
        self.is_evaluated = True
        self.mark_stale(words, scope, line)

    def set_variable(self, word: Word) -> bool:
        """Put the variable of a word ``NAME=value`` into `env`, and remove it from `unset`. Return
        whether the word has that form; any other word changes nothing."""
        match = re.match(r"([A-Za-z_]\w*)=", word.text)
        if match:
            self.env[match[1]] = word.without_start(len(match[0]))
            self.unset.pop(match[1], None)
        return bool(match)

    def take_program(self, words: Sequence[Word]) -> None:
        """Set `program` and `args` to the first and the other `words`, which stand behind a
        launcher's options; without words nothing changes. A program that begins with a blank is
        marked as lost: the blank follows a backslash that was meant to join two lines."""
        text = words[0].text if words else ""
        if words and words[0].code and text.lstrip():  # of a variable, where the shell drops blanks
            start = words[0].without_start(len(text) - len(text.lstrip()))
            words, text = [start, *words[1:]], text.lstrip()
        if text[:1].isspace():
            text = "a backslash before a blank does not go on in the next line"
            self.mark(words[0].line, LOST, text)
        if words:
            self.program, self.args = words[0], list(words[1:])

    def take_first_component(self, words: list[Word]) -> list[Word]:
        """Return the `words` of srun or mpirun, its name first, up to a lone colon, behind which
        another program follows. All lines from the colon on are marked as lost."""
        at = next((i for i, word in enumerate(words) if word.text == ":"), len(words))
        for line in dict.fromkeys(word.line for word in words[at:]):
            text = f"{words[0].text} … : …: {NO_COMPONENTS}: submit the others as jobs of their own"
            self.mark(line, LOST, text)
        return words[:at]

    def take_options(self, words: Sequence[Word], rules: Options, scope: Scope) -> list[Word]:
        """Read the options at the beginning of `words`, behind the launcher's name, which is the
        first word. Return the words behind the options, and behind a ``--``. An option's use is
        that of the first pattern in ``rules.uses`` that fits its name:

        - ``ours``: hpc-ddp decides it; ``lost``; ``later``: the caller uses it
        - ``env``: variables, ``NAME=value`` with commas between them
        - ``#NAME``: a number, for the launch's attribute of that name
        - ``=KEY``: a setting with one value; ``!KEY``: a setting that is true
        - ``+KEY``, ``&KEY``, ``%KEY``: an entry of a list (`_add_option`)

        Each option is noted in `options`, in `gpus` if it asks for GPUs, and in `names_nodes` if it
        names nodes. `marks` gets those that are ``ours`` or ``lost``, and numbers of nodes, tasks
        and processes, which are lost where only the job knows them.
        """
        launcher, remaining = words[0].text.rsplit("/", 1)[-1], list(words[1:])
        while remaining and re.match(r"-{1,2}[A-Za-z]", remaining[0].text):
            word = remaining.pop(0)
            written = [word]  # the option, and its value if that is a word of its own
            name, operand = option_name(word, rules.letters, rules.names)
            use = rules.find_use(name)
            kind, key = use[0], use[1:]
            is_flag = bool(rules.flags.fullmatch(name)) or not remaining
            is_flag = is_flag or (use == "lost" and remaining[0].text[:1] == "-")  # an option
            if operand is None and not is_flag:
                operand = remaining.pop(0)
                written.append(operand)
            if operand and rules.flags.fullmatch(name) and word.text[:2] != "--":  # -ul is -u -l
                remaining.insert(0, join_words("-", operand))
                operand = None
            self.options[name] = operand, word.line
            if use == "lost":
                self.mark(word.line, LOST, f"{launcher} {word.text}: see {launcher}'s own page")
            elif use == "env":
                if operand:
                    for pair in split_at(operand, ","):
                        self.set_variable(pair)
            elif kind in "=!":
                self.settings[key] = [operand if operand and kind == "=" else word]
            elif kind in "+&%":
                self._add_option(use, name, operand, written)
            elif use != "later" and key not in ("workers", "cpus"):  # ours, and other numbers
                self.mark(word.line, OURS, f"{launcher} --{name}")
            if kind == "#":
                self._set_number(key, operand, scope, word.line, f"{launcher} --{name}")
            if operand and re.match(r"gres|gpus", name):
                self.gpus[name] = operand.text
            self.names_nodes |= name == "nodelist"
        return remaining[1:] if remaining and remaining[0].text == "--" else remaining

    def _add_option(self, use: str, name: str, operand: Word | None, written: list[Word]) -> None:
        """Add an option `name` with its value (`operand`) to the list of a key, in the form that
        its `use` has: for ``+KEY`` as ``--name=value``; for ``&KEY`` as it is `written`, in one
        word or two; for ``%KEY`` so, too, but in one word with a blank in it."""
        kind, key = use[0], use[1:]
        if kind == "+":
            option = literal(f"--{name}", written[0].line)
            self.add(key, join_words(f"--{name}=", operand) if operand else option)
        elif kind == "%" and len(written) > 1:
            self.add(key, join_words(written[0], " ", written[1]))
        else:
            self.add(key, *written)

    def _set_number(
        self, key: str, operand: Word | None, scope: Scope, line: int, option: str
    ) -> None:
        """Set the attribute `key` to the number of an operand, also of a range with equal ends
        (``4-4``); to None for another range, and where only the job knows the number.

        A number of CPUs, nodes, tasks or processes that is None is marked as lost in its `line`,
        with `option` in the reason, unless hpc-ddp finds it by itself: it is a variable of Slurm's,
        one process for each GPU, or as many tasks or processes on each node, which `tasks_per_node`
        or `workers` gets.
        """
        ends = re.fullmatch(r"(\d+)-(\d+)", operand.text) if operand else None
        number = whole_number(operand, scope) if ends is None else None
        if ends and ends[1] == ends[2]:
            number = int(ends[1])
        setattr(self, key, number)
        of_node = {"tasks": "tasks_per_node", "processes": "workers"}.get(key)
        if of_node and (per_node := tasks_per_node(operand, scope)):
            setattr(self, of_node, per_node)
            return
        is_of_job = key in ("nodes", "tasks", "tasks_per_node", "processes")
        is_slurms = operand is None or re.fullmatch(r"\$\{?SLURM_\w+\}?", operand.text)
        is_each_gpu = key == "processes" and operand and is_gpus_of_all_nodes(operand, scope)
        if number is None and key == "cpus":
            text = "" if is_slurms else ": only the job knows it: cpus-per-task = N"
            self.mark(line, OURS if is_slurms else LOST, f"{option}{text}")
        if number is None and is_of_job and not (is_slurms or is_each_gpu):
            text = f"{option}: only the job knows it: nodes, nproc-per-node = N"
            if ends:
                text = f'{option}: a range: nodes = "{ends[0]}"'
            self.mark(line, LOST, text)

    def inherit_from(self, outer: Launch) -> None:
        """Add to this launch, which stands in the text of a ``bash -c``, what the launch around it,
        `outer`, says: ``srun -n 4`` of ``srun -n 4 bash -c "python train.py"``.

        Words of settings, and marks, are joined, those of `outer` first. A number, a variable or a
        request for GPUs of `outer` counts where this launch has none. Plain Python gets the weight
        that it has in a task, if `outer` starts tasks; if it starts none, lines in which it unsets
        variables (``env -u``) are marked as lost.
        """
        if not self.kind and outer.step:
            self.weight = 3 if self.weight == 1 else self.weight
        for key in ("step", "nodes", "tasks", "tasks_per_node", "cpus"):
            setattr(self, key, getattr(self, key) or getattr(outer, key))
        unset = {name: entry for name, entry in outer.unset.items() if name not in self.env}
        if not outer.step:
            for name, (line, _) in unset.items():
                self.mark(line, LOST, f'env -u {name} before a script: setup = ["unset {name}"]')
        self.unset = (unset if outer.step else {}) | self.unset
        self.gpus, self.env = outer.gpus | self.gpus, outer.env | self.env  # its own go before
        self.names_nodes |= outer.names_nodes
        self.outputs = [*outer.outputs, *self.outputs]
        self.enters_container = bool(self.settings.keys() & {"image", "container"})
        self.marks = [*outer.marks, *self.marks]
        for key, words in outer.settings.items():
            self.settings[key] = [*words, *self.settings.get(key, [])]

    @property
    def sets_folder(self) -> bool:
        """Whether an option of the launch's container sets the working directory."""
        keys = ("container-options", "srun")
        options = " ".join(word.text for key in keys for word in self.settings.get(key, []))
        return bool(re.search("--(container-workdir|pwd)", options))

    @property
    def training_key(self) -> tuple[str, ...]:
        """The texts that two launches of the same training have in common: the
        launcher's kind, its number of workers, its variables, those that it unsets, and the words
        of the program that it starts."""
        words = [*self.settings.get("module", ()), self.program, *self.args]
        variables = [f"{name}={word.text}" for name, word in sorted(self.env.items())]
        variables += sorted(f"-u {name}" for name in self.unset)
        return self.kind, str(self.workers), *variables, *(word.text for word in words if word)

    @property
    def words(self) -> list[Word]:
        """All words of the launch that become settings: the program, its arguments, its variables
        except hpc-ddp's, and the words of `settings`, in this order."""
        lists = [word for words in self.settings.values() for word in words]
        program = [self.program] if self.program else []
        env = [word for name, word in self.env.items() if not is_of_hpc_ddp(name)]
        return [*program, *self.args, *env, *lists]
