"""The ``#SBATCH`` lines of a job: the user's options and ours."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import OPTIONS, JobSpec
from hpc_ddp.core.job.slurm_options import split_raw
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission.settings.operators import comment_pairs

# The fields that Slurm fills into the name of an output file, as words of the batch script.
_FIELDS = {
    "%j": "$SLURM_JOB_ID",
    "%x": "$SLURM_JOB_NAME",
    "%A": "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}",
    "%a": "${SLURM_ARRAY_TASK_ID-}",
    "%u": "$SLURM_JOB_USER",
    "%N": "$SLURMD_NODENAME",
    "%J": "$SLURM_JOB_ID",  # from here on: the values that Slurm uses for a batch script
    "%t": "0",
    "%n": "0",
    "%s": "batch",
    "%%": "%",
}
_PADDED = re.compile(r"%0*([1-9]\d?)([AaJjnt])", re.A)  # a field with a width, as %4j


def header_pairs(spec: JobSpec, run: RunFolder, more: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return the (option, value) pairs of all ``#SBATCH`` lines: the user's, `more` behind them,
    and ours last. Where a name comes twice, the last one counts. A flag's value is ''.

    `more` are raw options, ``--name=value``, as those of a container. Our comment is left out where
    the user has one, also in SBATCH_COMMENT. Raise UsageError for a raw option of another form, and
    for one that hpc-ddp refuses.
    """
    # Slurm's warning comes within the last tenth of the time (without a limit: of an hour).
    warn_s = min(spec.warn_s, (spec.time_min_s or spec.time_s or 3600) // 10)
    pairs = directives(replace(spec, sbatch=(*spec.sbatch, *more)))
    # Also for Slurm's own requeues, as after the loss of a node.
    is_requeued = spec.continue_by == "requeue" and spec.max_requeues != 0
    requeue_flag = "requeue" if is_requeued else "no-requeue"
    return [
        *pairs,
        # Not for a range of nodes, of which Slurm would give the least: it counts tasks then.
        *([("ntasks-per-node", str(spec.tasks_per_node))] if isinstance(spec.nodes, int) else []),
        ("output", output_file(spec, run)),
        ("open-mode", "append"),
        *comment_pairs((*spec.sbatch, *more)),
        *_export_pairs(spec, dict(pairs)),
        *([("no-kill", "")] if spec.elastic else []),
        # By default Slurm passes on all limits of the login shell, as of CPU time and open files.
        # Only that of core files is passed on: a node may have none, and each crash would then
        # write a file of the memory's size.
        *([] if "propagate" in dict(pairs) else [("propagate", "CORE")]),
        # The user may have set it with a value: --sbatch=--requeue=expedite.
        *([] if requeue_flag in dict(pairs) else [(requeue_flag, "")]),
        ("signal", f"B:USR2@{warn_s}"),
    ]


def _export_pairs(spec: JobSpec, options: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return a pair for ``--export`` with the names of ``--env NAME`` added, as a list of one; []
    where no pair is needed. A pair is needed where the ``--export`` of the job's `options`, or else
    SBATCH_EXPORT, would keep a variable from the job. The pair has no values of variables."""
    words = (options.get("export") or os.environ.get("SBATCH_EXPORT") or "ALL").split(",")
    present = {word.partition("=")[0] for word in words}
    names = [name for name in spec.env_names if name not in present]
    if not names or "ALL" in map(str.upper, words):
        return []
    if words[0].upper() in ("NONE", "NIL"):
        words = []
    return [("export", ",".join([*words, *names]))]


def output_word(pattern: str, chdir: str) -> str:
    """Return `pattern`, the value of ``--output`` or ``--error``, as the word of bash for the
    file's path: ``out-%j.txt`` in /w is ``/w/out-"$SLURM_JOB_ID".txt``. Fields of Slurm's become
    variables; a field with a width, as ``%4j``, becomes a number with zeros in front. A relative
    path lies in the working directory `chdir`.

    Raise UsageError for a field of Slurm's that is not in `_FIELDS`.
    """
    # Texts at even indexes, fields between them at odd ones.
    parts = re.split(r"(%(?:\d+\w|.?))", str(Path(chdir, pattern)))
    unknown = [f for f in parts[1::2] if f not in _FIELDS and not _PADDED.fullmatch(f)]
    if unknown:
        raise UsageError(
            f"output {pattern!r} has {unknown[0]}; accepted: {', '.join(_FIELDS)}",
            hint="--output out-%x-%j.txt",
        )
    fields = [*map(_field_word, parts[1::2]), ""]
    literals = [shlex.quote(part) if part else "" for part in parts[::2]]
    return "".join(part for pair in zip(literals, fields, strict=True) for part in pair)


def _field_word(field: str) -> str:
    """Return a field of Slurm's as a word for bash, ``%j`` as ``"$SLURM_JOB_ID"``. The field is a
    known one: of `_FIELDS`, or such a one with a width."""
    if padded := _PADDED.fullmatch(field):
        return f'"$(printf %0{padded[1]}d "{_FIELDS["%" + padded[2]]}")"'
    return f'"{_FIELDS[field]}"'


def output_file(spec: JobSpec, run: RunFolder) -> str:
    """Return the path of the job's output in the form of ``--output``: a ``%`` in the run's path is
    doubled, and for an array ``-%a``, the index of the task, stands before ``.out``."""
    path = str(run.slurm_out).replace("%", "%%")
    return f"{path.removesuffix('.out')}-%a.out" if spec.array else path


def directives(spec: JobSpec) -> list[tuple[str, str]]:
    """Return the (option, value) pairs for sbatch that the settings of a job stand for, raw options
    last. Options are without dashes; a flag's value is ''. Raise UsageError for a raw option that
    `split_raw` refuses."""
    pairs = [("job-name", spec.job_name)]
    for name, declared in OPTIONS.items():
        value = getattr(spec, name.replace("-", "_"))
        if declared.is_sbatch and value is not None:
            pairs.append((name, str(value)))
        elif name == "gpus-per-node":
            pairs += _gpu_request(spec)
        elif name == "cpus-per-task" and spec.task_cpus is not None:
            pairs.append((name, str(spec.task_cpus)))
    if spec.exclusive:
        pairs.append(("exclusive", ""))
    return pairs + [split_raw(raw, "sbatch", "--network=x") for raw in spec.sbatch]


def _gpu_request(spec: JobSpec) -> list[tuple[str, str]]:
    """Return the request for a node's GPUs in the form that the site accepts, as a list of one
    (option, value) pair; [] for a job without GPUs, and for a site that accepts no request."""
    if spec.gpus_per_node is None or spec.gpu_request == "none":
        return []
    if spec.gpu_request == "gres":
        return [("gres", f"gpu:{spec.gpus_per_node}")]
    if spec.gpu_request == "gpus-per-task":
        of_task = str(max(1, spec.gpu_count // spec.tasks_per_node))
        return [("gpus-per-task", f"{spec.gpu_type}:{of_task}" if spec.gpu_type else of_task)]
    return [("gpus-per-node", spec.gpus_per_node)]


def sbatch_line(name: str, value: str) -> str:
    """Return the ``#SBATCH`` line of an option, its name without dashes; a flag's value is ''. A
    value is quoted where needed: sbatch splits the line at blanks, and interprets both kinds of
    quotes and the backslash. A value with a line break must not be given: `JobSpec` refuses such
    values."""
    if not value:
        return f"#SBATCH --{name}"
    if not re.fullmatch(r"[\w./:,@%+=\[\]&|*()<>-]+", value):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'#SBATCH --{name}="{escaped}"'
    return f"#SBATCH --{name}={value}"
