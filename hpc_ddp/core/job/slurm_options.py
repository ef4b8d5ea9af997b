"""The options of sbatch and srun by name: their letters, aliases, and beginnings.

From the man pages of Slurm 20.11 to 25.11. Options of plugins, as those of pyxis, are not here.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import Any

from hpc_ddp.core.errors import UsageError

# The short options of sbatch and srun.
SHORT_OPTIONS = {
    **{"A": "account", "a": "array", "b": "begin", "B": "extra-node-info", "c": "cpus-per-task"},
    **{"C": "constraint", "d": "dependency", "D": "chdir", "e": "error", "G": "gpus", "H": "hold"},
    **{"i": "input", "J": "job-name", "k": "no-kill", "K": "kill-on-bad-exit", "l": "label"},
    **{"L": "licenses", "m": "distribution", "M": "clusters", "n": "ntasks", "N": "nodes"},
    **{"o": "output", "p": "partition", "q": "qos", "Q": "quiet", "s": "oversubscribe"},
    **{"t": "time", "u": "unbuffered", "v": "verbose", "w": "nodelist", "W": "wait"},
    **{"x": "exclude", "O": "overcommit", "E": "preserve-env", "r": "relative", "S": "core-spec"},
    **{"F": "nodefile", "T": "threads"},
}
# The long options of sbatch, and those that only srun has: an unambiguous beginning will do.
SBATCH = (
    "account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment"
    " constraint container container-id contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu"
    " cpus-per-task deadline delay-boot dependency distribution error exclude exclusive export"
    " export-file extra extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-node"
    " gpus-per-socket gpus-per-task gres gres-flags hint hold ignore-pbs input job-name"
    " kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu"
    " mem-per-gpu mincpus network nice no-kill no-requeue nodefile nodelist nodes ntasks"
    " ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step open-mode"
    " output overcommit oversubscribe parsable partition power prefer priority profile propagate"
    " qos quiet reboot requeue reservation segment signal sockets-per-node spread-job stepmgr"
    " switches tasks-per-node test-only thread-spec threads-per-core time time-min tmp tres-bind"
    " tres-per-task uid use-min-nodes verbose wait wait-all-nodes wckey workdir wrap"
)
SRUN = SBATCH + (
    " accel-bind bcast bcast-exclude compress cpu-bind disable-status epilog exact external"
    " het-group immediate interactive jobid kill-on-bad-exit label mpi msg-timeout multi-prog"
    " no-allocate overlap pack-group preserve-env prolog pty quit-on-interrupt relative resv-ports"
    " send-libs task-epilog task-prolog threads treewidth unbuffered whole"
)
# Options of sbatch by which other settings are chosen, or bounded.
_OF_KEYS = ("time", "partition", "qos")
# Other names of the same.
_ALIASES = {"tasks-per-node": "ntasks-per-node", "workdir": "chdir", "pack-group": "het-group",
            "cluster": "clusters", "share": "oversubscribe"}  # fmt: skip

# Options of srun that the step has already, or can't have, and what to use instead.
SRUN_SETTLED = {
    **dict.fromkeys(("nodes", "relative"), "--nodes"),
    **dict.fromkeys(("ntasks", "ntasks-per-node"), "--nproc-per-node, or --gpus-per-node"),
    "cpus-per-task": "--cpus-per-task, or --cpus-per-node",
    **dict.fromkeys(("output", "error", "label"), "nothing: `hpc-ddp logs --rank` has each rank's"),
    **dict.fromkeys(("overlap", "exclusive"), "nothing: the step has all that the job has"),
    **dict.fromkeys(
        ("kill-on-bad-exit", "no-kill", "wait"),
        "nothing: the launcher relies on the value that it has",
    ),
    "distribution": "block, or block:…, since ranks go node by node",
}
# Distributions of tasks over the nodes, one node after the other; the rest is of a node's CPUs.
NODE_BY_NODE = re.compile(r"(block|\*)([:,].*)?|(no)?pack", re.I)
# Options of sbatch that are refused: what each does, and what to use instead.
SBATCH_REFUSED = {
    "no-kill": (
        "would keep a job without its first node, and its script, until the time limit; accepted:"
        " --elastic",
        "--elastic: the job continues without a node that is lost",
    ),
    "array": ("makes an array that hpc-ddp can't know; accepted: --array", "--array 0-3"),
    "error": ("would take messages out of the job's log; accepted: --error", "--error x.err"),
    "chdir": ("has no effect: the script goes to its folder; accepted: --chdir", "--chdir DIR"),
    "ntasks": (
        "is the number of tasks, which hpc-ddp counts; accepted: nodes and workers",
        "--nodes 2 --nproc-per-node 4",
    ),
    "ntasks-per-node": (
        "is the number of tasks of a node, which hpc-ddp counts; accepted: workers",
        "--nproc-per-node 4, or --gpus-per-node 4",
    ),
    "test-only": ("submits nothing; accepted: others of sbatch's", "hpc-ddp render"),
    "wait": ("waits for the job's end; accepted: others of sbatch's", "hpc-ddp logs -f RUN"),
    "time-min": (
        "would leave the time limit at what one attempt got; accepted: --time-min",
        "--time-min 1:00:00",
    ),
    "wrap": ("submits something else; accepted: SCRIPT", "--setup, or SCRIPT"),
}


def full_name(name: str, names: str = SRUN) -> str:
    """Return the whole name of a long option, given without dashes. `name` may be an alias, or a
    beginning that only one of `names` has (a text with blanks between the names). Any other name is
    returned as it is."""
    matches = _match_names(name, names)
    long_name = matches[0] if len(matches) == 1 else name
    return _ALIASES.get(long_name, long_name)


def _match_names(name: str, names: str) -> list[str]:
    """Return [name] where `name` is one of `names` (a text with blanks between them) or an alias,
    else those of `names` that begin with it."""
    all_names = names.split()
    return (
        [name]
        if name in (*all_names, *_ALIASES)
        else [long for long in all_names if long.startswith(name)]
    )


def as_pairs(options: Iterable[str], names: str = SRUN) -> list[tuple[str, str]]:
    """Return raw options, ``--name=value``, as pairs of the whole name (see `full_name`) and the
    value; the value is '' without ``=``."""
    parts = (option.removeprefix("--").partition("=") for option in options)
    return [(full_name(name, names), text) for name, _, text in parts]


def as_raw(name: str, text: str) -> str:
    """Return an option and its value, `text`, as a raw option: ``--name=value``, or ``--name`` for
    ''."""
    return f"--{name}={text}" if text else f"--{name}"


def move_to_own_keys(
    settings: dict[str, Any], accepted: Container[str] = _OF_KEYS
) -> dict[str, Any]:
    """Move raw options from the ``sbatch`` of `settings` to their own keys (`_OF_KEYS`), by which
    limits and the tables of settings files are looked up. Change `settings` in place, and return
    it. An option stays where it has no value, and where its key is set already or is not among the
    `accepted` keys. An ``sbatch`` that is then empty is removed."""
    keys = {*settings}
    for raw in [*settings.get("sbatch", ())]:
        ((name, text),) = as_pairs([raw], SBATCH)
        if text and name in _OF_KEYS and name in accepted and name not in keys:
            settings[name] = text
            settings["sbatch"] = [option for option in settings["sbatch"] if option != raw]
    if "sbatch" in keys and not settings["sbatch"]:
        del settings["sbatch"]  # an empty one would replace that of a run that goes on
    return settings


def split_raw(raw: str, command: str, example: str) -> tuple[str, str]:
    """Return the whole name and the value of a raw option of srun or sbatch (`command`),
    ``--name=value`` or ``--name``; the value is '' without ``=``. An alias, or the beginning of
    only one name, becomes the whole name.

    Raise UsageError for another form, ``--name=`` without a value, a control character, and the
    beginning of several names. `example` (``--gpu-bind=x``) is for the hint.
    """
    if not re.match(r"--[a-z][\w-]*(=|$)", raw) or not raw.isprintable():
        raise UsageError(
            f"{command} option {raw!r} is not of the form --name or --name=value",
            hint=f"--{command}={example}",
        )
    name, equals, value = raw[2:].partition("=")
    if equals and not value:  # `#SBATCH --network` would be another request
        raise UsageError(
            f"{command} option {raw!r} has no value; accepted: --{name}, or --{name}=VALUE",
            hint=f"--{command}=--{name}, without the equals sign",
        )
    names = SBATCH if command == "sbatch" else SRUN
    matches = _match_names(name, names)
    if len(matches) > 1:
        raise UsageError(
            f"{command} option --{name} is a beginning of --{', --'.join(matches)}",
            hint=f"--{command}=--{matches[0]}, or another of them",
        )
    return full_name(name, names), value
