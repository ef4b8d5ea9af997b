"""The command that starts the training: launcher by launcher, down to the program."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpc_ddp.submission.job_script.shell import Word


# Options without a value, of srun and sbatch.
def set_of(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


FLAGS = set_of(
    "label unbuffered overlap no-kill verbose quiet pty preserve-env immediate kill-on-bad-exit",
    "contiguous oversubscribe overcommit multi-prog spread-job use-min-nodes exclusive requeue",
    "no-requeue hold get-user-env parsable reboot wait-for-all exact container-writable",
    "container-readonly container-mount-home no-container-mount-home container-remap-root",
    "no-container-remap-root container-entrypoint no-container-entrypoint",
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
Option = tuple[str, Word | None, Word]  # its name, its value, and the word that has the name


@dataclass
class Launch:
    """A launch, as far as it is known.

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
    node_words: bool = False  # by a node's name, or by ssh
    in_loop: bool = False  # over the nodes
    folder: str | None = ""  # the working directory there; None where only the job knows it
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
        """The program and its arguments: two launches of one training have the same."""
        return (self.program.text if self.program else "", *(word.text for word in self.args))


def read_options(
    words: Sequence[Word], flags: frozenset[str], letters: dict[str, str] | None = None
) -> tuple[list[Option], list[Word]]:
    """Return the options that some words begin with, their names in dashes, and the other words."""
    remaining, options = list(words), []
    while remaining and re.match(r"-{1,2}[A-Za-z]", remaining[0].text):
        word = remaining.pop(0)
        text = word.text
        if letters and re.match(r"-\w", text):
            name = letters.get(text[1], text[1])
            operand = word.after(2) if len(text) > 2 else None
        else:
            head = text.partition("=")[0]
            name = head.lstrip("-").replace("_", "-")
            operand = word.after(len(head) + 1) if "=" in text else None
        if operand is None and name not in flags and remaining:
            operand = remaining.pop(0)
        options.append((name, operand, word))
    if remaining and remaining[0].text == "--":
        remaining.pop(0)
    return options, remaining


def read_gpus(options: dict[str, str], tasks_per_node: int) -> int:
    """Return the GPUs of a node by the options of a launch; 0 where they are not known."""
    for name in ("gpus-per-node", "gres", "gpus-per-task"):
        match = re.search(r"(?:^|:|gpu[:=])(\d+)$", options.get(name, ""))
        if match:
            return int(match[1]) * (tasks_per_node if name == "gpus-per-task" else 1)
    return 0
