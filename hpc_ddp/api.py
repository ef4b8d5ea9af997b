"""hpc-ddp from Python: submit a job, and look after its run. All of it is ``hpc_ddp.<name>``.

It means what the command line means: ``hpc-ddp.toml`` and site files count, runs lie where
``hpc-ddp status`` finds them, and each side can look after what the other one has started.
Errors are `HpcDdpError`; a `UsageError` is one of what was asked for.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hpc_ddp import slurm
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.file_io import read_text
from hpc_ddp.core.job import sweep as launch_sweep
from hpc_ddp.core.job.option_declaration import default_of, key_of
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.live_jobs import Queue, describe_work, read_queue
from hpc_ddp.report.cancel import cancel
from hpc_ddp.report.logs.files import log_files
from hpc_ddp.report.status.run_status import Status, status_of
from hpc_ddp.submission import backends
from hpc_ddp.submission.plan import plan_new
from hpc_ddp.submission.settings import config
from hpc_ddp.submission.settings.runs_dir import run_of, runs_root
from hpc_ddp.submission.settings.user import home_folder

__all__ = ["Handle", "HpcDdpError", "JobSpec", "Status", "UsageError", "find", "submit"]

FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 10.0  # between two looks, of which one of a job asks Slurm


@dataclass(frozen=True)
class Handle:
    """A run, to be looked after; made by `submit` and `find`.

    Attributes
    ----------
    path
        the run's folder, with its script, logs, checkpoints and journal
    """

    path: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False, compare=False)

    @property
    def _run(self) -> RunFolder:
        return RunFolder(self.path)

    @property
    def id(self) -> str:
        """``<run id>``, as `hpc-ddp status` has it; of a task of an array with ``/task-<n>``."""
        return self._run.id

    @property
    def name(self) -> str:
        """The job's name."""
        return self._run.name

    @property
    def job_id(self) -> str | None:
        """The newest Slurm job of the run; None where there was none. Raises OSError where its
        journal can't be read."""
        jobs = self._run.jobs(self._run.events())
        return jobs[-1].id if jobs else None

    @property
    def state(self) -> str:
        """The run's state in one word, as `hpc-ddp status` has it: ``waiting``, ``running``,
        ``finished``, ``failed``, ``cancelled``, ``stopped`` … Slurm is asked each time. Raises
        OSError where the journal can't be read."""
        return str(self.status().state)

    def status(self) -> Status:
        """Return all that a line of `hpc-ddp status` has: step, loss, goodput, results …

        Slurm is asked for a run that has a job. Without an answer the state is that of the journal,
        or ``unknown`` where it has no end. Raises OSError where the journal can't be read.
        """
        return status_of(self._run, read_queue() if self.job_id else Queue(None))

    def wait(self, timeout: float | None = None) -> str:
        """Wait until nothing works on the run any more and nothing will, and return its state.

        A job that is requeued is waited for until its last attempt is over; a Slurm that gives no
        answer, and a job whose cluster can't be asked, without end.

        Parameters
        ----------
        timeout
            how long to wait at most, in seconds; None: as long as it takes

        Raises
        ------
        TimeoutError
            it was not over by then
        HpcDdpError
            it is a job, and there is no Slurm to ask, or Slurm refuses
        OSError
            its journal can't be read

        Examples
        --------
        >>> run = submit(script="train.py", backend="local", launcher="srun")
        >>> run.wait(timeout=300)
        'finished'
        """
        give_up_s = float("inf") if timeout is None else time.monotonic() + timeout
        pause_s = FIRST_PAUSE_S
        while self._at_work():
            left_s = give_up_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"run {self.id} is not over after {timeout:g} s")
            time.sleep(min(pause_s, left_s))
            pause_s = min(1.5 * pause_s, LAST_PAUSE_S)
        return self.state

    def _at_work(self) -> bool:
        """Return whether a process or a job works on the run, or will; True also while Slurm gives
        no answer. Raise HpcDdpError without a Slurm for a run that has a job, and OSError where the
        journal can't be read."""
        if self._process:
            return self._process.poll() is None
        try:
            queue = Queue(slurm.queue() if self.job_id else {})
        except slurm.NoAnswerError:  # it will come back
            return True
        return describe_work(self._run, queue) is not None

    def cancel(self) -> None:
        """End the run for good: nothing requeues it after this.

        It is marked as cancelled first, and stays so also where Slurm then refuses. The end of its
        jobs is waited for, some 10 s at most, that of a process on this machine is not. A run that
        is finished but whose script still works is ended, and stays finished.

        Raises
        ------
        UsageError
            it is finished and nothing works on it, or another user could have written the ids of
            its processes and jobs
        HpcDdpError
            Slurm gives no answer or refuses, or a job is live after the wait, or can't be asked for
        OSError
            the run's folder can't be read
        """
        cancel(self._run)

    def logs(self, rank: int | None = None) -> str:
        """Return what the job has printed so far, or one `rank`, over all attempts.

        The text of a rank is empty before the first attempt. The first 64 MiB of each log count.

        Raises
        ------
        UsageError
            there is no such rank, or, without a `rank`, nothing was printed yet
        OSError
            a log can't be read

        Examples
        --------
        >>> run = find("train")
        >>> "hello" in run.logs(rank=0)
        True
        """
        files = log_files(self._run, rank, None)
        return "".join(map(read_text, files))


def submit(spec: JobSpec | None = None, /, **settings: Any) -> Handle:
    """Submit a job, as ``hpc-ddp submit`` does, and return at once.

    With ``backend="local"`` it is played here, behind this process, and stops with it.

    Parameters
    ----------
    spec
        the job. A field at its default counts as unset: the project's ``hpc-ddp.toml`` and the site
        file may set it. Paths are relative to the working directory.
    settings
        the keys that ``hpc-ddp.toml`` may have, with ``_`` for ``-``: the same without a
        `JobSpec`, or more that one has no field for, such as ``site``; and ``sweep``, values by
        parameter. They come before `spec`.

    Raises
    ------
    UsageError
        a setting is unknown or refused, or the script does not exist; nothing is left behind
    HpcDdpError
        it could not be started; its folder stays only where Slurm gave no answer
    OSError
        the script or the output can't be written, or the process not be started

    Examples
    --------
    >>> import hpc_ddp
    >>> spec = hpc_ddp.JobSpec("train.py", args=("--lr", "0.1"), launcher="srun")
    >>> run = hpc_ddp.submit(spec, backend="local")
    >>> run.wait()
    'finished'
    >>> hpc_ddp.submit(script="train.py", nodse=2)
    Traceback (most recent call last):
        ...
    hpc_ddp.core.errors.UsageError: hpc_ddp.submit: unknown key 'nodse', did you mean 'nodes'?; ...
    """
    cwd = Path.cwd()
    layer = (_set_fields(spec) if spec else {}) | settings
    sweep = layer.pop("sweep", None)
    merged = config.load(_as_file(layer) | _sweep(sweep), cwd, home_folder())
    root = runs_root(merged)
    prepared = plan_new(merged, cwd, root).write()
    with contextlib.ExitStack() as stack:
        output = None
        if prepared.spec.backend in ("local", "salloc"):  # where Slurm would put it
            output = stack.enter_context(open(prepared.run.slurm_out, "ab"))
        started = backends.start(prepared, output)
    return Handle(prepared.run.path, started.process)


def find(run: str | os.PathLike[str], runs_dir: str | None = None) -> Handle:
    """Return the run that a folder, run id, run name (the newest) or job id means.

    Parameters
    ----------
    runs_dir
        where runs are; None: where the command line looks

    Raises
    ------
    UsageError
        there is no such run, or a setting for that folder is refused
    OSError
        a run's folder or journal can't be read, or the name is too long for a path
    """
    return Handle(run_of(os.fspath(run), runs_dir).path)


def _set_fields(spec: JobSpec) -> dict[str, Any]:
    """Return the fields of a job that differ from their default, by name."""
    values = {item.name: (getattr(spec, item.name), default_of(item)) for item in fields(spec)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _as_file(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under the keys of a project file, checked; None counts as not set. Raise
    UsageError for an unknown key or a value of the wrong kind."""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, tuple):
            values[key_of(name)] = list(value)
        elif value is not None:
            values[key_of(name)] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return config.as_options(values, "hpc_ddp.submit")


def _sweep(sweep: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings of a sweep over these values by parameter; {} for None and without a
    parameter. Raise UsageError for anything but a mapping to iterables of values, and for too many
    trials."""
    if not sweep:
        return {}
    if not isinstance(sweep, Mapping) or any(
        isinstance(values, str) or not isinstance(values, Iterable) for values in sweep.values()
    ):
        raise UsageError(
            f"sweep is {sweep!r}; accepted: names, each with its values",
            hint='sweep={"lr": [0.1, 0.01], "seed": [0, 1]}',
        )
    values = {name: tuple(map(str, texts)) for name, texts in sweep.items()}
    return launch_sweep.settings_of(values)
