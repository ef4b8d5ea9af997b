"""The index of a checkpoint of many ranks, without the ranks: its size, and the seconds it costs.

``python bench/checkpoint_index.py [RANKS] [TENSORS]`` prints a table, beside what an entry for each
tensor and rank takes (its bytes from those of the first 50 ranks), and writes of several processes
into one file beside those into a file each.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import Process
from pathlib import Path
from typing import TypeVar

import torch

from hpc_ddp.training.checkpoint.storage import disk
from hpc_ddp.training.checkpoint.storage.index import (
    INDEX,
    Claim,
    Index,
    RankPart,
    dump_index,
    plan_of,
    reader_of,
)
from hpc_ddp.training.checkpoint.storage.layout import (
    MeshCut,
    StoredShard,
    aligned,
    cut_box,
    digest_of,
    layout_of,
)

SHAPE = 16384, 4096
WRITERS, WRITTEN = 8, 1 << 27  # processes, and the bytes of each
T = TypeVar("T")


def timed(act: Callable[[], T]) -> tuple[T, float]:
    """Return what `act` returns, and the seconds that it took."""
    began = time.perf_counter()
    result = act()
    return result, time.perf_counter() - began


def pieces_of(rank: int, ranks: int, tensors: int) -> list[StoredShard]:
    """Return the pieces of a rank of FSDP."""
    cuts, pieces, offset = (MeshCut(0, ranks, rank, "dp"),), [], 0
    start, size = cut_box(SHAPE, [(0, ranks, rank)])
    for number in range(tensors):
        name = f"optimizer.state.model.layers.{number}.weight.exp_avg"
        pieces.append(StoredShard(name, "float32", SHAPE, start, size, offset, cuts))
        offset += aligned(4 * size[0] * size[1])
    return pieces


def measure_index(ranks: int, tensors: int) -> None:
    """Print the rows of the index."""
    (layout, _), made_s = timed(lambda: layout_of(pieces_of(5, ranks, tensors)))
    digest, digest_s = timed(lambda: digest_of(layout))
    claims = [
        Claim(f"n{rank // 8}", 1 << 30, 14000, 0, ((rank,),), (digest,), rank)
        for rank in range(ranks)
    ]
    plan, plan_s = timed(lambda: plan_of(claims))
    content, dump_s = timed(lambda: dump_index(plan, {0: layout}, {}))
    loaded, load_s = timed(lambda: torch.load(io.BytesIO(content), weights_only=True)[INDEX])
    parts = [RankPart(*row) for row in loaded["parts"]]
    reader = reader_of(Path(), Index({}, parts, [layout], []), 5)
    _, find_s = timed(
        lambda: [list(reader._pieces(n, cut_box(SHAPE, [(0, ranks, 5)]))) for n in reader]
    )
    few = [[tuple(piece[:6]) for piece in pieces_of(rank, ranks, tensors)] for rank in range(50)]
    file = io.BytesIO()
    _, few_s = timed(lambda: torch.save(few, file))
    print(f"{ranks} ranks, {tensors} tensors, {len({part.file for part in parts})} files")
    print("| | one layout | an entry for each tensor and rank |\n|---|---|---|")
    print(f"| index, MB | {len(content) / 1e6:.1f} | {file.tell() * ranks / 50 / 1e6:,.0f} |")
    print(f"| to write, s | {dump_s:.2f} | {few_s * ranks / 50:,.0f} |")
    print(f"| to read, s | {load_s:.2f} | |")
    print(f"| layout and digest of a rank, s a save | {made_s + digest_s:.2f} | |")
    print(f"| plan of rank 0, s a save | {plan_s:.2f} | |")
    print(f"| the places of one rank's parts, s a restore | {find_s:.2f} | |")


def measure_writes(folder: Path) -> None:
    """Print how fast processes write into one file, and into a file each."""
    content = os.urandom(1 << 20) * (WRITTEN >> 20)
    rates: dict[str, list[float]] = {"one file": [], "a file each": []}
    for _ in range(3):
        for kind, rows in rates.items():
            is_one = kind == "one file"
            paths = [folder / f"{0 if is_one else n}" for n in range(WRITERS)]
            offsets = [n * WRITTEN if is_one else 0 for n in range(WRITERS)]
            processes = [
                Process(
                    target=disk.write_file,
                    args=(path, content),
                    kwargs={"offset": offset, "ends": not is_one},
                )
                for path, offset in zip(paths, offsets, strict=True)
            ]
            began = time.perf_counter()
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            rows.append(WRITERS * WRITTEN / (time.perf_counter() - began) / 1e9)
            for path in set(paths):
                path.unlink()
    print(f"\n{WRITERS} processes write {WRITTEN >> 20} MiB each, and sync; GB/s in three rounds")
    for kind, rows in rates.items():
        print(f"- {kind}: {', '.join(f'{rate:.2f}' for rate in rows)}")


if __name__ == "__main__":
    measure_index(*(int(word) for word in (sys.argv[1:] or ["8192", "9000"])))
    with tempfile.TemporaryDirectory(dir=".") as name:
        measure_writes(Path(name))
