"""The checks of a `JobSpec`: each raises an error with what is accepted, and a hint."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.option_declaration import key_of
from hpc_ddp.core.job.slurm_options import NODE_BY_NODE, SBATCH_REFUSED, SRUN_SETTLED, split_raw
from hpc_ddp.core.job.slurm_values import (
    array_indexes,
    check_time_min,
    is_unlimited,
    parse_signal,
    parse_time,
)
from hpc_ddp.core.job.sweep import check_sweep
from hpc_ddp.core.job.variables import OF_USERS, SECRET_NAME, URL_WITH_PASSWORD, names_in

if TYPE_CHECKING:
    from hpc_ddp.core.job.options import JobSpec

LONGEST_VARIABLE = 131_072  # bytes of ``NAME=VALUE`` that Linux takes, with its end
# torchrun's own options that hpc-ddp sets, or the job looks up, and what to use instead.
TORCHRUN_SETTLED = {
    **dict.fromkeys(
        ("rdzv-", "node-rank", "master-addr", "master-port", "local-addr", "role"),
        "nothing: the job finds its nodes and a free port itself",
    ),
    **dict.fromkeys(("nnodes", "standalone"), "--nodes"),
    "nproc-per-node": "--nproc-per-node, or --gpus-per-node",
    "max-restarts": "--max-restarts",
    "start-method": "nothing: workers are processes of their own",
    **dict.fromkeys(
        (
            *("log-dir", "redirects", "tee", "logs-specs", "local-ranks-filter"),
            *("log-line-prefix-template", "duplicate-stdout-filters", "duplicate-stderr-filters"),
        ),
        "nothing: each rank has a log, see `hpc-ddp logs --rank`",
    ),
    **dict.fromkeys(("module", "m"), "hpc-ddp's own --module, before SCRIPT"),
    **dict.fromkeys(("no-python", "run-path"), "hpc-ddp's own --no-python, before SCRIPT"),
    **dict.fromkeys(("help", "print-completion"), "torchrun --help, in a shell"),
    "signals-to-handle": "nothing: the supervisor handles signals",
}
_MPIRUN_SETTLED = (
    *("-np", "--np", "-n", "--n", "-c", "-N", "-npernode", "--npernode", "--map-by", "--rank-by"),
    *("-H", "-host", "--host", "-hostfile", "--hostfile", "-machinefile", "--machinefile"),
)

GPUS = re.compile(r"(?:(?P<type>[\w.-]+):)?(?P<count>\d+)", re.A)
JOB_NAME = re.compile(r"\w[\w .+=,@-]{0,99}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TORCHRUN = re.compile(r"--?(?P<name>[a-z][a-z_-]*)(=[\w./:,@%+=-]+)?")
_MODULE = re.compile(r"[^\W\d][\w-]*(\.[^\W\d][\w-]*)*")  # of Python -m
_NO_BYTE = "[\ud800-\udc7f\udd00-\udfff]"  # stand-ins for nothing, as JSON may have


def check(spec: JobSpec) -> None:
    """Raise UsageError for the first bad value of a job. The values have the types of their fields;
    a value of another type may raise any error."""
    _check_texts(spec)
    _check_python(spec.python)
    _check_nodes(spec.nodes)
    for declared in fields(spec):
        content = getattr(spec, declared.name)
        is_unset = content is None and declared.default is None
        if "option" in declared.metadata and not is_unset:
            declared.metadata["option"].check(key_of(declared), content)
    _check_notation(spec)
    _check_names(spec)
    if spec.gpus_per_node is not None and not GPUS.fullmatch(spec.gpus_per_node):
        raise UsageError(
            f"gpus-per-node {spec.gpus_per_node!r} is neither a number nor type:number",
            hint="--gpus-per-node 4, or --gpus-per-node a100:4",
        )
    _check_resume(spec)
    _check_sbatch(spec)
    _check_env(spec)
    _check_container(spec)
    _check_torchrun(spec)
    _check_tasks(spec)
    if spec.array and spec.continue_by == "resubmit":
        raise UsageError(
            "a chain of jobs can't be an array, nor a sweep", hint="--continue-by requeue"
        )
    check_sweep(spec)
    _check_budget(spec)


def _check_notation(spec: JobSpec) -> None:
    """Parse the values in Slurm's notation: signal, times and array. Raise UsageError for one of
    another form, a time of 0, and a least time that `check_time_min` refuses."""
    parse_signal(spec.signal)
    if spec.time is not None and not is_unlimited(spec.time) and parse_time(spec.time) <= 0:
        raise UsageError(
            f"time {spec.time!r} is zero; accepted: a positive Slurm time, UNLIMITED",
            hint="--time 1:00:00; without it the partition's own limit holds",
        )
    check_time_min(spec.time_min, spec.time, spec.warn_s)
    if spec.array:
        array_indexes(spec.array)


def _check_names(spec: JobSpec) -> None:
    """Check the names of the module and of the job. Raise UsageError for a bad one, and for
    ``--module`` and ``--no-python`` at once."""
    if spec.module and spec.no_python:
        raise UsageError(
            "--module and --no-python exclude each other: a module needs Python", hint="one of them"
        )
    if spec.module and not _MODULE.fullmatch(spec.script):
        raise UsageError(
            f"{spec.script!r} is no module; accepted with --module: a name such as package.train",
            hint="hpc-ddp submit -m package.train --lr 0.1",
        )
    if not JOB_NAME.fullmatch(spec.job_name):
        raise UsageError(
            f"job name {spec.job_name!r} can't be the name of a folder; accepted: up to 100"
            " letters, digits, spaces and any of . _ + = , @ -, with a letter or digit first",
            hint="--job-name my-training",
        )


def _check_resume(spec: JobSpec) -> None:
    """Check the arguments of a resume. Raise UsageError where they can't be split into words, and
    for a ``resume-if`` without ``resume-args``."""
    try:
        shlex.split(spec.resume_args)
    except ValueError as error:
        raise UsageError(
            f"resume-args is {spec.resume_args!r}: {error}; accepted: words, quoted as in a shell",
            hint="--resume-args '--init_from=resume'",
        ) from None
    if spec.resume_if and not spec.resume_args:
        raise UsageError(
            f"resume-if {spec.resume_if!r} has no resume-args beside it; accepted: both",
            hint="--resume-args '--init_from=resume' --resume-if out/ckpt.pt",
        )


def _check_sbatch(spec: JobSpec) -> None:
    """Check the raw options of sbatch. Raise UsageError for one that `split_raw` refuses, and for
    one that would break what hpc-ddp does with the job."""
    for raw in spec.sbatch:
        name, _ = split_raw(raw, "sbatch", "--network=x")
        if name in SBATCH_REFUSED:
            does, instead = SBATCH_REFUSED[name]
            raise UsageError(f"sbatch option --{name} {does}", hint=instead)
        if name in ("hold", "begin") and spec.continue_by == "resubmit":
            raise UsageError(
                f"sbatch option --{name} would hold up each job of the chain, and not only the"
                " first; accepted: jobs that continue by a requeue",
                hint="scontrol hold JOB, once the first one is submitted",
            )


def _check_budget(spec: JobSpec) -> None:
    """Check the bound on GPU hours of a run, None for no bound; raise UsageError for anything but a
    number above 0."""
    hours = spec.budget_gpu_hours
    if hours is not None and not (isinstance(hours, (int, float)) and hours > 0):
        raise UsageError(
            f"budget-gpu-hours is {hours!r}; accepted: a number above 0",
            hint="--budget-gpu-hours 100",
        )


def _check_tasks(spec: JobSpec) -> None:
    """Check the settings of the Slurm step: its launcher, its CPUs, its raw options. Raise
    UsageError for settings that exclude each other, for fewer CPUs than tasks, and where
    `_check_step_options` does."""
    _check_step_options(spec)
    if spec.launcher != "torchrun" and not isinstance(spec.nodes, int):
        raise UsageError(
            f"nodes is {spec.nodes}, and with --launcher {spec.launcher} Slurm has to know how many"
            " tasks there are; accepted: a whole number",
            hint="--nodes 2, or --launcher torchrun",
        )
    command = spec.step_command
    if command != "srun" and (spec.elastic or spec.srun):
        raise UsageError(f"{command} excludes --elastic and --srun", hint="--step-launcher srun")
    if spec.step_launcher not in ("srun", command):
        raise UsageError(
            f"step-launcher {spec.step_launcher} excludes --launcher {spec.launcher}",
            hint=f"--launcher {spec.step_launcher}, or --step-launcher srun",
        )
    if command != "srun" and (spec.preflight or spec.backend == "submitit"):
        raise UsageError(
            f"the preflight and submitit need srun, and {command} starts the tasks",
            hint="--step-launcher srun, or without --preflight and with --backend slurm",
        )
    if spec.mpirun and command == "srun":
        raise UsageError(
            "options of mpirun have no effect: srun starts the tasks",
            hint="--launcher mpirun, a task for each worker; or --step-launcher mpirun, one a node",
        )
    if spec.cpus_per_node is not None and spec.cpus_per_task is not None:
        raise UsageError(
            f"cpus-per-node {spec.cpus_per_node} and cpus-per-task {spec.cpus_per_task} are two"
            " ways to set the same; accepted: one of them",
            hint="--cpus-per-node alone",
        )
    if spec.cpus_per_node is not None and spec.cpus_per_node < spec.tasks_per_node:
        raise UsageError(
            f"cpus-per-node is {spec.cpus_per_node}; accepted: one CPU or more for each of the"
            f" {spec.tasks_per_node} tasks of a node",
            hint=f"--cpus-per-node {spec.tasks_per_node}",
        )


def _check_step_options(spec: JobSpec) -> None:
    """Check the raw options of srun and mpirun. Raise UsageError for an option that hpc-ddp sets
    itself, for one of srun's that `split_raw` refuses, and for mpirun's that can't be split into
    words."""
    for raw in spec.srun:
        name, text = split_raw(raw, "srun", "--gpu-bind=closest")
        if name in SRUN_SETTLED and not (name == "distribution" and NODE_BY_NODE.fullmatch(text)):
            raise UsageError(
                f"srun option --{name} is set by hpc-ddp; accepted: others of srun's",
                hint=f"in its place: {SRUN_SETTLED[name]}",
            )
    for word in mpirun_words(spec.mpirun):
        if word.partition("=")[0] in _MPIRUN_SETTLED:
            raise UsageError(
                f"mpirun option {word} is set by hpc-ddp; accepted: others of mpirun's",
                hint="nodes and workers: --nodes, --nproc-per-node",
            )


def _check_container(spec: JobSpec) -> None:
    """Check the settings of a container. Raise UsageError for a command that can't be split into
    words, for a container and an image at once, and for ``--stage`` with one of these or
    submitit."""
    if spec.stage and (spec.container or spec.image or spec.backend == "submitit"):
        raise UsageError(
            "--stage is not for containers, whose image is one file already, nor for submitit",
            hint="without --stage, or --backend slurm and no container",
        )
    if spec.container and spec.image:
        raise UsageError(
            f"container {spec.container!r} and image {spec.image!r} are two ways to say one thing",
            hint="--image alone, or --container with the whole command",
        )
    try:
        shlex.split(spec.container or "")
    except ValueError as error:
        raise UsageError(
            f"container {spec.container!r} can't be split into words: {error}",
            hint="--container 'apptainer exec --nv image.sif'",
        ) from None


def _check_torchrun(spec: JobSpec) -> None:
    """Check raw options of torchrun, restarts, and ``--elastic``. Raise UsageError for settings
    that exclude each other, for an option of another form than ``--name`` or ``--name=value``, and
    for an option that hpc-ddp sets itself, also where only the beginning of its name is given."""
    if spec.launcher != "torchrun" and (spec.torchrun or spec.restarts or spec.elastic):
        raise UsageError(
            "without torchrun there are no --max-restarts, --elastic and --torchrun",
            hint="--launcher torchrun",
        )
    if spec.elastic and spec.restarts < 1:
        raise UsageError(
            "an elastic job restarts its workers when a node is lost, and max-restarts is 0",
            hint="--elastic, without --max-restarts",
        )
    for word in spec.torchrun:
        match = _TORCHRUN.fullmatch(word)
        if not match:
            raise UsageError(
                f"torchrun option {word!r} is not of the form --name or --name=value",
                hint="--torchrun=--numa-binding=node",
            )
        name = match["name"].replace("_", "-")
        for settled, ours in TORCHRUN_SETTLED.items():
            if settled.startswith(name) or name.startswith("rdzv-"):  # a beginning, or any rdzv-
                raise UsageError(
                    f"torchrun option --{name} is set by hpc-ddp; accepted: others of torchrun's",
                    hint=f"in its place: {ours}",
                )


def _texts_in(setting: Any) -> Iterator[str]:
    """Yield the texts of a setting: itself, or those in a list, or in the values of a table."""
    if isinstance(setting, str):
        yield setting
    elif isinstance(setting, (list, tuple, Mapping)):
        parts = setting.values() if isinstance(setting, Mapping) else setting
        yield from (text for part in parts for text in _texts_in(part))


def _check_texts(spec: JobSpec) -> None:
    """Check the characters of a job's texts. Raise UsageError for an empty value of an option that
    may be left out; for a value of an ``#SBATCH`` line that can't be printed, as a line break; and
    for NUL, or bytes that are no UTF-8, in any text, of lists and tables as well."""
    for item in fields(spec):
        text, declared = getattr(spec, item.name), item.metadata.get("option")
        is_directive = declared and declared.is_sbatch
        key = key_of(item)
        if declared and item.default is None and text == "":
            raise UsageError(
                f"{key} is an empty text; accepted: a value, or no --{key}",
                hint=f"a variable behind --{key} may not be set",
            )
        if is_directive and isinstance(text, str) and not text.isprintable():
            raise UsageError(
                f"{key} {text!r} has a character that an #SBATCH line can't hold",
                hint=f"leave out line breaks and control characters in --{key}",
            )
    for text in _texts_in([getattr(spec, item.name) for item in fields(spec)]):
        if "\0" in text or not _is_unicode(text):
            content = os.fsencode(re.sub(_NO_BYTE, "\udcff", text))
            is_locale_wrong = _is_unicode(content.decode(errors="surrogateescape"))
            raise UsageError(
                f"{text!r} holds a NUL or bytes that are no UTF-8, which a script can't",
                hint="export LC_ALL=C.UTF-8: this shell's locale knows ASCII alone"
                if is_locale_wrong and "\0" not in text
                else "rename it, or leave those characters out",
            )


def _check_python(python: str) -> None:
    """Check the name or path of Python. Raise UsageError for an empty text; for an option, which
    srun would take for its own; and for several words, unless the first has a slash: a path may
    have blanks."""
    first, *words = python.split() or [""]
    if not first or first.startswith("-") or (words and "/" not in first):
        raise UsageError(
            f"python {python!r} is no program; accepted: one name, or a path",
            hint='for words around it a script: #!/bin/sh, then exec nice -n 5 python3 "$@"',
        )


def _is_unicode(text: str) -> bool:
    """Return whether a text can be written as UTF-8: it has none of Python's stand-ins for bytes
    that it could not decode."""
    return not re.search("[\ud800-\udfff]", text)


def _check_nodes(nodes: int | str) -> None:
    """Check a number of nodes. Raise UsageError for anything but a number from 1 to 999,999, or a
    range of such, as ``1-4``."""
    match = re.fullmatch(r"(\d{1,6})-(\d{1,6})", nodes, re.A) if isinstance(nodes, str) else None
    if match and 1 <= int(match[1]) <= int(match[2]):
        return
    if not isinstance(nodes, int) or isinstance(nodes, bool) or not 1 <= nodes < 10**6:
        raise UsageError(
            f"nodes is {nodes}; accepted: a whole number from 1, or a range of them, as 1-4",
            hint="--nodes 1, or --nodes 1-4",
        )


def _check_env(spec: JobSpec) -> None:
    """Check the variables of a job. Raise UsageError for a bad name in `env`, `env_names` or
    `expand`, and for a value of `env` that looks like a secret, is too long for Linux, or is none
    that a variable of hpc-ddp accepts."""
    of_expand = (name.removesuffix("[@]") for name in spec.expand)
    for name in (*spec.env, *spec.env_names, *of_expand):
        if not _ENV_NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is not a name of an environment variable",
                hint="--env NAME, --env NAME=VALUE, or --expand NAME",
            )
    for name, text in spec.env.items():
        if re.search(SECRET_NAME, name, re.I) or re.search(URL_WITH_PASSWORD, text):
            raise UsageError(
                f"the value of {name} looks like a secret and would stand in the job's script",
                hint=f"export {name} in your shell, then --env {name}",
            )
        if len(os.fsencode(f"{name}={text}")) >= LONGEST_VARIABLE:
            raise UsageError(
                f"the value of {name} has {len(text):,} characters, with which Linux starts no"
                f" process; accepted: fewer than {LONGEST_VARIABLE:,} bytes, its name included",
                hint="a file, whose path the variable has",
            )
        variable = OF_USERS.get(name)
        if variable and not (variable.accepts(text) or names_in(text, spec.expand)):
            raise UsageError(
                f"variable {name} of env is {text!r}; accepted: {variable.accepted}",
                hint=f"--env {name}={variable.example}",
            )


def mpirun_words(options: Sequence[str]) -> list[str]:
    """Return the words of options of mpirun, each of which is split as by a shell. Raise UsageError
    where one can't be split."""
    try:
        return [word for text in options for word in shlex.split(text)]
    except ValueError as error:
        raise UsageError(
            f"options of mpirun can't be split into words: {error}", hint="--mpirun='--mca pml ob1'"
        ) from None
