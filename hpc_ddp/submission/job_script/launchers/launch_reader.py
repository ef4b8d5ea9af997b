"""The launch that a command is: its launchers, one inside the other, are read in turn."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from hpc_ddp.submission.job_script.bash.values import Counted
from hpc_ddp.submission.job_script.bash.variables import Scope
from hpc_ddp.submission.job_script.bash.words import Word, literal
from hpc_ddp.submission.job_script.conversion import LOST, OURS
from hpc_ddp.submission.job_script.launchers.accelerate import read_accelerate
from hpc_ddp.submission.job_script.launchers.containers import read_container, read_wrapper
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.launchers.option_names import (
    IMAGES,
    MANAGERS,
    MPIRUNS,
    TOOLS,
    is_launcher,
)
from hpc_ddp.submission.job_script.launchers.program_names import may_be_function, may_train
from hpc_ddp.submission.job_script.launchers.tasks import (
    read_env,
    read_horovodrun,
    read_mpirun,
    read_scl,
    read_shell,
    read_srun,
    srun_in_place_of_ssh,
    take_command,
)
from hpc_ddp.submission.job_script.launchers.torchrun import read_torchrun

# Modules that train nothing.
_NO_MODULE = re.compile(
    r"pip|venv|virtualenv|ensurepip|site|sysconfig|compileall|py_compile|json\.tool|http\.server"
    r"|zipfile|tarfile|torch\.utils\.collect_env|.*\.info|ipykernel.*|jupyter.*"
)

# Python's flags, and the variables that do the same; '' for the flag's own value.
_FLAGS = (
    ("-O", "PYTHONOPTIMIZE", "1"),
    ("-OO", "PYTHONOPTIMIZE", "2"),
    ("-B", "PYTHONDONTWRITEBYTECODE", "1"),
    ("-s", "PYTHONNOUSERSITE", "1"),
    ("-v", "PYTHONVERBOSE", "1"),
    ("-Xfaulthandler", "PYTHONFAULTHANDLER", "1"),
    ("-Xdev", "PYTHONDEVMODE", "1"),
    ("-W\\w[\\w:.]*", "PYTHONWARNINGS", ""),
)

_STARTS_WORKERS = re.compile(
    r"torchrun[\w-]*|deepspeed|accelerate(\.commands\.launch)?|torch\.distributed\.(run|launch)"
)
_TORCH_MODULE = re.compile(r"-u?m (torch\.distributed\.(run|launch)|accelerate\.commands\.launch)")

# Reads a launcher at the beginning of words into a launch, and returns the words behind.
Handler = Callable[[list[Word], Launch, Scope], list[Word]]


def read_launch(
    words: Sequence[Word], scope: Scope, step: str = "", in_loop: bool = False
) -> Launch:
    """Return the launch that the words of a command make, as ``srun python train.py``, with the
    weight 0 if they are no launch. `step` is the command that starts the tasks which run the words,
    '' for the batch script; `in_loop` says that they stand in a loop over the nodes.

    Launchers are read one after the other, each by its function (`_HANDLERS`), until the program or
    the text of a ``bash -c`` is found.
    """
    launch = Launch(words[0].line if words else 0, step=step, in_loop=in_loop)
    folder, remaining = scope.values.get("PWD"), list(words)
    launch.folder = folder.text if isinstance(folder, Word) else None
    if in_loop and words and words[0].text == "ssh":
        remaining = srun_in_place_of_ssh(remaining)
        if not re.search(r"\bcd\s", remaining[-1].text):
            text = "ssh starts it in the home folder: relative paths are the job folder's now"
            launch.mark(launch.line, "", text)
    while remaining and not launch.program and launch.inner is None:
        remaining[0] = _launcher_by_default(remaining[0], launch, scope)
        name = remaining[0].text.rsplit("/", 1)[-1]
        if launch.set_variable(remaining[0]):
            remaining.pop(0)
        elif name in ("exec", "time", "nohup", "command"):
            remaining = _drop_prefix(remaining, launch)
        elif handler := read_python if _is_python(remaining, launch) else _find_handler(name):
            remaining = handler(remaining, launch, scope)
        elif _is_container_tool(remaining):
            tool, remaining = remaining[0], read_container(remaining, launch, scope)
            del launch.settings["container-tool"]  # a variable: hpc-ddp takes its default
            text = "only the job knows the tool: container-tool = …, if it is not apptainer"
            launch.mark(tool.line, "", f"{tool.text}: {text}")
        elif _has_unknown_prefix(remaining):
            text = f"{remaining[0].text} before the launch: only the job knows it"
            launch.mark(remaining.pop(0).line, LOST, text)
        else:
            if _is_program(remaining, launch, scope, step):
                take_command(remaining, launch)
            break
    if in_loop and launch.tasks:
        launch.tasks_per_node, launch.tasks = launch.tasks, None
    if launch.program is None:  # torchrun --version
        launch.weight = 0
    return launch


def _is_program(words: Sequence[Word], launch: Launch, scope: Scope, step: str) -> bool:
    """Return whether `words`, which begin with no launcher, are a program that counts as a launch:
    a command in a task of ``launch.step``, or one that may train where all commands count
    (``scope.counted``). `step` is as in `read_launch`."""
    text, counts_all = words[0].text, scope.counted == Counted.COMMANDS
    starts_workers = any(
        _STARTS_WORKERS.fullmatch(piece) for word in words[1:] for piece in word.text.split()
    )
    # podman run IMAGE torchrun train.py, in a text or the batch script.
    is_run = starts_workers and any(word.text in ("run", "exec") for word in words[1:3])
    # oumi distributed torchrun -m oumi train
    of_module = f" -m {text.rsplit('/', 1)[-1]} "
    is_run |= counts_all and of_module in " ".join(word.text for word in words)
    # In a task of another command only what has a program's form is one.
    is_path = re.fullmatch(r"\.{0,2}/\S+|\S+\.sh|bash", text)
    is_of_task = launch.step and (not step or is_path or words[0].code)
    # Of LUMI's images, which set it: it activates their Python.
    is_set_up = len(words) == 1 and re.fullmatch(r"\$\{?WITH_\w+\}?", text)
    trains = may_train(words) and not (starts_workers or may_be_function(words))
    is_counted = is_run or (counts_all and trains)
    return is_counted or bool(is_of_task and not is_set_up)


def _launcher_by_default(word: Word, launch: Launch, scope: Scope) -> Word:
    """Return ``srun`` for ``$RUN`` after ``RUN=${RUN:-srun}``, with a note in `launch`: the word is
    a variable alone, whose default is a launcher, though a file that is sourced before may have set
    it. Return any other word as it is."""
    name = word.names[0] if len(word.parts) == len(word.names) == 1 else ""
    assigned = scope.earlier.get(name) if scope.values.get(name) is None else None
    code = assigned.text if isinstance(assigned, Word) else word.text
    match = re.fullmatch(r"\$\{(\w+):?-([\w./-]+)\}", code)
    if match is None or not is_launcher(match[2]) or match[1] in scope.shell_names:
        return word
    launch.mark(word.line, "", f"${match[1]}: taken as {match[2]}, which a line before may change")
    return literal(match[2], word.line)


def _has_unknown_prefix(words: Sequence[Word]) -> bool:
    """Return whether a variable, the first of `words`, stands before a launcher of workers or
    Python, so that the job may have anything there: ``$PREFIX torchrun train.py``."""
    name = r"(.*/)?(python[\d.]*|torchrun|accelerate|deepspeed)"
    is_variable = bool(words[0].code) and words[0].code == list(words[0].parts)
    return is_variable and any(re.fullmatch(name, word.text) for word in words[1:2])


def _drop_prefix(words: list[Word], launch: Launch) -> list[Word]:
    """Return `words` without the first, which is ``exec``, ``nohup``, ``command`` or ``time``; for
    ``time`` also without its options, and `launch` gets a note."""
    prefix, *remaining = words
    if prefix.text.rsplit("/", 1)[-1] == "time":
        launch.mark(prefix.line, "", "time is left out: hpc-ddp status has the times")
        while remaining and re.fullmatch("-[apvq]+", remaining[0].text):
            remaining.pop(0)
    return remaining


def _is_python(words: list[Word], launch: Launch) -> bool:
    """Return whether words begin with Python: by its name or path; in a task by a variable with
    ``PYTHON`` in its name; or by any variable before ``-m torch.distributed.run`` and the like."""
    text, next_texts = words[0].text, [word.text for word in words[1:3]]
    if re.fullmatch(r"python[\d.]*", text.rsplit("/", 1)[-1]) or (launch.step and "PYTHON" in text):
        return True
    is_variable = bool(words[0].code) and all(part.name for part in words[0].code)
    return is_variable and bool(_TORCH_MODULE.fullmatch(" ".join(next_texts)))


def _find_handler(name: str) -> Handler | None:
    """Return the function that reads the launcher `name`, None for another command. A name that
    begins with ``torchrun``, as a site's own launcher has, is read as torchrun."""
    return read_torchrun if re.fullmatch(r"torchrun[\w-]*", name) else _HANDLERS.get(name)


def _is_container_tool(words: Sequence[Word]) -> bool:
    """Return whether words are those of a container tool whose name is in a variable: ``$TOOL exec
    --nv image.sif python train.py``, which has one of its options, or the file of an image."""
    if not words[0].code or [word.text for word in words[1:2]] != ["exec"]:
        return False
    pattern = re.compile(r"--(nv|rocm|bind|cleanenv)\b.*|-B|.*\.(sif|simg)")
    return any(pattern.fullmatch(word.text) for word in words[2:])


def _read_tool(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read a tool that starts the program, as numactl or ``poetry run``; return the words from the
    next launcher or Python on.

    In a task the tool with all its words becomes the program, as another command would; uv's weighs
    as much as Python. So it is in the batch script of a job with one node, with the weight of the
    launch behind the tool. ``timeout`` is left out: a run has a time limit of its own. In front of
    srun and the like, and on more nodes, the tool is lost, or ``stdbuf`` hpc-ddp's own. No words
    are returned for a manager without ``run``, and where no launcher or Python follows.
    """
    name = words[0].text.rsplit("/", 1)[-1]
    at = next((i for i, word in enumerate(words) if i and is_launcher(word.text)), len(words))
    if name == "timeout" and at < len(words):
        launch.mark(words[0].line, OURS, "timeout: --time, at whose end the run is requeued")
        return words[at:]
    if name in MANAGERS and all(word.text != "run" for word in words[:at]):  # uv pip install …
        return []
    if at == len(words) and not launch.step and scope.counted == Counted.COMMANDS:
        take_command(words, launch)  # uv run train.py
        return []
    inner = read_launch(words[at:], scope) if not launch.step else launch
    if name in MANAGERS and inner.step and not (launch.step or inner.kind):
        handler = _find_handler(words[at].text)  # uv run -- srun python train.py
        if handler in (read_srun, read_mpirun):
            return _read_tool([*words[:at], *handler(words[at:], launch, scope)], launch, scope)
    is_on_only_node = inner.weight and not inner.step and scope.numbers.get("SLURM_NNODES", 1) == 1
    if launch.step or is_on_only_node:
        take_command(words, launch)
        of_task = 3 if name == "uv" else launch.weight
        launch.weight = inner.weight if is_on_only_node else of_task
    elif name == "stdbuf" and at < len(words):
        launch.mark(words[0].line, OURS, "stdbuf: Python's output has no buffer")
    elif at < len(words):
        launch.mark(words[0].line, LOST, f"{words[0].text} before the launch: there is no such key")
    return words[at:]


def read_python(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read Python with a launcher, a module or a script, which becomes the program, and set
    ``python``; return no words. Its flags become variables of a program, but not of a launcher's
    workers, whose processes do not have them. A module that trains nothing, as pip, is no launch.
    """
    launch.settings["python"] = [words[0]]
    remaining, variables = _drop_python_flags(words[1:], launch)
    name = remaining[0].text.rsplit("/", 1)[-1] if remaining else ""
    module = remaining[1].text if len(remaining) > 1 and remaining[0].text == "-m" else ""
    if re.fullmatch(r"torchrun|deepspeed", name):  # python `which torchrun`
        return read_torchrun([literal(name, remaining[0].line), *remaining[1:]], launch, scope)
    if name == "accelerate":
        return read_accelerate(remaining, launch, scope)
    if re.fullmatch(r"torch\.distributed\.(run|launch)|torchrun[\w-]*", module):
        launcher = literal(module.rsplit(".")[-1], remaining[1].line)
        return read_torchrun([launcher, *remaining[2:]], launch, scope)
    if module == "accelerate.commands.launch":
        return read_accelerate([remaining[1], literal("launch"), *remaining[2:]], launch, scope)
    if module:
        launch.add("module", remaining.pop(0))  # the word -m
    if remaining and remaining[0].text[:1] != "-" and not _NO_MODULE.fullmatch(module):
        launch.weight = 3 if launch.step else 1
        launch.env = variables | launch.env
        launch.take_program(remaining)
    return []


def _drop_python_flags(words: list[Word], launch: Launch) -> tuple[list[Word], dict[str, Word]]:
    """Return the words behind Python's flags, from ``-m`` or a script on, and the variables that do
    what the flags do; ``-um`` becomes ``-u`` and ``-m``. The lines of flags without a variable are
    marked in `launch` as lost."""
    remaining, variables = list(words), dict[str, Word]()
    if remaining and re.fullmatch(r"-[uEsSIBOqvx]+m", remaining[0].text):  # python -um module
        line = remaining[0].line
        remaining[:1] = [literal(remaining[0].text[:-1], line), literal("-m", line)]
    while remaining and re.fullmatch(r"-[uEsSIBOqvx]+|-[WX].*", remaining[0].text):
        flag = remaining.pop(0)
        text = flag.text
        if text in ("-W", "-X") and remaining:
            text += remaining.pop(0).text
        pairs = [pair for pattern, *pair in _FLAGS if re.fullmatch(pattern, text)]
        for name, content in pairs:
            variables.setdefault(name, literal(content or text[2:], flag.line))
        if text not in ("-u", "-q") and not pairs:
            launch.mark(flag.line, LOST, f"python {text}: a variable, as PYTHONWARNINGS")
    return remaining, variables


_HANDLERS: dict[str, Handler] = {
    "srun": read_srun,
    **dict.fromkeys(MPIRUNS, read_mpirun),
    **dict.fromkeys(("composer", "deepspeed"), read_torchrun),
    "accelerate": read_accelerate,
    "horovodrun": read_horovodrun,
    "env": read_env,
    "scl": read_scl,
    **dict.fromkeys(("bash", "sh"), read_shell),
    **dict.fromkeys(IMAGES, read_container),
    "singularity_wrapper": read_wrapper,
    **dict.fromkeys(TOOLS, _read_tool),
}
