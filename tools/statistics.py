"""The interval of a share."""

from __future__ import annotations

import math

Z = 1.96  # for 95 %


def wilson_interval(hits: int, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share that was measured as `hits` of `total`."""
    if total == 0:
        return 0.0, 1.0
    share = hits / total
    scale = 1 + Z * Z / total
    centre = (share + Z * Z / (2 * total)) / scale
    half = Z / scale * math.sqrt(share * (1 - share) / total + Z * Z / (4 * total * total))
    return max(0.0, centre - half), min(1.0, centre + half)
