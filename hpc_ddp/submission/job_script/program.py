"""A launch, as settings: the program, its arguments, workers and container."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_ddp.core.job.variables import is_of_hpc_ddp, is_of_slurm
from hpc_ddp.submission.job_script.bash.words import Word, joined, literal
from hpc_ddp.submission.job_script.conversion import LOST, OURS, TAKEN, ArgumentWriter, Conversion
from hpc_ddp.submission.job_script.directives import (
    Directives,
    has_range_of_nodes,
    take_gpus,
    take_other_gres,
    tasks_of_launch,
    tasks_of_node,
)
from hpc_ddp.submission.job_script.launch import Launch, Statement, accelerate_variable, is_of_pyxis
from hpc_ddp.submission.job_script.statements import Reader

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
# Keys of Accelerate's YAML that describe the job itself.
_NOT_OF_ALL = (
    r"num_processes|num_machines|machine_rank|main_process_\w+|rdzv_backend|same_network|gpu_ids"
    r"|compute_environment|main_training_function|debug|tpu_\w+|use_cpu|downcast_bf16|dynamo_\w+"
    r"|enable_cpu_affinity|distributed_type|deepspeed_multinode_\w+|\w*hostfile"
)


def take(
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
    if statement.inside:
        writer.key = "node-setup" if launch.kind else "worker-setup"
    _take_arguments(launch, writer)
    _take_settings(launch, writer)
    _take_variables(launch, writer, reader.scope.is_open)
    _take_unset(statement, launch, result)
    _take_marks(launch, result)
    if config := launch.options.get("config-file", (None, 0))[0]:
        _take_yaml(launch, config, result, cwd)
    _take_nodes(launch, result, directives, numbers)
    _take_workers(launch, result, directives, numbers, gpus)
    _take_step_launcher(launch, result, directives, numbers, gpus)
    _take_cpus(launch, result, directives, numbers)


def _make_writer(result: Conversion, reader: Reader) -> ArgumentWriter:
    """Return a writer into `result` that knows the variables of the `reader`'s statements."""
    outer = (s for s in reader.statements if not s.inside)
    names = {name for s in outer for name in (s.name, *s.sets)}
    of_tasks = {s.name for s in reader.statements if s.name and s.inside} - names
    has_arguments = reader.scope.are_set
    return ArgumentWriter(result, names, reader.of_batch, of_tasks, has_arguments=has_arguments)


def _take_arguments(launch: Launch, writer: ArgumentWriter) -> None:
    """Write the program's arguments into the conversion. An argument that is lost is left out, and
    so is the option before it. If that is the ``-c`` of bash, there is no program either."""
    result = writer.result
    for before, argument in zip([literal(""), *launch.args], launch.args, strict=False):
        option = before.text if re.fullmatch(r"--?[A-Za-z][\w.-]*", before.text) else ""
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


def _take_variables(launch: Launch, writer: ArgumentWriter, is_open: bool) -> None:
    """Write the launch's variables into the conversion: into ``[env]``, or as set-up lines where
    earlier lines change them or may do so (`is_open`), or where their values have code. Variables
    of hpc-ddp's become notes; lost ones are left out."""
    result = writer.result
    for name, word in launch.env.items():
        at = word.line or launch.line
        if is_of_hpc_ddp(name):
            result.note(at, f"{name} is hpc-ddp's in the workers")
        elif writer.refuse(word, f"env: {name}", launch.line):
            continue
        elif not is_open and name not in writer.assigned and word.is_static:
            result.env[name] = word.text, at
        else:  # [env] comes before the set-up lines
            result.append("setup", f"export {name}={word.bash()}", at)


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
    is_in_image = bool(launch.settings.keys() & {"image", "container"})
    keys = ("container-options", "srun")
    options = " ".join(word.text for key in keys for word in launch.settings.get(key, []))
    is_elsewhere = launch.folder is None or bool(re.search("--(container-workdir|pwd)", options))
    is_away = (is_in_image and not Path(name).is_file()) if os.path.isabs(name) else is_elsewhere
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
        launch.settings["python"] = [literal(_of_home(python[0].text), python[0].line)]


def _take_image(launch: Launch, directives: Directives, result: Conversion) -> None:
    """Add the image of the directives, and their other options of pyxis, to the launch's settings.
    A container without an image is removed from these, and its line is lost. A note says in which
    folder a container of pyxis starts."""
    words = {n: literal(operand, at) for n, (operand, at) in directives.options.items()}
    tool = launch.settings.get("container-tool", [literal("")])[0].text
    image = words.get("container-image") or (words.get("image") if tool == "shifter" else None)
    if tool == "shifter" and image:  # hpc-ddp writes that option
        entries = result.lists.setdefault("sbatch", [])
        entries[:] = [entry for entry in entries if not entry[0].startswith("--image=")]
    if image and "image" not in launch.settings:
        launch.settings["image"] = [image]
        launch.settings.setdefault("container-tool", [literal("pyxis", image.line)])
    if _has_environment(launch, directives):
        launch.add("srun", *launch.settings.pop("container-options", []))
    if not any(word.text for word in launch.settings.get("image", [])):
        for key in {"image", "container-tool", "container-options"} & launch.settings.keys():
            at = launch.settings.pop(key)[0].line or launch.line
            launch.mark(at, LOST, "a container whose image is not named: image = …")
    elif options := [
        joined(f"--{name}=" if word.text else f"--{name}", word)
        for name, word in words.items()
        if is_of_pyxis(name) and name != "container-image"
    ]:
        launch.settings.setdefault("container-options", [])[:0] = options
    tools = [word for word in launch.settings.get("container-tool", []) if word.text == "pyxis"]
    tool_options = " ".join(word.text for word in launch.settings.get("container-options", []))
    if tools and "--container-workdir" not in tool_options:
        text = 'or container-options = ["--container-workdir=/its/own"]'
        launch.mark(tools[0].line, "", f"the container starts in the job's folder, {text}")


def _of_home(text: str) -> str:
    """Return a path with the home folder in place of ``~`` or ``$HOME`` at its beginning."""
    return os.path.expanduser(re.sub(r"^\$\{?HOME\}?(?=/)", "~", text))


def _take_yaml(launch: Launch, word: Word, result: Conversion, cwd: Path) -> None:
    """Read a configuration of Accelerate from the path in `word`. Its keys become the variables
    that Accelerate's launcher sets; ``num_processes`` the number of processes, if no option has it;
    other keys become notes. A configuration that can't be read becomes a note."""
    path = Path(cwd, launch.folder or "", os.path.expanduser(word.text))
    line = word.line or launch.line
    import yaml

    try:
        read: dict[str, Any] = dict(yaml.safe_load(path.read_text()) or {})
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        text = f"{word.text} can't be read ({type(error).__name__}): put it there and import again"
        text = f"not taken over: {text}; its FSDP or DeepSpeed settings would be missing"
        result.note(line, text)
        return
    parts = [read, *(part for part in read.values() if isinstance(part, dict))]
    keys = {str(k): e for part in parts for k, e in part.items() if not isinstance(e, dict)}
    use = f"use_{keys.get('distributed_type', '')}".lower()
    for key, entry in {use: True, **keys}.items():
        if variable := accelerate_variable(key, str(entry)):
            result.env.setdefault(variable[0], (variable[1], line))
        elif not re.fullmatch(f"{_NOT_OF_ALL}|use_.*", key) and entry not in (None, {}, [], "no"):
            text = f"not taken over: {key} of {word.text}: set it in Accelerator(…)"
            result.note(line, text)
    count = keys.get("num_processes")
    launch.processes = launch.processes or (count if isinstance(count, int) else None)


def _take_nodes(
    launch: Launch, result: Conversion, directives: Directives, numbers: Mapping[str, int]
) -> None:
    """Put the number of nodes into `result`: from the directives, as a range where it is one, else
    from the launch, else 1 with a note. `numbers` are as from `sizes`."""
    nodes = numbers.get("SLURM_NNODES") or launch.nodes
    is_range = has_range_of_nodes(directives, numbers)
    at = directives.line("nodes", "ntasks") or launch.line
    result.values.setdefault("nodes", (directives.get("nodes") if is_range else nodes or 1, at))
    if not is_range and not nodes:
        result.note(0, "the script has no number of nodes: 1 is taken; --nodes N")


def _take_workers(
    launch: Launch, result: Conversion, directives: Directives, numbers: Mapping[str, int],
    gpus: int,
) -> None:  # fmt: skip
    """Put the number of workers on a node into `result`, unless hpc-ddp takes that number by
    itself: one for each of the node's `gpus`, one without GPUs.

    The number is the launcher's; where it names none, its processes divided by the nodes, else one
    for each GPU. Without a launcher of workers it is the number of tasks on a node that srun or
    mpirun starts, else 1. Notes name a number that is not known, torchrun's own default on a node
    of several GPUs, and a launcher that several tasks of a node would start. The line of tasks that
    the nodes can't have equally many of is lost. `numbers` are as from `sizes`."""
    line, nodes = launch.line, numbers.get("SLURM_NNODES") or launch.nodes or 1
    if launch.kind:
        workers = launch.workers or (launch.processes or 0) // nodes or gpus or 1
    else:
        workers = tasks_of_launch(launch, numbers) if launch.step else 1
    if launch.step and not launch.kind:
        _mark_uneven_tasks(launch, result, directives, numbers)
    if launch.kind == "torchrun" and launch.workers is None and not gpus:
        result.note(line, "the number of workers is not known here: --nproc-per-node N")
    has_number = {"nproc-per-node", "nproc", "n"} & launch.options.keys()
    if launch.kind == "torchrun" and launch.workers == 1 < gpus and not has_number:
        text = "torchrun's own default is one worker: drop nproc-per-node for one on each GPU"
        result.note(line, text)
    if launch.step and launch.kind and not (launch.tasks or launch.in_loop):
        count = launch.tasks_per_node or tasks_of_node(numbers)
        text = f"{count} tasks on a node would each start the launcher there; hpc-ddp starts one"
        if count > 1:
            result.note(line, text)
    if workers != (gpus or 1):
        result.values["nproc-per-node"] = workers, line


def _mark_uneven_tasks(
    launch: Launch, result: Conversion, directives: Directives, numbers: Mapping[str, int]
) -> None:
    """Mark the line with the number of tasks as lost where the nodes can't have equally many."""
    nodes = numbers.get("SLURM_NNODES") or launch.nodes
    of_job = 0 if launch.tasks_per_node else numbers.get("SLURM_NTASKS", 0)
    tasks = launch.tasks or of_job
    if tasks % (nodes or 1):
        text = f"{tasks} tasks on {nodes} nodes: each node has as many: nproc-per-node = N"
        at = (0 if launch.tasks else directives.line("ntasks")) or launch.line
        result.mark(at, at, LOST, text)


def _take_step_launcher(
    launch: Launch, result: Conversion, directives: Directives, numbers: Mapping[str, int],
    gpus: int,
) -> None:  # fmt: skip
    """Put the command that starts the tasks into `result`, unless that is srun and a launcher of
    workers runs in them. A program without any launcher becomes one of srun, with a note where the
    node has several `gpus`. `numbers` are as from `sizes`."""
    # A program of its own is no child of torchrun's agent, whose variables its children would get.
    has_range = has_range_of_nodes(directives, numbers)
    is_alone = bool(launch.program) and not (launch.kind or has_range)
    step = launch.step or ("srun" if is_alone else "")
    if is_alone and not launch.step and gpus > 1 and "no-python" not in launch.settings:
        text = "plain Python: one process; for a worker on each GPU drop launcher, nproc-per-node"
        result.note(launch.line, text)
    if step and not (launch.kind and step == "srun"):
        result.values["step-launcher" if launch.kind else "launcher"] = step, launch.line


def _take_cpus(
    launch: Launch, result: Conversion, directives: Directives, numbers: Mapping[str, int]
) -> None:
    """Put the number of CPUs into `result`, from the directives, else from the launch: of a task,
    or of a node where several tasks of the job become one launcher of workers, or one program. The
    launch's line is lost where both have a number and they differ. `numbers` are as from
    `sizes`."""
    wide = tasks_of_node(numbers) if launch.kind or not launch.step else 1
    cpus = directives.number("cpus-per-task") or (wide > 1 and launch.cpus is None)
    if cpus:
        key = "cpus-per-task" if wide == 1 else "cpus-per-node"
        at = directives.line("cpus-per-task", "ntasks-per-node", "ntasks")
        result.values[key] = cpus * wide, at
        if launch.cpus not in (None, cpus):
            text = f"srun --cpus-per-task={launch.cpus} beside {cpus} of the job: cpus-per-task = N"
            result.mark(launch.line, launch.line, LOST, text)
    elif launch.cpus:
        result.values["cpus-per-task"] = launch.cpus, launch.line
