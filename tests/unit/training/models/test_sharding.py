"""Device meshes and pipeline schedules."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.devices import CPU
from hpc_ddp.training.models.mesh import ParallelDims


@pytest.fixture(scope="module")
def sharding() -> Any:
    """The module, whose imports of torch take a second that the collection of tests is not to
    pay."""
    from hpc_ddp.training.models import sharding

    return sharding


def test_gloo_sends_no_stage_of_a_device(monkeypatch: pytest.MonkeyPatch, sharding: Any) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    sharding.check_schedule("GPipe", 2, 2, CPU)
    sharding.check_schedule("GPipe", 2, 1, torch.device("cuda"))
    with pytest.raises(UsageError, match="the backend is 'gloo' on cuda with pp=2"):
        sharding.check_schedule("GPipe", 2, 2, torch.device("cuda"))


def test_a_look_at_shapes_leaves_no_cast_without_gradients(sharding: Any) -> None:
    """torch 2.9 would train such a cast, in a script's own autocast around the pipeline's step."""
    stage = torch.nn.Linear(2, 2)
    pipeline = object.__new__(sharding.Pipeline)
    pipeline.stage = stage
    pipeline._autocast = lambda: torch.autocast("cpu", torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        pipeline._forward(torch.ones(1, 2))
        stage(torch.ones(1, 2)).sum().backward()
    assert stage.weight.grad is not None


@pytest.mark.parametrize("name", ["_set_default_timeout", "set_timeout"])
def test_groups_of_a_mesh_have_the_runs_timeout(
    name: str, monkeypatch: pytest.MonkeyPatch, sharding: Any
) -> None:
    timeouts: list[timedelta] = []
    backend = SimpleNamespace(**{name: timeouts.append})
    group = SimpleNamespace(_get_backend=lambda device: backend)
    mesh: Any = SimpleNamespace(get_group=lambda name: group)
    monkeypatch.setattr(sharding, "init_device_mesh", lambda *args, **options: mesh)
    monkeypatch.setattr(sharding, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=group)))
    assert sharding.make_mesh(ParallelDims(), CPU, timedelta(seconds=9)) is mesh
    assert timeouts == [timedelta(seconds=9)] * 4


def test_a_backend_may_refuse_a_timeout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sharding: Any
) -> None:
    """As XCCL's until torch 2.12: the base class of torch 2.9 has the method, and raises."""

    def refuse(timeout: timedelta) -> None:
        raise RuntimeError("Backend xccl does not support setting timeout")

    group = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(set_timeout=refuse))
    mesh: Any = SimpleNamespace(get_group=lambda name: group)
    torchs = SimpleNamespace(group=SimpleNamespace(WORLD=group), get_backend=lambda: "xccl")
    monkeypatch.setattr(sharding, "init_device_mesh", lambda *args, **options: mesh)
    monkeypatch.setattr(sharding, "dist", torchs)
    for rank in (0, 1):
        assert sharding.make_mesh(ParallelDims(rank, 2), CPU, timedelta(seconds=9)) is mesh
    assert capsys.readouterr().err.count("the backend 'xccl' of this torch takes no other") == 1


def test_replicas_and_shards_are_the_data_parallel_ranks(
    monkeypatch: pytest.MonkeyPatch, sharding: Any
) -> None:
    group = SimpleNamespace(_get_backend=lambda device: None)
    flat = SimpleNamespace(get_group=lambda: group)
    part = SimpleNamespace(_flatten={"dp": flat}.__getitem__)

    class Mesh(dict[Any, Any]):
        def get_group(self, name: str) -> Any:
            return group

    def init(kind: str, sizes: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Mesh:
        assert dict(zip(mesh_dim_names, sizes, strict=True)) == {
            "pp": 1,
            "replica": 3,
            "shard": 2,
            "tp": 2,
        }
        return Mesh({("replica", "shard"): part})

    monkeypatch.setattr(sharding, "init_device_mesh", init)
    monkeypatch.setattr(sharding, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=group)))
    sharding.make_mesh(ParallelDims(0, 12, tp=2, replicas=3), CPU, timedelta(seconds=9))


@pytest.mark.parametrize(
    ("name", "count", "words"),
    [
        ("ZBVZeroBubble", 4, "schedule is 'ZBVZeroBubble'; accepted: GPipe, 1F1B"),
        ("gpipe", 1, "n_microbatches is 1 for 2 stages; accepted: 2 or more"),
    ],
)
def test_schedules_are_checked(name: str, count: int, words: str, sharding: Any) -> None:
    from hpc_ddp.training.models.sharding import (
        check_schedule,  # takes seconds: in one process only
    )

    with pytest.raises(UsageError, match=words):
        check_schedule(name, count, 2, torch.device("cpu"))


def test_few_schedules_are_kept(monkeypatch: pytest.MonkeyPatch, sharding: Any) -> None:
    """Each has memory for what a stage receives, and padded batches have many lengths."""
    sizes: list[int] = []

    class Schedule:
        def step(self, inputs: torch.Tensor, target: torch.Tensor) -> None:
            pipeline._losses.append(inputs.mean())

    def make_schedule(inputs: torch.Tensor) -> Schedule:
        sizes.append(len(inputs))
        return Schedule()

    monkeypatch.setattr(sharding.dist, "broadcast", lambda *args, **options: None)
    pipeline = object.__new__(sharding.Pipeline)
    vars(pipeline).update(
        _count=1, _schedules={}, _losses=[], _index=0, _last=0, _group=None, _device=CPU
    )
    vars(pipeline).update(_autocast=nullcontext, _make_schedule=make_schedule)
    for size in (9, 1, 9, 2, 9, 3, 9, 4, 9, 1):
        pipeline.step(torch.ones(size), torch.ones(size))
    assert sizes == [9, 1, 2, 3, 4, 1]
    assert len(pipeline._schedules) == sharding.MOST_SCHEDULES


@pytest.mark.parametrize("syncs", [True, False])
def test_a_stage_averages_gradients_once_in_a_step(
    monkeypatch: pytest.MonkeyPatch, sharding: Any, syncs: bool
) -> None:
    """torch's does so in the last micro-batch of each call of its schedule."""
    calls: list[bool] = []

    def note(*_: Any, last_backward: bool) -> None:
        calls.append(last_backward)

    monkeypatch.setattr(sharding.PipelineStage, "backward_maybe_with_nosync", note)
    stage: Any = object.__new__(sharding._Stage)
    stage.submod = SimpleNamespace(require_backward_grad_sync=syncs)
    for is_last in (False, True):
        stage.backward_maybe_with_nosync("full", {}, last_backward=is_last)
    assert calls == [False, syncs]


def test_a_stage_keeps_no_outputs(monkeypatch: pytest.MonkeyPatch, sharding: Any) -> None:
    """Logits of all micro-batches of a batch would lie in the last stage's memory, twice."""
    stage = object.__new__(sharding._Stage)
    stage.output_chunks = []

    def forward(self: Any, *args: Any) -> str:
        self.output_chunks.append("logits")
        return "logits"

    monkeypatch.setattr(sharding.PipelineStage, "forward_one_chunk", forward)
    assert stage.forward_one_chunk(0) == "logits"
    assert stage.output_chunks == []
