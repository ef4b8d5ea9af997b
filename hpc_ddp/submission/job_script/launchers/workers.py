"""The launchers of PyTorch's workers, as torchrun.

A function that reads a launcher gets all words from the launcher's name on. It puts what they say
into the launch, and returns the words that are left for the next function.
"""

from __future__ import annotations

import re

from hpc_ddp.core.job.checks import TORCHRUN_SETTLED
from hpc_ddp.submission.job_script.bash.counts import whole_number
from hpc_ddp.submission.job_script.bash.scope import Scope
from hpc_ddp.submission.job_script.bash.words import Part, Word, literal
from hpc_ddp.submission.job_script.conversion import LOST
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.launchers.options import LAUNCHERS, Options

_TORCHRUN = {
    "nproc-per-node|nproc|n|num-gpus": "#workers",
    "module|m|module-mode": "!module",
    "no-python|command-mode|c": "!no-python",
    "max-restarts": "=max-restarts",
    # Of composer and deepspeed, too.
    "|".join(
        [
            "rdzv-.*|nnode|use-env|world-size|num-nodes|hostfile|stdout|stderr|include|i|base-rank|verbose"
            "|no-local-rank|no-ssh(-check)?|force-multi|launcher",
            *TORCHRUN_SETTLED,
        ]
    ): "ours",
    ".*": "+torchrun",
}

_ALL_GPUS = re.compile(r"gpu|auto|\$\{?SLURM_GPUS_(ON|PER)_NODE\}?")  # a worker for each
_TORCHRUN_FLAGS = re.compile(
    "standalone|module|m|no-python|run-path|use-env|v|verbose"
    # Of composer and deepspeed.
    "|module-mode|command-mode|c|no-ssh(-check)?|no-local-rank|force-multi|save-pid"
    "|bind-cores-to-rank|elastic-training"
)


def take_python_beside(launcher: Word, launch: Launch) -> None:
    """Set ``python``, with a note, to the Python in the folder of a launcher that is named by its
    path; not for a folder of the system, or a user's own, whose Python is elsewhere."""
    *before, last = launcher.parts
    folder, slash, name = last.text.rpartition("/")
    is_elsewhere = folder.endswith(".local/bin") or folder in ("/usr/bin", "/usr/local/bin")
    if slash and name in LAUNCHERS | {"torchrun"} and not (last.is_code or is_elsewhere):
        python = Word((*before, Part(f"{folder}/python")), launcher.line)
        launch.settings.setdefault("python", [python])
        launch.mark(launcher.line, "", f"python: the one beside {name}, {python.text}")


def read_torchrun(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read torchrun, ``torch.distributed.launch``, composer or deepspeed, whose options are alike,
    with the program behind; return no words. Options without a key of hpc-ddp are lost. Variables
    and arguments that composer and the older launchers give to their programs are added."""
    launch.kind, launch.weight = "torchrun", 4
    take_python_beside(words[0], launch)
    name, line = words[0].text.rsplit("/", 1)[-1], words[0].line
    uses = _TORCHRUN | ({".*": "lost"} if name in ("composer", "deepspeed") else {})
    if name not in ("torchrun", "run", "launch", *LAUNCHERS):
        launch.mark(line, "", f"{name} is taken to be torchrun")
    launch.take_program(launch.take_options(words, Options(uses, _TORCHRUN_FLAGS), scope))
    options = launch.options
    nodes, at = options.get("nnodes") or options.get("nnode") or (None, 0)  # as argparse has it
    of_nodes = 1 if "standalone" in options else whole_number(nodes, scope)
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
        if whole_number(count, scope) is None and not (count and _ALL_GPUS.fullmatch(count.text)):
            text = "only the job knows it: nproc-per-node = N"
            launch.mark(at, LOST, f"{name} --{option}: {text}")
    if name == "composer":
        launch.add("worker-setup", literal("export NODE_RANK=$GROUP_RANK", line))
    if name == "deepspeed":
        launch.mark(line, "", "the launcher deepspeed: torchrun starts the workers in its place")
        chosen, at = options.get("include") or options.get("i") or (None, 0)
        if chosen and (match := re.fullmatch(r"localhost:(\d+(?:,\d+)*)", chosen.text)):
            launch.workers = launch.workers or match[1].count(",") + 1
        elif chosen:
            launch.mark(at, LOST, "deepspeed --include: nodes = N, nproc-per-node = N")
    is_without = bool({"use-env", "no-local-rank"} & options.keys())
    if name in ("launch", "deepspeed") and launch.program and not is_without:
        launch.args.insert(0, literal("--local_rank=$LOCAL_RANK", line))
        launch.add("expand", literal("LOCAL_RANK", line))
    return []
