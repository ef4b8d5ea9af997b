"""From merged settings to a run folder that is ready to start."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hpc_ddp import slurm
from hpc_ddp.launch import snapshot
from hpc_ddp.launch.config import Settings, job_spec, working_directory
from hpc_ddp.launch.render import Rendering
from hpc_ddp.run import process
from hpc_ddp.run.errors import UsageError
from hpc_ddp.run.folder import RunFolder, read_json, write_json
from hpc_ddp.run.spec import JobSpec, array_indexes


@dataclass(frozen=True)
class Prepared:
    """A run whose folder has all that a back-end needs. `script` is the one that runs, in the
    snapshot at `code` (or live); `is_new` tells that the folder was made just now."""

    spec: JobSpec
    run: RunFolder
    code: Path
    script: Path
    is_new: bool

    @property
    def rendering(self) -> Rendering:
        return Rendering(self.spec, self.run, self.code, self.script)

    def discard(self) -> None:
        """Take a new run's folder away again, since nothing came of it."""
        if self.is_new:
            shutil.rmtree(self.run.path, ignore_errors=True)


def new_run(settings: Settings, cwd: Path, root: Path) -> Prepared:
    """Make the folder of a new run below `root`.

    Raises
    ------
    UsageError
        a setting is refused; nothing is left behind
    """
    return make(planned_run(settings, cwd, root), settings, cwd)


def planned_run(settings: Settings, cwd: Path, root: Path) -> Prepared:
    """Return what `new_run` would make, and make nothing."""
    spec = job_spec(settings, cwd)
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    return plan(spec, RunFolder(root / spec.name / run_id), settings, is_new=True)


def continued_run(
    run: RunFolder, options: Mapping[str, Any], settings: Settings, cwd: Path
) -> Prepared:
    """Make a run ready to go on: the job that it was, with `options` over it, and fresh code.

    Raises
    ------
    UsageError
        the run is finished, or an option is refused
    """
    return make(planned_continuation(run, options, settings, cwd), settings, cwd)


def planned_continuation(
    run: RunFolder, options: Mapping[str, Any], settings: Settings, cwd: Path
) -> Prepared:
    """Return what `continued_run` would make, and make nothing."""
    if run.finished():
        raise UsageError(f"run {run.path} is finished", hint="start a new one without --run")
    _check_idle(run)
    spec = JobSpec.from_json(run.job_json.read_text())
    names = {field.name for field in fields(JobSpec)}
    changed = {key.replace("-", "_"): value for key, value in options.items()}
    if "script" in changed:
        changed["script"] = str((cwd / changed["script"]).absolute())
    if "chdir" in changed:
        changed["workdir"] = working_directory(cwd, changed["chdir"])
    if "template" in changed:
        changed["template"] = str(cwd / changed["template"])
    if "env" in changed:
        changed["env"] = {**spec.env, **changed["env"]}
    # The back-end is not the run's: what was tried here may go on there, and the other way round.
    changed.setdefault("backend", settings.get("backend", "slurm"))
    if run.is_task:  # it alone goes on, and keeps its index
        changed["array"] = str(run.index)
    elif spec.array:
        changed.setdefault("array", _unfinished(run, spec))
    spec = replace(spec, **{key: value for key, value in changed.items() if key in names})
    if not Path(spec.script).is_file():
        raise UsageError(f"script {spec.script!r} does not exist any more", hint="name SCRIPT")
    return plan(spec, run, settings, is_new=False)


def _unfinished(run: RunFolder, spec: JobSpec) -> str:
    """Return the indexes of the array's tasks that are not finished, with its bound (``%2``)."""
    array = spec.array or ""
    begun = (task.index for task in run.tasks())
    # The last submit may have been of some of them only.
    known = range(len(spec.points)) if spec.sweep else sorted({*begun, *array_indexes(array)})
    left = [str(index) for index in known if not run.task(index).finished()]
    if not left:
        raise UsageError(f"all tasks of {run.path} are finished", hint=f"hpc-ddp status {run.id}")
    _, percent, bound = array.partition("%")
    return ",".join(left) + percent + bound


def plan(spec: JobSpec, run: RunFolder, settings: Settings, is_new: bool) -> Prepared:
    """Return the job as it would run there; nothing is written.

    Raises
    ------
    UsageError
        a variable is not set here, or the user's template is broken
    """
    _check_environment(spec)
    script = Path(spec.script)
    code = script.parent
    if settings.get("snapshot", True):
        code, script = snapshot.place(script, run)
    prepared = Prepared(spec, run, code, script, is_new)
    prepared.rendering.whole()  # a broken template ends it before anything is written
    return prepared


def make(prepared: Prepared, settings: Settings, cwd: Path) -> Prepared:
    """Make the folder of a planned run, with all that it needs."""
    run, spec = prepared.run, prepared.spec
    try:
        run.make()
        snapshot.carry_library(run)
        if settings.get("snapshot", True):
            snapshot.take(Path(spec.script), run, settings.get("snapshot-exclude", ()))
        run.job_json.write_text(spec.to_json())
        write_json(run.asked_json, _asked(run, settings, cwd))
    except OSError as error:
        prepared.discard()
        raise UsageError(
            f"the run folder {run.path} can't be written: {error.strerror}",
            hint="--runs-dir, or export HPC_DDP_RUNS=/path/on/scratch",
        ) from None
    except UsageError:
        prepared.discard()
        raise
    return prepared


def _asked(run: RunFolder, settings: Settings, cwd: Path) -> dict[str, Any]:
    """Return what was said on the command line, over what was said when the run began."""
    before = read_json(run.asked_json)
    said = next((layer.values for layer in settings.layers if layer.kind == "option"), {})
    return {"cwd": str(cwd), "options": over(before.get("options", {}), said)}


def over(options: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with others over them: ``env`` name by name, and SCRIPT without its ARGS."""
    merged = {**options, **others}
    if "env" in options and "env" in others:
        merged["env"] = {**options["env"], **others["env"]}
    return merged


def _check_idle(run: RunFolder) -> None:
    """Refuse a run that is queued or under way: its next job would find it taken."""
    starts = [e for e in run.events() if e["event"] in ("queued", "started")]
    info = max(starts, key=lambda event: float(event["time"]), default={})
    job_id = info.get("job_id")
    if job_id and job_id != os.environ.get("SLURM_JOB_ID") and slurm.is_pending_or_running(job_id):
        raise UsageError(f"run {run.path} is job {job_id} by now", hint=f"hpc-ddp cancel {job_id}")
    if process.is_live(info):
        raise UsageError(f"run {run.path} runs here", hint=f"hpc-ddp cancel {run.id}")


def _check_environment(spec: JobSpec) -> None:
    for name in spec.env_names:
        if name not in os.environ:
            raise UsageError(f"--env {name}: {name} is not set here", hint=f"export {name}=…")
