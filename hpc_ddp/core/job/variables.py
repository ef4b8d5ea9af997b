"""The environment variables of a job: those that hpc-ddp sets, and those filled into texts.

A text of the job (an argument, a value of ``env``, an image …) is literal. Only ``$NAME`` and
``${NAME}`` of the names in `JobSpec.expand` stand for the values that these variables have in the
job: docs/decisions/017-variables.md. An argument that is ``${NAME[@]}`` stands for all elements of
an array that set-up lines fill, where `expand` has ``NAME[@]``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

# A part of a name, in any case, that makes its value a secret.
SECRET_NAME = (
    r"TOKEN(?!IZER|S)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTHORIZATION|COOKIE"
    r"|JWT|(?:GH|GITHUB|GITLAB|AZURE|ADO|HF)_PAT(?![^\W_])"
    r"|(?<![^\W_])(?:API|ACCESS|PRIVATE)?_?KEY(?![^\W_])"
)
# The same for bash, in capitals, and with a few names more.
SECRET_NAME_OF_BASH = (
    "TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTHORIZATION|COOKIE"
    "|JWT|(GH|GITHUB|GITLAB|AZURE|ADO|HF)_PAT(_|$)|(^|_)(API|ACCESS|PRIVATE)?_?KEY(_|$)"
)
URL_WITH_PASSWORD = r"(://[^/\s:@]*:)[^/\s@]+(?=@)"  # https://user:password@host
URL_WITH_PASSWORD_OF_BASH = "://[^/[:space:]:@]*:[^/[:space:]@]+@"

LONGEST_ARRAY = 100_000  # characters of a variable; Linux starts no process beside one of 128 KiB
# The variables by which torchrun makes a process a rank of a world, as a regular expression. Other
# names with TORCHELASTIC_ are settings of a user's, which torchrun reads.
OF_A_RANK = (
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|TORCHELASTIC_(RUN_ID|RESTART_COUNT|MAX_RESTARTS|USE_AGENT_STORE|ERROR_FILE"
    r"|SIGNALS_TO_HANDLE)"
)
# As `worker.task_variables` sets them, also below torchrun.
_OF_A_TASK = (
    r"SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|NTASKS_PER_NODE|TASKS_PER_NODE"
    r"|STEP_NUM_TASKS|STEP_TASKS_PER_NODE)"
)
# Their values differ between the nodes or the workers of a job.
_OF_A_WORKER = re.compile(rf"{OF_A_RANK}|{_OF_A_TASK}|GROUP_WORLD_SIZE|HOSTNAME|SLURMD_NODENAME")


class UserVariable(NamedTuple):
    """A variable of hpc-ddp that users may set: its effect, the values that it accepts, in words
    and as a regular expression, and an example of one."""

    effect: str
    accepted: str
    pattern: str = ".*"
    example: str = ""

    def accepts(self, text: str) -> bool:
        """Return whether `text` is an accepted value, or empty, which stands for no value."""
        return not text or re.fullmatch(self.pattern, text) is not None


_SECONDS = r"(\d+\.?\d*|\.\d+)"
# All others of hpc-ddp are its own.
OF_USERS = {
    "HPC_DDP_RUNS": UserVariable(
        "The folder of all run folders, unless `runs-dir` is set.", "a folder"
    ),
    "HPC_DDP_SITE_FILE": UserVariable(
        "The operators' site file, in place of `/etc/hpc-ddp/site.toml`.", "a file"
    ),
    "HPC_DDP_SAVE_EVERY": UserVariable(
        "In place of the script's `save_every`.", "seconds, or `auto`", f"{_SECONDS}|auto", "300"
    ),
    "HPC_DDP_HANG_AFTER": UserVariable(
        "In place of the script's `hang_after`.", "seconds; 0: never", _SECONDS, "1800"
    ),
    "HPC_DDP_PROFILE": UserVariable(
        "In place of the script's `profile`.", "two steps, as `10:15`", r"\d+:\d+", "10:15"
    ),
    "HPC_DDP_BACKEND": UserVariable("In place of the script's `backend`.", "as `gloo`"),
    "HPC_DDP_DRY_RUN_DEVICES": UserVariable(
        "A dry run uses this machine's GPUs; with `shared` its workers share them.",
        "`1`, or `shared`",
    ),
}
# In a worker each of these has hpc-ddp's value, or none, whatever the job's environment has.
_OF_HPC_DDP = re.compile(
    rf"{OF_A_RANK}|{_OF_A_TASK}|GROUP_WORLD_SIZE|HPC_DDP_\w+|PET_\w+"
    r"|PALS_\w+|MPI_LOCAL\w+|MV2_COMM_WORLD_\w+|OMPI_(COMM_WORLD_\w+|UNIVERSE_SIZE|APP_\w+)"
)
# Slurm sets these, for a job and its step; another value misleads srun, or a script that reads it.
_OF_SLURM = re.compile(
    r"SLURM_(JOB_\w+|JOBID|STEP_\w+|STEPID|ARRAY_\w+|NNODES|NODELIST|NODE_ALIASES|TASK_PID|GTIDS"
    r"|CLUSTER_NAME|RESTART_COUNT|SUBMIT_\w+|EXPORT_ENV|DISTRIBUTION|WAIT|KILL_BAD_EXIT|NO_KILL"
    r"|OVERLAP|EXCLUSIVE|LABELIO|STDOUTMODE|STDERRMODE|CPUS_PER_TASK)"
)
# torchrun's workers have none of these. Other launchers' are tasks of an MPI, which has settings.
_OF_PMI = re.compile(r"PMI2?_(?!DEBUG|MMAP)\w+|PMIX_(?!MCA_)\w+|SLURM_(PMI|MPI_)\w*")
_OF_A_PMI_TASK = re.compile(r"PMI2?_(RANK|SIZE|ID|FD|PORT|JOBID)|PMIX_(RANK|NAMESPACE)")


# A later job of a run has other values of these than its first one, which set-up lines may read.
OF_FIRST_JOB = (
    "HPC_DDP_FIRST_START",
    *("SLURM_RESTART_COUNT", "SLURM_SUBMIT_DIR", "SLURM_ARRAY_TASK_COUNT"),
    *("SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_STEP"),
)


def export_lines(values: Mapping[str, str]) -> str:
    """Return a line ``export NAME=value`` for bash for each of the variables, with the value
    quoted."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())


def is_of_worker(name: str) -> bool:
    """Return whether a variable has other values in other workers, or on other nodes, so that its
    value is known only there."""
    return bool(_OF_A_WORKER.fullmatch(name))


def is_of_hpc_ddp(name: str, launcher: str = "torchrun") -> bool:
    """Return whether a worker has hpc-ddp's value of the variable `name`, or none, and never the
    user's. `launcher` is the job's: torchrun's workers have no variables of a PMI."""
    of_pmi = _OF_PMI if launcher == "torchrun" else _OF_A_PMI_TASK
    is_ours = _OF_HPC_DDP.fullmatch(name) or of_pmi.fullmatch(name)
    return bool(is_ours) and name not in OF_USERS


def is_of_slurm(name: str) -> bool:
    """Return whether Slurm sets a variable of this name in a job or its step, or reads it as an
    option of the step."""
    return bool(_OF_SLURM.fullmatch(name))


def _marks(names: Collection[str]) -> re.Pattern[str]:
    """Return the pattern of ``$NAME`` and ``${NAME}`` for the given names. As in bash, a longer
    name that begins with one of them does not match."""
    names_pattern = "|".join(map(re.escape, names)) or "(?!)"  # without a name nothing fits
    return re.compile(rf"\$(?:({names_pattern})(?![A-Za-z0-9_])|\{{({names_pattern})\}})")


def names_in(text: str, names: Collection[str]) -> list[str]:
    """Return those of `names` that `text` has as ``$NAME`` or ``${NAME}``, in the order of the
    text; a name that is there twice comes twice."""
    return [match[1] or match[2] for match in _marks(names).finditer(text)]


def fill(text: str, names: Collection[str], values: Mapping[str, str]) -> str:
    """Return `text` with each ``$NAME`` and ``${NAME}`` of `names` replaced by its value. All else
    stays as it is, also a ``$`` in a value. Raise KeyError for a name without a value."""
    return _marks(names).sub(lambda match: values[match[1] or match[2]], text)


def shell_word(text: str, names: Collection[str] = ()) -> str:
    """Return `text` quoted as one word for bash, which fills in the variables of `names`; where a
    variable is not set, the shell fails with a message. ``${NAME[@]}`` becomes a word for each
    element of the array."""
    words, end = [], 0  # a literal, a name, a literal, a name …
    for match in _marks(names).finditer(text):
        words += [text[end : match.start()], match[1] or match[2]]
        end = match.end()
    if not words:
        return shlex.quote(text)
    literals = [shlex.quote(word) if word else "" for word in (*words[::2], text[end:])]
    marks = [f'"${{{name}?is not set, and --expand names it}}"' for name in words[1::2]] + [""]
    return "".join(part for pair in zip(literals, marks, strict=True) for part in pair)


def array_exports(names: Collection[str]) -> str:
    """Return the lines of bash that pass the arrays among `names`, as ``NAME[@]``, on to the
    workers; '' where there is none.

    An array that is set becomes a variable ``HPC_DDP_WORDS_NAME``, with an ASCII unit separator
    before each element. Where that has more than `LONGEST_ARRAY` characters, it is not passed on,
    and a message goes to stderr: no process could be started with such a variable.
    """
    lines = []
    for name in (name.removesuffix("[@]") for name in names if name.endswith("[@]")):
        words = f"HPC_DDP_WORDS_{name}"
        message = (
            f"hpc-ddp: --expand passes on at most {LONGEST_ARRAY} characters; {name} has more."
            " hint: read them in the script"
        )
        # The elements joined without IFS, each behind a unit separator.
        lines += [
            f"! declare -p {name} >/dev/null 2>&1 || {{ IFS=; export"
            f" {words}=\"${{{name}[*]/#/$'\\x1f'}}\"; IFS=$' \\t\\n'",
            f'[ "${{#{words}}}" -le {LONGEST_ARRAY} ] ||'
            f' {{ unset {words}; echo "{message}" >&2; }}; }}',
        ]
    return "\n".join(lines)


def misplaced_array(texts: Sequence[str], args: Sequence[str], names: Collection[str]) -> str:
    """Return the first of the arrays in `names`, as ``NAME[@]``, that stands where it can't be
    filled in: in one of `texts`, or in one of `args` that is more than ``${NAME[@]}`` alone. Return
    '' where there is none."""
    arrays = [name for name in names if name.endswith("[@]")]
    parts = [word for word in args if word[2:-1] not in arrays]  # the name in ${…}
    return next((name for text in (*texts, *parts) for name in names_in(text, arrays)), "")


def literal_names(texts: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the marks in `texts` that a shell would fill in and the job does not, as ``$NAME``,
    ``$(`` or a backtick, since `names` lacks them: each once, in the order of the texts."""
    marks = (re.findall(r"\$\{?[A-Za-z_]\w*\}?|\$\(|`", _marks(names).sub("", t)) for t in texts)
    return list(dict.fromkeys(mark for row in marks for mark in row))
