"""The rest of a trainer's day, as far as it needs no ranks."""

from __future__ import annotations

import inspect
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.journal.journal import Journal, read_events
from hpc_ddp.training import options as options_module
from hpc_ddp.training.data.order import Position
from hpc_ddp.training.models.evaluation import averaged
from hpc_ddp.training.models.precision import Precision
from hpc_ddp.training.options import Options
from hpc_ddp.training.process.environment import LaunchEnv
from hpc_ddp.training.process.start import start
from hpc_ddp.training.telemetry import sinks
from hpc_ddp.training.telemetry.metrics import Metrics
from hpc_ddp.training.telemetry.profiling import peak_flops, use_per_sample
from hpc_ddp.training.telemetry.sinks import ProgressLines
from tests.waiting import LIMIT_S

CPU = torch.device("cpu")


def options(**arguments: Any) -> Options:
    """Return what `start` makes of its arguments."""
    return Options(**arguments).checked(LaunchEnv.from_env({}))


def test_start_shows_its_parameters() -> None:
    parameters = inspect.signature(start).parameters
    assert parameters == inspect.signature(Options).parameters
    assert [parameters[name].default for name in ("seed", "save_every")] == [0, 300.0]


def test_variables_of_the_environment_win() -> None:
    env = LaunchEnv.from_env({"HPC_DDP_SAVE_EVERY": "20"})
    checked = Options(save_every=10, hang_after=30).checked(env)
    assert (checked.save_every, checked.hang_after) == (20, 30)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"precision": "half"}, "precision is 'half'; accepted: 'fp32', 'bf16', 'fp16'"),
        ({"profile": (1, 5)}, r"profile is \(1, 5\); accepted: the first step to trace, from 2"),
        ({"profile": (9, 5)}, "profile is"),
        ({"flops_per_sample": 0.0}, "flops_per_sample is 0.0; accepted: a number above 0"),
        ({"peak_flops": -1.0}, "peak_flops is -1.0"),
    ],
)
def test_options_are_checked(wrong: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        options(**wrong)


def test_a_missing_tensorboard_is_said_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_module, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="tensorboard") as caught:
        options(tensorboard=True)
    assert caught.value.hint == "pip install tensorboard"


def test_the_environment_names_a_window_to_profile() -> None:
    assert LaunchEnv.from_env({"HPC_DDP_PROFILE": "10:15"}).profile == (10, 15)
    with pytest.raises(UsageError, match="HPC_DDP_PROFILE is 'ten'"):
        LaunchEnv.from_env({"HPC_DDP_PROFILE": "ten"})


def make_step(precision: Precision, factor: float = 1.0) -> tuple[nn.Linear, Any, Any]:
    """Return a model with gradients of 2 * `factor`, its optimizer, and a scheduler."""
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    precision.watch(model)
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


def test_without_clipping_there_is_no_norm() -> None:
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
        other = Precision("fp16", CPU, stop_on_nan=True)
        other.load_state_dict(state)
        assert other.state_dict()["scale"] == (2.0**15 if state else 2.0**16)
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


def test_scaled_gradients_are_not_for_an_optimizer_alone() -> None:
    precision = Precision("fp16", CPU, stop_on_nan=True)
    make_step(precision)
    with pytest.raises(UsageError, match=r"run\.update was not called"):
        precision.end_step()


def test_poison_is_seen_in_the_weights_and_in_a_scale_that_sinks() -> None:
    for watching in (True, False):
        precision = Precision("fp32", CPU, stop_on_nan=watching)
        _, optimizer, _ = make_step(precision, factor=float("nan"))
        precision.look()
        optimizer.step()
        assert not precision.has_non_finite()
        precision.look()
        assert precision.has_non_finite() == watching
    scaled = Precision("fp16", CPU, stop_on_nan=True)
    for _ in range(33):
        assert not scaled.has_non_finite()
        _, optimizer, _ = make_step(scaled, factor=float("nan"))
        scaled.update(optimizer, None, None)
        scaled.end_step()
    assert scaled.has_non_finite()


def test_the_average_follows_weights_and_statistics() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = averaged(model, decay=0.5)
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
        averaged(model, 1.5)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("log", [io.StringIO(), Terminal()])
def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, log: io.StringIO) -> None:
    monkeypatch.setattr("sys.stderr", log)
    ProgressLines().end()
    quiet = ProgressLines()
    quiet.show({"step": 1})
    quiet.end()
    assert not log.getvalue()
    monkeypatch.setattr(sinks, "TERMINAL_S" if log.isatty() else "EVERY_S", 0.0)
    progress = ProgressLines()
    progress.show({"step": 1, "total_steps": 3, "loss": 2.0})
    progress.show({"step": 2, "total_steps": 3, "loss": 0.25})
    progress.end()
    first, last = "step 1/3  loss 2", "step 2/3  loss 0.25  0:00:00 left"
    assert log.getvalue() == f"{first}\n{last}\n{last}\n"


def test_mfu_needs_a_peak_and_the_cost_of_a_sample(tmp_path: Path) -> None:
    chosen = options(flops_per_sample=2e6, peak_flops=1e9)
    assert use_per_sample(chosen, CPU, world_size=4) == pytest.approx(0.0005)
    assert use_per_sample(options(flops_per_sample=2e6), CPU, 4) is None
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp16") == 989.4e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32") == 156e12
    assert peak_flops("a toaster", "fp32") is None

    journal = Journal(tmp_path, "rank-0")
    told: list[dict[str, Any]] = []
    metrics = Metrics(journal, 1, ["here"], use_per_sample_s=0.5, listeners=[told.append])
    metrics.add(Position(step=1), 10, {"loss": torch.tensor(1.0)})
    metrics.flush()
    journal.drain(LIMIT_S)
    event = read_events(tmp_path)[-1].to_line()
    assert event["mfu"] == pytest.approx(event["samples_per_s"] / 2, rel=1e-3)
    assert told == [{name: event[name] for name in told[0]}]
    assert told[0]["loss"] == 1.0
