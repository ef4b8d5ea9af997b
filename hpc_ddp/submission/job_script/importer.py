"""The import of a job script, step by step, and notes that need all of its settings."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from hpc_ddp.core.file_io import read_text
from hpc_ddp.core.job.variables import is_of_hpc_ddp
from hpc_ddp.submission.job_script import launch_settings, secrets
from hpc_ddp.submission.job_script.bash.quotes import split_quoted
from hpc_ddp.submission.job_script.bash.values import Counted, Value
from hpc_ddp.submission.job_script.bash.variables import Scope
from hpc_ddp.submission.job_script.bash.words import literal
from hpc_ddp.submission.job_script.conversion import Conversion
from hpc_ddp.submission.job_script.directives import (
    names_not_set,
    read_sizes,
    take_array,
    take_directives,
    tasks_of_node,
)
from hpc_ddp.submission.job_script.script_text import (
    fill_in_own_path,
    join_lines,
    leave_out_other_languages,
    leave_out_refused,
    note_misspelt_directives,
    take_shebang,
)
from hpc_ddp.submission.job_script.sizes import read_texts
from hpc_ddp.submission.job_script.statements.loaded_texts import sentences_on
from hpc_ddp.submission.job_script.statements.needed_variables import (
    note_lost_variables,
    take_shell_variables,
)
from hpc_ddp.submission.job_script.statements.reader import Reader
from hpc_ddp.submission.job_script.statements.requeues_and_deletions import separate_deletions
from hpc_ddp.submission.job_script.statements.rules import ENDED, FINALLY, PRINTED_TEXT, PRINTS
from hpc_ddp.submission.job_script.statements.sorter import Sorter
from hpc_ddp.submission.job_script.statements.statement import (
    Statement,
    first_load,
    join_exit_codes,
    mark_exported,
)
from hpc_ddp.submission.job_script.statements.training_choice import (
    choose_launch,
    has_launch,
    join_commands_read_in_parts,
    keep_one_command,
    restore_definitions,
)
from hpc_ddp.submission.job_script.wrapper import JobText, unwrap

# Variables that count tasks, or have a number for one task.
_OF_TASKS = re.compile(r"\bSLURM_(NTASKS|NPROCS|NTASKS_PER_NODE|TASKS_PER_NODE|CPUS_PER_TASK)\b")
_ON_ERROR = re.compile(r"trap\s.*\sERR\s*$", re.S)
_OF_GPUS = re.compile("SLURM_GPUS")
# Settings whose entries are lines of bash.
_OF_CODE = {"setup", "node-setup", "worker-setup", "teardown"}
_OF_STEP = "NTASKS NPROCS NTASKS_PER_NODE TASKS_PER_NODE"  # SLURM_…, which each step has anew
# $NAME [1], ${NAME} or ${NAME:-default} [2].
_VARIABLE = re.compile(r"(?<!\\)\$(?:(\w+)|\{(\w+)(?::?-[^{}]*)?\})")
_JOB_ID = re.compile(r"\bSLURM_(JOB_?ID|ARRAY_JOB_ID)\b")
_SETS_IFS = re.compile(r"IFS=(\S*|\$?'[^']*'|\"[^\"]*\")")
# A command that changes the folder of the code.
_CHANGES_CODE = re.compile(r"\bgit\s+(?:-C\s+\S+\s+)?(?:pull|checkout|reset|switch)\b")
# A module or environment of a Python that hpc-ddp can't use: python/3.8, python-2.7.
_OLD_PYTHON = re.compile(r"(?i:\bpython[\w-]*)[/-](2\.\d|3\.\d(?!\d))[\w.-]*")
# A point in time, NAME [1], of which a later line makes a duration.
_TIME = re.compile(r"(?:export\s+)?(\w+)=[\"`$(]*date \+[\"']?%s(?:\.%N)?[\"')`]*")
_DURATION = re.compile(r"(export\s+)?\w+=([\"`]?\$\(\(|[\"`$(]*(expr|echo)\b)")
_PLACEHOLDER = re.compile(r"(?<![\w.-])/?(?:path/to/[\w./-]*\w|your[-_]\w+)")
# A command that reads the script's file, or takes a part of its path.
_OWN_PATH = re.compile(
    r"\b(?:cp|cat|source|\.|basename|dirname|readlink|realpath)\s[^;&|]*\$\{?(0\b|BASH_SOURCE)"
)
# Random numbers, the shell's process id ($$), times and the like.
_DRAWN = re.compile(r"\$\{?S?RANDOM\b|\$\{?\$|[(`]\s*(date|mktemp|uuidgen)\b")


def _may_come_from_shell(name: str) -> bool:
    """Return whether a job may have a variable of this name from the shell that submits it: it is
    none of Slurm's and of hpc-ddp's."""
    return not (name.startswith("SLURM_") or is_of_hpc_ddp(name))


def _program_text(result: Conversion, folder: Path) -> str:
    """Return the text of the program that a conversion names by its path from `folder`, or as a
    module there; '' where there is none, or it can't be read."""
    path = folder / os.path.expanduser(str(result.values.get("script", ("",))[0]))
    if "module" in result.values:  # pkg.train is the file pkg/train.py
        path = folder.joinpath(*path.name.split(".")).with_suffix(".py")
    try:
        return read_text(path)
    except OSError:
        return ""


def _add_notes(result: Conversion, scope: Scope, missing: set[str], optional: set[str]) -> None:
    """Add notes to `result`: on the script's arguments, where something depends on them; on
    clean-up lines, and traps for errors; on variables that the `scope` has taken to be unset, and
    on those that the submitting shell has to export, since it lacks them (`missing`), or may have
    (`optional`)."""
    of_shell = scope.defaults - {*"123456789@"}  # without those that stand for arguments
    if scope.defaults != of_shell or "job script's own arguments" in str(result.marks):
        text = "give the script's arguments, if it gets any: hpc-ddp import job.sbatch -- ARG…"
        result.note(0, text)
    ends = any(re.match(r"set\s+-(\w*e|o\s+errexit)", t) for t, _ in result.lists.get("setup", ()))
    lines = [
        entry for entry in result.lists.get("teardown", ()) if ends or not PRINTS.match(entry[0])
    ]
    asking = [n for text, n in lines if ENDED in text]
    if asking:
        text = "by hpc-ddp's verdict the exit code is 0 or 1 there; a preemption ends the teardown"
        result.note(asking[0], text)
    always = takewhile(lambda entry: ENDED not in entry[0], lines)
    if teardown := [n for text, n in always if n and not text.startswith(FINALLY.test)]:
        text = "teardown runs after each attempt, also one that fails or is preempted"
        result.note(teardown[0], text)
    for line in [line for text, line in result.lists.get("setup", ()) if _ON_ERROR.match(text)]:
        text = "the trap is for the lines of setup: how the launch ended is hpc-ddp's verdict"
        result.note(line, text)
    lines = [entry for key in ("node-setup", "worker-setup") for entry in result.lists.get(key, ())]
    in_image = [line for text, line in lines if launch_settings.BRINGS_PYTHON.search(text)]
    if in_image and result.values.keys() & {"image", "container"} and "python" not in result.values:
        reason = "the image's own python3 starts the workers before that"
        result.note(in_image[0], f'{reason}: python = "/its/path", if it has none from 3.10 on')
    for name in sorted(scope.guesses):
        result.note(0, f"${name} is taken to be unset: by that a launch is chosen")
    has_none = "--export=NONE" in dict(result.lists.get("sbatch", ()))
    place = "in env, for --export=NONE passes on none" if has_none else "before hpc-ddp submit"
    end = (
        ", unless a file or module that the script loads sets them"
        if scope.has_unknown_names
        else ""
    )
    for variables, reason in (
        (missing - of_shell, f"not set in this shell: to be exported {place}{end}"),
        (of_shell, "taken as unset: if your shell has one, write it"),
        (optional, "unset in this shell; lines ask for that of the shell that submits"),
    ):
        names = [f"${name}" for name in sorted(variables) if _may_come_from_shell(name)]
        if names:
            result.note(0, f"{', '.join(names)}: {reason}")


def _note_values(result: Conversion, numbers: Mapping[str, int]) -> None:
    """Add notes to `result` on set-up lines, without those that print or trap errors, and on
    arguments.

    One is on each line and argument that has the job's id: the next job of the run has another one,
    and would not find the checkpoints by it. The others are on each line, and on each argument with
    the number of a task's CPUs, that

    - counts the script's tasks, as in its `numbers`, where hpc-ddp's job has one on each node
    - changes the code by git, of which hpc-ddp has a copy by then
    - has a value that is drawn anew at each start, as ``$RANDOM``
    """
    setup = result.lists.get("setup", ())
    lines = [entry for entry in setup if not (PRINTS.match(entry[0]) or _ON_ERROR.match(entry[0]))]
    arguments = result.lists.get("args", ())
    for text, line in (*lines, *arguments):
        if job_id := _JOB_ID.search(text):
            reason = "is another one where the run goes on in a new job: $HPC_DDP_RUN stays"
            result.note(line, f"${job_id[0]} {reason}")
    lines += [entry for entry in arguments if "$SLURM_CPUS" in entry[0]]
    if _has_fewer_tasks(result, numbers):
        for text, line in lines:
            for name in sorted({match[0] for match in _OF_TASKS.finditer(text)} & numbers.keys()):
                reason = f"{numbers[name]} there; hpc-ddp's job has one task for each node"
                result.note(line, f"${name} is {reason}: write it")
    of_names = "\n".join(text for text, _ in lines if not _DURATION.match(text))
    for text, line in lines:
        time = _TIME.fullmatch(text)
        if time and not re.search(rf"\$\{{?{time[1]}\b", of_names):
            continue
        if old := _OLD_PYTHON.search(text):
            result.note(line, f"{old[0]}: hpc-ddp needs Python 3.10 or later in the job")
        if own_path := _OWN_PATH.search(text):
            reason = "is the batch script of hpc-ddp there, and not the script itself"
            result.note(line, f"${own_path[1]} {reason}")
        if changes := _CHANGES_CODE.search(text):
            reason = "changes the folder behind the copy that hpc-ddp submit makes of the code"
            result.note(line, f"{changes[0]} {reason}: call it before the submit")
        if drawn := _DRAWN.search(text):
            word = (drawn[1] or drawn[0]).strip("${")  # '' of $$
            reason = (
                "has another value at each start, also where the run goes on: write a fixed one"
            )
            result.note(line, f"{word or '$$'} {reason}")


def _note_placeholders(result: Conversion) -> None:
    """Add a note to `result` on each line of which a setting has what looks like a placeholder, and
    not only in a text that is printed."""
    codes = [(PRINTED_TEXT.sub(" ", str(text)), n) for text, n in result.entries()]
    places = [(n, match[0]) for code, n in codes if (match := _PLACEHOLDER.search(code))]
    for line, text in sorted({*places}):
        result.note(line, f"{text} looks like a placeholder: write your own")


def _has_fewer_tasks(result: Conversion, numbers: Mapping[str, int]) -> bool:
    """Return whether the script's job has several tasks on a node, by its `numbers`, and hpc-ddp's
    has one, which is torchrun."""
    launcher = result.values.get("launcher", ("torchrun",))[0]
    return tasks_of_node(numbers) > 1 and launcher == "torchrun"


def _write_numbers(result: Conversion, numbers: Mapping[str, int], reader: Reader) -> None:
    """Write the numbers of the script's tasks and GPUs into ``env``, arguments, set-up and clean-up
    lines of `result`, in place of variables of Slurm that have other values in hpc-ddp's job, or
    none. `numbers` are as from `read_sizes`.

    Variables stay that a statement sets; those on tasks, where the launch's own step has other
    numbers than the job; and all in texts that bash does not expand. Names that nothing uses any
    more are removed from ``expand``.
    """
    fixed = {name for s in reader.statements for name in (s.name, *s.sets)}
    launches = [s.launch for s in reader.statements if s.launch and s.in_task]
    if any(launch.tasks or launch.tasks_per_node for launch in launches):
        fixed |= {f"SLURM_{name}" for name in _OF_STEP.split()} - reader.batch_variables
    numbers = {name: number for name, number in numbers.items() if name not in fixed}
    has_fewer = _has_fewer_tasks(result, numbers)

    def number_of(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        is_other = (has_fewer and _OF_TASKS.fullmatch(name)) or _OF_GPUS.fullmatch(name)
        return str(numbers[name]) if name in numbers and is_other else match[0]

    for name, (text, line) in result.env.items():
        result.env[name] = _VARIABLE.sub(number_of, text), line
    for key in _OF_CODE & result.lists.keys():
        pieces = [(split_quoted(text), line) for text, line in result.lists[key]]
        result.lists[key] = [
            ("".join(_VARIABLE.sub(number_of, t) if is_code else t for t, is_code in texts), line)
            for texts, line in pieces
        ]
    expanded = dict(result.lists.get("expand", ()))
    if arguments := result.lists.get("args"):
        arguments[:] = [
            (_VARIABLE.sub(lambda m: number_of(m) if (m[1] or m[2]) in expanded else m[0], text), n)
            for text, n in arguments
        ]
    _remove_unused_names(result)


def _remove_unused_names(result: Conversion) -> None:
    """Remove names from ``expand`` that no text of `result` has as a variable, and ``expand``
    itself if no name is left."""
    expand = result.lists.pop("expand", [])
    texts = [str(setting) for setting, _ in result.entries()]
    names = {name for text in texts for name in re.findall(r"\$\{?(\w+)", text)}
    if used := [entry for entry in expand if entry[0].removesuffix("[@]") in names]:
        result.lists["expand"] = used


def _read_statements(text: str, make_scope: Callable[[Counted], Scope]) -> Reader:
    """Return a reader that has read the statements of a script's text. `make_scope` returns the
    scope at the script's begin, by its ``counted``; all of them share their ``guesses``.

    The text is read twice, since a guess of the first reading holds for all lines; and again, so
    that more commands count as a launch (`Counted`), while there is no other launch.
    """

    def read(counted: Counted) -> Reader:
        reader = Reader(make_scope(counted))
        reader.read(text)
        return reader

    read(Counted.PLAIN_PYTHON)
    for counted in (Counted.PLAIN_PYTHON, Counted.PYTHON):
        reader = read(counted)
        if has_launch(reader.statements, counted):
            return reader
    reader = read(Counted.COMMANDS)
    keep_one_command(reader.statements)
    return reader


def _add_set_line(arguments: Sequence[str], result: Conversion) -> None:
    """Put a line ``set -- ARG…`` before the set-up lines, and before the clean-up lines, if one of
    them uses the script's arguments, and there are some."""
    for key in {"setup", "teardown"} & result.lists.keys():
        lines = [line for line, _ in result.lists[key]]
        uses = any(re.search(r"\$\{?[1-9@*#]|shift|getopts", line) for line in lines)
        if arguments and uses:
            result.lists[key].insert(0, (f"set -- {shlex.join(arguments)}", 0))


def _find_job(text: str, scope: Scope, path: Path | None, result: Conversion) -> JobText:
    """Return the job of a script's text: the script itself, or the one that it submits (`unwrap`,
    which changes the `scope`). `path` is the script's own, None for a text without one. Notes in
    `result` name a first line that sbatch refuses, and comments that look like directives. Raise as
    `syntax.parse`."""
    if text.startswith("!/"):
        result.note(1, "sbatch refuses a script whose first line has no #: #! is meant")
        text = f"#{text}"
    job = unwrap(fill_in_own_path(text, path, result) if path else text, scope)
    if not job.first_line.startswith("#!"):
        reason = "is no #!: sbatch itself refuses the script"
        result.note(job.first_number, f"the first line of the job {reason}")
    note_misspelt_directives(job.text, result)
    return job


def _mark_wrapper(job: JobText, result: Conversion) -> None:
    """Put into `result` the groups of the lines around a job that another script submits, and notes
    on it and on doubtful values in its text. A job that is the script itself changes nothing."""
    for line, (group, reason) in job.marks.items():
        result.mark(line, line, group, reason)
    if job.line:
        text = "the job is the script that it submits here"
        result.note(job.line, f"{text}; the lines around it are read as the job's")
    for sentence in sentences_on(job.doubts):
        result.note(job.line, sentence)


def import_script(
    text: str, cwd: Path, folder: Path, arguments: Sequence[str] = (), name: str = "",
    environ: Mapping[str, str] = {},
) -> Conversion:  # fmt: skip
    """Return the settings of a job script's text, and what became of its lines; none of it is run.

    `cwd` is the folder that the script is submitted from, `folder` that of the project file to be
    written. `arguments` are the script's own, ``$1`` and so on; where a line of set-up or clean-up
    uses them, a line before it sets them. `name` is the name of the script's file, `environ` the
    environment of the shell that will submit. The program, files that the script sources, and a
    configuration of Accelerate that it names, are read, too. Raise UsageError where the parser of
    bash or of YAML is missing.
    """
    # The script, or the one that it submits, as statements.
    result = Conversion()
    text = leave_out_other_languages(text, name, result)
    words = [literal(argument) for argument in arguments] or None
    defaults: set[str] = set()
    of_cwd: dict[str, Value] = {"PWD": literal(str(cwd)), "SLURM_SUBMIT_DIR": literal(str(cwd))}
    of_shell = {n: literal(environ[n]) for n in ("HOME", "USER", "LOGNAME") if n in environ}
    of_wrapper = Scope(
        {**of_cwd, **of_shell}, arguments=words, lacks_arguments=not words,
        shell_names=environ.keys(), defaults=defaults, hides=secrets.is_secret,
    )  # fmt: skip
    job = _find_job(text, of_wrapper, cwd / name if name else None, result)
    directives, text = job.directives, job.text
    numbers = read_sizes(directives)
    start = os.path.normpath(cwd / os.path.expanduser(directives.get("chdir") or ""))
    guesses: set[str] = set()

    def make_scope(counted: Counted) -> Scope:
        return Scope(
            {**of_cwd, "PWD": literal(start)}, numbers, read_texts(directives, numbers),
            names_not_set(directives),
            arguments=words, arguments_are_set=bool(words), lacks_arguments=not words,
            shell_names=environ.keys(), guesses=guesses, defaults=defaults,
            counted=counted, hides=secrets.is_secret,
        )  # fmt: skip

    text = join_lines(leave_out_refused(text, result), result)
    reader = _read_statements(text, make_scope)
    scope = reader.scope
    result.notes += reader.notes

    # What becomes of each line. The order matters: later steps need the settings of earlier ones.
    take_directives(directives, result, name)
    _mark_wrapper(job, result)
    launch, at = choose_launch(reader, result)
    at = restore_definitions(reader, join_commands_read_in_parts(reader, at))
    join_exit_codes(reader.statements, at)
    at = separate_deletions(reader.statements, at)
    mark_exported(reader.statements, environ.keys())
    sorter = Sorter(reader, result, launch, at, start, name)
    take_shebang(text.partition("\n")[0], result)
    sorter.take_statements()
    scope.has_unknown_names |= first_load(reader.statements) < len(reader.statements)
    statement = reader.statements[at] if launch else Statement("", (0, 0))
    launch_settings.take_launch(statement, result, directives, reader, cwd, folder)
    if ifs_lines := [n for text, n in result.lists.get("setup", ()) if _SETS_IFS.fullmatch(text)]:
        result.append("setup", "unset IFS", ifs_lines[-1])  # the batch script relies on bash's own
    take_array(directives, result, (text, _program_text(result, folder)))

    # What follows from all settings together.
    missing, optional = take_shell_variables(reader.statements, sorter.kept, result, environ)
    note_lost_variables(reader.statements, sorter.kept, result)
    _add_set_line(arguments, result)
    _add_notes(result, scope, missing, optional - scope.defaults)
    _write_numbers(result, numbers, reader)
    _note_values(result, numbers)
    _note_placeholders(result)
    for line, mark in reader.other_marks.items():
        result.marks.setdefault(line, [mark])
    secrets.take_out_secrets(result)
    return result
