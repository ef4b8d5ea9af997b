"""A layout has the boxes of many ranks, and finds those that have some of another box."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch

from hpc_ddp.training.checkpoint.storage.layout import (
    Cut,
    LayoutEntry,
    MeshCut,
    StoredShard,
    aligned,
    cells,
    cut_box,
    digest_of,
    layout_of,
    offsets_of,
    overlap,
)


@pytest.mark.parametrize(("size", "parts"), [(10, 3), (4, 8), (0, 2), (7, 1), (6, 4)])
def test_a_cut_is_that_of_torch_chunk(size: int, parts: int) -> None:
    chunks = torch.arange(size).chunk(parts)
    for place in range(parts):
        (start,), (extent,) = cut_box((size,), [(0, parts, place)])
        expected = chunks[place].tolist() if place < len(chunks) else []
        assert list(range(start, start + extent)) == expected


def pieces_at(row: int, column: int) -> list[StoredShard]:
    """Return the pieces of a rank of a 2 x 3 mesh: a matrix cut twice, a vector cut once, rows."""
    pieces, offset = [], 0
    axes = {"row": (0, 2, row), "column": (1, 3, column)}
    cuts = [[axes["row"], axes["column"]], [(0, 3, column)], []]
    for name, shape, places in zip("abc", [(5, 7), (4,), (2, 2)], cuts, strict=True):
        mesh_cuts = tuple(MeshCut(*place, axis=place[1]) for place in places)
        box = cut_box(shape, places)
        pieces.append(StoredShard(name, "float32", shape, *box, offset, mesh_cuts))
        offset += aligned(4 * torch.Size(box[1]).numel())
    return pieces


def test_ranks_that_cut_alike_have_one_layout() -> None:
    digests = set()
    for row, column in product(range(2), range(3)):
        pieces = pieces_at(row, column)
        layout, coordinates = layout_of(pieces)
        digests.add(digest_of(layout))
        assert coordinates == (row, column)
        assert [entry.box_at(coordinates) for entry in layout] == [
            (p.start, p.size) for p in pieces
        ]
        assert offsets_of(layout, coordinates) == [piece.offset for piece in pieces]
    assert len(digests) == 1
    assert digest_of(layout_of(pieces_at(0, 0)[:2])[0]) not in digests


@pytest.mark.parametrize("seed", range(20))
def test_a_box_is_covered_once(seed: int) -> None:
    """Also where one dimension is cut twice, as by tensor parallelism and then by FSDP2."""
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 9) for _ in range(2))
    cuts = tuple(Cut(rng.randrange(2), rng.randint(1, 4), axis) for axis in range(3))
    start = tuple(rng.randrange(size) for size in shape)
    box = start, tuple(rng.randint(1, n - low) for n, low in zip(shape, start, strict=True))
    entry = LayoutEntry("a", "float32", shape, None, cuts)
    count = torch.zeros(shape, dtype=torch.int)
    for places, cell in cells(entry, box):
        assert cell == entry.box_at(places)
        (row, column), (height, width) = overlap(cell, box)
        assert min(height, width) > 0, "a cell without any of it"
        count[row : row + height, column : column + width] += 1
    wanted = torch.zeros_like(count)
    wanted[box[0][0] :, box[0][1] :][: box[1][0], : box[1][1]] = 1
    assert count.equal(wanted)
