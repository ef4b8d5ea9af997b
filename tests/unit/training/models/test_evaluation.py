"""Models in an evaluation, and their moving average."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.models import evaluation
from hpc_ddp.training.models.evaluation import in_eval_mode, make_average


class Merging(nn.Module):
    """As loralib's layers, which merge an adapter's weights for an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.is_merged, self.norm = False, nn.BatchNorm1d(2)

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        self.is_merged = not mode
        self.norm.training = False  # as networks for detection keep it
        return self


def test_modules_learn_of_the_end_of_an_evaluation() -> None:
    """By ``train``; parts that were in eval mode are so again, and have been told so last."""
    model = nn.ModuleDict({"trained": Merging(), "frozen": Merging(), "dropout": nn.Dropout()})
    model["frozen"].eval()
    model["frozen"].get_submodule("norm").train()
    before = [part.training for part in model.modules()]
    for _ in range(2):
        with in_eval_mode(model):
            assert not any(part.training for part in model.modules())
        assert [part.training for part in model.modules()] == before
        assert [model["trained"].is_merged, model["frozen"].is_merged] == [False, True]


def test_buffers_travel_in_parcels(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is larger than the largest buffer, or `TOGETHER`."""
    sent: list[int] = []
    monkeypatch.setattr(evaluation, "TOGETHER", 40)
    monkeypatch.setattr(dist, "broadcast", lambda flat, **_: sent.append(flat.add_(1).numel()))
    model = nn.ModuleList(nn.Module() for _ in range(5))
    for module, count in zip(model, (20, 20, 100, 8, 8), strict=True):
        module.register_buffer("mask", torch.zeros(count, dtype=torch.uint8))
    evaluation.share_buffers(model, torch.device("cpu"), None)
    assert sent == [40, 100, 16]
    assert all(buffer.eq(1).all() for buffer in model.buffers())


def test_a_sharded_buffer_stays_each_ranks_own(
    monkeypatch: pytest.MonkeyPatch, two_ranks: None
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    sent: list[int] = []
    monkeypatch.setattr(dist, "broadcast", lambda flat, **_: sent.append(flat.numel()))
    mesh: Any = init_device_mesh("cpu", (2,))
    model = nn.Module()
    model.register_buffer("cache", DTensor.from_local(torch.ones(8), mesh, [Shard(0)]))
    model.register_buffer("mask", torch.zeros(3, dtype=torch.uint8))
    evaluation.share_buffers(model, torch.device("cpu"), None)
    assert sent == [3]


def test_the_average_follows_weights_and_statistics() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = make_average(model, decay=0.5)
    average.update_parameters(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for value in model.state_dict().values():
            value.add_(2)
    average.update_parameters(model)
    for name, value in average.module.state_dict().items():
        added = 2 if name.endswith("num_batches_tracked") else 1
        assert torch.allclose(value, before[name] + added), name
    with pytest.raises(UsageError, match=r"decay is 1\.5"):
        make_average(model, 1.5)


def by_default(net: Any) -> Any:
    kind: Any = nn.Sequential
    return lambda inputs, model=net: kind.forward(model, inputs)


def beside_a_vocabulary(net: Any) -> Any:
    class Settings(dict[str, int]):
        def __getattr__(self, name: str) -> int:
            return self[name]

    plain, aa = net.forward, {f"word {number}": [number] for number in range(20_000)}
    bb, cc = Settings(), weakref.proxy(nn.Linear(1, 1))  # whose object is gone

    def forward(inputs: Any) -> Any:
        assert aa
        assert bb
        assert cc is not None
        return plain(inputs)

    return forward


def by_a_global(net: Any) -> Any:
    scope = {"plain": net.forward}
    exec("forward = lambda inputs: plain(inputs)", scope)
    return scope["forward"]


def by_a_global_of_an_inner_function(net: Any) -> Any:
    scope = {"plain": net.forward}
    exec("forward = lambda inputs: (lambda: plain(inputs))()", scope)
    return scope["forward"]


def by_a_part(net: Any) -> Any:
    part = net[0]
    return lambda inputs: part(inputs)


def by_reference(net: Any) -> Any:
    kind: Any = nn.Sequential
    reference, calls = weakref.ref(net), [kind.forward]
    return lambda inputs: calls[0](reference(), inputs)


@pytest.mark.parametrize(
    "forward_of",
    [
        lambda net: lambda inputs, plain=net.forward: plain(inputs),
        lambda net: partial(nn.Sequential.forward, net),
        by_default,
        by_reference,
        by_a_global,
        by_a_global_of_an_inner_function,
        by_a_part,
        beside_a_vocabulary,
    ],
)
def test_an_average_has_no_forward_of_its_model(forward_of: Callable[[Any], Any]) -> None:
    """A compiled forward, or a CUDA graph's, is a function, which a copy of the model shares."""
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Dropout(0.5))
    vars(net)["forward"] = forward_of(net)
    lines: list[str] = []
    ema = make_average(net, 0.5, lines.append)
    text = "the average evaluates Sequential by its class's forward"
    assert [text in line for line in lines] == [True] * (not isinstance(net.forward, partial))
    for model, number in ((net, 1.0), (ema.module, 2.0)):
        nn.init.constant_(next(model.parameters()), number)
    ema.eval()
    assert ema(torch.ones(1)).item() == 2.0
    assert "forward" in vars(net)
    vars(net)["forward"] = torch.compile(net.forward, backend="eager")
    assert "forward" not in vars(make_average(net, 0.5, lines.append).module)
    assert len(lines) < 2


def test_an_average_keeps_a_forward_that_is_no_models() -> None:
    """As scripts cut off a head."""
    net: Any = nn.Sequential(nn.Linear(1, 1))

    def repeat(inputs: Any, count: int = 0) -> Any:
        return repeat(inputs, count - 1) if count else inputs

    net[0].forward = repeat
    ema = make_average(net, 0.5)
    assert ema(torch.full((1,), 7.0)).item() == 7.0
    net.forward = MethodType(lambda self, inputs: self[0](inputs) + 1, net)
    ema = make_average(net, 0.5)
    assert ema(torch.full((1,), 7.0)).item() == 8.0
    assert getattr(ema.module.forward, "__self__", None) is ema.module


def test_complex_weights_are_averaged() -> None:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    average = make_average(model, decay=0.9)
    average.update_parameters(model)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1 + 2j)
    average.update_parameters(model)
    torch.testing.assert_close(average.module.weight, before + 0.1 + 0.2j)


def test_weights_of_16_bits_have_an_average_of_32() -> None:
    """In 16 bits a step of a thousandth is rounded away; frozen weights take none."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).bfloat16()
    with pytest.raises(UsageError, match=r"1.weight is of torch.bfloat16.*share of 0\.001 are"):
        make_average(model[:1].requires_grad_(False).append(model[1]), decay=0.999)
    make_average(model.requires_grad_(False), decay=0.999)
    average = make_average(copy.deepcopy(model).float(), decay=0.999)
    for value in (1.0, *[1.0625] * 2000):
        for weight in model.parameters():
            weight.data.fill_(value)
        average.update_parameters(model)
    assert {weight.dtype for weight in average.parameters()} == {torch.float32}
    assert next(average.parameters())[0, 0].item() == pytest.approx(1.0625 - 0.0625 * 0.999**2000)


class Masked(nn.Module):
    """A causal mask as a buffer and as a frozen parameter; frozen weights, also in 8 bits."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.randn(9))
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.frozen_mask = nn.Parameter(self.mask.clone(), requires_grad=False)
        self.frozen = nn.Parameter(torch.randn(99) / 3, requires_grad=False)
        eight_bits = torch.randn(9).to(torch.float8_e4m3fn)
        self.small = nn.Parameter(eight_bits, requires_grad=False)


def test_masks_and_frozen_weights_stay_as_they_are() -> None:
    model = Masked()
    average = make_average(model, decay=0.999)
    expected = model.trained.detach().clone()
    average.update_parameters(model)
    for _ in range(3):
        with torch.no_grad():
            model.trained.add_(0.1)
        average.update_parameters(model)
        expected.lerp_(model.trained.detach(), 1 - 0.999)
    for name, value in average.module.state_dict().items():
        wanted = expected if name == "trained" else model.state_dict()[name]
        assert torch.equal(value.float(), wanted.float()), name


def test_a_mask_may_open() -> None:
    model = Masked()
    average = make_average(model, decay=0.9)
    average.update_parameters(model)
    model.mask.zero_()
    average.update_parameters(model)
    assert torch.equal(average.module.get_buffer("mask"), torch.zeros(3, 3))


def test_weights_without_gradients_at_that_moment_are_averaged() -> None:
    """As those of a GAN's generator, while the discriminator is trained."""
    model = nn.Linear(2, 2).requires_grad_(False)
    average = make_average(model, decay=0.5)
    average.update_parameters(model)
    before = model.weight.clone()
    model.weight.add_(2)
    average.update_parameters(model)
    torch.testing.assert_close(average.module.weight, before + 1)


@pytest.mark.parametrize("is_kept", [False, True])
def test_an_average_follows_its_model_to_another_device(is_kept: bool) -> None:
    """`run.wrap` moves the model alone; an average that its script has moved stays there."""
    model = nn.Linear(2, 2).to("meta" if is_kept else "cpu")
    average = make_average(model, 0.9)
    if is_kept:
        average.to_empty(device="cpu")
    else:
        model.to("meta")
    average.follow(model)
    kinds = {tensor.device.type for tensor in average.module.parameters()}
    assert kinds == {"cpu" if is_kept else "meta"}


def test_an_average_can_be_saved_whole() -> None:
    saved = io.BytesIO()
    torch.save(make_average(nn.Linear(2, 2), 0.9), saved)
    saved.seek(0)
    assert torch.load(saved, weights_only=False).n_averaged == 0
