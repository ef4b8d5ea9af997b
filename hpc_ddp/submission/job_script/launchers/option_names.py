"""The names of launchers and their options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from hpc_ddp.core.job.slurm_options import SBATCH, SRUN, full_name
from hpc_ddp.core.job.variables import is_of_slurm
from hpc_ddp.submission.job_script.bash.words import Word

# Managers of environments, which run a program with ``run``.
MANAGERS = ("uv", "poetry", "pixi", "pdm", "pipenv", "hatch", "conda", "mamba", "micromamba")
# Commands that start another one, by their names.
MPIRUNS = ("mpirun", "mpiexec", "mpiexec.hydra", "ibrun", "orterun")
IMAGES = ("singularity", "apptainer", "shifter")
TOOLS = ("numactl", "nsys", "taskset", "timeout", "stdbuf", "nice", *MANAGERS)
LAUNCHERS = {
    *("srun", "composer", "deepspeed", "accelerate", "env", "scl", "bash", "sh", "horovodrun"),
    *("singularity_wrapper", *MPIRUNS, *IMAGES, *TOOLS),
}

# Options of sbatch and srun without a value, or with one in the same word.
FLAGS = re.compile(
    r"label|unbuffered|overlap|no-kill|verbose|quiet|pty|preserve-env|immediate|kill-on-bad-exit"
    r"|contiguous|oversubscribe|overcommit|multi-prog|spread-job|use-min-nodes|exclusive|requeue"
    r"|no-requeue|hold|get-user-env|parsable|reboot|exact|ignore-pbs|test-only|stepmgr|nice"
    r"|propagate|resv-ports|compress|bcast|whole|external|interactive|disable-status|no-allocate"
    r"|quit-on-interrupt|send-libs"
    r"|container-(writable|readonly)|(no-)?container-(mount-home|remap-root|entrypoint)"
)

# What srun's variables are named for, behind SLURM_, where that is no option's long name.
_OF_SRUN = re.compile(
    r"CPU_FREQ_REQ|CONF|DEBUG|DIST_\w+|EXIT_\w+|HOSTFILE|LLLP|MEM_BIND_\w+|MPI_TYPE|REMOTE_CWD"
    r"|REQ_SWITCH|SPANK_\w+|SRUN_\w+|STDINMODE|STEP_GRES|TIMELIMIT|UMASK|UNBUFFEREDIO|WAIT4SWITCH"
    r"|WORKING_DIR"
)


class Options(NamedTuple):
    """The options of a launcher, and how to read them."""

    uses: Mapping[str, str]  # an option's use (see `Launch.take_options`) by a pattern of names
    flags: re.Pattern[str]  # names of the options without a value
    letters: Mapping[str, str] = {}  # long names by letter
    names: str = ""  # all long names, with blanks between; a beginning will do

    def find_use(self, name: str) -> str:
        """Return an option's use: that of the first pattern that fits its `name`. Each launcher has
        a pattern for all other names."""
        return next(use for pattern, use in self.uses.items() if re.fullmatch(pattern, name))


def is_launcher(text: str) -> bool:
    """Return whether `text` is the name or path of a launcher (`LAUNCHERS`), of Python in any
    version, or of a site's own launcher whose name begins with ``torchrun``."""
    name = text.rsplit("/", 1)[-1]
    return name in LAUNCHERS or bool(re.match(r"python|torchrun[\w-]*$", name))


def is_option_of_step(name: str) -> bool:
    """Return whether srun reads the variable `name` as an option of its step, as SLURM_CPU_BIND, or
    sbatch as one of a job, or whether Slurm sets it for a step itself."""
    start, _, option = name.partition("_")
    is_option = option.lower().replace("_", "-") in SRUN.split() or _OF_SRUN.fullmatch(option)
    of_slurm = start == "SLURM" and (is_option or is_of_slurm(name))
    return start in ("SBATCH", "SRUN") or bool(of_slurm)


def is_of_pyxis(name: str) -> bool:
    """Return whether `name` is a long option of pyxis, as ``container-image``, which sbatch hands
    on to the steps."""
    return "container-" in name and name not in SBATCH.split()


def option_name(word: Word, letters: Mapping[str, str], names: str = "") -> tuple[str, Word | None]:
    """Return an option's long name, without the dashes before it and with ``-`` for ``_``, and its
    value if that is in the same `word`, else None.

    - ``--np=3`` and ``-np=3`` are "np" with 3
    - ``-n3`` is "ntasks" with 3, if `letters` has the long name of "n"; without it "n" with 3
    - ``-np`` is "np" where `letters` is empty
    - ``--part`` is "partition", if `names` (a text with blanks between long names) has that name
      and no other with this beginning
    """
    text = word.text
    if letters and re.match(r"-\w", text):
        return letters.get(text[1], text[1]), word.without_start(2) if len(text) > 2 else None
    head = text.partition("=")[0]
    operand = word.without_start(len(head) + 1) if "=" in text else None
    name = head.lstrip("-").replace("_", "-")
    return full_name(name, names) if names else name, operand
