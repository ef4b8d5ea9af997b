"""The ``#SBATCH`` lines of a job script, as settings, and the sizes that follow from them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hpc_ddp.core.job.option_checks import JOB_NAME
from hpc_ddp.core.job.slurm_options import NODE_BY_NODE, SBATCH, SHORT_OPTIONS, as_raw
from hpc_ddp.core.job.slurm_values import gpus_of, slurm_seconds
from hpc_ddp.submission.job_script.bash.words import Word, literal
from hpc_ddp.submission.job_script.conversion import (
    LOST,
    NO_COMPONENTS,
    OURS,
    TAKEN,
    Conversion,
    Mark,
    TextAt,
)
from hpc_ddp.submission.job_script.launchers.option_names import FLAGS, is_of_pyxis, option_name
from hpc_ddp.submission.job_script.secrets import looks_secret
from hpc_ddp.submission.settings.config import OPTIONS

# Options of sbatch that are keys of hpc-ddp with the same name.
_OWN_KEYS = {key for key, o in OPTIONS.items() if o.is_sbatch} - {"nodes"}
# Options whose values have a number, by their names.
_OF_NUMBERS = re.compile(r"nodes|mem(-per-.*)?|cpus-per-.*|ntasks(-per-.*)?")
# Values that a template has for its users to replace, as <account> and your-partition.
_PLACEHOLDER = re.compile(
    r"<.*|\{[^\"]*|x{3,}|your[-_ ]?\w*|(my|some)?[-_]?(partition|account)[-_]?(name)?"
    r"|\[[a-z_ ]+\]|todo|changeme.*|.*\bxxx\b.*", re.I)  # fmt: skip
_WITHIN = re.compile(r"<[A-Za-z][\w .-]*>")  # as in afterok:<ID>
# Options, as regular expressions, that hpc-ddp decides itself, and the reasons.
_DECIDED = {
    "requeue": "a job is requeued until it has finished",
    "open-mode": "the output is appended to",
    "export": "the job has your shell's variables, as sbatch's own default is",
    "ntasks|ntasks-per-(node|gpu)": "tasks follow from nodes and workers",
    "wait": "srun waits as long as it takes",
    "quiet|parsable": "submit prints the job's number alone",
    "get-user-env": "your shell's variables, which the job has, come before a login shell's",
    "kill-on-bad-exit": "a failed worker ends the attempt",
}
_CHAIN = "a chain: one run goes on until it has finished"
GPUS = ("gpus-per-node", "gres", "gpus-per-task", "gpus")
_NEXT = f"{NO_COMPONENTS}: the lines above are the job; submit each other component as its own"
_OF_ANOTHER = "of another component of a heterogeneous job: submit that as a job of its own"
_LATER = ("nodes", "cpus-per-task", *GPUS)  # options that the launch may have, too
# Slurm sets these only for a job with one of the options that the pattern beside them fits.
_SET_BY = {
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
    "SLURM_NTASKS": "ntasks.*|gpus-per-task",
    "SLURM_NPROCS": "ntasks.*|gpus-per-task",
    "SLURM_GPUS": "gpus",
    "SLURM_CPUS_PER_TASK": "cpus-per-task",
    "SLURM_GPUS_PER_NODE": "gpus-per-node",
    "SLURM_GPUS_PER_TASK": "gpus-per-task",
    "CUDA_VISIBLE_DEVICES": "gpus.*|gres|tres-per-task|exclusive",
    "SLURM_ARRAY": "array",  # stands for all of SLURM_ARRAY_…
}
BURST_BUFFER = re.compile(r"#(DW|BB|BB_LUA)\s")


@dataclass
class Directives:
    """The ``#SBATCH`` lines of a job script.

    Attributes
    ----------
    options
        (value, line) by sbatch's long name of an option, with the value '' for a flag
    marks
        (group, reason), by line, of lines of which no option counts
    replaced
        (line, reason) of options that do not count, while others of their line may
    """

    options: dict[str, TextAt] = field(default_factory=dict)
    marks: dict[int, Mark] = field(default_factory=dict)
    replaced: list[tuple[int, str]] = field(default_factory=list)

    @property
    def operands(self) -> dict[str, str]:
        """The values of `options`, without their lines."""
        return {name: operand for name, (operand, _) in self.options.items()}

    def get(self, name: str) -> str | None:
        """Return the value of the option with sbatch's long `name`, '' for a flag; None where the
        script does not have it."""
        return self.options.get(name, (None, 0))[0]

    def line(self, *names: str) -> int:
        """Return the line of the first of the options `names` that the script has; 0 where it has
        none of them."""
        return next((self.options[name][1] for name in names if name in self.options), 0)

    def number(self, name: str) -> int | None:
        """Return the value of an option as a number; None where it is no whole number, or the
        script does not have the option."""
        text = self.get(name) or ""
        return int(text) if text.isdecimal() else None


def read_directives(text: str) -> Directives:
    """Return the directives of a job script's text as sbatch reads them: those before the first
    command; of two equal options the last counts, while values of ``--mail-type`` are joined.
    ``marks`` of the result has lines behind the first command, without an option of sbatch, and
    from ``#SBATCH hetjob`` on, behind which another component of the job begins."""
    result, has_begun, is_first_component = Directives(), False, True
    for number, line in enumerate(text.splitlines(), 1):
        if BURST_BUFFER.match(line):
            result.marks[number] = LOST, "of a burst buffer: your own template may have it"
        if not line.startswith("#SBATCH"):
            has_begun = has_begun or line.strip()[:1] not in ("", "#")
            continue
        if has_begun:
            result.marks[number] = OURS, "after the first command: sbatch ignores it"
            continue
        reason = "no option of sbatch"
        try:
            text = re.sub(r"\s\\\s*$", "", line.removeprefix("#SBATCH"))  # it joins no lines
            words = shlex.split(text, comments=True)
        except ValueError:
            words, reason = [], "its quotes do not match"
        pairs = list(read_options([literal(word) for word in words]))
        if not pairs:
            result.marks[number] = LOST, reason
        if {"hetjob", "packjob"} & {word.lower() for word in words}:
            result.marks[number], is_first_component = (LOST, _NEXT), False
        elif not is_first_component:
            result.marks[number] = LOST, _OF_ANOTHER
        if is_first_component:
            _add_options(pairs, number, result)
    return result


def _add_options(pairs: Sequence[tuple[str, str]], line: int, directives: Directives) -> None:
    """Put `pairs`, names and values of the options of a `line`, into ``directives.options``. An
    equal option of an earlier line goes to ``directives.replaced``; the value of an earlier
    ``--mail-type`` is put before the new one, and its line gets a mark."""
    for name, operand in pairs:
        if name == "mail-type" and name in directives.options:
            before, line_before = directives.options[name]
            operand = f"{before},{operand}"
            directives.marks.setdefault(line_before, (TAKEN, f"--mail-type, in line {line}"))
        elif (name, operand) == ("mail-user", ""):
            directives.marks.setdefault(line, (OURS, "empty: Slurm writes to the user, as without"))
            continue
        elif name in directives.options:
            before, at = directives.options[name]
            reason = "has the same" if before == operand else "replaces"
            directives.replaced.append((at, f"line {line} {reason} --{name}"))
        directives.options[name] = operand, line


def read_options(words: list[Word]) -> Iterator[tuple[str, str]]:
    """Yield the long name and the value ('' for a flag) of each option of sbatch at the beginning
    of `words`, and remove the words of these options from `words`. A name in it may be a letter, or
    a long name cut short."""
    while words and re.match(r"--?\w", words[0].text):
        name, operand = option_name(words.pop(0), SHORT_OPTIONS, SBATCH)
        is_flag = name == "wait" or FLAGS.fullmatch(name)
        if operand is None and not is_flag and words and words[0].text[:1] != "-":
            operand = words.pop(0)
        yield name, operand.text if operand else ""


def take_directives(directives: Directives, result: Conversion, file: str = "") -> None:
    """Put directives into `result`: the groups of their lines, and the settings of those that are
    taken over. Settings for nodes, CPUs, GPUs and pyxis are left to `launch_settings.take_launch`,
    since the launch has such options, too. Placeholders and secrets are lost.

    Where an output has the job's name in it (``%x``), and no directive sets that, the job is named
    by the script's `file`, as by Slurm; '' for a script without one.
    """
    for name, (operand, line) in directives.options.items():
        text = as_raw(name, operand)
        group, reason = _mark_of(name, operand)
        pairs = _exported_variables(operand) if name == "export" else []
        # Mere names of jobs, as my_job, look like placeholders.
        is_placeholder = bool(_PLACEHOLDER.fullmatch(operand) or _WITHIN.search(operand))
        is_placeholder |= _lacks_number(name, operand)
        if is_placeholder and (name != "job-name" or operand[0] in "<{"):
            group, reason = LOST, f"{text} is a placeholder: --{name} with yours"
        elif name in SBATCH.split() and not (
            operand or FLAGS.fullmatch(name) or name in ("wait", "export")
        ):
            is_idle = name in ("exclude", "comment", "dependency")
            empty = f"--{name} is empty"
            group, reason = (OURS, empty) if is_idle else (LOST, f"{empty}: --{name} with yours")
        elif pairs:
            group, reason = TAKEN, "env, env-names"
            for variable, content in pairs:
                if content is None:
                    result.append("env-names", variable, line)
                else:
                    result.env[variable] = content, line
        elif looks_secret(text):
            group, reason = LOST, f"it has what looks like a secret: submit --sbatch=--{name}=…"
        result.mark(line, line, group, reason or text)
        if group == TAKEN and not (name in _LATER or pairs or is_of_pyxis(name)):
            _take_option(name, operand, line, result, file)
    for line, mark in directives.marks.items():
        result.mark(line, line, *mark)
    for line, reason in directives.replaced:
        result.mark(line, line, OURS, reason)


def _lacks_number(name: str, operand: str) -> bool:
    """Return whether the value of the option `name` is a placeholder for a number, as CPU_NUM:
    `operand` has no digit where sbatch takes a number. '' is none; nor is a type of GPUs alone."""
    if name in ("gpus", "gpus-per-node", "gpus-per-task"):  # a type alone means one
        return bool(re.fullmatch(r"[A-Z]+(_[A-Z]+)+", operand))
    return bool(operand and _OF_NUMBERS.fullmatch(name) and not re.search(r"\d", operand))


def _take_option(name: str, operand: str, line: int, result: Conversion, file: str) -> None:
    """Put the option `name` of sbatch into `result`: under its own key, else into ``sbatch``, the
    list of raw options. A note says what changes: a job name that is no folder's name, a signal for
    bash alone, ``--time-min`` without ``--time``, a dependency on jobs of the same name. `file` is
    as in `take_directives`."""
    text = as_raw(name, operand)
    if name == "job-name" and not JOB_NAME.fullmatch(operand):
        operand = re.sub(r"[^\w .+=,@-]+", "", operand).lstrip(" .+=,@-")[:100] or "job"
        result.note(line, f"{text}: job-name = {operand!r}, for a folder is named by it")
    if name == "time" and slurm_seconds(operand) == 0:
        operand = "UNLIMITED"
    if name in ("output", "error", "job-name", "chdir", "array") or name in _OWN_KEYS:
        result.values[name] = operand, line
    elif name == "exclusive" and not operand:
        result.values[name] = True, line
    elif name == "signal":  # without B: or R:
        result.values[name] = operand.partition(":")[2] or operand, line
        if operand.startswith("B:"):
            result.note(line, f"{text}: here the notice reaches the workers, and not bash alone")
    elif name == "time-min" and "time" not in result.values:  # of the partition's limit
        result.note(line, f"{text}: without a --time the longest time is not known: time = …")
    elif name == "no-requeue":
        result.values["max-requeues"] = 0, line
    else:
        result.append("sbatch", text, line)
    if "singleton" in operand:
        result.note(line, f"{text}: a run goes on by itself, by one submit")
    if name in ("output", "error") and "%x" in operand and file:
        result.values.setdefault("job-name", (file, line))


def take_array(directives: Directives, result: Conversion, texts: Sequence[str]) -> None:
    """Decide what ``--array=…%1`` means, whose tasks run one after the other, and put a note on it
    into `result`. It is an array (``array``) if one of the `texts`, of the job script and of its
    program, reads the index of a task; else a chain of jobs, which is one run. Any other array
    stays as it is; a note names an index that is read in a job without an array."""
    operand, line = directives.options.get("array", ("", 0))
    settings = [text for entries in result.lists.values() for text, _ in entries]
    settings += [text for text, _ in result.env.values()] + [*texts[1:]]
    if not operand and any("SLURM_ARRAY_TASK_ID" in text for text in settings):
        result.note(0, 'it reads SLURM_ARRAY_TASK_ID, and has no --array: array = "0-3", say')
    if not operand.endswith("%1"):
        return
    note = f"a chain, one run: if its tasks differ, array = {json.dumps(operand)}"
    comment_or_print = r"\s*#|\s*(echo|printf?)\b[^;|&>\n]*$"
    reads_index = re.compile(rf"^(?!{comment_or_print}).*SLURM_ARRAY_TASK", re.M)
    if any(map(reads_index.search, texts)):
        result.values["array"] = operand, line
        result.mark(line, line, TAKEN, f"--array={operand}")
        note = "its tasks read SLURM_ARRAY_TASK_…: a run for each; of a mere chain drop array"
    else:
        _replace_array_id(result, line)
    result.note(line, note)


def _replace_array_id(result: Conversion, line: int) -> None:
    """Write ``${RUN_NAME}`` for ``$SLURM_ARRAY_JOB_ID`` in arguments, set-up and clean-up lines of
    `result`: an array that has become a chain of jobs has no id, while all these jobs have the
    run's name. Where it is written, the first set-up line sets it, and the `line` of the array gets
    a note."""
    array_id = re.compile(r"\$(SLURM_ARRAY_JOB_ID\b|\{SLURM_ARRAY_JOB_ID\})")
    count = 0
    for key in {"args", "setup", "node-setup", "worker-setup", "teardown"} & result.lists.keys():
        replaced = [(array_id.subn("${RUN_NAME}", text), at) for text, at in result.lists[key]]
        count += sum(number for (_, number), _ in replaced)
        result.lists[key] = [(text, at) for (text, _), at in replaced]
    if count:
        result.lists.setdefault("setup", []).insert(
            0, ('export RUN_NAME="${HPC_DDP_RUN##*/}"', line)
        )
        result.append("expand", "RUN_NAME", line)
        result.note(
            line, "$SLURM_ARRAY_JOB_ID is $RUN_NAME here, the run's name in all of its jobs"
        )


def _exported_variables(operand: str) -> list[tuple[str, str | None]]:
    """Return names and values of the variables in a value of ``--export``, in order: ("A", "1") and
    ("B", None) of ``ALL,A=1,B``. None stands for the value in the shell that submits; ALL, NONE and
    NIL are no names."""
    words = re.findall(r"(?:^|,)(\w+)(=('[^']*'|\"[^\"]*\"|[^,]*))?", operand)
    return [
        (name, content.strip("'\"") if sign else None)
        for name, sign, content in words
        if sign or name not in ("ALL", "NONE", "NIL")
    ]


def _mark_of(name: str, operand: str) -> Mark:
    """Return (OURS, reason) for the directive `name` with the value `operand` where hpc-ddp decides
    what it asks for, else (TAKEN, "")."""
    decided = next((why for names, why in _DECIDED.items() if re.fullmatch(names, name)), "")
    if name == "export" and operand in ("NONE", "NIL"):
        return TAKEN, ""
    if name == "distribution" and not NODE_BY_NODE.fullmatch(operand):
        return OURS, "ranks go node by node; for a node's CPUs: --distribution=block:…"
    is_chain = name == "array" and operand.endswith("%1")
    return (OURS, decided or _CHAIN) if decided or is_chain else (TAKEN, "")


def read_sizes(directives: Directives) -> dict[str, int]:
    """Return the numbers of nodes, tasks, GPUs and CPUs that follow from the directives, by the
    names of Slurm's variables. Where the number of nodes does not follow, the tasks and GPUs are
    those of one node. Numbers that do not follow, or are 0, are left out."""
    least, _, most = (directives.get("nodes") or "").partition("-")
    tasks, per_node = directives.number("ntasks"), directives.number("ntasks-per-node")
    nodes = int(least) if least.isdecimal() and most in ("", least) else None
    options = directives.operands
    gpus, gpus_of_task = read_gpus(options, ("gpus",)), read_gpus(options, ("gpus-per-task",))
    gpus_of_node = read_gpus(options, ("gpus-per-node", "gres"))
    if nodes is None and tasks and per_node:
        nodes = -(-tasks // per_node)  # rounded up, as all below
    if nodes is None and gpus and gpus_of_node:
        nodes = -(-gpus // gpus_of_node)
    of_gpu = directives.number("ntasks-per-gpu")
    if of_gpu and tasks and not (gpus or gpus_of_node or gpus_of_task):
        gpus = -(-tasks // of_gpu)  # which Slurm then gives the job
    if per_node is None and of_gpu and not tasks:
        per_node = of_gpu * (gpus_of_node or gpus // (nodes or 1)) or 1
    if per_node is None:
        per_node = -(-tasks // (nodes or 1)) if tasks else 1
    tasks = tasks or (nodes or 1) * per_node
    has_range = "nodes" in options and nodes is None
    share = 0 if has_range else gpus // (nodes or 1)  # rounded down: `take_gpus` says so
    gpus_of_node = gpus_of_node or share or gpus_of_task * -(-tasks // (nodes or 1))
    numbers = {
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), nodes),
        **dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), gpus_of_node),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), tasks),
        "SLURM_GPUS_PER_TASK": gpus_of_task,
        **{"SLURM_NTASKS_PER_NODE": per_node, "SLURM_GPUS": gpus},
        "SLURM_CPUS_PER_TASK": directives.number("cpus-per-task"),
    }
    return {name: number for name, number in numbers.items() if number}


def tasks_of_node(numbers: Mapping[str, int]) -> int:
    """Return the number of tasks of the job on a node: all tasks divided by the nodes, rounded up.
    Slurm takes ``--ntasks-per-node`` beside ``--ntasks`` for a mere maximum. `numbers` are as from
    `read_sizes`."""
    return -(-numbers.get("SLURM_NTASKS", 1) // numbers.get("SLURM_NNODES", 1))


def has_range_of_nodes(directives: Directives, numbers: Mapping[str, int]) -> bool:
    """Return whether the number of nodes is a range, as of ``--nodes=2-4``, and does not follow
    from other options. `numbers` are as from `read_sizes`."""
    has_number = re.search(r"\d", directives.get("nodes") or "")  # and is no placeholder
    return "SLURM_NNODES" not in numbers and bool(has_number)


def names_not_set(directives: Directives) -> set[str]:
    """Return the variables on a job's sizes that Slurm does not set in this job, since its script
    lacks the options for them (`_SET_BY`)."""
    return {
        name
        for name, options in _SET_BY.items()
        if not any(re.fullmatch(options, option) for option in directives.options)
    }


def read_gpus(options: Mapping[str, str], names: tuple[str, ...] = GPUS) -> int:
    """Return the number of GPUs that an option asks for: the first of `names` that is in `options`,
    values by sbatch's long names. 0 without such an option."""
    return next((requested_gpus(options, name)[1] for name in names if name in options), 0)


def requested_gpus(options: Mapping[str, str], name: str) -> tuple[str, int]:
    """Return the type ('' without one) and the number of GPUs that the option `name` asks for, by
    its value in `options`. Without a number in it, that is 1 (``gres`` "gpu:a100"); the number is 0
    if the option is not there, or ``gres`` names no GPU."""
    request = options.get(name, "")
    request = "" if _lacks_number(name, request) else request
    gpus = gpus_of(request if name == "gres" else f"gpu:{request}")
    return gpus[0] if gpus else ("", 0)
