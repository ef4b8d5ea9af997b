"""A job's plan: from merged settings to a run folder that is ready to start.

`plan_new` returns a `Plan` and writes nothing, as do `plan_continuation` and `plan_rerun` of
restart.py. `Plan.write` makes the folder and returns a `PreparedRun`, which a back-end starts.
"""

from __future__ import annotations

import glob
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hpc_ddp.core import checkpoints
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_io import (
    check_links,
    drafted_folder,
    make_folders,
    write_json,
    write_whole,
)
from hpc_ddp.core.file_owners import check_folder, check_kept_modes
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.slurm_values import array_bound, array_indexes
from hpc_ddp.core.journal.events import Rerun
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.live_jobs import check_idle
from hpc_ddp.submission.run_files import snapshot
from hpc_ddp.submission.run_files.earlier import note_earlier, undo_start
from hpc_ddp.submission.run_files.library import carry_library, close_code
from hpc_ddp.submission.run_files.start_claim import claim_start
from hpc_ddp.submission.script.mistakes import find_mistakes
from hpc_ddp.submission.script.render import Rendering
from hpc_ddp.submission.settings.config import Settings
from hpc_ddp.submission.settings.job import job_spec
from hpc_ddp.submission.settings.machine_checks import check_job
from hpc_ddp.submission.settings.user import user_name


@dataclass(frozen=True)
class Plan:
    """A job as it will run, before anything is written.

    Attributes
    ----------
    spec, run
        the job, and the folder of its run
    code, script
        the snapshot of the code (or the live folder), and the script in it
    is_new
        the run's folder does not exist yet
    copies_code, exclude
        whether `write` takes a snapshot, and the patterns of files that it leaves out
    limits
        the operators' limits for the run, by key
    source
        for a rerun with the same code: the run whose newest snapshot is copied
    rerun_of
        for a rerun: the run that it repeats
    is_forced
        the user states that the run's jobs are over for which Slurm can't be asked
    is_fresh
        the run is to begin at step 0, whatever checkpoints there are
    """

    spec: JobSpec
    run: RunFolder
    code: Path
    script: Path
    is_new: bool
    copies_code: bool = True
    exclude: Sequence[str] = ()
    limits: Mapping[str, Any] = field(default_factory=dict)
    source: RunFolder | None = None
    rerun_of: RunFolder | None = None
    is_forced: bool = False
    is_fresh: bool = False

    @cached_property
    def rendering(self) -> Rendering:
        """The job's script, made at the first access; raises UsageError as `Rendering`."""
        return Rendering(self.spec, self.run, self.code, self.script)

    def warnings(self) -> list[str]:
        """Return sentences: on words of ``without`` that have no effect, on what a user's template
        leaves out, and on each probable mistake in the job. Raise UsageError for a job without a
        script (`rendering`), and for a template that can't be used."""
        return [*self.rendering.warnings(), *find_mistakes(self.spec)]

    def write(self) -> PreparedRun:
        """Write the run's folder, with all that the job needs, and return the run, ready to start.
        Notes on what the copy of the code leaves out, and its progress, go to stderr; a rerun is
        journaled.

        An existing run is claimed first: no other process can start it until `backends.start`, or
        this process, has ended. With `is_forced` its jobs that can't be asked for are journaled as
        over.

        Raises
        ------
        UsageError
            the folder can't be written, was just made by another submit, could be replaced by other
            users, or is on a disk that keeps no permissions; another process starts the run just
            now; a job works on it, or may; the code is too large; git can't list it; a fabric's
            profile, or an existing run's job.json, is broken; `source` has no snapshot of the
            script; or the newest checkpoint is of another version of hpc-ddp. The start is undone
            then (`PreparedRun.discard`)
        """
        prepared = PreparedRun(**{part.name: getattr(self, part.name) for part in fields(self)})
        if not self.is_new:
            try:
                self._claim()
            except OSError as error:
                raise self._unwritable_error(error) from None
        try:
            self._write_files()
        except OSError as error:
            path = self.run.path
            if isinstance(error, FileExistsError) and error.filename in (str(path), path.name):
                raise UsageError(
                    f"the run folder {path} was made by another submit just now",
                    hint="the same command again",
                ) from None
            prepared.discard()
            raise self._unwritable_error(error) from None
        except (UsageError, KeyboardInterrupt):
            prepared.discard()
            raise
        if self.rerun_of:
            self.run.journal("submit").write(Rerun(str(self.rerun_of.path)))
        return prepared

    def _unwritable_error(self, error: OSError) -> UsageError:
        """Return the error for a disk that refuses the run's folder."""
        reason = error.strerror or error
        if isinstance(error, shutil.Error):  # copytree's: a list of (path, copy, reason)
            *_, reason = error.args[0][0]
        return UsageError(
            f"the run folder {self.run.path} can't be written: {reason}",
            hint="--runs-dir, or export HPC_DDP_RUNS=/path/on/scratch",
        )

    def _claim(self) -> None:
        """Claim an existing run for this start, check that no job works on it, and write the note
        by which the start can be undone. Raise UsageError where another process starts the run,
        where a job works on it, or may, and where its newest checkpoint is of another version;
        OSError where the disk refuses. The claim stays then."""
        claim_start(self.run)  # `backends.start` releases it
        check_idle(self.run, self.is_forced)
        if not self.is_fresh:
            _check_formats(self.run)
        note_earlier(self.run)

    def _write_files(self) -> None:
        """Write the run's folder: the library, the code, the job and its limits. Raise UsageError
        and OSError for the reasons that `write` lists; files that are written by then stay."""
        check_folder(self.run)  # before anything is made, and again: a link may have come since
        run = self.run.make(self.is_new)  # and the folders above
        check_kept_modes(run)
        check_folder(run)
        carry_library(run)
        self._write_code(run)
        spec = self.spec
        # The local back-end plays all tasks of job.json: its array is the part that is started.
        if not (self.is_new or run.is_task or spec.backend == "local"):
            spec = _with_all_tasks(spec, run)
        write_whole(run.job_json, spec.to_json(), mode=0o644)
        write_json(run.limits_json, {**self.limits})

    def _write_code(self, run: RunFolder) -> None:
        """Copy the newest snapshot of `source`, or else, with `copies_code`, take a new one; then
        close the run's code to other users' writes. Raise as `snapshot.find_newest` and
        `snapshot.take_snapshot`."""
        if self.source or self.copies_code:
            make_folders(run.code)
        if self.source:
            newest, inside = snapshot.find_newest(self.source, self.spec.program, self.spec.module)
            with drafted_folder(self.code) as draft:
                copy = shutil.copy  # with times of now, as `carry_library`
                shutil.copytree(
                    newest, draft, symlinks=True, copy_function=copy, dirs_exist_ok=True
                )
            snapshot.note_script(self.code, self.spec.program, inside)
        elif self.copies_code:
            snapshot.take_snapshot(self.spec.program, run, self.exclude)
        if self.code.is_relative_to(run.path):  # no live code
            close_code(self.code)


def _with_all_tasks(spec: JobSpec, run: RunFolder) -> JobSpec:
    """Return the job for ``job.json`` of an existing run. Where only a part of an array is started,
    the job's array has also the indexes of the earlier ``job.json``: tasks that have never begun
    are named nowhere else. The limit of tasks at once is the earlier one then. Raise UsageError
    where the earlier ``job.json`` is broken, and OSError where it can't be read."""
    if not (spec.array and run.job_json.exists()):
        return spec
    earlier = JobSpec.from_json(run.job_json.read_bytes()).array
    if not earlier:
        return spec
    indexes = {*array_indexes(earlier)}
    if indexes.issuperset(array_indexes(spec.array)):
        return replace(spec, array=earlier)
    indexes.update(array_indexes(spec.array))
    return replace(spec, array=",".join(map(str, sorted(indexes))) + array_bound(earlier))


@dataclass(frozen=True)
class PreparedRun(Plan):
    """A run whose folder has all that a back-end needs to start it."""

    def discard(self) -> None:
        """Undo `write`, for a run that could not be started. Nothing is raised.

        The folder of a new run is removed, and then the folder above, ``NAME``, if it is empty.
        Files that can't be removed stay, and so does a folder behind another user's link. An older
        run gets its former files back, if `write` has changed any (see `undo_start`).
        """
        if not self.is_new:
            undo_start(self.run)
            return
        with suppress(OSError):
            check_links(self.run.path)
            shutil.rmtree(self.run.path, ignore_errors=True)
            self.run.whole.parent.rmdir()  # fails while there are other runs of the name


def plan_new(settings: Settings, cwd: Path, root: Path) -> Plan:
    """Return the plan of a new run below `root`, the folder of all runs. Relative paths of the
    settings are seen from `cwd`.

    Raises
    ------
    UsageError
        a setting is refused; see `job_spec` and `make_plan`
    OSError
        the script can't be read
    """
    spec = job_spec(settings, cwd)
    return make_plan(spec, new_folder(root, spec), settings, is_new=True)


def new_run_id() -> str:
    """Return an id for a run that begins now, ``<time>-<hex>``. The time is UTC: so ids sort by
    time, also those of several time zones and of the hour that comes twice in autumn."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.urandom(2).hex()}"


def new_folder(root: Path, spec: JobSpec) -> RunFolder:
    """Return the folder of a new run of a job below `root`, ``NAME/<time>-<hex>``; it is not made.
    Where another user has the name, ours is ``NAME-USER``."""
    folder = root / spec.job_name
    # By lstat: a colleague's link counts as the colleague's, also if it leads to a folder of ours.
    if os.path.lexists(folder) and folder.lstat().st_uid != os.geteuid():
        folder = root / f"{spec.job_name}-{user_name()}"
    return RunFolder(folder / new_run_id())


def make_plan(
    spec: JobSpec,
    run: RunFolder,
    settings: Settings,
    is_new: bool,
    source: RunFolder | None = None,
    keeps_code: bool = False,
) -> Plan:
    """Return the plan of a job; nothing is written.

    Parameters
    ----------
    spec, run
        the job, and the folder of its run, which does not exist yet if `is_new`
    settings
        only of these: ``snapshot``, ``snapshot-exclude``, the operators' limits, and which layer
        has set ``container-options``
    source, keeps_code
        which code the job runs: a copy of the newest snapshot of the run `source`; with
        `keeps_code` the newest snapshot of `run`; else a new snapshot. It is the live code where
        `run` has no snapshot to keep, where the settings want none, and for a command or an
        installed module

    Raises
    ------
    UsageError
        a variable is not set here, this shell's locale reads a text wrong, the workers' Python is
        too old, the file of `notify` is refused, container-options have no image, the job exceeds
        the operators' limits, the script is not in the snapshot that is to be used, or the user's
        template can't be used; or as `Rendering`
    """
    check_job(spec, run, settings)
    limits: Mapping[str, Any] = {}
    if settings.limits and spec.backend != "local":
        limits = settings.limits.bounds
    takes_snapshot = bool(settings.get("snapshot", True)) and not keeps_code
    source = source if source and _has_code(spec, source) else None
    code, script, copies_code = _choose_code(spec, run, source, keeps_code, takes_snapshot)
    secret = (glob.escape(os.path.realpath(spec.notify)),) if spec.notify else ()
    exclude = (*settings.get("snapshot-exclude", ()), *secret)
    plan = Plan(spec, run, code, script, is_new, copies_code, exclude, limits, source)
    plan.rendering.text()  # so that a broken template is refused before anything is written
    return plan


def _has_code(spec: JobSpec, run: RunFolder) -> bool:
    """Return whether a job runs the user's code, of which `run` has a copy or gets one: a script,
    or a module of the working directory, also one that is left in the newest copy alone. None is
    made of an installed module, nor for a command, which finds its files where they are."""
    if spec.module and not spec.module_file:
        return snapshot.is_newest_of(run, spec.program)
    return not spec.no_python


def _choose_code(
    spec: JobSpec, run: RunFolder, source: RunFolder | None, keeps_code: bool, takes_snapshot: bool
) -> tuple[Path, Path, bool]:
    """Return the folder of a job's code, the script in it, and whether the code is copied there
    from where it is now. `source` and `keeps_code` are as in `make_plan`; `takes_snapshot` says
    that the settings want a copy. Raise UsageError where a snapshot lacks the script."""
    script, has_code = spec.program, _has_code(spec, run)
    if keeps_code and has_code and run.newest_code:
        code, inside = snapshot.find_newest(run, script, spec.module)
        return code, code / inside, False
    if source:
        code = run.code / "0"
        inside = snapshot.find_newest(source, script, spec.module)[1]
        return code, code / inside, takes_snapshot
    if takes_snapshot and has_code:
        return *snapshot.next_place(script, run), True
    return script.parent, script, False


def _check_formats(run: RunFolder) -> None:
    """Raise UsageError where the newest checkpoint of a run, or of a task of it, has a format that
    this version of hpc-ddp can't read. A checkpoint whose manifest can't be read passes."""
    for folder in (run, *run.tasks()):
        for path in checkpoints.published(folder.checkpoints)[:1]:  # the newest comes first
            with suppress(OSError, ValueError):
                version = checkpoints.read_manifest(path).get("format")
                if isinstance(version, int) and version != checkpoints.FORMAT:
                    raise UsageError(
                        f"{path} has format {version}; this hpc-ddp reads {checkpoints.FORMAT}",
                        hint="submit it with the hpc-ddp that wrote it, or begin at step 0 and keep"
                        f" what there is: {checkpoints.fresh_command(folder)}",
                    )
