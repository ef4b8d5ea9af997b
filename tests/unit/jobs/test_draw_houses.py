"""The houses that jobs/data/draw_houses.py draws."""

from __future__ import annotations

import runpy
from pathlib import Path

DRAW = runpy.run_path(str(Path(__file__).parents[3] / "jobs" / "data" / "draw_houses.py"))


def test_a_seed_gives_the_same_pictures(tmp_path: Path) -> None:
    counts = {"Train": 2, "Validation": 1, "Test": 1}
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        DRAW["draw_set"](tmp_path / name, counts, size=32, seed=seed)
    one, two, third = (
        {path.relative_to(tmp_path / name): path.read_bytes() for path in pictures}
        for name in ("one", "two", "other")
        for pictures in [sorted((tmp_path / name).rglob("*.png"))]
    )
    assert one == two
    assert len(one) == 12
    assert Path("Train", "C4", "001.png") in one
    assert not set(one.values()) & set(third.values())
    assert len(set(one.values())) == 12  # a class, a split, a number: another picture
