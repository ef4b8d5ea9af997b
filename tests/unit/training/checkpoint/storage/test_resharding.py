"""Tensors are read again from the parts of all ranks, whole or in other boxes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpc_ddp.core import file_io
from hpc_ddp.core.errors import CAN_GO_ON, HpcDdpError
from hpc_ddp.training.checkpoint import plain_state, put_back, state
from hpc_ddp.training.checkpoint.rank_part import parts_of_rank
from hpc_ddp.training.checkpoint.storage import resharding as reader_module
from hpc_ddp.training.checkpoint.storage.layout import OWN
from hpc_ddp.training.checkpoint.storage.resharding import Reader, UnreadableError
from hpc_ddp.training.checkpoint.storage.shards import rows, whole
from hpc_ddp.training.models.mesh import ParallelDims
from unit.fakes import stop_clock
from unit.training.checkpoint.fakes import reader_of, write_buffer
from unit.training.fakes import Holds


def test_a_tensor_is_put_together_from_boxes(tmp_path: Path) -> None:
    full = torch.arange(12.0).view(4, 3)
    parts = {"u": whole(torch.ones(0, 3)), "v": whole(torch.tensor(7))}
    files = []
    for index, (low, high) in enumerate(((0, 24), (24, 48))):
        part = rows(full, low, high)
        assert part is not None
        files.append(
            write_buffer(
                tmp_path / str(index),
                {**{k: p for k, p in parts.items() if index == 0 and p}, "t": part},
            )
        )
    reader = reader_of(files)
    assert torch.equal(reader.read("t"), full)
    assert reader.read("u").shape == (0, 3)
    assert reader.read("v").item() == 7
    assert (reader.describe("t").shape, reader.describe("t").is_meta) == ((4, 3), True)
    assert sorted(reader) == ["t", "u", "v"]
    assert "t" in reader
    assert "w" not in reader
    with pytest.raises(HpcDdpError, match="t: only 6 of 12 numbers are stored"):
        reader_of(files[1:]).read("t")
    with pytest.raises(HpcDdpError, match="t: only 6 of 12"):
        reader_of(files[:1]).read("t")


def test_a_ranks_private_tensor_is_preferred(tmp_path: Path) -> None:
    first = {"b": whole(torch.tensor(1)), f"c{OWN}": whole(torch.tensor(3))}
    second = {f"b{OWN}": whole(torch.tensor(2)), f"c{OWN}": whole(torch.tensor(4))}
    files = [write_buffer(tmp_path / f"{n}", p) for n, p in enumerate((first, second))]
    readers = [reader_of(files, rank) for rank in (0, 1, None)]
    assert [reader.read("b").item() for reader in readers] == [1, 2, 1]
    assert [reader.read("c").item() for reader in readers[:2]] == [3, 4]
    assert [list(reader) for reader in readers] == [["b", "c"], ["b", "c"], ["b"]]
    assert [reader.of_other_ranks for reader in readers] == [set(), set(), {"c"}]


def test_any_box_of_a_tensor_is_read(tmp_path: Path) -> None:
    """Other ranks than the writers have other parts of a tensor."""
    full = torch.arange(18.0).view(6, 3)
    files = []
    for index, low in enumerate((0, 24, 48)):  # two rows each
        part = rows(full, low, low + 24)
        assert part is not None
        files.append(write_buffer(tmp_path / str(index), {"t": part}))
    boxes = [((0, 0), (2, 3)), ((1, 0), (2, 3)), ((1, 1), (4, 2)), ((4, 2), (2, 1))]
    boxes += [((6, 0), (0, 3)), ((3, 0), (0, 3))]
    for start, size in boxes:
        wanted = full[start[0] : start[0] + size[0], start[1] : start[1] + size[1]]
        assert torch.equal(reader_of(files).read_box("t", (start, size)), wanted)
    with pytest.raises(HpcDdpError, match="t: only 0 of 6 numbers are stored"):
        reader_of(files[:1]).read_box("t", ((4, 0), (2, 3)))


def _stored(folder: Path) -> Reader:
    return reader_of([write_buffer(folder / "data", {"t": whole(torch.arange(6.0).view(3, 2))})])


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
    with pytest.raises(UnreadableError, match=r"data can't be read.*it ends too early") as caught:
        put_back.put_back({"t": holds}, {"t": plain_state.TENSOR}, reader, 1)
    assert caught.value.exit_code == CAN_GO_ON  # another attempt may find that the disk answers
    assert sum(clock.slept) >= file_io.PATIENCE_S


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "MOST_FILES", 2)
    files = []
    for index in range(5):
        files.append(write_buffer(tmp_path / str(index), {f"t{index}": whole(torch.tensor(index))}))
    reader = reader_of(files)
    for _ in range(2):
        assert [int(reader.read(f"t{index}")) for index in range(5)] == [0, 1, 2, 3, 4]
        assert len(reader._files) <= 2


@pytest.mark.parametrize("ignored", [False, True])
def test_a_new_rank_reads_the_first_ranks_buffers(tmp_path: Path, ignored: bool) -> None:
    models = [nn.BatchNorm1d(2) for _ in range(3)]
    ddp: Any = nn.parallel.DistributedDataParallel
    for model in models if ignored else ():
        ddp._set_params_and_buffers_to_ignore_for_model(model, ["running_mean"])
    files = []
    for rank, model in enumerate(models[:2]):
        model.running_mean = torch.full((2,), rank + 1.0)
        collected = state.collect({"model": model})
        parts = parts_of_rank(collected, ParallelDims(rank, 2))
        files.append(write_buffer(tmp_path / f"{rank}", parts))
    means = [reader_of(files, rank).read("model.running_mean")[0].item() for rank in (0, 1, None)]
    assert means == [1.0, 2.0, 1.0]
