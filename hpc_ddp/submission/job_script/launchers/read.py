"""The launchers of a command, one inside the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from hpc_ddp.submission.job_script.bash.scope import Scope
from hpc_ddp.submission.job_script.bash.words import Word, literal
from hpc_ddp.submission.job_script.conversion import LOST, OURS
from hpc_ddp.submission.job_script.launchers.accelerate import read_accelerate
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.launchers.options import (
    IMAGES,
    MANAGERS,
    MPIRUNS,
    TOOLS,
    is_launcher,
)
from hpc_ddp.submission.job_script.launchers.tasks import (
    as_srun,
    read_env,
    read_image,
    read_mpirun,
    read_shell,
    read_srun,
    read_wrapper,
    take_command,
)
from hpc_ddp.submission.job_script.launchers.workers import read_torchrun

_NO_MODULE = re.compile(
    r"pip|venv|virtualenv|ensurepip|site|sysconfig|compileall|py_compile|json\.tool|http\.server"
    r"|zipfile|tarfile|torch\.utils\.collect_env|.*\.info|ipykernel.*|jupyter.*"
)

_TORCH_MODULE = re.compile(r"-u?m (torch\.distributed\.(run|launch)|accelerate\.commands\.launch)")

# Reads a launcher at the beginning of words into a launch, and returns the words behind.
Handler = Callable[[list[Word], Launch, Scope], list[Word]]


def read_launch(
    words: Sequence[Word], scope: Scope, step: str = "", in_loop: bool = False
) -> Launch:
    """Return the launch that the words of a command make, as ``srun python train.py``; its weight
    is 0 where they are no launch. `step` is the command that starts the tasks which run the words,
    '' for the batch script; `in_loop` says that they stand in a loop over the nodes."""
    launch = Launch(words[0].line if words else 0, step=step, in_loop=in_loop)
    folder, remaining = scope.values.get("PWD"), list(words)
    launch.folder = folder.text if isinstance(folder, Word) else None
    if in_loop and words and words[0].text == "ssh":
        remaining = as_srun(remaining)
    while remaining and not launch.program and launch.inner is None:
        text = remaining[0].text
        name = text.rsplit("/", 1)[-1]
        is_python = re.fullmatch(r"python[\d.]*", name) or (launch.step and "PYTHON" in text)
        behind = [word.text for word in remaining[1:3]]
        is_variable = bool(remaining[0].code) and all(part.name for part in remaining[0].code)
        starts_torch = is_variable and _TORCH_MODULE.fullmatch(" ".join(behind))
        if launch.set_variable(remaining[0]) or name in ("exec", "time", "nohup", "command"):
            if name == "time":
                launch.mark(remaining[0].line, "", "time is left out: hpc-ddp status has the times")
            remaining.pop(0)
            while name == "time" and remaining and re.fullmatch("-[apvq]+", remaining[0].text):
                remaining.pop(0)
        elif handler := read_python if is_python or starts_torch else _handler(name):
            remaining = handler(remaining, launch, scope)
        elif remaining[0].code and behind[:1] == ["exec"] and _names_image(remaining[2:]):
            remaining = read_image(remaining, launch, scope)
            del launch.settings["container-tool"]  # the one that is there
        else:
            is_program = re.fullmatch(r"\.{0,2}/\S+|\S+\.sh|bash", text) or remaining[0].code
            if launch.step and (not step or is_program):
                take_command(remaining, launch)
            break
    if in_loop and launch.tasks:
        launch.tasks_per_node, launch.tasks = launch.tasks, None
    if launch.program is None:  # torchrun --version
        launch.weight = 0
    return launch


def _handler(name: str) -> Handler | None:
    """Return the function that reads the launcher `name`, None for another command. A name that
    begins with ``torchrun``, as a site's own launcher has, is read as torchrun."""
    return read_torchrun if re.fullmatch(r"torchrun[\w-]*", name) else _HANDLERS.get(name)


def _names_image(words: Sequence[Word]) -> bool:
    """Return whether words behind ``exec`` are those of a container tool: with its options, or with
    the file of an image."""
    pattern = re.compile(r"--(nv|rocm|bind|cleanenv)\b.*|-B|.*\.(sif|simg)")
    return any(pattern.fullmatch(word.text) for word in words)


def _read_tool(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read a tool that starts the program, as numactl or ``poetry run``; return the words from the
    next launcher or Python on. In a task, or on a job's only node, the tool with all its words
    becomes the program, with the weight of the launch behind it on the only node, and with that of
    a command in a task, or for uv of Python. Before srun and the like, and on more nodes, it is
    lost; without a launcher in the batch script, or for a manager without ``run``, the command is
    no launch."""
    name = words[0].text.rsplit("/", 1)[-1]
    at = next((i for i, word in enumerate(words) if i and is_launcher(word.text)), len(words))
    if name in MANAGERS and all(word.text != "run" for word in words[:at]):  # uv pip install …
        return []
    inner = read_launch(words[at:], scope) if not launch.step else launch
    is_alone = inner.weight and not inner.step and scope.numbers.get("SLURM_NNODES", 1) == 1
    if launch.step or is_alone:
        take_command(words, launch)
        launch.weight = inner.weight if is_alone else 3 if name == "uv" else launch.weight
    elif name == "stdbuf" and at < len(words):
        launch.mark(words[0].line, OURS, "stdbuf: Python's output has no buffer")
    elif at < len(words):
        launch.mark(words[0].line, LOST, f"{words[0].text} before the launch: there is no such key")
    return words[at:]


def read_python(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read Python with a launcher's module, another module or a script; return no words. Its flags
    are lost, except ``-u``. A module that trains nothing, as pip, is no launch."""
    python, remaining = words[0], words[1:]
    launch.settings["python"] = [python]
    if remaining and re.fullmatch(r"-[uEsSIBOqvx]+m", remaining[0].text):  # python -um module
        line = remaining[0].line
        remaining[:1] = [literal(remaining[0].text[:-1], line), literal("-m", line)]
    while remaining and re.fullmatch(r"-[uEsSIBOqvx]+|-[WX].*", remaining[0].text):
        flag = remaining.pop(0)
        if flag.text in ("-W", "-X") and remaining:
            remaining.pop(0)
        if flag.text != "-u":
            launch.mark(flag.line, LOST, f"python {flag.text}: a variable, as PYTHONWARNINGS")
    name = remaining[0].text.rsplit("/", 1)[-1] if remaining else ""
    if re.fullmatch(r"torchrun|deepspeed", name):  # python `which torchrun`
        return read_torchrun([literal(name, remaining[0].line), *remaining[1:]], launch, scope)
    if name == "accelerate":
        return read_accelerate(remaining, launch, scope)
    module = remaining[1].text if len(remaining) > 1 and remaining[0].text == "-m" else ""
    if module in ("torch.distributed.run", "torch.distributed.launch", "torchrun"):
        start = literal(module.rsplit(".")[-1], remaining[1].line)
        return read_torchrun([start, *remaining[2:]], launch, scope)
    if module == "accelerate.commands.launch":
        return read_accelerate([remaining[1], literal("launch"), *remaining[2:]], launch, scope)
    if module:
        launch.add("module", remaining.pop(0))
    if remaining and remaining[0].text[:1] != "-" and not _NO_MODULE.fullmatch(module):
        launch.weight = 3 if launch.step else 1
        launch.take_program(remaining)
    return []


_HANDLERS: dict[str, Handler] = {
    "srun": read_srun,
    **dict.fromkeys(MPIRUNS, read_mpirun),
    **dict.fromkeys(("composer", "deepspeed"), read_torchrun),
    "accelerate": read_accelerate,
    "env": read_env,
    **dict.fromkeys(("bash", "sh"), read_shell),
    **dict.fromkeys(IMAGES, read_image),
    "singularity_wrapper": read_wrapper,
    **dict.fromkeys(TOOLS, _read_tool),
}
