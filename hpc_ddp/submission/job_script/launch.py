"""A statement of a job script, the launch that it may be, and the options of launchers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hpc_ddp.core.job.slurm_options import SBATCH, full_name
from hpc_ddp.core.job.variables import is_of_hpc_ddp
from hpc_ddp.submission.job_script import syntax
from hpc_ddp.submission.job_script.conversion import LOST, NO_COMPONENTS, OURS
from hpc_ddp.submission.job_script.shell import Scope, Value, Word, joined, literal, separated

# Those of both without a value, or with one in the same word.
FLAGS = re.compile(
    r"label|unbuffered|overlap|no-kill|verbose|quiet|pty|preserve-env|immediate|kill-on-bad-exit"
    r"|contiguous|oversubscribe|overcommit|multi-prog|spread-job|use-min-nodes|exclusive|requeue"
    r"|no-requeue|hold|get-user-env|parsable|reboot|exact|ignore-pbs|test-only|stepmgr|nice"
    r"|propagate|resv-ports|compress|bcast|whole|external|interactive|disable-status|no-allocate"
    r"|quit-on-interrupt|send-libs"
    r"|container-(writable|readonly)|(no-)?container-(mount-home|remap-root|entrypoint)"
)
# A number of nodes or tasks that need not be reported: also a range, or Slurm's own number.
_KNOWN = re.compile(r"[\dkKmM-]*|\$\{?SLURM_\w+\}?").fullmatch

# The variables by which `accelerate launch` passes on its options: accelerate.utils.launch, 1.0.
_VARIABLE = re.compile(
    r"(?P<fsdp>fsdp_backward_prefetch(?=_policy)|fsdp_.*)(?:_policy)?|mixed_precision|use_fsdp"
    r"|(?P<zero>zero_stage|offload_(optimizer|param)_device|zero3_init|zero3_save_16bit_model)"
    r"(?:_flag)?|gradient_(accumulation_steps|clipping)|use_deepspeed|deepspeed_config_file"
)


class Options(NamedTuple):
    """The options of a launcher."""

    uses: Mapping[str, str]  # what becomes of one, as `Launch.take_options` has it, by a pattern
    flags: re.Pattern[str]  # of the names of those without a value
    letters: Mapping[str, str] = {}  # long names by letter
    names: str = ""  # all long names, of which a beginning will do


@dataclass
class Launch:
    """A launch, as far as it is known.

    Attributes
    ----------
    weight
        how surely it is the training: 0 for a command that is none, to 4 for torchrun and the like
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
        (line, whether each task does it) by the name of a variable that the program does not get
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
    enters_container: bool = False  # by its own words, behind lines of the task that are outside
    folder: str | None = ""  # the working directory there; None where only the job knows it
    options: dict[str, tuple[Word | None, int]] = field(default_factory=dict)
    settings: dict[str, list[Word]] = field(default_factory=dict)
    env: dict[str, Word] = field(default_factory=dict)
    unset: dict[str, tuple[int, bool]] = field(default_factory=dict)
    inner: Word | None = None  # the text of bash -c
    marks: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, key: str, *words: Word) -> None:
        self.settings.setdefault(key, []).extend(words)

    def mark(self, line: int, group: str, text: str) -> None:
        self.marks.append((line, group, text))

    def set_variable(self, word: Word) -> bool:
        """Take a word ``NAME=value`` into the program's environment; return whether it is one."""
        match = re.match(r"([A-Za-z_]\w*)=", word.text)
        if match:
            self.env[match[1]] = word.after(len(match[0]))
            self.unset.pop(match[1], None)
        return bool(match)

    def take_program(self, words: Sequence[Word]) -> None:
        """Take the words behind a launcher's options: a program and its arguments. A blank at
        the program's begin stands behind a backslash that was to end a line: the line is lost."""
        if words and words[0].text[:1].isspace():
            text = "a backslash before a blank does not go on in the next line"
            self.mark(words[0].line, LOST, text)
        if words:
            self.program, self.args = words[0], list(words[1:])

    def take_first_component(self, words: list[Word]) -> list[Word]:
        """Return the words of srun's or mpirun's first program; lines from a lone colon on, behind
        which other programs are, are lost."""
        at = next((i for i, word in enumerate(words) if word.text == ":"), len(words))
        for line in dict.fromkeys(word.line for word in words[at:]):
            text = f"{words[0].text} … : …: {NO_COMPONENTS}: submit the others as jobs of their own"
            self.mark(line, LOST, text)
        return words[:at]

    def take_options(self, words: Sequence[Word], rules: Options, scope: Scope) -> list[Word]:
        """Take the options at the beginning of `words`, behind a launcher's name, and return the
        words behind them. `options` has all of them; the first of the `rules` whose pattern fits
        one says its use:

        ``ours`` (hpc-ddp decides), ``lost``, ``later`` (the caller takes it), ``env`` (variables,
        ``NAME=value`` with commas between them), ``#NAME`` (a number, for that attribute), ``=KEY``
        (one value), ``!KEY`` (a setting that is true), ``+KEY`` (a list, of ``--name=value``),
        ``&KEY`` (a list, in words of their own), ``%KEY`` (a list, as it is).

        `marks` gets those that are ``ours``, ``lost``, or numbers of nodes or tasks, which are lost
        where only the job knows them. Requests for GPUs go into `gpus` as well.
        """
        launcher, remaining = words[0].text.rsplit("/", 1)[-1], list(words[1:])
        while remaining and re.match(r"-{1,2}[A-Za-z]", remaining[0].text):
            word = remaining.pop(0)
            name, operand = option_name(word, rules.letters, rules.names)
            is_inside = operand is not None
            if not is_inside and not rules.flags.fullmatch(name) and remaining:
                operand = remaining.pop(0)
            self.options[name] = operand, word.line
            use = next(use for pattern, use in rules.uses.items() if re.fullmatch(pattern, name))
            kind, key = use[0], use[1:]
            if use == "lost":
                self.mark(word.line, LOST, f"{launcher} {word.text}: see {launcher}'s own page")
            elif use == "env":
                for pair in separated(operand, ",") if operand else ():
                    self.set_variable(pair)
            elif kind in "=!":
                self.settings[key] = [operand if operand and kind == "=" else word]
            elif kind in "+&%":
                option = literal(f"--{name}", word.line)
                behind = None if is_inside else operand
                parts = {"+": [joined(f"--{name}=", operand) if operand else option],
                         "&": [word, behind] if behind else [word],
                         "%": [joined(word, " ", behind) if behind else word]}  # fmt: skip
                self.add(key, *(part for part in parts[kind] if part))
            elif use != "later" and key not in ("workers", "cpus"):
                self.mark(word.line, OURS, f"{launcher} --{name}")
            if kind == "#":
                number = scope.number(operand)
                setattr(self, key, number)
                if (
                    operand
                    and number is None
                    and key[:2] in ("no", "ta", "pr")
                    and not _KNOWN(operand.text)
                ):
                    text = f"{launcher} --{name}: only the job knows it: nodes, nproc-per-node = N"
                    self.mark(word.line, LOST, text)
            if operand and re.match(r"gres|gpus", name):
                self.gpus[name] = operand.text
            self.node_words |= name == "nodelist"
        return remaining[1:] if remaining and remaining[0].text == "--" else remaining

    def take_from(self, outer: Launch) -> None:
        """Add what the launch around this one says, as srun's options before ``bash -c``; what both
        say is this one's, and plain Python is a surer training in a task."""
        if not self.kind and outer.step:
            self.weight = 3 if self.weight == 1 else self.weight
        for key in ("step", "nodes", "tasks", "tasks_per_node", "cpus"):
            setattr(self, key, getattr(self, key) or getattr(outer, key))
        unset = {name: place for name, place in outer.unset.items() if name not in self.env}
        for name, (line, _) in unset.items() if not outer.step else ():
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
        """All words of which something is taken over."""
        lists = [word for words in self.settings.values() for word in words]
        program = [self.program] if self.program else []
        env = [word for name, word in self.env.items() if not is_of_hpc_ddp(name)]
        return [*program, *self.args, *env, *lists]


@dataclass
class Statement:
    """One statement of a script: an assignment (of `assigned` to `name`), a launch, a function
    (`defines`), or another command or block, which may set the variables `sets`.

    `lines` are the first and last one in the script; `inside` says that it runs in each task, in
    ``bash -c``; `output` is the file that a launch writes to; `lost` says why it can't be taken
    over, `decided` why hpc-ddp does it itself.
    """

    text: str
    lines: tuple[int, int]
    words: list[Word] = field(default_factory=list)
    name: str = ""
    assigned: Value = None
    exported: bool = False
    launch: Launch | None = None
    inside: bool = False
    output: str = ""
    lost: str = ""
    decided: str = ""
    defines: str = ""
    sets: set[str] = field(default_factory=set)
    of_script: bool = True  # and not made of a part of a word
    outer: Launch | None = None  # around the bash -c in whose text it stands

    @property
    def first(self) -> str:
        return self.words[0].text if self.words else ""

    @property
    def names(self) -> set[str]:
        """The variables and functions that it may need, with some other words beside."""
        return syntax.names_needed(self.text, self.name)

    def reports_status(self, variables: set[str]) -> bool:
        """Return whether it keeps the exit code of the command before it, or asks for that, or for
        one of the `variables`, only to print something or to end the script."""
        if self.name:
            return bool(re.fullmatch(r"\w+=[\"']?\$(\?|\{PIPESTATUS\[0\]\})[\"']?", self.text))
        is_asked = self.names & variables or re.search(r"\$(\?|\{PIPESTATUS)", self.text)
        return bool(is_asked) and syntax.only_reports(syntax.parse(self.text))


def with_functions(statement: Statement, functions: Mapping[str, Statement]) -> list[Statement]:
    """Return a statement and those of the `functions`, by name, that it needs, directly or not."""
    needed, pending = {statement.defines: statement}, [statement]
    while pending:
        for name in (pending.pop().names & functions.keys()) - needed.keys():
            needed[name] = functions[name]
            pending.append(functions[name])
    return [*needed.values()]


def accelerate_variable(name: str, operand: str) -> tuple[str, str] | None:
    """Return the variable by which ``accelerate launch`` passes on one of its options or keys, and
    its value; None for one that it does not pass on so."""
    name = name.replace("-", "_")
    if name == "num_cpu_threads_per_process":
        return "OMP_NUM_THREADS", operand
    match = _VARIABLE.fullmatch(name)
    if not match:
        return None
    name = match["fsdp"] or match["zero"] or match[0]
    name = name.replace("transformer_layer_cls", "transformer_cls").upper()
    start = "" if match["fsdp"] else "ACCELERATE_DEEPSPEED_" if match["zero"] else "ACCELERATE_"
    return start + name, operand.lower() if operand in ("True", "False") else operand


def is_command(assigned: Value) -> bool:
    """Return whether a value is a text of several words that does not begin with code."""
    if not isinstance(assigned, Word) or not assigned.parts or assigned.parts[0].is_code:
        return False
    text = "".join("$" if part.is_code else part.text for part in assigned.parts)
    return bool(re.search(r"\S\s+\S", text))


def is_known(assigned: Value) -> bool:
    """Return whether a value is written where its variable is used: it is text and names, or a
    command (`is_command`); of an array, one word at least is text."""
    if isinstance(assigned, Word):
        return is_command(assigned) or all(part.name for part in assigned.code)
    return assigned is not None and any(word.is_static for word in assigned)


def is_of_pyxis(name: str) -> bool:
    """Return whether an option is one of pyxis', which sbatch hands on to the steps."""
    return "container-" in name and name not in SBATCH.split()


def option_name(word: Word, letters: Mapping[str, str], names: str = "") -> tuple[str, Word | None]:
    """Return the name of an option, with dashes for underscores and none before it, and the value
    in the same word, None without.

    `letters` has long names by letter. An alias, or an unambiguous beginning of one of the `names`,
    becomes the whole name; without `names` it stays as it is.
    """
    text = word.text
    if letters and re.match(r"-\w", text):
        return letters.get(text[1], text[1]), word.after(2) if len(text) > 2 else None
    head = text.partition("=")[0]
    operand = word.after(len(head) + 1) if "=" in text else None
    name = head.lstrip("-").replace("_", "-")
    return full_name(name, names) if names else name, operand
