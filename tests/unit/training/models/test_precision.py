"""Mixed precision: scales, clipping, and numbers that are not finite."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.devices import CPU
from hpc_ddp.training.models import precision
from hpc_ddp.training.models.mesh import ParallelDims
from hpc_ddp.training.models.precision import NON_FINITE_WEIGHTS, Precision
from hpc_ddp.training.models.trained_parameters import TrainedParameters


def make_step(precision: Precision, factor: float = 1.0) -> tuple[nn.Linear, Any, Any]:
    """Return a model with gradients of 2 * `factor`, its optimizer, and a scheduler."""
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    precision.watch_model(model)
    precision.backward(factor * model(torch.full((2, 3), 2.0)).mean())
    return model, optimizer, scheduler


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
def test_an_update_clips_the_true_gradient(kind: str) -> None:
    precision = Precision(kind, CPU, stop_on_nan=True)
    model, optimizer, scheduler = make_step(precision)
    before = model.weight.detach().clone()
    norm = precision.update(optimizer, clip_norm=1.0, scheduler=scheduler)
    assert norm is not None
    assert norm.item() == pytest.approx(12**0.5)
    assert (before - model.weight).norm().item() == pytest.approx(1.0, rel=1e-4)
    assert scheduler.get_last_lr() == [0.5]
    assert model.weight.grad is None
    precision.end_step()
    with precision.autocast():
        expected = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kind]
        assert model(torch.ones(1, 3)).dtype == expected


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
def test_an_optimizer_without_gradients_and_schedule_is_stepped(kind: str) -> None:
    """As a GAN's generator, while its critic is trained alone."""
    precision = Precision(kind, CPU, stop_on_nan=True)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    assert precision.update(optimizer, clip_norm=None, scheduler=None) is None
    precision.end_step()
    assert torch.equal(model.weight, before)


def test_an_overflow_of_a_model_that_is_each_ranks_own_is_not_shared() -> None:
    """The other rank may have no such model: a collective would wait for ever."""
    precision = Precision("fp16", CPU, stop_on_nan=True, dims=ParallelDims(0, 2))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    precision.backward(model(torch.full((2, 3), 1e38)).mean())
    before = model.weight.detach().clone()
    precision.update(optimizer, clip_norm=None, scheduler=None)
    precision.end_step()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_fast", [True, False])
def test_bf16_that_a_device_emulates_is_told_once(
    monkeypatch: pytest.MonkeyPatch, kind: str, rank: int, is_fast: bool
) -> None:
    told: list[str] = []
    monkeypatch.setattr(precision, "say", told.append)
    monkeypatch.setattr(precision, "has_bf16", lambda device: is_fast)
    monkeypatch.setattr(precision, "name", lambda device: "Tesla T4")
    Precision(kind, CPU, stop_on_nan=True, dims=ParallelDims(rank, 2))
    line = "precision is 'bf16' on Tesla T4, which emulates it: steps are slow; precision='fp16'"
    expected = kind == "bf16" and rank == 0 and not is_fast
    assert told == ([f"{line} is fast there"] if expected else [])


def test_an_update_without_clipping_returns_no_norm() -> None:
    precision = Precision("fp32", CPU, stop_on_nan=True)
    _, optimizer, _ = make_step(precision)
    assert precision.update(optimizer, None, None) is None


def test_an_overflow_skips_the_step_and_the_schedule() -> None:
    precision = Precision("fp16", CPU, stop_on_nan=True)
    model, optimizer, scheduler = make_step(precision, factor=float("inf"))
    before = model.weight.detach().clone()
    precision.update(optimizer, None, scheduler)
    assert torch.equal(before, model.weight)
    assert scheduler.get_last_lr() == [1.0]
    precision.end_step()
    assert precision.state_dict()["scale"] == 2.0**15
    for state in (precision.state_dict(), {}):  # {}: of a run in another precision
        loaded = Precision("fp16", CPU, stop_on_nan=True)
        loaded.load_state_dict(state)
        assert loaded.state_dict()["scale"] == (2.0**15 if state else 2.0**16)
    Precision("bf16", CPU, stop_on_nan=True).load_state_dict(precision.state_dict())


def test_two_optimizers_unscale_by_one_scale() -> None:
    """Muon for the matrices and AdamW for the rest: the first one's overflow is its own."""
    precision = Precision("fp16", CPU, stop_on_nan=True)
    models = [nn.Linear(3, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    before = models[1].weight.detach().clone()
    inputs = torch.full((2, 3), 2.0)
    precision.backward(float("inf") * models[0](inputs).mean() + models[1](inputs).mean())
    for optimizer in optimizers:
        precision.update(optimizer, None, None)
    assert torch.allclose(before - models[1].weight, torch.full((1, 3), 2.0))
    precision.end_step()
    assert precision.state_dict()["scale"] == 2.0**15


@pytest.mark.parametrize("clip", [None, 100.0])
@pytest.mark.parametrize("factor", [1.0, float("inf")])
def test_an_optimizer_may_be_updated_twice_in_a_step(factor: float, clip: float | None) -> None:
    """The scale stays within the step, also after an overflow, which lowers it at the end."""
    precision = Precision("fp16", CPU, stop_on_nan=True)
    model, optimizer, _ = make_step(precision, factor)
    precision.update(optimizer, clip, None)
    precision.backward(model(torch.full((2, 3), 2.0)).mean())
    before = model.weight.detach().clone()
    precision.update(optimizer, clip, None)
    assert torch.allclose(before - model.weight, torch.full((1, 3), 2.0))
    precision.end_step()
    assert precision.state_dict()["scale"] == (2.0**16 if factor == 1.0 else 2.0**15)


class Around(torch.optim.Optimizer):
    """As timm's Lookahead, which has another optimizer, and no hooks by torch's own `__init__`."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner, self.param_groups = inner, inner.param_groups
        self.defaults, self.state = inner.defaults, inner.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._inner.zero_grad(set_to_none)


@pytest.mark.parametrize("factor", [1.0, float("inf")])
def test_the_scheduler_of_an_optimizer_without_hooks_is_stepped(factor: float) -> None:
    precision = Precision("fp16", CPU, stop_on_nan=True)
    _, inner, _ = make_step(precision, factor)
    optimizer = Around(inner)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = vars(optimizer)["step"]
    rate = inner.param_groups[0]["lr"]
    precision.update(optimizer, None, scheduler)
    assert inner.param_groups[0]["lr"] == rate * (0.5 if factor == 1.0 else 1.0)
    assert vars(optimizer)["step"] is step


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_an_optimizer_without_gradients_is_updated(kind: str, clip_norm: float | None) -> None:
    """As a GAN's in its warm-up; torch's scaler refuses it."""
    precision = Precision(kind, CPU, stop_on_nan=True)
    model, idle = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer, idle_one = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, idle))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(idle_one, 0.5)
    before = idle.weight.detach().clone()
    for _ in range(2):
        precision.backward(model(torch.ones(1, 2)).sum())
        precision.update(idle_one, clip_norm, scheduler)
        precision.update(optimizer, clip_norm, None)
        precision.end_step()
    assert idle_one.param_groups[0]["lr"] == 0.025
    assert torch.equal(idle.weight, before)


class Fused(torch.optim.SGD):
    """An optimizer that skips an overflow by itself, as torch's fused ones do on a device."""

    _step_supports_amp_scaling = True
    found_inf: torch.Tensor
    grad_scale: torch.Tensor | None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            scale = 1.0 if self.grad_scale is None else self.grad_scale
            step = torch.where(self.found_inf.bool(), torch.zeros_like(weight), weight.grad / scale)
            with torch.no_grad():
                weight.sub_(step)


@pytest.mark.parametrize("factor", [1.0, float("inf")])
@pytest.mark.parametrize("has_scheduler", [False, True])
def test_a_fused_optimizer_skips_by_itself(
    monkeypatch: pytest.MonkeyPatch, factor: float, has_scheduler: bool
) -> None:
    """Whether it has is read from the device only where a scheduler hangs on it."""
    precision = Precision("fp16", CPU, stop_on_nan=True)
    model, _, _ = make_step(precision, factor)
    optimizer = Fused(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if has_scheduler else None
    reads: list[int] = []
    read: Any = torch.Tensor.item

    def count(tensor: torch.Tensor) -> Any:
        reads.append(1)
        return read(tensor)

    monkeypatch.setattr(torch.Tensor, "item", count)
    precision.update(optimizer, None, scheduler)
    assert bool(reads) is has_scheduler
    if scheduler:
        assert scheduler.get_last_lr() == [0.5 if factor == 1.0 else 1.0]
    precision.end_step()
    assert precision.state_dict()["scale"] == (2.0**16 if factor == 1.0 else 2.0**15)


def test_large_weights_in_fp16_are_finite() -> None:
    precision = Precision("fp32", CPU, stop_on_nan=True)
    model = nn.Linear(400, 400).half()
    for weight in model.parameters():
        weight.data.fill_(300.0)
    precision.watch_model(model)
    precision.start_check()
    assert not precision.take_fault()
    model.bias.data[0] = torch.inf
    precision.start_check()
    assert precision.take_fault()


def test_scaled_gradients_need_run_update() -> None:
    precision = Precision("fp16", CPU, stop_on_nan=True)
    make_step(precision)
    with pytest.raises(UsageError, match=r"run\.update was not called"):
        precision.end_step()


def test_non_finite_weights_and_a_sinking_scale_are_detected() -> None:
    for watching in (True, False):
        precision = Precision("fp32", CPU, stop_on_nan=watching)
        _model, optimizer, _ = make_step(precision, factor=float("nan"))
        precision.start_check()
        optimizer.step()
        assert not precision.take_fault()
        precision.start_check()
        assert precision.take_fault() == (NON_FINITE_WEIGHTS if watching else "")
    scaled = Precision("fp16", CPU, stop_on_nan=True)
    for _ in range(33):
        assert not scaled.take_fault()
        _, optimizer, _ = make_step(scaled, factor=float("nan"))
        scaled.update(optimizer, None, None)
        scaled.end_step()
    assert "fp16 skips nearly all steps" in scaled.take_fault()


def test_frozen_and_8_bit_weights_are_not_checked() -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad = False
    model.weight.data.fill_(torch.nan)
    model.register_parameter("small", nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn)))
    watch = Precision("fp32", CPU, stop_on_nan=True)
    watch.watch_model(model)
    watch.start_check()
    assert not watch.take_fault()
    model.bias.data.fill_(torch.inf)
    watch.start_check()
    assert watch.take_fault()


def test_a_gans_discriminator_is_checked_while_it_is_frozen() -> None:
    """But not a frozen mask in an optimizer, which never has a gradient."""
    model = nn.Linear(2, 2)
    model.mask = nn.Parameter(torch.full((2,), -torch.inf), requires_grad=False)
    watch = Precision("fp32", CPU, stop_on_nan=True)
    watch.watch_model(model)
    trained = TrainedParameters()
    trained.add([model, torch.optim.SGD(model.parameters())])
    watch.watch_trained(trained)
    model.requires_grad_(False)
    watch.start_check()
    assert not watch.take_fault()
    model.weight.data[0, 0] = torch.nan
    watch.start_check()
    assert watch.take_fault()


def test_a_model_that_the_script_has_let_go_is_not_checked() -> None:
    """A trial of learning rates may end in NaN; such a model may be part of a cycle."""
    watch = Precision("fp32", CPU, stop_on_nan=True)
    trial, model = nn.Linear(2, 2), nn.Linear(2, 2)
    vars(trial)["itself"] = trial
    watch.watch_model(trial)
    watch.watch_model(model)
    trial.weight.data.fill_(torch.nan)
    watch.start_check()
    assert watch.take_fault() == NON_FINITE_WEIGHTS
    del trial
    watch.start_check()
    assert not watch.take_fault()
    model.weight.data.fill_(torch.nan)
    watch.start_check()
    assert watch.take_fault() == NON_FINITE_WEIGHTS


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


def test_deterministic_algorithms_are_torchs_and_nccls(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", calls.append)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    for name in ("CUBLAS_WORKSPACE_CONFIG", *precision.SUMS_IN_SWITCHES):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    precision.make_deterministic(0)
    assert calls == [True]
    assert not torch.backends.cudnn.benchmark
    assert capsys.readouterr().err == ""
    assert [os.environ[name] for name in precision.SUMS_IN_SWITCHES] == ["0", "0"]
    os.environ["NCCL_NVLS_ENABLE"] = "1"
    for rank in (1, 0):
        precision.make_deterministic(rank)
    assert os.environ["NCCL_NVLS_ENABLE"] == "1"
    assert capsys.readouterr().err.count("NCCL_NVLS_ENABLE=1 lets NCCL add up in switches") == 1
