"""``accelerate launch``: its options and its configuration, as the variables that it sets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hpc_ddp.core.file_io import read_text
from hpc_ddp.submission.job_script.bash.counts import whole_number
from hpc_ddp.submission.job_script.bash.variables import Scope
from hpc_ddp.submission.job_script.bash.words import Word, literal
from hpc_ddp.submission.job_script.bash.written_texts import path_of
from hpc_ddp.submission.job_script.conversion import LOST, OURS
from hpc_ddp.submission.job_script.launchers.argument_writer import ArgumentWriter
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.launchers.option_names import Options
from hpc_ddp.submission.job_script.launchers.torchrun import (
    take_program_of_workers,
    take_python_beside,
)

# The variables by which `accelerate launch` passes on its options: accelerate.utils.launch, 1.0.
_VARIABLE = re.compile(
    r"(?P<fsdp>fsdp_backward_prefetch(?=_policy)|fsdp_.*)(?:_policy)?|mixed_precision|use_fsdp"
    r"|(?P<zero>zero_stage|offload_(optimizer|param)_device|zero3_init|zero3_save_16bit_model)"
    r"(?:_flag)?|gradient_(accumulation_steps|clipping)|use_deepspeed|deepspeed_config_file"
)

# The options of `accelerate launch`, and values that are those without the option, or what hpc-ddp
# does: an agent on each node.
_ACCELERATE_USES = {
    "module|m": "!module",
    "no-python": "!no-python",
    "num-processes": "#processes",
    r"num-machines|machine-rank|main-process-(ip|port)|rdzv-\w+|multi-gpu|same-network|gpu-ids"
    r"|main-training-function|compute-environment|use-cpu|cpu|debug|quiet|tpu-.*|downcast-bf16"
    r"|enable-cpu-affinity|max-restarts|monitor-interval|tee|role|log-dir|mpirun-hostfile"
    r"|use-mps-device|deepspeed-(multinode-launcher|hostfile)": "ours",
    ".*": "later",
}

_ACCELERATE_FLAGS = re.compile(
    "multi-gpu|cpu|fp16|tpu|use-(deepspeed|fsdp|megatron-lm|xpu|mps-device)|same-network|module|m"
    "|no-python|debug|quiet"
)

ACCELERATE = Options(_ACCELERATE_USES, _ACCELERATE_FLAGS)

# Values of options that are those without the option.
ACCELERATE_DEFAULTS = {"dynamo-backend": "no"}

# Keys of Accelerate's YAML that describe the job itself.
_NOT_OF_ALL = (
    r"num_processes|num_machines|machine_rank|main_process_\w+|rdzv_backend|same_network|gpu_ids"
    r"|compute_environment|main_training_function|debug|tpu_\w+|use_cpu|downcast_bf16|dynamo_\w+"
    r"|enable_cpu_affinity|distributed_type|deepspeed_multinode_\w+|\w*hostfile"
)

# Values of its keys that ask for nothing.
_NOTHING: tuple[Any, ...] = (None, False, {}, [], "no")

# What the launcher passes on beside `use_fsdp` where neither an option nor the configuration says
# otherwise, and the program would take another value for: accelerate.commands.launch, 1.15.
_OF_FSDP = {
    **dict.fromkeys(
        ("FSDP_USE_ORIG_PARAMS", "FSDP_CPU_RAM_EFFICIENT_LOADING", "FSDP_SYNC_MODULE_STATES"),
        "true",
    ),
    "FSDP_MIN_NUM_PARAMS": "100000000",
}


def read_accelerate(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read ``accelerate launch`` and its program; return no words. Its options become variables in
    `launch`, as it would set them; an option without a variable is marked as lost, unless it is in
    `ACCELERATE_DEFAULTS`. The options of an srun around it are forgotten. Other commands of
    ``accelerate`` are no launch."""
    if [word.text for word in words[1:2]] != ["launch"]:
        return []
    launch.kind, launch.weight, launch.options = "accelerate", 4, {}
    take_python_beside(words[0], launch)
    take_program_of_workers(words[1:], ACCELERATE, launch, scope, "accelerate launch")
    machines, at = launch.options.get("num-machines", (literal("1"), 0))
    if at or "config-file" not in launch.options:
        launch.machines = whole_number(machines, scope)
    if at and launch.machines not in (None, 1, scope.numbers.get("SLURM_NNODES", launch.machines)):
        text = "accelerate --num-machines: another number than the job's nodes"
        launch.mark(at, LOST, text)
    for name, (operand, line) in launch.options.items():
        text = operand.text if operand else "true"
        name, text = ("mixed-precision", name) if name == "fp16" else (name, text)  # before 1.0
        if variable := find_variable(name, text):
            constant = literal(variable[1], line)
            launch.env[variable[0]] = operand if operand and operand.code else constant
            launch.launcher_variables.add(variable[0])
        elif ACCELERATE_DEFAULTS.get(name) == text.lower():
            launch.mark(line, OURS, f"launch --{name}")
        elif name != "config-file" and ACCELERATE.find_use(name) == "later":
            launch.mark(line, LOST, f"accelerate --{name}: set it in Accelerator(…)")
    return []


def take_configuration(launch: Launch, word: Word, writer: ArgumentWriter, cwd: Path) -> None:
    """Read a configuration of Accelerate from the path in `word`, seen from `cwd` and the launch's
    folder: as the script writes it, else the file that is there. Its keys become the variables that
    Accelerate's launcher sets, in `launch` and through `writer`; ``num_processes`` becomes the
    launch's number of processes, unless an option has it; other keys become notes, but for those
    that describe the job. So do a value that only the job knows, and a configuration that can't be
    read."""
    path, line, result = path_of(word, launch.folder), word.line or launch.line, writer.result
    import yaml

    try:
        text = launch.files.get(path) or read_text(Path(cwd, path))
        read: dict[str, Any] = dict(yaml.safe_load(text) or {})
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        text = f"{word.text} can't be read ({type(error).__name__}): put it there and import again"
        text = f"not taken over: {text}; its FSDP or DeepSpeed settings would be missing"
        result.note(line, text)
        return
    if read.pop("fp16", False):  # an older form: accelerate.commands.config.config_args
        read.setdefault("mixed_precision", "fp16")
    parts = [("", read), *((k, part) for k, part in read.items() if isinstance(part, dict))]
    keys = {
        _full_key(name, str(k)): entry
        for name, part in parts for k, entry in part.items() if not isinstance(entry, dict)
    }  # fmt: skip
    use = f"use_{keys.get('distributed_type', '')}".lower()  # as the option --use_fsdp
    for key, entry in {use: True, **keys}.items():
        content = _text_of(entry)
        variable, has_code = find_variable(key, content), re.search("[$`]", content)
        is_set = variable is not None and variable[0] in launch.launcher_variables
        if variable and not has_code:
            _write_variable(*variable, launch, writer, line)
        elif not (is_set or re.fullmatch(f"{_NOT_OF_ALL}|use_.*", key) or entry in _NOTHING):
            reason = f"only the job knows {content}" if has_code else "set it in Accelerator(…)"
            result.note(line, f"not taken over: {key} of {word.text}: {reason}")
    machines, count = keys.get("num_machines", 1), keys.get("num_processes")
    if "num-machines" not in launch.options and isinstance(machines, int):
        launch.machines = machines
    if isinstance(count, int):  # -1: an option has it
        launch.processes = launch.processes or max(count, 0)
    elif count is not None and "num-processes" not in launch.options:
        text = f"num_processes of {word.text}: only the job knows {count}: nproc-per-node = N"
        result.note(line, f"not taken over: {text}")


def _text_of(entry: Any) -> str:
    """Return a value of a configuration as text: of a list its entries with commas between, in
    which '' stands for a list or mapping, since aliases of YAML may make these endless."""
    entries = entry if isinstance(entry, list) else [entry]
    return ",".join("" if isinstance(one, (list, dict)) else str(one) for one in entries)


def _full_key(part: str, key: str) -> str:
    """Return the name by which Accelerate's launcher knows a `key` of its YAML, in the part of that
    name, '' for the top: ``fsdp_offload_params`` for ``offload_params`` in ``fsdp_config``."""
    start = {"fsdp_config": "fsdp", "fp8_config": "fp8", "dynamo_config": "dynamo_"}.get(part, "")
    return key if key.startswith(start) else f"{start.rstrip('_')}_{key}"


def take_fsdp_defaults(launch: Launch, writer: ArgumentWriter) -> None:
    """Write the variables of ``accelerate launch`` with FSDP that have values by default, unless
    they are set. To be called when all its other variables are written. Another launch changes
    nothing."""
    uses_fsdp = launch.env.get("ACCELERATE_USE_FSDP")
    if launch.kind == "accelerate" and uses_fsdp and uses_fsdp.text.lower() == "true":
        for name, text in _OF_FSDP.items():
            _write_variable(name, text, launch, writer, launch.line)


def _write_variable(
    name: str, text: str, launch: Launch, writer: ArgumentWriter, line: int
) -> None:
    """Set a variable of Accelerate's launcher in `launch` and in the conversion of `writer`,
    unless an option or the configuration has set it (``launch.launcher_variables``). It replaces
    the script's own value in ``env``, which has no effect in the program."""
    if name not in launch.launcher_variables:
        launch.launcher_variables.add(name)
        launch.env[name] = literal(text, line)
        lines = [code for code, _ in writer.result.lists.get("setup", ())]
        if name in writer.result.env and not any(f"{name}=" in code for code in lines):
            writer.result.env[name] = text, line
        else:
            writer.write_variable(name, launch.env[name], line)


def find_variable(name: str, operand: str) -> tuple[str, str] | None:
    """Return name and value of the variable by which ``accelerate launch`` passes on the option, or
    key of its configuration, `name` with the value `operand`: ("ACCELERATE_MIXED_PRECISION",
    "bf16") for "mixed-precision" and "bf16". None for a name that it does not pass on."""
    name = name.replace("-", "_")
    if name == "num_cpu_threads_per_process":
        return "OMP_NUM_THREADS", operand
    match = _VARIABLE.fullmatch(name)
    if not match:
        return None
    name = match["fsdp"] or match["zero"] or match[0]
    name = name.replace("transformer_layer_cls", "transformer_cls").upper()
    start = "" if match["fsdp"] else "ACCELERATE_DEEPSPEED_" if match["zero"] else "ACCELERATE_"
    is_lower = operand in ("True", "False") or re.fullmatch(r"OFFLOAD_\w+_DEVICE|ZERO3_\w+", name)
    return start + name, operand.lower() if is_lower else operand
