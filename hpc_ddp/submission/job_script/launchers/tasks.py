"""The launchers of tasks, each of which starts the next one.

How the functions are called, `torchrun.py` says.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
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
from hpc_ddp.submission.job_script.launchers.unknown_words import (
    Kind,
    kind_before_command,
    skip_unknown_options,
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

# Names of programs, without their folders, that train, and of those that prepare a training.
TRAINS = re.compile(
    r"(?:^|[_. -])(?:v\d_)?(?:pre|re)?train(?:er|ing)?(?![a-z])|fine[_-]?tun"
    r"|(?:^|[_. -])(?:sft|dpo|ddp|main|run|agent|fit|launch)(?![a-z])", re.I
)  # fmt: skip
PREPARES = re.compile(
    r"(?:^|[_. -])(?:prep|download|data|convert|tokeni|extract|split|cache|build|setup|install"
    r"|check|clean|copy|stage|unzip|fetch)|^(?:config|create|generat|make|activate|load|init|env)",
    re.I,
)  # fmt: skip
TESTS = re.compile(r"eval|test|infer|predict|bench|plot", re.I)  # in names of programs
# In the name of a program or its first argument: what finishes a run's results.
_FINISHES = re.compile(
    r"(?:^|[_. /-])(?:finali|finish|meta|report|summar|aggregat|merge|collect|upload|export|notif"
    r"|post|archiv|publish)", re.I
)  # fmt: skip
# Arguments by which a program tests a model: --eval, --test_only, --do_predict, --mode test.
_TESTING = re.compile(
    r"(?<!\S)--?(do_)?(eval(uate)?|test|infer(ence)?|predict)([-_]only)?(?!\S)"
    r"|(?<!\S)--?(mode|phase|stage|task)[ =](eval|test|infer|predict)", re.I
)  # fmt: skip
# Names and options of a program that may train, though its name does not say so.
_MAY_TRAIN = re.compile(
    r"(train|tun(e|ing)|stage|phase|distil|adapt|learn|ppo|grpo|align|prun|(?<![a-z])rl)", re.I
)
_TRAINS_BY = re.compile(
    r"(?<![\w-])([\w.+-]*[-._+])?(epochs?|lr|learning[-_]rate|optim(izer)?|max[-_]steps)(?=[\s=]|$)",
    re.I,
)
# A program of Python in a text, without its folder or package, and its arguments.
_PROGRAM = re.compile(
    r"\bpython[\d.]*\s+(-[A-Za-ln-z]\s+)*(-m\s+(\w+\.)*|([^\s-]\S*/)?)(?P<name>[\w-]+)(\.py\b)?"
    r"(?P<arguments>(\\\n|[^;&|\n])*)"
)
_LAUNCHER = re.compile(
    r"\b((torchrun\S*|deepspeed|accelerate|srun|mpirun|mpiexec|ibrun)\s|torch\.distributed\.)"
)
# Commands behind whose names other words than a program's stand.
_STARTS_NONE = re.compile(
    r"source|\.|cd|pushd|export|unset|alias|trap|type|which|read|module|ml|conda|mamba|spack|docker"
    r"|podman|make|cmake|git|sbatch|salloc|ssh|tmux|screen|jupyter\S*|tensorboard|wget|curl"
)
# Commands that surely train nothing.
_NO_TRAINING = re.compile(
    r"(.*/)?(hostname|nvidia-smi|rocm-smi|echo|mkdir|cp|mv|rm|ls|cat|date|sleep|ray|rsync|tar|unzip"
    r"|env|printenv|pkill|kill|killall|chmod|chown|ln|true|test|find|lscpu|ip|ifconfig|which|df|du"
    r"|sbcast|enroot|nvcc|pip3?|wget|curl|git|touch|tee|sed|awk|grep|free|uptime|whoami"
    r"|id|pwd|gzip|gunzip|zstd|unsquashfs|scontrol|ping)"
)


def srun_in_place_of_ssh(words: list[Word]) -> list[Word]:
    """Return the words of an srun that starts the command which an ssh starts on a node: ``srun
    bash -c "python train.py"`` for ``ssh -q $NODE python train.py``. Without a command return
    `words`, those of the ssh."""
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
    remaining = launch.take_options(options, _MPIRUN, scope)
    names = launch.step, f"{launch.step} = […]"
    return skip_unknown_options(
        options, remaining, _MPIRUN, launch, scope, kind_before_command, names
    )[0]


def read_horovodrun(words: list[Word], launch: Launch, scope: Scope) -> list[Word]:
    """Read horovodrun with its options into `launch`, with a note that mpirun starts the tasks in
    its place; return the words behind them."""
    launch.step = "mpirun"
    launch.mark(words[0].line, "", "horovodrun: mpirun starts the tasks in its place")
    remaining = launch.take_options(words, _HOROVODRUN, scope)
    names = "horovodrun", "mpirun = […]"
    return skip_unknown_options(
        words, remaining, _HOROVODRUN, launch, scope, kind_before_command, names
    )[0]


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
    if not _NO_TRAINING.fullmatch(words[0].text):
        launch.weight, launch.program, launch.args = 2, words[0], words[1:]
        launch.add("no-python", words[0])


def only_ends_run(name: str, arguments: str) -> bool:
    """Return whether a program tests a model or finishes a run's results, by its `name` or
    `arguments`, and does not train."""
    first = re.match(r"\s*[\w-]*", arguments)[0]  # type: ignore[index]
    finishes = _FINISHES.search(f"{name} {first}") and not _MAY_TRAIN.search(first)
    is_last = TESTS.search(name) or finishes
    return bool(_TESTING.search(arguments) or (is_last and not TRAINS.search(name)))


def follows_training(name: str, arguments: str, training: Launch) -> bool:
    """Return whether a program of Python behind the `training`, by its `name` and `arguments`, is
    no second training: it tests or finishes a run, or nothing of it says that it may train. Where
    the training itself is plain Python whose name says nothing, any other program may train."""
    program, name = (
        re.sub(r"\.py$", "", n).rsplit(".", 1)[-1] for n in (program_name(training), name)
    )
    is_clear = "$" not in name and (training.weight > 1 or TRAINS.search(program))
    words = f"{name} {arguments.strip().partition(' ')[0]}"  # the first may be a command
    may_train = bool(TRAINS.search(name) or _MAY_TRAIN.search(words))
    may_train |= name == program or bool(_TRAINS_BY.search(arguments))
    return only_ends_run(name, arguments) or bool(is_clear and not may_train)


def programs_follow_training(text: str, training: Launch | None) -> bool:
    """Return whether each Python program that a `text` behind the `training` starts, one at least,
    is no second training; below a launcher it must test or finish a run."""
    programs = [(match["name"], match["arguments"]) for match in _PROGRAM.finditer(text)]
    if training is None or _LAUNCHER.search(text):
        return bool(programs) and all(only_ends_run(*program) for program in programs)
    return bool(programs) and all(follows_training(*program, training) for program in programs)


def program_name(launch: Launch) -> str:
    """Return the name of a launch's program, without its folder: of a tool that starts it, as in
    ``uv run python train.py``, or a shell, the first word behind that is a file or follows ``-m``.
    """
    texts = [word.text for word in (launch.program, *launch.args) if word]
    if texts and "no-python" in launch.settings and is_launcher(texts[0]):
        is_module = (before == "-m" for before in texts)
        files = (text for text, is_one in zip(texts[1:], is_module, strict=False)
                 if is_one or re.search(r"\.(py|sh)$", text))  # fmt: skip
        texts[0] = next(files, texts[0])
    return "".join(texts[:1]).rsplit("/", 1)[-1]


def prepares_training(launch: Launch) -> bool:
    """Return whether the name of a launch's program says that it prepares a training."""
    return bool(PREPARES.search(program_name(launch)))


def may_train(words: Sequence[Word]) -> bool:
    """Return whether the form or the name of a command, `words`, suggests that it trains: ``bash
    run.sh``, ``./run.sh``, ``wandb agent a``, ``nnUNetv2_train 1``. One that prepares something by
    its name does not."""
    is_shell = words[0].text.rsplit("/", 1)[-1] in ("bash", "sh")
    if is_shell:  # bash -x run.sh
        words = [words[0], *itertools.dropwhile(lambda w: w.text.startswith("-"), words[1:])]
    names = [word.text.rsplit("/", 1)[-1] for word in words[:2]]
    is_file = is_shell or re.match(r"\.{0,2}/|\S+\.sh$", words[0].text)
    name = " ".join(names[1:] if is_shell else names[:1] if is_file else names)
    is_known = bool(is_file and name[:1] not in ("", "-")) or bool(TRAINS.search(name))
    return is_known and not (PREPARES.search(name) or _STARTS_NONE.fullmatch(names[0]))


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
