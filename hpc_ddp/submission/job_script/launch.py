"""The command that starts the training: launcher by launcher, down to the program."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hpc_ddp.core.job.checks import TORCHRUN_SETTLED
from hpc_ddp.submission.job_script.shell import Scope, Word, known

# Options without a value, of srun and sbatch.
FLAGS = frozenset(
    "label unbuffered overlap no-kill verbose quiet pty preserve-env immediate kill-on-bad-exit"
    " contiguous oversubscribe overcommit multi-prog spread-job use-min-nodes exclusive requeue"
    " no-requeue hold get-user-env parsable reboot wait-for-all exact container-writable"
    " container-readonly container-mount-home no-container-mount-home container-remap-root"
    " no-container-remap-root container-entrypoint no-container-entrypoint".split()
)
LETTERS = {
    **{"A": "account", "a": "array", "b": "begin", "B": "extra-node-info", "c": "cpus-per-task"},
    **{"C": "constraint", "d": "dependency", "D": "chdir", "e": "error", "G": "gpus", "H": "hold"},
    **{"i": "input", "J": "job-name", "k": "no-kill", "K": "kill-on-bad-exit", "l": "label"},
    **{"L": "licenses", "m": "distribution", "M": "clusters", "n": "ntasks", "N": "nodes"},
    **{"o": "output", "p": "partition", "q": "qos", "Q": "quiet", "s": "oversubscribe"},
    **{"t": "time", "u": "unbuffered", "v": "verbose", "w": "nodelist", "W": "wait"},
    **{"x": "exclude", "O": "overcommit", "E": "preserve-env", "r": "relative", "S": "core-spec"},
}
# Options of srun that hpc-ddp decides itself.
_OURS = (
    "nodes ntasks ntasks-per-node cpus-per-task distribution output error input label jobid overlap"
    " kill-on-bad-exit no-kill wait exact nodelist relative partition account time job-name mem"
    " gres gpus gpus-per-node gpus-per-task export unbuffered quiet verbose exclusive"
).split()
_CONTAINER_FLAGS = frozenset(
    "nv rocm nvccli cleanenv e contain c containall C no-home writable-tmpfs fakeroot f userns u"
    " ipc i pid p writable w no-init rm".split()
)
_ACCELERATE_FLAGS = frozenset(
    "multi-gpu cpu tpu use-deepspeed use-fsdp use-megatron-lm same-network module m no-python"
    " debug quiet use-xpu use-mps-device".split()
)
_OF_RANKS = (
    r"(num-processes|num-machines|machine-rank|main-process-(ip|port)|rdzv-\w+|rdzv-backend|multi-gpu"
    r"|same-network|main-training-function|compute-environment|gpu-ids|use-cpu|cpu|debug|tpu-.*|quiet"
    r"|downcast-bf16|enable-cpu-affinity|max-restarts|monitor-interval|tee|role|log-dir"
    r"|mpirun-hostfile|use-mps-device)"
)
Option = tuple[str, Word | None, Word]  # its name, its value, and the word that has the name


@dataclass
class Launch:
    """What is known of a launch.

    Attributes
    ----------
    weight
        how surely it is the training: 0 for a command that is none
    kind, step
        torchrun or the like, or "" where a task is a worker; and what starts the tasks
    workers, tasks, gpus
        per node, in all, and the request for GPUs, as the launch has them
    settings
        values by key, lists of words for lists
    ours, lost
        (line, text) of options that hpc-ddp decides itself, and of those that can't be said
    """

    line: int
    weight: int = 0
    kind: str = ""
    step: str = ""
    program: Word | None = None
    args: list[Word] = field(default_factory=list)
    workers: int | None = None
    nodes: int | None = None
    tasks: int | None = None
    tasks_per_node: int | None = None
    gpus: dict[str, str] = field(default_factory=dict)
    node_words: bool = False  # by a node's name, in a loop or by ssh
    settings: dict[str, list[Word]] = field(default_factory=dict)
    env: dict[str, Word] = field(default_factory=dict)
    inner: Word | None = None  # of bash -c
    yaml: Word | None = None  # of accelerate
    ours: list[tuple[int, str]] = field(default_factory=list)
    lost: list[tuple[int, str]] = field(default_factory=list)

    def add(self, key: str, *words: Word) -> None:
        self.settings.setdefault(key, []).extend(words)

    @property
    def identity(self) -> tuple[str, ...]:
        """What two launches of one training have in common."""
        return (self.program.text if self.program else "", *(word.text for word in self.args))


def read_options(
    words: Sequence[Word], flags: frozenset[str], letters: dict[str, str] | None = None
) -> tuple[list[Option], list[Word]]:
    """Return the options that some words begin with, their names in dashes, and the other words."""
    rest, options = list(words), []
    while rest and re.match(r"-{1,2}[A-Za-z]", rest[0].text):
        word = rest.pop(0)
        text = word.text
        if letters and re.match(r"-\w", text):
            name = letters.get(text[1], text[1])
            value = word.after(2) if len(text) > 2 else None
        else:
            head = text.partition("=")[0]
            name = head.lstrip("-").replace("_", "-")
            value = word.after(len(head) + 1) if "=" in text else None
        if value is None and name not in flags and rest:
            value = rest.pop(0)
        options.append((name, value, word))
    if rest and rest[0].text == "--":
        rest.pop(0)
    return options, rest


def read_launch(words: Sequence[Word], scope: Scope) -> Launch:
    """Return the launch that some words are; its weight is 0 where they are none."""
    launch = Launch(words[0].line if words else 0)
    rest: list[Word] | None = list(words)
    while rest and not launch.program and launch.inner is None:
        text = rest[0].text
        name = text.rsplit("/", 1)[-1]
        if re.fullmatch(r"python[\d.]*", name) or (launch.step and re.search(r"PYTHON", text)):
            rest = _python(rest, launch, scope)
            continue
        if match := re.match(r"([A-Za-z_]\w*)=", text):
            launch.env[match[1]] = rest.pop(0).after(len(match[0]))
            continue
        handler = _HANDLERS.get(name)
        if handler is None:
            if launch.step:
                _command(rest, launch)
            break
        rest = handler(rest, launch, scope)
    return launch


def _skip(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    return words[1:]


def _srun(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    launch.step = "srun"
    options, rest = read_options(words[1:], FLAGS, LETTERS)
    for name, value, word in options:
        if name == "container-image" and value:
            launch.settings["image"] = [value]
            launch.settings["container-tool"] = [known("pyxis", word.line)]
        elif name.startswith(("container-", "no-container-")):
            text = f"--{name}="
            joined = Word((*known(text).parts, *value.parts), word.line) if value else word
            launch.add("container-options", joined)
        elif name == "export" and value and re.search(r"=", value.text):
            for pair in value.text.split(","):
                key, _, content = pair.partition("=")
                if content:
                    launch.env[key] = known(content, word.line)
        elif name in _OURS or (name == "mpi" and "torch" in " ".join(w.text for w in rest)):
            launch.ours.append((word.line, f"srun --{name}"))
            if name in ("gres", "gpus", "gpus-per-node", "gpus-per-task") and value:
                launch.gpus[name] = value.text
        else:
            joined = Word((*known(f"--{name}=").parts, *value.parts), word.line) if value else known(
                f"--{name}", word.line
            )
            launch.add("srun", joined)
        numbers = {"nodes": "nodes", "ntasks": "tasks", "ntasks-per-node": "tasks_per_node"}
        if name in numbers:
            setattr(launch, numbers[name], scope.number(value))
        launch.node_words |= name == "nodelist"
    return rest


def _mpirun(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    launch.step = "ibrun" if words[0].text.endswith("ibrun") else "mpirun"
    rest = words[1:]
    while rest and rest[0].text.startswith("-"):
        word = rest.pop(0)
        name = word.text.lstrip("-")
        if name in ("mca", "gmca", "prtemca") and len(rest) > 1:
            text = " ".join([word.text, rest.pop(0).text, rest.pop(0).text])
            launch.add("mpirun", known(text, word.line))
        elif name == "x" and rest:
            key, equals, content = rest.pop(0).text.partition("=")
            if equals:
                launch.env[key] = known(content, word.line)
            launch.ours.append((word.line, f"mpirun -x {key}: workers have the job's variables"))
        elif re.fullmatch(r"n|np|c|N|npernode|ppn|map-by|rank-by|H|host|hosts|hostfile|f|machinefile"
                          r"|bind-to|o|ntasks-per-node", name) and rest:  # fmt: skip
            value = rest.pop(0)
            if name in ("n", "np", "c"):
                launch.tasks = scope.number(value)
            elif name in ("N", "npernode", "ppn", "ntasks-per-node"):
                launch.tasks_per_node = scope.number(value)
            if name == "bind-to":
                launch.add("mpirun", known(f"--bind-to {value.text}", word.line))
            else:
                launch.ours.append((word.line, f"mpirun -{name}"))
        elif name in ("allow-run-as-root", "oversubscribe", "tag-output", "report-bindings"):
            launch.add("mpirun", word)
        else:
            launch.lost.append((word.line, f"{words[0].text} {word.text}: mpirun = [\"{word.text}\"]"))
    return rest


def _torchrun(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Take the options of torchrun, of ``torch.distributed.launch`` and composer, whose own are
    alike; the program follows."""
    launch.kind, launch.weight = "torchrun", 4
    name = words[0].text.rsplit("/", 1)[-1]
    flags = frozenset(("standalone", "module", "m", "no-python", "run-path", "use-env"))
    options, rest = read_options(words[1:], flags)
    adds_rank = name in ("launch", "deepspeed")
    for option, value, word in options:
        if option in ("nproc-per-node", "n", "nproc", "num-gpus"):
            launch.workers = scope.number(value) if value else None
        elif option in ("module", "m"):
            launch.add("module", word)
        elif option == "no-python":
            launch.add("no-python", word)
        elif option == "use-env":
            adds_rank = False
        elif option == "max-restarts" and value:
            if scope.number(value):
                launch.add("max-restarts", value)
        elif option == "nnodes" and value and ":" in value.text:
            launch.add("nodes", known(value.text.replace(":", "-"), word.line))
            launch.add("elastic", word)
        elif any(s.startswith(option) for s in TORCHRUN_SETTLED) or option.startswith("rdzv-"):
            launch.ours.append((word.line, f"{name} --{option}"))
        elif name in ("composer", "deepspeed"):
            if option in ("world-size", "num-nodes", "hostfile", "stdout", "stderr", "include"):
                launch.ours.append((word.line, f"{name} --{option}"))
            else:
                launch.lost.append((word.line, f"{name} {word.text}: see {name}'s own page"))
        else:
            joined = Word((*known(f"--{option}=").parts, *value.parts), word.line) if value else word
            launch.add("torchrun", joined)
    if name == "composer":
        launch.add("worker-setup", known("export NODE_RANK=$GROUP_RANK", words[0].line))
    if name == "deepspeed":
        launch.lost.append((words[0].line, "the launcher deepspeed: torchrun starts the workers, and"
                            " its options but for the number of workers are gone"))  # fmt: skip
    _program(rest, launch)
    if adds_rank and launch.program:
        launch.args.insert(0, known("--local_rank=$LOCAL_RANK", words[0].line))
        launch.add("expand", known("LOCAL_RANK", words[0].line))
    return []


def _accelerate(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    if len(words) < 2 or words[1].text != "launch":
        return []
    launch.kind, launch.weight = "accelerate", 4
    options, rest = read_options(words[2:], _ACCELERATE_FLAGS)
    for name, value, word in options:
        if name == "config-file":
            launch.yaml = value
        elif name in ("module", "m", "no-python"):
            launch.add("module" if name == "m" else name, word)
        elif name == "num-processes" and value:
            launch.tasks = scope.number(value)
            launch.ours.append((word.line, "accelerate --num_processes"))
        elif re.fullmatch(_OF_RANKS, name):
            launch.ours.append((word.line, f"accelerate --{name}"))
        elif variable := accelerate_variable(name, value.text if value else "true"):
            launch.env.update({variable[0]: known(variable[1], word.line)})
        else:
            launch.lost.append((word.line, f"accelerate {word.text}: set it in Accelerator(…)"))
    _program(rest, launch)
    return []


def accelerate_variable(name: str, value: str) -> tuple[str, str] | None:
    """Return the variable by which ``accelerate launch`` passes on one of its options or keys, and
    its value (accelerate.utils.launch, 1.0); None for one that it does not pass on so."""
    name, low = name.replace("_", "-"), value.lower()
    if name in ("mixed-precision", "gradient-accumulation-steps"):
        return f"ACCELERATE_{name.replace('-', '_').upper()}", value
    if name in ("use-fsdp", "use-deepspeed"):
        return f"ACCELERATE_{name.replace('-', '_').upper()}", "true"
    if name.startswith("fsdp-"):
        variable = name.replace("-", "_").upper()
        variable = {"FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "FSDP_TRANSFORMER_CLS_TO_WRAP",
                    "FSDP_BACKWARD_PREFETCH_POLICY": "FSDP_BACKWARD_PREFETCH"}.get(variable, variable)  # fmt: skip
        return variable, low if low in ("true", "false") else value
    if name == "gradient-clipping":
        return "ACCELERATE_GRADIENT_CLIPPING", low
    zero = r"zero-stage|offload-(optimizer|param)-device|zero3-init-flag|zero3-save-16bit-model"
    if re.fullmatch(zero, name):
        short = name.replace("zero3-init-flag", "zero3-init").replace("-", "_").upper()
        return f"ACCELERATE_DEEPSPEED_{short}", low
    if name == "deepspeed-config-file":
        return "ACCELERATE_DEEPSPEED_CONFIG_FILE", value
    return None


def _python(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Take Python and its flags; what follows is a launcher, a module or a script."""
    python, rest = words[0], words[1:]
    if "/" in python.text or "$" in python.text:
        launch.settings["python"] = [python]
    while rest and re.fullmatch(r"-[uEsSIBOqvx]+|-[WX].*", rest[0].text):
        flag = rest.pop(0)
        if flag.text in ("-W", "-X") and rest:
            rest.pop(0)
        if flag.text != "-u":
            launch.lost.append((flag.line, f"python {flag.text}: a variable, as PYTHONWARNINGS"))
    if len(rest) > 1 and rest[0].text == "-m":
        if rest[1].text in ("torch.distributed.run", "torch.distributed.launch"):
            return _torchrun([known(rest[1].text.rsplit(".")[-1], rest[1].line), *rest[2:]], launch, scope)
        if rest[1].text == "accelerate.commands.launch":
            return _accelerate([rest[1], known("launch"), *rest[2:]], launch, scope)
        launch.add("module", rest[0])
        rest = rest[1:]
    if rest and rest[0].text == "-c":
        return []
    launch.weight = 3 if launch.step else 1
    _program(rest, launch)
    if not launch.program:
        launch.weight = 0
    return []


def _program(words: Sequence[Word], launch: Launch) -> None:
    rest = list(words)
    if len(rest) > 1 and re.fullmatch(r"\S*python[\d.]*", rest[0].text):
        if launch.settings.pop("no-python", None):  # torchrun --no_python python train.py
            rest.pop(0)
        while len(rest) > 1 and rest[0].text == "-u":
            rest.pop(0)
    if rest:
        launch.program, launch.args = rest[0], rest[1:]


_NO_TRAINING = re.compile(
    r"(.*/)?(hostname|nvidia-smi|rocm-smi|echo|mkdir|cp|mv|rm|ls|cat|date|sleep|ray|rsync|tar|unzip|env"
    r"|printenv|pkill|kill|chmod|ln|true|test|find|lscpu|ip|ifconfig|which|df|sbcast|enroot|nvcc)"
)


def _command(words: list[Word], launch: Launch) -> None:
    """Take a command that is no launcher as the program of each task."""
    if _NO_TRAINING.fullmatch(words[0].text):
        return
    launch.weight = 2
    launch.program, launch.args = words[0], words[1:]
    launch.add("no-python", words[0])


def _shell(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Take ``bash -c '…'``, whose text is a script of its own, or ``bash file``."""
    options = [w for w in words[1:3] if re.fullmatch(r"-[a-z]*c", w.text)]
    if options:
        at = words.index(options[0])
        launch.inner = words[at + 1] if at + 1 < len(words) else known("")
    elif launch.step:
        _command(words, launch)
    return []


def _image(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    tool = words[0].text.rsplit("/", 1)[-1]
    if len(words) < 3 or words[1].text not in ("exec", "run"):
        return []
    options, rest = read_options(words[2:], _CONTAINER_FLAGS)
    for name, value, word in options:
        if name in ("nv", "rocm"):
            launch.ours.append((word.line, f"{tool} --{name}"))
        elif name == "env" and value and "=" in value.text:
            key, _, content = value.text.partition("=")
            launch.env[key] = known(content, word.line)
        else:
            launch.add("container-options", word, *([] if "=" in word.text or not value else [value]))
    if rest:
        launch.settings["image"] = [rest.pop(0)]
        launch.settings["container-tool"] = [known(tool, words[0].line)]
    return rest


def _shifter(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    options, rest = read_options(words[1:], frozenset())
    for name, value, word in options:
        if name == "image" and value:
            launch.settings["image"] = [value]
        elif value:
            launch.add("container-options", Word((*known(f"--{name}=").parts, *value.parts), word.line))
    launch.settings["container-tool"] = [known("shifter", words[0].line)]
    return rest


def _wrapper(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Take a command that enters a container in its own way, as CSC's does: ``container``."""
    at = next((i for i, word in enumerate(words) if word.text == "exec"), 0)
    launch.settings["container"] = [known(" ".join(w.text for w in words[: at + 1]), words[0].line)]
    return words[at + 1 :]


def _remote(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Take ssh or pdsh: what it starts is a script of its own."""
    rest = [word for word in words[1:] if not word.text.startswith("-")]
    launch.step, launch.node_words = "srun", True
    launch.inner = Word(tuple(p for w in rest[1:] for p in (*w.parts, *known(" ").parts)), words[0].line)
    return []


def _tool(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Take a tool before the program, as numactl or nsys: it can't be said."""
    options, rest = read_options(words[1:], frozenset(("l", "localalloc")))
    launch.lost.append((words[0].line, f"{words[0].text} before the program: worker-setup has none"))
    return rest


_HANDLERS: dict[str, Callable[[list[Word], Launch, Scope], list[Word]]] = {
    **dict.fromkeys(("exec", "time", "nohup", "env"), _skip),
    "srun": _srun,
    **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "ibrun", "orterun"), _mpirun),
    **dict.fromkeys(("torchrun", "composer", "deepspeed"), _torchrun),
    "accelerate": _accelerate,
    **dict.fromkeys(("bash", "sh"), _shell),
    **dict.fromkeys(("singularity", "apptainer"), _image),
    "shifter": _shifter,
    "singularity_wrapper": _wrapper,
    **dict.fromkeys(("ssh", "pdsh", "clush"), _remote),
    **dict.fromkeys(("numactl", "nsys"), _tool),
}


def read_gpus(options: dict[str, str], tasks_per_node: int) -> int:
    """Return the GPUs of a node by the options of a launch; 0 where they are not known."""
    for name in ("gpus-per-node", "gres", "gpus-per-task"):
        match = re.search(r"(?:^|:|gpu[:=])(\d+)$", options.get(name, ""))
        if match:
            return int(match[1]) * (tasks_per_node if name == "gpus-per-task" else 1)
    return 0
