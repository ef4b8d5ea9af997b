"""What ranks have to save is compared before it is written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hpc_ddp.training.inventory import Inventory, find_fault, fit_together, inventory_of
from hpc_ddp.training.pieces import OWN, rows, whole

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


def test_different_numbers_are_named_with_the_ranks() -> None:
    one = Inventory(0, SHAPES, ALL, {"m.weight": 7, "m.bias": 8})
    same, other = replace(one, written={}), Inventory(0, SHAPES, {}, {"m.weight": 7, "m.bias": 9})
    assert _fit(one, same, same)
    assert "m.bias differs between rank 0 and rank 2:" in _fault(one, same, other)
    assert "m.bias differs between rank 0 and ranks 1, 2:" in _fault(one, other, other)
    behind = [replace(one, stage=1), replace(other, stage=1)]
    assert "m.bias differs between rank 1 and rank 2:" in _fault(Inventory(0, {}), *behind)


def test_an_inventory_counts_what_a_rank_shares_with_others() -> None:
    weight = torch.ones(4, 2)
    part = rows(weight, 0, 16)
    assert part is not None
    parts = {"m.weight": part, f"m.mean{OWN}1": whole(torch.ones(3))}
    tensors = {"m.weight": weight, "m.mean": torch.ones(3)}
    inventory = inventory_of(2, tensors, parts)
    shapes = {"m.weight": (4, 2), "m.mean": (3,)}
    assert inventory == Inventory(2, shapes, {"m.weight": 4}, {})
