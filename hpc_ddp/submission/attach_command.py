"""Commands on the login node that open a shell beside a worker of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hpc_ddp import slurm
from hpc_ddp.core import process
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.file_owners import check_executable
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.variables import fill
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission.script import container

# Runs the first Python on the worker's node that is new enough: this one, the job's, or python3; as
# the batch script does. Its words are both paths, then the arguments of that Python.
_PYTHON = """\
for python in "$1" "$2" python3; do
    "$python" -E -s -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && break
done
shift 2
exec "$python" -E -s "$@\""""


def make_command(
    run: RunFolder, node: str | None, rank: int | None, words: Sequence[str], terminal: bool
) -> list[str]:
    """Return the words of the command that runs `node.attach` beside a worker of the run's newest
    attempt. For a run with a Slurm job it is an srun onto the worker's node, into another container
    of the same kind if the job has one. For a run without a job it is this Python on this machine.

    The command is not started; Slurm is asked whether the job runs.

    Parameters
    ----------
    node, rank
        the name of the worker's node, and the worker's rank. Without `rank` it is the lowest rank
        on `node`; without both the lowest rank of the attempt
    words
        ``stacks``, or ``run`` and a command, for `node.attach`
    terminal
        whether srun gives the command a terminal

    Raises
    ------
    UsageError
        there is no such worker yet; the run is another user's; or its job.json or container's tool
        is broken
    HpcDdpError
        as `_live_attempt`; or the container's command has a variable that is not set here
    OSError
        the run's folder can't be read
    """
    check_executable(run)
    attempt, job = _live_attempt(run)
    pid_file = _pid_file(attempt, node, rank)
    attach_words = [str(run.lib / "node.py"), "attach", str(pid_file), *words]
    if not job:
        return [sys.executable, *attach_words]
    spec = JobSpec.from_json(run.job_json.read_bytes())
    srun = ["srun", *slurm.cluster_option(job), f"--jobid={job.id}", "--overlap"]
    srun += [f"--nodelist={pid_file.parent.name}", "--nodes=1", "--ntasks=1"]
    if terminal:
        srun.append("--pty")
    has_container = bool(spec.container or spec.image)
    search = ["sh", "-c", _PYTHON, "sh", sys.executable, spec.python]
    python = [spec.python] if has_container else search
    return [*srun, *_container_words(run, spec, job), *python, *attach_words]


def _live_attempt(run: RunFolder) -> tuple[AttemptFolder, JobRef | None]:
    """Return the run's newest attempt, and its job (None: a process of this machine). Raise
    HpcDdpError where the run has no attempt, where its job or process does not run, or runs on
    another machine, and where Slurm gives no answer for `slurm.PATIENCE_S`; OSError where the run's
    folder can't be read."""
    attempts = run.attempts()
    if not attempts:
        attach_task = next((f"hpc-ddp attach {task.quoted}" for task in run.tasks()), None)
        hint = attach_task or f"hpc-ddp explain {run.quoted}"
        raise HpcDdpError(f"run {run.path} has no worker to attach to", hint=hint)
    attempt = attempts[-1]
    info = attempt.info
    job = JobRef.of(info.get("job_id"), info.get("cluster"))
    if not (slurm.show_job(job).state == "RUNNING" if job else process.is_live(info)):
        raise HpcDdpError(
            f"run {run.path} does not run here now", hint=f"hpc-ddp explain {run.quoted}"
        )
    return attempt, job


def _container_words(run: RunFolder, spec: JobSpec, job: JobRef) -> list[str]:
    """Return the options of srun, and the words before the command, that enter a container like the
    worker's, so that the paths in the worker's environment exist there; [] for a job without one.
    Raise HpcDdpError where they have a variable that is not set here, and UsageError as
    `container.make_entry`."""
    entry = container.make_entry(spec, run.whole, run.whole / "code")
    values = {**os.environ, "SLURM_JOB_ID": job.id}
    try:
        return [fill(word, spec.expand, values) for word in (*entry.srun, *entry.command)]
    except KeyError as error:
        raise HpcDdpError(
            f"the container's command has ${error.args[0]}, which is not set here",
            hint=f"export {error.args[0]}",
        ) from None


def _pid_file(attempt: AttemptFolder, node: str | None, rank: int | None) -> Path:
    """Return the path of a worker's pid file in the attempt's folder. With `rank` the worker is
    that rank, which has to be on `node` if `node` is given too; without `rank` it is the lowest
    rank on `node` (None: on any node). Raise UsageError where no such worker has started, and
    OSError where a file disappears meanwhile."""
    # After a node of an elastic job is lost, its ranks are another node's. The newest file of a
    # rank comes last, and so stays in the dict.
    paths = sorted(attempt.path.glob("*/rank-*.pid"), key=os.path.getmtime)
    pid_files = {_rank(path): path for path in paths}
    on_node = {r: path for r, path in pid_files.items() if node in (None, path.parent.name)}
    chosen_rank = rank if rank is not None else min(on_node, default=0)
    if chosen_rank not in on_node:
        nodes = sorted({path.parent.name for path in pid_files.values()})
        raise UsageError(
            (f"rank {chosen_rank}" if rank is not None else f"node {node!r}" if node else "rank 0")
            + f" has no worker{f' on {node}' if node and rank is not None else ''};"
            + f" ranks: {', '.join(map(str, sorted(pid_files))) or 'none yet'};"
            + f" nodes: {', '.join(nodes) or 'none yet'}",
            hint="hpc-ddp logs -f shows when they start",
        )
    return on_node[chosen_rank]


def _rank(pid_file: Path) -> int:
    """Return the rank of ``rank-<r>.pid``; raise ValueError for another name."""
    return int(pid_file.stem.removeprefix("rank-"))
