"""Tensors are cut into shards, staged, stored and read back."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_ddp.training import devices
from hpc_ddp.training.checkpoint import state
from hpc_ddp.training.checkpoint.rank_part import parts_of_rank
from hpc_ddp.training.checkpoint.storage import shards
from hpc_ddp.training.checkpoint.storage.shards import (
    StagingBuffer,
    rows,
    share_of,
    whole,
)
from hpc_ddp.training.devices import CPU
from hpc_ddp.training.models.mesh import ParallelDims
from unit.training.checkpoint.fakes import ManyParameters, reader_of

# --- pieces --------------------------------------------------------------------------------


def test_a_range_of_bytes_is_cut_into_whole_rows() -> None:
    tensor = torch.arange(12.0).view(6, 2)  # 8 bytes a row
    result = [
        rows(tensor, *edges) for edges in ((0, 48), (0, 8), (1, 17), (-5, 9), (48, 60), (8, 8))
    ]
    spans = [None if part is None else (part.start[0], part.size[0]) for part in result]
    assert spans == [(0, 6), (0, 1), (1, 2), (0, 2), None, None]
    assert rows(torch.tensor(5.0), 1, 9) is None
    alone = rows(torch.tensor(5.0), -1, 2)
    assert alone is not None
    assert alone.size == ()


def test_a_staging_buffer_detects_non_finite_numbers() -> None:
    big = torch.full((4,), 60000.0, dtype=torch.float16)  # their sum is finite, not in halves
    for bad, names, finite in (
        (big, ("a",), True),
        (torch.tensor([1.0, torch.nan]), ("a",), False),
        (torch.tensor([1.0, torch.inf]), ("a",), False),
        (torch.tensor([1.0, torch.inf]), (), True),
        (torch.tensor([1, 2]), ("a",), True),
        (torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn), ("a",), False),
        (torch.tensor([1.0, 448.0]).to(torch.float8_e4m3fn), ("a",), True),
    ):
        buffer = StagingBuffer(CPU)
        buffer.fill({"n": whole(torch.ones(1)), "a": whole(bad)})
        assert buffer.is_finite(names) is finite


def test_memory_in_blocks_holds_the_same_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The memory is pinned for an accelerator, or left as it is if that fails, as here."""
    parts = {
        "a": whole(torch.arange(70.0, dtype=torch.float64)),
        "b": whole(torch.randn(4, 6, 5).transpose(0, 2)),
        "c": whole(torch.randn(3).to(torch.bfloat16)),
        "d": whole(torch.empty(0)),
    }
    one = StagingBuffer(CPU)
    one.fill(parts)
    monkeypatch.setattr(shards, "BLOCK", 256)
    monkeypatch.setattr(devices, "use", lambda device: None)  # there is none here
    blocks = StagingBuffer(torch.device("cuda"))
    blocks.fill(parts)
    blocks.wait()
    assert blocks.pieces == one.pieces
    readers = []
    for name, buffer in {"one": one, "blocks": blocks}.items():
        (tmp_path / name).write_bytes(b"".join(buffer.bytes))
        readers.append(reader_of([(tmp_path / name, buffer.pieces)]))
    assert all(torch.equal(*(reader.read(name) for reader in readers)) for name in parts)
    assert [len(block) for block in blocks.bytes] == [256, 256, 256, 256, 128]
    assert blocks.is_finite(parts)
    parts["b"].numbers[2, 3, 1] = torch.inf
    blocks.fill(parts)
    assert not blocks.is_finite(["b"])


def test_a_staging_buffer_is_allocated_once() -> None:
    model = ManyParameters()
    collected = state.collect({"model": model})
    buffer = StagingBuffer(CPU)
    places = []
    for _ in range(2):
        buffer.fill(parts_of_rank(collected, ParallelDims()))
        places.append(buffer._blocks[0].data_ptr())
    assert places[0] == places[1]
    assert buffer._blocks[0].numel() < sum(t.nbytes for t in collected.tensors.values()) + 64 * 20


def test_memory_that_can_not_be_locked_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, refusals = torch.empty, list[int]()

    def refuse(size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            refusals.append(size)
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be")
        return empty(size, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(shards, "BLOCK", 128)
    buffer = StagingBuffer(torch.device("meta"))
    for numbers in (torch.arange(100.0), torch.arange(200.0)):
        buffer.fill({"a": whole(numbers)})
        assert torch.equal(torch.cat(buffer._segments[0]), numbers)
    assert len(refusals) == 1
    assert capsys.readouterr().err == (
        "hpc-ddp: saves hold the training up for their copy: no memory can be locked"
        " (CUDA error: out of memory)\n"
    )


def test_a_thread_that_waits_chooses_its_device_also_without_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may wait for sums next, and would open the node's first device for that."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(devices, "use", chosen.append)
    buffer = StagingBuffer(CPU)
    buffer.fill({})
    assert buffer.wait() == 0.0
    assert chosen == [CPU]


@pytest.mark.parametrize("size", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("total", [0, 9, 10, 35, 80, 999])
def test_a_small_state_is_shared_by_few_ranks(
    monkeypatch: pytest.MonkeyPatch, total: int, size: int
) -> None:
    """The shares are all of the bytes in a row, none is too small, and the first rank has one."""
    monkeypatch.setattr(shards, "LEAST_SHARE", 10)
    parts = {rank: share_of(total, rank, size) for rank in range(size)}
    writers = [rank for rank, (low, high) in parts.items() if low < high]
    assert len(writers) == (min(size, max(total // 10, 1)) if total else 0)
    assert [byte for rank in writers for byte in range(*parts[rank])] == list(range(total))
    assert not total or writers[0] == 0
    gaps = {after - before for before, after in pairwise(writers)}
    assert max(gaps, default=1) - min(gaps, default=1) <= 1
