"""The tensors that ranks have to save are compared before they are written."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from hpc_ddp.training.checkpoint.rank_comparison import (
    Inventory,
    checksum,
    different_objects,
    digest,
    find_fault,
    fit_together,
    has_equal_objects,
    inventory_of,
    start_checksums,
    with_checksums,
)
from hpc_ddp.training.checkpoint.storage.layout import OWN
from hpc_ddp.training.checkpoint.storage.shards import rows, whole

SHAPES = {"m.weight": (4, 2), "m.bias": (4,), "m.steps": ()}
ALL = {"m.weight": 8, "m.bias": 4, "m.steps": 1}


def _fit(*inventories: Inventory) -> bool:
    return fit_together([inventory.digest for inventory in inventories])


def _fault(*inventories: Inventory) -> str:
    assert not _fit(*inventories)
    return find_fault(inventories).message


def _pair(**changes: int) -> list[Inventory]:
    """Return two ranks' that share a weight; the second one writes other numbers, by name."""
    second = {"m.weight": 3} | {f"m.{name}": count for name, count in changes.items()}
    return [Inventory(0, SHAPES, {**ALL, "m.weight": 5}), Inventory(0, SHAPES, second)]


def test_ranks_that_write_each_number_once_fit_together() -> None:
    assert _fit(Inventory(0, SHAPES, ALL))
    assert _fit(*_pair())
    assert _fit(Inventory(0, {}), Inventory(0, {}))
    assert _fit(*_pair(), replace(_pair()[0], stage=1), replace(_pair()[1], stage=1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight": 2}, "m.weight has 8 numbers, and the ranks would write 7"),
        ({"weight": 4}, "m.weight has 8 numbers, and the ranks would write 9"),
        ({"weight": 2, "bias": 1}, "m.weight has 8 numbers, and the ranks would write 7"),
        ({"steps": 1}, "m.steps has 1 numbers, and the ranks would write 2"),
    ],
)
def test_a_tensor_that_is_not_written_once_is_named(changes: dict[str, int], words: str) -> None:
    assert words in _fault(*_pair(**changes))
    behind = [replace(inventory, stage=1) for inventory in _pair(**changes)]
    assert words in _fault(*_pair(), *behind)


def test_other_tensors_are_named_with_the_rank() -> None:
    one = Inventory(0, SHAPES, ALL)
    for shapes in ({**SHAPES, "m.bias": (2, 2)}, {**SHAPES, "m.new": (1,)}):
        name = "m.new" if "m.new" in shapes else "m.bias"
        fault = _fault(one, Inventory(0, SHAPES), Inventory(0, shapes))
        assert fault == f"rank 2 has other tensors to save than rank 0: {name}"
    many = {f"m.{index}": (1,) for index in range(9)}
    assert _fault(one, Inventory(0, SHAPES | many)).endswith("m.0, m.1, m.2, m.3, …")


def test_an_object_that_only_some_ranks_track_is_named() -> None:
    """An object without tensors is named, too."""
    one, fewer = (Inventory(0, {}, objects=names) for names in (["meter", "model"], ["model"]))
    assert _fit(one, one, replace(one, stage=1))
    for stage in (0, 1):
        fault = _fault(one, one, replace(fewer, stage=stage))
        assert fault == "rank 2 shares other objects than rank 0: meter"


def test_different_numbers_are_named_with_the_ranks() -> None:
    one = Inventory(0, SHAPES, ALL, {"m.weight": 7, "m.bias": 8})
    same, different = (
        replace(one, written={}),
        Inventory(0, SHAPES, {}, {"m.weight": 7, "m.bias": 9}),
    )
    assert _fit(one, same, same)
    assert "m.bias differs between rank 0 and rank 2:" in _fault(one, same, different)
    assert "m.bias differs between rank 0 and ranks 1, 2:" in _fault(one, different, different)
    behind = [replace(one, stage=1), replace(different, stage=1)]
    assert "m.bias differs between rank 1 and rank 2:" in _fault(Inventory(0, {}), *behind)


def test_an_inventory_counts_what_a_rank_shares_with_others() -> None:
    weight = torch.ones(4, 2)
    part = rows(weight, 0, 16)
    assert part is not None
    parts = {"m.weight": part, f"m.mean{OWN}": whole(torch.ones(3))}
    tensors = {"m.weight": weight, "m.mean": torch.ones(3)}
    inventory = inventory_of(2, tensors, parts, ("m", "count"))
    shapes = {"m.weight": (4, 2), "m.mean": (3,)}
    assert inventory == Inventory(2, shapes, {"m.weight": 4}, {}, ["count", "m"])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(5, 3),
        torch.tensor(2.5),
        torch.randn(3).to(torch.bfloat16),
        torch.tensor([True, False, True]),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(2, dtype=torch.complex64),
        torch.randn(9).to(torch.float8_e4m3fn),
        torch.randn(9)[1:],  # not at a multiple of eight bytes
        torch.arange(7)[::2],
        torch.randn(4, 3)[:1, 1],  # one number, in steps of three
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_the_checksum_of_a_tensor_is_that_of_its_numbers(tensor: torch.Tensor) -> None:
    assert checksum(tensor).item() == checksum(tensor.clone(memory_format=torch.preserve_format))
    for place in {0, tensor.numel() - 1}:
        changed = tensor.clone(memory_format=torch.contiguous_format)
        memory = changed.view(-1).view(torch.uint8)
        memory[place * changed.element_size()] ^= 1
        assert checksum(changed).item() != checksum(tensor).item()
    assert checksum(tensor[:0] if tensor.dim() else torch.empty(0)).item() == 0


def test_checksums_are_of_the_moment_they_were_started_at() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    expected = {"a": checksum(torch.zeros(2)).item(), "w": checksum(torch.ones(3, 3)).item()}
    wait = start_checksums({"w": weight, "a": torch.zeros(2)})
    with torch.no_grad():
        weight.zero_()
    assert wait() == expected
    assert start_checksums({})() == {}


def test_copies_of_a_part_are_compared_with_each_other_alone() -> None:
    """Two replicas of a weight in two parts."""

    def ranks(*sums: int) -> list[Inventory]:
        places = ["m.weight at (0, 0)", "m.weight at (2, 0)"]
        weights = [{place: weight} for weight in (1, -1) for place in places]
        inventories = [Inventory(0, SHAPES, ALL), *(Inventory(0, SHAPES) for _ in range(3))]
        rows = zip(inventories, weights, sums, strict=True)
        return [with_checksums(i, dict.fromkeys(w, total), w, {}) for i, w, total in rows]

    assert _fit(*ranks(5, 7, 5, 7))
    beginning = "m.weight at (2, 0) differs between rank 1 and rank 3"
    assert _fault(*ranks(5, 7, 5, 8)).startswith(beginning)
    assert _fault(*ranks(5, 7, 7, 5)).startswith("m.weight at (0, 0) differs")


def test_other_objects_that_differ_are_named_and_make_a_whole() -> None:
    def rank(stage: int, *rows: object) -> Inventory:
        return with_checksums(
            Inventory(stage, SHAPES, ALL), {}, {}, dict(zip("ab", rows, strict=True))
        )

    one, other, behind = rank(0, 1, [2]), rank(0, 1, [3]), rank(1, 5, [6])
    assert has_equal_objects([one.digest, rank(0, 1, [2]).digest, behind.digest])
    assert not has_equal_objects([one.digest, other.digest, behind.digest])
    assert different_objects([one, other, behind]) == ["b"]
    assert different_objects([one, behind]) == []
    assert _fit(one, replace(other, written={}))
    assert rank(0, {"x": 1, "y": {"a", "b"}}, 0) == rank(0, {"y": {"b", "a"}, "x": 1}, 0)
    assert rank(0, [{"x": (1,)}], 0) != rank(0, [{"x": (2,)}], 0)


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3000), (1024, 2)])
def test_a_digest_sees_what_has_changed_places(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    for other in (tensor.flip(0), tensor.roll(1, -1), tensor + 1):
        assert digest(other) != digest(tensor)
    assert digest(tensor.flip(0).flip(0)) == digest(tensor)
    assert digest(torch.zeros(0)) == 0
