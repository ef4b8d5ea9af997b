"""A sweep: one array of jobs, with a run of its own for each trial, a combination of values."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.slurm_values import MOST_TASKS, array_indexes

if TYPE_CHECKING:
    from hpc_ddp.core.job.options import JobSpec

_HINT = "hpc-ddp sweep --set lr=1e-3,1e-4 --set seed=0,1,2 train.py"
_PARAMETER = re.compile(r"[A-Za-z_][\w.-]*|\+{1,2}[A-Za-z_][\w.@/-]*")
_OVERRIDE = re.compile(r"\+{0,2}[A-Za-z_][\w.@/-]*=")  # of Hydra and OmegaConf


def parse_sets(sets: Sequence[str], max_parallel: int | None) -> dict[str, Any]:
    """Return the settings that make a job a sweep, ``sweep`` and ``array``, from the texts of
    ``--set``.

    Parameters
    ----------
    sets
        ``name=value,value…`` for each parameter, also with ``--`` before the name, or Hydra's ``+``
        or ``++``; a comma within a value is written ``\\,``, and blanks around it do not count
    max_parallel
        how many tasks may run at once, None for as many as there are

    Raises
    ------
    UsageError
        there is no parameter, one comes twice or has no ``=``, there are too many trials, or
        `max_parallel` is less than 1; names and values are checked by `JobSpec`, which refuses
        empty ones
    """
    if not sets:
        raise UsageError("a sweep without a parameter is no sweep", hint=_HINT)
    sweep: dict[str, tuple[str, ...]] = {}
    for text in sets:
        name, equals, values = text.partition("=")
        name = name.removeprefix("--")
        if not equals or name in sweep:
            fault = "is said twice" if name in sweep else "is not of the form name=value,value"
            raise UsageError(f"--set {text} {fault}", hint=_HINT)
        parts = re.split(r"(?<!\\),", values)
        sweep[name] = tuple(part.replace("\\,", ",").strip() for part in parts)
    if max_parallel is not None and max_parallel < 1:
        raise UsageError(
            f"max-parallel is {max_parallel}; accepted: a whole number from 1",
            hint="--max-parallel 4",
        )
    return settings_of(sweep, max_parallel)


def settings_of(
    sweep: Mapping[str, Sequence[str]], max_parallel: int | None = None
) -> dict[str, Any]:
    """Return the settings that make a job a sweep: ``sweep``, which is `sweep` itself, and
    ``array``, with an index for each trial. At most `max_parallel` trials run at once (None: all).

    `sweep` has one parameter or more; `JobSpec` refuses one without a value.

    Raises
    ------
    UsageError
        there are too many trials
    """
    last = math.prod(map(len, sweep.values())) - 1
    if last >= MOST_TASKS:
        raise UsageError(
            f"the sweep has {last + 1:,} trials; accepted: up to {MOST_TASKS:,}",
            hint="make several; what the site takes: scontrol show config | grep MaxArraySize",
        )
    bound = f"%{max_parallel}" if max_parallel else ""
    return {"sweep": sweep, "array": f"0-{last}{bound}"}


def trials(sweep: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Return a sweep's combinations of values, each as value by parameter, in the order of the
    array's indexes; [] for a job that is no sweep. The last parameter changes fastest."""
    combinations = itertools.product(*sweep.values()) if sweep else ()
    return [dict(zip(sweep, values, strict=True)) for values in combinations]


def trial_args(trial: Mapping[str, str], args: Sequence[str] = ()) -> list[str]:
    """Return a sweep's trial as arguments of the script, in the form of its other arguments,
    `args`: ``name=value``, as of Hydra, if some have this form and none begins with a dash; else
    ``--name=value``. A name with Hydra's ``+`` has no dashes in any case."""
    has_overrides = any(_OVERRIDE.match(word) for word in args)
    has_dashes = any(word.startswith("-") for word in args)
    dashes = "" if has_overrides and not has_dashes else "--"
    return [
        f"{'' if name.startswith('+') else dashes}{name}={value}" for name, value in trial.items()
    ]


def parameter_of(word: str) -> str:
    """Return the name of the parameter that an argument of the script sets, ``--name``,
    ``--name=value``, or ``name=value`` as of Hydra; '' for any other word."""
    name = word.partition("=")[0]
    if word.startswith("--"):
        return name[2:]
    return name.lstrip("+") if _OVERRIDE.match(word) else ""


def parameters_in(args: Sequence[str]) -> list[str]:
    """Return, for each argument of the script, the parameter that it sets (see `parameter_of`); ''
    for an argument that sets none, as the value behind an option."""
    names, awaits_value = [], False
    for word in args:
        is_value = awaits_value and not word.startswith("--")
        names.append("" if is_value else parameter_of(word))
        is_option = word.startswith("--") and word != "--multirun"  # Hydra's flag
        awaits_value = is_option and "=" not in word
    return names


def check_sweep(spec: JobSpec) -> None:
    """Raise UsageError for bad parameters of a sweep, or a bad array: a bad name, a parameter
    without values, values that are empty, equal or not printable, a parameter that is also among
    the arguments, too many trials, an index beyond the trials. A job that is no sweep passes."""
    for name, values in spec.sweep.items():
        if name.lstrip("+") in parameters_in(spec.args):
            raise UsageError(
                f"{name} is among the arguments, and the sweep adds another; accepted: one",
                hint=f"leave {name} out behind SCRIPT, and out of args in hpc-ddp.toml",
            )
        are_printable = all(value and value.isprintable() for value in values)
        is_sound = _PARAMETER.fullmatch(name) and values and are_printable
        if not is_sound or len({*values}) < len(values):
            raise UsageError(
                f"{name}={','.join(values)!r} is no parameter with values that differ and are not"
                " empty",
                hint=_HINT,
            )
    count = math.prod(map(len, spec.sweep.values())) if spec.sweep else None
    if count and count > MOST_TASKS:
        raise UsageError(f"the sweep has {count:,} trials; accepted: up to {MOST_TASKS:,}")
    if count and spec.array and max(array_indexes(spec.array)) >= count:
        raise UsageError(
            f"array {spec.array} goes beyond the sweep; accepted: indexes from 0 to {count - 1}",
            hint="hpc-ddp status SWEEP lists them",
        )
