"""The launchers of tasks (srun, mpirun), and commands before a program: env, bash, scl, ssh.

How the functions are called, `torchrun.py` says.
"""

from __future__ import annotations

import re
from dataclasses import replace

from hpc_ddp.core.job.slurm_options import NODE_BY_NODE, SHORT_OPTIONS, SRUN
from hpc_ddp.submission.job_script.bash.values import Counted
from hpc_ddp.submission.job_script.bash.variables import Scope
from hpc_ddp.submission.job_script.bash.words import Part, Word, join_words, literal
from hpc_ddp.submission.job_script.conversion import LOST, NO_COMPONENTS, OURS
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.launchers.option_names import (
    FLAGS,
    Options,
    is_launcher,
    option_name,
)
from hpc_ddp.submission.job_script.launchers.program_names import may_train
from hpc_ddp.submission.job_script.launchers.unknown_words import (
    Kind,
    kind_before_command,
    take_all_options,
)

_SRUN_USES = {
    "container-image": "=image",
    "(no-)?container-.*": "+container-options",
    "export": "env",
    "nodes": "#nodes",
    "ntasks": "#tasks",
    "ntasks-per-node": "#tasks_per_node",
    "cpus-per-task": "#cpus",
    "het-group|distribution": "later",
    "multi-prog|input": "lost",
    "output|error|label|jobid|overlap|kill-on-bad-exit|no-kill|wait|exact"
    "|nodelist|relative|partition|account|time|job-name|mem|gres|gpus|gpus-per-(node|task)"
    "|ntasks-per-gpu"
    "|unbuffered|quiet|verbose|exclusive|auto-resume": "ours",
    ".*": "+srun",
}

_SRUN = Options(_SRUN_USES, FLAGS, SHORT_OPTIONS, SRUN)

_MPI_FLAGS = (
    "(g|prte)?mca .*|allow-run-as-root|oversubscribe|tag-output|report-bindings|prepend-rank"
)

_MPIRUN_USES = {
    "x": "env",
    "np?|c": "#tasks",
    "N|npernode|ppn|perhost|ntasks-per-node": "#tasks_per_node",
    "map-by|rank-by|H|hosts?|hostfile|f|machinefile": "ours",
    f"bind-to|{_MPI_FLAGS}": "%mpirun",
    ".*": "lost",
}

_MPIRUN = Options(_MPIRUN_USES, re.compile(_MPI_FLAGS))

_HOROVODRUN_USES = {
    "np|num-proc": "#tasks",
    "H|hosts|hostfile|gloo|mpi|verbose|start-timeout|network-interfaces?": "ours",
    ".*": "lost",
}

_HOROVODRUN = Options(_HOROVODRUN_USES, re.compile("gloo|mpi|verbose|disable-cache"))

_ENV_LETTERS = {"u": "unset", "C": "chdir", "S": "split-string", "i": "ignore-environment",
                "a": "argv0", "0": "null", "v": "debug"}  # fmt: skip

_ENV_WITH_VALUE = ("unset", "chdir", "argv0")

_ENV_LOST = {
    "unset": 'setup or worker-setup = ["unset NAME"]',
    "chdir": "chdir = DIR, and script = DIR/…",
    "ignore-environment": 'workers need the job\'s variables: worker-setup = ["unset NAME"]',
}

_SSH_WITH_VALUE = re.compile("-[BbcDEeFIiJLlmOopQRSWw]")

# Commands that surely train nothing.
_NO_TRAINING = re.compile(
    r"(.*/)?(hostname|nvidia-smi|rocm-smi|echo|mkdir|cp|mv|rm|ls|cat|date|sleep|ray|rsync|tar|unzip"
    r"|env|printenv|pkill|kill|killall|chmod|chown|ln|true|test|find|lscpu|ip|ifconfig|which|df|du"
    r"|sbcast|enroot|nvcc|pip3?|wget|curl|git|touch|tee|sed|awk|grep|free|uptime|whoami"
    r"|id|pwd|gzip|gunzip|zstd|unsquashfs|scontrol|ping)"
)


def srun_in_place_of_ssh(words: list[Word]) -> list[Word]:
    """Return the words ``srun bash -c "python train.py"`` for those of ``ssh -q $NODE python
    train.py``. An ssh without a command is returned as it is."""
    remaining = words[1:]
    while remaining and remaining[0].text.startswith("-"):
        option = remaining.pop(0)
        if _SSH_WITH_VALUE.fullmatch(option.text):
            remaining = remaining[1:]
    if len(remaining) < 2:  # the host alone
        return words
    text = join_words(remaining[1], *(piece for word in remaining[2:] for piece in (" ", word)))
    return [*(literal(part, words[0].line) for part in ("srun", "bash", "-c")), text]


def read_srun(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read srun and its options into `launch`, and return the words behind them. An image makes
    pyxis the container tool. A variable among the options, as ``srun $OPTIONS -n 4 a.out``, is left
    out: with a note that it counts as unset, or as lost where the script sets it or may have set
    it."""
    launch.step = "srun"
    words = launch.take_first_component(words)
    remaining = launch.take_options(words, _SRUN, scope)
    # A word that the shell splits may be options, if options or a launcher follow.
    while len(remaining) > 1 and not is_launcher(remaining[0].text):
        is_before_command = remaining[1].text[:1] == "-" or is_launcher(remaining[1].text)
        is_split = remaining[0].parts[0].splits and is_before_command
        if not is_split and kind_before_command(remaining, scope) != Kind.OPTIONS:
            break  # it is the program
        unknown = remaining[0]
        is_set = {*unknown.names} & scope.values.keys() or scope.has_unknown_names
        if re.search("auto_?resume", unknown.text, re.I):  # SageMaker HyperPod's --auto-resume=1
            launch.mark(unknown.line, OURS, f"srun {unknown.text}")
        elif is_set or not all(part.name for part in unknown.parts):
            text = f"srun {unknown.text}: only the job knows it: srun = […]"
            launch.mark(unknown.line, LOST, text)
        else:
            launch.mark(unknown.line, "", f"{unknown.text} is taken to be unset: srun = […]")
        words = [words[0], *remaining[1:]]
        remaining = launch.take_options(words, _SRUN, scope)
    files = [launch.options[name][0] for name in ("output", "error") if name in launch.options]
    launch.outputs = [file.text for file in files if file and file.text != "/dev/null"]
    if group := launch.options.get("het-group"):
        text = f"{NO_COMPONENTS}: write this component's nodes = N, gpus-per-node = N"
        launch.mark(group[1], LOST, f"srun --het-group: {text}")
    order, at = launch.options.get("distribution", (None, 0))
    if order and order.text.lower() != "block" and NODE_BY_NODE.fullmatch(order.text):
        launch.add("srun", join_words("--distribution=", order))  # of a node's CPUs
    elif order:
        launch.mark(at, OURS, "srun --distribution")
    if "image" in launch.settings:
        launch.settings["container-tool"] = [literal("pyxis", words[0].line)]
    return remaining


def read_mpirun(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read mpirun, by any of its names, or ibrun, with its options into `launch`; return the words
    behind them."""
    launch.step = "ibrun" if words[0].text.endswith("ibrun") else "mpirun"
    options: list[Word] = []
    for word in launch.take_first_component(words):
        if options and options[-1].text in ("-genv", "-env") and "=" in word.text:  # of MPICH
            options[-1] = literal("-x", options[-1].line)
        elif len(options) > 2 and options[-2].text in ("-genv", "-env"):  # NAME VALUE
            word = join_words(options.pop(), "=", word)
            options[-1] = literal("-x", options[-1].line)
        # --mca NAME VALUE becomes one word: `take_options` knows no option with two values.
        if len(options) > 2 and re.fullmatch(r"--?(g|prte)?mca", options[-2].text):
            word = join_words(options[-2], " ", options[-1], " ", word)
            del options[-2:]
        options.append(word)
    name, key = launch.step, f"{launch.step} = […]"
    return take_all_options(options, _MPIRUN, launch, scope, kind_before_command, name, key)[0]


def read_horovodrun(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read horovodrun with its options into `launch`, with a note that mpirun starts the tasks in
    its place; return the words behind them."""
    launch.step = "mpirun"
    launch.mark(words[0].line, "", "horovodrun: mpirun starts the tasks in its place")
    name, key = "horovodrun", "mpirun = […]"
    return take_all_options(words, _HOROVODRUN, launch, scope, kind_before_command, name, key)[0]


LOGIN = (  # what a login shell reads: bash(1), INVOCATION
    ". /etc/profile; for REPLY in ~/.bash_profile ~/.bash_login ~/.profile; do"
    ' [ ! -r "$REPLY" ] || { . "$REPLY"; break; }; done'
)


def take_command(words: list[Word], launch: Launch) -> None:
    """Make a command that is no launcher, `words`, the program of `launch` (``no-python``), with
    the weight 2, unless it surely trains nothing, as mkdir. A launcher among its words gets a
    note."""
    inner = r"(.*/)?(torchrun|accelerate|deepspeed|composer)|torch\.distributed\.(run|launch)"
    is_kin = re.search(r"[_-](torchrun|accelerate|deepspeed)$", words[0].text)  # idr_accelerate
    texts = (text for word in words[1:] for text in word.text.split())
    if is_kin or any(re.fullmatch(inner, text) for text in texts):
        text = f"{words[0].text} starts a launcher of its own in each task, as it is written"
        launch.mark(words[0].line, "", f"{text}: its restarts and workers are not hpc-ddp's")
    is_ray = [word.text for word in words[1:2]] == ["symmetric-run"]  # with the program behind
    if is_ray:
        text = "ray symmetric-run: each task starts it, and it starts the workers"
        launch.mark(words[0].line, "", text)
    if is_ray or not _NO_TRAINING.fullmatch(words[0].text):
        launch.weight, launch.program, launch.args = 2, words[0], words[1:]
        launch.add("no-python", words[0])


def read_shell(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read ``bash -c '…'``: the text, a script of its own, becomes `inner`, and the arguments that
    are its ``$1`` and so on become `args`. In a task ``bash file``, and a text that is all code,
    become the program (`take_command`). In the batch script ``bash file`` is no launch. Return no
    words. Other options of bash get a note."""
    at = next((i for i, w in enumerate(words[:3]) if re.fullmatch(r"-[a-z]*c", w.text)), 0)
    text = words[at + 1] if at + 1 < len(words) else literal("")
    is_known = not launch.step or any(not p.is_code and p.text.strip() for p in text.parts)
    if at and is_known:  # 0: without -c
        launch.inner, launch.args = text, words[at + 3 :]
        launch.inner_name = [words[0], *words[at + 2 : at + 3]][-1]
        options = re.sub("[-c]", "", "".join(word.text for word in words[1 : at + 1]))
        if "l" in options:
            launch.inner = replace(text, parts=(Part(f"{LOGIN}; "), *text.parts))
            options = options.replace("l", "")
        if options:
            note = f'bash -{options}: left out: worker-setup = ["set -…", or "source …profile"]'
            launch.mark(words[0].line, "", note)
    elif launch.step or (scope.counted == Counted.COMMANDS and may_train(words)):
        take_command(words, launch)
    return []


def read_scl(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read ``scl enable NAME… -- COMMAND``, which runs a command with Red Hat's software
    collections: they become a line of ``setup``, or of ``worker-setup`` in a task. Return the
    words of the command; where it is one text, it becomes `inner`. No words are returned for
    another form."""
    at = next((i for i, word in enumerate(words) if word.text == "--"), len(words) - 1)
    if len(words) < 4 or words[1].text != "enable":
        return []
    pieces = [piece for word in words[2:at] for piece in (" ", word)]
    line = join_words("source scl_source enable", *pieces)
    launch.add("worker-setup" if launch.step else "setup", line)
    if words[at].text != "--":
        launch.inner, launch.inner_name = words[at], words[0]
        return []
    return words[at + 1 :]


def read_env(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read ``env`` and its options; return the words behind them: assignments and the program.
    Variables that ``-u`` names leave ``launch.env`` and go to ``launch.unset``; other options are
    lost. A command in one word (``-S``) is no launch: then no words are returned."""
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
        elif operand and name not in _ENV_WITH_VALUE and word.text[:2] != "--":
            remaining.insert(0, join_words("-", operand))  # -iu NAME is -i -u NAME
        if name == "unset" and operand and re.fullmatch(r"[A-Za-z_]\w*", operand.text):
            launch.env.pop(operand.text, None)
            launch.unset[operand.text] = word.line, bool(launch.step)
        else:
            # A mere - has no name, and means -i.
            hint = _ENV_LOST.get(name or "ignore-environment", "there is no such key")
            launch.mark(word.line, LOST, f"env {word.text}: {hint}")
    return remaining
