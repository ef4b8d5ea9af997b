"""Tensors are cut into shards, staged, stored and read back."""

from __future__ import annotations

import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpc_ddp.core import file_io
from hpc_ddp.core.errors import CAN_GO_ON, HpcDdpError
from hpc_ddp.training import devices
from hpc_ddp.training.checkpoint import put_back, shards, state
from hpc_ddp.training.checkpoint.shards import (
    OWN,
    Reader,
    StagingBuffer,
    StoredShard,
    rows,
    share_of,
    whole,
)
from hpc_ddp.training.devices import CPU
from hpc_ddp.training.models.mesh import ParallelDims
from unit.fakes import stop_clock
from unit.training.checkpoint.fakes import ManyParameters
from unit.training.fakes import Holds

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


def test_a_tensor_is_put_together_from_boxes(tmp_path: Path) -> None:
    full = torch.arange(12.0).view(4, 3)
    parts = {"t": rows(full, 0, 24), "u": whole(torch.ones(0, 3)), "v": whole(torch.tensor(7))}
    files = []
    for index, (low, high) in enumerate(((0, 24), (24, 48))):
        buffer = StagingBuffer(CPU)
        part = rows(full, low, high)
        assert part is not None
        buffer.fill({**{k: p for k, p in parts.items() if index == 0 and p}, "t": part})
        (tmp_path / str(index)).write_bytes(b"".join(buffer.bytes))
        files.append((tmp_path / str(index), buffer.pieces))
    reader = Reader(files)
    assert torch.equal(reader.read("t"), full)
    assert reader.read("u").shape == (0, 3)
    assert reader.read("v").item() == 7
    assert (reader.describe("t").shape, reader.describe("t").is_meta) == ((4, 3), True)
    assert sorted(reader) == ["t", "u", "v"]
    assert "t" in reader
    assert "w" not in reader
    with pytest.raises(HpcDdpError, match="t: only 6 of 12 numbers are stored"):
        Reader(files[1:]).read("t")
    with pytest.raises(HpcDdpError, match="t: only 6 of 12"):
        Reader(files[:1]).read("t")


def test_a_ranks_private_tensor_is_preferred(tmp_path: Path) -> None:
    buffer = StagingBuffer(CPU)
    buffer.fill({"b": whole(torch.tensor(1)), f"b{OWN}2": whole(torch.tensor(2))})
    (tmp_path / "data").write_bytes(b"".join(buffer.bytes))
    files = [(tmp_path / "data", buffer.pieces)]
    assert [Reader(files, rank).read("b").item() for rank in (0, 2, None)] == [1, 2, 1]
    assert list(Reader(files)) == ["b"]
    assert buffer.pieces[1].offset == 64
    assert math.prod(buffer.pieces[1].size) == 1
    assert isinstance(buffer.pieces[0], StoredShard)


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
        readers.append(Reader([(tmp_path / name, buffer.pieces)]))
    assert all(torch.equal(*(reader.read(name) for reader in readers)) for name in parts)
    assert [len(block) for block in blocks.bytes] == [256, 256, 256, 256, 128]
    assert blocks.is_finite(parts)
    parts["b"].numbers[2, 3, 1] = torch.inf
    blocks.fill(parts)
    assert not blocks.is_finite(["b"])


def test_any_box_of_a_tensor_is_read(tmp_path: Path) -> None:
    """Other ranks than the writers have other parts of a tensor."""
    full = torch.arange(18.0).view(6, 3)
    files = []
    for index, low in enumerate((0, 24, 48)):  # two rows each
        buffer = StagingBuffer(CPU)
        part = rows(full, low, low + 24)
        assert part is not None
        buffer.fill({"t": part})
        (tmp_path / str(index)).write_bytes(b"".join(buffer.bytes))
        files.append((tmp_path / str(index), buffer.pieces))
    boxes = [((0, 0), (2, 3)), ((1, 0), (2, 3)), ((1, 1), (4, 2)), ((4, 2), (2, 1))]
    boxes += [((6, 0), (0, 3)), ((3, 0), (0, 3))]
    for start, size in boxes:
        wanted = full[start[0] : start[0] + size[0], start[1] : start[1] + size[1]]
        assert torch.equal(Reader(files)._box("t", start, size), wanted)
    with pytest.raises(HpcDdpError, match="t: only 0 of 6 numbers are stored"):
        Reader(files[:1])._box("t", (4, 0), (2, 3))


def _stored(folder: Path) -> Reader:
    buffer = StagingBuffer(CPU)
    buffer.fill({"t": whole(torch.arange(6.0).view(3, 2))})
    (folder / "data").write_bytes(b"".join(buffer.bytes))
    return Reader([(folder / "data", buffer.pieces)])


def test_a_data_file_that_is_away_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, clock = _stored(tmp_path), stop_clock(monkeypatch, file_io)
    (tmp_path / "data").rename(tmp_path / "away")

    def sleep(seconds: float) -> None:
        (tmp_path / "away").rename(tmp_path / "data")

    monkeypatch.setattr(clock, "sleep", sleep)
    assert torch.equal(reader.read("t"), torch.arange(6.0).view(3, 2))


def test_an_unreadable_data_file_is_not_called_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process gets no SIGBUS either, which ends one that has mapped a file at an I/O error."""
    reader, clock = _stored(tmp_path), stop_clock(monkeypatch, file_io)
    os.truncate(tmp_path / "data", 20)
    holds = Holds(torch.zeros(3, 2))
    with pytest.raises(
        shards.UnreadableError, match=r"data can't be read.*it ends too early"
    ) as caught:
        put_back.put_back({"t": holds}, {"t": state.TENSOR}, reader, 1)
    assert caught.value.exit_code == CAN_GO_ON  # another attempt may find that the disk answers
    assert sum(clock.slept) >= file_io.PATIENCE_S


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MOST_FILES", 2)
    files = []
    for index in range(5):
        buffer = StagingBuffer(CPU)
        buffer.fill({f"t{index}": whole(torch.tensor(index))})
        (tmp_path / str(index)).write_bytes(b"".join(buffer.bytes))
        files.append((tmp_path / str(index), buffer.pieces))
    reader = Reader(files)
    for _ in range(2):
        assert [int(reader.read(f"t{index}")) for index in range(5)] == [0, 1, 2, 3, 4]
        assert len(reader._files) <= 2


def test_a_staging_buffer_is_allocated_once() -> None:
    model = ManyParameters()
    collected = state.collect({"model": model})
    buffer = StagingBuffer(CPU)
    places = []
    for _ in range(2):
        buffer.fill(state.my_parts(collected, ParallelDims()))
        places.append(buffer._blocks[0].data_ptr())
    assert places[0] == places[1]
    assert buffer._blocks[0].numel() < sum(t.nbytes for t in collected.tensors.values()) + 64 * 20


@pytest.mark.parametrize("ignored", [False, True])
def test_a_new_rank_reads_the_first_ranks_buffers(tmp_path: Path, ignored: bool) -> None:
    models = [nn.BatchNorm1d(2) for _ in range(3)]
    ddp: Any = nn.parallel.DistributedDataParallel
    for model in models if ignored else ():
        ddp._set_params_and_buffers_to_ignore_for_model(model, ["running_mean"])
    for rank, model in enumerate(models[:2]):
        model.running_mean = torch.full((2,), rank + 1.0)
        collected = state.collect({"model": model})
        buffer = StagingBuffer(CPU)
        buffer.fill(state.my_parts(collected, ParallelDims(rank, 2)))
        (tmp_path / f"tensors-{rank}.bin").write_bytes(b"".join(buffer.bytes))
        torch.save(list(map(tuple, buffer.pieces)), tmp_path / f"pieces-{rank}")
    files = [
        (path, torch.load(path.with_name(f"pieces-{path.stem[8:]}"), weights_only=True))
        for path in tmp_path.glob("tensors-*")
    ]
    means = [Reader(files, rank).read("model.running_mean")[0].item() for rank in (0, 1, None)]
    assert means == [1.0, 2.0, 1.0]


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
