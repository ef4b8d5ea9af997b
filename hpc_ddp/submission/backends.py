"""Back-ends: each one starts a prepared run. Callers use `start`, which works for all of them.

``slurm`` and ``submitit`` return as soon as the job is queued. ``salloc`` and ``local`` return a
process, which ends with the attempt, or with the run; the caller waits for its end.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, Protocol

from hpc_ddp import slurm
from hpc_ddp.core.accelerators import SHOW_DEVICES, hiding_env
from hpc_ddp.core.attempt_env import INTERACTIVE, allocation_env, clean_env, installed_python
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.file_io import close_to_others, make_folders, write_whole
from hpc_ddp.core.file_owners import check_kept_modes
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.slurm_values import array_indexes
from hpc_ddp.core.job.variables import fill
from hpc_ddp.core.journal.events import Queued, Submitted
from hpc_ddp.core.process import NOTICES
from hpc_ddp.core.run_index import link_job
from hpc_ddp.submission.plan import Plan, PreparedRun
from hpc_ddp.submission.run_files.earlier import remove_note
from hpc_ddp.submission.run_files.start_claim import release_start
from hpc_ddp.submission.script import template_sandbox
from hpc_ddp.submission.script.render import (
    job_env,
    names_filled_by_workers,
    node_command,
    node_env,
    step_options,
)

Output = int | IO[bytes] | None  # as Popen takes it; None: to where this process prints

PICKLE = "supervisor.pkl"  # of submitit's task
# The template's blocks before and after srun.
SET_UP, TEAR_DOWN = ("settings", "setup", "attempt", "preflight"), ("teardown", "verdict")
# For submitit's own line: bash runs a trap while it waits, not with srun in the foreground.
SRUN = """srun() {{
    command srun --nodes="$SLURM_NNODES" --ntasks="$((SLURM_NNODES * {tasks_per_node}))" "$@" &
    _step=$!
    while kill -0 $_step 2>/dev/null; do wait $_step || :; done
}}"""


@dataclass(frozen=True)
class StartedRun:
    """The result of a start: `job` is queued, or `process` runs in the foreground."""

    job: JobRef | None = None
    process: subprocess.Popen[bytes] | None = None


class Backend(Protocol):
    """A way to start a run."""

    def script(self, plan: Plan) -> str:
        """Return the text of the batch script as it will run; nothing is written.

        Raises
        ------
        UsageError
            the user's template is broken, or the back-end can't do what the job asks for
        HpcDdpError
            only of submitit: this machine has no Slurm client
        """
        ...

    def write_further_files(self, prepared: PreparedRun) -> None:
        """Write the files that the batch script needs besides itself; most back-ends need none.
        Called after the script is written. Raise OSError where a file can't be written."""
        ...

    def start(self, prepared: PreparedRun, output: Output = None) -> StartedRun:
        """Start the run, and return its queued job, or its process in the foreground. The process
        prints to `output` (None: to where this process prints).

        Raises
        ------
        HpcDdpError
            the run could not be started; UsageError where the request is wrong
        OSError
            the process could not be started, or the journal can't be read
        """
        ...


class SlurmBackend:
    """Our own batch script, through sbatch."""

    def script(self, plan: Plan) -> str:
        return plan.rendering.text()

    def write_further_files(self, prepared: PreparedRun) -> None:
        pass

    def start(self, prepared: PreparedRun, output: Output = None) -> StartedRun:
        """Submit the script, and return the job with its cluster ('' where Slurm does not say);
        `output` is not used.

        Where sbatch gives no answer, the queue is searched for a new job of the script. Raise
        NoAnswerError where the job may be queued all the same, HpcDdpError where Slurm refuses it
        (see `slurm.sbatch`), and OSError where the journal can't be read (of earlier jobs).
        """
        run = prepared.run
        # Asked before: a Ctrl-C between sbatch's answer and the return would lose the job's id.
        cluster = slurm.own_cluster()
        job = slurm.sbatch(run.script, os.environ, earlier=run.jobs(run.events()))
        return StartedRun(job if job.cluster else JobRef(job.id, cluster))


class AllocationBackend(SlurmBackend):
    """The same script, run by a shell inside an allocation that is there already."""

    def start(self, prepared: PreparedRun, output: Output = None) -> StartedRun:
        """Start the batch script in a shell inside this allocation, and return the shell's process;
        `output` is as in `Backend.start`.

        Raise UsageError outside of an allocation, and in one with another number of nodes than the
        job asks for (a job of one node runs in any). Raise OSError if the shell can't be started.
        """
        if "SLURM_JOB_ID" not in os.environ:
            raise UsageError(
                "the allocation back-end runs inside an allocation, and this shell is in none",
                hint=f"salloc --nodes {prepared.spec.nodes}, then the same command again",
            )
        least, most = prepared.spec.node_range
        env = allocation_env(os.environ)
        nodes = int(env.get("SLURM_NNODES", most))
        if most > 1 and not least <= nodes <= most:
            raise UsageError(
                f"nodes is {prepared.spec.nodes}, and the allocation has {nodes}",
                hint=f"--nodes {nodes}, or salloc --nodes {prepared.spec.nodes}",
            )
        env[INTERACTIVE] = env["SLURM_JOB_ID"]
        argv = ["bash", str(prepared.run.script)]
        # A session of its own: Ctrl-C is for this process, which passes on a notice.
        return StartedRun(
            process=subprocess.Popen(
                argv,
                env=env,
                start_new_session=True,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
            )
        )


class LocalBackend(SlurmBackend):
    """The same attempt, supervisors and verdict on this machine, with gloo on CPU.

    It has no accelerators unless `SHOW_DEVICES` is set, a developer's switch: docs/testing.md.
    """

    def start(self, prepared: PreparedRun, output: Output = None) -> StartedRun:
        return StartedRun(process=self.launch(prepared, output))

    def launch(self, prepared: PreparedRun, output: Output) -> subprocess.Popen[bytes]:
        """Start the run on this machine, and return its process, which leads a session of its own
        and stops the run if this process ends. `output` is as in `Backend.start`. Raise UsageError
        as `_local_env`, OSError where the process can't be started."""
        spec, run = prepared.spec, prepared.run
        env = {**clean_env(os.environ), **_local_env(spec)}
        env |= {"HPC_DDP_RUN": str(run.path), "HPC_DDP_CODE": str(prepared.code)}
        env["HPC_DDP_PARENT"] = str(os.getpid())
        if not os.environ.get(SHOW_DEVICES):
            env |= hiding_env()
        env.setdefault("OMP_NUM_THREADS", "1")
        node = str(run.lib / "node.py")
        _, prefix = node_command(spec, run, prepared.script)
        command = [installed_python(), node, "dry_run", *prefix, *spec.args]
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)  # until `dry_run` handles them
        try:
            return subprocess.Popen(
                command,
                env=env,
                cwd=spec.chdir,
                start_new_session=True,  # Ctrl-C is for this process, which passes on a notice
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _local_env(spec: JobSpec) -> dict[str, str]:
    """Return the variables of `job_env` and `node_env`, by name, as a run on this machine needs
    them. Variables in the user's texts (``env``) are filled in, except in those texts that each
    worker fills in by itself (`names_filled_by_workers`).

    A variable of Slurm's in ``expand`` that is not set here counts as 0; SLURM_NNODES and
    SLURM_JOB_NUM_NODES count as the number of nodes. The workers get these numbers as
    ``HPC_DDP_DRY_NAME``, for each of Slurm's variables in ``expand``. Raise UsageError where a
    text of ``env`` has another variable that is not set here, and for an unknown or broken fabric.
    """
    env, nodes = {**job_env(spec), **node_env(spec)}, str(spec.node_range[1])
    stand_ins = {name: "0" for name in spec.expand if name.startswith("SLURM_")}
    for name in stand_ins.keys() & {"SLURM_NNODES", "SLURM_JOB_NUM_NODES"}:
        stand_ins[name] = nodes
    environ = {**stand_ins, **os.environ}
    try:
        for name in spec.env.keys() & env.keys() - {*names_filled_by_workers(spec)}:
            env[name] = fill(env[name], spec.expand, environ)
    except KeyError as error:
        raise UsageError(
            f"--expand names {error.args[0]}, which is not set here", hint=f"export {error.args[0]}"
        ) from None
    return env | {f"HPC_DDP_DRY_{name}": text for name, text in stand_ins.items()}


class SubmititBackend(SlurmBackend):
    """Starts runs by submitit's submission file, whose tasks each call our supervisor.

    The lines of our batch script before and after srun go into submitit's set-up and tear-down.
    submitit's own time-out and requeue path never fires, since the supervisor handles the signals.
    submitit's task loads a pickle whose name has the job's id. The job itself makes a link of that
    name: so one pickle serves each job of a chain, each task of an array, and a user's `sbatch`.
    """

    def script(self, plan: Plan) -> str:
        """Return the text of submitit's submission file. Raise UsageError for a job that submitit
        can't start (see `_make_executor`), and HpcDdpError without a Slurm client.

        The file runs submitit's task by a path: with ``python -m``, as submitit does it, Python
        would look for modules in the working directory first, in which colleagues may write.
        """
        from submitit.core import _submit

        executor, path = self._make_executor(plan), _submit.__file__
        command = f"{executor.python} -u {shlex.quote(path)} {shlex.quote(str(executor.folder))}"
        text: str = executor._make_submission_file_text(command, "")
        return text + "\n"

    def write_further_files(self, prepared: PreparedRun) -> None:
        """Write the pickle that submitit's task loads: the supervisor and its command. Only this
        user can change the file. Raise OSError where it can't be written."""
        from submitit.core.utils import DelayedSubmission

        from hpc_ddp.node.supervisor import submitit_main

        kind, command = node_command(prepared.spec, prepared.run, prepared.script)
        folder = prepared.run.submitit
        make_folders(folder)
        DelayedSubmission(submitit_main, kind, command).dump(folder / PICKLE)
        close_to_others(folder / PICKLE)

    def _make_executor(self, plan: Plan) -> Any:
        """Return an executor of submitit, with our set-up and tear-down lines.

        Raise UsageError for a container, for a block of the user's template that submitit does not
        use, for a template that can't be used, and for a run's path of which submitit would replace
        a part; HpcDdpError without a Slurm client.
        """
        import submitit

        spec, run = plan.spec, plan.run
        if spec.container or spec.image:
            raise UsageError("the submitit back-end has no containers", hint="--backend slurm")
        if tag := re.search("%[jtAa]", str(run.path)):
            raise UsageError(
                f"the run folder {str(run.path)!r} has {tag[0]}, in whose place submitit puts the"
                " job's id",
                hint="--runs-dir, without it; or --backend slurm",
            )
        template_sandbox.check_used(spec.template, (*SET_UP, "unfit", *TEAR_DOWN))
        lib, python = shlex.quote(str(run.lib)), shlex.quote(installed_python())
        try:
            executor = submitit.SlurmExecutor(
                run.submitit, python=f"env PYTHONPATH={lib}${{PYTHONPATH:+:$PYTHONPATH}} {python}"
            )
        except RuntimeError:
            raise HpcDdpError("srun was not found: this machine has no Slurm client") from None
        pairs = {name: value or True for name, value in plan.rendering.header}
        folder = shlex.quote(str(run.submitit))
        executor.update_parameters(
            job_name=str(pairs.pop("job-name")),
            wckey=None,
            time=None,  # submitit's default is 5 minutes; the job's own limit is in `pairs`
            stderr_to_stdout=True,
            setup=[
                *(plan.rendering.block(name) for name in SET_UP),
                '_job="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"',
                f'ln -sfn {PICKLE} {folder}/"${{_job}}_submitted.pkl"',
                'export SRUN_CPUS_PER_TASK="$_cpus" SLURM_CPUS_PER_TASK="$_cpus"',
                SRUN.format(tasks_per_node=spec.tasks_per_node),
            ],
            teardown=[plan.rendering.block(name) for name in TEAR_DOWN],
            srun_args=[
                f"--output={pairs['output']}",
                "--open-mode=append",
                f"--ntasks-per-node={spec.tasks_per_node}",
                *step_options(spec, plan.rendering.header),
                *plan.rendering.srun,
            ],
            additional_parameters=pairs,
        )
        return executor


BACKENDS: dict[str, Backend] = {
    "slurm": SlurmBackend(),
    "submitit": SubmititBackend(),
    "salloc": AllocationBackend(),
    "local": LocalBackend(),
}


def write_script(prepared: PreparedRun) -> str:
    """Render the run's script and write it, with its back-end's further files; return its text.

    Raises
    ------
    UsageError
        the user's template is broken, the back-end can't do what the job asks for, or the file
        system keeps no permissions
    HpcDdpError
        only of submitit: this machine has no Slurm client
    OSError
        a file can't be written
    """
    backend = BACKENDS[prepared.spec.backend]
    text = backend.script(prepared)
    write_whole(prepared.run.script, text, mode=0o644)
    backend.write_further_files(prepared)
    check_kept_modes(prepared.run)
    return text


def start(prepared: PreparedRun, output: Output = None) -> StartedRun:
    """Write a prepared run's script, start the run with its back-end, and journal the start; return
    the job or process. `output` is as in `Backend.start`.

    The mark of an earlier cancel and the count of starts in vain are removed from the run, and from
    each task of an array that starts. The claim of `Plan.write` on the run is released, also after
    an error. A disk that refuses the journal is reported on stderr.

    Raises
    ------
    HpcDdpError, OSError
        the run could not be started. It is discarded then (see `PreparedRun.discard`), except
        after a NoAnswerError of Slurm: the job may be queued
    """
    try:
        return _start(prepared, output)
    finally:
        release_start(prepared.run)


def _start(prepared: PreparedRun, output: Output) -> StartedRun:
    """Do what `start` does, with its errors, except for the claim, which stays."""
    spec, run, journal = prepared.spec, prepared.run, prepared.run.journal("submit")
    try:
        write_script(prepared)
        indexes = set(array_indexes(spec.array)) if spec.array else set()
        tasks = [task for task in run.tasks() if task.index in indexes]
        for part in (run, *tasks):
            for file in (part.cancelled, part.vain_jobs, part.vain_nodes, part.pauses):
                file.unlink(missing_ok=True)  # of earlier starts
        submitted = Submitted(run.next_attempt(), spec.backend, spec.script)
    except (HpcDdpError, OSError, KeyboardInterrupt):
        prepared.discard()
        raise
    try:
        started = BACKENDS[spec.backend].start(prepared, output)
    except slurm.NoAnswerError:  # the job may be queued all the same, and then needs its folder
        journal.write(submitted)
        raise
    except (HpcDdpError, OSError):
        prepared.discard()
        raise
    except KeyboardInterrupt:  # here, too, the job may be queued
        if spec.backend != "local":
            say(
                "note: this start was broken off, and a job may be queued all the same: squeue"
                f" --me; if none is, the next start of {run.path} undoes this one"
            )
        raise
    remove_note(run)
    # Journaled only now: a refused start must not change how the run has ended.
    journal.write(submitted)
    if started.job:
        journal.write(Queued(started.job.id, started.job.cluster or None))
        link_job(started.job, run)
    for task in tasks:
        with suppress(OSError):  # the task's journal can't be read: the job is queued all the same
            if not task.finished():
                task.journal("submit").write(Submitted(task.next_attempt()))
    return started
