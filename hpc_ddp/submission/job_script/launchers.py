"""The launchers of tasks, of containers and of PyTorch's workers, one inside the other.

A function that reads a launcher gets all words from the launcher's name on. It puts what they say
into the launch, and returns the words that are left for the next function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from hpc_ddp.core.job.checks import TORCHRUN_SETTLED
from hpc_ddp.core.job.slurm_options import SHORT_OPTIONS, SRUN
from hpc_ddp.submission.job_script.bash.scope import Scope
from hpc_ddp.submission.job_script.bash.words import Part, Word, joined, literal
from hpc_ddp.submission.job_script.conversion import LOST, NO_COMPONENTS, OURS
from hpc_ddp.submission.job_script.launch import (
    ACCELERATE,
    ACCELERATE_DEFAULTS,
    FLAGS,
    Launch,
    Options,
    accelerate_variable,
    option_name,
)

_SRUN_USES = {
    "container-image": "=image",
    "(no-)?container-.*": "+container-options",
    "export": "env",
    "nodes": "#nodes",
    "ntasks": "#tasks",
    "ntasks-per-node": "#tasks_per_node",
    "cpus-per-task": "#cpus",
    "het-group": "later",
    "multi-prog|input": "lost",
    "distribution|output|error|label|jobid|overlap|kill-on-bad-exit|no-kill|wait|exact"
    "|nodelist|relative|partition|account|time|job-name|mem|gres|gpus|gpus-per-(node|task)"
    "|unbuffered|quiet|verbose|exclusive": "ours",
    ".*": "+srun",
}
_SRUN = Options(_SRUN_USES, FLAGS, SHORT_OPTIONS, SRUN)
_MPI_FLAGS = "(g|prte)?mca .*|allow-run-as-root|oversubscribe|tag-output|report-bindings"
_MPIRUN_USES = {
    "x": "env",
    "np?|c": "#tasks",
    "N|npernode|ppn|ntasks-per-node": "#tasks_per_node",
    "map-by|rank-by|H|hosts?|hostfile|f|machinefile": "ours",
    f"bind-to|{_MPI_FLAGS}": "%mpirun",
    ".*": "lost",
}
_MPIRUN = Options(_MPIRUN_USES, re.compile(_MPI_FLAGS))
# Apptainer's options without a value; all others have one.
_IMAGE_FLAGS = re.compile(
    r"nv|nvccli|rocm|intel-hpu|cleanenv|compat|contain|containall|writable(-tmpfs)?|fakeroot|userns"
    r"|ipc|pid|uts|net|oci|rm|allow-setuid|disable-cache|docker-login|keep-privs|oom-kill-disable"
    r"|(no-)?tmp-sandbox|underlay|unsquash|sharens|no-(eval|home|https|init|pid|privs|umask|nv|rocm)"
)
_IMAGE_LETTERS = {"c": "contain", "C": "containall", "e": "cleanenv", "f": "fakeroot", "i": "ipc",
                  "p": "pid", "u": "userns", "w": "writable"}  # fmt: skip
_IMAGE_USES = {"env": "env", ".*": "&container-options"}
_IMAGE = Options(_IMAGE_USES, _IMAGE_FLAGS, _IMAGE_LETTERS)
_SHIFTER_LETTERS = {"i": "image", "V": "volume", "e": "env", "E": "clearenv", "w": "workdir",
                    "m": "module", "v": "verbose"}  # fmt: skip
_SHIFTER_USES = {"image": "=image", ".*": "+container-options"}
_SHIFTER = Options(_SHIFTER_USES, re.compile("gpu|clearenv|verbose|entrypoint"), _SHIFTER_LETTERS)
_ENV_LETTERS = {"u": "unset", "C": "chdir", "S": "split-string", "i": "ignore-environment",
                "a": "argv0", "0": "null", "v": "debug"}  # fmt: skip
_ENV_WITH_VALUE = ("unset", "chdir", "argv0")
_ENV_LOST = {
    "unset": 'setup or worker-setup = ["unset NAME"]',
    "chdir": "chdir = DIR, and script = DIR/…",
    "ignore-environment": 'workers need the job\'s variables: worker-setup = ["unset NAME"]',
}
_TORCHRUN = {
    "nproc-per-node|nproc|n|num-gpus": "#workers",
    "module|m|module-mode": "!module",
    "no-python|command-mode|c": "!no-python",
    "max-restarts": "=max-restarts",
    # Of composer and deepspeed, too.
    "|".join(
        [
            "rdzv-.*|nnode|use-env|world-size|num-nodes|hostfile|stdout|stderr|include|base-rank|verbose",
            *TORCHRUN_SETTLED,
        ]
    ): "ours",
    ".*": "+torchrun",
}
_TORCHRUN_FLAGS = re.compile(
    "standalone|module|m|no-python|run-path|use-env|v|verbose"
    # Of composer and deepspeed.
    "|module-mode|command-mode|c|no-ssh(-check)?|no-local-rank|force-multi|save-pid"
    "|bind-cores-to-rank|elastic-training"
)
_NO_TRAINING = re.compile(
    r"(.*/)?(hostname|nvidia-smi|rocm-smi|echo|mkdir|cp|mv|rm|ls|cat|date|sleep|ray|rsync|tar|unzip"
    r"|env|printenv|pkill|kill|chmod|ln|true|test|find|lscpu|ip|ifconfig|which|df|sbcast|enroot|nvcc)"
)
_NO_MODULE = re.compile(
    r"pip|venv|virtualenv|ensurepip|site|sysconfig|compileall|py_compile|json\.tool|http\.server"
    r"|zipfile|tarfile|torch\.utils\.collect_env|.*\.info|ipykernel.*|jupyter.*"
)
# Managers of environments, which run a program with ``run``.
_MANAGERS = ("uv", "poetry", "pixi", "pdm", "pipenv", "hatch", "conda", "mamba", "micromamba")
# Reads a launcher at the beginning of words into a launch, and returns the words behind.
Handler = Callable[[list[Word], Launch, Scope], list[Word]]


def read_launch(words: Sequence[Word], scope: Scope, step: str = "") -> Launch:
    """Return the launch that the words of a command make, as ``srun python train.py``; its weight
    is 0 where they are no launch. `step` is the command that starts the tasks which run the words,
    '' for the batch script."""
    launch, remaining = Launch(words[0].line if words else 0, step=step), list(words)
    while remaining and not launch.program and launch.inner is None:
        text = remaining[0].text
        name = text.rsplit("/", 1)[-1]
        is_python = re.fullmatch(r"python[\d.]*", name) or (launch.step and "PYTHON" in text)
        if launch.set_variable(remaining[0]) or name in ("exec", "time", "nohup"):
            if name == "time":
                launch.mark(remaining[0].line, "", "time is left out: hpc-ddp status has the times")
            remaining.pop(0)
        elif handler := _python if is_python else _handler(name):
            remaining = handler(remaining, launch, scope)
        else:
            is_program = re.fullmatch(r"\.{0,2}/\S+|\S+\.sh|bash", text) or remaining[0].code
            if launch.step and (not step or is_program):
                _command(remaining, launch)
            break
    if launch.program is None:  # torchrun --version
        launch.weight = 0
    return launch


def _handler(name: str) -> Handler | None:
    """Return the function that reads the launcher `name`, None for another command. A name that
    begins with ``torchrun``, as a site's own launcher has, is read as torchrun."""
    return _torchrun if re.fullmatch(r"torchrun[\w-]*", name) else _HANDLERS.get(name)


def _srun(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read srun and its options, and return the words behind them. An image makes pyxis the
    container tool. A variable among the options is left out: with a note that it counts as unset,
    or as lost where the script sets it or may have set it."""
    launch.step = "srun"
    words = launch.take_first_component(words)
    remaining = launch.take_options(words, _SRUN, scope)
    while (
        len(remaining) > 1 and remaining[0].parts[0].splits and not _is_launcher(remaining[0].text)
    ):
        if remaining[1].text[:1] != "-" and not _is_launcher(remaining[1].text):
            break  # it is the program
        unknown = remaining[0]
        is_set = {*unknown.names} & scope.values.keys() or scope.is_open
        if is_set or not all(part.name for part in unknown.parts):
            text = f"srun {unknown.text}: only the job knows it: srun = […]"
            launch.mark(unknown.line, LOST, text)
        else:
            launch.mark(unknown.line, "", f"{unknown.text} is taken to be unset: srun = […]")
        words = [words[0], *remaining[1:]]
        remaining = launch.take_options(words, _SRUN, scope)
    if group := launch.options.get("het-group"):
        text = f"{NO_COMPONENTS}: write this component's nodes = N, gpus-per-node = N"
        launch.mark(group[1], LOST, f"srun --het-group: {text}")
    if "image" in launch.settings:
        launch.settings["container-tool"] = [literal("pyxis", words[0].line)]
    return remaining


def _is_launcher(text: str) -> bool:
    """Return whether a word is the name or path of a launcher, or of Python."""
    name = text.rsplit("/", 1)[-1]
    return bool(_handler(name)) or name.startswith("python")


def _mpirun(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read mpirun, by any of its names, or ibrun; return the words behind its options."""
    launch.step = "ibrun" if words[0].text.endswith("ibrun") else "mpirun"
    pairs: list[Word] = []
    for word in launch.take_first_component(words):  # --mca has two values
        if len(pairs) > 2 and re.fullmatch(r"--?(g|prte)?mca", pairs[-2].text):
            word = joined(pairs[-2], " ", pairs[-1], " ", word)
            del pairs[-2:]
        pairs.append(word)
    return launch.take_options(pairs, _MPIRUN, scope)


def _command(words: list[Word], launch: Launch) -> None:
    """Make a command that is no launcher the program of each task, unless it surely trains nothing,
    as mkdir. A launcher among its words gets a note."""
    inner = r"(.*/)?(torchrun|accelerate|deepspeed|composer)|torch\.distributed\.(run|launch)"
    if any(re.fullmatch(inner, text) for word in words[1:] for text in word.text.split()):
        text = f"{words[0].text} starts a launcher of its own in each task, as it is written"
        launch.mark(words[0].line, "", f"{text}: its restarts and workers are not hpc-ddp's")
    if not _NO_TRAINING.fullmatch(words[0].text):
        launch.weight, launch.program, launch.args = 2, words[0], words[1:]
        launch.add("no-python", words[0])


def _shell(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read ``bash -c '…'``: the text, a script of its own, becomes `inner`, its arguments `args`.
    In a task ``bash file``, or a text that is all code, is the program. Return no words."""
    at = next((i for i, w in enumerate(words[:3]) if re.fullmatch(r"-[a-z]*c", w.text)), 0)
    text = words[at + 1] if at + 1 < len(words) else literal("")
    is_known = not launch.step or any(not p.is_code and p.text.strip() for p in text.parts)
    if at and is_known:  # else bash reads it in the task
        launch.inner, launch.args = text, words[at + 3 :]
        if options := re.sub("[-c]", "", "".join(word.text for word in words[1 : at + 1])):
            note = f'bash -{options}: left out: worker-setup = ["set -…", or "source …profile"]'
            launch.mark(words[0].line, "", note)
    elif launch.step:
        _command(words, launch)
    return []


def _image(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read Singularity, Apptainer or Shifter with the image; return the words behind. ``run`` with
    a program that is no launcher is read as ``exec``, and its line is lost; ``shell`` and the like
    are no launch."""
    tool = words[0].text.rsplit("/", 1)[-1]
    if tool == "shifter":
        remaining = launch.take_options(words, _SHIFTER, scope)
    else:
        verbs = ("exec", "run", "shell")
        at = next((i for i, word in enumerate(words) if i and word.text in verbs), 0)
        if not at or words[at].text == "shell":
            return []
        for word in words[1:at]:
            launch.mark(word.line, "", f"{tool} {word.text} is left out: container = …")
        remaining = launch.take_options(words[at:], _IMAGE, scope)
        launch.settings["image"] = [remaining.pop(0)] if remaining else []
        if words[at].text == "run" and remaining and _is_launcher(remaining[0].text):
            tool = f"{tool}-run"
        elif words[at].text == "run":
            text = f"{tool} run: what the image's runscript does is left out: it is exec here"
            launch.mark(words[0].line, LOST, text)
    launch.settings["container-tool"] = [literal(tool, words[0].line)]
    return remaining


def _wrapper(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read a command that enters a container in its own way, as CSC's: its words up to ``exec``
    become ``container``. Return the words behind ``exec``, [] without it."""
    at = next((i for i, word in enumerate(words) if word.text == "exec"), len(words))
    pieces = [piece for word in words[: at + 1] for piece in (" ", word)]
    launch.settings["container"] = [joined(*pieces[1:])]
    return words[at + 1 :]


def _tool(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read a tool that starts the program, as numactl or ``poetry run``; return the words from the
    next launcher or Python on. In a task, or on a job's only node, the tool with all its words
    becomes the program. Before srun and the like, and on more nodes, it is lost; without a launcher
    in the batch script, or for a manager without ``run``, the command is no launch."""
    name = words[0].text.rsplit("/", 1)[-1]
    at = next((i for i, word in enumerate(words) if i and _is_launcher(word.text)), len(words))
    if name in _MANAGERS and all(word.text != "run" for word in words[:at]):  # uv pip install …
        return []
    inner = read_launch(words[at:], scope) if not launch.step else launch
    is_alone = inner.weight and not inner.step and scope.numbers.get("SLURM_NNODES", 1) == 1
    if launch.step or is_alone:
        _command(words, launch)
        launch.weight = inner.weight if is_alone else 3 if name == "uv" else launch.weight
    elif at < len(words):
        launch.mark(words[0].line, LOST, f"{words[0].text} before the launch: there is no such key")
    return words[at:]


def _env(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read ``env`` and its options, and return the words behind: assignments and the program.
    Variables that ``-u`` names go to `unset`; other options are lost. A command in one word
    (``-S``) is no launch: then no words are returned."""
    remaining = words[1:]
    while remaining and remaining[0].text[:1] == "-":
        word = remaining.pop(0)
        if word.text == "--":
            break
        name, operand = option_name(word, _ENV_LETTERS, " ".join(_ENV_LETTERS.values()))
        if name == "split-string":
            return []
        if operand is None and name in _ENV_WITH_VALUE and remaining:
            operand = remaining.pop(0)
        elif operand and name not in _ENV_WITH_VALUE and word.text[:2] != "--":  # -iu NAME
            remaining.insert(0, joined("-", operand))
        if name == "unset" and operand and re.fullmatch(r"[A-Za-z_]\w*", operand.text):
            launch.env.pop(operand.text, None)
            launch.unset[operand.text] = word.line, bool(launch.step)
        else:
            hint = _ENV_LOST.get(name or "ignore-environment", "there is no such key")
            launch.mark(word.line, LOST, f"env {word.text}: {hint}")
    return remaining


def _take_python_beside(launcher: Word, launch: Launch) -> None:
    """Set ``python``, with a note, to the Python in the folder of a launcher that is named by its
    path; not for a folder of the system, or a user's own, whose Python is elsewhere."""
    *before, last = launcher.parts
    folder, slash, name = last.text.rpartition("/")
    is_elsewhere = folder.endswith(".local/bin") or folder in ("/usr/bin", "/usr/local/bin")
    if slash and name in _HANDLERS.keys() | {"torchrun"} and not (last.is_code or is_elsewhere):
        python = Word((*before, Part(f"{folder}/python")), launcher.line)
        launch.settings.setdefault("python", [python])
        launch.mark(launcher.line, "", f"python: the one beside {name}, {python.text}")


def _torchrun(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read torchrun, ``torch.distributed.launch``, composer or deepspeed, whose options are alike,
    with the program behind; return no words. Options without a key of hpc-ddp are lost. Variables
    and arguments that composer and the older launchers give to their programs are added."""
    launch.kind, launch.weight = "torchrun", 4
    _take_python_beside(words[0], launch)
    name, line = words[0].text.rsplit("/", 1)[-1], words[0].line
    uses = _TORCHRUN | ({".*": "lost"} if name in ("composer", "deepspeed") else {})
    if name not in ("torchrun", "run", "launch", *_HANDLERS):
        launch.mark(line, "", f"{name} is taken to be torchrun")
    launch.take_program(launch.take_options(words, Options(uses, _TORCHRUN_FLAGS), scope))
    options = launch.options
    nodes, at = options.get("nnodes") or options.get("nnode") or (None, 0)  # as argparse has it
    of_nodes = 1 if "standalone" in options else scope.number(nodes)
    if of_nodes == 1 and "SLURM_NNODES" not in scope.numbers:
        launch.nodes = launch.nodes or 1
    elif of_nodes not in (None, scope.numbers.get("SLURM_NNODES")):
        launch.mark(at, LOST, f"{name} --nnodes is another number than the job's nodes")
    if nodes and re.fullmatch(r"\d+:\d+", nodes.text):
        launch.mark(at, LOST, f"{name} --nnodes: elastic = true, with nodes = …")
    counts = ("nproc-per-node", "nproc", "n", "num-gpus")
    if not {*counts} & options.keys() and name not in ("composer", "deepspeed"):
        launch.workers = 1  # its default
    for option in counts:
        count, at = options.get(option, (literal("gpu"), 0))
        if scope.number(count) is None and (not count or count.text not in ("gpu", "auto")):
            text = "only the job knows it: nproc-per-node = N"
            launch.mark(at, LOST, f"{name} --{option}: {text}")
    if name == "composer":
        launch.add("worker-setup", literal("export NODE_RANK=$GROUP_RANK", line))
    if name == "deepspeed":
        text = "torchrun starts the workers; its options but for the number of workers are gone"
        launch.mark(line, LOST, f"the launcher deepspeed: {text}")
    is_without = bool({"use-env", "no-local-rank"} & options.keys())
    if name in ("launch", "deepspeed") and launch.program and not is_without:
        launch.args.insert(0, literal("--local_rank=$LOCAL_RANK", line))
        launch.add("expand", literal("LOCAL_RANK", line))
    return []


def _accelerate(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read ``accelerate launch`` and its program; return no words. Its options become the variables
    that it would set; one without a variable is lost. Its other commands are no launch."""
    if [word.text for word in words[1:2]] != ["launch"]:
        return []
    launch.kind, launch.weight, launch.options = "accelerate", 4, {}
    _take_python_beside(words[0], launch)
    launch.take_program(launch.take_options(words[1:], ACCELERATE, scope))
    for name, (operand, line) in launch.options.items():
        text = operand.text if operand else "true"
        if variable := accelerate_variable(name, text):
            constant = literal(variable[1], line)
            launch.env[variable[0]] = operand if operand and operand.code else constant
        elif ACCELERATE_DEFAULTS.get(name) == text.lower():
            launch.mark(line, OURS, f"launch --{name}")
        elif name != "config-file" and ACCELERATE.use(name) == "later":
            launch.mark(line, LOST, f"accelerate --{name}: set it in Accelerator(…)")
    return []


def _python(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read Python with a launcher's module, another module or a script; return no words. Its flags
    are lost, except ``-u``. A module that trains nothing, as pip, is no launch."""
    python, remaining = words[0], words[1:]
    launch.settings["python"] = [python]
    while remaining and re.fullmatch(r"-[uEsSIBOqvx]+|-[WX].*", remaining[0].text):
        flag = remaining.pop(0)
        if flag.text in ("-W", "-X") and remaining:
            remaining.pop(0)
        if flag.text != "-u":
            launch.mark(flag.line, LOST, f"python {flag.text}: a variable, as PYTHONWARNINGS")
    module = remaining[1].text if len(remaining) > 1 and remaining[0].text == "-m" else ""
    if module in ("torch.distributed.run", "torch.distributed.launch"):
        start = literal(module.rsplit(".")[-1], remaining[1].line)
        return _torchrun([start, *remaining[2:]], launch, scope)
    if module == "accelerate.commands.launch":
        return _accelerate([remaining[1], literal("launch"), *remaining[2:]], launch, scope)
    if module:
        launch.add("module", remaining.pop(0))
    if remaining and remaining[0].text[:1] != "-" and not _NO_MODULE.fullmatch(module):
        launch.weight = 3 if launch.step else 1
        launch.take_program(remaining)
    return []


_HANDLERS: dict[str, Handler] = {
    "srun": _srun,
    **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "ibrun", "orterun"), _mpirun),
    **dict.fromkeys(("composer", "deepspeed"), _torchrun),
    "accelerate": _accelerate,
    "env": _env,
    **dict.fromkeys(("bash", "sh"), _shell),
    **dict.fromkeys(("singularity", "apptainer", "shifter"), _image),
    "singularity_wrapper": _wrapper,
    **dict.fromkeys(("numactl", "nsys", "taskset", "timeout", "stdbuf", "nice", *_MANAGERS), _tool),
}
