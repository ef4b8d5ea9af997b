"""A statement of a job script, the launch that it may be, and the options of launchers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hpc_ddp.core.job.slurm_options import SBATCH, SRUN, full_name
from hpc_ddp.core.job.variables import is_of_hpc_ddp, is_of_slurm
from hpc_ddp.submission.job_script.bash import syntax
from hpc_ddp.submission.job_script.bash.scope import Scope, Value
from hpc_ddp.submission.job_script.bash.words import Word, joined, literal, separated
from hpc_ddp.submission.job_script.conversion import LOST, NO_COMPONENTS, OURS

# Options of sbatch and srun without a value, or with one in the same word.
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

# What srun's variables are named for, behind SLURM_, where that is no option's long name.
_OF_SRUN = re.compile(
    r"CPU_FREQ_REQ|CONF|DEBUG|DIST_\w+|EXIT_\w+|HOSTFILE|LLLP|MEM_BIND_\w+|MPI_TYPE|REMOTE_CWD"
    r"|REQ_SWITCH|SPANK_\w+|SRUN_\w+|STDINMODE|STEP_GRES|TIMELIMIT|UMASK|UNBUFFEREDIO|WAIT4SWITCH"
    r"|WORKING_DIR"
)

_LOADS = re.compile(r"\s*(module|ml|source|\.|conda|spack|eval)\s")
_QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""", re.S)

# The variables by which `accelerate launch` passes on its options: accelerate.utils.launch, 1.0.
_VARIABLE = re.compile(
    r"(?P<fsdp>fsdp_backward_prefetch(?=_policy)|fsdp_.*)(?:_policy)?|mixed_precision|use_fsdp"
    r"|(?P<zero>zero_stage|offload_(optimizer|param)_device|zero3_init|zero3_save_16bit_model)"
    r"(?:_flag)?|gradient_(accumulation_steps|clipping)|use_deepspeed|deepspeed_config_file"
)


class Options(NamedTuple):
    """The options of a launcher, and how to read them."""

    uses: Mapping[str, str]  # an option's use (see `Launch.take_options`) by a pattern of names
    flags: re.Pattern[str]  # names of the options without a value
    letters: Mapping[str, str] = {}  # long names by letter
    names: str = ""  # all long names, with blanks between; a beginning will do

    def use(self, name: str) -> str:
        """Return an option's use: that of the first pattern that fits its `name`."""
        return next(use for pattern, use in self.uses.items() if re.fullmatch(pattern, name))


# The options of `accelerate launch`, and values that are those without the option, or what hpc-ddp
# does: an agent on each node.
_ACCELERATE_USES = {
    "module|m": "!module",
    "no-python": "!no-python",
    "num-processes": "#processes",
    r"num-machines|machine-rank|main-process-(ip|port)|rdzv-\w+|multi-gpu|same-network|gpu-ids"
    r"|main-training-function|compute-environment|use-cpu|cpu|debug|quiet|tpu-.*|downcast-bf16"
    r"|enable-cpu-affinity|max-restarts|monitor-interval|tee|role|log-dir|mpirun-hostfile"
    r"|use-mps-device": "ours",
    ".*": "later",
}
_ACCELERATE_FLAGS = re.compile(
    "multi-gpu|cpu|tpu|use-(deepspeed|fsdp|megatron-lm|xpu|mps-device)|same-network|module|m"
    "|no-python|debug|quiet"
)
ACCELERATE = Options(_ACCELERATE_USES, _ACCELERATE_FLAGS)
ACCELERATE_DEFAULTS = {"dynamo-backend": "no", "deepspeed-multinode-launcher": "standard"}


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
    enters_container: bool = False  # after lines that each task runs outside of it
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
        """Put a word ``NAME=value`` into the program's environment, where it is no longer unset;
        return whether the word has that form. Another word changes nothing."""
        match = re.match(r"([A-Za-z_]\w*)=", word.text)
        if match:
            self.env[match[1]] = word.after(len(match[0]))
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
                    for pair in separated(operand, ","):
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
            self.add(key, joined(f"--{name}=", operand) if operand else option)
        elif kind == "%":
            self.add(key, joined(word, " ", behind) if behind else word)
        else:
            self.add(key, *([word, behind] if behind else [word]))

    def _set_number(
        self, key: str, operand: Word | None, scope: Scope, line: int, option: str
    ) -> None:
        """Set the attribute `key` to the number of an operand, None where only the job knows it. A
        number of nodes, tasks or processes is then lost; `option` is named in the reason."""
        number = scope.number(operand)
        setattr(self, key, number)
        is_counted = key[:2] in ("no", "ta", "pr")
        if operand and number is None and is_counted and not _KNOWN(operand.text):
            text = f"{option}: only the job knows it: nodes, nproc-per-node = N"
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


@dataclass
class Statement:
    """One statement of a script: an assignment (of `assigned` to `name`), a launch, a function
    (`defines`), or another command or block, which may set the variables `sets`.

    `lines` are its first and last line in the script; `inside` says that each task runs it, in
    ``bash -c``; `output` is the file that a launch writes to. `lost` is the reason why the
    statement can't be taken over, `decided` the reason why hpc-ddp does itself what it does; ''
    without.
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
    of_script: bool = True  # False for one made of a part of a word
    outer: Launch | None = None  # around the bash -c in whose text it stands
    shells: tuple[int, ...] = ()  # the child shells that run it, each by a number of its own

    @property
    def first(self) -> str:
        return self.words[0].text if self.words else ""

    @property
    def names(self) -> set[str]:
        """The variables and functions that the statement may need; some other words may be among
        them."""
        return syntax.names_needed(self.text, self.name)

    def ends_only(self, processes: set[str]) -> bool:
        """Return whether the statement does no more than end processes, as ``kill $PID || true``,
        all of which are among `processes`, the variables that have their numbers."""
        match = re.fullmatch(
            r"kill(?:\s+-\w+)*((?:\s+[\"']?\$\{?\w+\}?[\"']?)+)"
            r"(?:\s*(?:[12&]?>\s*/dev/null|2>&1))*(?:\s*\|\|\s*(?:true|:))?",
            self.text,
        )
        return bool(match) and {*re.findall(r"\w+", match[1])} <= processes  # type: ignore[index]

    def reports_status(self, variables: set[str]) -> bool:
        """Return whether an assignment keeps the exit code of the command before it (``rc=$?``), or
        another statement uses that code, or one of the `variables`, only to print something or to
        end the script (``exit $rc``)."""
        if self.name:
            return bool(re.fullmatch(r"\w+=[\"']?\$(\?|\{PIPESTATUS\[0\]\})[\"']?", self.text))
        is_asked = self.names & variables or re.search(r"\$(\?|\{PIPESTATUS)", self.text)
        return bool(is_asked) and syntax.only_reports(syntax.parse(self.text))


def first_load(statements: Sequence[Statement]) -> int:
    """Return the index of the first statement that loads a module, another file or an environment,
    which may set any variable; the number of statements without one."""
    loads = (i for i, s in enumerate(statements) if s.words and _LOADS.match(s.text))
    return next(loads, len(statements))


def with_functions(statement: Statement, functions: Mapping[str, Statement]) -> list[Statement]:
    """Return the statement, and those of the `functions` (by name) that it needs, directly or
    through another function."""
    needed, pending = {statement.defines: statement}, [statement]
    while pending:
        for name in (pending.pop().names & functions.keys()) - needed.keys():
            needed[name] = functions[name]
            pending.append(functions[name])
    return [*needed.values()]


def inner_text(word: Word) -> str:
    """Return the text that ``bash -c`` gets, as a script: a variable in single quotes, where the
    outer bash has put its value, stands in double quotes of its own: ``echo 'a $X'`` is then
    ``echo 'a '"${X}"''``."""
    code = rf"\$\{{(?:{'|'.join(word.names or '!')})\}}"
    return _QUOTED.sub(
        lambda m: re.sub(code, r"""'"\g<0>"'""", m[0]) if m[0][0] == "'" else m[0], word.script
    )


def accelerate_variable(name: str, operand: str) -> tuple[str, str] | None:
    """Return name and value of the variable by which ``accelerate launch`` passes on an option, or
    a key of its configuration, with the value `operand`. None if it passes on none for `name`."""
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


def is_option_of_step(name: str) -> bool:
    """Return whether srun reads a variable of this name as an option of its step, or sbatch as one
    of a job."""
    start, _, option = name.partition("_")
    is_option = option.lower().replace("_", "-") in SRUN.split() or _OF_SRUN.fullmatch(option)
    of_slurm = start == "SLURM" and (is_option or is_of_slurm(name))
    return start in ("SBATCH", "SRUN") or bool(of_slurm)


def is_of_pyxis(name: str) -> bool:
    """Return whether `name` is an option of pyxis, which sbatch hands on to the steps."""
    return "container-" in name and name not in SBATCH.split()


def option_name(word: Word, letters: Mapping[str, str], names: str = "") -> tuple[str, Word | None]:
    """Return an option's name, without the dashes before it and with ``-`` for ``_``, and its value
    if that is in the same word, else None.

    With `letters` (long names by letter) ``-x3`` is the long name of x, else x itself, with the
    value 3; without, ``-np`` is a long name. `names`, a text with blanks between long names,
    completes a long name from an alias or a beginning that only one of them has.
    """
    text = word.text
    if letters and re.match(r"-\w", text):
        return letters.get(text[1], text[1]), word.after(2) if len(text) > 2 else None
    head = text.partition("=")[0]
    operand = word.after(len(head) + 1) if "=" in text else None
    name = head.lstrip("-").replace("_", "-")
    return full_name(name, names) if names else name, operand
