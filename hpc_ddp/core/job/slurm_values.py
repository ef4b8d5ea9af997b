"""Values in Slurm's notation: time limits, signals, arrays."""

from __future__ import annotations

import math
import re

from hpc_ddp.core.errors import UsageError

# The signals by which the workers may get a notice. hpc_ddp.training understands each.
SIGNALS = ("TERM", "INT", "HUP", "USR1", "USR2")
# The largest array; a site's MaxArraySize is mostly 1,001, and never above 4,000,001.
MOST_TASKS = 100_000
LEAST_ATTEMPT_S = 120  # in which a script can start, step and save

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?", re.A)
# A type may begin with a digit, or be a number: what stands alone is the count.
_GPUS = re.compile(r"gpu(:(?P<type>[\w.-]+?))??(:no_consume)?(:(?P<count>\d+))?", re.A)
_INDEXES = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+)(?::(?P<step>[1-9]\d*))?)?", re.A)
_SIGNAL = re.compile(r"(?:[BR]{1,2}:)?(?:SIG)?(?P<name>[A-Z0-9]+)(?:@(?P<seconds>\d{1,5}))?", re.A)
_SIGNAL_NUMBERS = {"1": "HUP", "2": "INT", "10": "USR1", "12": "USR2", "15": "TERM"}


def parse_time(text: str) -> int:
    """Return the seconds of a Slurm time: ``m``, ``m:s``, ``h:m:s``, ``d-h``, ``d-h:m``, …

    Raise UsageError for another form.
    """
    padded = f"{text}0" if re.fullmatch(r"\d+-", text, re.A) else text  # "1-" is "1-0"
    match = _TIME.fullmatch(padded)
    if not match:
        raise UsageError(
            f"time {text!r} is not a Slurm time; accepted: minutes, h:mm:ss, d-hh, d-hh:mm:ss",
            hint="for twelve hours: --time 12:00:00, for no limit: --time UNLIMITED;"
            " without it the partition's own limit holds",
        )
    a, b, c = (int(match[group] or 0) for group in "abc")  # the numbers between the colons
    if match["days"] is not None:
        return int(match["days"]) * 86400 + a * 3600 + b * 60 + c
    if match["c"] is not None:
        return a * 3600 + b * 60 + c
    return a * 60 + b


def limit_seconds(text: str) -> int | None:
    """Return the seconds of a time limit in Slurm's notation (`parse_time`); None for no limit:
    ``UNLIMITED``, ``INFINITE``, or a time of 0. Raise UsageError for another form."""
    return None if is_unlimited(text) else parse_time(text) or None


def is_unlimited(text: str) -> bool:
    """Return whether a time limit is one of Slurm's words for none, in upper or lower case."""
    return re.fullmatch("UNLIMITED|INFINITE", text, re.I) is not None


def slurm_seconds(text: str) -> int | None:
    """Return the seconds of a Slurm time (`parse_time`); None for any other text, as UNLIMITED."""
    try:
        return parse_time(text)
    except UsageError:
        return None


def gpus_of(gres: str) -> tuple[tuple[str, int], ...]:
    """Return type and number of the GPUs in a Gres value such as ``gpu:a100:4(S:0-1),nvme:1``: type
    '' and number 1 where it has none, and () without GPUs."""
    parts = re.sub(r"\([^)]*\)", "", gres).split(",")
    matches = filter(None, map(_GPUS.fullmatch, parts))
    return tuple((match["type"] or "", int(match["count"] or 1)) for match in matches)


def check_time_min(least: str | None, most: str | None, warn_s: int) -> None:
    """Raise UsageError for a least time limit of an attempt, `least`, that does not go with the
    largest, `most`: both are Slurm times, or None; `most` may be ``UNLIMITED``. `warn_s` is how
    many seconds before its end the notice comes. A `least` of None passes.

    The error comes where a limit is no Slurm time; and where `least` is longer than `most`, comes
    without it, or is shorter than `LEAST_ATTEMPT_S` or ten times `warn_s`.
    """
    if least is None:
        return
    least_s = parse_time(least)
    if most is None or least_s > (limit_seconds(most) or math.inf):
        raise UsageError(
            f"time-min is {least} and time {most or 'not set'};"
            " accepted: a time-min up to time, which stays the most",
            hint=f"--time-min {most}" if most else f"--time 12:00:00 --time-min {least}",
        )
    if least_s < max(LEAST_ATTEMPT_S, 10 * warn_s):  # a notice comes in the last tenth
        raise UsageError(
            f"time-min {least} is too little for a notice {warn_s} s before the end; accepted: ten"
            f" times the seconds of --signal, or {LEAST_ATTEMPT_S // 60} minutes, where that is"
            " more",
            hint="--time-min 1:00:00",
        )


def parse_signal(text: str) -> tuple[str, int]:
    """Return the name and the seconds of a signal in sbatch's form, in upper or lower case:
    ``USR1@90``, ``SIGUSR1``, ``10`` … Without seconds they are 60.

    A ``B:`` or ``R:`` before the signal has no effect: a notice always goes to the workers. Raise
    UsageError for another form, and for a signal that is not in `SIGNALS`.
    """
    match = _SIGNAL.fullmatch(text.upper())
    name = match["name"] if match else ""
    name = _SIGNAL_NUMBERS.get(name, name)
    if not match or name not in SIGNALS:
        raise UsageError(
            f"signal {text!r} is not of the form NAME@SECONDS;"
            f" accepted names: {', '.join(SIGNALS)}",
            hint="--signal USR1@90",
        )
    return name, int(match["seconds"] or 60)


def array_bound(array: str) -> str:
    """Return an array's bound on the tasks that run at once, as ``%2``; '' without one."""
    _, percent, bound = array.partition("%")
    return percent + bound


def array_indexes(array: str) -> list[int]:
    """Return the indexes of a Slurm array such as ``0-5%2`` or ``1,3,10-20:5``, in its order; an
    index that is written twice comes twice.

    Raises
    ------
    UsageError
        the text is empty or no such list, a range ends before it begins, or there are more than
        `MOST_TASKS` indexes
    """
    indexes: list[int] = []
    parts, percent, most_at_once = array.partition("%")
    for part in parts.split(","):
        match = _INDEXES.fullmatch(part)
        is_empty = match and match["last"] and int(match["last"]) < int(match["first"])
        if not match or is_empty or (percent and not re.fullmatch("[0-9]+", most_at_once)):
            raise UsageError(
                f"array {array!r} is no list of indexes; accepted: numbers and ranges, with commas",
                hint="--array 0-5, or --array 1,3,10-20:5%2",
            )
        first = int(match["first"])
        span = range(first, int(match["last"] or first) + 1, int(match["step"] or 1))
        if len(indexes) + len(span) > MOST_TASKS:
            raise UsageError(
                f"array {array!r} has more than {MOST_TASKS:,} tasks",
                hint="what the site takes: scontrol show config | grep MaxArraySize",
            )
        indexes += span
    return indexes


def least_cpus(counts: str) -> int:
    """Return the number of CPUs that the job has on its smallest node by `counts`, the text of
    SLURM_JOB_CPUS_PER_NODE like ``72(x2),36``; 1 for an empty text."""
    per_node = re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", counts)  # (x2): on two nodes
    return min((int(count) for count in per_node), default=1)
