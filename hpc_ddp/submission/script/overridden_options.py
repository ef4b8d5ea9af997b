"""Checks that the user's settings have an effect; which options ``without`` takes out of a job.

An option or a variable that is accepted, and is then replaced by one of hpc-ddp's own, would be
lost in silence. `check_effect` refuses such options and variables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from hpc_ddp.core.attempt_env import clean_env
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import OPTIONS, JobSpec
from hpc_ddp.core.job.slurm_options import SBATCH, SRUN_SETTLED, as_pairs, as_raw
from hpc_ddp.core.job.slurm_values import gpus_of
from hpc_ddp.core.job.variables import is_of_hpc_ddp, is_of_slurm, misplaced_array
from hpc_ddp.submission.script.directives import directives

Pair = tuple[str, str]  # an option of sbatch or srun without dashes, and its value

# Options that exclude each other: the last one of a family counts.
_FAMILIES = (
    {"requeue", "no-requeue"},
    {"mem", "mem-per-cpu", "mem-per-gpu"},
    {"exclusive", "oversubscribe"},
    {"gpus-per-node", "gres"},
    {"cpus-per-task", "cpus-per-gpu"},
)
# An earlier value of these is not lost: the lists of pyxis are joined (`container.join_lists`), and
# hpc-ddp's export repeats the user's.
_ADDED = ("container-mounts", "container-env", "export")
# For the hint: what the user can do in place of an option that hpc-ddp sets itself.
_INSTEAD = {
    "output": "--output out-%j.txt, a link to it",
    "open-mode": "nothing: the output is appended to",
    "signal": "--signal USR1@90",
    "no-requeue": '--max-requeues 0; for the site\'s default: without = ["--requeue"]',
    "requeue": "--continue-by requeue",
    "container-image": "--image alone",
    "distribution": SRUN_SETTLED["distribution"],
}
# The job does not work without these.
_NEEDED = ("job-name", "nodes", "ntasks-per-node", "output", "open-mode", "signal", "no-kill")
OMP = "OMP_NUM_THREADS"  # of the batch script
_NOT_IN_A_DRY_RUN = ("setup", "teardown", "image", "container", "srun", "mpirun", "array")
_NOT_IN_AN_ALLOCATION = (
    *(key for key, declared in OPTIONS.items() if declared.is_sbatch and key != "nodes"),
    *("exclusive", "output", "error", "sbatch"),
)


def check_effect(spec: JobSpec, header: Sequence[Pair], srun: Sequence[Pair]) -> None:
    """Refuse a job of which a request would have no effect. `header` and `srun` are all options of
    sbatch and of the step's srun, in the order in which they are written.

    Raises
    ------
    UsageError
        an array is to run in an allocation; a later option overrides one of the user's (a raw
        option may override a raw one: so the job's overrides the site's); an option of the
        container is one that hpc-ddp sets for the step; a variable of ``env`` is hpc-ddp's or
        Slurm's, or can't be passed on from this shell; or an array of bash in ``expand`` stands
        within a text. The hint says what to use instead
    """
    if spec.array and spec.backend == "salloc":
        raise UsageError(
            "an array, as of a sweep, is several jobs, and the salloc back-end runs inside one",
            hint="--backend slurm, or local to play a sweep here",
        )
    declared, raw = directives(replace(spec, sbatch=())), as_pairs(spec.sbatch, SBATCH)
    _check_pairs("sbatch", [*declared, *raw], header, raw)
    _check_pairs("srun", as_pairs(spec.srun), srun, as_pairs(spec.srun))
    _check_container_options([pair for pair in as_pairs(spec.container_options) if pair in srun])
    _check_variables(spec)
    if name := misplaced_array([*spec.env.values()], spec.args, spec.expand):
        raise UsageError(
            f"{name} stands within a text; accepted: an argument that is ${{{name}}} alone",
            hint=f"train.py '${{{name}}}'",
        )


def check_inherited(spec: JobSpec, header: Sequence[Pair], srun: Sequence[Pair]) -> None:
    """Refuse an option of sbatch that the step would inherit (`header`, also from variables of this
    shell), if an option of the step's srun goes before it. Raise UsageError, with what to use
    instead; two options of the user's may differ."""
    names = {name for name, _ in srun}
    inherited = [pair for pair in header if pair[0] in names]
    _check_pairs("sbatch", inherited, srun, [*inherited, *as_pairs(spec.srun)])


def _check_variables(spec: JobSpec) -> None:
    """Raise UsageError for a variable of ``env``, by value or by name, that is set by hpc-ddp or
    Slurm, and for one by name that an outer job may have left in this shell."""
    for name in (*spec.env, *spec.env_names):
        if is_of_hpc_ddp(name, spec.launcher):
            raise UsageError(
                f"variable {name} of env has no effect: a worker has hpc-ddp's value, or none",
                hint="leave it out: the job finds its nodes and a free port itself; under another"
                f" name: --worker-setup 'export NAME=${name}'",
            )
        if is_of_slurm(name):
            raise UsageError(
                f"variable {name} of env is set by Slurm, for the job and its step",
                hint="leave it out; for an option of srun: --srun=--NAME=VALUE",
            )
        if name in spec.env_names and name not in clean_env({**os.environ, name: ""}):
            raise UsageError(
                f"variable {name} of this shell does not reach the job: it may be an outer job's",
                hint=f"--env {name}=VALUE; for an option of srun: --srun=--NAME=VALUE",
            )


def find_ineffective(spec: JobSpec) -> list[str]:
    """Return warnings, a sentence each, about settings that are accepted, and have no effect or
    another one than the user expects: options of no use to the back-end, a notice that comes later
    than asked for, set-up lines that hpc-ddp overrides, and ``--sbatch`` for GPUs with one worker
    on a node."""
    warnings = []
    keys = {"local": _NOT_IN_A_DRY_RUN, "salloc": _NOT_IN_AN_ALLOCATION}.get(spec.backend, ())
    names = [f"--{key}" for key in keys if getattr(spec, key.replace("-", "_"))]
    # The array of a sweep, which hpc-ddp sets, is played here.
    if names := [name for name in names if not (name == "--array" and spec.sweep)]:
        place = "a dry run" if spec.backend == "local" else "an allocation that is there already"
        warnings.append(f"{', '.join(names)}: no effect in {place}")
    limit_s = spec.time_min_s or spec.time_s
    if spec.signal != JobSpec.signal and limit_s and spec.warn_s > limit_s // 10:
        warnings.append(
            f"the notice comes {limit_s // 10} s before the end, and not {spec.warn_s}: in the last"
            " tenth of the time; --time for more"
        )
    distribution = dict(as_pairs(spec.sbatch, SBATCH)).get("distribution", "")
    if ":" in distribution and spec.step_command != "srun":
        warnings.append(f"--distribution={distribution}: {spec.step_command} has its own")
    warnings += _line_warnings((*spec.setup, *spec.node_setup), spec.launcher)
    # --gres asks for other things, too; --gpus, --gpus-per-node and the like for GPUs alone.
    requests = [
        name for name, text in as_pairs(spec.sbatch, SBATCH) if name != "gres" or gpus_of(text)
    ]
    has_gpus = any(re.match(r"gpus|gres$", name) for name in requests)
    if has_gpus and spec.gpus_per_node is None and spec.nproc_per_node is None:
        warnings.append(
            "--sbatch asks for GPUs, and a node has one worker; --gpus-per-node 4 does both"
        )
    return warnings


def _line_warnings(lines: Iterable[str], launcher: str) -> list[str]:
    """Return warnings about set-up lines that export a variable, or set a trap, which hpc-ddp
    replaces: ``export RANK=0``, ``trap save TERM``. Which variables it replaces depends on the
    job's `launcher`."""
    warnings = []
    for line in lines:
        exports = " ".join(re.findall(r"\bexport\s+([^;&|]*)", line))  # up to the command's end
        names = {*re.findall(r"(?:^|\s)([A-Z]\w*)=", exports)}
        if ours := sorted(name for name in names if is_of_hpc_ddp(name, launcher)):
            warnings.append(
                f"setup sets {', '.join(ours)}, and a worker has hpc-ddp's; --worker-setup for"
                " lines in each worker"
            )
        if re.match(r"\s*trap\s.*\b(SIG)?(TERM|USR2)\b", line):
            warnings.append(f"the trap {line!r} is replaced by hpc-ddp's; --teardown LINE is run")
    return warnings


def _check_container_options(pairs: Sequence[Pair]) -> None:
    """Raise UsageError for an option of the container that hpc-ddp sets for the step already.
    `pairs` are the container's options that go to the step's srun, as those of pyxis do."""
    for name, text in pairs:
        if instead := {**SRUN_SETTLED, "container-image": _INSTEAD["container-image"]}.get(name):
            raise UsageError(
                f"container option {as_raw(name, text)} is an option of the step, set by hpc-ddp",
                hint=f"in its place: {instead}",
            )


def _check_pairs(
    command: str, requested: Sequence[Pair], final: Sequence[Pair], raw: Collection[Pair]
) -> None:
    """Raise UsageError for a `requested` option in whose place another one counts: the last of its
    name or family in `final`, which has all options of `command` (``sbatch`` or ``srun``).

    An option passes where the last one is equal, where both are `raw`, or where all values of the
    option count (`_ADDED`).
    """
    for name, text in requested:
        winner = [pair for pair in final if _is_rival(pair, (name, text))][-1]
        if name in _ADDED or winner == (name, text) or {winner, (name, text)} <= {*raw}:
            continue
        instead = _INSTEAD.get(name, _INSTEAD.get(winner[0], "leave it out"))
        if winner in raw:
            has_value = text and name in OPTIONS and winner[0] == name
            instead = f"--{name} {winner[1]}" if has_value else f"{as_raw(*winner)} alone"
        if name in ("gpus-per-node", "gres"):
            instead = "--gpu-request none, and one --sbatch=--gres=gpu:4,… with all there is to ask"
        raise UsageError(
            f"{command} option {as_raw(name, text)} has no effect:"
            f" {as_raw(*winner)} comes after it",
            hint=f"in its place: {instead}",
        )


def _is_rival(first: Pair, second: Pair) -> bool:
    """Return whether two options have the same name, or exclude each other as members of one of the
    `_FAMILIES`. A ``--gres`` without GPUs excludes no request for GPUs."""
    names = {first[0], second[0]}
    has_gpus = all(gpus_of(text) for name, text in (first, second) if name == "gres")
    return len(names) == 1 or (has_gpus and any(names <= family for family in _FAMILIES))


def words_of(name: str, text: str) -> set[str]:
    """Return the words by which ``without`` takes out an option: its name alone, or with its
    value."""
    return {f"--{name}", as_raw(name, text)}


def keep_options(spec: JobSpec, pairs: Iterable[Pair]) -> list[Pair]:
    """Return the options of sbatch or srun that remain: `pairs` without those that the job's
    ``without`` takes out, by name or with their value. Raise UsageError where ``without`` has an
    option that the job needs."""
    words = {*spec.without}
    names = {word.partition("=")[0] for word in words}
    if needed := next((name for name in _NEEDED if f"--{name}" in names), None):
        raise UsageError(
            f"without has --{needed}, which hpc-ddp needs; accepted: others, variables of env,"
            f" {OMP}, and set-up lines",
            hint=f"in its place: {_INSTEAD.get(needed, f'--{needed} VALUE')}",
        )
    return [pair for pair in pairs if not words_of(*pair) & words]


def find_unused_words(spec: JobSpec, pairs: Iterable[Pair], env: Iterable[str]) -> list[str]:
    """Return the words of ``without`` that take nothing out of the job: each names no option of
    `pairs`, no variable (a name in `env`, or `OMP`) and no set-up line."""
    names = {OMP, *env, *spec.setup, *spec.node_setup, *spec.worker_setup}
    for pair in pairs:
        names |= words_of(*pair)
    return [word for word in spec.without if word not in names]
