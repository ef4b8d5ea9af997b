"""The ``#SBATCH`` lines of a job script, as settings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.slurm_values import parse_signal
from hpc_ddp.submission.job_script.launch import FLAGS, LETTERS
from hpc_ddp.submission.settings.config import OPTIONS

_LONG = [*LETTERS.values(), *FLAGS, *(key for key, o in OPTIONS.items() if o.is_sbatch),
         *("ntasks-per-node", "gpus-per-node", "gpus-per-task", "gres", "mem-per-cpu",
           "mem-per-gpu", "cpus-per-gpu", "signal", "open-mode", "export", "hint", "network",
           "chdir", "comment", "mail-user", "mail-type", "reservation", "no-requeue", "output",
           "error", "wait-all-nodes", "threads-per-core", "gpu-bind", "tmp")]  # fmt: skip
_PLACEHOLDER = re.compile(r"<.*>|x{3,}|your[-_ ]?\w*|(my|some)?[-_]?(partition|account)[-_]?(name)?"
                          r"|\[[a-z_ ]+\]|\{\{.*\}\}|todo|changeme|.*\bxxx\b.*", re.I)  # fmt: skip


@dataclass
class Directives:
    """The directives of a job script.

    Attributes
    ----------
    options
        (value, line) by sbatch's long name; a flag's value is ""
    replaced, late, strange
        lines that count for nothing: a later one replaces them, they come after the first command,
        or no word of them is an option
    """

    options: dict[str, tuple[str, int]] = field(default_factory=dict)
    replaced: dict[int, str] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)
    strange: dict[int, str] = field(default_factory=dict)
    placeholders: dict[int, str] = field(default_factory=dict)

    def get(self, name: str) -> str | None:
        return self.options.get(name, (None, 0))[0]

    def line(self, name: str) -> int:
        return self.options.get(name, ("", 0))[1]

    def number(self, name: str) -> int | None:
        text = self.get(name) or ""
        return int(text) if text.isdecimal() else None


def read_directives(text: str) -> Directives:
    """Return the directives of a job script, as sbatch reads them: up to the first command, of two
    equal ones the last."""
    result, has_begun = Directives(), False
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("#SBATCH"):
            has_begun = has_begun or (bool(line.strip()) and not line.startswith("#"))
            continue
        if has_begun:
            result.late.append(number)
            continue
        try:
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        except ValueError:
            result.strange[number] = "its quotes do not match"
            continue
        pairs = list(_pairs(words))
        if not pairs:
            result.strange[number] = "no option of sbatch"
        for name, operand in pairs:
            if name in result.options:
                result.replaced[result.options[name][1]] = f"line {number} replaces --{name}"
            result.options[name] = operand, number
            if _PLACEHOLDER.fullmatch(operand):
                result.placeholders[number] = f"--{name}={operand} is a placeholder"
    return result


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if re.match(r"--\w", word):
            head, equals, operand = word[2:].partition("=")
            name = head.replace("_", "-")
            fitting = {long for long in _LONG if long.startswith(name)}
            name = name if name in fitting or len(fitting) != 1 else fitting.pop()
        elif re.match(r"-\w", word):
            name, operand = LETTERS.get(word[1], word[1]), word[2:].removeprefix("=")
            equals = operand
        else:
            return
        if not equals and name not in FLAGS and remaining and not remaining[0].startswith("-"):
            operand = remaining.pop(0)
        yield name, operand


_DECIDED = {
    "requeue": "a job is requeued until it has finished",
    "open-mode": "the output is appended to",
    "export": "the job has the variables of [env] and env-names, and Slurm's",
    "ntasks": "tasks follow from nodes and workers",
    "ntasks-per-node": "tasks follow from nodes and workers",
    "wait": "srun waits as long as it takes",
    "quiet": "sbatch prints the job's number alone",
    "get-user-env": "the job has the login shell's variables by set-up lines",
    "parsable": "submit prints the job's number alone",
    "kill-on-bad-exit": "a failed worker ends the attempt",
}
_NEEDED = ("nodes", "gpus", "gpus-per-node", "gpus-per-task", "gres", "cpus-per-task")


def direct(directives: Directives) -> Iterator[tuple[str, str, object, int, str]]:
    """Yield (group, key, value, line, text) for each directive that stands for itself: group
    ``taken``, ``ours`` or ``lost``."""
    for name, (operand, line) in directives.options.items():
        if line in directives.placeholders:
            yield (
                "lost",
                name,
                operand,
                line,
                f"{directives.placeholders[line]}: --{name} with yours",
            )
        elif name == "array":
            if operand.endswith("%1"):
                yield "ours", name, operand, line, "a chain: one run goes on until it has finished"
            else:
                yield "taken", name, operand, line, ""
        elif name == "signal":
            try:
                parse_signal(operand)
                yield "taken", name, operand.partition(":")[2] or operand, line, ""
            except UsageError:
                yield "ours", name, operand, line, "a notice comes by SIGTERM, 60 s before the end"
        elif name == "no-requeue":
            yield "taken", "max-requeues", 0, line, ""
        elif name == "exclusive" and not operand:
            yield "taken", name, True, line, ""
        elif name in _DECIDED:
            yield "ours", name, operand, line, _DECIDED[name]
        elif name == "dependency" and "singleton" in operand:
            yield "ours", name, operand, line, "a chain: one run goes on until it has finished"
        elif name in ("output", "error") and (field := re.search(r"%[^jxAauN%]", operand)):
            text = f"--{name} with {field[0]}; accepted: %j, %x, %A, %a, %u, %N"
            yield "lost", name, operand, line, text
        elif name in ("output", "error", "job-name", "chdir") or (
            name in OPTIONS and OPTIONS[name].is_sbatch and name != "nodes"
        ):
            yield "taken", name, operand, line, ""
        elif name in ("test-only", "wrap", "no-kill"):
            yield "lost", name, operand, line, f"--{name}: --elastic, or hpc-ddp render"
        elif name not in _NEEDED:
            yield "taken", "sbatch", f"--{name}={operand}" if operand else f"--{name}", line, ""


def sizes(directives: Directives) -> dict[str, int]:
    """Return the numbers of nodes, tasks, GPUs and CPUs that follow from the directives, by Slurm's
    variables."""
    nodes_text = (directives.get("nodes") or "").replace(",", "-").split("-")
    tasks, per_node = directives.number("ntasks"), directives.number("ntasks-per-node")
    nodes = int(nodes_text[-1]) if nodes_text[-1].isdecimal() and len({*nodes_text}) == 1 else None
    gpus = directives.number("gpus") or _gpu_number(directives.get("gpus"))
    gpus_here = _gpu_number(directives.get("gpus-per-node") or _gres(directives.get("gres")))
    if nodes is None and tasks and per_node:
        nodes = -(-tasks // per_node)
    if nodes is None and gpus and gpus_here:
        nodes = -(-gpus // gpus_here)
    if per_node is None and tasks and nodes:
        per_node = -(-tasks // nodes)
    per_node = per_node or 1
    of_task = _gpu_number(directives.get("gpus-per-task"))
    gpus_here = (
        gpus_here or (gpus // nodes if gpus and nodes else None) or (of_task or 0) * per_node
    )
    numbers = {"SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_GPUS_ON_NODE": gpus_here,
             "SLURM_GPUS_PER_NODE": gpus_here, "SLURM_NTASKS_PER_NODE": per_node,
             "SLURM_NTASKS": tasks or (nodes or 1) * per_node, "SLURM_GPUS": gpus,
             "SLURM_NPROCS": tasks or (nodes or 1) * per_node,
             "SLURM_CPUS_PER_TASK": directives.number("cpus-per-task")}  # fmt: skip
    return {name: number for name, number in numbers.items() if number}


def gpu_request(options: Mapping[str, str], count: int) -> tuple[str, str] | None:
    """Return ``gpus-per-node`` and ``gpu-request`` for the options of a request, `count` in all of
    a node; None without one."""
    for name in ("gpus-per-node", "gres", "gpus-per-task", "gpus"):
        text = _gres(options.get("gres")) if name == "gres" else options.get(name)
        if text:
            kind = re.fullmatch(r"(?:([A-Za-z][\w.-]*):)?\d+", text)
            form = "gpus-per-node" if name == "gpus" else name
            return (f"{kind[1]}:{count}" if kind and kind[1] else str(count)), form
    return None


def _gres(text: str | None) -> str | None:
    """Return the GPUs of a ``--gres``, ``TYPE:N`` or ``N``; None without."""
    match = re.search(r"gpu(?::([\w.:-]+?))?(?:\(.*?\))?(?:,|$)", text or "")
    return (match[1] or "1") if match else None


def _gpu_number(text: str | None) -> int | None:
    match = re.fullmatch(r"(?:[\w.-]+:)?(\d+)", text or "")
    return int(match[1]) if match else None
