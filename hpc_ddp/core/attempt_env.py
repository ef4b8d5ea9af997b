"""Environments: `AttemptEnv`, the ``HPC_DDP_*`` variables of an attempt, from the batch script to
the workers; and those for Slurm's commands, without what an outer job has left."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.job.variables import OF_A_RANK, OF_USERS
from hpc_ddp.core.run_folder import RunFolder

# The variables whose names differ from their field's: torchrun's options and templates use them.
NAMES = {"min_nodes": "HPC_DDP_LEAST_NODES", "notice_signal": "HPC_DDP_SIGNAL"}
# In the batch script's environment, besides the attempt's variables: the id of the allocation in
# which the script runs, where Slurm requeues nothing; unset in a batch job.
INTERACTIVE = "HPC_DDP_INTERACTIVE"
AWAY_S = 900.0  # within which a disk comes back, as after a failover of its server
# With ``--stage``, of a worker: the file on its node that lists the files that Python opens, and
# the line in it by which rank 0 says that the first step is done.
OPENED_FILES, FIRST_STEP = "HPC_DDP_OPENED_FILES", "first step"
# The tree from which Python has started, and the end of the folder in PYTHONPATH whose code has
# Python list the files.
NEAR, HOOK = "HPC_DDP_NEAR", "/hpc_ddp/node/workers/staging/hook"


# What describes an outer job: with it, srun would bind to that one's CPUs. What names the cluster,
# and proves who asks, is the user's, and so are sbatch's own variables (see `slurm.submit_env`).
_INHERITED = re.compile(rf"(SLURM|SLURMD|SRUN|SALLOC|HPC_DDP)_|({OF_A_RANK})$")
# What describes a step in which a shell runs (``srun --pty``, or salloc's interactive step): other
# sruns there would take it for their options, such as the CPUs of that step's task.
_OF_A_STEP = re.compile(
    "SLURM_(CPU_BIND|MEM_BIND|GPU_BIND|TRES_BIND|TRES_PER_TASK|DIST|STEP|SRUN_COMM|PTY_|CPU_FREQ"
    "|PROCID|LOCALID|NODEID|GTIDS|TASK_PID|LAUNCH_NODE|EXACT|OVERLAP|EXPORT_ENV|UNBUFFEREDIO"
    "|LABELIO|KILL_BAD_EXIT|WAIT|IMMEDIATE|MPI_TYPE|STD(IN|OUT|ERR)MODE)"
)
_KEPT = (
    *("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"),
    *OF_USERS,  # of a shell or a script
)
# A supervisor sets these for its own node.
_OF_A_NODE = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "CCL_KVS_IFACE")


# sbatch's variables whose option has another name (man sbatch, INPUT ENVIRONMENT VARIABLES).
_OPTIONS = {
    **{"timelimit": "time", "array-inx": "array", "req-switch": "switches"},
    "mem-per-node": "mem",
}
# Options of which a job has one at most, or one that would undo another.
_FAMILIES = (
    {"gpus", "gpus-per-node", "gpus-per-task", "gres"},
    {"mem", "mem-per-cpu", "mem-per-gpu"},
    {"requeue", "no-requeue"},
    {"output", "error"},
)
# Options of Slurm's other commands (INPUT ENVIRONMENT VARIABLES of their man pages).
_OPTION_OF_ASKING = re.compile("(SQUEUE|SCANCEL|SCONTROL|SACCT|SINFO)_")
# With these sbatch would submit something else, or not return before the job's end.
_NEVER = {"array", "wait", "jobid", "no-kill"}
# Options by which sbatch chooses where a job runs; the next job of a chain is to have them, too.
_OF_PLACES = re.compile(
    "account|comment|constraint|core-spec|cpus-per-gpu|delay-boot|distribution|exclusive"
    "|gpu-(bind|freq)|gpus(-per-(node|task))?|gres(-flags)?|hint|mem(-bind|-per-(cpu|gpu))?|network"
    "|partition|power|profile|qos|reservation|switches|thread-spec|threads-per-core|time|tres-bind"
    "|tres-per-task|wckey"
)


@dataclass(frozen=True)
class AttemptEnv:
    """The values that the batch script, or the local back-end, passes to an attempt's processes.

    Attributes
    ----------
    run, attempt
        the run's folder, and the attempt's number
    nnodes, min_nodes
        the number of nodes, and with how many an elastic job continues
    head, port, rdzv_id
        host and port of torchrun's rendezvous, and its id, unique among what runs now
    end_time, warn_s
        the end of the job's time in unix seconds, None without a limit; how long before it the
        workers get a notice, in s
    notice_signal
        the notice for the workers, as ``TERM``
    fabric, host_suffix, interface
        the interconnect, the suffix of nodes' names on it, the network interface
    step_launcher
        the command that starts the supervisors
    resume_args, resume_if
        further arguments of the script from its second start on, quoted as for a shell; the file
        without which the script gets none of them, '' where it gets them in any case
    first_attempt
        the attempt that began the run anew (``--fresh``), 0 where none did
    warm_start
        1 if workers are forked from a process that has imported torch, 0 if each imports it
    preflight_shell
        process id of the batch script where torchrun's agents take part in the preflight, and start
        the workers after it; else 0
    restarts, cpus
        how often Slurm has requeued the job; CPUs of the smallest node
    node_index
        this node's index in `nodes`, where Slurm does not set it; None elsewhere

    Each value is short whatever the number of nodes: Linux starts no process with a variable of
    more than 128 KiB.
    """

    run: str = ""
    attempt: int = 0
    nnodes: int = 0
    min_nodes: int = 0
    head: str = ""
    port: int = 0
    rdzv_id: str = ""
    end_time: float | None = None
    warn_s: float = 0.0
    notice_signal: str = "TERM"
    fabric: str = ""
    host_suffix: str = ""
    interface: str = ""
    step_launcher: str = "srun"
    restarts: int = 0
    cpus: int = 1
    node_index: int | None = None
    resume_args: str = ""
    resume_if: str = ""
    first_attempt: int = 0
    warm_start: int = 0
    preflight_shell: int = 0

    @property
    def run_folder(self) -> RunFolder:
        """The run's folder. Raises KeyError without one: its path would lead to the files of the
        working directory."""
        if not self.run:
            raise KeyError(variable("run"))
        return RunFolder(Path(self.run))

    @property
    def attempt_folder(self) -> AttemptFolder:
        """The attempt's folder in the run's. Raises KeyError without a run."""
        return self.run_folder.attempt(self.attempt)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes, in the order of the ranks, read from the attempt's file.

        A disk that does not answer is waited for, for a minute; then OSError is raised. Raises
        ValueError or KeyError where the file is damaged, and KeyError without a run.
        """
        return self.attempt_folder.node_names

    def to_env(self) -> dict[str, str]:
        """Return the fields' values by the names of their variables: '' for None, times in whole
        seconds. The fields whose variables the batch script sets (`_OF_THE_SCRIPT`) are left
        out."""
        names = (item.name for item in fields(self) if item.name not in _OF_THE_SCRIPT)
        return {variable(name): _text_of_field(getattr(self, name)) for name in names}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> AttemptEnv:
        """Return the values of the variables in `environ`; a variable that is missing or empty
        leaves the field's default. Raise ValueError where the variable of a number holds something
        else."""
        texts = {item.name: environ.get(variable(item.name)) for item in fields(cls)}
        return cls(**{name: _parse_field(name, text) for name, text in texts.items() if text})


def variable(name: str) -> str:
    """Return the name of a field's variable, as ``HPC_DDP_ATTEMPT``."""
    return NAMES.get(name, f"HPC_DDP_{name.upper()}")


def _text_of_field(value: Any) -> str:
    """Return a field's value as text: a float rounded to a whole number, None as ''."""
    if isinstance(value, float):
        return f"{value:.0f}"
    return "" if value is None else str(value)


def _parse_field(name: str, text: str) -> Any:
    """Return the value of the field `name` from the text of its variable. Raise ValueError where
    the field is a number and the text is not."""
    if name in ("end_time", "warn_s"):
        return float(text)
    return int(text) if name in _INTEGERS else text


_OF_THE_SCRIPT = ("host_suffix", "interface", "step_launcher", "node_index", "preflight_shell")
_INTEGERS = (
    "attempt",
    "first_attempt",
    "nnodes",
    "min_nodes",
    "port",
    "restarts",
    "cpus",
    "node_index",
    "warm_start",
    "preflight_shell",
)


def clean_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without variables of an outer Slurm job, torchrun or hpc-ddp run.

    srun's settings of the user's profile (``SLURM_*``) are left out, too; and, on a node of a run,
    the variables that the node's supervisor has set: the network interface, and those of the
    trackers. The variables in `_KEPT` stay. In a process that runs from a copy of ``--stage``,
    paths in the copy become those of the installed environment, and paths in the node's folder of
    the copy are left out.
    """
    environ = _without_stage(environ)
    of_a_node = _OF_A_NODE if "HPC_DDP_NODE_FOLDER" in environ else ()
    of_trackers = environ.get("HPC_DDP_TRACKERS", "").split()  # names, see `trackers.SET_HERE`
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT or not (_INHERITED.match(name) or name in (*of_a_node, *of_trackers))
    }


def allocation_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ`, that of a shell inside an allocation, without the variables of the step
    that the shell may run in. SLURM_NNODES becomes the allocation's number of nodes, where that is
    known."""
    env = {name: text for name, text in environ.items() if not _OF_A_STEP.match(name)}
    nodes = environ.get("SLURM_JOB_NUM_NODES")
    return env | ({"SLURM_NNODES": nodes} if nodes else {})


def _without_stage(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return `environ` as it was before ``stage.sh`` turned its paths to this node's folder;
    `environ` itself in a process without ``--stage``. A variable of which no path remains is left
    out."""
    folder, near = os.path.dirname(environ.get(OPENED_FILES, "")), environ.get(NEAR, "")
    if not folder:
        return environ
    before = {}
    for name, text in environ.items():
        # NEAR before a path makes it one in the copy; the folder's own paths are `stage.sh`'s.
        parts = [part.removeprefix(near) for part in text.split(":")]
        parts = [part for part in parts if not (part.startswith(folder) or part.endswith(HOOK))]
        if parts:
            before[name] = ":".join(parts)
    return before


def installed_python() -> str:
    """Return the path of this process's Python in the installed environment. With ``--stage`` the
    process may run from a copy, which other nodes do not have, nor this node later."""
    return sys.executable.removeprefix(os.environ.get(NEAR, ""))


def submit_env(environ: Mapping[str, str], options: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for the sbatch of a script whose `options` are values by long names:
    that of `clean_env`, without the SBATCH variables that would overrule the job.

    sbatch prefers SBATCH_PARTITION, say, to the script's ``#SBATCH --partition``. So a variable is
    left out where the job has its option or one that excludes it, as ``mem-per-cpu`` does ``mem``,
    and where no job of hpc-ddp may have its option (`_NEVER`). Each variable that is left out is
    reported on stderr, unless the job's option has the same value. The other SBATCH variables stay:
    a site's or user's profile may set them.
    """
    env = clean_env(environ)
    for name, option in _variables_of_sbatch(env).items():
        options_of_job = _rivals(option, options)
        if options_of_job or option in _NEVER:
            value = env.pop(name)
            if value != options.get(option):
                reason = (
                    f"the job has --{options_of_job[0]}"
                    if options_of_job
                    else "a job of hpc-ddp has its own way"
                )
                say(f"{name}={value} is not used: {reason}")
    return env


def options_of_variables(
    environ: Mapping[str, str], options: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Return those of sbatch's variables in `environ` that decide where a job with these `options`
    runs, as (long option, value) pairs, in the order of `environ`. Written into the job's script
    they count for each job of a chain, even where the first job passes on no variables.

    A variable is left out where the job has its option or one that excludes it, and where its value
    can't be printed. So is an empty one, but for ``exclusive``.
    """
    return [
        (option, environ[name])
        for name, option in _variables_of_sbatch(environ).items()
        if _OF_PLACES.fullmatch(option)
        and (environ[name].isprintable() and (environ[name] or option == "exclusive"))
        and not _rivals(option, options)
    ]


def _variables_of_sbatch(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the long options that sbatch's variables in `environ` stand for, by the variables'
    names."""
    names = [name for name in environ if name.startswith("SBATCH_")]
    options = {n: n.removeprefix("SBATCH_").lower().replace("_", "-") for n in names}
    return {name: _OPTIONS.get(option, option) for name, option in options.items()}


def _rivals(option: str, options: Mapping[str, str]) -> list[str]:
    """Return the names in a job's `options` that are `option` or exclude it, sorted."""
    family = next((names for names in _FAMILIES if option in names), {option})
    return sorted(family & options.keys())


def asking_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment, made from `environ`, for a command of Slurm's that submits nothing.

    With it Slurm prints times as `slurm_text.parse_job` reads them, whole lists of waiting tasks,
    and hidden partitions, without which squeue would omit the user's own jobs there. Other
    variables that set options of such commands are left out: a profile's SQUEUE_PARTITION or
    SCANCEL_STATE would hide jobs that are live, or keep them from being cancelled. SLURM_CLUSTERS
    is left out inside a job, and where it names several clusters; then this machine's cluster is
    asked.
    """
    env = {name: value for name, value in environ.items() if not _OPTION_OF_ASKING.match(name)}
    # A length of 0 has no limit: the list of the tasks that wait is not cut.
    env |= {"SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0"}
    env |= dict.fromkeys(("SQUEUE_ALL", "SINFO_ALL", "SCONTROL_ALL"), "1")
    if "SLURM_JOB_ID" in env or "," in env.get("SLURM_CLUSTERS", ""):  # scontrol takes one alone
        env.pop("SLURM_CLUSTERS", None)
    return env
