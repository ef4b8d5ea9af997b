"""A launch, as settings: the program, its arguments, workers and container."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from hpc_ddp.core.job.variables import is_of_hpc_ddp, is_of_slurm
from hpc_ddp.submission.job_script.bash.words import Word, join_words, literal
from hpc_ddp.submission.job_script.conversion import (
    LOST,
    OURS,
    PRINTED_TEXT,
    TAKEN,
    ArgumentWriter,
    Conversion,
)
from hpc_ddp.submission.job_script.directives import (
    Directives,
    take_gpus,
    take_other_gres,
)
from hpc_ddp.submission.job_script.launchers.accelerate import take_defaults, take_yaml
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.launchers.options import is_of_pyxis
from hpc_ddp.submission.job_script.sizes import take_sizes
from hpc_ddp.submission.job_script.statements.reader import Reader
from hpc_ddp.submission.job_script.statements.statement import Statement

# Lines that bring a Python, or another PATH: modules of compilers and libraries alone do not.
_BRINGS_PYTHON = re.compile(
    r"(?:^|[;&\s])(?:(?:source|\.|conda|spack|eval)\s|(?:export\s+)?PATH=|(?:module|ml)\s+(?!purge|reset"
    r"|restore|list|use|unload|(?:(?:load|add|(?:cuda|gcc|gnu|nvhpc|nccl|cudnn|rocm|openmpi|ucx|craype"
    r"|aws-ofi|cmake|git)[^\s;&]*)(?:\s+|$))+$))",
    re.M,
)
_AT_THE_END = re.compile(r"\bPATH=[\"']?\$\{?PATH\}?:([^\s\"';:]+)")
# Settings of a launch that are one word, and those that are true.
_SINGLE = ("image", "container-tool", "container", "python", "max-restarts")
_SETUP = ("setup", "node-setup", "worker-setup")
_TRUE = ("module", "no-python")


def take_launch(
    statement: Statement, result: Conversion, directives: Directives, reader: Reader,
    cwd: Path, folder: Path,
) -> None:  # fmt: skip
    """Put the launch of a statement into a conversion: program, arguments, Python, container,
    variables and sizes, and its marks as groups of lines. `cwd` and `folder` are as in `convert`.

    Without a launch only the sizes and the image of the directives are put there. The conversion
    must have the set-up lines already. The launch itself is changed.
    """
    launch = statement.launch or Launch(0)
    _take_image(launch, directives, result)
    numbers = reader.scope.numbers
    gpus = take_gpus(launch, result, directives, numbers)
    take_other_gres(result, directives)
    writer = _make_writer(result, reader)
    if launch.program and writer.refuse(launch.program, "script", launch.line):
        launch.program, launch.args = None, []
    _take_program(launch, result, cwd, folder)
    _take_python(launch, result, _has_environment(launch, directives))
    writer.is_evaluated = launch.is_evaluated
    if statement.in_task:
        writer.key = "node-setup" if launch.kind else "worker-setup"
    _take_arguments(launch, writer)
    _take_settings(launch, writer)
    _take_variables(launch, writer)
    _take_unset(statement, launch, result)
    _take_marks(launch, result)
    if config := launch.options.get("config-file", (None, 0))[0]:
        take_yaml(launch, config, writer, cwd)
    take_defaults(launch, writer)
    take_sizes(launch, result, directives, numbers, gpus)


def _make_writer(result: Conversion, reader: Reader) -> ArgumentWriter:
    """Return a writer into `result` that knows the variables of the `reader`'s statements."""
    outer = (s for s in reader.statements if not s.in_task)
    names = {name for s in outer for name in (s.name, *s.sets)}
    of_tasks = {s.name for s in reader.statements if s.name and s.in_task} - names
    scope = reader.scope
    return ArgumentWriter(
        result,
        names,
        reader.batch_variables,
        of_tasks,
        scope.is_open,
        has_arguments=scope.arguments_are_set,
    )


def _take_arguments(launch: Launch, writer: ArgumentWriter) -> None:
    """Write the program's arguments into the conversion. An argument that is lost is left out, and
    so is the option before it. If that is the ``-c`` of bash, there is no program either."""
    result = writer.result
    for before, argument in zip([literal(""), *launch.args], launch.args, strict=False):
        is_option = re.fullmatch(r"--?[A-Za-z][\w.-]*", before.text) and argument.text[:1] != "-"
        option = before.text if is_option else ""
        if not writer.refuse(argument, "args", launch.line, option):
            at = argument.line or launch.line
            result.append("args", writer.write(argument, at), at)
        elif option:
            result.lists.get("args", [("", 0)]).pop()
            result.values.pop("script" if option == "-c" else "", None)  # bash alone does nothing


def _take_settings(launch: Launch, writer: ArgumentWriter) -> None:
    """Write the launch's settings into the conversion: single words, flags and lists. Left out are
    words that are lost, with the container's option before them, and ``--mpi`` of srun."""
    result = writer.result
    for key, words in launch.settings.items():
        for before, word in zip([literal(""), *words], words, strict=False):
            at = word.line or launch.line
            option = before.text if key == "container-options" else ""
            if launch.kind and word.text.startswith("--mpi") and key == "srun":
                launch.mark(at, OURS, "srun --mpi")  # the workers are torchrun's
            elif writer.refuse(word, key, launch.line):
                if re.fullmatch(r"--?[A-Za-z][\w-]*", option):  # without its value
                    result.lists[key].pop()
            elif key in _TRUE:
                if launch.program:
                    result.values[key] = True, at
            elif key in _SINGLE:
                text = writer.write_one(word, at)
                result.values[key] = int(text) if text.isdecimal() else text, at
            else:
                result.append(key, writer.write_one(word, at), at)


def _take_variables(launch: Launch, writer: ArgumentWriter) -> None:
    """Write the launch's variables into the conversion. Variables of hpc-ddp's become notes; lost
    ones are left out."""
    result = writer.result
    for name, word in launch.env.items():
        at = word.line or launch.line
        if is_of_hpc_ddp(name):
            result.note(at, f"{name} is hpc-ddp's in the workers")
        elif writer.refuse(word, f"env: {name}", launch.line):
            continue
        else:
            writer.write_variable(name, word, at)


def _take_marks(launch: Launch, result: Conversion) -> None:
    """Put the launch's marks into `result`: lost lines and notes as they are; for each line one
    mark for all that hpc-ddp sets itself."""
    busy = {launch.line, *(word.line for word in launch.words)}
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
        result.marks[at] = of_launch if at in busy else [*lost, (OURS, reason)]


def _take_unset(statement: Statement, launch: Launch, result: Conversion) -> None:
    """Put a set-up line ``unset NAME`` into `result` for each variable that ``env`` unsets for the
    program. It stands behind the other lines, or before them where ``env`` stands before their
    ``bash -c``. A variable of hpc-ddp's becomes a note; one of Slurm's is lost."""
    of_task = "node-setup" if launch.kind else "worker-setup"
    outer = statement.outer.unset if statement.outer else {}
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
    """Put the program into `result` as ``script``: by its path from `folder` if it is below `cwd`,
    else by an absolute one. Where only the job knows the program's place, the launch is changed: a
    command (``no-python``) gets the program as an argument. Without a program nothing happens."""
    if (word := launch.program) is None:
        return
    line, kind = word.line or launch.line, launch.settings.keys() & {"module", "no-python"}
    name = _of_home(word.text)
    file = cwd / (launch.folder or "") / name
    if kind == {"no-python"} and "/" not in name and not shutil.which(name) and file.is_file():
        word = literal(f"./{name}", line)  # srun looks in its own folder last
        name = word.text
    is_in_image = bool(launch.settings.keys() & {"image", "container"})
    keys = ("container-options", "srun")
    options = " ".join(word.text for key in keys for word in launch.settings.get(key, []))
    is_elsewhere = launch.folder is None or bool(re.search("--(container-workdir|pwd)", options))
    is_away = (is_in_image and not Path(name).is_file()) if os.path.isabs(name) else is_elsewhere
    if not kind and (made_at := _line_that_makes(name, result)):
        text = "is made by that line: the job runs it where it is, and not a copy of now"
        result.note(made_at, f"{name} {text}")
        is_away = True
    if "$" in name or (kind == {"module"} and is_elsewhere) or (not kind and is_away):
        python = launch.settings.pop(
            "python", [literal("python3" if is_in_image else "python", line)]
        )
        is_module = bool(launch.settings.pop("module", []))
        command = [] if "no-python" in kind else [*python, *([literal("-m", line)] * is_module)]
        words = [*command, word]
        name = words.pop(0).text if words[0].is_static else "env"
        launch.settings["python"] = python
        launch.add("no-python", word)
        launch.args[:0] = words
    elif not kind and not os.path.isabs(name):
        place = cwd / (launch.folder or "") / name
        is_below = Path(os.path.realpath(place)).is_relative_to(os.path.realpath(cwd))
        name = os.path.relpath(place, folder) if is_below else str(place)
    result.values["script"] = name, line


def _line_that_makes(name: str, result: Conversion) -> int:
    """Return the line of a set-up line that writes or changes the file `name`, 0 without one."""
    file = rf"[\"']?(?:\./)?{re.escape(name)}[\"']?(?=\s*(?:$|[\n;&|)]))"
    same = rf"\S*/{re.escape(name)}\s+(?:\.|\./|\"?\$\{{?PWD\}}?\"?)(?=\s*(?:$|[\n;&|)]))"
    stem = rf"nbconvert\b[^\n;&|]*[\s/\"']{re.escape(name.removesuffix('.py'))}(?:\.ipynb|\b)"
    copies = r"\b(?:rsync\s|(?:cp|mv|ln|install)\s(?![^\n;&|]*-t\s))"
    copies = rf"{copies}(?:[^\n;&|]*\s)?(?:{file}|{same})"
    writes = rf"(?<!2)>\s*{file}|\b(?:tee|sed\s+-\w*i\S*)\s[^\n;&|]*\s{file}"
    makes = re.compile(rf"{stem}|{copies}|{writes}")
    setup = result.lists.get("setup", ())
    lines = (line for text, line in setup if makes.search(PRINTED_TEXT.sub(" ", text)))
    return next(lines, 0)


def _has_environment(launch: Launch, directives: Directives) -> bool:
    """Return whether a file names the image, by ``--environment`` of sbatch or srun, as at CSCS."""
    words = launch.settings.get("srun", [])
    return "environment" in directives.options or any(
        word.text.startswith("--environment=") for word in words
    )


def _take_python(launch: Launch, result: Conversion, has_environment: bool) -> None:
    """Leave the launch's ``python`` only if it has a path, or if set-up lines or the image's file
    (`has_environment`) bring it; hpc-ddp finds any other by itself. Add a note on each folder that
    a set-up line puts at the end of PATH: the script's Python may be there."""
    python = launch.settings.pop("python", [literal("python", launch.line)])
    for text, line in result.lists.get("setup", ()):
        if launch.program and (end := _AT_THE_END.search(text)):
            reason = f"PATH has {end[1]} at its end: if the script's torchrun, or Python, is there"
            result.note(line, f'{reason}: python = "{end[1]}/python"')
    lists = {key: "\n".join(line for line, _ in result.lists.get(key, [])) for key in _SETUP}
    if "activate" in lists["setup"]:  # config.default_python
        lists["setup"] = ""
    brings = "PATH" in result.env or any(map(_BRINGS_PYTHON.search, lists.values()))
    without = {"image", "container"} | (set() if launch.kind else {"no-python"})
    is_in_image = bool(launch.settings.keys() & without)
    is_brought = brings and not is_in_image and launch.program
    if is_brought or has_environment or re.search("[/$]", python[0].text):
        path = literal(_of_home(python[0].text), python[0].line)
        launch.settings["python"] = [python[0] if "$" in path.text else path]


def _take_image(launch: Launch, directives: Directives, result: Conversion) -> None:
    """Add the image of the directives, and their other options of pyxis, to the launch's settings.
    A container without an image is removed from these, and its line is lost. A note says in which
    folder a container of pyxis starts."""
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
    """Make the image that a directive of sbatch names, by the `words` of its options, that of a
    launch without one: pyxis's ``--container-image``, or Shifter's ``--image``, which is then no
    raw option in `result` any more: hpc-ddp writes it."""
    is_shifter = launch.settings.get("container-tool", [literal("")])[0].text == "shifter"
    image = words.get("container-image") or (words.get("image") if is_shifter else None)
    if is_shifter and image:
        entries = result.lists.setdefault("sbatch", [])
        entries[:] = [entry for entry in entries if not entry[0].startswith("--image=")]
    if image and "image" not in launch.settings:
        launch.settings["image"] = [image]
        launch.settings.setdefault("container-tool", [literal("pyxis", image.line)])


def _of_home(text: str) -> str:
    """Return a path with the home folder in place of ``~`` or ``$HOME`` at its beginning, and with
    the user's name in place of ``$USER``."""
    text = re.sub(r"\$(USER\b|\{USER\})", lambda match: os.environ.get("USER", match[0]), text)
    return os.path.expanduser(re.sub(r"^\$\{?HOME\}?(?=/)", "~", text))
