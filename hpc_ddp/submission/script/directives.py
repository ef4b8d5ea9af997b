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

# Fields of a name of Slurm's output, as the batch script knows them.
_FIELDS = {
    "%j": "$SLURM_JOB_ID",
    "%x": "$SLURM_JOB_NAME",
    "%A": "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}",
    "%a": "${SLURM_ARRAY_TASK_ID-}",
    "%u": "$SLURM_JOB_USER",
    "%N": "$SLURMD_NODENAME",
    "%J": "$SLURM_JOB_ID",  # this and the next three: as Slurm fills them in for a batch script
    "%t": "0",
    "%n": "0",
    "%s": "batch",
    "%%": "%",
}


_PADDED = re.compile(r"%0*([1-9]\d?)([AaJjnt])", re.A)  # a number, with its width


def header_pairs(spec: JobSpec, run: RunFolder, more: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return the (option, value) pairs of all ``#SBATCH`` lines: the user's, `more` behind them,
    and ours last. Where a name comes twice, the last one counts. A flag's value is ''.

    `more` are raw options, ``--name=value``, as those of a container. Our comment is left out where
    the user has one, also in SBATCH_COMMENT. Raise UsageError for a raw option of another form, and
    for one that hpc-ddp refuses.
    """
    warn_s = min(spec.warn_s, (spec.time_min_s or spec.time_s or 3600) // 10)
    pairs = directives(replace(spec, sbatch=(*spec.sbatch, *more)))
    is_requeued = spec.continue_by == "requeue" and spec.max_requeues != 0
    continues = "requeue" if is_requeued else "no-requeue"  # Slurm does so by itself, too
    return [
        *pairs,
        # For a range of nodes Slurm would then give the least, since it counts tasks.
        *([("ntasks-per-node", str(spec.tasks_per_node))] if isinstance(spec.nodes, int) else []),
        ("output", output_file(spec, run)),
        ("open-mode", "append"),
        *comment_pairs((*spec.sbatch, *more)),
        *_export_pairs(spec, dict(pairs)),
        *([("no-kill", "")] if spec.elastic else []),
        # Slurm would pass on the login shell's limits, of CPU time and open files above all. A
        # node's own limit of core files may be none, and each crash would write the memory's size.
        *([] if "propagate" in dict(pairs) else [("propagate", "CORE")]),
        # With --sbatch=--requeue=expedite it is there already.
        *([] if continues in dict(pairs) else [(continues, "")]),
        ("signal", f"B:USR2@{warn_s}"),
    ]


def _export_pairs(spec: JobSpec, options: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return a pair for ``--export`` that adds the names of ``--env NAME``, as a list; [] where no
    pair is needed. One is needed where the ``--export`` of the job's `options`, or else
    SBATCH_EXPORT, would keep a variable from the job. The variables' values are not written
    anywhere."""
    words = (options.get("export") or os.environ.get("SBATCH_EXPORT") or "ALL").split(",")
    present = {word.partition("=")[0] for word in words}
    names = [name for name in spec.env_names if name not in present]
    if not names or "ALL" in map(str.upper, words):
        return []
    if words[0].upper() in ("NONE", "NIL"):
        words = []
    return [("export", ",".join([*words, *names]))]


def output_word(pattern: str, chdir: str) -> str:
    """Return the path of ``--output`` or ``--error`` as a word for bash. Slurm's fields, as ``%j``,
    become variables, and as ``%4j`` with zeros before it; a relative path lies in the working
    directory `chdir`: ``out-%j.txt`` in /w is ``/w/out-"$SLURM_JOB_ID".txt``.

    Raise UsageError for a field of Slurm's that is not in `_FIELDS`.
    """
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
    """Return a field of Slurm's as a word for bash."""
    if padded := _PADDED.fullmatch(field):
        return f'"$(printf %0{padded[1]}d "{_FIELDS["%" + padded[2]]}")"'
    return f'"{_FIELDS[field]}"'


def output_file(spec: JobSpec, run: RunFolder) -> str:
    """Return the path of the job's output in the form of ``--output``: a ``%`` of the run's path is
    doubled. For an array ``%a``, the index of the task, is put in."""
    path = str(run.slurm_out).replace("%", "%%")
    return f"{path.removesuffix('.out')}-%a.out" if spec.array else path


def directives(spec: JobSpec) -> list[tuple[str, str]]:
    """Return the (option, value) pairs for sbatch that the user's settings make, raw options last.
    Options are without dashes; a flag's value is ''. Raise UsageError for a raw option that
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
    """Return the ``#SBATCH`` line of an option; a flag's value is ''. A value is quoted where it
    has to be: sbatch splits the line at blanks, and interprets both quotes and backslash.

    The value has no line breaks: `JobSpec` refuses them.
    """
    if not value:
        return f"#SBATCH --{name}"
    if not re.fullmatch(r"[\w./:,@%+=\[\]&|*()<>-]+", value):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'#SBATCH --{name}="{escaped}"'
    return f"#SBATCH --{name}={value}"
