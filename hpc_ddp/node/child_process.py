"""The child of a supervisor: a node's torchrun, or with another ``--launcher`` one worker.

For one worker the variables that torchrun would set are made of those that Slurm, or an MPI, sets
for the task.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from string import Template

from hpc_ddp.core.attempt_env import AttemptEnv
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_io import make_folders, write_json
from hpc_ddp.core.job.attempt_folder import NodeFolder
from hpc_ddp.core.process import NOTICE_SIGNALS, mortal_name
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.net.place import Place
from hpc_ddp.node.watch.wake_links import Task
from hpc_ddp.node.workers.worker import command_after_setup, worker_command

NODE_SETUP = "HPC_DDP_NODE_SETUP"  # the variable with the set-up lines that run before the child
AGENT_WORDS = 4  # python -u node.py elastic_agent
MOST_FILES = 1 << 16  # some programs close each descriptor that there might be
# Beginnings of an MPI's variables of a task: Open MPI; Intel MPI and MPICH; MVAPICH.
MPI_TASKS = ("OMPI_COMM_WORLD", "PMI", "MV2_COMM_WORLD")
# By these OpenMP binds the threads of a program, from the first CPU on.
BINDINGS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
NO_GROUP = "no-group"  # a file of the first node: its workers have formed no process group


def ignore_notices() -> None:
    """Ignore the `NOTICE_SIGNALS` in this process, a fork that is to become a supervisor's child.

    A wrapper of Python (``--python``) inherits this: a site may signal each process of the step,
    and a wrapper's death would end its child. torchrun's agent and a worker set handlers of their
    own.
    """
    for number in NOTICE_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def warn_of_wrapper(environ: Mapping[str, str]) -> None:
    """Print a warning if Slurm's task (SLURM_TASK_PID in `environ`) is another process, above this
    one, that would die of SIGTERM, a preemption's signal. Print nothing if that process can't be
    seen from this container."""
    with suppress(ValueError):  # a variable that is no number
        task = int(environ.get("SLURM_TASK_PID") or os.getpid())
        if task != os.getpid() and (name := mortal_name(task)):
            say(
                f"WARNING: this Python runs below {name}, which dies of a preemption's signal, and"
                " the job with it, before it has saved; hint: end the wrapper (--python,"
                ' --container) in: exec python "$@"'
            )


def note_missing_variable(name: str) -> str:
    """Record as this node's failure in the newest attempt that the job's variable `name` is
    missing, so that the verdict permits no further attempt; return the text of the failure.

    The run is found by the path of this file, ``<run>/lib/…``, since its variable may be missing,
    too. A record that can't be written is left out.
    """
    text = (
        f"this Python does not get the job's variables ({name} is missing): a wrapper or container"
        " takes them away, as env -i and --cleanenv do"
    )
    # <run>/lib/hpc_ddp/node/child_process.py
    run, node = RunFolder(Path(__file__).resolve().parents[3]), socket.gethostname()
    failure = {"rank": None, "code": 2, "time": time.time(), "error": text}
    with suppress(OSError, IndexError):  # in no run, or in an array's, whose task is not known
        folder = run.attempts()[-1].node(node)
        make_folders(folder.path)
        write_json(folder.record, {"node": node, "code": 2, "failures": [failure]})
    return text


def limit_umask() -> None:
    """Set this process's umask so that new files are writable for their owner alone, and keep the
    user's umask, which workers get back, in HPC_DDP_UMASK. `node.entry` does the same for the
    processes that start by it."""
    umask = os.umask(0o022)
    os.umask(umask | 0o022)
    os.environ.setdefault("HPC_DDP_UMASK", f"{umask:o}")


def raise_file_limit() -> None:
    """Raise this process's soft limit of open files to the hard one, at most to `MOST_FILES`; its
    children inherit it.

    Slurm passes on the limit of the shell that submitted, 1,024 by default; a rank of a job with
    512 ranks has more connections than that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Return torchrun's options, ``--name=value``, and the script with its arguments, which are the
    words from the first one without a dash on. Raise StopIteration where there is no script.
    """
    script = next(i for i, word in enumerate(words) if not word.startswith("-"))
    return words[:script], words[script:]


def fill_options(command: list[str], environ: Mapping[str, str]) -> list[str]:
    """Return a command of torchrun with the ``$`` variables of its options filled in from
    `environ`: under submitit and locally no shell does that.

    `command` has the form that `torchrun_launch` describes. The words before the options and the
    script's arguments stay as they are. Raise UsageError for a variable that `environ` lacks, or a
    ``$`` without a name; StopIteration without a script.
    """
    start, (options, script) = command[:AGENT_WORDS], split_words(command[AGENT_WORDS:])
    return [*start, *(_fill_option(word, environ) for word in options), *script]


def _fill_option(option: str, environ: Mapping[str, str]) -> str:
    """Return an option of torchrun with its ``$`` variables filled in from `environ`; raise
    UsageError as `fill_options`."""
    try:
        return Template(option).substitute(environ)
    except (KeyError, ValueError) as error:
        reason = f"{error.args[0]} is not set" if isinstance(error, KeyError) else str(error)
        raise UsageError(
            f"torchrun's option {option} can't be filled in: {reason}",
            hint="write $NAME of a variable that is set, and $$ for a dollar sign",
        ) from None


def unbound_threads(options: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that undo the `BINDINGS` in `environ` where torchrun, by its `options`,
    starts several workers of a node: all would share the first CPUs. {} where torchrun starts one
    worker, where it binds the workers itself, and where `environ` has none of the `BINDINGS`."""
    is_single = "--nproc-per-node=1" in options
    is_bound = any(word.startswith("--numa-binding=") for word in options)
    if is_single or is_bound or not any(map(environ.get, BINDINGS)):
        return {}
    return {"OMP_PROC_BIND": "false", "KMP_AFFINITY": "disabled"}


@dataclass(frozen=True)
class Launch:
    """The child process of a supervisor: a node's torchrun, or one worker.

    `peers` are the record files of all supervisors; only the first supervisor, whose exit code
    fails the step, has them, and the others have []. `rank` is None for torchrun, which reports its
    workers in ``folder.failures``.
    """

    name: str  # of the supervisor, in the attempt: the node, and for one worker also its rank
    task: Task  # the supervisor's number among those of the attempt
    folder: NodeFolder  # the files of the supervisor
    command: Sequence[str]
    env: Mapping[str, str]  # the child's variables besides those of every launch
    peers: Sequence[Path]
    rank: int | None = None  # of the one worker
    store_port: int = 0  # not 0: this worker hosts the store; the script tries another if taken
    reports_fabric: bool = True  # one supervisor of each node does
    is_elastic: bool = False  # the other nodes' torchrun continues without a lost node


def torchrun_launch(place: Place, command: list[str]) -> Launch:
    """Return the launch of a node's torchrun, with the options added that differ between nodes. On
    the first node print a line if it undoes the `BINDINGS`.

    `command` is python, -u, node.py, ``elastic_agent``, torchrun's options, and the script with its
    arguments: workers may be forked from this Python, so it has a worker's options. The set-up
    lines of NODE_SETUP run before the command. Raise StopIteration without a script.

    torchrun would guess the store's host and this node's name from host names: wrong with several
    interfaces, aliases, or a name that /etc/hosts maps to loopback (pytorch issue 73656).
    """
    is_host = "1" if place.index == 0 else "0"
    start, (options, script) = command[:AGENT_WORDS], split_words(command[AGENT_WORDS:])
    confs = [w.removeprefix("--rdzv-conf=") for w in options if w.startswith("--rdzv-conf=")]
    conf = ",".join([*confs, f"is_host={is_host}"])  # torchrun reads only the last --rdzv-conf
    words = [*start, *options, f"--rdzv-conf={conf}", f"--local-addr={place.host}", *script]
    unbinding = unbound_threads(options, os.environ)
    if unbinding and not place.index:
        names = ", ".join(filter(os.environ.get, BINDINGS))
        say(
            f"note: {names} would bind all workers of a node to the same CPUs, and has no effect;"
            " hint: --torchrun=--numa-binding=node, or --launcher srun"
        )
    return Launch(
        name=place.node,
        task=Task(place.index, len(place.nodes)),
        folder=place.attempt.node(place.node),
        command=command_after_setup(os.environ.get(NODE_SETUP, ""), words),
        # Forked workers have this Python's seed of hashes: sets have one order on all ranks.
        env={"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"), **unbinding},
        peers=[] if place.index else [place.attempt.node(node).record for node in place.nodes],
        is_elastic=any(word.startswith("--nnodes=") and ":" in word for word in options),
    )


def worker_launch(place: Place, command: list[str]) -> Launch:
    """Return the launch of this task's worker; `command` is python and the script with its
    arguments. The set-up lines of NODE_SETUP run before the command.

    Ranks are in blocks, node by node, as --distribution has it. Rank 0 has the records of all
    workers for `peers`, and the port of the store. Raise KeyError where the launcher's variables of
    a task are missing, OSError where the tasks can't be divided by the nodes, or an MPI has ordered
    the ranks in another way.
    """
    rank, size = _rank_and_size()
    per_node, surplus = divmod(size, len(place.nodes))
    if surplus or not per_node:
        raise OSError(
            f"the launcher has started {size} workers on {len(place.nodes)} nodes, and each node"
            " needs the same number of them; hint: --launcher torchrun"
        )
    if rank // per_node != place.index:
        raise OSError(
            f"rank {rank} is on {place.node}, number {place.index} of the job's nodes, and ranks"
            " have to go node by node, in Slurm's order; hint: --launcher torchrun"
        )
    peer_nodes = [] if rank else [place.nodes[peer // per_node] for peer in range(size)]
    return Launch(
        name=f"{place.node}-{rank}",
        task=Task(rank, size, per_node),
        folder=place.attempt.node(place.node, rank),
        command=command_after_setup(
            os.environ.get(NODE_SETUP, ""), worker_command(command[0], command[1:])
        ),
        env=_variables(place, rank, size),
        peers=[place.attempt.node(node, peer).record for peer, node in enumerate(peer_nodes)],
        rank=rank,
        store_port=0 if rank else AttemptEnv.from_env(os.environ).port,
        reports_fabric=rank % per_node == 0,
    )


def wait_for_files(paths: Sequence[Path], limit_s: float) -> None:
    """Wait until all files exist, `limit_s` seconds at most; which ones are missing is not
    returned. Raise OSError where a file can't be looked up."""
    give_up, missing = time.monotonic() + limit_s, list(paths)
    while time.monotonic() < give_up and missing:
        while missing and missing[-1].exists():  # one after the other, each until it exists
            missing.pop()
        time.sleep(0.2)


def _rank_and_size() -> tuple[int, int]:
    """Return the rank and the number of tasks that srun, or an MPI's launcher, has set in this
    process's environment; raise KeyError outside of a task."""
    env = os.environ
    if AttemptEnv.from_env(env).step_launcher == "srun":
        return int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"])
    kind = next((kind for kind in MPI_TASKS if f"{kind}_RANK" in env), MPI_TASKS[0])
    return int(env[f"{kind}_RANK"]), int(env[f"{kind}_SIZE"])


def _variables(place: Place, rank: int, size: int) -> dict[str, str]:
    """Return the variables that torchrun would set for worker `rank` of `size` in the attempt of
    this process's environment.

    By TORCHELASTIC_RUN_ID libraries know that starts and restarts are not theirs: Lightning then
    switches its own requeue off, which revives cancelled jobs.
    """
    env = AttemptEnv.from_env(os.environ)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % (size // len(place.nodes))),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size // len(place.nodes)),
        "GROUP_RANK": str(place.index),
        "GROUP_WORLD_SIZE": str(len(place.nodes)),
        "MASTER_ADDR": env.head,
        "MASTER_PORT": str(env.port),
        "TORCHELASTIC_RUN_ID": env.rdzv_id,
    }


LAUNCHES: Mapping[str, Callable[[Place, list[str]], Launch]] = {
    "torchrun": torchrun_launch,
    "worker": worker_launch,
}
