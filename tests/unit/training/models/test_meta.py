"""Models on torch's meta device, and numbers in the formats that only some of them have."""

from __future__ import annotations

import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.training import devices, drill
from hpc_ddp.training.devices import CPU
from hpc_ddp.training.models import dtensor, precision, sharding
from hpc_ddp.training.models.mesh import ParallelDims
from hpc_ddp.training.models.meta import materialize
from hpc_ddp.training.models.precision import Precision


class Buffers(nn.Module):
    """Has a buffer of each kind of number, and no way of its own to fill them."""

    waves: torch.Tensor
    places: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("places", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))


def fill(module: nn.Module) -> None:
    for buffer in module.buffers(recurse=False):
        buffer.copy_(torch.arange(len(buffer)))


def test_a_module_without_a_way_of_its_own_is_filled_by_init() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Buffers())
    materialize(model, CPU, fill)
    buffers: Any = model[1]
    assert buffers.waves.tolist() == [0, 1]
    assert buffers.places.tolist() == [0, 1, 2]
    assert buffers.mask.tolist() == [False, True, True]
    assert model[0].weight.requires_grad
    assert not any(parameter.isnan().any() for parameter in model.parameters())


@pytest.mark.parametrize("missing", ["waves", "places", "mask"])
def test_a_buffer_that_nothing_fills_is_named(missing: str) -> None:
    def fill_others(module: nn.Module) -> None:
        for name, buffer in module.named_buffers(recurse=False):
            if name != missing:
                buffer.zero_()

    with torch.device("meta"):
        model = nn.Sequential(Buffers())
    with pytest.raises(UsageError, match=f"nothing gives numbers to 0.{missing} of a Buffers"):
        materialize(model, CPU, fill_others)


def test_a_module_that_is_not_on_meta_stays_as_it_is() -> None:
    layer = nn.Linear(2, 2)
    before = layer.weight.clone()
    materialize(layer, CPU, None)
    assert torch.equal(layer.weight, before)


# --- precision -----------------------------------------------------------------------------


def test_a_look_passes_over_what_is_frozen_or_has_8_bits() -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad = False
    model.weight.data.fill_(torch.nan)
    model.register_parameter("small", nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn)))
    watch = Precision("fp32", CPU, stop_on_nan=True)
    watch.watch(model)
    watch.look()
    assert not watch.has_non_finite()
    model.bias.data.fill_(torch.inf)
    watch.look()
    assert watch.has_non_finite()


def test_an_overflow_of_an_earlier_update_lowers_the_scale() -> None:
    """A GAN's critic is updated several times in a step; the scaler knows of its last one."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaled = Precision("fp16", CPU, stop_on_nan=True)
    scaler: Any = scaled._scaler
    scaled._choose_scale()  # of a step without an update
    before = scaler.get_scale()
    for factor in (torch.inf, 1.0, 1.0):
        scaled.backward((weight * factor).sum())
        scaled.update(optimizer, None, None)
    scaled._choose_scale()
    assert scaler.get_scale() == before * scaler.get_backoff_factor()
    assert torch.isfinite(weight).all()


def test_fp16_needs_a_device_with_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "has_float64", lambda device: False)
    with pytest.raises(UsageError, match=r"'fp16' on .* which has no float64"):
        Precision("fp16", CPU, stop_on_nan=True)


def test_gloo_sends_no_stage_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    sharding.check_schedule("GPipe", 2, 2, CPU)
    sharding.check_schedule("GPipe", 2, 1, torch.device("cuda"))
    with pytest.raises(UsageError, match="the backend is 'gloo' on cuda with pp=2"):
        sharding.check_schedule("GPipe", 2, 2, torch.device("cuda"))


def test_groups_of_a_mesh_wait_as_long_as_the_runs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[timedelta] = []
    backend = SimpleNamespace(_set_default_timeout=asked.append)
    group = SimpleNamespace(_get_backend=lambda device: backend)
    mesh: Any = SimpleNamespace(get_group=lambda name: group)
    monkeypatch.setattr(sharding, "init_device_mesh", lambda *args, **options: mesh)
    monkeypatch.setattr(sharding, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=group)))
    assert sharding.make_mesh(ParallelDims(), CPU, timedelta(seconds=9)) is mesh
    assert asked == [timedelta(seconds=9)] * 4


def test_deterministic_algorithms_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    precision.make_deterministic()
    assert asked == [True]
    assert not torch.backends.cudnn.benchmark


# --- sharded tensors -----------------------------------------------------------------------


def test_without_torchs_own_nothing_is_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
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


def _tensor(*placements: Any, coordinate: list[int] | None, ranks: tuple[int, ...] = (0, 1)) -> Any:
    return SimpleNamespace(placements=placements, device_mesh=Mesh(coordinate, *ranks))


def test_of_copies_on_several_ranks_one_is_saved() -> None:
    dims = ParallelDims(0, 2)
    assert dtensor.holds_first_copy(_tensor(_placement(), coordinate=[1]), dims)
    assert dtensor.holds_first_copy(_tensor(_placement(replicate=True), coordinate=[0]), dims)
    assert not dtensor.holds_first_copy(_tensor(_placement(replicate=True), coordinate=[1]), dims)
    assert not dtensor.holds_first_copy(_tensor(_placement(), coordinate=None), dims)
    with pytest.raises(HpcDdpError, match="pending reduction"):
        dtensor.holds_first_copy(_tensor(_placement(partial=True), coordinate=[0]), dims)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("pp", [1, 2])
def test_of_meshes_side_by_side_the_first_ranks_one_is_saved(size: int, pp: int) -> None:
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


class Fake:
    """A DTensor, as far as it is asked."""

    def __init__(self, *placements: Any) -> None:
        self.placements, self.wanted = placements, list[Any]()

    def detach(self) -> Fake:
        return self

    def to_local(self) -> torch.Tensor:
        return torch.full((2,), 3.0)

    def redistribute(self, *, placements: list[Any]) -> torch.Tensor:
        self.wanted = placements
        return self.to_local()


def test_only_a_pending_sum_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtensor, "is_sharded", lambda tensor: isinstance(tensor, Fake))
    kept, pending = _placement(), _placement(partial=True)
    tensor = Fake(kept, pending)
    dtensor.reduced(tensor)
    assert tensor.wanted[0] is kept
    assert tensor.wanted[1].is_replicate()
    untouched: Any = Fake(kept)
    assert dtensor.reduced(untouched) is untouched


def test_a_drill_compares_what_a_rank_has_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill, "is_sharded", lambda tensor: isinstance(tensor, Fake))
    tensors: Any = [Fake(), torch.ones(1)]
    assert drill.size_of(tensors) == 7.0


def test_a_fused_optimizer_takes_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, part = (nn.Parameter(torch.ones(1)) for _ in range(2))
    monkeypatch.setattr(dtensor, "is_sharded", lambda tensor: tensor is part)
    for fused, foreach in ((True, None), (False, False)):
        optimizer = torch.optim.Adam([whole, part], fused=fused)
        seen: list[Any] = []
        dtensor.step_apart(optimizer)
        optimizer.register_step_pre_hook(
            lambda optimizer, *_, of=seen: of.append(optimizer.param_groups[0]["foreach"])
        )
        whole.grad, part.grad = torch.ones(1), torch.ones(1)
        optimizer.step()
        assert seen == [foreach]
        assert optimizer.param_groups[0]["foreach"] is None


def test_the_cpu_has_no_name_of_a_model() -> None:
    assert devices.name(CPU) == ""
