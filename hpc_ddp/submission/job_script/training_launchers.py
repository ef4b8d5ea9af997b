"""The launchers of PyTorch's workers: torchrun, those like it, Accelerate's, plain Python."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpc_ddp.core.job.checks import TORCHRUN_SETTLED
from hpc_ddp.submission.job_script.launch import Launch, read_options, set_of
from hpc_ddp.submission.job_script.shell import Scope, Word, literal

_ACCELERATE_FLAGS = set_of(
    "multi-gpu cpu tpu use-deepspeed use-fsdp use-megatron-lm same-network module m no-python",
    "debug quiet use-xpu use-mps-device",
)
_OF_RANKS = (
    r"(num-processes|num-machines|machine-rank|main-process-(ip|port)|rdzv-\w+|multi-gpu"
    r"|same-network|main-training-function|compute-environment|gpu-ids|use-cpu|cpu|debug|quiet"
    r"|tpu-.*|downcast-bf16|enable-cpu-affinity|max-restarts|monitor-interval|tee|role|log-dir"
    r"|mpirun-hostfile|use-mps-device)"
)


def take_torchrun(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Take the options of torchrun, of ``torch.distributed.launch`` and composer, whose own are
    alike; the program follows."""
    launch.kind, launch.weight = "torchrun", 4
    name = words[0].text.rsplit("/", 1)[-1]
    flags = frozenset(("standalone", "module", "m", "no-python", "run-path", "use-env"))
    options, remaining = read_options(words[1:], flags)
    adds_rank = name in ("launch", "deepspeed")
    for option, operand, word in options:
        if option in ("nproc-per-node", "n", "nproc", "num-gpus"):
            launch.workers = scope.number(operand) if operand else None
        elif option in ("module", "m"):
            launch.add("module", word)
        elif option == "no-python":
            launch.add("no-python", word)
        elif option == "use-env":
            adds_rank = False
        elif option == "max-restarts" and operand:
            if scope.number(operand):
                launch.add("max-restarts", operand)
        elif option == "nnodes" and operand and ":" in operand.text:
            launch.add("nodes", literal(operand.text.replace(":", "-"), word.line))
            launch.add("elastic", word)
        elif any(s.startswith(option) for s in TORCHRUN_SETTLED) or option.startswith("rdzv-"):
            launch.ours.append((word.line, f"{name} --{option}"))
        elif name in ("composer", "deepspeed"):
            if option in ("world-size", "num-nodes", "hostfile", "stdout", "stderr", "include"):
                launch.ours.append((word.line, f"{name} --{option}"))
            else:
                launch.lost.append((word.line, f"{name} {word.text}: see {name}'s own page"))
        else:
            joined = (
                Word((*literal(f"--{option}=").parts, *operand.parts), word.line)
                if operand
                else word
            )
            launch.add("torchrun", joined)
    if name == "composer":
        launch.add("worker-setup", literal("export NODE_RANK=$GROUP_RANK", words[0].line))
    if name == "deepspeed":
        launch.lost.append((words[0].line, "the launcher deepspeed: torchrun starts the workers;"
                            " its options but for the number of workers are gone"))  # fmt: skip
    take_program(remaining, launch)
    if adds_rank and launch.program:
        launch.args.insert(0, literal("--local_rank=$LOCAL_RANK", words[0].line))
        launch.add("expand", literal("LOCAL_RANK", words[0].line))
    return []


def take_accelerate(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    if len(words) < 2 or words[1].text != "launch":
        return []
    launch.kind, launch.weight = "accelerate", 4
    options, remaining = read_options(words[2:], _ACCELERATE_FLAGS)
    for name, operand, word in options:
        if name == "config-file":
            launch.yaml = operand
        elif name in ("module", "m", "no-python"):
            launch.add("module" if name == "m" else name, word)
        elif name == "num-processes" and operand:
            launch.tasks = scope.number(operand)
            launch.ours.append((word.line, "accelerate --num_processes"))
        elif re.fullmatch(_OF_RANKS, name):
            launch.ours.append((word.line, f"accelerate --{name}"))
        elif variable := accelerate_variable(name, operand.text if operand else "true"):
            launch.env.update({variable[0]: literal(variable[1], word.line)})
        else:
            launch.lost.append((word.line, f"accelerate {word.text}: set it in Accelerator(…)"))
    take_program(remaining, launch)
    return []


def accelerate_variable(name: str, operand: str) -> tuple[str, str] | None:
    """Return the variable by which ``accelerate launch`` passes on one of its options or keys, and
    its value (accelerate.utils.launch, 1.0); None for one that it does not pass on so."""
    name, low = name.replace("_", "-"), operand.lower()
    if name in ("mixed-precision", "gradient-accumulation-steps"):
        return f"ACCELERATE_{name.replace('-', '_').upper()}", operand
    if name in ("use-fsdp", "use-deepspeed"):
        return f"ACCELERATE_{name.replace('-', '_').upper()}", "true"
    if name.startswith("fsdp-"):
        variable = name.replace("-", "_").upper()
        if variable == "FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP":
            variable = "FSDP_TRANSFORMER_CLS_TO_WRAP"
        variable = variable.replace("PREFETCH_POLICY", "PREFETCH")
        return variable, low if low in ("true", "false") else operand
    if name == "gradient-clipping":
        return "ACCELERATE_GRADIENT_CLIPPING", low
    zero = r"zero-stage|offload-(optimizer|param)-device|zero3-init-flag|zero3-save-16bit-model"
    if re.fullmatch(zero, name):
        short = name.replace("zero3-init-flag", "zero3-init").replace("-", "_").upper()
        return f"ACCELERATE_DEEPSPEED_{short}", low
    if name == "deepspeed-config-file":
        return "ACCELERATE_DEEPSPEED_CONFIG_FILE", operand
    return None


def take_python(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Take Python and its flags; what follows is a launcher, a module or a script."""
    python, remaining = words[0], words[1:]
    if "/" in python.text or "$" in python.text:
        launch.settings["python"] = [python]
    while remaining and re.fullmatch(r"-[uEsSIBOqvx]+|-[WX].*", remaining[0].text):
        flag = remaining.pop(0)
        if flag.text in ("-W", "-X") and remaining:
            remaining.pop(0)
        if flag.text != "-u":
            launch.lost.append((flag.line, f"python {flag.text}: a variable, as PYTHONWARNINGS"))
    if len(remaining) > 1 and remaining[0].text == "-m":
        if remaining[1].text in ("torch.distributed.run", "torch.distributed.launch"):
            return take_torchrun(
                [literal(remaining[1].text.rsplit(".")[-1], remaining[1].line), *remaining[2:]],
                launch,
                scope,
            )
        if remaining[1].text == "accelerate.commands.launch":
            return take_accelerate([remaining[1], literal("launch"), *remaining[2:]], launch, scope)
        launch.add("module", remaining[0])
        remaining = remaining[1:]
    if remaining and remaining[0].text == "-c":
        return []
    launch.weight = 3 if launch.step else 1
    take_program(remaining, launch)
    if not launch.program:
        launch.weight = 0
    return []


def take_program(words: Sequence[Word], launch: Launch) -> None:
    remaining = list(words)
    if len(remaining) > 1 and re.fullmatch(r"\S*python[\d.]*", remaining[0].text):
        if launch.settings.pop("no-python", None):  # torchrun --no_python python train.py
            remaining.pop(0)
        while len(remaining) > 1 and remaining[0].text == "-u":
            remaining.pop(0)
    if remaining:
        launch.program, launch.args = remaining[0], remaining[1:]
