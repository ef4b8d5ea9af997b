"""Whether what the user asks for is in force, and what ``without`` takes out of a job.

An option or a variable that is accepted, and then loses against one of hpc-ddp's own, would be lost
without a word: `check_effect` is the one check of all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.variables import is_of_hpc_ddp, misplaced_array
from hpc_ddp.submission.script.directives import directives

Pair = tuple[str, str]  # an option of sbatch or srun without dashes, and its value

# Options that exclude each other: the last one of a family counts.
_FAMILIES = ({"requeue", "no-requeue"}, {"mem", "mem-per-cpu", "mem-per-gpu"})
_WHOLE = ("mem", "gpus", "gres", "ntasks", "time")  # names that are also beginnings of others
_ADDED = ("container-mounts", "container-env")  # pyxis takes all values
# What to use in place of an option that hpc-ddp sets itself.
_INSTEAD = {
    "output": "--output out-%j.txt, a link to it",
    "open-mode": "nothing: the output is appended to",
    "signal": "--signal USR1@90",
    "ntasks-per-node": "--nproc-per-node, or --gpus-per-node",
    "no-requeue": '--max-requeues 0; for the site\'s default: without = ["--requeue"]',
    "requeue": "--continue-by requeue",
    "container-image": "--image alone",
}
# The job does not work without these.
_NEEDED = ("job-name", "nodes", "ntasks-per-node", "output", "open-mode", "signal", "no-kill")
OMP = "OMP_NUM_THREADS"  # of the batch script


def check_effect(spec: JobSpec, header: Sequence[Pair], srun: Sequence[Pair]) -> None:
    """Check that what the user asks for is in force; `header` and `srun` are all options of sbatch
    and of the step's srun, in their order.

    Raises
    ------
    UsageError
        an option is overridden, but for a raw one by another raw one, as a site's by the job's; a
        variable of ``env`` has another value in a worker; or an array of ``expand`` stands within a
        text; with what to use instead
    """
    declared, raw = directives(replace(spec, sbatch=())), as_pairs(spec.sbatch)
    _check_pairs("sbatch", [*declared, *raw], header, raw)
    _check_pairs("srun", as_pairs(spec.srun), srun, as_pairs(spec.srun))
    for name in (*spec.env, *spec.env_names):
        if is_of_hpc_ddp(name, spec.launcher):
            raise UsageError(
                f"variable {name} of env has no effect: a worker has hpc-ddp's value, or none",
                hint="leave it out: the job finds its nodes and a free port itself; under another"
                f" name: --worker-setup 'export NAME=${name}'",
            )
    if name := misplaced_array([*spec.env.values()], spec.args, spec.expand):
        raise UsageError(
            f"{name} stands within a text; accepted: an argument that is ${{{name}}} alone",
            hint=f"train.py '${{{name}}}'",
        )


def _check_pairs(
    command: str, requested: Sequence[Pair], final: Sequence[Pair], raw: Collection[Pair]
) -> None:
    """Raise UsageError for a `requested` option that is not the last of its name and family in
    `final`, which has all of them, unless the last one has the same value, or both are `raw`."""
    for name, text in requested:
        winner = [pair for pair in final if _is_same(pair[0], name)][-1]
        if name in _ADDED or winner == (name, text) or {winner, (name, text)} <= {*raw}:
            continue
        instead = _INSTEAD.get(name, _INSTEAD.get(winner[0], "leave it out"))
        if winner in raw:
            instead = f"--{name} {winner[1]}" if winner[0] == name else f"{_text(*winner)} alone"
        raise UsageError(
            f"{command} option {_text(name, text)} has no effect: {_text(*winner)} comes after it",
            hint=f"in its place: {instead}",
        )


def _is_same(option: str, name: str) -> bool:
    """Return whether `name`, which may be cut short, is for sbatch the same option as `option`, or
    one that excludes it."""
    is_beginning = option.startswith(name) and name not in _WHOLE
    return option == name or is_beginning or any({option, name} <= f for f in _FAMILIES)


def _text(name: str, text: str) -> str:
    return f"--{name}={text}" if text else f"--{name}"


def as_pairs(options: Iterable[str]) -> list[Pair]:
    """Return raw options, ``--name=value``, as pairs; a flag's value is ''."""
    parts = (option.removeprefix("--").partition("=") for option in options)
    return [(name, text) for name, _, text in parts]


def without(spec: JobSpec, pairs: Iterable[Pair]) -> list[Pair]:
    """Return options of sbatch or srun but for those that the job's ``without`` takes out, by name
    or with their value. Raise UsageError for one that the job needs."""
    words = {*spec.without}
    if needed := next((name for name in _NEEDED if f"--{name}" in words), None):
        raise UsageError(
            f"without has --{needed}, which hpc-ddp needs; accepted: others, variables of env,"
            f" {OMP}, and set-up lines",
            hint=f"in its place: {_INSTEAD.get(needed, f'--{needed} VALUE')}",
        )
    return [pair for pair in pairs if not {f"--{pair[0]}", _text(*pair)} & words]


def taken_out_in_vain(spec: JobSpec, pairs: Iterable[Pair], env: Iterable[str]) -> list[str]:
    """Return those words of ``without`` that name nothing of the job: no option among `pairs`, no
    variable of `env`, no set-up line."""
    names = {OMP, *env, *spec.setup, *spec.node_setup, *spec.worker_setup}
    for pair in pairs:
        names |= {f"--{pair[0]}", _text(*pair)}
    return [word for word in spec.without if word not in names]
