"""The plans of runs that exist: the same run continued, or its job as a new run."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_ddp.core import checkpoints
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_io import parse_object
from hpc_ddp.core.file_owners import check_executable
from hpc_ddp.core.job.options import FIELDS, JobSpec
from hpc_ddp.core.job.slurm_values import array_bound, array_indexes
from hpc_ddp.core.job.sweep import parameters_in, trial_args
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission.plan import Plan, PreparedRun, make_plan, new_folder
from hpc_ddp.submission.run_files.earlier import undo_broken_start
from hpc_ddp.submission.settings.config import EXCLUSIVE, JOINED, Settings, put_over
from hpc_ddp.submission.settings.defaults import (
    NO_FILE,
    absolute,
    is_same_program,
    working_directory,
)


def plan_rerun(
    run: RunFolder,
    changes: Mapping[str, str],
    options: Mapping[str, Any],
    settings: Settings,
    cwd: Path,
    root: Path,
    same_code: bool,
) -> Plan:
    """Return the plan of a new run below `root` that repeats the job of `run`; the new run is not
    written. A broken-off start of `run` is undone first (`undo_broken_start`). Notes on stderr name
    settings of another version (`_read_spec`), and doubtful arguments (`with_values`).

    Parameters
    ----------
    run
        any run; an array or a sweep is repeated as a whole, a task of a sweep as a job of its own,
        and a task of another array as an array of its index alone
    changes
        new values of the script's arguments, by name; a sweep's parameters can't be changed
    options
        other new settings, by key; without ``dependency`` the new job waits for no other
    settings
        `options` merged with the settings of files. Only these are read from it: the operators'
        limits, what `make_plan` reads, and lists that begin with the site's (`JOINED`)
    cwd
        the folder that paths in `options` are relative to
    same_code
        use a copy of the run's newest snapshot, not the code as it is now

    Raises
    ------
    UsageError
        a change or an option is refused (also as `make_plan` does), the run's script or snapshot is
        gone, its job.json is broken, it was started by hand or is another user's; or as
        `undo_broken_start`
    OSError
        the run's folder can't be read
    """
    check_executable(run)
    undo_broken_start(run)
    old = _read_spec(run)
    _check_repeatable(run, old, changes)
    changed = {"args": with_values(old.args, changes), **_fields_of(old, options, settings, cwd)}
    changed.setdefault("dependency", None)  # the job that the old one waited for is over
    if run.is_task and JobSpec.from_json((run.whole / "job.json").read_bytes()).sweep:
        changed.setdefault("array", None)  # a job of its own: its arguments have the trial's values
    elif old.array and not run.is_task:
        indexes = old.indexes(task.index for task in run.tasks())
        all_indexes = f"0-{indexes[-1]}" if old.sweep else ",".join(map(str, indexes))
        changed.setdefault("array", all_indexes + array_bound(old.array))
    spec = _with_fields(old, changed)
    _check_folder(spec)
    if not same_code:
        _check_script(spec, hint="hpc-ddp rerun --same-code takes the run's own copy")
    source = run if same_code else None
    plan = make_plan(spec, new_folder(root, spec), settings, is_new=True, source=source)
    return replace(plan, rerun_of=run)


def _check_repeatable(run: RunFolder, old: JobSpec, changes: Mapping[str, str]) -> None:
    """Raise UsageError where `changes` has a parameter of the run's sweep, and for a run that was
    started by hand; `old` is the run's job."""
    for name in changes:
        if name in old.sweep:
            raise UsageError(
                f"{name} is a parameter of the sweep {run.path}",
                hint=f"a new sweep; or of one trial: hpc-ddp rerun {run.task(0).quoted} --set …",
            )
    if not run.lib.exists():
        raise UsageError(
            f"run {run.path} was started by hand: there is no job to start again",
            hint=f"hpc-ddp submit {shlex.join([old.script, *old.args])}",
        )


def with_values(args: Sequence[str], changes: Mapping[str, str]) -> list[str]:
    """Return a script's arguments with new values: each of `changes` (value by name, without
    dashes) takes the place of ``--name value``, ``--name=value`` or Hydra's ``name=value``. A name
    that the arguments do not have is added at the end, in their form (`trial_args`).

    The word behind ``--name`` counts as its value unless it begins with ``--``. A further word
    behind that value, which may be a second value, stays. A name that comes several times comes
    once in the result, at its first place. Notes on stderr name each word that stays so, and each
    name that is added.

    Examples
    --------
    >>> with_values(["data", "--lr", "0.1", "--seed=1"], {"lr": "0.2", "seed": "2"})
    ['data', '--lr=0.2', '--seed=2']
    >>> with_values(["model=vit", "+optimizer.lr=0.1"], {"optimizer.lr": "0.2"})
    ['model=vit', '+optimizer.lr=0.2']
    """
    words = list(zip(args, parameters_in(args), strict=True))  # (word, name of its parameter or "")
    pending = {name.lstrip("+"): name for name in changes}  # "+name" is Hydra's for a new key
    names = set(pending)
    changed: list[str] = []
    while words:
        word, name = words.pop(0)
        start, equals, _ = word.partition("=")
        if name not in names:
            changed.append(word)
            continue
        if not equals and words and not words[0][0].startswith("--"):
            words.pop(0)  # its value
            if words and not words[0][0].startswith("-") and not words[0][1]:
                say(f"note: {words[0][0]!r}, behind the old value of {word}, stays as it is")
        if spelling := pending.pop(name, ""):  # '' where the name has come before
            start = spelling if spelling.startswith("+") else start
            changed.append(f"{start}={changes[spelling]}")
    for name in pending.values():
        say(f"note: {name} is not among the arguments of the run, and is added to them")
    return [*changed, *trial_args({name: changes[name] for name in pending.values()}, args)]


def plan_continuation(
    run: RunFolder,
    options: Mapping[str, Any],
    settings: Settings,
    cwd: Path,
    new_code: bool = False,
) -> Plan:
    """Return the plan of a run that continues: its job with `options` over it, on the back-end that
    `settings` name, and with its own code.

    `options` are by key; `settings` are `options` merged with the settings of files; `cwd` is the
    folder that paths in `options` are relative to. With `new_code`, and for a script or
    ``snapshot`` in `options`, the code is copied anew, unless the settings want no snapshot. An
    array goes on with its unfinished tasks, or with those that `options` name; a task of an array
    goes on alone. Once the run has begun, a ``dependency`` of an earlier start is dropped, except
    ``singleton``.

    A broken-off start of the run is undone first (`undo_broken_start`); else nothing is written.
    A warning on stderr names settings of another version. `Plan.write`, not this function, checks
    that no job works on the run.

    Raises
    ------
    UsageError
        the run, or each task of it, is finished; `options` name other tasks beside a task's run;
        it is another user's; its script is gone; its
        job.json is broken; or an option is refused (also as `make_plan` does); or as
        `undo_broken_start`
    OSError
        the run's folder can't be read
    """
    check_executable(run)
    undo_broken_start(run)
    if "site" in options:
        raise UsageError(
            "--site has no effect beside --run: the run keeps its settings; accepted: single ones",
            hint="--partition, --account, --gpus-per-node …; or a new run, without --run",
        )
    spec = _read_spec(run)
    if _is_over(run, spec):
        raise UsageError(f"run {run.path} is finished", hint="start a new one without --run")
    changed = _fields_of(spec, options, settings, cwd)
    # The run's earlier back-end does not count: a local run may continue in Slurm, and vice versa.
    changed.setdefault("backend", settings.get("backend", "slurm"))
    # Once the run has begun, the jobs that it waited for are over; Slurm may have forgotten them.
    if run.attempts() or run.tasks():
        is_single = "singleton" in re.split("[,?]", spec.dependency or "")
        changed.setdefault("dependency", "singleton" if is_single else None)
    if run.is_task:  # it alone goes on, and keeps its index
        if changed.get("array") not in (None, str(run.index)):
            raise UsageError(
                f"array is {changed['array']!r} for {run.path}, which is one task; accepted: no"
                " --array",
                hint=f"hpc-ddp submit --run {RunFolder(run.whole).quoted} --array TASKS",
            )
        changed["array"] = str(run.index)
    elif spec.array:
        changed.setdefault("array", _unfinished_tasks(run, spec))
    elif changed.get("array"):
        raise UsageError(
            f"array is {changed['array']!r} for run {run.path}, which is no array; accepted: tasks"
            " of an array",
            hint="a new run, without --run",
        )
    spec = _with_fields(spec, changed)
    _check_folder(spec)
    if new_code or options.keys() & {"script", "snapshot"}:
        _check_script(spec, hint="name SCRIPT")
        return make_plan(spec, run, settings, is_new=False)
    if run.newest_code is None:  # it was begun with --no-snapshot
        _check_script(spec, hint="name SCRIPT")
    return make_plan(spec, run, settings, is_new=False, keeps_code=True)


def _read_spec(run: RunFolder) -> JobSpec:
    """Return a run's job. Settings in its job.json that this version of hpc-ddp does not know are
    left out, and named on stderr. Raise UsageError where job.json is broken, and OSError where it
    can't be read."""
    text = run.job_json.read_bytes()
    spec = JobSpec.from_json(text)
    if unknown := sorted(parse_object(text).keys() - FIELDS):
        say(
            f"warning: the run has settings of another version of hpc-ddp, which are left out:"
            f" {', '.join(unknown)}"
        )
    return spec


def _fields_of(
    spec: JobSpec, options: Mapping[str, Any], settings: Settings, cwd: Path
) -> dict[str, Any]:
    """Return the user's `options` (by key) as new values of the fields of `spec`, an existing job,
    by field; ``env`` and ``env_names`` are always among them.

    The paths of ``script``, ``chdir``, ``template`` and ``notify`` become absolute, by `cwd`. The
    user's variables are added to those of `spec`, or replace them. A script in `options` resets the
    flags of `NO_FILE` that `options` lack to False; a script other than the job's gets only the
    arguments in `options`. A list of `JOINED` that `options` have is that of `settings`. Raise
    UsageError for a working directory that does not exist.
    """
    changed = {key.replace("-", "_"): value for key, value in options.items()}
    # In `settings` the site's part of a list (modules, flags of srun) stands before the user's.
    changed |= {key: settings.get(key) for key in JOINED if key in changed}
    if "script" in changed:
        kinds = {key.replace("-", "_"): bool(options.get(key)) for key in NO_FILE}
        program = {"script": spec.script, "module": spec.module, "no-python": spec.no_python}
        if not is_same_program(options, program, cwd):
            changed.setdefault("args", ())
        path = changed["script"] if any(kinds.values()) else absolute(cwd / changed["script"])
        changed |= {**kinds, "script": str(path)}
    if "chdir" in changed:
        changed["chdir"] = working_directory(cwd, changed["chdir"])
    if "template" in changed:
        changed["template"] = str(cwd / changed["template"])
    if changed.get("notify"):
        changed["notify"] = str(absolute(cwd / os.path.expanduser(changed["notify"])))
    merged = put_over({"env": spec.env, "env-names": spec.env_names}, options)
    return changed | {"env": merged["env"], "env_names": merged["env-names"]}


def _with_fields(spec: JobSpec, changed: Mapping[str, Any]) -> JobSpec:
    """Return a job with the `changed` values, by field; other names are passed over. The rival
    (`EXCLUSIVE`) of a changed field becomes None, unless `changed` has it, too. Raise UsageError
    for a refused value."""
    new = {name: value for name, value in changed.items() if name in FIELDS}
    for pair in EXCLUSIVE:
        for key, rival in (pair, pair[::-1]):
            if key.replace("-", "_") in new:
                new.setdefault(rival.replace("-", "_"), None)
    return replace(spec, **new)


def _check_folder(spec: JobSpec) -> None:
    """Raise UsageError where the job's working directory is gone, as a git work tree may be."""
    if not Path(spec.chdir).is_dir():
        raise UsageError(
            f"the run's working directory {spec.chdir!r} does not exist any more",
            hint="--chdir DIR",
        )


def _check_script(spec: JobSpec, hint: str) -> None:
    """Raise UsageError, with this hint, where the job's script, a file, is gone."""
    if not (spec.module or spec.no_python or spec.program.is_file()):
        raise UsageError(f"script {spec.script!r} does not exist any more", hint=hint)


def _is_over(run: RunFolder, spec: JobSpec) -> bool:
    """Return whether a run is finished, and its teardown, too. Raise as `RunFolder.finished`."""
    return run.finished() and not run.lacks_teardown(spec.teardown)


def _unfinished_tasks(run: RunFolder, spec: JobSpec) -> str:
    """Return the option ``array`` for the tasks of an array that are not over: their indexes, and
    the array's limit of tasks at once, as ``0,3%2``. Raise UsageError where all are finished, and
    OSError where a journal can't be read."""
    indexes = spec.indexes(task.index for task in run.tasks())
    unfinished = [str(index) for index in indexes if not _is_over(run.task(index), spec)]
    if not unfinished:
        raise UsageError(
            f"all tasks of {run.path} are finished", hint=f"hpc-ddp status {run.quoted}"
        )
    return ",".join(unfinished) + array_bound(spec.array or "")


def set_aside(prepared: PreparedRun) -> list[Path]:
    """Move the checkpoints of a continued run aside, so that it begins at step 0; of an array those
    of the tasks that go on. The journals note it.

    Return the folders where the checkpoints are now, one for each run that had some; nothing is
    deleted.

    Raises
    ------
    UsageError
        the disk refuses it; checkpoints that were moved before stay aside
    """
    run, array = prepared.run, prepared.spec.array
    try:
        # A run that is no array has no tasks, and is moved itself.
        tasks = [task for task in run.tasks() if array and task.index in array_indexes(array)]
        runs = tasks or [run]
        return [folder for folder in map(checkpoints.set_aside, runs) if folder]
    except OSError as error:
        raise UsageError(
            f"the checkpoints of {run.path} can't be set aside: {error.strerror}",
            hint="the same command again, when the disk answers",
        ) from None
