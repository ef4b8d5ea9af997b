"""Sharded tensors: which copy is saved, how gradients are clipped and stepped."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.training.devices import CPU
from hpc_ddp.training.models import dtensor
from hpc_ddp.training.models.mesh import ParallelDims
from unit.training.fakes import FakeDTensor


def test_a_gradient_whose_sum_is_pending_is_clipped(two_ranks: None) -> None:
    """Replicated weights on sharded activations have such gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh: Any = init_device_mesh("cpu", (2,))
    weight: Any = nn.Parameter(DTensor.from_local(torch.ones(4), mesh))
    weight.grad = DTensor.from_local(torch.full((4,), 3.0), mesh, [Partial()])
    norm = dtensor.clip_gradients([weight], 1.5, ParallelDims(), CPU)
    assert norm.item() == 6.0
    assert weight.grad.to_local().tolist() == pytest.approx([0.75] * 4)


def test_parameters_that_are_whole_are_left_to_ddp(two_ranks: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = init_device_mesh("cpu", (2,))
    model = nn.Linear(2, 2)
    weight: Any = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()]))
    model.weight, before = weight, model.bias.detach().clone()
    dtensor.make_copies_equal(model, CPU)
    assert torch.equal(model.bias, before)
    assert torch.equal(weight.to_local(), torch.ones(2, 2))


def test_gradients_are_scaled_in_one_call_for_each_type(two_ranks: None) -> None:
    """A kernel for each would keep the host busy."""
    weights = [nn.Parameter(torch.ones(2)) for _ in range(9)]
    weights.append(nn.Parameter(torch.ones(2, dtype=torch.bfloat16)))
    for weight in weights:
        weight.grad = torch.full_like(weight, 3.0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dtensor.clip_gradients(weights, 1.5, ParallelDims(0, 2, pp=2), CPU)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls.get("aten::_foreach_mul_") == 2
    sizes = [weight.grad.square().sum().item() for weight in weights if weight.grad is not None]
    assert sum(sizes) == pytest.approx(1.5**2, rel=0.01)


def test_a_group_of_two_kinds_is_stepped_as_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the step only: a checkpoint may be resumed where all are of one kind."""
    first, second, third, fourth = (torch.nn.Parameter(torch.ones(2)) for _ in range(4))
    monkeypatch.setattr(dtensor, "is_sharded", lambda tensor: tensor is third)
    calls: list[Any] = []

    class Spied(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            calls.append([group["params"] for group in self.param_groups])
            for group in self.param_groups:
                group["seen"] = len(calls)
            if len(calls) == 4:
                raise ValueError

    optimizer = Spied([first], lr=0.1)
    dtensor.split_mixed_groups(optimizer)
    optimizer.step()
    optimizer.add_param_group({"params": [second, third, fourth], "lr": 0.5})
    optimizer.step()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "foreach": True})
    optimizer.step()
    assert [[len(group) for group in call] for call in calls] == [[1], [1, 1, 2], [1, 1, 2, 1]]
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 3, 1]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5, 0.1]
    assert [group["seen"] for group in optimizer.param_groups] == [3, 3, 3]
    with pytest.raises(ValueError):  # noqa: PT011
        optimizer.step()
    optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 3, 1]


def test_nothing_is_sharded_before_torchs_module_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("torch.distributed.tensor", "torch.distributed.fsdp"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert not dtensor.is_sharded(torch.ones(1))
    assert dtensor.fsdp_modules(nn.Linear(1, 1)) == []


def _placement(*, partial: bool = False, replicate: bool = False) -> Any:
    return SimpleNamespace(is_partial=lambda: partial, is_replicate=lambda: replicate)


class Mesh:
    """A device mesh, as far as it is asked."""

    def __init__(self, coordinate: list[int] | None, *ranks: int) -> None:
        self.coordinate, self.mesh = coordinate, torch.tensor(ranks)

    def get_coordinate(self) -> list[int] | None:
        return self.coordinate

    def size(self, axis: int) -> int:
        return self.mesh.size(axis)


def _tensor(*placements: Any, coordinate: list[int] | None, ranks: tuple[int, ...] = (0, 1)) -> Any:
    return SimpleNamespace(placements=placements, device_mesh=Mesh(coordinate, *ranks))


def test_one_of_the_copies_on_several_ranks_is_saved() -> None:
    dims = ParallelDims(0, 2)
    assert dtensor.holds_first_copy(_tensor(_placement(), coordinate=[1]), dims)
    assert dtensor.holds_first_copy(_tensor(_placement(replicate=True), coordinate=[0]), dims)
    assert not dtensor.holds_first_copy(_tensor(_placement(replicate=True), coordinate=[1]), dims)
    assert not dtensor.holds_first_copy(_tensor(_placement(), coordinate=None), dims)
    with pytest.raises(HpcDdpError, match="pending reduction"):
        dtensor.holds_first_copy(_tensor(_placement(partial=True), coordinate=[0]), dims)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("pp", [1, 2])
def test_the_first_mesh_of_several_is_saved(size: int, pp: int) -> None:
    """Neighbours (tensor parallel) or every other rank (data parallel), in each stage."""
    stage = 8 // pp
    for first in range(0, 8, stage):
        for step in (1, stage // size):
            count = 0
            for rank in range(first, first + stage):
                place = (rank - first) // step % size
                begin = rank - place * step
                mesh = tuple(range(begin, begin + size * step, step))
                tensor = _tensor(_placement(), coordinate=[place], ranks=mesh)
                count += dtensor.holds_first_copy(tensor, ParallelDims(rank, 8, pp=pp))
            assert count == size


def test_only_a_pending_sum_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtensor, "is_sharded", lambda tensor: isinstance(tensor, FakeDTensor))
    sharded, pending = _placement(), _placement(partial=True)
    tensor = FakeDTensor(sharded, pending)
    dtensor.finish_reduction(tensor)
    assert tensor.wanted[0] is sharded
    assert tensor.wanted[1].is_replicate()
    untouched: Any = FakeDTensor(sharded)
    assert dtensor.finish_reduction(untouched) is untouched


def test_a_fused_optimizer_steps_sharded_and_whole_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, part = (nn.Parameter(torch.ones(1)) for _ in range(2))
    monkeypatch.setattr(dtensor, "is_sharded", lambda tensor: tensor is part)
    for fused, counts in ((True, [2]), (False, [1, 1])):
        optimizer = torch.optim.Adam([plain, part], fused=fused)
        calls: list[Any] = []
        dtensor.split_mixed_groups(optimizer)
        optimizer.register_step_pre_hook(
            lambda optimizer, *_, of=calls: of.extend(
                len(group["params"]) for group in optimizer.param_groups
            )
        )
        plain.grad, part.grad = torch.ones(1), torch.ones(1)
        optimizer.step()
        assert calls == counts
        assert len(optimizer.param_groups) == 1
