"""A launch, as settings: the program, its arguments, workers and container."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from hpc_ddp.core.job.variables import is_of_hpc_ddp, is_of_slurm, is_of_worker
from hpc_ddp.submission.job_script.bash.values import fill_in_home
from hpc_ddp.submission.job_script.bash.words import Word, join_words, literal
from hpc_ddp.submission.job_script.conversion import LOST, OURS, TAKEN, Conversion
from hpc_ddp.submission.job_script.directives import Directives
from hpc_ddp.submission.job_script.launchers.accelerate import (
    take_configuration,
    take_fsdp_defaults,
)
from hpc_ddp.submission.job_script.launchers.argument_writer import ArgumentWriter
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.launchers.option_names import is_of_pyxis
from hpc_ddp.submission.job_script.launchers.torchrun import OF_OLD_LAUNCHERS
from hpc_ddp.submission.job_script.sizes import (
    OF_A_TASK,
    note_devices,
    note_task_numbers,
    take_gpus,
    take_other_gres,
    take_sizes,
)
from hpc_ddp.submission.job_script.statements.reader import Reader
from hpc_ddp.submission.job_script.statements.rules import PRINTED_TEXT
from hpc_ddp.submission.job_script.statements.statement import Statement

# Lines that bring a Python, or another PATH, as modules of compilers and libraries do not.
BRINGS_PYTHON = re.compile(
    r"(?:^|[;&\s])(?:export\s+)?PATH=|(?:^|[;&|{!]|(?<!\$)\(|\b(?:then|do|else)\s)\s*"
    r"(?:(?:source|\.|conda|spack|eval)\s|(?:module|ml)\s+(?!purge|reset|restore|list|use|unload|(?:(?:load|add|(?i:cuda|gcc|gnu|nvhpc|nccl|cudnn|rocm|openmpi|ucx|craype"
    r"|aws-ofi|cmake|git)[^\s;&]*)(?:\s+|$))+$))",
    re.M,
)
_AT_THE_END = re.compile(r"\bPATH=[\"']?\$\{?PATH\}?:([^\s\"';:]+)")
# An argument of the script; with [1] it is another text where the script has the argument.
_ARGUMENT = re.compile(r"\$(?:[1-9]|\{[1-9]\d*(:?\+.*)?\})", re.S)
# Settings of a launch that are one word, and those that are true.
_SINGLE = ("image", "container-tool", "container", "python", "max-restarts")
_SETUP = ("setup", "node-setup", "worker-setup")
_TRUE = ("module", "no-python")
_DEVICES = "(CUDA|HIP|ROCR)_VISIBLE_DEVICES"


def take_launch(
    statement: Statement, result: Conversion, directives: Directives, reader: Reader,
    cwd: Path, folder: Path,
) -> None:  # fmt: skip
    """Put the launch of a statement into `result`: program, arguments, Python, container, variables
    and sizes, and its marks as groups of lines. `cwd` and `folder` are as in `convert`.

    For a statement without a launch only sizes, GPUs and image of the directives are put there. The
    set-up lines must be in `result` already. The launch itself is changed.
    """
    launch = statement.launch or Launch(0)
    _take_image(launch, directives, result)
    numbers = reader.scope.numbers
    gpus = take_gpus(launch, result, directives, numbers)
    take_other_gres(result, directives)
    writer = _make_writer(result, reader)
    if launch.program and writer.refuse_word(launch.program, "script", launch.line):
        launch.args = launch.args if launch.program.is_static else []  # those of a placeholder
        launch.program = None
    _take_program(launch, result, cwd, folder)
    _take_python(launch, result, _has_environment(launch, directives))
    writer.is_evaluated = launch.is_evaluated
    if statement.in_task:
        writer.key = "node-setup" if launch.kind else "worker-setup"
    if reader.scope.lacks_arguments:
        _leave_out_lacking_arguments(launch, reader.scope.defaults)
    texts = _take_arguments(launch, writer)
    _take_settings(launch, writer)
    _take_variables(launch, writer)
    writer.protect_texts(texts)
    if not launch.step:
        note_devices(result, gpus)
    elif not launch.in_loop:
        of_batch = reader.batch_variables if statement.in_task else {*OF_A_TASK}
        note_task_numbers(launch, result, of_batch)
    _take_unset(statement, launch, result)
    _take_marks(launch, result)
    if config := launch.options.get("config-file", (None, 0))[0]:
        take_configuration(launch, config, writer, cwd)
    elif launch.kind == "accelerate":
        result.note(launch.line, "accelerate's default_config.yaml is not read: --config_file FILE")
    take_fsdp_defaults(launch, writer)
    take_sizes(launch, result, directives, numbers, gpus)
    if "container-image" in directives.options:
        _move_into_container(launch, result, directives.line("container-image"))


def _move_into_container(launch: Launch, result: Conversion, line: int) -> None:
    """Make set-up lines of each task of those in `result`, with a note on a `line`, for a script
    that sbatch itself starts in a container of pyxis. Variables that they set are exported."""
    key = "node-setup" if launch.kind else "worker-setup"
    lines = result.lists.pop("setup", [])
    if lines:
        names = {name for name, _ in result.lists.get("expand", ())}
        exported = [
            (f"export {text}" if text.partition("=")[0] in names else text, n) for text, n in lines
        ]
        result.lists[key] = [*exported, *result.lists.get(key, [])]
        reason = "sbatch starts the script in the container: its lines are the tasks' set-up"
        result.note(line, f"{reason}, and run on each node")
        for marks in result.marks.values():
            marks[:] = [(group, key if text == "setup" else text) for group, text in marks]


def _make_writer(result: Conversion, reader: Reader) -> ArgumentWriter:
    """Return a writer into `result` that knows the variables of the `reader`'s statements."""
    of_batch_script = (s for s in reader.statements if not s.in_task)
    names = {name for s in of_batch_script for name in (s.name, *s.sets)}
    task_variables = {s.name for s in reader.statements if s.name and s.in_task} - names
    return ArgumentWriter(
        result, names, reader.batch_variables, task_variables, reader.batch_words,
        has_unknown_names=reader.scope.has_unknown_names,
        has_arguments=reader.scope.arguments_are_set,
    )  # fmt: skip


def _leave_out_lacking_arguments(launch: Launch, defaults: set[str]) -> None:
    """Remove arguments of a launch that bash makes nothing of where the script gets none: ``$1``
    without quotes, unless it may be the value of an option, and ``${1:+…}``. Each is noted in
    `defaults`."""
    before = ""
    for word in [*launch.args]:
        is_value = re.fullmatch(r"--?[A-Za-z][\w.-]*", before)
        form = _ARGUMENT.fullmatch(word.text)
        if form and word.parts[0].splits and (form[1] or not is_value):
            launch.args.remove(word)
            defaults.add("@")
        else:
            before = word.text


def _take_arguments(launch: Launch, writer: ArgumentWriter) -> dict[int, Word]:
    """Write the program's arguments into the writer's conversion, and return those without code by
    their index in ``args``. An argument that can't be written is left out, with the option in front
    of it. If that is the ``-c`` of bash, the program is left out, too."""
    result, texts = writer.result, dict[int, Word]()
    # Pairs of an argument and the one in front of it.
    for before, argument in zip([literal(""), *launch.args], launch.args, strict=False):
        is_option = re.fullmatch(r"--?[A-Za-z][\w.-]*", before.text) and argument.text[:1] != "-"
        option = before.text if is_option else ""
        if not writer.refuse_word(argument, "args", launch.line, option):
            at = argument.line or launch.line
            result.append("args", writer.write_argument(argument, at), at)
            is_text = argument.is_static and argument.text != OF_OLD_LAUNCHERS
            texts |= {len(result.lists["args"]) - 1: argument} if is_text else {}
        elif option:
            result.lists.get("args", [("", 0)]).pop()  # nothing, where the list is not there
            texts.pop(len(result.lists.get("args", ())), None)
            if option == "-c":
                result.values.pop("script", None)  # bash alone does nothing
    return texts


def _take_settings(launch: Launch, writer: ArgumentWriter) -> None:
    """Write the launch's settings into the writer's conversion: words, flags and lists. Left out
    are words that can't be written, with an option of the container in front of them; flags
    without a program; and srun's ``--mpi`` if a launcher of workers runs in the tasks, which is
    marked in `launch` as hpc-ddp's."""
    result = writer.result
    for key, words in launch.settings.items():
        for before, word in zip([literal(""), *words], words, strict=False):
            at = word.line or launch.line
            is_value = key == "container-options" and not word.text.startswith("-")
            option = before.text if is_value else ""
            if launch.kind and word.text.startswith("--mpi") and key == "srun":
                launch.mark(at, OURS, "srun --mpi")
            elif writer.refuse_word(word, key, launch.line):
                if re.fullmatch(r"--?[A-Za-z][\w-]*", option):  # without its value
                    result.lists[key].pop()
            elif key in _TRUE:
                if launch.program:
                    result.values[key] = True, at
            elif key in _SINGLE:
                text = writer.write_single_word(word, at)
                result.values[key] = int(text) if text.isdecimal() else text, at
            else:
                result.append(key, writer.write_single_word(word, at), at)


def _take_variables(launch: Launch, writer: ArgumentWriter) -> None:
    """Write the launch's variables into the writer's conversion. Those of hpc-ddp become notes;
    those whose values can't be written are left out."""
    result = writer.result
    for name, word in launch.env.items():
        at = word.line or launch.line
        if is_of_hpc_ddp(name):
            result.note(at, f"{name} is hpc-ddp's in the workers")
            continue
        if writer.refuse_word(word, f"env: {name}", launch.line):
            continue
        is_of_node = launch.in_loop and any(map(is_of_worker, word.names))  # of a loop over them
        # srun has set another value.
        if is_of_node or (launch.step == "srun" and re.fullmatch(_DEVICES, name)):
            key = "node-setup" if launch.kind else "worker-setup"
            result.append(key, f"export {name}={word.as_bash()}", at)
        else:
            writer.write_variable(name, word, at)


def _take_marks(launch: Launch, result: Conversion) -> None:
    """Put the launch's marks into `result`; a lost mark without a line is that of the launch.

    Marks of what hpc-ddp sets itself become one for each line. On a line with words of the launch
    this mark, and one for the launch, are `TAKEN`, and the line's earlier marks stay. On another
    line the mark is `OURS`, and of the earlier marks only lost ones stay.
    """
    lines_of_words = {launch.line, *(word.line for word in launch.words)}
    ours: dict[int, list[str]] = {}
    for at, group, text in launch.marks:
        if group == LOST:
            result.mark(at or launch.line, at or launch.line, LOST, text)
        elif not group:
            result.note(at, text)
        else:
            ours.setdefault(at, []).append(text)
    for at, texts in ours.items():
        marks, reason = result.marks.get(at, []), ", ".join(texts)
        lost = [(group, text) for group, text in marks if group == LOST]
        of_launch = [(TAKEN, "the launch"), *marks, (TAKEN, f"hpc-ddp sets {reason}")]
        result.marks[at] = of_launch if at in lines_of_words else [*lost, (OURS, reason)]


def _take_unset(statement: Statement, launch: Launch, result: Conversion) -> None:
    """Put a set-up line ``unset NAME`` into `result` for each variable that ``env -u`` unsets for
    the program. It stands behind the other lines, or in front of them where ``env`` stands in front
    of the ``bash -c`` that has them. A variable of hpc-ddp's becomes a note; the line with one of
    Slurm's is lost."""
    of_task = "node-setup" if launch.kind else "worker-setup"
    outer = statement.outer.unset if statement.outer else {}  # of the launch around the bash -c
    for name, (line, is_of_task) in launch.unset.items():
        if is_of_hpc_ddp(name):
            result.note(line, f"{name} is hpc-ddp's in the workers")
        elif is_of_slurm(name):
            result.mark(line, line, LOST, f"env -u {name}: hpc-ddp and srun need it")
        else:
            lines = result.lists.setdefault(of_task if is_of_task else "setup", [])
            is_first = is_of_task and outer.get(name) == (line, is_of_task)
            lines.insert(0 if is_first else len(lines), (f"unset {name}", line))


def _take_program(launch: Launch, result: Conversion, cwd: Path, folder: Path) -> None:
    """Put the program into `result` as ``script``: a file by its path from `folder` if it is below
    `cwd`, else by an absolute one; a module and a command by its name. A note names a set-up line
    that makes the file. A program whose place only the job knows becomes a command
    (`_make_command`). Without a program nothing happens.
    """
    if (word := launch.program) is None:
        return
    line = word.line or launch.line
    kind = launch.settings.keys() & {"module", "no-python"}  # none of both: a file
    name = fill_in_home(word.text)
    file = cwd / (launch.folder or "") / name
    if kind == {"no-python"} and "/" not in name and not shutil.which(name) and file.is_file():
        word = literal(f"./{name}", line)  # srun looks in its own folder last
        name = word.text
    if not kind and re.fullmatch(r"[\w-]+", name) and not file.exists():  # $(which fairseq-train)
        launch.add("no-python", word)
        kind = {"no-python"}
        result.note(line, f"{name} is started as a command, and not by Python")
    is_elsewhere = launch.folder is None or launch.sets_folder
    chdir, _ = result.values.get("chdir", ("", 0))
    folders = (os.path.normpath(cwd / str(place or "")) for place in (launch.folder, chdir))
    is_module_away = is_elsewhere or len({*folders}) > 1  # they are looked for in the job's folder
    is_in_image = bool(launch.settings.keys() & {"image", "container"})
    is_outside = os.path.isabs(name) or not file.is_relative_to(cwd)
    is_missing = is_in_image and is_outside and not file.is_file()
    is_away = is_missing or (is_elsewhere and not os.path.isabs(name))
    made_at = 0 if kind else _find_line_that_makes(name, result)
    if made_at:
        text = "is made by that line: the job runs it where it is, and not a copy of now"
        result.note(made_at, f"{name} {text}")
        is_away = True
    if "$" in name or (kind == {"module"} and is_module_away) or (not kind and is_away):
        name = _make_command(word, launch)
        is_in_folder = is_missing and not (kind or os.path.isabs(word.text))  # it is not here
        if is_in_folder or not (is_in_image or made_at):
            text = "only the job knows its folder: it runs there, and not from a copy of now"
            result.note(line, f"{word.text}: {text}")
    elif not kind and not os.path.isabs(name):
        is_below = Path(os.path.realpath(file)).is_relative_to(os.path.realpath(cwd))
        name = os.path.relpath(file, folder) if is_below else str(file)
    result.values["script"] = name, line


def _make_command(program: Word, launch: Launch) -> str:
    """Change a launch so that it runs its `program` by a command (``no-python``), and return the
    command's name: Python, with the program as its first argument; or the program itself, if it is
    a command already. A command whose name has variables becomes an argument of ``env``."""
    line, is_command = program.line or launch.line, "no-python" in launch.settings
    is_in_image = bool(launch.settings.keys() & {"image", "container"})
    default = literal("python3" if is_in_image else "python", line)
    python = launch.settings.pop("python", [default])
    is_module = bool(launch.settings.pop("module", []))
    words = [] if is_command else [*python, *([literal("-m", line)] * is_module)]
    words.append(program)
    name = words.pop(0).text if words[0].is_static else "env"
    launch.settings["python"] = python
    launch.add("no-python", program)
    launch.args[:0] = words
    return name


def _find_line_that_makes(name: str, result: Conversion) -> int:
    """Return the line of the first set-up line that writes or changes the file `name`, as ``cp
    a/train.py .`` or ``sed -i s/a/b/ train.py`` do; 0 without one."""
    end = r"(?=\s*(?:$|[\n;&|)]))"
    file = rf"[\"']?(?:\./)?{re.escape(name)}[\"']?{end}"
    into_folder = rf"\S*/{re.escape(name)}\s+(?:\.|\./|\"?\$\{{?PWD\}}?\"?){end}"
    stem = re.escape(name.removesuffix(".py"))
    converts = rf"nbconvert\b[^\n;&|]*[\s/\"']{stem}(?:\.ipynb|\b)"
    commands = r"\b(?:rsync\s|(?:cp|mv|ln|install)\s(?![^\n;&|]*-t\s))"
    copies = rf"{commands}(?:[^\n;&|]*\s)?(?:{file}|{into_folder})"
    writes = rf"(?<!2)>\s*{file}|\b(?:tee|sed\s+-\w*i\S*)\s[^\n;&|]*\s{file}"
    makes = re.compile(rf"{converts}|{copies}|{writes}")
    setup = result.lists.get("setup", ())
    lines = (line for text, line in setup if makes.search(PRINTED_TEXT.sub(" ", text)))
    return next(lines, 0)


def _has_environment(launch: Launch, directives: Directives) -> bool:
    """Return whether ``--environment`` of sbatch or srun names the image's file, as at CSCS."""
    words = launch.settings.get("srun", [])
    return "environment" in directives.options or any(
        word.text.startswith("--environment=") for word in words
    )


def _take_python(launch: Launch, result: Conversion, has_environment: bool) -> None:
    """Set the launch's ``python`` if it is named by a path, or if set-up lines or the image's file
    (`has_environment`) bring it; else remove it, for hpc-ddp finds one by itself. Add a note to
    `result` on each folder that a set-up line puts at the end of PATH: the script's Python may be
    there."""
    python = launch.settings.pop("python", [literal("python", launch.line)])
    for text, line in result.lists.get("setup", ()):
        if launch.program and (end := _AT_THE_END.search(text)):
            reason = f"PATH has {end[1]} at its end: if the script's torchrun, or Python, is there"
            result.note(line, f'{reason}: python = "{end[1]}/python"')
    lists = {key: "\n".join(line for line, _ in result.lists.get(key, [])) for key in _SETUP}
    if "activate" in lists["setup"]:
        lists["setup"] = ""  # hpc-ddp finds the environment's Python there
    brings = "PATH" in result.env or any(map(BRINGS_PYTHON.search, lists.values()))
    without = {"image", "container"} | (set() if launch.kind else {"no-python"})
    is_in_image = bool(launch.settings.keys() & without)
    is_version = re.fullmatch(r"python3\.\d+", python[0].text)
    is_brought = (is_version or (brings and not is_in_image)) and launch.program
    if is_brought or has_environment or re.search("[/$]", python[0].text):
        path = literal(fill_in_home(python[0].text), python[0].line)
        launch.settings["python"] = [python[0] if "$" in path.text else path]


def _take_image(launch: Launch, directives: Directives, result: Conversion) -> None:
    """Add the image of the directives, and their other options of pyxis, to the launch's settings;
    Shifter's image is removed from the raw options in `result`. A container without an image is
    removed from the settings, and its line is lost. A note says in which folder a container of
    pyxis starts."""
    words = {n: literal(operand, at) for n, (operand, at) in directives.options.items()}
    _take_named_image(launch, words, result)
    if _has_environment(launch, directives):
        launch.add("srun", *launch.settings.pop("container-options", []))
    if any(word.text for word in launch.settings.get("image", [])):
        launch.settings.setdefault("container-options", [])[:0] = [
            join_words(f"--{name}=" if word.text else f"--{name}", word)
            for name, word in words.items()
            if is_of_pyxis(name) and name != "container-image"
        ]
    else:
        for key in {"image", "container-tool", "container-options"} & launch.settings.keys():
            at = launch.settings.pop(key)[0].line or launch.line
            launch.mark(at, LOST, "a container whose image is not named: image = …")
    tools = [word for word in launch.settings.get("container-tool", []) if word.text == "pyxis"]
    tool_options = " ".join(word.text for word in launch.settings.get("container-options", []))
    if tools and "--container-workdir" not in tool_options:
        text = 'or container-options = ["--container-workdir=/its/own"]'
        launch.mark(tools[0].line, "", f"the container starts in the job's folder, {text}")


def _take_named_image(launch: Launch, words: Mapping[str, Word], result: Conversion) -> None:
    """Set the image of a launch without one to that which a directive names: ``--container-image``
    of pyxis, or ``--image`` of Shifter. The latter is removed from the raw options in `result`, for
    hpc-ddp writes it. `words` are the values of sbatch's options, by name."""
    is_shifter = launch.settings.get("container-tool", [literal("")])[0].text == "shifter"
    image = words.get("container-image") or (words.get("image") if is_shifter else None)
    if is_shifter and image:
        entries = result.lists.setdefault("sbatch", [])
        entries[:] = [entry for entry in entries if not entry[0].startswith("--image=")]
    if image and "image" not in launch.settings:
        launch.settings["image"] = [image]
        launch.settings.setdefault("container-tool", [literal("pyxis", image.line)])
