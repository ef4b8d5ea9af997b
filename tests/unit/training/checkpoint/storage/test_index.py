"""Ranks share files where there would be too many, and the index says where their parts lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ddp.core import file_io
from hpc_ddp.training.checkpoint.storage import disk, index
from hpc_ddp.training.checkpoint.storage.index import PAGE, Claim, dump, plan_of, read_values
from unit.fakes import stop_clock


def claims_of(nodes: int, ranks: int) -> list[Claim]:
    return [
        Claim(f"n{rank // ranks}", tensors=64 * (rank % 3), values=10, layouts=(b"a",))
        for rank in range(nodes * ranks)
    ]


@pytest.mark.parametrize(
    ("nodes", "ranks", "files"),
    [(1, 8, 8), (8, 8, 64), (9, 8, 36), (16, 8, 64), (32, 8, 64), (100, 8, 100), (1024, 8, 1024)],
)
def test_the_number_of_files_is_bounded(nodes: int, ranks: int, files: int) -> None:
    plan = plan_of(claims_of(nodes, ranks))
    names = {part.file for part in plan.parts}
    assert len(names) == files
    assert len(names) <= max(nodes, index.MOST_FILES)
    for part, rank in zip(plan.parts, range(nodes * ranks), strict=True):
        assert int(part.file[5:-4]) // ranks == rank // ranks, "a file of two nodes"


def test_parts_of_a_file_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MOST_FILES", 1)
    claims = [Claim("n1", tensors=PAGE, values=1), Claim("n2", values=5), Claim("n1", values=7)]
    plan = plan_of(claims)
    assert [(p.file, p.offset, p.size) for p in plan.parts] == [
        ("rank-0.bin", 0, 2 * PAGE),
        ("rank-1.bin", 0, PAGE),
        ("rank-0.bin", 2 * PAGE, PAGE),
    ]
    assert [plan.is_last(rank) for rank in range(3)] == [False, True, True]


def test_a_layout_is_sent_by_the_first_rank_that_has_it() -> None:
    layouts = [(b"a",), (b"a", b"f"), (b"b",), (b"b", b"f")]
    plan = plan_of([Claim(layouts=digests, objects=("sampler",)) for digests in layouts])
    assert [part.layouts for part in plan.parts] == [(0,), (0, 1), (2,), (2, 1)]
    assert plan.senders == {0: [0], 1: [1], 2: [2]}
    assert plan.objects == ["sampler"]


def test_values_lie_behind_the_tensors(tmp_path: Path) -> None:
    values = dump({"rng": [1, 2]})
    parts = plan_of([Claim(tensors=128, values=len(values))] * 2).parts
    part = parts[0]._replace(offset=PAGE)
    disk.write_file(tmp_path / part.file, bytes(128), values, offset=PAGE)
    assert read_values(tmp_path, part) == {"rng": [1, 2]}


def test_values_that_end_too_early_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not those of a shorter pickle: a file system may return less than it has."""
    stop_clock(monkeypatch, file_io)
    values = dump({"rng": [1, 2]})
    part = plan_of([Claim(values=len(values))]).parts[0]
    disk.write_file(tmp_path / part.file, values[:-1])
    with pytest.raises(OSError, match="ends too early"):
        read_values(tmp_path, part)
