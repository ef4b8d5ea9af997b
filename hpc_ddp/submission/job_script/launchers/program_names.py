"""The purpose of a program, by its name and arguments: training, its preparation, a test …"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from hpc_ddp.submission.job_script.bash.words import Word
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.launchers.option_names import is_launcher

# Names of programs, without their folders, that train; and of those that prepare a training.
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
# Commands of any shell that start the program behind them, or print it, and are no `LAUNCHERS`.
_STARTS_OTHERS = re.compile(
    r"xvfb-run|rye|pipx|dotenv|doppler|dvc|wandb|ray|ncu|rocprof\S*|perf|strace|echo|printf"
)
# Commands behind whose names other words than a program's stand.
_STARTS_NONE = re.compile(
    r"source|\.|cd|pushd|export|unset|alias|trap|type|which|read|module|ml|conda|mamba|spack|docker"
    r"|podman|make|cmake|git|sbatch|salloc|ssh|tmux|screen|jupyter\S*|tensorboard|wget|curl"
)


def only_ends_run(name: str, arguments: str) -> bool:
    """Return whether a program does not train, but tests a model or finishes a run's results (a
    report, an upload), by its `name` or `arguments`."""
    first = re.match(r"\s*[\w-]*", arguments)[0]  # type: ignore[index]
    finishes = _FINISHES.search(f"{name} {first}") and not _MAY_TRAIN.search(first)
    is_last = TESTS.search(name) or finishes
    return bool(_TESTING.search(arguments) or (is_last and not TRAINS.search(name)))


def follows_training(name: str, arguments: str, training: Launch) -> bool:
    """Return whether a program of Python that stands behind the `training` is no second training:
    by its `name` and `arguments` it tests a model or finishes a run, or nothing in them says that
    it may train. If the training itself is plain Python whose name says nothing, any other program
    may train."""
    program, name = (
        re.sub(r"\.py$", "", n).rsplit(".", 1)[-1] for n in (program_name(training), name)
    )
    is_clear = "$" not in name and (training.weight > 1 or TRAINS.search(program))
    words = f"{name} {arguments.strip().partition(' ')[0]}"  # the first may be a command
    may_train = bool(TRAINS.search(name) or _MAY_TRAIN.search(words))
    may_train |= name == program or bool(_TRAINS_BY.search(arguments))
    return only_ends_run(name, arguments) or bool(is_clear and not may_train)


def programs_follow_training(text: str, training: Launch | None) -> bool:
    """Return whether a `text` that stands behind the `training` starts Python programs, and each of
    them is no second training (`follows_training`). Where a launcher starts them, or `training` is
    None, each must test or finish a run (`only_ends_run`)."""
    programs = [(match["name"], match["arguments"]) for match in _PROGRAM.finditer(text)]
    if training is None or _LAUNCHER.search(text):
        return bool(programs) and all(only_ends_run(*program) for program in programs)
    return bool(programs) and all(follows_training(*program, training) for program in programs)


def program_name(launch: Launch) -> str:
    """Return the name of a launch's program without its folder, '' without a program. Where a tool
    or a shell starts it, that is the first word behind this which is a file or follows ``-m``:
    train.py of ``uv run python train.py``."""
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


def may_be_function(words: Sequence[Word]) -> bool:
    """Return whether a command, `words`, may be a function of a file that is sourced, which starts
    the program behind it: its first word is a name of no known command, and a launcher or Python
    follows, as in ``run python train.py``."""
    name = words[0].text if words else ""
    is_known = "/" in name or name.endswith(".sh") or is_launcher(name)
    is_known = is_known or bool(_STARTS_OTHERS.fullmatch(name) or _STARTS_NONE.fullmatch(name))
    return not is_known and any(is_launcher(word.text) for word in words[1:])
