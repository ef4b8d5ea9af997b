"""hpc-ddp from Python: submit a job, and look after its run. All of it is ``hpc_ddp.<name>``.

It means what the command line means: ``hpc-ddp.toml`` and site files count, runs lie where
``hpc-ddp status`` finds them, and Python can look after a run of the command line, and the reverse.
Errors are `HpcDdpError`, or its subclass `UsageError` where the request itself is wrong. An error
of a disk is an OSError.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hpc_ddp import slurm
from hpc_ddp.core.errors import HpcDdpError, HpcDdpWarning, UsageError
from hpc_ddp.core.file_io import read_text
from hpc_ddp.core.job import sweep as launch_sweep
from hpc_ddp.core.job.option_declaration import default_of, key_of
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.live_jobs import Queue, describe_work, read_queue
from hpc_ddp.report.cancel import cancel
from hpc_ddp.report.logs.files import find_log_files
from hpc_ddp.report.status.run_status import Status, status_of
from hpc_ddp.submission import backends
from hpc_ddp.submission.plan import plan_new
from hpc_ddp.submission.settings import config
from hpc_ddp.submission.settings.runs_dir import run_of, runs_root
from hpc_ddp.submission.settings.user import home_folder

__all__ = ["Handle", "HpcDdpError", "HpcDdpWarning", "JobSpec", "Status", "UsageError"]
__all__ += ["find", "submit"]

FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 10.0  # between two looks of `wait`; for a job a look asks Slurm


@dataclass(frozen=True)
class Handle:
    """A run, to be looked after; made by `submit` and `find`.

    Attributes
    ----------
    path
        the run's folder, with its script, logs, checkpoints and journal
    """

    path: Path
    # The background process that `submit` has started; None but for the local and salloc back-ends.
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False, compare=False)

    @property
    def _run(self) -> RunFolder:
        return RunFolder(self.path)

    @property
    def id(self) -> str:
        """``<run id>``, as `hpc-ddp status` has it; of a task of an array ``<run id>/task-<n>``."""
        return self._run.id

    @property
    def name(self) -> str:
        """The job's name; ``NAME-USER`` where another user's runs have the folder of that name."""
        return self._run.name

    @property
    def job_id(self) -> str | None:
        """The id of the newest Slurm job of the run; None where it has had none. Raises OSError
        where the run's journal can't be read."""
        jobs = self._run.jobs(self._run.events())
        return jobs[-1].id if jobs else None

    @property
    def state(self) -> str:
        """The run's state in one word, as `hpc-ddp status` has it: ``waiting``, ``running``,
        ``finished``, ``failed``, ``cancelled``, ``stopped`` … For a run that has a job, Slurm is
        asked each time. Raises OSError where the journal can't be read."""
        return str(self.status().state)

    def status(self) -> Status:
        """Return all that a line of `hpc-ddp status` has: step, loss, goodput, results …

        Slurm is asked for a run that has a job; without an answer the state is that of the journal
        alone. Raises OSError where the journal can't be read.
        """
        return status_of(self._run, read_queue() if self.job_id else Queue(None))

    def wait(self, timeout: float | None = None) -> str:
        """Wait until no process or job works on the run any more, and none will; return its state.

        A job that is requeued is waited for until its last attempt is over. A job counts as not
        over while Slurm gives no answer, or where its cluster can't be asked from here; a process
        of another machine counts as not over until the journal has its end. With the handle that
        `submit` has returned, a local run, or one in an allocation, is over when its process here
        has ended.

        Parameters
        ----------
        timeout
            how long to wait at most, in seconds; None: without end

        Raises
        ------
        TimeoutError
            the run was not over by then
        HpcDdpError
            the run has a job, and this machine has no Slurm client, or Slurm refuses
        OSError
            the run's journal can't be read

        Examples
        --------
        >>> run = submit(script="train.py", backend="local", launcher="srun")
        >>> run.wait(timeout=300)
        'finished'
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        pause_s = FIRST_PAUSE_S
        while self._is_at_work():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"run {self.id} is not over after {timeout:g} s")
            time.sleep(min(pause_s, left_s))
            pause_s = min(1.5 * pause_s, LAST_PAUSE_S)
        return self.state

    def _is_at_work(self) -> bool:
        """Return whether a process or a job works on the run, or will work on it. If `submit` has
        started a process for this handle, that process alone counts. Otherwise Slurm is asked for a
        run that has a job; the result is True also while Slurm gives no answer.

        Raise HpcDdpError where Slurm refuses, or a run with a job is on a machine without a Slurm
        client; and OSError where the journal can't be read.
        """
        if self._process:
            return self._process.poll() is None
        try:
            queue = Queue(slurm.list_jobs() if self.job_id else {})
        except slurm.NoAnswerError:  # it will come back
            return True
        return describe_work(self._run, queue) is not None

    def cancel(self) -> None:
        """End the run for good, an array with all tasks: nothing requeues it after this.

        The run is marked as cancelled first, and keeps the mark also where Slurm then refuses. A
        process of it on this machine gets SIGTERM, and its end is not waited for. Its jobs are
        cancelled, and their end is waited for, some 10 s at most. A run that is finished but whose
        script still works is ended, too, and stays finished.

        Raises
        ------
        UsageError
            the run is finished and nothing works on it, or another user could have written the ids
            of its processes and jobs
        HpcDdpError
            Slurm gives no answer or refuses; or a job is live after the wait; or a job or process
            can't be asked for from here
        OSError
            the run's folder can't be read
        """
        cancel(self._run)

    def logs(self, rank: int | None = None) -> str:
        """Return the text that the job, or with `rank` that rank, has printed so far, over all
        attempts.

        The job's text has the launcher's lines and rank 0's; rank 0's alone where a dry run printed
        to a terminal. The text of a rank is '' before the first attempt. The first 64 MiB of each
        log count.

        Raises
        ------
        UsageError
            no attempt has a log of that rank; or, without a `rank`, nothing was printed yet, or the
            script was started by hand and printed to its terminal
        OSError
            a log, an attempt's folder or the journal can't be read

        Examples
        --------
        >>> run = find("train")
        >>> "hello" in run.logs(rank=0)
        True
        """
        files = find_log_files(self._run, rank, None)
        return "".join(map(read_text, files))


def submit(spec: JobSpec | None = None, /, **settings: Any) -> Handle:
    """Submit a job, as ``hpc-ddp submit`` does, and return its handle without waiting for its end.

    With ``backend="local"`` a background process plays the job on this machine; when this process
    ends, the background process gives the workers notice to save and stop. The job's output goes to
    the run's ``logs``.

    Parameters
    ----------
    spec
        the job. A field at its default counts as unset: the project's ``hpc-ddp.toml`` and the site
        file may set it. Paths are relative to the working directory.
    settings
        keys of ``hpc-ddp.toml``, with ``_`` for ``-``, without a `spec` or together with one. They
        win over the fields of `spec`; some, as ``site``, are no field. A setting of None counts as
        unset, also where `spec` has a value for it. A further key is ``sweep``: a mapping of each
        parameter's name to its values.

    Raises
    ------
    UsageError
        a setting is unknown or refused, the script does not exist, or the run's folder can't be
        written; nothing is left behind
    HpcDdpError
        the job could not be started; its folder stays only where Slurm gave no answer
    OSError
        the script or the journal can't be read, the batch script or the output not be written, or
        the process not be started

    Warns
    -----
    HpcDdpWarning
        the job is probably not what was meant: each sentence that the command prints behind
        ``warning:``

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
    layer = (_non_default_fields(spec) if spec else {}) | settings
    sweep = layer.pop("sweep", None)
    merged = config.load(_checked_settings(layer) | _sweep_settings(sweep), cwd, home_folder())
    root = runs_root(merged)
    plan = plan_new(merged, cwd, root)
    for text in plan.warnings():
        warnings.warn(text, HpcDdpWarning, stacklevel=2)
    prepared = plan.write()
    with contextlib.ExitStack() as stack:
        output = None
        if prepared.spec.backend in ("local", "salloc"):  # where Slurm would put it
            try:
                output = stack.enter_context(open(prepared.run.slurm_out, "ab"))
            except OSError:
                prepared.discard()
                raise
        started = backends.start(prepared, output)
    return Handle(prepared.run.path, started.process)


def find(run: str | os.PathLike[str], runs_dir: str | None = None) -> Handle:
    """Return a handle of the run that `run` names; for a job id Slurm may be asked for its cluster.

    Parameters
    ----------
    run
        a folder, job id, run id or run name (the newest run of it); the first of these that fits
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


def _non_default_fields(spec: JobSpec) -> dict[str, Any]:
    """Return the values of a job's fields that differ from their default, by the field's name."""
    settings = {field.name: getattr(spec, field.name) for field in fields(spec)}
    defaults = {field.name: default_of(field) for field in fields(spec)}
    return {name: setting for name, setting in settings.items() if setting != defaults[name]}


def _checked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under the keys of a project file (``-`` for ``_``). Settings of None are left
    out, tuples become lists, and paths become texts. Raise UsageError for an unknown key or a value
    of the wrong kind."""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, tuple):
            values[key_of(name)] = list(value)
        elif value is not None:
            values[key_of(name)] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return config.as_options(values, "hpc_ddp.submit")


def _sweep_settings(sweep: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings ``sweep`` and ``array`` for a mapping of each parameter's name to its
    values, which become texts; {} for None and an empty mapping. Raise UsageError for anything but
    a mapping of texts to iterables that are no texts themselves, and for too many trials. A
    parameter without a value passes: `JobSpec` refuses it."""
    sweep = {} if sweep is None else sweep  # () or "" is no mapping, and refused
    if not isinstance(sweep, Mapping) or any(
        isinstance(values, (str, bytes))
        or not (isinstance(name, str) and isinstance(values, Iterable))
        for name, values in sweep.items()
    ):
        raise UsageError(
            f"sweep is {sweep!r}; accepted: names, each with its values",
            hint='sweep={"lr": [0.1, 0.01], "seed": [0, 1]}',
        )
    values = {name: tuple(map(str, texts)) for name, texts in sweep.items()}
    return launch_sweep.settings_of(values) if values else {}
