"""Amounts as text for people, and ages from such text. Standard library only."""

from __future__ import annotations

import math
import re

from hpc_ddp.core.errors import UsageError

# A unit, its size in seconds, and the amount below which it is used.
_TIMES = (("s", 1.0, 119.5), ("min", 60.0, 119.5), ("h", 3600.0, 47.5), ("d", 86400.0, math.inf))
# A unit, its size in bytes, and the count from which it is used: 999.95 MB would round to 1000.0.
_BYTES = (("TB", 1e12, 999.95e9), ("GB", 1e9, 999.95e6), ("MB", 1e6, 999.95e3), ("kB", 1e3, 999.5))


def duration(seconds: float) -> str:
    """Return a time span in one unit, with a decimal below 9.95: ``4.2 s``, ``75 s``, ``2.5 min``,
    ``30 h``, ``5.0 d``."""
    units = ((unit, size) for unit, size, most in _TIMES if seconds < most * size)
    unit, size = next(units, ("d", 86400.0))
    amount = seconds / size
    return f"{amount:.1f} {unit}" if amount < 9.95 else f"{amount:.0f} {unit}"


def brief_duration(seconds: float) -> str:
    """Return a time that is not negative with two digits, in milliseconds below 0.1 s: ``0.31 s``,
    ``4.5 ms``; from 10 s on as `duration` does."""
    if seconds >= 9.95:
        return duration(seconds)
    return f"{seconds:.2g} s" if seconds >= 0.0995 else f"{1000 * seconds:.2g} ms"


def byte_count(count: float) -> str:
    """Return a number of bytes in its largest decimal unit: ``4.2 GB``, ``512 B``."""
    for unit, size, least in _BYTES:
        if count >= least:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def speed(megabytes_per_s: float) -> str:
    """Return a transfer speed, given in MB/s: ``850 MB/s``, ``12.4 GB/s``."""
    if megabytes_per_s >= 999.5:
        return f"{megabytes_per_s / 1000:.1f} GB/s"
    return f"{megabytes_per_s:.3g} MB/s"


def measured(number: float | None) -> str:
    """Return a measured number with four significant digits, or from 10,000 to 1e9 as a whole
    number: ``0.9861``, ``12,346``, ``2.7e−5``, ``NaN``. None is ``–``."""
    if number is None:
        return "–"
    if not math.isfinite(number):
        return "NaN" if math.isnan(number) else "∞" if number > 0 else "−∞"
    if 9999.5 <= abs(number) < 1e9:
        return f"{number:,.0f}"
    text = f"{number:.4g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    return text.replace("-", "−")


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 step``, ``3 steps``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def parse_age(text: str) -> float:
    """Return the seconds of ``30d``, ``12h`` or ``4w``; raise UsageError, which names
    ``--older-than``, for another form."""
    match = re.fullmatch(r"(\d{1,6})([hdw])", text, re.A)
    if not match:
        raise UsageError(
            f"older-than {text!r} is no age; accepted: hours, days and weeks, as 12h, 30d, 4w",
            hint="hpc-ddp clean --older-than 30d",
        )
    return int(match[1]) * {"h": 3600.0, "d": 86400.0, "w": 604800.0}[match[2]]
