"""The launchers of PyTorch's workers: torchrun, composer, deepspeed.

A function that reads a launcher (`launch_reader.Handler`) gets all words from the launcher's name
on. It puts what they say into the launch, and returns the words that are left for the function of
the next launcher.
"""

from __future__ import annotations

import re

from hpc_ddp.core.job.option_checks import TORCHRUN_SETTLED
from hpc_ddp.submission.job_script.bash.counts import whole_number
from hpc_ddp.submission.job_script.bash.variables import Scope
from hpc_ddp.submission.job_script.bash.words import Part, Word, literal
from hpc_ddp.submission.job_script.conversion import LOST
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.launchers.option_names import LAUNCHERS, Options
from hpc_ddp.submission.job_script.launchers.unknown_words import (
    Kind,
    kind_before_program,
    take_all_options,
)

# The options of torchrun, and their uses (see `Launch.take_options`).
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

# Options by which a launcher knows the number of nodes.
_NODES = {"nnodes", "nnode", "num-nodes", "hostfile", "world-size", "standalone"}
_ALL_GPUS = re.compile(
    r"gpu|auto|\$\{?SLURM_GPUS_(ON_NODE|PER_(NODE|TASK))\}?"
)  # a worker for each
_CUT_GPUS = re.compile(
    r"(\$\(|`)\s*echo\s+[\"']?\$\{?SLURM_GPUS_(ON_NODE|PER_NODE)\}?[\"']?"
    r"\s*\|\s*(sed|tr|cut|awk|grep)\s[^|;&$`]*[)`]"
)
_TORCHRUN_FLAGS = re.compile(
    "standalone|module|m|no-python|run-path|use-env|v|verbose"
    # Of composer and deepspeed.
    "|module-mode|command-mode|c|no-ssh(-check)?|no-local-rank|force-multi|save-pid"
    "|bind-cores-to-rank|elastic-training"
)

# The argument that older launchers add.
OF_OLD_LAUNCHERS = "--local_rank=$LOCAL_RANK"


def take_python_beside(launcher: Word, launch: Launch) -> None:
    """Set ``python`` of a launch, with a note, to ``$ENV/bin/python`` for the `launcher`
    ``$ENV/bin/torchrun``. Nothing changes if ``python`` is set, for a launcher without a folder,
    and for a folder of the system or ``~/.local/bin``, whose Python is elsewhere."""
    *before, last = launcher.parts
    folder, slash, name = last.text.rpartition("/")
    is_elsewhere = folder.endswith(".local/bin") or folder in ("/usr/bin", "/usr/local/bin")
    if slash and name in LAUNCHERS | {"torchrun"} and not (last.is_code or is_elsewhere):
        python = Word((*before, Part(f"{folder}/python")), launcher.line)
        launch.settings.setdefault("python", [python])
        launch.mark(launcher.line, "", f"python: the one beside {name}, {python.text}")


def take_program_of_workers(
    words: list[Word], rules: Options, launch: Launch, scope: Scope, launcher: str
) -> None:
    """Read the options of a `launcher` of workers, `words`, by `rules` into `launch`, and set its
    program and arguments to the words behind them. Options that only the job knows are marked as
    lost. So is a first word that may be an option or the program: then there is no program."""
    is_torchrun = launcher in ("torchrun", "run", "launch")
    key = "torchrun = […]" if is_torchrun else f"see {launcher}'s own page"
    behind, kind = take_all_options(words, rules, launch, scope, kind_before_program, launcher, key)
    if kind == Kind.UNKNOWN:
        text = f"{launcher} {behind[0].text}: only the job knows whether it is the program"
        launch.mark(behind[0].line, LOST, f"{text}: script = …, args = […]")
    else:
        launch.take_program(behind)
        if launch.args and launch.args[0].text == "--":  # argparse of the launcher swallows it
            del launch.args[0]


def read_torchrun(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read torchrun, ``torch.distributed.launch``, composer or deepspeed, whose options are alike,
    with the program behind; return no words. Options of composer and deepspeed without a key of
    hpc-ddp are lost, those of torchrun are kept. The variable NODE_RANK, which composer sets, and
    the argument ``--local_rank``, which older launchers add, are added to the launch."""
    launch.kind, launch.weight = "torchrun", 4
    take_python_beside(words[0], launch)
    name, line = words[0].text.rsplit("/", 1)[-1], words[0].line
    uses = _TORCHRUN | ({".*": "lost"} if name in ("composer", "deepspeed") else {})
    if name not in ("torchrun", "run", "launch", *LAUNCHERS):
        launch.mark(line, "", f"{name} is taken to be torchrun")
    take_program_of_workers(words, Options(uses, _TORCHRUN_FLAGS), launch, scope, name)
    _take_nodes(name, launch, scope)
    _take_workers(name, launch, scope)
    if name == "composer":
        launch.add("worker-setup", literal("export NODE_RANK=$GROUP_RANK", line))
    if name == "deepspeed":
        launch.mark(line, "", "the launcher deepspeed: torchrun starts the workers in its place")
        _take_included_gpus(launch)
    has_no_argument = bool({"use-env", "no-local-rank"} & launch.options.keys())
    if name in ("launch", "deepspeed") and launch.program and not has_no_argument:
        if name == "launch":
            text = "from torch 2.0 on the launcher passes --local-rank: write that, if it is meant"
            launch.mark(line, "", f"{OF_OLD_LAUNCHERS.partition('=')[0]}: {text}")
        launch.args.insert(0, literal(OF_OLD_LAUNCHERS, line))
        launch.add("expand", literal("LOCAL_RANK", line))
    return []


def _take_nodes(name: str, launch: Launch, scope: Scope) -> None:
    """Take over what the options of the launcher `name` say of nodes: the launch's `nodes` are 1
    for ``--nnodes=1`` and ``--standalone``, unless a step has a number of its own or the
    directives'; `machines` is 1 where no option tells of other nodes, else None. Another number
    than the job's, and a range (``1:4``) that begins with another, are marked as lost."""
    options = launch.options
    nodes, at = options.get("nnodes") or options.get("nnode") or (None, 0)  # as argparse has it
    count = 1 if "standalone" in options else whole_number(nodes, scope)
    is_of_batch_script = not (launch.step or launch.in_loop)  # on the first node, whatever others
    if count == 1 and (is_of_batch_script or "SLURM_NNODES" not in scope.numbers):
        launch.nodes = launch.nodes or 1
    elif count not in (None, scope.numbers.get("SLURM_NNODES")):
        option = "--standalone" if "standalone" in options else "--nnodes"
        text = f"{name} {option}: another number than the job's nodes"
        launch.mark(at or launch.line, LOST, text)
    # composer may have WORLD_SIZE.
    launch.machines = None if _NODES & options.keys() or name == "composer" else 1
    least = re.fullmatch(r"(\d+):\d+", nodes.text) if nodes else None
    if least and int(least[1]) != scope.numbers.get("SLURM_NNODES", 1):
        launch.mark(at, LOST, f"{name} --nnodes: elastic = true, with nodes = …")


def _take_workers(name: str, launch: Launch, scope: Scope) -> None:
    """Take 1 for the launch's number of workers if the launcher `name` starts one by default, and
    has no number. A number that only the job knows is marked as lost, unless it is that of the
    node's GPUs."""
    counts = ("nproc-per-node", "nproc", "n", "num-gpus")
    if not {*counts} & launch.options.keys() and name not in ("composer", "deepspeed"):
        launch.workers = 1
    for option in (key for key in counts if key in launch.options):
        count, at = launch.options[option]
        is_of_gpus = count is not None and bool(_ALL_GPUS.fullmatch(count.text))
        if count and whole_number(count, scope) is None and _is_cut_from_gpus(count, scope):
            launch.mark(at, "", f"{name} --{option}: taken to be the number of a node's GPUs")
            is_of_gpus = True
        if whole_number(count, scope) is None and not is_of_gpus:
            is_empty = count is not None and count.is_static and not count.text
            is_blank = count is not None and count.is_static and count.text[:1] == "<"
            reason = "it is empty" if is_empty else "only the job knows it"
            text = f"{'a placeholder' if is_blank else reason}: nproc-per-node = N"
            launch.mark(at, LOST, f"{name} --{option}: {text}")


def _is_cut_from_gpus(word: Word, scope: Scope) -> bool:
    """Return whether a word, or the value of the variable that it is, is what a command such as sed
    makes of Slurm's number of a node's GPUs."""
    assigned = scope.values.get(word.names[0]) if word.names else None
    code = assigned.text if isinstance(assigned, Word) else word.text
    return bool(_CUT_GPUS.fullmatch(code))


def _take_included_gpus(launch: Launch) -> None:
    """Take the number of workers from deepspeed's ``--include localhost:0,1``, unless it is set.
    Another form of that option is marked as lost."""
    included, at = launch.options.get("include") or launch.options.get("i") or (None, 0)
    if included and (match := re.fullmatch(r"localhost:(\d+(?:,\d+)*)", included.text)):
        launch.workers = launch.workers or match[1].count(",") + 1
    elif included:
        launch.mark(at, LOST, "deepspeed --include: nodes = N, nproc-per-node = N")
