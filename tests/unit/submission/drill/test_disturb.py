"""The steps at which a drill disturbs its runs."""

from __future__ import annotations

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.submission.drill.disturb import LEAST_STEPS, choose_points


@pytest.mark.parametrize(
    ("total", "ends"),
    [(8, []), (9, [3, 6, 9]), (24, [6, 12, 18, 24]), (40, []), (250, [50, 100, 150, 200, 250])],
)
def test_the_disturbances_leave_room_for_each_other(total: int, ends: list[int]) -> None:
    points = choose_points(total, ends)
    assert 2 <= points.stop < points.save < points.kill < total
    assert points.stop not in ends
    if ends:
        assert points.stop > ends[0]
        assert points.save in ends


def test_a_run_that_is_too_short_is_refused() -> None:
    with pytest.raises(UsageError, match="takes 5 steps, and a drill needs 8"):
        choose_points(LEAST_STEPS - 3, [])
