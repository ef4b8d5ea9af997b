"""The settings of a job script, what became of each of its lines, and rules for that."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_ddp.core.job.variables import is_of_hpc_ddp, is_of_worker, names_in
from hpc_ddp.submission.job_script.bash.syntax import uses_arguments
from hpc_ddp.submission.job_script.bash.words import Word

# The groups of a script's lines.
TAKEN, OURS, LOST = "taken over", "set by hpc-ddp itself", "not taken over"

NO_COMPONENTS = "hpc-ddp has no heterogeneous jobs"
# A line that starts a Python program, or a module that may train: python train.py, python -m train.
STARTS_PYTHON = (
    r"(?!\w+=(?![\w./:,-]*\s)|(echo|printf|log)\b).*\bpython[\d.]*\s+(-[A-Za-ln-z]\s+)*"
    r"([^\s-]\S*\.py\b|-m\s+(?!pip|venv|site|json)\S)"
)
DELETES = "it deletes something: setup or teardown, if needed"
PLACEHOLDER = "a placeholder: write your own"
BLANK_VALUE = "bash takes no value behind a blank: NAME=VALUE; a secret is exported in your shell"
VERDICT = "hpc-ddp says how the launch ended, and ends the job by that"
# What stands for the launch in a clean-up line that asks for its exit code.
ENDED = 'case "$HPC_DDP_VERDICT" in finished) ;; failed) false ;; *) exit ;; esac'
TRAINS_BEHIND = "it may start a training: name its program in script, or submit it as its own job"
PRINTS = re.compile(
    r"(echo|printf(?!\s+-v)|date|printenv|hostname|nvidia-smi|module list|which)\b"
    r"|(set|env)\s*($|[|>;])"
)
# A trap that prints how a command has failed, and may end the script.
_ONE_PRINT = (
    r"\s*(\w+=\$\?|(echo|printf|date|exit)\b"
    r"(\\.|\$\((date|hostname)[^()`$]*\)|[12]?>&2|\$[\w?{!]|(?!(?P=quote))[^\\$`<>|&;\n])*)"
)
_PRINTING = rf"(?P<quote>[\"']){_ONE_PRINT}([;\n]+{_ONE_PRINT})*[;\s]*"
PRINTS_ON_ERROR = rf"trap\s+(--\s+)?{_PRINTING}(?P=quote)\s+ERR"
_PRINTS_ON_SIGNAL = (
    rf"trap\s+(--\s+)?{_PRINTING.replace('quote', 'mark')}(?P=mark)"
    r"(\s+(SIG)?(INT|TERM|HUP|QUIT|USR[12]|[1-3]|15))+\s*$"
)
# A trap for the script's end, which may name signals as well.
ON_EXIT = re.compile(
    r"(?P<trap>trap\s+(--\s+)?('[^']*'|\"(\\.|[^\"\\])*\"|[\w-]+))(?=(\s+\w+)*?\s+(EXIT|0)\b)"
    r"(?P<signals>(\s+[A-Z\d]+)+)\s*(\n|$)"
)
# Words of `rm` behind its options, all of which name what is temporary.
_TEMPORARY = (
    r"(\s+[\"']?(?!\S*\.\.)(/tmp/|/dev/shm/|\$\{?(SLURM_)?TMPDIR\b|\$\{?\w*(TMP|TEMP|CACHE)\w*\b)"
    r"[^\s;&|]*)+(\s*\d?>+&?\s*\S+)*\s*([;&|)\n]|$|(EXIT|0)\b)"
)
# A line that does no more than delete files or folders with names, but not those of runs.
ONLY_DELETES = re.compile(
    r"rm(\s+-\w+)*(\s+[\"']?(?!\S*\.\.|\S*\bruns\b)([\w.${}~-]*/)*\w[\w.*-]*(/|/\*)?[\"']?(?=\s|$))+"
    r"(\s*\d?>+&?\s*\S+)*(\s*\|\|\s*(true|:))?"
)
# Whether a run, or the task of an array that it is, may have had an attempt: nothing is deleted
# where that can't be known.
ATTEMPTED = '[ "${HPC_DDP_FIRST_START-}" != yes ]'
# Limits of lines: the test that leaves one out, and the note.
ONCE = ATTEMPTED, "deletes in the first attempt alone: later ones go on with what is there"
FINALLY = (
    '[ "$HPC_DDP_VERDICT" != finished ]',
    "a second launch: teardown starts it once the training has finished; it is not requeued",
)
# A job submits itself: by its name, or, behind another one, by a variable.
REQUEUES = (
    r"scontrol\s+requeue|\bsbatch\s[^\n;]*(\$\{?0|BASH_SOURCE"
    r"|(--dependency|-d)\b[^\n;]*\s[\"']?\$\{?(?!SLURM_JOB_?ID)\w)"
)
# Texts that a command prints, as one on the script's usage, messages of ${A:?…}, here-documents and
# comments: no command is in them.
PRINTED_TEXT = re.compile(
    r"\b(echo|printf|log\w*|die|fail|warn|error|usage)\s+(-\w+\s+)*"
    r"(\"(\\.|[^\"\\`$]|\$(?!\()|\$\((date|pwd|hostname|whoami)[^()\"]*\))*\"|'[^']*')|\{\w+:?\?[^{}`$]*\}|<<-?\s*[\"']?(?P<end>\w+)[\"']?\n.*?^\s*(?P=end)$|^\s*#.*?$",
    re.S | re.M,
)
# A here-document that a command writes into a file.
_WRITTEN_TEXT = re.compile(
    r"\b(?:cat|tee)\b(?=[^\n]*>)[^\n]*<<-?\s*[\"']?(\w+)[\"']?[^\n]*\n.*?^\s*\1$", re.S | re.M
)
# Names of commands that a printed text may have.
_NAMES_COMMAND = re.compile("sbatch|scancel|pkill|killall|ssh|pdsh|clush")
# A line that names a file by a relative path; an environment's name is no path.
RELATIVE = re.compile(
    r"\$\{?PWD\b|\bpwd\b|^(?!module|ml|conda|spack|echo|printf|export|\w+=).*?"
    r"(?:[\s\"'(](?![-/~$])[\w.-]+/[\w.]|\b(?:bash|python3?|mkdir|cp|cat)\s+(?:-[pvrRfam]+\s+)*(?![-/~$\"'])[\w.]"
    r"|>\s*\w)|^(?:source|\.)\s+(?!activate\b)[\w.]",
    re.S,
)
# Commands that read or write files of the folder that they run in, whatever their words are.
_OF_FOLDER = re.compile(
    r"(?:^|[;&|({\n]\s*|\b(?:if|then|do)\s+)(?:\.{1,2}/|(?:sh|git|make|cmake|tar|unzip|wget|uv|touch)\s"
    r"|wandb\s+(?!login)|pip3?\s+install\s[^\n;&|]*(?:-e|-r|\s\.)|python[\d.]*\s+-c\s"
    r"|\[\[?\s+(?:!\s+)?-[defrsx]\s+[\"']?[\w.])|\bactivate\s+\.{1,2}/",
)
# A token of a vocabulary, as <mask> and </s>, and no placeholder.
_TOKEN = re.compile(
    r"<\|\w+\|>|<[|/]?(?!(path|dir|folder|file|name|user|account|project|partition|email|model|data|dataset|config"
    r"|checkpoint|ckpt|output|input|token|key|id|number|num|value|args?|script|port|host|node|time|n)>)"
    r"[a-z]+[|]?>"
)
_BEFORE, _AFTER, _AROUND = (False,), (True,), (False, True)  # the launch
_ON_HOSTS = "it runs something on other hosts: node-setup, if needed"
# A text each of whose ssh makes folders or copies files, and which starts or ends nothing.
_COPIES_BY_SSH = (
    r"(?!.*\b(python[\d.]*|torchrun|\w*kill\w*|nohup|screen|tmux|docker|ray|bash|sh|srun|exit|pdsh|clush)\b)"
    r"((?!\bssh\s).|\bssh\s+(-\S+\s+([\w]+=\S+\s+)?)*[\w\"'${}\[\]@.:-]+\s+[\"']?"
    r"(mkdir|cp|rsync|tar|ln|touch|unzip|chmod)\b)*$"
)
Mark = tuple[str, str]  # the group of a line, and the reason
TextAt = tuple[str, int]  # a text, and the line of the script that it comes from
# What can't be taken over, and what hpc-ddp does itself: pattern, place, and reason.
Rules = tuple[tuple[str, tuple[bool, ...], str], ...]
REFUSED: Rules = (
    (rf"(?!.*({REQUEUES}))(?!{PRINTS_ON_ERROR}\s*(\n|$)|{_PRINTS_ON_SIGNAL})"
     rf"(?!{ON_EXIT.pattern})trap\s", _AROUND,
     "a trap: notices reach the workers; clean-up: teardown = […]"),
    (r".*(=[\"']?(<[^<>\n|&;()]+>|your[-_]\w+)|\s'<[A-Za-z][\w .-]*>'(?m:\s*(#|$)))"
     r"|'<[A-Za-z][\w .-]*>'|(source|\.|cd|conda|module|ml|mkdir)\s[^\n<]*<[A-Za-z][\w .-]*>",
     _AROUND, PLACEHOLDER),
    (rf"(?!.*({REQUEUES})).*\b(pkill|killall|scancel)\s|kill\s", _AROUND,
     "it ends something: setup or teardown, if needed"),
    (rf"(?!.*({REQUEUES})).*(\brm\s+(-\w*r\w*\b|(-\w+\s+)*(?=[^\n;&|]*\*))(?!{_TEMPORARY}))",
     _AROUND, DELETES),
    (r"(?!echo|printf).*\bsrun\s([^\"']*\s:\s|.*--(het|pack)-group)", _AROUND,
     f"{NO_COMPONENTS}: submit each component as a job of its own"),
    (rf"(?!.*({REQUEUES})).*\bsbatch\s", _AROUND,
     "it submits another job: sbatch --dependency=afterok:ID … behind hpc-ddp submit"),
    (rf"(?!{_COPIES_BY_SSH}).*\b(ssh|pdsh|clush)\s", _BEFORE, _ON_HOSTS),
    (r".*\b(ssh|pdsh|clush)\s", _AFTER, _ON_HOSTS),
    (rf"(?!{re.escape(ENDED)}|.*({REQUEUES}))(?!exit\b|wait\b|\w+\+?=\(?\"?\$!\"?\)?$)"
     r".*(\$[?!]|\bwait \$|PIPESTATUS)", _AFTER,
     "it asks how the launch ended: hpc-ddp decides by that; see its verdict"),
    (r"(?!\w+=|(echo|printf|log|which|pip3?|module)\b).*(\b(torchrun\S*|deepspeed|accelerate\s+launch)"
     r"|torch\.distributed\.(run|launch))\s.*(\.py\b|\s-m\s|\$)", _AROUND,
     TRAINS_BEHIND),
    (r".*(\$\(|`)\s*((torchrun|deepspeed)\s|accelerate\s+launch\s|(srun|mpirun)\s[^)`]*\bpython[\d.]*\s"
     r"[^)`]*\.py\b|[^)`]*\btorch\.distributed\.(run|launch)\s)", _AROUND, TRAINS_BEHIND),
    (STARTS_PYTHON, _AFTER, TRAINS_BEHIND),
    (r"exit\b(?!=)", _BEFORE, "here the job script ends"),
    (r"(?!echo|printf).*\bray\s+start\b", _AROUND,
     "Ray starts its workers itself: a wrapper that starts Ray and the program on one node"),
    (r"--?[A-Za-z]", _AROUND, "an option is no command: what ends the command before it?"),
)  # fmt: skip
DECIDED: Rules = (
    (f".*({REQUEUES})", _AROUND, "the job is requeued until it has finished"),
    (r"exit\b", _AROUND, "hpc-ddp waits for the workers, and ends the job"),
    (r"wait\b", _AFTER, "hpc-ddp waits for the workers, and ends the job"),
    (
        r"for\s+\w+\s+in\s[^;\n]*(;|\n)\s*do\s+wait\s[^;\n]*(;|\n)\s*done$",
        _AFTER,
        "hpc-ddp waits for the workers, and ends the job",
    ),
    (_PRINTS_ON_SIGNAL, _AROUND, "hpc-ddp says which signal came, and why a job ends"),
    (
        r"(['\"]{2})?(['\"])[^'\"$`]*\n[^'\"$`]*['\"]+$",
        _AROUND,
        "a text, and no command: a comment?",
    ),
    (r"sleep\s", _AFTER, "hpc-ddp waits for the workers, and ends the job"),
)
_ADDRESS = "MASTER_ADDR"  # of the first node: a worker has it, whatever line would set it
# Settings that the batch script fills in, before a task has variables of its own.
_OF_A_NODE = {"SLURMD_NODENAME", "HOSTNAME"}
_OF_THE_STEP = ("image", "container", "container-options", "srun", "mpirun", "python")


@dataclass
class Conversion:
    """The settings of a job script, with the lines that they come from: numbers from 1; 0 for none.

    Attributes
    ----------
    values, lists
        (setting, line), and (entry, line) of each entry, by the key of a project file
    env
        (text, line) by the name of an environment variable
    marks
        groups of a line with their reasons, by line
    notes
        (line, sentence) for the user
    secrets
        values of the script's variables that are secrets, by name; they are not written
    unknown
        where a variable that can't be taken over is set, as ``line 7``, by its name
    """

    values: dict[str, tuple[Any, int]] = field(default_factory=dict)
    lists: dict[str, list[TextAt]] = field(default_factory=dict)
    env: dict[str, TextAt] = field(default_factory=dict)
    marks: dict[int, list[Mark]] = field(default_factory=dict)
    notes: list[tuple[int, str]] = field(default_factory=list)
    secrets: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    def mark(self, first: int, last: int, group: str, text: str) -> None:
        """Add a mark, the `group` and its reason (`text`), to each line from `first` to `last`."""
        for line in range(first, last + 1):
            self.marks.setdefault(line, []).append((group, text))

    def note(self, line: int, sentence: str) -> None:
        """Add a note for the user on a line, or with 0 on the whole script."""
        self.notes.append((line, sentence))

    def group(self, line: int) -> Mark:
        """Return the one group of a line, LOST before TAKEN before OURS, and all its reasons for
        that group, in one text. A line without a mark is LOST."""
        groups = dict(self.marks.get(line, [(LOST, "not understood")]))
        group = next(group for group in (LOST, TAKEN, OURS) if group in groups)
        return group, self.reasons(line, group) or groups[group]

    def reasons(self, line: int, group: str) -> str:
        """Return all reasons of a line for one group, in one text; '' where it has none."""
        texts = (text for name, text in self.marks.get(line, []) if name == group)
        return "; ".join(dict.fromkeys(texts))  # each once

    def lost_parts(self) -> set[int]:
        """Return the lines of which a part alone is lost: they have a mark for each group, and
        something of them is a setting."""
        entries = [*self.values.values(), *self.env.values()]
        entries += [entry for entries_of_key in self.lists.values() for entry in entries_of_key]
        lines = {line for _, line in entries} & self.marks.keys()
        return {line for line in lines if {TAKEN, LOST} <= dict(self.marks[line]).keys()}

    def append(self, key: str, entry: str, line: int) -> None:
        """Append an entry, of a `line`, to the list of a key. A second equal one changes nothing in
        ``expand``, ``env-names`` and ``without``."""
        entries = self.lists.setdefault(key, [])
        is_set = key in ("expand", "env-names", "without")
        if not is_set or entry not in dict(entries):
            entries.append((entry, line))

    def leave_out_each(self) -> Iterator[tuple[Conversion, str, int]]:
        """Yield, for each setting, then each variable of ``env``, then each entry of a list: a
        conversion that lacks it, its name (for an entry the key and the text), and its line. Marks
        and notes of such a conversion are this one's, so that a change of them holds for all."""
        for key, (_, line) in self.values.items():
            values = {name: entry for name, entry in self.values.items() if name != key}
            yield replace(self, values=values), key, line
        for key, (_, line) in self.env.items():
            env = {name: entry for name, entry in self.env.items() if name != key}
            yield replace(self, env=env), key, line
        for key, entries in self.lists.items():
            for index, (text, line) in enumerate(entries):
                lists = {**self.lists, key: entries[:index] + entries[index + 1 :]}
                yield replace(self, lists=lists), f"{key} {text}", line

    def settings(self) -> dict[str, Any]:
        """Return all settings by the keys of a project file; ``env`` only if it has variables."""
        single = {key: setting for key, (setting, _) in self.values.items()}
        lists = {key: [entry for entry, _ in entries] for key, entries in self.lists.items()}
        env = {name: text for name, (text, _) in self.env.items()}
        return {**single, **lists, **({"env": env} if env else {})}


@dataclass
class ArgumentWriter:
    """Writes words of a launch as texts of a project file. Adds to `result` the entries of
    ``expand`` and the set-up lines that these texts need."""

    result: Conversion
    assigned: set[str]  # the variables that the batch script sets
    batch_variables: set[str]  # those whose values it puts into the text that a task runs
    task_variables: set[str]  # those that each task sets for itself
    batch_words: set[str] = field(default_factory=set)  # which the batch script expands
    is_open: bool = False  # a line of the batch script may set any variable
    is_evaluated: bool = False  # an ``eval`` makes the launch: bash reads the variables' values
    key: str = "setup"  # of the set-up lines that run where the launch does
    count: int = 0  # variables ARGUMENTS_n that set-up lines have so far
    has_arguments: bool = False  # a set-up line sets the script's own arguments

    def write_argument(self, word: Word, at: int) -> str:
        """Return the text of an argument of line `at`: a variable stands in it as ``$NAME``, and
        ``expand`` gets NAME.

        For some words it is ``${ARGUMENTS_1[@]}``, an array that a new set-up line fills with all
        that bash makes of the word: where the shell may split it, or it has other code than names
        of variables; and, in the batch script, where it has a variable of hpc-ddp's with the
        script's own value.
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
            return self.write_single_word(word, at)
        self.count += 1
        name = f"ARGUMENTS_{self.count}"
        if self.is_evaluated or (from_batch and not is_of_batch):  # bash reads the values again
            self.add_to_expand(from_batch, at)  # which exports them for the task
            self.result.append(key, f'eval "{name}=({word.as_bash(True)})"', at)
        else:
            self.result.append(key, f"{name}=({word.as_bash()})", at)
            of_batch = self.assigned - self.task_variables if not is_of_batch else set()
            self.add_to_expand([n for n in word.names if n in of_batch], at)
        self.add_to_expand([f"{name}[@]"], at)
        return f"${{{name}[@]}}"

    def refuse_word(self, word: Word, key: str, line: int, option: str = "") -> bool:
        """Return whether a word can't be written: it is a placeholder, or it needs a lost variable,
        one that only the tasks set (in a setting of the step) or the script's own arguments.

        If so, the word's line, else `line`, is marked as lost. The reason names `option`, which
        stands before the word, '' for none, and `key`, the setting that the user is to write.
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
        is_placeholder = re.fullmatch(form, word.text, re.S)
        if (is_placeholder and not is_token) or holds_placeholder:
            lacking.append("a value of yours")
        if lacking:
            text = f"{option} {word.text}: it needs {lacking[0]}: write it into {key}"
            self.result.mark(word.line or line, word.line or line, LOST, text.strip())
        return bool(lacking)

    def write_single_word(self, word: Word, at: int) -> str:
        """Return the text of a word of line `at`, which is taken as one word, though the shell may
        split it: each variable stands in it as ``$NAME``, and ``expand`` gets NAME. Other code, but
        for an option's name, becomes ``$ARGUMENTS_1``, which a new line of ``setup`` sets."""
        if all(part.name for part in word.code):
            self.add_to_expand(word.names, at)
            return word.text
        self.count += 1
        name = f"ARGUMENTS_{self.count}"
        quoted = Word(tuple(replace(part, splits=False) for part in word.parts))
        option = "".join(re.findall(r"^--[\w-]+=", word.text))
        self.result.append("setup", f"{name}={quoted.without_start(len(option)).as_bash()}", at)
        self.add_to_expand([name], at)
        return f"{option}${name}"

    def write_variable(self, name: str, word: Word, at: int) -> None:
        """Write a variable of the program, with the value `word`, of line `at`: into ``env``, which
        is set before the set-up lines run. Where these set the variable, or may do so, or where its
        value has code, it becomes a set-up line behind them; where each task sets it, or has a
        value of its own (`is_of_worker`), one of the task's."""
        line = f"export {name}={word.as_bash()}"
        is_of_task = name in self.task_variables or any(map(is_of_worker, word.names))
        if is_of_task and self.key != "setup":
            self.result.append(self.key, line, at)
        elif not self.is_open and name not in self.assigned and word.is_static:
            self.result.env[name] = word.text, at
        else:
            self.result.append("setup", line, at)

    def protect_texts(self, texts: Mapping[int, Word]) -> None:
        """Make an array of each argument, of `texts` by index, that has a name of ``expand`` as
        ``$NAME``, and is a mere text in the script: ``'$HOME'`` beside ``"$HOME"``."""
        names = [name for name, _ in self.result.lists.get("expand", ()) if name.isidentifier()]
        for index, word in texts.items():
            _, line = self.result.lists["args"][index]
            if names_in(word.text, names):
                self.count += 1
                name = f"ARGUMENTS_{self.count}"
                self.result.append(self.key, f"{name}=({word.as_bash()})", line)
                self.add_to_expand([f"{name}[@]"], line)
                self.result.lists["args"][index] = f"${{{name}[@]}}", line

    def add_to_expand(self, names: list[str], at: int) -> None:
        """Add `names`, of line `at`, to ``expand``."""
        for name in names:
            self.result.append("expand", name, at)


def needs_folder(text: str, is_assignment: bool) -> bool:
    """Return whether a line, `text`, may do another thing in another folder: it names a file by a
    relative path, or is a command of its folder. Only the ``$(…)`` of an assignment counts."""
    if is_assignment:
        codes = re.findall(r"(?:\$\((?!\()|`)(.*)", text, re.S)
        return any(RELATIVE.search(code) or _OF_FOLDER.search(code) for code in codes)
    return bool(RELATIVE.search(text) or _OF_FOLDER.search(text))


def first_reason(rules: Rules, text: str, is_after: bool) -> str:
    """Return the reason of the first rule that fits a statement's `text` at its place, behind the
    launch (`is_after`) or before it; '' if none fits. Texts that the statement only prints, and
    commands that it only looks for (``which srun``), do not count."""
    text = re.sub(r"(\{\w+:?\?)[^{}`$]*\}", r"\1}", text)  # ${A:?message} prints its message
    text = _WRITTEN_TEXT.sub(" ", text)
    text = re.sub(r"\b(which|command\s+-[vV]|type|hash)\s+(-\w+\s+)*\w+", " ", text)
    text = re.sub(r"\$\(\s*\)", " ", text)  # $(which srun), without its command
    text = PRINTED_TEXT.sub(" ", text) if _NAMES_COMMAND.search(text) else text
    fitting = (rule for rule in rules if re.match(rule[0], text, re.S))
    return next((reason for _, places, reason in fitting if is_after in places), "")
