"""Batches of any type are moved to a device."""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

import torch

from hpc_ddp.training.data import batches
from hpc_ddp.training.data.batches import move_to_device
from hpc_ddp.training.devices import CPU
from unit.training.data.fakes import Sample


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


class Encoding(UserDict[str, torch.Tensor]):
    """A batch like Transformers' BatchEncoding: no dict, and it moves itself."""

    def to(self, device: torch.device) -> Encoding:
        return Encoding({name: value.to(device) for name, value in self.items()})


def test_batches_of_other_libraries_are_moved() -> None:
    meta = torch.device("meta")
    encoding, sample = move_to_device(
        [Encoding({"ids": torch.ones(2)}), Sample(torch.ones(1), [torch.ones(2)], "n")], meta
    )
    assert isinstance(encoding, Encoding)
    assert encoding["ids"].device == meta
    assert sample.image.device == sample.boxes[0].device == meta
    assert (sample.name, sample.area) == ("n", 3)
    assert move_to_device(Sample, meta) is Sample
    features = UserDict[str, Any]({"ids": [torch.ones(2)], "name": "n"})
    moved = move_to_device(features, meta)
    assert (type(moved), moved["ids"][0].device, moved["name"]) == (UserDict, meta, "n")
    assert features["ids"][0].device == CPU


class Kept(MutableMapping[str, Any]):
    """A mapping of a script's own, of which a copy has the same dict."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self.parts = parts

    def __getitem__(self, key: str) -> Any:
        return self.parts[key]

    def __setitem__(self, key: str, part: Any) -> None:
        self.parts[key] = part

    def __delitem__(self, key: str) -> None:
        del self.parts[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def test_a_mapping_that_a_data_set_keeps_stays_on_the_host() -> None:
    kept = Kept({"ids": torch.ones(2)})
    moved = move_to_device(kept, torch.device("meta"))
    assert (moved["ids"].device.type, kept["ids"].device) == ("meta", CPU)


def test_a_batch_that_can_move_itself_moves_without_a_wait() -> None:
    calls: list[dict[str, Any]] = []

    class Quick(Encoding):
        def to(self, device: torch.device, **options: Any) -> Encoding:
            calls.append(options)
            return super().to(device)

    move_to_device([Quick({"ids": torch.ones(2)})], torch.device("meta"))
    assert calls == [{"non_blocking": True}]


def test_a_named_tuple_stays_one() -> None:
    moved = move_to_device({"a": Pair(torch.zeros(1), "n")}, torch.device("meta"))
    assert moved["a"].x.is_meta
    assert moved["a"].name == "n"


def test_a_tensor_of_rows_of_different_lengths_moves_unpinned() -> None:
    rows = [torch.zeros(1), torch.zeros(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a prototype
        for layout in (torch.strided, torch.jagged):
            nested = torch.nested.nested_tensor(rows, layout=layout)
            assert batches._pin(nested) is nested


def test_nested_batches_move() -> None:
    batch = {"x": torch.zeros(1), "y": [torch.zeros(1), ("name", 3)]}
    moved = move_to_device(batch, torch.device("meta"))
    assert moved["x"].is_meta
    assert moved["y"][0].is_meta
    assert moved["y"][1] == ("name", 3)
