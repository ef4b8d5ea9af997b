"""What a model goes through before DDP."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.devices import CPU
from hpc_ddp.training.models.ddp import (
    BucketOrders,
    check_steps_are_even,
    convert_to_sync_batchnorm,
    fix_bucket_order,
    set_averaging,
)


class NormAct(nn.BatchNorm2d):
    """As timm's BatchNormAct2d, which has the activation in it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


def test_a_batch_norm_with_an_activation_is_refused() -> None:
    """torch would put one without in its place; on a CPU as well, where a dry run is to show it."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(NormAct(3)))
    with pytest.raises(UsageError, match=r"replace 1\.0, a NormAct, by a batch norm alone"):
        convert_to_sync_batchnorm(model, CPU, None, print)


def test_batch_norms_become_those_of_all_ranks_on_accelerators() -> None:
    notes: list[str] = []
    model = nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3))
    assert convert_to_sync_batchnorm(model, CPU, None, notes.append) is model
    assert notes == ["sync_batchnorm is off: torch has it for GPUs only"]
    converted = convert_to_sync_batchnorm(model, torch.device("meta"), None, notes.append)
    assert [type(part) for part in converted.children()] == [nn.SyncBatchNorm] * 2


@pytest.mark.parametrize(
    ("static", "recorded", "averages"),
    [(False, False, False), (True, False, True), (True, True, False)],
)
def test_a_static_graph_is_recorded_with_averages(
    static: bool, recorded: bool, averages: bool
) -> None:
    ddp = SimpleNamespace(static_graph=static, _static_graph_delay_allreduce_enqueued=recorded)
    for on in (True, False):
        set_averaging(ddp, on)
        assert ddp.require_backward_grad_sync == (on or averages)


class HeadFirst(nn.Module):
    """Is defined in another order than it computes in, as CLIP, DETR and UNets are."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, numbers: torch.Tensor) -> Any:
        return self.head(self.body(numbers))


ARRIVING = [1, 0, 5, 4, 3, 2]  # the head's weights are numbers 0 and 1


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    store: Any = vars(dist)["HashStore"]()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Packed:
    """A model in DDP that notes how its gradients are packed."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(HeadFirst(), **options)
        self._numbers = {id(weight): n for n, weight in enumerate(self.ddp.module.parameters())}
        self.packed: list[int] = []
        hook: Any = lambda _, bucket: self._note(bucket)  # noqa: E731
        self.ddp.register_comm_hook(None, hook)

    def _note(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        self.packed += [self._numbers[id(weight)] for weight in bucket.parameters()]
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def train(self) -> list[int]:
        """Run a backward; return the numbers of the parameters, bucket by bucket."""
        self.packed = []
        self.ddp(torch.ones(2, 4)).sum().backward()
        return self.packed


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("is_late", [False, True])
def test_a_resumed_process_packs_gradients_as_the_first_one_did(is_late: bool) -> None:
    """In the order in which they arrive: the order of definition would hide no all-reduce."""
    first, orders = Packed(), BucketOrders()
    orders.add(first.ddp)
    assert orders.values() == [[]]
    with first.ddp.no_sync():
        first.train()
    assert orders.values() == [[]]
    first.train()
    assert orders.values() == [ARRIVING]
    assert first.train() == ARRIVING  # in whatever order torch packs them anew
    first.ddp.module.head.requires_grad_(False)
    assert orders.values() == [ARRIVING]

    second, resumed = Packed(), BucketOrders()
    before = [weight.clone() for weight in second.ddp.parameters()]
    if is_late:
        resumed.load([ARRIVING])
    resumed.add(second.ddp)
    if not is_late:
        second.ddp.module.head.requires_grad_(False)  # as the generator of a GAN, at times
        resumed.load([ARRIVING])
        assert not second.ddp.module.head.weight.requires_grad
        second.ddp.module.head.requires_grad_(True)
    assert resumed.values() == [ARRIVING]
    assert all(weight.grad is None for weight in second.ddp.parameters())
    assert all(map(torch.equal, before, second.ddp.parameters()))
    assert second.train() == ARRIVING
    assert resumed.values() == [ARRIVING]


@pytest.mark.usefixtures("alone")
def test_a_backward_past_ddp_says_nothing_of_its_order() -> None:
    """A regulariser's, or that of a part which is trained by the plain module at first."""
    packed, orders = Packed(), BucketOrders()
    orders.add(packed.ddp)
    plain = packed.ddp.module
    plain.body[0].weight.square().sum().backward()
    with torch.no_grad():
        packed.ddp(torch.ones(2, 4))
    plain(torch.ones(2, 4)).sum().backward()
    plain.head.weight.square().sum().backward()
    assert orders.values() == [[]]
    packed.train()
    assert orders.values() == [ARRIVING]
    assert packed.train() == ARRIVING


@pytest.mark.usefixtures("alone")
def test_a_parameter_that_ddp_ignores_is_not_waited_for() -> None:
    """As an expert of this rank that gets no sample for a while."""
    model: Any = nn.ModuleDict({"whole": HeadFirst(), "expert": nn.Linear(4, 4)})
    model.forward = lambda numbers: model["whole"](numbers)
    model._ddp_params_and_buffers_to_ignore = ["expert.weight", "expert.bias"]
    ddp, orders = DistributedDataParallel(model), BucketOrders()
    orders.add(ddp)
    ddp(torch.ones(2, 4)).sum().backward()
    assert orders.values() == [ARRIVING]


@pytest.mark.usefixtures("alone")
def test_hooks_and_the_compiler_see_nothing_of_the_backward_that_fixes_an_order() -> None:
    ddp = DistributedDataParallel(HeadFirst())
    calls: list[Any] = []
    ddp.register_forward_pre_hook(lambda module, inputs: calls.append(inputs))
    ddp._compiled_call_impl = lambda *inputs: calls.append(inputs)
    of_all = register_module_forward_hook(lambda module, *values: calls.append(values))
    fix_bucket_order(ddp)
    of_all.remove()
    assert not calls


@pytest.mark.usefixtures("alone")
def test_ranks_with_other_numbers_of_steps_are_refused() -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    check_steps_are_even([ddp, nn.Linear(2, 2)])
    with ddp.join(enable=False):
        check_steps_are_even([ddp])
    with ddp.join(), pytest.raises(UsageError, match=r"in model\.join\(\)"):
        check_steps_are_even([ddp])


@pytest.mark.usefixtures("alone")
def test_a_model_that_is_let_go_is_neither_kept_nor_counted() -> None:
    """A search for the largest batch wraps the model anew at each try, with buckets on the GPU."""
    orders = BucketOrders()
    for count in range(3):
        ddp = DistributedDataParallel(HeadFirst())
        orders.add(ddp)
        if count:
            ddp(torch.ones(2, 4)).sum().backward()
        model, weight = weakref.ref(ddp), weakref.ref(ddp.module.head.weight)
        if count < 2:  # the first one without a backward: the memory was out before
            del ddp
            gc.collect()
            assert model() is weight() is None
    assert orders.values() == [ARRIVING]
    orders.clear()
    assert orders.values() == []


@pytest.mark.usefixtures("alone")
def test_a_model_that_lives_on_some_ranks_alone_takes_no_number() -> None:
    """A collective of the others would wait for this rank for ever."""
    orders, packed = BucketOrders(), Packed()
    orders.load([ARRIVING])
    gc.disable()
    try:
        trial = DistributedDataParallel(HeadFirst())
        orders.add(trial)
        trial.itself = trial  # a cycle, which Python frees at some time
        del trial
        orders.add(packed.ddp)
    finally:
        gc.enable()
    assert orders.values() == [ARRIVING]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("loaded", [[], [[]], [[2, 1, 0]], [[0, 0, 1, 2, 3, 4]]])
def test_an_order_of_another_model_is_none(loaded: list[list[int]]) -> None:
    packed, orders = Packed(), BucketOrders()
    orders.add(packed.ddp)
    orders.load(loaded)
    assert orders.values() == [[]]
    packed.train()
    assert orders.values() == [ARRIVING]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_where_ddp_packs_nothing_anew_no_order_is_noted(option: str) -> None:
    packed, orders = Packed(**{option: True}), BucketOrders()
    orders.load([ARRIVING])
    orders.add(packed.ddp)
    for _ in range(2):
        packed.train()
    assert orders.values() == [[]]
