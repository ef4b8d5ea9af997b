"""A launch, as settings: the program, its arguments, workers and container."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.variables import is_of_hpc_ddp
from hpc_ddp.submission.job_script.directives import Directives, gpu_request
from hpc_ddp.submission.job_script.launch import Launch, read_gpus
from hpc_ddp.submission.job_script.shell import Word
from hpc_ddp.submission.job_script.training_launchers import accelerate_variable

if TYPE_CHECKING:
    from hpc_ddp.submission.job_script.conversion import Conversion

# Settings of a launch that are one word.
_SINGLE = ("image", "container-tool", "container", "python", "nodes")
_NOT_OF_ALL = r"num_processes|num_machines|machine_rank|main_process_\w+|rdzv_backend|" \
    r"same_network|compute_environment|main_training_function|debug|tpu_\w+|gpu_ids|use_cpu|" \
    r"downcast_bf16|enable_cpu_affinity|distributed_type|dynamo_\w+|" \
    r"deepspeed_multinode_\w+|\w*hostfile"  # fmt: skip


def take(
    launch: Launch, result: Conversion, directives: Directives, numbers: Mapping[str, int],
    cwd: Path, folder: Path,
) -> None:  # fmt: skip
    """Put a launch into a conversion; `cwd` and `folder` as `convert` has them."""
    line = launch.line
    _take_program(launch, result, cwd, folder)
    for key, words in launch.settings.items():
        for word in words:
            if launch.kind and word.text.startswith("--mpi") and key == "srun":
                continue  # the workers are torchrun's
            if key in _SINGLE:
                result.values[key] = _text(word, result), word.line
            elif key == "max-restarts":
                result.values[key] = int(word.text), word.line
            elif key in ("module", "no-python", "elastic"):
                result.values[key] = True, word.line
            else:
                result.append(key, _text(word, result), word.line)
    for name, word in launch.env.items():
        if is_of_hpc_ddp(name):
            result.notes.append((word.line or line, f"{name} is hpc-ddp's in the workers"))
        else:
            result.env[name] = _text(word, result), word.line or line
    words = [*launch.args, *(word for entries in launch.settings.values() for word in entries)]
    busy = {line, *(word.line for word in words), launch.program.line if launch.program else line}
    for at, text in launch.ours:
        if at not in busy:
            result.marks[at] = [("set by hpc-ddp itself", text)]
    for at, text in launch.lost:
        result.notes.append((at, f"not taken over: {text}"))
    if launch.yaml is not None:
        _take_yaml(launch, launch.yaml, result, cwd)
    _take_sizes(launch, result, directives, numbers)


def _take_program(launch: Launch, result: Conversion, cwd: Path, folder: Path) -> None:
    """Take the program and its arguments; a script's path as seen from `folder`."""
    word, line = launch.program, launch.line
    if word is None:
        return
    name = _text(word, result) if launch.settings.keys() & {"module", "no-python"} else word.text
    if not launch.settings.keys() & {"module", "no-python"}:
        name = re.sub(r"^\$\{?HOME\}?(?=/)", "~", name)
        chdir = os.path.expanduser(launch.folder or "")
        path = Path(os.path.expanduser(name))
        is_hidden = "$" in name or (launch.folder is None and not path.is_absolute())
        is_in_image = launch.settings.keys() & {"image", "container"}
        is_away = path.is_absolute() and not path.is_file()
        if is_hidden or (is_in_image and is_away):
            python = launch.settings.pop("python", [])
            result.values["no-python"] = True, line
            result.append("args", _text(word, result), word.line or line)
            name = python[0].text if python else "python3" if is_in_image else "python"
        elif not path.is_absolute():
            place = cwd / chdir / path
            is_below = os.path.realpath(place).startswith(os.path.realpath(cwd))
            name = os.path.relpath(place, folder) if is_below else str(place)
    result.values["script"] = name, word.line or line
    for argument in launch.args:
        text = argument.text
        is_own = re.search(r"\$\{?[@*\d]\}?|\[[@*]\]", text) and argument.has_code
        is_own = is_own or (launch.in_loop and argument.has_code)
        if is_own or {*argument.names} & result.unknown:
            result.mark(argument.line, argument.line, "not taken over",
                        f"{text}: only the job script knows it; write it into args")  # fmt: skip
            continue
        result.append("args", _text(argument, result), argument.line or line)


def _text(word: Word, result: Conversion) -> str:
    """Return a word with its variables noted in ``expand``; code becomes a variable that a set-up
    line sets."""
    if word.has_code:
        index = sum(operand.startswith("ARGUMENT_") for operand, _ in result.lists.get("setup", []))
        name = f"ARGUMENT_{index + 1}"
        result.append("setup", f"{name}={word.source}", word.line)
        result.append("expand", name, word.line)
        return f"${name}"
    for name in word.names:
        result.append("expand", name, word.line)
    return word.text


def _take_yaml(launch: Launch, word: Word, result: Conversion, cwd: Path) -> None:
    """Take a configuration of Accelerate: its keys become the variables that its launcher sets."""
    path, line = Path(cwd, os.path.expanduser(word.text)), word.line or launch.line
    try:
        import yaml

        read: dict[str, Any] = yaml.safe_load(path.read_text()) or {}
    except ImportError:
        raise UsageError(
            f"{path} is YAML, and its parser is not installed; accepted: hpc-ddp[import]",
            hint="pip install pyyaml",
        ) from None
    except (OSError, ValueError) as error:
        result.notes.append((line, f"not taken over: {word.text} can't be read"
                             f" ({type(error).__name__}): put it there and import again;"
                             " its FSDP or DeepSpeed settings would be missing"))  # fmt: skip
        return
    kind = str(read.get("distributed_type", "")).upper()
    flat = {key: entry for key, entry in read.items() if not isinstance(entry, dict)}
    for part in read.values():
        flat |= part if isinstance(part, dict) else {}
    for use in ("FSDP", "DEEPSPEED"):
        if kind == use:
            result.env[f"ACCELERATE_USE_{use}"] = "true", line
    for key, operand in flat.items():
        text = str(operand).lower() if isinstance(operand, bool) else str(operand)
        if variable := accelerate_variable(key, text):
            result.env.setdefault(variable[0], (variable[1], line))
        elif not re.fullmatch(_NOT_OF_ALL, key) and operand not in (None, {}, [], "no"):
            result.notes.append(
                (line, f"not taken over: {key} of {word.text}: set it in Accelerator(…)")
            )
    launch.tasks = launch.tasks or flat.get("num_processes")


def _take_sizes(
    launch: Launch, result: Conversion, directives: Directives, numbers: Mapping[str, int]
) -> None:
    """Take nodes, GPUs, CPUs and workers; the directives' lines, or the launch's."""
    line = launch.line
    nodes = numbers.get("SLURM_NNODES") or launch.nodes
    text = directives.get("nodes") or ""
    if "nodes" not in result.values:
        is_range = re.fullmatch(r"\d+-\d+", text) and len({*text.split("-")}) == 2
        if is_range:
            result.values["nodes"] = text, directives.line("nodes")
        elif nodes:
            result.values["nodes"] = (
                nodes,
                directives.line("nodes") or directives.line("ntasks") or line,
            )
        else:
            result.notes.append(
                (0, "the number of nodes is not in the script: 1 is taken; --nodes N")
            )
    tasks = launch.tasks_per_node or (launch.tasks // (nodes or 1) if launch.tasks else None)
    per_node = tasks or numbers.get("SLURM_NTASKS_PER_NODE", 1)
    count = numbers.get("SLURM_GPUS_ON_NODE") or read_gpus(launch.gpus, per_node)
    options = {name: operand for name, (operand, _) in directives.options.items()}
    request = gpu_request(options if numbers.get("SLURM_GPUS_ON_NODE") else launch.gpus, count)
    if count and request:
        names = ("gpus-per-node", "gres", "gpus-per-task", "gpus")
        request_line = next((directives.line(n) for n in names
                      if directives.line(n)), line)  # fmt: skip
        result.values["gpus-per-node"] = request[0], request_line
        if request[1] != "gpus-per-node":
            result.values["gpu-request"] = request[1], request_line
    if launch.kind:
        workers = launch.workers or (tasks if launch.kind == "accelerate" else None) or count or 1
    else:
        workers = per_node if launch.step else 1
    if launch.kind == "torchrun" and launch.workers is None and not count:
        result.notes.append((line, "the number of workers is not known here: --nproc-per-node N"))
    if workers != (count or 1):
        result.values["nproc-per-node"] = workers, line
    if launch.step and not launch.kind:
        result.values["launcher"] = launch.step, line
    elif launch.step not in ("", "srun"):
        result.values["step-launcher"] = launch.step, line
    if cpus := directives.number("cpus-per-task"):
        wide = numbers.get("SLURM_NTASKS_PER_NODE", 1) if launch.kind else 1
        key = "cpus-per-task" if wide == 1 else "cpus-per-node"
        result.values[key] = cpus * wide, directives.line("cpus-per-task")
