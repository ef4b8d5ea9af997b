"""Started by torchrun, or a task's supervisor: prepares the process, then becomes the script.

Run as a file, isolated (``python -ISs worker.py``), since it must not load anything of the user's
environment before the script does. The worker gets a log file, by its rank, and ends with its
parent: torchrun's workers have sessions of their own, and would outlive an agent that is killed.
"""

import contextlib
import glob
import os
import shlex
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PATIENCE_S = 60.0
LOOKUP_S = 160.0  # of `tracker_lookup`, which has bounds of its own below that
# PMI-1, PMI-2 and PMIx of Slurm and Cray, Open MPI, Intel MPI and MPICH, MVAPICH. Not OMPI_MCA_,
# PMIX_MCA_ and I_MPI_, which are settings.
OF_AN_MPI_TASK = (
    *("PMI_", "PMI2_", "PMIX_", "SLURM_PMI", "SLURM_MPI_", "PALS_", "OMPI_COMM_WORLD_"),
    *("OMPI_UNIVERSE_SIZE", "OMPI_APP_", "MPI_LOCAL", "MV2_COMM_WORLD_"),
)
COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
NAMESPACE = "/proc/self/ns/pid"
NOTICE_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
READY = "--ready"  # the first word of `main` where the set-up lines are done
RESUMABLE = "resumable"  # a file in the folder of the run's first attempt, see `note_checkpoint`
AGAIN = b"hpc-ddp: the workers start again\n"  # in a log, at a restart: `first_failure` reads it


def worker_command(python: str, script: list[str]) -> list[str]:
    """Return the command by which the interpreter `python` starts a worker: it runs this file,
    whose process then becomes the `script` (its words, with the arguments)."""
    return [python, "-ISs", __file__, python, "-u", *script]


def command_after_setup(lines: str, command: list[str]) -> list[str]:
    """Return the command of a bash that runs the set-up `lines`, and then becomes `command`, which
    so has the variables that the lines export. A line that fails is reported, and the next line
    runs; one that ends the shell fails. Without lines ('') return `command` itself."""
    if not lines:
        return command
    report = 'echo "hpc-ddp: this set-up command failed with code $?: $BASH_COMMAND" >&2'
    end = '[ $? != 0 ] || { echo "hpc-ddp: the set-up lines have not ended" >&2; exit 1; }'
    # The words are no arguments of this shell, which a file that is sourced would have, and shift.
    text = f"trap '{end}' EXIT\ntrap '{report}' ERR\n{lines}\ntrap - ERR\nexec "
    return ["bash", "-c", text + shlex.join(command), "hpc-ddp"]  # $0: the name in messages


def die_with_parent() -> None:
    """Have the kernel kill this process by SIGKILL when its parent dies; this holds across exec.
    Do nothing on other systems than Linux."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def task_variables() -> dict[str, str]:
    """Return the variables that Slurm would set for this worker if it were a task of its own, as by
    ``srun python``. They are computed from torchrun's variables, for equally many workers on each
    node. The environment is not changed. Raise KeyError without torchrun's variables.

    Below torchrun a worker inherits those of the node's one task, with the node's number as the
    rank and the number of nodes as the world size.
    """
    size, per_node = os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]
    by_node = per_node if size == per_node else f"{per_node}(x{int(size) // int(per_node)})"
    return {
        "SLURM_PROCID": os.environ["RANK"],
        "SLURM_LOCALID": os.environ["LOCAL_RANK"],
        "SLURM_NODEID": os.environ["GROUP_RANK"],
        "SLURM_NTASKS_PER_NODE": per_node,
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), size),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), by_node),
    }


def is_of_mpi_task(name: str) -> bool:
    """Return whether an MPI launcher describes a task by the variable `name`."""
    return name.startswith(OF_AN_MPI_TASK) and not name.startswith("PMIX_MCA_")


def forget_mpi_task() -> None:
    """Remove from this process's environment the variables by which an MPI launcher describes its
    one task of this node: each of torchrun's workers would take itself for that task, and `import
    mpi4py.MPI` would hang. Do nothing in a worker that torchrun has not started, such a task."""
    if "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        for name in [*filter(is_of_mpi_task, os.environ)]:
            del os.environ[name]


def python_path() -> str:
    """Return a value for PYTHONPATH: the run's own library, the snapshot of the user's code if
    there is one, and then the folders in PYTHONPATH so far. Raise KeyError without HPC_DDP_RUN."""
    parts = [os.path.join(os.environ["HPC_DDP_RUN"], "lib"), os.environ.get("HPC_DDP_CODE")]
    return ":".join(part for part in (*parts, os.environ.get("PYTHONPATH")) if part)


def start_of_process() -> str:
    """Return when this process began, in the form of `hpc_ddp.core.process`: a text that is equal
    for equal times; ``running`` where there is no /proc."""
    try:
        with open("/proc/self/stat", errors="replace") as file:
            # Field 22 of man 5 proc; the name before the last ) may have blanks.
            return file.read().rpartition(")")[2].split()[19]
    except OSError:  # a Mac, in a dry run
        return "running"


def open_log(name: str) -> int:
    """Write this process's id, start and PID namespace to the file ``<name>.pid``; then open the
    file ``<name>.log`` to append to it, and return its descriptor. `name` is a path.

    Where the disk refuses, try again each second; raise OSError if it still refuses after
    `PATIENCE_S`.
    """
    give_up = time.monotonic() + PATIENCE_S
    namespace = os.readlink(NAMESPACE) if os.path.exists(NAMESPACE) else ""  # a Mac has none
    while True:
        try:
            with open(f"{name}.pid", "w") as file:
                file.write(f"{os.getpid()} {start_of_process()} {namespace}")
            return os.open(f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(1)


def forget_other_ranks() -> None:
    """In the node's first worker, remove from the node's folder the pid files of ranks that the
    node no longer has: an elastic job that has lost nodes numbers its ranks anew. Do nothing in
    other workers. Raise OSError if the disk refuses, KeyError without torchrun's variables."""
    if os.environ["LOCAL_RANK"] != "0":
        return
    rank = int(os.environ["RANK"])
    names = {f"rank-{rank + index}.pid" for index in range(int(os.environ["LOCAL_WORLD_SIZE"]))}
    folder = os.environ["HPC_DDP_NODE_FOLDER"]
    for name in os.listdir(folder):
        if name.startswith("rank-") and name.endswith(".pid") and name not in names:
            os.unlink(os.path.join(folder, name))


def make_compile_cache() -> str:
    """Return the path of a folder for the caches of torch's compiler; make the folder where it is
    missing. It lies below TMPDIR, and is shared by the user's jobs; where it can't be made there,
    and where another user has made it or could replace it, it lies in the run's folder.

    torch by itself uses ``/tmp/torchinductor_<user>``, even if another user has made it, and loads
    pickles from it. Raise OSError if the folder in the run can't be made, or if other users may
    write it.
    """
    refusal, parent = None, os.environ.get("TMPDIR") or "/tmp"
    in_tmp = os.path.join(parent, f"hpc-ddp-compile-{os.geteuid()}")
    in_run = os.path.join(os.environ["HPC_DDP_RUN"], "compile-cache")
    for folder in (in_tmp, in_run):
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
        except OSError as error:  # there is no TMPDIR on this node, or no room
            refusal = error
            continue
        refusal = None
        status = os.lstat(folder)
        is_folder = status.st_mode & 0o170000 == 0o040000  # S_ISDIR, without an import
        is_own = is_folder and status.st_uid == os.geteuid() and not status.st_mode & 0o022
        if is_own and (folder == in_run or _is_entry_safe(folder)):
            return folder
    raise refusal or PermissionError(f"{in_run} is not this user's alone")


def _is_entry_safe(folder: str) -> bool:
    """Return whether no other user, but root, can put a folder of theirs in place of `folder`: the
    owner of its parent may do so, and users who can write the parent, unless it has the sticky
    bit (0o1000)."""
    parent = os.stat(os.path.dirname(folder))
    is_closed = not parent.st_mode & 0o022 or bool(parent.st_mode & 0o1000)
    return is_closed and parent.st_uid in (0, os.geteuid())


def set_compile_cache() -> None:
    """Set `COMPILE_CACHE` in this process's environment to the folder of `make_compile_cache`,
    unless it is set already. Raise as `make_compile_cache`."""
    if COMPILE_CACHE not in os.environ:
        os.environ[COMPILE_CACHE] = make_compile_cache()


def resume_args() -> list[str]:
    """Return the arguments that a resume adds to the script's (``--resume-args``), split as by a
    shell; [] where this start resumes nothing: in the first attempt of the run, or in the first
    since ``--fresh``, unless torchrun has started the worker again; and where HPC_DDP_RESUME_IF is
    set and there is no checkpoint (`note_checkpoint`). Where there are files from before the run, a
    line on stderr says so. Raise ValueError for an open quote; exit as `note_checkpoint`."""
    numbers = ("HPC_DDP_ATTEMPT", "HPC_DDP_FIRST_ATTEMPT", "TORCHELASTIC_RESTART_COUNT")
    attempt, first_attempt, restarts = (int(os.environ.get(name) or 0) for name in numbers)
    words, path = (os.environ.get(f"HPC_DDP_RESUME_{name}") for name in ("ARGS", "IF"))
    if not words or (attempt <= first_attempt and not restarts):
        return []
    if not path or note_checkpoint():
        return shlex.split(words)
    if files := glob.glob(os.path.expandvars(path)):
        text = f"hpc-ddp: {files[0]} is older than this run: the script begins anew"
        print(text, file=sys.stderr, flush=True)
    return []


def note_checkpoint(waits: bool = True) -> bool:
    """Return whether a path that counts matches HPC_DDP_RESUME_IF, if that is set. A folder counts
    always, since its time shows nothing; a file counts if it is not older than the run's first
    attempt, or the first since ``--fresh``. Attempts may end before they write one.

    That one was there is noted in the folder of that attempt (`RESUMABLE`). With `waits` it is then
    waited for, `PATIENCE_S` at most: a disk may be away, and the script would begin anew over its
    checkpoint. Exit the process with 1 where it stays away. Raise KeyError without HPC_DDP_RUN."""
    path = os.path.expandvars(os.environ.get("HPC_DDP_RESUME_IF", ""))  # with $HPC_DDP_RUN, say
    if not path:
        return False
    run = os.environ["HPC_DDP_RUN"]
    folder = os.path.join(run, "logs", f"attempt-{os.environ.get('HPC_DDP_FIRST_ATTEMPT') or 0}")
    note = os.path.join(folder, RESUMABLE)
    give_up = time.monotonic() + PATIENCE_S
    while True:
        is_noted, is_away = os.path.exists(note), waits and not os.path.isdir(run)
        if not is_away and any(is_noted or _is_newer(file, folder) for file in glob.glob(path)):
            with contextlib.suppress(OSError):
                open(note, "a").close()
            return True
        if not (is_away or (is_noted and waits)):
            return False
        if time.monotonic() > give_up:
            hint = "submit --run RUN once it is back; --fresh begins anew"
            sys.exit(f"hpc-ddp: {path}, the script's checkpoint, is gone; hint: hpc-ddp {hint}")
        time.sleep(1)


def _is_newer(file: str, attempt: str) -> bool:
    """Return whether a file was changed since an attempt began, whose folder is `attempt`; True
    where `file` is a folder, and where the disk does not tell."""
    try:
        began = os.stat(os.path.join(attempt, "attempt.json")).st_mtime
        return os.path.isdir(file) or os.stat(file).st_mtime >= began
    except OSError:
        return True


def value_of(name: str, variable: str = "") -> str:
    """Return the value of the variable `name`, which ``--expand`` names: that of `variable` if
    given, else its own; else that of HPC_DDP_DRY_`name`, which a dry run sets for variables that
    only Slurm sets. HOSTNAME is this node's name. Exit the process with 1 where none is set."""
    if name == "HOSTNAME":  # the variable has the first node's name, from the batch script
        return os.uname().nodename
    for source in (variable or name, f"HPC_DDP_DRY_{name}"):
        if source in os.environ:
            return os.environ[source]
    sys.exit(f"hpc-ddp: --expand names {name}, which is not set in this worker")


def fill_variables(command: list[str]) -> list[str]:
    """Return `command` (python, -u, a script, and words behind it) with values in place of the
    variables that ``--expand`` names, in the words behind the script. A word ``${NAME[@]}`` becomes
    one word for each element of the array.

    The values are also filled into this process's environment, in the variables that
    HPC_DDP_EXPAND_ENV names: those of ``env`` that differ between workers. ``$NAME`` and
    ``${NAME}`` are replaced, as by `core.job.variables.fill`. Exit as `value_of`.
    """
    names = os.environ.get("HPC_DDP_EXPAND", "").split()
    if not names:
        return command
    import re

    names_pattern = "|".join(map(re.escape, names))
    marks = re.compile(rf"\$(?:({names_pattern})(?![A-Za-z0-9_])|\{{({names_pattern})\}})")

    def fill_in(text: str) -> str:
        """Return a text with the values of the variables."""
        return marks.sub(lambda match: value_of(match[1] or match[2]), text)

    for name in os.environ.get("HPC_DDP_EXPAND_ENV", "").split():
        os.environ[name] = fill_in(os.environ[name])
    # The array's name, NAME[@], by the argument ${NAME[@]} that it fills; and the variable in which
    # the batch script has put the array's elements, with a separator (\x1f) before each.
    arrays = {f"${{{name}}}": (name, f"HPC_DDP_WORDS_{name[:-3]}") for name in names if "[" in name}
    words = command[:3]
    for word in command[3:]:
        elements = value_of(*arrays[word]).split("\x1f")[1:] if word in arrays else [fill_in(word)]
        words += elements
    return words


def await_tracker_answer() -> dict[str, str]:
    """Wait for the variables that the first supervisor looks up for trackers (`tracker_lookup`),
    and return them by name; {} where nothing is looked up, or the supervisor has not answered
    within `LOOKUP_S`, which is printed. HPC_DDP_TRACKERS_FILE, the path of the file with the
    answer, is removed from this process's environment."""
    path = os.environ.pop("HPC_DDP_TRACKERS_FILE", "")
    if not path:
        return {}
    import json

    give_up = time.monotonic() + LOOKUP_S
    while time.monotonic() < give_up:
        try:
            with open(path) as file:
                return dict(json.load(file))
        except (OSError, ValueError):  # the file is empty until the answer
            time.sleep(0.1)
    os.write(2, b"hpc-ddp: no word of the first node about trackers: they start as they are\n")
    return {}


def set_trackers() -> None:
    """Set in this process's environment the variables by which trackers know their run, so that
    only rank 0 writes the job's run. This waits as `await_tracker_answer`; it does nothing for a
    job without HPC_DDP_TRACKERS.

    Other ranks that record something get runs of their own in W&B and Comet. In MLflow, whose ids
    come from a server, only rank 0 gets the id of a run.
    """
    if "HPC_DDP_TRACKERS" not in os.environ:
        return
    variables, rank = await_tracker_answer(), os.environ["RANK"]
    names = " ".join([os.environ["HPC_DDP_TRACKERS"], *variables])
    os.environ.update(variables, HPC_DDP_TRACKERS=names)
    if rank == "0":
        return
    for name, suffix in (("WANDB_RUN_ID", f"-r{rank}"), ("COMET_EXPERIMENT_KEY", f"r{rank}")):
        if name in names:
            os.environ[name] += suffix
    if "MLFLOW_RUN_ID" in names:
        del os.environ["MLFLOW_RUN_ID"]


def prepare_worker(command: list[str]) -> list[str]:
    """Prepare this process as a worker; return `command` (python, -u, the script and its arguments)
    with the arguments that a resume adds.

    The process gets its own log for stdout and stderr, a pid file, a worker's environment and the
    user's umask, and dies with its parent. Pid files of ranks that the node no longer has are
    removed. This may wait, as `await_tracker_answer`. It exits with 1 if torchrun's agent has died
    already. Raise OSError if the node's folder can't be used, or as `make_compile_cache`;
    ValueError as `resume_args`; KeyError without the variables of torchrun or of the supervisor.
    """
    die_with_parent()
    # A worker of srun is not checked: a wrapper may be its parent, and Slurm ends it with the step.
    is_of_torchrun = "TORCHELASTIC_USE_AGENT_STORE" in os.environ
    if is_of_torchrun and os.getppid() != int(os.environ["HPC_DDP_AGENT_PID"]):
        sys.exit("hpc-ddp: what has started this worker has died")
    name = os.path.join(os.environ["HPC_DDP_NODE_FOLDER"], f"rank-{os.environ['RANK']}")
    log = open_log(name)
    if os.fstat(log).st_size:
        os.write(log, AGAIN)
    forget_other_ranks()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    forget_mpi_task()
    identity = f"{os.getpid()} {os.environ.get('SLURM_JOB_ID', '')}"  # `training` reads it
    os.environ.pop("HPC_DDP_TRAINER", None)  # inherited, if a training has called sbatch
    os.environ.update(task_variables(), PYTHONPATH=python_path(), HPC_DDP_WORKER=identity)
    # A set of strings has one order on all ranks, and after a resume: a vocabulary, for one.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    set_compile_cache()
    set_trackers()
    if "HPC_DDP_UMASK" in os.environ:  # not under submitit, whose tasks have no `entry`
        os.umask(int(os.environ.pop("HPC_DDP_UMASK"), 8))
    return [*command, *resume_args()]


def heed_notice() -> None:
    """End this process by SIGTERM if there is a notice, whose signal may have been ignored."""
    if os.path.exists(os.environ.get("HPC_DDP_NOTICE", "")):
        os.kill(os.getpid(), signal.SIGTERM)


def main(command: list[str]) -> None:
    """Prepare this process, and replace it by `command` (python, -u, the script and its arguments),
    run by this process's Python: the command's may be a wrapper, which has done its work.

    If there are set-up lines, a bash runs them after the preparation, and then this file once more,
    with `READY` before the command. This may end as `heed_notice`. Raise as `prepare_worker`, and
    OSError where there is no bash; exit as `fill_variables`.
    """
    if command[0] != READY:
        command = prepare_worker(command)
        if lines := os.environ.get("HPC_DDP_WORKER_SETUP"):
            words = [sys.executable, "-ISs", __file__, READY, *command]
            os.execvp("bash", command_after_setup(lines, words))
    command = fill_variables(command[1:] if command[0] == READY else command)
    for number in NOTICE_SIGNALS:  # a supervisor's child is started with them ignored
        signal.signal(number, signal.SIG_DFL)
    heed_notice()
    os.execv(sys.executable, [sys.executable, *command[1:]])


if __name__ == "__main__":
    main(sys.argv[1:])
