"""The launchers that start tasks or enter a container, one inside the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from hpc_ddp.submission.job_script.launch import FLAGS, LETTERS, Launch, read_options, set_of
from hpc_ddp.submission.job_script.shell import Scope, Word, literal
from hpc_ddp.submission.job_script.training_launchers import (
    take_accelerate,
    take_python,
    take_torchrun,
)

# Options of srun that hpc-ddp decides itself.
_OURS = set_of(
    "nodes ntasks ntasks-per-node cpus-per-task distribution output error input label jobid",
    "overlap kill-on-bad-exit no-kill wait exact nodelist relative partition account time job-name",
    "mem gres gpus gpus-per-node gpus-per-task export unbuffered quiet verbose exclusive",
)
_CONTAINER_FLAGS = set_of(
    "nv rocm nvccli cleanenv e contain c containall C no-home writable-tmpfs fakeroot f userns u",
    "ipc i pid p writable w no-init rm",
)


def read_launch(words: Sequence[Word], scope: Scope, step: str = "") -> Launch:
    """Return the launch that some words are; its weight is 0 where they are none. `step` is what
    starts the tasks that have these words in them, '' for the batch script."""
    launch = Launch(words[0].line if words else 0, step=step)
    remaining: list[Word] | None = list(words)
    while remaining and not launch.program and launch.inner is None:
        text = remaining[0].text
        name = text.rsplit("/", 1)[-1]
        if re.fullmatch(r"python[\d.]*", name) or (launch.step and re.search(r"PYTHON", text)):
            remaining = take_python(remaining, launch, scope)
            continue
        if match := re.match(r"([A-Za-z_]\w*)=", text):
            launch.env[match[1]] = remaining.pop(0).after(len(match[0]))
            continue
        handler = _HANDLERS.get(name)
        if handler is None:
            if launch.step and (not step or re.fullmatch(r"\.{0,2}/\S+|\S+\.sh|bash", text)):
                _command(remaining, launch)
            break
        remaining = handler(remaining, launch, scope)
    return launch


def _skip(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    return words[1:]


def _srun(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    launch.step = "srun"
    options, remaining = read_options(words[1:], FLAGS, LETTERS)
    while (
        len(remaining) > 1
        and re.fullmatch(r"\$\{?\w+\}?", remaining[0].text)
        and _goes_on(remaining[1].text)
    ):
        unknown = remaining.pop(0)
        launch.lost.append(
            (unknown.line, f"srun {unknown.text}: only the job knows it: srun = […]")
        )
        more, remaining = read_options(remaining, FLAGS, LETTERS)
        options += more
    for name, operand, word in options:
        if name == "container-image" and operand:
            launch.settings["image"] = [operand]
            launch.settings["container-tool"] = [literal("pyxis", word.line)]
        elif name.startswith(("container-", "no-container-")):
            text = f"--{name}="
            joined = Word((*literal(text).parts, *operand.parts), word.line) if operand else word
            launch.add("container-options", joined)
        elif name == "export" and operand and re.search(r"=", operand.text):
            for pair in operand.text.split(","):
                key, _, content = pair.partition("=")
                if content:
                    launch.env[key] = literal(content, word.line)
        elif name in _OURS:
            launch.ours.append((word.line, f"srun --{name}"))
            if name in ("gres", "gpus", "gpus-per-node", "gpus-per-task") and operand:
                launch.gpus[name] = operand.text
        else:
            joined = (
                Word((*literal(f"--{name}=").parts, *operand.parts), word.line)
                if operand
                else literal(f"--{name}", word.line)
            )
            launch.add("srun", joined)
        numbers = {"nodes": "nodes", "ntasks": "tasks", "ntasks-per-node": "tasks_per_node"}
        if name in numbers:
            setattr(launch, numbers[name], scope.number(operand))
        launch.node_words |= name == "nodelist"
    return remaining


def _goes_on(text: str) -> bool:
    """Return whether a word is an option of srun's, or a launcher: no argument of a program."""
    name = text.rsplit("/", 1)[-1]
    return text.startswith("-") or name in _HANDLERS or name.startswith("python")


def _mpirun(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    launch.step = "ibrun" if words[0].text.endswith("ibrun") else "mpirun"
    remaining = words[1:]
    while remaining and remaining[0].text.startswith("-"):
        word = remaining.pop(0)
        name = word.text.lstrip("-")
        if name in ("mca", "gmca", "prtemca") and len(remaining) > 1:
            text = " ".join([word.text, remaining.pop(0).text, remaining.pop(0).text])
            launch.add("mpirun", literal(text, word.line))
        elif name == "x" and remaining:
            key, equals, content = remaining.pop(0).text.partition("=")
            if equals:
                launch.env[key] = literal(content, word.line)
            launch.ours.append((word.line, f"mpirun -x {key}: workers have the job's variables"))
        elif re.fullmatch(r"n|np|c|N|npernode|ppn|map-by|rank-by|H|host|hosts|hostfile|f"
                          r"|machinefile|bind-to|ntasks-per-node", name) and remaining:  # fmt: skip
            operand = remaining.pop(0)
            if name in ("n", "np", "c"):
                launch.tasks = scope.number(operand)
            elif name in ("N", "npernode", "ppn", "ntasks-per-node"):
                launch.tasks_per_node = scope.number(operand)
            if name == "bind-to":
                launch.add("mpirun", literal(f"--bind-to {operand.text}", word.line))
            else:
                launch.ours.append((word.line, f"mpirun -{name}"))
        elif name in ("allow-run-as-root", "oversubscribe", "tag-output", "report-bindings"):
            launch.add("mpirun", word)
        else:
            launch.lost.append(
                (word.line, f'{words[0].text} {word.text}: mpirun = ["{word.text}"]')
            )
    return remaining


_NO_TRAINING = re.compile(
    r"(.*/)?(hostname|nvidia-smi|rocm-smi|echo|mkdir|cp|mv|rm|ls|cat|date|sleep|ray|rsync|tar|unzip"
    r"|env|printenv|pkill|kill|chmod|ln|true|test|find|lscpu|ip|ifconfig|which|df|sbcast|enroot|nvcc)"
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
        launch.inner = words[at + 1] if at + 1 < len(words) else literal("")
    elif launch.step:
        _command(words, launch)
    return []


def _image(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    tool = words[0].text.rsplit("/", 1)[-1]
    if len(words) < 3 or words[1].text not in ("exec", "run"):
        return []
    options, remaining = read_options(words[2:], _CONTAINER_FLAGS)
    for name, operand, word in options:
        if name in ("nv", "rocm"):
            launch.ours.append((word.line, f"{tool} --{name}"))
        elif name == "env" and operand and "=" in operand.text:
            key, _, content = operand.text.partition("=")
            launch.env[key] = literal(content, word.line)
        else:
            launch.add(
                "container-options", word, *([] if "=" in word.text or not operand else [operand])
            )
    if remaining:
        launch.settings["image"] = [remaining.pop(0)]
        launch.settings["container-tool"] = [literal(tool, words[0].line)]
    return remaining


def _shifter(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    options, remaining = read_options(words[1:], frozenset())
    for name, operand, word in options:
        if name == "image" and operand:
            launch.settings["image"] = [operand]
        elif operand:
            launch.add(
                "container-options", Word((*literal(f"--{name}=").parts, *operand.parts), word.line)
            )
    launch.settings["container-tool"] = [literal("shifter", words[0].line)]
    return remaining


def _wrapper(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Take a command that enters a container in its own way, as CSC's does: ``container``."""
    at = next((i for i, word in enumerate(words) if word.text == "exec"), 0)
    launch.settings["container"] = [
        literal(" ".join(w.text for w in words[: at + 1]), words[0].line)
    ]
    return words[at + 1 :]


def _remote(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Take ssh or pdsh: what it starts is a script of its own."""
    remaining = [word for word in words[1:] if not word.text.startswith("-")]
    launch.step, launch.node_words = "srun", True
    launch.inner = Word(
        tuple(p for w in remaining[1:] for p in (*w.parts, *literal(" ").parts)), words[0].line
    )
    return []


def _tool(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Take a tool before the program, as numactl or nsys: it can't be said."""
    if launch.step:
        _command(words, launch)
        launch.weight = 3
        return []
    _, remaining = read_options(words[1:], frozenset(("l", "localalloc")))
    launch.lost.append(
        (words[0].line, f"{words[0].text} before the program: worker-setup has none")
    )
    return remaining


_HANDLERS: dict[str, Callable[[list[Word], Launch, Scope], list[Word]]] = {
    **dict.fromkeys(("exec", "time", "nohup", "env"), _skip),
    "srun": _srun,
    **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "ibrun", "orterun"), _mpirun),
    **dict.fromkeys(("torchrun", "composer", "deepspeed"), take_torchrun),
    "accelerate": take_accelerate,
    **dict.fromkeys(("bash", "sh"), _shell),
    **dict.fromkeys(("singularity", "apptainer"), _image),
    "shifter": _shifter,
    "singularity_wrapper": _wrapper,
    **dict.fromkeys(("ssh", "pdsh", "clush"), _remote),
    **dict.fromkeys(("numactl", "nsys"), _tool),
}
